/* How long the plugin itself takes, for a few of its calls. */
#ifndef DYNAMICCL_WATCH_H
#define DYNAMICCL_WATCH_H

#include "comm.h"

/* A thread that was put to sleep meanwhile took nothing. */
#define WATCH_MOST_NS 5000

/* Two readings in a row say what a reading takes. */
struct watch {
    uint64_t first, second;
};

static inline struct watch watch_begin(void) {
    struct watch watch = {.first = comm_host_ns()};
    watch.second = comm_host_ns();
    return watch;
}

/* Nanoseconds since, without those of the clock; may be a little below 0. */
static inline int64_t watch_took(struct watch watch) {
    int64_t took = (int64_t)(comm_host_ns() - watch.second) - (int64_t)(watch.second - watch.first);
    return took > WATCH_MOST_NS ? WATCH_MOST_NS : took < -WATCH_MOST_NS ? -WATCH_MOST_NS : took;
}

/* Kept in memory that is never freed, as the last event of a communicator may come beside its end. */
static inline void watch_end(struct watch watch, struct comm *comm) {
    atomic_fetch_add_explicit(&comm->profile_ns, (uint64_t)watch_took(watch), memory_order_relaxed);
}

#endif
