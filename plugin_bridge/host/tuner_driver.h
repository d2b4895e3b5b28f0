/*
 * Calls the plugin's tuner as the NCCL release of its ABI version does, and settles what it asked for.
 *
 * All calls come from the process's main thread. The tuner is shared by the communicators of a process; each
 * has a context of its own.
 */
#ifndef DYNAMICCL_HOST_TUNER_DRIVER_H
#define DYNAMICCL_HOST_TUNER_DRIVER_H

#include <stdint.h>

#include "nccl_abi.h"
#include "program.h"
#include "schedule.h"

struct tuner {
    int abi; /* 2 to 6; 0: no tuner, NCCL's own choice throughout */
    int n_algorithms;
    void *library;
    union {
        const struct tuner_v2 *v2;
        const struct tuner_v3 *v3;
        const struct tuner_v4 *v4;
        const struct tuner_v5 *v5;
        const struct tuner_v6 *v6;
    } is;
};

/* What one collective really uses. */
struct decision {
    int untouched; /* the table was left bit for bit and nChannels was left 0 */
    int algorithm;
    int protocol;
    int requested; /* nChannels as the tuner set it; 0: NCCL's own */
    uint32_t chunk_bytes;
    struct plan plan;
};

/* Opens the plugin. profiler_abi only tells NCCL 2.22 from 2.23, which know 6 and 7 algorithms to v3. */
int tuner_open(struct tuner *tuner, const char *path, int abi, int profiler_abi);
void tuner_close(struct tuner *tuner);

int tuner_init(const struct tuner *tuner, void **context, const struct program_header *header,
               uint64_t comm_id, logger_fn log);
int tuner_finalize(const struct tuner *tuner, void *context);

/*
 * One getCollInfo for n_tasks equal collectives of `key`, NCCL's choice from the table that comes back, the
 * split over channels, and getChunkSize for each part. Returns -1, with a message, where NCCL would fail the
 * collective or run into undefined behaviour.
 */
int tuner_decide(const struct tuner *tuner, void *context, const struct program_header *header,
                 const struct program_key *key, int n_tasks, struct decision *decision);

/* Prints "host error: ..." to stderr and returns -1. */
int host_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
