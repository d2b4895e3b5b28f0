/* Decisions and the events that belong to them, whatever NCCL makes of them. */
#include "stress.h"

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

void test_stale(uint64_t seed) {
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
void test_groups(uint64_t seed) {
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
void test_passed_over(uint64_t seed) {
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
void test_sure(uint64_t seed) {
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
