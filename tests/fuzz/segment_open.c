#define _GNU_SOURCE
/* The reader on a file of any size, mode and content: dcc_open(), and all that it may be asked for then. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file.h"
#include "memory.h"
#include "reader.h"
#include "scribble.h"

#define ERROR_BYTES 256
#define PATCHES 64
#define MOST_OPS 32

/* Content that is not among the words that are always cleaned. */
static size_t patched[PATCHES];
static unsigned n_patched;

static void patch(struct dcc_segment *seg, struct input *in) {
    static const size_t places[] = {offsetof(struct dcc_segment, magic),
                                    offsetof(struct dcc_segment, identity),
                                    offsetof(struct dcc_segment, plugin),
                                    offsetof(struct dcc_segment, runner),
                                    offsetof(struct dcc_segment, tables),
                                    offsetof(struct dcc_segment, ring),
                                    offsetof(struct dcc_segment, job),
                                    offsetof(struct dcc_segment, in_band),
                                    offsetof(struct dcc_segment, plugin) +
                                        offsetof(struct dcc_plugin_words, fingerprints)};
    uint8_t how = take8(in);
    size_t at = places[how % 9] + take(in, how & 16 ? 3 : 1);
    if (how & 32) { /* a record that is ready to be read */
        uint64_t position = atomic_load(&seg->runner.tail) + take(in, 1);
        struct dcc_record *record = &seg->ring[position % DCC_RING_RECORDS];
        at = (size_t)((char *)&record->ticket - (char *)seg);
        atomic_store(&record->ticket, position + 1);
    } else {
        at = (at < sizeof *seg ? at : 0) & ~(size_t)7;
        uint64_t word = how & 64 ? take_word(in, seg) : take(in, 1 + (how >> 7) * 7);
        memcpy((char *)seg + at, &word, sizeof word);
    }
    if (n_patched < PATCHES)
        patched[n_patched++] = at;
}

static void clean(struct dcc_segment *seg) {
    for (; n_patched > 0; n_patched--)
        memset((char *)seg + patched[n_patched - 1], 0, 8);
    atomic_store(&seg->head, 0);
    scribble_never();
    memory_clean();
}

static void drain(struct dcc_segment *seg, struct input *in) {
    size_t most = take(in, 1);
    struct dcc_record *out = malloc(most * sizeof *out + 1);
    MUST(out);
    uint64_t tail = atomic_load(&seg->runner.tail);
    size_t n = dcc_drain(seg, out, most);
    MUST(n <= most);
    for (size_t i = 0; i < n; i++)
        MUST(atomic_load(&out[i].ticket) == tail + i + 1);
    free(out);
}

static void cost_rows(struct dcc_segment *seg, struct input *in) {
    size_t first = take_word(in, seg), most = take(in, 1);
    struct dcc_cost_row *out = malloc(most * sizeof *out + 1);
    MUST(out);
    MUST(dcc_cost_rows(seg, out, first, most) <= most);
    free(out);
}

static void read_words(struct dcc_segment *seg) {
    struct dcc_status status;
    struct dcc_identity_view view;
    struct dcc_job_view job;
    uint64_t windows[DCC_FINGERPRINT_WINDOWS], hashes[DCC_FINGERPRINT_WINDOWS];
    dcc_status(seg, &status);
    dcc_identity(seg, &view);
    MUST(memchr(view.job, 0, sizeof view.job) && memchr(view.comm_name, 0, sizeof view.comm_name));
    MUST(dcc_fingerprints(seg, windows, hashes) <= DCC_FINGERPRINT_WINDOWS);
    dcc_job(seg, &job);
}

static void take_for_runner(struct dcc_segment *seg, struct input *in, struct dcc_table *table) {
    take_table(in, table);
    for (unsigned slot = 0; slot < DCC_SLOTS; slot++)
        memory_table_dirty(seg, slot);
}

