#define _GNU_SOURCE
#include "library.h"

#include <ctype.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "log.h"

static void *try_open(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        nccl_log(LOG_LEVEL_INFO, LOG_INIT, NULL, 0, "Plugin: %s", dlerror());
    return library;
}

/* As plugin/plugin_open.cc decides whether a name may be a short one. */
static bool is_short_name(const char *name) {
    size_t length = strlen(name);
    bool is_file = strncmp(name, "lib", 3) == 0 && length >= 3 && strcmp(name + length - 3, ".so") == 0;
    return strchr(name, '/') == NULL && !is_file;
}

void *library_open(const char *kind) {
    char variable[64], path[PATH_MAX];
    snprintf(variable, sizeof(variable), "NCCL_%s_PLUGIN", kind);
    for (char *c = variable; *c; c++)
        *c = (char)toupper((unsigned char)*c);
    const char *name = getenv(variable);
    if (name == NULL || *name == '\0') {
        snprintf(path, sizeof(path), "libnccl-%s.so", kind);
        return try_open(path);
    }
    if (strcasecmp(name, "none") == 0)
        return NULL;
    void *library = try_open(name);
    if (library == NULL && is_short_name(name)) {
        snprintf(path, sizeof(path), "libnccl-%s-%s.so", kind, name);
        library = try_open(path);
    }
    return library;
}

void library_close(void *library) {
    dlclose(library);
}

static bool is_hidden(const char *name) {
    const char *list = getenv("EMULATED_NCCL_HIDE");
    size_t length = strlen(name);
    for (const char *at = list; at && (at = strstr(at, name)) != NULL; at += length)
        if ((at == list || at[-1] == ',') && (at[length] == '\0' || at[length] == ','))
            return true;
    return false;
}

void *library_symbol(void *library, const char *name) {
    return is_hidden(name) ? NULL : dlsym(library, name);
}
