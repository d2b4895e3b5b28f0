#define _GNU_SOURCE
#include "profiler.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "library.h"
#include "log.h"
#include "names.h"
#include "release.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static enum { NOT_LOADED, LOADED, FAILED } status;
static int users;
static void *library;
static const struct profiler *plugin; /* read without the lock between init and finalize */
static int version, mask;
static pid_t pid;

bool profiler_is_loaded(void) {
    return __atomic_load_n(&plugin, __ATOMIC_ACQUIRE) != NULL;
}

int profiler_mask(void) {
    /* Pairs with whatever the plugin stores with; NCCL loads it relaxed as well. */
    return __atomic_load_n(&mask, __ATOMIC_RELAXED);
}

pid_t profiler_pid(void) {
    return pid;
}

/* ---- loading ---- */

static const struct profiler *find(void) {
    for (version = release()->profiler; version >= 1; version--) {
        char name[32];
        snprintf(name, sizeof(name), "ncclProfiler_v%d", version);
        const struct profiler *found = library_symbol(library, name);
        if (found == NULL)
            continue;
        if (found->name == NULL) {
            fail(NCCL_INTERNAL_ERROR, "%s has no name, which NCCL prints", name);
            return NULL;
        }
        nccl_log(LOG_LEVEL_INFO, LOG_INIT, NULL, 0, "PROFILER/Plugin: Loaded %s (v%d)", found->name, version);
        return found;
    }
    nccl_log(LOG_LEVEL_INFO, LOG_INIT, NULL, 0, "the profiler plugin has no version that is known");
    return NULL;
}

static bool load(void) {
    pthread_mutex_lock(&lock);
    if (status == NOT_LOADED) {
        library = release()->profiler ? library_open("profiler") : NULL;
        const struct profiler *found = library ? find() : NULL;
        status = found ? LOADED : FAILED;
        if (library && found == NULL)
            library_close(library);
        pid = getpid();
        __atomic_store_n(&plugin, found, __ATOMIC_RELEASE);
    }
    users += status == LOADED;
    bool loaded = status == LOADED;
    pthread_mutex_unlock(&lock);
    return loaded;
}

static void unload(void) {
    pthread_mutex_lock(&lock);
    if (status == LOADED && --users == 0) {
        __atomic_store_n(&plugin, NULL, __ATOMIC_RELEASE);
        library_close(library);
        status = NOT_LOADED;
    }
    pthread_mutex_unlock(&lock);
}

bool profiler_init(void **context, uint64_t id, const char *name, int nodes, int ranks, int rank) {
    nccl_result result;
    if (!load())
        return false;
    if (version <= 3)
        result = plugin->init.v1(context, &mask);
    else if (version == 4)
        result = plugin->init.v4(context, &mask, name, id, nodes, ranks, rank, nccl_log);
    else
        result = plugin->init.v5(context, id, &mask, name, nodes, ranks, rank, nccl_log);
    if (result == NCCL_SUCCESS)
        return true;
    nccl_log(LOG_LEVEL_WARN, LOG_INIT, NULL, 0, "profiler init returned %d; continuing without a profiler",
             result);
    unload();
    return false;
}

void profiler_finalize(void *context) {
    if (context && profiler_is_loaded())
        (void)plugin->finalize(context);
    unload();
}

/* ---- events ---- */

static bool knows(enum event_type type) {
    if (type >= EVENT_GROUP_API)
        return version >= 5;
    if (type >= EVENT_KERNEL_CH)
        return version >= 3;
    return true;
}

