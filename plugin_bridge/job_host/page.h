/* The job page: one small file that every process of a job maps, and Python too.
 *
 * Every shared word stands alone, so no field needs another one to have been seen first, with two exceptions:
 * `hold`, which Python raises to read a stable picture (see page_admit), and the ids. A page is created by
 * Python and lives as long as the job.
 *
 * Who writes what:
 *   Python           credit, hold, stop_at, switches, the counts
 *   rank i           ranks[i]
 *   the first of one ids[communicator]
 *   anyone           abort_by, once, by compare and swap */
#ifndef DYNAMICCL_JOB_PAGE_H
#define DYNAMICCL_JOB_PAGE_H

#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

#define PAGE_MAGIC "DCCLJOB2"
enum { PAGE_VERSION = 2, MAX_SWITCHES = 64, CACHE_LINE = 64 };

enum rank_state {
    RANK_ABSENT = 0,
    RANK_INIT = 1,
    RANK_RUNNING = 2,
    RANK_WAITING = 3, /* for credit, for the window or for a hold */
    RANK_FINISHED = 4,
    RANK_FAILED = 5,
};

struct page_rank {
    alignas(CACHE_LINE) _Atomic uint64_t begun; /* steps begun */
    _Atomic uint64_t intent;                    /* begun, or one more while asking to begin */
    _Atomic int32_t pid;
    _Atomic uint32_t state;
    _Atomic uint64_t host_ns;      /* virtual time at the end of the last step */
    _Atomic uint64_t iteration_ns; /* virtual time that it took */
    _Atomic int32_t thread;        /* that runs the rank, as the kernel numbers them */
};

/* How the ranks of a communicator get its unique id. */
struct page_id {
    _Atomic uint64_t
        turn; /* times that it was published; release, pairs with the acquire in page_await_id() */
    char id[128];
    uint64_t reserved[7];
};

struct page {
    char magic[8];
    uint32_t version;
    uint32_t n_ranks, n_comms;
    uint64_t page_bytes;
    alignas(CACHE_LINE) _Atomic uint64_t credit;   /* step i may begin once i < credit */
    alignas(CACHE_LINE) _Atomic uint64_t stop_at;  /* steps from here on never begin */
    alignas(CACHE_LINE) _Atomic uint64_t hold;     /* while not 0 nobody begins anything */
    alignas(CACHE_LINE) _Atomic uint64_t abort_by; /* 1 + the rank that failed or died; 0: none */
    alignas(CACHE_LINE) _Atomic uint64_t switches[MAX_SWITCHES]; /* step << 8 | phase, ascending; 0: none */
    struct page_rank ranks[]; /* [n_ranks], then struct page_id [n_comms] */
};
_Static_assert(sizeof(struct page_rank) == 64, "mirrored in nccl_job.py");
_Static_assert(sizeof(struct page_id) == 192, "mirrored in nccl_job.py");
_Static_assert(sizeof(struct page) == 832, "mirrored in nccl_job.py");

enum admission {
    ADMIT_BEGIN,     /* go ahead */
    ADMIT_STOP,      /* nothing from this step on: finish */
    ADMIT_PEER_LEFT, /* a peer that is needed finished early and in good order: finish */
    ADMIT_ABORT,     /* a peer died: *peer says which */
    ADMIT_SIGNAL,    /* asked to end */
};

/* One rank's view of the page; a thread's own. */
struct place {
    struct page *page;
    uint32_t rank;
    uint64_t window;
    uint32_t phase;     /* of the step admitted last */
    uint32_t n_applied; /* switches that lie behind */
};

/* Maps the page once per process; prints why and returns NULL where it cannot be used. */
struct page *page_open(const char *path, uint32_t n_ranks, uint32_t n_comms);
void page_take(struct place *place, struct page *page, uint32_t rank, uint64_t window);
void page_set_state(struct place *place, enum rank_state state);

void page_publish_id(struct page *page, uint32_t comm, const char *id);
/* Waits for the id that is published for the `turn`-th time; -1 where the job was aborted meanwhile. */
int page_await_id(struct place *place, uint32_t comm, uint64_t turn, char *id);

/* Waits until step `index` may begin and sets place->phase for it.
 *
 * A rank announces `intent` = index + 1, then reads `hold` (both seq_cst); Python stores `hold`, then reads
 * every `intent`. Whatever Python's largest `intent` is, no rank begins that step or a later one before
 * `hold` falls, so a stop or a switch that Python writes for that step while it holds is seen by all: the
 * release store that lowers `hold` pairs with the acquire load here. */
enum admission page_admit(struct place *place, uint64_t index, uint32_t *peer);

/* Waits until no rank runs any more: NCCL's proxies may still need what other processes of the node have. */
void page_await_end(struct place *place);

/* Records that this rank failed; true where it was the first of the job to say so. */
int page_fail(struct place *place);
/* Looks whether any rank but `first` to `last` failed or died, and records that. */
void page_look(struct page *page, uint32_t first, uint32_t last);
uint32_t page_aborted_by(const struct page *page); /* rank, or UINT32_MAX */

/* Set by the signal handler for SIGTERM and SIGINT. */
extern volatile sig_atomic_t job_signalled;

#endif
