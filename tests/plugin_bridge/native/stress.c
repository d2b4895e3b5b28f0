/* Both ends of the channel in one process, so that the sanitizers see both: the plugin's sources and the
 * runner's are linked in and driven from threads that know nothing of each other.
 *
 *   stress [ring|agreement|events|lost|stale|groups|passed-over|sure|mask|pause|timed|job] [SEED]
 *      everything without an argument
 *
 * Prints a line per part. Ends with 1 and a line that says what broke. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "comm.h"
#include "govern.h"
#include "handle.h"
#include "reader.h"
#include "ring.h"
#include "table.h"

static _Noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "stress: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    _exit(1);
}

/* SplitMix64 */
static uint64_t draw(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Nothing, a few instructions, a yield, or a short sleep: the interleavings of two cores and of one. */
static void dawdle(uint64_t *random) {
    uint64_t x = draw(random);
    switch (x % 16) {
    case 0:
        sched_yield();
        break;
    case 1:
        nanosleep(&(struct timespec){.tv_nsec = (long)(x >> 8) % 20000}, NULL);
        break;
    case 2:
    case 3:
        for (volatile unsigned i = 0; i < (x >> 8) % 400; i++) {
        }
        break;
    default:
        break;
    }
}

#ifdef DCC_STRESS
void dcc_interleave(void) {
    static _Atomic uint64_t threads;
    static _Thread_local uint64_t random;
    if (!random)
        random = atomic_fetch_add(&threads, 1) + 1;
    if (draw(&random) % 8 == 0)
        dawdle(&random);
}
#endif

static pthread_t begin(void *(*function)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, argument))
        fail("cannot create a thread");
    return thread;
}

/* ---- the ring ---- */

enum { PRODUCERS = 3, PUSHES = 350000 };

struct producer {
    struct dcc_segment *seg;
    unsigned index;
    uint64_t dropped;
};

static _Atomic unsigned producing;
static _Atomic uint64_t issued, consumed;
static _Atomic bool paced;

/* Never more under way than half of the ring holds. */
static void keep_pace(void) {
    while (atomic_load(&issued) - atomic_load(&consumed) > DCC_RING_RECORDS / 2)
        sched_yield();
    atomic_fetch_add(&issued, 1);
}

static void *produce(void *argument) {
    struct producer *self = argument;
    for (uint64_t i = 0; i < PUSHES; i++) {
        /* Every word derives from the identity, so that a torn record cannot pass. */
        struct dcc_record record = {.dseq = i,
                                    .bytes = ~i,
                                    .exec_ns = i * 3,
                                    .start_ns = i * 5,
                                    .version = self->index,
                                    .plan = (uint32_t)i,
                                    .key = (uint16_t)(i * 7)};
        if (atomic_load(&paced))
            keep_pace();
        /* Some want everything through, one drops as the plugin does. */
        while (!dcc_ring_push(self->seg, &record)) {
            if (atomic_load(&paced))
                fail("ring: a record was dropped although there was room");
            if (self->index == 1) {
                self->dropped++;
                break;
            }
            sched_yield();
        }
    }
    atomic_fetch_sub(&producing, 1);
    return NULL;
}

