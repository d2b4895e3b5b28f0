/* NCCL's end of the plugin: calls what the input says, in any order that NCCL's interface allows and many
 * that it does not, and checks what comes back. */
#ifndef FUZZ_NCCL_H
#define FUZZ_NCCL_H

#include "input.h"
#include "memory.h"

#define RANKS 3

/* One communicator of this process. */
struct rank {
    unsigned tuner_abi, profiler_abi; /* what its contexts are of; 0: not there */
    void *tuner, *profiler;
    struct dcc_segment *seg; /* of the profiler, also when that is gone */
};

extern struct rank ranks[RANKS];

/* Collectives that a segment's profiler was told of. */
extern uint64_t begun[SEGMENTS];

/* Detaches what is attached, and forgets all. */
void nccl_end(void);
void nccl_reset(void);

void nccl_attach_tuner(struct rank *rank, struct input *in);
void nccl_attach_profiler(struct rank *rank, struct input *in);
void nccl_detach_tuner(struct rank *rank);
void nccl_detach_profiler(struct rank *rank);

/* getCollInfo and getChunkSize with arguments from the input. */
void nccl_decide(struct rank *rank, struct input *in);
void nccl_call(struct rank *rank, int func, size_t bytes, int pipe_ops, uint8_t how, struct input *in);
void nccl_chunk(struct rank *rank, struct input *in);

/* startEvent; the handle is kept among the latest. */
void nccl_start(struct rank *rank, struct input *in);
/* A group of up to three collectives as NCCL tells of it: calls, decisions, then their start. */
void nccl_group(struct rank *rank, struct input *in);
/* stopEvent and recordEventState of one of the latest handles. */
void nccl_stop(struct rank *rank, struct input *in);
void nccl_state(struct rank *rank, struct input *in);

#endif
