/* How a kernel is played: when each of its channels begins and ends, what NCCL's proxy thread is told of it,
 * and the log. */
#define _GNU_SOURCE
#include "play.h"

#include <stdlib.h>

#include "comms.h"
#include "log.h"
#include "meeting.h"
#include "times.h"

/* Channels begin and end a little apart: by up to this share of the time. */
#define CHANNEL_SKEW 64

static double pace;
static uint64_t least_ns;

/* Work that is being played. */
struct running {
    bool begun, numbered;
    uint8_t first_channel, channels_left, members;
    uint64_t ordinal, sent, received;
    uint64_t priced_ns; /* with noise */
    uint64_t start_ns, stop_ns;
};

struct lane {
    uint16_t *batches; /* of this channel, in order */
    uint16_t count, next;
    bool begun;
    uint64_t ns;      /* virtual end of what it has done */
    uint64_t real_ns; /* when its batch began */
};

struct play {
    struct gpu_kernel kernel;
    struct running *running;
    uint64_t start_ns;
    struct lane lanes[GPU_MAX_CHANNELS];
    uint16_t order[]; /* what lanes[].batches point into */
};

int play_open(void) {
    const char *text = getenv("GPU_PACE"), *least = getenv("GPU_LEAST_US");
    pace = text ? strtod(text, NULL) : 0;
    least_ns = (uint64_t)(1e3 * (least ? strtod(least, NULL) : 0));
    return gpu_log_open();
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* What all ranks must be doing in a collective. */
static uint64_t signature(const struct gpu_work *work) {
    uint64_t pair = (uint64_t)work->func << 24 | (uint64_t)work->algo << 16 | (uint64_t)work->proto << 8;
    return mix((pair | work->channels) ^ mix(work->bytes ^ (uint64_t)work->chunk_bytes << 40));
}

static bool is_transfer(const struct gpu_work *work) {
    return work->func == GPU_FUNC_SEND_RECV;
}

static void price(struct gpu_comm *comm, uint32_t phase, const struct gpu_work *work, struct running *run) {
    uint32_t number = comm ? comm->info.number : 0;
    int rank = comm ? comm->info.rank : 0;
    bool same_node = true;
    if (comm && is_transfer(work)) {
        const uint8_t *nodes = comm->info.nodes;
        same_node = (work->send_peer < 0 || nodes[work->send_peer] == nodes[rank]) &&
                    (work->recv_peer < 0 || nodes[work->recv_peer] == nodes[rank]);
    }
    double sigma;
    double ns = times_ns(number, phase, work, same_node, &sigma);
    if (comm)
        ns *= times_noise(number, rank, run->ordinal, sigma);
    run->priced_ns = ns < 1 ? 1 : (uint64_t)ns;
}

static void number_work(struct gpu_comm *comm, const struct gpu_work *work, struct running *run) {
    if (comm && is_transfer(work)) {
        run->ordinal = comm->transfers++;
        if (work->send_peer >= 0)
            run->sent = comm->sent[work->send_peer]++;
        if (work->recv_peer >= 0)
            run->received = comm->received[work->recv_peer]++;
    } else if (comm) {
        run->ordinal = comm->collectives++;
    }
}

/* Ordinals are given channel by channel: all ranks of a collective, and both ends of a transfer, have it on
 * the same channels. */
static void number_works(struct play *play, uint32_t phase) {
    struct gpu_kernel *kernel = &play->kernel;
    for (int c = 0; c < GPU_MAX_CHANNELS; c++) {
        const struct lane *lane = &play->lanes[c];
        for (int b = 0; b < lane->count; b++) {
            const struct gpu_batch *batch = &kernel->batches[lane->batches[b]];
            for (int m = 0; m < batch->count; m++) {
                int w = kernel->members[batch->first + m].work;
                struct running *run = &play->running[w];
                if (!run->numbered) {
                    run->numbered = true;
                    number_work(kernel->comm, &kernel->works[w], run);
                    price(kernel->comm, phase, &kernel->works[w], run);
                }
            }
        }
    }
}

static struct play *begin(struct gpu_op *op, uint64_t clock_ns) {
    struct gpu_kernel kernel = {0};
    op->parse(op->argument, &kernel);
    struct play *play = calloc(1, sizeof(*play) + kernel.n_batches * sizeof(uint16_t));
    struct running *running = calloc(kernel.n_works + 1, sizeof(*running));
    if (play == NULL || running == NULL)
        abort();
    play->kernel = kernel;
    play->running = running;
    play->start_ns = clock_ns > op->launched_ns ? clock_ns : op->launched_ns;
    for (uint32_t i = 0; i < kernel.n_batches; i++)
        play->lanes[kernel.batches[i].channel].count++;
    uint16_t *free_place = play->order;
    for (int c = 0; c < GPU_MAX_CHANNELS; c++) {
        struct lane *lane = &play->lanes[c];
        lane->ns = play->start_ns;
        lane->batches = free_place;
        free_place += lane->count;
        lane->count = 0;
    }
    for (uint32_t i = 0; i < kernel.n_batches; i++) {
        const struct gpu_batch *batch = &kernel.batches[i];
        struct lane *lane = &play->lanes[batch->channel];
        lane->batches[lane->count++] = (uint16_t)i;
        for (int m = 0; m < batch->count; m++) {
            struct running *run = &running[kernel.members[batch->first + m].work];
            if (run->channels_left == 0 || batch->channel < run->first_channel)
                run->first_channel = batch->channel;
            run->channels_left++;
            if (batch->count > run->members)
                run->members = (uint8_t)batch->count;
        }
    }
    number_works(play, op->phase);
    return play;
}

static void end(struct play *play) {
    gpu_comm_release(play->kernel.comm);
    free(play->kernel.works);
    free(play->kernel.batches);
    free(play->kernel.members);
    free(play->running);
    free(play);
}

static void post(const struct play *play, int work_index, uint64_t ns) {
    const struct gpu_work *work = &play->kernel.works[work_index];
    const struct running *run = &play->running[work_index];
    struct gpu_comm *comm = play->kernel.comm;
    if (comm == NULL || comm->meeting == NULL)
        return;
    int rank = comm->info.rank;
    if (!is_transfer(work)) {
        meeting_arrive(comm->meeting, run->ordinal, play->start_ns, signature(work));
        return;
    }
    if (work->send_peer >= 0 && work->send_peer != rank)
        meeting_offer(comm->meeting, rank, work->send_peer, true, run->sent, ns);
    if (work->recv_peer >= 0 && work->recv_peer != rank)
        meeting_offer(comm->meeting, work->recv_peer, rank, false, run->received, ns);
}

/* Whether everybody that the work needs has begun it, and since when. */
static bool joined(const struct play *play, int work_index, uint64_t *since_ns) {
    const struct gpu_work *work = &play->kernel.works[work_index];
    const struct running *run = &play->running[work_index];
    struct gpu_comm *comm = play->kernel.comm;
    *since_ns = 0;
    if (comm == NULL || comm->meeting == NULL)
        return true;
    if (!is_transfer(work))
        return meeting_complete(comm->meeting, run->ordinal, since_ns);
    int rank = comm->info.rank;
    uint64_t ns = 0;
    if (work->send_peer >= 0 && work->send_peer != rank) {
        if (!meeting_offered(comm->meeting, rank, work->send_peer, false, run->sent, &ns))
            return false;
        *since_ns = ns;
    }
    if (work->recv_peer >= 0 && work->recv_peer != rank) {
        if (!meeting_offered(comm->meeting, work->recv_peer, rank, true, run->received, &ns))
            return false;
        *since_ns = ns > *since_ns ? ns : *since_ns;
    }
    return true;
}

static void tell(struct gpu_counters *counters, uint64_t counter, uint64_t timestamp) {
    size_t cell = counter % GPU_COUNTERS;
    __atomic_store_n(&counters->data[cell].timestamp, timestamp, __ATOMIC_RELAXED);
    __atomic_store_n(&counters->data[cell].counter, counter, __ATOMIC_RELEASE);
}

static void tell_all(const struct play *play, const struct gpu_batch *batch, struct gpu_counters *counters,
                     uint64_t timestamp) {
    const struct gpu_kernel *kernel = &play->kernel;
    if (counters == NULL || kernel->work_counter[batch->channel] == NULL)
        return;
    uint64_t counter = *kernel->work_counter[batch->channel];
    for (int m = 0; m < batch->count; m++) {
        counter++;
        if (kernel->works[kernel->members[batch->first + m].work].profiled)
            tell(&counters[batch->channel], counter, timestamp);
    }
}

static uint64_t skew(const struct play *play, const struct gpu_batch *batch, uint64_t side) {
    const struct running *lead = &play->running[play->kernel.members[batch->first].work];
    uint64_t most = lead->priced_ns / CHANNEL_SKEW;
    bool exact = batch->channel == lead->first_channel;
    return exact || most == 0 ? 0 : mix(lead->ordinal ^ side << 40 ^ (uint64_t)batch->channel << 48) % most;
}

static void begin_batch(struct play *play, struct lane *lane, const struct gpu_batch *batch, int device) {
    for (int m = 0; m < batch->count; m++) {
        int w = play->kernel.members[batch->first + m].work;
        struct running *run = &play->running[w];
        if (run->begun)
            continue;
        run->begun = true;
        run->start_ns = lane->ns;
        post(play, w, lane->ns);
    }
    lane->begun = true;
    lane->real_ns = gpu_now_ns();
    tell_all(play, batch, play->kernel.started, gpu_timestamp(device, lane->ns + skew(play, batch, 1)));
}

static void log_work(const struct gpu_op *op, const struct play *play, int work_index, int device) {
    const struct gpu_work *work = &play->kernel.works[work_index];
    const struct running *run = &play->running[work_index];
    const struct gpu_comm *comm = play->kernel.comm;
    struct gpu_log_record record = {
        .comm = comm ? comm->info.id : 0,
        .ordinal = run->ordinal,
        .bytes = work->bytes,
        .start_ns = run->start_ns,
        .stop_ns = run->stop_ns,
        .priced_ns = run->priced_ns,
        .step = op->step,
        .chunk_bytes = work->chunk_bytes,
        .phase = (uint16_t)op->phase,
        .rank = (uint16_t)(comm ? comm->info.rank : 0),
        .func = work->func,
        .algo = work->algo,
        .proto = work->proto,
        .channels = work->channels,
        .members = run->members,
        .own = work->own,
        .asked = work->asked,
        .device = (uint8_t)device,
        .number = comm ? comm->info.number : 0,
    };
    gpu_log_add(&record);
}

/* True once the batch has ended. */
static bool end_batch(const struct gpu_op *op, struct play *play, struct lane *lane,
                      const struct gpu_batch *batch, int device) {
    uint64_t since = lane->ns, takes = 0;
    bool aborted = play->kernel.abort && *play->kernel.abort;
    for (int m = 0; m < batch->count && !aborted; m++) {
        const struct gpu_member *member = &play->kernel.members[batch->first + m];
        uint64_t ns;
        if (!joined(play, member->work, &ns))
            return false;
        since = ns > since ? ns : since;
        uint64_t priced = (uint64_t)(member->share * (double)play->running[member->work].priced_ns);
        /* Transfers run side by side, collectives one after the other. */
        if (is_transfer(&play->kernel.works[member->work]))
            takes = priced > takes ? priced : takes;
        else
            takes += priced;
    }
    uint64_t stop = since + takes;
    uint64_t real = (uint64_t)(pace * (double)(stop - lane->ns));
    if (!aborted && gpu_now_ns() < lane->real_ns + (real > least_ns ? real : least_ns))
        return false;
    lane->ns = stop;
    tell_all(play, batch, play->kernel.completed, gpu_timestamp(device, stop - skew(play, batch, 2)));
    if (play->kernel.work_counter[batch->channel])
        *play->kernel.work_counter[batch->channel] += batch->count;
    for (int m = 0; m < batch->count; m++) {
        int w = play->kernel.members[batch->first + m].work;
        struct running *run = &play->running[w];
        run->stop_ns = stop > run->stop_ns ? stop : run->stop_ns;
        if (--run->channels_left == 0 && gpu_log_is_open() && !aborted)
            log_work(op, play, w, device);
    }
    lane->begun = false;
    lane->next++;
    return true;
}

bool play_kernel(struct gpu_stream *stream, struct gpu_op *op, bool *ended) {
    bool happened = op->play == NULL;
    if (op->play == NULL)
        op->play = begin(op, stream->clock_ns);
    struct play *play = op->play;
    uint64_t latest = play->start_ns;
    *ended = true;
    for (int c = 0; c < GPU_MAX_CHANNELS; c++) {
        struct lane *lane = &play->lanes[c];
        while (lane->next < lane->count) {
            const struct gpu_batch *batch = &play->kernel.batches[lane->batches[lane->next]];
            if (!lane->begun) {
                begin_batch(play, lane, batch, stream->device);
                happened = true;
            }
            if (!end_batch(op, play, lane, batch, stream->device)) {
                *ended = false;
                break;
            }
            happened = true;
        }
        if (lane->count && lane->ns > latest)
            latest = lane->ns;
    }
    if (*ended) {
        stream->clock_ns = latest;
        end(play);
        op->play = NULL;
    }
    return happened;
}
