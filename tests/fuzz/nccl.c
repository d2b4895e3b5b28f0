#define _GNU_SOURCE
/* The tuner's half; the profiler's is in events.c. */
#include "nccl.h"

#include <stdarg.h>
#include <string.h>
#include <time.h>

#include "comm.h"
#include "scribble.h"

#define MOST_ALGOS 9
#define MOST_PROTOS 4
#define LARGEST_CHUNK ((size_t)1 << DCC_MAX_CHUNK_LOG2)

extern const struct nccl_tuner_v2 ncclTunerPlugin_v2;
extern const struct nccl_tuner_v3 ncclTunerPlugin_v3;
extern const struct nccl_tuner_v4 ncclTunerPlugin_v4;
extern const struct nccl_tuner_v5 ncclTunerPlugin_v5;
extern const struct nccl_tuner_v6 ncclTunerPlugin_v6;

#define MOST_NAPS 100

struct rank ranks[RANKS];

static unsigned naps;

/* Looks at every argument, as NCCL's own does. */
static void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    char text[1024];
    va_list arguments;
    (void)level, (void)flags, (void)file, (void)line;
    va_start(arguments, format);
    MUST(vsnprintf(text, sizeof text, format, arguments) > 0);
    va_end(arguments);
}

void nccl_attach_tuner(struct rank *rank, struct input *in) {
    if (rank->tuner_abi)
        return;
    uint8_t how = take8(in);
    unsigned abi = 2 + how % 5;
    uint64_t id = take(in, 1);
    size_t n = take(in, 1), nodes = 1 + (how >> 5);
    nccl_logger log = how & 16 ? log_line : NULL;
    int result;
    switch (abi) {
    case 2:
        result = ncclTunerPlugin_v2.init(n, nodes, log, &rank->tuner);
        break;
    case 3:
        result = ncclTunerPlugin_v3.init(n, nodes, log, &rank->tuner);
        break;
    case 4:
        result = ncclTunerPlugin_v4.init(n, nodes, log, &rank->tuner);
        break;
    case 5:
        result = ncclTunerPlugin_v5.init(&rank->tuner, id, n, nodes, log, NULL, NULL);
        break;
    default:
        result = ncclTunerPlugin_v6.init(&rank->tuner, id, n, nodes, log, NULL, NULL);
    }
    MUST(result == NCCL_SUCCESS && rank->tuner);
    rank->tuner_abi = abi;
}

void nccl_detach_tuner(struct rank *rank) {
    int result = NCCL_SUCCESS;
    switch (rank->tuner_abi) {
    case 0:
        return;
    case 2:
        result = ncclTunerPlugin_v2.destroy(rank->tuner);
        break;
    case 3:
        result = ncclTunerPlugin_v3.destroy(rank->tuner);
        break;
    case 4:
        result = ncclTunerPlugin_v4.destroy(rank->tuner);
        break;
    case 5:
        result = ncclTunerPlugin_v5.finalize(rank->tuner);
        break;
    default:
        result = ncclTunerPlugin_v6.finalize(rank->tuner);
    }
    MUST(result == NCCL_SUCCESS);
    rank->tuner_abi = 0;
    rank->tuner = NULL;
}

static bool takes_any_count(int algo, bool several_nodes) {
    return algo == 2 || algo == 3 || (algo == 4 && several_nodes);
}

/* v2 shows no costs: ring and tree with LL and Simple, tree for all-reduce alone. */
static void decide_v2(struct rank *rank, int func, size_t bytes, int pipe_ops, uint8_t how) {
    int algorithm = -1, protocol = -1, channels = -7, collnet = how & 1, nvls = how >> 1 & 1;
    int result = ncclTunerPlugin_v2.getCollInfo(rank->tuner, func, bytes, collnet, nvls, pipe_ops, &algorithm,
                                                &protocol, &channels);
    MUST(result == NCCL_SUCCESS);
    MUST((algorithm == -1) == (protocol == -1));
    MUST(algorithm == -1 || algorithm == 1 || (algorithm == 0 && func == 4));
    MUST(protocol == -1 || protocol == 0 || protocol == 2);
    MUST(channels == -7 || (channels >= 1 && channels <= COMM_CHANNELS));
    if (algorithm == -1 && (collnet || nvls))
        MUST(channels == -7);
}

static int cheapest(const float *cost, int cells, int protos) {
    int best = -1;
    for (int i = 0; i < cells; i++)
        if (cost[i] >= 0 && (best < 0 || cost[i] < cost[best]))
            best = i;
    return best < 0 ? -1 : best / protos;
}

