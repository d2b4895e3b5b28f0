/* One table of any content: whether it is valid, and what the plugin does with a call under it. The rules are
 * written down here anew, from docs/channel.md. */
#include <string.h>

#include "comm.h"
#include "memory.h"
#include "reader.h"
#include "scribble.h"
#include "table.h"

#define MOST_OPS 16
#define ALGOS 7
#define PROTOS 3

extern const struct nccl_tuner_v6 ncclTunerPlugin_v6;

struct call {
    int func, pipe_ops;
    size_t bytes;
    float cost[ALGOS][PROTOS];
};

struct answer {
    int algo, proto; /* whose cost becomes 0; -1: none */
    int channels;    /* 0: left alone */
    size_t chunk;    /* 0: left alone */
};

static bool valid(const struct dcc_table *t, uint64_t version) {
    return t->magic == 0x31425443 && t->abi == 6 && t->version == version && t->apply < 2 &&
           t->digest == model_digest(t);
}

/* Eight bins an octave, exact up to 7 bytes, none above 2^41. */
static uint32_t model_key(const struct call *call) {
    uint64_t bytes = call->bytes;
    uint32_t bin = 0, octave = 0;
    while (bytes >> octave >= 16)
        octave++;
    bin = bytes < 8 ? (uint32_t)bytes : (octave + 1) * 8 + (uint32_t)((bytes >> octave) - 8);
    if (bin > 311)
        bin = 311;
    return (uint32_t)(call->func * 2 + (call->pipe_ops > 1)) * 312 + bin;
}

static bool clamped(int algo, bool several_nodes) {
    return algo != 2 && algo != 3 && !(algo == 4 && several_nodes);
}

static struct answer model(const struct dcc_table *t, bool whole, const struct call *call, bool several) {
    struct answer none = {-1, -1, 0, 0}, it = none;
    if (!whole || !t->apply || (unsigned)call->func > 4)
        return none;
    const struct dcc_entry *e = &t->entries[model_key(call)];
    if (e->set != 1 || e->path || e->channels > t->max_channels || e->channels > 64)
        return none;
    int cheapest = -1;
    float least = 0;
    for (int i = 0; i < ALGOS * PROTOS; i++) {
        float cost = call->cost[i / PROTOS][i % PROTOS];
        if (cost >= 0 && (cheapest < 0 || cost < least)) {
            cheapest = i / PROTOS;
            least = cost;
        }
    }
    if (e->algo == 255 && e->proto == 255) {
        it.channels = clamped(cheapest, several) ? e->channels : 0;
        return it;
    }
    if (e->algo >= ALGOS || e->proto >= PROTOS || !(call->cost[e->algo][e->proto] >= 0))
        return none;
    it.algo = e->algo;
    it.proto = e->proto;
    it.channels = clamped(e->algo, several) ? e->channels : 0;
    if (e->chunk_log2 > 0 && e->chunk_log2 <= 26) {
        size_t grain = (size_t[]){16, 1920, 512}[e->proto], asked = (size_t)1 << e->chunk_log2;
        it.chunk = asked < grain ? grain : asked / grain * grain;
    }
    return it;
}

static void call_and_compare(struct comm *comm, const struct dcc_table *t, bool whole, struct input *in) {
    uint8_t what = take8(in);
    uint32_t offered = what & 32 ? (uint32_t)take(in, 3) : UINT32_MAX;
    struct call call = {what % 8 - 1, what >> 6, take_bytes(in), {{0}}};
    float cost[ALGOS][PROTOS];
    for (int i = 0; i < ALGOS * PROTOS; i++)
        call.cost[i / PROTOS][i % PROTOS] = offered >> i & 1 ? (float)((i * 5 + what) % 13) : -1.0f;
    memcpy(cost, call.cost, sizeof cost);
    int channels = -7;
    struct answer expected = model(t, whole, &call, comm->several_nodes);
    MUST(ncclTunerPlugin_v6.getCollInfo(comm, call.func, call.bytes, call.pipe_ops, (float **)cost, ALGOS,
                                        PROTOS, 0, &channels) == 0);
    if (expected.algo >= 0)
        call.cost[expected.algo][expected.proto] = 0;
    MUST(memcmp(cost, call.cost, sizeof cost) == 0);
    MUST(channels == (expected.channels ? expected.channels : -7));
    size_t chunk = 12345;
    if (expected.algo >= 0) {
        MUST(ncclTunerPlugin_v6.getChunkSize(comm, call.func, call.bytes, expected.algo, expected.proto, 4,
                                             &chunk) == 0);
        MUST(chunk == (expected.chunk ? expected.chunk : 12345));
    }
}

/* Each call is either applied or counted under what kept it from being. */
static void account(const struct dcc_segment *seg, uint64_t calls) {
    uint64_t sum = atomic_load(&seg->plugin.applied);
    for (int i = 0; i < DCC_CAUSES; i++)
        sum += atomic_load(&seg->plugin.passthrough[i]);
    MUST(sum <= calls && atomic_load(&seg->plugin.dseq) == calls);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct dcc_table copy;
    struct input in = {data, data + size};
    uint8_t how = take8(&in);
    void *context;
    MUST(ncclTunerPlugin_v6.init(&context, 7, 8, 1 + (how & 1), NULL, NULL, NULL) == 0);
    struct comm *comm = context;
    struct dcc_segment *seg = comm->seg;
    unsigned slot = how >> 1 & 3;
    if (slot == DCC_SLOTS)
        slot = take8(&in);
    struct dcc_table *t = &seg->tables[slot % DCC_SLOTS];
    memory_table_dirty(seg, slot % DCC_SLOTS);
    take_table(&in, t);
    for (unsigned i = how >> 3 & 3; i > 0; i--) { /* bits that flip after it was written */
        size_t at = (how & 32 ? take(&in, 2) : take(&in, 1)) % sizeof *t;
        ((uint8_t *)t)[at] ^= take8(&in);
    }
    uint64_t version = how & 64 ? take(&in, 7) : t->version & (UINT64_MAX >> 8);
    uint64_t word = version << 8 | slot;
    bool is_valid = valid(t, version), whole = word && slot < DCC_SLOTS && is_valid;
    atomic_store(&seg->runner.base, word);
    if (how & 128) {
        MUST(dcc_table_valid(t, version) == is_valid);
        MUST(dcc_table(seg, &copy) == whole);
    }
    uint64_t calls = 0;
    for (; more(&in) && calls < MOST_OPS; calls++)
        call_and_compare(comm, t, whole, &in);
    account(seg, calls);
    ncclTunerPlugin_v6.finalize(context);
    memory_clean();
    return 0;
}
