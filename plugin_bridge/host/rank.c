#define _GNU_SOURCE
#include "rank.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"

enum {
    LOG_BUFFER_BYTES = 1 << 16,
    DELAY_ONE_IN = 64,
    RATE_BACKLOG_NS = 100000000, /* a rank that fell further behind than this does not catch up */
    PACE_BATCH_NS = 2000000,
};

static int logger_rank = -1;
static int logger_verbose;

void host_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    static const char *const names[] = {"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};
    (void)flags;
    if (level > LOG_LEVEL_WARN && !logger_verbose)
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "[rank %d] NCCL %s %s:%d %s\n", logger_rank,
            level >= 0 && level <= LOG_LEVEL_TRACE ? names[level] : "?", file != NULL ? file : "?", line,
            text);
}

int host_error(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "[rank %d] host error: %s\n", logger_rank, text);
    return -1;
}

int host_open(struct host *host, const struct options *options) {
    logger_rank = options->rank;
    logger_verbose = options->verbose;
    host->options = options;
    if (program_open(&host->program, options->program) != 0)
        return -1;
    if (options->rank < 0 || (uint32_t)options->rank >= host->program.header->n_ranks)
        return host_error("rank %d of a communicator of %u ranks", options->rank,
                          host->program.header->n_ranks);
    /* As in NCCL, which loads the profiler while it sets the transports up and the tuner after. */
    if (profiler_open(&host->profiler, options->plugin, options->profiler_abi) != 0)
        return -1;
    return tuner_open(&host->tuner, options->plugin, options->tuner_abi, options->profiler_abi);
}

void host_close(struct host *host) {
    for (int i = 0; i < host->n_communicators; i++)
        if (host->communicators[i].log != NULL)
            fclose(host->communicators[i].log);
    tuner_close(&host->tuner);
    profiler_close(&host->profiler);
    program_close(&host->program);
}

static int open_log(struct communicator *comm, const char *path, int index) {
    static char buffers[MAX_COMMUNICATORS][LOG_BUFFER_BYTES];
    char full[4096];
    if (index == 0)
        snprintf(full, sizeof(full), "%s", path);
    else
        snprintf(full, sizeof(full), "%s.%d", path, index);
    comm->log = fopen(full, "wb");
    if (comm->log == NULL)
        return host_error("cannot write the log %s", full);
    setvbuf(comm->log, buffers[index], _IOFBF, LOG_BUFFER_BYTES);
    return 0;
}

int communicator_open(struct host *host, int index) {
    const struct program_header *header = host->program.header;
    struct communicator *comm = &host->communicators[index];
    host->n_communicators = index + 1;
    comm->id = header->comm_id + (uint64_t)index;
    if (index == 0)
        snprintf(comm->name, sizeof(comm->name), "%s", header->comm_name);
    else
        snprintf(comm->name, sizeof(comm->name), "%s.%d", header->comm_name, index);
    comm->noise_stream = comm_stream(header->noise_seed, comm->id);
    comm->jitter_stream = rank_stream(header->noise_seed, comm->id, (uint32_t)host->options->rank);
    if (host->options->log != NULL && open_log(comm, host->options->log, index) != 0)
        return -1;

    if (profiler_init(&host->profiler, &comm->profiler_context, header, comm->id, comm->name,
                      host->options->rank, host_logger) != 0)
        return -1;
    comm->has_profiler = host->profiler.abi != 0;
    if (comm->has_profiler && !host->proxy.running && proxy_start(&host->proxy, &host->profiler) != 0)
        return -1;
    if (tuner_init(&host->tuner, &comm->tuner_context, header, comm->id, host_logger) != 0)
        return -1;
    comm->has_tuner = host->tuner.abi != 0;
    return 0;
}

int host_finalize(struct host *host) {
    int result = 0;
    proxy_join(&host->proxy);
    for (int i = 0; i < host->n_communicators; i++) {
        struct communicator *comm = &host->communicators[i];
        if (comm->has_tuner && tuner_finalize(&host->tuner, comm->tuner_context) != 0)
            result = -1;
        if (comm->has_profiler && profiler_finalize(&host->profiler, comm->profiler_context) != 0)
            result = -1;
        comm->has_tuner = comm->has_profiler = 0;
    }
    return result;
}

