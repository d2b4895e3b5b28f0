/* The log of what was played: GPU_LOG. */
#ifndef DYNAMICCL_GPU_LOG_H
#define DYNAMICCL_GPU_LOG_H

#include "gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Begins the file that GPU_LOG names, if any; prints why and returns -1 where it cannot. */
int gpu_log_open(void);
bool gpu_log_is_open(void);
void gpu_log_add(const struct gpu_log_record *record);
/* What was recorded is in the file then. It also is when the process ends. */
void gpu_log_flush(void);

#ifdef __cplusplus
}
#endif
#endif
