#define _GNU_SOURCE
#include "tuner.h"

#include <pthread.h>
#include <stdio.h>

#include "library.h"
#include "log.h"
#include "release.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static enum { NOT_LOADED, LOADED, FAILED } status;
static int users;
static void *library;

/* Of the version that was found. */
static union {
    const void *symbol;
    const struct tuner_v2 *v2;
    const struct tuner_v3 *v3;
    const struct tuner_v4 *v4;
    const struct tuner_v5 *v5;
    const struct tuner_v6 *v6;
} plugin;

/* ---- what the versions differ in ---- */

static bool available(float cost) {
    return cost >= 0.0f;
}

/* init has the same place and signature in v2, v3 and v4. */
static nccl_result init_v2(void **context, uint64_t id, size_t ranks, size_t nodes,
                           struct nvl_domain_info *domains, struct tuner_constants *constants) {
    (void)id, (void)domains, (void)constants;
    return plugin.v2->init(ranks, nodes, nccl_log, context);
}

static nccl_result init_v5(void **context, uint64_t id, size_t ranks, size_t nodes,
                           struct nvl_domain_info *domains, struct tuner_constants *constants) {
    return plugin.v5->init(context, id, ranks, nodes, nccl_log, domains, constants);
}

/* v2 had no table: its two support flags are read off the table, and the pair that it asks for becomes the
 * cheapest. */
static nccl_result ask_v2(void *context, int func, size_t bytes, int pipe_ops, cost_table cost,
                          bool registered, int *channels, int *algorithm, int *protocol) {
    (void)registered;
    int nvls = available(cost[ALGO_NVLS][PROTO_SIMPLE]) || available(cost[ALGO_NVLS_TREE][PROTO_SIMPLE]);
    int collnet = available(cost[ALGO_COLLNET_CHAIN][PROTO_SIMPLE]);
    nccl_result result = plugin.v2->get_coll_info(context, func, bytes, collnet, nvls, pipe_ops, algorithm,
                                                  protocol, channels);
    if (*algorithm >= 0 && *algorithm < release()->algorithms && *protocol >= 0 && *protocol < N_PROTOCOLS &&
        available(cost[*algorithm][*protocol]))
        cost[*algorithm][*protocol] = 0.0f;
    return result;
}

static nccl_result ask_v3(void *context, int func, size_t bytes, int pipe_ops, cost_table cost,
                          bool registered, int *channels, int *algorithm, int *protocol) {
    (void)registered, (void)algorithm, (void)protocol;
    return plugin.v3->get_coll_info(context, func, bytes, pipe_ops, (float **)(void *)cost,
                                    release()->algorithms, N_PROTOCOLS, channels);
}

/* getCollInfo has the same place and signature in v4, v5 and v6. */
static nccl_result ask_v4(void *context, int func, size_t bytes, int pipe_ops, cost_table cost,
                          bool registered, int *channels, int *algorithm, int *protocol) {
    (void)algorithm, (void)protocol;
    return plugin.v4->get_coll_info(context, func, bytes, pipe_ops, (float **)(void *)cost,
                                    release()->algorithms, N_PROTOCOLS, registered, channels);
}

/* destroy and finalize too. */
static nccl_result finalize(void *context) {
    return plugin.v4->destroy(context);
}

/* ---- loading ---- */

static struct tuner tuner;

static bool find(void) {
    for (int version = release()->tuner; version >= 2; version--) {
        char name[32];
        snprintf(name, sizeof(name), "ncclTunerPlugin_v%d", version);
        plugin.symbol = library_symbol(library, name);
        if (plugin.symbol == NULL)
            continue;
        tuner = (struct tuner){
            .version = version,
            .name = plugin.v2->name,
            .init = version >= 5 ? init_v5 : init_v2,
            .get_coll_info = version == 2   ? ask_v2
                             : version == 3 ? ask_v3
                                            : ask_v4,
            .get_chunk_size = version >= 6 ? plugin.v6->get_chunk_size : NULL,
            .finalize = finalize,
        };
        if (tuner.name == NULL) {
            fail(NCCL_INTERNAL_ERROR, "%s has no name, which NCCL prints", name);
            return false;
        }
        nccl_log(LOG_LEVEL_INFO, LOG_INIT | LOG_TUNING, NULL, 0, "TUNER/Plugin: Using %s (v%d)", tuner.name,
                 version);
        return true;
    }
    nccl_log(LOG_LEVEL_INFO, LOG_INIT | LOG_TUNING, NULL, 0, "the tuner plugin has no version that is known");
    return false;
}

const struct tuner *tuner_load(bool *first) {
    *first = false;
    pthread_mutex_lock(&lock);
    if (status == NOT_LOADED) {
        library = library_open("tuner");
        status = library && find() ? LOADED : FAILED;
        *first = status == LOADED;
        if (status == FAILED && library)
            library_close(library);
    }
    users += status == LOADED;
    const struct tuner *found = status == LOADED ? &tuner : NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

void tuner_unload(bool first) {
    pthread_mutex_lock(&lock);
    if (first && --users == 0) {
        library_close(library);
        status = NOT_LOADED;
    }
    pthread_mutex_unlock(&lock);
}
