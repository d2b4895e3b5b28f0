/* The program file: what every rank of a job does. Written by plugin_bridge/program.py, mapped read-only
 * here.
 *
 *   struct program_header
 *   struct program_comm comms[n_comms]
 *   struct program_rank ranks[n_ranks]
 *   struct program_op ops[n_ops]
 *
 * Little endian, natural alignment, no implicit padding; the Python side mirrors these structures. */
#ifndef DYNAMICCL_JOB_PROGRAM_H
#define DYNAMICCL_JOB_PROGRAM_H

#include <stdint.h>

#define PROGRAM_MAGIC "DCCLPROG"
enum {
    PROGRAM_VERSION = 3,
    PROGRAM_NAME_BYTES = 64,
    PROGRAM_MAX_RANKS = 64,
    PROGRAM_STREAMS = 8,
    PROGRAM_EVENTS = 64,
    PROGRAM_GRAPHS = 8,
};

enum op_code {
    OP_INIT,     /* comm; peer: rank in it, value: its size; func: 1 makes the unique id */
    OP_SPLIT,    /* comm, from; peer: color or -1, value: key */
    OP_SHRINK,   /* comm, from; value: bit per rank that is left out; not called by those */
    OP_FINALIZE, /* comm */
    OP_DESTROY,  /* comm */
    OP_ABORT,    /* comm */
    OP_GROUP_START,
    OP_GROUP_END,
    OP_SIMULATE_END, /* ncclGroupSimulateEnd */
    OP_COLLECTIVE,   /* comm, stream, func, type; peer: root, value: count as the API takes it */
    OP_SEND,         /* comm, stream, type, peer; value: count */
    OP_RECV,
    OP_COMPUTE,     /* stream; value: virtual ns */
    OP_RECORD,      /* stream, peer: event */
    OP_WAIT,        /* stream, peer: event */
    OP_SYNC,        /* stream; 255: all of the device */
    OP_HOST,        /* value: virtual ns of the host's own work */
    OP_CAPTURE,     /* stream */
    OP_END_CAPTURE, /* stream, peer: graph */
    OP_REPLAY,      /* stream, peer: graph */
    OP_DROP,        /* peer: graph, which NCCL waits for before it lets its communicators go */
    OP_REGISTER,    /* comm: the job's buffer */
    OP_DEREGISTER,  /* comm */
    OP_CLOCK,       /* value: 0 begins to measure what this thread takes, 1 ends it and prints */
    OP_CODES
};

struct program_op {
    uint8_t code; /* enum op_code */
    uint8_t func; /* ncclFunc_t */
    uint8_t type; /* ncclDataType_t */
    uint8_t stream;
    uint16_t comm, from;
    int32_t peer;
    uint32_t reserved;
    uint64_t value;
};

/* Which of the ops a rank runs: once, in every step, at the end. */
struct program_rank {
    uint32_t setup, n_setup, step, n_step, end, n_end;
    uint32_t node, device;
};

struct program_comm {
    char name[PROGRAM_NAME_BYTES]; /* zero-terminated; empty: NCCL gives it none */
    uint32_t present;              /* ranks of it that run here */
    uint32_t blocking;
    uint8_t nodes[PROGRAM_MAX_RANKS]; /* of each of its ranks */
};

struct program_header {
    char magic[8];
    uint32_t version, n_comms, n_ranks, n_ops;
    uint64_t file_bytes;
    uint64_t buffer_bytes; /* of the largest message */
    uint64_t call_ns;      /* virtual time that the host takes for one call of NCCL */
    uint64_t steps;        /* to run; 0: until stopped */
    double rate_hz;        /* steps per second of real time; 0: as fast as possible */
    uint32_t window;       /* steps that one rank may begin before another */
    uint32_t reserved;
};

struct program {
    const struct program_header *header;
    const struct program_comm *comms;
    const struct program_rank *ranks;
    const struct program_op *ops;
};

/* Maps and checks the file; prints why and returns -1 where it cannot be used. */
int program_open(struct program *program, const char *path);

#endif
