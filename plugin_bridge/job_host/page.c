#define _GNU_SOURCE
#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SPINS = 200,
    NAP_NS = 50000,
    LIVENESS_PERIOD_NS = 50000000,
};

volatile sig_atomic_t job_signalled;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void nap(void) {
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
}

static struct page_id *id_of(struct page *page, uint32_t comm) {
    return (struct page_id *)&page->ranks[page->n_ranks] + comm;
}

struct page *page_open(const char *path, uint32_t n_ranks, uint32_t n_comms) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    void *map = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct page))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map == MAP_FAILED) {
        fprintf(stderr, "cannot map the job page %s: %s\n", path, strerror(errno));
        return NULL;
    }
    struct page *page = map;
    size_t needed = sizeof(*page) + n_ranks * sizeof(struct page_rank) + n_comms * sizeof(struct page_id);
    if (memcmp(page->magic, PAGE_MAGIC, sizeof(page->magic)) != 0 || page->version != PAGE_VERSION ||
        page->page_bytes != (uint64_t)st.st_size || needed != (size_t)st.st_size ||
        page->n_ranks != n_ranks || page->n_comms != n_comms) {
        fprintf(stderr, "job page %s: wrong magic, version or size, or of another program\n", path);
        munmap(map, (size_t)st.st_size);
        return NULL;
    }
    return page;
}

void page_take(struct place *place, struct page *page, uint32_t rank, uint64_t window) {
    *place = (struct place){.page = page, .rank = rank, .window = window};
    atomic_store(&page->ranks[rank].thread, (int32_t)gettid());
    atomic_store(&page->ranks[rank].pid, (int32_t)getpid());
}

void page_set_state(struct place *place, enum rank_state state) {
    atomic_store(&place->page->ranks[place->rank].state, (uint32_t)state);
}

int page_fail(struct place *place) {
    uint64_t nobody = 0;
    page_set_state(place, RANK_FAILED);
    return atomic_compare_exchange_strong(&place->page->abort_by, &nobody, (uint64_t)place->rank + 1);
}

uint32_t page_aborted_by(const struct page *page) {
    uint64_t by = atomic_load(&page->abort_by);
    return by == 0 ? UINT32_MAX : (uint32_t)(by - 1);
}

void page_publish_id(struct page *page, uint32_t comm, const char *id) {
    struct page_id *slot = id_of(page, comm);
    memcpy(slot->id, id, sizeof(slot->id));
    atomic_fetch_add_explicit(&slot->turn, 1, memory_order_release);
}

/* A killed child stays visible to kill() until its parent reaps it, so a zombie is looked for in /proc. */
static int process_is_dead(int32_t pid) {
    if (kill(pid, 0) != 0)
        return errno == ESRCH;
    char path[32], text[256];
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT && kill(pid, 0) != 0;
    ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0)
        return 1;
    text[n] = '\0';
    const char *name_end = strrchr(text, ')');
    return name_end != NULL && (name_end[2] == 'Z' || name_end[2] == 'X');
}

void page_look(struct page *page, uint32_t first, uint32_t last) {
    for (uint32_t i = 0; i < page->n_ranks; i++) {
        struct page_rank *peer = &page->ranks[i];
        uint32_t state = atomic_load(&peer->state);
        int32_t pid = atomic_load(&peer->pid);
        if ((i >= first && i <= last) || state == RANK_FINISHED || pid == 0)
            continue;
        if (state != RANK_FAILED && !process_is_dead(pid))
            continue;
        /* It may have finished between the two looks. */
        if (atomic_load(&peer->state) == RANK_FINISHED)
            continue;
        uint64_t nobody = 0;
        atomic_compare_exchange_strong(&page->abort_by, &nobody, (uint64_t)i + 1);
        return;
    }
}

static void look_for_dead_peers(struct place *place) {
    page_look(place->page, place->rank, place->rank);
}

