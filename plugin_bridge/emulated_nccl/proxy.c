#define _GNU_SOURCE
#include "proxy.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../gpu/nap.h"
#include "events.h"
#include "faults.h"
#include "names.h"
#include "release.h"

enum {
    MOST_BEHIND = GPU_COUNTERS / 2,
    PASSES_BETWEEN_LOOKS = 8, /* for new work, while there is some */
    IDLE_PASSES = 32,         /* until the thread naps */
    SHORT_NAP_NS = 5000,
    NET_STEPS = 8,
    BLOCK = 256,
};

/* The kinds of work of a channel, which run side by side; work of one kind runs one after the other. */
enum lane { LANE_SENDS, LANE_RECVS, LANE_NET_SENDS, LANE_NET_RECVS, LANES };

struct posted {
    enum proxy_kind kind;
    enum lane lane;
    int channel, peer, chunk_bytes, mask;
    uint64_t work;
    void *parent;
};

/* What was posted at once. */
struct post {
    struct post *next;
    int n;
    struct posted ops[];
};

/* One operation of the thread (NCCL's proxy arguments). */
struct running {
    struct running *next;  /* active, or free */
    struct running *after; /* of the same lane */
    struct posted is;
    bool begun, started, stopped;
    /* Never cleared: NCCL takes these structures back as they are. A channel whose start was missed is
     * stopped with the handle of whatever ran there before. */
    void *kernel;
    void *net;
};

struct proxy {
    struct comm *comm;
    pthread_mutex_t lock; /* of what is between here ... */
    pthread_cond_t news;
    struct post *posts, **last_post;
    bool running, ending;
    /* ... and here; the rest is the thread's. */
    pthread_t thread;
    struct running *active, *free;
    struct block {
        struct block *next;
        struct running all[BLOCK];
    } *blocks;
    struct running *last[MAX_CHANNELS][LANES];
    _Atomic int outstanding[MAX_CHANNELS];
};

/* ---- one channel's part of an operation ---- */

static bool has_reached(const struct gpu_counters *counters, const struct running *run, uint64_t *timestamp) {
    const size_t cell = run->is.work % GPU_COUNTERS;
    /* The kernel writes the timestamp first: acquire pairs with its release. */
    if (__atomic_load_n(&counters[run->is.channel].data[cell].counter, __ATOMIC_ACQUIRE) < run->is.work)
        return false;
    *timestamp = __atomic_load_n(&counters[run->is.channel].data[cell].timestamp, __ATOMIC_RELAXED);
    return true;
}

static uint64_t fault_number(const struct proxy *proxy, const struct running *run) {
    return proxy->comm->id ^ (run->is.work << 8 | (uint64_t)run->is.channel);
}

static void start_kernel(const struct proxy *proxy, struct running *run, uint64_t timer) {
    if (!profiler_is_loaded() || !(run->is.mask & EVENT_KERNEL_CH))
        return;
    struct event event = {
        .type = EVENT_KERNEL_CH, .parent = run->is.parent, .channel = run->is.channel, .timer = timer};
    profiler_start(proxy->comm->profiler_context, &run->kernel, &event);
}

static void stop_kernel(const struct proxy *proxy, struct running *run, uint64_t timer) {
    if (!profiler_is_loaded() || run->kernel == NULL)
        return;
    if (fault_strikes(faults()->zero_timers, fault_number(proxy, run)))
        timer = 0;
    profiler_record(run->kernel, STATE_KERNEL_CH_STOP, timer);
    profiler_stop(run->kernel);
}

/* All starts of a pass come before the stops: a channel that has just been started is left alone until the
 * next pass. NCCL looks for the start before it looks for the end; where the kernel begins and ends in
 * between, the start is skipped. Here the end is looked for first, and starts are skipped where that is asked
 * for: else a run could not be repeated. */
