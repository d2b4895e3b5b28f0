#define _GNU_SOURCE
#include "tuner_driver.h"

#include <dlfcn.h>
#include <float.h>
#include <stdio.h>
#include <string.h>

int tuner_open(struct tuner *tuner, const char *path, int abi, int profiler_abi) {
    *tuner = (struct tuner){.abi = abi, .n_algorithms = N_ALGORITHMS};
    if (abi == 0)
        return 0;
    /* PAT came with 2.23, and 2.22 is the v3 release that has no profiler. */
    if (abi == 2 || (abi == 3 && profiler_abi == 0))
        tuner->n_algorithms = N_ALGORITHMS_BEFORE_PAT;
    tuner->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (tuner->library == NULL)
        return host_error("cannot load tuner plugin %s: %s", path, dlerror());
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclTunerPlugin_v%d", abi);
    tuner->is.v2 = dlsym(tuner->library, symbol);
    if (tuner->is.v2 == NULL)
        return host_error("%s exports no symbol %s", path, symbol);
    if (tuner->is.v2->name == NULL)
        return host_error("%s: %s has no name, which NCCL prints", path, symbol);
    return 0;
}

void tuner_close(struct tuner *tuner) {
    if (tuner->library != NULL)
        dlclose(tuner->library);
    tuner->library = NULL;
}

/* Constants in NCCL's range; nothing in the emulation depends on them, but a plugin may read and scale them.
 */
static void default_constants(struct tuner_constants *constants) {
    for (int a = 0; a < N_ALGORITHMS; a++)
        for (int p = 0; p < N_PROTOCOLS; p++) {
            constants->base_latencies[a][p] = p == PROTO_LL ? 6.6 : 8.4;
            for (int link = 0; link < 3; link++)
                constants->hw_latencies[link][a][p] = 0.6 + 0.4 * p + 1.5 * link;
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 3; j++) {
            constants->ll_max_bws[i][j] = 39.0 + 25.0 * i;
            constants->per_channel_max_ring_ll128_bws[i][j] = 20.0 + 5.0 * i;
            constants->per_channel_max_tree_ll128_bws[i][j] = 20.0 + 5.0 * i;
            constants->per_channel_max_tree_bws[i][j] = 24.0 + 4.0 * i;
            constants->per_channel_max_nvls_tree_bws[i][j] = 24.0 + 4.0 * i;
        }
}

int tuner_init(const struct tuner *tuner, void **context, const struct program_header *header,
               uint64_t comm_id, logger_fn log) {
    result_t result = RESULT_SUCCESS;
    *context = NULL;
    if (tuner->abi >= 2 && tuner->abi <= 4) {
        /* init has the same place and signature in v2, v3 and v4. */
        result = tuner->is.v2->init(header->n_ranks, header->n_nodes, log, context);
    } else if (tuner->abi >= 5) {
        struct tuner_constants constants;
        int per_domain = (int)(header->n_ranks / header->n_nodes);
        struct nvl_domain_info nvl = {(int)header->n_nodes, per_domain, per_domain};
        default_constants(&constants);
        result =
            tuner->is.v5->init(context, comm_id, header->n_ranks, header->n_nodes, log, &nvl, &constants);
    }
    if (result != RESULT_SUCCESS)
        return host_error("tuner init returned %d; NCCL would fail the communicator", result);
    return 0;
}

int tuner_finalize(const struct tuner *tuner, void *context) {
    result_t result = RESULT_SUCCESS;
    if (tuner->abi >= 2 && tuner->abi <= 4)
        result = tuner->is.v2->destroy(context);
    else if (tuner->abi >= 5)
        result = tuner->is.v5->finalize(context);
    if (result != RESULT_SUCCESS)
        return host_error("tuner %s returned %d", tuner->abi <= 4 ? "destroy" : "finalize", result);
    return 0;
}

typedef float cost_table[N_ALGORITHMS][N_PROTOCOLS];

