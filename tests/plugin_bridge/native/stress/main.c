/* Both ends of the channel in one process, so that the sanitizers see both: the plugin's sources and the
 * runner's are linked in and driven from threads that know nothing of each other.
 *
 *   stress [ring|agreement|events|lost|stale|groups|passed-over|sure|mask|pause|timed|job] [SEED]
 *      everything without an argument
 *
 * Prints a line per part. Ends with 1 and a line that says what broke. */
#define _GNU_SOURCE
#include "stress.h"

_Noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "stress: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    _exit(1);
}

uint64_t draw(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void dawdle(uint64_t *random) {
    uint64_t x = draw(random);
    switch (x % 16) {
    case 0:
        sched_yield();
        break;
    case 1:
        nanosleep(&(struct timespec){.tv_nsec = (long)(x >> 8) % 20000}, NULL);
        break;
    case 2:
    case 3:
        for (volatile unsigned i = 0; i < (x >> 8) % 400; i++) {
        }
        break;
    default:
        break;
    }
}

#ifdef DCC_STRESS
void dcc_interleave(void) {
    static _Atomic uint64_t threads;
    static _Thread_local uint64_t random;
    if (!random)
        random = atomic_fetch_add(&threads, 1) + 1;
    if (draw(&random) % 8 == 0)
        dawdle(&random);
}
#endif

pthread_t begin(void *(*function)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, argument))
        fail("cannot create a thread");
    return thread;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(uint64_t seed);
    } parts[] = {{"ring", test_ring},
                 {"agreement", test_agreement},
                 {"events", test_events},
                 {"lost", test_lost},
                 {"stale", test_stale},
                 {"groups", test_groups},
                 {"passed-over", test_passed_over},
                 {"sure", test_sure},
                 {"mask", test_mask},
                 {"pause", test_pause},
                 {"timed", test_timed},
                 {"job", test_job}};
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (argc < 2 || strcmp(argv[1], parts[i].name) == 0) {
            parts[i].run(seed);
            fflush(stdout);
        }
    return 0;
}
