// CUDA's runtime: devices, streams, events and graphs of the virtual GPU (../gpu/gpu.h).
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "gpus.h"
#include "memory.h"

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

gpu_stream *stream_of(cudaStream_t stream) {
    bool is_default = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? gpu_default_stream(gpu_get_device()) : reinterpret_cast<gpu_stream *>(stream);
}

gpu_event *event_of(cudaEvent_t event) {
    return reinterpret_cast<gpu_event *>(event);
}

// A graph that a user holds, and its objects that live as long.
struct UserObject {
    cudaHostFn_t destroy;
    void *argument;
    unsigned refs;
};

void drop(UserObject *object, unsigned count) {
    object->refs -= count < object->refs ? count : object->refs;
    if (object->refs == 0) {
        object->destroy(object->argument);
        delete object;
    }
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

struct HostCall {
    cudaHostFn_t fn;
    void *argument;
};

// Of a graph, which may call again and again: it keeps its calls.
void run_host_call(void *argument) {
    auto *call = static_cast<HostCall *>(argument);
    call->fn(call->argument);
}

void run_host_call_once(void *argument) {
    std::unique_ptr<HostCall> call(static_cast<HostCall *>(argument));
    call->fn(call->argument);
}

void delete_host_call(void *argument) {
    delete static_cast<HostCall *>(argument);
}

} // namespace

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
    snprintf(text, static_cast<size_t>(size), "%s", fake::bus_id(device).c_str());
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text) {
    *device = fake::device_of_bus(text);
    return *device < 0 ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = fake::compute_capability() / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = fake::compute_capability() % 10;
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
    prop->major = fake::compute_capability() / 10;
    prop->minor = fake::compute_capability() % 10;
    prop->multiProcessorCount = 132;
    prop->pciBusID = static_cast<int>(strtol(fake::bus_id(device).c_str() + 5, nullptr, 16));
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

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *argument) {
    gpu_stream *at = stream_of(stream);
    auto *call = new HostCall{fn, argument};
    if (gpu_graph *graph = gpu_capturing(at)) {
        gpu_graph_keep(graph, delete_host_call, call);
        gpu_call(at, run_host_call, call);
    } else {
        gpu_call(at, run_host_call_once, call);
    }
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

// ---- graphs: what was captured, in its order ----

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
    std::swap(now, *mode);
    return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    gpu_capture_begin(stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = reinterpret_cast<cudaGraph_t>(gpu_capture_end(stream_of(stream)));
    return *graph ? cudaSuccess : fail(cudaErrorStreamCaptureInvalidated);
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = gpu_capturing(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

namespace {

cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                         cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *count) {
    gpu_graph *capturing = gpu_capturing(stream_of(stream));
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id)
        *id = reinterpret_cast<unsigned long long>(capturing);
    if (graph)
        *graph = reinterpret_cast<cudaGraph_t>(capturing);
    // One node stands for all that came before.
    static const cudaGraphNode_t before = reinterpret_cast<cudaGraphNode_t>(1);
    if (nodes)
        *nodes = &before;
    if (count)
        *count = 1;
    return cudaSuccess;
}

} // namespace

#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                         size_t *count) {
    if (edges)
        *edges = nullptr;
    return capture_info(stream, status, id, graph, nodes, count);
}

API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *,
                                                    const cudaGraphEdgeData *, size_t, unsigned) {
    return cudaSuccess;
}

API cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t *, const cudaGraphNode_t *,
                                         const cudaGraphEdgeData *, size_t) {
    return cudaSuccess;
}
#else
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes, size_t *count) {
    return capture_info(stream, status, id, graph, nodes, count);
}

API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *, size_t, unsigned) {
    return cudaSuccess;
}

API cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t *, const cudaGraphNode_t *,
                                         size_t) {
    return cudaSuccess;
}
#endif

API cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t *node, cudaGraph_t, const cudaGraphNode_t *,
                                            size_t, cudaEvent_t) {
    *node = reinterpret_cast<cudaGraphNode_t>(1);
    return cudaSuccess;
}

API cudaError_t cudaGraphAddEventWaitNode(cudaGraphNode_t *node, cudaGraph_t, const cudaGraphNode_t *, size_t,
                                          cudaEvent_t) {
    *node = reinterpret_cast<cudaGraphNode_t>(1);
    return cudaSuccess;
}

API cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *argument, cudaHostFn_t destroy,
                                     unsigned refs, unsigned) {
    *object = reinterpret_cast<cudaUserObject_t>(new UserObject{destroy, argument, refs});
    return cudaSuccess;
}

API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
    // With the flag that NCCL gives, the graph takes the caller's reference.
    gpu_graph_keep(
        reinterpret_cast<gpu_graph *>(graph), [](void *kept) { drop(static_cast<UserObject *>(kept), 1); },
        reinterpret_cast<UserObject *>(object));
    return cudaSuccess;
}

// An executable graph is the graph.
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    *executable = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    gpu_graph_launch(reinterpret_cast<gpu_graph *>(executable), stream_of(stream));
    return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    gpu_graph_destroy(reinterpret_cast<gpu_graph *>(graph));
    return cudaSuccess;
}
