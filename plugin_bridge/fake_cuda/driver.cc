// CUDA's driver: entry points, contexts and launches. Its memory is in driver_memory.cc.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <strings.h>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "gpus.h"
#include "kernel.h"

namespace fake {

int compute_capability() {
    static const int value = [] {
        const char *text = getenv("GPU_COMPUTE_CAPABILITY");
        return text ? atoi(text) : 90;
    }();
    return value;
}

std::string bus_id(int device) {
    char text[16];
    snprintf(text, sizeof text, "0000:%02x:00.0", 0x10 * (device + 1));
    return text;
}

int device_of_bus(const char *text) {
    for (int device = 0; device < gpu_device_count(); device++)
        if (strcasecmp(text, bus_id(device).c_str()) == 0)
            return device;
    return -1;
}

} // namespace fake

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS ? "no error" : "error of the fake CUDA driver";
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR";
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = static_cast<char>(device + 1);
    return CUDA_SUCCESS;
}

/* cuda.h means the second version by that name; whoever looks the symbol up by its name means the first. */
extern "C" __attribute__((visibility("default"), alias("cuDeviceGetUuid_v2"))) CUresult
first_device_get_uuid(CUuuid *uuid, CUdevice device) __asm__("cuDeviceGetUuid");

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        *value = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        *value = fake::compute_capability() >= 90;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate(CUcontext *context, CUctxCreateParams *, unsigned, CUdevice device) {
    *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
    return CUDA_SUCCESS;
}

API CUresult cuCtxDestroy(CUcontext) {
    return CUDA_SUCCESS;
}

// A context is its device's number and one.
API CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(gpu_get_device()) + 1);
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    if (context)
        gpu_set_device(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    *device = gpu_get_device();
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, CUstream stream, void **extra) {
    void *arguments = nullptr;
    size_t bytes = 0;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            arguments = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            bytes = *static_cast<size_t *>(extra[1]);
    }
    gpu_stream *at = stream ? reinterpret_cast<gpu_stream *>(stream) : gpu_default_stream(gpu_get_device());
    fake::launch_kernel(at, reinterpret_cast<const void *>(function), arguments, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, CUstream stream, void **, void **extra) {
    return launch(function, stream, extra);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **, void **extra) {
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
            gpu_event_record(
                reinterpret_cast<gpu_event *>(config->attrs[i].value.launchCompletionEvent.event),
                reinterpret_cast<gpu_stream *>(config->hStream));
    return launch(function, config->hStream, extra);
}

// NCCL asks for these and uses them for what the fake does not have: copies by the copy engines, windows.
API CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuStreamWriteValue64(CUstream, CUdeviceptr, cuuint64_t, unsigned) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuStreamWaitValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuStreamWaitValue64(CUstream, CUdeviceptr, cuuint64_t, unsigned) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuStreamBatchMemOp(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

// Headers rename some functions to their latest version: what is asked for by name is what was compiled.
static void *entry_point(const char *name) {
    static const struct {
        const char *name;
        void *function;
    } entries[] = {
        {"cuGetErrorString", reinterpret_cast<void *>(cuGetErrorString)},
        {"cuGetErrorName", reinterpret_cast<void *>(cuGetErrorName)},
        {"cuDeviceGet", reinterpret_cast<void *>(cuDeviceGet)},
        {"cuDeviceGetAttribute", reinterpret_cast<void *>(cuDeviceGetAttribute)},
        {"cuDeviceGetUuid", reinterpret_cast<void *>(cuDeviceGetUuid)},
        {"cuCtxCreate", reinterpret_cast<void *>(cuCtxCreate)},
        {"cuCtxDestroy", reinterpret_cast<void *>(cuCtxDestroy)},
        {"cuCtxGetCurrent", reinterpret_cast<void *>(cuCtxGetCurrent)},
        {"cuCtxSetCurrent", reinterpret_cast<void *>(cuCtxSetCurrent)},
        {"cuCtxGetDevice", reinterpret_cast<void *>(cuCtxGetDevice)},
        {"cuLaunchKernel", reinterpret_cast<void *>(cuLaunchKernel)},
        {"cuLaunchKernelEx", reinterpret_cast<void *>(cuLaunchKernelEx)},
        {"cuMemGetAddressRange", reinterpret_cast<void *>(cuMemGetAddressRange)},
        {"cuMemAddressReserve", reinterpret_cast<void *>(cuMemAddressReserve)},
        {"cuMemAddressFree", reinterpret_cast<void *>(cuMemAddressFree)},
        {"cuMemCreate", reinterpret_cast<void *>(cuMemCreate)},
        {"cuMemGetAllocationGranularity", reinterpret_cast<void *>(cuMemGetAllocationGranularity)},
        {"cuMemExportToShareableHandle", reinterpret_cast<void *>(cuMemExportToShareableHandle)},
        {"cuMemImportFromShareableHandle", reinterpret_cast<void *>(cuMemImportFromShareableHandle)},
        {"cuMemMap", reinterpret_cast<void *>(cuMemMap)},
        {"cuMemRelease", reinterpret_cast<void *>(cuMemRelease)},
        {"cuMemRetainAllocationHandle", reinterpret_cast<void *>(cuMemRetainAllocationHandle)},
        {"cuMemSetAccess", reinterpret_cast<void *>(cuMemSetAccess)},
        {"cuMemUnmap", reinterpret_cast<void *>(cuMemUnmap)},
        {"cuMemGetAllocationPropertiesFromHandle",
         reinterpret_cast<void *>(cuMemGetAllocationPropertiesFromHandle)},
        {"cuMemGetHandleForAddressRange", reinterpret_cast<void *>(cuMemGetHandleForAddressRange)},
        {"cuPointerGetAttribute", reinterpret_cast<void *>(cuPointerGetAttribute)},
        {"cuMulticastAddDevice", reinterpret_cast<void *>(cuMulticastAddDevice)},
        {"cuMulticastBindMem", reinterpret_cast<void *>(cuMulticastBindMem)},
        {"cuMulticastBindAddr", reinterpret_cast<void *>(cuMulticastBindAddr)},
        {"cuMulticastCreate", reinterpret_cast<void *>(cuMulticastCreate)},
        {"cuMulticastGetGranularity", reinterpret_cast<void *>(cuMulticastGetGranularity)},
        {"cuMulticastUnbind", reinterpret_cast<void *>(cuMulticastUnbind)},
        {"cuStreamBatchMemOp", reinterpret_cast<void *>(cuStreamBatchMemOp)},
        {"cuStreamWaitValue32", reinterpret_cast<void *>(cuStreamWaitValue32)},
        {"cuStreamWaitValue64", reinterpret_cast<void *>(cuStreamWaitValue64)},
        {"cuStreamWriteValue32", reinterpret_cast<void *>(cuStreamWriteValue32)},
        {"cuStreamWriteValue64", reinterpret_cast<void *>(cuStreamWriteValue64)},
    };
    for (const auto &entry : entries)
        if (strcmp(entry.name, name) == 0)
            return entry.function;
    return nullptr;
}

static cudaError_t find_entry(const char *name, void **function, cudaDriverEntryPointQueryResult *result) {
    *function = entry_point(name);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

#if CUDART_VERSION >= 12050
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
    return find_entry(name, function, result);
}
#endif
#if CUDART_VERSION < 13000
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                        cudaDriverEntryPointQueryResult *result) {
    return find_entry(name, function, result);
}
#endif