void page_await_end(struct place *place) {
    const struct page *page = place->page;
    uint64_t next_look = now_ns() + LIVENESS_PERIOD_NS;
    for (uint32_t i = 0; i < page->n_ranks;) {
        uint32_t state = atomic_load(&page->ranks[i].state);
        if (page_aborted_by(page) != UINT32_MAX || job_signalled)
            return;
        if (state == RANK_ABSENT || state == RANK_FINISHED || state == RANK_FAILED) {
            i++;
            continue;
        }
        nap();
        if (now_ns() >= next_look) {
            look_for_dead_peers(place);
            next_look = now_ns() + LIVENESS_PERIOD_NS;
        }
    }
}

int page_await_id(struct place *place, uint32_t comm, uint64_t turn, char *id) {
    struct page_id *slot = id_of(place->page, comm);
    uint64_t next_look = now_ns() + LIVENESS_PERIOD_NS;
    while (atomic_load_explicit(&slot->turn, memory_order_acquire) < turn) {
        if (page_aborted_by(place->page) != UINT32_MAX || job_signalled)
            return -1;
        nap();
        if (now_ns() >= next_look) {
            look_for_dead_peers(place);
            next_look = now_ns() + LIVENESS_PERIOD_NS;
        }
    }
    memcpy(id, slot->id, sizeof(slot->id));
    return 0;
}

/* Returns 1 where the window lets `index` begin, 0 where it does not yet, -1 where it never will. */
static int window_allows(const struct place *place, uint64_t index) {
    const struct page *page = place->page;
    int allowed = 1;
    for (uint32_t i = 0; i < page->n_ranks; i++) {
        const struct page_rank *peer = &page->ranks[i];
        if (i == place->rank)
            continue;
        int finished = atomic_load(&peer->state) == RANK_FINISHED;
        if (index < atomic_load(&peer->begun) + place->window)
            continue;
        if (finished)
            return -1;
        allowed = 0;
    }
    return allowed;
}

static void apply_switches(struct place *place, uint64_t index) {
    while (place->n_applied < MAX_SWITCHES) {
        uint64_t entry = atomic_load(&place->page->switches[place->n_applied]);
        if (entry == 0 || (entry >> 8) > index)
            return;
        place->phase = (uint32_t)(entry & 0xff);
        place->n_applied++;
    }
}

enum admission page_admit(struct place *place, uint64_t index, uint32_t *peer) {
    struct page *page = place->page;
    struct page_rank *self = &page->ranks[place->rank];
    uint64_t next_look = 0;
    for (unsigned tries = 0;; tries++) {
        atomic_store(&self->intent, index + 1);
        int held = atomic_load(&page->hold) != 0;
        if (atomic_load(&page->abort_by) != 0) {
            *peer = page_aborted_by(page);
            return ADMIT_ABORT;
        }
        if (job_signalled)
            return ADMIT_SIGNAL;
        if (!held) {
            if (index >= atomic_load(&page->stop_at))
                return ADMIT_STOP;
            int allowed = window_allows(place, index);
            if (allowed < 0)
                return ADMIT_PEER_LEFT;
            if (allowed > 0 && index < atomic_load(&page->credit)) {
                apply_switches(place, index);
                atomic_store(&self->begun, index + 1);
                if (tries > SPINS)
                    page_set_state(place, RANK_RUNNING);
                return ADMIT_BEGIN;
            }
        }
        if (tries < SPINS)
            continue;
        if (tries == SPINS) {
            page_set_state(place, RANK_WAITING);
            next_look = now_ns() + LIVENESS_PERIOD_NS;
        }
        /* Withdrawn while asleep, so that a hold sees no more than what really began. */
        atomic_store(&self->intent, index);
        nap();
        if (now_ns() >= next_look) {
            look_for_dead_peers(place);
            next_look = now_ns() + LIVENESS_PERIOD_NS;
        }
    }
}