static void run_ring(uint64_t seed, bool pace) {
    struct dcc_segment *seg = calloc(1, sizeof *seg + 64);
    if (!seg)
        fail("out of memory");
    struct dcc_segment *aligned = (struct dcc_segment *)(((uintptr_t)seg + 63) & ~(uintptr_t)63);
    struct producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    atomic_store(&producing, PRODUCERS);
    atomic_store(&issued, 0);
    atomic_store(&consumed, 0);
    atomic_store(&paced, pace);
    for (unsigned p = 0; p < PRODUCERS; p++) {
        producers[p] = (struct producer){.seg = aligned, .index = p};
        threads[p] = begin(produce, &producers[p]);
    }
    static struct dcc_record batch[4096];
    uint64_t next[PRODUCERS] = {0}, seen[PRODUCERS] = {0}, random = seed;
    for (bool last = false; !last;) {
        last = atomic_load(&producing) == 0;
        size_t n = dcc_drain(aligned, batch, 1 + draw(&random) % 4096);
        for (size_t i = 0; i < n; i++) {
            const struct dcc_record *r = &batch[i];
            uint64_t d = r->dseq;
            if (r->version >= PRODUCERS || r->bytes != ~d || r->exec_ns != d * 3 || r->start_ns != d * 5 ||
                r->plan != (uint32_t)d || r->key != (uint16_t)(d * 7))
                fail("ring: torn record %llu of producer %u", (unsigned long long)d, r->version);
            if (d < next[r->version])
                fail("ring: producer %u: record %llu after %llu", r->version, (unsigned long long)d,
                     (unsigned long long)next[r->version] - 1);
            next[r->version] = d + 1;
            seen[r->version]++;
        }
        atomic_fetch_add(&consumed, n);
        if (n)
            last = false;
        else
            dawdle(&random);
        if (!pace && draw(&random) % 256 == 0) /* long enough for the ring to fill up */
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    uint64_t total = 0, dropped = 0;
    for (unsigned p = 0; p < PRODUCERS; p++) {
        pthread_join(threads[p], NULL);
        if (seen[p] + producers[p].dropped != PUSHES)
            fail("ring: producer %u: %llu seen, %llu dropped, %d pushed", p, (unsigned long long)seen[p],
                 (unsigned long long)producers[p].dropped, PUSHES);
        total += seen[p];
        dropped += producers[p].dropped;
    }
    free(seg);
    printf("ring: %llu records from %d threads, %llu dropped\n", (unsigned long long)total, PRODUCERS,
           (unsigned long long)dropped);
}

static void test_ring(uint64_t seed) {
    run_ring(seed, true);
    run_ring(seed, false);
}

/* ---- agreement ---- */

enum { VERSIONS = 2500, CALL_BYTES = 1 << 20, ALL_REDUCE = 4, KEPT = 1 << 16 };

/* What getCollInfo did at call d: which version's table, if any. Version v asks for 1 + v % 60 channels. */
static _Atomic uint32_t used[KEPT];

struct caller {
    struct comm *comm;
    uint64_t seed;
    _Atomic bool stop;
    struct caller *all;
};

static uint8_t channels_of(uint64_t version) {
    return version ? (uint8_t)(1 + version % 60) : 0;
}

static void *call(void *argument) {
    struct caller *self = argument;
    uint64_t random = self->seed;
    while (!atomic_load_explicit(&self->stop, memory_order_relaxed)) {
        float cost[DCC_ALGOS][DCC_PROTOS];
        for (int i = 0; i < DCC_ALGOS * DCC_PROTOS; i++)
            cost[i / DCC_PROTOS][i % DCC_PROTOS] = 1.0f;
        int channels = 0;
        uint64_t d = self->comm->dseq + 1;
        comm_decide(self->comm, ALL_REDUCE, CALL_BYTES, 1, (float **)(void *)cost, DCC_ALGOS, DCC_PROTOS, 0,
                    &channels);
        bool touched = cost[1][2] == 0.0f;
        if (touched != (channels != 0))
            fail("agreement: call %llu: half of a decision", (unsigned long long)d);
        atomic_store_explicit(&used[d % KEPT], (uint32_t)channels, memory_order_release);
        /* Bursts, so that PREPARE is overtaken now and then, and pauses. */
        if (draw(&random) % 32 == 0)
            dawdle(&random);
    }
    return NULL;
}

static void fill_table(struct dcc_table *table, uint64_t version) {
    memset(table, 0, sizeof *table);
    table->magic = DCC_TABLE_MAGIC;
    table->abi = DCC_ABI;
    table->version = version;
    table->max_channels = 64;
    table->apply = 1;
    table->entries[dcc_key(ALL_REDUCE, CALL_BYTES, 1)] =
        (struct dcc_entry){.set = 1, .algo = 1, .proto = 2, .channels = channels_of(version)};
    table->digest = dcc_table_digest(table);
}

static uint64_t dseq_of(struct dcc_segment *seg) {
    return load(&seg->plugin.dseq, seq_cst);
}

/* Checks calls [from, to), all of which are over, against the version that they had to use. */
static void check_calls(uint64_t from, uint64_t to, uint64_t version) {
    if (to > from + KEPT / 2)
        from = to - KEPT / 2; /* the older ones are overwritten */
    for (uint64_t d = from; d < to; d++) {
        uint32_t channels = atomic_load_explicit(&used[d % KEPT], memory_order_acquire);
        if (channels != channels_of(version))
            fail("agreement: call %llu used %u channels, version %llu says %u", (unsigned long long)d,
                 channels, (unsigned long long)version, channels_of(version));
    }
}

struct outcomes {
    unsigned committed, aborted, overtaken;
};

/* One version from PREPARE to the fold. Returns the version in force afterwards. */
static uint64_t switch_once(struct dcc_segment *seg, uint64_t *random, uint64_t version, uint64_t in_force,
                            uint64_t *checked, struct outcomes *outcomes) {
    static struct dcc_table table;
    uint64_t hold_at = 0, digest = 0;
    fill_table(&table, version);
    int prepared =
        dcc_prepare(seg, &table, draw(random) % 4 ? draw(random) % 8 : draw(random) % 200, &hold_at, &digest);
    if (prepared == DCC_OVERTAKEN) {
        outcomes->overtaken++;
        return in_force;
    }
    if (prepared != DCC_PREPARED || digest != table.digest)
        fail("agreement: PREPARE of version %llu answered %d", (unsigned long long)version, prepared);
    dawdle(random);
    uint64_t again = 0;
    if (draw(random) % 4 == 0 &&
        (dcc_prepare(seg, &table, 0, &again, &digest) != DCC_PREPARED || again != hold_at))
        fail("agreement: a repeated PREPARE answered another hold");
    if (dseq_of(seg) > hold_at)
        fail("agreement: call %llu began behind the hold at %llu", (unsigned long long)dseq_of(seg),
             (unsigned long long)hold_at);
    if (draw(random) % 8 == 0) /* long enough for the plugin to fall asleep at the hold */
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    if (draw(random) % 4 == 0) {
        if (dcc_decide(seg, version, DCC_ABORT) != 0 || !dcc_fold(seg))
            fail("agreement: ABORT refused");
        outcomes->aborted++;
        return in_force;
    }
    uint64_t switch_at = hold_at + draw(random) % 6;
    if (dcc_decide(seg, version, hold_at - 1) != -1)
        fail("agreement: COMMIT below the promised hold was taken");
    if (dcc_decide(seg, version, switch_at) != 0)
        fail("agreement: COMMIT refused");
    outcomes->committed++;
    fill_table(&table, version + 1);
    while (!dcc_fold(seg)) {
        int early = dcc_prepare(seg, &table, 1, &again, &digest);
        if (early != DCC_BUSY && dseq_of(seg) < switch_at)
            fail("agreement: PREPARE taken before the last switch");
        if (early == DCC_PREPARED) /* call S has begun in between */
            dcc_decide(seg, version + 1, DCC_ABORT);
        dawdle(random);
    }
    /* Call S has begun, so all calls below it are over and noted. */
    check_calls(*checked, switch_at, in_force);
    *checked = switch_at;
    return version;
}

static void test_agreement(uint64_t seed) {
    struct comm *comm = comm_attach_tuner(6, 1, 2, 1, NULL);
    if (!comm || !comm->seg)
        fail("agreement: no channel; is there room in DYNAMICCL_SHM_DIR?");
    struct dcc_segment *seg = comm->seg;
    struct caller caller = {.comm = comm, .seed = seed};
    pthread_t thread = begin(call, &caller);
    uint64_t random = seed ^ 0x5eed, in_force = 0, checked = 1;
    struct outcomes outcomes = {0};
    for (uint64_t version = 1; version <= VERSIONS; version++)
        in_force = switch_once(seg, &random, version, in_force, &checked, &outcomes);
    uint64_t last = dseq_of(seg);
    atomic_store(&caller.stop, true);
    pthread_join(thread, NULL);
    check_calls(checked, last, in_force);
    struct dcc_status status;
    dcc_status(seg, &status);
    if (status.dseq != status.applied + status.passthrough[DCC_NO_TABLE])
        fail("agreement: %llu calls, %llu applied, %llu without a table", (unsigned long long)status.dseq,
             (unsigned long long)status.applied, (unsigned long long)status.passthrough[DCC_NO_TABLE]);
    if (status.hold_waits == 0)
        fail("agreement: no call ever waited, so nothing was tried");
    comm_detach_tuner(comm);
    printf("agreement: %u committed, %u aborted, %u overtaken; %llu calls, %llu waits\n", outcomes.committed,
           outcomes.aborted, outcomes.overtaken, (unsigned long long)status.dseq,
           (unsigned long long)status.hold_waits);
}

/* ---- events ---- */

enum { COLLECTIVES = 60000, MAX_CHILDREN = 8, QUEUE = 512, CALLERS = 2 };

/* A collective on its way from the launching thread to the two that report its channels. */
struct work {
    _Atomic uint32_t state; /* 0 empty, 1 posted */
    void *handle;
    uint64_t start, stop; /* exact: of the earliest and of the latest channel */
    unsigned children;
};

struct pipeline {
    struct comm *comm;
    struct work queues[CALLERS][QUEUE];
    uint64_t seed;
};

/* Channel c of n belongs to reporter c % CALLERS. Channel 0 starts first, the last one stops last. */
struct reporter {
    struct pipeline *pipeline;
    unsigned index;
};

static void *report(void *argument) {
    struct reporter *self = argument;
    uint64_t random = self->pipeline->seed + 17 * self->index;
    for (uint64_t i = 0; i < COLLECTIVES; i++) {
        struct work *work = &self->pipeline->queues[self->index][i % QUEUE];
        while (!atomic_load_explicit(&work->state, memory_order_acquire))
            sched_yield();
        void *handles[MAX_CHILDREN] = {NULL};
        unsigned first = self->index, turn = (unsigned)draw(&random);
        for (unsigned k = 0, n = work->children; k < n; k++) {
            unsigned c = (k + turn) % n;
            if (c % CALLERS != first)
                continue;
            handles[c] = comm_child_start(work->handle, (uint8_t)(c + 3), work->start + c);
        }
        for (unsigned k = 0, n = work->children; k < n; k++) {
            unsigned c = n - 1 - (k + turn) % n;
            if (c % CALLERS != first)
                continue;
            comm_child_timer(handles[c], work->stop - (n - 1 - c));
            comm_event_stop(handles[c]);
        }
        if (draw(&random) % 256 == 0)
            dawdle(&random);
        atomic_store_explicit(&work->state, 0, memory_order_release);
    }
    return NULL;
}

static void post(struct pipeline *pipeline, uint64_t i, void *handle, unsigned children, uint64_t exec) {
    for (unsigned q = 0; q < CALLERS; q++) {
        struct work *work = &pipeline->queues[q][i % QUEUE];
        while (atomic_load_explicit(&work->state, memory_order_acquire))
            sched_yield();
        work->handle = handle;
        work->children = children;
        work->start = 1000000 + i * 1000;
        work->stop = work->start + exec;
        atomic_store_explicit(&work->state, 1, memory_order_release);
    }
}

static uint64_t exec_of(uint64_t i) {
    return 100 + i % 700;
}

static void drain_events(struct dcc_segment *seg, uint64_t *n, uint8_t *seen) {
    static struct dcc_record batch[1024];
    size_t got = dcc_drain(seg, batch, 1024);
    for (size_t k = 0; k < got; k++) {
        uint64_t i = batch[k].dseq - 1;
        if (i >= COLLECTIVES || seen[i]++)
            fail("events: collective %llu recorded twice", (unsigned long long)i);
        if (batch[k].exec_ns != exec_of(i) || batch[k].start_ns != 1000000 + i * 1000 ||
            batch[k].bytes != 4 * (i + 1))
            fail("events: collective %llu: %llu ns from %llu, %llu bytes", (unsigned long long)i,
                 (unsigned long long)batch[k].exec_ns, (unsigned long long)batch[k].start_ns,
                 (unsigned long long)batch[k].bytes);
    }
    *n += got;
}

static void test_events(uint64_t seed) {
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 2, "stress", 1, 2, 0, NULL);
    if (!comm || comm_attach_tuner(6, 2, 2, 1, NULL) != comm)
        fail("events: tuner and profiler did not find each other");
    if (!comm->seg)
        fail("events: no channel; is there room in DYNAMICCL_SHM_DIR?");
    static struct pipeline pipeline;
    static uint8_t seen[COLLECTIVES];
    pipeline.comm = comm;
    pipeline.seed = seed;
    struct reporter reporters[CALLERS];
    pthread_t threads[CALLERS];
    for (unsigned i = 0; i < CALLERS; i++) {
        reporters[i] = (struct reporter){.pipeline = &pipeline, .index = i};
        threads[i] = begin(report, &reporters[i]);
    }
    uint64_t random = seed, records = 0;
    for (uint64_t i = 0; i < COLLECTIVES; i++) {
        float cost[DCC_ALGOS][DCC_PROTOS] = {{0}};
        int wanted = 0;
        unsigned children = 2 + (unsigned)(draw(&random) % (MAX_CHILDREN - 1));
        struct coll_event event = {.count = i + 1,
                                   .element_bytes = 4,
                                   .func = ALL_REDUCE,
                                   .algo = 1,
                                   .proto = 2,
                                   .channels = (uint8_t)children};
        comm_decide(comm, ALL_REDUCE, 4 * (i + 1), 1, (float **)(void *)cost, DCC_ALGOS, DCC_PROTOS, 0,
                    &wanted);
        void *handle = comm_coll_start(comm, &event);
        bool early = draw(&random) % 2;
        if (early)
            comm_event_stop(handle);
        post(&pipeline, i, handle, children, exec_of(i));
        if (!early)
            comm_event_stop(handle);
        if (draw(&random) % 64 == 0) /* once too often */
            comm_event_stop(handle);
        drain_events(comm->seg, &records, seen);
    }
    for (unsigned i = 0; i < CALLERS; i++)
        pthread_join(threads[i], NULL);
    drain_events(comm->seg, &records, seen);
    for (uint64_t before = 0; before != records;) {
        before = records;
        drain_events(comm->seg, &records, seen);
    }
    struct dcc_status status;
    dcc_status(comm->seg, &status);
    uint64_t dropped = status.dropped_full + status.dropped_busy + status.dropped_incomplete;
    if (records != status.records || records + dropped != COLLECTIVES || status.dropped_timer)
        fail("events: %llu records, %llu full, %llu busy, %llu incomplete, %llu bad timers of %d",
             (unsigned long long)records, (unsigned long long)status.dropped_full,
             (unsigned long long)status.dropped_busy, (unsigned long long)status.dropped_incomplete,
             (unsigned long long)status.dropped_timer, COLLECTIVES);
    if (records < COLLECTIVES / 2)
        fail("events: only %llu records", (unsigned long long)records);
    comm_detach_tuner(comm);
    comm_detach_profiler(comm);
    printf("events: %llu records from %d threads, %llu dropped\n", (unsigned long long)records, CALLERS,
           (unsigned long long)dropped);
}