static void serve(struct dcc_segment *seg, struct input *in) {
    static struct dcc_table table;
    uint64_t hold_at, digest;
    struct dcc_offer offer;
    switch (take8(in) % 20) {
    case 0:
        read_words(seg);
        break;
    case 1:
        drain(seg, in);
        break;
    case 2:
        cost_rows(seg, in);
        break;
    case 3:
        if (dcc_table(seg, &table))
            MUST(table.digest == model_digest(&table) && table.apply <= 1);
        break;
    case 4:
        take_for_runner(seg, in, &table);
        MUST((unsigned)dcc_prepare(seg, &table, take_word(in, seg), &hold_at, &digest) <= DCC_REFUSED);
        break;
    case 5:
        dcc_decide(seg, take(in, 1), take_word(in, seg));
        break;
    case 6:
        dcc_fold(seg);
        break;
    case 7:
        take_for_runner(seg, in, &table);
        MUST((unsigned)dcc_stage(seg, &table) <= DCC_REFUSED);
        break;
    case 8:
        dcc_offer(seg, &offer);
        break;
    case 9:
        dcc_take_offer(seg);
        break;
    case 10:
        dcc_out_of_step(seg);
        break;
    case 11:
        dcc_join_in_band(seg);
        break;
    case 12:
        dcc_show_to(seg, take_word(in, seg));
        break;
    case 13:
        dcc_report_step(seg, take_word(in, seg), take_word(in, seg), 1.0);
        break;
    case 14:
        dcc_report_fault(seg);
        break;
    case 15:
        dcc_beat(seg, take_word(in, seg), 1);
        break;
    case 16:
        patch(seg, in);
        break;
    case 17:
        scribble(seg, in);
        break;
    default:
        scribble_later(seg, in);
    }
}

/* What dcc_open() may open, as docs/channel.md has it. */
static bool is_ours(const struct dcc_segment *seg, size_t bytes, mode_t mode, uid_t owner) {
    return bytes == 1147200 && S_ISREG(mode) && !(mode & 077) && owner == FILE_OWNER &&
           seg->magic == 0x4c43434d414e5944u && seg->abi == 6 && seg->record_bytes == 64 &&
           seg->ring_records == 16384 && seg->table_bytes == 24992 && seg->segment_bytes == 1147200 &&
           atomic_load(&seg->state) != DCC_STARTING && atomic_load(&seg->identity.ranks) <= 1 << 20;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    struct dcc_segment *seg = memory_segment(0);
    uint8_t how = take8(&in);
    size_t bytes = how & 1 ? take(&in, 3) : sizeof *seg;
    mode_t mode = how & 2 ? (mode_t)take(&in, 2) : S_IFREG | 0600;
    uid_t owner = how & 4 ? take8(&in) : FILE_OWNER;
    atomic_store(&seg->state, DCC_READY);
    for (unsigned i = how >> 4; i > 0; i--)
        patch(seg, &in);
    if (how & 8) { /* names that do not end */
        memset(seg->identity.job, 'j', DCC_NAME_BYTES);
        memset(seg->identity.comm_name, 'c', DCC_NAME_BYTES);
    }
    char *error = malloc(ERROR_BYTES);
    MUST(error);
    memset(error, 'x', ERROR_BYTES);
    file_is(seg, bytes < sizeof *seg ? bytes : sizeof *seg, mode, owner);
    if (bytes > sizeof *seg)
        file_is(seg, bytes, mode, owner);
    struct dcc_segment *opened = dcc_open(3, error);
    MUST((opened != NULL) == is_ours(seg, bytes, mode, owner));
    MUST(memchr(error, 0, ERROR_BYTES) && (opened || (error[0] && (errno == EAGAIN || errno == EINVAL))));
    free(error);
    for (unsigned i = 0; opened && more(&in) && i < MOST_OPS; i++)
        serve(opened, &in);
    if (opened)
        dcc_close(opened);
    clean(seg);
    return 0;
}
