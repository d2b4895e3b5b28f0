#include "schedule.h"

#include <string.h>

enum {
    MIN_TRAFFIC_PER_CHANNEL = 32 << 10,
    NCCL_STEPS = 8,
    LL_TRAFFIC = 4, /* LL sends flags along and is scheduled as if it sent four times the bytes */
};

static size_t divide_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static int is_per_rank(int collective) {
    return collective == FUNC_ALL_GATHER || collective == FUNC_REDUCE_SCATTER;
}

int is_collnet(const struct program_header *header, int algorithm) {
    return algorithm == ALGO_COLLNET_DIRECT || algorithm == ALGO_COLLNET_CHAIN ||
           (algorithm == ALGO_NVLS && header->n_nodes > 1);
}

static int is_nvls(int algorithm) {
    return algorithm == ALGO_NVLS || algorithm == ALGO_NVLS_TREE;
}

int task_datatype(const struct program_key *key) {
    return key->collective == FUNC_ALL_GATHER || key->collective == FUNC_BROADCAST ? TYPE_INT8 : TYPE_FLOAT32;
}

static size_t element_bytes(const struct program_key *key) {
    return task_datatype(key) == TYPE_INT8 ? 1 : 4;
}

size_t task_count(const struct program_header *header, const struct program_key *key) {
    size_t bytes = is_per_rank((int)key->collective) ? key->bytes / header->n_ranks : key->bytes;
    size_t count = bytes / element_bytes(key);
    return count > 0 ? count : 1;
}

size_t traffic_per_byte(const struct program_header *header, int collective) {
    if (collective == FUNC_ALL_REDUCE)
        return 2;
    return is_per_rank(collective) ? header->n_ranks : 1;
}

/* Where the previous collective of the plan left off. */
struct cursor {
    int channel;
    size_t traffic;
};

static void place(struct task *task, struct cursor *at, const struct program_header *header,
                  const struct program_key *key, size_t per_byte, size_t per_channel, int limit) {
    const size_t element = element_bytes(key);
    const size_t count = task_count(header, key);
    const size_t cell_bytes = divide_up(divide_up(MIN_TRAFFIC_PER_CHANNEL, per_byte), 16) * 16;
    const size_t cell_elements = cell_bytes / element;
    const size_t cell_traffic = cell_bytes * per_byte;
    const size_t cells = divide_up(count * element, cell_bytes);
    size_t cells_per_channel = smaller(cells, divide_up(per_channel, cell_traffic));

    size_t lo =
        at->channel + 1 == limit ? cells : smaller(cells, divide_up(per_channel - at->traffic, cell_traffic));
    int n_mid = (int)((cells - lo) / cells_per_channel);
    size_t hi = (cells - lo) % cells_per_channel;
    int n = (lo != 0) + n_mid + (hi != 0);
    if (limit < at->channel + n) {
        n_mid = limit - at->channel - 2;
        cells_per_channel = (cells - lo) / (size_t)(n_mid + 1);
        hi = cells_per_channel + (cells - lo) % (size_t)(n_mid + 1);
    }
    if (hi == 0 && n_mid != 0) {
        hi = cells_per_channel;
        n_mid--;
    }
    if (lo == 0) {
        at->channel++;
        if (n_mid == 0) {
            lo = hi;
            hi = 0;
        } else {
            lo = cells_per_channel;
            n_mid--;
        }
    }
    size_t count_mid = n_mid != 0 ? cells_per_channel * cell_elements : 0;
    size_t count_lo = lo * cell_elements;
    size_t count_hi = hi * cell_elements;
    const size_t excess = cells * cell_elements - count;
    if (count_hi != 0)
        count_hi -= excess;
    else
        count_lo -= excess;

    n = (count_lo != 0) + n_mid + (hi != 0);
    const size_t global = element * (is_per_rank((int)key->collective) ? header->n_ranks : 1);
    task->channel_lo = at->channel;
    task->n_channels = n;
    task->part_bytes[0] = count_lo * global;
    task->part_bytes[1] = count_hi * global;
    task->part_bytes[2] = count_mid * global;

    if (count_hi != 0) {
        at->channel += n - 1;
        at->traffic = hi * cell_elements * element * per_byte;
    } else if (n_mid != 0) {
        at->channel += n;
        at->traffic = 0;
    } else {
        at->traffic += lo * cell_elements * element * per_byte;
    }
    if (at->traffic >= per_channel && at->channel + 1 != limit) {
        at->channel++;
        at->traffic = 0;
    }
}

void schedule(struct plan *plan, const struct program_header *header, const struct program_key *key,
              int algorithm, int protocol, int ceiling, int n_tasks) {
    memset(plan, 0, sizeof(*plan));
    plan->n_tasks = n_tasks;
    if (is_collnet(header, algorithm)) {
        for (int i = 0; i < n_tasks; i++) {
            plan->tasks[i].n_channels = ceiling;
            plan->tasks[i].part_bytes[0] = key->bytes;
        }
        return;
    }

    int limit = (int)header->max_channels;
    if (is_nvls(algorithm))
        limit = key->own_channels[algorithm][protocol];
    size_t per_byte = traffic_per_byte(header, (int)key->collective);
    if (protocol == PROTO_LL)
        per_byte *= LL_TRAFFIC;
    size_t traffic = task_count(header, key) * element_bytes(key) * per_byte;
    if (traffic < MIN_TRAFFIC_PER_CHANNEL)
        traffic = MIN_TRAFFIC_PER_CHANNEL;
    int channels = n_tasks * ceiling < limit ? n_tasks * ceiling : limit;
    size_t per_channel = traffic * (size_t)n_tasks / (size_t)channels;
    if (per_channel < MIN_TRAFFIC_PER_CHANNEL)
        per_channel = MIN_TRAFFIC_PER_CHANNEL;

    struct cursor at = {0, 0};
    for (int i = 0; i < n_tasks; i++)
        place(&plan->tasks[i], &at, header, key, per_byte, per_channel, limit);
}

size_t chunk_grain(int protocol) {
    /* LL: a line of 16 bytes. LL128: 32 lanes of 8 words each, of which 15 in 16 carry data. */
    static const size_t grains[N_PROTOCOLS] = {16, 1920, 512};
    return grains[protocol];
}

size_t chunk_limit(const struct program_key *key, int algorithm, int protocol) {
    size_t bytes = key->buffer_bytes[protocol] / NCCL_STEPS;
    int pipelined = key->collective == FUNC_ALL_REDUCE || is_per_rank((int)key->collective);
    if (protocol == PROTO_SIMPLE && algorithm == ALGO_RING && pipelined)
        bytes *= NCCL_STEPS / 2; /* chunk steps */
    if (protocol == PROTO_LL)
        bytes /= 2;
    if (protocol == PROTO_LL128)
        bytes = bytes / 16 * 15;
    return bytes;
}
