/* The profiler plugin: loaded with the first communicator, closed with the last, and called through the
 * interface of its version. What is reported when is in events.c. */
#ifndef DYNAMICCL_EMULATED_PROFILER_H
#define DYNAMICCL_EMULATED_PROFILER_H

#include <stdbool.h>

#include "plugin_abi.h"

/* What any version may want to know of an event. */
struct event {
    enum event_type type;
    void *parent;
    int rank;
    const char *comm_name; /* of Coll and P2p, where the release says it */
    uint64_t comm_id;
    enum nccl_func func;
    int data_type, op, root, peer;
    const void *send;
    void *recv;
    size_t count, traffic;
    uint64_t sequence;
    int channels, warps, algorithm, protocol;
    bool collnet, nvls;
    void *parent_group;
    void *stream;
    bool captured;
    int group_depth;
    pid_t pid;
    int channel, steps, chunk_bytes;
    bool is_send;
    uint64_t timer;
};

/* False where there is no profiler: it could not be loaded, or its init failed. */
bool profiler_init(void **context, uint64_t id, const char *name, int nodes, int ranks, int rank);
void profiler_finalize(void *context);
bool profiler_is_loaded(void);
int profiler_mask(void);  /* as the plugin has it now */
pid_t profiler_pid(void); /* of the process that loaded the plugin */

/* Leaves *handle alone where the version does not know the event, but for v1 to v3. */
void profiler_start(void *context, void **handle, const struct event *event);
void profiler_stop(void *handle);
/* `value` is the bytes, the timer or the number of operations that the state is about. */
void profiler_record(void *handle, enum event_state state, uint64_t value);

#endif
