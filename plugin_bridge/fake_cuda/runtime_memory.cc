// CUDA's runtime: memory, between processes too, copies and pools.
#include <cuda_runtime.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "fifo.h"
#include "memory.h"
#include "runtime.h"

using namespace fake;

namespace {

// By cudaHostRegister: not ours to free. Leaked on purpose: NCCL's threads outlive main().
struct Registered {
    std::mutex lock;
    std::map<const void *, size_t> bytes;
};

Registered &registered() {
    static auto *all = new Registered;
    return *all;
}

// What an IPC handle holds: where another process finds the memfd.
struct Ticket {
    pid_t pid;
    int fd;
    uint64_t bytes;
};
static_assert(sizeof(Ticket) <= sizeof(cudaIpcMemHandle_t), "an IPC handle holds a ticket");

std::shared_ptr<Backing> open_ticket(const Ticket &ticket) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket.pid, ticket.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? nullptr : adopt(fd, ticket.bytes);
}

// A copy in stream order. Pageable memory is the caller's again when the call returns.
struct Copy {
    void *to;
    const void *from;
    size_t bytes;
    std::unique_ptr<char[]> staged;
};

void run_copy(void *argument) {
    std::unique_ptr<Copy> copy(static_cast<Copy *>(argument));
    memmove(copy->to, copy->staged ? copy->staged.get() : copy->from, copy->bytes);
}

struct Clear {
    void *at;
    int value;
    size_t bytes;
};

void run_clear(void *argument) {
    std::unique_ptr<Clear> clear(static_cast<Clear *>(argument));
    fake::clear(clear->at, clear->value, clear->bytes);
}

} // namespace

// ---- memory ----

API cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = allocate(bytes, Kind::device);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaFree(void *pointer) {
    release(pointer);
    return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    *pointer = allocate(bytes, Kind::host);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaFreeHost(void *pointer) {
    release(pointer);
    return cudaSuccess;
}

API cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned) {
    auto &all = registered();
    std::lock_guard<std::mutex> held(all.lock);
    all.bytes[pointer] = bytes;
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *pointer) {
    auto &all = registered();
    size_t bytes;
    {
        std::lock_guard<std::mutex> held(all.lock);
        bytes = all.bytes[pointer];
        all.bytes.erase(pointer);
    }
    forget(pointer, bytes);
    return cudaSuccess;
}

API cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    *device = host;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    Range range;
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = const_cast<void *>(pointer);
    if (find(pointer, &range)) {
        attributes->type = range.kind == Kind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        attributes->device = range.device;
        attributes->devicePointer = const_cast<void *>(pointer);
    }
    return cudaSuccess;
}

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    Range range;
    if (!find(pointer, &range) || !range.backing)
        return cudaErrorInvalidValue;
    Ticket ticket = {getpid(), range.backing->fd, range.bytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ticket, sizeof ticket);
    return cudaSuccess;
}

API cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned) {
    Ticket ticket;
    memcpy(&ticket, &handle, sizeof ticket);
    auto backing = open_ticket(ticket);
    *pointer = backing ? map(backing, 0, ticket.bytes) : nullptr;
    if (*pointer == nullptr)
        return cudaErrorMapBufferObjectFailed;
    remember(*pointer, ticket.bytes, Kind::device, std::move(backing));
    return cudaSuccess;
}

API cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    release(pointer);
    return cudaSuccess;
}

// ---- copies ----

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                                cudaStream_t stream) {
    auto *copy = new Copy{to, from, bytes, nullptr};
    fake::Range range;
    if (!fake::find(from, &range)) {
        copy->staged.reset(new char[bytes]);
        memcpy(copy->staged.get(), from, bytes);
    }
    gpu_call(stream_of(stream), run_copy, copy);
    return cudaSuccess;
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    memmove(to, from, bytes);
    return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    gpu_call(stream_of(stream), run_clear, new Clear{at, value, bytes});
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    fake::clear(at, value, bytes);
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
API cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes,
                                     size_t count, cudaMemcpyAttributes *, size_t *, size_t,
                                     cudaStream_t stream) {
    for (size_t i = 0; i < count; i++)
        cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream);
    return cudaSuccess;
}
#endif

// ---- pools ----

API cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *) {
    *pool = reinterpret_cast<cudaMemPool_t>(new char);
    return cudaSuccess;
}

API cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
    delete reinterpret_cast<char *>(pool);
    return cudaSuccess;
}

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) {
    return cudaSuccess;
}

API cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t, cudaStream_t) {
    *pointer = fake::allocate(bytes, fake::Kind::device);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) {
    return cudaMallocFromPoolAsync(pointer, bytes, nullptr, nullptr);
}

API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    gpu_call(stream_of(stream), fake::release, pointer);
    return cudaSuccess;
}
