#include "scribble.h"

#include <string.h>

#include "memory.h"

#define LATER 4
#define MOST_ENTRIES 8
#define AT_ONCE 120 /* words of a digest; most tables here are almost empty */
_Static_assert(DCC_KEYS % AT_ONCE == 0, "whole steps");

static struct {
    struct dcc_segment *seg;
    struct input what;
    unsigned points;
} later[LATER];

uint64_t take_word(struct input *in, const struct dcc_segment *seg) {
    uint8_t kind = take8(in);
    switch (kind & 7) {
    case 0:
        return kind & 8 ? UINT64_MAX : 0;
    case 1:
        return take8(in);
    case 2:
        return take(in, 4);
    case 3: /* a table */
    case 4:
        return take(in, 1) << 8 | (kind >> 4 & 3);
    case 5: /* a promise */
        return take(in, 1) << 2 | (kind >> 4 & 3);
    case 6: /* near the call that began last */
        return atomic_load(&seg->plugin.dseq) + (uint64_t)(int64_t)(int8_t)take8(in);
    default:
        return take(in, 8);
    }
}

uint64_t take_bytes(struct input *in) {
    uint8_t kind = take8(in);
    if (kind & 0x40)
        return ((uint64_t)1 << (kind & 0x3f)) + (uint64_t)(int64_t)(int8_t)take8(in);
    return (uint64_t)1 << (kind & 0x3f);
}

uint32_t take_entry(struct input *in, struct dcc_entry *entry) {
    uint8_t of = take8(in), shape = take8(in);
    uint64_t bytes = (uint64_t)1 << (of & 0x3f);
    /* docs/channel.md: eight bins an octave, exact up to 7 bytes. */
    uint32_t exponent = of & 0x3f;
    uint32_t bin = bytes < 8 ? (uint32_t)bytes : (exponent - 2) * 8;
    if (bin >= DCC_BINS)
        bin = DCC_BINS - 1;
    memset(entry, 0, sizeof *entry);
    entry->set = shape & 8 ? take8(in) : 1;
    entry->path = shape & 16 ? take8(in) : 0;
    entry->algo = shape & 32 ? 255 : take8(in) % 9;
    entry->proto = shape & 64 ? 255 : take8(in) % 4;
    entry->channels = take8(in);
    entry->chunk_log2 = shape & 128 ? take8(in) : 0;
    return ((shape & 7) % DCC_FUNCS * 2 + (of >> 7)) * DCC_BINS + bin;
}

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t model_digest(const struct dcc_table *table) {
    static const uint64_t zeros[AT_ONCE];
    uint64_t sum = mixed(table->version ^ (uint64_t)table->max_channels << 32 ^ (uint64_t)table->apply << 63);
    for (uint64_t from = 0; from < DCC_KEYS; from += AT_ONCE) {
        uint64_t words[AT_ONCE];
        if (memcmp(&table->entries[from], zeros, sizeof zeros) == 0)
            continue;
        memcpy(words, &table->entries[from], sizeof words);
        for (uint64_t i = 0; i < AT_ONCE; i++)
            sum += words[i] ? mixed(words[i] ^ mixed(from + i + 1)) : 0;
    }
    return sum;
}

void take_table(struct input *in, struct dcc_table *table) {
    memset(table, 0, sizeof *table);
    uint8_t shape = take8(in);
    table->magic = DCC_TABLE_MAGIC;
    table->abi = DCC_ABI;
    table->version = take8(in);
    table->max_channels = shape & 1 ? take8(in) : 64;
    table->apply = shape & 2 ? take8(in) % 3 : 1;
    for (unsigned i = (shape >> 2) % MOST_ENTRIES; i > 0; i--) {
        struct dcc_entry entry;
        uint32_t key = take_entry(in, &entry);
        table->entries[key] = entry;
    }
    if (shape & 32)
        table->version = take(in, 8);
    table->digest = model_digest(table);
    if (shape & 64)
        table->digest ^= take(in, 8);
    if (shape & 128) {
        table->magic ^= (uint32_t)take(in, 1);
        table->abi ^= (uint32_t)take(in, 1);
    }
}

