/* NCCL's interface for programs, as far as the emulated NCCL has it; declared from NCCL's documentation. */
#ifndef DYNAMICCL_EMULATED_API_H
#define DYNAMICCL_EMULATED_API_H

#include <stddef.h>
#include <stdint.h>

typedef int nccl_result; /* NCCL's enum has int's size on every platform that it supports */
enum {
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_IN_PROGRESS = 7,
};

enum nccl_func {
    FUNC_BROADCAST = 0,
    FUNC_REDUCE = 1,
    FUNC_ALL_GATHER = 2,
    FUNC_REDUCE_SCATTER = 3,
    FUNC_ALL_REDUCE = 4,
    FUNC_SEND_RECV = 5,
    FUNC_SEND = 6,
    FUNC_RECV = 7,
    N_COLLECTIVES = 5,
    N_FUNCS = 8,
};

enum nccl_algorithm {
    ALGO_UNDEFINED = -1,
    ALGO_TREE = 0,
    ALGO_RING = 1,
    ALGO_COLLNET_DIRECT = 2,
    ALGO_COLLNET_CHAIN = 3,
    ALGO_NVLS = 4,
    ALGO_NVLS_TREE = 5,
    ALGO_PAT = 6,
    N_ALGORITHMS = 7,
};

enum nccl_protocol {
    PROTO_UNDEFINED = -1,
    PROTO_LL = 0,
    PROTO_LL128 = 1,
    PROTO_SIMPLE = 2,
    N_PROTOCOLS = 3,
};

enum nccl_type { TYPE_INT8 = 0, TYPE_FLOAT32 = 7, N_TYPES = 12 };
enum nccl_op { OP_SUM = 0, OP_PROD = 1, OP_MAX = 2, OP_MIN = 3, OP_AVG = 4, N_OPS = 5 };

struct comm;

struct nccl_unique_id {
    char bytes[128];
};

/* The beginning of ncclConfig_t, up to commName, which came with 2.27. */
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
};
enum { NCCL_CONFIG_MAGIC = (int)0xcafebeef, NCCL_UNDEFINED = INT32_MIN, NCCL_SPLIT_NO_COLOR = -1 };

struct nccl_sim_info {
    size_t size;
    unsigned magic, version;
    float estimated_us;
};
enum { NCCL_SIM_INFO_MAGIC = 0x74685283 };

#define EXPORT __attribute__((visibility("default")))

#endif
