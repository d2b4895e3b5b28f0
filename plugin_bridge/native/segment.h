/* The plugin's end of a segment: creation at communicator start-up, removal at its end. */
#ifndef DYNAMICCL_SEGMENT_H
#define DYNAMICCL_SEGMENT_H

#include "channel.h"

/* Creates and maps a segment, its name in `path` (at least 256 bytes), and in *lock_fd a descriptor with a
 * lock on it for as long as this process lives: process ids mean nothing to a container that shares the
 * directory. NULL with a one-line reason and fix in `error` (at least 512 bytes) if there is no room or no
 * permission. */
struct dcc_segment *segment_create(char *path, int *lock_fd, char *error);

/* Marks it closed and removes its name; a runner that has it mapped drains it at leisure. */
void segment_close(struct dcc_segment *seg, const char *path, int lock_fd);

/* The same, and unmaps it. */
void segment_remove(struct dcc_segment *seg, const char *path, int lock_fd);

#endif
