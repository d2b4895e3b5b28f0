/*
 * What NCCL does between the tuner's answer and the kernel launch: channels per collective and their bytes.
 *
 * Follows scheduleCollTasksToPlan of NCCL 2.30:
 *   - The ceiling is the tuner's nChannels where that is not 0, else NCCL's own for the pair. It is kept in a
 *     signed 8-bit field.
 *   - Outside CollNet the sum of the ceilings of the plan's collectives is clamped to the communicator's
 *     channels (for NVLS and NVLS tree to the NVLS channels, which is NCCL's own count for those pairs).
 *   - Every channel gets at least 32 KiB of traffic (twice the bytes for all-reduce; four times more for LL),
 *     so a small message uses fewer channels than the ceiling, and the last channels of one collective may be
 *     shared with the next of the same plan: channels need not start at 0.
 *   - The traffic per channel is rounded down first, so a remainder can take one channel above the ceiling.
 *   - CollNet, and NVLS over several nodes, take the ceiling as it stands: nothing clamps it.
 *
 * Pure functions without state; any thread may call them.
 */
#ifndef DYNAMICCL_HOST_SCHEDULE_H
#define DYNAMICCL_HOST_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>

#include "program.h"

enum { MAX_TASKS = 2, MAX_CHANNELS = 64 };

/* One collective of a plan. */
struct task {
    int channel_lo;
    int n_channels;
    size_t part_bytes[3]; /* bytes of the low, the high and a middle channel in NCCL's order of asking; 0:
                             none */
};

struct plan {
    int n_tasks;
    struct task tasks[MAX_TASKS];
};

/* True where NCCL schedules the pair as CollNet: no split over channels, no clamp. */
int is_collnet(const struct program_header *header, int algorithm);

/* Elements and element bytes as NCCL keeps them in the task: all-gather and broadcast count int8. */
size_t task_count(const struct program_header *header, const struct program_key *key);
int task_datatype(const struct program_key *key);

/* Bytes that every channel moves at least. */
size_t traffic_per_byte(const struct program_header *header, int collective);

/* Fills `plan` for n_tasks equal collectives of `key`; ceiling is in 1..127. */
void schedule(struct plan *plan, const struct program_header *header, const struct program_key *key,
              int algorithm, int protocol, int ceiling, int n_tasks);

/* The multiple that chunks come in, and the largest chunk that the buffer takes. */
size_t chunk_grain(int protocol);
size_t chunk_limit(const struct program_key *key, int algorithm, int protocol);

#endif
