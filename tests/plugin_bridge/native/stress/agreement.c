/* Tables that come into force while calls go on. */
#include "stress.h"

enum { VERSIONS = 2500, KEPT = 1 << 16 };

/* What getCollInfo did at call d: which version's table, if any. Version v asks for 1 + v % 60 channels. */
static _Atomic uint32_t used[KEPT];

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

void test_agreement(uint64_t seed) {
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
