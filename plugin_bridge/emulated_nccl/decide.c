#define _GNU_SOURCE
#include "decide.h"

#include <float.h>
#include <string.h>

#include "../gpu/times.h"
#include "log.h"
#include "names.h"
#include "release.h"

enum {
    WARP = 32,
    MAX_THREADS = 640,
    MAX_DIRECT_ARITY = 7,
    MAX_NVLS_ARITY = 32,
    BATCH_BYTES = 1024, /* of work items that one channel runs at once */
    CORRECTED_SIZES = 24,
};

#define UNAVAILABLE (-1.0f)

/* src/graph/tuning.cc: factor on a tree's bandwidth by protocol and log2(bytes / 64). */
static const float tree_correction[N_PROTOCOLS][CORRECTED_SIZES] = {
    {1.0f, 1.0f, 1.0f, 1.0f, .9f, .8f, .7f, .7f,  .7f,  .7f,  .6f,  .5f,
     .4f,  .4f,  .5f,  .6f,  .7f, .8f, .9f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f},
    {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, .9f, .8f, .8f, .8f, .7f,  .6f,  .6f,
     .6f,  .6f,  .6f,  .6f,  .8f,  .9f, .9f, .9f, .9f, 1.0f, 1.0f, 1.0f},
    {.9f, .9f, .9f, .9f, .9f, .9f, .9f, .8f, .7f, .6f, .6f, .5f,
     .5f, .5f, .5f, .6f, .7f, .8f, .7f, .7f, .8f, .9f, .9f, .9f},
};

static bool is_per_rank(enum nccl_func func) {
    return func == FUNC_ALL_GATHER || func == FUNC_REDUCE_SCATTER;
}

size_t tuner_bytes(const struct comm *comm, enum nccl_func func, size_t count, int type) {
    return type_bytes(type) * count * (is_per_rank(func) ? (size_t)comm->ranks : 1);
}

/* ---- costs ---- */

static bool available(float cost) {
    return cost >= 0.0f;
}

/* In single precision but for what NCCL itself computes in double: pairs can tie, and then the last bit
 * decides. */
static float cost_us(const struct comm *comm, enum nccl_func func, int algorithm, int protocol, size_t bytes,
                     int pipe_ops) {
    const struct constants *constants = comm->constants;
    float gb_per_s = constants->gb_per_s[func][algorithm][protocol];
    float latency_us = constants->latency_us[func][algorithm][protocol];
    if (gb_per_s == 0)
        return UNAVAILABLE;
    bool all_reduce = func == FUNC_ALL_REDUCE;
    int size = log2_down(bytes >> 6);
    bool newest = constants->compute_capability >= 100 && constants->flags & CONSTANTS_X86 &&
                  release()->corrects_nvls_tree;
    if (all_reduce && size >= 0 &&
        ((algorithm == ALGO_TREE && size < CORRECTED_SIZES - 1) ||
         (algorithm == ALGO_NVLS_TREE && size < CORRECTED_SIZES && newest)))
        gb_per_s *= tree_correction[protocol][size];
    if (algorithm == ALGO_RING && protocol == PROTO_SIMPLE && comm->nodes > 1 && all_reduce &&
        bytes / (constants->channels * (size_t)comm->ranks) >= 64)
        latency_us = (float)(latency_us * (constants->compute_capability < 80 ? 1.9 : 1.4));
    int per_batch = (int)(BATCH_BYTES / release()->coll_bytes);
    int count = algorithm == ALGO_RING ? pipe_ops : (pipe_ops + per_batch - 1) / per_batch;
    return latency_us * (float)count + (float)bytes / (1000 * gb_per_s);
}

