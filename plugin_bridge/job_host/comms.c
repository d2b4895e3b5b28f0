/* The communicators of a rank: how they are made and end. */
#define _GNU_SOURCE
#include <time.h>

#include "running.h"

enum { POLL_NS = 50000 };

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

/* Until a non-blocking communicator has done what it was asked for: only then may it be asked for more. */
static int await_comm(const struct rank *rank, const struct comm *comm) {
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

int await_unless_blocking(struct rank *rank, uint16_t number) {
    return rank->job->program.comms[number].blocking ? 0 : await_comm(rank, &rank->comms[number]);
}

int introduce(struct rank *rank, uint16_t number) {
    const struct program *program = &rank->job->program;
    struct comm *comm = &rank->comms[number];
    comm->is_new = rank->depth > 0;
    if (comm->is_new)
        return 0;
    struct gpu_comm_info info = {.number = number, .present = (int)program->comms[number].present};
    if (comm->handle == NULL || await_unless_blocking(rank, number) != 0)
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

int comm_init(struct rank *rank, const struct program_op *op) {
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

int comm_split(struct rank *rank, const struct program_op *op) {
    const bool gets_none = op->peer < 0;
    struct comm *parent = &rank->comms[op->from], none = {0};
    struct comm *comm = gets_none ? &none : &rank->comms[op->comm];
    struct nccl_config config = config_of(&rank->job->program.comms[op->comm]);
    rank->nccl->gpu_comm_announce(op->comm);
    nccl_result result =
        rank->nccl->ncclCommSplit(parent->handle, op->peer, (int)op->value, &comm->handle, &config);
    if (check(rank, "ncclCommSplit", result) != 0 || await_unless_blocking(rank, op->from) != 0)
        return -1;
    return gets_none ? 0 : introduce(rank, op->comm);
}

int comm_shrink(struct rank *rank, const struct program_op *op) {
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

int comm_end(struct rank *rank, const struct program_op *op) {
    struct comm *comm = &rank->comms[op->comm];
    if (comm->handle == NULL)
        return 0;
    if (op->code == OP_FINALIZE) {
        nccl_result result = rank->nccl->ncclCommFinalize(comm->handle);
        return check(rank, "ncclCommFinalize", result) != 0 ? -1 : await_unless_blocking(rank, op->comm);
    }
    nccl_result result = op->code == OP_DESTROY ? rank->nccl->ncclCommDestroy(comm->handle)
                                                : rank->nccl->ncclCommAbort(comm->handle);
    rank->nccl->gpu_comm_forget(comm->key);
    comm->handle = NULL;
    comm->key = NULL;
    return check(rank, op->code == OP_DESTROY ? "ncclCommDestroy" : "ncclCommAbort", result);
}