static void flush_logs(void *argument) {
    struct host *host = argument;
    for (int i = 0; i < host->n_communicators; i++)
        fflush(host->communicators[i].log);
}

/* The rank's own pace: the program's rate, and now and then a delay where the stress tests ask for it. */
static void keep_pace(const struct host *host, uint64_t index, uint64_t *due) {
    const struct options *options = host->options;
    if (options->max_delay_us != 0) {
        uint64_t draw = mix64(options->seed ^ mix64(index * 131 + (uint64_t)options->rank));
        if (draw % DELAY_ONE_IN == 0)
            sleep_ns((draw >> 8) % (options->max_delay_us * 1000 + 1));
    }
    double rate_hz = host->program.header->rate_hz;
    if (rate_hz <= 0)
        return;
    uint64_t now = host_ns();
    if (now > *due + RATE_BACKLOG_NS)
        *due = now;
    /* A few at a time: waking up for each collective would cost more than the collective. */
    if (*due > now + PACE_BATCH_NS)
        sleep_ns(*due - now);
    *due += (uint64_t)(1e9 / rate_hz);
}

static int report_dead_peer(const struct host *host, uint32_t peer) {
    const struct job_process *who = &host->job.page->processes[peer];
    const char *what = atomic_load(&who->state) == PROCESS_FAILED ? "failed" : "died";
    fprintf(stderr, "[rank %d] peer process %u (pid %d) %s; NCCL would abort the communicator\n",
            host->options->rank, peer, (int)atomic_load(&who->pid), what);
    return EXIT_PEER_DIED;
}

static int loop(struct host *host) {
    const struct program_header *header = host->program.header;
    const struct options *options = host->options;
    const uint64_t n = (uint64_t)host->n_communicators;
    uint64_t due = host_ns();
    for (uint64_t index = 0; header->total == 0 || index < header->total; index++) {
        uint32_t peer = 0;
        keep_pace(host, index, &due);
        switch (job_admit(&host->job, index, flush_logs, host, &peer)) {
        case ADMIT_BEGIN:
            break;
        case ADMIT_ABORT:
            return report_dead_peer(host, peer);
        case ADMIT_PEER_LEFT:
            fprintf(stderr, "[rank %d] a peer left; ending at collective %llu\n", options->rank,
                    (unsigned long long)index);
            return EXIT_OK;
        default:
            return EXIT_OK;
        }
        struct communicator *comm = &host->communicators[index % n];
        const uint64_t call = index / n;
        if (host->job.phase >= header->n_phases) {
            host_error("phase %u of a program of %u phases", host->job.phase, header->n_phases);
            return EXIT_HOST_ERROR;
        }
        int aggregate =
            options->aggregate_every != 0 && call % options->aggregate_every == options->aggregate_every - 1;
        struct used used;
        if (launch_collective(host, comm, host->program.order[call % header->order_length], host->job.phase,
                              aggregate ? 2 : 1, &used) != 0)
            return EXIT_HOST_ERROR;
        if (fwrite(&used, sizeof(used), 1, comm->log) != 1) {
            host_error("cannot write the log");
            return EXIT_HOST_ERROR;
        }
        if (options->p2p_every != 0 && call % options->p2p_every == options->p2p_every - 1)
            launch_p2p(host, comm, index);
    }
    return EXIT_OK;
}

int run_rank(const struct options *options) {
    static struct host host;
    int code = EXIT_HOST_ERROR;
    if (host_open(&host, options) != 0)
        goto close;
    if (job_open(&host.job, options->job, options->process, host.program.header->window) != 0)
        goto close;
    job_set_state(&host.job, PROCESS_INIT);
    for (int i = 0; i < options->communicators; i++)
        if (communicator_open(&host, i) != 0)
            goto finalize;
    job_set_state(&host.job, PROCESS_RUNNING);
    code = loop(&host);

finalize:
    if (code == EXIT_HOST_ERROR)
        job_fail(&host.job);
    if (host_finalize(&host) != 0 && code == EXIT_OK)
        code = EXIT_HOST_ERROR;
    flush_logs(&host);
    if (code == EXIT_OK)
        job_set_state(&host.job, PROCESS_FINISHED);
    else
        job_fail(&host.job);
close:
    host_close(&host);
    job_close(&host.job);
    return code;
}
