/* dynamiccl-nccl-host: runs one rank of an emulated NCCL job, or times the plugin's calls. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

static const char usage[] =
    "usage: dynamiccl-nccl-host [bench] --program FILE --plugin PATH [options]\n"
    "\n"
    "  --program FILE         what to run and how long it takes (written by plugin_bridge/emulation.py)\n"
    "  --plugin PATH          the tuner and profiler plugin\n"
    "  --rank R               communicator rank (0)\n"
    "  --tuner-abi N          2 to 6, 0 for no tuner (6)\n"
    "  --profiler-abi N       1 to 6, 0 for no profiler (6)\n"
    "  --communicators N      communicators per process (1)\n"
    "  --seed N               of delays and event order (0)\n"
    "  --verbose              print the plugin's INFO messages too\n"
    "  --anonymous            give profilers v1 to v3 no communicator name or hash\n"
    "run a rank:\n"
    "  --job FILE             the job page\n"
    "  --process I            this process's place in it (0)\n"
    "  --log FILE             what every collective really used\n"
    "  --max-delay-us N       now and then sleep up to N microseconds (0)\n"
    "  --p2p-every N          a send after every N collectives of a communicator (0: none)\n"
    "  --aggregate-every N    every N-th collective is an aggregate of two (0: none)\n"
    "  --pxn-every N          a foreign ProxyOp with every N-th collective (0: none)\n"
    "  --bad-timers PERMILLE  KernelCh stop timers that read 0 (0)\n"
    "bench:\n"
    "  --calls N              getCollInfo calls to time (100000)\n"
    "  --pause-us N           between blocks (0)\n";

static void on_signal(int signal) {
    (void)signal;
    job_signalled = 1;
}

/* Reads a number in [low, high]; the value is left alone and 0 returned where the text is none. */
static int number(const char *text, uint64_t low, uint64_t high, uint64_t *value) {
    char *end;
    errno = 0;
    unsigned long long parsed = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || parsed < low || parsed > high)
        return 0;
    *value = parsed;
    return 1;
}

enum option_kind { TEXT, FLAG, NUMBER };

struct option_value {
    const char *name;
    enum option_kind kind;
    uint64_t high;
    const char **text;
    int *flag;
    uint64_t *number;
};

static int parse(int argc, char **argv, const struct option_value *values, int n) {
    struct option longs[32] = {{0}};
    for (int i = 0; i < n; i++)
        longs[i] = (struct option){values[i].name, values[i].kind == FLAG ? no_argument : required_argument,
                                   NULL, i + 1};
    for (;;) {
        int which = getopt_long(argc, argv, "", longs, NULL);
        if (which == -1)
            break;
        if (which == '?')
            return -1;
        const struct option_value *value = &values[which - 1];
        if (value->kind == TEXT) {
            *value->text = optarg;
        } else if (value->kind == FLAG) {
            *value->flag = 1;
        } else if (!number(optarg, 0, value->high, value->number)) {
            fprintf(stderr, "--%s %s: expected a number up to %llu\n", value->name, optarg,
                    (unsigned long long)value->high);
            return -1;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "unexpected argument %s\n", argv[optind]);
        return -1;
    }
    return 0;
}

static int check(const struct options *options, int bench) {
    const char *missing = NULL;
    if (options->program == NULL)
        missing = "--program";
    else if (options->plugin == NULL)
        missing = "--plugin";
    else if (!bench && options->job == NULL)
        missing = "--job";
    else if (!bench && options->log == NULL)
        missing = "--log";
    else if (options->tuner_abi == 1)
        missing = "--tuner-abi 2 to 6 (or 0)";
    else if (options->communicators < 1)
        missing = "--communicators of at least 1";
    if (missing == NULL)
        return 0;
    fprintf(stderr, "missing %s\n\n%s", missing, usage);
    return -1;
}

int main(int argc, char **argv) {
    struct options options = {0};
    uint64_t rank = 0, process = 0, tuner_abi = 6, profiler_abi = 6, bad_timers = 0, communicators = 1;
    options.calls = 100000;
    const struct option_value values[] = {
        {"program", TEXT, 0, &options.program, NULL, NULL},
        {"job", TEXT, 0, &options.job, NULL, NULL},
        {"plugin", TEXT, 0, &options.plugin, NULL, NULL},
        {"log", TEXT, 0, &options.log, NULL, NULL},
        {"process", NUMBER, 4095, NULL, NULL, &process},
        {"rank", NUMBER, INT_MAX, NULL, NULL, &rank},
        {"tuner-abi", NUMBER, 6, NULL, NULL, &tuner_abi},
        {"profiler-abi", NUMBER, 6, NULL, NULL, &profiler_abi},
        {"communicators", NUMBER, MAX_COMMUNICATORS, NULL, NULL, &communicators},
        {"seed", NUMBER, UINT64_MAX, NULL, NULL, &options.seed},
        {"max-delay-us", NUMBER, 10000000, NULL, NULL, &options.max_delay_us},
        {"p2p-every", NUMBER, UINT64_MAX, NULL, NULL, &options.p2p_every},
        {"aggregate-every", NUMBER, UINT64_MAX, NULL, NULL, &options.aggregate_every},
        {"pxn-every", NUMBER, UINT64_MAX, NULL, NULL, &options.pxn_every},
        {"bad-timers", NUMBER, 1000, NULL, NULL, &bad_timers},
        {"calls", NUMBER, 100000000, NULL, NULL, &options.calls},
        {"pause-us", NUMBER, 10000000, NULL, NULL, &options.pause_us},
        {"verbose", FLAG, 0, NULL, &options.verbose, NULL},
        {"anonymous", FLAG, 0, NULL, &options.anonymous, NULL},
    };
    const int bench = argc > 1 && strcmp(argv[1], "bench") == 0;
    if (parse(argc - bench, argv + bench, values, (int)(sizeof(values) / sizeof(values[0]))) != 0) {
        fputs(usage, stderr);
        return EXIT_USAGE;
    }
    options.rank = (int)rank;
    options.process = (uint32_t)process;
    options.tuner_abi = (int)tuner_abi;
    options.profiler_abi = (int)profiler_abi;
    options.bad_timers_permille = (int)bad_timers;
    options.communicators = (int)communicators;
    if (check(&options, bench) != 0)
        return EXIT_USAGE;

    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    return bench ? run_bench(&options) : run_rank(&options);
}
