/* What goes wrong on purpose: EMULATED_NCCL_FAULTS=NAME=NUMBER,... */
#ifndef DYNAMICCL_EMULATED_FAULTS_H
#define DYNAMICCL_EMULATED_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

struct faults {
    unsigned lag_us;      /* the proxy thread sleeps so long before each pass, and no launch waits for it */
    unsigned zero_timers; /* per mille of the channels' stops whose timer reads 0 */
    unsigned late_starts; /* per mille of the channels whose start is looked for before the kernel runs, and
                             whose stop after: the start is skipped */
    unsigned foreign_ops; /* per mille of the operations that bring a network operation of another process */
};

/* Ends the process where the variable says something else. */
const struct faults *faults(void);
/* True for so many of a thousand numbers; the same for equal numbers. */
bool fault_strikes(unsigned per_mille, uint64_t number);

#endif
