/* Groups: what a thread calls between ncclGroupStart and ncclGroupEnd. Every call is in one, if only its own.
 */
#ifndef DYNAMICCL_EMULATED_GROUP_H
#define DYNAMICCL_EMULATED_GROUP_H

#include <pthread.h>

#include "comm.h"

/* What does not run at once but when the group ends: creating and ending communicators. */
struct job {
    struct job *next;
    nccl_result (*run)(struct job *job);
    void (*release)(struct job *job);
    struct comm *comm; /* whose state tells how it goes */
    bool ends_comm;
    nccl_result result;
    pthread_t thread;
};

extern __thread int group_depth;

void group_start(void);
nccl_result group_end(struct nccl_sim_info *simulated);
/* Remembers an error until the group ends. */
nccl_result group_error(nccl_result result);
nccl_result group_add_job(struct job *job);
void group_join(struct comm *comm);

/* Waits for what runs in the background; `abort` does not wait for it to succeed. */
nccl_result group_job_complete(struct comm *comm);
void group_job_abort(struct comm *comm);

#endif
