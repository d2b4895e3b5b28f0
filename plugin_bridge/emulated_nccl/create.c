/* Communicators come into being: alone, by a split or by a shrink (src/init.cc). */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "group.h"
#include "log.h"
#include "profiler.h"
#include "proxy.h"
#include "release.h"
#include "rendezvous.h"
#include "schedule.h"

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* ---- ids ---- */

/* What is in a unique id: enough to tell communicators apart, and the same in every run of a program. */
struct identity {
    uint64_t id;
};

/* A program may create a communicator again. Its ranks count alike how often they have: `times` is the
 * calling rank's. */
static uint64_t next_id(const struct constants *constants, uint32_t number, uint32_t times[MAX_COMMS]) {
    uint64_t time = times[number]++;
    return time == 0 ? constants->id : mix(constants->id + time * 0x9e3779b97f4a7c15u);
}

EXPORT nccl_result ncclGetUniqueId(struct nccl_unique_id *unique) {
    static __thread uint32_t times[MAX_COMMS];
    uint32_t number = gpu_comm_announced();
    const struct constants *constants = constants_of(number);
    if (constants == NULL)
        return NCCL_SYSTEM_ERROR;
    struct identity identity = {.id = next_id(constants, number, times)};
    memset(unique, 0, sizeof(*unique));
    memcpy(unique->bytes, &identity, sizeof(identity));
    return NCCL_SUCCESS;
}

/* ---- the communicator ---- */

static nccl_result count_nodes(struct comm *comm) {
    comm->node_of = constants_nodes(comm->constants);
    comm->nodes = (int)comm->constants->nodes;
    comm->node = comm->node_of[comm->rank];
    int *on_node = calloc((size_t)comm->nodes, sizeof(*on_node));
    comm->local_to_rank = calloc((size_t)comm->ranks, sizeof(int));
    if (on_node == NULL || comm->local_to_rank == NULL)
        abort();
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank)
            comm->local_rank = comm->local_ranks;
        if (comm->node_of[r] == comm->node)
            comm->local_to_rank[comm->local_ranks++] = r;
        on_node[comm->node_of[r]]++;
    }
    comm->min_local_ranks = comm->max_local_ranks = comm->local_ranks;
    for (int n = 0; n < comm->nodes; n++) {
        comm->min_local_ranks = on_node[n] < comm->min_local_ranks ? on_node[n] : comm->min_local_ranks;
        comm->max_local_ranks = on_node[n] > comm->max_local_ranks ? on_node[n] : comm->max_local_ranks;
    }
    free(on_node);
    return comm->min_local_ranks > 0 ? NCCL_SUCCESS : fail(NCCL_SYSTEM_ERROR, "a node has no ranks");
}

static void *zeroed(size_t n, size_t bytes) {
    void *memory = calloc(n, bytes);
    if (memory == NULL)
        abort();
    return memory;
}

/* Ranks of this process, from what all have said: the first and those that come after it, latest first. */
static void find_ranks_here(struct comm *comm, const struct said *all) {
    for (int r = 0; r < comm->ranks; r++) {
        if (!all[r].present || all[r].pid != getpid())
            continue;
        if (comm->first_here == NULL)
            comm->first_here = all[r].comm;
        if (comm->here++ > 0 && comm->first_here == comm) {
            all[r].comm->next_here = comm->next_here;
            comm->next_here = all[r].comm;
        }
    }
    for (int r = 0; r < comm->ranks; r++)
        for (int other = r + 1; other < comm->ranks; other++)
            comm->shares_process |= all[r].present && all[other].present && all[r].pid == all[other].pid &&
                                    comm->node_of[r] == comm->node_of[other];
}

static nccl_result exchange(struct comm *comm, struct said *all) {
    const struct said mine = {.pid = getpid(), .comm = comm};
    return rendezvous_exchange(comm->rendezvous, &mine, all, &comm->aborted);
}

static nccl_result init_plugins(struct comm *comm) {
    profiler_init(&comm->profiler_context, comm->id, comm->name, comm->nodes, comm->ranks, comm->rank);
    struct nvl_domain_info domains = {comm->nodes, comm->min_local_ranks, comm->max_local_ranks};
    struct tuner_constants constants;
    constants_tuner(&constants);
    comm->tuner = tuner_load(&comm->loaded_tuner);
    if (comm->tuner == NULL)
        return NCCL_SUCCESS;
    nccl_result result = comm->tuner->init(&comm->tuner_context, comm->id, (size_t)comm->ranks,
                                           (size_t)comm->nodes, &domains, &constants);
    return result == NCCL_SUCCESS
               ? NCCL_SUCCESS
               : fail(result, "tuner init returned %d; NCCL fails the communicator", result);
}

