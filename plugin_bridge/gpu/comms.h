/* The communicators whose kernels the virtual GPU plays. */
#ifndef DYNAMICCL_GPU_COMMS_H
#define DYNAMICCL_GPU_COMMS_H

#include "gpu.h"

struct gpu_comm {
    struct gpu_comm *next;
    const void *key;
    unsigned refs;
    struct gpu_comm_info info;
    struct meeting_comm *meeting;
    uint64_t collectives, transfers; /* begun so far; the player's */
    uint64_t *sent, *received;       /* [ranks], likewise */
};

/* Gives back what gpu_comm_find() found; NULL: nothing. */
void gpu_comm_release(struct gpu_comm *comm);

#endif
