#define _GNU_SOURCE
#include "faults.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct faults set;

static void read_variable(void) {
    const struct {
        const char *name;
        unsigned *value;
    } known[] = {{"lag_us", &set.lag_us},
                 {"zero_timers", &set.zero_timers},
                 {"late_starts", &set.late_starts},
                 {"foreign_ops", &set.foreign_ops}};
    const char *text = getenv("EMULATED_NCCL_FAULTS");
    for (const char *at = text; at && *at;) {
        char name[32];
        unsigned value;
        int length = 0;
        size_t which = 0;
        if (sscanf(at, "%31[a-z_]=%u%n", name, &value, &length) == 2 &&
            (at[length] == ',' || at[length] == '\0'))
            while (which < sizeof(known) / sizeof(known[0]) && strcmp(name, known[which].name) != 0)
                which++;
        else
            which = sizeof(known) / sizeof(known[0]);
        if (which == sizeof(known) / sizeof(known[0])) {
            fprintf(stderr,
                    "EMULATED_NCCL_FAULTS=%s: expected lag_us, zero_timers, late_starts or foreign_ops, each "
                    "with =NUMBER, and commas between\n",
                    text);
            _exit(1);
        }
        *known[which].value = value;
        at += length + (at[length] == ',');
    }
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

const struct faults *faults(void) {
    pthread_once(&once, read_variable);
    return &set;
}

/* Sebastiano Vigna's splitmix64 step. */
bool fault_strikes(unsigned per_mille, uint64_t number) {
    number += 0x9e3779b97f4a7c15u;
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9u;
    number = (number ^ (number >> 27)) * 0x94d049bb133111ebu;
    return (number ^ (number >> 31)) % 1000 < per_mille;
}
