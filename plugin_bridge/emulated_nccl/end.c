/* What communicators say of themselves, and how they end (src/init.cc). */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "launch.h"
#include "log.h"
#include "profiler.h"
#include "proxy.h"
#include "rendezvous.h"

nccl_result comm_check(const struct comm *comm, const char *function) {
    return comm ? NCCL_SUCCESS : fail(NCCL_INVALID_ARGUMENT, "%s: comm argument is NULL", function);
}

EXPORT nccl_result ncclCommGetAsyncError(struct comm *comm, nccl_result *result) {
    nccl_result checked = comm_check(comm, "ncclCommGetAsyncError");
    if (checked != NCCL_SUCCESS)
        return checked;
    *result = comm->async_result;
    return *result == NCCL_SUCCESS ? group_job_complete(comm) : NCCL_SUCCESS;
}

nccl_result comm_ready(struct comm *comm) {
    nccl_result state = NCCL_SUCCESS;
    if (comm->aborted) {
        group_job_abort(comm);
        return NCCL_SUCCESS;
    }
    nccl_result result = ncclCommGetAsyncError(comm, &state);
    if (result != NCCL_SUCCESS)
        return result;
    if (state == NCCL_IN_PROGRESS)
        return fail(NCCL_INVALID_ARGUMENT,
                    "Attempt to use communicator before the previous operation returned ncclSuccess");
    return state;
}

EXPORT nccl_result ncclCommCount(struct comm *comm, int *ranks) {
    nccl_result result = comm_check(comm, "ncclCommCount");
    result = result == NCCL_SUCCESS ? comm_ready(comm) : result;
    if (result == NCCL_SUCCESS)
        *ranks = comm->ranks;
    return result;
}

EXPORT nccl_result ncclCommUserRank(struct comm *comm, int *rank) {
    nccl_result result = comm_check(comm, "ncclCommUserRank");
    result = result == NCCL_SUCCESS ? comm_ready(comm) : result;
    if (result == NCCL_SUCCESS)
        *rank = comm->rank;
    return result;
}

/* See ../gpu/gpu.h: kernels carry the communicator itself. */
EXPORT void gpu_comm_identity(const void *nccl_comm, const void **key, uint64_t *id) {
    const struct comm *comm = nccl_comm;
    *key = comm;
    *id = comm->id;
}

/* ---- the end ---- */

/* Waits until everything is done. */
static nccl_result finish(struct comm *comm) {
    gpu_set_device(comm->device);
    if (comm->launched)
        launch_drain(comm);
    return NCCL_SUCCESS;
}

/* The tuner goes before the proxy thread has ended, the profiler after everything else. */
static void free_comm(struct comm *comm) {
    if (comm->tuner) {
        (void)comm->tuner->finalize(comm->tuner_context);
        tuner_unload(comm->loaded_tuner);
    }
    if (comm->proxy) {
        proxy_end(comm->proxy);
        proxy_free(comm->proxy);
    }
    forget_registered(comm);
    rendezvous_close(comm->rendezvous);
    if (comm->launched)
        gpu_event_destroy(comm->launched);
    free(comm->local_to_rank);
    free(comm->rounds);
    free(comm->peers);
    free(comm->started);
    free(comm->completed);
    profiler_finalize(comm->profiler_context);
    free(comm);
}

static void release_job(struct job *job) {
    free(job);
}

static nccl_result run_finalize(struct job *job) {
    return finish(job->comm);
}

/* The last of a process's ranks frees them all. */
static nccl_result run_end(struct job *job) {
    struct comm *comm = job->comm, *first = comm->first_here;
    if (first == NULL || ++first->gone != comm->here)
        return NCCL_SUCCESS;
    for (struct comm *one = first; one; one = one->next_here)
        if (!one->finalized)
            finish(one);
    for (struct comm *one = first, *next; one; one = next) {
        next = one->next_here;
        free_comm(one);
    }
    return NCCL_SUCCESS;
}

static nccl_result add_job(struct comm *comm, nccl_result (*run)(struct job *)) {
    struct job *job = calloc(1, sizeof(*job));
    if (job == NULL)
        abort();
    *job = (struct job){.run = run, .release = release_job, .comm = comm};
    return group_add_job(job);
}

EXPORT nccl_result ncclCommFinalize(struct comm *comm) {
    nccl_result result = comm_check(comm, "ncclCommFinalize");
    if (result != NCCL_SUCCESS)
        return result;
    group_start();
    result = comm_ready(comm);
    if (result == NCCL_SUCCESS && comm->finalized)
        result = fail(NCCL_INVALID_ARGUMENT, "ncclCommFinalize was called before");
    if (result == NCCL_SUCCESS) {
        comm->finalized = true;
        result = add_job(comm, run_finalize);
    }
    group_error(result);
    nccl_result ended = group_end(NULL);
    return result != NCCL_SUCCESS ? result : ended;
}

static nccl_result end_comm(struct comm *comm, nccl_result ready) {
    nccl_result result = ready == NCCL_SUCCESS ? add_job(comm, run_end) : ready;
    group_error(result);
    nccl_result ended = group_end(NULL);
    return result != NCCL_SUCCESS ? result : ended;
}

EXPORT nccl_result ncclCommDestroy(struct comm *comm) {
    if (comm == NULL)
        return NCCL_SUCCESS;
    group_start();
    comm->destroyed = true;
    return end_comm(comm, comm_ready(comm));
}

EXPORT nccl_result ncclCommAbort(struct comm *comm) {
    if (comm == NULL)
        return NCCL_SUCCESS;
    group_start();
    if (comm->child_aborted)
        *comm->child_aborted = 1;
    comm->aborted = 1;
    comm->destroyed = true;
    (void)comm_ready(comm);
    return end_comm(comm, NCCL_SUCCESS);
}
