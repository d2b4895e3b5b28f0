/* Events, and how the host waits for them. */
#include <pthread.h>
#include <stdlib.h>

#include "player.h"
#include "queue.h"

static pthread_cond_t done = PTHREAD_COND_INITIALIZER; /* for the host: a stamp was set */
static unsigned hosts_wait;

static struct gpu_stamp *keep(struct gpu_stamp *stamp) {
    if (stamp)
        stamp->refs++;
    return stamp;
}

void gpu_stamp_drop(struct gpu_stamp *stamp) {
    if (stamp && --stamp->refs == 0)
        free(stamp);
}

static struct gpu_stamp *new_stamp(void) {
    struct gpu_stamp *stamp = calloc(1, sizeof(*stamp));
    if (stamp == NULL)
        abort();
    stamp->refs = 1;
    return stamp;
}

struct gpu_event *gpu_event_create(void) {
    player_start();
    struct gpu_event *event = calloc(1, sizeof(*event));
    if (event == NULL)
        abort();
    return event;
}

void gpu_event_destroy(struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    gpu_stamp_drop(event->last);
    pthread_mutex_unlock(&gpu_lock);
    free(event);
}

void gpu_event_record(struct gpu_event *event, struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    event->captured = stream->capture;
    if (stream->capture == NULL) {
        struct gpu_op *op = gpu_new_op(GPU_OP_STAMP, stream->device);
        gpu_stamp_drop(event->last);
        event->last = new_stamp();
        op->stamp = keep(event->last);
        gpu_push(stream, op);
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
        struct gpu_op *op = gpu_new_op(GPU_OP_WAIT, stream->device);
        op->stamp = keep(event->last);
        gpu_push(stream, op);
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
    gpu_stamp_drop(stamp);
    pthread_mutex_unlock(&gpu_lock);
    gpu_host_reaches(gpu_get_device(), ns);
}

uint64_t gpu_event_ns(struct gpu_event *event) {
    pthread_mutex_lock(&gpu_lock);
    uint64_t ns = event->last && event->last->done ? event->last->ns : 0;
    pthread_mutex_unlock(&gpu_lock);
    return ns;
}

void gpu_stamp_set(struct gpu_stamp *stamp, uint64_t ns) {
    stamp->ns = ns;
    stamp->done = true;
    if (hosts_wait)
        pthread_cond_broadcast(&done);
}

bool gpu_stamp_done(struct gpu_stamp *stamp, uint64_t *ns) {
    pthread_mutex_lock(&gpu_lock);
    bool is_done = stamp->done;
    *ns = stamp->ns;
    pthread_mutex_unlock(&gpu_lock);
    return is_done;
}