static bool may_use(const struct comm *comm, const struct question *question, int algorithm) {
    bool collnet = algorithm == ALGO_COLLNET_DIRECT || algorithm == ALGO_COLLNET_CHAIN;
    bool nvls = algorithm == ALGO_NVLS || algorithm == ALGO_NVLS_TREE;
    if (collnet && (!question->collnet || comm->max_local_ranks > MAX_DIRECT_ARITY + 1))
        return false;
    if (nvls &&
        (!question->nvls || (question->sum->func != FUNC_ALL_REDUCE && comm->local_ranks > MAX_NVLS_ARITY)))
        return false;
    return algorithm != ALGO_NVLS || question->collnet || comm->nodes == 1;
}

/* Nothing may ask for what the virtual GPU has no time for. */
static bool has_times(const struct comm *comm, const struct question *question, int algorithm, int protocol) {
    const struct coll_task *task = question->first;
    for (int i = 0; i < question->n; i++, task = task->next)
        if (!times_has(comm->number, (uint32_t)task->func,
                       tuner_bytes(comm, task->func, task->count, task->type), algorithm, protocol))
            return false;
    return true;
}

static void fill_costs(const struct comm *comm, const struct question *question, size_t bytes,
                       cost_table cost) {
    for (int a = 0; a < N_ALGORITHMS; a++)
        for (int p = 0; p < N_PROTOCOLS; p++) {
            bool may = a < release()->algorithms && may_use(comm, question, a);
            float us =
                may ? cost_us(comm, question->sum->func, a, p, bytes, question->pipe_ops) : UNAVAILABLE;
            cost[a][p] = available(us) && has_times(comm, question, a, p) ? us : UNAVAILABLE;
        }
}

/* ---- the choice ---- */

/* The first smallest entry that is not negative, algorithms outermost. */
static nccl_result choose(struct coll_task *task, const cost_table offered, const cost_table cost,
                          float *us) {
    *us = FLT_MAX;
    task->algorithm = ALGO_UNDEFINED;
    task->protocol = PROTO_UNDEFINED;
    for (int a = 0; a < release()->algorithms; a++)
        for (int p = 0; p < N_PROTOCOLS; p++)
            if (available(cost[a][p]) && cost[a][p] < *us) {
                task->algorithm = a;
                task->protocol = p;
                *us = cost[a][p];
            }
    if (task->algorithm == ALGO_UNDEFINED)
        return fail(NCCL_INTERNAL_ERROR, "No algorithm/protocol available for function %s with datatype %s.",
                    func_name(task->func), type_name(task->type));
    if (!available(offered[task->algorithm][task->protocol]))
        return fail(
            NCCL_INTERNAL_ERROR,
            "the tuner wrote a cost over -1: %s/%s is not available for %s, and NCCL does not check again",
            algorithm_name(task->algorithm), protocol_name(task->protocol), func_name(task->func));
    return NCCL_SUCCESS;
}

static int direct_channels(const struct constants *constants, size_t bytes, int channels, int threads,
                           size_t thread_bytes) {
    bool starved = true;
    for (int until = 16; until >= 1 && starved; until /= 2)
        for (;;) {
            starved = bytes < (size_t)channels * (size_t)threads * constants->collnet_heads * thread_bytes;
            if (!starved || channels <= until)
                break;
            if (channels == until + until / 2)
                thread_bytes /= 2;
            channels--;
        }
    return channels;
}

/* The most channels that it may have, and the warps of each. */
static void size_blocks(const struct comm *comm, struct coll_task *task, size_t bytes) {
    const struct constants *constants = comm->constants;
    const int a = task->algorithm, p = task->protocol;
    int channels = (int)constants->channels, threads = constants->max_threads[a][p];
    size_t thread_bytes = (size_t)constants->thread_bytes[a][p];
    bool nvls = a == ALGO_NVLS || a == ALGO_NVLS_TREE;
    if (a == ALGO_COLLNET_DIRECT) {
        channels = direct_channels(constants, bytes, channels, threads, thread_bytes);
    } else if (nvls) {
        int most = (int)constants->nvls_channels;
        channels = a == ALGO_NVLS && comm->nodes > 1 && most > channels ? channels : most;
    } else {
        while (channels > 1 && bytes < (size_t)channels * (size_t)threads * thread_bytes)
            channels--;
        while (bytes < (size_t)channels * (size_t)threads * thread_bytes && threads % 128 == 0)
            threads /= 2;
    }
    if (a == ALGO_RING && p == PROTO_SIMPLE)
        threads += WARP;
    if (threads < 3 * WARP)
        threads = 3 * WARP;
    if (a == ALGO_TREE || a == ALGO_PAT)
        threads = MAX_THREADS;
    task->max_channels = channels;
    task->warps = threads / WARP;
}

