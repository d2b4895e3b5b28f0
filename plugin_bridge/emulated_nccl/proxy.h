/* The proxy thread of a communicator: it tells the profiler when kernels run, channel by channel
 * (src/proxy.cc, src/transport/profiler.cc). */
#ifndef DYNAMICCL_EMULATED_PROXY_H
#define DYNAMICCL_EMULATED_PROXY_H

#include "comm.h"

/* Its thread is started with the first work. */
struct proxy *proxy_new(struct comm *comm);
/* Ends the thread once its work is done, at once where the communicator was aborted. */
void proxy_end(struct proxy *proxy);
void proxy_free(struct proxy *proxy);

/* Whether the kernels of an operation must say when they run. */
bool proxy_wants_counters(const struct comm *comm, int mask);

/* ---- planning, on the thread that plans ---- */

void proxy_add_coll(struct comm *comm, struct plan *plan, const struct coll_task *task, int channel,
                    int chunk_bytes);
/* `first`: of the pair on this channel. `net_peer`: a rank on another node, or -1. */
void proxy_add_p2p(struct comm *comm, struct plan *plan, const struct p2p_task *task, int channel, bool first,
                   int chunk_bytes, int net_peer);
/* In the order in which they are posted: transfers by batch. */
void proxy_sort_ops(struct plan *plan);

/* ---- work ---- */

/* Kernels take no real time here, so they could run away from the proxy thread, whose timestamps wrap after
 * GPU_COUNTERS. So a launch waits while that is near, unless EMULATED_NCCL_FAULTS says otherwise. */
void proxy_make_room(struct comm *comm, const struct plan *plan);
void proxy_post(struct comm *comm, struct plan *plan);

#endif
