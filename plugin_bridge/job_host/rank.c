#define _GNU_SOURCE
#include "rank.h"

#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "proxies.h"
#include "running.h"

enum { RATE_BACKLOG_NS = 100000000 };

int complain(const struct rank *rank, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "[rank %u] %s\n", rank->number, text);
    return -1;
}

int check(const struct rank *rank, const char *what, nccl_result result) {
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS)
        return 0;
    return complain(rank, "%s failed with %d: %s", what, result, rank->nccl->ncclGetLastError(NULL));
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

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
        if (run_ops(rank, rank->program->step, rank->program->n_step) != 0)
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
    if (open_rank(&rank) == 0 && run_ops(&rank, rank.program->setup, rank.program->n_setup) == 0) {
        page_set_state(&rank.place, RANK_RUNNING);
        code = steps(&rank);
        if (code == EXIT_OK && run_ops(&rank, rank.program->end, rank.program->n_end) != 0)
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
