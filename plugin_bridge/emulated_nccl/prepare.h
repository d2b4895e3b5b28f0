/* What a group asks of a communicator: kept call by call, then decided (ncclPrepareTasks in src/enqueue.cc).
 */
#ifndef DYNAMICCL_EMULATED_PREPARE_H
#define DYNAMICCL_EMULATED_PREPARE_H

#include "comm.h"

void planner_begin(struct comm *comm);
/* Frees what a group that failed has left. */
void planner_end(struct comm *comm);
void planner_add(struct comm *comm, struct coll_task *task);

/* Asks the tuner for every collective, or every aggregate of several, and leaves them in the order in which
 * they are launched. */
nccl_result prepare(struct comm *comm, struct nccl_sim_info *simulated);

#endif