static int available(float cost) {
    return cost >= 0.0f;
}

/* v2 had no table: NCCL 2.22 and later derive the two support flags from it and set the pair asked for to 0.
 */
static result_t ask_v2(const struct tuner *tuner, void *context, const struct program_key *key, size_t bytes,
                       cost_table cost, int *algorithm, int *protocol, int *n_channels) {
    int nvls = available(cost[ALGO_NVLS][PROTO_SIMPLE]) || available(cost[ALGO_NVLS_TREE][PROTO_SIMPLE]);
    int collnet = available(cost[ALGO_COLLNET_CHAIN][PROTO_SIMPLE]);
    result_t result = tuner->is.v2->get_coll_info(context, (int)key->collective, bytes, collnet, nvls,
                                                  (int)key->pipe_ops, algorithm, protocol, n_channels);
    if (*algorithm >= 0 && *algorithm < tuner->n_algorithms && *protocol >= 0 && *protocol < N_PROTOCOLS &&
        available(cost[*algorithm][*protocol]))
        cost[*algorithm][*protocol] = 0.0f;
    return result;
}

static result_t ask(const struct tuner *tuner, void *context, const struct program_key *key, size_t bytes,
                    cost_table cost, int *n_channels) {
    const int func = (int)key->collective, pipe_ops = (int)key->pipe_ops, n = tuner->n_algorithms;
    if (tuner->abi == 3)
        return tuner->is.v3->get_coll_info(context, func, bytes, pipe_ops, (float **)(void *)cost, n,
                                           N_PROTOCOLS, n_channels);
    /* getCollInfo has the same place and signature in v4, v5 and v6. */
    return tuner->is.v4->get_coll_info(context, func, bytes, pipe_ops, (float **)(void *)cost, n, N_PROTOCOLS,
                                       0, n_channels);
}

/* NCCL takes the first smallest entry that is not negative, algorithms outermost. */
static int choose(const struct program_key *key, const cost_table cost, int n_algorithms,
                  struct decision *decision) {
    float least = FLT_MAX;
    decision->algorithm = ALGO_UNDEFINED;
    decision->protocol = PROTO_UNDEFINED;
    for (int a = 0; a < n_algorithms; a++)
        for (int p = 0; p < N_PROTOCOLS; p++)
            if (available(cost[a][p]) && cost[a][p] < least) {
                decision->algorithm = a;
                decision->protocol = p;
                least = cost[a][p];
            }
    if (decision->algorithm == ALGO_UNDEFINED)
        return host_error("no algorithm/protocol available for %s of %llu bytes after the tuner's changes",
                          func_name((int)key->collective), (unsigned long long)key->bytes);
    if (!available(key->cost_us[decision->algorithm][decision->protocol]))
        return host_error("the tuner wrote a cost over -1: %s/%s is not available for %s of %llu bytes, and "
                          "NCCL does not check again",
                          algorithm_name(decision->algorithm), protocol_name(decision->protocol),
                          func_name((int)key->collective), (unsigned long long)key->bytes);
    return 0;
}

static int settle_channels(const struct program_header *header, const struct program_key *key, int n_tasks,
                           struct decision *decision) {
    const int a = decision->algorithm, p = decision->protocol, requested = decision->requested;
    if (requested != (int8_t)requested || requested < 0)
        return host_error("the tuner asked for %d channels, which does not fit NCCL's signed 8-bit field",
                          requested);
    int ceiling = requested != 0 ? requested : key->own_channels[a][p];
    if (ceiling == 0 || key->own_channels[a][p] == 0)
        return host_error("program: key has no channel count of its own for %s/%s", algorithm_name(a),
                          protocol_name(p));
    if (is_collnet(header, a) && ceiling > (int)header->max_channels)
        return host_error(
            "the tuner asked for %d channels for %s, which NCCL does not clamp; the communicator "
            "has %u",
            ceiling, algorithm_name(a), header->max_channels);
    schedule(&decision->plan, header, key, a, p, ceiling, n_tasks);
    return 0;
}

