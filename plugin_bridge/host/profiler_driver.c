#define _GNU_SOURCE
#include "profiler_driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "tuner_driver.h"

/* Addresses that no plugin may follow; NCCL passes the user's device pointers. */
#define SEND_BUFFER ((void *)(uintptr_t)0x7f0000000000)
#define RECV_BUFFER ((void *)(uintptr_t)0x7f1000000000)
#define STREAM ((void *)(uintptr_t)0x7f2000000000)

int profiler_open(struct profiler_plugin *profiler, const char *path, int abi) {
    *profiler = (struct profiler_plugin){.abi = abi};
    if (abi == 0)
        return 0;
    profiler->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (profiler->library == NULL)
        return host_error("cannot load profiler plugin %s: %s", path, dlerror());
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", abi);
    profiler->is = dlsym(profiler->library, symbol);
    if (profiler->is == NULL)
        return host_error("%s exports no symbol %s", path, symbol);
    if (profiler->is->name == NULL)
        return host_error("%s: %s has no name, which NCCL prints", path, symbol);
    return 0;
}

void profiler_close(struct profiler_plugin *profiler) {
    if (profiler->library != NULL)
        dlclose(profiler->library);
    profiler->library = NULL;
}

int profiler_init(struct profiler_plugin *profiler, void **context, const struct program_header *header,
                  uint64_t comm_id, const char *comm_name, int rank, logger_fn log) {
    const int n_nodes = (int)header->n_nodes, n_ranks = (int)header->n_ranks;
    result_t result = RESULT_SUCCESS;
    *context = NULL;
    if (profiler->abi == 0)
        return 0;
    if (profiler->abi <= 3)
        result = profiler->is->init.v1(context, &profiler->mask);
    else if (profiler->abi == 4)
        result =
            profiler->is->init.v4(context, &profiler->mask, comm_name, comm_id, n_nodes, n_ranks, rank, log);
    else
        result =
            profiler->is->init.v5(context, comm_id, &profiler->mask, comm_name, n_nodes, n_ranks, rank, log);
    if (result != RESULT_SUCCESS) {
        fprintf(stderr, "profiler init returned %d; continuing without a profiler, as NCCL does\n", result);
        profiler->abi = 0;
    }
    return 0;
}

int profiler_finalize(const struct profiler_plugin *profiler, void *context) {
    if (profiler->abi == 0 || context == NULL)
        return 0;
    result_t result = profiler->is->finalize(context);
    if (result != RESULT_SUCCESS)
        return host_error("profiler finalize returned %d", result);
    return 0;
}

int profiler_mask(const struct profiler_plugin *profiler) {
    /* Pairs with whatever the plugin stores with; NCCL loads it relaxed as well. */
    return profiler->abi == 0 ? 0 : __atomic_load_n(&profiler->mask, __ATOMIC_RELAXED);
}

static const char *datatype_name(int datatype) {
    return datatype == TYPE_INT8 ? "ncclInt8" : "ncclFloat32";
}

static struct descr_proxy_op proxy_op(const struct event *event) {
    return (struct descr_proxy_op){
        .pid = event->pid,
        .channel_id = (uint8_t)event->channel_id,
        .peer = event->peer,
        .n_steps = event->n_steps,
        .chunk_size = event->chunk_size,
        .is_send = event->is_send,
    };
}

static void fill_v1(struct descr_v1 *descr, const struct event *event) {
    descr->type = (uint8_t)event->type;
    descr->parent = event->parent;
    descr->rank = event->rank;
    if (event->type == EVENT_COLL) {
        descr->coll.name = event->comm_name;
        descr->coll.comm_hash = event->comm_id;
        descr->coll.seq_number = event->seq_number;
        descr->coll.func = (uint8_t)event->func;
        descr->coll.send_buff = SEND_BUFFER;
        descr->coll.recv_buff = RECV_BUFFER;
        descr->coll.count = event->count;
        descr->coll.datatype = (uint8_t)event->datatype;
        descr->coll.traffic_bytes = event->traffic_bytes;
        descr->coll.n_max_channels = (uint8_t)event->n_max_channels;
        descr->coll.n_warps = (uint8_t)event->n_warps;
        descr->coll.algo = (uint8_t)event->algorithm;
        descr->coll.proto = (uint8_t)event->protocol;
        descr->coll.is_collnet = event->is_collnet;
        descr->coll.is_nvls = event->algorithm == ALGO_NVLS || event->algorithm == ALGO_NVLS_TREE;
    } else if (event->type == EVENT_P2P) {
        descr->p2p.name = event->comm_name;
        descr->p2p.comm_hash = event->comm_id;
        descr->p2p.func = (uint8_t)event->func;
        descr->p2p.buff = SEND_BUFFER;
        descr->p2p.datatype = (uint8_t)event->datatype;
        descr->p2p.count = event->count;
        descr->p2p.peer = event->peer;
    } else if (event->type == EVENT_PROXY_OP) {
        descr->proxy_op = proxy_op(event);
    }
}

