#include "fifo.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

namespace fake {
namespace {

constexpr uint64_t FAR_AHEAD = uint64_t{1} << 48;
constexpr unsigned SHORT_NAP_US = 20, LONG_NAP_US = 1000, PASSES_UNTIL_LONG = 200;

struct Fifo {
    volatile char *size;
    int slots;
    size_t stride;
};

struct State {
    std::mutex lock;
    std::vector<Fifo> fifos;
    std::unordered_set<const volatile void *> known; // sizes, tails and heads
    bool running = false;
};

State &state() {
    static State *all = new State;
    return *all;
}

bool refill(const Fifo &fifo) {
    bool wanted = false;
    for (int i = 0; i < fifo.slots; i++) {
        auto *size = reinterpret_cast<volatile int64_t *>(fifo.size + static_cast<size_t>(i) * fifo.stride);
        if (*size == -1) {
            *size = 0;
            wanted = true;
        }
    }
    return wanted;
}

void pump() {
    pthread_setname_np(pthread_self(), "fake fifo");
    for (unsigned idle = 0;;) {
        bool wanted = false;
        {
            std::lock_guard<std::mutex> held(state().lock);
            for (const Fifo &fifo : state().fifos)
                wanted |= refill(fifo);
        }
        idle = wanted ? 0 : idle + 1;
        usleep(idle > PASSES_UNTIL_LONG ? LONG_NAP_US : SHORT_NAP_US);
    }
}

bool within(const volatile void *pointer, const void *base, size_t bytes) {
    auto at = reinterpret_cast<uintptr_t>(pointer), from = reinterpret_cast<uintptr_t>(base);
    return at >= from && at < from + bytes;
}

} // namespace

void feed(volatile void *size, int slots, size_t stride, volatile uint64_t *tail) {
    State &all = state();
    std::lock_guard<std::mutex> held(all.lock);
    if (!all.known.insert(size).second)
        return;
    *tail = FAR_AHEAD;
    all.fifos.push_back({static_cast<volatile char *>(size), slots, stride});
    if (!all.running)
        std::thread(pump).detach();
    all.running = true;
}

void drain(volatile uint64_t *head) {
    State &all = state();
    std::lock_guard<std::mutex> held(all.lock);
    if (all.known.insert(head).second)
        *head = FAR_AHEAD;
}

void forget(const void *base, size_t bytes) {
    State &all = state();
    std::lock_guard<std::mutex> held(all.lock);
    if (all.known.empty())
        return;
    for (auto i = all.known.begin(); i != all.known.end();)
        i = within(*i, base, bytes) ? all.known.erase(i) : std::next(i);
    auto gone = [&](const Fifo &fifo) { return within(fifo.size, base, bytes); };
    if (std::none_of(all.fifos.begin(), all.fifos.end(), gone))
        return;
    uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), from = reinterpret_cast<uintptr_t>(base);
    uintptr_t first = from / page * page;
    // Of shared memory this makes a second mapping.
    void *kept = mremap(reinterpret_cast<void *>(first), 0, from + bytes - first, MREMAP_MAYMOVE);
    if (kept == MAP_FAILED) {
        all.fifos.erase(std::remove_if(all.fifos.begin(), all.fifos.end(), gone), all.fifos.end());
        return;
    }
    for (Fifo &fifo : all.fifos)
        if (gone(fifo))
            fifo.size = static_cast<char *>(kept) + (reinterpret_cast<uintptr_t>(fifo.size) - first);
}

} // namespace fake
