#include "comms.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "meeting.h"

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct gpu_comm *comms;

void gpu_comm_release(struct gpu_comm *comm) {
    pthread_mutex_lock(&registry);
    bool last = comm && --comm->refs == 0;
    pthread_mutex_unlock(&registry);
    if (!last)
        return;
    meeting_leave(comm->meeting);
    free((void *)comm->info.nodes);
    free(comm->sent);
    free(comm->received);
    free(comm);
}

static __thread uint32_t announced;

void gpu_comm_announce(uint32_t number) {
    announced = number;
}

uint32_t gpu_comm_announced(void) {
    return announced;
}

void gpu_comm_register(const void *key, const struct gpu_comm_info *info) {
    struct gpu_comm *comm = calloc(1, sizeof(*comm));
    uint8_t *nodes = calloc((size_t)info->ranks, 1);
    if (comm == NULL || nodes == NULL)
        abort();
    /* The stream that the first kernel comes on may be older than the files are open. */
    gpu_default_stream(gpu_get_device());
    if (info->nodes)
        memcpy(nodes, info->nodes, (size_t)info->ranks);
    comm->key = key;
    comm->refs = 1;
    comm->info = *info;
    comm->info.nodes = nodes;
    comm->sent = calloc((size_t)info->ranks, sizeof(uint64_t));
    comm->received = calloc((size_t)info->ranks, sizeof(uint64_t));
    comm->meeting = info->present > 1 ? meeting_join(info->id, (uint32_t)info->present) : NULL;
    pthread_mutex_lock(&registry);
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&registry);
}

void gpu_comm_forget(const void *key) {
    pthread_mutex_lock(&registry);
    struct gpu_comm *found = NULL, **at = NULL;
    /* The first of that name: its address may be another communicator's by now. */
    for (struct gpu_comm **p = &comms; *p; p = &(*p)->next)
        if ((*p)->key == key)
            at = p;
    if (at) {
        found = *at;
        *at = found->next;
    }
    pthread_mutex_unlock(&registry);
    gpu_comm_release(found);
}

struct gpu_comm *gpu_comm_find(const void *key) {
    pthread_mutex_lock(&registry);
    struct gpu_comm *comm = comms;
    while (comm && comm->key != key)
        comm = comm->next;
    if (comm)
        comm->refs++;
    pthread_mutex_unlock(&registry);
    return comm;
}
