/* A tuner and a profiler that write down every call that NCCL makes, as a line of JSON each.
 *
 * Compiled with SPY_TUNER and SPY_PROFILER, the newest versions that it has. Environment: SPY_LOG, the folder
 * of the logs, a file per process; SPY_MASK, the events to ask for; SPY_ASK, what the tuner asks for, call
 * after call and over again: "algorithm.protocol.channels" or nothing, separated by semicolons; SPY_CHUNK,
 * what to divide large chunks by. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "../../../plugin_bridge/emulated_nccl/plugin_abi.h"

#define SHOWN __attribute__((visibility("default")))
enum {
    MOST = 1 << 16,
    LINE = 4096,
    DEFAULT_MASK = 0xfffff & ~(EVENT_PROXY_STEP | EVENT_NET_PLUGIN | EVENT_PROXY_CTRL)
};

/* ---- lines ---- */

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static __thread struct {
    char text[LINE];
    size_t n;
} line;

static void add(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line.text + line.n, LINE - line.n, format, arguments);
    va_end(arguments);
    if (n < 0 || (size_t)n >= LINE - line.n)
        abort();
    line.n += (size_t)n;
}

static void begin(const char *call) {
    char thread[16];
    prctl(PR_GET_NAME, thread);
    line.n = 0;
    add("{\"call\":\"%s\",\"thread\":%d,\"thread_name\":\"%s\"", call, (int)gettid(), thread);
}

static void number(const char *key, long long value) {
    add(",\"%s\":%lld", key, value);
}

/* Hashes and addresses do not fit every reader's integers. */
static void word(const char *key, uint64_t value) {
    add(",\"%s\":\"%llx\"", key, (unsigned long long)value);
}

static void text(const char *key, const char *value) {
    if (value)
        add(",\"%s\":\"%s\"", key, value);
    else
        add(",\"%s\":null", key);
}

static void end(void) {
    add("}\n");
    pthread_mutex_lock(&writing);
    if (file == NULL) {
        char path[512];
        snprintf(path, sizeof(path), "%s/spy.%d", getenv("SPY_LOG"), (int)getpid());
        file = fopen(path, "a");
        if (file == NULL)
            abort();
        setvbuf(file, NULL, _IOLBF, 0);
    }
    fwrite(line.text, 1, line.n, file);
    pthread_mutex_unlock(&writing);
}

__attribute__((constructor)) static void loaded(void) {
    begin("load");
    end();
}

__attribute__((destructor)) static void unloaded(void) {
    begin("unload");
    end();
    fclose(file);
}

/* ---- what NCCL gets from here, by number ---- */

struct thing {
    int number, calls;
};
static struct thing tuners[MOST], profilers[MOST], events[MOST];
static _Atomic int n_tuners, n_profilers, n_events;

static struct thing *new_thing(struct thing *things, _Atomic int *n) {
    int number = (*n)++;
    if (number >= MOST)
        abort();
    things[number].number = number;
    return &things[number];
}

static int number_of(const struct thing *things, const void *thing) {
    uintptr_t first = (uintptr_t)things, address = (uintptr_t)thing;
    if (thing == NULL)
        return -1;
    if (address < first || address >= first + MOST * sizeof(*things))
        return -2;
    return ((const struct thing *)thing)->number;
}

/* ---- tuner ---- */

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

/* ---- profiler ---- */

static void begin_profiler_init(int version, void **context, int *mask) {
    const char *wanted = getenv("SPY_MASK");
    *context = new_thing(profilers, &n_profilers);
    begin("profiler.init");
    number("version", version);
    number("profiler", number_of(profilers, *context));
    number("mask", *mask);
    *mask = wanted ? atoi(wanted) : DEFAULT_MASK;
}

static void comm_is(uint64_t comm, const char *name, int nodes, int ranks, int rank) {
    word("comm", comm);
    text("name", name);
    number("nodes", nodes);
    number("ranks", ranks);
    number("rank", rank);
}

#define PROFILER_INIT(v)                                                                                     \
    static nccl_result profiler_init_##v(void **context, int *mask) {                                        \
        begin_profiler_init(v, context, mask);                                                               \
        end();                                                                                               \
        return NCCL_SUCCESS;                                                                                 \
    }
