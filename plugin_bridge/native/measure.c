/* From profiler events to records: one slot per collective, counted references, nobody waits.
 *
 * `refs` of a slot is 0 when it is free, BUSY while one thread fills or empties it, and otherwise counts what
 * is still to come: COLL for the collective's own stop, one per channel that has yet to stop, and MORE where
 * the number of channels is unknown. Whoever takes the last of them away moves the slot to BUSY, writes the
 * record and frees it. What comes too late, or for a share that is gone already, changes nothing.
 *
 * A handle is the slot's address, with 1 + channel in the low bits for a channel and the slot's generation in
 * the 16 bits that no user-space address uses. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "comm.h"
#include "ring.h"
#include "table.h"

#define REFS_CHILDREN 0xffffu
#define REFS_COLL (1u << 16)
#define REFS_MORE (1u << 17)
#define REFS_TO_COME (REFS_CHILDREN | REFS_COLL | REFS_MORE)
#define REFS_COUNTED (1u << 18) /* the channels were counted in from the beginning */
#define REFS_BUSY (1u << 30)

#define LAPS_UNTIL_LOST 4
#define LONGEST_NS (3600ull * 1000000000ull)
/* A collective without a channel count is complete once one this many places later has begun on the GPU: a
 * communicator runs its collectives in order, and the proxy thread reports them almost in order. */
