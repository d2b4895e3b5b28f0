/* The empty function that the plugin's calls are measured against. Any thread may call it. */
#ifndef DYNAMICCL_BENCH_BASELINE_H
#define DYNAMICCL_BENCH_BASELINE_H

#include "../emulated_nccl/plugin_abi.h"

nccl_result baseline_get_coll_info(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                   int n_algorithms, int n_protocols, int registered, int *n_channels);

#endif
