#define _GNU_SOURCE
#include "rank.h"
#include "proxies.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RATE_BACKLOG_NS = 100000000, POLL_NS = 50000 };

struct comm {
    nccl_comm handle;
    const void *key; /* what its kernels carry; NULL: not registered */
    void *registered;
    uint64_t inits;
    bool is_new; /* made in a group that has not ended */
};

struct rank {
    const struct job *job;
    const struct nccl *nccl;
    const struct program_rank *program;
    uint32_t number;
    struct place place;
    struct comm *comms;
    struct gpu_stream *streams[PROGRAM_STREAMS];
    struct gpu_event *events[PROGRAM_EVENTS];
    struct gpu_graph *graphs[PROGRAM_GRAPHS];
    void *buffer;
    size_t buffer_bytes;
    int depth; /* of groups */
    uint64_t clock_cpu_ns, clock_wall_ns;
};

static int complain(const struct rank *rank, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "[rank %u] %s\n", rank->number, text);
    return -1;
}

static int check(const struct rank *rank, const char *what, nccl_result result) {
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS)
        return 0;
    return complain(rank, "%s failed with %d: %s", what, result, rank->nccl->ncclGetLastError(NULL));
}

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

/* ---- communicators ---- */

static struct nccl_config config_of(const struct program_comm *comm) {
    return (struct nccl_config){
        .size = sizeof(struct nccl_config),
        .magic = (unsigned)NCCL_CONFIG_MAGIC,
        .version = NCCL_CONFIG_VERSION,
        .blocking = comm->blocking ? 1 : 0,
        .cga_cluster_size = NCCL_UNDEFINED,
        .min_ctas = NCCL_UNDEFINED,
        .max_ctas = NCCL_UNDEFINED,
        .split_share = NCCL_UNDEFINED,
        .traffic_class = NCCL_UNDEFINED,
        .comm_name = comm->name[0] ? comm->name : NULL,
    };
}

/* A non-blocking communicator must have done one thing before it is asked for the next. */
static int settle(const struct rank *rank, const struct comm *comm) {
    nccl_result state = NCCL_IN_PROGRESS;
    while (comm->handle && state == NCCL_IN_PROGRESS) {
        if (check(rank, "ncclCommGetAsyncError", rank->nccl->ncclCommGetAsyncError(comm->handle, &state)) !=
            0)
            return -1;
        if (state == NCCL_IN_PROGRESS) {
            if (page_aborted_by(rank->place.page) != UINT32_MAX)
                return -1;
            nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        }
    }
    return check(rank, "an operation of a non-blocking communicator", state);
}

static int settle_if_told(struct rank *rank, uint16_t number) {
    return rank->job->program.comms[number].blocking ? 0 : settle(rank, &rank->comms[number]);
}

/* Tells the virtual GPU whose kernels it will see. A communicator that is made in a group is there when that
 * ends. */
static int introduce(struct rank *rank, uint16_t number) {
    const struct program *program = &rank->job->program;
    struct comm *comm = &rank->comms[number];
    comm->is_new = rank->depth > 0;
    if (comm->is_new)
        return 0;
    struct gpu_comm_info info = {.number = number, .present = (int)program->comms[number].present};
    if (comm->handle == NULL || settle_if_told(rank, number) != 0)
        return comm->handle == NULL ? 0 : -1;
    if (check(rank, "ncclCommCount", rank->nccl->ncclCommCount(comm->handle, &info.ranks)) != 0 ||
        check(rank, "ncclCommUserRank", rank->nccl->ncclCommUserRank(comm->handle, &info.rank)) != 0)
        return -1;
    if (info.ranks <= PROGRAM_MAX_RANKS)
        info.nodes = program->comms[number].nodes;
    rank->nccl->gpu_comm_identity(comm->handle, &comm->key, &info.id);
    rank->nccl->gpu_comm_register(comm->key, &info);
    return 0;
}

