/* The plugin, while another process writes what it likes into the words and tables of its segment: between
 * calls, in the middle of one, and while it waits at a hold. */
#include "comm.h"
#include "nccl.h"
#include "reader.h"
#include "scribble.h"

#define MOST_OPS 64

static void take_for_runner(struct dcc_segment *seg, struct input *in, struct dcc_table *table) {
    take_table(in, table);
    for (unsigned slot = 0; slot < DCC_SLOTS; slot++)
        memory_table_dirty(seg, slot);
}

/* What a runner does, on words that need not be its own. */
static void serve(struct dcc_segment *seg, struct input *in) {
    static struct dcc_table table;
    uint64_t hold_at, digest;
    struct dcc_offer offer;
    struct dcc_record records[8];
    switch (take8(in) % 8) {
    case 0:
        take_for_runner(seg, in, &table);
        dcc_prepare(seg, &table, take8(in), &hold_at, &digest);
        break;
    case 1:
        dcc_decide(seg, take(in, 1), take_word(in, seg));
        break;
    case 2:
        dcc_fold(seg);
        break;
    case 3:
        dcc_join_in_band(seg);
        take_for_runner(seg, in, &table);
        dcc_stage(seg, &table);
        break;
    case 4:
        dcc_offer(seg, &offer);
        break;
    case 5:
        dcc_take_offer(seg);
        break;
    case 6:
        dcc_drain(seg, records, 8);
        break;
    default:
        dcc_out_of_step(seg);
    }
}

static void play(struct input *in) {
    uint8_t what = take8(in);
    struct rank *rank = &ranks[(what >> 6) % RANKS];
    struct comm *comm = rank->tuner ? rank->tuner : rank->profiler;
    struct dcc_segment *seg = comm ? comm->seg : NULL;
    switch (what % 16) {
    case 0:
        nccl_attach_tuner(rank, in);
        break;
    case 1:
        nccl_attach_profiler(rank, in);
        break;
    case 2:
        nccl_detach_tuner(rank);
        break;
    case 3:
        nccl_detach_profiler(rank);
        break;
    case 4:
    case 5:
    case 6:
        nccl_decide(rank, in);
        break;
    case 7:
        nccl_chunk(rank, in);
        break;
    case 8:
        nccl_start(rank, in);
        break;
    case 9:
        nccl_stop(rank, in);
        break;
    case 10:
        if (seg)
            serve(seg, in);
        break;
    case 11:
        if (seg)
            scribble_later(seg, in);
        break;
    case 13:
        nccl_group(rank, in);
        break;
    case 12:
        /* As after many calls. */
        if (comm && comm == rank->tuner && seg)
            atomic_store(&seg->plugin.dseq, comm->dseq += take(in, 2));
        break;
    default:
        if (seg)
            scribble(seg, in);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    nccl_reset();
    nccl_attach_profiler(&ranks[0], &in);
    nccl_attach_tuner(&ranks[0], &in);
    for (unsigned i = 0; more(&in) && i < MOST_OPS; i++)
        play(&in);
    nccl_end();
    scribble_never();
    memory_clean();
    return 0;
}
