/* dynamiccl-plugin-bench: times the plugin's hot paths on one communicator.
 *
 *   - N getCollInfo calls, each timed, in blocks that alternate with blocks of the same loop over an empty
 *     function of the same signature, so that both see the same machine.
 *   - The same in whole blocks without a clock inside, for machines whose counter is coarse.
 *   - The profiler calls of one collective on 8 channels: 26 calls.
 *
 * Prints "ready" and waits for a line on stdin first, so that the caller can stage a decision in the plugin.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "baseline.h"

enum {
    EXIT_OK = 0,
    EXIT_PLUGIN = 1,
    EXIT_USAGE = 2,
    BLOCK = 1000,
    WHOLE_BLOCKS = 101,
    PROFILER_BLOCK = 100,
    CHANNELS = 8,
    RANKS = 8,
    NODES = 2,
    COMM = 1,
};

static const char usage[] = "usage: dynamiccl-plugin-bench --plugin FILE --bytes N --calls N [--pause-us N]\n"
                            "\n"
                            "  --plugin FILE   a tuner (v6) and a profiler (v6) in one library\n"
                            "  --bytes N       size of the all-reduce that it is asked about\n"
                            "  --calls N       how often\n"
                            "  --pause-us N    sleep between blocks of calls\n";

struct bench {
    const struct tuner_v6 *tuner;
    const struct profiler *profiler;
    void *tuner_context, *profiler_context;
    int mask;
    uint64_t bytes, calls, pause_us;
    float cost[N_ALGORITHMS][N_PROTOCOLS];
};

/* ---- clocks ---- */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_us(uint64_t us) {
    struct timespec span = {.tv_sec = (time_t)(us / 1000000u), .tv_nsec = (long)(us % 1000000u) * 1000};
    if (us != 0)
        nanosleep(&span, NULL);
}

static inline uint64_t ticks(void) {
#if defined(__x86_64__)
    uint32_t low, high, core;
    __asm__ volatile("rdtscp" : "=a"(low), "=d"(high), "=c"(core) : : "memory");
    return (uint64_t)high << 32 | low;
#elif defined(__aarch64__)
    uint64_t count;
    __asm__ volatile("isb; mrs %0, cntvct_el0" : "=r"(count) : : "memory");
    return count;
#else
    return now_ns();
#endif
}

static double ns_per_tick(void) {
    uint64_t ns = now_ns(), count = ticks();
    sleep_us(50000);
    return (double)(now_ns() - ns) / (double)(ticks() - count);
}

/* ---- statistics ---- */

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_statistics(const char *name, uint32_t *samples, uint64_t n, double scale) {
    double sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += samples[i];
    qsort(samples, n, sizeof(*samples), compare);
    printf(", \"%s\": {\"p50\": %.2f, \"p99\": %.2f, \"mean\": %.2f}", name, samples[n / 2] * scale,
           samples[n - 1 - n / 100] * scale, sum / (double)n * scale);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *samples, int n) {
    qsort(samples, (size_t)n, sizeof(*samples), compare_doubles);
    return samples[n / 2];
}

static uint32_t clip(uint64_t count) {
    return count > UINT32_MAX ? UINT32_MAX : (uint32_t)count;
}

static void *allocate(uint64_t n) {
    void *memory = calloc(n, sizeof(uint32_t));
    if (memory == NULL)
        abort();
    return memory;
}

/* ---- the tuner ---- */

/* One loop for both functions: the pointer is volatile, so neither call can be inlined. */
static void time_block(get_coll_info_v4_fn volatile *function, const struct bench *bench, uint32_t *samples) {
    for (int i = 0; i < BLOCK; i++) {
        float cost[N_ALGORITHMS][N_PROTOCOLS];
        int n_channels = 0;
        memcpy(cost, bench->cost, sizeof(cost));
        uint64_t from = ticks();
        (*function)(bench->tuner_context, FUNC_ALL_REDUCE, bench->bytes, 1, (float **)(void *)cost,
                    N_ALGORITHMS, N_PROTOCOLS, 0, &n_channels);
        samples[i] = clip(ticks() - from);
    }
}

