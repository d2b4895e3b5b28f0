/* What NCCL would find out when it creates a communicator, from the file that EMULATED_NCCL names.
 *
 * Written by plugin_bridge/constants.py and mapped read-only here; constants.py mirrors these structures.
 * Little endian, natural alignment, no implicit padding:
 *
 *   struct constants_header
 *   struct constants comms[n_comms]   by the number of the communicator in the program; ranks 0: none
 *   uint16_t nodes[]                  that they point at */
#ifndef DYNAMICCL_EMULATED_CONSTANTS_H
#define DYNAMICCL_EMULATED_CONSTANTS_H

#include "api.h"
#include "plugin_abi.h"

#define CONSTANTS_MAGIC "DCCLCNST"
enum {
    CONSTANTS_VERSION = 1,
    MAX_COMMS = 256,
    CONSTANTS_COLLNET = 1 << 0,     /* CollNet is enabled and reduces every type */
    CONSTANTS_NVLS = 1 << 1,        /* NVLS was set up */
    CONSTANTS_X86 = 1 << 2,         /* all CPUs are */
    CONSTANTS_DIRECT = 1 << 3,      /* all ranks of a node reach each other's memory */
    CONSTANTS_GPU_NETWORK = 1 << 4, /* network devices reach the GPUs' memory, without a detour over NVLink */
};

struct constants_header {
    char magic[8];
    uint32_t version, n_comms;
    uint64_t file_bytes;
    struct tuner_constants tuner; /* NCCL 2.30's defaults */
};

struct constants {
    uint64_t id;           /* NCCL's hash of it, the first time that it is created */
    uint64_t nodes_offset; /* of the node of each rank, in the file */
    uint32_t ranks, nodes;
    uint32_t present; /* ranks that there are processes for */
    uint32_t flags;
    uint32_t compute_capability; /* times ten */
    uint32_t channels, nvls_channels;
    uint32_t p2p_channels, p2p_channels_per_peer, p2p_chunk_bytes;
    uint32_t buffer_bytes[N_PROTOCOLS];
    uint32_t nvls_heads, nvls_chunk_bytes, nvls_tree_chunk_bytes;
    uint32_t collnet_heads, collnet_depth, collnet_chain_depth;
    uint32_t net_devices; /* per GPU */
    float latency_us[N_COLLECTIVES][N_ALGORITHMS][N_PROTOCOLS];
    float gb_per_s[N_COLLECTIVES][N_ALGORITHMS][N_PROTOCOLS]; /* 0: there is no such pair */
    int32_t max_threads[N_ALGORITHMS][N_PROTOCOLS];
    int32_t thread_bytes[N_ALGORITHMS][N_PROTOCOLS]; /* that make one more thread worth it */
};

/* Maps the file on the first call; NULL and the reason in the log where it has no such communicator. */
const struct constants *constants_of(uint32_t number);
const uint16_t *constants_nodes(const struct constants *constants);
void constants_tuner(struct tuner_constants *tuner); /* as a tuner is shown them */
/* Where processes of the job find each other: the folder that the file is in. */
const char *constants_folder(void);

#endif
