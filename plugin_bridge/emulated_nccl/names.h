/* NCCL's names and sizes of things. */
#ifndef DYNAMICCL_EMULATED_NAMES_H
#define DYNAMICCL_EMULATED_NAMES_H

#include "api.h"

const char *func_name(int func);
const char *algorithm_name(int algorithm);
const char *protocol_name(int protocol);
const char *type_name(int type);
size_t type_bytes(int type);

static inline size_t divide_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* -1 for 0. */
static inline int log2_down(uint64_t x) {
    return x ? 63 - __builtin_clzll(x) : -1;
}

static inline int log2_up(uint64_t x) {
    return x <= 1 ? 0 : log2_down(x - 1) + 1;
}

#endif
