#define _GNU_SOURCE
#include "layout.h"

#include <stdlib.h>
#include <string.h>

#include "launch.h"

/* The batch that a channel is at. */
struct open_batch {
    bool begun, is_p2p;
    uint64_t kernel;
    size_t work_bytes, offset; /* of its first work item, in its latest extension */
    int n_p2ps, epoch, rounds[P2P_PER_BATCH];
    uint64_t p2p_batches;
};

/* One channel's part of some work. */
struct part {
    uint16_t work;
    uint8_t channel;
    bool begins_batch;
    float share;
};

struct layout {
    struct gpu_work *works;
    size_t n_works, max_works;
    struct part *parts;
    size_t n_parts, max_parts;
    struct open_batch open[MAX_CHANNELS];
};

struct layout *layout_new(void) {
    struct layout *layout = calloc(1, sizeof(*layout));
    if (layout == NULL)
        abort();
    return layout;
}

void layout_free(struct layout *layout) {
    if (layout == NULL)
        return;
    free(layout->works);
    free(layout->parts);
    free(layout);
}

static void *grown(void *array, size_t n, size_t *max, size_t item) {
    if (n < *max)
        return array;
    *max = *max ? 2 * *max : 16;
    array = realloc(array, *max * item);
    if (array == NULL)
        abort();
    return array;
}

bool layout_fits(const struct plan *plan, int batches, size_t work_bytes) {
    const size_t arguments = ARGUMENT_BYTES - ARGUMENT_HEAD, of_batches = (size_t)batches * BATCH_BYTES;
    size_t outside = plan->persistent ? (size_t)1 << 30 : FIFO_BYTES / 2;
    return of_batches + work_bytes <= arguments || (of_batches <= arguments && work_bytes <= outside);
}

uint16_t layout_add_work(struct plan *plan, const struct gpu_work *work, size_t item_bytes) {
    struct layout *layout = plan->layout;
    layout->works = grown(layout->works, layout->n_works, &layout->max_works, sizeof(*layout->works));
    layout->works[layout->n_works] = *work;
    plan->work_bytes += item_bytes;
    return (uint16_t)layout->n_works++;
}

static bool can_join(const struct open_batch *open, const struct placing *placing) {
    if (!open->begun || open->is_p2p != placing->is_p2p || open->kernel != placing->kernel)
        return false;
    if (placing->is_p2p) {
        if (open->epoch != placing->epoch || open->n_p2ps == P2P_PER_BATCH)
            return false;
        for (int i = 0; i < open->n_p2ps; i++)
            if (open->rounds[i] == placing->round ||
                open->rounds[i] / P2P_PER_BATCH != placing->round / P2P_PER_BATCH)
                return false;
    }
    return open->work_bytes + placing->item_bytes <= BATCH_WORK_BYTES;
}

void layout_place(struct plan *plan, const struct placing *placing) {
    struct layout *layout = plan->layout;
    struct open_batch *open = &layout->open[placing->channel];
    /* Of the work that was added last. */
    size_t offset = plan->work_bytes - placing->item_bytes;
    bool begins = !can_join(open, placing);
    size_t distance = begins ? 0 : offset - open->offset;
    /* An extension is a batch of its own to the arguments, and the same one to the GPU. */
    if (begins || distance > 63 * placing->item_bytes || distance % placing->item_bytes != 0) {
        open->offset = offset;
        plan->n_batches++;
    }
    if (begins) {
        *open = (struct open_batch){
            .begun = true,
            .is_p2p = placing->is_p2p,
            .kernel = placing->kernel,
            .offset = offset,
            .p2p_batches = open->p2p_batches + placing->is_p2p,
        };
    }
    open->work_bytes += placing->item_bytes;
    if (placing->is_p2p) {
        open->epoch = placing->epoch;
        open->rounds[open->n_p2ps++] = placing->round;
    }
    layout->parts = grown(layout->parts, layout->n_parts, &layout->max_parts, sizeof(*layout->parts));
    layout->parts[layout->n_parts++] = (struct part){
        .work = (uint16_t)(layout->n_works - 1),
        .channel = (uint8_t)placing->channel,
        .begins_batch = begins,
        .share = placing->share,
    };
    plan->channel_mask |= (uint64_t)1 << placing->channel;
}

uint64_t layout_p2p_batches(const struct plan *plan, int channel) {
    return plan->layout->open[channel].p2p_batches;
}

static void *copied(const void *from, size_t bytes) {
    void *to = malloc(bytes + 1);
    if (to == NULL)
        abort();
    return memcpy(to, from, bytes);
}

struct kernel *layout_finish(struct plan *plan) {
    const struct layout *layout = plan->layout;
    struct kernel *kernel = kernel_new(plan->comm);
    struct gpu_member *members = calloc(layout->n_parts + 1, sizeof(*members));
    struct gpu_batch *batches = calloc(layout->n_parts + 1, sizeof(*batches));
    size_t at[MAX_CHANNELS + 1] = {0};
    if (members == NULL || batches == NULL)
        abort();
    /* Parts by channel, in their order. */
    for (size_t i = 0; i < layout->n_parts; i++)
        at[layout->parts[i].channel + 1]++;
    for (int c = 0; c < MAX_CHANNELS; c++)
        at[c + 1] += at[c];
    bool *begins = calloc(layout->n_parts + 1, sizeof(*begins));
    uint8_t *channels = calloc(layout->n_parts + 1, sizeof(*channels));
    if (begins == NULL || channels == NULL)
        abort();
    for (size_t i = 0; i < layout->n_parts; i++) {
        const struct part *part = &layout->parts[i];
        size_t to = at[part->channel]++;
        members[to] = (struct gpu_member){.work = part->work, .share = part->share};
        begins[to] = part->begins_batch;
        channels[to] = part->channel;
    }
    uint32_t n_batches = 0;
    for (size_t i = 0; i < layout->n_parts; i++) {
        if (begins[i])
            batches[n_batches++] = (struct gpu_batch){.channel = channels[i], .first = (uint16_t)i};
        batches[n_batches - 1].count++;
    }
    free(begins);
    free(channels);
    kernel_fill(kernel, copied(layout->works, layout->n_works * sizeof(*layout->works)),
                (uint32_t)layout->n_works, batches, n_batches, members, (uint32_t)layout->n_parts);
    return kernel;
}