/* With rank, ranks, id, number and constants set. */
static nccl_result set_up(struct comm *comm) {
    gpu_set_device(comm->device);
    nccl_result result = count_nodes(comm);
    if (result != NCCL_SUCCESS)
        return result;
    comm->present = (int)comm->constants->present;
    comm->rendezvous = rendezvous_open(comm->id, comm->ranks, comm->present, comm->rank);
    if (comm->rendezvous == NULL)
        return NCCL_SYSTEM_ERROR;
    struct said *all = zeroed((size_t)comm->ranks, sizeof(*all));
    result = exchange(comm, all);
    if (result == NCCL_SUCCESS) {
        find_ranks_here(comm, all);
        rendezvous_hide(comm->rendezvous);
        comm->rounds = zeroed((size_t)comm->ranks, sizeof(*comm->rounds));
        comm->peers = zeroed((size_t)comm->ranks, sizeof(*comm->peers));
        comm->started = zeroed(MAX_CHANNELS, sizeof(*comm->started));
        comm->completed = zeroed(MAX_CHANNELS, sizeof(*comm->completed));
        comm->launched = gpu_event_create();
        comm->proxy = proxy_new(comm);
        schedule_rounds(comm);
        result = init_plugins(comm);
    }
    /* Nobody launches anything before all are there. */
    if (result == NCCL_SUCCESS)
        result = exchange(comm, all);
    free(all);
    return result;
}

static nccl_result check_size(const struct comm *comm) {
    if (comm->ranks == (int)comm->constants->ranks && comm->rank >= 0 && comm->rank < comm->ranks)
        return NCCL_SUCCESS;
    return fail(NCCL_INVALID_ARGUMENT, "rank %d of %d in communicator %u, which has %u ranks", comm->rank,
                comm->ranks, comm->number, comm->constants->ranks);
}

static struct comm *new_comm(const struct nccl_config *config) {
    struct comm *comm = zeroed(1, sizeof(*comm));
    comm->blocking = config == NULL || config->blocking != 0;
    comm->name = config ? config->comm_name : NULL;
    comm->device = gpu_get_device();
    comm->number = gpu_comm_announced();
    comm->constants = constants_of(comm->number);
    comm->group_next = COMM_NOT_IN_GROUP;
    return comm;
}

/* ---- jobs ---- */

struct create_job {
    struct job base;
    struct comm *comm, **place; /* set when it is done */
    /* Of children. */
    struct comm *parent;
    int color, key;
    bool shrinks;
    bool *excluded; /* [ranks of the parent] */
};

static void release_job(struct job *base) {
    struct create_job *job = (struct create_job *)base;
    free(job->excluded);
    free(job);
}

static nccl_result run_init(struct job *base) {
    struct create_job *job = (struct create_job *)base;
    return set_up(job->comm);
}

/* The parent's ranks that go into the child, in its order: by key, then by rank in the parent. */
static nccl_result find_split(struct create_job *job) {
    struct comm *parent = job->parent, *comm = job->comm;
    struct said *all = zeroed((size_t)parent->ranks, sizeof(*all));
    const struct said mine = {.pid = getpid(), .color = job->color, .key = job->key};
    nccl_result result = rendezvous_exchange(parent->rendezvous, &mine, all, &parent->aborted);
    for (int r = 0; comm && result == NCCL_SUCCESS && r < parent->ranks; r++) {
        if (all[r].color != job->color)
            continue;
        comm->ranks++;
        comm->rank += all[r].key < job->key || (all[r].key == job->key && r < parent->rank);
    }
    free(all);
    return result;
}

static void find_shrunk(struct create_job *job) {
    for (int r = 0; r < job->parent->ranks; r++) {
        job->comm->rank += !job->excluded[r] && r < job->parent->rank;
        job->comm->ranks += !job->excluded[r];
    }
}

static nccl_result run_child(struct job *base) {
    struct create_job *job = (struct create_job *)base;
    struct comm *parent = job->parent, *comm = job->comm;
    nccl_result result = NCCL_SUCCESS;
    if (job->shrinks)
        find_shrunk(job);
    else
        result = find_split(job);
    if (comm == NULL || result != NCCL_SUCCESS)
        return result;
    result = check_size(comm);
    if (result == NCCL_SUCCESS)
        result = set_up(comm);
    parent->child_aborted = NULL;
    __atomic_store_n(job->place, comm, __ATOMIC_RELEASE);
    return result;
}