/* The same without a clock inside: ticks per call over a whole block, below the resolution of the counter. */
static double block_ticks(get_coll_info_v4_fn volatile *function, const struct bench *bench) {
    float cost[N_ALGORITHMS][N_PROTOCOLS];
    uint64_t from = ticks();
    for (int i = 0; i < BLOCK; i++) {
        int n_channels = 0;
        memcpy(cost, bench->cost, sizeof(cost));
        (*function)(bench->tuner_context, FUNC_ALL_REDUCE, bench->bytes, 1, (float **)(void *)cost,
                    N_ALGORITHMS, N_PROTOCOLS, 0, &n_channels);
    }
    return (double)(ticks() - from) / (double)BLOCK;
}

static void bench_tuner(const struct bench *bench, double scale) {
    get_coll_info_v4_fn volatile baseline = baseline_get_coll_info;
    get_coll_info_v4_fn volatile tuner = bench->tuner->get_coll_info;
    uint32_t *with = allocate(bench->calls), *without = allocate(bench->calls);
    for (uint64_t i = 0; i < bench->calls; i += BLOCK) {
        time_block(&tuner, bench, with + i);
        time_block(&baseline, bench, without + i);
        sleep_us(bench->pause_us);
    }
    double whole_with[WHOLE_BLOCKS], whole_without[WHOLE_BLOCKS];
    for (int i = 0; i < WHOLE_BLOCKS; i++) {
        whole_with[i] = block_ticks(&tuner, bench);
        whole_without[i] = block_ticks(&baseline, bench);
        sleep_us(bench->pause_us);
    }
    print_statistics("tuner_ns", with, bench->calls, scale);
    print_statistics("baseline_ns", without, bench->calls, scale);
    printf(", \"tuner_block_ns\": %.2f, \"baseline_block_ns\": %.2f",
           median(whole_with, WHOLE_BLOCKS) * scale, median(whole_without, WHOLE_BLOCKS) * scale);
    free(with);
    free(without);
}

/* ---- the profiler ---- */

/* Returns how many calls that were. */
static int profile_collective(const struct bench *bench, uint64_t sequence) {
    const struct profiler *profiler = bench->profiler;
    struct descr_v5 coll = {.type = EVENT_COLL};
    coll.coll.seq_number = sequence;
    coll.coll.func = "AllReduce";
    coll.coll.count = bench->bytes / 4;
    coll.coll.datatype = "ncclFloat32";
    coll.coll.n_channels = CHANNELS;
    coll.coll.n_warps = 16;
    coll.coll.algo = "RING";
    coll.coll.proto = "SIMPLE";
    void *parent = NULL, *kernels[CHANNELS] = {NULL};
    const uint64_t start = 1700000000000000000u + sequence * 100000;
    int calls = 1 + CHANNELS;
    profiler->start_event(bench->profiler_context, &parent, &coll);
    for (int c = 0; c < CHANNELS; c++) {
        struct descr_v5 kernel = {.type = EVENT_KERNEL_CH, .parent = parent};
        kernel.kernel_ch.channel_id = (uint8_t)c;
        kernel.kernel_ch.p_timer = start + (uint64_t)c;
        profiler->start_event(bench->profiler_context, &kernels[c], &kernel);
    }
    for (int c = 0; c < CHANNELS; c++) {
        if (kernels[c] == NULL)
            continue;
        union state_args_v4 args = {.kernel_ch = {start + 50000 + (uint64_t)c}};
        profiler->record_event_state(kernels[c], STATE_KERNEL_CH_STOP, &args);
        profiler->stop_event(kernels[c]);
        calls += 2;
    }
    if (parent != NULL) {
        profiler->stop_event(parent);
        calls++;
    }
    return calls;
}

