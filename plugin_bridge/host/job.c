#define _GNU_SOURCE
#include "job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"

enum {
    SPINS = 200,
    NAP_NS = 50000,
    NAPS_BEFORE_IDLE = 20, /* 1 ms and more without work: worth a flush */
    LIVENESS_PERIOD_NS = 50000000,
};

volatile sig_atomic_t job_signalled;

int job_open(struct job *job, const char *path, uint32_t process, uint64_t window) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        fprintf(stderr, "cannot open job page %s: %s\n", path, strerror(errno));
        return -1;
    }
    struct stat st;
    void *map = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(struct job_page))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        fprintf(stderr, "cannot map job page %s: it is too short, or mmap failed\n", path);
        return -1;
    }
    struct job_page *page = map;
    size_t needed = sizeof(*page) + (size_t)page->n_processes * sizeof(struct job_process);
    if (memcmp(page->magic, JOB_MAGIC, sizeof(page->magic)) != 0 || page->version != JOB_VERSION ||
        page->page_bytes != (uint64_t)st.st_size || needed > (size_t)st.st_size ||
        process >= page->n_processes) {
        fprintf(stderr, "job page %s: wrong magic, version or size, or no place for process %u of %u\n", path,
                process, page->n_processes);
        munmap(map, (size_t)st.st_size);
        return -1;
    }
    *job = (struct job){.page = page, .process = process, .window = window};
    atomic_store(&page->processes[process].pid, (int32_t)getpid());
    return 0;
}

void job_close(struct job *job) {
    if (job->page != NULL)
        munmap(job->page, job->page->page_bytes);
    job->page = NULL;
}

void job_set_state(struct job *job, enum process_state state) {
    atomic_store(&job->page->processes[job->process].state, (uint32_t)state);
}

int job_fail(struct job *job) {
    uint64_t nobody = 0;
    job_set_state(job, PROCESS_FAILED);
    return atomic_compare_exchange_strong(&job->page->abort_by, &nobody, (uint64_t)job->process + 1);
}

uint32_t job_aborted_by(const struct job *job) {
    uint64_t by = atomic_load(&job->page->abort_by);
    return by == 0 ? UINT32_MAX : (uint32_t)(by - 1);
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

static void look_for_dead_peers(struct job *job) {
    struct job_page *page = job->page;
    for (uint32_t i = 0; i < page->n_processes; i++) {
        struct job_process *peer = &page->processes[i];
        uint32_t state = atomic_load(&peer->state);
        int32_t pid = atomic_load(&peer->pid);
        if (i == job->process || state == PROCESS_FINISHED || pid == 0)
            continue;
        if (state != PROCESS_FAILED && !process_is_dead(pid))
            continue;
        /* It may have finished between the two looks. */
        if (atomic_load(&peer->state) == PROCESS_FINISHED)
            continue;
        uint64_t nobody = 0;
        atomic_compare_exchange_strong(&page->abort_by, &nobody, (uint64_t)i + 1);
        return;
    }
}

/* Returns 1 where the window lets `index` begin, 0 where it does not yet, -1 where it never will. */
static int window_allows(const struct job *job, uint64_t index) {
    const struct job_page *page = job->page;
    int allowed = 1;
    for (uint32_t i = 0; i < page->n_processes; i++) {
        const struct job_process *peer = &page->processes[i];
        if (i == job->process)
            continue;
        int finished = atomic_load(&peer->state) == PROCESS_FINISHED;
        if (index < atomic_load(&peer->begun) + job->window)
            continue;
        if (finished)
            return -1;
        allowed = 0;
    }
    return allowed;
}

static void apply_switches(struct job *job, uint64_t index) {
    while (job->n_applied < MAX_SWITCHES) {
        uint64_t entry = atomic_load(&job->page->switches[job->n_applied]);
        if (entry == 0 || (entry >> 8) > index)
            return;
        job->phase = (uint32_t)(entry & 0xff);
        job->n_applied++;
    }
}

enum admission job_admit(struct job *job, uint64_t index, idle_fn idle, void *argument, uint32_t *peer) {
    struct job_page *page = job->page;
    struct job_process *self = &page->processes[job->process];
    uint64_t next_look = 0;
    for (unsigned tries = 0;; tries++) {
        atomic_store(&self->intent, index + 1);
        int held = atomic_load(&page->hold) != 0;
        if (atomic_load(&page->abort_by) != 0) {
            *peer = job_aborted_by(job);
            return ADMIT_ABORT;
        }
        if (job_signalled)
            return ADMIT_SIGNAL;
        if (!held) {
            if (index >= atomic_load(&page->stop_at))
                return ADMIT_STOP;
            int allowed = window_allows(job, index);
            if (allowed < 0)
                return ADMIT_PEER_LEFT;
            if (allowed > 0 && index < atomic_load(&page->credit)) {
                apply_switches(job, index);
                atomic_store(&self->begun, index + 1);
                if (tries > SPINS)
                    job_set_state(job, PROCESS_RUNNING);
                return ADMIT_BEGIN;
            }
        }
        if (tries < SPINS)
            continue;
        if (tries == SPINS) {
            job_set_state(job, PROCESS_WAITING);
            next_look = host_ns() + LIVENESS_PERIOD_NS;
        }
        /* Withdrawn while asleep, so that a hold sees no more than what really began. */
        atomic_store(&self->intent, index);
        if (tries == SPINS + NAPS_BEFORE_IDLE)
            idle(argument);
        sleep_ns(NAP_NS);
        if (host_ns() >= next_look) {
            look_for_dead_peers(job);
            next_look = host_ns() + LIVENESS_PERIOD_NS;
        }
    }
}
