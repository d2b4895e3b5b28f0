#define _GNU_SOURCE
/* NCCL's profiler interface, one thin adapter per version over comm.h. Every event gets a handle, measured or
 * not: NCCL skips the children of a parent without one. */
#include <unistd.h>

#include "comm.h"
#include "govern.h"

#define EXPORT __attribute__((visibility("default")))
#define NAME "DynamICCL"
#define UNKNOWN 255

static _Atomic pid_t self; /* set at init, by any thread; getpid is a system call */

/* The names are short and almost always the first one tried: a call of strcmp costs more than this. */
static inline bool same(const char *a, const char *b) {
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

static inline uint8_t func_of(const char *s) {
    if (!s)
        return UNKNOWN;
    switch (s[0]) {
    case 'A':
        return same(s, "AllReduce") ? 4 : same(s, "AllGather") ? 2 : UNKNOWN;
    case 'R':
        return same(s, "ReduceScatter") ? 3 : same(s, "Reduce") ? 1 : UNKNOWN;
    default:
        return same(s, "Broadcast") ? 0 : UNKNOWN;
    }
}

static inline uint8_t algo_of(const char *s) {
    if (!s)
        return UNKNOWN;
    switch (s[0]) {
    case 'R':
        return same(s, "RING") ? 1 : UNKNOWN;
    case 'T':
        return same(s, "TREE") ? 0 : UNKNOWN;
    case 'N':
        return same(s, "NVLS") ? 4 : same(s, "NVLS_TREE") ? 5 : UNKNOWN;
    case 'C':
        return same(s, "COLLNET_DIRECT") ? 2 : same(s, "COLLNET_CHAIN") ? 3 : UNKNOWN;
    default:
        return same(s, "PAT") ? 6 : UNKNOWN;
    }
}

static inline uint8_t proto_of(const char *s) {
    if (!s)
        return UNKNOWN;
    return same(s, "SIMPLE") ? 2 : same(s, "LL") ? 0 : same(s, "LL128") ? 1 : UNKNOWN;
}

/* ncclFloat16, ncclInt8, ncclFloat8e4m3, ...: the first number in the name is the width in bits. */
static uint8_t type_bytes(const char *s) {
    while (s && *s && (*s < '0' || *s > '9'))
        s++;
    if (!s || !*s)
        return 0;
    return *s == '8' ? 1 : *s == '1' ? 2 : *s == '3' ? 4 : *s == '6' ? 8 : 0;
}

static uint8_t type_bytes_v1(uint8_t type) {
    static const uint8_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type < sizeof bytes ? bytes[type] : 0;
}

static int attach(unsigned abi, enum children children, void **context, int *mask, uint64_t id,
                  const char *name, int nodes, int ranks, int rank, nccl_logger log) {
    atomic_store_explicit(&self, getpid(), memory_order_relaxed);
    struct comm *comm = comm_attach_profiler(abi, children, id, name, nodes, ranks, rank, log);
    *context = comm;
    if (comm && comm->seg)
        govern_begin(comm, mask,
                     NCCL_EVENT_COLL |
                         (children == CHILDREN_PROXY ? NCCL_EVENT_PROXY_OP : NCCL_EVENT_KERNEL_CH));
    return NCCL_SUCCESS;
}

static int stop(void *handle) {
    comm_event_stop(handle);
    return NCCL_SUCCESS;
}

static int finish(void *context) {
    if (context)
        comm_detach_profiler(context);
    return NCCL_SUCCESS;
}

static int ignore_state(void *handle, int state, union nccl_state_args *args) {
    (void)handle;
    (void)state;
    (void)args;
    return NCCL_SUCCESS;
}

static int timer_state(void *handle, int state, union nccl_state_args *args) {
    if (state == NCCL_STATE_KERNEL_CH_STOP && args)
        comm_child_timer(handle, args->kernel_ch.timer);
    return NCCL_SUCCESS;
}

/* With PXN the proxy of another process sends on our behalf: its parent pointer is not ours. */
static void *proxy_op_start(void *parent, const struct nccl_proxy_op *op) {
    return op->pid == atomic_load_explicit(&self, memory_order_relaxed)
               ? comm_child_start(parent, op->channel, 0)
               : comm_ignored_event;
}

/* v1: NCCL 2.23 */
static int init_v1(void **context, int *mask) {
    return attach(1, CHILDREN_PROXY, context, mask, 0, NULL, 0, 0, -1, NULL);
}

static int start_v1(void *context, void **handle, void *descriptor) {
    const struct nccl_event_v1 *e = descriptor;
    *handle = comm_ignored_event;
    if (context && e->type == NCCL_EVENT_COLL)
        *handle =
            comm_coll_start(context, &(struct coll_event){.comm_id = e->coll.comm_hash,
                                                          .group = e->parent,
                                                          .count = e->coll.count,
                                                          .element_bytes = type_bytes_v1(e->coll.datatype),
                                                          .rank = e->rank,
                                                          .func = e->coll.func,
                                                          .algo = e->coll.algo,
                                                          .proto = e->coll.proto,
                                                          .channels = e->coll.max_channels});
    else if (context && e->type == NCCL_EVENT_GROUP)
        *handle = comm_group_start(context);
    else if (e->type == NCCL_EVENT_PROXY_OP)
        *handle = proxy_op_start(e->parent, &e->proxy_op);
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v1 ncclProfiler_v1 = {NAME, init_v1, start_v1, stop, ignore_state, finish};

/* v2 on name function, type, algorithm and protocol in words. */
#define NAMED_COLL(e, id, channel_count, api_event, group_event)                                             \
    (&(struct coll_event){.comm_id = (id),                                                                   \
                          .api = (api_event),                                                                \
                          .group = (group_event),                                                            \
                          .count = (e)->coll.count,                                                          \
                          .element_bytes = type_bytes((e)->coll.datatype),                                   \
                          .rank = (e)->rank,                                                                 \
                          .func = func_of((e)->coll.func),                                                   \
                          .algo = algo_of((e)->coll.algo),                                                   \
                          .proto = proto_of((e)->coll.proto),                                                \
                          .channels = (channel_count)})

/* v2: NCCL 2.24, 2.25 */
static int init_v2(void **context, int *mask) {
    return attach(2, CHILDREN_PROXY, context, mask, 0, NULL, 0, 0, -1, NULL);
}

static int start_v2(void *context, void **handle, void *descriptor) {
    const struct nccl_event_v2 *e = descriptor;
    *handle = comm_ignored_event;
    if (context && e->type == NCCL_EVENT_COLL)
        *handle =
            comm_coll_start(context, NAMED_COLL(e, e->coll.comm_hash, e->coll.max_channels, NULL, e->parent));
    else if (context && e->type == NCCL_EVENT_GROUP)
        *handle = comm_group_start(context);
    else if (e->type == NCCL_EVENT_PROXY_OP)
        *handle = proxy_op_start(e->parent, &e->proxy_op);
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v1 ncclProfiler_v2 = {NAME, init_v2, start_v2, stop, ignore_state, finish};

/* v3: NCCL 2.26 */
static int init_v3(void **context, int *mask) {
    return attach(3, CHILDREN_KERNEL, context, mask, 0, NULL, 0, 0, -1, NULL);
}

static int start_v3(void *context, void **handle, void *descriptor) {
    const struct nccl_event_v3 *e = descriptor;
    *handle = comm_ignored_event;
    if (context && e->type == NCCL_EVENT_COLL)
        *handle =
            comm_coll_start(context, NAMED_COLL(e, e->coll.comm_hash, e->coll.max_channels, NULL, e->parent));
    else if (context && e->type == NCCL_EVENT_GROUP)
        *handle = comm_group_start(context);
    else if (e->type == NCCL_EVENT_KERNEL_CH)
        *handle = comm_child_start(e->parent, e->kernel_ch.channel, 0);
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v1 ncclProfiler_v3 = {NAME, init_v3, start_v3, stop, ignore_state, finish};

/* v4: NCCL 2.27 */
static int init_v4(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank,
                   nccl_logger log) {
    return attach(4, CHILDREN_GPU, context, mask, id, name, nodes, ranks, rank, log);
}

static int start_v4(void *context, void **handle, void *descriptor) {
    const struct nccl_event_v4 *e = descriptor;
    *handle = comm_ignored_event;
    if (context && e->type == NCCL_EVENT_COLL)
        *handle = comm_coll_start(context, NAMED_COLL(e, 0, e->coll.channels, NULL, e->parent));
    else if (context && e->type == NCCL_EVENT_GROUP)
        *handle = comm_group_start(context);
    else if (e->type == NCCL_EVENT_KERNEL_CH)
        *handle = comm_child_start(e->parent, e->kernel_ch.channel, e->kernel_ch.timer);
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v4 ncclProfiler_v4 = {NAME, init_v4, start_v4, stop, timer_state, finish};

/* v5: NCCL 2.28; v6: 2.29 on */
static int init_v5(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,
                   nccl_logger log) {
    return attach(5, CHILDREN_GPU, context, mask, id, name, nodes, ranks, rank, log);
}

static int init_v6(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,
                   nccl_logger log) {
    return attach(6, CHILDREN_GPU, context, mask, id, name, nodes, ranks, rank, log);
}

static int start_v5(void *context, void **handle, void *descriptor) {
    const struct nccl_event_v5 *e = descriptor;
    *handle = comm_ignored_event;
    if (unlikely(!context))
        return NCCL_SUCCESS;
    if (likely(e->type == NCCL_EVENT_KERNEL_CH))
        *handle = comm_child_start(e->parent, e->kernel_ch.channel, e->kernel_ch.timer);
    else if (e->type == NCCL_EVENT_COLL)
        *handle =
            comm_coll_start(context, NAMED_COLL(e, 0, e->coll.channels, e->parent, e->coll.parent_group));
    else if (e->type == NCCL_EVENT_GROUP)
        *handle = comm_group_start(context);
    else if (e->type == NCCL_EVENT_COLL_API || e->type == NCCL_EVENT_P2P_API)
        *handle = comm_api_start(context, e->parent);
    else if (e->type == NCCL_EVENT_GROUP_API)
        *handle = comm_group_api_start();
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v5 ncclProfiler_v5 = {NAME, init_v5, start_v5, stop, timer_state, finish};
EXPORT const struct nccl_profiler_v5 ncclProfiler_v6 = {NAME, init_v6, start_v5, stop, timer_state, finish};
