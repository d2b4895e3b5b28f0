/* What the channels of a kernel do, while it is being planned (ncclAddWorkBatchToPlan in src/enqueue.cc). */
#ifndef DYNAMICCL_EMULATED_LAYOUT_H
#define DYNAMICCL_EMULATED_LAYOUT_H

#include "comm.h"

enum {
    P2P_PER_BATCH = 8, /* transfers that one channel runs at once */
    P2P_BYTES = 48,    /* of a transfer's work item */
    BCAST_BYTES = 48,
    BATCH_BYTES = 16,           /* of what a kernel's arguments say of one batch */
    BATCH_WORK_BYTES = 1 << 10, /* of the work items of one batch */
    ARGUMENT_BYTES = 4 << 10,   /* of a kernel's arguments, of which */
    ARGUMENT_HEAD = 32,
    FIFO_BYTES = 1 << 20, /* for work items that do not fit the arguments */
};

struct layout;

struct layout *layout_new(void);
void layout_free(struct layout *layout);

/* Whether a plan of so many batches and bytes of work items fits. */
bool layout_fits(const struct plan *plan, int batches, size_t work_bytes);

/* Adds work and says where it is among the plan's work items. */
uint16_t layout_add_work(struct plan *plan, const struct gpu_work *work, size_t item_bytes);

/* Lets a channel do the work that was added last, together with what came before it there where the GPU can.
 * `kernel` is any number that tells apart what needs another function on the GPU. */
struct placing {
    int channel;
    uint64_t kernel;
    float share; /* of the bytes that the channel with the most has */
    bool is_p2p;
    int epoch, round; /* of a transfer */
    size_t item_bytes;
};
void layout_place(struct plan *plan, const struct placing *placing);
/* Batches of transfers on a channel so far. */
uint64_t layout_p2p_batches(const struct plan *plan, int channel);

/* The kernel that the plan came to. */
struct kernel *layout_finish(struct plan *plan);

#endif
