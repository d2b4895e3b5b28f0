/* From profiler events to records: one slot per decision, counted references, nobody waits.
 *
 * `refs` of a slot is 0 or GIVEN_UP when it is free, BUSY while one thread fills or empties it, and otherwise
 * counts what is still to come: one per channel of each of its operations that has yet to stop, COLL and MORE
 * where the number of channels is unknown, and JOIN while an aggregate waits for operations. Whoever takes
 * the last of them away moves the slot to BUSY, writes the record and frees it. What comes too late, or for a
 * share that is gone already, changes nothing.
 *
 * A handle of a collective is the slot's address, with 1 + channel in the low bits for a channel, a tag there
 * if its channels are all that is waited for, and the slot's generation in the 16 bits that no user-space
 * address uses. Handles of groups and calls are numbers behind a tag. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "comm.h"
#include "join.h"
#include "ring.h"
#include "table.h"

#define REFS_CHILDREN 0xffffu
#define REFS_COLL (1u << 16)
#define REFS_COLLS (0xffu << 16)
#define REFS_MORE (1u << 24)
#define REFS_JOIN (1u << 25)
#define REFS_TO_COME (REFS_CHILDREN | REFS_COLLS | REFS_MORE | REFS_JOIN)
#define REFS_COUNTED (1u << 26)  /* the channels were counted in from the beginning */
#define REFS_GIVEN_UP (1u << 27) /* free; `running` is not all 0 */
#define REFS_BUSY (1u << 30)

#define LONGEST_NS (3600ull * 1000000000ull)
/* A collective without a channel count is complete once one this many places later has begun on the GPU: a
 * communicator runs its collectives in order, and the proxy thread reports them almost in order. */
#define RETIRE_DISTANCE 4
/* One that still waits for a channel then never hears of it: NCCL passes over a start when the kernel has run
 * between its two looks (proxy.cc), and what was never started is never stopped either. */
#define LOST_DISTANCE 512
#define START_SPINS 200
/* NCCL keeps this many timestamps per channel (src/include/device.h) and writes over the oldest. */
#define TIMESTAMPS_KEPT 64
/* Operations of one kernel that NCCL may have launched and not yet told of, where it does not report calls.
 */
