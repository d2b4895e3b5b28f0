#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

const int channel_values[N_CHANNEL_VALUES] = {0, 1, 2, 4, 8, 12, 16, 24, 32};

int channel_index(int requested) {
    for (int i = 0; i < N_CHANNEL_VALUES; i++)
        if (channel_values[i] == requested)
            return i;
    return -1;
}

size_t program_cell(const struct program *program, uint32_t phase, uint32_t key, int pair, int channels) {
    size_t row = ((size_t)phase * program->header->n_keys + key) * N_PAIRS + (size_t)pair;
    return row * N_CHANNEL_VALUES + (size_t)channels;
}

static int fits(const struct program_header *h, uint64_t offset, uint64_t count, uint64_t size) {
    return offset % 8 == 0 && offset <= h->file_bytes && count <= (h->file_bytes - offset) / size;
}

/* Returns what is wrong with the file, NULL when nothing is. */
static const char *check(const struct program_header *h, uint64_t mapped_bytes) {
    if (memcmp(h->magic, PROGRAM_MAGIC, sizeof(h->magic)) != 0)
        return "not a program file (wrong magic)";
    if (h->version != PROGRAM_VERSION || h->header_bytes != sizeof(*h))
        return "written by another version of the Python side";
    if (h->file_bytes != mapped_bytes)
        return "truncated: its size is not what its header says";
    if (h->n_ranks < 1 || h->n_nodes < 1 || h->n_keys < 1 || h->n_phases < 1 || h->order_length < 1)
        return "ranks, nodes, keys, phases and order must not be empty";
    if (h->n_phases > 255)
        return "more than 255 phases";
    if (h->max_channels < 1 || h->max_channels > 64)
        return "max_channels must be in 1..64";
    if (h->window < 1)
        return "window must be at least 1";
    if (memchr(h->comm_name, 0, COMM_NAME_BYTES) == NULL)
        return "communicator name is not terminated";
    uint64_t cells = (uint64_t)h->n_phases * h->n_keys * N_PAIRS * N_CHANNEL_VALUES;
    if (!fits(h, h->keys_offset, h->n_keys, sizeof(struct program_key)) ||
        !fits(h, h->order_offset, h->order_length, sizeof(uint32_t)) ||
        !fits(h, h->time_offset, cells, sizeof(double)) || !fits(h, h->sigma_offset, cells, sizeof(double)))
        return "a section lies outside the file";

    const char *base = (const char *)h;
    const struct program_key *keys = (const void *)(base + h->keys_offset);
    for (uint32_t i = 0; i < h->n_keys; i++)
        if (keys[i].collective >= N_COLLECTIVES || keys[i].bytes == 0)
            return "a key has an unknown collective or no bytes";
    const uint32_t *order = (const void *)(base + h->order_offset);
    for (uint32_t i = 0; i < h->order_length; i++)
        if (order[i] >= h->n_keys)
            return "the order names a key that does not exist";
    return NULL;
}

int program_open(struct program *program, const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fprintf(stderr, "cannot open program %s: %s\n", path, strerror(errno));
        return -1;
    }
    struct stat st;
    void *map = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct program_header))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        fprintf(stderr, "cannot map program %s: it is shorter than its header, or mmap failed\n", path);
        return -1;
    }
    const char *problem = check(map, (uint64_t)st.st_size);
    if (problem != NULL) {
        fprintf(stderr, "program %s: %s\n", path, problem);
        munmap(map, (size_t)st.st_size);
        return -1;
    }
    const char *base = map;
    program->header = map;
    program->keys = (const void *)(base + program->header->keys_offset);
    program->order = (const void *)(base + program->header->order_offset);
    program->time_us = (const void *)(base + program->header->time_offset);
    program->sigma = (const void *)(base + program->header->sigma_offset);
    return 0;
}

void program_close(struct program *program) {
    if (program->header != NULL)
        munmap((void *)(uintptr_t)program->header, program->header->file_bytes);
    program->header = NULL;
}

const char *func_name(int func) {
    static const char *const names[] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                        "AllReduce", "SendRecv", "Send",      "Recv"};
    return func >= 0 && func < (int)(sizeof(names) / sizeof(names[0])) ? names[func] : "Invalid";
}

const char *algorithm_name(int algorithm) {
    static const char *const names[N_ALGORITHMS] = {
        "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
    return algorithm >= 0 && algorithm < N_ALGORITHMS ? names[algorithm] : "Unknown";
}

const char *protocol_name(int protocol) {
    static const char *const names[N_PROTOCOLS] = {"LL", "LL128", "SIMPLE"};
    return protocol >= 0 && protocol < N_PROTOCOLS ? names[protocol] : "Unknown";
}
