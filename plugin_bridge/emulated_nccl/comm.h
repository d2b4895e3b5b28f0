/* A communicator. */
#ifndef DYNAMICCL_EMULATED_COMM_H
#define DYNAMICCL_EMULATED_COMM_H

#include <pthread.h>

#include "constants.h"
#include "task.h"
#include "tuner.h"

struct group_job;
struct proxy;
struct rendezvous;

/* Registered memory. */
struct registered {
    struct registered *next;
    uintptr_t begin, end;
    int users;
};

struct comm {
    /* Set when it is created. */
    int rank, ranks, present;
    int node, nodes, local_rank, local_ranks, min_local_ranks, max_local_ranks;
    const uint16_t *node_of;
    int *local_to_rank; /* of this node */
    uint64_t id;
    uint32_t number;
    const struct constants *constants;
    int device;
    bool blocking;
    const char *name; /* the user's own memory, as in NCCL */
    struct rendezvous *rendezvous;
    struct p2p_round {
        int send, recv;
    } *rounds; /* [ranks]: whom it sends to and receives from, one after the other */
    int round_group;
    bool shares_process; /* with another of its ranks */

    /* Plugins. */
    const struct tuner *tuner;
    void *tuner_context;
    bool loaded_tuner;
    void *profiler_context;
    _Atomic uint64_t sequence[N_FUNCS];

    /* State. */
    volatile uint32_t aborted;
    volatile uint32_t *child_aborted; /* of a communicator that is being split off */
    _Atomic int async_result;
    bool finalized, destroyed;
    struct group_job *job;   /* that works for it in the background */
    struct comm *group_next; /* COMM_NOT_IN_GROUP, or the next of the thread's group */
    struct planner planner;
    struct peer *peers; /* [ranks] */
    struct registered *registered;

    /* Ranks of the same process go together. The first of them counts. */
    struct comm *first_here, *next_here;
    int here;
    _Atomic int gone;

    /* The GPU's side. */
    struct gpu_counters *started, *completed; /* [MAX_CHANNELS] */
    uint64_t gpu_work[MAX_CHANNELS];          /* done so far, as kernels count it; the player's */
    _Atomic uint64_t work[MAX_CHANNELS];      /* planned so far, as the host counts it */
    struct gpu_event *launched;               /* after its last kernel */
    struct gpu_stream *last_stream;
    _Atomic int graphs; /* plans that graphs still hold */
    struct proxy *proxy;
};

#define COMM_NOT_IN_GROUP ((struct comm *)1)

/* Fails where a non-blocking communicator has not done the last thing that it was asked. */
nccl_result comm_ready(struct comm *comm);
nccl_result comm_check(const struct comm *comm, const char *function);

/* Whether all of a buffer is registered. */
bool is_registered(const struct comm *comm, const void *buffer, size_t bytes);
void forget_registered(struct comm *comm);

#endif
