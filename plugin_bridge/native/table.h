/* Keys, digests and checks of decision tables: shared by the plugin and the channel library. */
#ifndef DYNAMICCL_TABLE_H
#define DYNAMICCL_TABLE_H

#include <stdbool.h>
#include <stddef.h>

#include "channel.h"

/* Eight bins per octave: exact up to 7 bytes, then the exponent and the next three bits. Monotonic in bytes.
 */
static inline uint32_t dcc_size_bin(uint64_t bytes) {
    if (bytes < 8)
        return (uint32_t)bytes;
    unsigned exponent = 63u - (unsigned)__builtin_clzll(bytes);
    uint32_t bin = ((exponent - 2) << 3) | (uint32_t)((bytes >> (exponent - 3)) & 7u);
    return bin < DCC_BINS ? bin : DCC_BINS - 1;
}

/* Depends only on the arguments of getCollInfo that NCCL makes equal on every rank. func must be < DCC_FUNCS.
 */
static inline uint32_t dcc_key(unsigned func, uint64_t bytes, int pipe_ops) {
    return ((func << 1) | (pipe_ops > 1)) * DCC_BINS + dcc_size_bin(bytes);
}

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014). */
static inline uint64_t dcc_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

uint64_t dcc_table_digest(const struct dcc_table *table);

/* True if the table is whole and is `version`. Says nothing of whether its entries make sense. */
bool dcc_table_valid(const struct dcc_table *table, uint64_t version);

#endif
