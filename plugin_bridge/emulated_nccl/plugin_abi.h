/* NCCL's plugin interface as the emulated NCCL calls it: tuner v2 to v6 and profiler v1 to v6.
 *
 * Declared from the published layouts, independently of the plugin under test, so that a layout error on
 * either side shows up as a failure here and not as two files that agree with each other.
 *
 * Which NCCL release introduced what:
 *   tuner    v2 2.21, v3 2.22, v4 2.24, v5 2.28, v6 2.30
 *   profiler v1 2.23, v2 2.24, v3 2.26, v4 2.27, v5 2.28, v6 2.29 */
#ifndef DYNAMICCL_EMULATED_PLUGIN_ABI_H
#define DYNAMICCL_EMULATED_PLUGIN_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "api.h"

enum nccl_log_level {
    LOG_LEVEL_NONE = 0,
    LOG_LEVEL_VERSION = 1,
    LOG_LEVEL_WARN = 2,
    LOG_LEVEL_INFO = 3,
    LOG_LEVEL_ABORT = 4,
    LOG_LEVEL_TRACE = 5,
};
typedef void (*logger_fn)(int level, unsigned long flags, const char *file, int line, const char *fmt, ...);

#define COST_UNAVAILABLE (-1.0f)

/* ---- tuner ---- */

struct nvl_domain_info {
    int n_domains;
    int min_ranks_per_domain;
    int max_ranks_per_domain;
};

struct tuner_constants {
    double base_latencies[N_ALGORITHMS][N_PROTOCOLS];
    double hw_latencies[3][N_ALGORITHMS][N_PROTOCOLS]; /* NVLink, PCIe, network */
    double ll_max_bws[4][3];                           /* compute capability by 1, 2, 4 or more nodes */
    double per_channel_max_ring_ll128_bws[4][3];
    double per_channel_max_tree_ll128_bws[4][3];
    double per_channel_max_tree_bws[4][3];
    double per_channel_max_nvls_tree_bws[4][3];
};

typedef nccl_result (*tuner_init_fn)(size_t n_ranks, size_t n_nodes, logger_fn log, void **context);
typedef nccl_result (*tuner_init_v5_fn)(void **context, uint64_t comm_id, size_t n_ranks, size_t n_nodes,
                                        logger_fn log, struct nvl_domain_info *nvl,
                                        struct tuner_constants *constants);
typedef nccl_result (*get_coll_info_v2_fn)(void *context, int func, size_t bytes, int collnet_support,
                                           int nvls_support, int pipe_ops, int *algorithm, int *protocol,
                                           int *n_channels);
typedef nccl_result (*get_coll_info_v3_fn)(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                           int n_algorithms, int n_protocols, int *n_channels);
typedef nccl_result (*get_coll_info_v4_fn)(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                           int n_algorithms, int n_protocols, int registered,
                                           int *n_channels);
typedef nccl_result (*get_chunk_size_fn)(void *context, int func, size_t bytes, int algorithm, int protocol,
                                         int n_channels, size_t *chunk_bytes);
typedef nccl_result (*destroy_fn)(void *context);

struct tuner_v2 {
    const char *name;
    tuner_init_fn init;
    get_coll_info_v2_fn get_coll_info;
    destroy_fn destroy;
};

struct tuner_v3 {
    const char *name;
    tuner_init_fn init;
    get_coll_info_v3_fn get_coll_info;
    destroy_fn destroy;
};

struct tuner_v4 {
    const char *name;
    tuner_init_fn init;
    get_coll_info_v4_fn get_coll_info;
    destroy_fn destroy;
};

struct tuner_v5 {
    const char *name;
    tuner_init_v5_fn init;
    get_coll_info_v4_fn get_coll_info;
    destroy_fn finalize;
};

struct tuner_v6 {
    const char *name;
    tuner_init_v5_fn init;
    get_coll_info_v4_fn get_coll_info;
    destroy_fn finalize;
    get_chunk_size_fn get_chunk_size; /* may be NULL */
};

