#define _GNU_SOURCE
#include "log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[1024];

static int level_of(void) {
    static const char *const names[] = {"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};
    const char *text = getenv("NCCL_DEBUG");
    for (int i = 0; text && i <= LOG_LEVEL_TRACE; i++)
        if (strcasecmp(text, names[i]) == 0)
            return i;
    return LOG_LEVEL_WARN;
}

/* Those that a plugin may name; NCCL has more. */
static unsigned long subsystems_of(void) {
    static const struct {
        const char *name;
        unsigned long flag;
    } known[] = {
        {"INIT", LOG_INIT}, {"TUNING", LOG_TUNING}, {"ENV", LOG_ENV}, {"PROFILE", 0x4000}, {"ALL", ~0ul}};
    const char *text = getenv("NCCL_DEBUG_SUBSYS");
    unsigned long flags = 0;
    if (text == NULL)
        return LOG_INIT | LOG_ENV;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcasestr(text, known[i].name))
            flags |= known[i].flag;
    return flags;
}

static void write_line(int level, const char *file, int line, const char *format, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof(text), format, arguments);
    if (level == LOG_LEVEL_WARN) {
        pthread_mutex_lock(&lock);
        memcpy(last_error, text, sizeof(last_error));
        pthread_mutex_unlock(&lock);
    }
    const char *what = level == LOG_LEVEL_WARN ? "WARN" : level == LOG_LEVEL_INFO ? "INFO" : "LOG";
    char where[128] = "";
    if (level == LOG_LEVEL_WARN && file)
        snprintf(where, sizeof(where), "%s:%d ", file, line);
    fprintf(stderr, "emulated:%d:%ld NCCL %s %s%s\n", (int)getpid(), (long)syscall(SYS_gettid), what, where,
            text);
}

void nccl_log(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    static int limit = -1;
    static unsigned long subsystems;
    if (__atomic_load_n(&limit, __ATOMIC_ACQUIRE) < 0) {
        subsystems = subsystems_of();
        __atomic_store_n(&limit, level_of(), __ATOMIC_RELEASE);
    }
    if (level != LOG_LEVEL_WARN && (level > limit || !(flags & subsystems)))
        return;
    if (level == LOG_LEVEL_WARN && limit < LOG_LEVEL_WARN)
        return;
    va_list arguments;
    va_start(arguments, format);
    write_line(level, file, line, format, arguments);
    va_end(arguments);
}

nccl_result fail(nccl_result result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line(LOG_LEVEL_WARN, NULL, 0, format, arguments);
    va_end(arguments);
    return result;
}

EXPORT const char *ncclGetLastError(struct comm *comm) {
    (void)comm;
    return last_error;
}
