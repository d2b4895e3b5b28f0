/* What the proxy thread will have to do for an operation: planned with it, posted when it is launched. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "events.h"
#include "layout.h"
#include "proxy.h"
#include "schedule.h"

/* Work is counted on every channel, watched or not: the kernels count, too. That of a graph is counted when
 * it is replayed. */
static void add_profile(struct comm *comm, struct plan *plan, struct proxy_op *op, int mask) {
    const bool needed = profiler_is_loaded() && mask & EVENT_KERNEL_CH;
    op->kind = PROXY_PROFILE;
    if (!needed || !comm->planner.persistent)
        op->work = op->counts ? ++comm->work[op->channel] : comm->work[op->channel];
    if (needed)
        add_op(plan, op);
}

/* Network operations have the number of the work that is about to be counted. */
static void add_net(struct comm *comm, struct plan *plan, struct proxy_op op, enum proxy_kind kind, int peer,
                    int mask) {
    if (!profiler_is_loaded() || !(mask & PROXY_OP_BITS))
        return;
    op.kind = kind;
    op.peer = peer;
    op.work = comm->work[op.channel] + op.counts;
    add_op(plan, &op);
}

/* The ring of each channel leaves and enters a node at other ranks, in turns. Where a switch of NVLinks
 * reduces, every rank has a share of each channel and sends that itself. */
static void add_crossings(struct comm *comm, struct plan *plan, const struct proxy_op *op,
                          const struct coll_task *task) {
    if (comm->nodes == 1)
        return;
    const bool all = task->algorithm == ALGO_NVLS_TREE;
    const int step = all ? comm->local_ranks : 1, mask = task->watched.mask;
    const int out = op->channel % comm->local_ranks, in = (op->channel + 1) % comm->local_ranks;
    if (all || comm->local_rank == in)
        add_net(comm, plan, *op, PROXY_RECV, (comm->rank + comm->ranks - step) % comm->ranks, mask);
    if (all || comm->local_rank == out)
        add_net(comm, plan, *op, PROXY_SEND, (comm->rank + step) % comm->ranks, mask);
}

void proxy_add_coll(struct comm *comm, struct plan *plan, const struct coll_task *task, int channel,
                    int chunk_bytes) {
    struct proxy_op op = {.channel = channel, .counts = true, .chunk_bytes = chunk_bytes, .of.coll = task};
    add_crossings(comm, plan, &op, task);
    add_profile(comm, plan, &op, task->watched.mask);
}

void proxy_add_p2p(struct comm *comm, struct plan *plan, const struct p2p_task *task, int channel, bool first,
                   int chunk_bytes, int net_peer) {
    struct proxy_op op = {
        .to_recv = task->func == FUNC_RECV,
        .counts = first,
        .is_p2p = true,
        .batch = layout_p2p_batches(plan, channel),
        .channel = channel,
        .chunk_bytes = chunk_bytes,
        .of.p2p = task,
    };
    if (net_peer >= 0)
        add_net(comm, plan, op, op.to_recv ? PROXY_RECV : PROXY_SEND, net_peer, task->watched.mask);
    add_profile(comm, plan, &op, task->watched.mask);
}

static int compare(const void *a, const void *b) {
    const struct proxy_op *x = a, *y = b;
    if (x->is_p2p != y->is_p2p)
        return x->is_p2p - y->is_p2p;
    if (x->batch != y->batch)
        return x->batch < y->batch ? -1 : 1;
    if (x->is_p2p && x->channel != y->channel)
        return x->channel - y->channel;
    return x->place - y->place;
}

void proxy_sort_ops(struct plan *plan) {
    for (int i = 0; i < plan->n_ops; i++)
        plan->ops[i].place = i;
    if (plan->p2ps.head && plan->n_ops > 0)
        qsort(plan->ops, (size_t)plan->n_ops, sizeof(*plan->ops), compare);
}
