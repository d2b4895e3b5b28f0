/* Segments in plain memory, so that the sanitizer sees every byte beyond them, and no execution makes a
 * system call. They stand in for native/segment.c. */
#ifndef FUZZ_MEMORY_H
#define FUZZ_MEMORY_H

#include "channel.h"

#define SEGMENTS 2 /* communicators beyond these get no channel */

/* Number `i`, as a plugin leaves it that has just started: all zero but for what it says of itself. */
struct dcc_segment *memory_segment(unsigned i);

/* -1 for none of ours. */
int memory_index(const struct dcc_segment *seg);

/* To be told of what is written outside the words that are always cleaned. */
void memory_table_dirty(struct dcc_segment *seg, unsigned slot);
void memory_ring_from(struct dcc_segment *seg, uint64_t position);
/* UINT64_MAX where the segment is not in use. */
uint64_t memory_ring_of(unsigned i);

/* Before the next execution: all as it was. Communicators keep their memory, and forget what was in it. */
void memory_clean(void);

/* A slot of a communicator is about to be used. */
struct comm;
void memory_slot_dirty(struct comm *comm);

#endif
