/* Streams: queues of work, which the host fills and the player empties. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "player.h"
#include "queue.h"

pthread_mutex_t gpu_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER; /* for the player: there is work */
static bool player_sleeps;

static struct gpu_stream *streams; /* all that are not both destroyed and empty */
static struct gpu_stream *defaults[GPU_MAX_DEVICES];

struct gpu_op *gpu_new_op(enum gpu_op_kind kind, int device) {
    struct gpu_op *op = calloc(1, sizeof(*op));
    if (op == NULL)
        abort();
    op->kind = kind;
    op->launched_ns = gpu_host_ns(device);
    gpu_get_phase(device, &op->phase, &op->step);
    return op;
}

void gpu_push(struct gpu_stream *stream, struct gpu_op *op) {
    if (stream->tail)
        stream->tail->next = op;
    else /* pairs with the acquire in play_stream() */
        __atomic_store_n(&stream->head, op, __ATOMIC_RELEASE);
    stream->tail = op;
    if (player_sleeps)
        pthread_cond_signal(&news);
}

/* Under gpu_lock. A captured operation has no time of its own yet. */
static void submit(struct gpu_stream *stream, struct gpu_op *op) {
    struct gpu_graph *graph = stream->capture;
    if (graph == NULL) {
        gpu_push(stream, op);
        return;
    }
    if (graph->tail)
        graph->tail->next = op;
    else
        graph->head = op;
    graph->tail = op;
}

struct gpu_stream *gpu_stream_create(int device) {
    player_start();
    struct gpu_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        abort();
    stream->device = device;
    pthread_mutex_lock(&gpu_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&gpu_lock);
    return stream;
}

/* Under gpu_lock. */
static void unlink_stream(struct gpu_stream *stream) {
    for (struct gpu_stream **p = &streams; *p; p = &(*p)->next)
        if (*p == stream) {
            *p = stream->next;
            break;
        }
    free(stream);
}

void gpu_stream_destroy(struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    stream->destroyed = true;
    gpu_leave_capture(stream);
    if (stream->head == NULL && !stream->playing)
        unlink_stream(stream);
    pthread_mutex_unlock(&gpu_lock);
}

struct gpu_stream *gpu_default_stream(int device) {
    static pthread_mutex_t creating = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&creating);
    if (defaults[device] == NULL)
        defaults[device] = gpu_stream_create(device);
    pthread_mutex_unlock(&creating);
    return defaults[device];
}

int gpu_stream_device(const struct gpu_stream *stream) {
    return stream->device;
}

bool gpu_stream_idle(struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    bool idle = stream->head == NULL;
    pthread_mutex_unlock(&gpu_lock);
    return idle;
}

void gpu_stream_sync(struct gpu_stream *stream) {
    struct gpu_event *event = gpu_event_create();
    gpu_event_record(event, stream);
    gpu_event_sync(event);
    gpu_event_destroy(event);
}

/* A stream that has nothing to do may have ended later than the host is, in virtual time. */
void gpu_device_sync(int device) {
    for (;;) {
        uint64_t ns = 0;
        pthread_mutex_lock(&gpu_lock);
        struct gpu_stream *stream = streams;
        for (; stream; stream = stream->next) {
            if (stream->device != device || stream->destroyed)
                continue;
            if (stream->head)
                break;
            ns = stream->clock_ns > ns ? stream->clock_ns : ns;
        }
        pthread_mutex_unlock(&gpu_lock);
        if (stream == NULL) {
            gpu_host_reaches(device, ns);
            return;
        }
        gpu_stream_sync(stream);
    }
}

/* ---- work ---- */

static void submit_locked(struct gpu_stream *stream, struct gpu_op *op) {
    pthread_mutex_lock(&gpu_lock);
    submit(stream, op);
    pthread_mutex_unlock(&gpu_lock);
}

void gpu_launch(struct gpu_stream *stream, gpu_parse_fn parse, gpu_host_fn release, void *launched) {
    struct gpu_op *op = gpu_new_op(GPU_OP_KERNEL, stream->device);
    op->parse = parse;
    op->release = release;
    op->argument = launched;
    submit_locked(stream, op);
}

void gpu_compute(struct gpu_stream *stream, uint64_t ns) {
    struct gpu_op *op = gpu_new_op(GPU_OP_COMPUTE, stream->device);
    op->ns = ns;
    submit_locked(stream, op);
}

void gpu_call(struct gpu_stream *stream, gpu_host_fn fn, void *argument) {
    struct gpu_op *op = gpu_new_op(GPU_OP_CALL, stream->device);
    op->fn = fn;
    op->argument = argument;
    submit_locked(stream, op);
}

/* ---- for the player ---- */

struct gpu_stream *gpu_next_busy(struct gpu_stream *after) {
    pthread_mutex_lock(&gpu_lock);
    struct gpu_stream *stream = after ? after->next : streams;
    while (stream && stream->head == NULL)
        stream = stream->next;
    if (stream)
        stream->playing = true;
    if (after) {
        after->playing = false;
        if (after->destroyed && after->head == NULL)
            unlink_stream(after);
    }
    pthread_mutex_unlock(&gpu_lock);
    return stream;
}

void gpu_finish_op(struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    struct gpu_op *op = stream->head;
    __atomic_store_n(&stream->head, op->next, __ATOMIC_RELEASE);
    if (stream->head == NULL)
        stream->tail = NULL;
    if (op->kind == GPU_OP_STAMP)
        gpu_stamp_set(op->stamp, stream->clock_ns > op->launched_ns ? stream->clock_ns : op->launched_ns);
    gpu_stamp_drop(op->stamp);
    pthread_mutex_unlock(&gpu_lock);
    if (op->graph)
        gpu_graph_destroy(op->graph);
    else if (op->release)
        op->release(op->argument);
    free(op);
}

void gpu_await_work(void) {
    pthread_mutex_lock(&gpu_lock);
    player_sleeps = true;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    bool empty = true;
    for (struct gpu_stream *s = streams; s && empty; s = s->next)
        empty = s->head == NULL;
    if (empty)
        pthread_cond_timedwait(&news, &gpu_lock, &until);
    player_sleeps = false;
    pthread_mutex_unlock(&gpu_lock);
}
