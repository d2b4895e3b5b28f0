// Memory of GPUs that are not there. Device memory and what is shared between processes are memfds, so that
// CUDA's IPC, its virtual memory management and multicast objects are ordinary mappings. Nothing is ever
// copied to another process.
#ifndef DYNAMICCL_FAKE_CUDA_MEMORY_H
#define DYNAMICCL_FAKE_CUDA_MEMORY_H

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

namespace fake {

enum class Kind { device, host };

// A memfd, closed with its last user.
struct Backing {
    int fd = -1;
    size_t bytes = 0;
    CUmemAllocationProp prop{};
    ~Backing();
};

struct Range {
    char *base = nullptr;
    size_t bytes = 0;
    Kind kind = Kind::device;
    int device = 0;
    std::shared_ptr<Backing> backing; // none for host memory
};

std::shared_ptr<Backing> make_backing(size_t bytes);
std::shared_ptr<Backing> adopt(int fd, size_t bytes); // of a memfd that is there
// Maps it, `at` an address that was reserved or anywhere; null where that fails.
void *map(const std::shared_ptr<Backing> &backing, size_t offset, size_t bytes, void *at = nullptr);
// What is mapped there is an allocation from now on.
void remember(void *base, size_t bytes, Kind kind, std::shared_ptr<Backing> backing);
// Reserves the addresses of an allocation again, without its memory.
void unmap(void *base, size_t bytes);
// New memory; null where there is none left.
void *allocate(size_t bytes, Kind kind);
void release(void *pointer);
// The allocation that holds an address; false: it is none of ours.
bool find(const void *pointer, Range *range);
// To zero without keeping the pages: buffers of gigabytes are cleared and never written.
void clear(void *pointer, int value, size_t bytes);

} // namespace fake
#endif
