/* dynamiccl-nccl-job: some ranks of a job, each a thread with a GPU of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

static const char usage[] =
    "usage: dynamiccl-nccl-job --nccl LIBRARY --program FILE --page FILE --ranks A-B\n"
    "\n"
    "  --nccl LIBRARY   NCCL on a virtual GPU: libnccl.so.2 of `make real-nccl`, or libnccl-emulated.so\n"
    "  --program FILE   what the ranks do (written by plugin_bridge/program.py)\n"
    "  --page FILE      the job page\n"
    "  --ranks A-B      which ranks run in this process; A alone for one\n";

static void on_signal(int signal) {
    (void)signal;
    job_signalled = 1;
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

int main(int argc, char **argv) {
    const char *library = NULL, *program = NULL, *page = NULL, *ranks = NULL;
    const struct option options[] = {{"nccl", required_argument, NULL, 'n'},
                                     {"program", required_argument, NULL, 'p'},
                                     {"page", required_argument, NULL, 'j'},
                                     {"ranks", required_argument, NULL, 'r'},
                                     {0}};
    for (int which; (which = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (which == 'n')
            library = optarg;
        else if (which == 'p')
            program = optarg;
        else if (which == 'j')
            page = optarg;
        else if (which == 'r')
            ranks = optarg;
        else
            ranks = library = NULL;
    }
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
    if (job.page == NULL || nccl_open(&nccl, library) != 0)
        return EXIT_USAGE;

    pthread_t threads[PROGRAM_MAX_RANKS];
    struct rank_args args[PROGRAM_MAX_RANKS];
    int worst = EXIT_OK;
    uint32_t n = last - first + 1;
    for (uint32_t i = 0; i < n; i++) {
        args[i] = (struct rank_args){.job = &job, .rank = first + i};
        if (pthread_create(&threads[i], NULL, run_rank, &args[i]) != 0)
            abort();
    }
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        worst = args[i].code > worst ? args[i].code : worst;
    }
    return worst;
}
