/* What is still to come of a collective that is being measured: one slot per decision, counted references,
 * nobody waits.
 *
 * `refs` of a slot is 0 or GIVEN_UP when it is free, BUSY while one thread fills or empties it, and otherwise
 * counts what is still to come: one per channel of each of its operations that has yet to stop, COLL and MORE
 * where the number of channels is unknown, and JOIN while an aggregate waits for operations. Whoever takes
 * the last of them away moves the slot to BUSY, writes the record and frees it. What comes too late, or for a
 * share that is gone already, changes nothing. */
#ifndef DYNAMICCL_MEASURE_H
#define DYNAMICCL_MEASURE_H

#include "comm.h"
#include "short.h"

/* NCCL keeps this many timestamps per channel (src/include/device.h) and writes over the oldest. */
#define TIMESTAMPS_KEPT 64

#define REFS_CHILDREN 0xffffu
#define REFS_COLL (1u << 16)
#define REFS_COLLS (0xffu << 16)
#define REFS_MORE (1u << 24)
#define REFS_JOIN (1u << 25)
#define REFS_TO_COME (REFS_CHILDREN | REFS_COLLS | REFS_MORE | REFS_JOIN)
#define REFS_COUNTED (1u << 26)  /* the channels were counted in from the beginning */
#define REFS_GIVEN_UP (1u << 27) /* free; `running` is not all 0 */
#define REFS_BUSY (1u << 30)

static inline uint64_t sequence_of(const struct slot *slot) {
    return (uint64_t)load(&slot->generation, relaxed) * COMM_SLOTS + (uint64_t)(slot - slot->comm->slots);
}

/* Writes the record of a slot that is BUSY, or counts why there is none. */
void measure_emit(struct slot *slot);

/* Takes `share` (COLL, MORE, JOIN, or 1 for a channel) off the count, if it is still there, and writes the
 * record if nothing is left to come. */
static inline void take_off(struct slot *slot, uint32_t share) {
    uint32_t all = share == 1 ? REFS_CHILDREN : share == REFS_COLL ? REFS_COLLS : share;
    uint32_t refs = load(&slot->refs, relaxed), left;
    do {
        if (unlikely(!(refs & all)))
            return;
        left = refs - share;
        if (!(left & REFS_TO_COME))
            left = REFS_BUSY;
        /* acq_rel: the last one sees every other thread's timers. */
    } while (unlikely(!atomic_compare_exchange_weak_explicit(&slot->refs, &refs, left, memory_order_acq_rel,
                                                             memory_order_relaxed)));
    if (left == REFS_BUSY) {
        dcc_interleave();
        measure_emit(slot);
        store(&slot->refs, 0, release); /* pairs with the acquire in allocate() */
    }
}

/* Collectives below `sequence` wait for no more channels than have begun. */
void measure_retire_before(struct comm *comm, uint64_t sequence);

/* Empties a slot whose channels will never report; false if it has just been completed after all. */
bool measure_give_up(struct comm *comm, struct slot *slot, uint32_t refs);

#endif
