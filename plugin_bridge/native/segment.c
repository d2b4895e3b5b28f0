#define _GNU_SOURCE
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* What must stay free for NCCL's own shared-memory transport, which fails hard when /dev/shm is full.
 * Docker's default /dev/shm of 64 MiB is therefore never touched. */
#define RESERVE_BYTES (64ull << 20)
#define MOST_SEGMENTS 4096

static _Atomic uint32_t ordinals;

/* Segments that this process has made or removed so far: who serves a step boundary need not look for new
 * ones in the file system each time. Read by plugin_bridge/job.py. */
__attribute__((visibility("default"))) _Atomic uint64_t dynamiccl_segments_changed;

/* Field 22 of /proc/self/stat; the name in field 2 may hold spaces, so count from its closing parenthesis. */
static uint64_t start_time(void) {
    char text[1024];
    FILE *f = fopen("/proc/self/stat", "re");
    if (!f)
        return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    char *p = strrchr(text, ')');
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    return p ? strtoull(p + 1, NULL, 10) : 0;
}

/* As it stands in file names: everything but ASCII letters, digits, '_' and '.' as =XX, so that no two ids
 * share a name. plugin_bridge/segments.py does the same. */
static void file_name(const char *job, char *out) {
    for (; *job; job++) {
        unsigned char c = (unsigned char)*job;
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
                     c == '.';
        out += sprintf(out, plain ? "%c" : "=%02X", c);
    }
    *out = 0;
}

/* On a file of its own: a lock lasts as long as any mapping of its open file, and forked children have those.
 */
static int lock(const char *path) {
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    struct flock held = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    if (fd >= 0 && fcntl(fd, F_OFD_SETLK, &held) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

struct dcc_segment *segment_create(char *path, int *lock_fd, char *error) {
    const char *dir = getenv("DYNAMICCL_SHM_DIR");
    if (!dir || !*dir)
        dir = "/dev/shm";
    const char *given = getenv("DYNAMICCL_JOB_ID");
    char job[DCC_NAME_BYTES] = {0}, name[3 * DCC_NAME_BYTES];
    snprintf(job, sizeof job, "%s", given && *given ? given : "default");
    file_name(job, name);
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < sizeof(struct dcc_segment)) {
        snprintf(
            error, 512,
            "no file may be larger than %llu bytes here, and a channel has %zu; tuning stays off (ulimit -f)",
            (unsigned long long)limit.rlim_cur, sizeof(struct dcc_segment));
        return NULL;
    }
    struct statvfs fs;
    if (statvfs(dir, &fs) != 0) {
        snprintf(error, 512, "cannot read %.200s: %s; tuning stays off", dir, strerror(errno));
        return NULL;
    }
    uint64_t available = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (available < sizeof(struct dcc_segment) + RESERVE_BYTES) {
        snprintf(
            error, 512,
            "%.200s has %llu MiB free, fewer than the %llu MiB that a channel and NCCL's own shared memory "
            "need; tuning stays off (in a container: --shm-size=1g)",
            dir, (unsigned long long)(available >> 20),
            (unsigned long long)((sizeof(struct dcc_segment) + RESERVE_BYTES + (1 << 20) - 1) >> 20));
        return NULL;
    }
    uint32_t ordinal;
    int fd;
    do {
        ordinal = atomic_fetch_add(&ordinals, 1);
        if ((size_t)snprintf(path, 256, "%s/dynamiccl-%s-%d-%u", dir, name, (int)getpid(), ordinal) >= 256) {
            snprintf(error, 512, "DYNAMICCL_SHM_DIR=%.200s is too long; tuning stays off", dir);
            return NULL;
        }
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        /* The name of a process in another PID namespace, or of one that is gone: not ours to judge here. */
    } while (fd < 0 && errno == EEXIST && ordinal < MOST_SEGMENTS);
    if (fd < 0) {
        snprintf(error, 512,
                 "cannot create %.255s: %s; tuning stays off (DYNAMICCL_SHM_DIR names another directory)",
                 path, strerror(errno));
        return NULL;
    }
    /* Reserve the pages now: touching a page of a full tmpfs later would be a SIGBUS in the training process.
     */
    int failed = posix_fallocate(fd, 0, sizeof(struct dcc_segment));
    struct dcc_segment *seg = MAP_FAILED;
    if (!failed) {
        seg = mmap(NULL, sizeof *seg, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        failed = seg == MAP_FAILED ? errno : 0;
    }
    close(fd);
    if (!failed && (*lock_fd = lock(path)) < 0) {
        failed = errno;
        munmap(seg, sizeof *seg);
    }
    if (failed) {
        unlink(path);
        snprintf(error, 512, "cannot reserve %zu bytes for %.255s: %s; tuning stays off", sizeof *seg, path,
                 strerror(failed));
        return NULL;
    }
    atomic_fetch_add(&dynamiccl_segments_changed, 1);
    seg->magic = DCC_MAGIC;
    seg->abi = DCC_ABI;
    seg->record_bytes = sizeof(struct dcc_record);
    seg->ring_records = DCC_RING_RECORDS;
    seg->table_bytes = sizeof(struct dcc_table);
    seg->segment_bytes = sizeof *seg;
    seg->identity.pid = (uint32_t)getpid();
    seg->identity.start_time = start_time();
    seg->identity.ordinal = ordinal;
    atomic_store(&seg->identity.rank, UINT32_MAX);
    memcpy(seg->identity.job, job, sizeof job);
    atomic_store(&seg->runner.hold_at, DCC_NO_HOLD);
    /* Touch the page tables too, so that the first collectives do not fault them in. */
    for (size_t i = 0; i < sizeof *seg; i += 4096)
        *(volatile char *)((char *)seg + i) = *(volatile char *)((char *)seg + i);
    return seg;
}

void segment_close(struct dcc_segment *seg, const char *path, int lock_fd) {
    atomic_store_explicit(&seg->state, DCC_CLOSED, memory_order_release);
    unlink(path);
    close(lock_fd);
    atomic_fetch_add(&dynamiccl_segments_changed, 1);
}

void segment_remove(struct dcc_segment *seg, const char *path, int lock_fd) {
    segment_close(seg, path, lock_fd);
    munmap(seg, sizeof *seg);
}
