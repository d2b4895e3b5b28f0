#define _GNU_SOURCE
#include "gpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "meeting.h"
#include "player.h"
#include "times.h"

/* Of all queues, events and graphs. Held for a few instructions at a time, never while anything is played. */
pthread_mutex_t gpu_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER; /* for the player: there is work */
static pthread_cond_t done = PTHREAD_COND_INITIALIZER; /* for the host: a stamp was set */
static bool player_sleeps;
static unsigned hosts_wait;

static struct gpu_stream *streams; /* all that are not both destroyed and empty */
static struct gpu_stream *defaults[GPU_MAX_DEVICES];
static struct {
    _Atomic uint64_t host_ns;
    _Atomic uint32_t phase;
    _Atomic uint64_t step;
} devices[GPU_MAX_DEVICES];
static __thread int current;

uint64_t gpu_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- start ---- */

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *play(void *unused) {
    (void)unused;
    /* The proxy threads must keep up with the kernels, so these come after them. */
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 5);
    for (unsigned idle = 0;;) {
        bool queued = false;
        idle = player_turn(&queued) ? 0 : idle + 1;
        if (idle == 0)
            continue;
        pthread_mutex_lock(&gpu_lock);
        if (!queued) {
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
        }
        pthread_mutex_unlock(&gpu_lock);
        /* Waiting for other ranks, or for real time. */
        if (queued)
            nanosleep(&(struct timespec){.tv_nsec = idle < 10 ? 5000 : 50000}, NULL);
    }
    return NULL;
}

static void start(void) {
    const char *times = getenv("GPU_TIMES"), *meeting = getenv("GPU_MEETING");
    if ((times && *times && times_open(times) != 0) || (meeting && *meeting && meeting_open(meeting) != 0) ||
        player_open() != 0)
        _exit(1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, play, NULL) != 0) {
        fprintf(stderr, "cannot start the thread that plays the GPUs\n");
        _exit(1);
    }
    pthread_detach(thread);
}

int gpu_device_count(void) {
    static int count;
    if (count == 0) {
        const char *text = getenv("GPU_DEVICES");
        int n = text ? atoi(text) : 8;
        count = n >= 1 && n <= GPU_MAX_DEVICES ? n : 8;
    }
    return count;
}

void gpu_set_device(int device) {
    current = device;
}

int gpu_get_device(void) {
    return current;
}

uint64_t gpu_host_ns(int device) {
    return atomic_load(&devices[device].host_ns);
}

void gpu_host_advance(int device, uint64_t ns) {
    atomic_fetch_add(&devices[device].host_ns, ns);
}

void gpu_set_phase(int device, uint32_t phase, uint64_t step) {
    atomic_store(&devices[device].phase, phase);
    atomic_store(&devices[device].step, step);
}

static void host_reaches(int device, uint64_t ns) {
    uint64_t now = atomic_load(&devices[device].host_ns);
    while (now < ns && !atomic_compare_exchange_weak(&devices[device].host_ns, &now, ns)) {
    }
}

/* ---- queues ---- */

static struct gpu_stamp *keep(struct gpu_stamp *stamp) {
    if (stamp)
        stamp->refs++;
    return stamp;
}

static void drop(struct gpu_stamp *stamp) {
    if (stamp && --stamp->refs == 0)
        free(stamp);
}

static struct gpu_op *new_op(enum gpu_op_kind kind, int device) {
    struct gpu_op *op = calloc(1, sizeof(*op));
    if (op == NULL)
        abort();
    op->kind = kind;
    op->launched_ns = gpu_host_ns(device);
    op->phase = atomic_load_explicit(&devices[device].phase, memory_order_relaxed);
    op->step = atomic_load_explicit(&devices[device].step, memory_order_relaxed);
    return op;
}

/* Under gpu_lock. */
static void push(struct gpu_stream *stream, struct gpu_op *op) {
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
        push(stream, op);
        return;
    }
    if (graph->tail)
        graph->tail->next = op;
    else
        graph->head = op;
    graph->tail = op;
}

