/*
 * A tuner and profiler of every version that only checks how it is called, and counts.
 *
 * It knows no layouts beyond what it needs, and none of the host's headers: the point is a second opinion.
 * What it found goes to "$DUMMY_SUMMARY.<pid>" as "name value" lines when the last context is finalized.
 *
 *   DUMMY_MASK         activation mask (default: everything up to KernelLaunch)
 *   DUMMY_MASK_OFF_AT  calls of getCollInfo after which the mask drops to 0
 *   DUMMY_PAIR         "algorithm protocol channels": what to ask for
 *   DUMMY_CHUNK        what getChunkSize answers
 *   DUMMY_ERROR_AT     getCollInfo call that returns an error
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOTS = 1 << 16, NAMES = 64 };
enum {
    GROUP = 1,
    COLL = 2,
    P2P = 4,
    PROXY_OP = 8,
    KERNEL = 64,
    GROUP_API = 256,
    COLL_API = 512,
    LAUNCH = 2048
};

/* ---- counters ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[40];
    long long value;
} counters[NAMES];

static void add_locked(const char *name, long long value) {
    for (int i = 0; i < NAMES; i++) {
        if (counters[i].name[0] == '\0')
            snprintf(counters[i].name, sizeof(counters[i].name), "%s", name);
        if (strcmp(counters[i].name, name) == 0) {
            counters[i].value += value;
            return;
        }
    }
}

static void add(const char *name, long long value) {
    pthread_mutex_lock(&lock);
    add_locked(name, value);
    pthread_mutex_unlock(&lock);
}

static void expect(bool condition, const char *violation) {
    if (!condition)
        add(violation, 1);
}

static long long setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atoll(text) : otherwise;
}

static int n_contexts;
static int *mask_pointer;
static long long n_calls;

static void open_context(void **context, const char *kind) {
    add(kind, 1);
    pthread_mutex_lock(&lock);
    *context = &counters[n_contexts++ % NAMES];
    pthread_mutex_unlock(&lock);
}

static int close_context(const char *kind) {
    add(kind, 1);
    pthread_mutex_lock(&lock);
    const char *prefix = getenv("DUMMY_SUMMARY");
    if (--n_contexts == 0 && prefix != NULL) {
        char path[4096];
        snprintf(path, sizeof(path), "%s.%d", prefix, (int)getpid());
        FILE *file = fopen(path, "w");
        for (int i = 0; i < NAMES && counters[i].name[0] != '\0'; i++)
            fprintf(file, "%s %lld\n", counters[i].name, counters[i].value);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- tuner ---- */

static int decide(float *cost, int n_algorithms, int n_protocols, int *algorithm, int *protocol,
                  int *n_channels) {
    add("get_coll_info", 1);
    n_calls++;
    expect(n_protocols == 3 && (n_algorithms == 6 || n_algorithms == 7), "bad_table_size");
    if (n_algorithms == 6)
        add("tables_of_6", 1);
    expect(*n_channels == 0, "bad_initial_channels");
    if (mask_pointer != NULL && n_calls == setting("DUMMY_MASK_OFF_AT", -1))
        __atomic_store_n(mask_pointer, 0, __ATOMIC_RELAXED);
    const char *pair = getenv("DUMMY_PAIR");
    int a, p, c;
    if (pair != NULL && sscanf(pair, "%d %d %d", &a, &p, &c) == 3) {
        if (cost != NULL)
            cost[a * n_protocols + p] = 0.0f;
        if (algorithm != NULL) {
            *algorithm = a;
            *protocol = p;
        }
        *n_channels = c;
    }
    return n_calls == setting("DUMMY_ERROR_AT", -1) ? 3 : 0;
}

static int tuner_init(size_t n_ranks, size_t n_nodes, void *log, void **context) {
    expect(n_ranks >= n_nodes && n_nodes > 0 && log != NULL, "bad_tuner_init");
    open_context(context, "tuner_init");
    return 0;
}

static int tuner_init_v5(void **context, uint64_t comm, size_t n_ranks, size_t n_nodes,
                         void (*log)(int, unsigned long, const char *, int, const char *, ...), int *nvl,
                         double *constants) {
    (void)comm;
    expect(nvl[0] >= 1 && nvl[1] >= 1 && nvl[2] >= nvl[1], "bad_nvl_domains");
    /* 7*3 + 3*7*3 + 5 * 4*3 numbers that the plugin may change; 0 where an algorithm has none */
    expect(constants[0] > 0 && constants[143] > 0, "bad_constants");
    for (int i = 0; i < 144; i++) {
        expect(constants[i] >= 0 && constants[i] < 1e4, "bad_constants");
        constants[i] *= 1.5;
    }
    log(2, 0x1, __FILE__, __LINE__, "TUNER/Dummy: warning of comm %llu", (unsigned long long)comm);
    log(3, 0x1, __FILE__, __LINE__, "TUNER/Dummy: information");
    return tuner_init(n_ranks, n_nodes, (void *)(uintptr_t)log, context);
}

