/* NCCL's interface, as far as a job uses it, and the virtual GPU's below it: looked up in whichever library
 * the job was given, NCCL's own or the emulated one. Declared here from NCCL's documentation of its
 * interface. */
#ifndef DYNAMICCL_JOB_NCCL_H
#define DYNAMICCL_JOB_NCCL_H

#include <stddef.h>
#include <stdint.h>

#include "../gpu/gpu.h"

typedef int nccl_result; /* 0: success, 7: in progress */
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, NCCL_SUM = 0, NCCL_SHRINK_DEFAULT = 0 };

typedef struct ncclComm *nccl_comm;

struct nccl_unique_id {
    char bytes[128];
};

/* The beginning of ncclConfig_t up to commName, which came with 2.27; NCCL fills in the rest. */
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
};
enum { NCCL_CONFIG_MAGIC = (int)0xcafebeef, NCCL_CONFIG_VERSION = 22700, NCCL_UNDEFINED = INT32_MIN };

/* ncclSimInfo_t, which came with 2.22. */
struct nccl_sim_info {
    size_t size;
    unsigned magic, version;
    float estimated_us;
};
enum { NCCL_SIM_INFO_MAGIC = 0x74685283, NCCL_SIM_INFO_VERSION = 22200 };

#define NCCL_FUNCTIONS(F)                                                                                    \
    F(nccl_result, ncclGetUniqueId, (struct nccl_unique_id *))                                               \
    F(nccl_result, ncclCommInitRankConfig,                                                                   \
      (nccl_comm *, int, struct nccl_unique_id, int, struct nccl_config *))                                  \
    F(nccl_result, ncclCommSplit, (nccl_comm, int, int, nccl_comm *, struct nccl_config *))                  \
    F(nccl_result, ncclCommShrink, (nccl_comm, int *, int, nccl_comm *, struct nccl_config *, int))          \
    F(nccl_result, ncclCommFinalize, (nccl_comm))                                                            \
    F(nccl_result, ncclCommDestroy, (nccl_comm))                                                             \
    F(nccl_result, ncclCommAbort, (nccl_comm))                                                               \
    F(nccl_result, ncclCommGetAsyncError, (nccl_comm, nccl_result *))                                        \
    F(nccl_result, ncclCommCount, (nccl_comm, int *))                                                        \
    F(nccl_result, ncclCommUserRank, (nccl_comm, int *))                                                     \
    F(nccl_result, ncclGroupStart, (void))                                                                   \
    F(nccl_result, ncclGroupEnd, (void))                                                                     \
    F(nccl_result, ncclGroupSimulateEnd, (struct nccl_sim_info *))                                           \
    F(nccl_result, ncclBroadcast, (const void *, void *, size_t, int, int, nccl_comm, void *))               \
    F(nccl_result, ncclReduce, (const void *, void *, size_t, int, int, int, nccl_comm, void *))             \
    F(nccl_result, ncclAllGather, (const void *, void *, size_t, int, nccl_comm, void *))                    \
    F(nccl_result, ncclReduceScatter, (const void *, void *, size_t, int, int, nccl_comm, void *))           \
    F(nccl_result, ncclAllReduce, (const void *, void *, size_t, int, int, nccl_comm, void *))               \
    F(nccl_result, ncclSend, (const void *, size_t, int, int, nccl_comm, void *))                            \
    F(nccl_result, ncclRecv, (void *, size_t, int, int, nccl_comm, void *))                                  \
    F(nccl_result, ncclMemAlloc, (void **, size_t))                                                          \
    F(nccl_result, ncclMemFree, (void *))                                                                    \
    F(nccl_result, ncclCommRegister, (nccl_comm, void *, size_t, void **))                                   \
    F(nccl_result, ncclCommDeregister, (nccl_comm, void *))                                                  \
    F(const char *, ncclGetLastError, (nccl_comm))                                                           \
    F(nccl_result, ncclGetVersion, (int *))                                                                  \
    F(void, gpu_set_device, (int))                                                                           \
    F(uint64_t, gpu_host_ns, (int))                                                                          \
    F(void, gpu_host_advance, (int, uint64_t))                                                               \
    F(void, gpu_set_phase, (int, uint32_t, uint64_t))                                                        \
    F(struct gpu_stream *, gpu_stream_create, (int))                                                         \
    F(void, gpu_stream_destroy, (struct gpu_stream *))                                                       \
    F(void, gpu_stream_sync, (struct gpu_stream *))                                                          \
    F(void, gpu_device_sync, (int))                                                                          \
    F(struct gpu_event *, gpu_event_create, (void))                                                          \
    F(void, gpu_event_record, (struct gpu_event *, struct gpu_stream *))                                     \
    F(void, gpu_stream_wait, (struct gpu_stream *, struct gpu_event *))                                      \
    F(void, gpu_compute, (struct gpu_stream *, uint64_t))                                                    \
    F(void, gpu_capture_begin, (struct gpu_stream *))                                                        \
    F(struct gpu_graph *, gpu_capture_end, (struct gpu_stream *))                                            \
    F(void, gpu_graph_launch, (struct gpu_graph *, struct gpu_stream *))                                     \
    F(void, gpu_graph_destroy, (struct gpu_graph *))                                                         \
    F(void, gpu_comm_announce, (uint32_t))                                                                   \
    F(void, gpu_comm_register, (const void *, const struct gpu_comm_info *))                                 \
    F(void, gpu_comm_forget, (const void *))                                                                 \
    F(void, gpu_comm_identity, (const void *, const void **, uint64_t *))

struct nccl {
#define MEMBER(result, name, arguments) result(*name) arguments;
    NCCL_FUNCTIONS(MEMBER)
#undef MEMBER
};

/* Loads the library; prints why and returns -1 where it lacks something. */
int nccl_open(struct nccl *nccl, const char *path);

#endif
