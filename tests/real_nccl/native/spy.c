/* Lines of JSON, and numbers for what NCCL is given. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "spy.h"

enum { LINE = 4096 };

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static __thread struct {
    char text[LINE];
    size_t n;
} line;

void add(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line.text + line.n, LINE - line.n, format, arguments);
    va_end(arguments);
    if (n < 0 || (size_t)n >= LINE - line.n)
        abort();
    line.n += (size_t)n;
}

void begin(const char *call) {
    char thread[16];
    prctl(PR_GET_NAME, thread);
    line.n = 0;
    add("{\"call\":\"%s\",\"thread\":%d,\"thread_name\":\"%s\"", call, (int)gettid(), thread);
}

void number(const char *key, long long value) {
    add(",\"%s\":%lld", key, value);
}

void word(const char *key, uint64_t value) {
    add(",\"%s\":\"%llx\"", key, (unsigned long long)value);
}

void text(const char *key, const char *value) {
    if (value)
        add(",\"%s\":\"%s\"", key, value);
    else
        add(",\"%s\":null", key);
}

void end(void) {
    add("}\n");
    pthread_mutex_lock(&writing);
    if (file == NULL) {
        char path[512];
        snprintf(path, sizeof(path), "%s/spy.%d", getenv("SPY_LOG"), (int)getpid());
        file = fopen(path, "a");
        if (file == NULL)
            abort();
        setvbuf(file, NULL, _IOLBF, 0);
    }
    fwrite(line.text, 1, line.n, file);
    pthread_mutex_unlock(&writing);
}

__attribute__((constructor)) static void loaded(void) {
    begin("load");
    end();
}

__attribute__((destructor)) static void unloaded(void) {
    begin("unload");
    end();
    fclose(file);
}

struct thing *new_thing(struct thing *things, _Atomic int *n) {
    int number = (*n)++;
    if (number >= MOST)
        abort();
    things[number].number = number;
    return &things[number];
}

int number_of(const struct thing *things, const void *thing) {
    uintptr_t first = (uintptr_t)things, address = (uintptr_t)thing;
    if (thing == NULL)
        return -1;
    if (address < first || address >= first + MOST * sizeof(*things))
        return -2;
    return ((const struct thing *)thing)->number;
}
