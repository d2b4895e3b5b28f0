/* The plugin's end of a segment: creation at communicator start-up, removal at its end. */
#ifndef DYNAMICCL_SEGMENT_H
#define DYNAMICCL_SEGMENT_H

#include "channel.h"

/* Creates and maps a segment, its name in `path` (at least 256 bytes). NULL with a one-line reason and fix in
 * `error` (at least 512 bytes) if there is no room or no permission. */
struct dcc_segment *segment_create(char *path, char *error);

/* Marks it closed, unmaps it and removes its name; a runner that has it mapped drains it at leisure. */
void segment_remove(struct dcc_segment *seg, const char *path);

#endif