/* ---- calls ---- */

EXPORT nccl_result ncclCommInitRankConfig(struct comm **place, int ranks, struct nccl_unique_id unique,
                                          int rank, struct nccl_config *config) {
    struct identity identity;
    memcpy(&identity, unique.bytes, sizeof(identity));
    if (place == NULL || (config && config->magic != (unsigned)NCCL_CONFIG_MAGIC))
        return fail(NCCL_INVALID_ARGUMENT,
                    "ncclCommInitRankConfig: a pointer is NULL, or the configuration is not "
                    "initialised");
    group_start();
    struct comm *comm = new_comm(config);
    comm->id = identity.id;
    comm->rank = rank;
    comm->ranks = ranks;
    nccl_result result = comm->constants ? check_size(comm) : NCCL_SYSTEM_ERROR;
    if (result == NCCL_SUCCESS) {
        struct create_job *job = zeroed(1, sizeof(*job));
        job->base = (struct job){.run = run_init, .release = release_job, .comm = comm};
        job->comm = comm;
        *place = comm;
        result = group_add_job(&job->base);
    } else {
        free(comm);
        *place = NULL;
    }
    group_error(result);
    nccl_result ended = group_end(NULL);
    if (*place && !(*place)->blocking)
        return (*place)->async_result;
    return result != NCCL_SUCCESS ? result : ended;
}

static nccl_result create_child(struct comm *parent, struct comm **place, struct create_job *job,
                                struct nccl_config *config) {
    group_start();
    *place = NULL;
    nccl_result result = comm_ready(parent);
    if (result == NCCL_SUCCESS && job->color != NCCL_SPLIT_NO_COLOR) {
        static __thread uint32_t times[MAX_COMMS];
        job->comm = new_comm(config);
        job->comm->device = parent->device;
        parent->child_aborted = &job->comm->aborted;
        result = job->comm->constants ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
        if (result == NCCL_SUCCESS)
            job->comm->id = next_id(job->comm->constants, job->comm->number, times);
    }
    if (result == NCCL_SUCCESS && !job->shrinks && parent->present < parent->ranks)
        result = fail(NCCL_INVALID_USAGE, "only a communicator all of whose ranks are there can be split");
    if (result == NCCL_SUCCESS) {
        job->base = (struct job){.run = run_child, .release = release_job, .comm = parent};
        job->place = place;
        job->parent = parent;
        result = group_add_job(&job->base);
    } else {
        free(job->comm);
        release_job(&job->base);
    }
    group_error(result);
    nccl_result ended = group_end(NULL);
    return result != NCCL_SUCCESS ? result : ended;
}

EXPORT nccl_result ncclCommSplit(struct comm *parent, int color, int key, struct comm **place,
                                 struct nccl_config *config) {
    nccl_result result = comm_check(parent, "ncclCommSplit");
    if (result != NCCL_SUCCESS)
        return result;
    struct create_job *job = zeroed(1, sizeof(*job));
    job->color = color;
    job->key = key;
    return create_child(parent, place, job, config);
}

EXPORT nccl_result ncclCommShrink(struct comm *parent, int *excluded, int n, struct comm **place,
                                  struct nccl_config *config, int flags) {
    nccl_result result = comm_check(parent, "ncclCommShrink");
    if (result != NCCL_SUCCESS)
        return result;
    if (flags != 0)
        return fail(NCCL_INVALID_ARGUMENT, "ncclCommShrink: only NCCL_SHRINK_DEFAULT is emulated");
    struct create_job *job = zeroed(1, sizeof(*job));
    job->shrinks = true;
    job->excluded = zeroed((size_t)parent->ranks, sizeof(bool));
    for (int i = 0; i < n; i++)
        if (excluded[i] >= 0 && excluded[i] < parent->ranks)
            job->excluded[excluded[i]] = true;
    if (n < 1 || job->excluded[parent->rank]) {
        release_job(&job->base);
        return fail(NCCL_INVALID_ARGUMENT,
                    "ncclCommShrink is for ranks that stay, where others are left out");
    }
    return create_child(parent, place, job, config);
}

EXPORT nccl_result ncclGetVersion(int *version) {
    *version = release_number();
    return NCCL_SUCCESS;
}
