/* The channel: one shared-memory segment per (job, communicator, rank) between the plugin inside a training
 * process and the control plane beside it. This file is the layout and nothing else; docs/channel.md is its
 * prose.
 *
 * Writers. Every field has one writing side, named at the field: the plugin (NCCL's threads), the runner
 * (whoever holds an exclusive flock on the file) or the job (the training script, one thread at a time). The
 * one exception is `promise`, which both plugin and runner change by compare-and-swap.
 *
 * Ordering. C11 atomics; each release names the acquire it pairs with, so that it is right on Arm too. */
#ifndef DYNAMICCL_CHANNEL_H
#define DYNAMICCL_CHANNEL_H

#include <stdatomic.h>
#include <stdint.h>

#define DCC_MAGIC 0x4c43434d414e5944ull /* "DYNAMCCL" */
#define DCC_ABI 6u
#define DCC_TABLE_MAGIC 0x31425443u /* "CTB1" */

#define DCC_RING_RECORDS 16384u /* power of two; 16 s of records at 1000 collectives/s */
#define DCC_FUNCS 5
#define DCC_ALGOS 7
#define DCC_PROTOS 3
#define DCC_BINS 312                        /* 8 per octave up to 2^41 bytes */
#define DCC_KEYS (DCC_FUNCS * 2 * DCC_BINS) /* (collective, pipelined or not, size bin) */
#define DCC_SLOTS 3                         /* in force, offered by the job, being written */
#define DCC_FINGERPRINT_CALLS 1024u         /* calls per published fingerprint */
#define DCC_FINGERPRINT_WINDOWS 16u         /* fingerprints kept */
#define DCC_COST_ROWS 256                   /* keys whose cost table is shown to the runner */
#define DCC_NAME_BYTES 64
#define DCC_MAX_CHUNK_LOG2 26
#define DCC_MAX_VERSION UINT32_MAX /* a record has 32 bits for it */

#define DCC_MOST_RANKS (1u << 20)

#define DCC_WINDOW_CALLS 256u /* all of a window's calls are profiled, or none */
#define DCC_MOST_DUTY 8u      /* at least one window in 2^8 is */
#define DCC_TIMED_ONE_IN 256u /* calls, and profiled collectives, for which the plugin times itself */

#define DCC_NO_HOLD UINT64_MAX
#define DCC_UNDECIDED 0u
#define DCC_ABORT UINT64_MAX
#define DCC_TAKEN 0x80u /* in `staged`, beside the slot */

enum dcc_promise { DCC_OPEN = 0, DCC_PROMISED = 1, DCC_REFUSED_BY_PLUGIN = 2 };

/* Why a collective was left to NCCL; index into dcc_plugin_words.passthrough. */
enum dcc_cause {
    DCC_NO_TABLE,  /* no table is in force */
    DCC_BAD_TABLE, /* the slot's magic, version or digest is wrong */
    DCC_NO_ENTRY,  /* the table says nothing of this key, or asks for a path other than NCCL's */
    DCC_MASKED,    /* the entry asks for something that NCCL did not offer or that could harm it */
    DCC_USER_ENV,  /* NCCL_ALGO or NCCL_PROTO is set */
    DCC_SHADOW,    /* the table is only to be looked at */
    DCC_CAUSES = 8
};

/* Where a record's execution time comes from; only these are ever recorded. */
enum dcc_timing { DCC_TIMING_GPU = 1, DCC_TIMING_KERNEL_HOST = 2, DCC_TIMING_PROXY = 3 };

enum dcc_record_flags {
    DCC_RECORD_DECIDED = 1,   /* joined with a getCollInfo call: dseq, key and version are valid */
    DCC_RECORD_APPLIED = 2,   /* the table's entry was written into NCCL's cost table */
    DCC_RECORD_AGGREGATE = 4, /* several operations that share a decision: their time from first to last */
    DCC_RECORD_SURE = 8,      /* its timers were read before NCCL could have written others over them */
};

/* What one decision cost: a collective, or the collectives that NCCL decided on together. */
struct dcc_record {
    uint64_t dseq;       /* decision sequence, from 1; 0 without DCC_RECORD_DECIDED */
    uint64_t bytes;      /* as NCCL counts them for the tuner, of all that share the decision */
    uint64_t exec_ns;    /* execution time, last channel's stop minus first channel's start */
    uint64_t start_ns;   /* first channel's start on the clock that `timing` names */
    uint32_t version;    /* of the table in force at dseq; 0 for none */
    uint32_t plan;       /* number of its kernel among those of the communicator's collectives, modulo 2^32 */
    uint32_t clock;      /* of a GPU's timer: the host's clock as its end was heard of, less that, mod 2^32 */
    uint16_t key;        /* index of the decision's key */
    uint8_t flags;       /* enum dcc_record_flags */
    uint8_t timing;      /* enum dcc_timing */
    uint8_t func;        /* ncclFunc_t */
    uint8_t algo, proto; /* what NCCL says it used; 255 if it names none that we know */
    uint8_t channels;    /* of an aggregate, the most of any of its operations; 0 where NCCL does not say */
    uint8_t asked_algo, asked_proto, asked_channels; /* the entry; 255, 255, 0 for NCCL's own */
    uint8_t asked_chunk_log2;                        /* 0 for NCCL's own */
    _Atomic uint64_t ticket;                         /* ring position + 1; published last */
};
_Static_assert(sizeof(struct dcc_record) == 64, "records are one cache line");

