#define _GNU_SOURCE
#include "events.h"

#include "group.h"
#include "release.h"

/* Of the thread's group. Handles outlive the event: NCCL forgets only that of a P2pApi event when it stops
 * it, so where the API events are turned off, the last CollApi event is stopped again by each later call. */
static __thread struct {
    int depth; /* of the group that is reported; 0: none */
    int mask;
    enum { NOTHING, GROUP_BEGUN, CALLS_BEGUN } state;
    void *group, *coll, *p2p;
} api;

enum {
    CE_BITS = EVENT_CE_COLL | EVENT_CE_SYNC | EVENT_CE_BATCH,
    GROUP_BITS = EVENT_GROUP | COLL_BITS | EVENT_P2P,
    GROUP_API_BITS = GROUP_BITS | EVENT_GROUP_API | EVENT_P2P_API | EVENT_COLL_API | EVENT_KERNEL_LAUNCH |
        CE_BITS,
};

/* ---- calls ---- */

void events_enter_call(void) {
    if (api.depth > 0)
        api.depth++;
}

static void begin_group(const struct comm *comm, bool captured) {
    api.mask = profiler_mask();
    if (!profiler_is_loaded() || !(api.mask & GROUP_API_BITS) || api.depth != 0)
        return;
    struct event event = {.type = EVENT_GROUP_API, .captured = captured, .group_depth = group_depth};
    profiler_start(comm->profiler_context, &api.group, &event);
    api.depth = group_depth;
    api.state = GROUP_BEGUN;
}

static void record(enum event_state state) {
    bool first = state == STATE_GROUP_START_API_STOP;
    if (api.state != (first ? GROUP_BEGUN : CALLS_BEGUN))
        return;
    api.state = first ? CALLS_BEGUN : NOTHING;
    if (profiler_is_loaded() && api.group)
        profiler_record(api.group, state, 0);
}

void events_begin_call(const struct call *call, bool captured, struct watched *watched) {
    bool is_p2p = call->func == FUNC_SEND || call->func == FUNC_RECV;
    if (!release()->api_events) {
        watched->mask = profiler_mask(); /* plans are made by it; before 2.26 it is read again */
        return;
    }
    begin_group(call->comm, captured);
    record(STATE_GROUP_START_API_STOP);
    struct event event = {
        .type = is_p2p ? EVENT_P2P_API : EVENT_COLL_API,
        .parent = api.group,
        .func = call->func,
        .count = call->count,
        .data_type = call->type,
        .root = call->peer,
        .stream = call->stream,
        .captured = captured,
    };
    int bits = is_p2p ? P2P_BITS | EVENT_P2P_API : COLL_BITS | EVENT_COLL_API | CE_BITS;
    void **handle = is_p2p ? &api.p2p : &api.coll;
    if (profiler_is_loaded() && (api.mask & bits))
        profiler_start(call->comm->profiler_context, handle, &event);
    watched->mask = api.mask;
    watched->group_api = api.group;
    watched->api = *handle;
}

void events_end_call(const struct call *call) {
    bool is_p2p = call->func == FUNC_SEND || call->func == FUNC_RECV;
    void *handle = is_p2p ? api.p2p : api.coll;
    if (profiler_is_loaded() && handle)
        profiler_stop(handle);
    if (is_p2p)
        api.p2p = NULL;
}

void events_leave_group(void) {
    if (api.depth > 0)
        api.depth--;
    if (api.depth == 0)
        record(STATE_GROUP_END_API_START);
}

void events_group_done(void) {
    if (!profiler_is_loaded() || api.group == NULL || api.depth != 0)
        return;
    profiler_stop(api.group);
    api.group = NULL;
}

/* ---- plans ---- */

/* Of the first operation that has any. */
static const struct watched *watched_of(const struct plan *plan) {
    static const struct watched nothing;
    for (const struct coll_task *task = plan->colls.head; task; task = task->next)
        if (task->watched.mask)
            return &task->watched;
    for (const struct p2p_task *task = plan->p2ps.head; task; task = task->next)
        if (task->watched.mask)
            return &task->watched;
    return &nothing;
}

