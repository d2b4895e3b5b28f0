/* Short words for what the hot paths say often. */
#ifndef DYNAMICCL_SHORT_H
#define DYNAMICCL_SHORT_H

#include <stdatomic.h>
#include <stdint.h>

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define load(p, order) atomic_load_explicit(p, memory_order_##order)
#define store(p, v, order) atomic_store_explicit(p, v, memory_order_##order)

static inline void bump(_Atomic uint64_t *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

#endif
