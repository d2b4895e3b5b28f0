/* The file of times: how long each collective takes in each configuration.
 *
 * Written by plugin_bridge/times.py and mapped read-only here; times.py mirrors these structures. Little
 * endian, natural alignment, no implicit padding:
 *
 *   struct times_header
 *   struct times_row rows[n_rows]       sorted by (comm, func, bytes)
 *   float noise[n_noise]                log of the factor on collective i of a communicator, over and over
 *   the tables that the rows point at
 *
 * A row is one collective of one communicator. Its table is of one of three kinds:
 *
 *   TIMES_USED   float us[n_phases][21][channels][TIMES_CHUNKS]: by pair (3 * algorithm + protocol), by the
 * channels that NCCL really used, from 1, and by chunk: 1 KiB to 4 MiB by powers of two, straight lines
 * between TIMES_ASKED  float us[n_phases][22][9]: by what was asked for, as the decision table says it: pair
 * 0 is NCCL's own choice, else 1 + 3 * algorithm + protocol; then the position of the channel count among 0
 * (NCCL's own), 1, 2, 4, 8, 12, 16, 24, 32. Behind it sigma of the same shape. Measured machines know no
 * more. TIMES_SENT   float us[n_phases][2]: of a message between two ranks of one node, and of two nodes
 *
 * NaN where nothing is known: playing it ends the job with a message. */
#ifndef DYNAMICCL_GPU_TIMES_H
#define DYNAMICCL_GPU_TIMES_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TIMES_MAGIC "DCCLTIME"
enum {
    TIMES_VERSION = 1,
    TIMES_PAIRS = 21,
    TIMES_CHUNKS = 13,
    TIMES_FIRST_CHUNK_LOG2 = 10,
    TIMES_ASKED_PAIRS = 22,
    TIMES_ASKED_CHANNELS = 9,
    TIMES_USED = 0,
    TIMES_ASKED = 1,
    TIMES_SENT = 2,
};

struct times_header {
    char magic[8];
    uint32_t version;
    uint32_t n_rows;
    uint32_t n_phases;
    uint32_t n_noise;
    uint64_t file_bytes;
    uint64_t noise_seed;
    double rank_jitter; /* standard deviation of a rank's own share of the log of the time */
};

struct times_row {
    uint32_t comm; /* number of the communicator */
    uint32_t func;
    uint64_t bytes;
    uint32_t kind;
    uint32_t channels; /* TIMES_USED */
    float sigma;       /* of the log of the time: TIMES_USED, TIMES_SENT */
    uint32_t reserved;
    uint64_t offset; /* of the table in the file */
};

/* Maps and checks the file; prints why and returns -1 where it cannot be used. */
int times_open(const char *path);
/* Without a file every collective takes a time that depends on all of its configuration, by a formula. */
bool times_are_known(void);

/* How long work takes on communicator `number` in a phase, in virtual ns, before noise; *sigma is that of its
 * log. Ends the process with a message where the file has no time for it. `same_node` is for sends. */
double times_ns(uint32_t number, uint32_t phase, const struct gpu_work *work, bool same_node, double *sigma);

/* Whether the file has a time for a pair (NCCL's numbers) of a collective in every phase; true without a
 * file. */
bool times_has(uint32_t number, uint32_t func, uint64_t bytes, int algo, int proto);

/* The factor on the time of collective `ordinal` of communicator `number` at `rank`. */
double times_noise(uint32_t number, int rank, uint64_t ordinal, double sigma);

#ifdef __cplusplus
}
#endif
#endif
