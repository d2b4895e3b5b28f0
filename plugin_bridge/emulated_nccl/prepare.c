#define _GNU_SOURCE
#include "prepare.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "decide.h"
#include "names.h"

void planner_begin(struct comm *comm) {
    memset(&comm->planner, 0, sizeof(comm->planner));
    comm->planner.least_root = INT_MAX;
    comm->planner.most_root = INT_MIN;
}

/* ---- sorting ---- */

/* A floating-point number with two bits behind the leading one orders sizes by quarters of a power of two. */
static int bin_of(size_t bytes) {
    uint64_t units = smaller(bytes, (size_t)1 << 30) >> 10;
    int power = log2_down(units | 1);
    uint64_t mantissa = (power >= 2 ? units >> (power - 2) : units) & 3;
    uint64_t exponent = power >= 2 ? (uint64_t)power - 1 : 0;
    return SORTER_BINS - 1 - (int)(exponent << 2 | mantissa);
}

void planner_add(struct comm *comm, struct coll_task *task) {
    struct coll_task **bin = &comm->planner.sorter[bin_of(task->traffic)];
    task->next = *bin;
    *bin = task;
    comm->planner.n_colls++;
}

/* Broadcasts of one root are planned like other collectives; what was kept of them says nothing of the
 * profiler. */
static void merge_broadcasts(struct comm *comm) {
    struct planner *planner = &comm->planner;
    if (planner->bcast_roots != 1)
        return;
    struct bcast_list *list = &comm->peers[planner->least_root].bcast;
    while (list->head) {
        struct bcast_task *bcast = list->head;
        struct coll_task *task = calloc(1, sizeof(*task));
        if (task == NULL)
            abort();
        POP(list);
        *task = (struct coll_task){
            .func = FUNC_BROADCAST,
            .send = bcast->send,
            .recv = bcast->recv,
            .count = bcast->bytes,
            .root = bcast->root,
            .type = TYPE_INT8,
            .traffic = bcast->bytes,
        };
        planner_add(comm, task);
        free(bcast);
    }
    planner->n_bcasts = planner->bcast_roots = 0;
}

/* Collectives that may be decided together: of one function, operator and type, by ascending size. */
struct bin {
    struct coll_task *head;
};
enum { N_BINS = N_COLLECTIVES * N_OPS * N_TYPES };

/* Takes the sorter's tasks, largest first; order[] gets the bins by their first. */
static int fill_bins(struct planner *planner, struct bin *bins, int *order) {
    int n = 0;
    for (int i = 0; i < SORTER_BINS; i++) {
        for (struct coll_task *task = planner->sorter[i], *next; task; task = next) {
            next = task->next;
            int bin = ((int)task->func * N_OPS + task->op) * N_TYPES + task->type;
            if (bins[bin].head == NULL)
                order[n++] = bin;
            task->next = bins[bin].head;
            bins[bin].head = task;
        }
        planner->sorter[i] = NULL;
    }
    return n;
}

/* ---- deciding ---- */

static bool nvls_reduces(const struct coll_task *task) {
    if (task->func == FUNC_ALL_GATHER)
        return true;
    switch (task->type) {
    case 2: /* 32 and 64 bit integers, half and bfloat16 */
    case 3:
    case 4:
    case 5:
    case 6:
    case 9:
        return task->op == OP_SUM || task->op == OP_MIN || task->op == OP_MAX;
    case 7: /* float and double */
    case 8:
        return task->op == OP_SUM;
    default:
        return false;
    }
}

/* How tasks share channels: each kind starts at channel 0. */
struct kinds {
    struct coll_list of[2][2]; /* [CollNet][NVLS] */
};

static void apply_decision(struct coll_task *task, const struct coll_task *sum, bool collnet, bool nvls) {
    task->algorithm = sum->algorithm;
    task->protocol = sum->protocol;
    task->max_channels = sum->max_channels;
    task->warps = sum->warps;
    task->own = sum->own;
    task->asked = sum->asked;
    task->is_collnet = collnet;
    task->is_nvls = nvls;
    if (task->protocol == PROTO_LL)
        task->traffic *= 4; /* flags, and its lower efficiency */
}

