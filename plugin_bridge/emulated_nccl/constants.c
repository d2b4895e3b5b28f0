#define _GNU_SOURCE
#include "constants.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"
#include "release.h"

_Static_assert(sizeof(struct constants_header) == 24 + 144 * 8, "mirrored in constants.py");
_Static_assert(sizeof(struct constants) == 1104, "mirrored in constants.py");

static const struct constants_header *header;
static char folder[PATH_MAX];

static const char *check(const struct constants_header *h, uint64_t bytes) {
    if (memcmp(h->magic, CONSTANTS_MAGIC, sizeof(h->magic)) != 0 || h->version != CONSTANTS_VERSION)
        return "not a file of constants of this version";
    if (h->file_bytes != bytes || h->n_comms > MAX_COMMS ||
        h->n_comms > (bytes - sizeof(*h)) / sizeof(struct constants))
        return "its size is not what its header says";
    const struct constants *comm = (const void *)(h + 1);
    for (uint32_t i = 0; i < h->n_comms; i++, comm++) {
        if (comm->ranks == 0)
            continue;
        if (comm->nodes_offset % sizeof(uint16_t) != 0 || comm->nodes_offset > bytes ||
            comm->ranks > (bytes - comm->nodes_offset) / sizeof(uint16_t))
            return "a communicator points outside of the file";
        if (comm->nodes == 0 || comm->nodes > comm->ranks || comm->present > comm->ranks ||
            comm->channels == 0 || comm->channels > 64 || comm->nvls_channels > 64 ||
            comm->p2p_channels == 0 || comm->p2p_channels > 64 ||
            (comm->p2p_channels & (comm->p2p_channels - 1)) != 0 || comm->p2p_channels_per_peer == 0 ||
            comm->p2p_channels_per_peer > comm->p2p_channels)
            return "a communicator's counts cannot be";
        const uint16_t *nodes = (const void *)((const char *)h + comm->nodes_offset);
        for (uint32_t rank = 0; rank < comm->ranks; rank++)
            if (nodes[rank] >= comm->nodes)
                return "a rank is on a node that does not exist";
    }
    return NULL;
}

static void map_file(void) {
    const char *path = getenv("EMULATED_NCCL");
    struct stat st;
    void *map = MAP_FAILED;
    if (path == NULL || *path == '\0') {
        fail(NCCL_SYSTEM_ERROR,
             "EMULATED_NCCL does not name a file of constants (plugin_bridge/constants.py)");
        return;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(*header))
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map == MAP_FAILED) {
        fail(NCCL_SYSTEM_ERROR, "cannot map EMULATED_NCCL=%s: %s", path, strerror(errno));
        return;
    }
    const char *problem = check(map, (uint64_t)st.st_size);
    if (problem != NULL) {
        fail(NCCL_SYSTEM_ERROR, "EMULATED_NCCL=%s: %s", path, problem);
        munmap(map, (size_t)st.st_size);
        return;
    }
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 0;
    if (length == 0 || length >= sizeof(folder))
        strcpy(folder, slash == path ? "/" : ".");
    else
        memcpy(folder, path, length);
    header = map;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

const struct constants *constants_of(uint32_t number) {
    pthread_once(&once, map_file);
    if (header == NULL)
        return NULL;
    const struct constants *comms = (const void *)(header + 1);
    if (number < header->n_comms && comms[number].ranks > 0)
        return &comms[number];
    fail(NCCL_SYSTEM_ERROR, "EMULATED_NCCL=%s says nothing of communicator %u", getenv("EMULATED_NCCL"),
         number);
    return NULL;
}

const uint16_t *constants_nodes(const struct constants *constants) {
    return (const void *)((const char *)header + constants->nodes_offset);
}

void constants_tuner(struct tuner_constants *tuner) {
    *tuner = header->tuner;
    if (release()->blackwell_ring_ll128[0] > 0)
        memcpy(tuner->per_channel_max_ring_ll128_bws[3], release()->blackwell_ring_ll128,
               sizeof(release()->blackwell_ring_ll128));
    if (release()->blackwell_nvls_tree > 0)
        tuner->per_channel_max_nvls_tree_bws[3][2] = release()->blackwell_nvls_tree;
}

const char *constants_folder(void) {
    return folder;
}