static bool watch_kernel(const struct proxy *proxy, struct running *run) {
    const struct comm *comm = proxy->comm;
    uint64_t timer, ended;
    bool has_ended = has_reached(comm->completed, run, &ended);
    bool late = !run->begun && fault_strikes(faults()->late_starts, fault_number(proxy, run));
    run->begun = true;
    if (!run->started && !late && has_reached(comm->started, run, &timer)) {
        start_kernel(proxy, run, timer);
        run->started = true;
        return true;
    }
    if (late)
        while (!(has_ended = has_reached(comm->completed, run, &ended)) && !comm->aborted)
            sched_yield();
    if (!has_ended)
        return false;
    stop_kernel(proxy, run, ended);
    run->stopped = true;
    return true;
}

/* A network operation begins when it is posted and ends with its channel. */
static void start_net(const struct proxy *proxy, struct running *run) {
    if (!profiler_is_loaded() || !(run->is.mask & PROXY_OP_BITS))
        return;
    struct event event = {
        .type = EVENT_PROXY_OP,
        .parent = run->is.parent,
        .rank = proxy->comm->rank,
        .pid = profiler_pid(),
        .channel = run->is.channel,
        .peer = run->is.peer,
        .steps = NET_STEPS,
        .chunk_bytes = run->is.chunk_bytes,
        .is_send = run->is.kind == PROXY_SEND,
    };
    profiler_start(proxy->comm->profiler_context, &run->net, &event);
}

static bool watch_net(const struct proxy *proxy, struct running *run) {
    uint64_t timer;
    const bool legacy = release()->names_in_events;
    if (!run->begun && run->net && profiler_is_loaded())
        profiler_record(run->net, legacy ? STATE_PROXY_OP_SEND_TRANSMITTED : STATE_PROXY_OP_IN_PROGRESS,
                        (uint64_t)run->is.chunk_bytes);
    bool first = !run->begun;
    run->begun = true;
    if (!has_reached(proxy->comm->completed, run, &timer))
        return first;
    if (run->net && profiler_is_loaded()) {
        if (legacy)
            profiler_record(run->net, STATE_PROXY_OP_SEND_DONE, (uint64_t)run->is.chunk_bytes);
        profiler_stop(run->net);
    }
    run->stopped = true;
    return true;
}

/* PXN runs another process's network operation: neither the context nor the parent means anything here. */
static void foreign_net(const struct proxy *proxy, const struct running *run) {
    struct event event = {
        .type = EVENT_PROXY_OP,
        .parent = (void *)(uintptr_t)0xdeadbeef,
        .rank = run->is.peer,
        .pid = getppid(),
        .channel = run->is.channel,
        .peer = proxy->comm->rank,
        .steps = NET_STEPS,
        .chunk_bytes = run->is.chunk_bytes,
    };
    void *handle = NULL;
    profiler_start(proxy->comm->profiler_context, &handle, &event);
    if (handle)
        profiler_stop(handle);
}

/* ---- the thread ---- */

/* The one that was given back last comes first. */
static struct running *new_running(struct proxy *proxy) {
    if (proxy->free == NULL) {
        struct block *block = calloc(1, sizeof(*block));
        if (block == NULL)
            abort();
        block->next = proxy->blocks;
        proxy->blocks = block;
        for (int i = BLOCK - 1; i >= 0; i--) {
            block->all[i].next = proxy->free;
            proxy->free = &block->all[i];
        }
    }
    struct running *run = proxy->free;
    proxy->free = run->next;
    return run;
}

/* At the end of the list, or behind what its lane is at. */
static void append(struct proxy *proxy, const struct posted *posted) {
    struct running *run = new_running(proxy), **last = &proxy->last[posted->channel][posted->lane];
    *run = (struct running){.is = *posted, .kernel = run->kernel};
    if (run->is.kind != PROXY_PROFILE) {
        start_net(proxy, run);
        if (profiler_is_loaded() && run->is.mask & PROXY_OP_BITS &&
            fault_strikes(faults()->foreign_ops, fault_number(proxy, run)))
            foreign_net(proxy, run);
    }
    if (*last) {
        (*last)->after = run;
    } else {
        struct running **at = &proxy->active;
        while (*at)
            at = &(*at)->next;
        *at = run;
    }
    *last = run;
}

