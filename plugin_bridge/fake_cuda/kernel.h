// NCCL's kernels, as far as they can be seen from the host: what they are launched with.
#ifndef DYNAMICCL_FAKE_CUDA_KERNEL_H
#define DYNAMICCL_FAKE_CUDA_KERNEL_H

#include <cstddef>

struct gpu_stream;

namespace fake {

// `function` is one of the stubs that build.mk makes; the arguments are copied.
void launch_kernel(gpu_stream *stream, const void *function, const void *arguments, size_t bytes);

} // namespace fake
#endif
