/* In a translation unit of its own, so that the compiler cannot see that the function does nothing. */
#include "baseline.h"

nccl_result baseline_get_coll_info(void *context, int func, size_t bytes, int pipe_ops, float **cost,
                                   int n_algorithms, int n_protocols, int registered, int *n_channels) {
    (void)context, (void)func, (void)bytes, (void)pipe_ops, (void)cost;
    (void)n_algorithms, (void)n_protocols, (void)registered, (void)n_channels;
    return NCCL_SUCCESS;
}