static void scribble_on_table(struct dcc_segment *seg, struct input *in) {
    uint8_t how = take8(in);
    unsigned slot = (how & 3) % DCC_SLOTS;
    struct dcc_table *table = &seg->tables[slot];
    memory_table_dirty(seg, slot);
    if (how & 4) {
        take_table(in, table);
    } else if (how & 8) { /* the words before the entries */
        size_t at = take8(in) % offsetof(struct dcc_table, entries);
        ((uint8_t *)table)[at] = take8(in);
    } else { /* under whoever uses it */
        struct dcc_entry entry;
        uint32_t key = take_entry(in, &entry);
        table->entries[key] = entry;
    }
}

/* Several words that go together, which chance would seldom bring about. */
static void scribble_whole(struct dcc_segment *seg, struct input *in) {
    struct dcc_runner_words *r = &seg->runner;
    uint8_t how = take8(in);
    uint64_t version = take8(in);
    unsigned slot = how >> 1 & 3;
    if (how & 1) { /* an open version */
        atomic_store(&r->pending, version << 8 | (how & 8 ? take8(in) : slot));
        atomic_store(&r->promise, version << 2 | (how >> 4 & 3));
        atomic_store(&r->decision, how & 64 ? take_word(in, seg) : DCC_UNDECIDED);
        atomic_store(&r->hold_at, take_word(in, seg));
    } else if (slot < DCC_SLOTS) { /* a table in force */
        memory_table_dirty(seg, slot);
        take_table(in, &seg->tables[slot]);
        atomic_store(&r->base, seg->tables[slot].version << 8 | slot);
    }
}

void scribble(struct dcc_segment *seg, struct input *in) {
    struct dcc_runner_words *r = &seg->runner;
    _Atomic uint64_t *words[] = {&r->hold_at,
                                 &r->base,
                                 &r->base_at,
                                 &r->pending,
                                 &r->decision,
                                 &r->promise,
                                 &r->heartbeat_ns,
                                 &r->runner_pid,
                                 &r->tail,
                                 &r->term,
                                 &r->duty,
                                 &r->overhead_ppm,
                                 &seg->in_band.joined,
                                 &seg->in_band.staged,
                                 &seg->in_band.offered,
                                 &seg->in_band.out_of_step,
                                 &seg->job.turn,
                                 &seg->job.step};
    uint8_t which = take8(in);
    if (which & 0x40)
        scribble_on_table(seg, in);
    else if (which & 0x80)
        atomic_store(&seg->plugin.cost_rows_used, DCC_COST_ROWS + (uint32_t)(int8_t)take8(in));
    else if (which & 0x20)
        scribble_whole(seg, in);
    else
        atomic_store(words[which % (sizeof words / sizeof *words)], take_word(in, seg));
}

void (*scribble_as)(struct dcc_segment *seg, struct input *in) = scribble;

void scribble_later(struct dcc_segment *seg, struct input *in) {
    unsigned points = take8(in) % 32;
    struct input what = take_part(in, take8(in) % 64);
    for (unsigned i = 0; i < LATER; i++)
        if (!later[i].seg) {
            later[i].seg = seg;
            later[i].what = what;
            later[i].points = points;
            return;
        }
}

void scribble_never(void) {
    memset(later, 0, sizeof later);
}

static void do_later(unsigned i) {
    struct dcc_segment *seg = later[i].seg;
    struct input what = later[i].what;
    later[i].seg = NULL;
    while (more(&what))
        scribble_as(seg, &what);
}

bool scribble_now(void) {
    for (unsigned i = 0; i < LATER; i++)
        if (later[i].seg) {
            do_later(i);
            return true;
        }
    return false;
}

/* Called wherever losing the processor is worst: see channel.h. */
void dcc_interleave(void) {
    for (unsigned i = 0; i < LATER; i++)
        if (later[i].seg && later[i].points-- == 0)
            do_later(i);
}
