#define _GNU_SOURCE
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ring.h"
#include "short.h"
#include "table.h"

#define ERROR_BYTES 256
#define PREPARE_TRIES 20
#define MAX_MARGIN (1ull << 32)
#define JOB_LOOKS 8

static void say_abi(char *error, uint32_t abi) {
    snprintf(error, ERROR_BYTES,
             "written by a plugin of channel ABI %u, this side speaks %u: install the same release on both",
             abi, DCC_ABI);
}

struct dcc_segment *dcc_open(int fd, char *error) {
    struct stat st;
    struct dcc_segment *seg = NULL;
    struct {
        uint64_t magic;
        uint32_t abi;
    } head;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || (size_t)st.st_size != sizeof *seg) {
        bool another = pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head && head.magic == DCC_MAGIC &&
                       head.abi != DCC_ABI;
        if (another)
            say_abi(error, head.abi);
        else
            snprintf(error, ERROR_BYTES, "not a channel of this version: %lld bytes, expected %zu",
                     (long long)st.st_size, sizeof *seg);
        errno = EINVAL;
        return NULL;
    }
    /* Whoever may write to the file may also cut it short under whoever has it mapped, which is a SIGBUS. */
    if (st.st_uid != geteuid() || (st.st_mode & 077)) {
        snprintf(error, ERROR_BYTES,
                 "belongs to user %u with mode %03o: run as the user of the training (this one is %u), and "
                 "let no others open it",
                 (unsigned)st.st_uid, (unsigned)(st.st_mode & 0777), (unsigned)geteuid());
        errno = EINVAL;
        return NULL;
    }
    seg = mmap(NULL, sizeof *seg, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (seg == MAP_FAILED) {
        snprintf(error, ERROR_BYTES, "cannot map: %s", strerror(errno));
        return NULL;
    }
    /* Acquire pairs with the release in ready(): the fixed fields below are written. */
    uint32_t state = load(&seg->state, acquire);
    error[0] = 0;
    if (state == DCC_STARTING && (seg->magic == 0 || seg->magic == DCC_MAGIC))
        snprintf(error, ERROR_BYTES, "still starting: try again");
    else if (seg->magic != DCC_MAGIC)
        snprintf(error, ERROR_BYTES, "not a channel: magic %016llx, expected %016llx",
                 (unsigned long long)seg->magic, DCC_MAGIC);
    else if (seg->abi != DCC_ABI)
        say_abi(error, seg->abi);
    else if (seg->record_bytes != sizeof(struct dcc_record) || seg->ring_records != DCC_RING_RECORDS ||
             seg->table_bytes != sizeof(struct dcc_table) || seg->segment_bytes != sizeof *seg)
        snprintf(error, ERROR_BYTES, "layout of another build: record %u, ring %u, table %u bytes",
                 seg->record_bytes, seg->ring_records, seg->table_bytes);
    else if (load(&seg->identity.ranks, relaxed) > DCC_MOST_RANKS)
        snprintf(error, ERROR_BYTES, "says that its communicator has %u ranks, more than %u: damaged",
                 load(&seg->identity.ranks, relaxed), DCC_MOST_RANKS);
    if (error[0]) {
        munmap(seg, sizeof *seg);
        errno = state == DCC_STARTING ? EAGAIN : EINVAL;
        return NULL;
    }
    return seg;
}

int dcc_owner_lives(int fd) {
    struct flock held = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &held) == 0 && held.l_type != F_UNLCK;
}

void dcc_close(struct dcc_segment *seg) {
    munmap(seg, sizeof *seg);
}

void dcc_identity(struct dcc_segment *seg, struct dcc_identity_view *out) {
    struct dcc_identity *id = &seg->identity;
    memset(out, 0, sizeof *out);
    out->rank = load(&id->rank, acquire); /* pairs with the release in comm_coll_start() */
    out->comm_id = load(&id->comm_id, relaxed);
    out->start_time = id->start_time;
    out->pid = id->pid;
    out->ordinal = id->ordinal;
    out->ranks = load(&id->ranks, relaxed);
    out->nodes = load(&id->nodes, relaxed);
    out->tuner_abi = load(&id->tuner_abi, relaxed);
    out->profiler_abi = load(&id->profiler_abi, relaxed);
    out->user_env = id->user_env;
    out->state = load(&seg->state, acquire);
    memcpy(out->comm_name, id->comm_name, DCC_NAME_BYTES - 1);
    memcpy(out->job, id->job, DCC_NAME_BYTES - 1);
}

