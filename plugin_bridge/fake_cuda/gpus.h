// What the fake GPUs say they are.
#ifndef DYNAMICCL_FAKE_CUDA_GPUS_H
#define DYNAMICCL_FAKE_CUDA_GPUS_H

#include <string>

namespace fake {

int compute_capability();       // times ten; GPU_COMPUTE_CAPABILITY, 90
std::string bus_id(int device); // as topology files name it: 0000:10:00.0 for the first, 0000:20:00.0, ...
int device_of_bus(const char *bus_id); // -1: none

} // namespace fake
#endif
