/* Calls, their groups, and kernels: events that only tell where a collective belongs. */
#include "govern.h"
#include "handle.h"
#include "measure.h"
#include "watch.h"

void *comm_group_api_start(void) {
    static _Atomic uint32_t groups; /* of the process: one group may hold calls of several communicators */
    uint32_t group;
    do
        group = (atomic_fetch_add_explicit(&groups, 1, memory_order_relaxed) + 1) & ((1u << GROUP_BITS) - 1);
    while (group == 0);
    return number_handle(TAG_GROUP_API, group);
}

/* A communicator is called by one thread at a time. */
static inline void *api_start(struct comm *comm, const void *group_api_handle) {
    uint32_t group = has_tag(group_api_handle, TAG_GROUP_API) ? (uint32_t)number_of(group_api_handle) : 0;
    uint32_t call = load(&comm->calls, relaxed) + 1 + govern_missed(comm, TIMESTAMPS_KEPT);
    if (group != load(&comm->group, relaxed)) {
        store(&comm->group, group, relaxed);
        store(&comm->group_first, call, relaxed);
    }
    uint32_t size = call - load(&comm->group_first, relaxed) + 1;
    if (size > load(&comm->largest_group, relaxed))
        store(&comm->largest_group, size, relaxed);
    store(&comm->calls, call, relaxed);
    return number_handle(TAG_API, (uint64_t)group << CALL_BITS | call);
}

static __attribute__((noinline)) void *api_start_timed(struct comm *comm, const void *group_api_handle) {
    struct watch watch = watch_begin();
    void *handle = api_start(comm, group_api_handle);
    watch_end(watch, comm);
    return handle;
}

void *comm_api_start(struct comm *comm, const void *group_api_handle) {
    bool timed = load(&comm->calls, relaxed) % DCC_TIMED_ONE_IN == 0 && comm->seg;
    return unlikely(timed) ? api_start_timed(comm, group_api_handle) : api_start(comm, group_api_handle);
}

/* Only has to differ from the latest; two threads that launch at once may take the same. */
void *comm_group_start(struct comm *comm) {
    uint32_t plan = load(&comm->plan, relaxed) + 1;
    store(&comm->plan, plan, relaxed);
    return number_handle(TAG_GROUP, plan);
}