/* ---- the tuner ---- */

static nccl_result check_answer(const struct comm *comm, const struct coll_task *task,
                                const cost_table offered, int channels, int algorithm, int protocol) {
    if (channels != (int8_t)channels || channels < 0)
        return fail(NCCL_INTERNAL_ERROR,
                    "the tuner asked for %d channels, which does not fit NCCL's signed 8-bit field",
                    channels);
    /* 2.21 takes a v2 answer unchecked, later releases ignore an impossible one: neither is what was meant.
     */
    bool none = algorithm == ALGO_UNDEFINED && protocol == PROTO_UNDEFINED;
    if (!none && !(algorithm >= 0 && algorithm < release()->algorithms && protocol >= 0 &&
                   protocol < N_PROTOCOLS && available(offered[algorithm][protocol])))
        return fail(NCCL_INTERNAL_ERROR,
                    "the v2 tuner asked for algorithm %d, protocol %d, which is not available", algorithm,
                    protocol);
    bool collnet = task->algorithm == ALGO_COLLNET_DIRECT || task->algorithm == ALGO_COLLNET_CHAIN ||
                   (task->algorithm == ALGO_NVLS && comm->nodes > 1);
    if (collnet && channels > (int)comm->constants->channels)
        return fail(
            NCCL_INTERNAL_ERROR,
            "the tuner asked for %d channels for %s, which NCCL does not clamp; the communicator has %u",
            channels, algorithm_name(task->algorithm), comm->constants->channels);
    return NCCL_SUCCESS;
}

static bool buffers_registered(const struct comm *comm, const struct coll_task *task) {
    if (comm->planner.graph)
        return true;
    size_t bytes = type_bytes(task->type) * task->count, all = bytes * (size_t)comm->ranks;
    return is_registered(comm, task->send, task->func == FUNC_REDUCE_SCATTER ? all : bytes) &&
           is_registered(comm, task->recv, task->func == FUNC_ALL_GATHER ? all : bytes);
}

nccl_result decide(struct comm *comm, const struct question *question, struct nccl_sim_info *simulated) {
    struct coll_task *task = question->sum;
    const size_t bytes = tuner_bytes(comm, task->func, task->count, task->type);
    cost_table offered, cost;
    int channels = 0, algorithm = ALGO_UNDEFINED, protocol = PROTO_UNDEFINED;
    fill_costs(comm, question, bytes, offered);
    memcpy(cost, offered, sizeof(cost));
    if (comm->tuner) {
        nccl_result result =
            comm->tuner->get_coll_info(comm->tuner_context, (int)task->func, bytes, question->pipe_ops, cost,
                                       buffers_registered(comm, task), &channels, &algorithm, &protocol);
        if (result != NCCL_SUCCESS)
            return fail(result, "getCollInfo returned %d for %s of %zu bytes; NCCL fails the collective",
                        result, func_name(task->func), bytes);
    }
    float us;
    nccl_result result = choose(task, offered, cost, &us);
    if (result == NCCL_SUCCESS)
        result = check_answer(comm, task, offered, channels, algorithm, protocol);
    if (result != NCCL_SUCCESS)
        return result;
    size_blocks(comm, task, bytes);
    task->own = channels == 0 && algorithm == ALGO_UNDEFINED && memcmp(cost, offered, sizeof(cost)) == 0;
    task->asked = channels;
    if (channels != 0)
        task->max_channels = channels;
    if (simulated)
        simulated->estimated_us = us;
    return NCCL_SUCCESS;
}
