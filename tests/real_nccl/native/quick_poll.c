/* Preloaded: nobody sleeps for long in poll(). A communicator's end waits for a thread of NCCL's that looks
 * up twice a second. */
#define _GNU_SOURCE
#include <poll.h>
#include <stddef.h>
#include <time.h>

enum { MOST_MS = 5 };

int poll(struct pollfd *fds, nfds_t n, int timeout_ms) {
    int ms = timeout_ms < 0 || timeout_ms > MOST_MS ? MOST_MS : timeout_ms;
    struct timespec most = {.tv_nsec = ms * 1000000L};
    int ready = ppoll(fds, n, &most, NULL);
    /* Whoever would wait forever does not expect to hear of nothing. */
    while (ready == 0 && timeout_ms < 0) {
        most.tv_nsec = MOST_MS * 1000000L;
        ready = ppoll(fds, n, &most, NULL);
    }
    return ready;
}
