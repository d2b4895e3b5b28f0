/* The channels of a collective, which NCCL reports as children of its event: their timers and stops. */
#include "handle.h"
#include "measure.h"
#include "watch.h"

/* A collective without a channel count is complete once one this many places later has begun on the GPU: a
 * communicator runs its collectives in order, and the proxy thread reports them almost in order. */
#define RETIRE_DISTANCE 4
/* One that still waits for a channel then never hears of it: NCCL passes over a start when the kernel has run
 * between its two looks (proxy.cc), and what was never started is never stopped either. */
#define LOST_DISTANCE 512

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

/* The time is unknown: longer than any that is recorded. */
static inline void has_bad_timer(struct slot *slot) {
    store(&slot->other_stop_ns, UINT64_MAX, relaxed);
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

static inline void give_up_lost(struct comm *comm, uint64_t sequence) {
    if (unlikely(sequence < LOST_DISTANCE))
        return;
    struct slot *slot = &comm->slots[(sequence - LOST_DISTANCE) % COMM_SLOTS];
    uint32_t refs = load(&slot->refs, relaxed);
    if (unlikely(refs && sequence_of(slot) == sequence - LOST_DISTANCE))
        measure_give_up(comm, slot, refs);
}

static inline void *child_start(void *coll_handle, uint8_t channel, uint64_t start_ns) {
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
        has_bad_timer(slot);
    started_at(slot, start_ns);
    /* A channel is reported by one thread at a time, start before stop. */
    store(&slot->running[channel], (uint8_t)(load(&slot->running[channel], relaxed) + 1), relaxed);
    uint64_t sequence = sequence_of(slot);
    give_up_lost(comm, sequence);
    if (unlikely(load(&comm->open_ended, relaxed)) && sequence >= RETIRE_DISTANCE)
        measure_retire_before(comm, sequence - RETIRE_DISTANCE + 1);
    return (void *)(((uintptr_t)coll_handle & ~HANDLE_CHANNEL) | (1u + channel));
}

/* NCCL keeps the handle of a channel's last start: where it passed over one, the stop arrives with that of an
 * earlier operation, which has been stopped before. */
static inline bool is_running(const struct slot *slot, unsigned channel) {
    return load(&slot->running[channel], relaxed) != 0;
}

static inline void child_timer(void *handle, uint64_t stop_ns) {
    struct slot *slot = slot_of(handle);
    if (unlikely(!slot || !is_child(handle) || !is_running(slot, channel_of(handle))))
        return;
    if (unlikely(stop_ns == 0)) /* seen in the field */
        has_bad_timer(slot);
    stopped_at(slot, stop_ns);
}

static inline void event_stop(void *handle) {
    struct slot *slot = slot_of(handle);
    if (unlikely(!slot))
        return;
    if (!is_child(handle)) {
        take_off(slot, REFS_COLL);
        return;
    }
    unsigned channel = channel_of(handle);
    if (unlikely(!is_running(slot, channel)))
        return;
    store(&slot->running[channel], (uint8_t)(load(&slot->running[channel], relaxed) - 1), relaxed);
    if (unlikely(slot->comm->children != CHILDREN_GPU))
        stopped_at(slot, comm_host_ns());
    take_off(slot, 1);
}

/* ---- a few are timed ---- */

static struct comm *comm_of(const void *handle) {
    struct slot *slot = slot_of(handle);
    return slot ? slot->comm : NULL;
}

static __attribute__((noinline)) void *child_start_timed(void *coll_handle, uint8_t channel,
                                                         uint64_t start_ns) {
    struct comm *comm = comm_of(coll_handle);
    struct watch watch = watch_begin();
    void *handle = child_start(coll_handle, channel, start_ns);
    if (comm)
        watch_end(watch, comm);
    return handle;
}

static __attribute__((noinline)) void child_timer_timed(void *handle, uint64_t stop_ns) {
    struct comm *comm = comm_of(handle);
    struct watch watch = watch_begin();
    child_timer(handle, stop_ns);
    if (comm)
        watch_end(watch, comm);
}

static __attribute__((noinline)) void event_stop_timed(void *handle) {
    struct comm *comm = comm_of(handle);
    struct watch watch = watch_begin();
    event_stop(handle);
    if (comm)
        watch_end(watch, comm);
}

void *comm_child_start(void *coll_handle, uint8_t channel, uint64_t start_ns) {
    return is_timed_handle(coll_handle) ? child_start_timed(coll_handle, channel, start_ns)
                                        : child_start(coll_handle, channel, start_ns);
}

void comm_child_timer(void *handle, uint64_t stop_ns) {
    if (is_timed_handle(handle))
        child_timer_timed(handle, stop_ns);
    else
        child_timer(handle, stop_ns);
}

void comm_event_stop(void *handle) {
    if (likely(has_tag(handle, TAG_COUNTED)))
        return;
    if (is_timed_handle(handle))
        event_stop_timed(handle);
    else
        event_stop(handle);
}