/* ---- lost channels and late events ---- */

static void test_lost(uint64_t seed) {
    (void)seed;
    for (int round = 0; round < 3; round++) {
        struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 3, "lost", 1, 2, 0, NULL);
        if (!comm || !comm->seg)
            fail("lost: no channel");
        struct dcc_segment *seg = comm->seg;
        enum { LOST = 5000 };
        void *handles[LOST], *children[LOST];
        for (uint64_t i = 0; i < LOST; i++) {
            struct coll_event event = {
                .count = 1, .element_bytes = 4, .func = ALL_REDUCE, .channels = i % 3 ? 2 : 0};
            handles[i] = comm_coll_start(comm, &event);
            children[i] = comm_child_start(handles[i], 0, 10);
            comm_event_stop(handles[i]);
            /* Every other collective reports one channel of two, and the next to nothing. */
            comm_child_timer(children[i], 20);
            comm_event_stop(children[i]);
        }
        comm_end_measuring(comm);
        struct dcc_status status;
        dcc_status(seg, &status);
        uint64_t dropped =
            status.dropped_full + status.dropped_busy + status.dropped_incomplete + status.dropped_timer;
        if (status.records + dropped != LOST || status.dropped_incomplete == 0)
            fail("lost: %llu records and %llu dropped of %d", (unsigned long long)status.records,
                 (unsigned long long)dropped, LOST);
        comm_detach_profiler(comm);
        /* Whatever comes late falls on the floor, also once the memory serves another communicator. */
        comm = comm_attach_profiler(6, CHILDREN_GPU, 4, "next", 1, 2, 0, NULL);
        struct coll_event event = {.count = 1, .element_bytes = 4, .func = ALL_REDUCE, .channels = 2};
        void *live = comm_coll_start(comm, &event);
        for (uint64_t i = 0; i < LOST; i++) {
            comm_child_timer(children[i], 30);
            comm_event_stop(children[i]);
            comm_event_stop(handles[i]);
            comm_event_stop(comm_child_start(handles[i], 1, 5));
        }
        comm_event_stop(live);
        void *a = comm_child_start(live, 0, 100), *b = comm_child_start(live, 1, 101);
        comm_child_timer(a, 200);
        comm_child_timer(b, 201);
        comm_event_stop(a);
        comm_event_stop(b);
        struct dcc_record record;
        if (dcc_drain(comm->seg, &record, 1) != 1 || record.exec_ns != 101)
            fail("lost: a late event of another collective was counted in");
        comm_detach_profiler(comm);
    }
    printf("lost: 15000 collectives that never ended\n");
}

