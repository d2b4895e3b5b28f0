/* What the handle of an event holds: nothing is kept for one.
 *
 * Of a collective: its slot's address, with 1 + channel in the low bits for a channel, a tag there if its
 * channels are all that is waited for, and the slot's generation in 15 of the 16 bits that no user-space
 * address uses; the last says that its callbacks are timed. Of groups and calls: a number behind a tag. */
#ifndef DYNAMICCL_HANDLE_H
#define DYNAMICCL_HANDLE_H

#include "comm.h"
#include "short.h"

#define HANDLE_GENERATION 48
#define HANDLE_GENERATIONS 0x7fffu
#define HANDLE_TIMED ((uintptr_t)1 << 63)
/* Of a decision in comm->decisions, beside a record's flags: its collective is not to be measured. */
#define DECISION_SPARED 0x80u
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

/* One in DCC_TIMED_ONE_IN, each time at another place of a program that repeats itself. */
static inline bool is_timed(uint64_t sequence) {
    return (sequence + sequence / DCC_TIMED_ONE_IN) % DCC_TIMED_ONE_IN == DCC_TIMED_ONE_IN / 2;
}

/* The stop of an operation with TAG_COUNTED says nothing: the thread that calls NCCL does not look at the
 * slot then, which belongs to the proxy thread's cache by now. */
static inline void *handle_of(struct slot *slot, bool counted) {
    uint32_t generation = load(&slot->generation, relaxed);
    uint64_t sequence = (uint64_t)generation * COMM_SLOTS + (uint64_t)(slot - slot->comm->slots);
    return (void *)((uintptr_t)slot | (uintptr_t)(generation & HANDLE_GENERATIONS) << HANDLE_GENERATION |
                    (unlikely(is_timed(sequence)) ? HANDLE_TIMED : 0) | (counted ? TAG_COUNTED : 0));
}

static inline bool is_timed_handle(const void *handle) {
    return unlikely((uintptr_t)handle & HANDLE_TIMED);
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
    uint32_t generation = (uint32_t)((uintptr_t)handle >> HANDLE_GENERATION) & HANDLE_GENERATIONS;
    return likely((load(&slot->generation, relaxed) & HANDLE_GENERATIONS) == generation) ? slot : NULL;
}

#endif