static int init(struct rank *rank, const struct program_op *op) {
    struct comm *comm = &rank->comms[op->comm];
    struct nccl_config config = config_of(&rank->job->program.comms[op->comm]);
    struct nccl_unique_id id;
    comm->inits++;
    rank->nccl->gpu_comm_announce(op->comm);
    if (op->func) {
        if (check(rank, "ncclGetUniqueId", rank->nccl->ncclGetUniqueId(&id)) != 0)
            return -1;
        page_publish_id(rank->place.page, op->comm, id.bytes);
    } else if (page_await_id(&rank->place, op->comm, comm->inits, id.bytes) != 0) {
        return -1;
    }
    nccl_result result =
        rank->nccl->ncclCommInitRankConfig(&comm->handle, (int)op->value, id, op->peer, &config);
    return check(rank, "ncclCommInitRankConfig", result) != 0 ? -1 : introduce(rank, op->comm);
}

static int split(struct rank *rank, const struct program_op *op) {
    const bool gets_none = op->peer < 0;
    struct comm *parent = &rank->comms[op->from], none = {0};
    struct comm *comm = gets_none ? &none : &rank->comms[op->comm];
    struct nccl_config config = config_of(&rank->job->program.comms[op->comm]);
    rank->nccl->gpu_comm_announce(op->comm);
    nccl_result result =
        rank->nccl->ncclCommSplit(parent->handle, op->peer, (int)op->value, &comm->handle, &config);
    if (check(rank, "ncclCommSplit", result) != 0 || settle_if_told(rank, op->from) != 0)
        return -1;
    return gets_none ? 0 : introduce(rank, op->comm);
}

static int shrink(struct rank *rank, const struct program_op *op) {
    struct comm *parent = &rank->comms[op->from], *comm = &rank->comms[op->comm];
    struct nccl_config config = config_of(&rank->job->program.comms[op->comm]);
    int excluded[PROGRAM_MAX_RANKS], n = 0;
    rank->nccl->gpu_comm_announce(op->comm);
    for (int i = 0; i < PROGRAM_MAX_RANKS; i++)
        if (op->value >> i & 1)
            excluded[n++] = i;
    nccl_result result =
        rank->nccl->ncclCommShrink(parent->handle, excluded, n, &comm->handle, &config, NCCL_SHRINK_DEFAULT);
    return check(rank, "ncclCommShrink", result) != 0 ? -1 : introduce(rank, op->comm);
}

static int end_comm(struct rank *rank, const struct program_op *op) {
    struct comm *comm = &rank->comms[op->comm];
    if (comm->handle == NULL)
        return 0;
    if (op->code == OP_FINALIZE) {
        nccl_result result = rank->nccl->ncclCommFinalize(comm->handle);
        return check(rank, "ncclCommFinalize", result) != 0 ? -1 : settle_if_told(rank, op->comm);
    }
    nccl_result result = op->code == OP_DESTROY ? rank->nccl->ncclCommDestroy(comm->handle)
                                                : rank->nccl->ncclCommAbort(comm->handle);
    rank->nccl->gpu_comm_forget(comm->key);
    comm->handle = NULL;
    comm->key = NULL;
    return check(rank, op->code == OP_DESTROY ? "ncclCommDestroy" : "ncclCommAbort", result);
}

/* ---- operations ---- */

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
    return rank->depth == 0 ? settle_if_told(rank, op->comm) : 0;
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
    if (check(rank, "ncclGroupEnd", nccl->ncclGroupEnd()) != 0 || settle_if_told(rank, op->comm) != 0)
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

static uint64_t now_ns(void) {
    return clock_ns(CLOCK_MONOTONIC);
}

/* Nothing is printed between the two: that would be measured, too. */
static void measure(struct rank *rank, bool is_end) {
    uint64_t cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID), wall_ns = now_ns();
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
        return init(rank, op);
    case OP_SPLIT:
        return split(rank, op);
    case OP_SHRINK:
        return shrink(rank, op);
    case OP_FINALIZE:
    case OP_DESTROY:
    case OP_ABORT:
        return end_comm(rank, op);
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

