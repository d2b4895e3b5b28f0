#include "names.h"

static const char *of(const char *const *names, int n, int i) {
    return i >= 0 && i < n ? names[i] : "Unknown";
}

const char *func_name(int func) {
    static const char *const names[N_FUNCS] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                               "AllReduce", "SendRecv", "Send",      "Recv"};
    return of(names, N_FUNCS, func);
}

const char *algorithm_name(int algorithm) {
    static const char *const names[N_ALGORITHMS] = {
        "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
    return of(names, N_ALGORITHMS, algorithm);
}

const char *protocol_name(int protocol) {
    static const char *const names[N_PROTOCOLS] = {"LL", "LL128", "SIMPLE"};
    return of(names, N_PROTOCOLS, protocol);
}

const char *type_name(int type) {
    static const char *const names[N_TYPES] = {
        "ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",   "ncclInt64",      "ncclUint64",
        "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
    return of(names, N_TYPES, type);
}

size_t type_bytes(int type) {
    static const size_t bytes[N_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < N_TYPES ? bytes[type] : 0;
}
