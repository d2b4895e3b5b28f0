#define _GNU_SOURCE
/* getCollInfo and getChunkSize: the decision in force for one collective. */
#include <string.h>
#include <time.h>

#include "comm.h"
#include "govern.h"
#include "handle.h"
#include "table.h"
#include "watch.h"

/* For counters with one writing thread at a time: no locked instruction. */
static inline void count(_Atomic uint64_t *counter, uint64_t n) {
    store(counter, load(counter, relaxed) + n, relaxed);
}

uint64_t comm_host_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* answered by the vDSO */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Call d has reached hold_at. Returns the table word that every rank uses at d. Once this rank's answer may
 * have been given, other ranks may be told COMMIT at an S <= d, so going on without knowing could split the
 * communicator: wait. Before that, take the answer back. */
static __attribute__((noinline)) uint64_t word_at_hold(struct comm *comm, uint64_t d) {
    struct dcc_runner_words *runner = &comm->seg->runner;
    uint64_t waited_from = 0;
    uint64_t word;
    /* Until the end of the call: leave() unmaps nothing under it. */
    atomic_fetch_add(&comm->waiting, 1);
    for (unsigned spins = 0;; spins++) {
        dcc_interleave();
        if (d < load(&runner->hold_at, acquire)) {
            word = load(&runner->base, acquire);
            break;
        }
        /* `pending` first: PREPARE resets `decision` before it names a new pending table, so what is read
         * here is about that table or about a later one, which switches behind d and so says base as well.
         * The second look at `pending` keeps the two apart for whoever reads on. */
        dcc_interleave();
        uint64_t pending = load(&runner->pending, acquire);
        dcc_interleave();
        uint64_t decision = load(&runner->decision, acquire);
        dcc_interleave();
        uint64_t promise = load(&runner->promise, acquire);
        dcc_interleave();
        if (pending != load(&runner->pending, acquire))
            continue;
        if (decision != DCC_UNDECIDED) {
            word = decision != DCC_ABORT && d >= decision ? pending : load(&runner->base, acquire);
            break;
        }
        uint64_t open = pending >> 8 << 2 | DCC_OPEN;
        if (promise == open &&
            !atomic_compare_exchange_strong(&runner->promise, &promise, open | DCC_REFUSED_BY_PLUGIN))
            continue;
        /* Also where `promise` is about another version: its runner died on the way to a promise. */
        if (promise != (open | DCC_PROMISED)) {
            word = load(&runner->base, acquire);
            break;
        }
        if (!waited_from) {
            waited_from = comm_host_ns();
            count(&comm->seg->plugin.hold_waits, 1);
        }
        if (load(&comm->closing, acquire)) { /* ncclCommAbort, from another thread: nothing is launched */
            word = load(&runner->base, acquire);
            break;
        }
        if (spins > 100)
            nanosleep(&(struct timespec){.tv_nsec = spins < 1000 ? 20000 : 1000000}, NULL);
    }
    if (waited_from)
        count(&comm->seg->plugin.hold_wait_ns, comm_host_ns() - waited_from);
    return word;
}

static __attribute__((noinline)) void use_table(struct comm *comm, uint64_t word) {
    comm->table_word = word;
    comm->table = NULL;
    comm->no_table_cause = DCC_NO_TABLE;
    if (!word)
        return;
    unsigned slot = word & 0xff;
    comm->no_table_cause = DCC_BAD_TABLE;
    if (slot < DCC_SLOTS && dcc_table_valid(&comm->seg->tables[slot], word >> 8))
        comm->table = &comm->seg->tables[slot];
}

static __attribute__((noinline)) void publish_fingerprint(struct comm *comm) {
    struct dcc_plugin_words *plugin = &comm->seg->plugin;
    uint64_t window = comm->dseq / DCC_FINGERPRINT_CALLS - 1;
    struct dcc_fingerprint *f = &plugin->fingerprints[window % DCC_FINGERPRINT_WINDOWS];
    store(&f->window, 0, relaxed);
    /* Pairs with the acquire fence in dcc_fingerprints(): a hash is never read under the wrong window. */
    atomic_thread_fence(memory_order_release);
    store(&f->hash, comm->fingerprint, relaxed);
    store(&f->window, window + 1, release);
}

/* The first time a key is seen. Keys beyond the board's room are tuned all the same, only without this hint.
 */
static __attribute__((noinline)) void show_cost(struct comm *comm, uint32_t key, const float *cost, int algos,
                                                int protos) {
    comm->cost_shown[key / 32] |= 1u << (key % 32);
    struct dcc_plugin_words *plugin = &comm->seg->plugin;
    uint32_t row = load(&plugin->cost_rows_used, relaxed);
    if (row >= DCC_COST_ROWS)
        return;
    struct dcc_cost_row *out = &plugin->cost_rows[row];
    out->key = key;
    for (int a = 0; a < DCC_ALGOS; a++)
        for (int p = 0; p < DCC_PROTOS; p++)
            out->cost_us[a][p] = a < algos && p < protos ? cost[a * protos + p] : -1.0f;
    store(&plugin->cost_rows_used, row + 1, release); /* pairs with the acquire in dcc_cost_rows() */
}

