/* What the parts of the stress test share. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "comm.h"
#include "govern.h"
#include "handle.h"
#include "reader.h"
#include "ring.h"
#include "table.h"

enum { CALL_BYTES = 1 << 20, ALL_REDUCE = 4 };

/* A thread that calls as NCCL does. */
struct caller {
    struct comm *comm;
    uint64_t seed;
    _Atomic bool stop;
    struct caller *all;
};

/* Says what broke, and ends the test. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* SplitMix64 */
uint64_t draw(uint64_t *state);
/* Nothing, a few instructions, a yield, or a short sleep: the interleavings of two cores and of one. */
void dawdle(uint64_t *random);
pthread_t begin(void *(*function)(void *), void *argument);

/* The parts. */
void test_ring(uint64_t seed);
void test_agreement(uint64_t seed);
void test_events(uint64_t seed);
void test_lost(uint64_t seed);
void test_stale(uint64_t seed);
void test_groups(uint64_t seed);
void test_passed_over(uint64_t seed);
void test_sure(uint64_t seed);
void test_mask(uint64_t seed);
void test_pause(uint64_t seed);
void test_timed(uint64_t seed);
void test_job(uint64_t seed);
