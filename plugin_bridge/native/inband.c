/* In-band agreement: the runner stages a table, and the job puts it in force at a step boundary, on all ranks
 * or on none. Docs/channel.md has the argument.
 *
 * A slot belongs to the runner until the job marks the word in `staged` as taken; from then on it is the
 * job's, first as `offered`, then as `base`. The runner takes an unmarked word back before it writes another
 * table, both by compare-and-swap, so nobody writes to a table that somebody else may use. */
#include <string.h>

#include "reader.h"
#include "short.h"
#include "table.h"

/* ---- the job's end ---- */

void dcc_join_in_band(struct dcc_segment *seg) {
    store(&seg->in_band.joined, 1, release);
}

int dcc_offer(struct dcc_segment *seg, struct dcc_offer *out) {
    struct dcc_in_band_words *words = &seg->in_band;
    uint64_t staged = load(&words->staged, relaxed);
    /* Acquire pairs with the release in dcc_stage(): the table is whole. */
    if (staged && atomic_compare_exchange_strong_explicit(&words->staged, &staged, staged | DCC_TAKEN,
                                                          memory_order_acq_rel, memory_order_relaxed)) {
        dcc_interleave();
        uint64_t version = staged >> 8, slot = staged & 0xff, base = load(&seg->runner.base, relaxed);
        bool free = slot < DCC_SLOTS && (!base || slot != (base & 0xff));
        if (version > base >> 8 && free && dcc_table_valid(&seg->tables[slot], version))
            store(&words->offered, staged, relaxed);
        dcc_interleave();
        store(&words->staged, 0, release); /* pairs with the acquire in dcc_stage(): `offered` is known */
    }
    uint64_t offered = load(&words->offered, relaxed);
    /* The job's own word, but in memory that others can write to: it must not lead out of the segment. */
    if ((offered & 0xff) >= DCC_SLOTS) {
        offered = 0;
        store(&words->offered, 0, release);
    }
    out->version = offered >> 8;
    out->digest = offered ? seg->tables[offered & 0xff].digest : 0;
    out->dseq = load(&seg->plugin.dseq, seq_cst);
    return offered != 0;
}

void dcc_take_offer(struct dcc_segment *seg) {
    struct dcc_in_band_words *words = &seg->in_band;
    uint64_t offered = load(&words->offered, relaxed);
    if (!offered)
        return;
    store(&seg->runner.base_at, load(&seg->plugin.dseq, seq_cst) + 1, release);
    dcc_interleave();
    store(&seg->runner.base, offered, release); /* pairs with the acquire in decide() */
    dcc_interleave();
    store(&words->offered, 0, release);
}

void dcc_out_of_step(struct dcc_segment *seg) {
    store(&seg->in_band.offered, 0, relaxed);
    store(&seg->in_band.out_of_step, 1, release); /* pairs with the acquire in dcc_prepare() */
}

/* ---- the runner's end ---- */

int dcc_stage(struct dcc_segment *seg, const struct dcc_table *table) {
    struct dcc_in_band_words *words = &seg->in_band;
    if (!load(&words->joined, acquire) || load(&words->out_of_step, relaxed) ||
        table->version > DCC_MAX_VERSION || !dcc_table_valid(table, table->version))
        return DCC_REFUSED;
    if (!dcc_fold(seg))
        return DCC_BUSY;
    uint64_t staged = load(&words->staged, acquire);
    if (staged & DCC_TAKEN || (staged && !atomic_compare_exchange_strong(&words->staged, &staged, 0)))
        return DCC_BUSY;
    dcc_interleave();
    /* What was staged until now is ours again. In this order: the job moves `offered` to `base`, and whoever
     * looks the other way round can miss it. */
    uint64_t offered = load(&words->offered, acquire);
    dcc_interleave();
    uint64_t base = load(&seg->runner.base, acquire);
    if (table->version <= base >> 8 || table->version <= offered >> 8)
        return DCC_REFUSED;
    /* A call from before the last switch may still read the table of that time. */
    if (load(&seg->plugin.dseq, seq_cst) < load(&seg->runner.base_at, acquire))
        return DCC_BUSY;
    uint64_t slot = 0;
    while ((base && (base & 0xff) == slot) || (offered && (offered & 0xff) == slot))
        slot++;
    memcpy(&seg->tables[slot], table, sizeof *table);
    dcc_interleave();
    store(&words->staged, table->version << 8 | slot, release);
    return DCC_PREPARED;
}
