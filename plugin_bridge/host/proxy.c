#define _GNU_SOURCE
#include "proxy.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "tuner_driver.h"

enum {
    IN_FLIGHT = 2,
    IDLE_SPINS = 500,
    SHORT_NAPS = 8,
    SHORT_NAP_NS = 30000,
    LONG_NAP_NS = 300000,
    OP_STEPS = 8
};

/* An element being delivered; only the proxy thread sees it. */
struct delivery {
    struct proxy_work work;
    uint64_t started; /* bit per channel position */
    uint64_t stopped;
    void *kernels[MAX_CHANNELS];
    void *ops[MAX_CHANNELS];
};

static int wants_kernels(const struct proxy *proxy, const struct proxy_work *work) {
    return proxy->profiler->abi >= 3 && (work->mask & EVENT_KERNEL_CH);
}

static int wants_ops(const struct proxy_work *work) {
    return (work->mask & (EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_NET_PLUGIN)) != 0;
}

/* Position k of the permuted order of the channels. */
static int position(const struct proxy_work *work, int k) {
    int shifted = (int)((work->salt + (uint64_t)k) % (uint64_t)work->n_channels);
    return work->salt & 0x100 ? work->n_channels - 1 - shifted : shifted;
}

/*
 * Channels start and stop a little apart; the earliest start and the latest stop are exact, so that the
 * latest stop minus the earliest start is the collective's time to the nanosecond.
 */
static uint64_t skew(const struct proxy_work *work, int channel, uint64_t side) {
    uint64_t most = (work->gpu_stop - work->gpu_start) / 16;
    int exact = (int)((work->salt >> (side ? 16 : 24)) % (uint64_t)work->n_channels);
    return channel == exact || most == 0 ? 0 : mix64(work->salt ^ (side << 32) ^ (uint64_t)channel) % most;
}

static void start_channel(const struct proxy *proxy, struct delivery *d, int channel) {
    const struct proxy_work *work = &d->work;
    d->started |= 1ull << channel;
    if (wants_ops(work)) {
        struct event op = {
            .type = EVENT_PROXY_OP,
            .parent = work->parent,
            .rank = work->rank,
            .pid = getpid(),
            .channel_id = work->channel_lo + channel,
            .peer = work->peer,
            .n_steps = OP_STEPS,
            .chunk_size = work->chunk_bytes,
            .is_send = 1,
        };
        d->ops[channel] = profiler_start(proxy->profiler, work->context, &op);
        int state = proxy->profiler->abi >= 4 ? STATE_PROXY_OP_IN_PROGRESS : STATE_PROXY_OP_SEND_TRANSMITTED;
        if (d->ops[channel] != NULL)
            profiler_record(proxy->profiler, d->ops[channel], state, (uint64_t)work->chunk_bytes);
    }
    if (wants_kernels(proxy, work)) {
        /* NCCL leaves rank 0 here. */
        struct event kernel = {
            .type = EVENT_KERNEL_CH,
            .parent = work->parent,
            .channel_id = work->channel_lo + channel,
            .p_timer = work->gpu_start + skew(work, channel, 0),
        };
        d->kernels[channel] = profiler_start(proxy->profiler, work->context, &kernel);
    }
}

static void stop_channel(const struct proxy *proxy, struct delivery *d, int channel) {
    const struct proxy_work *work = &d->work;
    d->stopped |= 1ull << channel;
    if (d->kernels[channel] != NULL) {
        uint64_t timer = work->gpu_stop - skew(work, channel, 1);
        if (mix64(work->salt ^ 0xbad ^ ((uint64_t)channel << 40)) % 1000 <
            (uint64_t)work->bad_timers_permille)
            timer = 0;
        if (proxy->profiler->abi >= 4)
            profiler_record(proxy->profiler, d->kernels[channel], STATE_KERNEL_CH_STOP, timer);
        profiler_stop(proxy->profiler, d->kernels[channel]);
    }
    if (d->ops[channel] != NULL) {
        if (proxy->profiler->abi <= 3)
            profiler_record(proxy->profiler, d->ops[channel], STATE_PROXY_OP_SEND_DONE,
                            (uint64_t)work->chunk_bytes);
        profiler_stop(proxy->profiler, d->ops[channel]);
    }
}

/* PXN runs another process's network operation: its pid differs and its parent means nothing here. */
static void foreign_op(const struct proxy *proxy, const struct proxy_work *work) {
    if (!work->foreign || !wants_ops(work))
        return;
    struct event op = {
        .type = EVENT_PROXY_OP,
        .parent = (void *)(uintptr_t)0xdeadbeef,
        .rank = work->peer,
        .pid = getppid(),
        .channel_id = work->channel_lo,
        .peer = work->rank,
        .n_steps = OP_STEPS,
        .chunk_size = work->chunk_bytes,
    };
    void *handle = profiler_start(proxy->profiler, work->context, &op);
    if (handle != NULL)
        profiler_stop(proxy->profiler, handle);
}

