/* Which decision a starting collective was part of. */
#ifndef DYNAMICCL_JOIN_H
#define DYNAMICCL_JOIN_H

#include "comm.h"

/* Under `starting`. Finds the decision that an operation of `bytes` was part of, and takes the operation off
 * what is to come for it. Returns its position in comm->decisions, or -1; *group is the group of calls, 0
 * where the profiler does not say. */
int join_claim(struct comm *comm, const struct coll_event *event, uint64_t bytes, uint32_t group);

/* Under `starting`, once the decision has been read: gives cells back to getCollInfo. */
void join_finish(struct comm *comm, bool found, uint32_t group);

#endif
