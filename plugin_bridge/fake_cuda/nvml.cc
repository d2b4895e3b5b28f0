// NVML, as far as NCCL asks: the GPUs and that they reach each other. The topology itself comes from
// NCCL_TOPO_FILE.
#include "nvmlwrap.h" // NCCL's own declarations of NVML

#include <cstdio>
#include <cstring>
#include <strings.h>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "gpus.h"

namespace {

// A handle is the device's number and one.
int number(nvmlDevice_t device) {
    return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1;
}

nvmlDevice_t handle(int device) {
    return reinterpret_cast<nvmlDevice_t>(static_cast<intptr_t>(device) + 1);
}

} // namespace

API nvmlReturn_t nvmlInit_v2() {
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlInit() {
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlShutdown() {
    return NVML_SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t) {
    return "error of the fake NVML";
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    *count = static_cast<unsigned>(gpu_device_count());
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCount(unsigned *count) {
    return nvmlDeviceGetCount_v2(count);
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
    *device = handle(static_cast<int>(index));
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) {
    int found = fake::device_of_bus(bus_id);
    *device = handle(found);
    return found < 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    *index = static_cast<unsigned>(number(device));
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t, int *major, int *minor) {
    *major = fake::compute_capability() / 10;
    *minor = fake::compute_capability() % 10;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t, nvmlDevice_t, nvmlGpuP2PCapsIndex_t,
                                        nvmlGpuP2PStatus_t *status) {
    *status = NVML_P2P_STATUS_OK;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t, unsigned, nvmlEnableState_t *) {
    return NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t, unsigned, nvmlPciInfo_t *) {
    return NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t, unsigned, nvmlNvLinkCapability_t, unsigned *) {
    return NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t, int, nvmlFieldValue_t *) {
    return NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, nvmlGpuFabricInfoV_t *) {
    return NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->busId, sizeof pci->busId, "%s", fake::bus_id(number(device)).c_str());
    pci->pciDeviceId = 0x233010de; // an H100 of NVIDIA
    pci->pciSubSystemId = 0x16c110de;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t, unsigned *generation) {
    *generation = 5;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t, unsigned *width) {
    *width = 16;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPcieLinkMaxSpeed(nvmlDevice_t, int *) {
    return NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t, void *) {
    return NVML_ERROR_NOT_SUPPORTED;
}
