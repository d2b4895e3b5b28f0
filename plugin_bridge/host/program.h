/*
 * The program file: what the emulated job does and how long everything takes.
 *
 * Written by plugin_bridge/emulation.py, mapped read-only here. Little endian, naturally aligned, no
 * implicit padding; the Python side mirrors these structs as numpy dtypes and both check the sizes.
 *
 *   struct program_header
 *   struct program_key keys[n_keys]                      at keys_offset
 *   uint32_t order[order_length]                         at order_offset; key indices, repeated for ever
 *   double time_us[n_phases][n_keys][N_PAIRS][N_CHANNEL_VALUES]    at time_offset
 *   double sigma  [n_phases][n_keys][N_PAIRS][N_CHANNEL_VALUES]    at sigma_offset
 *
 * A response cell is NaN where nothing was measured. Pair 0 is the tuner having left everything alone; pair
 * 1 + 3 * algorithm + protocol otherwise. The last axis is the position of the requested channel count in
 * CHANNEL_VALUES, 0 being NCCL's own.
 */
#ifndef DYNAMICCL_HOST_PROGRAM_H
#define DYNAMICCL_HOST_PROGRAM_H

#include <stdint.h>

#include "nccl_abi.h"

#define PROGRAM_MAGIC "DCCLPROG"
enum {
    PROGRAM_VERSION = 1,
    N_PAIRS = 1 + N_ALGORITHMS * N_PROTOCOLS,
    N_CHANNEL_VALUES = 9,
    COMM_NAME_BYTES = 64,
};

struct program_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint64_t file_bytes;
    uint64_t comm_id;
    char comm_name[COMM_NAME_BYTES]; /* zero-terminated */
    uint32_t n_ranks;
    uint32_t n_nodes;
    uint32_t max_channels;
    uint32_t n_keys;
    uint32_t n_phases;
    uint32_t order_length;
    uint32_t window; /* collectives that one rank may run ahead of another */
    uint32_t reserved;
    double rate_hz; /* collectives per second and rank; 0: as fast as possible */
    uint64_t total; /* collectives; 0: until stopped */
    uint64_t noise_seed;
    double rank_jitter; /* standard deviation of the rank's own share of the log of the time */
    uint64_t keys_offset;
    uint64_t order_offset;
    uint64_t time_offset;
    uint64_t sigma_offset;
};
_Static_assert(sizeof(struct program_header) == 192, "mirrored in emulation.py");

struct program_key {
    uint32_t collective;
    uint32_t pipe_ops;
    uint64_t bytes; /* as NCCL counts: the full buffer for all-gather and reduce-scatter */
    float cost_us[N_ALGORITHMS][N_PROTOCOLS];
    uint8_t own_channels[N_ALGORITHMS][N_PROTOCOLS]; /* the ceiling that NCCL sets for the pair */
    uint8_t own_warps[N_ALGORITHMS][N_PROTOCOLS];
    uint8_t reserved[2];
    uint32_t own_chunk_bytes[N_ALGORITHMS][N_PROTOCOLS];
    uint32_t buffer_bytes[N_PROTOCOLS];
};
_Static_assert(sizeof(struct program_key) == 240, "mirrored in emulation.py");

struct program {
    const struct program_header *header;
    const struct program_key *keys;
    const uint32_t *order;
    const double *time_us;
    const double *sigma;
};

extern const int channel_values[N_CHANNEL_VALUES];

/* Position of `requested` in channel_values, or -1. */
int channel_index(int requested);

/* Maps and checks the file; prints why and returns -1 where it cannot be used. */
int program_open(struct program *program, const char *path);
void program_close(struct program *program);

/* Index of a cell in time_us and sigma. */
size_t program_cell(const struct program *program, uint32_t phase, uint32_t key, int pair, int channels);

const char *func_name(int func);
const char *algorithm_name(int algorithm);
const char *protocol_name(int protocol);

#endif
