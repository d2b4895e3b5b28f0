/* Messages: NCCL_DEBUG and NCCL_DEBUG_SUBSYS say which of them are printed. */
#ifndef DYNAMICCL_EMULATED_LOG_H
#define DYNAMICCL_EMULATED_LOG_H

#include "api.h"
#include "plugin_abi.h"

enum { LOG_INIT = 0x1, LOG_ENV = 0x80, LOG_TUNING = 0x40, LOG_ALL = ~0 };

/* What plugins are given to log with, as ncclDebugLog. */
void nccl_log(int level, unsigned long flags, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Prints a warning, keeps it for ncclGetLastError() and returns `result`. */
nccl_result fail(nccl_result result, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
