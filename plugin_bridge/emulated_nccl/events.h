/* What the profiler is told of groups, calls, launches and operations (src/plugin/profiler.cc). */
#ifndef DYNAMICCL_EMULATED_EVENTS_H
#define DYNAMICCL_EMULATED_EVENTS_H

#include "comm.h"
#include "profiler.h"

/* Each of these wants one event reported, and so has its parents reported. */
enum {
    COLL_BITS = EVENT_COLL | EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL_CH | EVENT_NET_PLUGIN,
    P2P_BITS = EVENT_P2P | EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL_CH | EVENT_NET_PLUGIN,
    PROXY_OP_BITS = EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_NET_PLUGIN,
};

/* ---- calls, on the thread that makes them ---- */

struct call {
    struct comm *comm;
    enum nccl_func func;
    const void *send;
    void *recv;
    size_t count;
    int type, op, peer; /* or root */
    struct gpu_stream *stream;
};

/* A call begins inside of a group that has begun. */
void events_enter_call(void);
/* The operation of a call is about to be kept; *watched gets what is known of it. */
void events_begin_call(const struct call *call, bool captured, struct watched *watched);
void events_end_call(const struct call *call);
/* A group ends, its own or a call's. */
void events_leave_group(void);
void events_group_done(void);

/* ---- plans ---- */

void events_begin_launch(struct plan *plan, struct gpu_stream *stream);
void events_end_launch(struct plan *plan);
/* Where the host's part of a plan runs: the launching thread, or that of a graph's callbacks. */
void events_begin_plan(struct plan *plan);
void events_end_plan(struct plan *plan);

#endif
