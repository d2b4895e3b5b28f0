/* NCCL's cost model and what follows from it: algorithm, protocol, channels, warps and chunks
 * (src/graph/tuning.cc, src/enqueue.cc), and the tuner's say in them. */
#ifndef DYNAMICCL_EMULATED_DECIDE_H
#define DYNAMICCL_EMULATED_DECIDE_H

#include "comm.h"

/* Bytes of a collective as NCCL counts them for the tuner: of the larger of a rank's buffers. */
size_t tuner_bytes(const struct comm *comm, enum nccl_func func, size_t count, int type);

/* A collective, or an aggregate of `n` like it, first to last: *sum has their counts and traffic added up.
 * Fills in its algorithm, protocol, channels and warps. */
struct question {
    struct coll_task *sum;
    const struct coll_task *first;
    int n;
    bool collnet, nvls; /* may be used for it */
    int pipe_ops;
};
nccl_result decide(struct comm *comm, const struct question *question, struct nccl_sim_info *simulated);

/* The chunk of a part of a collective, over `channels` channels, in bytes. */
nccl_result decide_chunk(struct comm *comm, const struct coll_task *task, int channels, size_t bytes,
                         uint32_t *chunk_bytes);

/* Registered buffers and those in graphs are used in other ways, some on fewer channels. */
void apply_registration(struct comm *comm, struct coll_task *task);

#endif
