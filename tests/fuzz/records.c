/* The profiler's events in any order, with any description, and what the reader then finds: every collective
 * that began is one record, or counted as one that has none. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "comm.h"
#include "nccl.h"
#include "reader.h"
#include "scribble.h"

#define MOST_OPS 256
#define LONGEST_NS (3600ull * 1000000000ull)

static uint64_t drained[SEGMENTS];

static uint64_t host_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void check(const struct dcc_segment *seg, const struct dcc_record *record, uint64_t position) {
    MUST(atomic_load(&record->ticket) == position + 1);
    MUST(record->exec_ns > 0 && record->exec_ns <= LONGEST_NS);
    /* When it was heard of, modulo 2^32: not long ago. */
    uint32_t heard = record->clock + (uint32_t)(record->start_ns + record->exec_ns);
    if (record->timing == DCC_TIMING_GPU)
        MUST((uint32_t)host_ns() - heard < 1u << 31);
    else
        MUST(record->clock == 0);
    MUST(record->func < DCC_FUNCS && record->timing >= DCC_TIMING_GPU && record->timing <= DCC_TIMING_PROXY);
    MUST(record->asked_algo == 255 && record->asked_proto == 255 && record->asked_channels == 0);
    if (record->flags & DCC_RECORD_DECIDED) {
        MUST(record->dseq > 0 && record->dseq <= atomic_load(&seg->plugin.dseq));
        MUST(record->key < DCC_KEYS && record->key / (2 * DCC_BINS) == record->func);
    } else {
        MUST(record->dseq == 0 && record->key == 0 && !(record->flags & DCC_RECORD_AGGREGATE));
    }
    MUST(record->version == 0 && !(record->flags & DCC_RECORD_APPLIED));
}

static void drain(struct dcc_segment *seg, size_t most) {
    struct dcc_record out[16];
    uint64_t tail = atomic_load(&seg->runner.tail);
    size_t n = dcc_drain(seg, out, most < 16 ? most : 16);
    for (size_t i = 0; i < n; i++)
        check(seg, &out[i], tail + i);
    drained[memory_index(seg)] += n;
}

/* Other collectives have been measured meanwhile: slots come round again. */
static void others(struct comm *comm, struct input *in) {
    static const uint64_t steps[] = {1, 4, 511, 512, 1020, 1023, 1024, 65536 * 1024ull - 1};
    comm->next_slot += steps[take8(in) % 8];
}

static void play(struct input *in) {
    uint8_t what = take8(in);
    struct rank *rank = &ranks[(what >> 6) % RANKS];
    struct comm *comm = rank->profiler;
    struct dcc_segment *seg = comm ? comm->seg : NULL;
    switch (what % 16) {
    case 0:
        nccl_attach_profiler(rank, in);
        break;
    case 1:
        nccl_detach_profiler(rank);
        break;
    case 2:
        nccl_attach_tuner(rank, in);
        break;
    case 3:
        nccl_detach_tuner(rank);
        break;
    case 4:
    case 5:
        nccl_decide(rank, in);
        break;
    case 6:
        if (seg)
            drain(seg, take8(in));
        break;
    case 7:
        if (seg)
            others(comm, in);
        break;
    case 8:
        nccl_state(rank, in);
        break;
    case 9:
        if (seg) /* the ring is almost full: a reader that is slow */
            atomic_store(&seg->runner.tail, atomic_load(&seg->head) - DCC_RING_RECORDS + take8(in) % 4);
        break;
    case 10:
        if (seg) /* another thread reports this collective's channels from now on */
            atomic_store(&comm->slots[(comm->next_slot - 1) % COMM_SLOTS].owner, 1);
        break;
    case 11:
        if (seg) /* a thread was put to sleep at the start of a collective, or goes on */
            atomic_store(&comm->starting, take8(in) & 1);
        break;
    case 12:
    case 13:
        nccl_stop(rank, in);
        break;
    case 14:
        nccl_group(rank, in);
        break;
    default:
        nccl_start(rank, in);
    }
    if (seg)
        MUST(atomic_load(&seg->head) - atomic_load(&seg->runner.tail) <= DCC_RING_RECORDS);
}

static void account(unsigned i, uint64_t from) {
    struct dcc_segment *seg = memory_segment(i);
    struct dcc_plugin_words *p = &seg->plugin;
    uint64_t records = atomic_load(&seg->head) - from;
    uint64_t lost = atomic_load(&p->dropped_full) + atomic_load(&p->dropped_busy) +
                    atomic_load(&p->dropped_incomplete) + atomic_load(&p->dropped_timer);
    MUST(begun[i] == records + lost + atomic_load(&p->merged) + atomic_load(&p->spared));
    MUST(atomic_load(&p->undecided) <= records);
    /* What a slow reader has not read by now lies where it was. */
    uint64_t tail = atomic_load(&seg->runner.tail);
    if (tail < from || tail - from > records)
        atomic_store(&seg->runner.tail, tail = from);
    for (uint64_t left; (left = atomic_load(&seg->head) - atomic_load(&seg->runner.tail)) > 0;) {
        uint64_t before = atomic_load(&seg->runner.tail);
        drain(seg, 16);
        MUST(atomic_load(&seg->runner.tail) - before == (left < 16 ? left : 16));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    nccl_reset();
    memset(drained, 0, sizeof drained);
    nccl_attach_profiler(&ranks[0], &in);
    nccl_attach_tuner(&ranks[0], &in);
    for (unsigned i = 0; more(&in) && i < MOST_OPS; i++)
        play(&in);
    nccl_end();
    for (unsigned i = 0; i < SEGMENTS; i++)
        if (memory_ring_of(i) != UINT64_MAX)
            account(i, memory_ring_of(i));
    memory_clean();
    return 0;
}