PROFILER_INIT(1)
PROFILER_INIT(2)
PROFILER_INIT(3)

static nccl_result profiler_init_4(void **context, int *mask, const char *name, uint64_t comm, int nodes,
                                   int ranks, int rank, logger_fn log) {
    (void)log;
    begin_profiler_init(4, context, mask);
    comm_is(comm, name, nodes, ranks, rank);
    end();
    return NCCL_SUCCESS;
}

#define PROFILER_INIT_WITH_COMM(v)                                                                           \
    static nccl_result profiler_init_##v(void **context, uint64_t comm, int *mask, const char *name,         \
                                         int nodes, int ranks, int rank, logger_fn log) {                    \
        (void)log;                                                                                           \
        begin_profiler_init(v, context, mask);                                                               \
        comm_is(comm, name, nodes, ranks, rank);                                                             \
        end();                                                                                               \
        return NCCL_SUCCESS;                                                                                 \
    }
PROFILER_INIT_WITH_COMM(5)
PROFILER_INIT_WITH_COMM(6)

static void begin_event(void *context, void **handle, uint64_t type, const void *parent) {
    *handle = new_thing(events, &n_events);
    begin("start");
    number("event", number_of(events, *handle));
    number("profiler", number_of(profilers, context));
    number("type", (long long)type);
    number("parent", number_of(events, parent));
}

static void proxy_op_is(const struct descr_proxy_op *op) {
    number("of_this_process", op->pid == getpid());
    number("channel", op->channel_id);
    number("peer", op->peer);
    number("steps", op->n_steps);
    number("chunk_bytes", op->chunk_size);
    number("is_send", op->is_send);
}

static void names_are(const char *func, const char *type, const char *algorithm, const char *protocol) {
    text("func", func);
    text("data_type", type);
    text("algorithm", algorithm);
    text("protocol", protocol);
}

/* What the descriptors of all versions have, though not at the same place. */
#define COLL_IS(coll)                                                                                        \
    do {                                                                                                     \
        number("sequence", (long long)(coll).seq_number);                                                    \
        word("send", (uintptr_t)(coll).send_buff);                                                           \
        word("recv", (uintptr_t)(coll).recv_buff);                                                           \
        number("count", (long long)(coll).count);                                                            \
        number("root", (coll).root);                                                                         \
        number("warps", (coll).n_warps);                                                                     \
    } while (0)
#define P2P_IS(p2p)                                                                                          \
    do {                                                                                                     \
        word("recv", (uintptr_t)(p2p).buff);                                                                 \
        number("count", (long long)(p2p).count);                                                             \
        number("peer", (p2p).peer);                                                                          \
    } while (0)