/* Where NCCL takes a channel count as it stands instead of clamping it, the count stays NCCL's: CollNet, and
 * NVLS over several nodes, which is scheduled like it. */
static inline bool takes_channels_unclamped(const struct comm *comm, int algo) {
    return algo == 2 || algo == 3 || (algo == 4 && comm->several_nodes);
}

static int cheapest_algo(const float *cost, int algos, int protos) {
    int best = -1;
    for (int i = 0; i < algos * protos; i++)
        if (cost[i] >= 0.0f && (best < 0 || cost[i] < cost[best]))
            best = i;
    return best < 0 ? -1 : best / protos;
}

/* Writes what the entry asks for, if NCCL offers it. Returns whether it did. */
static inline bool apply(const struct comm *comm, const struct dcc_entry *entry, float *cost, int algos,
                         int protos, int *channels) {
    if (entry->algo == 255 && entry->proto == 255) {
        if (entry->channels) {
            if (takes_channels_unclamped(comm, cheapest_algo(cost, algos, protos)))
                return false;
            *channels = entry->channels;
        }
        return true;
    }
    if (unlikely(entry->algo >= algos || entry->proto >= protos))
        return false;
    float *cell = &cost[entry->algo * protos + entry->proto];
    if (unlikely(!(*cell >= 0.0f)))
        return false;
    *cell = 0.0f;
    if (entry->channels && !takes_channels_unclamped(comm, entry->algo))
        *channels = entry->channels;
    return true;
}

/* What the table says of a key, carried out where nothing speaks against it. Returns whether it was; what was
 * asked for is in *made, and in *cause what spoke against it. */
static inline __attribute__((always_inline)) bool look_up(const struct comm *comm, uint32_t key, float *cost,
                                                          int algos, int protos, int *channels,
                                                          struct dcc_record *made, enum dcc_cause *cause) {
    made->asked_algo = made->asked_proto = 255;
    made->asked_channels = 0;
    made->asked_chunk_log2 = 0;
    *cause = comm->no_table_cause;
    const struct dcc_table *table = comm->table;
    if (unlikely(!table))
        return false;
    struct dcc_entry entry;
    memcpy(&entry, &table->entries[key], sizeof entry);
    made->version = (uint32_t)table->version;
    *cause = DCC_NO_ENTRY;
    if (unlikely(entry.set != 1 || entry.path != 0))
        return false;
    made->asked_algo = entry.algo;
    made->asked_proto = entry.proto;
    made->asked_channels = entry.channels;
    made->asked_chunk_log2 = entry.chunk_log2 <= DCC_MAX_CHUNK_LOG2 ? entry.chunk_log2 : 0;
    *cause = DCC_USER_ENV;
    if (unlikely(comm->user_env))
        return false;
    *cause = table->apply ? DCC_MASKED : DCC_SHADOW;
    return table->apply && entry.channels <= table->max_channels && entry.channels <= COMM_CHANNELS &&
           apply(comm, &entry, cost, algos, protos, channels);
}

/* The latest decision of a collective for a pair is what getChunkSize is about. A choice that is NCCL's own
 * may fall on any pair, so it forgets them all. */
static inline void remember_chunk(struct comm *comm, unsigned func, const struct dcc_record *made) {
    if ((made->flags & DCC_RECORD_APPLIED) && made->asked_algo < DCC_ALGOS &&
        made->asked_proto < DCC_PROTOS) {
        if (!made->asked_chunk_log2 && !(comm->chunk_funcs >> func & 1))
            return;
        comm->chunk[func][made->asked_algo][made->asked_proto] = made->asked_chunk_log2;
        comm->chunk_funcs |= (uint8_t)(made->asked_chunk_log2 ? 1u << func : 0);
    } else if (comm->chunk_funcs >> func & 1) {
        memset(comm->chunk[func], 0, sizeof comm->chunk[func]);
        comm->chunk_funcs &= (uint8_t)~(1u << func);
    }
}

