/* The thread that plays all of a process's GPUs. */
#define _GNU_SOURCE
#include "player.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "log.h"
#include "meeting.h"
#include "nap.h"
#include "play.h"
#include "times.h"

static bool play_stream(struct gpu_stream *stream) {
    bool happened = false;
    for (struct gpu_op *op; (op = __atomic_load_n(&stream->head, __ATOMIC_ACQUIRE)) != NULL;) {
        uint64_t ns;
        bool ended = true;
        switch (op->kind) {
        case GPU_OP_KERNEL:
            happened |= play_kernel(stream, op, &ended);
            break;
        case GPU_OP_COMPUTE:
            stream->clock_ns =
                (stream->clock_ns > op->launched_ns ? stream->clock_ns : op->launched_ns) + op->ns;
            break;
        case GPU_OP_WAIT:
            ended = gpu_stamp_done(op->stamp, &ns);
            if (ended && ns > stream->clock_ns)
                stream->clock_ns = ns;
            break;
        case GPU_OP_CALL:
            op->fn(op->argument);
            break;
        case GPU_OP_STAMP:
            break;
        }
        if (!ended)
            break;
        gpu_finish_op(stream);
        happened = true;
    }
    return happened;
}

/* Plays what can be played now. Returns whether anything was; *queued says whether there is work at all. */
static bool play_turn(bool *queued) {
    bool happened = false;
    *queued = false;
    for (struct gpu_stream *stream = gpu_next_busy(NULL); stream; stream = gpu_next_busy(stream)) {
        *queued = true;
        happened |= play_stream(stream);
    }
    if (!happened)
        gpu_log_flush();
    return happened;
}

static void *play(void *unused) {
    (void)unused;
    /* The proxy threads must keep up with the kernels, so these come after them. */
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 5);
    for (unsigned idle = 0;;) {
        bool queued = false;
        idle = play_turn(&queued) ? 0 : idle + 1;
        if (idle == 0)
            continue;
        if (!queued)
            gpu_await_work();
        else /* for other ranks, or for real time */
            gpu_nap(idle);
    }
    return NULL;
}

static void start(void) {
    const char *times = getenv("GPU_TIMES"), *meeting = getenv("GPU_MEETING");
    if ((times && *times && times_open(times) != 0) || (meeting && *meeting && meeting_open(meeting) != 0) ||
        play_open() != 0)
        _exit(1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, play, NULL) != 0) {
        fprintf(stderr, "cannot start the thread that plays the GPUs\n");
        _exit(1);
    }
    pthread_detach(thread);
}

void player_start(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
}
