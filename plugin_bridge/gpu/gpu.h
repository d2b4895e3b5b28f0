/* A GPU that computes nothing: streams whose work takes the time that it is said to take.
 *
 * It stands under NCCL's own host code (plugin_bridge/fake_cuda gives it CUDA's interface) and under the
 * emulated NCCL (plugin_bridge/emulated_nccl), so that the two are timed alike and differ in nothing but
 * NCCL.
 *
 * Time is virtual: nanoseconds since the job began, on one clock for all processes of a job. A stream's work
 * begins when what came before it has ended, and not before it was launched; what the host itself does takes
 * no virtual time but for gpu_host_advance(). So a job takes the same virtual time on a loaded machine as on
 * an idle one, and the same in every run. `pace` in the environment makes real time pass with it.
 *
 * One thread per process, the player, plays all of its GPUs. Everything else may be called from any thread.
 * Objects are freed by their destroy call alone; what is still queued keeps what it needs.
 *
 * Environment: GPU_TIMES, the file of times (times.h; absent: a formula), GPU_MEETING, the file through which
 * the ranks of a job wait for each other (meeting.h; absent: nobody waits), GPU_LOG, where to log every
 * collective that was played (gpu_log_record), GPU_PACE (0: as fast as possible; 1: real time), GPU_LEAST_US
 * (real time that a kernel takes at the least). */
#ifndef DYNAMICCL_GPU_H
#define DYNAMICCL_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GPU_MAX_DEVICES = 16,
    GPU_MAX_CHANNELS = 64,
    GPU_COUNTERS = 64,      /* timestamps that NCCL keeps per channel (src/include/device.h) */
    GPU_TIMER_NS = 32,      /* resolution of the global timer */
    GPU_FUNC_SEND_RECV = 5, /* as NCCL numbers its functions; 0 to 4 are the tuner's collectives */
    GPU_CHUNK_FREE = 0,     /* chunk_bytes of work whose time does not depend on it */
};

struct gpu_stream;
struct gpu_event;
struct gpu_graph;
struct gpu_comm;

/* NCCL's struct ncclDevProfiler: what a kernel tells the proxy thread of one channel. */
struct gpu_counters {
    struct {
        uint64_t counter, timestamp;
    } data[GPU_COUNTERS];
};

/* One operation of a kernel: a collective, or a pair of send and receive. */
struct gpu_work {
    uint64_t bytes;       /* as NCCL counts them for the tuner */
    uint32_t chunk_bytes; /* of most of its channels */
    uint8_t func, algo, proto, channels;
    uint8_t own;      /* 1: NCCL's own choice, where the times tell it from the same pair asked for */
    uint8_t asked;    /* channels that the tuner asked for; 0: none */
    uint8_t profiled; /* its channels write their counters */
    int32_t send_peer, recv_peer; /* of send and receive; -1: none */
    uint64_t send_bytes, recv_bytes;
};

/* A channel's part of some work. */
struct gpu_member {
    uint16_t work;
    float share; /* of the bytes that the work has on the channel with the most */
};

/* Work that one channel runs at once: it starts together and ends together. */
struct gpu_batch {
    uint8_t channel;
    uint16_t first, count; /* into gpu_kernel.members */
};

/* A kernel, ready to be played. Batches of a channel follow each other in the order of the array. */
struct gpu_kernel {
    struct gpu_comm *comm;    /* from gpu_comm_find(), given back by the player; NULL: nobody registered it */
    volatile uint32_t *abort; /* the kernel ends at once when this is not 0; may be NULL */
    struct gpu_counters *started, *completed; /* [GPU_MAX_CHANNELS]; may be NULL */
    uint64_t *work_counter[GPU_MAX_CHANNELS]; /* NCCL's count of work per channel, in its own memory */
    struct gpu_work *works;
    struct gpu_batch *batches;
    struct gpu_member *members;
    uint32_t n_works, n_batches, n_members;
};

/* Fills a kernel from what was launched, when its turn comes; on the player thread. The arrays are malloc'ed
 * and freed by the player. A kernel without work takes no time. */
typedef void (*gpu_parse_fn)(void *launched, struct gpu_kernel *kernel);
typedef void (*gpu_host_fn)(void *argument);

/* ---- devices ---- */

/* Raised on the calling thread's first use; the number of GPUs is GPU_DEVICES (8). */
int gpu_device_count(void);
void gpu_set_device(int device); /* of the calling thread */
int gpu_get_device(void);

