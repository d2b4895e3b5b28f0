/* The operations of a rank's program. */
#define _GNU_SOURCE
#include <stdio.h>
#include <time.h>

#include "running.h"

static struct gpu_stream *stream_of(struct rank *rank, uint8_t number) {
    if (rank->streams[number] == NULL)
        rank->streams[number] = rank->nccl->gpu_stream_create((int)rank->program->device);
    return rank->streams[number];
}

static struct gpu_event *event_of(struct rank *rank, int number) {
    if (rank->events[number] == NULL)
        rank->events[number] = rank->nccl->gpu_event_create();
    return rank->events[number];
}

static nccl_result collective(struct rank *rank, const struct program_op *op) {
    const struct nccl *nccl = rank->nccl;
    nccl_comm comm = rank->comms[op->comm].handle;
    void *stream = stream_of(rank, op->stream), *buffer = rank->buffer;
    size_t count = op->value;
    switch (op->func) {
    case 0:
        return nccl->ncclBroadcast(buffer, buffer, count, op->type, op->peer, comm, stream);
    case 1:
        return nccl->ncclReduce(buffer, buffer, count, op->type, NCCL_SUM, op->peer, comm, stream);
    case 2:
        return nccl->ncclAllGather(buffer, buffer, count, op->type, comm, stream);
    case 3:
        return nccl->ncclReduceScatter(buffer, buffer, count, op->type, NCCL_SUM, comm, stream);
    default:
        return nccl->ncclAllReduce(buffer, buffer, count, op->type, NCCL_SUM, comm, stream);
    }
}

static int communicate(struct rank *rank, const struct program_op *op) {
    const struct nccl *nccl = rank->nccl;
    nccl_comm comm = rank->comms[op->comm].handle;
    nccl_result result;
    if (comm == NULL)
        return complain(rank, "an operation on communicator %u, which it is not in", op->comm);
    nccl->gpu_host_advance((int)rank->program->device, rank->job->program.header->call_ns);
    if (op->code == OP_SEND)
        result =
            nccl->ncclSend(rank->buffer, op->value, op->type, op->peer, comm, stream_of(rank, op->stream));
    else if (op->code == OP_RECV)
        result =
            nccl->ncclRecv(rank->buffer, op->value, op->type, op->peer, comm, stream_of(rank, op->stream));
    else
        result = collective(rank, op);
    if (check(rank, "a collective or a transfer", result) != 0)
        return -1;
    return rank->depth == 0 ? await_unless_blocking(rank, op->comm) : 0;
}

/* What NCCL thinks that the group would take; nothing is launched. */
static int simulate(struct rank *rank) {
    struct nccl_sim_info info = {
        .size = sizeof(info), .magic = NCCL_SIM_INFO_MAGIC, .version = NCCL_SIM_INFO_VERSION};
    if (check(rank, "ncclGroupSimulateEnd", rank->nccl->ncclGroupSimulateEnd(&info)) != 0)
        return -1;
    fprintf(stderr, "[rank %u] simulated: %.9g us\n", rank->number, (double)info.estimated_us);
    return 0;
}

static int group(struct rank *rank, const struct program_op *op) {
    const struct nccl *nccl = rank->nccl;
    if (op->code == OP_GROUP_START) {
        rank->depth++;
        return check(rank, "ncclGroupStart", nccl->ncclGroupStart());
    }
    rank->depth--;
    if (op->code == OP_SIMULATE_END)
        return simulate(rank);
    if (check(rank, "ncclGroupEnd", nccl->ncclGroupEnd()) != 0 || await_unless_blocking(rank, op->comm) != 0)
        return -1;
    for (uint32_t i = 0; rank->depth == 0 && i < rank->job->program.header->n_comms; i++)
        if (rank->comms[i].is_new && introduce(rank, (uint16_t)i) != 0)
            return -1;
    return 0;
}