/* v2 and v3 share these members by name; trafficBytes, which only v2 has, shifts what follows it. */
#define FILL_STRINGS_V2_V3(descr, event)                                                                     \
    do {                                                                                                     \
        (descr)->type = (uint8_t)(event)->type;                                                              \
        (descr)->parent = (event)->parent;                                                                   \
        (descr)->rank = (event)->rank;                                                                       \
        if ((event)->type == EVENT_COLL) {                                                                   \
            (descr)->coll.name = (event)->comm_name;                                                         \
            (descr)->coll.comm_hash = (event)->comm_id;                                                      \
            (descr)->coll.seq_number = (event)->seq_number;                                                  \
            (descr)->coll.func = func_name((event)->func);                                                   \
            (descr)->coll.send_buff = SEND_BUFFER;                                                           \
            (descr)->coll.recv_buff = RECV_BUFFER;                                                           \
            (descr)->coll.count = (event)->count;                                                            \
            (descr)->coll.datatype = datatype_name((event)->datatype);                                       \
            (descr)->coll.n_max_channels = (uint8_t)(event)->n_max_channels;                                 \
            (descr)->coll.n_warps = (uint8_t)(event)->n_warps;                                               \
            (descr)->coll.algo = algorithm_name((event)->algorithm);                                         \
            (descr)->coll.proto = protocol_name((event)->protocol);                                          \
        } else if ((event)->type == EVENT_P2P) {                                                             \
            (descr)->p2p.name = (event)->comm_name;                                                          \
            (descr)->p2p.comm_hash = (event)->comm_id;                                                       \
            (descr)->p2p.func = func_name((event)->func);                                                    \
            (descr)->p2p.buff = SEND_BUFFER;                                                                 \
            (descr)->p2p.datatype = datatype_name((event)->datatype);                                        \
            (descr)->p2p.count = (event)->count;                                                             \
            (descr)->p2p.peer = (event)->peer;                                                               \
        } else if ((event)->type == EVENT_PROXY_OP) {                                                        \
            (descr)->proxy_op = proxy_op(event);                                                             \
        }                                                                                                    \
    } while (0)

/* v4, v5 and v6 share these members by name. */
#define FILL_STRINGS_FROM_V4(descr, event)                                                                   \
    do {                                                                                                     \
        (descr)->parent = (event)->parent;                                                                   \
        (descr)->rank = (event)->rank;                                                                       \
        if ((event)->type == EVENT_COLL) {                                                                   \
            (descr)->coll.seq_number = (event)->seq_number;                                                  \
            (descr)->coll.func = func_name((event)->func);                                                   \
            (descr)->coll.send_buff = SEND_BUFFER;                                                           \
            (descr)->coll.recv_buff = RECV_BUFFER;                                                           \
            (descr)->coll.count = (event)->count;                                                            \
            (descr)->coll.datatype = datatype_name((event)->datatype);                                       \
            (descr)->coll.n_channels = (uint8_t)(event)->n_channels;                                         \
            (descr)->coll.n_warps = (uint8_t)(event)->n_warps;                                               \
            (descr)->coll.algo = algorithm_name((event)->algorithm);                                         \
            (descr)->coll.proto = protocol_name((event)->protocol);                                          \
        } else if ((event)->type == EVENT_P2P) {                                                             \
            (descr)->p2p.func = func_name((event)->func);                                                    \
            (descr)->p2p.buff = SEND_BUFFER;                                                                 \
            (descr)->p2p.datatype = datatype_name((event)->datatype);                                        \
            (descr)->p2p.count = (event)->count;                                                             \
            (descr)->p2p.peer = (event)->peer;                                                               \
            (descr)->p2p.n_channels = (uint8_t)(event)->n_channels;                                          \
        } else if ((event)->type == EVENT_PROXY_OP) {                                                        \
            (descr)->proxy_op = proxy_op(event);                                                             \
        } else if ((event)->type == EVENT_KERNEL_CH) {                                                       \
            (descr)->kernel_ch.channel_id = (uint8_t)(event)->channel_id;                                    \
            (descr)->kernel_ch.p_timer = (event)->p_timer;                                                   \
        }                                                                                                    \
    } while (0)