/* ---- profiler ---- */

enum event_type {
    EVENT_GROUP = 1 << 0,
    EVENT_COLL = 1 << 1,
    EVENT_P2P = 1 << 2,
    EVENT_PROXY_OP = 1 << 3,
    EVENT_PROXY_STEP = 1 << 4,
    EVENT_PROXY_CTRL = 1 << 5,
    EVENT_KERNEL_CH = 1 << 6,
    EVENT_NET_PLUGIN = 1 << 7,
    EVENT_GROUP_API = 1 << 8,
    EVENT_COLL_API = 1 << 9,
    EVENT_P2P_API = 1 << 10,
    EVENT_KERNEL_LAUNCH = 1 << 11,
    EVENT_CE_COLL = 1 << 12,
    EVENT_CE_SYNC = 1 << 13,
    EVENT_CE_BATCH = 1 << 14,
};

enum event_state {
    STATE_PROXY_OP_SEND_TRANSMITTED = 2, /* gone in v4 */
    STATE_PROXY_OP_SEND_DONE = 3,        /* gone in v4 */
    STATE_PROXY_CTRL_IDLE = 13,
    STATE_PROXY_CTRL_ACTIVE = 14,
    STATE_PROXY_CTRL_SLEEP = 15,
    STATE_PROXY_CTRL_WAKEUP = 16,
    STATE_PROXY_CTRL_APPEND = 17,
    STATE_PROXY_CTRL_APPEND_END = 18,
    STATE_PROXY_OP_IN_PROGRESS = 19, /* from v4 */
    STATE_KERNEL_CH_STOP = 22,       /* from v4 */
    STATE_GROUP_START_API_STOP = 23, /* from v5 */
    STATE_GROUP_END_API_START = 24,  /* from v5 */
};

struct descr_proxy_op {
    pid_t pid;
    uint8_t channel_id;
    int peer;
    int n_steps;
    int chunk_size;
    int is_send;
};

struct descr_proxy_step {
    int step;
};

struct descr_net_plugin {
    int64_t id;
    void *data;
};

struct descr_v1 {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t comm_hash;
            uint64_t seq_number;
            uint8_t func;
            const void *send_buff;
            void *recv_buff;
            size_t count;
            int root;
            uint8_t datatype;
            uint32_t op;
            size_t traffic_bytes;
            uint8_t n_max_channels;
            uint8_t n_warps;
            uint8_t algo;
            uint8_t proto;
            int is_collnet;
            int is_nvls;
        } coll;
        struct {
            const char *name;
            uint64_t comm_hash;
            uint8_t func;
            void *buff;
            uint8_t datatype;
            size_t count;
            int peer;
        } p2p;
        struct descr_proxy_op proxy_op;
        struct descr_proxy_step proxy_step;
    };
};

struct descr_v2 {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t comm_hash;
            uint64_t seq_number;
            const char *func;
            const void *send_buff;
            void *recv_buff;
            size_t count;
            int root;
            const char *datatype;
            size_t traffic_bytes;
            uint8_t n_max_channels;
            uint8_t n_warps;
            const char *algo;
            const char *proto;
        } coll;
        struct {
            const char *name;
            uint64_t comm_hash;
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
        struct descr_proxy_op proxy_op;
        struct descr_proxy_step proxy_step;
    };
};

struct descr_v3 {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t comm_hash;
            uint64_t seq_number;
            const char *func;
            const void *send_buff;
            void *recv_buff;
            size_t count;
            int root;
            const char *datatype;
            uint8_t n_max_channels;
            uint8_t n_warps;
            const char *algo;
            const char *proto;
        } coll;
        struct {
            const char *name;
            uint64_t comm_hash;
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
        struct descr_proxy_op proxy_op;
        struct descr_proxy_step proxy_step;
        struct {
            uint8_t channel_id;
        } kernel_ch;
        struct descr_net_plugin net_plugin;
    };
};

