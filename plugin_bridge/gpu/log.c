#define _GNU_SOURCE
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RECORDS = 1024 };
_Static_assert(sizeof(struct gpu_log_record) == 80, "mirrored in nccl_job.py");

/* Not a FILE: the process may end while the player writes, and then both would write what is left. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int fd = -1;
static struct gpu_log_record records[RECORDS];
static size_t n;

/* Under the lock. */
static void write_out(void) {
    const char *from = (const char *)records;
    size_t left = n * sizeof(records[0]);
    while (left > 0) {
        ssize_t wrote = write(fd, from, left);
        if (wrote < 0 && errno != EINTR)
            break;
        from += wrote > 0 ? wrote : 0;
        left -= wrote > 0 ? (size_t)wrote : 0;
    }
    n = 0;
}

void gpu_log_flush(void) {
    pthread_mutex_lock(&lock);
    write_out();
    pthread_mutex_unlock(&lock);
}

int gpu_log_open(void) {
    const char *path = getenv("GPU_LOG");
    if (path == NULL || *path == 0)
        return 0;
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        fprintf(stderr, "cannot write GPU_LOG=%s: %s\n", path, strerror(errno));
        return -1;
    }
    return atexit(gpu_log_flush);
}

bool gpu_log_is_open(void) {
    return fd >= 0;
}

void gpu_log_add(const struct gpu_log_record *record) {
    pthread_mutex_lock(&lock);
    records[n++] = *record;
    if (n == RECORDS)
        write_out();
    pthread_mutex_unlock(&lock);
}
