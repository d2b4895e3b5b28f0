// How an entry point of CUDA is defined here.
#ifndef DYNAMICCL_FAKE_CUDA_API_H
#define DYNAMICCL_FAKE_CUDA_API_H

#define API extern "C" __attribute__((visibility("default")))

#endif
