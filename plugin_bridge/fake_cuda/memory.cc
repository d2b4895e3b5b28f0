#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "fifo.h"

namespace fake {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t GRANULARITY = 2 << 20;
constexpr size_t PUNCH_FROM = 64 << 10;

// Leaked on purpose, like all state here: NCCL's threads outlive main().
struct Memory {
    std::mutex lock;
    std::map<const char *, Range> ranges;      // by base
    std::map<const void *, size_t> registered; // by cudaHostRegister: not ours to free
    std::map<CUmemGenericAllocationHandle, std::pair<std::shared_ptr<Backing>, unsigned>>
        handles; // with references
    CUmemGenericAllocationHandle next_handle = 0x1000;
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

CUmemGenericAllocationHandle new_handle(std::shared_ptr<Backing> backing) {
    auto &all = memory();
    std::lock_guard<std::mutex> held(all.lock);
    CUmemGenericAllocationHandle handle = all.next_handle++;
    all.handles[handle] = {std::move(backing), 1};
    return handle;
}

std::shared_ptr<Backing> backing_of(CUmemGenericAllocationHandle handle) {
    auto &all = memory();
    std::lock_guard<std::mutex> held(all.lock);
    auto found = all.handles.find(handle);
    return found == all.handles.end() ? nullptr : found->second.first;
}

// What an IPC handle holds: where another process finds the memfd.
struct Ticket {
    pid_t pid;
    int fd;
    uint64_t bytes;
};
static_assert(sizeof(Ticket) <= sizeof(cudaIpcMemHandle_t), "an IPC handle holds a ticket");

std::shared_ptr<Backing> adopt(int fd, size_t bytes) {
    auto backing = std::make_shared<Backing>();
    backing->fd = fd;
    backing->bytes = bytes;
    return backing;
}

std::shared_ptr<Backing> open_ticket(const Ticket &ticket) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket.pid, ticket.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? nullptr : adopt(fd, ticket.bytes);
}

void *map(const std::shared_ptr<Backing> &backing, size_t offset, size_t bytes, void *at = nullptr) {
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

} // namespace

Backing::~Backing() {
    if (fd >= 0)
        close(fd);
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

} // namespace fake

using namespace fake;

// ---- the runtime's memory ----

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
    auto &all = memory();
    std::lock_guard<std::mutex> held(all.lock);
    all.registered[pointer] = bytes;
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *pointer) {
    auto &all = memory();
    size_t bytes;
    {
        std::lock_guard<std::mutex> held(all.lock);
        bytes = all.registered[pointer];
        all.registered.erase(pointer);
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

// ---- the driver's virtual memory management ----

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *,
                                           CUmemAllocationGranularity_flags) {
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                         unsigned long long) {
    auto backing = make_backing(bytes);
    if (!backing)
        return CUDA_ERROR_OUT_OF_MEMORY;
    backing->prop = *prop;
    *handle = new_handle(std::move(backing));
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    auto &all = memory();
    std::lock_guard<std::mutex> held(all.lock);
    auto found = all.handles.find(handle);
    if (found == all.handles.end())
        return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.second == 0)
        all.handles.erase(found);
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr,
                                 unsigned long long) {
    size_t align = alignment > GRANULARITY ? alignment : GRANULARITY;
    // One more, so that there is an aligned address inside.
    void *base = mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    auto from = reinterpret_cast<uintptr_t>(base), aligned = (from + align - 1) / align * align;
    if (aligned > from)
        munmap(base, aligned - from);
    if (from + align > aligned)
        munmap(reinterpret_cast<void *>(aligned + bytes), from + align - aligned);
    *pointer = aligned;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    munmap(reinterpret_cast<void *>(pointer), bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long) {
    auto backing = backing_of(handle);
    auto *base = reinterpret_cast<void *>(pointer);
    if (!backing || map(backing, offset, bytes, base) == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    bool host = backing->prop.location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    remember(base, bytes, host ? Kind::host : Kind::device, std::move(backing));
    return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    auto &all = memory();
    forget(reinterpret_cast<void *>(pointer), bytes);
    std::lock_guard<std::mutex> held(all.lock);
    all.ranges.erase(reinterpret_cast<char *>(pointer));
    mmap(reinterpret_cast<void *>(pointer), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer) {
    auto &all = memory();
    std::lock_guard<std::mutex> held(all.lock);
    const Range *range = range_of(pointer);
    if (range == nullptr || !range->backing)
        return CUDA_ERROR_INVALID_VALUE;
    for (auto &known : all.handles)
        if (known.second.first == range->backing) {
            known.second.second++;
            *handle = known.first;
            return CUDA_SUCCESS;
        }
    *handle = all.next_handle++;
    all.handles[*handle] = {range->backing, 1};
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                    CUmemGenericAllocationHandle handle) {
    auto backing = backing_of(handle);
    if (!backing)
        return CUDA_ERROR_INVALID_VALUE;
    *prop = backing->prop;
    return CUDA_SUCCESS;
}

API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type, unsigned long long) {
    auto backing = backing_of(handle);
    if (!backing)
        return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *static_cast<int *>(shareable) = dup(backing->fd);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                            CUmemAllocationHandleType type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    int fd = dup(static_cast<int>(reinterpret_cast<intptr_t>(shareable)));
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    auto backing = adopt(fd, static_cast<size_t>(st.st_size));
    backing->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    backing->prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {gpu_get_device()}};
    backing->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = new_handle(std::move(backing));
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
    Range range;
    if (!find(reinterpret_cast<void *>(pointer), &range))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = reinterpret_cast<CUdeviceptr>(range.base);
    if (bytes)
        *bytes = range.bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetHandleForAddressRange(void *, CUdeviceptr, size_t, CUmemRangeHandleType,
                                           unsigned long long) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    Range range;
    if (!find(reinterpret_cast<void *>(pointer), &range))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned *>(data) =
            range.kind == Kind::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int *>(data) = range.device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *static_cast<int *>(data) = 1;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        /* As memory from cuMemCreate() was asked for; none for other memory. */
        *static_cast<int *>(data) = range.backing ? range.backing->prop.requestedHandleTypes : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *static_cast<CUdeviceptr *>(data) = reinterpret_cast<CUdeviceptr>(range.base);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *static_cast<size_t *>(data) = range.bytes;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

// ---- multicast: memory like any other ----

API CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop) {
    auto backing = make_backing(prop->size);
    if (!backing)
        return CUDA_ERROR_OUT_OF_MEMORY;
    backing->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    backing->prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {gpu_get_device()}};
    *handle = new_handle(std::move(backing));
    return CUDA_SUCCESS;
}

API CUresult cuMulticastGetGranularity(size_t *bytes, const CUmulticastObjectProp *,
                                       CUmulticastGranularity_flags) {
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

API CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle, CUdevice) {
    return CUDA_SUCCESS;
}

API CUresult cuMulticastBindMem(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t,
                                size_t, unsigned long long) {
    return CUDA_SUCCESS;
}

API CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t,
                                 unsigned long long) {
    return CUDA_SUCCESS;
}

API CUresult cuMulticastUnbind(CUmemGenericAllocationHandle, CUdevice, size_t, size_t) {
    return CUDA_SUCCESS;
}
