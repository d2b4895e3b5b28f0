/* The tuner that writes down its calls. */
#include "spy.h"

static struct thing tuners[MOST];
static _Atomic int n_tuners;

static void begin_tuner_init(int version, void **context, size_t ranks, size_t nodes) {
    *context = new_thing(tuners, &n_tuners);
    begin("tuner.init");
    number("version", version);
    number("tuner", number_of(tuners, *context));
    number("ranks", (long long)ranks);
    number("nodes", (long long)nodes);
}

#define TUNER_INIT(v)                                                                                        \
    static nccl_result tuner_init_##v(size_t ranks, size_t nodes, logger_fn log, void **context) {           \
        (void)log;                                                                                           \
        begin_tuner_init(v, context, ranks, nodes);                                                          \
        end();                                                                                               \
        return NCCL_SUCCESS;                                                                                 \
    }
TUNER_INIT(2)
TUNER_INIT(3)
TUNER_INIT(4)

static nccl_result tuner_init(int version, void **context, uint64_t comm, size_t ranks, size_t nodes,
                              const struct nvl_domain_info *nvl, const struct tuner_constants *constants) {
    begin_tuner_init(version, context, ranks, nodes);
    word("comm", comm);
    if (nvl) {
        number("domains", nvl->n_domains);
        number("least_ranks", nvl->min_ranks_per_domain);
        number("most_ranks", nvl->max_ranks_per_domain);
    }
    add(",\"constants\":[");
    for (size_t i = 0; i < sizeof(*constants) / sizeof(double); i++)
        add("%s%.17g", i ? "," : "", ((const double *)constants)[i]);
    add("]");
    end();
    return NCCL_SUCCESS;
}

#define TUNER_INIT_WITH_COMM(v)                                                                              \
    static nccl_result tuner_init_##v(void **context, uint64_t comm, size_t ranks, size_t nodes,             \
                                      logger_fn log, struct nvl_domain_info *nvl,                            \
                                      struct tuner_constants *constants) {                                   \
        (void)log;                                                                                           \
        return tuner_init(v, context, comm, ranks, nodes, nvl, constants);                                   \
    }
TUNER_INIT_WITH_COMM(5)
TUNER_INIT_WITH_COMM(6)

static void begin_question(const char *call, struct thing *tuner, int func, size_t bytes, int pipe_ops) {
    begin(call);
    number("tuner", number_of(tuners, tuner));
    number("func", func);
    number("bytes", (long long)bytes);
    number("pipe_ops", pipe_ops);
}

/* What SPY_ASK says of this call; false: nothing. */
static bool ask(struct thing *tuner, int *algorithm, int *protocol, int *channels) {
    const char *at = getenv("SPY_ASK");
    if (at == NULL || *at == 0)
        return false;
    int n = 1;
    for (const char *c = at; *c; c++)
        n += *c == ';';
    for (int i = tuner->calls++ % n; i > 0; i--)
        at = strchr(at, ';') + 1;
    return sscanf(at, "%d.%d.%d", algorithm, protocol, channels) == 3;
}

static nccl_result get_coll_info_v2(void *context, int func, size_t bytes, int collnet, int nvls,
                                    int pipe_ops, int *algorithm, int *protocol, int *channels) {
    int a, p, n;
    begin_question("getCollInfo", context, func, bytes, pipe_ops);
    number("collnet", collnet);
    number("nvls", nvls);
    number("algorithm", *algorithm);
    number("protocol", *protocol);
    number("channels", *channels);
    /* It is not told what there is: rings always are. */
    if (ask(context, &a, &p, &n) && a == ALGO_RING && p == PROTO_SIMPLE) {
        *algorithm = a;
        *protocol = p;
        *channels = n;
    }
    end();
    return NCCL_SUCCESS;
}

static void answer(struct thing *tuner, float **table, int algorithms, int protocols, int *channels) {
    float *cost = (float *)table;
    int a, p, n;
    number("algorithms", algorithms);
    number("protocols", protocols);
    number("channels", *channels);
    add(",\"cost\":[");
    for (int i = 0; i < algorithms * protocols; i++)
        add("%s%.9g", i ? "," : "", (double)cost[i]);
    add("]");
    if (ask(tuner, &a, &p, &n) && a < algorithms && cost[a * protocols + p] != COST_UNAVAILABLE) {
        cost[a * protocols + p] = 0;
        *channels = n;
    }
}

static nccl_result get_coll_info_v3(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                    int algorithms, int protocols, int *channels) {
    begin_question("getCollInfo", context, func, bytes, pipe_ops);
    answer(context, cost, algorithms, protocols, channels);
    end();
    return NCCL_SUCCESS;
}

static nccl_result get_coll_info_v4(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                    int algorithms, int protocols, int registered, int *channels) {
    begin_question("getCollInfo", context, func, bytes, pipe_ops);
    number("registered", registered);
    answer(context, cost, algorithms, protocols, channels);
    end();
    return NCCL_SUCCESS;
}

static nccl_result get_chunk_size(void *context, int func, size_t bytes, int algorithm, int protocol,
                                  int channels, size_t *chunk_bytes) {
    const char *divide = getenv("SPY_CHUNK");
    begin("getChunkSize");
    number("tuner", number_of(tuners, context));
    number("func", func);
    number("bytes", (long long)bytes);
    number("algorithm", algorithm);
    number("protocol", protocol);
    number("channels", channels);
    number("chunk_bytes", (long long)*chunk_bytes);
    end();
    if (divide && *chunk_bytes >= 1 << 16)
        *chunk_bytes /= (size_t)atoi(divide);
    return NCCL_SUCCESS;
}

static nccl_result end_tuner(void *context) {
    begin("tuner.finalize");
    number("tuner", number_of(tuners, context));
    end();
    return NCCL_SUCCESS;
}

#define TUNER(v, ...)                                                                                        \
    SHOWN const struct tuner_v##v ncclTunerPlugin_v##v = {"spy", tuner_init_##v, __VA_ARGS__};
TUNER(2, get_coll_info_v2, end_tuner)
#if SPY_TUNER >= 3
TUNER(3, get_coll_info_v3, end_tuner)
#endif
#if SPY_TUNER >= 4
TUNER(4, get_coll_info_v4, end_tuner)
#endif
#if SPY_TUNER >= 5
TUNER(5, get_coll_info_v4, end_tuner)
#endif
#if SPY_TUNER >= 6
TUNER(6, get_coll_info_v4, end_tuner, get_chunk_size)
#endif
