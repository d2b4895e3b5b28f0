/* Which collectives are profiled: all calls of a window, or none. docs/channel.md has the argument. */
#ifndef DYNAMICCL_GOVERN_H
#define DYNAMICCL_GOVERN_H

#include "comm.h"
#include "short.h"

/* NCCL looks at its mask when a collective is called, before getCollInfo. So events are on this many calls
 * before a window begins: the calls of a group are all made before the first of them is decided. */
#define GOVERN_GUARD 16u
_Static_assert(DCC_WINDOW_CALLS % GOVERN_GUARD == 0 && DCC_WINDOW_CALLS > 2 * GOVERN_GUARD, "edges");

/* At init: turns events on. `bits` are those of NCCL's activation mask. */
void govern_begin(struct comm *comm, int *mask, int bits);
void govern_end(struct comm *comm);

/* Call d is an edge. */
void govern_edge(struct comm *comm, uint64_t d);

/* With every call of getCollInfo, from the thread that calls. */
static inline void govern(struct comm *comm, uint64_t d) {
    if (unlikely(d % GOVERN_GUARD == 0))
        govern_edge(comm, d);
}

/* NCCL writes no times of what it does not profile, and counts it all the same: the first profiled operation
 * after a pause may write over those of any before it. Returns how many calls that is worth. */
static inline uint32_t govern_missed(struct comm *comm, uint32_t calls) {
    if (likely(!comm->events))
        return 0;
    uint32_t turns = load(&comm->events->turns, relaxed);
    if (likely(turns == load(&comm->turns, relaxed)))
        return 0;
    store(&comm->turns, turns, relaxed);
    return calls;
}

#endif
