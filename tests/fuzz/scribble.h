/* The other process, which may write anything into a segment, at any time. */
#ifndef FUZZ_SCRIBBLE_H
#define FUZZ_SCRIBBLE_H

#include "channel.h"
#include "input.h"

/* A word that is likely to mean something: none, all ones, small, a table, a promise, near `dseq`. */
uint64_t take_word(struct input *in, const struct dcc_segment *seg);

/* A collective's bytes, around the powers of two. */
uint64_t take_bytes(struct input *in);

/* One entry of a table, the key from the arguments of a call. Returns the key. */
uint32_t take_entry(struct input *in, struct dcc_entry *entry);

/* A whole table with a few entries; what does not fit together is the input's doing. */
void take_table(struct input *in, struct dcc_table *table);

/* Its digest as docs/channel.md has it, on its own. */
uint64_t model_digest(const struct dcc_table *table);

/* Writes one thing into the words of the runner and the job, or into the tables. */
void scribble(struct dcc_segment *seg, struct input *in);

/* Who it is that comes in between: scribble(), unless a target has somebody else. */
extern void (*scribble_as)(struct dcc_segment *seg, struct input *in);

/* Has the input's next bytes scribbled later, in the middle of a call: at one of the points where the stress
 * test gives up the processor. */
void scribble_later(struct dcc_segment *seg, struct input *in);
void scribble_never(void);

/* Someone sleeps. Scribbles what is still to come; returns false if nothing is left. */
bool scribble_now(void);

#endif