/* One decision. All zero: leave NCCL alone. */
struct dcc_entry {
    uint8_t set;      /* 1: this entry means something */
    uint8_t path;     /* 0: NCCL; anything else leaves NCCL alone */
    uint8_t algo;     /* 255: NCCL's own pair */
    uint8_t proto;    /* 255: NCCL's own pair */
    uint8_t channels; /* 0: NCCL's own */
    uint8_t reserved;
    uint8_t chunk_log2; /* 0: NCCL's own; only together with an explicit pair */
    uint8_t reserved2;
};
_Static_assert(sizeof(struct dcc_entry) == 8, "an entry is one word");

struct dcc_table {
    uint32_t magic;
    uint32_t abi;
    uint64_t version;      /* from 1 */
    uint64_t digest;       /* dcc_table_digest() of everything below and the version */
    uint32_t max_channels; /* the communicator's, as all ranks agreed */
    uint32_t apply;        /* 0: shadow; look up and record, write nothing */
    struct dcc_entry entries[DCC_KEYS];
};

/* Writer: the plugin. The atomic fields may be filled in after `state` is ready: the two halves of the plugin
 * are initialised one after the other, and old profilers tell rank and id only with the first collective. */
struct dcc_identity {
    _Atomic uint64_t comm_id;
    uint64_t start_time; /* of pid, clock ticks after boot: tells a recycled pid */
    uint32_t pid;
    uint32_t ordinal;      /* of the communicator in its process */
    _Atomic uint32_t rank; /* UINT32_MAX until known */
    _Atomic uint32_t ranks, nodes;
    _Atomic uint32_t tuner_abi, profiler_abi; /* 0: that half is not loaded */
    uint32_t user_env;                        /* 1: NCCL_ALGO or NCCL_PROTO is set in this process */
    char comm_name[DCC_NAME_BYTES];
    char job[DCC_NAME_BYTES];
};

enum dcc_state { DCC_STARTING = 0, DCC_READY = 1, DCC_CLOSED = 2 };

struct dcc_fingerprint {
    _Atomic uint64_t window; /* number of the window + 1; 0 while it is being written */
    _Atomic uint64_t hash;
};

/* NCCL's own prediction for a key, as its first collective saw it; -1 where NCCL does not offer the pair. */
struct dcc_cost_row {
    uint32_t key;
    float cost_us[DCC_ALGOS][DCC_PROTOS];
};

/* Writer: the plugin. */
struct dcc_plugin_words {
    _Alignas(64) _Atomic uint64_t dseq; /* calls of getCollInfo begun; see the agreement below */
    _Alignas(64) _Atomic uint64_t applied;
    _Atomic uint64_t passthrough[DCC_CAUSES];
    _Atomic uint64_t hold_waits, hold_wait_ns;    /* calls that waited at a hold, and for how long in all */
    _Atomic uint64_t overhead_ns, overhead_calls; /* getCollInfo, one call in DCC_TIMED_ONE_IN */
    _Atomic uint64_t heartbeat_ns;                /* CLOCK_MONOTONIC of the last such call */
    _Atomic uint64_t unprofiled; /* calls in windows that are not profiled: nothing of them is to come */
    /* The profiler's callbacks of one collective in DCC_TIMED_ONE_IN. Signed: clocks are coarse. */
    _Atomic uint64_t profile_ns;
    /* Collectives that were begun but have no record of their own in the ring; `head` counts those that have.
     */
    _Alignas(64) _Atomic uint64_t dropped_full; /* because the ring was full */
    _Atomic uint64_t dropped_busy;              /* ... because all measuring slots were in use */
    _Atomic uint64_t dropped_incomplete;        /* ... because a channel never reported */
    _Atomic uint64_t dropped_timer;             /* ... because a timer was missing or ran backwards */
    _Atomic uint64_t undecided;                 /* measured, but no getCollInfo call matches (graph replay) */
    _Atomic uint64_t merged; /* began, but share the record of the first operation of their aggregate */
    _Atomic uint64_t spared; /* began, but outside of the windows that are profiled */
    struct dcc_fingerprint fingerprints[DCC_FINGERPRINT_WINDOWS];
    _Atomic uint32_t cost_rows_used; /* rows below this are whole and never change */
    struct dcc_cost_row cost_rows[DCC_COST_ROWS];
};

