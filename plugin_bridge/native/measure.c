/* How measuring a collective ends: its record is written, or it is given up. */
#define _GNU_SOURCE
#include "measure.h"

#include <sched.h>

#include "ring.h"

#define LONGEST_NS (3600ull * 1000000000ull)

/* Whether no operation that could have run since can have written over the timestamps of a slot's first one.
 */
static inline bool timers_are_sure(const struct slot *slot) {
    const struct comm *comm = slot->comm;
    if (comm->children != CHILDREN_GPU)
        return true;
    uint32_t called = load(&comm->calls, relaxed) - slot->call;
    if (likely(!load(&comm->replays, relaxed)))
        return called < TIMESTAMPS_KEPT;
    return called < TIMESTAMPS_KEPT / 2 && load(&comm->starts, relaxed) - slot->start < TIMESTAMPS_KEPT / 2;
}

static inline uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static inline uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

void measure_emit(struct slot *slot) {
    struct dcc_segment *seg = slot->comm->seg;
    uint64_t start = smaller(load(&slot->start_ns, relaxed), load(&slot->other_start_ns, relaxed));
    uint64_t stop = larger(load(&slot->stop_ns, relaxed), load(&slot->other_stop_ns, relaxed));
    if (unlikely(stop <= start || stop - start > LONGEST_NS)) {
        bump(&seg->plugin.dropped_timer);
        return;
    }
    slot->record.start_ns = start;
    slot->record.exec_ns = stop - start;
    if (likely(slot->record.timing == DCC_TIMING_GPU))
        slot->record.clock = (uint32_t)(comm_host_ns() - stop);
    if (likely(timers_are_sure(slot)))
        slot->record.flags |= DCC_RECORD_SURE;
    if (unlikely(!dcc_ring_push(seg, &slot->record)))
        bump(&seg->plugin.dropped_full);
    else if (unlikely(!(slot->record.flags & DCC_RECORD_DECIDED)))
        bump(&seg->plugin.undecided);
}

void measure_retire_before(struct comm *comm, uint64_t sequence) {
    uint64_t next = load(&comm->retired, relaxed);
    do {
        if (next >= sequence)
            return;
    } while (!atomic_compare_exchange_weak_explicit(&comm->retired, &next, sequence, memory_order_relaxed,
                                                    memory_order_relaxed));
    /* This thread has the range to itself. Older slots have been used again since. */
    if (sequence - next > COMM_SLOTS)
        next = sequence - COMM_SLOTS;
    for (; next < sequence; next++) {
        struct slot *slot = &comm->slots[next % COMM_SLOTS];
        if (!(load(&slot->refs, relaxed) & REFS_MORE) || sequence_of(slot) != next)
            continue;
        atomic_fetch_sub_explicit(&comm->open_ended, 1, memory_order_relaxed);
        take_off(slot, REFS_MORE);
    }
}

bool measure_give_up(struct comm *comm, struct slot *slot, uint32_t refs) {
    if (refs == 0 || refs == REFS_BUSY || refs == REFS_GIVEN_UP ||
        !atomic_compare_exchange_strong_explicit(&slot->refs, &refs, REFS_GIVEN_UP, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return false;
    if (refs & REFS_MORE)
        atomic_fetch_sub_explicit(&comm->open_ended, 1, memory_order_relaxed);
    bump(&comm->seg->plugin.dropped_incomplete);
    return true;
}

void comm_end_measuring(struct comm *comm) {
    if (!comm->seg)
        return;
    measure_retire_before(comm, comm->next_slot);
    for (unsigned i = 0; i < COMM_SLOTS; i++) {
        struct slot *slot = &comm->slots[i];
        uint32_t refs;
        /* BUSY is another thread between two instructions of take_off(). */
        while ((refs = load(&slot->refs, acquire)) != 0 && refs != REFS_GIVEN_UP)
            if (!measure_give_up(comm, slot, refs))
                sched_yield();
    }
}