/* Those at the head of *tasks that are within four times its size are one aggregate. */
static nccl_result decide_aggregate(struct comm *comm, struct coll_task **tasks, int pipe_ops,
                                    struct kinds *kinds, struct nccl_sim_info *simulated) {
    struct coll_task *first = *tasks, *end = first->next, sum = *first;
    struct question question = {
        .sum = &sum,
        .first = first,
        .n = 1,
        .collnet = comm->constants->flags & CONSTANTS_COLLNET,
        .nvls = comm->constants->flags & CONSTANTS_NVLS && nvls_reduces(first),
        .pipe_ops = pipe_ops,
    };
    for (; end && end->traffic < 4 * first->traffic; end = end->next) {
        sum.count += end->count;
        sum.traffic += end->traffic;
        question.n++;
    }
    nccl_result result = decide(comm, &question, simulated);
    if (result != NCCL_SUCCESS)
        return result;
    bool nvls = sum.algorithm == ALGO_NVLS || sum.algorithm == ALGO_NVLS_TREE;
    bool collnet = sum.algorithm == ALGO_COLLNET_DIRECT || sum.algorithm == ALGO_COLLNET_CHAIN ||
                   (sum.algorithm == ALGO_NVLS && comm->nodes > 1);
    for (struct coll_task *task = first, *next; task != end; task = next) {
        next = task->next;
        apply_decision(task, &sum, collnet, nvls);
        PUSH(&kinds->of[collnet][nvls], task);
    }
    *tasks = end;
    return NCCL_SUCCESS;
}

static void append(struct coll_list *to, struct coll_list *from) {
    if (from->head == NULL)
        return;
    if (to->tail)
        to->tail->next = from->head;
    else
        to->head = from->head;
    to->tail = from->tail;
}

nccl_result prepare(struct comm *comm, struct nccl_sim_info *simulated) {
    struct planner *planner = &comm->planner;
    struct bin bins[N_BINS] = {0};
    struct kinds kinds = {0};
    int order[N_BINS];
    planner->persistent = planner->graph != NULL;
    merge_broadcasts(comm);
    int n = fill_bins(planner, bins, order);
    /* A crude guess of how many share a channel, before anything is known of them. */
    int pipe_ops = (int)divide_up((size_t)planner->n_colls, comm->constants->channels);
    nccl_result result = NCCL_SUCCESS;
    for (int i = 0; i < n; i++) {
        struct coll_task *tasks = bins[order[i]].head;
        while (tasks && result == NCCL_SUCCESS)
            result = decide_aggregate(comm, &tasks, pipe_ops, &kinds, simulated);
        /* What is left of a group that fails is freed with the planner. */
        for (struct coll_task *task = tasks, *next; task; task = next) {
            next = task->next;
            PUSH(&kinds.of[0][0], task);
        }
    }
    for (int collnet = 0; collnet < 2; collnet++)
        for (int nvls = 0; nvls < 2; nvls++)
            append(&planner->colls, &kinds.of[collnet][nvls]);
    for (struct coll_task *task = planner->colls.head; task && result == NCCL_SUCCESS; task = task->next)
        apply_registration(comm, task);
    return result;
}

void planner_end(struct comm *comm) {
    struct planner *planner = &comm->planner;
    for (int i = 0; i < SORTER_BINS; i++)
        while (planner->sorter[i]) {
            struct coll_task *task = planner->sorter[i];
            planner->sorter[i] = task->next;
            free(task);
        }
    while (planner->colls.head) {
        struct coll_task *task = planner->colls.head;
        POP(&planner->colls);
        free(task);
    }
    bool none = planner->n_sends + planner->n_recvs + planner->n_bcasts == 0;
    for (int i = none ? comm->ranks : 0; i < comm->ranks; i++) {
        struct peer *peer = &comm->peers[i];
        struct p2p_list *lists[2] = {&peer->send, &peer->recv};
        for (int l = 0; l < 2; l++)
            while (lists[l]->head) {
                struct p2p_task *task = lists[l]->head;
                POP(lists[l]);
                free(task);
            }
        while (peer->bcast.head) {
            struct bcast_task *task = peer->bcast.head;
            POP(&peer->bcast);
            free(task);
        }
    }
    free(planner->streams);
    planner->streams = NULL;
    planner->n_streams = 0;
}
