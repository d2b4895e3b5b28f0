/* dynamiccl-nccl-job: some ranks of a job, each a thread with a GPU of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "rank.h"

static const char usage[] =
    "usage: dynamiccl-nccl-job --nccl LIBRARY --program FILE --page FILE --ranks A-B [--parent PID]\n"
    "\n"
    "  --nccl LIBRARY   NCCL on a virtual GPU: libnccl.so.2 of `make real-nccl`, or libnccl-emulated.so\n"
    "  --program FILE   what the ranks do (written by plugin_bridge/program.py)\n"
    "  --page FILE      the job page\n"
    "  --ranks A-B      which ranks run in this process; A alone for one\n"
    "  --parent PID     end with that process, which started this one\n";

enum { WATCH_NS = 100000000, GRACE_S = 1 };

static pid_t parent;

static void on_signal(int signal) {
    (void)signal;
    job_signalled = 1;
}

/* Comes when the thread that started this process ends; only where the process did is this one an orphan. */
static void on_parents_death(int signal) {
    (void)signal;
    if (getppid() == parent)
        return;
    job_signalled = 1;
    alarm(GRACE_S); /* for ranks that wait inside of NCCL */
}

/* One that is stopped hears of nothing: a child of it sees the parent end, and kills what is left after a
 * while. */
static void guard(void) {
    pid_t host = getpid();
    int watched = (int)syscall(SYS_pidfd_open, parent, 0);
    if (watched < 0 || fork() != 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "dynamiccl-guard");
    struct pollfd ended = {.fd = watched, .events = POLLIN};
    while (getppid() == host && poll(&ended, 1, -1) != 1)
        ;
    sleep(2 * GRACE_S);
    if (getppid() == host)
        kill(host, SIGKILL);
    _exit(0);
}

/* False where the parent is gone already. */
static int follow_parent(const char *text) {
    char *end;
    parent = (pid_t)strtol(text, &end, 10);
    if (parent <= 0 || *end)
        return -1;
    struct sigaction action = {.sa_handler = on_parents_death};
    sigaction(SIGHUP, &action, NULL);
    prctl(PR_SET_PDEATHSIG, SIGHUP);
    guard();
    return getppid() == parent;
}

static int parse_ranks(const char *text, uint32_t *first, uint32_t *last) {
    char *end;
    unsigned long a = strtoul(text, &end, 10), b = a;
    if (end == text)
        return -1;
    if (*end == '-')
        b = strtoul(end + 1, &end, 10);
    if (*end || b < a || b >= PROGRAM_MAX_RANKS)
        return -1;
    *first = (uint32_t)a;
    *last = (uint32_t)b;
    return 0;
}

/* NCCL waits for a rank that died until somebody aborts the communicator. Nobody does here: once the job is
 * over for everybody else, this process just ends. */
static void watch(const struct job *job, uint32_t first, uint32_t last) {
    static int looks; /* since the job is over */
    page_look(job->page, first, last);
    uint32_t by = page_aborted_by(job->page);
    if (by == UINT32_MAX || ++looks < GRACE_S * 1000000000ll / WATCH_NS)
        return;
    fprintf(stderr, "[ranks %u to %u] rank %u failed or died, and NCCL waits for it\n", first, last, by);
    _exit(by >= first && by <= last ? EXIT_RANK_FAILED : EXIT_PEER_DIED);
}

static struct timespec soon(void) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_nsec += WATCH_NS;
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    return at;
}

/* Each on a thread of its own; returns the worst of their codes. */
static int run_ranks(const struct job *job, uint32_t first, uint32_t last) {
    pthread_t threads[PROGRAM_MAX_RANKS];
    struct rank_args args[PROGRAM_MAX_RANKS];
    int worst = EXIT_OK;
    uint32_t n = last - first + 1;
    for (uint32_t i = 0; i < n; i++) {
        args[i] = (struct rank_args){.job = job, .rank = first + i};
        if (pthread_create(&threads[i], NULL, run_rank, &args[i]) != 0)
            abort();
    }
    for (uint32_t i = 0; i < n; i++) {
        for (struct timespec until = soon(); pthread_timedjoin_np(threads[i], NULL, &until) == ETIMEDOUT;
             until = soon())
            watch(job, first, last);
        worst = args[i].code > worst ? args[i].code : worst;
    }
    return worst;
}

int main(int argc, char **argv) {
    const char *library = NULL, *program = NULL, *page = NULL, *ranks = NULL;
    int has_parent = 1;
    const struct option options[] = {
        {"nccl", required_argument, NULL, 'n'},   {"program", required_argument, NULL, 'p'},
        {"page", required_argument, NULL, 'j'},   {"ranks", required_argument, NULL, 'r'},
        {"parent", required_argument, NULL, 'a'}, {0}};
    for (int which; (which = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (which == 'n')
            library = optarg;
        else if (which == 'p')
            program = optarg;
        else if (which == 'j')
            page = optarg;
        else if (which == 'r')
            ranks = optarg;
        else if (which == 'a')
            has_parent = follow_parent(optarg);
        if (which == '?' || has_parent < 0) {
            fputs(usage, stderr);
            return EXIT_USAGE;
        }
    }
    if (!has_parent)
        return EXIT_OK;
    uint32_t first, last;
    if (!library || !program || !page || !ranks || optind < argc || parse_ranks(ranks, &first, &last) != 0) {
        fputs(usage, stderr);
        return EXIT_USAGE;
    }
    static struct nccl nccl;
    static struct job job = {.nccl = &nccl};
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    if (program_open(&job.program, program) != 0)
        return EXIT_USAGE;
    const struct program_header *header = job.program.header;
    if (last >= header->n_ranks) {
        fprintf(stderr, "--ranks %s: the program has %u ranks\n", ranks, header->n_ranks);
        return EXIT_USAGE;
    }
    job.page = page_open(page, header->n_ranks, header->n_comms);
    job.alone = first == last;
    if (job.page == NULL || nccl_open(&nccl, library) != 0)
        return EXIT_USAGE;

    return run_ranks(&job, first, last);
}