/* Returns whether the call came to a hold. */
static inline __attribute__((always_inline)) bool decide(struct comm *comm, int func, size_t bytes,
                                                         int pipe_ops, float *cost, int algos, int protos,
                                                         int *channels) {
    struct dcc_segment *seg = comm->seg;
    uint64_t d = ++comm->dseq;
    /* Dekker with dcc_prepare(): this store before that load, in one total order. */
    store(&seg->plugin.dseq, d, seq_cst);
    dcc_interleave();
    uint64_t hold_at = load(&seg->runner.hold_at, seq_cst);
    dcc_interleave();
    bool held = unlikely(d >= hold_at);
    uint64_t word = held ? word_at_hold(comm, d) : load(&seg->runner.base, acquire);
    if (unlikely(word != comm->table_word))
        use_table(comm, word);

    govern(comm, d);
    bool profiled = likely(load(&comm->profiling, relaxed));
    if (unlikely(!profiled))
        count(&seg->plugin.unprofiled, 1);

    uint64_t call = (bytes * 8 + (unsigned)func) * 2 + (pipe_ops > 1);
    comm->fingerprint = (comm->fingerprint ^ call) * 0x9e3779b97f4a7c15ull + d;
    if (unlikely(d % DCC_FINGERPRINT_CALLS == 0))
        publish_fingerprint(comm);

    if (unlikely((unsigned)func >= DCC_FUNCS))
        return held;
    uint32_t key = dcc_key((unsigned)func, bytes, pipe_ops);
    if (unlikely(!(comm->cost_shown[key / 32] >> (key % 32) & 1)))
        show_cost(comm, key, cost, algos, protos);

    /* Nobody takes decisions where NCCL loaded no profiler; the ring is full then. Acquire pairs with the
     * release in join_finish(): the cell has been read. Far from a window that is profiled, none is kept. */
    uint64_t position = load(&comm->decided, relaxed);
    bool room = likely(comm->joining) && likely(position - load(&comm->claimed, acquire) < COMM_DECISIONS);
    struct dcc_record nowhere;
    struct dcc_record *made = room ? &comm->decisions[position % COMM_DECISIONS] : &nowhere;
    made->dseq = d;
    made->bytes = bytes;
    made->version = 0;
    made->key = (uint16_t)key;
    made->flags = (uint8_t)(DCC_RECORD_DECIDED | (profiled ? 0 : DECISION_SPARED));
    made->func = (uint8_t)func;
    made->clock = 0;
    made->plan = load(&comm->group, relaxed); /* until it is joined with its profiler event */

    enum dcc_cause cause;
    bool applied = look_up(comm, key, cost, algos, protos, channels, made, &cause);
    if (likely(applied)) {
        made->flags |= DCC_RECORD_APPLIED;
        count(&seg->plugin.applied, 1);
    } else {
        count(&seg->plugin.passthrough[cause], 1);
    }
    remember_chunk(comm, (unsigned)func, made);
    if (likely(room)) /* pairs with the acquire in claim() */
        store(&comm->decided, position + 1, release);
    return held;
}

static __attribute__((noinline)) bool decide_timed(struct comm *comm, int func, size_t bytes, int pipe_ops,
                                                   float *cost, int algos, int protos, int *channels) {
    struct dcc_plugin_words *plugin = &comm->seg->plugin;
    uint64_t waited = load(&plugin->hold_wait_ns, relaxed);
    struct watch watch = watch_begin();
    bool held = decide(comm, func, bytes, pipe_ops, cost, algos, protos, channels);
    int64_t took = watch_took(watch);
    if (likely(load(&plugin->hold_wait_ns, relaxed) == waited)) { /* a wait is counted as such */
        count(&plugin->overhead_ns, took > 0 ? (uint64_t)took : 0);
        count(&plugin->overhead_calls, 1);
    }
    store(&plugin->heartbeat_ns, comm_host_ns(), relaxed);
    return held;
}

/* By a static table: nothing is counted, for nobody looks. */
static __attribute__((noinline)) void decide_static(struct comm *comm, int func, size_t bytes, int pipe_ops,
                                                    float *cost, int algos, int protos, int *channels) {
    if ((unsigned)func >= DCC_FUNCS || !comm->table)
        return;
    struct dcc_record made;
    enum dcc_cause cause;
    uint32_t key = dcc_key((unsigned)func, bytes, pipe_ops);
    made.flags = look_up(comm, key, cost, algos, protos, channels, &made, &cause) ? DCC_RECORD_APPLIED : 0;
    remember_chunk(comm, (unsigned)func, &made);
}

int comm_decide(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos, int protos,
                int registered, int *channels) {
    (void)registered; /* can differ between ranks */
    struct comm *comm = context;
    if (unlikely(!comm || !comm->seg)) {
        if (comm && comm->is_static)
            decide_static(comm, func, bytes, pipe_ops, (float *)cost, algos, protos, channels);
        return NCCL_SUCCESS;
    }
    bool held = unlikely(comm->dseq % DCC_TIMED_ONE_IN == DCC_TIMED_ONE_IN / 2)
                    ? decide_timed(comm, func, bytes, pipe_ops, (float *)cost, algos, protos, channels)
                    : decide(comm, func, bytes, pipe_ops, (float *)cost, algos, protos, channels);
    if (unlikely(held)) /* pairs with the acquire in leave() */
        atomic_fetch_sub_explicit(&comm->waiting, 1, memory_order_release);
    return NCCL_SUCCESS;
}

void comm_chunk_size(struct comm *comm, int func, int algo, int proto, size_t *chunk) {
    static const size_t grain[DCC_PROTOS] = {16, 1920, 512};
    if ((!comm->seg && !comm->is_static) || (unsigned)func >= DCC_FUNCS || (unsigned)algo >= DCC_ALGOS ||
        (unsigned)proto >= DCC_PROTOS)
        return;
    /* Nothing here says which collective is being scheduled; a group decides all of its collectives before it
     * schedules any. The latest decision for this pair is the same one on every rank. */
    if (!(comm->chunk_funcs >> func & 1) || !comm->chunk[func][algo][proto])
        return;
    size_t asked = (size_t)1 << comm->chunk[func][algo][proto];
    *chunk = asked < grain[proto] ? grain[proto] : asked - asked % grain[proto];
}
