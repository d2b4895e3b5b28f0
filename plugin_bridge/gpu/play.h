/* Playing one kernel. */
#ifndef DYNAMICCL_GPU_PLAY_H
#define DYNAMICCL_GPU_PLAY_H

#include "queue.h"

/* Reads the environment and opens the log; -1 where that fails. */
int play_open(void);
/* Goes on with the kernel at the head of a stream. Returns whether anything happened; *ended says whether the
 * kernel has. */
bool play_kernel(struct gpu_stream *stream, struct gpu_op *op, bool *ended);

#endif