struct descr_v4 {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            uint64_t seq_number;
            const char *func;
            const void *send_buff;
            void *recv_buff;
            size_t count;
            int root;
            const char *datatype;
            uint8_t n_channels;
            uint8_t n_warps;
            const char *algo;
            const char *proto;
        } coll;
        struct {
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t n_channels;
        } p2p;
        struct descr_proxy_op proxy_op;
        struct descr_proxy_step proxy_step;
        struct {
            uint8_t channel_id;
            uint64_t p_timer;
        } kernel_ch;
        struct descr_net_plugin net_plugin;
    };
};

/* v5 and v6: v6 only adds union members for the copy engine, which make the union larger. */
struct descr_v5 {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct {
            bool graph_captured;
            int group_depth;
        } group_api;
        struct {
            const char *func;
            size_t count;
            const char *datatype;
            int root;
            void *stream;
            bool graph_captured;
        } coll_api;
        struct {
            const char *func;
            size_t count;
            const char *datatype;
            void *stream;
            bool graph_captured;
        } p2p_api;
        struct {
            void *stream;
        } kernel_launch;
        struct {
            uint64_t seq_number;
            const char *func;
            const void *send_buff;
            void *recv_buff;
            size_t count;
            int root;
            const char *datatype;
            uint8_t n_channels;
            uint8_t n_warps;
            const char *algo;
            const char *proto;
            void *parent_group;
        } coll;
        struct {
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t n_channels;
            void *parent_group;
        } p2p;
        struct descr_proxy_op proxy_op;
        struct descr_proxy_step proxy_step;
        struct {
            uint8_t channel_id;
            uint64_t p_timer;
        } kernel_ch;
        struct descr_net_plugin net_plugin;
        struct {
            uint64_t seq_number;
            const char *func;
            const void *send_buff;
            void *recv_buff;
            size_t count;
            int root;
            const char *datatype;
            const char *sync_strategy;
            bool intra_batch_sync;
            uint32_t batch_size;
            uint32_t n_batches;
            uint32_t ce_seq_num;
            void *stream;
        } ce_coll; /* v6 only, never emitted: it gives the union its v6 size */
    };
};

/* v1 to v3 */
union state_args_v1 {
    struct {
        size_t trans_size;
        int steps;
    } proxy_op;
    struct {
        int appended_proxy_ops;
    } proxy_ctrl;
};

/* v4 to v6 */
union state_args_v4 {
    struct {
        size_t trans_size;
    } proxy_step;
    struct {
        int appended_proxy_ops;
    } proxy_ctrl;
    struct {
        void *data;
    } net_plugin;
    struct {
        uint64_t p_timer;
    } kernel_ch;
};

typedef nccl_result (*profiler_init_v1_fn)(void **context, int *mask);
typedef nccl_result (*profiler_init_v4_fn)(void **context, int *mask, const char *comm_name,
                                           uint64_t comm_hash, int n_nodes, int n_ranks, int rank,
                                           logger_fn log);
typedef nccl_result (*profiler_init_v5_fn)(void **context, uint64_t comm_id, int *mask, const char *comm_name,
                                           int n_nodes, int n_ranks, int rank, logger_fn log);

/* One struct for every version: the members are the same but for init, and the descriptor and the state
 * arguments travel by pointer. */
struct profiler {
    const char *name;
    union {
        profiler_init_v1_fn v1; /* v1 to v3 */
        profiler_init_v4_fn v4;
        profiler_init_v5_fn v5; /* v5 and v6 */
    } init;
    nccl_result (*start_event)(void *context, void **handle, void *descr);
    nccl_result (*stop_event)(void *handle);
    nccl_result (*record_event_state)(void *handle, int state, void *args);
    nccl_result (*finalize)(void *context);
};

#endif