/* ---- decisions that are never launched ---- */

static int decide_on(struct comm *comm, uint64_t bytes) {
    float cost[DCC_ALGOS][DCC_PROTOS] = {{0}};
    int channels = 0;
    return comm_decide(comm, ALL_REDUCE, bytes, 1, (float **)(void *)cost, DCC_ALGOS, DCC_PROTOS, 0,
                       &channels);
}

/* A collective with one channel, from 100 to 200. */
static void run_channel(struct comm *comm, uint64_t bytes, void *api, uint8_t algo) {
    struct coll_event event = {.count = bytes,
                               .element_bytes = 1,
                               .api = api,
                               .func = ALL_REDUCE,
                               .algo = algo,
                               .proto = 2,
                               .channels = 1};
    void *handle = comm_coll_start(comm, &event);
    void *child = comm_child_start(handle, 0, 100);
    comm_child_timer(child, 200);
    comm_event_stop(child);
    comm_event_stop(handle);
}

/* What the join said, whatever the timers were like. */
static unsigned joined(struct dcc_record record) {
    return record.flags & ~(unsigned)DCC_RECORD_SURE;
}

static struct dcc_record run_one(struct comm *comm, uint64_t bytes) {
    struct dcc_record record = {0};
    run_channel(comm, bytes, NULL, 1);
    if (dcc_drain(comm->seg, &record, 1) != 1)
        fail("stale: no record");
    return record;
}

