/* Waiting for what another rank or thread has to bring. Ranks share processors here: those that wait for a
 * late one must leave them to it. */
#ifndef DYNAMICCL_GPU_NAP_H
#define DYNAMICCL_GPU_NAP_H

#include <time.h>

/* `turns` in a row have found nothing. Naps grow with the time that was waited already, and stay a small part
 * of it. */
static inline void gpu_nap(unsigned turns) {
    enum { EAGER = 10, EAGER_NS = 5000, STEP_NS = 20000, MOST = 50 };
    unsigned steps = turns < EAGER ? 0 : turns - EAGER + 1;
    long ns = steps == 0 ? EAGER_NS : (long)STEP_NS * (steps < MOST ? steps : MOST);
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

#endif