/* Puts what comes next in its lane in its place, and returns what comes next in the list. */
static struct running *take_out(struct proxy *proxy, struct running **at) {
    struct running *run = *at, *next = run->next;
    *at = next;
    if (run->after) {
        *at = run->after;
        run->after->next = next;
    } else {
        proxy->last[run->is.channel][run->is.lane] = NULL;
    }
    proxy->outstanding[run->is.channel]--;
    run->next = proxy->free;
    proxy->free = run;
    return next;
}

/* One pass over all that is active. */
static bool progress(struct proxy *proxy) {
    bool happened = false;
    for (struct running **at = &proxy->active; *at;) {
        struct running *run = *at;
        happened |= run->is.kind == PROXY_PROFILE ? watch_kernel(proxy, run) : watch_net(proxy, run);
        if (!run->stopped) {
            at = &run->next;
            continue;
        }
        struct running *next = take_out(proxy, at);
        /* What took its place has its turn in the next pass. */
        while (*at != next)
            at = &(*at)->next;
    }
    return happened;
}

struct control {
    const struct proxy *proxy;
    void *event;
};

/* Control events follow the mask as it is now. */
static struct control begin_control(const struct proxy *proxy, enum event_state state) {
    struct control control = {.proxy = proxy};
    if (profiler_is_loaded() && profiler_mask() & EVENT_PROXY_CTRL) {
        struct event event = {.type = EVENT_PROXY_CTRL};
        profiler_start(proxy->comm->profiler_context, &control.event, &event);
        if (control.event)
            profiler_record(control.event, state, 0);
    }
    return control;
}

static void end_control(const struct control *control, enum event_state state, int appended) {
    if (control->event == NULL || !profiler_is_loaded())
        return;
    profiler_record(control->event, state, (uint64_t)appended);
    profiler_stop(control->event);
}

/* Takes what was posted; waits for it where there is nothing else to do. False: there will be no more. */
static bool get_posted(struct proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    if (proxy->active == NULL && proxy->posts == NULL && !proxy->ending) {
        struct control control = begin_control(proxy, STATE_PROXY_CTRL_SLEEP);
        while (proxy->posts == NULL && !proxy->ending)
            pthread_cond_wait(&proxy->news, &proxy->lock);
        end_control(&control, STATE_PROXY_CTRL_WAKEUP, 0);
    }
    struct post *post = proxy->posts;
    proxy->posts = NULL;
    proxy->last_post = &proxy->posts;
    bool goes_on = post || proxy->active || !proxy->ending;
    pthread_mutex_unlock(&proxy->lock);
    if (post == NULL)
        return goes_on;
    struct control control = begin_control(proxy, STATE_PROXY_CTRL_APPEND);
    int n = 0;
    for (struct post *next; post; post = next) {
        next = post->next;
        for (int i = 0; i < post->n; i++, n++)
            append(proxy, &post->ops[i]);
        free(post);
    }
    end_control(&control, STATE_PROXY_CTRL_APPEND_END, n);
    return goes_on;
}

static void nap(long ns) {
    nanosleep(&(struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}, NULL);
}

static void *run_proxy(void *argument) {
    struct proxy *proxy = argument;
    pthread_setname_np(pthread_self(), "NCCL Progress");
    for (unsigned pass = 0, idle = 0; !proxy->comm->aborted; pass++) {
        if (faults()->lag_us)
            nap(1000L * faults()->lag_us);
        idle = progress(proxy) ? 0 : idle + 1;
        if ((proxy->active == NULL || pass % PASSES_BETWEEN_LOOKS == 0) && !get_posted(proxy))
            break;
        if (idle > IDLE_PASSES)
            gpu_nap(idle - IDLE_PASSES);
        else if (idle)
            sched_yield();
    }
    return NULL;
}

