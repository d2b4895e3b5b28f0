#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "decide.h"
#include "layout.h"
#include "names.h"
#include "proxy.h"
#include "release.h"
#include "schedule.h"

static bool is_per_rank(enum nccl_func func) {
    return func == FUNC_ALL_GATHER || func == FUNC_REDUCE_SCATTER;
}

static size_t traffic_per_byte(const struct comm *comm, const struct coll_task *task) {
    size_t factor = task->func == FUNC_ALL_REDUCE ? 2 : is_per_rank(task->func) ? (size_t)comm->ranks : 1;
    return task->protocol == PROTO_LL ? 4 * factor : factor;
}

/* What of a kind of collective will go into a plan, and over how many channels. */
struct kind {
    size_t traffic, channels, limit;
};

static int kind_of(const struct coll_task *task) {
    return 2 * task->is_collnet + task->is_nvls;
}

static int estimate(const struct comm *comm, const struct plan *plan, struct kind kinds[4]) {
    const size_t channels = comm->constants->channels, nvls = comm->constants->nvls_channels;
    const size_t limits[4] = {channels, nvls, channels, smaller(channels, nvls)};
    size_t work_bytes = 0;
    int n = 0;
    for (int i = 0; i < 4; i++)
        kinds[i] = (struct kind){.limit = limits[i]};
    for (const struct coll_task *task = comm->planner.colls.head; task; task = task->next) {
        struct kind *kind = &kinds[kind_of(task)];
        /* Guessing four collectives to a batch. */
        if (!layout_fits(plan, (n + 3) / 4, work_bytes + release()->coll_bytes))
            break;
        n++;
        work_bytes += release()->coll_bytes;
        kind->traffic += larger(release()->least_traffic, task->traffic);
        kind->channels = smaller(kind->channels + (size_t)task->max_channels, kind->limit);
    }
    return n;
}

/* Where the last collective of a kind left off. */
struct cursor {
    int kind;
    size_t per_channel; /* traffic */
    int channel;
    size_t traffic; /* that the channel already has */
};

/* What the first of a collective's channels does, each of those in the middle, and the last. */
enum part { LOW, MIDDLE, HIGH, PARTS };

struct spread {
    int first, channels;
    size_t count[PARTS]; /* elements; 0: there is no such channel */
    uint32_t chunk_bytes[PARTS];
};

static enum part part_of(const struct spread *spread, int i) {
    return i == 0 ? LOW : i == spread->channels - 1 ? HIGH : MIDDLE;
}

static struct spread spread(const struct comm *comm, const struct coll_task *task, struct cursor *at,
                            int limit) {
    const size_t element = type_bytes(task->type), per_byte = traffic_per_byte(comm, task);
    const size_t cell_bytes = divide_up(divide_up(release()->least_traffic, per_byte), 16) * 16;
    const size_t cell_elements = cell_bytes / element, cell_traffic = cell_bytes * per_byte;
    const size_t cells = divide_up(task->count * element, cell_bytes);
    size_t per_channel = smaller(cells, divide_up(at->per_channel, cell_traffic));
    size_t low = at->channel + 1 == limit
                     ? cells
                     : smaller(cells, divide_up(at->per_channel - at->traffic, cell_traffic));
    int middle = (int)((cells - low) / per_channel);
    size_t high = (cells - low) % per_channel;
    if (limit < at->channel + (low != 0) + middle + (high != 0)) {
        middle = limit - at->channel - 2;
        per_channel = (cells - low) / (size_t)(middle + 1);
        high = per_channel + (cells - low) % (size_t)(middle + 1);
    }
    if (high == 0 && middle != 0) {
        high = per_channel;
        middle--;
    }
    if (low == 0) {
        /* The channel was full. */
        at->channel++;
        low = middle == 0 ? high : per_channel;
        high = middle == 0 ? 0 : high;
        middle -= middle != 0;
    }
    struct spread spread = {
        .first = at->channel,
        .channels = (low != 0) + middle + (high != 0),
        .count = {low * cell_elements, middle != 0 ? per_channel * cell_elements : 0, high * cell_elements},
    };
    spread.count[high != 0 ? HIGH : LOW] -= cells * cell_elements - task->count;
    return spread;
}

static void advance(struct cursor *at, const struct comm *comm, const struct coll_task *task,
                    const struct spread *spread, int limit) {
    const size_t per_element = type_bytes(task->type) * traffic_per_byte(comm, task);
    const size_t cell_bytes =
        divide_up(divide_up(release()->least_traffic, traffic_per_byte(comm, task)), 16) * 16;
    const size_t cell = cell_bytes / type_bytes(task->type);
    if (spread->count[HIGH] != 0) {
        at->channel += spread->channels - 1;
        at->traffic = divide_up(spread->count[HIGH], cell) * cell * per_element;
    } else if (spread->count[MIDDLE] != 0) {
        at->channel += spread->channels;
        at->traffic = 0;
    } else {
        at->traffic += divide_up(spread->count[LOW], cell) * cell * per_element;
    }
    if (at->traffic >= at->per_channel && at->channel + 1 != limit) {
        at->channel++;
        at->traffic = 0;
    }
}

