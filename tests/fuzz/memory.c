#define _GNU_SOURCE
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "input.h"
#include "segment.h"

#define COMMS 8
#define DIRTY_SLOTS 1024

static struct {
    struct dcc_segment *seg;
    bool used, dirty[DCC_SLOTS];
    uint64_t ring_from;
} segments[SEGMENTS];

/* Communicators are recycled, never freed; these are all there are. */
static void *allocated[2 * COMMS];
static unsigned allocations;
static struct slot *dirty_slots[DIRTY_SLOTS];
static unsigned n_dirty_slots;

_Atomic uint64_t dynamiccl_segments_changed;

static void describe(struct dcc_segment *seg) {
    seg->magic = DCC_MAGIC;
    seg->abi = DCC_ABI;
    seg->record_bytes = sizeof(struct dcc_record);
    seg->ring_records = DCC_RING_RECORDS;
    seg->table_bytes = sizeof(struct dcc_table);
    seg->segment_bytes = sizeof *seg;
    atomic_store(&seg->identity.rank, UINT32_MAX);
    atomic_store(&seg->runner.hold_at, DCC_NO_HOLD);
}

struct dcc_segment *memory_segment(unsigned i) {
    if (!segments[i].seg) {
        void *memory;
        MUST(posix_memalign(&memory, 64, sizeof(struct dcc_segment)) == 0);
        segments[i].seg = memory;
        memset((void *)segments[i].seg, 0, sizeof(struct dcc_segment));
    }
    if (!segments[i].used)
        describe(segments[i].seg);
    segments[i].used = true;
    return segments[i].seg;
}

int memory_index(const struct dcc_segment *seg) {
    for (int i = 0; i < SEGMENTS; i++)
        if (seg && segments[i].seg == seg)
            return i;
    return -1;
}

void memory_table_dirty(struct dcc_segment *seg, unsigned slot) {
    segments[memory_index(seg)].dirty[slot] = true;
}

void memory_ring_from(struct dcc_segment *seg, uint64_t position) {
    segments[memory_index(seg)].ring_from = position;
}

uint64_t memory_ring_of(unsigned i) {
    return segments[i].used ? segments[i].ring_from : UINT64_MAX;
}

void memory_slot_dirty(struct comm *comm) {
    if (n_dirty_slots < DIRTY_SLOTS)
        dirty_slots[n_dirty_slots++] = &comm->slots[comm->next_slot % COMM_SLOTS];
}

static void clean_segment(unsigned i) {
    struct dcc_segment *seg = segments[i].seg;
    uint64_t head = atomic_load(&seg->head), from = segments[i].ring_from;
    if (head - from > DCC_RING_RECORDS)
        from = head - DCC_RING_RECORDS;
    for (; from != head; from++)
        memset((void *)&seg->ring[from % DCC_RING_RECORDS], 0, sizeof *seg->ring);
    for (unsigned slot = 0; slot < DCC_SLOTS; slot++)
        if (segments[i].dirty[slot])
            memset(&seg->tables[slot], 0, sizeof seg->tables[slot]);
    memset((void *)seg, 0, offsetof(struct dcc_segment, tables));
    memset((void *)&seg->job, 0, sizeof *seg - offsetof(struct dcc_segment, job));
    memset(segments[i].dirty, 0, sizeof segments[i].dirty);
    segments[i].used = false;
    segments[i].ring_from = 0;
}

void memory_clean(void) {
    for (unsigned i = 0; i < SEGMENTS; i++)
        if (segments[i].used)
            clean_segment(i);
    for (unsigned i = 0; i < n_dirty_slots; i++) {
        struct comm *comm = dirty_slots[i]->comm;
        memset((void *)dirty_slots[i], 0, sizeof *dirty_slots[i]);
        dirty_slots[i]->comm = comm;
    }
    n_dirty_slots = 0;
    /* comm.c allocates a communicator and then its slots. */
    for (unsigned i = 0; i < allocations; i += 2)
        ((struct comm *)allocated[i])->next_slot = 0;
}

/* ---- what the plugin's sources call: the build names these in place of libc's and of segment.c's ---- */

void *fuzz_aligned_alloc(size_t alignment, size_t bytes);

void *fuzz_aligned_alloc(size_t alignment, size_t bytes) {
    void *memory;
    MUST(allocations < 2 * COMMS && posix_memalign(&memory, alignment, bytes) == 0);
    return allocated[allocations++] = memory;
}

struct dcc_segment *segment_create(char *path, int *lock_fd, char *error) {
    for (unsigned i = 0; i < SEGMENTS; i++)
        if (!segments[i].used) {
            snprintf(path, 256, "/dev/shm/dynamiccl-fuzz-1-%u", i);
            *lock_fd = -1;
            return memory_segment(i);
        }
    snprintf(error, 512, "no room for another channel; tuning stays off");
    return NULL;
}

void segment_close(struct dcc_segment *seg, const char *path, int lock_fd) {
    (void)path;
    (void)lock_fd;
    atomic_store_explicit(&seg->state, DCC_CLOSED, memory_order_release);
}

/* It stays readable for the checks. What is not cleaned yet is not given out again. */
void segment_remove(struct dcc_segment *seg, const char *path, int lock_fd) {
    segment_close(seg, path, lock_fd);
}