static int registration(struct rank *rank, const struct program_op *op) {
    const struct nccl *nccl = rank->nccl;
    struct comm *comm = &rank->comms[op->comm];
    if (op->code == OP_REGISTER)
        return check(
            rank, "ncclCommRegister",
            nccl->ncclCommRegister(comm->handle, rank->buffer, rank->buffer_bytes, &comm->registered));
    return check(rank, "ncclCommDeregister", nccl->ncclCommDeregister(comm->handle, comm->registered));
}

static void graph(struct rank *rank, const struct program_op *op) {
    const struct nccl *nccl = rank->nccl;
    if (op->code == OP_CAPTURE) {
        nccl->gpu_capture_begin(stream_of(rank, op->stream));
    } else if (op->code == OP_END_CAPTURE) {
        if (rank->graphs[op->peer])
            nccl->gpu_graph_destroy(rank->graphs[op->peer]);
        rank->graphs[op->peer] = nccl->gpu_capture_end(stream_of(rank, op->stream));
    } else if (op->code == OP_REPLAY && rank->graphs[op->peer]) {
        nccl->gpu_graph_launch(rank->graphs[op->peer], stream_of(rank, op->stream));
    } else if (op->code == OP_DROP && rank->graphs[op->peer]) {
        nccl->gpu_graph_destroy(rank->graphs[op->peer]);
        rank->graphs[op->peer] = NULL;
    }
}

static uint64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Nothing is printed between the two: that would be measured, too. */
static void measure(struct rank *rank, bool is_end) {
    uint64_t cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID), wall_ns = clock_ns(CLOCK_MONOTONIC);
    if (is_end)
        fprintf(stderr, "[rank %u] clock: thread %llu wall %llu process %llu\n", rank->number,
                (unsigned long long)(cpu_ns - rank->clock_cpu_ns),
                (unsigned long long)(wall_ns - rank->clock_wall_ns),
                (unsigned long long)clock_ns(CLOCK_PROCESS_CPUTIME_ID));
    rank->clock_cpu_ns = cpu_ns;
    rank->clock_wall_ns = wall_ns;
}

static int run(struct rank *rank, const struct program_op *op) {
    const struct nccl *nccl = rank->nccl;
    switch ((enum op_code)op->code) {
    case OP_INIT:
        return comm_init(rank, op);
    case OP_SPLIT:
        return comm_split(rank, op);
    case OP_SHRINK:
        return comm_shrink(rank, op);
    case OP_FINALIZE:
    case OP_DESTROY:
    case OP_ABORT:
        return comm_end(rank, op);
    case OP_GROUP_START:
    case OP_GROUP_END:
    case OP_SIMULATE_END:
        return group(rank, op);
    case OP_COLLECTIVE:
    case OP_SEND:
    case OP_RECV:
        return communicate(rank, op);
    case OP_COMPUTE:
        nccl->gpu_compute(stream_of(rank, op->stream), op->value);
        return 0;
    case OP_RECORD:
        nccl->gpu_event_record(event_of(rank, op->peer), stream_of(rank, op->stream));
        return 0;
    case OP_WAIT:
        nccl->gpu_stream_wait(stream_of(rank, op->stream), event_of(rank, op->peer));
        return 0;
    case OP_SYNC:
        if (op->stream == 255)
            nccl->gpu_device_sync((int)rank->program->device);
        else
            nccl->gpu_stream_sync(stream_of(rank, op->stream));
        return 0;
    case OP_HOST:
        nccl->gpu_host_advance((int)rank->program->device, op->value);
        return 0;
    case OP_CAPTURE:
    case OP_END_CAPTURE:
    case OP_REPLAY:
    case OP_DROP:
        graph(rank, op);
        return 0;
    case OP_REGISTER:
    case OP_DEREGISTER:
        return registration(rank, op);
    case OP_CLOCK:
        measure(rank, op->value != 0);
        return 0;
    case OP_CODES:
        break;
    }
    return -1;
}

int run_ops(struct rank *rank, uint32_t first, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (run(rank, &rank->job->program.ops[first + i]) != 0)
            return -1;
    return 0;
}