void events_begin_launch(struct plan *plan, struct gpu_stream *stream) {
    const struct watched *watched = watched_of(plan);
    if (!profiler_is_loaded() || !(watched->mask & EVENT_KERNEL_LAUNCH))
        return;
    struct event event = {.type = EVENT_KERNEL_LAUNCH, .parent = watched->group_api, .stream = stream};
    profiler_start(plan->comm->profiler_context, &plan->launch_event, &event);
}

void events_end_launch(struct plan *plan) {
    if (profiler_is_loaded() && plan->launch_event)
        profiler_stop(plan->launch_event);
}

static void begin_coll(const struct plan *plan, struct coll_task *task) {
    const struct comm *comm = plan->comm;
    const bool api_events = release()->api_events, names = release()->names_in_events;
    struct event event = {
        .type = EVENT_COLL,
        .parent = api_events ? task->watched.api : plan->group_event,
        .rank = comm->rank,
        .func = task->func,
        .data_type = task->type,
        .op = task->op,
        .root = task->root,
        .send = task->send,
        .recv = task->recv,
        .count = task->count,
        .sequence = comm->sequence[task->func],
        /* The number that it got has been said since 2.27. */
        .channels = names ? task->max_channels : task->channels,
        .warps = task->warps,
        .algorithm = task->algorithm,
        .protocol = task->protocol,
        .collnet = task->is_collnet,
        .nvls = task->is_nvls,
        .parent_group = plan->group_event,
    };
    if (names) {
        event.comm_name = comm->name;
        event.comm_id = comm->id;
        event.traffic = task->traffic;
    }
    profiler_start(comm->profiler_context, &task->watched.event, &event);
}

static void begin_p2p(const struct plan *plan, struct p2p_task *task) {
    const struct comm *comm = plan->comm;
    struct event event = {
        .type = EVENT_P2P,
        .parent = release()->api_events ? task->watched.api : plan->group_event,
        .rank = comm->rank,
        .func = task->func,
        .data_type = task->type,
        .recv = task->buffer,
        .count = task->count,
        .peer = task->peer,
        .channels = task->channels,
        .parent_group = plan->group_event,
    };
    if (release()->names_in_events) {
        event.comm_name = comm->name;
        event.comm_id = comm->id;
    }
    profiler_start(comm->profiler_context, &task->watched.event, &event);
}

/* Before 2.26 the mask is read once for all of a plan, when it is launched. */
static void take_mask(struct plan *plan) {
    int mask = profiler_mask();
    for (struct coll_task *task = plan->colls.head; task; task = task->next)
        task->watched.mask = mask;
    for (struct p2p_task *task = plan->p2ps.head; task; task = task->next)
        task->watched.mask = mask;
}

/* The adapters of v1 to v4 in newer releases make the group the parent; those of v5 and v6 name both. */
void events_begin_plan(struct plan *plan) {
    const bool loaded = profiler_is_loaded();
    struct comm *comm = plan->comm;
    if (!release()->mask_of_task)
        take_mask(plan);
    if (loaded && (watched_of(plan)->mask & GROUP_BITS)) {
        struct event event = {.type = EVENT_GROUP};
        profiler_start(comm->profiler_context, &plan->group_event, &event);
    }
    /* Before the API events only what had a group had any. */
    bool may = loaded && (release()->api_events || plan->group_event);
    for (struct coll_task *task = plan->colls.head; task; task = task->next) {
        if (may && (task->watched.mask & COLL_BITS))
            begin_coll(plan, task);
        /* Replays count only where the profiler makes every rank come by here. */
        if (!plan->persistent ||
            (loaded && (plan->group_event || task->watched.api) && (task->watched.mask & EVENT_KERNEL_CH)))
            comm->sequence[task->func]++;
    }
    for (struct p2p_task *task = plan->p2ps.head; may && task; task = task->next)
        if (task->watched.mask & P2P_BITS)
            begin_p2p(plan, task);
}

void events_end_plan(struct plan *plan) {
    if (!profiler_is_loaded())
        return;
    for (struct coll_task *task = plan->colls.head; task; task = task->next)
        if (task->watched.event)
            profiler_stop(task->watched.event);
    for (struct p2p_task *task = plan->p2ps.head; task; task = task->next)
        if (task->watched.event)
            profiler_stop(task->watched.event);
    if (plan->group_event)
        profiler_stop(plan->group_event);
}