static uint64_t kernel_of(const struct coll_task *task) {
    return 1 | (uint64_t)task->func << 8 | (uint64_t)task->op << 16 | (uint64_t)task->type << 24 |
           (uint64_t)task->algorithm << 32 | (uint64_t)task->protocol << 40;
}

static void place(struct comm *comm, struct plan *plan, struct coll_task *task, const struct spread *spread,
                  size_t bytes) {
    const uint32_t *chunk_bytes = spread->chunk_bytes;
    const struct gpu_work work = {
        .bytes = bytes,
        /* The times know one chunk: that of the channels in the middle, where there are any. */
        .chunk_bytes = chunk_bytes[MIDDLE] ? chunk_bytes[MIDDLE] : chunk_bytes[LOW],
        .func = (uint8_t)task->func,
        .algo = (uint8_t)task->algorithm,
        .proto = (uint8_t)task->protocol,
        .channels = (uint8_t)spread->channels,
        .own = task->own,
        .asked = (uint8_t)task->asked,
        .profiled = proxy_wants_counters(comm, task->watched.mask),
        .send_peer = -1,
        .recv_peer = -1,
    };
    layout_add_work(plan, &work, release()->coll_bytes);
    size_t most = 0;
    for (int part = LOW; part < PARTS; part++)
        most = larger(most, spread->count[part]);
    for (int i = 0; i < spread->channels; i++) {
        const enum part part = part_of(spread, i);
        layout_place(plan, &(struct placing){.channel = spread->first + i,
                                             .kernel = kernel_of(task),
                                             .share = most ? (float)spread->count[part] / (float)most : 1,
                                             .item_bytes = release()->coll_bytes});
        proxy_add_coll(comm, plan, task, spread->first + i, (int)chunk_bytes[part]);
    }
}

/* CollNet divides evenly over all channels that it may have. */
static nccl_result schedule_collnet(struct comm *comm, struct plan *plan, struct coll_task *task,
                                    bool *fits) {
    struct spread spread = {.channels = task->max_channels};
    size_t bytes = tuner_bytes(comm, task->func, task->count, task->type);
    uint32_t chunk_bytes;
    *fits = layout_fits(plan, plan->n_batches + spread.channels, plan->work_bytes + release()->coll_bytes);
    if (!*fits)
        return NCCL_SUCCESS;
    nccl_result result = decide_chunk(comm, task, spread.channels, bytes, &chunk_bytes);
    if (result != NCCL_SUCCESS)
        return result;
    for (int part = LOW; part < PARTS; part++)
        spread.chunk_bytes[part] = chunk_bytes;
    place(comm, plan, task, &spread, bytes);
    return NCCL_SUCCESS;
}

static nccl_result schedule_other(struct comm *comm, struct plan *plan, struct coll_task *task,
                                  struct cursor *at, int limit, bool *fits) {
    static const enum part order[PARTS] = {LOW, HIGH, MIDDLE};
    struct spread parts = spread(comm, task, at, limit);
    const size_t of_all = tuner_bytes(comm, task->func, 1, task->type);
    task->channels = parts.channels;
    *fits = layout_fits(plan, plan->n_batches + parts.channels, plan->work_bytes + release()->coll_bytes);
    if (!*fits)
        return NCCL_SUCCESS;
    for (int i = 0; i < PARTS; i++) {
        const size_t count = parts.count[order[i]];
        if (count == 0)
            continue;
        nccl_result result = decide_chunk(comm, task, 1, of_all * count, &parts.chunk_bytes[order[i]]);
        if (result != NCCL_SUCCESS)
            return result;
    }
    advance(at, comm, task, &parts, limit);
    place(comm, plan, task, &parts, of_all * task->count);
    return NCCL_SUCCESS;
}

nccl_result schedule_colls(struct comm *comm, struct plan *plan) {
    struct coll_list *tasks = &comm->planner.colls;
    struct kind kinds[4];
    struct cursor at = {.kind = -1};
    for (int n = estimate(comm, plan, kinds); n > 0 && tasks->head; n--) {
        struct coll_task *task = tasks->head;
        const struct kind *kind = &kinds[kind_of(task)];
        if (at.kind != kind_of(task)) {
            size_t share = kind->traffic / kind->channels;
            share = release()->rounds_traffic ? divide_up(share, 16) * 16
                                              : larger(share, release()->least_traffic);
            at = (struct cursor){.kind = kind_of(task), .per_channel = share};
        }
        bool fits;
        nccl_result result = task->is_collnet
                                 ? schedule_collnet(comm, plan, task, &fits)
                                 : schedule_other(comm, plan, task, &at, (int)kind->limit, &fits);
        if (result != NCCL_SUCCESS || !fits)
            return result;
        POP(tasks);
        comm->planner.n_colls--;
        PUSH(&plan->colls, task);
    }
    return NCCL_SUCCESS;
}