/* ---- its life ---- */

struct proxy *proxy_new(struct comm *comm) {
    struct proxy *proxy = calloc(1, sizeof(*proxy));
    if (proxy == NULL)
        abort();
    proxy->comm = comm;
    proxy->last_post = &proxy->posts;
    pthread_mutex_init(&proxy->lock, NULL);
    pthread_cond_init(&proxy->news, NULL);
    return proxy;
}

void proxy_end(struct proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    proxy->ending = true;
    bool running = proxy->running;
    proxy->running = false;
    pthread_cond_signal(&proxy->news);
    pthread_mutex_unlock(&proxy->lock);
    if (running)
        pthread_join(proxy->thread, NULL);
}

void proxy_free(struct proxy *proxy) {
    for (struct post *post = proxy->posts, *next; post; post = next) {
        next = post->next;
        free(post);
    }
    for (struct block *block = proxy->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    pthread_mutex_destroy(&proxy->lock);
    pthread_cond_destroy(&proxy->news);
    free(proxy);
}

/* ---- work ---- */

bool proxy_wants_counters(const struct comm *comm, int mask) {
    (void)comm;
    return profiler_is_loaded() && mask & (EVENT_KERNEL_CH | PROXY_OP_BITS);
}

void proxy_make_room(struct comm *comm, const struct plan *plan) {
    struct proxy *proxy = comm->proxy;
    for (int i = 0; i < plan->n_ops && faults()->lag_us == 0; i++)
        while (proxy->outstanding[plan->ops[i].channel] > MOST_BEHIND && !comm->aborted)
            nap(SHORT_NAP_NS);
}

static enum lane lane_of(const struct proxy_op *op) {
    if (op->kind == PROXY_PROFILE)
        return op->to_recv ? LANE_RECVS : LANE_SENDS;
    return op->kind == PROXY_SEND ? LANE_NET_SENDS : LANE_NET_RECVS;
}

void proxy_post(struct comm *comm, struct plan *plan) {
    struct proxy *proxy = comm->proxy;
    if (plan->n_ops == 0)
        return;
    struct post *post = malloc(sizeof(*post) + (size_t)plan->n_ops * sizeof(post->ops[0]));
    if (post == NULL)
        abort();
    post->next = NULL;
    post->n = plan->n_ops;
    for (int i = 0; i < plan->n_ops; i++) {
        struct proxy_op *op = &plan->ops[i];
        const struct watched *watched = op->is_p2p ? &op->of.p2p->watched : &op->of.coll->watched;
        /* NCCL looks at what the communicator is planning now, which need not be the graph that is replayed:
         * a replay after other work is not counted, and its channels get the times of earlier work. */
        if (plan->persistent && comm->planner.persistent && op->kind == PROXY_PROFILE)
            op->work = op->counts ? ++comm->work[op->channel] : comm->work[op->channel];
        post->ops[i] = (struct posted){
            .kind = op->kind,
            .lane = lane_of(op),
            .channel = op->channel,
            .peer = op->peer,
            .chunk_bytes = op->chunk_bytes,
            .mask = watched->mask,
            .work = op->work,
            .parent = watched->event,
        };
        proxy->outstanding[op->channel]++;
    }
    pthread_mutex_lock(&proxy->lock);
    *proxy->last_post = post;
    proxy->last_post = &post->next;
    if (!proxy->running && !proxy->ending) {
        proxy->running = true;
        if (pthread_create(&proxy->thread, NULL, run_proxy, proxy) != 0)
            abort();
    }
    pthread_cond_signal(&proxy->news);
    pthread_mutex_unlock(&proxy->lock);
}
