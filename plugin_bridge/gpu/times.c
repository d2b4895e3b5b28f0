#define _GNU_SOURCE
#include "times.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const int asked_channels[TIMES_ASKED_CHANNELS] = {0, 1, 2, 4, 8, 12, 16, 24, 32};

static const struct times_header *header;
static const struct times_row *rows;
static const float *noise;

static size_t cells(const struct times_row *row) {
    switch (row->kind) {
    case TIMES_USED:
        return (size_t)TIMES_PAIRS * row->channels * TIMES_CHUNKS;
    case TIMES_ASKED:
        return (size_t)TIMES_ASKED_PAIRS * TIMES_ASKED_CHANNELS;
    default:
        return 2;
    }
}

static const float *table_of(const struct times_row *row) {
    return (const float *)((const char *)header + row->offset);
}

static const char *check(const struct times_header *h, uint64_t bytes) {
    if (memcmp(h->magic, TIMES_MAGIC, sizeof(h->magic)) != 0 || h->version != TIMES_VERSION)
        return "not a file of times of this version";
    uint64_t fixed = sizeof(*h) + (uint64_t)h->n_rows * sizeof(struct times_row) + h->n_noise * sizeof(float);
    if (h->file_bytes != bytes || fixed > bytes || h->n_phases == 0)
        return "its size is not what its header says";
    const struct times_row *row = (const void *)(h + 1);
    for (uint32_t i = 0; i < h->n_rows; i++, row++) {
        if (row->kind > TIMES_SENT || row->offset % sizeof(float) != 0 ||
            (row->kind == TIMES_USED && (row->channels == 0 || row->channels > GPU_MAX_CHANNELS)))
            return "a row is damaged";
        uint64_t size = h->n_phases * cells(row) * sizeof(float) * (row->kind == TIMES_ASKED ? 2 : 1);
        if (row->offset > bytes || size > bytes - row->offset)
            return "a row points outside of the file";
    }
    return NULL;
}

int times_open(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    void *map = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct times_header))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map == MAP_FAILED) {
        fprintf(stderr, "cannot map the times %s: %s\n", path, strerror(errno));
        return -1;
    }
    const char *problem = check(map, (uint64_t)st.st_size);
    if (problem != NULL) {
        fprintf(stderr, "times %s: %s\n", path, problem);
        munmap(map, (size_t)st.st_size);
        return -1;
    }
    header = map;
    rows = (const void *)(header + 1);
    noise = (const void *)(rows + header->n_rows);
    return 0;
}

bool times_are_known(void) {
    return header != NULL;
}

static int order(const struct times_row *row, uint32_t comm, uint32_t func, uint64_t bytes) {
    if (row->comm != comm)
        return row->comm < comm ? -1 : 1;
    if (row->func != func)
        return row->func < func ? -1 : 1;
    return row->bytes == bytes ? 0 : row->bytes < bytes ? -1 : 1;
}

