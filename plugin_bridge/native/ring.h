/* The record ring. Many producers (any of NCCL's threads), one consumer (the runner that holds the lock).
 *
 * Capacity DCC_RING_RECORDS. Full: the record is dropped and the caller counts it; nobody waits, ever.
 * Races excluded: two producers on one cell (the CAS on `head` hands out each position once); reading a cell
 * that is still being written (`ticket`); overwriting a cell that is still being read (`tail`). */
#ifndef DYNAMICCL_RING_H
#define DYNAMICCL_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "channel.h"

#define DCC_RECORD_PAYLOAD offsetof(struct dcc_record, ticket)

static inline bool dcc_ring_push(struct dcc_segment *seg, const struct dcc_record *record) {
    uint64_t position = atomic_load_explicit(&seg->head, memory_order_relaxed);
    for (;;) {
        /* Acquire pairs with the release of `tail` in dcc_ring_drain: the cell has been read before it is
         * reused. */
        dcc_interleave();
        uint64_t tail = atomic_load_explicit(&seg->runner.tail, memory_order_acquire);
        if (__builtin_expect(position - tail >= DCC_RING_RECORDS, 0)) {
            /* Full, unless `position` has become so old that the consumer is ahead of it. */
            uint64_t now = atomic_load_explicit(&seg->head, memory_order_relaxed);
            if (now == position)
                return false;
            position = now;
            continue;
        }
        if (__builtin_expect(atomic_compare_exchange_weak_explicit(&seg->head, &position, position + 1,
                                                                   memory_order_relaxed,
                                                                   memory_order_relaxed),
                             1))
            break;
    }
    struct dcc_record *cell = &seg->ring[position & (DCC_RING_RECORDS - 1)];
    dcc_interleave();
    memcpy(cell, record, DCC_RECORD_PAYLOAD);
    /* Release pairs with the acquire of `ticket` in dcc_ring_drain: the payload is whole. */
    atomic_store_explicit(&cell->ticket, position + 1, memory_order_release);
    return true;
}

/* Copies up to `max` records to `out` in ring order and returns how many. A reserved cell that is not yet
 * published ends the batch; its producer publishes it without waiting for anyone. */
static inline size_t dcc_ring_drain(struct dcc_segment *seg, struct dcc_record *out, size_t max) {
    uint64_t tail = atomic_load_explicit(&seg->runner.tail, memory_order_relaxed);
    size_t n = 0;
    while (n < max) {
        struct dcc_record *cell = &seg->ring[(tail + n) & (DCC_RING_RECORDS - 1)];
        if (atomic_load_explicit(&cell->ticket, memory_order_acquire) != tail + n + 1)
            break;
        memcpy(&out[n], cell, DCC_RECORD_PAYLOAD);
        atomic_store_explicit(&out[n].ticket, tail + n + 1, memory_order_relaxed);
        n++;
    }
    if (n)
        atomic_store_explicit(&seg->runner.tail, tail + n, memory_order_release);
    return n;
}

#endif
