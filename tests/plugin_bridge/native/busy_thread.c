/* A thread of a given name that works for a while, then sleeps: without a lock that others could hold (a
 * thread of Python's sleeps whenever it waits for the interpreter). */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct busy {
    char name[16];
    int work_ms;
    atomic_int named, rests;
    sem_t over;
    pthread_t thread;
};

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static void *work(void *argument) {
    struct busy *busy = argument;
    pthread_setname_np(pthread_self(), busy->name);
    busy->named = 1;
    for (double end = now_ms() + busy->work_ms; now_ms() < end;)
        ;
    busy->rests = 1;
    sem_wait(&busy->over);
    return NULL;
}

struct busy *busy_start(const char *name, int work_ms) {
    struct busy *busy = calloc(1, sizeof(*busy));
    for (int at = 0; at < 15 && name[at]; at++)
        busy->name[at] = name[at];
    busy->work_ms = work_ms;
    sem_init(&busy->over, 0, 0);
    pthread_create(&busy->thread, NULL, work, busy);
    while (!busy->named)
        ;
    return busy;
}

int busy_rests(struct busy *busy) {
    return busy->rests;
}

void busy_end(struct busy *busy) {
    sem_post(&busy->over);
    pthread_join(busy->thread, NULL);
    free(busy);
}
