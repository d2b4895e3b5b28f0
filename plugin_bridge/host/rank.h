/* One job process: its communicators, the loop over collectives, and the log of what each really used. */
#ifndef DYNAMICCL_HOST_RANK_H
#define DYNAMICCL_HOST_RANK_H

#include <stdint.h>
#include <stdio.h>

#include "job.h"
#include "profiler_driver.h"
#include "program.h"
#include "proxy.h"
#include "tuner_driver.h"

enum { MAX_COMMUNICATORS = 16 };

struct options {
    const char *program;
    const char *job;
    const char *plugin;
    const char *log;
    uint32_t process;
    int rank;
    int tuner_abi;
    int profiler_abi;
    uint64_t seed; /* of delays, channel order and timer corruption; never of the priced times */
    uint64_t max_delay_us;
    int bad_timers_permille;
    uint64_t p2p_every;       /* 0: none */
    uint64_t aggregate_every; /* 0: none */
    uint64_t pxn_every;       /* 0: none */
    int communicators;
    int anonymous; /* profilers v1 to v3 get no communicator name or hash, as from NCCL 2.27 on */
    int verbose;
    /* bench only */
    uint64_t calls;
    uint64_t pause_us;
};

/* The log: records of 32 bytes, one per getCollInfo call, in order. Mirrored in emulation.USED_DTYPE. */
struct used {
    uint64_t call; /* 0-based count of getCollInfo calls on this communicator */
    uint64_t exec_ns;
    uint32_t key;
    uint32_t chunk_bytes; /* of the first part that NCCL asks about */
    uint8_t phase;
    uint8_t untouched;
    uint8_t algorithm;
    uint8_t protocol;
    uint8_t requested_channels;
    uint8_t channels;
    uint8_t n_collectives; /* 2 for an aggregate */
    uint8_t reserved;
};
_Static_assert(sizeof(struct used) == 32, "mirrored in emulation.py");

struct communicator {
    uint64_t id;
    char name[COMM_NAME_BYTES + 8];
    void *tuner_context;
    void *profiler_context;
    int has_tuner;
    int has_profiler;
    uint64_t sequence[8]; /* per function, as in NCCL */
    uint64_t calls;
    uint64_t gpu_free; /* virtual GPU time at which the stream has nothing left to do */
    uint64_t noise_stream;
    uint64_t jitter_stream;
    FILE *log;
};

struct host {
    const struct options *options;
    struct program program;
    struct tuner tuner;
    struct profiler_plugin profiler;
    struct proxy proxy;
    struct job job;
    struct communicator communicators[MAX_COMMUNICATORS];
    int n_communicators;
    /* v5 and v6: NCCL keeps a thread's last CollApi handle, whatever its communicator; see coll_api. */
    void *coll_api;
};

/* Exit codes of the program. */
enum { EXIT_OK = 0, EXIT_HOST_ERROR = 1, EXIT_USAGE = 2, EXIT_PEER_DIED = 3 };

int host_open(struct host *host, const struct options *options);
void host_close(struct host *host);
int communicator_open(struct host *host, int index);
/* Profiler and tuner finalize in NCCL's order: proxy thread, tuner, profiler. */
int host_finalize(struct host *host);

/* Runs the whole process; returns its exit code. */
int run_rank(const struct options *options);
int run_bench(const struct options *options);

/* launch.c: one group of n_tasks equal collectives, from the API call to the proxy thread. */
int launch_collective(struct host *host, struct communicator *comm, uint32_t key_index, uint32_t phase,
                      int n_tasks, struct used *used);
void launch_p2p(struct host *host, struct communicator *comm, uint64_t index);

/* What the plugin is given as NCCL's logger. */
void host_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

#endif
