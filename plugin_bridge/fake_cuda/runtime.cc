// CUDA's runtime: devices, streams and events of the virtual GPU (../gpu/gpu.h).
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "gpus.h"
#include "runtime.h"

using namespace fake;

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fake::fail(cudaError_t error) {
    last_error = error;
    return error;
}

gpu_stream *fake::stream_of(cudaStream_t stream) {
    bool is_default = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? gpu_default_stream(gpu_get_device()) : reinterpret_cast<gpu_stream *>(stream);
}

static gpu_event *event_of(cudaEvent_t event) {
    return reinterpret_cast<gpu_event *>(event);
}

// ---- errors and versions ----

API const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess         ? "no error"
           : error == cudaErrorNotReady ? "not ready"
                                        : "error of the fake CUDA";
}

API cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

API cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

// ---- devices ----

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = gpu_device_count();
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int *device) {
    *device = gpu_get_device();
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= gpu_device_count())
        return fail(cudaErrorInvalidDevice);
    gpu_set_device(device);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, static_cast<size_t>(size), "%s", bus_id(device).c_str());
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text) {
    *device = device_of_bus(text);
    return *device < 0 ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = compute_capability() / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = compute_capability() % 10;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = 227 << 10;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = 132;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device) {
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "Fake GPU %d", device);
    prop->totalGlobalMem = size_t{80} << 30;
    prop->major = compute_capability() / 10;
    prop->minor = compute_capability() % 10;
    prop->multiProcessorCount = 132;
    prop->pciBusID = static_cast<int>(strtol(bus_id(device).c_str() + 5, nullptr, 16));
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
    return cudaSuccess;
}

API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) {
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
    gpu_device_sync(gpu_get_device());
    return cudaSuccess;
}

// ---- functions ----

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof *attributes);
    return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

API cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol) {
    *function = reinterpret_cast<cudaFunction_t>(const_cast<void *>(symbol));
    return cudaSuccess;
}

// ---- streams ----

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = reinterpret_cast<cudaStream_t>(gpu_stream_create(gpu_get_device()));
    return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    gpu_stream_destroy(stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    gpu_stream_sync(stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return gpu_stream_idle(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    *id = reinterpret_cast<unsigned long long>(stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    gpu_stream_wait(stream_of(stream), event_of(event));
    return cudaSuccess;
}

// ---- events ----

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(gpu_event_create());
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    gpu_event_destroy(event_of(event));
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    gpu_event_record(event_of(event), stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    return gpu_event_done(event_of(event)) ? cudaSuccess : fail(cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    gpu_event_sync(event_of(event));
    return cudaSuccess;
}
