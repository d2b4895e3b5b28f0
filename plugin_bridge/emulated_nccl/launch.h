/* Launching what was planned, on the GPU and with the proxy thread. */
#ifndef DYNAMICCL_EMULATED_LAUNCH_H
#define DYNAMICCL_EMULATED_LAUNCH_H

#include "comm.h"

/* Plans and launches what a group asks of its communicators, one after the other. */
nccl_result launch_group(struct comm *comms);

/* Waits until the GPU has done everything, and until all graphs that the communicator is in are gone. */
void launch_drain(struct comm *comm);

/* ---- kernels ---- */

struct kernel *kernel_new(struct comm *comm);
/* Takes the arrays, which are malloc'ed. */
void kernel_fill(struct kernel *kernel, struct gpu_work *works, uint32_t n_works, struct gpu_batch *batches,
                 uint32_t n_batches, struct gpu_member *members, uint32_t n_members);

#endif
