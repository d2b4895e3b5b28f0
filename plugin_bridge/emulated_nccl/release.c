#define _GNU_SOURCE
#include "release.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Read in the sources of the releases. 2.21 planned its launches in another way; here it plans as 2.22. */
static const struct release releases[] = {
    {.minor = 21, .patch = 5, .tuner = 2, .algorithms = 6, .least_traffic = 512, .coll_bytes = 64},
    {.minor = 22, .patch = 3, .tuner = 3, .algorithms = 6, .least_traffic = 512, .coll_bytes = 64},
    {.minor = 23,
     .patch = 4,
     .tuner = 3,
     .profiler = 1,
     .algorithms = 7,
     .registers_direct = true,
     .least_traffic = 16 << 10,
     .coll_bytes = 96,
     .names_in_events = true},
    {.minor = 24,
     .patch = 3,
     .tuner = 4,
     .profiler = 2,
     .algorithms = 7,
     .registers_direct = true,
     .least_traffic = 16 << 10,
     .coll_bytes = 96,
     .names_in_events = true},
    {.minor = 26,
     .patch = 2,
     .tuner = 4,
     .profiler = 3,
     .algorithms = 7,
     .registers_direct = true,
     .least_traffic = 16 << 10,
     .coll_bytes = 96,
     .mask_of_task = true,
     .names_in_events = true},
    {.minor = 27,
     .patch = 3,
     .tuner = 4,
     .profiler = 4,
     .algorithms = 7,
     .registers_direct = true,
     .least_traffic = 16 << 10,
     .coll_bytes = 96,
     .mask_of_task = true},
    {.minor = 28,
     .patch = 3,
     .tuner = 5,
     .profiler = 5,
     .algorithms = 7,
     .registers_direct = true,
     .least_traffic = 16 << 10,
     .coll_bytes = 96,
     .jobs_inline = true,
     .mask_of_task = true,
     .api_events = true,
     .blackwell_ring_ll128 = {73.4, 34.6, 73.4},
     .blackwell_nvls_tree = 43.8},
    {.minor = 29,
     .patch = 2,
     .tuner = 5,
     .profiler = 6,
     .algorithms = 7,
     .registers_direct = true,
     .least_traffic = 32 << 10,
     .coll_bytes = 96,
     .rounds_traffic = true,
     .jobs_inline = true,
     .mask_of_task = true,
     .api_events = true,
     .bcast_apart = true,
     .p2p_simple_first = true,
     .blackwell_nvls_tree = 43.8,
     .corrects_nvls_tree = true},
    {.minor = 30,
     .patch = 3,
     .tuner = 6,
     .profiler = 6,
     .algorithms = 7,
     .registers_direct = true,
     .channel_per_device = true,
     .least_traffic = 32 << 10,
     .coll_bytes = 128,
     .rounds_traffic = true,
     .jobs_inline = true,
     .mask_of_task = true,
     .api_events = true,
     .bcast_apart = true,
     .p2p_simple_first = true,
     .corrects_nvls_tree = true},
};
enum { N_RELEASES = sizeof(releases) / sizeof(releases[0]), DEFAULT_MINOR = 30, DEFAULT_PATCH = 7 };

static const struct release *chosen;
static int number;

static void choose(void) {
    const char *text = getenv("EMULATED_NCCL_VERSION");
    int minor = DEFAULT_MINOR, patch = DEFAULT_PATCH, read = 0;
    if (text && *text) {
        patch = -1;
        if (sscanf(text, "2.%d%n.%d%n", &minor, &read, &patch, &read) < 1 || text[read] != '\0')
            minor = 0;
    }
    for (int i = 0; i < N_RELEASES; i++)
        if (releases[i].minor <= minor)
            chosen = &releases[i];
    if (chosen == NULL || minor > releases[N_RELEASES - 1].minor) {
        fprintf(stderr, "EMULATED_NCCL_VERSION=%s: there are 2.%d to 2.%d, with or without a patch number\n",
                text, releases[0].minor, releases[N_RELEASES - 1].minor);
        _exit(1);
    }
    number = 20000 + 100 * minor + (patch >= 0 ? patch : chosen->patch);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

const struct release *release(void) {
    pthread_once(&once, choose);
    return chosen;
}

int release_number(void) {
    pthread_once(&once, choose);
    return number;
}
