/*
 * One NCCL group from the API call to the hand-over to the proxy thread, with NCCL's order of plugin calls:
 *
 *   API call    v5 on: GroupApi start, record 23, then per collective CollApi start and stop
 *   group end   v5 on: GroupApi record 24
 *               getCollInfo, then getChunkSize per part
 *               v5 on: KernelLaunch start, stop
 *               Group start, Coll starts, hand-over of the children, Coll stops, Group stop
 *               v5 on: GroupApi stop
 *
 * The mask is read once: at the API call from v3 on, at Group start before that. From v5 on a Coll's parent
 * is the CollApi event, which has been stopped by then; before, it is the Group event, and a NULL Group
 * handle suppresses the Coll events.
 */
#define _GNU_SOURCE
#include <math.h>
#include <string.h>

#include "clock.h"
#include "rank.h"

enum {
    COLL_BITS = EVENT_COLL | EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL_CH | EVENT_NET_PLUGIN,
    P2P_BITS = EVENT_P2P | EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL_CH | EVENT_NET_PLUGIN,
    CE_BITS = EVENT_CE_COLL | EVENT_CE_SYNC | EVENT_CE_BATCH,
    GROUP_BITS = EVENT_GROUP | COLL_BITS | EVENT_P2P,
    COLL_BITS_BEFORE_V3 = EVENT_COLL | EVENT_PROXY_OP | EVENT_PROXY_STEP,
    GROUP_BITS_BEFORE_V3 = COLL_BITS_BEFORE_V3 | EVENT_P2P,
    GIVE_WAY_NS = 50000,
};

static int group_bits(int abi) {
    return abi <= 2 ? GROUP_BITS_BEFORE_V3 : GROUP_BITS;
}

static int coll_bits(int abi) {
    return abi <= 2 ? COLL_BITS_BEFORE_V3 : COLL_BITS;
}

/* The priced time in ns, or 0 with a message where the program has none. */
static uint64_t price(const struct host *host, const struct communicator *comm, uint32_t phase,
                      uint32_t key_index, const struct decision *decision) {
    const struct program *program = &host->program;
    const struct program_key *key = &program->keys[key_index];
    int pair = decision->untouched ? 0 : 1 + N_PROTOCOLS * decision->algorithm + decision->protocol;
    int position = channel_index(decision->requested);
    double time_us = NAN, sigma = NAN;
    if (position >= 0) {
        size_t cell = program_cell(program, phase, key_index, pair, position);
        time_us = program->time_us[cell];
        sigma = program->sigma[cell];
    }
    if (!isfinite(time_us) || !isfinite(sigma) || time_us <= 0) {
        host_error("no measurement for phase %u, key %u (%s, %llu bytes), pair %d (%s/%s%s), %d channels",
                   phase, key_index, func_name((int)key->collective), (unsigned long long)key->bytes, pair,
                   algorithm_name(decision->algorithm), protocol_name(decision->protocol),
                   pair == 0 ? ", NCCL's own" : "", decision->requested);
        return 0;
    }
    double z1 = noise(comm->noise_stream, comm->calls);
    double z2 = noise(comm->jitter_stream, comm->calls);
    double ns = 1e3 * time_us * exp(sigma * z1 + program->header->rank_jitter * z2);
    return ns < 1 ? 1 : (uint64_t)llround(ns);
}

static void *group_api_start(struct host *host, struct communicator *comm, int mask) {
    if (host->profiler.abi < 5 || !(mask & (GROUP_BITS | EVENT_GROUP_API | EVENT_P2P_API | EVENT_COLL_API |
                                            EVENT_KERNEL_LAUNCH | CE_BITS)))
        return NULL;
    struct event event = {.type = EVENT_GROUP_API, .group_depth = 1};
    void *handle = profiler_start(&host->profiler, comm->profiler_context, &event);
    if (handle != NULL)
        profiler_record(&host->profiler, handle, STATE_GROUP_START_API_STOP, 0);
    return handle;
}

/*
 * Starts and stops a CollApi event and returns what the Coll will name as its parent. No release so far
 * forgets the handle after its stop: with the API events off, the old one is stopped again for every
 * collective.
 */
static void *coll_api(struct host *host, struct communicator *comm, int mask, const struct event *coll,
                      void *group_api) {
    if (host->profiler.abi < 5)
        return NULL;
    if (mask & (COLL_BITS | EVENT_COLL_API | CE_BITS)) {
        struct event event = {.type = EVENT_COLL_API, .parent = group_api};
        event.func = coll->func;
        event.count = coll->count;
        event.datatype = coll->datatype;
        host->coll_api = profiler_start(&host->profiler, comm->profiler_context, &event);
    }
    if (host->coll_api != NULL)
        profiler_stop(&host->profiler, host->coll_api);
    return host->coll_api;
}

