/* One rank at work: what rank.c, comms.c and ops.c share. Functions that return an int return -1 where the
 * rank cannot go on, and have said why. */
#ifndef DYNAMICCL_JOB_RUNNING_H
#define DYNAMICCL_JOB_RUNNING_H

#include "rank.h"

struct comm {
    nccl_comm handle;
    const void *key; /* what its kernels carry; NULL: not registered */
    void *registered;
    uint64_t inits;
    bool is_new; /* made in a group that has not ended */
};

struct rank {
    const struct job *job;
    const struct nccl *nccl;
    const struct program_rank *program;
    uint32_t number;
    struct place place;
    struct comm *comms;
    struct gpu_stream *streams[PROGRAM_STREAMS];
    struct gpu_event *events[PROGRAM_EVENTS];
    struct gpu_graph *graphs[PROGRAM_GRAPHS];
    void *buffer;
    size_t buffer_bytes;
    int depth; /* of groups */
    uint64_t clock_cpu_ns, clock_wall_ns;
};

int complain(const struct rank *rank, const char *format, ...);
int check(const struct rank *rank, const char *what, nccl_result result);

/* ---- communicators ---- */

int comm_init(struct rank *rank, const struct program_op *op);
int comm_split(struct rank *rank, const struct program_op *op);
int comm_shrink(struct rank *rank, const struct program_op *op);
/* Finalises, destroys or aborts. */
int comm_end(struct rank *rank, const struct program_op *op);
/* Tells the virtual GPU whose kernels it will see. A communicator that is made in a group is there when that
 * ends. */
int introduce(struct rank *rank, uint16_t number);
/* A non-blocking communicator must have done one thing before it is asked for the next. */
int await_unless_blocking(struct rank *rank, uint16_t number);

/* ---- operations ---- */

int run_ops(struct rank *rank, uint32_t first, uint32_t n);

#endif
