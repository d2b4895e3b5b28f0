/* Profiler events on several threads, channels that are lost, events that come late. */
#include "stress.h"

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

void test_events(uint64_t seed) {
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

void test_lost(uint64_t seed) {
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