/* True if this rank's answer for the open version was given, or was about to be. */
static bool promised(struct dcc_segment *seg) {
    uint64_t version = load(&seg->runner.pending, relaxed) >> 8;
    return load(&seg->runner.promise, relaxed) == (version << 2 | DCC_PROMISED);
}

void dcc_status(struct dcc_segment *seg, struct dcc_status *out) {
    struct dcc_plugin_words *p = &seg->plugin;
    struct dcc_runner_words *r = &seg->runner;
    out->dseq = load(&p->dseq, seq_cst);
    out->hold_at = load(&r->hold_at, relaxed);
    out->decision = load(&r->decision, relaxed);
    out->base_version = load(&r->base, relaxed) >> 8;
    out->base_at = load(&r->base_at, relaxed);
    out->promised = promised(seg);
    out->pending_version = load(&r->pending, relaxed) >> 8;
    out->applied = load(&p->applied, relaxed);
    for (int i = 0; i < DCC_CAUSES; i++)
        out->passthrough[i] = load(&p->passthrough[i], relaxed);
    out->hold_waits = load(&p->hold_waits, relaxed);
    out->hold_wait_ns = load(&p->hold_wait_ns, relaxed);
    out->overhead_ns = load(&p->overhead_ns, relaxed);
    out->overhead_calls = load(&p->overhead_calls, relaxed);
    out->plugin_heartbeat_ns = load(&p->heartbeat_ns, relaxed);
    out->runner_heartbeat_ns = load(&r->heartbeat_ns, relaxed);
    out->runner_pid = load(&r->runner_pid, relaxed);
    out->dropped_full = load(&p->dropped_full, relaxed);
    out->dropped_busy = load(&p->dropped_busy, relaxed);
    out->dropped_incomplete = load(&p->dropped_incomplete, relaxed);
    out->dropped_timer = load(&p->dropped_timer, relaxed);
    out->undecided = load(&p->undecided, relaxed);
    out->merged = load(&p->merged, relaxed);
    out->unprofiled = load(&p->unprofiled, relaxed);
    out->spared = load(&p->spared, relaxed);
    out->duty = load(&r->duty, relaxed);
    if (out->duty > DCC_MOST_DUTY)
        out->duty = DCC_MOST_DUTY;
    out->overhead_ppm = load(&r->overhead_ppm, relaxed);
    out->profile_ns = (int64_t)load(&p->profile_ns, relaxed);
    out->records = load(&seg->head, relaxed);
    out->backlog = out->records - load(&r->tail, relaxed);
    out->term = load(&r->term, relaxed);
    out->in_band = load(&seg->in_band.joined, acquire);
    out->out_of_step = load(&seg->in_band.out_of_step, relaxed);
    out->staged_version = load(&seg->in_band.staged, relaxed) >> 8;
    out->offered_version = load(&seg->in_band.offered, relaxed) >> 8;
}

size_t dcc_drain(struct dcc_segment *seg, struct dcc_record *out, size_t max) {
    return dcc_ring_drain(seg, out, max);
}

size_t dcc_fingerprints(struct dcc_segment *seg, uint64_t *windows, uint64_t *hashes) {
    size_t n = 0;
    for (unsigned i = 0; i < DCC_FINGERPRINT_WINDOWS; i++) {
        struct dcc_fingerprint *f = &seg->plugin.fingerprints[i];
        uint64_t window = load(&f->window, acquire);
        uint64_t hash = load(&f->hash, relaxed);
        /* Pairs with the release fence in publish_fingerprint(). */
        atomic_thread_fence(memory_order_acquire);
        if (window == 0 || load(&f->window, relaxed) != window)
            continue;
        windows[n] = window - 1;
        hashes[n++] = hash;
    }
    return n;
}

