#include "table.h"

#include <string.h>

uint64_t dcc_table_digest(const struct dcc_table *table) {
    /* A sum of independently mixed words: order does not matter to the reader, so NumPy can do it in one go.
     */
    uint64_t sum =
        dcc_mix(table->version ^ ((uint64_t)table->max_channels << 32) ^ ((uint64_t)table->apply << 63));
    for (uint32_t i = 0; i < DCC_KEYS; i++) {
        uint64_t word;
        memcpy(&word, &table->entries[i], sizeof word);
        if (word)
            sum += dcc_mix(word ^ dcc_mix(i + 1));
    }
    return sum;
}

bool dcc_table_valid(const struct dcc_table *table, uint64_t version) {
    return table->magic == DCC_TABLE_MAGIC && table->abi == DCC_ABI && table->version == version &&
           table->apply <= 1 && table->digest == dcc_table_digest(table);
}