/* The strings live as long as the library. */
static struct descr_proxy_op proxy_op(const struct event *event) {
    return (struct descr_proxy_op){
        .pid = event->pid,
        .channel_id = (uint8_t)event->channel,
        .peer = event->peer,
        .n_steps = event->steps,
        .chunk_size = event->chunk_bytes,
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
        descr->coll.seq_number = event->sequence;
        descr->coll.func = (uint8_t)event->func;
        descr->coll.send_buff = event->send;
        descr->coll.recv_buff = event->recv;
        descr->coll.count = event->count;
        descr->coll.root = event->root;
        descr->coll.datatype = (uint8_t)event->data_type;
        descr->coll.op = (uint32_t)event->op;
        descr->coll.traffic_bytes = event->traffic;
        descr->coll.n_max_channels = (uint8_t)event->channels;
        descr->coll.n_warps = (uint8_t)event->warps;
        descr->coll.algo = (uint8_t)event->algorithm;
        descr->coll.proto = (uint8_t)event->protocol;
        descr->coll.is_collnet = event->collnet;
        descr->coll.is_nvls = event->nvls;
    } else if (event->type == EVENT_P2P) {
        descr->p2p.name = event->comm_name;
        descr->p2p.comm_hash = event->comm_id;
        descr->p2p.func = (uint8_t)event->func;
        descr->p2p.buff = event->recv;
        descr->p2p.datatype = (uint8_t)event->data_type;
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
            (descr)->coll.seq_number = (event)->sequence;                                                    \
            (descr)->coll.func = func_name((event)->func);                                                   \
            (descr)->coll.send_buff = (event)->send;                                                         \
            (descr)->coll.recv_buff = (event)->recv;                                                         \
            (descr)->coll.count = (event)->count;                                                            \
            (descr)->coll.root = (event)->root;                                                              \
            (descr)->coll.datatype = type_name((event)->data_type);                                          \
            (descr)->coll.n_max_channels = (uint8_t)(event)->channels;                                       \
            (descr)->coll.n_warps = (uint8_t)(event)->warps;                                                 \
            (descr)->coll.algo = algorithm_name((event)->algorithm);                                         \
            (descr)->coll.proto = protocol_name((event)->protocol);                                          \
        } else if ((event)->type == EVENT_P2P) {                                                             \
            (descr)->p2p.name = (event)->comm_name;                                                          \
            (descr)->p2p.comm_hash = (event)->comm_id;                                                       \
            (descr)->p2p.func = func_name((event)->func);                                                    \
            (descr)->p2p.buff = (event)->recv;                                                               \
            (descr)->p2p.datatype = type_name((event)->data_type);                                           \
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
            (descr)->coll.seq_number = (event)->sequence;                                                    \
            (descr)->coll.func = func_name((event)->func);                                                   \
            (descr)->coll.send_buff = (event)->send;                                                         \
            (descr)->coll.recv_buff = (event)->recv;                                                         \
            (descr)->coll.count = (event)->count;                                                            \
            (descr)->coll.root = (event)->root;                                                              \
            (descr)->coll.datatype = type_name((event)->data_type);                                          \
            (descr)->coll.n_channels = (uint8_t)(event)->channels;                                           \
            (descr)->coll.n_warps = (uint8_t)(event)->warps;                                                 \
            (descr)->coll.algo = algorithm_name((event)->algorithm);                                         \
            (descr)->coll.proto = protocol_name((event)->protocol);                                          \
        } else if ((event)->type == EVENT_P2P) {                                                             \
            (descr)->p2p.func = func_name((event)->func);                                                    \
            (descr)->p2p.buff = (event)->recv;                                                               \
            (descr)->p2p.datatype = type_name((event)->data_type);                                           \
            (descr)->p2p.count = (event)->count;                                                             \
            (descr)->p2p.peer = (event)->peer;                                                               \
            (descr)->p2p.n_channels = (uint8_t)(event)->channels;                                            \
        } else if ((event)->type == EVENT_PROXY_OP) {                                                        \
            (descr)->proxy_op = proxy_op(event);                                                             \
        } else if ((event)->type == EVENT_KERNEL_CH) {                                                       \
            (descr)->kernel_ch.channel_id = (uint8_t)(event)->channel;                                       \
            (descr)->kernel_ch.p_timer = (event)->timer;                                                     \
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
        descr->group_api.graph_captured = event->captured;
        descr->group_api.group_depth = event->group_depth;
    } else if (event->type == EVENT_COLL_API) {
        descr->coll_api.func = func_name(event->func);
        descr->coll_api.count = event->count;
        descr->coll_api.datatype = type_name(event->data_type);
        descr->coll_api.root = event->root;
        descr->coll_api.stream = event->stream;
        descr->coll_api.graph_captured = event->captured;
    } else if (event->type == EVENT_P2P_API) {
        descr->p2p_api.func = func_name(event->func);
        descr->p2p_api.count = event->count;
        descr->p2p_api.datatype = type_name(event->data_type);
        descr->p2p_api.stream = event->stream;
        descr->p2p_api.graph_captured = event->captured;
    } else if (event->type == EVENT_KERNEL_LAUNCH) {
        descr->kernel_launch.stream = event->stream;
    }
}

void profiler_start(void *context, void **handle, const struct event *told) {
    struct event copy = *told;
    const struct event *event = &copy;
    union {
        struct descr_v1 v1;
        struct descr_v2 v2;
        struct descr_v3 v3;
        struct descr_v4 v4;
        struct descr_v5 v5;
    } descr;
    if (version <= 3)
        *handle = NULL;
    if (!knows(event->type))
        return;
    /* Calls became the parents of operations with v5. */
    if (version <= 4 && (event->type == EVENT_COLL || event->type == EVENT_P2P))
        copy.parent = event->parent_group;
    memset(&descr, 0, sizeof(descr));
    switch (version) {
    case 1:
        fill_v1(&descr.v1, event);
        break;
    case 2:
        FILL_STRINGS_V2_V3(&descr.v2, event);
        if (event->type == EVENT_COLL)
            descr.v2.coll.traffic_bytes = event->traffic;
        break;
    case 3:
        FILL_STRINGS_V2_V3(&descr.v3, event);
        if (event->type == EVENT_KERNEL_CH)
            descr.v3.kernel_ch.channel_id = (uint8_t)event->channel;
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
    (void)plugin->start_event(context, handle, &descr);
    /* The descriptor is the caller's: poisoned, so that a plugin which kept the pointer is found out. */
    memset(&descr, 0xa5, sizeof(descr));
    __asm__ volatile("" : : "r"(&descr) : "memory");
}

void profiler_stop(void *handle) {
    (void)plugin->stop_event(handle);
}

void profiler_record(void *handle, enum event_state state, uint64_t value) {
    union {
        union state_args_v1 v1;
        union state_args_v4 v4;
    } args;
    memset(&args, 0, sizeof(args));
    bool of_group = state == STATE_GROUP_START_API_STOP || state == STATE_GROUP_END_API_START;
    bool of_control = state >= STATE_PROXY_CTRL_IDLE && state <= STATE_PROXY_CTRL_APPEND_END;
    if ((of_group && version < 5) || (state == STATE_KERNEL_CH_STOP && version < 4) ||
        (state == STATE_PROXY_OP_IN_PROGRESS && version < 4))
        return;
    if (state == STATE_KERNEL_CH_STOP)
        args.v4.kernel_ch.p_timer = value;
    else if (of_control && version <= 3)
        args.v1.proxy_ctrl.appended_proxy_ops = (int)value;
    else if (of_control)
        args.v4.proxy_ctrl.appended_proxy_ops = (int)value;
    else if (version <= 3)
        args.v1.proxy_op.trans_size = (size_t)value;
    (void)plugin->record_event_state(handle, (int)state, of_group ? NULL : (void *)&args);
}
