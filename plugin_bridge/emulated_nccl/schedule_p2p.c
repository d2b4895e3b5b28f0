#define _GNU_SOURCE
#include <stdlib.h>

#include "layout.h"
#include "log.h"
#include "names.h"
#include "proxy.h"
#include "release.h"
#include "schedule.h"

enum { STEPS = 8, LL_BYTES_PER_CHANNEL = 16 << 10 };

static int greatest_divisor(int a, int b) {
    while (b) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Ranks of a node are in groups of equal size. Distances between groups grow by one more each time, modulo a
 * power of two; those beyond the last group are left out. */
void schedule_rounds(struct comm *comm) {
    int size = comm->nodes > 1 ? P2P_PER_BATCH : comm->max_local_ranks;
    int *on_node = calloc((size_t)comm->nodes, sizeof(*on_node));
    int *node_ranks = calloc((size_t)comm->ranks, sizeof(*node_ranks)); /* by node, then by local rank */
    int *node_first = calloc((size_t)comm->nodes + 1, sizeof(*node_first));
    if (on_node == NULL || node_ranks == NULL || node_first == NULL)
        abort();
    for (int r = 0; r < comm->ranks; r++)
        node_first[comm->node_of[r] + 1]++;
    for (int n = 0; n < comm->nodes; n++) {
        if (node_first[n + 1] % size != 0 || node_first[n + 1] < size)
            size = greatest_divisor(size, node_first[n + 1]);
        node_first[n + 1] += node_first[n];
    }
    for (int r = 0; r < comm->ranks; r++) {
        int n = comm->node_of[r];
        node_ranks[node_first[n] + on_node[n]++] = r;
    }
    /* Every node holds a whole number of groups, so groups are consecutive here. */
    int groups = comm->ranks / size, power = 1, round = 0;
    int place = node_first[comm->node] + comm->local_rank, mine = place / size, local = place % size;
    while (power < groups)
        power *= 2;
    for (int step = 0, distance = 0; step < power; step++, distance = (distance + step) & (power - 1)) {
        if (distance >= groups)
            continue;
        int to = (mine + distance) % groups, from = (mine - distance + groups) % groups;
        for (int i = 0; i < size; i++, round++)
            comm->rounds[round] =
                (struct p2p_round){.send = node_ranks[to * size + (local + i) % size],
                                   .recv = node_ranks[from * size + (local - i + size) % size]};
    }
    comm->round_group = size;
    free(on_node);
    free(node_ranks);
    free(node_first);
}

/* The first channel of a round's transfers: rounds are spread over the channels as bits reversed. */
static int base_of(const struct comm *comm, int round) {
    int bits = log2_up(comm->constants->p2p_channels), base = round, reversed = 0;
    if (comm->nodes > 1) {
        int size = comm->round_group;
        base = round / size * (int)divide_up((size_t)size, P2P_PER_BATCH) + round % size / P2P_PER_BATCH;
    }
    for (int i = 0; i < bits; i++)
        reversed |= (base >> i & 1) << (bits - 1 - i);
    return reversed;
}

/* ---- one pair of send and receive ---- */

enum { RECV, SEND };

struct direction {
    struct p2p_task *task; /* NULL: nothing in this direction */
    int peer;
    bool network, ll;
    int channels, chunk_bytes;
};

/* Channels for a message, if a channel's share is to be within these bounds. */
static int channels_for(const struct comm *comm, size_t bytes, size_t step, int least, int most) {
    if (bytes == 0)
        return 1;
    size_t smallest = comm->nodes > 1 ? step / 2 : step / 8, largest = comm->nodes > 1 ? step : step * 32;
    int channels = (int)smaller((size_t)least, divide_up(bytes, smallest));
    size_t share = larger(smallest, divide_up(bytes, (size_t)channels));
    while (share > largest && channels <= most / 2) {
        channels *= 2;
        share = divide_up(bytes, (size_t)channels);
    }
    return channels;
}

/* Three bits behind the leading one: a transfer's chunk is kept in 8 bits. */
static uint32_t rounded_chunk(uint32_t bytes) {
    int power = log2_down(bytes | 1);
    return power > 3 ? bytes >> (power - 3) << (power - 3) : bytes;
}

static void plan_direction(const struct comm *comm, struct direction *way, bool to_self, int least,
                           int most) {
    const struct constants *constants = comm->constants;
    size_t bytes = way->task ? way->task->bytes : 0;
    way->network = !to_self && comm->node_of[way->peer] != comm->node;
    /* There are no such buffers for the network. */
    way->ll = !to_self && !way->network;
    if (release()->p2p_simple_first) {
        way->channels = way->task ? channels_for(comm, bytes, constants->p2p_chunk_bytes, least, most) : 0;
        way->ll = way->ll && bytes <= (size_t)way->channels * LL_BYTES_PER_CHANNEL;
    } else {
        way->ll = way->ll && bytes <= (size_t)most * LL_BYTES_PER_CHANNEL;
    }
    size_t step = way->ll ? constants->buffer_bytes[PROTO_LL] / STEPS : constants->p2p_chunk_bytes;
    size_t chunk = step;
    if (way->network && way->task)
        chunk /= !way->ll && bytes < step ? 4 : bytes < 8 * step ? 2 : 1;
    if (!release()->p2p_simple_first)
        way->channels = way->task ? channels_for(comm, bytes, step, least, most) : 0;
    way->chunk_bytes =
        (int)(way->ll ? 2 * rounded_chunk((uint32_t)chunk / 2) : rounded_chunk((uint32_t)chunk));
    if (way->task)
        way->task->channels = way->channels;
}

static void add_pair(struct comm *comm, struct plan *plan, struct direction ways[2], int epoch, int round,
                     int least, int most) {
    const bool to_self = ways[SEND].peer == comm->rank;
    for (int way = RECV; way <= SEND; way++)
        plan_direction(comm, &ways[way], to_self, least, most);
    const struct p2p_task *recv = ways[RECV].task, *send = ways[SEND].task;
    const struct gpu_work work = {
        .bytes = larger(recv ? recv->bytes : 0, send ? send->bytes : 0),
        .func = GPU_FUNC_SEND_RECV,
        .channels = (uint8_t)larger((size_t)ways[RECV].channels, (size_t)ways[SEND].channels),
        .profiled = proxy_wants_counters(comm, (recv ? recv : send)->watched.mask),
        .send_peer = send ? ways[SEND].peer : -1,
        .recv_peer = recv ? ways[RECV].peer : -1,
        .send_bytes = send ? send->bytes : 0,
        .recv_bytes = recv ? recv->bytes : 0,
    };
    layout_add_work(plan, &work, P2P_BYTES);
    const int first = base_of(comm, round), all = (int)comm->constants->p2p_channels;
    for (int part = 0; part < work.channels; part++) {
        const int channel = (first + part) & (all - 1);
        layout_place(plan, &(struct placing){.channel = channel,
                                             .share = 1,
                                             .is_p2p = true,
                                             .epoch = epoch,
                                             .round = round,
                                             .item_bytes = P2P_BYTES});
        /* NCCL counts a send to oneself on the GPU and not on the host. */
        bool counted = false;
        for (int way = RECV; way <= SEND && !to_self; way++) {
            if (part >= ways[way].channels)
                continue;
            proxy_add_p2p(comm, plan, ways[way].task, channel, !counted, ways[way].chunk_bytes,
                          ways[way].network ? ways[way].peer : -1);
            counted = true;
        }
    }
}

/* ---- all of them ---- */

nccl_result schedule_p2ps(struct comm *comm, struct plan *plan, int *epoch, int *round) {
    struct planner *planner = &comm->planner;
    const int most = (int)comm->constants->p2p_channels_per_peer;
    int least = most;
    while (least * comm->ranks > (int)comm->constants->p2p_channels && least > 1)
        least /= 2;
    while (planner->n_sends + planner->n_recvs > 0) {
        for (; *round < comm->ranks; (*round)++) {
            const struct p2p_round *meets = &comm->rounds[*round];
            struct p2p_list *sends = &comm->peers[meets->send].send, *recvs = &comm->peers[meets->recv].recv;
            struct p2p_task *send = sends->head, *recv = recvs->head;
            if (send == NULL && recv == NULL)
                continue;
            const bool to_self = meets->send == comm->rank;
            if (to_self && (send == NULL || recv == NULL))
                return fail(NCCL_INVALID_USAGE, "a send to oneself and its receive must be in one group");
            /* In place there is nothing to do. */
            const bool nothing = to_self && send->buffer == recv->buffer;
            if (!nothing && !layout_fits(plan, plan->n_batches + most, plan->work_bytes + P2P_BYTES))
                return NCCL_SUCCESS;
            if (send) {
                POP(sends);
                planner->n_sends--;
            }
            if (recv) {
                POP(recvs);
                planner->n_recvs--;
            }
            if (nothing) {
                free(send);
                free(recv);
                continue;
            }
            struct direction ways[2] = {{.task = recv, .peer = meets->recv},
                                        {.task = send, .peer = meets->send}};
            add_pair(comm, plan, ways, *epoch, *round, least, most);
            if (send)
                PUSH(&plan->p2ps, send);
            if (recv)
                PUSH(&plan->p2ps, recv);
        }
        *round = 0;
        (*epoch)++;
    }
    return NCCL_SUCCESS;
}