size_t dcc_cost_rows(struct dcc_segment *seg, struct dcc_cost_row *out, size_t first, size_t max) {
    size_t used = load(&seg->plugin.cost_rows_used, acquire); /* pairs with the release in show_cost() */
    if (used > DCC_COST_ROWS || first >= used)
        return 0;
    size_t n = used - first < max ? used - first : max;
    memcpy(out, &seg->plugin.cost_rows[first], n * sizeof *out);
    return n;
}

/* A sequence lock whose writer never waits. With the step alone as the word that is published last, a reader
 * could find the old step twice and a new loss between. */
void dcc_report_step(struct dcc_segment *seg, uint64_t step, uint64_t iteration_ns, double loss) {
    struct dcc_job_words *job = &seg->job;
    uint64_t turn = load(&job->turn, relaxed) | 1, bits;
    memcpy(&bits, &loss, sizeof bits);
    store(&job->turn, turn, relaxed);
    /* Pairs with the acquire fence in dcc_job(): whoever reads a word from below then finds this turn, or a
     * later one. */
    atomic_thread_fence(memory_order_release);
    dcc_interleave();
    store(&job->step, step, relaxed);
    dcc_interleave();
    store(&job->iteration_ns, iteration_ns, relaxed);
    dcc_interleave();
    store(&job->loss, bits, relaxed);
    dcc_interleave();
    store(&job->turn, turn + 1, release); /* pairs with the acquire in dcc_job() */
}

void dcc_report_fault(struct dcc_segment *seg) {
    atomic_fetch_add_explicit(&seg->job.faults, 1, memory_order_relaxed);
}

int dcc_job(struct dcc_segment *seg, struct dcc_job_view *out) {
    struct dcc_job_words *job = &seg->job;
    for (int i = 0; i < JOB_LOOKS; i++) {
        uint64_t turn = load(&job->turn, acquire); /* pairs with the release in dcc_report_step() */
        out->step = load(&job->step, relaxed);
        dcc_interleave();
        out->iteration_ns = load(&job->iteration_ns, relaxed);
        dcc_interleave();
        uint64_t bits = load(&job->loss, relaxed);
        /* Pairs with the release fence in dcc_report_step(). */
        atomic_thread_fence(memory_order_acquire);
        if (turn % 2 || load(&job->turn, relaxed) != turn)
            continue;
        memcpy(&out->loss, &bits, sizeof bits);
        out->reports = turn / 2;
        out->faults = load(&job->faults, relaxed);
        return 1;
    }
    return 0;
}

uint64_t dcc_digest(const struct dcc_table *table) {
    return dcc_table_digest(table);
}

int dcc_show_to(struct dcc_segment *seg, uint64_t term) {
    if (load(&seg->runner.term, relaxed) > term)
        return 0;
    store(&seg->runner.term, term, release);
    return 1;
}

void dcc_beat(struct dcc_segment *seg, uint64_t now_ns, uint64_t pid) {
    store(&seg->runner.heartbeat_ns, now_ns, relaxed);
    store(&seg->runner.runner_pid, pid, relaxed);
}

void dcc_govern(struct dcc_segment *seg, uint64_t duty) {
    store(&seg->runner.duty, duty > DCC_MOST_DUTY ? DCC_MOST_DUTY : duty, relaxed);
}

void dcc_note_overhead(struct dcc_segment *seg, uint64_t ppm) {
    store(&seg->runner.overhead_ppm, ppm, relaxed);
}

/* An open version is one that is named pending, not folded and not aborted. */
static bool open_version(struct dcc_segment *seg) {
    return load(&seg->runner.hold_at, relaxed) != DCC_NO_HOLD;
}

int dcc_fold(struct dcc_segment *seg) {
    struct dcc_runner_words *r = &seg->runner;
    if (!open_version(seg))
        return 1;
    uint64_t decision = load(&r->decision, relaxed);
    if (decision == DCC_UNDECIDED)
        return 0;
    if (decision != DCC_ABORT) {
        /* seq_cst pairs with the store in decide(): a call that has published d >= S has finished all d < S,
         * so nobody reads the old base any more. */
        if (load(&seg->plugin.dseq, seq_cst) < decision)
            return 0;
        store(&r->base_at, decision, relaxed);
        store(&r->base, load(&r->pending, relaxed), release);
        dcc_interleave();
    }
    store(&r->hold_at, DCC_NO_HOLD, release);
    return 1;
}