static void test_stale(uint64_t seed) {
    (void)seed;
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 5, "stale", 1, 2, 0, NULL);
    if (!comm || comm_attach_tuner(6, 5, 2, 1, NULL) != comm || !comm->seg)
        fail("stale: no channel");
    for (int i = 0; i < 1000; i++) {
        /* A third are only simulated; the operation belongs to the call just before it all the same. */
        decide_on(comm, 4096);
        if (i % 3 == 0)
            continue;
        struct dcc_record record = run_one(comm, 4096);
        if (record.dseq != comm->dseq || joined(record) != DCC_RECORD_DECIDED)
            fail("stale: call %llu taken for call %llu", (unsigned long long)comm->dseq,
                 (unsigned long long)record.dseq);
    }
    /* A graph: all decisions first, the operations later; then replays that nobody decided. */
    uint64_t first = comm->dseq + 1;
    for (int i = 0; i < 100; i++)
        decide_on(comm, 8192);
    uint8_t seen[100] = {0};
    for (int i = 0; i < 100; i++) {
        struct dcc_record record = run_one(comm, 8192);
        if (record.dseq < first || record.dseq >= first + 100 || seen[record.dseq - first]++)
            fail("stale: operation %d of the graph taken for call %llu", i, (unsigned long long)record.dseq);
    }
    for (int i = 0; i < 300; i++)
        if (joined(run_one(comm, 8192)) != 0)
            fail("stale: a replay found a decision");
    /* Parts of an aggregate, next to a decision of exactly their size: two records, the aggregate's when its
     * last part is there. */
    decide_on(comm, 3 << 20);
    decide_on(comm, 1 << 20);
    struct dcc_record records[5];
    if (joined(run_one(comm, 1 << 20)) != DCC_RECORD_DECIDED)
        fail("stale: an operation of a size that was decided is taken for a part");
    for (int i = 0; i < 3; i++)
        run_channel(comm, 1 << 20, NULL, 1);
    size_t n = dcc_drain(comm->seg, records, 5);
    if (n != 1 || joined(records[0]) != (DCC_RECORD_DECIDED | DCC_RECORD_AGGREGATE) ||
        records[0].bytes != 3 << 20)
        fail("stale: %zu records of an aggregate of 3", n);
    if (joined(run_one(comm, 1 << 20)) != 0)
        fail("stale: an operation that nobody decided found a decision");
    comm_detach_tuner(comm);
    comm_detach_profiler(comm);
    printf("stale: every operation found its own decision\n");
}

