#define _GNU_SOURCE
#include "meeting.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define load(p, order) atomic_load_explicit(p, memory_order_##order)
#define store(p, v, order) atomic_store_explicit(p, v, memory_order_##order)

/* Ranks come back to a cell MEETING_COLLECTIVES later. Counts go on and times only grow, so nothing is reset:
 * the cell of round n is complete when n + 1 times as many have arrived as take part. */
struct cell {
    _Atomic uint64_t arrived;
    _Atomic uint64_t latest_ns;
    _Atomic uint64_t what; /* round + 1 in the upper 24 bits */
};

struct transfer {
    _Atomic uint64_t begun[2]; /* ordinal + 1, by receiver and sender */
    _Atomic uint64_t ns[2];
};

struct meeting_comm {
    _Atomic uint64_t id; /* 0: free */
    uint32_t users, expected;
    struct cell cells[MEETING_COLLECTIVES];
    struct transfer transfers[]; /* [from][to][MEETING_TRANSFERS] */
};

static struct meeting_header *page;
static int page_fd = -1;

static size_t comm_bytes(uint32_t max_ranks) {
    size_t transfers = (size_t)max_ranks * max_ranks * MEETING_TRANSFERS;
    size_t bytes = sizeof(struct meeting_comm) + transfers * sizeof(struct transfer);
    return (bytes + 4095) & ~(size_t)4095;
}

size_t meeting_bytes(uint32_t max_comms, uint32_t max_ranks) {
    return 4096 + max_comms * comm_bytes(max_ranks);
}

int meeting_open(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    void *map = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct meeting_header))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        fprintf(stderr, "cannot map the meeting file %s: %s\n", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    struct meeting_header *header = map;
    if (memcmp(header->magic, MEETING_MAGIC, sizeof(header->magic)) != 0 ||
        header->version != MEETING_VERSION ||
        (size_t)st.st_size < meeting_bytes(header->max_comms, header->max_ranks)) {
        fprintf(stderr, "%s: not a meeting file of version %d, or too short\n", path, MEETING_VERSION);
        munmap(map, (size_t)st.st_size);
        close(fd);
        return -1;
    }
    page = header;
    page_fd = fd;
    return 0;
}

/* Two locks: that of a file keeps other processes out, but not the threads of this one. The kernel drops it
 * when a process dies. */
static pthread_mutex_t joining = PTHREAD_MUTEX_INITIALIZER;

static void lock_page(void) {
    pthread_mutex_lock(&joining);
    flock(page_fd, LOCK_EX);
}

static void unlock_page(void) {
    flock(page_fd, LOCK_UN);
    pthread_mutex_unlock(&joining);
}

static struct meeting_comm *comm_at(uint32_t i) {
    return (struct meeting_comm *)((char *)page + 4096 + i * comm_bytes(page->max_ranks));
}

struct meeting_comm *meeting_join(uint64_t id, uint32_t expected) {
    struct meeting_comm *found = NULL;
    if (page == NULL || id == 0)
        return NULL;
    lock_page();
    for (uint32_t i = 0; i < page->max_comms; i++) {
        struct meeting_comm *comm = comm_at(i);
        if (comm->id == id) {
            found = comm;
            break;
        }
        if (comm->id == 0 && found == NULL)
            found = comm;
    }
    if (found != NULL && found->id == 0) {
        memset((char *)found, 0, comm_bytes(page->max_ranks));
        found->id = id;
        found->expected = expected;
    }
    if (found != NULL)
        found->users++;
    unlock_page();
    return found;
}

void meeting_leave(struct meeting_comm *comm) {
    if (comm == NULL)
        return;
    lock_page();
    if (--comm->users == 0)
        comm->id = 0;
    unlock_page();
}

void meeting_arrive(struct meeting_comm *comm, uint64_t ordinal, uint64_t ns, uint64_t what) {
    struct cell *cell = &comm->cells[ordinal % MEETING_COLLECTIVES];
    uint64_t round = (ordinal / MEETING_COLLECTIVES + 1) & 0xffffff;
    uint64_t mine = round << 40 | (what & 0xffffffffff), there = load(&cell->what, relaxed);
    while (there >> 40 != round && !atomic_compare_exchange_weak(&cell->what, &there, mine)) {
    }
    if (there >> 40 == round && there != mine)
        __atomic_fetch_add(&page->violations, 1, __ATOMIC_RELAXED);
    uint64_t latest = load(&cell->latest_ns, relaxed);
    while (latest < ns && !atomic_compare_exchange_weak_explicit(
                              &cell->latest_ns, &latest, ns, memory_order_relaxed, memory_order_relaxed)) {
    }
    /* Release pairs with the acquire in meeting_complete(): the time is there. */
    atomic_fetch_add_explicit(&cell->arrived, 1, memory_order_release);
}

bool meeting_complete(struct meeting_comm *comm, uint64_t ordinal, uint64_t *latest_ns) {
    struct cell *cell = &comm->cells[ordinal % MEETING_COLLECTIVES];
    uint64_t needed = (ordinal / MEETING_COLLECTIVES + 1) * comm->expected;
    if (load(&cell->arrived, acquire) < needed)
        return false;
    *latest_ns = load(&cell->latest_ns, relaxed);
    return true;
}

static struct transfer *transfer_of(struct meeting_comm *comm, int from, int to, uint64_t ordinal) {
    size_t pair = (size_t)from * page->max_ranks + (size_t)to;
    return &comm->transfers[pair * MEETING_TRANSFERS + ordinal % MEETING_TRANSFERS];
}

static bool too_many(int from, int to) {
    return from < 0 || to < 0 || (uint32_t)from >= page->max_ranks || (uint32_t)to >= page->max_ranks;
}

void meeting_offer(struct meeting_comm *comm, int from, int to, bool sender, uint64_t ordinal, uint64_t ns) {
    if (too_many(from, to))
        return;
    struct transfer *transfer = transfer_of(comm, from, to, ordinal);
    store(&transfer->ns[sender], ns, relaxed);
    store(&transfer->begun[sender], ordinal + 1, release); /* pairs with the acquire in meeting_offered() */
}

bool meeting_offered(struct meeting_comm *comm, int from, int to, bool sender, uint64_t ordinal,
                     uint64_t *ns) {
    *ns = 0;
    if (too_many(from, to))
        return true;
    struct transfer *transfer = transfer_of(comm, from, to, ordinal);
    if (load(&transfer->begun[sender], acquire) < ordinal + 1)
        return false;
    *ns = load(&transfer->ns[sender], relaxed);
    return true;
}
