/* Where the ranks of a job wait for each other, as the kernels of a collective do: shared memory between all
 * of its processes.
 *
 * A collective can end on a rank once every rank has begun it; a send once its receive has begun. Ranks post
 * when they begin, in virtual time, and look for the others; nobody blocks here.
 *
 * The file is made by whoever starts the job: meeting_bytes() zeroes behind a struct meeting_header. It is
 * for the job alone, in a directory of its own: processes trust what they read in it. */
#ifndef DYNAMICCL_GPU_MEETING_H
#define DYNAMICCL_GPU_MEETING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MEETING_MAGIC "DCCLMEET"
enum {
    MEETING_VERSION = 1,
    MEETING_COLLECTIVES = 4096, /* of one communicator that may be under way; a kernel has far fewer */
    MEETING_TRANSFERS = 64,     /* of one pair of ranks, likewise */
};

struct meeting_header {
    char magic[8];
    uint32_t version;
    uint32_t max_comms;
    uint32_t max_ranks;  /* of a communicator whose ranks send to each other */
    uint32_t violations; /* collectives that two ranks began differently; atomic */
};

struct meeting_comm;

size_t meeting_bytes(uint32_t max_comms, uint32_t max_ranks);

/* Maps the file; prints why and returns -1 where it is not one. Once per process. */
int meeting_open(const char *path);

/* `expected` of the communicator's ranks take part. NULL: no file is open, or it is full. */
struct meeting_comm *meeting_join(uint64_t id, uint32_t expected);
void meeting_leave(struct meeting_comm *comm);

/* Collective `ordinal` begins here at `ns`. `what` is what every rank must be doing: its low 40 bits count.
 */
void meeting_arrive(struct meeting_comm *comm, uint64_t ordinal, uint64_t ns, uint64_t what);
/* Whether all have begun it, and when the last one did. */
bool meeting_complete(struct meeting_comm *comm, uint64_t ordinal, uint64_t *latest_ns);

/* Transfer `ordinal` from one rank to another begins at this end of it at `ns`. */
void meeting_offer(struct meeting_comm *comm, int from, int to, bool sender, uint64_t ordinal, uint64_t ns);
bool meeting_offered(struct meeting_comm *comm, int from, int to, bool sender, uint64_t ordinal,
                     uint64_t *ns);

#ifdef __cplusplus
}
#endif
#endif
