/* The empty functions that the plugin's calls are measured against. Any thread may call them. */
#ifndef DYNAMICCL_HOST_BENCH_BASELINE_H
#define DYNAMICCL_HOST_BENCH_BASELINE_H

#include "nccl_abi.h"

result_t baseline_get_coll_info(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                int n_algorithms, int n_protocols, int registered, int *n_channels);

#endif
