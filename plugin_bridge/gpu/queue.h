/* What streams, events and graphs share with each other, and with the player. */
#ifndef DYNAMICCL_GPU_QUEUE_H
#define DYNAMICCL_GPU_QUEUE_H

#include <pthread.h>

#include "gpu.h"

enum gpu_op_kind { GPU_OP_KERNEL, GPU_OP_COMPUTE, GPU_OP_STAMP, GPU_OP_WAIT, GPU_OP_CALL };

/* One recording of an event. Under gpu_lock. */
struct gpu_stamp {
    unsigned refs;
    bool done;
    uint64_t ns;
};

struct gpu_op {
    enum gpu_op_kind kind;
    struct gpu_op *next;
    uint64_t launched_ns; /* the host's clock then */
    uint32_t phase;
    uint64_t step;
    uint64_t ns;             /* COMPUTE */
    struct gpu_stamp *stamp; /* STAMP, WAIT */
    gpu_parse_fn parse;      /* KERNEL */
    gpu_host_fn fn, release; /* CALL; KERNEL */
    void *argument;          /* both */
    struct gpu_graph *graph; /* that owns the argument; NULL: the operation does */
    struct play *play;       /* KERNEL, once it has begun */
};

struct gpu_event {
    struct gpu_stamp *last;
    struct gpu_graph *captured; /* recorded on a capturing stream */
};

struct gpu_graph {
    unsigned refs; /* its owner's, and one per operation that is queued */
    struct gpu_op *head, *tail, *kept;
    struct gpu_stream *joined; /* streams that are captured into it */
};

struct gpu_stream {
    int device;
    bool destroyed, playing;
    struct gpu_op *head, *tail;
    uint64_t clock_ns; /* virtual end of what was played; the player's while anything is queued */
    struct gpu_graph *capture;
    struct gpu_stream *next, *capture_next;
};

/* Of all queues, events and graphs. Held for a few instructions at a time, never while anything is played. */
extern pthread_mutex_t gpu_lock;

uint64_t gpu_now_ns(void); /* real time */
/* The device's host thread has waited until then. */
void gpu_host_reaches(int device, uint64_t ns);
/* What gpu_set_phase() said last. */
void gpu_get_phase(int device, uint32_t *phase, uint64_t *step);

struct gpu_op *gpu_new_op(enum gpu_op_kind kind, int device);

/* ---- under gpu_lock ---- */

void gpu_push(struct gpu_stream *stream, struct gpu_op *op);
/* A stream may go before the capture that it joined ends. */
void gpu_leave_capture(struct gpu_stream *stream);
void gpu_stamp_set(struct gpu_stamp *stamp, uint64_t ns);
void gpu_stamp_drop(struct gpu_stamp *stamp);

/* ---- for the player ---- */

/* The next stream with work after one that was returned before, which is given back; NULL: none. */
struct gpu_stream *gpu_next_busy(struct gpu_stream *after);
/* The first operation of the stream has been played. */
void gpu_finish_op(struct gpu_stream *stream);
bool gpu_stamp_done(struct gpu_stamp *stamp, uint64_t *ns);

/* Sleeps until there is work, at most a second. */
void gpu_await_work(void);

#endif
