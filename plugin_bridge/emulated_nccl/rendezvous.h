/* Where the ranks of a communicator find each other while it is created or split: a small file that all of
 * them map. NCCL has sockets for it. Only ranks that there are processes for take part. */
#ifndef DYNAMICCL_EMULATED_RENDEZVOUS_H
#define DYNAMICCL_EMULATED_RENDEZVOUS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "api.h"

struct rendezvous;

/* What one rank tells the others. */
struct said {
    bool present; /* set by rendezvous_exchange() */
    int pid, color, key;
    struct comm *comm; /* for ranks of the same process */
};

/* NULL and the reason in the log where the file cannot be made. */
struct rendezvous *rendezvous_open(uint64_t id, int ranks, int present, int rank);
void rendezvous_close(struct rendezvous *rendezvous);

/* Every rank calls this equally often. all[] is by rank. Fails where `abort` becomes true or a rank that
 * came before has died. */
nccl_result rendezvous_exchange(struct rendezvous *rendezvous, const struct said *mine, struct said *all,
                                const volatile uint32_t *abort);

/* Removes the file's name; who has it open keeps it. Once all ranks have exchanged something. */
void rendezvous_hide(const struct rendezvous *rendezvous);

#endif
