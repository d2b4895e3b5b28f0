/* What a program has asked for and what came of it: tasks, and the plans that they are launched in. */
#ifndef DYNAMICCL_EMULATED_TASK_H
#define DYNAMICCL_EMULATED_TASK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "../gpu/gpu.h"
#include "api.h"

enum { MAX_CHANNELS = 64 };

/* What the profiler was told, or shall be, of one operation. */
struct watched {
    int mask; /* the profiler's, when the operation was called */
    void *group_api, *api, *event;
};

struct coll_task {
    struct coll_task *next;
    enum nccl_func func;
    const void *send;
    void *recv;
    size_t count; /* as NCCL plans it: of bytes for all-gather and broadcast */
    int root, type, op;
    size_t traffic; /* bytes that it moves, by which NCCL divides the channels */
    int algorithm, protocol, max_channels, warps;
    int channels; /* that it got; 0 for CollNet */
    bool is_collnet, is_nvls;
    bool own;             /* the tuner left it alone */
    int asked;            /* channels that the tuner asked for; 0: none */
    bool registered_nvls; /* NVLS reads and writes its buffers */
    struct watched watched;
};

struct p2p_task {
    struct p2p_task *next;
    enum nccl_func func;
    void *buffer;
    size_t count, bytes;
    int type, peer, channels;
    struct watched watched;
};

/* A broadcast of a release that keeps them apart. */
struct bcast_task {
    struct bcast_task *next;
    const void *send;
    void *recv;
    size_t bytes;
    int root;
};

struct coll_list {
    struct coll_task *head, *tail;
};
struct p2p_list {
    struct p2p_task *head, *tail;
};
struct bcast_list {
    struct bcast_task *head, *tail;
};

/* For all three. */
#define PUSH(list, task)                                                                                     \
    do {                                                                                                     \
        (task)->next = NULL;                                                                                 \
        if ((list)->tail)                                                                                    \
            (list)->tail->next = (task);                                                                     \
        else                                                                                                 \
            (list)->head = (task);                                                                           \
        (list)->tail = (task);                                                                               \
    } while (0)
#define POP(list)                                                                                            \
    do {                                                                                                     \
        (list)->head = (list)->head->next;                                                                   \
        if ((list)->head == NULL)                                                                            \
            (list)->tail = NULL;                                                                             \
    } while (0)

/* Of the sends to and receives from one rank, and of the broadcasts that it is the root of. */
struct peer {
    struct p2p_list send, recv;
    struct bcast_list bcast;
};

/* Roughly sorted by size, descending (src/include/comm.h): bins of a quarter of a power of two, and within a
 * bin the latest first. */
enum { SORTER_BINS = 1 + (30 - 10) * 4 };

/* What a communicator is asked for in one group. */
struct planner {
    struct coll_task *sorter[SORTER_BINS];
    struct coll_list colls; /* decided */
    int n_colls, n_sends, n_recvs, n_bcasts;
    int bcast_roots, least_root, most_root;
    bool persistent; /* captured into a graph */
    struct gpu_graph *graph;
    struct gpu_stream **streams; /* the user's, latest first */
    int n_streams;
    struct plan *plans, *last_plan, *unlaunched;
};

enum proxy_kind { PROXY_PROFILE, PROXY_SEND, PROXY_RECV };

/* Work for the proxy thread: one channel's part of an operation. */
struct proxy_op {
    enum proxy_kind kind;
    bool to_recv; /* PROFILE: of a receive, which has a connection of its own */
    bool counts;  /* the first of this work on the channel */
    bool is_p2p;
    uint64_t batch; /* p2p: of the channel, by which they are posted in order */
    int channel, peer, chunk_bytes;
    int place; /* among the plan's */
    union {
        const struct coll_task *coll;
        const struct p2p_task *p2p;
    } of;
    uint64_t work; /* number of the work on its channel, from 1 */
};

/* A kernel and what goes with it. */
struct plan {
    struct plan *next;
    struct comm *comm;
    bool persistent, by_callback;
    struct coll_list colls;
    struct p2p_list p2ps;
    struct proxy_op *ops;
    int n_ops, max_ops;
    uint64_t channel_mask;
    size_t work_bytes;
    int n_batches;
    struct layout *layout; /* what its channels do; becomes `kernel` */
    struct kernel *kernel;
    void *group_event, *launch_event;
};

#endif