static void kernel_launch(struct host *host, struct communicator *comm, int mask, void *group_api) {
    if (host->profiler.abi < 5 || !(mask & EVENT_KERNEL_LAUNCH))
        return;
    struct event event = {.type = EVENT_KERNEL_LAUNCH, .parent = group_api};
    void *handle = profiler_start(&host->profiler, comm->profiler_context, &event);
    if (handle != NULL)
        profiler_stop(&host->profiler, handle);
}

static void *group_start(struct host *host, struct communicator *comm, int mask) {
    if (!(mask & group_bits(host->profiler.abi)))
        return NULL;
    struct event event = {.type = EVENT_GROUP};
    return profiler_start(&host->profiler, comm->profiler_context, &event);
}

/* Enqueued now, on a stream that is busy until gpu_free; the origin is arbitrary, as globaltimer's is. */
static uint64_t gpu_start(struct host *host, struct communicator *comm, uint64_t exec_ns) {
    uint64_t now = host_ns() + 1700000000000000000u + (uint64_t)host->options->rank * 777u;
    uint64_t start = comm->gpu_free > now ? comm->gpu_free : now;
    comm->gpu_free = start + exec_ns;
    return start;
}

static void describe(const struct host *host, const struct communicator *comm, const struct program_key *key,
                     struct event *event) {
    const struct program_header *header = host->program.header;
    *event = (struct event){
        .type = EVENT_COLL,
        .rank = host->options->rank,
        .func = (int)key->collective,
        .datatype = task_datatype(key),
        .count = task_count(header, key),
    };
    if (!host->options->anonymous) {
        event->comm_name = comm->name;
        event->comm_id = comm->id;
    }
}

static void settle_event(const struct host *host, const struct program_key *key,
                         const struct decision *decision, struct event *event) {
    const int a = decision->algorithm, p = decision->protocol;
    event->algorithm = a;
    event->protocol = p;
    event->n_warps = key->own_warps[a][p];
    event->n_max_channels = decision->requested ? decision->requested : key->own_channels[a][p];
    event->is_collnet = is_collnet(host->program.header, a);
    event->traffic_bytes = event->count * (event->datatype == TYPE_INT8 ? 1 : 4) *
                           traffic_per_byte(host->program.header, (int)key->collective) *
                           (p == PROTO_LL ? 4 : 1);
}

/* Group start to Group stop: the part that NCCL runs once the kernel is launched. */
static void host_task(struct host *host, struct communicator *comm, int mask, const struct decision *decision,
                      struct event *coll, void *const *apis, uint64_t exec_ns) {
    const struct profiler_plugin *profiler = &host->profiler;
    const struct plan *plan = &decision->plan;
    const uint64_t salt = mix64(host->options->seed ^ mix64(comm->id + comm->calls));
    void *handles[MAX_TASKS] = {NULL};
    void *group = group_start(host, comm, mask);
    int enabled = (mask & coll_bits(profiler->abi)) && (group != NULL || profiler->abi >= 5);

    for (int i = 0; i < plan->n_tasks; i++) {
        coll->parent = profiler->abi >= 5 ? apis[i] : group;
        coll->parent_group = group;
        coll->seq_number = comm->sequence[coll->func];
        /* NCCL counts a CollNet collective's channels nowhere. */
        coll->n_channels = coll->is_collnet ? 0 : plan->tasks[i].n_channels;
        uint64_t host_start = host_ns();
        if (enabled)
            handles[i] = profiler_start(profiler, comm->profiler_context, coll);
        if (enabled || profiler->abi >= 3)
            comm->sequence[coll->func]++;

        const uint64_t start = gpu_start(host, comm, exec_ns);
        if (!(mask & (EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL_CH | EVENT_NET_PLUGIN)))
            continue;
        int lo = plan->tasks[i].channel_lo;
        int room = (int)host->program.header->max_channels - lo - plan->tasks[i].n_channels;
        /* Other members of a larger group would push this one up. */
        if (room > 0 && salt % 4 == 0)
            lo += 1 + (int)((salt >> 8) % (uint64_t)room);
        struct proxy_work work = {
            .context = comm->profiler_context,
            .parent = handles[i],
            .mask = mask,
            .rank = host->options->rank,
            .peer = (host->options->rank + 1) % (int)host->program.header->n_ranks,
            .channel_lo = lo,
            .n_channels = plan->tasks[i].n_channels,
            .chunk_bytes = (int)decision->chunk_bytes,
            .bad_timers_permille = host->options->bad_timers_permille,
            .foreign = host->options->pxn_every != 0 && comm->calls % host->options->pxn_every == 0,
            .gpu_start = start,
            .gpu_stop = start + exec_ns,
            .host_start = host_start,
            .salt = salt + (uint64_t)i,
        };
        proxy_post(&host->proxy, &work);
    }
    if (salt >> 60 < 2)
        proxy_give_way(&host->proxy, GIVE_WAY_NS);

    for (int i = 0; i < plan->n_tasks; i++)
        if (handles[i] != NULL)
            profiler_stop(profiler, handles[i]);
    if (group != NULL)
        profiler_stop(profiler, group);
    /* Host time carries the cost there, so nothing may queue up behind. */
    if (profiler->abi >= 1 && profiler->abi <= 3)
        proxy_drain(&host->proxy);
}