#define UNTOLD 16

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define load(p, order) atomic_load_explicit(p, memory_order_##order)
#define store(p, v, order) atomic_store_explicit(p, v, memory_order_##order)

char comm_ignored_event[1];

/* ---- handles ---- */

#define HANDLE_GENERATION 48
#define HANDLE_CHANNEL ((uintptr_t)_Alignof(struct slot) - 1)
_Static_assert(sizeof(uintptr_t) == 8, "the generation lives above bit 47");
/* Above 1 + any channel, so that no channel's handle looks like one of these. */
enum tag { TAG_COUNTED = 0x7c, TAG_API = 0x7d, TAG_GROUP_API = 0x7e, TAG_GROUP = 0x7f };
#define TAG_BITS 7
_Static_assert(_Alignof(struct slot) == 1 << TAG_BITS && COMM_CHANNELS < TAG_COUNTED,
               "tags fit below the alignment");
/* Of a call: its group above its number. Groups are compared modulo 2^24. */
#define GROUP_BITS 24
#define CALL_BITS 32

static inline void *number_handle(enum tag tag, uint64_t number) {
    return (void *)(uintptr_t)(number << TAG_BITS | tag);
}

static inline bool has_tag(const void *handle, enum tag tag) {
    return ((uintptr_t)handle & HANDLE_CHANNEL) == tag;
}

static inline uint64_t number_of(const void *handle) {
    return (uintptr_t)handle >> TAG_BITS;
}

/* The stop of an operation with TAG_COUNTED says nothing: the thread that calls NCCL does not look at the
 * slot then, which belongs to the proxy thread's cache by now. */
static inline void *handle_of(struct slot *slot, bool counted) {
    return (void *)((uintptr_t)slot | (uintptr_t)load(&slot->generation, relaxed) << HANDLE_GENERATION |
                    (counted ? TAG_COUNTED : 0));
}

static inline bool is_child(const void *handle) {
    return ((uintptr_t)handle & HANDLE_CHANNEL) - 1 < COMM_CHANNELS;
}

static inline unsigned channel_of(const void *handle) {
    return (unsigned)((uintptr_t)handle & HANDLE_CHANNEL) - 1;
}

/* NULL for every event that is not, or no longer, being measured. */
static inline struct slot *slot_of(const void *handle) {
    if (unlikely(!handle || handle == comm_ignored_event || ((uintptr_t)handle & HANDLE_CHANNEL) >= TAG_API))
        return NULL;
    uintptr_t address = (uintptr_t)handle & (((uintptr_t)1 << HANDLE_GENERATION) - 1) & ~HANDLE_CHANNEL;
    struct slot *slot = (struct slot *)address;
    uint16_t generation = (uint16_t)((uintptr_t)handle >> HANDLE_GENERATION);
    return likely((uint16_t)load(&slot->generation, relaxed) == generation) ? slot : NULL;
}

static inline uint64_t sequence_of(const struct slot *slot) {
    return (uint64_t)load(&slot->generation, relaxed) * COMM_SLOTS + (uint64_t)(slot - slot->comm->slots);
}

/* ---- calls, groups and kernels ---- */

void *comm_group_api_start(void) {
    static _Atomic uint32_t groups; /* of the process: one group may hold calls of several communicators */
    uint32_t group;
    do
        group = (atomic_fetch_add_explicit(&groups, 1, memory_order_relaxed) + 1) & ((1u << GROUP_BITS) - 1);
    while (group == 0);
    return number_handle(TAG_GROUP_API, group);
}

/* A communicator is called by one thread at a time. */
void *comm_api_start(struct comm *comm, const void *group_api_handle) {
    uint32_t group = has_tag(group_api_handle, TAG_GROUP_API) ? (uint32_t)number_of(group_api_handle) : 0;
    uint32_t call = load(&comm->calls, relaxed) + 1;
    if (group != load(&comm->group, relaxed)) {
        store(&comm->group, group, relaxed);
        store(&comm->group_first, call, relaxed);
    }
    uint32_t size = call - load(&comm->group_first, relaxed) + 1;
    if (size > load(&comm->largest_group, relaxed))
        store(&comm->largest_group, size, relaxed);
    store(&comm->calls, call, relaxed);
    return number_handle(TAG_API, (uint64_t)group << CALL_BITS | call);
}

/* Only has to differ from the latest; two threads that launch at once may take the same. */
void *comm_group_start(struct comm *comm) {
    uint32_t plan = load(&comm->plan, relaxed) + 1;
    store(&comm->plan, plan, relaxed);
    return number_handle(TAG_GROUP, plan);
}

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
    if (unlikely(stop <= start || stop - start > LONGEST_NS)) {
        bump(&seg->plugin.dropped_timer);
        return;
    }
    slot->record.start_ns = start;
    slot->record.exec_ns = stop - start;
    if (likely(timers_are_sure(slot)))
        slot->record.flags |= DCC_RECORD_SURE;
    if (unlikely(!dcc_ring_push(seg, &slot->record)))
        bump(&seg->plugin.dropped_full);
    else if (unlikely(!(slot->record.flags & DCC_RECORD_DECIDED)))
        bump(&seg->plugin.undecided);
}

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
    if (refs == 0 || refs == REFS_BUSY || refs == REFS_GIVEN_UP ||
        !atomic_compare_exchange_strong_explicit(&slot->refs, &refs, REFS_GIVEN_UP, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return false;
    if (refs & REFS_MORE)
        atomic_fetch_sub_explicit(&comm->open_ended, 1, memory_order_relaxed);
    bump(&comm->seg->plugin.dropped_incomplete);
    return true;
}

static inline void give_up_lost(struct comm *comm, uint64_t sequence) {
    if (unlikely(sequence < LOST_DISTANCE))
        return;
    struct slot *slot = &comm->slots[(sequence - LOST_DISTANCE) % COMM_SLOTS];
    uint32_t refs = load(&slot->refs, relaxed);
    if (unlikely(refs && sequence_of(slot) == sequence - LOST_DISTANCE))
        give_up(comm, slot, refs);
}

void comm_end_measuring(struct comm *comm) {
    if (!comm->seg)
        return;
    retire_before(comm, comm->next_slot);
    for (unsigned i = 0; i < COMM_SLOTS; i++) {
        struct slot *slot = &comm->slots[i];
        uint32_t refs;
        /* BUSY is another thread between two instructions of take_off(). */
        while ((refs = load(&slot->refs, acquire)) != 0 && refs != REFS_GIVEN_UP)
            if (!give_up(comm, slot, refs))
                sched_yield();
    }
}

/* ---- the beginning of a collective ---- */

/* The proxy thread wrote to this memory last: bring it here while there is other work to do. */
static inline void fetch_to_write(const void *memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64)
#ifdef __x86_64__
        __asm__ volatile("prefetchw %0" : : "m"(*((const char *)memory + at))); /* gcc's own only reads */
#else
        __builtin_prefetch((const char *)memory + at, 1);
#endif
}

