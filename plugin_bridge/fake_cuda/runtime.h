// What the files of the runtime share.
#ifndef DYNAMICCL_FAKE_CUDA_RUNTIME_H
#define DYNAMICCL_FAKE_CUDA_RUNTIME_H

#include <cuda_runtime.h>

struct gpu_stream;

namespace fake {

cudaError_t fail(cudaError_t error); // which cudaGetLastError() tells
gpu_stream *stream_of(cudaStream_t stream);

} // namespace fake
#endif
