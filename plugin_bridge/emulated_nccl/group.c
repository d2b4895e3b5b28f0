#define _GNU_SOURCE
#include "group.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "events.h"
#include "launch.h"
#include "log.h"
#include "prepare.h"
#include "release.h"

__thread int group_depth;

/* Of the thread's group. */
static __thread struct {
    nccl_result error;
    struct comm *comms; /* with collectives or transfers */
    struct job *jobs, **last_job;
    enum kind { UNKNOWN, NON_BLOCKING, BLOCKING } kind;
} group;

/* A group that has ended and is being carried out. */
struct group_job {
    struct comm *comms;
    struct job *jobs;
    nccl_result result;
    pthread_t thread;
    _Atomic int users; /* communicators that wait for it */
    _Atomic bool joined;
    volatile bool aborted;
};

void group_start(void) {
    group_depth++;
}

nccl_result group_error(nccl_result result) {
    if (group_depth > 0 && result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        group.error = result;
    return result;
}

nccl_result group_add_job(struct job *job) {
    struct comm *comm = job->comm;
    enum kind kind = comm->blocking || comm->destroyed ? BLOCKING : NON_BLOCKING;
    if (group.kind != UNKNOWN && group.kind != kind && !comm->destroyed) {
        job->release(job);
        return fail(NCCL_INVALID_ARGUMENT, "blocking and non-blocking communicators in the same group");
    }
    group.kind = kind;
    job->ends_comm = comm->destroyed;
    job->next = NULL;
    *(group.jobs ? group.last_job : &group.jobs) = job;
    group.last_job = &job->next;
    return NCCL_SUCCESS;
}

/* By ascending id; ranks of one process in one thread's group would stand together. */
void group_join(struct comm *comm) {
    group.kind = comm->blocking ? BLOCKING : NON_BLOCKING;
    if (comm->group_next != COMM_NOT_IN_GROUP)
        return;
    struct comm **at = &group.comms;
    while (*at && (*at)->first_here != comm->first_here)
        at = &(*at)->group_next;
    if (*at == NULL)
        for (at = &group.comms; *at && (*at)->id < comm->id; at = &(*at)->group_next)
            ;
    comm->group_next = *at;
    *at = comm;
    planner_begin(comm);
}

/* ---- jobs ---- */

static void *run_job(void *argument) {
    struct job *job = argument;
    job->result = job->run(job);
    return NULL;
}

static nccl_result run_jobs(struct job *jobs) {
    if (jobs && jobs->next == NULL && release()->jobs_inline) {
        run_job(jobs);
        return jobs->result;
    }
    nccl_result result = NCCL_SUCCESS;
    for (struct job *job = jobs; job; job = job->next)
        if (pthread_create(&job->thread, NULL, run_job, job) != 0)
            abort();
    for (struct job *job = jobs; job; job = job->next) {
        pthread_join(job->thread, NULL);
        if (result == NCCL_SUCCESS)
            result = job->result;
    }
    return result;
}

static void release_jobs(struct job *jobs, nccl_result result, bool tell) {
    for (struct job *job = jobs, *next; job; job = next) {
        next = job->next;
        if (tell && !job->ends_comm && !job->comm->blocking)
            job->comm->async_result = result;
        job->release(job);
    }
}

/* ---- carrying out ---- */

static nccl_result run_collectives(struct comm *comms, struct nccl_sim_info *simulated) {
    nccl_result result;
    for (struct comm *comm = comms; comm; comm = comm->group_next)
        if ((result = prepare(comm, simulated)) != NCCL_SUCCESS)
            return result;
    return simulated ? NCCL_SUCCESS : launch_group(comms);
}

static nccl_result run_group(struct group_job *job, struct nccl_sim_info *simulated) {
    nccl_result result = run_jobs(job->jobs);
    bool of_jobs = job->comms == NULL;
    if (result == NCCL_SUCCESS && job->comms)
        result = run_collectives(job->comms, simulated);
    /* Jobs that end a communicator have freed it. */
    release_jobs(job->jobs, result, of_jobs || result != NCCL_SUCCESS);
    for (struct comm *comm = job->comms, *next; comm; comm = next) {
        next = comm->group_next;
        comm->group_next = COMM_NOT_IN_GROUP;
        planner_end(comm);
        if (!comm->blocking)
            comm->async_result = result;
    }
    return result;
}

static void *run_in_background(void *argument) {
    struct group_job *job = argument;
    job->result = run_group(job, NULL);
    return NULL;
}

static void link_job(struct comm *comm, struct group_job *job) {
    comm->async_result = NCCL_IN_PROGRESS;
    if (comm->job == NULL) {
        comm->job = job;
        job->users++;
    }
}

static nccl_result begin_in_background(struct group_job *job) {
    for (struct job *one = job->jobs; one; one = one->next)
        link_job(one->comm, job);
    for (struct comm *comm = job->comms; comm; comm = comm->group_next)
        link_job(comm, job);
    if (pthread_create(&job->thread, NULL, run_in_background, job) != 0)
        abort();
    return NCCL_IN_PROGRESS;
}

static void unlink_job(struct comm *comm) {
    struct group_job *job = comm->job;
    comm->job = NULL;
    if (--job->users == 0)
        free(job);
}

static bool join(struct group_job *job) {
    bool others = atomic_exchange(&job->joined, true);
    if (!others)
        pthread_join(job->thread, NULL);
    return !others;
}

nccl_result group_job_complete(struct comm *comm) {
    if (comm->job == NULL)
        return NCCL_SUCCESS;
    nccl_result result = join(comm->job) ? comm->job->result : NCCL_SUCCESS;
    unlink_job(comm);
    return result;
}

void group_job_abort(struct comm *comm) {
    if (comm->job == NULL)
        return;
    join(comm->job);
    unlink_job(comm);
}

static nccl_result carry_out(struct nccl_sim_info *simulated) {
    if (group.comms == NULL && group.jobs == NULL)
        return NCCL_SUCCESS;
    struct group_job *job = calloc(1, sizeof(*job));
    if (job == NULL)
        abort();
    job->comms = group.comms;
    job->jobs = group.jobs;
    if (group.kind == NON_BLOCKING)
        return begin_in_background(job);
    nccl_result result = run_group(job, simulated);
    free(job);
    return result;
}

static void give_up(nccl_result result) {
    release_jobs(group.jobs, result, true);
    for (struct comm *comm = group.comms, *next; comm; comm = next) {
        next = comm->group_next;
        comm->group_next = COMM_NOT_IN_GROUP;
        planner_end(comm);
        if (!comm->blocking)
            comm->async_result = result;
    }
}

nccl_result group_end(struct nccl_sim_info *simulated) {
    nccl_result result = NCCL_SUCCESS;
    if (group_depth == 0)
        return fail(NCCL_INVALID_USAGE, "ncclGroupEnd: not in a group");
    events_leave_group();
    if (--group_depth > 0) {
        events_group_done();
        return NCCL_SUCCESS;
    }
    if (group.error != NCCL_SUCCESS) {
        result = group.error;
        give_up(result);
    } else if (simulated && simulated->magic != NCCL_SIM_INFO_MAGIC) {
        result = fail(NCCL_INVALID_ARGUMENT, "ncclSimInfo_t is not initialised");
        give_up(result);
    } else {
        result = carry_out(simulated);
    }
    memset(&group, 0, sizeof(group));
    events_group_done();
    return result;
}

EXPORT nccl_result ncclGroupStart(void) {
    group_start();
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclGroupEnd(void) {
    return group_end(NULL);
}

EXPORT nccl_result ncclGroupSimulateEnd(struct nccl_sim_info *info) {
    return group_end(info);
}
