#define _GNU_SOURCE
/* A communicator's life: the two halves of the plugin find each other, share one channel, and go. */
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "govern.h"
#include "segment.h"
#include "static_table.h"

#define MOST_LOOKS 2000 /* a millisecond each */

/* Start-up and shut-down only. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct comm *comms;    /* newest first */
static struct comm *recycled; /* see comm.h on memory */

static bool user_chose_algorithm(void) {
    const char *algo = getenv("NCCL_ALGO"), *proto = getenv("NCCL_PROTO");
    return (algo && *algo) || (proto && *proto);
}

#define LOG(comm, level, ...)                                                                                \
    do {                                                                                                     \
        if ((comm)->log)                                                                                     \
            (comm)->log(level, NCCL_LOG_INIT | NCCL_LOG_TUNING, __FILE__, __LINE__,                          \
                        "TUNER/DynamICCL: " __VA_ARGS__);                                                    \
    } while (0)

static struct comm *blank(void) {
    struct comm *comm = recycled;
    if (comm) {
        recycled = comm->next;
        struct slot *slots = comm->slots;
        uint64_t next_slot = comm->next_slot;
        struct dcc_table *fixed = comm->fixed;
        memset((void *)comm, 0, sizeof *comm);
        comm->slots = slots;
        comm->fixed = fixed;
        comm->next_slot = next_slot;
        atomic_store_explicit(&comm->retired, next_slot, memory_order_relaxed);
        return comm;
    }
    comm = aligned_alloc(_Alignof(struct comm), sizeof *comm);
    struct slot *slots = aligned_alloc(_Alignof(struct slot), COMM_SLOTS * sizeof *slots);
    if (!comm || !slots) {
        free(comm);
        free(slots);
        return NULL;
    }
    memset((void *)comm, 0, sizeof *comm);
    memset((void *)slots, 0, COMM_SLOTS * sizeof *slots);
    for (unsigned i = 0; i < COMM_SLOTS; i++)
        slots[i].comm = comm;
    comm->slots = slots;
    return comm;
}

/* A forked child has the communicators' memory and none of their threads. It must neither call into the
 * parent's segments nor remove them. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL); /* whoever held it is not here */
    for (struct comm *comm = comms; comm; comm = comm->next) {
        if (comm->seg)
            close(comm->lock_fd);
        comm->seg = NULL;
    }
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

/* Once per process and not through NCCL's log alone, which says nothing unless NCCL_DEBUG is set. */
static void complain(const char *what) {
    static bool complained;
    if (!complained)
        fprintf(stderr, "TUNER/DynamICCL: %s\n", what);
    complained = true;
}

static const char *static_path(void) {
    const char *path = getenv("DYNAMICCL_TABLE");
    return path && *path ? path : NULL;
}

static struct comm *create(nccl_logger log) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    struct comm *comm = blank();
    if (!comm)
        return NULL;
    comm->log = log;
    comm->creator = pthread_self();
    comm->no_table_cause = DCC_NO_TABLE;
    comm->joining = true; /* until a profiler says what is profiled */
    atomic_store_explicit(&comm->profiling, true, memory_order_relaxed);
    comm->user_env = user_chose_algorithm();
    char error[512];
    comm->is_static = static_path() != NULL;
    if (!comm->is_static)
        comm->seg = segment_create(comm->path, &comm->lock_fd, error);
    if (comm->seg) {
        comm->seg->identity.user_env = comm->user_env;
    } else if (!comm->is_static) {
        complain(error);
        LOG(comm, NCCL_LOG_INFO, "%s", error);
    }
    comm->next = comms;
    comms = comm;
    return comm;
}

static void ready(struct comm *comm) {
    if (comm->seg) /* release pairs with the acquire in dcc_open() */
        atomic_store_explicit(&comm->seg->state, DCC_READY, memory_order_release);
}

struct comm *comm_attach_profiler(unsigned abi, enum children children, uint64_t id, const char *name,
                                  int nodes, int ranks, int rank, nccl_logger log) {
    pthread_mutex_lock(&lock);
    struct comm *comm = create(log);
    if (comm) {
        comm->has_profiler = true;
        comm->users = 1;
        comm->children = children;
        comm->id = id;
        snprintf(comm->name, sizeof comm->name, "%s", name ? name : "");
        if (comm->seg) {
            struct dcc_identity *identity = &comm->seg->identity;
            atomic_store(&identity->profiler_abi, abi);
            if (ranks > 0) {
                atomic_store(&identity->comm_id, id);
                atomic_store(&identity->ranks, (uint32_t)ranks);
                atomic_store(&identity->nodes, (uint32_t)nodes);
                atomic_store(&identity->rank, (uint32_t)rank);
                atomic_store(&comm->rank_told, true);
                memcpy(identity->comm_name, comm->name, sizeof identity->comm_name);
            }
        }
        ready(comm);
    }
    pthread_mutex_unlock(&lock);
    return comm;
}

/* The block of DYNAMICCL_TABLE that is about this communicator. A table with a mistake anywhere is not used
 * at all: half of one could be another half on another rank. */