static void bench_profiler(const struct bench *bench, double scale) {
    const uint64_t collectives = bench->calls / 10;
    uint32_t *samples = allocate(collectives);
    int calls = 0;
    for (uint64_t i = 0; i < collectives; i++) {
        uint64_t from = ticks();
        calls = profile_collective(bench, i);
        samples[i] = clip(ticks() - from);
        if (i % PROFILER_BLOCK == PROFILER_BLOCK - 1)
            sleep_us(bench->pause_us);
    }
    printf(", \"profiler_calls\": %d, \"profiler_mask\": %d", calls, bench->mask);
    print_statistics("profiler_ns_per_collective", samples, collectives, scale);
    free(samples);
}

/* ---- the communicator ---- */

static void print_log(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    va_list arguments;
    (void)flags, (void)file, (void)line;
    if (level != LOG_LEVEL_WARN)
        return;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

/* As NCCL does: the profiler first, on the same thread. */
static int open_comm(struct bench *bench, const char *path) {
    static struct nvl_domain_info domains = {NODES, RANKS / NODES, RANKS / NODES};
    static struct tuner_constants constants;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "cannot load %s: %s\n", path, dlerror());
        return -1;
    }
    bench->tuner = dlsym(library, "ncclTunerPlugin_v6");
    bench->profiler = dlsym(library, "ncclProfiler_v6");
    if (bench->tuner == NULL || bench->profiler == NULL) {
        fprintf(stderr, "%s lacks ncclTunerPlugin_v6 or ncclProfiler_v6\n", path);
        return -1;
    }
    if (bench->profiler->init.v5(&bench->profiler_context, COMM, &bench->mask, "bench", NODES, RANKS, 0,
                                 print_log) != NCCL_SUCCESS ||
        bench->tuner->init(&bench->tuner_context, COMM, RANKS, NODES, print_log, &domains, &constants) !=
            NCCL_SUCCESS) {
        fprintf(stderr, "%s: init failed\n", path);
        return -1;
    }
    for (int a = 0; a < N_ALGORITHMS; a++)
        for (int p = 0; p < N_PROTOCOLS; p++)
            bench->cost[a][p] = 100.0f;
    return 0;
}

static uint64_t number(const char *text) {
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    return *end || *text == '-' ? 0 : value;
}

int main(int argc, char **argv) {
    const struct option options[] = {{"plugin", required_argument, NULL, 'p'},
                                     {"bytes", required_argument, NULL, 'b'},
                                     {"calls", required_argument, NULL, 'c'},
                                     {"pause-us", required_argument, NULL, 's'},
                                     {0}};
    struct bench bench = {0};
    const char *plugin = NULL;
    bool known = true;
    for (int which; (which = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (which == 'p')
            plugin = optarg;
        else if (which == 'b')
            bench.bytes = number(optarg);
        else if (which == 'c')
            bench.calls = number(optarg);
        else if (which == 's')
            bench.pause_us = number(optarg);
        else
            known = false;
    }
    if (!known || plugin == NULL || bench.bytes == 0 || bench.calls == 0 || optind != argc) {
        fputs(usage, stderr);
        return EXIT_USAGE;
    }
    bench.calls = (bench.calls + BLOCK - 1) / BLOCK * BLOCK;
    if (open_comm(&bench, plugin) != 0)
        return EXIT_PLUGIN;
    char line[64];
    printf("ready\n");
    fflush(stdout);
    if (fgets(line, sizeof(line), stdin) != NULL) {
        const double scale = ns_per_tick();
        printf("{\"calls\": %llu, \"ns_per_tick\": %.6f", (unsigned long long)bench.calls, scale);
        bench_tuner(&bench, scale);
        bench_profiler(&bench, scale);
        printf("}\n");
    }
    bench.tuner->finalize(bench.tuner_context);
    bench.profiler->finalize(bench.profiler_context);
    return EXIT_OK;
}
