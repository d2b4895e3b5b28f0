/* Windows of calls that are profiled, and what times itself. */
#include "stress.h"

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
void test_mask(uint64_t seed) {
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
void test_pause(uint64_t seed) {
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
void test_timed(uint64_t seed) {
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