static void load_table(struct comm *comm, size_t ranks, size_t nodes) {
    char error[STATIC_ERROR_BYTES];
    const char *path = static_path(), *job = getenv("DYNAMICCL_JOB_ID");
    if (!comm->fixed)
        comm->fixed = malloc(sizeof *comm->fixed);
    struct static_comm wanted = {ranks, nodes, comm->name};
    enum static_result result = STATIC_REFUSED;
    if (!path || !comm->fixed)
        snprintf(error, sizeof error, "DYNAMICCL_TABLE: %s; NCCL's own choice is used",
                 path ? "no memory" : "unset since the communicator began");
    else
        result = static_table_read(path, &wanted, comm->fixed, error);
    if (result == STATIC_REFUSED) {
        complain(error);
        LOG(comm, NCCL_LOG_WARN, "%s", error);
        return;
    }
    const char *name = *comm->name ? comm->name : "-";
    if (result == STATIC_NO_BLOCK) {
        LOG(comm, NCCL_LOG_INFO,
            "static table %s has no block for %zu ranks on %zu nodes, name %s: NCCL's own choice", path,
            ranks, nodes, name);
    } else {
        comm->table = comm->fixed;
        LOG(comm, NCCL_LOG_INFO, "static table %s, digest %016llx, %zu ranks on %zu nodes, name %s", path,
            (unsigned long long)comm->fixed->digest, ranks, nodes, name);
    }
    if (job && *job)
        LOG(comm, NCCL_LOG_INFO, "DYNAMICCL_TABLE is set and wins over DYNAMICCL_JOB_ID=%.64s: no channel",
            job);
}

/* NCCL initialises the profiler and the tuner of a communicator one after the other on one thread. Before
 * tuner v5 and profiler v4 that is all there is to join them by; and the id alone does not do either, for all
 * ranks of a communicator that live in one process share it. */
static struct comm *find_for_tuner(uint64_t id) {
    struct comm *by_id = NULL;
    unsigned same_id = 0;
    for (struct comm *c = comms; c; c = c->next) {
        if (c->has_tuner)
            continue;
        if (pthread_equal(c->creator, pthread_self()) && (id == 0 || c->id == 0 || c->id == id))
            return c;
        if (id && c->id == id) {
            by_id = c;
            same_id++;
        }
    }
    return same_id == 1 ? by_id : NULL;
}

struct comm *comm_attach_tuner(unsigned abi, uint64_t id, size_t ranks, size_t nodes, nccl_logger log) {
    pthread_mutex_lock(&lock);
    struct comm *comm = find_for_tuner(id);
    if (!comm && (comm = create(log)))
        comm->id = id;
    if (comm) {
        comm->users++;
        comm->has_tuner = true;
        comm->log = log;
        comm->several_nodes = nodes > 1;
        if (comm->seg) {
            struct dcc_identity *identity = &comm->seg->identity;
            atomic_store(&identity->ranks, (uint32_t)ranks);
            atomic_store(&identity->nodes, (uint32_t)nodes);
            if (id)
                atomic_store(&identity->comm_id, id);
            atomic_store(&identity->tuner_abi, abi);
            LOG(comm, NCCL_LOG_INFO, "channel %s, tuner v%u, profiler v%u, %zu ranks on %zu nodes",
                comm->path, abi, atomic_load(&identity->profiler_abi), ranks, nodes);
            if (!comm->has_profiler)
                LOG(comm, NCCL_LOG_WARN,
                    "NCCL loaded the tuner but not the profiler, so nothing can be measured; set "
                    "NCCL_PROFILER_PLUGIN as `dynamiccl plugin env` prints it");
        }
        if (comm->is_static)
            load_table(comm, ranks, nodes);
        if (comm->user_env)
            LOG(comm, NCCL_LOG_INFO, "NCCL_ALGO or NCCL_PROTO is set and wins: %s",
                comm->is_static ? "the static table is not used" : "measuring only");
        ready(comm);
    }
    pthread_mutex_unlock(&lock);
    return comm;
}

/* Whether nobody is at a hold any more. NCCL ends a communicator under a call only when it is aborted. */
static bool no_one_waits(struct comm *comm) {
    atomic_store_explicit(&comm->closing, 1, memory_order_release);
    for (int i = 0; i < MOST_LOOKS; i++) {
        /* Acquire pairs with the release in comm_decide(): that call does not touch the segment any more. */
        if (!atomic_load_explicit(&comm->waiting, memory_order_acquire))
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return false;
}

/* The last of tuner and profiler closes the channel. */
static void leave(struct comm *comm) {
    pthread_mutex_lock(&lock);
    if (--comm->users == 0) {
        for (struct comm **p = &comms; *p; p = &(*p)->next)
            if (*p == comm) {
                *p = comm->next;
                break;
            }
        if (!comm->seg || no_one_waits(comm)) {
            if (comm->seg)
                segment_remove(comm->seg, comm->path, comm->lock_fd);
            comm->seg = NULL;
            comm->next = recycled;
            recycled = comm;
        } else { /* its memory stays for good: a thread is in it */
            segment_close(comm->seg, comm->path, comm->lock_fd);
        }
    }
    pthread_mutex_unlock(&lock);
}

void comm_detach_profiler(struct comm *comm) {
    govern_end(comm);
    comm_end_measuring(comm);
    leave(comm);
}

void comm_detach_tuner(struct comm *comm) {
    leave(comm);
}
