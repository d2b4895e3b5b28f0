#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "../gpu/gpu.h"
#include "fifo.h"

namespace fake {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t PUNCH_FROM = 64 << 10;

// Leaked on purpose, like all state here: NCCL's threads outlive main().
struct Memory {
    std::mutex lock;
    std::map<const char *, Range> ranges; // by base
};

Memory &memory() {
    static Memory *all = [] {
        rlimit files;
        if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
            files.rlim_cur = files.rlim_max;
            setrlimit(RLIMIT_NOFILE, &files);
        }
        return new Memory;
    }();
    return *all;
}

size_t whole_pages(size_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

// Under the lock.
const Range *range_of(const void *pointer) {
    auto &ranges = memory().ranges;
    auto after = ranges.upper_bound(static_cast<const char *>(pointer));
    if (after == ranges.begin())
        return nullptr;
    const Range &range = std::prev(after)->second;
    return pointer < range.base + range.bytes ? &range : nullptr;
}

} // namespace

Backing::~Backing() {
    if (fd >= 0)
        close(fd);
}

std::shared_ptr<Backing> adopt(int fd, size_t bytes) {
    auto backing = std::make_shared<Backing>();
    backing->fd = fd;
    backing->bytes = bytes;
    return backing;
}

void *map(const std::shared_ptr<Backing> &backing, size_t offset, size_t bytes, void *at) {
    void *address = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), backing->fd,
                         static_cast<off_t>(offset));
    return address == MAP_FAILED ? nullptr : address;
}

void remember(void *base, size_t bytes, Kind kind, std::shared_ptr<Backing> backing) {
    auto &all = memory();
    std::lock_guard<std::mutex> held(all.lock);
    Range &range = all.ranges[static_cast<char *>(base)];
    range.base = static_cast<char *>(base);
    range.bytes = bytes;
    range.kind = kind;
    range.device = gpu_get_device();
    range.backing = std::move(backing);
}

std::shared_ptr<Backing> make_backing(size_t bytes) {
    int fd = memfd_create("gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        if (fd >= 0)
            close(fd);
        return nullptr;
    }
    return adopt(fd, bytes);
}

void *allocate(size_t bytes, Kind kind) {
    size_t size = whole_pages(bytes ? bytes : 1);
    std::shared_ptr<Backing> backing;
    void *base = nullptr;
    if (kind == Kind::device) {
        backing = make_backing(size);
        base = backing ? map(backing, 0, size) : nullptr;
    } else {
        base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        base = base == MAP_FAILED ? nullptr : base;
    }
    if (base)
        remember(base, size, kind, std::move(backing));
    return base;
}

void release(void *pointer) {
    auto &all = memory();
    Range range;
    if (find(pointer, &range))
        forget(range.base, range.bytes);
    std::lock_guard<std::mutex> held(all.lock);
    auto found = all.ranges.find(static_cast<char *>(pointer));
    if (found == all.ranges.end())
        return;
    munmap(pointer, found->second.bytes);
    all.ranges.erase(found);
}

bool find(const void *pointer, Range *range) {
    std::lock_guard<std::mutex> held(memory().lock);
    const Range *found = range_of(pointer);
    if (found)
        *range = *found;
    return found != nullptr;
}

void clear(void *pointer, int value, size_t bytes) {
    Range range;
    if (value == 0 && bytes >= PUNCH_FROM && find(pointer, &range) && range.backing) {
        auto offset = static_cast<size_t>(static_cast<char *>(pointer) - range.base);
        if (fallocate(range.backing->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0)
            return;
    }
    memset(pointer, value, bytes);
}

void unmap(void *base, size_t bytes) {
    auto &all = memory();
    forget(base, bytes);
    std::lock_guard<std::mutex> held(all.lock);
    all.ranges.erase(static_cast<char *>(base));
    mmap(base, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

} // namespace fake
