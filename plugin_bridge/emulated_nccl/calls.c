/* The operations: each is kept until its group ends (taskAppend in src/enqueue.cc). */
#define _GNU_SOURCE
#include <stdlib.h>

#include "events.h"
#include "group.h"
#include "log.h"
#include "names.h"
#include "prepare.h"
#include "release.h"

/* A communicator's group is captured with all of its streams, or with none. */
static nccl_result enter_stream(struct comm *comm, struct gpu_stream *stream) {
    struct planner *planner = &comm->planner;
    for (int i = 0; i < planner->n_streams; i++)
        if (planner->streams[i] == stream)
            return NCCL_SUCCESS;
    struct gpu_graph *graph = gpu_capturing(stream);
    if (planner->n_streams > 0 && graph != planner->graph)
        return fail(NCCL_INVALID_USAGE,
                    "Streams given to a communicator within a NCCL group must either be all "
                    "uncaptured or all captured by the same graph.");
    planner->graph = graph;
    planner->streams =
        realloc(planner->streams, (size_t)(planner->n_streams + 1) * sizeof(*planner->streams));
    if (planner->streams == NULL)
        abort();
    for (int i = planner->n_streams++; i > 0; i--)
        planner->streams[i] = planner->streams[i - 1];
    planner->streams[0] = stream;
    return NCCL_SUCCESS;
}

static void *new_task(size_t bytes) {
    void *task = calloc(1, bytes);
    if (task == NULL)
        abort();
    return task;
}

static void keep_p2p(const struct call *call, const struct watched *watched) {
    struct comm *comm = call->comm;
    struct p2p_task *task = new_task(sizeof(*task));
    struct peer *peer = &comm->peers[call->peer];
    *task = (struct p2p_task){
        .func = call->func,
        .buffer = call->recv,
        .count = call->count,
        .bytes = call->count * type_bytes(call->type),
        .type = call->type,
        .peer = call->peer,
        .watched = *watched,
    };
    if (call->func == FUNC_SEND) {
        PUSH(&peer->send, task);
        comm->planner.n_sends++;
    } else {
        PUSH(&peer->recv, task);
        comm->planner.n_recvs++;
    }
}

static void keep_bcast(const struct call *call) {
    struct planner *planner = &call->comm->planner;
    struct bcast_list *list = &call->comm->peers[call->peer].bcast;
    struct bcast_task *task = new_task(sizeof(*task));
    *task = (struct bcast_task){
        .send = call->send,
        .recv = call->recv,
        .bytes = call->count * type_bytes(call->type),
        .root = call->peer,
    };
    planner->least_root = call->peer < planner->least_root ? call->peer : planner->least_root;
    planner->most_root = call->peer > planner->most_root ? call->peer : planner->most_root;
    planner->bcast_roots += list->head == NULL;
    planner->n_bcasts++;
    PUSH(list, task);
}

static void keep_coll(const struct call *call, const struct watched *watched) {
    struct coll_task *task = new_task(sizeof(*task));
    const bool moves = call->func == FUNC_ALL_GATHER || call->func == FUNC_BROADCAST;
    const bool per_rank = call->func == FUNC_ALL_GATHER || call->func == FUNC_REDUCE_SCATTER;
    const size_t bytes = type_bytes(call->type);
    *task = (struct coll_task){
        .func = call->func,
        .send = call->send,
        .recv = call->recv,
        /* What is only moved has no type. */
        .count = moves ? call->count * bytes : call->count,
        .type = moves ? TYPE_INT8 : call->type,
        .root = call->peer,
        .op = call->op,
        .watched = *watched,
    };
    task->traffic = call->count * bytes *
                    (call->func == FUNC_ALL_REDUCE ? 2
                     : per_rank                    ? (size_t)call->comm->ranks
                                                   : 1);
    planner_add(call->comm, task);
}

