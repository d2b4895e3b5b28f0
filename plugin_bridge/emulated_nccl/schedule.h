/* From tasks to plans: which channels do what (scheduleCollTasksToPlan and its like in src/enqueue.cc). */
#ifndef DYNAMICCL_EMULATED_SCHEDULE_H
#define DYNAMICCL_EMULATED_SCHEDULE_H

#include "comm.h"

/* Each moves tasks from the communicator's planner to the plan while they fit. */
nccl_result schedule_colls(struct comm *comm, struct plan *plan);
nccl_result schedule_bcasts(struct comm *comm, struct plan *plan);
/* *epoch and *round go on from plan to plan of a group, from 0. */
nccl_result schedule_p2ps(struct comm *comm, struct plan *plan, int *epoch, int *round);

/* The order in which a rank meets the others (ncclP2pSchedule in src/init.cc). */
void schedule_rounds(struct comm *comm);

void add_op(struct plan *plan, const struct proxy_op *op);

#endif
