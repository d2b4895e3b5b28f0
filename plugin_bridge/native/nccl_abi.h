/* NCCL's tuner and profiler plugin interfaces, declared from their published field order. Each struct names
 * the NCCL releases that use it. Nothing but nccl_abi users may depend on these. */
#ifndef DYNAMICCL_NCCL_ABI_H
#define DYNAMICCL_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum nccl_result { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2 };
enum nccl_log_level { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum nccl_log_subsystem { NCCL_LOG_INIT = 0x1, NCCL_LOG_TUNING = 0x40, NCCL_LOG_ENV = 0x80 };

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format,
                            ...);

/* ---- tuner ---- */

/* 2.21 */
struct nccl_tuner_v2 {
    const char *name;
    int (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
    int (*getCollInfo)(void *context, int func, size_t bytes, int collnet_support, int nvls_support,
                       int pipe_ops, int *algorithm, int *protocol, int *channels);
    int (*destroy)(void *context);
};

/* 2.22, 2.23 */
struct nccl_tuner_v3 {
    const char *name;
    int (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
    int (*getCollInfo)(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos,
                       int protos, int *channels);
    int (*destroy)(void *context);
};

/* 2.24 to 2.27 */
struct nccl_tuner_v4 {
    const char *name;
    int (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
    int (*getCollInfo)(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos,
                       int protos, int registered, int *channels);
    int (*destroy)(void *context);
};

/* 2.28, 2.29. The domain info and the constants are not used here, so they stay opaque. */
struct nccl_tuner_v5 {
    const char *name;
    int (*init)(void **context, uint64_t comm_id, size_t ranks, size_t nodes, nccl_logger log,
                void *nvl_domain, void *constants);
    int (*getCollInfo)(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos,
                       int protos, int registered, int *channels);
    int (*finalize)(void *context);
};

/* 2.30.3 on */
struct nccl_tuner_v6 {
    const char *name;
    int (*init)(void **context, uint64_t comm_id, size_t ranks, size_t nodes, nccl_logger log,
                void *nvl_domain, void *constants);
    int (*getCollInfo)(void *context, int func, size_t bytes, int pipe_ops, float **cost, int algos,
                       int protos, int registered, int *channels);
    int (*finalize)(void *context);
    int (*getChunkSize)(void *context, int func, size_t bytes, int algo, int proto, int channels,
                        size_t *chunk);
};

/* ---- profiler ---- */

enum nccl_event {
    NCCL_EVENT_GROUP = 1 << 0, /* of one kernel; comes with any of the next three */
    NCCL_EVENT_COLL = 1 << 1,
    NCCL_EVENT_PROXY_OP = 1 << 3,
    NCCL_EVENT_KERNEL_CH = 1 << 6,
    NCCL_EVENT_GROUP_API = 1 << 8, /* v5 on; these three come with Coll and KernelCh */
    NCCL_EVENT_COLL_API = 1 << 9,
    NCCL_EVENT_P2P_API = 1 << 10,
};

enum { NCCL_STATE_KERNEL_CH_STOP = 22 };

/* Only the members that are read here are named; each union's other members are no larger than `coll`, and
 * NCCL owns the storage. */
struct nccl_proxy_op {
    int pid;
    uint8_t channel;
    int peer, steps, chunk, is_send;
};

struct nccl_kernel_ch {
    uint8_t channel;
    uint64_t timer; /* v4 on */
};

struct nccl_coll_v1 { /* 2.23 */
    const char *name;
    uint64_t comm_hash, seq;
    uint8_t func;
    const void *send;
    void *recv;
    size_t count;
    int root;
    uint8_t datatype;
    uint32_t op;
    size_t traffic;
    uint8_t max_channels, warps, algo, proto;
    int is_collnet, is_nvls;
};

struct nccl_coll_v2 { /* 2.24, 2.25 */
    const char *name;
    uint64_t comm_hash, seq;
    const char *func;
    const void *send;
    void *recv;
    size_t count;
    int root;
    const char *datatype;
    size_t traffic;
    uint8_t max_channels, warps;
    const char *algo, *proto;
};

struct nccl_coll_v3 { /* 2.26 */
    const char *name;
    uint64_t comm_hash, seq;
    const char *func;
    const void *send;
    void *recv;
    size_t count;
    int root;
    const char *datatype;
    uint8_t max_channels, warps;
    const char *algo, *proto;
};

struct nccl_coll_v4 { /* 2.27 */
    uint64_t seq;
    const char *func;
    const void *send;
    void *recv;
    size_t count;
    int root;
    const char *datatype;
    uint8_t channels, warps;
    const char *algo, *proto;
};

struct nccl_coll_v5 { /* 2.28 on; its parent is the CollApi event */
    uint64_t seq;
    const char *func;
    const void *send;
    void *recv;
    size_t count;
    int root;
    const char *datatype;
    uint8_t channels, warps;
    const char *algo, *proto;
    void *parent_group;
};

#define NCCL_EVENT_DESCRIPTOR(version, type_field, coll_struct)                                              \
    struct nccl_event_v##version {                                                                           \
        type_field type;                                                                                     \
        void *parent;                                                                                        \
        int rank;                                                                                            \
        union {                                                                                              \
            struct coll_struct coll;                                                                         \
            struct nccl_proxy_op proxy_op;                                                                   \
            struct nccl_kernel_ch kernel_ch;                                                                 \
        };                                                                                                   \
    }
NCCL_EVENT_DESCRIPTOR(1, uint8_t, nccl_coll_v1);
NCCL_EVENT_DESCRIPTOR(2, uint8_t, nccl_coll_v2);
NCCL_EVENT_DESCRIPTOR(3, uint8_t, nccl_coll_v3);
NCCL_EVENT_DESCRIPTOR(4, uint8_t, nccl_coll_v4);
NCCL_EVENT_DESCRIPTOR(5, uint64_t, nccl_coll_v5); /* 2.28 on; v6 is the same for what is read here */

union nccl_state_args {
    struct {
        uint64_t timer;
    } kernel_ch; /* v4 on */
};

/* v1 to v3 */
struct nccl_profiler_v1 {
    const char *name;
    int (*init)(void **context, int *mask);
    int (*startEvent)(void *context, void **handle, void *descriptor);
    int (*stopEvent)(void *handle);
    int (*recordEventState)(void *handle, int state, union nccl_state_args *args);
    int (*finalize)(void *context);
};

struct nccl_profiler_v4 {
    const char *name;
    int (*init)(void **context, int *mask, const char *comm_name, uint64_t comm_hash, int nodes, int ranks,
                int rank, nccl_logger log);
    int (*startEvent)(void *context, void **handle, void *descriptor);
    int (*stopEvent)(void *handle);
    int (*recordEventState)(void *handle, int state, union nccl_state_args *args);
    int (*finalize)(void *context);
};

/* v5, v6 */
struct nccl_profiler_v5 {
    const char *name;
    int (*init)(void **context, uint64_t comm_id, int *mask, const char *comm_name, int nodes, int ranks,
                int rank, nccl_logger log);
    int (*startEvent)(void *context, void **handle, void *descriptor);
    int (*stopEvent)(void *handle);
    int (*recordEventState)(void *handle, int state, union nccl_state_args *args);
    int (*finalize)(void *context);
};

#endif
