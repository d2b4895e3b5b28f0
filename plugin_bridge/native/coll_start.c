/* The beginning of a collective: it is joined with its decision and gets a slot. */
#include <string.h>

#include "govern.h"
#include "handle.h"
#include "join.h"
#include "measure.h"
#include "ring.h"
#include "watch.h"

#define START_SPINS 200
/* Operations of one kernel that NCCL may have launched and not told of yet, where it reports no calls. */
#define UNTOLD 16

char comm_ignored_event[1];

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
    store(&comm->time_next, is_timed(sequence + 1), relaxed);
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

/* Under `starting`. One more operation of the aggregate that began as `sequence`; NULL if that was given up
 * meanwhile. */
static void *join_slot(struct comm *comm, uint64_t sequence, const struct coll_event *event, bool last) {
    struct slot *slot = &comm->slots[sequence % COMM_SLOTS];
    if (unlikely(sequence_of(slot) != sequence))
        return NULL;
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
    /* Without a decision, far from a window that is profiled: nothing is to be measured there either. */
    if (unlikely(decision ? decision->flags & DECISION_SPARED : !load(&comm->profiling, relaxed))) {
        bump(&comm->seg->plugin.spared);
        join_finish(comm, decision != NULL, group);
        return comm_ignored_event;
    }
    /* NCCL decides on the sum of what it aggregates. */
    bool aggregate = unlikely(decision && bytes != decision->bytes);
    bool last = aggregate && comm->claims[at].bytes_left == 0;
    if (aggregate && comm->claims[at].measured_in) {
        void *handle = join_slot(comm, comm->claims[at].measured_in - 1, event, last);
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
            comm->claims[at].measured_in = 1 + sequence_of(slot);
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

static inline void *coll_start(struct comm *comm, const struct coll_event *event) {
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
        call = load(&comm->calls, relaxed) + 1 + govern_missed(comm, TIMESTAMPS_KEPT);
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

static __attribute__((noinline)) void *coll_start_timed(struct comm *comm, const struct coll_event *event) {
    store(&comm->time_next, false, relaxed);
    struct watch watch = watch_begin();
    void *handle = coll_start(comm, event);
    watch_end(watch, comm);
    return handle;
}

void *comm_coll_start(struct comm *comm, const struct coll_event *event) {
    if (unlikely(!comm->seg))
        return comm_ignored_event;
    return unlikely(load(&comm->time_next, relaxed)) ? coll_start_timed(comm, event)
                                                     : coll_start(comm, event);
}
