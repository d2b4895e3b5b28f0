/*
 * The proxy progress thread: delivers KernelCh and ProxyOp events apart from the launching thread.
 *
 * A bounded single-producer single-consumer queue. The main thread posts and waits; the proxy thread, which
 * proxy_start creates and proxy_join ends, takes. Capacity QUEUE_CAPACITY; a full queue makes the main thread
 * wait, as NCCL's own pool of proxy operations does. Nothing is ever dropped.
 *
 * Order: within a channel start, record, stop. Between channels, and between two collectives in flight, any
 * order: channels are visited in a permuted order and skipped at random.
 *
 * Profilers before v4 have no GPU timer, so there the thread lets the execution time really pass.
 */
#ifndef DYNAMICCL_HOST_PROXY_H
#define DYNAMICCL_HOST_PROXY_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

#include "profiler_driver.h"
#include "schedule.h"

enum { QUEUE_CAPACITY = 256 };

/* The children of one Coll or P2p event. */
struct proxy_work {
    void *context;
    void *parent;
    int mask; /* as read for the group */
    int rank;
    int peer;
    int channel_lo;
    int n_channels;
    int chunk_bytes;
    int bad_timers_permille;
    int foreign;        /* one ProxyOp as PXN would run it for another process */
    uint64_t gpu_start; /* virtual GPU time: first channel's start and last channel's stop */
    uint64_t gpu_stop;
    uint64_t host_start; /* host time at the parent's start */
    uint64_t salt;
};

struct proxy {
    const struct profiler_plugin *profiler;
    pthread_t thread;
    int running;
    /* tail: written by the main thread with release, read by the proxy thread with acquire; head and done the
     * other way round. head counts what was taken, done what was delivered in full. */
    alignas(64) _Atomic uint64_t tail;
    alignas(64) _Atomic uint64_t head;
    _Atomic uint64_t done;
    alignas(64) _Atomic int stop;
    struct proxy_work slots[QUEUE_CAPACITY];
};

int proxy_start(struct proxy *proxy, const struct profiler_plugin *profiler);
void proxy_join(struct proxy *proxy); /* delivers what is left first */

void proxy_post(struct proxy *proxy, const struct proxy_work *work);
void proxy_drain(struct proxy *proxy); /* returns once everything posted was delivered */
/* Waits up to `ns` for the last post to be taken: lets children overtake the parent's stop. */
void proxy_give_way(struct proxy *proxy, uint64_t ns);

#endif