int launch_collective(struct host *host, struct communicator *comm, uint32_t key_index, uint32_t phase,
                      int n_tasks, struct used *used) {
    const struct program_key *key = &host->program.keys[key_index];
    struct decision decision;
    struct event coll;
    void *apis[MAX_TASKS] = {NULL};
    int mask = profiler_mask(&host->profiler);
    describe(host, comm, key, &coll);
    void *group_api = group_api_start(host, comm, mask);
    for (int i = 0; i < n_tasks; i++)
        apis[i] = coll_api(host, comm, mask, &coll, group_api);
    if (group_api != NULL)
        profiler_record(&host->profiler, group_api, STATE_GROUP_END_API_START, 0);

    if (tuner_decide(&host->tuner, comm->tuner_context, host->program.header, key, n_tasks, &decision) != 0)
        return -1;
    uint64_t exec_ns = price(host, comm, phase, key_index, &decision);
    if (exec_ns == 0)
        return -1;
    settle_event(host, key, &decision, &coll);
    kernel_launch(host, comm, mask, group_api);
    if (host->profiler.abi <= 2)
        mask = profiler_mask(&host->profiler);
    host_task(host, comm, mask, &decision, &coll, apis, exec_ns);
    if (group_api != NULL)
        profiler_stop(&host->profiler, group_api);

    *used = (struct used){
        .call = comm->calls,
        .exec_ns = exec_ns,
        .key = key_index,
        .chunk_bytes = decision.chunk_bytes,
        .phase = (uint8_t)phase,
        .untouched = (uint8_t)decision.untouched,
        .algorithm = (uint8_t)decision.algorithm,
        .protocol = (uint8_t)decision.protocol,
        .requested_channels = (uint8_t)decision.requested,
        .channels = (uint8_t)decision.plan.tasks[0].n_channels,
        .n_collectives = (uint8_t)n_tasks,
    };
    comm->calls++;
    return 0;
}

void launch_p2p(struct host *host, struct communicator *comm, uint64_t index) {
    enum { P2P_BYTES = 65536, P2P_NS = 12000 };
    const struct profiler_plugin *profiler = &host->profiler;
    const int mask = profiler_mask(profiler);
    const int peer = (host->options->rank + 1) % (int)host->program.header->n_ranks;
    void *group_api = group_api_start(host, comm, mask);
    struct event event = {.func = FUNC_SEND, .datatype = TYPE_FLOAT32, .count = P2P_BYTES / 4, .peer = peer};
    void *api = NULL;
    if (profiler->abi >= 5 && (mask & (P2P_BITS | EVENT_P2P_API))) {
        event.type = EVENT_P2P_API;
        event.parent = group_api;
        api = profiler_start(profiler, comm->profiler_context, &event);
        if (api != NULL)
            profiler_stop(profiler, api);
    }
    if (group_api != NULL)
        profiler_record(profiler, group_api, STATE_GROUP_END_API_START, 0);
    kernel_launch(host, comm, mask, group_api);

    void *group = group_start(host, comm, mask);
    void *handle = NULL;
    uint64_t host_start = host_ns();
    if ((mask & P2P_BITS) && (group != NULL || profiler->abi >= 5)) {
        event.type = EVENT_P2P;
        event.rank = host->options->rank;
        event.parent = profiler->abi >= 5 ? api : group;
        event.parent_group = group;
        event.n_channels = 1;
        event.comm_name = host->options->anonymous ? NULL : comm->name;
        event.comm_id = host->options->anonymous ? 0 : comm->id;
        handle = profiler_start(profiler, comm->profiler_context, &event);
    }
    const uint64_t start = gpu_start(host, comm, P2P_NS);
    if (mask & (EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL_CH | EVENT_NET_PLUGIN)) {
        struct proxy_work work = {
            .context = comm->profiler_context,
            .parent = handle,
            .mask = mask,
            .rank = host->options->rank,
            .peer = peer,
            .n_channels = 1,
            .chunk_bytes = P2P_BYTES,
            .gpu_start = start,
            .gpu_stop = start + P2P_NS,
            .host_start = host_start,
            .salt = mix64(host->options->seed ^ index ^ 0x503250),
        };
        proxy_post(&host->proxy, &work);
    }
    if (handle != NULL)
        profiler_stop(profiler, handle);
    if (group != NULL)
        profiler_stop(profiler, group);
    if (group_api != NULL)
        profiler_stop(profiler, group_api);
    if (profiler->abi >= 1 && profiler->abi <= 3)
        proxy_drain(&host->proxy);
}