/* Visits every channel once in permuted order; returns 1 once all have stopped. */
static int advance(const struct proxy *proxy, struct delivery *d, uint64_t pass) {
    const uint64_t all = d->work.n_channels == 64 ? ~0ull : (1ull << d->work.n_channels) - 1;
    for (int k = 0; k < d->work.n_channels; k++) {
        int channel = position(&d->work, k);
        if ((mix64(d->work.salt + pass * 64 + (uint64_t)channel) & 3) == 0)
            continue;
        if (!(d->started >> channel & 1))
            start_channel(proxy, d, channel);
        else if (!(d->stopped >> channel & 1))
            stop_channel(proxy, d, channel);
    }
    return d->stopped == all;
}

/* v1 to v3: whoever listens takes host time, so the execution time is spent between start and stop. */
static void deliver_in_host_time(const struct proxy *proxy, struct delivery *d) {
    const struct proxy_work *work = &d->work;
    uint64_t from = proxy->profiler->abi == 3 ? host_ns() : work->host_start;
    for (int k = 0; k < work->n_channels; k++)
        start_channel(proxy, d, position(work, k));
    wait_until_ns(from + (work->gpu_stop - work->gpu_start));
    for (int k = work->n_channels - 1; k >= 0; k--)
        stop_channel(proxy, d, position(work, k));
}

static int take(struct proxy *proxy, struct delivery *d) {
    uint64_t head = atomic_load_explicit(&proxy->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&proxy->tail, memory_order_acquire))
        return 0;
    memset(d, 0, sizeof(*d));
    d->work = proxy->slots[head % QUEUE_CAPACITY];
    atomic_store_explicit(&proxy->head, head + 1, memory_order_release);
    return 1;
}

static void *proxy_main(void *argument) {
    struct proxy *proxy = argument;
    struct delivery deliveries[IN_FLIGHT];
    int busy[IN_FLIGHT] = {0};
    unsigned idle = 0;
    for (uint64_t pass = 0;; pass++) {
        int any = 0;
        for (int i = 0; i < IN_FLIGHT; i++) {
            struct delivery *d = &deliveries[i];
            if (!busy[i] && take(proxy, d)) {
                foreign_op(proxy, &d->work);
                busy[i] = 1;
            }
            if (!busy[i])
                continue;
            any = 1;
            if (proxy->profiler->abi <= 3) {
                deliver_in_host_time(proxy, d);
                busy[i] = 0;
            } else if (advance(proxy, d, pass)) {
                busy[i] = 0;
            }
            if (!busy[i])
                atomic_fetch_add_explicit(&proxy->done, 1, memory_order_release);
        }
        if (any) {
            idle = 0;
            continue;
        }
        /* stop is set after the last post, so an empty queue seen after it stays empty. */
        if (atomic_load_explicit(&proxy->stop, memory_order_acquire) &&
            atomic_load_explicit(&proxy->head, memory_order_relaxed) ==
                atomic_load_explicit(&proxy->tail, memory_order_acquire))
            return NULL;
        if (++idle > IDLE_SPINS)
            sleep_ns(idle > IDLE_SPINS + SHORT_NAPS ? LONG_NAP_NS : SHORT_NAP_NS);
        else if (idle % 16 == 0)
            sched_yield();
    }
}

int proxy_start(struct proxy *proxy, const struct profiler_plugin *profiler) {
    memset(proxy, 0, sizeof(*proxy));
    proxy->profiler = profiler;
    if (pthread_create(&proxy->thread, NULL, proxy_main, proxy) != 0)
        return host_error("cannot create the proxy thread");
    proxy->running = 1;
    return 0;
}

void proxy_join(struct proxy *proxy) {
    if (!proxy->running)
        return;
    atomic_store_explicit(&proxy->stop, 1, memory_order_release);
    pthread_join(proxy->thread, NULL);
    proxy->running = 0;
}

void proxy_post(struct proxy *proxy, const struct proxy_work *work) {
    uint64_t tail = atomic_load_explicit(&proxy->tail, memory_order_relaxed);
    while (tail - atomic_load_explicit(&proxy->head, memory_order_acquire) == QUEUE_CAPACITY)
        sched_yield();
    proxy->slots[tail % QUEUE_CAPACITY] = *work;
    atomic_store_explicit(&proxy->tail, tail + 1, memory_order_release);
}

void proxy_drain(struct proxy *proxy) {
    uint64_t tail = atomic_load_explicit(&proxy->tail, memory_order_relaxed);
    while (atomic_load_explicit(&proxy->done, memory_order_acquire) != tail)
        sched_yield();
}

void proxy_give_way(struct proxy *proxy, uint64_t ns) {
    uint64_t tail = atomic_load_explicit(&proxy->tail, memory_order_relaxed);
    uint64_t deadline = host_ns() + ns;
    while (atomic_load_explicit(&proxy->head, memory_order_acquire) != tail && host_ns() < deadline)
        sched_yield();
}
