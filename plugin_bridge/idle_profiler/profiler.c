/* A profiler that asks for the events that ours asks for and does nothing with them, and a tuner that leaves
 * all as it is: what NCCL itself takes for any profiler and tuner. */
#include "../native/nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define NAME "idle"

static char handle_of_all;

static int ask(void **context, int *mask) {
    *context = &handle_of_all;
    *mask |= NCCL_EVENT_COLL | NCCL_EVENT_KERNEL_CH;
    return NCCL_SUCCESS;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank,
                   nccl_logger log) {
    (void)name, (void)id, (void)nodes, (void)ranks, (void)rank, (void)log;
    return ask(context, mask);
}

static int init_v5(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,
                   nccl_logger log) {
    (void)name, (void)id, (void)nodes, (void)ranks, (void)rank, (void)log;
    return ask(context, mask);
}

/* NCCL tells of the parts of an event only where it has a handle. */
static int start(void *context, void **handle, void *descriptor) {
    (void)descriptor;
    *handle = context;
    return NCCL_SUCCESS;
}

static int stop(void *handle) {
    (void)handle;
    return NCCL_SUCCESS;
}

static int state(void *handle, int what, union nccl_state_args *args) {
    (void)handle, (void)what, (void)args;
    return NCCL_SUCCESS;
}

static int finish(void *context) {
    (void)context;
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v4 ncclProfiler_v4 = {NAME, init_v4, start, stop, state, finish};
EXPORT const struct nccl_profiler_v5 ncclProfiler_v5 = {NAME, init_v5, start, stop, state, finish};
EXPORT const struct nccl_profiler_v5 ncclProfiler_v6 = {NAME, init_v5, start, stop, state, finish};

static int init_tuner(void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger log, void *domain,
                      void *constants) {
    (void)id, (void)ranks, (void)nodes, (void)log, (void)domain, (void)constants;
    *context = &handle_of_all;
    return NCCL_SUCCESS;
}

static int decide(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos, int protos,
                  int registered, int *channels) {
    (void)context, (void)func, (void)bytes, (void)pipe_ops, (void)cost, (void)algos, (void)protos;
    (void)registered, (void)channels;
    return NCCL_SUCCESS;
}

static int chunk(void *context, int func, size_t bytes, int algo, int proto, int channels, size_t *size) {
    (void)context, (void)func, (void)bytes, (void)algo, (void)proto, (void)channels, (void)size;
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {NAME, init_tuner, decide, finish};
EXPORT const struct nccl_tuner_v6 ncclTunerPlugin_v6 = {NAME, init_tuner, decide, finish, chunk};
