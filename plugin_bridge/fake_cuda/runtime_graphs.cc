// CUDA's runtime: graphs, which play what was captured in its order, and calls of the host, which they keep.
#include <cuda_runtime.h>

#include <memory>
#include <utility>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "runtime.h"

using namespace fake;

namespace {

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

// ---- capture ----

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
