/*
 * Times the plugin's hot paths on one communicator.
 *
 *   - N getCollInfo calls, each timed, in blocks that alternate with blocks of the same loop over an empty
 *     function of the same signature, so that both see the same machine.
 *   - The same in whole blocks without a clock inside, for machines whose counter is coarse.
 *   - The profiler calls of one collective on 8 channels: 26 calls.
 *
 * Prints "ready" and waits for a line on stdin first, so that the caller can stage a decision in the plugin.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "bench_baseline.h"
#include "clock.h"
#include "rank.h"

enum {
    BLOCK = 1000,
    WHOLE_BLOCKS = 101,
    PROFILER_BLOCK = 100,
    CHANNELS = 8,
    PROFILER_CALLS = 2 + 3 * CHANNELS
};

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
    return host_ns();
#endif
}

static double ns_per_tick(void) {
    uint64_t ns = host_ns(), count = ticks();
    sleep_ns(50000000);
    return (double)(host_ns() - ns) / (double)(ticks() - count);
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_statistics(const char *name, uint32_t *samples, uint64_t n, double scale) {
    double sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += samples[i];
    qsort(samples, n, sizeof(*samples), compare);
    printf("\"%s\": {\"p50\": %.2f, \"p99\": %.2f, \"mean\": %.2f}", name, samples[n / 2] * scale,
           samples[n - 1 - n / 100] * scale, sum / (double)n * scale);
}

static uint32_t clip(uint64_t count) {
    return count > UINT32_MAX ? UINT32_MAX : (uint32_t)count;
}

/* One loop for both functions: the pointer is volatile, so neither call can be inlined. */
static void time_block(get_coll_info_v4_fn volatile *function, void *context, const struct host *host,
                       uint64_t first, uint64_t n, uint32_t *samples) {
    const struct program *program = &host->program;
    for (uint64_t i = 0; i < n; i++) {
        const struct program_key *key =
            &program->keys[program->order[(first + i) % program->header->order_length]];
        float cost[N_ALGORITHMS][N_PROTOCOLS];
        int n_channels = 0;
        memcpy(cost, key->cost_us, sizeof(cost));
        uint64_t from = ticks();
        (*function)(context, (int)key->collective, key->bytes, (int)key->pipe_ops, (float **)(void *)cost,
                    host->tuner.n_algorithms, N_PROTOCOLS, 0, &n_channels);
        samples[i] = clip(ticks() - from);
    }
}

/* The same without a clock inside: ns per call over a whole block, below the resolution of the counter. */
static double block_ticks(get_coll_info_v4_fn volatile *function, void *context, const struct host *host,
                          uint64_t n) {
    const struct program_key *key = &host->program.keys[0];
    float cost[N_ALGORITHMS][N_PROTOCOLS];
    uint64_t from = ticks();
    for (uint64_t i = 0; i < n; i++) {
        int n_channels = 0;
        memcpy(cost, key->cost_us, sizeof(cost));
        (*function)(context, (int)key->collective, key->bytes, (int)key->pipe_ops, (float **)(void *)cost,
                    host->tuner.n_algorithms, N_PROTOCOLS, 0, &n_channels);
    }
    return (double)(ticks() - from) / (double)n;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *samples, int n) {
    qsort(samples, (size_t)n, sizeof(*samples), compare_doubles);
    return samples[n / 2];
}

static void profile_collective(struct host *host, struct communicator *comm, uint64_t sequence) {
    const struct profiler *profiler = host->profiler.is;
    struct descr_v5 coll = {.type = EVENT_COLL, .rank = host->options->rank};
    coll.coll.seq_number = sequence;
    coll.coll.func = "AllReduce";
    coll.coll.count = 1 << 20;
    coll.coll.datatype = "ncclFloat32";
    coll.coll.n_channels = CHANNELS;
    coll.coll.n_warps = 16;
    coll.coll.algo = "RING";
    coll.coll.proto = "SIMPLE";
    void *parent = NULL, *kernels[CHANNELS] = {NULL};
    const uint64_t start = 1700000000000000000u + sequence * 100000;
    profiler->start_event(comm->profiler_context, &parent, &coll);
    for (int c = 0; c < CHANNELS; c++) {
        struct descr_v5 kernel = {.type = EVENT_KERNEL_CH, .parent = parent};
        kernel.kernel_ch.channel_id = (uint8_t)c;
        kernel.kernel_ch.p_timer = start + (uint64_t)c;
        profiler->start_event(comm->profiler_context, &kernels[c], &kernel);
    }
    for (int c = 0; c < CHANNELS; c++) {
        if (kernels[c] == NULL)
            continue;
        union state_args_v4 args = {.kernel_ch = {start + 50000 + (uint64_t)c}};
        profiler->record_event_state(kernels[c], STATE_KERNEL_CH_STOP, &args);
        profiler->stop_event(kernels[c]);
    }
    if (parent != NULL)
        profiler->stop_event(parent);
}

