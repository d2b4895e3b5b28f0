/*
 * Calls the plugin's profiler: turns one neutral event description into the descriptor of its ABI version.
 *
 * The activation mask is one int for the process, as in NCCL: the plugin keeps the pointer and may store
 * through it from any thread at any time, so it is only ever read with profiler_mask.
 *
 * Threads: open, init, finalize and close on the main thread; start, stop and record on the main thread and
 * on the proxy thread, for different events at the same time.
 */
#ifndef DYNAMICCL_HOST_PROFILER_DRIVER_H
#define DYNAMICCL_HOST_PROFILER_DRIVER_H

#include <stdint.h>

#include "nccl_abi.h"
#include "program.h"

struct profiler_plugin {
    int abi; /* 1 to 6; 0: no profiler */
    void *library;
    const struct profiler *is;
    int mask;
};

/* Everything that any version says about an event; the members that a version lacks are dropped. */
struct event {
    int type;
    void *parent;       /* the API event from v5 on, the group before */
    void *parent_group; /* v5 and v6 */
    int rank;
    /* Coll, P2p and their API events */
    const char *comm_name;
    uint64_t comm_id;
    uint64_t seq_number;
    int func;
    int datatype;
    size_t count;
    size_t traffic_bytes;
    int n_max_channels; /* v1 to v3 report the ceiling */
    int n_channels;     /* v4 and later report the channels really used */
    int n_warps;
    int algorithm;
    int protocol;
    int is_collnet;
    int peer;
    /* KernelCh and ProxyOp */
    int channel_id;
    uint64_t p_timer;
    pid_t pid;
    int n_steps;
    int chunk_size;
    int is_send;
    /* GroupApi */
    int group_depth;
};

int profiler_open(struct profiler_plugin *profiler, const char *path, int abi);
void profiler_close(struct profiler_plugin *profiler);

/* A plugin that fails here is left out, as in NCCL: the profiler is then gone for the process. */
int profiler_init(struct profiler_plugin *profiler, void **context, const struct program_header *header,
                  uint64_t comm_id, const char *comm_name, int rank, logger_fn log);
int profiler_finalize(const struct profiler_plugin *profiler, void *context);

int profiler_mask(const struct profiler_plugin *profiler);

/* Returns the event's handle, or NULL where the plugin gave none. */
void *profiler_start(const struct profiler_plugin *profiler, void *context, const struct event *event);
void profiler_stop(const struct profiler_plugin *profiler, void *handle);
/* value: the GPU timer for STATE_KERNEL_CH_STOP, otherwise the transferred bytes where a version has them. */
void profiler_record(const struct profiler_plugin *profiler, void *handle, int state, uint64_t value);

#endif