/* Writer: the runner, but for `base` and `base_at` once the job has joined in band. Agreement on one version
 * at a time.
 *
 *   runner, PREPARE                          plugin, getCollInfo
 *   decision = UNDECIDED                     dseq = d            (seq_cst store)
 *   pending  = version << 8 | slot           h = hold_at         (seq_cst load)
 *   promise  = version << 2 | OPEN           if d < h: use `base`
 *   hold_at  = dseq + H     (seq_cst)        else, undecided: OPEN -> REFUSED, use `base`
 *   if dseq >= hold_at      (seq_cst)                         PROMISED -> wait
 *      or not OPEN -> PROMISED:              COMMIT at S: d < S ? base : pending
 *      again, larger H                       ABORT: base
 *   answer hold_at
 *
 * The two seq_cst pairs are Dekker's: either the plugin sees the hold, or the runner sees that it was
 * overtaken. `promise` makes sure that a rank waits only after its answer may have been given: whoever moves
 * it first decides whether there will be an answer; one that is about another version was never given.
 * COMMIT stores S in `decision`; once dseq >= S no call below S is in flight, and the runner folds: base =
 * pending, hold_at = none. Why it is right: docs/channel.md. */
struct dcc_runner_words {
    _Alignas(64) _Atomic uint64_t hold_at;
    _Atomic uint64_t base;     /* version << 8 | slot; 0 for none */
    _Atomic uint64_t base_at;  /* the S at which it came into force: what a rank that was not told asks for */
    _Atomic uint64_t pending;  /* likewise */
    _Atomic uint64_t decision; /* DCC_UNDECIDED, DCC_ABORT, or S */
    _Atomic uint64_t promise;  /* version << 2 | enum dcc_promise */
    _Atomic uint64_t heartbeat_ns;
    _Atomic uint64_t runner_pid;
    _Alignas(64) _Atomic uint64_t tail; /* ring position of the next record to read */
    _Atomic uint64_t term;              /* of the newest coordinator that was shown how this rank stands */
    _Atomic uint64_t duty; /* one window in 2^duty is profiled; more than DCC_MOST_DUTY counts as that */
    _Atomic uint64_t
        overhead_ppm; /* of the process's time, measured last; for who looks, not for the plugin */
};

/* Writer: the job, where it reports its steps; all 0 where it does not. The last report, and no queue:
 * whoever looks too rarely misses steps. `turn` is odd while the words below it are written. */
struct dcc_job_words {
    _Alignas(64) _Atomic uint64_t turn; /* reports * 2; even is a release, for the acquire in dcc_job() */
    _Atomic uint64_t step;
    _Atomic uint64_t iteration_ns;
    _Atomic uint64_t loss;   /* bits of a double; NaN where the job reports none */
    _Atomic uint64_t faults; /* how many so far; not covered by `turn` */
};

/* In-band agreement, for jobs whose script has a step boundary for us: see inband.c. Once `joined`, the
 * runner makes no agreement of its own any more, and the job writes `base` and `base_at`. */
struct dcc_in_band_words {
    _Alignas(64) _Atomic uint64_t joined; /* job: 1 */
    _Atomic uint64_t staged;              /* both, by compare-and-swap: version << 8 | slot, 0 for none */
    _Atomic uint64_t offered;             /* job: likewise; what the ranks are being asked about */
    /* job: 1: boundaries are not at the same call on all ranks; agreement is the runner's again */
    _Atomic uint64_t out_of_step;
};

struct dcc_segment {
    uint64_t magic;
    uint32_t abi;
    uint32_t record_bytes, ring_records, table_bytes;
    uint64_t segment_bytes;
    _Atomic uint32_t state; /* enum dcc_state; release when ready, pairs with the acquire in dcc_open() */
    struct dcc_identity identity;
    struct dcc_plugin_words plugin;
    struct dcc_runner_words runner;
    _Alignas(
        64) _Atomic uint64_t head; /* ring position of the next record to write; writers: NCCL's threads */
    _Alignas(64) struct dcc_table tables[DCC_SLOTS];
    _Alignas(64) struct dcc_record ring[DCC_RING_RECORDS];
    struct dcc_job_words job;
    struct dcc_in_band_words in_band;
};

/* Called wherever losing the processor is worst. The stress test makes it do so; elsewhere it is nothing. */
#ifdef DCC_STRESS
void dcc_interleave(void);
#else
static inline void dcc_interleave(void) {}
#endif

#endif
