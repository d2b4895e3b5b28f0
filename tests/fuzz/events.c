/* The profiler's half of NCCL. */
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "memory.h"
#include "nccl.h"
#include "scribble.h"

#define HANDLES 64 /* the latest, a power of two */
#define LIKELY_CHANNELS 4
#define MOST_IN_GROUP 3

extern const struct nccl_profiler_v1 ncclProfiler_v1, ncclProfiler_v2, ncclProfiler_v3;
extern const struct nccl_profiler_v4 ncclProfiler_v4;
extern const struct nccl_profiler_v5 ncclProfiler_v5, ncclProfiler_v6;

uint64_t begun[SEGMENTS];

static void *handles[HANDLES];
static unsigned n_handles;
static int own_pid;
static int masks[RANKS]; /* NCCL's: each rank has one of its own */

static const char *const funcs[] = {"AllReduce", "AllGather", "ReduceScatter", "Reduce",
                                    "Broadcast", "SendRecv",  "AllReduceX",    "",
                                    NULL,        "R"};
#define KNOWN_FUNCS 5
static const char *const algos[] = {"RING",          "TREE", "NVLS", "NVLS_TREE", "COLLNET_DIRECT",
                                    "COLLNET_CHAIN", "PAT",  NULL,   "",          "NVLS_"};
static const char *const protos[] = {"SIMPLE", "LL", "LL128", NULL, "", "L"};
static const char *const types[] = {"ncclFloat32", "ncclFloat16", "ncclInt8",      "ncclFloat64", "",
                                    NULL,          "none",        "ncclFloat8e4m3"};
static const uint64_t kinds[] = {
    NCCL_EVENT_COLL,      NCCL_EVENT_KERNEL_CH, NCCL_EVENT_GROUP,   NCCL_EVENT_PROXY_OP,
    NCCL_EVENT_GROUP_API, NCCL_EVENT_COLL_API,  NCCL_EVENT_P2P_API, 0};

#define PICK(names, in) (names)[take8(in) % (sizeof(names) / sizeof *(names))]

void nccl_reset(void) {
    memset(ranks, 0, sizeof ranks);
    memset(begun, 0, sizeof begun);
    memset(handles, 0, sizeof handles);
    n_handles = 0;
}

void nccl_attach_profiler(struct rank *rank, struct input *in) {
    if (rank->profiler_abi)
        return;
    uint8_t how = take8(in);
    unsigned abi = 1 + how % 6;
    int *mask = &masks[rank - ranks], n = (int)take8(in) - 1, result;
    uint64_t id = take(in, 1);
    *mask = 0; /* the rank's last profiler may have left it on */
    const char *name = how & 64    ? NULL
                       : how & 128 ? "a name that is longer than the sixty-three bytes which are kept of it"
                                   : "g";
    switch (abi) {
    case 1:
        result = ncclProfiler_v1.init(&rank->profiler, mask);
        break;
    case 2:
        result = ncclProfiler_v2.init(&rank->profiler, mask);
        break;
    case 3:
        result = ncclProfiler_v3.init(&rank->profiler, mask);
        break;
    case 4:
        result = ncclProfiler_v4.init(&rank->profiler, mask, name, id, 1, n, 0, NULL);
        break;
    case 5:
        result = ncclProfiler_v5.init(&rank->profiler, id, mask, name, 1, n, 0, NULL);
        break;
    default:
        result = ncclProfiler_v6.init(&rank->profiler, id, mask, name, 1, n, 0, NULL);
    }
    MUST(result == NCCL_SUCCESS && rank->profiler);
    rank->profiler_abi = abi;
    struct comm *comm = rank->profiler;
    rank->seg = comm->seg;
    MUST((*mask != 0) == (comm->seg != NULL));
    if (!comm->seg)
        return;
    /* As after many records, and after many collectives: numbers wrap, generations come round. */
    uint64_t head = how & 32 ? take(in, 5) : 0;
    atomic_store(&comm->seg->head, head);
    atomic_store(&comm->seg->runner.tail, head);
    memory_ring_from(comm->seg, head);
    if (how & 16)
        comm->next_slot = take(in, 5);
    atomic_store(&comm->retired, comm->next_slot);
}