struct gpu_stream *gpu_stream_create(int device) {
    pthread_once(&once, start);
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

/* Under gpu_lock. A stream may go before the capture that it joined ends. */
static void leave_capture(struct gpu_stream *stream) {
    struct gpu_stream **p = stream->capture ? &stream->capture->joined : NULL;
    while (p && *p && *p != stream)
        p = &(*p)->capture_next;
    if (p && *p)
        *p = stream->capture_next;
    stream->capture = NULL;
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
    leave_capture(stream);
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

/* ---- events ---- */

static struct gpu_stamp *new_stamp(void) {
    struct gpu_stamp *stamp = calloc(1, sizeof(*stamp));
    if (stamp == NULL)
        abort();
    stamp->refs = 1;
    return stamp;
}

struct gpu_event *gpu_event_create(void) {
    pthread_once(&once, start);
    struct gpu_event *event = calloc(1, sizeof(*event));
    if (event == NULL)
        abort();
    return event;
}

void gpu_event_destroy(struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    drop(event->last);
    pthread_mutex_unlock(&gpu_lock);
    free(event);
}

void gpu_event_record(struct gpu_event *event, struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    event->captured = stream->capture;
    if (stream->capture == NULL) {
        struct gpu_op *op = new_op(GPU_OP_STAMP, stream->device);
        drop(event->last);
        event->last = new_stamp();
        op->stamp = keep(event->last);
        push(stream, op);
    }
    pthread_mutex_unlock(&gpu_lock);
}

void gpu_stream_wait(struct gpu_stream *stream, struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    if (event->captured && stream->capture == NULL) {
        stream->capture = event->captured;
        stream->capture_next = event->captured->joined;
        event->captured->joined = stream;
    } else if (!event->captured && event->last && stream->capture == NULL) {
        struct gpu_op *op = new_op(GPU_OP_WAIT, stream->device);
        op->stamp = keep(event->last);
        push(stream, op);
    }
    pthread_mutex_unlock(&gpu_lock);
}

bool gpu_event_done(struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    bool is_done = event->last == NULL || event->last->done;
    pthread_mutex_unlock(&gpu_lock);
    return is_done;
}

/* Under gpu_lock. */
static uint64_t wait_for(struct gpu_stamp *stamp) {
    hosts_wait++;
    while (!stamp->done)
        pthread_cond_wait(&done, &gpu_lock);
    hosts_wait--;
    return stamp->ns;
}

void gpu_event_sync(struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    struct gpu_stamp *stamp = keep(event->last);
    uint64_t ns = stamp ? wait_for(stamp) : 0;
    drop(stamp);
    pthread_mutex_unlock(&gpu_lock);
    host_reaches(current, ns);
}

uint64_t gpu_event_ns(struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    uint64_t ns = event->last && event->last->done ? event->last->ns : 0;
    pthread_mutex_unlock(&gpu_lock);
    return ns;
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
            host_reaches(device, ns);
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
    struct gpu_op *op = new_op(GPU_OP_KERNEL, stream->device);
    op->parse = parse;
    op->release = release;
    op->argument = launched;
    submit_locked(stream, op);
}

void gpu_compute(struct gpu_stream *stream, uint64_t ns) {
    struct gpu_op *op = new_op(GPU_OP_COMPUTE, stream->device);
    op->ns = ns;
    submit_locked(stream, op);
}

void gpu_call(struct gpu_stream *stream, gpu_host_fn fn, void *argument) {
    struct gpu_op *op = new_op(GPU_OP_CALL, stream->device);
    op->fn = fn;
    op->argument = argument;
    submit_locked(stream, op);
}

/* ---- capture ---- */

void gpu_capture_begin(struct gpu_stream *stream) {
    struct gpu_graph *graph = calloc(1, sizeof(*graph));
    if (graph == NULL)
        abort();
    graph->refs = 1;
    pthread_mutex_lock(&gpu_lock);
    stream->capture = graph;
    stream->capture_next = NULL;
    graph->joined = stream;
    pthread_mutex_unlock(&gpu_lock);
}

struct gpu_graph *gpu_capture_end(struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    struct gpu_graph *graph = stream->capture;
    for (struct gpu_stream *s = graph ? graph->joined : NULL, *next; s; s = next) {
        next = s->capture_next;
        s->capture = NULL;
        s->capture_next = NULL;
    }
    if (graph)
        graph->joined = NULL;
    pthread_mutex_unlock(&gpu_lock);
    return graph;
}

struct gpu_graph *gpu_capturing(struct gpu_stream *stream) {
    return stream->capture;
}

void gpu_graph_keep(struct gpu_graph *graph, gpu_host_fn fn, void *argument) {
    struct gpu_op *op = calloc(1, sizeof(*op));
    if (op == NULL)
        abort();
    op->fn = fn;
    op->argument = argument;
    pthread_mutex_lock(&gpu_lock);
    op->next = graph->kept;
    graph->kept = op;
    pthread_mutex_unlock(&gpu_lock);
}

void gpu_graph_launch(struct gpu_graph *graph, struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    for (const struct gpu_op *captured = graph->head; captured; captured = captured->next) {
        struct gpu_op *op = new_op(captured->kind, stream->device);
        op->parse = captured->parse;
        op->fn = captured->fn;
        op->argument = captured->argument;
        op->ns = captured->ns;
        /* What was launched belongs to the graph, which waits for its plays. */
        op->graph = graph;
        graph->refs++;
        push(stream, op);
    }
    pthread_mutex_unlock(&gpu_lock);
}

static void release_graph(struct gpu_graph *graph) {
    for (struct gpu_op *op = graph->head, *next; op; op = next) {
        next = op->next;
        if (op->release)
            op->release(op->argument);
        free(op);
    }
    for (struct gpu_op *op = graph->kept, *next; op; op = next) {
        next = op->next;
        op->fn(op->argument);
        free(op);
    }
    free(graph);
}

void gpu_graph_destroy(struct gpu_graph *graph) {
    pthread_mutex_lock(&gpu_lock);
    bool last = --graph->refs == 0;
    pthread_mutex_unlock(&gpu_lock);
    if (last)
        release_graph(graph);
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
    if (op->kind == GPU_OP_STAMP) {
        op->stamp->ns = stream->clock_ns > op->launched_ns ? stream->clock_ns : op->launched_ns;
        op->stamp->done = true;
        if (hosts_wait)
            pthread_cond_broadcast(&done);
    }
    drop(op->stamp);
    pthread_mutex_unlock(&gpu_lock);
    if (op->graph)
        gpu_graph_destroy(op->graph);
    else if (op->release)
        op->release(op->argument);
    free(op);
}

bool gpu_stamp_done(struct gpu_stamp *stamp, uint64_t *ns) {
    pthread_mutex_lock(&gpu_lock);
    bool is_done = stamp->done;
    *ns = stamp->ns;
    pthread_mutex_unlock(&gpu_lock);
    return is_done;
}
