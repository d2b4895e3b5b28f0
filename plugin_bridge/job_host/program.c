#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(struct program_op) == 24, "mirrored in program.py");
_Static_assert(sizeof(struct program_rank) == 32, "mirrored in program.py");
_Static_assert(sizeof(struct program_comm) == 136, "mirrored in program.py");
_Static_assert(sizeof(struct program_header) == 72, "mirrored in program.py");

static const char *check_op(const struct program_header *header, const struct program_op *op) {
    bool event = op->code == OP_RECORD || op->code == OP_WAIT;
    bool graph = op->code == OP_END_CAPTURE || op->code == OP_REPLAY || op->code == OP_DROP;
    int peer_limit = event ? PROGRAM_EVENTS : graph ? PROGRAM_GRAPHS : INT32_MAX;
    if (op->code >= OP_CODES)
        return "an operation of an unknown kind";
    if (op->comm >= header->n_comms || op->from >= header->n_comms)
        return "an operation on a communicator that does not exist";
    if (op->stream >= PROGRAM_STREAMS && !(op->code == OP_SYNC && op->stream == 255))
        return "an operation on a stream that does not exist";
    if (op->peer >= peer_limit || (peer_limit != INT32_MAX && op->peer < 0))
        return "an event or a graph that does not exist";
    if (op->code == OP_COLLECTIVE && (op->func > 4 || op->type > 11))
        return "an unknown collective or type";
    return NULL;
}

static const char *check(const struct program_header *header, uint64_t bytes) {
    if (memcmp(header->magic, PROGRAM_MAGIC, sizeof(header->magic)) != 0 ||
        header->version != PROGRAM_VERSION)
        return "not a program of this version";
    uint64_t needed = sizeof(*header) + header->n_comms * sizeof(struct program_comm) +
                      header->n_ranks * sizeof(struct program_rank) +
                      header->n_ops * sizeof(struct program_op);
    if (header->file_bytes != bytes || needed != bytes || header->n_comms == 0 || header->n_ranks == 0 ||
        header->n_ranks > PROGRAM_MAX_RANKS || header->window == 0)
        return "its size is not what its header says, or it has no ranks";
    const struct program_comm *comms = (const void *)(header + 1);
    const struct program_rank *ranks = (const void *)(comms + header->n_comms);
    const struct program_op *ops = (const void *)(ranks + header->n_ranks);
    for (uint32_t i = 0; i < header->n_comms; i++)
        if (memchr(comms[i].name, 0, sizeof(comms[i].name)) == NULL)
            return "a communicator's name has no end";
    for (uint32_t i = 0; i < header->n_ranks; i++) {
        const uint32_t *parts = &ranks[i].setup;
        for (int part = 0; part < 6; part += 2)
            if (parts[part] > header->n_ops || parts[part + 1] > header->n_ops - parts[part])
                return "a rank's operations lie outside of the file";
    }
    for (uint32_t i = 0; i < header->n_ops; i++) {
        const char *problem = check_op(header, &ops[i]);
        if (problem)
            return problem;
    }
    return NULL;
}

int program_open(struct program *program, const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    void *map = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct program_header))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map == MAP_FAILED) {
        fprintf(stderr, "cannot map the program %s: %s\n", path, strerror(errno));
        return -1;
    }
    const char *problem = check(map, (uint64_t)st.st_size);
    if (problem) {
        fprintf(stderr, "program %s: %s\n", path, problem);
        munmap(map, (size_t)st.st_size);
        return -1;
    }
    program->header = map;
    program->comms = (const void *)(program->header + 1);
    program->ranks = (const void *)(program->comms + program->header->n_comms);
    program->ops = (const void *)(program->ranks + program->header->n_ranks);
    return 0;
}