void nccl_detach_profiler(struct rank *rank) {
    int result = NCCL_SUCCESS;
    switch (rank->profiler_abi) {
    case 0:
        return;
    case 1:
        result = ncclProfiler_v1.finalize(rank->profiler);
        break;
    case 2:
        result = ncclProfiler_v2.finalize(rank->profiler);
        break;
    case 3:
        result = ncclProfiler_v3.finalize(rank->profiler);
        break;
    case 4:
        result = ncclProfiler_v4.finalize(rank->profiler);
        break;
    case 5:
        result = ncclProfiler_v5.finalize(rank->profiler);
        break;
    default:
        result = ncclProfiler_v6.finalize(rank->profiler);
    }
    MUST(result == NCCL_SUCCESS);
    rank->profiler_abi = 0;
    rank->profiler = NULL;
}

/* One of the latest handles, also of communicators that are gone; sometimes none. */
static void *take_handle(struct input *in) {
    uint8_t back = take8(in);
    if (back == 255)
        return NULL;
    if (back == 254)
        return comm_ignored_event;
    return handles[(n_handles - 1 - back) % HANDLES];
}

struct told {
    uint64_t kind;
    void *parent, *group;
    const char *func, *algo, *proto, *type;
    uint64_t id, timer;
    size_t count;
    int rank;
    uint8_t channels, channel, v1_func, v1_type;
    bool ours;
};

static struct told take_event(struct input *in) {
    struct told e = {0};
    uint8_t how = take8(in);
    e.kind = kinds[how & 7];
    e.parent = take_handle(in);
    e.rank = how & 8 ? (int8_t)take8(in) : 0;
    e.ours = !(how & 16);
    if (e.kind == NCCL_EVENT_COLL) {
        uint8_t what = take8(in);
        e.v1_func = what % 8;
        e.func = funcs[what % 10];
        e.count = take_bytes(in);
        e.type = how & 32 ? PICK(types, in) : types[2];
        e.v1_type = how & 32 ? take8(in) : 0;
        e.algo = how & 64 ? PICK(algos, in) : algos[0];
        e.proto = how & 64 ? PICK(protos, in) : protos[0];
        e.channels = what & 32 ? take8(in) : take8(in) % LIKELY_CHANNELS;
        e.group = what & 64 ? take_handle(in) : NULL;
        e.id = what & 128 ? take8(in) : 0;
    } else {
        uint8_t channel = take8(in);
        e.channel = channel & 128 ? channel : channel % LIKELY_CHANNELS;
        e.timer = how & 32 ? take(in, 8) : 1000 + take(in, 1);
    }
    return e;
}

/* In the words of every version but the first. */
#define FILL_COLL(d, e)                                                                                      \
    do {                                                                                                     \
        (d).coll.func = (e).func;                                                                            \
        (d).coll.algo = (e).algo;                                                                            \
        (d).coll.proto = (e).proto;                                                                          \
        (d).coll.datatype = (e).type;                                                                        \
        (d).coll.count = (e).count;                                                                          \
    } while (0)

#define FILL_CHILD(d, e)                                                                                     \
    do {                                                                                                     \
        if ((e).kind == NCCL_EVENT_PROXY_OP)                                                                 \
            (d).proxy_op = (struct nccl_proxy_op){.pid = (e).ours ? own_pid : 1, .channel = (e).channel};    \
        else if ((e).kind == NCCL_EVENT_KERNEL_CH)                                                           \
            (d).kernel_ch = (struct nccl_kernel_ch){.channel = (e).channel, .timer = (e).timer};             \
    } while (0)

#define DESCRIBE(version, kind_type, e)                                                                      \
    struct nccl_event_v##version d = {.type = (kind_type)(e).kind, .parent = (e).parent, .rank = (e).rank};  \
    FILL_CHILD(d, e)

static int start(struct rank *rank, void **handle, const struct told *e) {
    bool coll = e->kind == NCCL_EVENT_COLL;
    if (rank->profiler_abi == 1) {
        DESCRIBE(1, uint8_t, *e);
        if (coll)
            d.coll = (struct nccl_coll_v1){.comm_hash = e->id,
                                           .func = e->v1_func,
                                           .count = e->count,
                                           .datatype = e->v1_type,
                                           .algo = e->channel,
                                           .max_channels = e->channels};
        return ncclProfiler_v1.startEvent(rank->profiler, handle, &d);
    }
    if (rank->profiler_abi == 2) {
        DESCRIBE(2, uint8_t, *e);
        if (coll) {
            d.coll = (struct nccl_coll_v2){.comm_hash = e->id, .max_channels = e->channels};
            FILL_COLL(d, *e);
        }
        return ncclProfiler_v2.startEvent(rank->profiler, handle, &d);
    }
    if (rank->profiler_abi == 3) {
        DESCRIBE(3, uint8_t, *e);
        if (coll) {
            d.coll = (struct nccl_coll_v3){.comm_hash = e->id, .max_channels = e->channels};
            FILL_COLL(d, *e);
        }
        return ncclProfiler_v3.startEvent(rank->profiler, handle, &d);
    }
    if (rank->profiler_abi == 4) {
        DESCRIBE(4, uint8_t, *e);
        if (coll) {
            d.coll = (struct nccl_coll_v4){.channels = e->channels};
            FILL_COLL(d, *e);
        }
        return ncclProfiler_v4.startEvent(rank->profiler, handle, &d);
    }
    DESCRIBE(5, uint64_t, *e);
    if (coll) {
        d.coll = (struct nccl_coll_v5){.channels = e->channels, .parent_group = e->group};
        FILL_COLL(d, *e);
    }
    return (rank->profiler_abi == 5 ? &ncclProfiler_v5 : &ncclProfiler_v6)
        ->startEvent(rank->profiler, handle, &d);
}