/* ---- groups ---- */

/* NCCL decides all of a group before it launches any of it: here two aggregates of one function, launched in
 * the order in which they were decided, with a decision of another group between groups that was only
 * simulated. */
static void test_groups(uint64_t seed) {
    (void)seed;
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 7, "groups", 1, 2, 0, NULL);
    if (!comm || comm_attach_tuner(6, 7, 2, 1, NULL) != comm || !comm->seg)
        fail("groups: no channel");
    for (int round = 0; round < 500; round++) {
        void *group = comm_group_api_start(), *api[5];
        for (int i = 0; i < 5; i++)
            api[i] = comm_api_start(comm, group);
        uint64_t first = comm->dseq + 1;
        decide_on(comm, 3 << 20);        /* 2 parts: 1 and 2 MiB */
        decide_on(comm, (4 << 20) + 64); /* 3 parts: 64 bytes, 2 and 2 MiB */
        run_channel(comm, 1 << 20, api[0], 1);
        run_channel(comm, 2 << 20, api[1], 1);
        run_channel(comm, 64, api[2], 1);
        run_channel(comm, 2 << 20, api[3], 1);
        run_channel(comm, 2 << 20, api[4], 1);
        struct dcc_record records[6];
        size_t n = dcc_drain(comm->seg, records, 6);
        if (n != 2 || records[0].dseq != first || records[1].dseq != first + 1 ||
            records[0].bytes != 3 << 20 || records[1].bytes != (4 << 20) + 64 ||
            records[0].flags != (DCC_RECORD_DECIDED | DCC_RECORD_AGGREGATE | DCC_RECORD_SURE))
            fail("groups: %zu records of two aggregates, the first of call %llu with flags %u", n,
                 (unsigned long long)(n ? records[0].dseq - first : 0), n ? records[0].flags : 0);
        comm_api_start(comm, comm_group_api_start());
        decide_on(comm, 1 << 20);
    }
    struct dcc_status status;
    dcc_status(comm->seg, &status);
    if (status.undecided || status.merged != 500 * 3)
        fail("groups: %llu undecided, %llu merged", (unsigned long long)status.undecided,
             (unsigned long long)status.merged);
    comm_detach_tuner(comm);
    comm_detach_profiler(comm);
    printf("groups: 1000 aggregates, each with its own decision\n");
}

/* ---- what NCCL gets wrong ---- */

/* NCCL passes over the start of a channel where the kernel runs between its two looks, and stops the handle
 * that it had from an earlier operation instead. That operation may be under way on other channels. */
static void test_passed_over(uint64_t seed) {
    (void)seed;
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 8, "passed over", 1, 2, 0, NULL);
    if (!comm || !comm->seg)
        fail("passed over: no channel");
    struct coll_event event = {.count = 1, .element_bytes = 4, .func = ALL_REDUCE, .channels = 2};
    struct dcc_record record;
    for (int i = 0; i < 3000; i++) {
        uint64_t at = 1000 + (uint64_t)i * 1000;
        void *one = comm_coll_start(comm, &event), *other = comm_coll_start(comm, &event);
        void *fast = comm_child_start(one, 0, at), *slow = comm_child_start(one, 1, at);
        comm_child_timer(fast, at + 100);
        comm_event_stop(fast);
        /* Of the other, only channel 1 is started in time. */
        void *child = comm_child_start(other, 1, at + 900);
        comm_child_timer(fast, at + 950);
        comm_event_stop(fast);
        comm_child_timer(child, at + 950);
        comm_event_stop(child);
        if (dcc_drain(comm->seg, &record, 1) != 0)
            fail("passed over: recorded before its last channel stopped");
        comm_child_timer(slow, at + 800);
        comm_event_stop(slow);
        comm_event_stop(one);
        comm_event_stop(other);
        if (dcc_drain(comm->seg, &record, 1) != 1 || record.exec_ns != 800)
            fail("passed over: %llu ns instead of 800", (unsigned long long)record.exec_ns);
    }
    struct dcc_status status;
    dcc_status(comm->seg, &status);
    if (status.dropped_busy || status.dropped_incomplete < 2000)
        fail("passed over: %llu given up, %llu found no slot", (unsigned long long)status.dropped_incomplete,
             (unsigned long long)status.dropped_busy);
    comm_detach_profiler(comm);
    printf("passed over: 3000 starts that never came\n");
}

