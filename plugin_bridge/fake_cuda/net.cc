// A network without wires, as a plugin of NCCL's: as many devices as the cluster has, so that NCCL finds the
// rings and trees that it would find there. Messages have no bytes (fifo.h) and arrive at once; how long they
// would take is for the times that the virtual GPU plays. Without this plugin NCCL talks over real sockets.
#include "nccl_net.h" // NCCL's

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_api.h"

namespace {

constexpr int MAX_NICS = 64;

double number(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtod(text, nullptr) : otherwise;
}

int something; // what every connection and every request is
char names[MAX_NICS][16];

ncclResult_t init(void **context, uint64_t, ncclNetCommConfig_v11_t *, ncclDebugLogger_t,
                  ncclProfilerCallback_t) {
    *context = &something;
    return ncclSuccess;
}

ncclResult_t devices(int *count) {
    *count = static_cast<int>(number("GPU_NICS", 8));
    *count = *count < MAX_NICS ? *count : MAX_NICS;
    return ncclSuccess;
}

ncclResult_t get_properties(int device, ncclNetProperties_v11_t *properties) {
    memset(properties, 0, sizeof *properties);
    // The topology file says where it is.
    snprintf(names[device], sizeof names[device], "fake%d", device);
    properties->name = names[device];
    properties->guid = static_cast<uint64_t>(device) + 1;
    properties->ptrSupport = NCCL_PTR_HOST | NCCL_PTR_CUDA;
    properties->speed = static_cast<int>(number("GPU_NIC_MBPS", 400000));
    properties->latency = static_cast<float>(number("GPU_NIC_LATENCY_US", 0));
    properties->maxComms = 1 << 16;
    properties->maxRecvs = 1;
    properties->netDeviceType = NCCL_NET_DEVICE_HOST;
    properties->netDeviceVersion = NCCL_NET_DEVICE_INVALID_VERSION;
    properties->vProps.ndevs = 1;
    properties->vProps.devs[0] = device;
    properties->maxP2pBytes = properties->maxCollBytes = size_t{1} << 40;
    return ncclSuccess;
}

ncclResult_t listen(void *, int, void *, void **comm) {
    *comm = &something;
    return ncclSuccess;
}

ncclResult_t connect(void *, int, void *, void **comm, ncclNetDeviceHandle_v11_t **) {
    *comm = &something;
    return ncclSuccess;
}

ncclResult_t accept(void *, void **comm, ncclNetDeviceHandle_v11_t **) {
    *comm = &something;
    return ncclSuccess;
}

ncclResult_t reg_mr(void *, void *, size_t, int, void **handle) {
    *handle = &something;
    return ncclSuccess;
}

ncclResult_t dereg_mr(void *, void *) {
    return ncclSuccess;
}

ncclResult_t isend(void *, void *, size_t, int, void *, void *, void **request) {
    *request = &something;
    return ncclSuccess;
}

ncclResult_t irecv(void *, int, void **, size_t *, int *, void **, void **, void **request) {
    *request = &something;
    return ncclSuccess;
}

ncclResult_t iflush(void *, int, void **, int *, void **, void **request) {
    *request = nullptr;
    return ncclSuccess;
}

ncclResult_t test(void *, int *done, int *sizes) {
    *done = 1;
    if (sizes)
        *sizes = 0;
    return ncclSuccess;
}

ncclResult_t close_comm(void *) {
    return ncclSuccess;
}

ncclNet_v11_t plugin() {
    ncclNet_v11_t net;
    memset(&net, 0, sizeof net);
    net.name = "Fake";
    net.init = init;
    net.devices = devices;
    net.getProperties = get_properties;
    net.listen = listen;
    net.connect = connect;
    net.accept = accept;
    net.regMr = reg_mr;
    net.deregMr = dereg_mr;
    net.isend = isend;
    net.irecv = irecv;
    net.iflush = iflush;
    net.test = test;
    net.closeSend = net.closeRecv = net.closeListen = close_comm;
    net.finalize = close_comm;
    return net;
}

} // namespace

API ncclNet_v11_t ncclNetPlugin_v11;
ncclNet_v11_t ncclNetPlugin_v11 = plugin();
