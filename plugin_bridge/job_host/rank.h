/* One rank of a job: a thread that runs its program on one GPU. */
#ifndef DYNAMICCL_JOB_RANK_H
#define DYNAMICCL_JOB_RANK_H

#include "nccl.h"
#include "page.h"
#include "program.h"
#include <stdbool.h>

/* Exit codes of the process; the worst of its ranks'. */
enum { EXIT_OK = 0, EXIT_RANK_FAILED = 1, EXIT_USAGE = 2, EXIT_PEER_DIED = 3 };

/* What all ranks of a process share; read only once they run. */
struct job {
    bool alone; /* one rank in this process */
    const struct nccl *nccl;
    struct program program;
    struct page *page;
    /* Told of every step where it is there: plugin_bridge's channel library, to report it to the plugin's
     * channels. */
    void (*report_step)(uint64_t step, uint64_t iteration_ns, double loss);
};

struct rank_args {
    const struct job *job;
    uint32_t rank;
    int code; /* out */
};

void *run_rank(void *rank_args);

#endif