static int coll_info_v2(void *context, int func, size_t bytes, int collnet, int nvls, int pipe,
                        int *algorithm, int *protocol, int *n_channels) {
    expect(context != NULL && func >= 0 && func < 5 && bytes > 0 && pipe > 0, "bad_call");
    expect(*algorithm == -1 && *protocol == -1 && (collnet | nvls) <= 1, "bad_v2_call");
    return decide(NULL, 6, 3, algorithm, protocol, n_channels);
}

static int coll_info_v3(void *context, int func, size_t bytes, int pipe, float **cost, int n_algorithms,
                        int n_protocols, int *n_channels) {
    expect(context != NULL && func >= 0 && func < 5 && bytes > 0 && pipe > 0, "bad_call");
    return decide((float *)cost, n_algorithms, n_protocols, NULL, NULL, n_channels);
}

static int coll_info_v4(void *context, int func, size_t bytes, int pipe, float **cost, int n_algorithms,
                        int n_protocols, int registered, int *n_channels) {
    expect(registered == 0 || registered == 1, "bad_registered");
    return coll_info_v3(context, func, bytes, pipe, cost, n_algorithms, n_protocols, n_channels);
}

static int chunk_size(void *context, int func, size_t bytes, int algorithm, int protocol, int n_channels,
                      size_t *chunk) {
    expect(context != NULL && func >= 0 && bytes > 0 && algorithm >= 0 && protocol >= 0 && n_channels >= 1 &&
               *chunk > 0,
           "bad_chunk_call");
    add("get_chunk_size", 1);
    *chunk = (size_t)setting("DUMMY_CHUNK", (long long)*chunk);
    return 0;
}

static int tuner_end(void *context) {
    expect(context != NULL, "bad_tuner_end");
    return close_context("tuner_end");
}

#define EXPORT __attribute__((visibility("default")))
EXPORT const void *const ncclTunerPlugin_v2[] = {"Dummy", tuner_init, coll_info_v2, tuner_end};
EXPORT const void *const ncclTunerPlugin_v3[] = {"Dummy", tuner_init, coll_info_v3, tuner_end};
EXPORT const void *const ncclTunerPlugin_v4[] = {"Dummy", tuner_init, coll_info_v4, tuner_end};
EXPORT const void *const ncclTunerPlugin_v5[] = {"Dummy", tuner_init_v5, coll_info_v4, tuner_end};
EXPORT const void *const ncclTunerPlugin_v6[] = {"Dummy", tuner_init_v5, coll_info_v4, tuner_end, chunk_size};

/* ---- profiler ---- */

struct slot {
    _Atomic int type; /* 0: free */
    _Atomic int stops;
    struct slot *coll;
    uint64_t first_start, last_stop; /* GPU time over the Coll's channels */
    int n_channels, n_started, n_stopped;
};

static struct slot slots[SLOTS];
static _Atomic unsigned n_slots;

static struct slot *new_slot(int type) {
    struct slot *slot = &slots[n_slots++ % SLOTS];
    *slot = (struct slot){0};
    slot->type = type;
    return slot;
}

static int profiler_version;

static void *word(void *descr, size_t at) {
    void *value;
    memcpy(&value, (char *)descr + at, sizeof(value));
    return value;
}

/* Offsets of the union are the same in every version: type, parent and rank fill 24 bytes. */
static int start_event(void *context, void **handle, void *descr) {
    long type = profiler_version <= 4 ? *(uint8_t *)descr : (long)*(uint64_t *)descr;
    char name[40];
    snprintf(name, sizeof(name), "start_%ld", type);
    add(name, 1);
    expect(context != NULL, "bad_context");
    struct slot *parent = word(descr, 8);
    struct slot *slot = new_slot((int)type);
    *handle = slot;
    if (type == COLL) {
        /* v1 to v3 begin with the communicator's name and hash */
        size_t at = profiler_version <= 3 ? 40 : 24;
        if (profiler_version <= 3) {
            expect(word(descr, 24) != NULL && strncmp(word(descr, 24), "world", 5) == 0, "bad_comm_name");
            expect((uintptr_t)word(descr, 32) != 0, "bad_comm_hash");
        }
        expect((uintptr_t)word(descr, at) < 1u << 30, "bad_sequence");
        if (profiler_version >= 2) {
            const char *func = word(descr, at + 8);
            add(func, 1);
            add(word(descr, at + 48), 1);
            expect(strncmp(word(descr, at + 48), "ncclFloat32", 11) == 0 ||
                       strncmp(word(descr, at + 48), "ncclInt8", 8) == 0,
                   "bad_datatype");
        }
        if (profiler_version >= 4) {
            slot->n_channels = *((uint8_t *)descr + at + 56);
            expect(*((uint8_t *)descr + at + 57) >= 1, "bad_warps");
            const char *algo = word(descr, at + 64), *proto = word(descr, at + 72);
            expect(strcmp(algo, "RING") == 0 || strcmp(algo, "TREE") == 0, "bad_algorithm");
            expect(strcmp(proto, "LL128") == 0 || strcmp(proto, "SIMPLE") == 0 || strcmp(proto, "LL") == 0,
                   "bad_protocol");
        }
        int expected = profiler_version >= 5 ? COLL_API : GROUP;
        expect(parent != NULL && parent->type == expected, "bad_coll_parent");
        if (profiler_version >= 5) {
            struct slot *group = word(descr, at + 80);
            expect(group != NULL && group->type == GROUP, "bad_parent_group");
        }
    } else if (type == KERNEL || type == PROXY_OP) {
        bool foreign = type == PROXY_OP && *(pid_t *)((char *)descr + 24) != getpid();
        if (foreign) {
            add("foreign", 1);
            return 0;
        }
        expect(parent != NULL && (parent->type == COLL || parent->type == P2P), "bad_child_parent");
        slot->coll = parent;
        if (type == KERNEL) {
            int channel = *((uint8_t *)descr + 24);
            expect(channel < 64, "bad_channel");
            if (channel >= 8)
                add("high_channels", 1);
            if (profiler_version >= 4 && parent != NULL) {
                uint64_t start = (uint64_t)(uintptr_t)word(descr, 32);
                if (parent->n_started++ == 0 || start < parent->first_start)
                    parent->first_start = start;
            }
            if (parent != NULL && parent->stops > 0)
                add("kernels_after_stop", 1);
            else
                add("kernels_before_stop", 1);
        }
    }
    return 0;
}

