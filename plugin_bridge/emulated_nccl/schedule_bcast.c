/* Broadcasts of several roots in one group are one kernel (src/scheduler/allgatherv_sched.cc). The tuner is
 * asked about an all-gather of the largest; of its answer the protocol and the channels count. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "decide.h"
#include "layout.h"
#include "names.h"
#include "proxy.h"
#include "schedule.h"

enum { STEPS = 8, MAX_AT_ONCE = (16 << 10) / BCAST_BYTES - 1, PER_EXTENSION = 64, ALIGN = 256 };

/* The next of each root, as many as fit. */
static int next_batch(const struct comm *comm, const struct plan *plan, size_t *all, size_t *largest) {
    int n = 0;
    *all = *largest = 0;
    for (int root = comm->planner.least_root; root <= comm->planner.most_root; root++) {
        const struct bcast_task *task = comm->peers[root].bcast.head;
        if (task == NULL)
            continue;
        int batches = (int)comm->constants->channels * ((n + PER_EXTENSION) / PER_EXTENSION);
        if (!layout_fits(plan, batches, (size_t)(n + 1) * BCAST_BYTES) || n + 1 > MAX_AT_ONCE)
            break;
        *all += task->bytes;
        *largest = larger(*largest, task->bytes);
        n++;
    }
    return n;
}

static void take(struct comm *comm, int n) {
    comm->planner.n_bcasts -= n;
    for (int root = comm->planner.least_root; n > 0; root++) {
        struct bcast_list *list = &comm->peers[root].bcast;
        if (list->head == NULL)
            continue;
        struct bcast_task *task = list->head;
        POP(list);
        free(task);
        n--;
    }
}

/* How many of the first n broadcasts have something in a part of their bytes, which is a channel's. */
static int in_part(const struct comm *comm, int n, size_t part, size_t parts) {
    int found = 0;
    for (int root = comm->planner.least_root; n > 0; root++) {
        const struct bcast_task *task = comm->peers[root].bcast.head;
        if (task == NULL)
            continue;
        const size_t bytes = divide_up(task->bytes, parts);
        found += divide_up(part * bytes, ALIGN) * ALIGN < task->bytes;
        n--;
    }
    return found;
}

nccl_result schedule_bcasts(struct comm *comm, struct plan *plan) {
    size_t all, largest;
    if (plan->n_batches != 0)
        return NCCL_SUCCESS;
    int n = next_batch(comm, plan, &all, &largest);
    if (n == 0)
        return NCCL_SUCCESS;
    struct coll_task asked = {.func = FUNC_ALL_GATHER, .count = largest, .type = TYPE_INT8};
    const struct question question = {.sum = &asked, .first = &asked, .n = 1, .pipe_ops = 1};
    nccl_result result = decide(comm, &question, NULL);
    if (result != NCCL_SUCCESS)
        return result;
    struct coll_task ring = {.func = FUNC_BROADCAST, .algorithm = ALGO_RING, .protocol = asked.protocol};
    /* Channels that get nothing of any broadcast do not run. */
    size_t part = divide_up(largest, (size_t)asked.max_channels), parts = 0;
    for (size_t at = 0; at < largest && parts < (size_t)asked.max_channels; parts++)
        at = divide_up((parts + 1) * part, ALIGN) * ALIGN;
    const struct gpu_work work = {
        .bytes = all,
        .func = FUNC_BROADCAST,
        .algo = ALGO_RING,
        .proto = (uint8_t)ring.protocol,
        .channels = (uint8_t)parts,
        .send_peer = -1,
        .recv_peer = -1,
    };
    layout_add_work(plan, &work, BCAST_BYTES);
    /* Each is work that the kernels count, and NCCL does not. */
    for (size_t channel = 0; channel < parts; channel++)
        for (int i = in_part(comm, n, channel, (size_t)asked.max_channels); i > 0; i--)
            layout_place(plan, &(struct placing){.channel = (int)channel,
                                                 .kernel = 2 | (uint64_t)ring.protocol << 8,
                                                 .share = i == 1 ? 1 : 0,
                                                 .item_bytes = BCAST_BYTES});
    take(comm, n);
    return NCCL_SUCCESS;
}