static void decide_v3(struct rank *rank, int func, size_t bytes, int pipe_ops, uint8_t how,
                      struct input *in) {
    int algos = how & 4 ? take8(in) % (MOST_ALGOS + 1) : DCC_ALGOS;
    int protos = how & 8 ? take8(in) % (MOST_PROTOS + 1) : DCC_PROTOS;
    int cells = algos * protos, channels = -7, result;
    float before[MOST_ALGOS * MOST_PROTOS];
    /* As large as it is said to be, so that nothing beyond it goes unseen. */
    float *cost = malloc(cells ? (size_t)cells * sizeof *cost : 1);
    MUST(cost);
    uint64_t offered = how & 16 ? take(in, 4) : UINT64_MAX;
    for (int i = 0; i < cells; i++)
        before[i] = offered >> (i % 32) & 1 ? (float)(i * 7 % 11) + 1.0f : i % 5 ? -1.0f : __builtin_nanf("");
    memcpy(cost, before, (size_t)cells * sizeof *cost);
    if (rank->tuner_abi == 3)
        result = ncclTunerPlugin_v3.getCollInfo(rank->tuner, func, bytes, pipe_ops, (float **)cost, algos,
                                                protos, &channels);
    else if (rank->tuner_abi == 4)
        result = ncclTunerPlugin_v4.getCollInfo(rank->tuner, func, bytes, pipe_ops, (float **)cost, algos,
                                                protos, how & 1, &channels);
    else
        result = ncclTunerPlugin_v6.getCollInfo(rank->tuner, func, bytes, pipe_ops, (float **)cost, algos,
                                                protos, how & 1, &channels);
    MUST(result == NCCL_SUCCESS);
    int changed = -1;
    for (int i = 0; i < cells; i++)
        if (memcmp(&cost[i], &before[i], sizeof *cost) != 0) {
            MUST(changed < 0 && before[i] >= 0 && cost[i] == 0);
            changed = i;
        }
    if (channels != -7) {
        int algo = changed < 0 ? cheapest(before, cells, protos) : changed / protos;
        MUST(channels >= 1 && channels <= COMM_CHANNELS);
        MUST(!takes_any_count(algo, ((struct comm *)rank->tuner)->several_nodes));
    }
    free(cost);
}

/* A call waits at a hold: the other process goes on, and if it has no more to do, NCCL aborts the
 * communicator. */
int fuzz_nanosleep(const struct timespec *time, struct timespec *left);

int fuzz_nanosleep(const struct timespec *time, struct timespec *left) {
    (void)time, (void)left;
    MUST(naps++ < MOST_NAPS);
    if (!scribble_now())
        for (unsigned i = 0; i < RANKS; i++)
            if (ranks[i].tuner)
                atomic_store(&((struct comm *)ranks[i].tuner)->closing, 1);
    return 0;
}

void nccl_call(struct rank *rank, int func, size_t bytes, int pipe_ops, uint8_t how, struct input *in) {
    naps = 0;
    if (rank->tuner_abi == 2)
        decide_v2(rank, func, bytes, pipe_ops, how);
    else if (rank->tuner_abi)
        decide_v3(rank, func, bytes, pipe_ops, how, in);
    else
        return;
    struct comm *comm = rank->tuner;
    /* Nobody is in a call any more; an abort was for this one. */
    MUST(atomic_load(&comm->waiting) == 0);
    atomic_store(&comm->closing, 0);
}

void nccl_decide(struct rank *rank, struct input *in) {
    uint8_t what = take8(in), how = take8(in);
    int func = what & 32 ? (int)take(in, 4) : what % 8 - 1;
    nccl_call(rank, func, take_bytes(in), what >> 6, how, in);
}

void nccl_chunk(struct rank *rank, struct input *in) {
    static const size_t grain[DCC_PROTOS] = {16, 1920, 512};
    uint8_t what = take8(in);
    int func = what % 8 - 1, algo = take8(in) % 9 - 1, proto = (what >> 3) % 5 - 1;
    size_t chunk = 12345;
    if (rank->tuner_abi != 6)
        return;
    MUST(ncclTunerPlugin_v6.getChunkSize(rank->tuner, func, 1 << 20, algo, proto, 4, &chunk) == NCCL_SUCCESS);
    if (chunk != 12345)
        MUST(proto >= 0 && proto < DCC_PROTOS && chunk >= grain[proto] && chunk % grain[proto] == 0 &&
             chunk <= LARGEST_CHUNK);
}

void nccl_end(void) {
    for (unsigned i = 0; i < RANKS; i++) {
        nccl_detach_profiler(&ranks[i]);
        nccl_detach_tuner(&ranks[i]);
    }
}
