#define _GNU_SOURCE
/* getCollInfo and getChunkSize: the decision in force for one collective. */
#include <string.h>
#include <time.h>

#include "comm.h"
#include "table.h"

#define unlikely(x) __builtin_expect(!!(x), 0)
#define load(p, order) atomic_load_explicit(p, memory_order_##order)
#define store(p, v, order) atomic_store_explicit(p, v, memory_order_##order)

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
    for (unsigned spins = 0;; spins++) {
        if (d < load(&runner->hold_at, acquire)) {
            word = load(&runner->base, acquire);
            break;
        }
        /* `pending`, then `decision`, then `pending` again: PREPARE resets `decision` before it names a new
         * pending table, so an unchanged `pending` means that the decision is about it. */
        uint64_t pending = load(&runner->pending, acquire);
        uint64_t decision = load(&runner->decision, acquire);
        uint64_t promise = load(&runner->promise, acquire);
        if (pending != load(&runner->pending, acquire))
            continue;
        if (decision != DCC_UNDECIDED) {
            word = decision != DCC_ABORT && d >= decision ? pending : load(&runner->base, acquire);
            break;
        }
        uint64_t open = pending >> 8 << 2 | DCC_OPEN;
        if (promise == (open | DCC_REFUSED_BY_PLUGIN) ||
            (promise == open &&
             atomic_compare_exchange_strong(&runner->promise, &promise, open | DCC_REFUSED_BY_PLUGIN))) {
            word = load(&runner->base, acquire);
            break;
        }
        if (!waited_from) {
            waited_from = comm_host_ns();
            count(&comm->seg->plugin.hold_waits, 1);
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

/* NCCL clamps the channel count for ring, tree and NVLS but not for CollNet, so there it stays NCCL's. */
static inline bool is_collnet(int algo) {
    return algo == 2 || algo == 3;
}

static int cheapest_algo(const float *cost, int algos, int protos) {
    int best = -1;
    for (int i = 0; i < algos * protos; i++)
        if (cost[i] >= 0.0f && (best < 0 || cost[i] < cost[best]))
            best = i;
    return best < 0 ? -1 : best / protos;
}

/* Writes what the entry asks for, if NCCL offers it. Returns whether it did. */
static inline bool apply(const struct dcc_entry *entry, float *cost, int algos, int protos, int *channels) {
    if (entry->algo == 255) {
        if (entry->channels && !is_collnet(cheapest_algo(cost, algos, protos)))
            *channels = entry->channels;
        return true;
    }
    if (entry->algo >= algos || entry->proto >= protos)
        return false;
    float *cell = &cost[entry->algo * protos + entry->proto];
    if (!(*cell >= 0.0f))
        return false;
    *cell = 0.0f;
    if (entry->channels && !is_collnet(entry->algo))
        *channels = entry->channels;
    return true;
}

static void decide(struct comm *comm, int func, size_t bytes, int pipe_ops, float *cost, int algos,
                   int protos, int *channels) {
    struct dcc_segment *seg = comm->seg;
    uint64_t d = ++comm->dseq;
    /* Dekker with dcc_prepare(): this store before that load, in one total order. */
    store(&seg->plugin.dseq, d, seq_cst);
    uint64_t hold_at = load(&seg->runner.hold_at, seq_cst);
    uint64_t word = unlikely(d >= hold_at) ? word_at_hold(comm, d) : load(&seg->runner.base, acquire);
    if (unlikely(word != comm->table_word))
        use_table(comm, word);

    comm->fingerprint = (comm->fingerprint ^ (bytes * 8 + (unsigned)func)) * 0x9e3779b97f4a7c15ull + d;
    if (unlikely(d % DCC_FINGERPRINT_CALLS == 0))
        publish_fingerprint(comm);

    if (unlikely((unsigned)func >= DCC_FUNCS))
        return;
    uint32_t key = dcc_key((unsigned)func, bytes, pipe_ops);
    if (unlikely(!(comm->cost_shown[key / 32] >> (key % 32) & 1)))
        show_cost(comm, key, cost, algos, protos);
    struct decision made = {.dseq = d,
                            .bytes_left = bytes,
                            .key = (uint16_t)key,
                            .func = (uint8_t)func,
                            .flags = DCC_RECORD_DECIDED,
                            .algo = 255,
                            .proto = 255};
    enum dcc_cause cause = comm->no_table_cause;
    const struct dcc_table *table = comm->table;
    bool applied = false;
    if (table) {
        struct dcc_entry entry;
        memcpy(&entry, &table->entries[key], sizeof entry);
        made.version = (uint32_t)table->version;
        cause = DCC_NO_ENTRY;
        if (entry.set && entry.path == 0) {
            made.algo = entry.algo;
            made.proto = entry.proto;
            made.channels = entry.channels;
            made.chunk = entry.chunk_log2 && entry.chunk_log2 < 32 ? 1u << entry.chunk_log2 : 0;
            cause = DCC_USER_ENV;
            if (!comm->user_env) {
                cause = DCC_MASKED;
                applied = entry.channels <= table->max_channels &&
                          (!table->apply || apply(&entry, cost, algos, protos, channels));
                applied = applied && table->apply;
            }
        }
    }
    if (applied) {
        made.flags |= DCC_RECORD_APPLIED;
        if (made.algo < DCC_ALGOS && made.proto < DCC_PROTOS)
            comm->chunk[func][made.algo][made.proto] = made.chunk;
        count(&seg->plugin.applied, 1);
    } else {
        memset(comm->chunk[func], 0, sizeof comm->chunk[func]);
        count(&seg->plugin.passthrough[cause], 1);
    }
    comm->decisions[comm->decided++ % COMM_DECISIONS] = made;
}

void comm_decide(struct comm *comm, int func, size_t bytes, int pipe_ops, float *cost, int algos, int protos,
                 int *channels) {
    if (unlikely(!comm->seg))
        return;
    if (unlikely(comm->dseq % DCC_FINGERPRINT_CALLS == DCC_FINGERPRINT_CALLS / 2)) {
        struct dcc_plugin_words *plugin = &comm->seg->plugin;
        uint64_t waited = load(&plugin->hold_wait_ns, relaxed);
        uint64_t begin = comm_host_ns();
        decide(comm, func, bytes, pipe_ops, cost, algos, protos, channels);
        uint64_t end = comm_host_ns();
        waited = load(&plugin->hold_wait_ns, relaxed) - waited;
        count(&plugin->overhead_ns, end - begin > waited ? end - begin - waited : 0);
        count(&plugin->overhead_calls, 1);
        store(&plugin->heartbeat_ns, end, relaxed);
        return;
    }
    decide(comm, func, bytes, pipe_ops, cost, algos, protos, channels);
}

void comm_chunk_size(struct comm *comm, int func, int algo, int proto, size_t *chunk) {
    static const size_t grain[DCC_PROTOS] = {16, 1920, 512};
    if (!comm->seg || (unsigned)func >= DCC_FUNCS || (unsigned)algo >= DCC_ALGOS ||
        (unsigned)proto >= DCC_PROTOS)
        return;
    /* Nothing here says which collective is being scheduled; a group decides all of its collectives before it
     * schedules any. The latest decision for this pair is the same one on every rank. */
    size_t asked = comm->chunk[func][algo][proto];
    if (asked)
        *chunk = asked < grain[proto] ? grain[proto] : asked - asked % grain[proto];
}
