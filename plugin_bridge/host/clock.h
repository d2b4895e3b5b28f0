/* Host time, waiting, and the counter-based noise. Any thread may call everything here. */
#ifndef DYNAMICCL_HOST_CLOCK_H
#define DYNAMICCL_HOST_CLOCK_H

#include <math.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t host_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void sleep_ns(uint64_t ns) {
    struct timespec span = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&span, NULL);
}

/* nanosleep overshoots by some 60 microseconds, so the last part is spun. */
static inline void wait_until_ns(uint64_t deadline) {
    for (;;) {
        uint64_t now = host_ns();
        if (now >= deadline)
            return;
        if (deadline - now > 150000)
            sleep_ns(deadline - now - 100000);
    }
}

/* Sebastiano Vigna's splitmix64 step as a stateless mixer. */
static inline uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Standard normal number `index` of stream `seed` (Box-Muller); emulation.noise computes the same. */
static inline double noise(uint64_t seed, uint64_t index) {
    uint64_t stream = mix64(seed);
    double u1 = (double)((mix64(stream ^ (2 * index)) >> 11) + 1) * 0x1p-53; /* (0, 1] */
    double u2 = (double)(mix64(stream ^ (2 * index + 1)) >> 11) * 0x1p-53;   /* [0, 1) */
    return sqrt(-2.0 * log(u1)) * cos(6.283185307179586476925 * u2);
}

static inline uint64_t comm_stream(uint64_t seed, uint64_t comm_id) {
    return seed ^ mix64(comm_id);
}

static inline uint64_t rank_stream(uint64_t seed, uint64_t comm_id, uint32_t rank) {
    return comm_stream(seed, comm_id) ^ mix64((uint64_t)rank + 0x52414e4b00000000u);
}

#endif
