/* The writing side of `dynamiccl bench channel`. In the channel library, never in the plugin. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ring.h"

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A segment that no plugin owns. NULL if it cannot be made. */
struct dcc_segment *dcc_bench_segment(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return NULL;
    struct dcc_segment *seg = MAP_FAILED;
    if (posix_fallocate(fd, 0, sizeof *seg) == 0)
        seg = mmap(NULL, sizeof *seg, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (seg == MAP_FAILED)
        return NULL;
    seg->magic = DCC_MAGIC;
    seg->abi = DCC_ABI;
    seg->record_bytes = sizeof(struct dcc_record);
    seg->ring_records = DCC_RING_RECORDS;
    seg->table_bytes = sizeof(struct dcc_table);
    seg->segment_bytes = sizeof *seg;
    atomic_store(&seg->runner.hold_at, DCC_NO_HOLD);
    atomic_store_explicit(&seg->state, DCC_READY, memory_order_release);
    return seg;
}

/* Writes n records as fast as it can and returns the nanoseconds that took. */
uint64_t dcc_bench_push(struct dcc_segment *seg, uint64_t n) {
    struct dcc_record record = {.bytes = 1 << 20, .exec_ns = 1};
    uint64_t begin = now_ns();
    for (uint64_t i = 0; i < n; i++) {
        record.dseq = i;
        dcc_ring_push(seg, &record);
    }
    return now_ns() - begin;
}

struct writer {
    pthread_t thread;
    struct dcc_segment *seg;
    uint64_t total, per_s, refused;
    _Atomic int over;
};

static void *write_paced(void *argument) {
    struct writer *w = argument;
    struct dcc_record record = {.bytes = 1 << 20, .exec_ns = 1};
    uint64_t begin = now_ns();
    for (uint64_t i = 0; i < w->total; i++) {
        if (i % 256 == 0)
            while ((now_ns() - begin) * w->per_s / 1000000000u < i)
                nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        record.dseq = i;
        w->refused += !dcc_ring_push(w->seg, &record);
    }
    atomic_store(&w->over, 1);
    return NULL;
}

void *dcc_bench_start(struct dcc_segment *seg, uint64_t total, uint64_t per_s) {
    struct writer *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    *w = (struct writer){.seg = seg, .total = total, .per_s = per_s};
    if (pthread_create(&w->thread, NULL, write_paced, w)) {
        free(w);
        return NULL;
    }
    return w;
}

/* Whether the writer has written all. */
int dcc_bench_over(void *writer) {
    struct writer *w = writer;
    return atomic_load(&w->over);
}

/* Waits for the writer and returns how many records a full ring refused. */
uint64_t dcc_bench_join(void *writer) {
    struct writer *w = writer;
    pthread_join(w->thread, NULL);
    uint64_t refused = w->refused;
    free(w);
    return refused;
}
