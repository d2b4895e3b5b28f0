/* The devices, and the virtual clocks of the host threads that drive them. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "queue.h"

#define EPOCH_NS 1700000000000000000u

static struct {
    _Atomic uint64_t host_ns;
    _Atomic uint32_t phase;
    _Atomic uint64_t step;
} devices[GPU_MAX_DEVICES];
static __thread int current;

uint64_t gpu_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int gpu_device_count(void) {
    static int count;
    if (count == 0) {
        const char *text = getenv("GPU_DEVICES");
        int n = text ? atoi(text) : 8;
        count = n >= 1 && n <= GPU_MAX_DEVICES ? n : 8;
    }
    return count;
}

void gpu_set_device(int device) {
    current = device;
}

int gpu_get_device(void) {
    return current;
}

uint64_t gpu_host_ns(int device) {
    return atomic_load(&devices[device].host_ns);
}

void gpu_host_advance(int device, uint64_t ns) {
    atomic_fetch_add(&devices[device].host_ns, ns);
}

void gpu_set_phase(int device, uint32_t phase, uint64_t step) {
    atomic_store(&devices[device].phase, phase);
    atomic_store(&devices[device].step, step);
}

void gpu_host_reaches(int device, uint64_t ns) {
    uint64_t now = atomic_load(&devices[device].host_ns);
    while (now < ns && !atomic_compare_exchange_weak(&devices[device].host_ns, &now, ns)) {
    }
}

void gpu_get_phase(int device, uint32_t *phase, uint64_t *step) {
    *phase = atomic_load_explicit(&devices[device].phase, memory_order_relaxed);
    *step = atomic_load_explicit(&devices[device].step, memory_order_relaxed);
}

uint64_t gpu_timestamp(int device, uint64_t virtual_ns) {
    uint64_t ns = EPOCH_NS + (uint64_t)device * 7919u * GPU_TIMER_NS + virtual_ns;
    return ns / GPU_TIMER_NS * GPU_TIMER_NS;
}
