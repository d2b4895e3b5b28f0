#define _GNU_SOURCE
#include "rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "constants.h"
#include "log.h"

enum { NAP_NS = 50000, NAPS_UNTIL_LOOK = 1000 };

/* Two sets of slots: a rank that has written round n + 1 has read round n, so that nobody who writes round
 * n + 2 takes anything away. */
struct slot {
    _Atomic uint64_t round; /* release; pairs with the acquire in arrived() */
    struct said said;
};

struct rendezvous {
    struct slot *slots[2];
    size_t bytes;
    int ranks, present, rank;
    uint64_t round;
    char path[PATH_MAX];
};

struct rendezvous *rendezvous_open(uint64_t id, int ranks, int present, int rank) {
    struct rendezvous *r = calloc(1, sizeof(*r));
    if (r == NULL)
        abort();
    snprintf(r->path, sizeof(r->path), "%s/rendezvous-%016llx", constants_folder(), (unsigned long long)id);
    r->ranks = ranks;
    r->present = present;
    r->rank = rank;
    r->bytes = 2 * (size_t)ranks * sizeof(struct slot);
    void *map = MAP_FAILED;
    int fd = open(r->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    /* Every rank does this: zeroes are a rendezvous where nobody is yet. */
    if (fd >= 0 && ftruncate(fd, (off_t)r->bytes) == 0)
        map = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map == MAP_FAILED) {
        fail(NCCL_SYSTEM_ERROR, "cannot make %s: %s", r->path, strerror(errno));
        free(r);
        return NULL;
    }
    r->slots[0] = map;
    r->slots[1] = r->slots[0] + ranks;
    return r;
}

void rendezvous_close(struct rendezvous *r) {
    if (r == NULL)
        return;
    munmap(r->slots[0], r->bytes);
    free(r);
}

void rendezvous_hide(const struct rendezvous *r) {
    unlink(r->path);
}

static int arrived(const struct rendezvous *r, struct said *all) {
    int n = 0;
    for (int i = 0; i < r->ranks; i++) {
        struct slot *slot = &r->slots[r->round & 1][i];
        all[i] = (struct said){0};
        if (atomic_load_explicit(&slot->round, memory_order_acquire) != r->round)
            continue;
        all[i] = slot->said;
        n++;
    }
    return n;
}

/* 0, or the process of a rank that was here in this round or the last and is gone. */
static int dead_peer(const struct rendezvous *r) {
    for (int set = 0; set < 2; set++)
        for (int i = 0; i < r->ranks; i++) {
            int pid = r->slots[set][i].said.pid;
            if (pid != 0 && kill(pid, 0) != 0 && errno == ESRCH)
                return pid;
        }
    return 0;
}

nccl_result rendezvous_exchange(struct rendezvous *r, const struct said *mine, struct said *all,
                                const volatile uint32_t *abort) {
    struct slot *slot = &r->slots[++r->round & 1][r->rank];
    slot->said = *mine;
    slot->said.present = true;
    atomic_store_explicit(&slot->round, r->round, memory_order_release);
    for (unsigned naps = 0; arrived(r, all) < r->present; naps++) {
        if (*abort)
            return NCCL_INTERNAL_ERROR;
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        int dead = naps % NAPS_UNTIL_LOOK == NAPS_UNTIL_LOOK - 1 ? dead_peer(r) : 0;
        if (dead != 0)
            return fail(NCCL_SYSTEM_ERROR, "a rank of the communicator is gone: process %d", dead);
    }
    return NCCL_SUCCESS;
}