static bool has_known_func(const struct rank *rank, const struct told *e) {
    if (rank->profiler_abi == 1)
        return e->v1_func < DCC_FUNCS;
    for (unsigned i = 0; i < KNOWN_FUNCS; i++)
        if (e->func == funcs[i])
            return true;
    return false;
}

static void *start_and_keep(struct rank *rank, const struct told *e) {
    struct comm *comm = rank->profiler;
    if (!own_pid)
        own_pid = getpid();
    if (e->kind == NCCL_EVENT_COLL && comm->seg) {
        begun[memory_index(comm->seg)] += has_known_func(rank, e);
        memory_slot_dirty(comm);
    }
    void *handle = NULL;
    MUST(start(rank, &handle, e) == NCCL_SUCCESS);
    MUST(handle); /* NCCL skips the children of a parent without one */
    return handles[n_handles++ % HANDLES] = handle;
}

void nccl_start(struct rank *rank, struct input *in) {
    struct told e = take_event(in);
    if (rank->profiler_abi)
        start_and_keep(rank, &e);
}

void nccl_group(struct rank *rank, struct input *in) {
    static const int numbers[KNOWN_FUNCS] = {4, 2, 3, 1, 0};
    uint8_t what = take8(in);
    unsigned n = 1 + what % MOST_IN_GROUP, func = what >> 4 & 3;
    bool together = what & 8;
    size_t count = take_bytes(in);
    void *calls[MOST_IN_GROUP];
    struct comm *comm = rank->profiler;
    if (!comm || !comm->seg || rank->tuner != rank->profiler)
        return;
    size_t bytes = count * (func == 1 || func == 2 ? atomic_load(&comm->seg->identity.ranks) : 1);
    void *group = start_and_keep(rank, &(struct told){.kind = NCCL_EVENT_GROUP_API});
    for (unsigned i = 0; i < n; i++)
        calls[i] = start_and_keep(rank, &(struct told){.kind = NCCL_EVENT_COLL_API, .parent = group});
    for (unsigned i = 0; i < (together ? 1 : n); i++)
        nccl_call(rank, numbers[func], together ? n * bytes : bytes, 0, 0, in);
    void *kernel = start_and_keep(rank, &(struct told){.kind = NCCL_EVENT_GROUP});
    for (unsigned i = 0; i < n; i++)
        start_and_keep(rank, &(struct told){.kind = NCCL_EVENT_COLL,
                                            .parent = rank->profiler_abi < 5 ? kernel : calls[i],
                                            .group = kernel,
                                            .func = funcs[func],
                                            .v1_func = (uint8_t)numbers[func],
                                            .type = types[2],
                                            .algo = algos[0],
                                            .proto = protos[0],
                                            .count = count,
                                            .channels = what >> 6});
}

void nccl_stop(struct rank *rank, struct input *in) {
    void *handle = take_handle(in);
    if (rank->profiler_abi > 0 && handle)
        MUST(ncclProfiler_v6.stopEvent(handle) == NCCL_SUCCESS);
}

void nccl_state(struct rank *rank, struct input *in) {
    void *handle = take_handle(in);
    uint8_t how = take8(in);
    union nccl_state_args args = {.kernel_ch = {.timer = how & 1 ? take(in, 8) : 1100 + take(in, 1)}};
    int state = how & 2 ? take8(in) : NCCL_STATE_KERNEL_CH_STOP;
    if (rank->profiler_abi && handle)
        MUST((rank->profiler_abi < 4 ? ncclProfiler_v1.recordEventState : ncclProfiler_v6.recordEventState)(
                 handle, state, how & 4 ? NULL : &args) == NCCL_SUCCESS);
}
