// CUDA's driver: virtual memory management and multicast objects.
#include <cuda.h>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "memory.h"

using namespace fake;

namespace {

constexpr size_t GRANULARITY = 2 << 20;

// Leaked on purpose: NCCL's threads outlive main().
struct Handles {
    std::mutex lock;
    // With references.
    std::map<CUmemGenericAllocationHandle, std::pair<std::shared_ptr<Backing>, unsigned>> backings;
    CUmemGenericAllocationHandle next = 0x1000;
};

Handles &handles() {
    static auto *all = new Handles;
    return *all;
}

CUmemGenericAllocationHandle new_handle(std::shared_ptr<Backing> backing) {
    auto &all = handles();
    std::lock_guard<std::mutex> held(all.lock);
    CUmemGenericAllocationHandle handle = all.next++;
    all.backings[handle] = {std::move(backing), 1};
    return handle;
}

std::shared_ptr<Backing> backing_of(CUmemGenericAllocationHandle handle) {
    auto &all = handles();
    std::lock_guard<std::mutex> held(all.lock);
    auto found = all.backings.find(handle);
    return found == all.backings.end() ? nullptr : found->second.first;
}

} // namespace

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
    auto &all = handles();
    std::lock_guard<std::mutex> held(all.lock);
    auto found = all.backings.find(handle);
    if (found == all.backings.end())
        return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.second == 0)
        all.backings.erase(found);
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
    unmap(reinterpret_cast<void *>(pointer), bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer) {
    Range range;
    if (!find(pointer, &range) || !range.backing)
        return CUDA_ERROR_INVALID_VALUE;
    auto &all = handles();
    std::lock_guard<std::mutex> held(all.lock);
    for (auto &known : all.backings)
        if (known.second.first == range.backing) {
            known.second.second++;
            *handle = known.first;
            return CUDA_SUCCESS;
        }
    *handle = all.next++;
    all.backings[*handle] = {range.backing, 1};
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
