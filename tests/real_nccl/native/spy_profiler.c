/* The profiler that writes down its calls. */
#include <unistd.h>

#include "spy.h"

enum { DEFAULT_MASK = 0xfffff & ~(EVENT_PROXY_STEP | EVENT_NET_PLUGIN | EVENT_PROXY_CTRL) };

static struct thing profilers[MOST], events[MOST];
static _Atomic int n_profilers, n_events;

static void begin_profiler_init(int version, void **context, int *mask) {
    const char *wanted = getenv("SPY_MASK");
    *context = new_thing(profilers, &n_profilers);
    begin("profiler.init");
    number("version", version);
    number("profiler", number_of(profilers, *context));
    number("mask", *mask);
    *mask = wanted ? atoi(wanted) : DEFAULT_MASK;
}

static void comm_is(uint64_t comm, const char *name, int nodes, int ranks, int rank) {
    word("comm", comm);
    text("name", name);
    number("nodes", nodes);
    number("ranks", ranks);
    number("rank", rank);
}

#define PROFILER_INIT(v)                                                                                     \
    static nccl_result profiler_init_##v(void **context, int *mask) {                                        \
        begin_profiler_init(v, context, mask);                                                               \
        end();                                                                                               \
        return NCCL_SUCCESS;                                                                                 \
    }
PROFILER_INIT(1)
PROFILER_INIT(2)
PROFILER_INIT(3)

static nccl_result profiler_init_4(void **context, int *mask, const char *name, uint64_t comm, int nodes,
                                   int ranks, int rank, logger_fn log) {
    (void)log;
    begin_profiler_init(4, context, mask);
    comm_is(comm, name, nodes, ranks, rank);
    end();
    return NCCL_SUCCESS;
}

#define PROFILER_INIT_WITH_COMM(v)                                                                           \
    static nccl_result profiler_init_##v(void **context, uint64_t comm, int *mask, const char *name,         \
                                         int nodes, int ranks, int rank, logger_fn log) {                    \
        (void)log;                                                                                           \
        begin_profiler_init(v, context, mask);                                                               \
        comm_is(comm, name, nodes, ranks, rank);                                                             \
        end();                                                                                               \
        return NCCL_SUCCESS;                                                                                 \
    }
PROFILER_INIT_WITH_COMM(5)
PROFILER_INIT_WITH_COMM(6)

static void begin_event(void *context, void **handle, uint64_t type, const void *parent) {
    *handle = new_thing(events, &n_events);
    begin("start");
    number("event", number_of(events, *handle));
    number("profiler", number_of(profilers, context));
    number("type", (long long)type);
    number("parent", number_of(events, parent));
}

static void proxy_op_is(const struct descr_proxy_op *op) {
    number("of_this_process", op->pid == getpid());
    number("channel", op->channel_id);
    number("peer", op->peer);
    number("steps", op->n_steps);
    number("chunk_bytes", op->chunk_size);
    number("is_send", op->is_send);
}

static void names_are(const char *func, const char *type, const char *algorithm, const char *protocol) {
    text("func", func);
    text("data_type", type);
    text("algorithm", algorithm);
    text("protocol", protocol);
}

/* What the descriptors of all versions have, though not at the same place. */
#define COLL_IS(coll)                                                                                        \
    do {                                                                                                     \
        number("sequence", (long long)(coll).seq_number);                                                    \
        word("send", (uintptr_t)(coll).send_buff);                                                           \
        word("recv", (uintptr_t)(coll).recv_buff);                                                           \
        number("count", (long long)(coll).count);                                                            \
        number("root", (coll).root);                                                                         \
        number("warps", (coll).n_warps);                                                                     \
    } while (0)
#define P2P_IS(p2p)                                                                                          \
    do {                                                                                                     \
        word("recv", (uintptr_t)(p2p).buff);                                                                 \
        number("count", (long long)(p2p).count);                                                             \
        number("peer", (p2p).peer);                                                                          \
    } while (0)