static void bench(struct host *host, const struct options *options) {
    struct communicator *comm = &host->communicators[0];
    get_coll_info_v4_fn volatile baseline = baseline_get_coll_info;
    get_coll_info_v4_fn volatile tuner = host->tuner.is.v4->get_coll_info;
    const uint64_t calls = (options->calls + BLOCK - 1) / BLOCK * BLOCK;
    const uint64_t collectives = calls / 10;
    uint32_t *with = calloc(calls, sizeof(*with));
    uint32_t *without = calloc(calls, sizeof(*without));
    uint32_t *profiled = calloc(collectives, sizeof(*profiled));
    if (with == NULL || without == NULL || profiled == NULL)
        abort();
    const double scale = ns_per_tick();
    for (uint64_t i = 0; i < calls; i += BLOCK) {
        time_block(&tuner, comm->tuner_context, host, i, BLOCK, with + i);
        time_block(&baseline, comm->tuner_context, host, i, BLOCK, without + i);
        if (options->pause_us != 0)
            sleep_ns(options->pause_us * 1000);
    }
    double whole_with[WHOLE_BLOCKS], whole_without[WHOLE_BLOCKS];
    for (int i = 0; i < WHOLE_BLOCKS; i++) {
        whole_with[i] = block_ticks(&tuner, comm->tuner_context, host, BLOCK);
        whole_without[i] = block_ticks(&baseline, comm->tuner_context, host, BLOCK);
        if (options->pause_us != 0)
            sleep_ns(options->pause_us * 1000);
    }
    for (uint64_t i = 0; host->profiler.abi != 0 && i < collectives; i++) {
        uint64_t from = ticks();
        profile_collective(host, comm, i);
        profiled[i] = clip(ticks() - from);
        if (options->pause_us != 0 && i % PROFILER_BLOCK == PROFILER_BLOCK - 1)
            sleep_ns(options->pause_us * 1000);
    }
    printf("{\"calls\": %llu, \"ns_per_tick\": %.6f, ", (unsigned long long)calls, scale);
    print_statistics("tuner_ns", with, calls, scale);
    printf(", ");
    print_statistics("baseline_ns", without, calls, scale);
    printf(", \"tuner_block_ns\": %.2f, \"baseline_block_ns\": %.2f",
           median(whole_with, WHOLE_BLOCKS) * scale, median(whole_without, WHOLE_BLOCKS) * scale);
    if (host->profiler.abi != 0) {
        printf(", \"profiler_calls\": %d, \"profiler_mask\": %d, ", PROFILER_CALLS,
               profiler_mask(&host->profiler));
        print_statistics("profiler_ns_per_collective", profiled, collectives, scale);
    }
    printf("}\n");
    free(with);
    free(without);
    free(profiled);
}

int run_bench(const struct options *options) {
    static struct host host;
    int code = EXIT_HOST_ERROR;
    if (options->tuner_abi < 4 || (options->profiler_abi != 0 && options->profiler_abi < 5)) {
        fprintf(stderr, "bench needs --tuner-abi 4 to 6 and --profiler-abi 5, 6 or 0\n");
        return EXIT_USAGE;
    }
    if (host_open(&host, options) == 0 && communicator_open(&host, 0) == 0) {
        char line[64];
        printf("ready\n");
        fflush(stdout);
        if (fgets(line, sizeof(line), stdin) != NULL) {
            bench(&host, options);
            code = EXIT_OK;
        }
    }
    if (host_finalize(&host) != 0)
        code = EXIT_HOST_ERROR;
    host_close(&host);
    return code;
}
