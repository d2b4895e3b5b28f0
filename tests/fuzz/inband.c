/* The in-band words: the runner stages, the job offers and takes, in any order and each in the middle of the
 * other's call; or somebody writes into the words, and then nothing is asked but that both stay whole. */
#include <string.h>

#include "memory.h"
#include "reader.h"
#include "scribble.h"

#define MOST_OPS 24
#define VERSIONS 256

static bool hostile;
static bool job_is_in_call, runner_is_in_call;
static uint64_t digests[VERSIONS]; /* of what was staged */
static uint64_t taken;             /* version of `base` */
/* The table before the last switch, which a call may still read. */
static uint64_t old_word;

static uint64_t word_of(_Atomic uint64_t *word) {
    return atomic_load(word);
}

/* Nobody has written to a table that is in use. */
static void check_table(const struct dcc_segment *seg, uint64_t word) {
    if (!word)
        return;
    MUST((word & 0xff) < DCC_SLOTS && word >> 8 < VERSIONS);
    const struct dcc_table *table = &seg->tables[word & 0xff];
    MUST(table->version == word >> 8 && table->digest == digests[word >> 8] &&
         table->digest == model_digest(table));
}

static void check(struct dcc_segment *seg) {
    uint64_t base = word_of(&seg->runner.base), offered = word_of(&seg->in_band.offered);
    check_table(seg, base);
    check_table(seg, offered);
    MUST(!base || !offered || (base & 0xff) != (offered & 0xff));
    MUST(!offered || offered >> 8 > base >> 8);
    MUST(base >> 8 == taken);
    if (atomic_load(&seg->plugin.dseq) < atomic_load(&seg->runner.base_at))
        check_table(seg, old_word);
}

static void job(struct dcc_segment *seg, uint8_t what) {
    struct dcc_offer offer;
    uint64_t base = word_of(&seg->runner.base), dseq = atomic_load(&seg->plugin.dseq);
    job_is_in_call = true;
    if (what & 1) {
        int has = dcc_offer(seg, &offer);
        MUST(has == (word_of(&seg->in_band.offered) != 0));
        if (!hostile)
            MUST(has ? offer.version > taken && offer.digest == digests[offer.version] : offer.digest == 0);
    } else if (what & 2) {
        uint64_t offered = word_of(&seg->in_band.offered);
        dcc_take_offer(seg);
        if (offered && !hostile) {
            MUST(atomic_load(&seg->runner.base_at) == dseq + 1 && word_of(&seg->runner.base) == offered);
            old_word = base;
            taken = offered >> 8;
        }
    } else if (what & 4) {
        dcc_out_of_step(seg);
    } else {
        dcc_join_in_band(seg);
    }
    job_is_in_call = false;
}

static void runner(struct dcc_segment *seg, struct input *in) {
    static struct dcc_table table;
    uint64_t before, newest = word_of(&seg->in_band.staged) >> 8;
    take_table(in, &table);
    uint64_t version = table.version;
    bool fits = version < VERSIONS && version > 0 && version > newest && version > taken &&
                version > word_of(&seg->in_band.offered) >> 8 && table.magic == DCC_TABLE_MAGIC &&
                table.abi == DCC_ABI && table.apply < 2 && table.digest == model_digest(&table);
    /* A run gives a number to one table. */
    if (!hostile && !fits)
        return;
    runner_is_in_call = true;
    before = digests[version % VERSIONS];
    digests[version % VERSIONS] = table.digest;
    if (dcc_stage(seg, &table) != DCC_PREPARED)
        digests[version % VERSIONS] = before;
    runner_is_in_call = false;
}

/* Whoever is not in a call; the plugin may always begin one. */
static void somebody(struct dcc_segment *seg, struct input *in) {
    uint8_t what = take8(in);
    switch (what & 3) {
    case 0:
        if (!job_is_in_call)
            job(seg, what >> 2);
        break;
    case 1:
        if (!runner_is_in_call)
            runner(seg, in);
        break;
    case 2:
        atomic_fetch_add(&seg->plugin.dseq, what >> 6);
        break;
    default:
        if (hostile)
            scribble(seg, in);
        else
            atomic_fetch_add(&seg->plugin.dseq, 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    struct dcc_segment *seg = memory_segment(0);
    hostile = take8(&in) & 1;
    taken = old_word = 0;
    memset(digests, 0, sizeof digests);
    for (unsigned slot = 0; slot < DCC_SLOTS; slot++)
        memory_table_dirty(seg, slot);
    atomic_store(&seg->state, DCC_READY);
    atomic_store(&seg->in_band.joined, 1);
    scribble_as = somebody;
    for (unsigned i = 0; more(&in) && i < MOST_OPS; i++) {
        if (take8(&in) & 1)
            scribble_later(seg, &in);
        somebody(seg, &in);
        if (!hostile)
            check(seg);
    }
    scribble_never();
    memory_clean();
    return 0;
}