static int run_all(struct rank *rank, uint32_t first, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (run(rank, &rank->job->program.ops[first + i]) != 0)
            return -1;
    return 0;
}

/* ---- steps ---- */

static void keep_pace(const struct rank *rank, uint64_t *due) {
    double rate_hz = rank->job->program.header->rate_hz;
    if (rate_hz <= 0)
        return;
    uint64_t now = now_ns();
    if (now > *due + RATE_BACKLOG_NS)
        *due = now;
    if (*due > now)
        nanosleep(&(struct timespec){.tv_sec = (time_t)((*due - now) / 1000000000u),
                                     .tv_nsec = (long)((*due - now) % 1000000000u)},
                  NULL);
    *due += (uint64_t)(1e9 / rate_hz);
}

static int steps(struct rank *rank) {
    const struct program_header *header = rank->job->program.header;
    struct page_rank *self = &rank->place.page->ranks[rank->number];
    int device = (int)rank->program->device;
    uint64_t due = now_ns(), begun_ns = rank->nccl->gpu_host_ns(device);
    for (uint64_t step = 0; header->steps == 0 || step < header->steps; step++) {
        uint32_t peer = 0;
        keep_pace(rank, &due);
        switch (page_admit(&rank->place, step, &peer)) {
        case ADMIT_BEGIN:
            break;
        case ADMIT_ABORT:
            fprintf(stderr, "[rank %u] rank %u failed or died\n", rank->number, peer);
            return EXIT_PEER_DIED;
        default:
            return EXIT_OK;
        }
        rank->nccl->gpu_set_phase(device, rank->place.phase, step);
        if (run_all(rank, rank->program->step, rank->program->n_step) != 0)
            return EXIT_RANK_FAILED;
        /* Of several ranks one may be a step ahead, and its proxies wait for the others. */
        if (rank->job->alone)
            proxies_wait();
        uint64_t ns = rank->nccl->gpu_host_ns(device);
        atomic_store(&self->host_ns, ns);
        atomic_store(&self->iteration_ns, ns - begun_ns);
        if (rank->job->report_step)
            rank->job->report_step(step, ns - begun_ns, NAN);
        begun_ns = ns;
    }
    return EXIT_OK;
}

static int open_rank(struct rank *rank) {
    const struct program_header *header = rank->job->program.header;
    rank->nccl->gpu_set_device((int)rank->program->device);
    rank->comms = calloc(header->n_comms, sizeof(*rank->comms));
    rank->buffer_bytes = header->buffer_bytes ? header->buffer_bytes : 4096;
    if (rank->comms == NULL)
        return complain(rank, "no memory");
    return check(rank, "ncclMemAlloc", rank->nccl->ncclMemAlloc(&rank->buffer, rank->buffer_bytes));
}

void *run_rank(void *argument) {
    struct rank_args *args = argument;
    struct rank rank = {.job = args->job,
                        .nccl = args->job->nccl,
                        .program = &args->job->program.ranks[args->rank],
                        .number = args->rank};
    int code = EXIT_RANK_FAILED;
    page_take(&rank.place, args->job->page, args->rank, args->job->program.header->window);
    page_set_state(&rank.place, RANK_INIT);
    if (open_rank(&rank) == 0 && run_all(&rank, rank.program->setup, rank.program->n_setup) == 0) {
        page_set_state(&rank.place, RANK_RUNNING);
        code = steps(&rank);
        if (code == EXIT_OK && run_all(&rank, rank.program->end, rank.program->n_end) != 0)
            code = EXIT_RANK_FAILED;
    }
    if (code != EXIT_OK)
        page_fail(&rank.place);
    else
        page_set_state(&rank.place, RANK_FINISHED);
    page_await_end(&rank.place);
    free(rank.comms);
    args->code = code;
    return NULL;
}