/* The virtual clock of the host thread that drives a device: moved by waiting and by gpu_host_advance(). */
uint64_t gpu_host_ns(int device);
void gpu_host_advance(int device, uint64_t ns);

/* What the job says from now on of the work that it launches on a device. */
void gpu_set_phase(int device, uint32_t phase, uint64_t step);

/* ---- streams and events ---- */

struct gpu_stream *gpu_stream_create(int device);
void gpu_stream_destroy(struct gpu_stream *stream); /* what is queued is still played */
struct gpu_stream *gpu_default_stream(int device);
int gpu_stream_device(const struct gpu_stream *stream);
bool gpu_stream_idle(struct gpu_stream *stream);
void gpu_stream_sync(struct gpu_stream *stream);
void gpu_device_sync(int device);

struct gpu_event *gpu_event_create(void);
void gpu_event_destroy(struct gpu_event *event);
void gpu_event_record(struct gpu_event *event, struct gpu_stream *stream);
void gpu_stream_wait(struct gpu_stream *stream, struct gpu_event *event);
bool gpu_event_done(struct gpu_event *event); /* true for one that was never recorded */
void gpu_event_sync(struct gpu_event *event);
uint64_t gpu_event_ns(struct gpu_event *event); /* virtual time; 0 until it is done */

/* ---- work ---- */

/* `launched` is handed to `parse` once per play, and to `release` when nobody needs it any more. */
void gpu_launch(struct gpu_stream *stream, gpu_parse_fn parse, gpu_host_fn release, void *launched);
void gpu_compute(struct gpu_stream *stream, uint64_t ns);
void gpu_call(struct gpu_stream *stream, gpu_host_fn fn, void *argument); /* on the player thread */

/* ---- capture ---- */

/* What a capturing stream is given is kept instead of played; streams join by waiting for its events. */
void gpu_capture_begin(struct gpu_stream *stream);
struct gpu_graph *gpu_capture_end(struct gpu_stream *stream);
struct gpu_graph *gpu_capturing(struct gpu_stream *stream); /* NULL: it is not */
/* Plays what was captured in the order in which it was. */
void gpu_graph_launch(struct gpu_graph *graph, struct gpu_stream *stream);
/* `fn` is called when the graph goes. */
void gpu_graph_keep(struct gpu_graph *graph, gpu_host_fn fn, void *argument);
void gpu_graph_destroy(struct gpu_graph *graph);

/* ---- communicators ---- */

struct gpu_comm_info {
    uint64_t id;
    uint32_t number; /* by which the times know it */
    int rank, ranks;
    int present;          /* ranks that there are processes for: those that wait for each other */
    const uint8_t *nodes; /* of each rank; copied */
};

/* Says which of the job's communicators the calling thread creates next: the emulated NCCL knows them by
 * number. NCCL's own does not need it. */
void gpu_comm_announce(uint32_t number);
uint32_t gpu_comm_announced(void);

/* Says whose kernels carry `key`, any address: NCCL's is that of the device communicator. */
void gpu_comm_register(const void *key, const struct gpu_comm_info *info);
void gpu_comm_forget(const void *key);
struct gpu_comm *gpu_comm_find(const void *key); /* NULL: not registered */

/* Of an ncclComm_t: what its kernels carry, and NCCL's hash of it. Defined by whoever stands above: the fake
 * CUDA for NCCL's own communicators, the emulated NCCL for its. */
void gpu_comm_identity(const void *nccl_comm, const void **key, uint64_t *id);

/* ---- the log ---- */

/* Work as one rank played it: records of GPU_LOG, in the order of their end. Mirrored in nccl_job.py. */
struct gpu_log_record {
    uint64_t comm;              /* id */
    uint64_t ordinal;           /* among its communicator's collectives, or its transfers, from 0 */
    uint64_t bytes;             /* of a transfer, the larger direction's */
    uint64_t start_ns, stop_ns; /* virtual: this rank's first channel, last channel */
    uint64_t priced_ns;         /* what it would take if all ranks began at once, on channels of its own */
    uint64_t step;
    uint32_t chunk_bytes;
    uint16_t phase, rank;
    uint8_t func, algo, proto, channels;
    uint8_t members; /* of its largest batch: 1 for work that runs alone */
    uint8_t own, asked, device;
    uint32_t number; /* of the communicator */
    uint32_t reserved;
};

/* Times of day differ between GPUs; the timestamps that kernels write do, too. */
uint64_t gpu_timestamp(int device, uint64_t virtual_ns);

#ifdef __cplusplus
}
#endif
#endif
