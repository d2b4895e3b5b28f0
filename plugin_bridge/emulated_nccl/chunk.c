#define _GNU_SOURCE
#include "decide.h"
#include "log.h"
#include "names.h"

enum {
    STEPS = 8,           /* slots of a buffer */
    PIPELINED_STEPS = 4, /* that ring/simple fills at once */
    LL128_LINE = 16,     /* words, of which */
    LL128_DATA = 15,     /* carry data */
    KIB = 1 << 10,
};

/* Least bytes, and what chunks are rounded down to: a line of LL; 32 lanes of 8 words of LL128. */
static size_t grain_of(int protocol) {
    static const size_t grains[N_PROTOCOLS] = {16, 32 * 8 / LL128_LINE * LL128_DATA * 8, 512};
    return grains[protocol];
}

/* What the buffer holds. */
static size_t buffer_limit(const struct comm *comm, const struct coll_task *task) {
    size_t bytes = comm->constants->buffer_bytes[task->protocol] / STEPS;
    bool pipelined = task->func != FUNC_BROADCAST && task->func != FUNC_REDUCE;
    if (task->protocol == PROTO_SIMPLE && task->algorithm == ALGO_RING && pipelined)
        bytes *= PIPELINED_STEPS;
    if (task->protocol == PROTO_LL)
        bytes /= 2;
    if (task->protocol == PROTO_LL128)
        bytes = bytes / LL128_LINE * LL128_DATA;
    return bytes;
}

/* Halved until there are `least` of them, but not below `until`. */
static size_t halve(size_t chunk, size_t until, size_t bytes, size_t streams, size_t least) {
    while (chunk > until && bytes / (streams * chunk) < least)
        chunk /= 2;
    return chunk;
}

static size_t collnet_chunk(const struct comm *comm, int algorithm, size_t chunk, size_t bytes,
                            size_t channels) {
    const struct constants *constants = comm->constants;
    size_t depth = constants->collnet_chain_depth;
    if (algorithm == ALGO_COLLNET_DIRECT) {
        depth = constants->collnet_depth;
        channels *= constants->collnet_heads;
    } else {
        chunk = smaller(256 * KIB, constants->buffer_bytes[PROTO_SIMPLE] / STEPS);
    }
    chunk = halve(chunk, 128 * KIB, bytes, channels, depth * 64);
    chunk = halve(chunk, 64 * KIB, bytes, channels, depth * 8);
    return halve(chunk, 32 * KIB, bytes, channels, algorithm == ALGO_COLLNET_DIRECT ? depth * 8 : depth);
}

/* A chunk of `most` needs `rounds` of it from every stream. */
static size_t cap(size_t chunk, size_t most, size_t bytes, size_t streams, size_t rounds) {
    return bytes < rounds * streams * chunk && chunk > most ? most : chunk;
}

static size_t nvls_chunk(const struct comm *comm, const struct coll_task *task, size_t chunk, size_t bytes,
                         size_t channels) {
    const struct constants *constants = comm->constants;
    size_t streams = channels * constants->nvls_heads;
    if (task->algorithm == ALGO_NVLS_TREE) {
        chunk = smaller(constants->nvls_chunk_bytes, constants->nvls_tree_chunk_bytes);
        chunk = cap(chunk, 256 * KIB, bytes, streams, 32);
        chunk = cap(chunk, 128 * KIB, bytes, streams, 16);
        chunk = cap(chunk, 64 * KIB, bytes, streams, 4);
        return cap(chunk, 32 * KIB, bytes, streams, 1);
    }
    if (task->registered_nvls && task->func != FUNC_ALL_REDUCE)
        return constants->buffer_bytes[PROTO_SIMPLE] / STEPS;
    bool slow = comm->nodes > 1 && constants->gb_per_s[FUNC_ALL_REDUCE][ALGO_NVLS][PROTO_SIMPLE] < 150;
    chunk = smaller(chunk, slow ? 32 * KIB : constants->nvls_chunk_bytes);
    chunk = cap(chunk, 64 * KIB, bytes, streams, 64);
    chunk = cap(chunk, 32 * KIB, bytes, streams, 8);
    return cap(chunk, 16 * KIB, bytes, streams, 2);
}

static size_t tree_ll128_chunk(const struct comm *comm, size_t chunk, size_t bytes, size_t channels) {
    float local = (float)comm->ranks / (float)comm->nodes;
    float steps = (float)(1 + log2_down((uint64_t)comm->nodes) + 0.1 * local);
    while (chunk > 128 * KIB && (float)(bytes / (channels * chunk)) < steps * 64 / local)
        chunk /= 2;
    while (chunk > 32 * KIB && (float)(bytes / (channels * chunk)) < steps * 16 / local)
        chunk /= 2;
    return chunk;
}

/* NCCL's own. */
static size_t own_chunk(const struct comm *comm, const struct coll_task *task, size_t limit, size_t bytes,
                        size_t channels) {
    size_t chunk = limit;
    switch (task->algorithm) {
    case ALGO_COLLNET_DIRECT:
    case ALGO_COLLNET_CHAIN:
        return collnet_chunk(comm, task->algorithm, chunk, bytes, channels);
    case ALGO_NVLS:
    case ALGO_NVLS_TREE:
        return nvls_chunk(comm, task, chunk, bytes, channels);
    case ALGO_TREE:
        return task->protocol == PROTO_LL128 ? tree_ll128_chunk(comm, chunk, bytes, channels) : chunk;
    case ALGO_PAT:
        while (chunk > 64 * KIB && chunk * channels * (task->func == FUNC_ALL_GATHER ? 32 : 16) > bytes)
            chunk /= 2;
        return chunk;
    default:
        return chunk;
    }
}

nccl_result decide_chunk(struct comm *comm, const struct coll_task *task, int channels, size_t bytes,
                         uint32_t *chunk_bytes) {
    const size_t grain = grain_of(task->protocol), limit = buffer_limit(comm, task);
    size_t chunk = own_chunk(comm, task, limit, bytes, (size_t)channels);
    if (comm->tuner && comm->tuner->get_chunk_size) {
        nccl_result result = comm->tuner->get_chunk_size(comm->tuner_context, (int)task->func, bytes,
                                                         task->algorithm, task->protocol, channels, &chunk);
        if (result != NCCL_SUCCESS)
            return fail(result, "getChunkSize returned %d; NCCL fails the collective", result);
        chunk = smaller(chunk, limit);
        if (chunk < grain)
            return fail(
                NCCL_INTERNAL_ERROR,
                "getChunkSize returned %zu bytes for %s/%s, less than one grain of %zu: NCCL would divide by "
                "zero",
                chunk, algorithm_name(task->algorithm), protocol_name(task->protocol), grain);
    }
    *chunk_bytes = (uint32_t)(chunk / grain * grain);
    return NCCL_SUCCESS;
}