#define RETIRE_DISTANCE 4
#define START_SPINS 200
#define DECISIONS_KEPT (COMM_DECISIONS / 2) /* a group decides all of its operations first */
#define DECISIONS_LIKELY 32

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define load(p, order) atomic_load_explicit(p, memory_order_##order)
#define store(p, v, order) atomic_store_explicit(p, v, memory_order_##order)

char comm_ignored_event[1];

/* ---- handles ---- */

#define HANDLE_GENERATION 48
#define HANDLE_CHANNEL ((uintptr_t)_Alignof(struct slot) - 1)
_Static_assert(sizeof(uintptr_t) == 8, "the generation lives above bit 47");
_Static_assert(COMM_CHANNELS < _Alignof(struct slot), "1 + channel fits below the alignment");

static inline void *handle_of(struct slot *slot) {
    return (void *)((uintptr_t)slot | (uintptr_t)load(&slot->generation, relaxed) << HANDLE_GENERATION);
}

static inline bool is_child(const void *handle) {
    return (uintptr_t)handle & HANDLE_CHANNEL;
}

/* NULL for every event that is not, or no longer, being measured. */
static inline struct slot *slot_of(const void *handle) {
    if (unlikely(!handle || handle == comm_ignored_event))
        return NULL;
    uintptr_t address = (uintptr_t)handle & (((uintptr_t)1 << HANDLE_GENERATION) - 1) & ~HANDLE_CHANNEL;
    struct slot *slot = (struct slot *)address;
    uint16_t generation = (uint16_t)((uintptr_t)handle >> HANDLE_GENERATION);
    return likely((uint16_t)load(&slot->generation, relaxed) == generation) ? slot : NULL;
}

static inline uint64_t sequence_of(const struct slot *slot) {
    return (uint64_t)load(&slot->generation, relaxed) * COMM_SLOTS + (uint64_t)(slot - slot->comm->slots);
}

/* ---- the end of a collective ---- */

static inline void bump(_Atomic uint64_t *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static inline uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static inline uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static void emit(struct slot *slot) {
    struct dcc_segment *seg = slot->comm->seg;
    uint64_t start = smaller(load(&slot->start_ns, relaxed), load(&slot->other_start_ns, relaxed));
    uint64_t stop = larger(load(&slot->stop_ns, relaxed), load(&slot->other_stop_ns, relaxed));
    if (unlikely(load(&slot->bad_timer, relaxed) || stop <= start || stop - start > LONGEST_NS)) {
        bump(&seg->plugin.dropped_timer);
        return;
    }
    slot->record.start_ns = start;
    slot->record.exec_ns = stop - start;
    if (unlikely(!dcc_ring_push(seg, &slot->record)))
        bump(&seg->plugin.dropped_full);
    else if (unlikely(!(slot->record.flags & DCC_RECORD_DECIDED)))
        bump(&seg->plugin.undecided);
}

/* Takes `share` (COLL, MORE, or 1 for a channel) off the count, if it is still there, and writes the record
 * if nothing is left to come. */
static inline void take_off(struct slot *slot, uint32_t share) {
    uint32_t all = share == 1 ? REFS_CHILDREN : share;
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
        emit(slot);
        store(&slot->refs, 0, release); /* pairs with the acquire in allocate() */
    }
}

static void retire_before(struct comm *comm, uint64_t sequence) {
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

/* Empties a slot whose channels will never report; false if it has just been completed after all. */
static bool give_up(struct comm *comm, struct slot *slot, uint32_t refs) {
    if (refs == 0 || refs == REFS_BUSY ||
        !atomic_compare_exchange_strong_explicit(&slot->refs, &refs, 0, memory_order_acq_rel,
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
    retire_before(comm, comm->next_slot);
    for (unsigned i = 0; i < COMM_SLOTS; i++) {
        struct slot *slot = &comm->slots[i];
        uint32_t refs;
        /* BUSY is another thread between two instructions of take_off(). */
        while ((refs = load(&slot->refs, acquire)) != 0)
            if (!give_up(comm, slot, refs))
                sched_yield();
    }
}

/* ---- the beginning of a collective ---- */

/* Under `starting`. NULL if the slot is still in use. */
static struct slot *allocate(struct comm *comm) {
    uint64_t sequence = comm->next_slot++;
    struct slot *slot = &comm->slots[sequence % COMM_SLOTS];
    /* Pairs with the release in take_off(): the record has been written. */
    uint32_t refs = load(&slot->refs, acquire);
    if (unlikely(refs)) {
        bump(&comm->seg->plugin.dropped_busy);
        /* Thousands of collectives later a channel still has not reported: it never will. */
        if (++slot->laps >= LAPS_UNTIL_LOST)
            give_up(comm, slot, refs);
        return NULL;
    }
    slot->laps = 0;
    store(&slot->generation, (uint32_t)(sequence / COMM_SLOTS), relaxed);
    store(&slot->bad_timer, 0, relaxed);
    store(&slot->owner, 0, relaxed);
    store(&slot->start_ns, UINT64_MAX, relaxed);
    store(&slot->stop_ns, 0, relaxed);
    store(&slot->other_start_ns, UINT64_MAX, relaxed);
    store(&slot->other_stop_ns, 0, relaxed);
    return slot;
}

/* Under `starting`. Finds the decision that this operation was part of: NCCL decides once per aggregate and
 * launches in an order of its own, and some decisions are never launched (ncclGroupSimulateEnd) or long after
 * (graphs). So the newest one that fits best: the whole message rather than a part of an aggregate, and what
 * was asked for is what NCCL used. */
static const struct dcc_record *claim(struct comm *comm, const struct coll_event *event, uint64_t bytes) {
    /* Pairs with the release in decide(): the decisions below are whole. */
    uint64_t decided = load(&comm->decided, acquire);
    uint64_t claimed = load(&comm->claimed, relaxed);
    for (; comm->looked < decided; comm->looked++)
        comm->bytes_left[comm->looked % COMM_DECISIONS] =
            comm->decisions[comm->looked % COMM_DECISIONS].bytes;
    int best_fit = -1;
    uint64_t best = 0;
    for (uint64_t i = decided; i-- > claimed && best_fit < 3;) {
        uint64_t left = comm->bytes_left[i % COMM_DECISIONS];
        if (left < bytes || left == 0)
            continue;
        const struct dcc_record *d = &comm->decisions[i % COMM_DECISIONS];
        if (d->func != event->func)
            continue;
        bool as_asked = !(d->flags & DCC_RECORD_APPLIED) || d->asked_algo == 255 ||
                        (d->asked_algo == event->algo && d->asked_proto == event->proto);
        int fit = 2 * (left == bytes) + as_asked;
        if (fit > best_fit) {
            best_fit = fit;
            best = i;
        }
    }
    if (best_fit >= 0)
        comm->bytes_left[best % COMM_DECISIONS] -= bytes;
    /* Release in finish_claim() gives the cells back, so not before the caller has read the decision. */
    return best_fit >= 0 ? &comm->decisions[best % COMM_DECISIONS] : NULL;
}

/* Gives cells back to getCollInfo. What is never launched must neither fill the ring nor make every search
 * long: it goes little by little whenever an operation finds no decision, as in the replay of a graph. */
static void finish_claim(struct comm *comm, bool found) {
    uint64_t claimed = load(&comm->claimed, relaxed), before = claimed;
    while (claimed < comm->looked && comm->bytes_left[claimed % COMM_DECISIONS] == 0)
        claimed++;
    uint64_t waiting = comm->looked - claimed;
    if (unlikely(waiting > DECISIONS_KEPT))
        claimed += waiting - DECISIONS_KEPT;
    else if (unlikely(!found && waiting > DECISIONS_LIKELY))
        claimed++;
    if (claimed != before)
        store(&comm->claimed, claimed, release); /* pairs with the acquire in decide() */
}

static inline bool hold_start(struct comm *comm) {
    for (int i = 0; i < START_SPINS; i++)
        if (likely(!atomic_exchange_explicit(&comm->starting, 1, memory_order_acquire)))
            return true;
    return false;
}

void *comm_coll_start(struct comm *comm, const struct coll_event *event) {
    if (unlikely(!comm->seg))
        return comm_ignored_event;
    struct dcc_identity *identity = &comm->seg->identity;
    if (unlikely(load(&identity->rank, relaxed) == UINT32_MAX && event->rank >= 0)) {
        if (event->comm_id)
            store(&identity->comm_id, event->comm_id, relaxed);
        store(&identity->rank, (uint32_t)event->rank, release); /* pairs with the acquire in dcc_identity() */
    }
    if (unlikely(event->func >= DCC_FUNCS))
        return comm_ignored_event;
    uint64_t bytes = event->count * event->element_bytes;
    if (event->func == 2 || event->func == 3) /* all-gather and reduce-scatter count the full buffer */
        bytes *= load(&identity->ranks, relaxed);
    /* Another thread is starting a collective and was put to sleep at it; NCCL's threads do not wait. */
    if (unlikely(!hold_start(comm))) {
        bump(&comm->seg->plugin.dropped_busy);
        return comm_ignored_event;
    }
    const struct dcc_record *decision = claim(comm, event, bytes);
    struct slot *slot = allocate(comm);
    void *handle = comm_ignored_event;
    if (likely(slot)) {
        struct dcc_record *record = &slot->record;
        if (likely(decision))
            memcpy((void *)record, decision, DCC_RECORD_PAYLOAD);
        else
            *record = (struct dcc_record){.asked_algo = 255, .asked_proto = 255};
        /* NCCL decides on the sum of what it aggregates. */
        if (unlikely(decision && bytes != decision->bytes))
            record->flags |= DCC_RECORD_AGGREGATE;
        record->bytes = bytes;
        record->timing = comm->children == CHILDREN_GPU      ? DCC_TIMING_GPU
                         : comm->children == CHILDREN_KERNEL ? DCC_TIMING_KERNEL_HOST
                                                             : DCC_TIMING_PROXY;
        record->func = event->func;
        record->algo = event->algo;
        record->proto = event->proto;
        record->channels = event->channels;
        record->warps = event->warps;
        record->seq = (uint32_t)event->seq;
        bool counted = comm->children == CHILDREN_GPU && event->channels;
        if (unlikely(!counted))
            atomic_fetch_add_explicit(&comm->open_ended, 1, memory_order_relaxed);
        handle = handle_of(slot);
        store(&slot->refs, REFS_COLL | (counted ? REFS_COUNTED | event->channels : REFS_MORE), release);
    }
    finish_claim(comm, decision != NULL);
    store(&comm->starting, 0, release);
    return handle;
}

/* ---- channels ---- */

/* Whether the caller may use the slot's plain pair of timers. In practice one proxy thread reports all
 * channels of a collective, so they need no locked instruction; a second thread gets the other pair. */
static inline bool is_owner(struct slot *slot) {
    uintptr_t self = (uintptr_t)__builtin_thread_pointer(), nobody = 0;
    uintptr_t owner = load(&slot->owner, relaxed);
    return likely(owner == self) ||
           (owner == 0 && atomic_compare_exchange_strong_explicit(
                              &slot->owner, &nobody, self, memory_order_relaxed, memory_order_relaxed));
}

static inline void started_at(struct slot *slot, uint64_t ns) {
    if (likely(is_owner(slot))) {
        if (ns < load(&slot->start_ns, relaxed)) {
            dcc_interleave();
            store(&slot->start_ns, ns, relaxed);
        }
        return;
    }
    uint64_t earliest = load(&slot->other_start_ns, relaxed);
    while (ns < earliest &&
           !atomic_compare_exchange_weak_explicit(&slot->other_start_ns, &earliest, ns, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
}

static inline void stopped_at(struct slot *slot, uint64_t ns) {
    if (likely(is_owner(slot))) {
        if (ns > load(&slot->stop_ns, relaxed)) {
            dcc_interleave();
            store(&slot->stop_ns, ns, relaxed);
        }
        return;
    }
    uint64_t latest = load(&slot->other_stop_ns, relaxed);
    while (ns > latest &&
           !atomic_compare_exchange_weak_explicit(&slot->other_stop_ns, &latest, ns, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
}

/* One more channel of a collective that may have any number; false if it has been completed without. */
static bool add_child(struct slot *slot) {
    uint32_t refs = load(&slot->refs, relaxed);
    do {
        if (!(refs & REFS_MORE) || (refs & REFS_CHILDREN) == REFS_CHILDREN)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&slot->refs, &refs, refs + 1, memory_order_acquire,
                                                    memory_order_relaxed));
    return true;
}

void *comm_child_start(void *coll_handle, uint8_t channel, uint64_t start_ns) {
    struct slot *slot = slot_of(coll_handle);
    if (unlikely(!slot || is_child(coll_handle) || channel >= COMM_CHANNELS))
        return comm_ignored_event;
    struct comm *comm = slot->comm;
    uint32_t refs = load(&slot->refs, acquire); /* pairs with the release in comm_coll_start() */
    if (unlikely(!(refs & REFS_COUNTED) && !add_child(slot)))
        return comm_ignored_event;
    if (comm->children != CHILDREN_GPU)
        start_ns = comm_host_ns();
    else if (unlikely(start_ns == 0))
        store(&slot->bad_timer, 1, relaxed);
    started_at(slot, start_ns);
    if (unlikely(load(&comm->open_ended, relaxed))) {
        uint64_t sequence = sequence_of(slot);
        if (sequence >= RETIRE_DISTANCE)
            retire_before(comm, sequence - RETIRE_DISTANCE + 1);
    }
    return (char *)coll_handle + 1 + channel;
}

void comm_child_timer(void *handle, uint64_t stop_ns) {
    struct slot *slot = slot_of(handle);
    if (unlikely(!slot || !is_child(handle)))
        return;
    if (unlikely(stop_ns == 0)) /* seen in the field; the collective's time is unknown then */
        store(&slot->bad_timer, 1, relaxed);
    stopped_at(slot, stop_ns);
}

void comm_event_stop(void *handle) {
    struct slot *slot = slot_of(handle);
    if (unlikely(!slot))
        return;
    if (!is_child(handle)) {
        take_off(slot, REFS_COLL);
        return;
    }
    if (unlikely(slot->comm->children != CHILDREN_GPU))
        stopped_at(slot, comm_host_ns());
    take_off(slot, 1);
}
