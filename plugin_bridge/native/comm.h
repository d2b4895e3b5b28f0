/* One communicator inside the training process. Everything here runs on NCCL's threads: after the init
 * functions nothing allocates or makes a system call, and the only wait is the one at a hold (comm_decide).
 *
 * Threads. getCollInfo and getChunkSize of one communicator come one at a time. A collective's start and stop
 * come from the launching thread, or from CUDA's callback thread when a graph is replayed, at the same time
 * as the former. Channels report from the proxy thread, before or after the collective's own stop.
 *
 * Memory. Communicators and their slots are recycled, never freed: a handle stays safe to pass in for as long
 * as the process lives, and a generation in it tells a late event from one of the slot's next collective. */
#ifndef DYNAMICCL_COMM_H
#define DYNAMICCL_COMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "channel.h"
#include "nccl_abi.h"

#define COMM_SLOTS 1024    /* decisions being measured at once */
#define COMM_DECISIONS 512 /* getCollInfo calls waiting for their profiler event */
#define COMM_CHANNELS 64   /* the most that any NCCL release uses for one communicator */

/* How a profiler version reports execution. */
enum children {
    CHILDREN_GPU,    /* v4 on: KernelCh events with GPU timers, `channels` of them unless that is 0 */
    CHILDREN_KERNEL, /* v3: KernelCh without timers, number unknown */
    CHILDREN_PROXY,  /* v1, v2: ProxyOp only, number unknown */
};

/* One decision being measured; see measure.h for `refs`, handle.h for what a handle is. Written by the thread
 * that starts the collective before it publishes `refs`, and by nobody else unless atomic. That thread writes
 * the first two cache lines, the proxy thread all three. */
struct slot {
    _Alignas(128) struct comm *comm; /* never changes */
    _Atomic uint32_t refs;
    _Atomic uint32_t generation; /* times that this slot was used before */
    uint32_t start;              /* its first operation's number among those that have started */
    uint32_t call; /* ... among the calls, less those of its group, which NCCL launches in any order */
    _Atomic uintptr_t owner;            /* the thread whose channels report without locking; 0: none yet */
    _Atomic uint64_t start_ns, stop_ns; /* writer: that thread */
    _Atomic uint64_t other_start_ns, other_stop_ns; /* every other thread, by compare-and-swap */
    _Alignas(64) struct dcc_record record;
    /* Operations of this decision that run on a channel and whose stop is to come. */
    _Alignas(64) _Atomic uint8_t running[COMM_CHANNELS];
};
_Static_assert(offsetof(struct slot, record) == 64 && offsetof(struct slot, running) == 128, "cache lines");

/* NCCL's activation mask, which all of its communicators share: see govern.c. */
struct event_switch {
    int *_Atomic mask;
    _Atomic int bits;
    _Atomic uint32_t wanting; /* communicators that want events */
    _Atomic uint32_t turns;   /* how often events were turned on */
};

/* A decision on its way to its profiler event. */
struct claim {
    uint64_t bytes_left;  /* of the aggregate that the decision is for; 0: claimed */
    uint64_t measured_in; /* of an aggregate that has begun: 1 + the sequence of its slot, which may have been
                           * given up and used again since */
};

struct comm {
    /* Hardly ever written: what every thread looks at. */
    _Alignas(64) struct dcc_segment *seg; /* NULL: no channel */
    struct slot *slots;
    const struct dcc_table *table; /* NULL: pass through for `no_table_cause` */
    uint64_t table_word;           /* the word that `table` was checked for */
    enum dcc_cause no_table_cause;
    enum children children;
    bool user_env;
    bool several_nodes;
    bool is_static;         /* DYNAMICCL_TABLE decides: no channel, nothing is measured */
    _Atomic bool rank_told; /* the profiler has said which rank this is */
    _Atomic bool time_next; /* the next collective that starts is one of those that are timed */
    uint8_t chunk_funcs;    /* bit per collective whose row of `chunk` is not all 0 */
    /* What is profiled; writer: the thread that calls. */
    bool joining;                /* decisions are kept for events to come */
    bool profiling_next;         /* the next window is profiled */
    bool wants_events;           /* as counted in `events` */
    _Atomic bool profiling;      /* this window is profiled */
    struct event_switch *events; /* NULL: everything is profiled */
    /* Collectives with an unknown number of channels. */
    _Atomic uint32_t open_ended; /* how many wait for the end of their channels */
    _Atomic uint64_t retired;    /* collectives below this wait no more */