/* Timers are sure until as many operations may have run as NCCL keeps timestamps. */
static void test_sure(uint64_t seed) {
    (void)seed;
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 9, "sure", 1, 2, 0, NULL);
    if (!comm || !comm->seg)
        fail("sure: no channel");
    for (int ahead = 0; ahead < 80; ahead++) {
        struct dcc_record record;
        struct coll_event event = {.count = 1, .element_bytes = 4, .func = ALL_REDUCE, .channels = 1};
        event.api = comm_api_start(comm, comm_group_api_start());
        void *handle = comm_coll_start(comm, &event);
        for (int i = 0; i < ahead; i++)
            comm_api_start(comm, comm_group_api_start());
        void *child = comm_child_start(handle, 0, 100);
        comm_child_timer(child, 200);
        comm_event_stop(child);
        comm_event_stop(handle);
        if (dcc_drain(comm->seg, &record, 1) != 1)
            fail("sure: no record");
        if (((record.flags & DCC_RECORD_SURE) != 0) != (ahead + 1 < 64))
            fail("sure: flags %u with %d operations behind", record.flags, ahead);
    }
    comm_detach_profiler(comm);
    printf("sure: timers of 63 operations are, of more are not\n");
}

/* ---- windows ---- */

enum { GOVERNED = 2, GOVERNED_ROUNDS = 20000, EVENTS = 0x42, OTHERS = 0x100 };

static int nccl_mask;
static _Atomic unsigned arrived;

static void call_once(struct comm *comm) {
    float cost[DCC_ALGOS][DCC_PROTOS] = {{1.0f}};
    int channels = 0;
    comm_decide(comm, ALL_REDUCE, CALL_BYTES, 1, (float **)(void *)cost, DCC_ALGOS, DCC_PROTOS, 0, &channels);
}

static bool events_are_on(void) {
    int mask = __atomic_load_n(&nccl_mask, __ATOMIC_RELAXED);
    if ((mask & OTHERS) != OTHERS || ((mask & EVENTS) != 0 && (mask & EVENTS) != EVENTS))
        fail("mask: %#x", mask);
    return mask & EVENTS;
}

static void meet(void) {
    unsigned turn = atomic_fetch_add(&arrived, 1) / GOVERNED;
    while (atomic_load(&arrived) / GOVERNED == turn)
        sched_yield();
}

/* All come to the edge of a window at once. */
static void *cross_edges(void *argument) {
    struct caller *self = argument;
    struct comm *comm = self->comm;
    uint64_t random = self->seed;
    for (int round = 0; round < GOVERNED_ROUNDS; round++) {
        comm->profiling_next = draw(&random) % 2;
        comm->dseq += DCC_WINDOW_CALLS - 1 - comm->dseq % DCC_WINDOW_CALLS;
        meet();
        call_once(comm);
        atomic_store(&self->stop, comm->wants_events);
        meet();
        bool wanted = false;
        for (struct caller *c = self->all; c < self->all + GOVERNED; c++)
            wanted |= atomic_load(&c->stop);
        if (comm->wants_events != comm->profiling_next || events_are_on() != wanted)
            fail("mask: events are %s", wanted ? "off, and wanted" : "on, and not wanted");
        meet();
    }
    return NULL;
}

/* Threads turn one mask on and off. When they stand still, it is on if any of them wants it. */
static void test_mask(uint64_t seed) {
    struct caller callers[GOVERNED];
    pthread_t threads[GOVERNED];
    uint64_t unprofiled = 0;
    nccl_mask = OTHERS; /* somebody else's bits */
    for (unsigned i = 0; i < GOVERNED; i++) {
        struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 20 + i, "mask", 1, 2, 0, NULL);
        if (!comm || comm_attach_tuner(6, 20 + i, 2, 1, NULL) != comm || !comm->seg)
            fail("mask: no channel");
        govern_begin(comm, &nccl_mask, EVENTS);
        callers[i] = (struct caller){.comm = comm, .seed = seed * GOVERNED + i, .all = callers};
    }
    for (unsigned i = 0; i < GOVERNED; i++)
        threads[i] = begin(cross_edges, &callers[i]);
    for (unsigned i = 0; i < GOVERNED; i++)
        pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < GOVERNED; i++) {
        struct dcc_status status;
        dcc_status(callers[i].comm->seg, &status);
        unprofiled += status.unprofiled;
        comm_detach_profiler(callers[i].comm);
        comm_detach_tuner(callers[i].comm);
    }
    if (events_are_on() || !unprofiled)
        fail("mask: on at the end");
    printf("mask: %d rounds, on and off as it was wanted\n", GOVERNED_ROUNDS);
}