/* Under `starting`. NULL if the slot is still in use: the host is so many collectives ahead of the GPU. */
static struct slot *allocate(struct comm *comm) {
    uint64_t sequence = comm->next_slot++;
    struct slot *slot = &comm->slots[sequence % COMM_SLOTS];
    /* Pairs with the release in take_off(): the record has been written. */
    uint32_t refs = load(&slot->refs, acquire);
    if (unlikely(refs && refs != REFS_GIVEN_UP)) {
        bump(&comm->seg->plugin.dropped_busy);
        return NULL;
    }
    store(&slot->generation, (uint32_t)(sequence / COMM_SLOTS), relaxed);
    store(&slot->owner, 0, relaxed);
    store(&slot->start_ns, UINT64_MAX, relaxed);
    store(&slot->stop_ns, 0, relaxed);
    store(&slot->other_start_ns, UINT64_MAX, relaxed);
    store(&slot->other_stop_ns, 0, relaxed);
    if (unlikely(refs))
        memset((void *)slot->running, 0, sizeof slot->running);
    fetch_to_write(&comm->slots[(sequence + 1) % COMM_SLOTS], offsetof(struct slot, running));
    return slot;
}

static inline bool hold_start(struct comm *comm) {
    for (int i = 0; i < START_SPINS; i++)
        if (likely(!atomic_exchange_explicit(&comm->starting, 1, memory_order_acquire)))
            return true;
    return false;
}

/* Whether it is known how many channels will report. */
static inline bool is_counted(const struct comm *comm, const struct coll_event *event) {
    return likely(comm->children == CHILDREN_GPU && event->channels);
}

/* What an operation adds to the count. */
static inline uint32_t shares_of(const struct comm *comm, const struct coll_event *event) {
    return is_counted(comm, event) ? REFS_COUNTED | event->channels : REFS_COLL | REFS_MORE;
}

static void fill(struct slot *slot, const struct coll_event *event, const struct dcc_record *decision,
                 uint64_t bytes) {
    const struct comm *comm = slot->comm;
    struct dcc_record *record = &slot->record;
    if (likely(decision))
        memcpy((void *)record, decision, DCC_RECORD_PAYLOAD);
    else
        *record = (struct dcc_record){.bytes = bytes, .asked_algo = 255, .asked_proto = 255};
    record->plan = comm->kernels;
    record->timing = comm->children == CHILDREN_GPU      ? DCC_TIMING_GPU
                     : comm->children == CHILDREN_KERNEL ? DCC_TIMING_KERNEL_HOST
                                                         : DCC_TIMING_PROXY;
    record->func = event->func;
    record->algo = event->algo;
    record->proto = event->proto;
    record->channels = event->channels;
}

/* Under `starting`. One more operation of an aggregate that has begun; NULL if that was given up meanwhile.
 */
static void *join_slot(struct comm *comm, struct slot *slot, const struct coll_event *event, bool last) {
    uint32_t refs = load(&slot->refs, relaxed), more;
    do {
        if (unlikely(!(refs & REFS_JOIN) || (refs & REFS_COLLS) == REFS_COLLS ||
                     (refs & REFS_CHILDREN) > REFS_CHILDREN - UINT8_MAX))
            return NULL;
        more = refs + (shares_of(comm, event) & (REFS_CHILDREN | REFS_COLL));
    } while (!atomic_compare_exchange_weak_explicit(&slot->refs, &refs, more, memory_order_acq_rel,
                                                    memory_order_relaxed));
    if (event->channels > slot->record.channels)
        slot->record.channels = event->channels;
    void *handle = handle_of(slot, is_counted(comm, event));
    if (last)
        take_off(slot, REFS_JOIN);
    return handle;
}

static uint32_t group_size(const struct comm *comm, uint32_t group) {
    if (!group)
        return UNTOLD;
    uint32_t calls = load(&comm->calls, relaxed);
    if (likely(group == load(&comm->group, relaxed)))
        return calls - load(&comm->group_first, relaxed) + 1;
    return load(&comm->largest_group, relaxed);
}

/* Under `starting`. The operations of a kernel start one after the other. */
static inline void count_kernel(struct comm *comm, const void *group) {
    uint32_t plan = (uint32_t)number_of(group);
    if (unlikely(!has_tag(group, TAG_GROUP) || plan == comm->newest_plan))
        return;
    comm->newest_plan = plan;
    comm->kernels++;
}

/* Under `starting`. */
static void count_start(struct comm *comm, uint32_t group) {
    store(&comm->starts, load(&comm->starts, relaxed) + 1, relaxed);
    /* Groups start in the order of their calls, but for those that a graph brings back. */
    int32_t newer = (int32_t)((group - comm->newest_group) << (32 - GROUP_BITS));
    if (newer > 0)
        comm->newest_group = group;
    else if (unlikely(newer < 0 && comm->newest_group))
        store(&comm->replays, 1, relaxed);
}

