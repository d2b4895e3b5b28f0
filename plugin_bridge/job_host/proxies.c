#define _GNU_SOURCE
#include "proxies.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { POLL_US = 200 };

static bool is_busy(const char *thread) {
    char path[64], line[256];
    snprintf(path, sizeof(path), "/proc/self/task/%.20s/stat", thread);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool read = fgets(line, sizeof(line), file) != NULL;
    fclose(file);
    if (!read)
        return false;
    /* "1234 (NCCL Progress 4) S ...": one that waits for work sleeps; one that has some runs or yields. */
    const char *name = strchr(line, '('), *end = strrchr(line, ')');
    return name && end && strncmp(name, "(NCCL Progress", 14) == 0 && end[1] == ' ' && end[2] != 'S';
}

static bool any_is_busy(void) {
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL)
        return false;
    bool busy = false;
    for (const struct dirent *task; !busy && (task = readdir(tasks)) != NULL;)
        busy = task->d_name[0] != '.' && is_busy(task->d_name);
    closedir(tasks);
    return busy;
}

void proxies_wait(void) {
    for (int waited_us = 0; waited_us < PROXIES_WAIT_MS * 1000 && any_is_busy(); waited_us += POLL_US)
        usleep(POLL_US);
}