static nccl_result start_1(void *context, void **handle, void *descr) {
    const struct descr_v1 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        text("name", event->coll.name);
        word("comm", event->coll.comm_hash);
        number("func", event->coll.func);
        number("data_type", event->coll.datatype);
        number("op", event->coll.op);
        number("traffic", (long long)event->coll.traffic_bytes);
        number("channels", event->coll.n_max_channels);
        number("algorithm", event->coll.algo);
        number("protocol", event->coll.proto);
        number("is_collnet", event->coll.is_collnet);
        number("is_nvls", event->coll.is_nvls);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        text("name", event->p2p.name);
        word("comm", event->p2p.comm_hash);
        number("func", event->p2p.func);
        number("data_type", event->p2p.datatype);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result start_2(void *context, void **handle, void *descr) {
    const struct descr_v2 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        text("name", event->coll.name);
        word("comm", event->coll.comm_hash);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("traffic", (long long)event->coll.traffic_bytes);
        number("channels", event->coll.n_max_channels);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        text("name", event->p2p.name);
        word("comm", event->p2p.comm_hash);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result start_3(void *context, void **handle, void *descr) {
    const struct descr_v3 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        text("name", event->coll.name);
        word("comm", event->coll.comm_hash);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("channels", event->coll.n_max_channels);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        text("name", event->p2p.name);
        word("comm", event->p2p.comm_hash);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    } else if (event->type == EVENT_KERNEL_CH) {
        number("channel", event->kernel_ch.channel_id);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result start_4(void *context, void **handle, void *descr) {
    const struct descr_v4 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("channels", event->coll.n_channels);
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    } else if (event->type == EVENT_KERNEL_CH) {
        number("channel", event->kernel_ch.channel_id);
        word("timer", event->kernel_ch.p_timer);
    }
    end();
    return NCCL_SUCCESS;
}

/* v5 and v6 differ in nothing that is looked at here. */
static nccl_result start_5(void *context, void **handle, void *descr) {
    const struct descr_v5 *event = descr;
    begin_event(context, handle, event->type, event->parent);
    if (event->type == EVENT_COLL) {
        number("rank", event->rank);
        names_are(event->coll.func, event->coll.datatype, event->coll.algo, event->coll.proto);
        number("channels", event->coll.n_channels);
        number("parent_group", number_of(events, event->coll.parent_group));
        COLL_IS(event->coll);
    } else if (event->type == EVENT_P2P) {
        number("rank", event->rank);
        names_are(event->p2p.func, event->p2p.datatype, NULL, NULL);
        number("channels", event->p2p.n_channels);
        number("parent_group", number_of(events, event->p2p.parent_group));
        P2P_IS(event->p2p);
    } else if (event->type == EVENT_PROXY_OP) {
        number("rank", event->rank);
        proxy_op_is(&event->proxy_op);
    } else if (event->type == EVENT_KERNEL_CH) {
        number("channel", event->kernel_ch.channel_id);
        word("timer", event->kernel_ch.p_timer);
    } else if (event->type == EVENT_GROUP_API) {
        number("captured", event->group_api.graph_captured);
        number("depth", event->group_api.group_depth);
    } else if (event->type == EVENT_COLL_API) {
        names_are(event->coll_api.func, event->coll_api.datatype, NULL, NULL);
        number("count", (long long)event->coll_api.count);
        number("root", event->coll_api.root);
        word("stream", (uintptr_t)event->coll_api.stream);
        number("captured", event->coll_api.graph_captured);
    } else if (event->type == EVENT_P2P_API) {
        names_are(event->p2p_api.func, event->p2p_api.datatype, NULL, NULL);
        number("count", (long long)event->p2p_api.count);
        word("stream", (uintptr_t)event->p2p_api.stream);
        number("captured", event->p2p_api.graph_captured);
    } else if (event->type == EVENT_KERNEL_LAUNCH) {
        word("stream", (uintptr_t)event->kernel_launch.stream);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result stop(void *handle) {
    begin("stop");
    number("event", number_of(events, handle));
    end();
    return NCCL_SUCCESS;
}

static void begin_state(const void *handle, int state) {
    begin("state");
    number("event", number_of(events, handle));
    number("state", state);
}

static nccl_result record_old(void *handle, int state, void *arguments) {
    const union state_args_v1 *of = arguments;
    begin_state(handle, state);
    if (state < STATE_PROXY_CTRL_IDLE) {
        number("bytes", (long long)of->proxy_op.trans_size);
        number("steps", of->proxy_op.steps);
    }
    end();
    return NCCL_SUCCESS;
}

static nccl_result record_new(void *handle, int state, void *arguments) {
    const union state_args_v4 *of = arguments;
    begin_state(handle, state);
    if (state == STATE_KERNEL_CH_STOP)
        word("timer", of->kernel_ch.p_timer);
    end();
    return NCCL_SUCCESS;
}

static nccl_result end_profiler(void *context) {
    begin("profiler.finalize");
    number("profiler", number_of(profilers, context));
    end();
    return NCCL_SUCCESS;
}

#define PROFILER(v, is, start, record)                                                                       \
    SHOWN const struct profiler ncclProfiler_v##v = {                                                        \
        "spy", {.is = profiler_init_##v}, start, stop, record, end_profiler};

PROFILER(1, v1, start_1, record_old)
#if SPY_PROFILER >= 2
PROFILER(2, v1, start_2, record_old)
#endif
#if SPY_PROFILER >= 3
PROFILER(3, v1, start_3, record_old)
#endif
#if SPY_PROFILER >= 4
PROFILER(4, v4, start_4, record_new)
#endif
#if SPY_PROFILER >= 5
PROFILER(5, v5, start_5, record_new)
#endif
#if SPY_PROFILER >= 6
PROFILER(6, v5, start_5, record_new)
#endif