static nccl_result start_1(void *context, void **handle, void *descr) {
    const struct descr_v1 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        text("name", event->coll.name);
        word("comm", event->coll.comm_hash);
        number("func", event->coll.func);
        number("data_type", event->coll.datatype);
        number("op", event->coll.op);
        number("traffic", (long long)event->coll.traffic_bytes);
        number("channels", event->coll.n_max_channels);
        number("algorithm", event->coll.algo);
        number("protocol", event->coll.proto);
        number("is_collnet", event->coll.is_collnet);
        number("is_nvls", event->coll.is_nvls);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        text("name", event->p2p.name);
        word("comm", event->p2p.comm_hash);
        number("func", event->p2p.func);
        number("data_type", event->p2p.datatype);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result start_2(void *context, void **handle, void *descr) {
    const struct descr_v2 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        text("name", event->coll.name);
        word("comm", event->coll.comm_hash);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("traffic", (long long)event->coll.traffic_bytes);
        number("channels", event->coll.n_max_channels);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        text("name", event->p2p.name);
        word("comm", event->p2p.comm_hash);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result start_3(void *context, void **handle, void *descr) {
    const struct descr_v3 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        text("name", event->coll.name);
        word("comm", event->coll.comm_hash);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("channels", event->coll.n_max_channels);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        text("name", event->p2p.name);
        word("comm", event->p2p.comm_hash);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    } else if (event->type == EVENT_KERNEL_CH) {
        number("channel", event->kernel_ch.channel_id);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result start_4(void *context, void **handle, void *descr) {
    const struct descr_v4 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("channels", event->coll.n_channels);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    } else if (event->type == EVENT_KERNEL_CH) {
        number("channel", event->kernel_ch.channel_id);
        word("timer", event->kernel_ch.p_timer);
    }
    end();
    return NCCL_SUCCESS;
}

/* v5 and v6 differ in nothing that is looked at here. */
static nccl_result start_5(void *context, void **handle, void *descr) {
    const struct descr_v5 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("channels", event->coll.n_channels);
        number("parent_group", number_of(events, event->coll.parent_group));
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        number("channels", event->p2p.n_channels);
        number("parent_group", number_of(events, event->p2p.parent_group));
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    } else if (event->type == EVENT_KERNEL_CH) {
        number("channel", event->kernel_ch.channel_id);
        word("timer", event->kernel_ch.p_timer);
    } else if (event->type == EVENT_GROUP_API) {
        number("captured", event->group_api.graph_captured);
        number("depth", event->group_api.group_depth);
    } else if (event->type == EVENT_COLL_API) {
        names_are(event->coll_api.func, event->coll_api.datatype, NULL, NULL);
        number("count", (long long)event->coll_api.count);
        number("root", event->coll_api.root);
        word("stream", (uintptr_t)event->coll_api.stream);
        number("captured", event->coll_api.graph_captured);
    } else if (event->type == EVENT_P2P_API) {
        names_are(event->p2p_api.func, event->p2p_api.datatype, NULL, NULL);
        number("count", (long long)event->p2p_api.count);
        word("stream", (uintptr_t)event->p2p_api.stream);
        number("captured", event->p2p_api.graph_captured);
    } else if (event->type == EVENT_KERNEL_LAUNCH) {
        word("stream", (uintptr_t)event->kernel_launch.stream);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result stop(void *handle) {
    begin("stop");
    number("event", number_of(events, handle));
    end();
    return NCCL_SUCCESS;
}

static void begin_state(const void *handle, int state) {
    begin("state");
    number("event", number_of(events, handle));
    number("state", state);
}

static nccl_result record_old(void *handle, int state, void *arguments) {
    const union state_args_v1 *of = arguments;
    begin_state(handle, state);
    if (state < STATE_PROXY_CTRL_IDLE) {
        number("bytes", (long long)of->proxy_op.trans_size);
        number("steps", of->proxy_op.steps);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result record_new(void *handle, int state, void *arguments) {
    const union state_args_v4 *of = arguments;
    begin_state(handle, state);
    if (state == STATE_KERNEL_CH_STOP)
        word("timer", of->kernel_ch.p_timer);
    end();
    return NCCL_SUCCESS;
}

static nccl_result end_profiler(void *context) {
    begin("profiler.finalize");
    number("profiler", number_of(profilers, context));
    end();
    return NCCL_SUCCESS;
}

/* ---- what NCCL looks up ---- */

#define TUNER(v, ...)                                                                                        \
    SHOWN const struct tuner_v##v ncclTunerPlugin_v##v = {"spy", tuner_init_##v, __VA_ARGS__};
#define PROFILER(v, is, start, record)                                                                       \
    SHOWN const struct profiler ncclProfiler_v##v = {                                                        \
        "spy", {.is = profiler_init_##v}, start, stop, record, end_profiler};

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
PROFILER(1, v1, start_1, record_old)
#if SPY_PROFILER >= 2
PROFILER(2, v1, start_2, record_old)
#endif
#if SPY_PROFILER >= 3
PROFILER(3, v1, start_3, record_old)
#endif
#if SPY_PROFILER >= 4
PROFILER(4, v4, start_4, record_new)
#endif
#if SPY_PROFILER >= 5
PROFILER(5, v5, start_5, record_new)
#endif
#if SPY_PROFILER >= 6
PROFILER(6, v5, start_5, record_new)
#endif