    /* Written with each call, mostly by the one thread that calls: getCollInfo. */
    _Alignas(64) uint64_t dseq;
    uint64_t fingerprint;
    _Atomic uint64_t decided; /* a ring from getCollInfo to the start of the collective */
    _Atomic uint64_t claimed; /* all below are claimed or given up */
    /* Starting a collective: one thread at a time. */
    uint64_t looked;           /* decisions below this have an entry in `claims` */
    uint64_t next_slot;        /* outlives the communicator, like the slots */
    _Atomic uint32_t starting; /* 1: held, for the five around it */
    uint32_t newest_group;     /* of those that have started */
    uint32_t newest_plan;      /* the latest kernel whose operations have started */
    uint32_t kernels;          /* how many there were */

    /* What the user called, from profiler v5 on; writer: the thread that calls. */
    _Alignas(64) _Atomic uint32_t calls; /* collectives, sends and receives */
    _Atomic uint32_t group;              /* the latest group of calls; 0: none yet */
    _Atomic uint32_t group_first;        /* its first call */
    _Atomic uint32_t largest_group;      /* calls of the largest group so far */
    _Atomic uint32_t plan;               /* tells a kernel from the one before */
    _Atomic uint32_t starts;             /* operations that have started; writer: under `starting` */
    _Atomic uint32_t replays;            /* 1: graphs are replayed, whose operations nobody calls */
    _Atomic uint32_t turns;              /* of `events`, as far as `calls` knows of them */

    /* Log2 of the bytes that the latest decision of a collective asked for with that pair; 0: NCCL's own. */
    _Alignas(64) uint8_t chunk[DCC_FUNCS][DCC_ALGOS][DCC_PROTOS];
    uint32_t cost_shown[DCC_KEYS / 32 + 1]; /* bit per key whose cost row is published */
    /* Their `plan` holds the group in which they were made. */
    _Alignas(64) struct dcc_record decisions[COMM_DECISIONS];
    struct claim claims[COMM_DECISIONS]; /* under `starting` */

    _Atomic uint64_t profile_ns; /* as in the segment, which is told now and then */
    _Atomic uint32_t waiting;    /* threads at a hold */
    _Atomic uint32_t closing;    /* 1: they wait no more */

    /* Under the lock in comm.c. */
    unsigned users; /* tuner, profiler */
    bool has_tuner, has_profiler;
    uint64_t id;
    pthread_t creator;
    nccl_logger log;
    char path[256];
    char name[DCC_NAME_BYTES]; /* as the profiler was told; empty without one */
    struct dcc_table *fixed;   /* room for the static table; outlives the communicator, like the slots */
    int lock_fd;               /* holds the lock that says that this process lives */
    struct comm *next;
};

/* What a profiler version says of a starting collective. */
struct coll_event {
    uint64_t comm_id; /* 0: told at init */
    uint64_t count, element_bytes;
    const void *api;   /* handle of its CollApi event, from v5 on; NULL before */
    const void *group; /* handle of its Group event */
    int rank;
    uint8_t func, algo, proto, channels; /* 255: unknown; channels 0: unknown */
};

/* Returned for every event that is not measured; accepts every later call. */
extern char comm_ignored_event[1];

/* Init and finalize: may allocate, lock and make system calls. They never return NULL for want of a channel:
 * a communicator without one passes everything through, or decides by the static table. NULL only when memory
 * is exhausted. */
struct comm *comm_attach_profiler(unsigned abi, enum children children, uint64_t id, const char *name,
                                  int nodes, int ranks, int rank, nccl_logger log);
struct comm *comm_attach_tuner(unsigned abi, uint64_t id, size_t ranks, size_t nodes, nccl_logger log);
void comm_detach_profiler(struct comm *comm);
void comm_detach_tuner(struct comm *comm);

/* getCollInfo, in NCCL's own signature from v4 on, so that the adapters cost nothing: `context` is a struct
 * comm or NULL, `cost` is really float[algos][protos]. Writes 0 over one cost >= 0 and sets *channels, or
 * touches neither. Always success. */
int comm_decide(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos, int protos,
                int registered, int *channels);
void comm_chunk_size(struct comm *comm, int func, int algo, int proto, size_t *chunk);

/* Events that only tell where a collective belongs. Their handles are numbers: nothing is kept for them. */
void *comm_group_api_start(void);
void *comm_api_start(struct comm *comm, const void *group_api_handle); /* CollApi, P2pApi */
void *comm_group_start(struct comm *comm);

void *comm_coll_start(struct comm *comm, const struct coll_event *event);
void *comm_child_start(void *coll_handle, uint8_t channel, uint64_t start_ns);
void comm_child_timer(void *handle, uint64_t stop_ns);
void comm_event_stop(void *handle);

/* Ends all measuring: what can still complete does, the rest is counted as incomplete. */
void comm_end_measuring(struct comm *comm);

uint64_t comm_host_ns(void);

#endif
