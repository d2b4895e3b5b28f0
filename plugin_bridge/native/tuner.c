/* NCCL's tuner interface, one thin adapter per version over comm.h. Always returns success: NCCL fails the
 * collective otherwise. */
#include "comm.h"

#define EXPORT __attribute__((visibility("default")))
#define NAME "DynamICCL"

static int init(unsigned abi, void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger log) {
    *context = comm_attach_tuner(abi, id, ranks, nodes, log);
    return NCCL_SUCCESS;
}

static int finish(void *context) {
    if (context)
        comm_detach_tuner(context);
    return NCCL_SUCCESS;
}

/* v2: NCCL 2.21. It shows no costs, so the only pairs that are surely there are ring and tree with LL and
 * Simple, tree for all-reduce alone. */
static int init_v2(size_t ranks, size_t nodes, nccl_logger log, void **context) {
    return init(2, context, 0, ranks, nodes, log);
}

static int decide_v2(void *context, int func, size_t bytes, int collnet, int nvls, int pipe_ops,
                     int *algorithm, int *protocol, int *channels) {
    float cost[2][3] = {{-1.0f, -1.0f, -1.0f}, {1.0f, -1.0f, 1.0f}};
    if (func == 4)
        cost[0][0] = cost[0][2] = 1.0f;
    int wanted = *channels;
    comm_decide(context, func, bytes, pipe_ops, (float **)cost, 2, 3, 0, &wanted);
    /* A count for a pair of NCCL's own choice, which could be one where NCCL does not clamp it. */
    if (!collnet && !nvls)
        *channels = wanted;
    for (int a = 0; a < 2; a++)
        for (int p = 0; p < 3; p++)
            if (cost[a][p] == 0.0f) {
                *algorithm = a;
                *protocol = p;
                *channels = wanted;
            }
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_tuner_v2 ncclTunerPlugin_v2 = {NAME, init_v2, decide_v2, finish};

/* v3: NCCL 2.22, 2.23 */
static int init_v3(size_t ranks, size_t nodes, nccl_logger log, void **context) {
    return init(3, context, 0, ranks, nodes, log);
}

static int decide_v3(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos, int protos,
                     int *channels) {
    return comm_decide(context, func, bytes, pipe_ops, cost, algos, protos, 0, channels);
}

EXPORT const struct nccl_tuner_v3 ncclTunerPlugin_v3 = {NAME, init_v3, decide_v3, finish};

/* v4: NCCL 2.24 to 2.27 */
static int init_v4(size_t ranks, size_t nodes, nccl_logger log, void **context) {
    return init(4, context, 0, ranks, nodes, log);
}

EXPORT const struct nccl_tuner_v4 ncclTunerPlugin_v4 = {NAME, init_v4, comm_decide, finish};

/* v5: NCCL 2.28, 2.29 */
static int init_v5(void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger log, void *nvl_domain,
                   void *constants) {
    (void)nvl_domain;
    (void)constants;
    return init(5, context, id, ranks, nodes, log);
}

EXPORT const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {NAME, init_v5, comm_decide, finish};

/* v6: NCCL 2.30.3 on */
static int init_v6(void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger log, void *nvl_domain,
                   void *constants) {
    (void)nvl_domain;
    (void)constants;
    return init(6, context, id, ranks, nodes, log);
}

static int chunk_size(void *context, int func, size_t bytes, int algo, int proto, int channels,
                      size_t *chunk) {
    (void)bytes;
    (void)channels;
    if (context)
        comm_chunk_size(context, func, algo, proto, chunk);
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_tuner_v6 ncclTunerPlugin_v6 = {NAME, init_v6, comm_decide, finish, chunk_size};