static nccl_result keep(const struct call *call) {
    struct comm *comm = call->comm;
    const bool is_p2p = call->func == FUNC_SEND || call->func == FUNC_RECV;
    struct watched watched = {0};
    if (!is_p2p && call->count == 0)
        return NCCL_SUCCESS;
    /* A rank alone copies its buffer, without NCCL's kernels. */
    if (!is_p2p && comm->ranks == 1)
        return NCCL_SUCCESS;
    group_join(comm);
    nccl_result result = enter_stream(comm, call->stream);
    if (result != NCCL_SUCCESS)
        return result;
    events_begin_call(call, comm->planner.graph != NULL, &watched);
    if (is_p2p)
        keep_p2p(call, &watched);
    else if (call->func == FUNC_BROADCAST && release()->bcast_apart)
        keep_bcast(call);
    else
        keep_coll(call, &watched);
    events_end_call(call);
    return NCCL_SUCCESS;
}

static nccl_result check(const struct call *call) {
    const struct comm *comm = call->comm;
    if (call->type < 0 || call->type >= N_TYPES || call->op < 0 || call->op >= N_OPS)
        return fail(NCCL_INVALID_ARGUMENT, "%s: type %d or operator %d is invalid", func_name(call->func),
                    call->type, call->op);
    if (call->peer < 0 || call->peer >= comm->ranks)
        return fail(NCCL_INVALID_ARGUMENT, "%s: invalid root or peer %d (communicator has %d ranks)",
                    func_name(call->func), call->peer, comm->ranks);
    if (call->stream == NULL)
        return fail(NCCL_INVALID_ARGUMENT, "%s: the emulated NCCL has no default stream",
                    func_name(call->func));
    return NCCL_SUCCESS;
}

static nccl_result enqueue(const struct call *call) {
    nccl_result result = comm_check(call->comm, func_name(call->func));
    if (result != NCCL_SUCCESS)
        return group_error(result);
    events_enter_call();
    group_start();
    result = comm_ready(call->comm);
    if (result == NCCL_SUCCESS)
        result = check(call);
    if (result == NCCL_SUCCESS)
        result = keep(call);
    if (result != NCCL_SUCCESS && !call->comm->blocking)
        call->comm->async_result = result;
    group_error(result);
    nccl_result ended = group_end(NULL);
    if (!call->comm->blocking)
        return call->comm->async_result;
    return result != NCCL_SUCCESS ? result : ended;
}

EXPORT nccl_result ncclBroadcast(const void *send, void *recv, size_t count, int type, int root,
                                 struct comm *comm, void *stream) {
    return enqueue(&(struct call){comm, FUNC_BROADCAST, send, recv, count, type, OP_SUM, root, stream});
}

EXPORT nccl_result ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root,
                              struct comm *comm, void *stream) {
    return enqueue(&(struct call){comm, FUNC_REDUCE, send, recv, count, type, op, root, stream});
}

EXPORT nccl_result ncclAllGather(const void *send, void *recv, size_t count, int type, struct comm *comm,
                                 void *stream) {
    return enqueue(&(struct call){comm, FUNC_ALL_GATHER, send, recv, count, type, OP_SUM, 0, stream});
}

EXPORT nccl_result ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op,
                                     struct comm *comm, void *stream) {
    return enqueue(&(struct call){comm, FUNC_REDUCE_SCATTER, send, recv, count, type, op, 0, stream});
}

EXPORT nccl_result ncclAllReduce(const void *send, void *recv, size_t count, int type, int op,
                                 struct comm *comm, void *stream) {
    return enqueue(&(struct call){comm, FUNC_ALL_REDUCE, send, recv, count, type, op, 0, stream});
}

EXPORT nccl_result ncclSend(const void *buffer, size_t count, int type, int peer, struct comm *comm,
                            void *stream) {
    return enqueue(
        &(struct call){comm, FUNC_SEND, NULL, (void *)(uintptr_t)buffer, count, type, OP_SUM, peer, stream});
}

EXPORT nccl_result ncclRecv(void *buffer, size_t count, int type, int peer, struct comm *comm, void *stream) {
    return enqueue(&(struct call){comm, FUNC_RECV, NULL, buffer, count, type, OP_SUM, peer, stream});
}
