#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "decide.h"
#include "log.h"
#include "names.h"
#include "release.h"

/* ---- memory of the GPU ---- */

/* Only its addresses are needed: nothing is ever read or written there. A page in front knows the size. */
EXPORT nccl_result ncclMemAlloc(void **pointer, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), all = (bytes + 2 * page - 1) / page * page;
    size_t *memory = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_READ | PROT_WRITE) != 0)
        return fail(NCCL_SYSTEM_ERROR, "no room for %zu bytes", bytes);
    *memory = all;
    *pointer = (char *)memory + page;
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclMemFree(void *pointer) {
    if (pointer) {
        size_t *memory = (size_t *)((char *)pointer - sysconf(_SC_PAGESIZE));
        munmap(memory, *memory);
    }
    return NCCL_SUCCESS;
}

/* ---- what users register (src/register/register.cc) ---- */

EXPORT nccl_result ncclCommRegister(struct comm *comm, void *buffer, size_t bytes, void **handle) {
    nccl_result result = comm_check(comm, "ncclCommRegister");
    if (result != NCCL_SUCCESS)
        return result;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)buffer & -page, end = ((uintptr_t)buffer + bytes + page - 1) & -page;
    for (struct registered *one = comm->registered; one; one = one->next)
        if (one->begin <= begin && end <= one->end) {
            one->users++;
            *handle = one;
            return NCCL_SUCCESS;
        }
    struct registered *one = calloc(1, sizeof(*one));
    if (one == NULL)
        abort();
    *one = (struct registered){.next = comm->registered, .begin = begin, .end = end, .users = 1};
    comm->registered = one;
    *handle = one;
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclCommDeregister(struct comm *comm, void *handle) {
    nccl_result result = comm_check(comm, "ncclCommDeregister");
    if (result != NCCL_SUCCESS || handle == NULL)
        return result;
    for (struct registered **at = &comm->registered; *at; at = &(*at)->next)
        if (*at == handle) {
            struct registered *one = *at;
            if (--one->users == 0) {
                *at = one->next;
                free(one);
            }
            return NCCL_SUCCESS;
        }
    return fail(NCCL_INVALID_USAGE, "Deregister: Could not find handle");
}

bool is_registered(const struct comm *comm, const void *buffer, size_t bytes) {
    uintptr_t begin = (uintptr_t)buffer;
    for (const struct registered *one = comm->registered; one; one = one->next)
        if (one->begin <= begin && begin + bytes <= one->end)
            return true;
    return false;
}

void forget_registered(struct comm *comm) {
    for (struct registered *one = comm->registered, *next; one; one = next) {
        next = one->next;
        free(one);
    }
    comm->registered = NULL;
}

/* ---- what it changes (src/register/coll_reg.cc, src/transport/nvls.cc) ---- */

enum { PEERS_CHANNELS = 16, PEERS_MOST_CHANNELS = 24, NVLS_UNITS = 8 };

/* Channels that NVLS needs between registered buffers, if one GPU in eight were a head. */
static int nvls_units(const struct comm *comm, enum nccl_func func) {
    const bool newest = comm->constants->compute_capability >= 100, alone = comm->nodes == 1;
    switch (func) {
    case FUNC_REDUCE_SCATTER:
        if (alone)
            return newest ? 6 : 5;
        return comm->constants->gb_per_s[func][ALGO_NVLS][PROTO_SIMPLE] > 400 ? 7 : 6;
    case FUNC_ALL_REDUCE:
        if (newest)
            return alone ? 8 : 7;
        return alone ? 4 : 6;
    default:
        return alone ? 4 : 6;
    }
}

static void apply_nvls(const struct comm *comm, struct coll_task *task, bool send, bool recv) {
    if (comm->shares_process || !(send || task->func == FUNC_ALL_GATHER) ||
        !(recv || task->func == FUNC_REDUCE_SCATTER))
        return;
    task->registered_nvls = true;
    task->max_channels =
        (int)divide_up((size_t)nvls_units(comm, task->func) * NVLS_UNITS, comm->constants->nvls_heads);
}

/* Whether it goes from buffer to buffer, without NCCL's own in between. */
static bool is_direct(const struct coll_task *task) {
    const bool in_place = task->send == task->recv;
    if (task->protocol != PROTO_SIMPLE)
        return false;
    if (task->algorithm == ALGO_RING)
        return task->func == FUNC_ALL_GATHER || task->func == FUNC_BROADCAST ||
               (task->func == FUNC_ALL_REDUCE && !in_place);
    return task->algorithm == ALGO_TREE && !in_place;
}

static void apply_direct(const struct comm *comm, struct coll_task *task) {
    const struct constants *constants = comm->constants;
    if (comm->nodes == 1 && constants->flags & CONSTANTS_DIRECT) {
        if (task->max_channels > PEERS_CHANNELS && task->max_channels <= PEERS_MOST_CHANNELS)
            task->max_channels = PEERS_CHANNELS;
    } else if (comm->max_local_ranks == 1 && constants->flags & CONSTANTS_GPU_NETWORK &&
               (task->func == FUNC_ALL_GATHER || task->func == FUNC_BROADCAST)) {
        task->max_channels = release()->channel_per_device ? (int)constants->net_devices : 1;
    }
}

static bool usable(const struct comm *comm, const void *buffer, size_t bytes) {
    return comm->planner.persistent || is_registered(comm, buffer, bytes);
}

void apply_registration(struct comm *comm, struct coll_task *task) {
    const size_t bytes = type_bytes(task->type) * task->count, all = bytes * (size_t)comm->ranks;
    const bool send = usable(comm, task->send, task->func == FUNC_REDUCE_SCATTER ? all : bytes);
    const bool recv = usable(comm, task->recv, task->func == FUNC_ALL_GATHER ? all : bytes);
    if (task->algorithm == ALGO_NVLS || task->algorithm == ALGO_NVLS_TREE)
        apply_nvls(comm, task, send, recv);
    else if (release()->registers_direct && is_direct(task) && send && recv)
        apply_direct(comm, task);
}
