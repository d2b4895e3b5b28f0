/*
 * The job page: one small file that every process of an emulated job maps, and Python too.
 *
 * Every shared word stands alone, so no field needs another one to have been seen first, with one exception:
 * `hold`. Python raises it to read a stable picture; see job_admit. A page is created by Python and lives as
 * long as the job.
 *
 * Who writes what:
 *   Python     credit, hold, stop_at, switches, n_processes
 *   process i  processes[i]
 *   anyone     abort_by, once, by compare and swap
 */
#ifndef DYNAMICCL_HOST_JOB_H
#define DYNAMICCL_HOST_JOB_H

#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

#define JOB_MAGIC "DCCLJOB1"
enum { JOB_VERSION = 1, MAX_SWITCHES = 64, CACHE_LINE = 64 };

enum process_state {
    PROCESS_ABSENT = 0,
    PROCESS_INIT = 1,
    PROCESS_RUNNING = 2,
    PROCESS_WAITING = 3, /* for credit, for the window or for a hold */
    PROCESS_FINISHED = 4,
    PROCESS_FAILED = 5,
};

struct job_process {
    alignas(CACHE_LINE) _Atomic uint64_t begun; /* collectives begun */
    _Atomic uint64_t intent;                    /* begun, or one more while asking to begin */
    _Atomic int32_t pid;
    _Atomic uint32_t state;
};

struct job_page {
    char magic[8];
    uint32_t version;
    uint32_t n_processes;
    uint64_t page_bytes;
    alignas(CACHE_LINE) _Atomic uint64_t credit;   /* collective i may begin once i < credit */
    alignas(CACHE_LINE) _Atomic uint64_t stop_at;  /* collectives from here on never begin */
    alignas(CACHE_LINE) _Atomic uint64_t hold;     /* while not 0 nobody begins anything */
    alignas(CACHE_LINE) _Atomic uint64_t abort_by; /* 1 + index of the process that failed or died; 0: none */
    alignas(
        CACHE_LINE) _Atomic uint64_t switches[MAX_SWITCHES]; /* collective << 8 | phase, ascending; 0: none */
    struct job_process processes[];
};
_Static_assert(sizeof(struct job_process) == 64, "mirrored in emulation.py");
_Static_assert(sizeof(struct job_page) == 832, "mirrored in emulation.py");

enum admission {
    ADMIT_BEGIN,     /* go ahead */
    ADMIT_STOP,      /* nothing from this collective on: finish */
    ADMIT_PEER_LEFT, /* a peer that is needed finished early and in good order: finish */
    ADMIT_ABORT,     /* a peer died: *peer says which */
    ADMIT_SIGNAL,    /* this process was asked to end */
};

struct job {
    struct job_page *page;
    uint32_t process;
    uint64_t window;
    uint32_t phase;     /* of the collective admitted last */
    uint32_t n_applied; /* switches that lie behind */
};

int job_open(struct job *job, const char *path, uint32_t process, uint64_t window);
void job_close(struct job *job);
void job_set_state(struct job *job, enum process_state state);

/* Called before the process sleeps for long, so that its log can be flushed; see job_admit. */
typedef void (*idle_fn)(void *argument);

/*
 * Waits until collective `index` may begin and sets job->phase for it. Only the process's main thread calls.
 *
 * A process announces `intent` = index + 1, then reads `hold` (both seq_cst); Python stores `hold`, then
 * reads every `intent`. Whatever Python's largest `intent` is, no process begins that index or a later one
 * before `hold` falls, so a stop or a switch that Python writes for that index while it holds is seen by all:
 * the release store that lowers `hold` pairs with the acquire load here.
 */
enum admission job_admit(struct job *job, uint64_t index, idle_fn idle, void *argument, uint32_t *peer);

/* Records that this process failed; true where it was the first of the job to say so. */
int job_fail(struct job *job);
uint32_t job_aborted_by(const struct job *job); /* process index, or UINT32_MAX */

/* Set by the signal handler for SIGTERM and SIGINT. */
extern volatile sig_atomic_t job_signalled;

#endif
