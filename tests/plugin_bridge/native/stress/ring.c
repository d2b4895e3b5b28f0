/* The ring, from several producers to one reader. */
#include "stress.h"

enum { PRODUCERS = 3, PUSHES = 350000 };

struct producer {
    struct dcc_segment *seg;
    unsigned index;
    uint64_t dropped;
};

static _Atomic unsigned producing;
static _Atomic uint64_t issued, consumed;
static _Atomic bool paced;

/* Never more under way than half of the ring holds. */
static void keep_pace(void) {
    while (atomic_load(&issued) - atomic_load(&consumed) > DCC_RING_RECORDS / 2)
        sched_yield();
    atomic_fetch_add(&issued, 1);
}

static void *produce(void *argument) {
    struct producer *self = argument;
    for (uint64_t i = 0; i < PUSHES; i++) {
        /* Every word derives from the identity, so that a torn record cannot pass. */
        struct dcc_record record = {.dseq = i,
                                    .bytes = ~i,
                                    .exec_ns = i * 3,
                                    .start_ns = i * 5,
                                    .version = self->index,
                                    .plan = (uint32_t)i,
                                    .key = (uint16_t)(i * 7)};
        if (atomic_load(&paced))
            keep_pace();
        /* Some want everything through, one drops as the plugin does. */
        while (!dcc_ring_push(self->seg, &record)) {
            if (atomic_load(&paced))
                fail("ring: a record was dropped although there was room");
            if (self->index == 1) {
                self->dropped++;
                break;
            }
            sched_yield();
        }
    }
    atomic_fetch_sub(&producing, 1);
    return NULL;
}

static void run_ring(uint64_t seed, bool pace) {
    struct dcc_segment *seg = calloc(1, sizeof *seg + 64);
    if (!seg)
        fail("out of memory");
    struct dcc_segment *aligned = (struct dcc_segment *)(((uintptr_t)seg + 63) & ~(uintptr_t)63);
    struct producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    atomic_store(&producing, PRODUCERS);
    atomic_store(&issued, 0);
    atomic_store(&consumed, 0);
    atomic_store(&paced, pace);
    for (unsigned p = 0; p < PRODUCERS; p++) {
        producers[p] = (struct producer){.seg = aligned, .index = p};
        threads[p] = begin(produce, &producers[p]);
    }
    static struct dcc_record batch[4096];
    uint64_t next[PRODUCERS] = {0}, seen[PRODUCERS] = {0}, random = seed;
    for (bool last = false; !last;) {
        last = atomic_load(&producing) == 0;
        size_t n = dcc_drain(aligned, batch, 1 + draw(&random) % 4096);
        for (size_t i = 0; i < n; i++) {
            const struct dcc_record *r = &batch[i];
            uint64_t d = r->dseq;
            if (r->version >= PRODUCERS || r->bytes != ~d || r->exec_ns != d * 3 || r->start_ns != d * 5 ||
                r->plan != (uint32_t)d || r->key != (uint16_t)(d * 7))
                fail("ring: torn record %llu of producer %u", (unsigned long long)d, r->version);
            if (d < next[r->version])
                fail("ring: producer %u: record %llu after %llu", r->version, (unsigned long long)d,
                     (unsigned long long)next[r->version] - 1);
            next[r->version] = d + 1;
            seen[r->version]++;
        }
        atomic_fetch_add(&consumed, n);
        if (n)
            last = false;
        else
            dawdle(&random);
        if (!pace && draw(&random) % 256 == 0) /* long enough for the ring to fill up */
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    uint64_t total = 0, dropped = 0;
    for (unsigned p = 0; p < PRODUCERS; p++) {
        pthread_join(threads[p], NULL);
        if (seen[p] + producers[p].dropped != PUSHES)
            fail("ring: producer %u: %llu seen, %llu dropped, %d pushed", p, (unsigned long long)seen[p],
                 (unsigned long long)producers[p].dropped, PUSHES);
        total += seen[p];
        dropped += producers[p].dropped;
    }
    free(seg);
    printf("ring: %llu records from %d threads, %llu dropped\n", (unsigned long long)total, PRODUCERS,
           (unsigned long long)dropped);
}

void test_ring(uint64_t seed) {
    run_ring(seed, true);
    run_ring(seed, false);
}