static const struct times_row *find(uint32_t comm, uint32_t func, uint64_t bytes) {
    uint32_t low = 0, high = header->n_rows;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int side = order(&rows[middle], comm, func, bytes);
        if (side == 0)
            return &rows[middle];
        if (side < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* Between two chunks the time is on a line over their logarithm. */
static double at_chunk(const float *us, uint32_t chunk_bytes) {
    double at = chunk_bytes ? log2(chunk_bytes) - TIMES_FIRST_CHUNK_LOG2 : TIMES_CHUNKS - 1;
    at = fmin(fmax(at, 0), TIMES_CHUNKS - 1);
    int below = (int)at < TIMES_CHUNKS - 2 ? (int)at : TIMES_CHUNKS - 2;
    return us[below] + (at - below) * ((double)us[below + 1] - us[below]);
}

static size_t asked_cell(const struct gpu_work *work) {
    size_t pair = work->own ? 0 : (size_t)(1 + 3 * work->algo + work->proto), position = 0;
    while (position < TIMES_ASKED_CHANNELS && asked_channels[position] != work->asked)
        position++;
    return position < TIMES_ASKED_CHANNELS ? pair * TIMES_ASKED_CHANNELS + position : SIZE_MAX;
}

/* All of a configuration shows in the time, so that tests can tell what was used. */
static double formula_us(const struct gpu_work *work) {
    if (work->func == GPU_FUNC_SEND_RECV)
        return 8 + (double)(work->send_bytes > work->recv_bytes ? work->send_bytes : work->recv_bytes) / 20e3;
    return 4 + 1.5 * work->algo + 2.5 * work->proto + 0.1 * work->channels +
           (double)work->bytes / (1e3 * (8 + 2.0 * work->channels)) + log2(2.0 + work->chunk_bytes) / 8;
}

double times_ns(uint32_t number, uint32_t phase, const struct gpu_work *work, bool same_node, double *sigma) {
    *sigma = 0;
    if (header == NULL)
        return 1e3 * formula_us(work);
    bool sent = work->func == GPU_FUNC_SEND_RECV;
    uint64_t bytes = work->bytes;
    if (sent)
        bytes = work->send_bytes > work->recv_bytes ? work->send_bytes : work->recv_bytes;
    const struct times_row *row = find(number, work->func, bytes);
    double us = NAN;
    if (row != NULL && phase < header->n_phases && (work->algo < 7 && work->proto < 3)) {
        const float *table = table_of(row) + phase * cells(row);
        *sigma = row->sigma;
        if (row->kind == TIMES_SENT) {
            us = table[!same_node];
        } else if (row->kind == TIMES_ASKED) {
            size_t cell = asked_cell(work);
            if (cell != SIZE_MAX) {
                us = table[cell];
                *sigma = (table + header->n_phases * cells(row))[cell];
            }
        } else if (work->channels >= 1 && work->channels <= row->channels) {
            size_t pair = (size_t)(3 * work->algo + work->proto);
            us = at_chunk(table + (pair * row->channels + work->channels - 1) * TIMES_CHUNKS,
                          work->chunk_bytes);
        }
    }
    if (!(us > 0)) {
        fprintf(stderr,
                "no time for function %d of %llu bytes on communicator %u in phase %u: algorithm %d, "
                "protocol %d, "
                "%d channels (%d asked for), chunk %u%s\n",
                work->func, (unsigned long long)bytes, number, phase, work->algo, work->proto, work->channels,
                work->asked, work->chunk_bytes, work->own ? ", NCCL's own choice" : "");
        _exit(1);
    }
    return 1e3 * us;
}

bool times_has(uint32_t number, uint32_t func, uint64_t bytes, int algo, int proto) {
    if (header == NULL)
        return true;
    const struct times_row *row = find(number, func, bytes);
    if (row == NULL || row->kind == TIMES_SENT)
        return false;
    size_t pair = (size_t)(3 * algo + proto), first = pair * row->channels * TIMES_CHUNKS;
    if (row->kind == TIMES_ASKED)
        first = (pair + 1) * TIMES_ASKED_CHANNELS;
    for (uint32_t phase = 0; phase < header->n_phases; phase++) {
        const float *table = table_of(row) + phase * cells(row) + first;
        int known = table[0] > 0;
        for (int i = 1; row->kind == TIMES_ASKED && i < TIMES_ASKED_CHANNELS; i++)
            known |= table[i] > 0;
        if (!known)
            return false;
    }
    return true;
}

/* Sebastiano Vigna's splitmix64 step as a stateless mixer. */
static uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Standard normal number `index` of stream `seed` (Box and Muller 1958). */
static double normal(uint64_t seed, uint64_t index) {
    uint64_t stream = mix64(seed);
    double u1 = (double)((mix64(stream ^ (2 * index)) >> 11) + 1) * 0x1p-53; /* (0, 1] */
    double u2 = (double)(mix64(stream ^ (2 * index + 1)) >> 11) * 0x1p-53;   /* [0, 1) */
    return sqrt(-2.0 * log(u1)) * cos(6.283185307179586476925 * u2);
}

double times_noise(uint32_t number, int rank, uint64_t ordinal, double sigma) {
    if (header == NULL)
        return 1;
    uint64_t shared = header->noise_seed ^ mix64(number);
    double log_factor = sigma > 0 ? sigma * normal(shared, ordinal) : 0;
    if (header->n_noise)
        log_factor += noise[(ordinal + mix64(shared)) % header->n_noise];
    if (header->rank_jitter > 0)
        log_factor +=
            header->rank_jitter * normal(shared ^ mix64((uint64_t)rank + 0x52414e4b00000000u), ordinal);
    return exp(log_factor);
}