/* NCCL counts what it does not profile, so the first operation after a pause may write over any timer. */
static void test_pause(uint64_t seed) {
    (void)seed;
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 30, "pause", 1, 2, 0, NULL);
    if (!comm || comm_attach_tuner(6, 30, 2, 1, NULL) != comm || !comm->seg)
        fail("pause: no channel");
    nccl_mask = OTHERS;
    govern_begin(comm, &nccl_mask, EVENTS);
    for (int turn = 0; turn < 2; turn++) {
        struct dcc_record record;
        struct coll_event event = {
            .count = CALL_BYTES / 4, .element_bytes = 4, .func = ALL_REDUCE, .channels = 1};
        event.api = comm_api_start(comm, comm_group_api_start());
        call_once(comm);
        void *handle = comm_coll_start(comm, &event);
        /* Nothing is profiled, until it is again. */
        dcc_govern(comm->seg, turn ? DCC_MOST_DUTY : 0);
        while (turn && events_are_on())
            call_once(comm);
        while (turn && !events_are_on())
            call_once(comm);
        comm_api_start(comm, comm_group_api_start());
        void *child = comm_child_start(handle, 0, 100);
        comm_child_timer(child, 200);
        comm_event_stop(child);
        if (dcc_drain(comm->seg, &record, 1) != 1)
            fail("pause: no record");
        if (((record.flags & DCC_RECORD_SURE) != 0) != (turn == 0))
            fail("pause: flags %u in turn %d", record.flags, turn);
    }
    comm_detach_profiler(comm);
    comm_detach_tuner(comm);
    printf("pause: no timer from before one is sure\n");
}

/* One collective in so many is timed, with all of its channels. */
static void test_timed(uint64_t seed) {
    (void)seed;
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 31, "timed", 1, 2, 0, NULL);
    if (!comm || !comm->seg)
        fail("timed: no channel");
    struct coll_event event = {.count = 1, .element_bytes = 4, .func = ALL_REDUCE, .channels = 1};
    unsigned timed = 0, children = 0;
    for (unsigned i = 0; i < 64 * DCC_TIMED_ONE_IN; i++) {
        struct dcc_record record;
        void *handle = comm_coll_start(comm, &event), *child = comm_child_start(handle, 0, 100);
        timed += is_timed_handle(handle);
        children += is_timed_handle(child);
        comm_child_timer(child, 200);
        comm_event_stop(child);
        comm_event_stop(handle);
        if (dcc_drain(comm->seg, &record, 1) != 1 || record.exec_ns != 100)
            fail("timed: no record, or of %llu ns", (unsigned long long)record.exec_ns);
    }
    if (timed < 63 || timed > 65 || children != timed || load(&comm->profile_ns, relaxed) == 0)
        fail("timed: %u, and %u channels", timed, children);
    comm_detach_profiler(comm);
    printf("timed: %u of %u collectives\n", timed, 64 * DCC_TIMED_ONE_IN);
}

/* ---- the job's reports ---- */

#define REPORTS_READ 2000

static _Atomic int listening;

static void *report_steps(void *seg) {
    uint64_t random = 1;
    for (uint64_t step = 1; atomic_load(&listening); step++) {
        dcc_report_step(seg, step, step * 3, (double)step / 2);
        dawdle(&random);
    }
    return NULL;
}

static void test_job(uint64_t seed) {
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 6, "job", 1, 2, 0, NULL);
    if (!comm || !comm->seg)
        fail("job: no channel");
    struct dcc_job_view view;
    if (!dcc_job(comm->seg, &view) || view.reports || view.faults)
        fail("job: a report before the first");
    pthread_t thread;
    atomic_store(&listening, 1);
    pthread_create(&thread, NULL, report_steps, comm->seg);
    for (uint64_t read = 0, last = 0; read < REPORTS_READ;) {
        dawdle(&seed);
        if (!dcc_job(comm->seg, &view) || view.reports == 0)
            continue;
        if (view.step != view.reports || view.iteration_ns != view.step * 3 ||
            view.loss != (double)view.step / 2 || view.step < last)
            fail("job: report %llu is of step %llu, %llu ns, loss %g, after %llu",
                 (unsigned long long)view.reports, (unsigned long long)view.step,
                 (unsigned long long)view.iteration_ns, view.loss, (unsigned long long)last);
        read += view.step != last;
        last = view.step;
    }
    atomic_store(&listening, 0);
    pthread_join(thread, NULL);
    comm_detach_profiler(comm);
    printf("job: %d reports, none of them read in parts\n", REPORTS_READ);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(uint64_t seed);
    } parts[] = {{"ring", test_ring},
                 {"agreement", test_agreement},
                 {"events", test_events},
                 {"lost", test_lost},
                 {"stale", test_stale},
                 {"groups", test_groups},
                 {"passed-over", test_passed_over},
                 {"sure", test_sure},
                 {"mask", test_mask},
                 {"pause", test_pause},
                 {"timed", test_timed},
                 {"job", test_job}};
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (argc < 2 || strcmp(argv[1], parts[i].name) == 0) {
            parts[i].run(seed);
            fflush(stdout);
        }
    return 0;
}