/* NCCL clamps the chunk to the buffer and rounds it down to the grain, but sets no lower bound. */
static int settle_chunk(const struct tuner *tuner, void *context, const struct program_header *header,
                        const struct program_key *key, struct decision *decision) {
    const int a = decision->algorithm, p = decision->protocol;
    const size_t grain = chunk_grain(p), limit = chunk_limit(key, a, p);
    decision->chunk_bytes = 0;
    for (int i = 0; i < decision->plan.n_tasks; i++) {
        const struct task *task = &decision->plan.tasks[i];
        for (int part = 0; part < 3; part++) {
            if (task->part_bytes[part] == 0)
                continue;
            size_t chunk = key->own_chunk_bytes[a][p];
            if (tuner->abi == 6 && tuner->is.v6->get_chunk_size != NULL) {
                int n_channels = is_collnet(header, a) ? task->n_channels : 1;
                result_t result = tuner->is.v6->get_chunk_size(
                    context, (int)key->collective, task->part_bytes[part], a, p, n_channels, &chunk);
                if (result != RESULT_SUCCESS)
                    return host_error("getChunkSize returned %d; NCCL would fail the collective", result);
                if (chunk > limit)
                    chunk = limit;
                if (chunk < grain)
                    return host_error(
                        "getChunkSize returned %zu bytes for %s/%s, less than one grain of %zu: "
                        "NCCL would divide by zero",
                        chunk, algorithm_name(a), protocol_name(p), grain);
            }
            chunk = chunk / grain * grain;
            if (chunk == 0)
                return host_error("program: own chunk of %u bytes for %s/%s is less than one grain of %zu",
                                  key->own_chunk_bytes[a][p], algorithm_name(a), protocol_name(p), grain);
            if (decision->chunk_bytes == 0)
                decision->chunk_bytes = (uint32_t)chunk;
        }
    }
    return 0;
}

int tuner_decide(const struct tuner *tuner, void *context, const struct program_header *header,
                 const struct program_key *key, int n_tasks, struct decision *decision) {
    cost_table cost;
    memcpy(cost, key->cost_us, sizeof(cost));
    decision->requested = 0;
    decision->untouched = 1;
    int algorithm = ALGO_UNDEFINED, protocol = PROTO_UNDEFINED, n_channels = 0;
    result_t result = RESULT_SUCCESS;
    if (tuner->abi == 2)
        result = ask_v2(tuner, context, key, key->bytes * (size_t)n_tasks, cost, &algorithm, &protocol,
                        &n_channels);
    else if (tuner->abi >= 3)
        result = ask(tuner, context, key, key->bytes * (size_t)n_tasks, cost, &n_channels);
    if (result != RESULT_SUCCESS)
        return host_error("getCollInfo returned %d for %s of %llu bytes; NCCL would fail the collective",
                          result, func_name((int)key->collective), (unsigned long long)key->bytes);
    /* 2.21 takes a v2 answer unchecked, later releases ignore an impossible one: neither is what was meant.
     */
    if (tuner->abi == 2 && (algorithm != ALGO_UNDEFINED || protocol != PROTO_UNDEFINED) &&
        !(algorithm >= 0 && algorithm < tuner->n_algorithms && protocol >= 0 && protocol < N_PROTOCOLS &&
          available(key->cost_us[algorithm][protocol])))
        return host_error("the v2 tuner asked for algorithm %d, protocol %d, which is not available",
                          algorithm, protocol);

    decision->requested = n_channels;
    decision->untouched = n_channels == 0 && algorithm == ALGO_UNDEFINED && protocol == PROTO_UNDEFINED &&
                          memcmp(cost, key->cost_us, sizeof(cost)) == 0;
    if (choose(key, cost, tuner->n_algorithms, decision) != 0 ||
        settle_channels(header, key, n_tasks, decision) != 0)
        return -1;
    return settle_chunk(tuner, context, header, key, decision);
}