static void fill_v5(struct descr_v5 *descr, const struct event *event) {
    descr->type = (uint64_t)event->type;
    FILL_STRINGS_FROM_V4(descr, event);
    if (event->type == EVENT_COLL) {
        descr->coll.parent_group = event->parent_group;
    } else if (event->type == EVENT_P2P) {
        descr->p2p.parent_group = event->parent_group;
    } else if (event->type == EVENT_GROUP_API) {
        descr->group_api.group_depth = event->group_depth;
    } else if (event->type == EVENT_COLL_API) {
        descr->coll_api.func = func_name(event->func);
        descr->coll_api.count = event->count;
        descr->coll_api.datatype = datatype_name(event->datatype);
        descr->coll_api.stream = STREAM;
    } else if (event->type == EVENT_P2P_API) {
        descr->p2p_api.func = func_name(event->func);
        descr->p2p_api.count = event->count;
        descr->p2p_api.datatype = datatype_name(event->datatype);
        descr->p2p_api.stream = STREAM;
    } else if (event->type == EVENT_KERNEL_LAUNCH) {
        descr->kernel_launch.stream = STREAM;
    }
}

void *profiler_start(const struct profiler_plugin *profiler, void *context, const struct event *event) {
    union {
        struct descr_v1 v1;
        struct descr_v2 v2;
        struct descr_v3 v3;
        struct descr_v4 v4;
        struct descr_v5 v5;
    } descr;
    void *handle = NULL;
    memset(&descr, 0, sizeof(descr));
    switch (profiler->abi) {
    case 1:
        fill_v1(&descr.v1, event);
        break;
    case 2:
        FILL_STRINGS_V2_V3(&descr.v2, event);
        if (event->type == EVENT_COLL)
            descr.v2.coll.traffic_bytes = event->traffic_bytes;
        break;
    case 3:
        FILL_STRINGS_V2_V3(&descr.v3, event);
        if (event->type == EVENT_KERNEL_CH)
            descr.v3.kernel_ch.channel_id = (uint8_t)event->channel_id;
        break;
    case 4:
        descr.v4.type = (uint8_t)event->type;
        FILL_STRINGS_FROM_V4(&descr.v4, event);
        break;
    default:
        fill_v5(&descr.v5, event);
        break;
    }
    /* NCCL ignores the result here and in stop and record. */
    (void)profiler->is->start_event(context, &handle, &descr);
    /* The descriptor is the caller's: poisoned, so that a plugin which kept the pointer is found out. */
    memset(&descr, 0xa5, sizeof(descr));
    __asm__ volatile("" : : "r"(&descr) : "memory");
    return handle;
}

void profiler_stop(const struct profiler_plugin *profiler, void *handle) {
    (void)profiler->is->stop_event(handle);
}

void profiler_record(const struct profiler_plugin *profiler, void *handle, int state, uint64_t value) {
    if (state == STATE_GROUP_START_API_STOP || state == STATE_GROUP_END_API_START) {
        (void)profiler->is->record_event_state(handle, state, NULL);
        return;
    }
    union {
        union state_args_v1 v1;
        union state_args_v4 v4;
    } args;
    memset(&args, 0, sizeof(args));
    if (state == STATE_KERNEL_CH_STOP)
        args.v4.kernel_ch.p_timer = value;
    else if (profiler->abi <= 3)
        args.v1.proxy_op.trans_size = (size_t)value;
    (void)profiler->is->record_event_state(handle, state, &args);
}
