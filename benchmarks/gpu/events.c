/* A profiler between NCCL and another one, for measuring what events cost. NCCL keeps the mask of the events
 * that it reports in one int for the process, hands its address to every profiler, and reads it again for
 * every group. This one remembers the address, so that events can be turned off and on while the job runs.
 * With GPU_BENCH_SWALLOW=1 it passes no event on: a profiler that does nothing, under the same mask.
 *
 * GPU_BENCH_PROFILER names the profiler behind it. Profiler interfaces v4 to v6 (NCCL 2.27 on), whose tables
 * have the same six entries. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define SUCCESS 0
#define INTERNAL_ERROR 3

typedef int (*init_v4)(void **, int *, const char *, uint64_t, int, int, int, void *);
typedef int (*init_v5)(void **, uint64_t, int *, const char *, int, int, int, void *);

struct profiler {
    const char *name;
    void *init;
    int (*start)(void *, void **, void *);
    int (*stop)(void *);
    int (*state)(void *, int, void *);
    int (*finalize)(void *);
};

EXPORT extern struct profiler ncclProfiler_v4, ncclProfiler_v5, ncclProfiler_v6;

static const struct profiler *behind[7];
static int *mask;
static int wanted; /* what the profiler behind asked for */

/* Loading order does not matter: init may run on several threads, and all of them store the same address. */
static int remember(int *address, int result) {
    wanted |= __atomic_load_n(address, __ATOMIC_RELAXED);
    __atomic_store_n(&mask, address, __ATOMIC_RELEASE);
    return result;
}

static int start_v4(void **context, int *events, const char *name, uint64_t id, int nodes, int ranks,
                    int rank, void *log) {
    if (!behind[4])
        return INTERNAL_ERROR;
    return remember(events, ((init_v4)behind[4]->init)(context, events, name, id, nodes, ranks, rank, log));
}

static int start_v5(void **context, uint64_t id, int *events, const char *name, int nodes, int ranks,
                    int rank, void *log) {
    if (!behind[5])
        return INTERNAL_ERROR;
    return remember(events, ((init_v5)behind[5]->init)(context, id, events, name, nodes, ranks, rank, log));
}

static int start_v6(void **context, uint64_t id, int *events, const char *name, int nodes, int ranks,
                    int rank, void *log) {
    if (!behind[6])
        return INTERNAL_ERROR;
    return remember(events, ((init_v5)behind[6]->init)(context, id, events, name, nodes, ranks, rank, log));
}

/* A handle that is not NULL: NCCL skips the children of an event without one. */
static int swallow_start(void *context, void **handle, void *descriptor) {
    static char event;
    (void)context;
    (void)descriptor;
    *handle = &event;
    return SUCCESS;
}

static int swallow_stop(void *handle) {
    (void)handle;
    return SUCCESS;
}

static int swallow_state(void *handle, int state, void *arguments) {
    (void)handle;
    (void)state;
    (void)arguments;
    return SUCCESS;
}

#define PROFILER(version, initialise)                                                                        \
    struct profiler ncclProfiler_v##version = {"events",     (void *)(initialise), swallow_start,            \
                                               swallow_stop, swallow_state,        swallow_stop}
PROFILER(4, start_v4);
PROFILER(5, start_v5);
PROFILER(6, start_v6);

static void adopt(void *library, int version, const char *symbol, struct profiler *ours, int swallow) {
    behind[version] = dlsym(library, symbol);
    if (!behind[version])
        return;
    ours->finalize = behind[version]->finalize;
    if (swallow)
        return;
    ours->start = behind[version]->start;
    ours->stop = behind[version]->stop;
    ours->state = behind[version]->state;
}

__attribute__((constructor)) static void load(void) {
    const char *path = getenv("GPU_BENCH_PROFILER"), *quiet = getenv("GPU_BENCH_SWALLOW");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "events: GPU_BENCH_PROFILER=%s cannot be loaded: %s\n", path ? path : "(not set)",
                path ? dlerror() : "name a profiler plugin");
        return;
    }
    int swallow = quiet && !strcmp(quiet, "1");
    adopt(library, 4, "ncclProfiler_v4", &ncclProfiler_v4, swallow);
    adopt(library, 5, "ncclProfiler_v5", &ncclProfiler_v5, swallow);
    adopt(library, 6, "ncclProfiler_v6", &ncclProfiler_v6, swallow);
}

/* Returns the mask that is in force afterwards, or -1 before any communicator was made. */
EXPORT int gpu_bench_mask(int on) {
    int *address = __atomic_load_n(&mask, __ATOMIC_ACQUIRE);
    if (!address)
        return -1;
    __atomic_store_n(address, on ? wanted : 0, __ATOMIC_RELAXED);
    return on ? wanted : 0;
}