/* Under `starting`. */
static void *begin_measuring(struct comm *comm, const struct coll_event *event, uint64_t bytes,
                             uint32_t group, uint32_t call) {
    if (likely(group))
        count_start(comm, group);
    count_kernel(comm, event->group);
    int at = join_claim(comm, event, bytes, group);
    const struct dcc_record *decision = at >= 0 ? &comm->decisions[at] : NULL;
    /* NCCL decides on the sum of what it aggregates. */
    bool aggregate = unlikely(decision && bytes != decision->bytes);
    bool last = aggregate && comm->claims[at].bytes_left == 0;
    if (aggregate && comm->claims[at].measured_in) {
        void *handle = join_slot(comm, comm->claims[at].measured_in, event, last);
        bump(handle ? &comm->seg->plugin.merged : &comm->seg->plugin.dropped_incomplete);
        join_finish(comm, true, group);
        return handle ? handle : comm_ignored_event;
    }
    struct slot *slot = allocate(comm);
    void *handle = comm_ignored_event;
    if (likely(slot)) {
        fill(slot, event, decision, bytes);
        slot->call = call - group_size(comm, group);
        slot->start = load(&comm->starts, relaxed);
        uint32_t shares = shares_of(comm, event);
        if (unlikely(aggregate)) {
            slot->record.flags |= DCC_RECORD_AGGREGATE;
            shares |= REFS_JOIN;
            comm->claims[at].measured_in = slot;
        }
        if (unlikely(shares & REFS_MORE))
            atomic_fetch_add_explicit(&comm->open_ended, 1, memory_order_relaxed);
        handle = handle_of(slot, is_counted(comm, event));
        store(&slot->refs, shares, release);
    }
    join_finish(comm, decision != NULL, group);
    return handle;
}

/* Before v4 a rank is first heard of with its first collective. */
static __attribute__((noinline)) void tell_rank(struct comm *comm, const struct coll_event *event) {
    struct dcc_identity *identity = &comm->seg->identity;
    if (event->comm_id)
        store(&identity->comm_id, event->comm_id, relaxed);
    store(&identity->rank, (uint32_t)event->rank, release); /* pairs with the acquire in dcc_identity() */
    store(&comm->rank_told, true, relaxed);
}

void *comm_coll_start(struct comm *comm, const struct coll_event *event) {
    if (unlikely(!comm->seg))
        return comm_ignored_event;
    if (unlikely(!load(&comm->rank_told, relaxed) && event->rank >= 0))
        tell_rank(comm, event);
    if (unlikely(event->func >= DCC_FUNCS))
        return comm_ignored_event;
    uint64_t bytes = event->count * event->element_bytes;
    if (event->func == 2 || event->func == 3) /* all-gather and reduce-scatter count the full buffer */
        bytes *= load(&comm->seg->identity.ranks, relaxed);
    uint32_t group = 0, call;
    if (likely(has_tag(event->api, TAG_API))) {
        uint64_t number = number_of(event->api);
        group = (uint32_t)(number >> CALL_BITS) & ((1u << GROUP_BITS) - 1);
        call = (uint32_t)number;
    } else {
        /* Before v5 a call is first heard of here, behind the launch of its kernel. */
        call = load(&comm->calls, relaxed) + 1;
        store(&comm->calls, call, relaxed);
    }
    /* Another thread is starting a collective and was put to sleep at it; NCCL's threads do not wait. */
    if (unlikely(!hold_start(comm))) {
        bump(&comm->seg->plugin.dropped_busy);
        return comm_ignored_event;
    }
    void *handle = begin_measuring(comm, event, bytes, group, call);
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
        has_bad_timer(slot);
    started_at(slot, start_ns);
    /* A channel is reported by one thread at a time, start before stop. */
    store(&slot->running[channel], (uint8_t)(load(&slot->running[channel], relaxed) + 1), relaxed);
    uint64_t sequence = sequence_of(slot);
    give_up_lost(comm, sequence);
    if (unlikely(load(&comm->open_ended, relaxed)) && sequence >= RETIRE_DISTANCE)
        retire_before(comm, sequence - RETIRE_DISTANCE + 1);
    return (void *)(((uintptr_t)coll_handle & ~HANDLE_CHANNEL) | (1u + channel));
}

/* NCCL keeps the handle of a channel's last start: where it passed over one, the stop arrives with that of an
 * earlier operation, which has been stopped before. */
static inline bool is_running(const struct slot *slot, unsigned channel) {
    return load(&slot->running[channel], relaxed) != 0;
}

void comm_child_timer(void *handle, uint64_t stop_ns) {
    struct slot *slot = slot_of(handle);
    if (unlikely(!slot || !is_child(handle) || !is_running(slot, channel_of(handle))))
        return;
    if (unlikely(stop_ns == 0)) /* seen in the field */
        has_bad_timer(slot);
    stopped_at(slot, stop_ns);
}

void comm_event_stop(void *handle) {
    if (likely(has_tag(handle, TAG_COUNTED)))
        return;
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