static int stop_event(void *handle) {
    struct slot *slot = handle;
    char name[40];
    snprintf(name, sizeof(name), "stop_%d", slot->type);
    add(name, 1);
    if (slot->stops++ > 0)
        add("stopped_twice", 1);
    struct slot *coll = slot->coll;
    if (slot->type == KERNEL && coll != NULL && coll->type == COLL && profiler_version >= 4) {
        expect(coll->n_started == coll->n_channels || coll->n_stopped < coll->n_channels, "bad_child_count");
        if (++coll->n_stopped == coll->n_channels)
            add("exec_ns", (long long)(coll->last_stop - coll->first_start));
    }
    return 0;
}

static int record_event_state(void *handle, int state, void *args) {
    struct slot *slot = handle;
    char name[40];
    snprintf(name, sizeof(name), "state_%d", state);
    add(name, 1);
    if (state == 22) {
        uint64_t timer;
        memcpy(&timer, args, sizeof(timer));
        expect(slot->type == KERNEL && slot->stops == 0, "bad_record");
        if (timer == 0)
            add("bad_timers", 1);
        else if (slot->coll != NULL && timer > slot->coll->last_stop)
            slot->coll->last_stop = timer;
    } else if (state == 23 || state == 24) {
        expect(slot->type == GROUP_API && args == NULL && slot->stops == 0, "bad_api_record");
    }
    return 0;
}

static int profiler_begin(int version, void **context, int *mask) {
    profiler_version = version;
    mask_pointer = mask;
    __atomic_store_n(mask, (int)setting("DUMMY_MASK", 0xfff), __ATOMIC_RELAXED);
    expect(n_calls == 0, "late_profiler_init");
    open_context(context, "profiler_init");
    return 0;
}

#define INIT_BEFORE_V4(version)                                                                              \
    static int init_v##version(void **context, int *mask) {                                                  \
        return profiler_begin(version, context, mask);                                                       \
    }
INIT_BEFORE_V4(1)
INIT_BEFORE_V4(2)
INIT_BEFORE_V4(3)

static int check_init(const char *name, uint64_t comm, int n_nodes, int n_ranks, int rank, void *log) {
    expect(strncmp(name, "world", 5) == 0 && comm != 0 && log != NULL, "bad_profiler_init");
    expect(n_nodes > 0 && n_ranks >= n_nodes && rank >= 0 && rank < n_ranks, "bad_profiler_init");
    return 0;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t comm, int n_nodes, int n_ranks,
                   int rank, void *log) {
    check_init(name, comm, n_nodes, n_ranks, rank, log);
    return profiler_begin(4, context, mask);
}

static int init_v5(void **context, uint64_t comm, int *mask, const char *name, int n_nodes, int n_ranks,
                   int rank, void *log) {
    check_init(name, comm, n_nodes, n_ranks, rank, log);
    return profiler_begin(5, context, mask);
}

static int init_v6(void **context, uint64_t comm, int *mask, const char *name, int n_nodes, int n_ranks,
                   int rank, void *log) {
    check_init(name, comm, n_nodes, n_ranks, rank, log);
    return profiler_begin(6, context, mask);
}

static int profiler_end(void *context) {
    expect(context != NULL, "bad_profiler_end");
    return close_context("profiler_end");
}

#define PROFILER(version)                                                                                    \
    EXPORT const void *const ncclProfiler_v##version[] = {"Dummy",    init_v##version,    start_event,       \
                                                          stop_event, record_event_state, profiler_end}
PROFILER(1);
PROFILER(2);
PROFILER(3);
PROFILER(4);
PROFILER(5);
PROFILER(6);