int dcc_table(struct dcc_segment *seg, struct dcc_table *out) {
    struct dcc_runner_words *r = &seg->runner;
    uint64_t decision = load(&r->decision, relaxed);
    bool committed = open_version(seg) && decision != DCC_UNDECIDED && decision != DCC_ABORT;
    uint64_t word = committed ? load(&r->pending, relaxed) : load(&r->base, relaxed);
    if (!word || (word & 0xff) >= DCC_SLOTS)
        return 0;
    memcpy(out, &seg->tables[word & 0xff], sizeof *out);
    return dcc_table_valid(out, word >> 8);
}

int dcc_prepare(struct dcc_segment *seg, const struct dcc_table *table, uint64_t margin, uint64_t *hold_at,
                uint64_t *digest) {
    struct dcc_runner_words *r = &seg->runner;
    if (!dcc_fold(seg) && promised(seg)) {
        uint64_t pending = load(&r->pending, relaxed);
        if (pending >> 8 != table->version || load(&r->decision, relaxed) != DCC_UNDECIDED ||
            (pending & 0xff) >= DCC_SLOTS)
            return DCC_BUSY;
        *hold_at = load(&r->hold_at, relaxed);
        *digest = dcc_table_digest(&seg->tables[pending & 0xff]);
        return DCC_PREPARED;
    }
    uint64_t base = load(&r->base, relaxed);
    if (load(&seg->in_band.joined, acquire) && !load(&seg->in_band.out_of_step, acquire))
        return DCC_REFUSED;
    /* A version that is older than one that was asked for here comes of a message that is. */
    if (table->version < load(&r->pending, relaxed) >> 8 || table->version == 0 ||
        table->version > DCC_MAX_VERSION || table->version <= base >> 8 ||
        !dcc_table_valid(table, table->version))
        return DCC_REFUSED;
    /* A runner that died before it could promise has left a hold that nobody knows of. */
    store(&r->hold_at, DCC_NO_HOLD, seq_cst);
    uint64_t slot = base && (base & 0xff) == 0 ? 1 : 0;
    memcpy(&seg->tables[slot], table, sizeof *table);
    *digest = dcc_table_digest(&seg->tables[slot]);
    store(&r->decision, DCC_UNDECIDED, release);
    dcc_interleave();
    store(&r->pending, table->version << 8 | slot, release);
    dcc_interleave();
    if (margin > MAX_MARGIN)
        margin = MAX_MARGIN;
    for (int i = 0; i < PREPARE_TRIES; i++, margin = 2 * margin + 1) {
        uint64_t open = table->version << 2 | DCC_OPEN;
        store(&r->promise, open, release);
        dcc_interleave();
        uint64_t hold = load(&seg->plugin.dseq, seq_cst) + margin + 1;
        /* Dekker with decide() in the plugin: this store before that load, in one total order. */
        dcc_interleave();
        store(&r->hold_at, hold, seq_cst);
        dcc_interleave();
        if (load(&seg->plugin.dseq, seq_cst) < hold &&
            atomic_compare_exchange_strong(&r->promise, &open, open | DCC_PROMISED)) {
            *hold_at = hold;
            return DCC_PREPARED;
        }
    }
    store(&r->decision, DCC_ABORT, release);
    store(&r->hold_at, DCC_NO_HOLD, release);
    return DCC_OVERTAKEN;
}

int dcc_decide(struct dcc_segment *seg, uint64_t version, uint64_t decision) {
    struct dcc_runner_words *r = &seg->runner;
    if (decision == DCC_UNDECIDED || load(&r->pending, relaxed) >> 8 != version)
        return -1;
    uint64_t known = load(&r->decision, relaxed);
    if (known != DCC_UNDECIDED)
        return known == decision ? 0 : -1;
    if (!open_version(seg))
        return -1;
    /* The calls below the promised hold are served from the old table without a look at the decision. */
    if (decision != DCC_ABORT && (!promised(seg) || decision < load(&r->hold_at, relaxed)))
        return -1;
    /* Release pairs with the acquire in word_at_hold(). */
    store(&r->decision, decision, release);
    if (decision == DCC_ABORT)
        store(&r->hold_at, DCC_NO_HOLD, release);
    return 0;
}
