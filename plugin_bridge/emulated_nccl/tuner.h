/* The tuner plugin: loaded with the first communicator, and called through the interface of its version. */
#ifndef DYNAMICCL_EMULATED_TUNER_H
#define DYNAMICCL_EMULATED_TUNER_H

#include <stdbool.h>

#include "plugin_abi.h"

typedef float cost_table[N_ALGORITHMS][N_PROTOCOLS];

/* A plugin of any version, called as one of the newest. */
struct tuner {
    int version;
    const char *name;
    nccl_result (*init)(void **context, uint64_t id, size_t ranks, size_t nodes,
                        struct nvl_domain_info *domains, struct tuner_constants *constants);
    /* *algorithm and *protocol are what v2 answered, else undefined. */
    nccl_result (*get_coll_info)(void *context, int func, size_t bytes, int pipe_ops, cost_table cost,
                                 bool registered, int *channels, int *algorithm, int *protocol);
    get_chunk_size_fn get_chunk_size; /* NULL: it has none */
    nccl_result (*finalize)(void *context);
};

/* One communicator more. *first says that it is the one that loaded the plugin. NULL: there is no tuner. */
const struct tuner *tuner_load(bool *first);
/* As in NCCL only the communicator that loaded the plugin counts itself out. So the plugin goes with that
 * one where it was alone all the time, and else stays. */
void tuner_unload(bool first);

#endif
