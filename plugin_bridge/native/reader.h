/* The runner's end of a segment, for plugin_bridge/layout.py through ctypes, and the job's few words. All
 * calls on one segment but the job's come from the process that holds an exclusive flock on its file, one at
 * a time. None of them waits for the plugin. */
#ifndef DYNAMICCL_READER_H
#define DYNAMICCL_READER_H

#include <stddef.h>
#include <stdint.h>

#include "channel.h"

struct dcc_identity_view {
    uint64_t comm_id, start_time;
    uint32_t pid, ordinal, rank, ranks, nodes, tuner_abi, profiler_abi, user_env, state;
    char comm_name[DCC_NAME_BYTES];
    char job[DCC_NAME_BYTES];
};

struct dcc_status {
    uint64_t dseq, hold_at, decision;
    uint64_t base_version, base_at, pending_version; /* 0: none */
    uint64_t promised;                               /* 1: an answer for the pending version may be out */
    uint64_t applied, passthrough[DCC_CAUSES];
    uint64_t hold_waits, hold_wait_ns, overhead_ns, overhead_calls, plugin_heartbeat_ns, runner_heartbeat_ns,
        runner_pid;
    uint64_t records, dropped_full, dropped_busy, dropped_incomplete, dropped_timer, undecided, merged;
    uint64_t unprofiled, spared, duty, overhead_ppm;
    int64_t profile_ns;
    uint64_t backlog; /* records not yet drained */
    uint64_t term, in_band, out_of_step, staged_version, offered_version;
};

/* What a rank brings to a step boundary. */
struct dcc_offer {
    uint64_t version, digest; /* of the table that it would put in force; 0: none */
    uint64_t dseq;            /* calls so far */
};

/* What the job said last. */
struct dcc_job_view {
    uint64_t reports; /* steps it has reported; 0: nothing below means anything but `faults` */
    uint64_t step, iteration_ns, faults;
    double loss; /* NaN: not reported */
};

enum dcc_prepared {
    DCC_PREPARED = 0,
    DCC_BUSY = 1,      /* an earlier version is still open, or its S has not passed */
    DCC_OVERTAKEN = 2, /* calls came faster than the margin could grow; nothing is held */
    DCC_REFUSED = 3,   /* version 0, not newer than the one in force, no such table, or the job's to decide */
};

/* Maps an open file, which the caller closes. NULL with the reason in `error` (256 bytes): not ours, another
 * ABI version, still starting; errno is EAGAIN for the last and EINVAL for the others. */
struct dcc_segment *dcc_open(int fd, char *error);
void dcc_close(struct dcc_segment *seg);

/* Whether the process that made the segment in this open file lives, in whatever PID namespace. */
int dcc_owner_lives(int fd);

void dcc_identity(struct dcc_segment *seg, struct dcc_identity_view *out);
void dcc_status(struct dcc_segment *seg, struct dcc_status *out);
size_t dcc_drain(struct dcc_segment *seg, struct dcc_record *out, size_t max);

/* The last published fingerprints, up to DCC_FINGERPRINT_WINDOWS, in no order; returns how many. */
size_t dcc_fingerprints(struct dcc_segment *seg, uint64_t *windows, uint64_t *hashes);

/* Copies cost rows from index `first` on, up to `max`; returns how many. */
size_t dcc_cost_rows(struct dcc_segment *seg, struct dcc_cost_row *out, size_t first, size_t max);

/* For the job, from its own process and one thread at a time. Neither waits for anybody. */
void dcc_report_step(struct dcc_segment *seg, uint64_t step, uint64_t iteration_ns, double loss);
void dcc_report_fault(struct dcc_segment *seg);

/* The last report; 0 if one was being written each time that this looked, and then `out` means nothing. */
int dcc_job(struct dcc_segment *seg, struct dcc_job_view *out);

/* The table that calls use from now on, or from the S of the last COMMIT on. 0 without one. */
int dcc_table(struct dcc_segment *seg, struct dcc_table *out);

uint64_t dcc_digest(const struct dcc_table *table);
/* Before a coordinator is shown how this rank stands. 0 if a newer one has been shown: this one may decide
 * nothing. */
int dcc_show_to(struct dcc_segment *seg, uint64_t term);

void dcc_beat(struct dcc_segment *seg, uint64_t now_ns, uint64_t pid);

/* One window in 2^duty is profiled from the next one on. */
void dcc_govern(struct dcc_segment *seg, uint64_t duty);
/* What the plugin takes of its process's time, for whoever looks. */
void dcc_note_overhead(struct dcc_segment *seg, uint64_t ppm);

/* PREPARE: copies the table into the spare slot and promises to hold at *hold_at unless decided before. The
 * digest is of what the slot then holds. Asked again for the open version, answers the same hold_at. */
int dcc_prepare(struct dcc_segment *seg, const struct dcc_table *table, uint64_t margin, uint64_t *hold_at,
                uint64_t *digest);

/* For the job, from its own process and one thread at a time, between two steps. dcc_offer() takes what has
 * been staged since and returns whether there is something to offer; dcc_take_offer() puts it in force from
 * the next call on. */
void dcc_join_in_band(struct dcc_segment *seg);
int dcc_offer(struct dcc_segment *seg, struct dcc_offer *out);
void dcc_take_offer(struct dcc_segment *seg);
void dcc_out_of_step(struct dcc_segment *seg);

/* A step boundary of one process, for the job as well: see boundary.c. Between the first and the second,
 * `words` are reduced over all ranks with MIN. The second returns how many communicators are out of step
 * since then. */
#define DCC_BOUNDARY_PLACES 64
#define DCC_BOUNDARY_WORDS 6 /* of each */
struct dcc_place {
    struct dcc_segment *seg;
    uint64_t comm;        /* its id; 0: unknown, and steps are only reported to it */
    uint32_t moved;       /* how often it has met another communicator in its place */
    uint32_t offered;     /* 1: a table of it is being agreed on */
    uint32_t out_of_step; /* 1: for good */
};
void dcc_boundary_bring(struct dcc_place *places, size_t n, int64_t *words);
size_t dcc_boundary_take(struct dcc_place *places, size_t n, int64_t *words);
void dcc_boundary_report(struct dcc_place *places, size_t n, uint64_t step, uint64_t iteration_ns,
                         double loss);

/* In band: hands a table to the job, in place of one that it has not taken yet. DCC_BUSY: try again. */
int dcc_stage(struct dcc_segment *seg, const struct dcc_table *table);

/* COMMIT at `decision`, or DCC_ABORT, for `version`. 0 if done or already so, -1 if that version is not open,
 * or if it was never promised for a call as early as `decision`. */
int dcc_decide(struct dcc_segment *seg, uint64_t version, uint64_t decision);

/* Folds a committed version once dseq has passed its S. 1 if no version is open any more. */
int dcc_fold(struct dcc_segment *seg);

#endif
