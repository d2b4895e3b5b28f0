/* A tuner and a profiler that write down every call that NCCL makes, as a line of JSON each.
 *
 * Compiled with SPY_TUNER and SPY_PROFILER, the newest versions that it has. Environment: SPY_LOG, the folder
 * of the logs, a file per process; SPY_MASK, the events to ask for; SPY_ASK, what the tuner asks for, call
 * after call and over again: "algorithm.protocol.channels" or nothing, separated by semicolons; SPY_CHUNK,
 * what to divide large chunks by. */
#ifndef SPY_H
#define SPY_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../plugin_bridge/emulated_nccl/plugin_abi.h"

#define SHOWN __attribute__((visibility("default")))

/* A line: its call, then what is to be said of it, then its end. */
void begin(const char *call);
void add(const char *format, ...);
void number(const char *key, long long value);
/* Hashes and addresses do not fit every reader's integers. */
void word(const char *key, uint64_t value);
void text(const char *key, const char *value);
void end(void);

/* What NCCL gets from here, by number. */
enum { MOST = 1 << 16 };
struct thing {
    int number, calls;
};
struct thing *new_thing(struct thing *things, _Atomic int *n);
int number_of(const struct thing *things, const void *thing);

#endif
