#include "nccl.h"

#include <dlfcn.h>
#include <stdio.h>

int nccl_open(struct nccl *nccl, const char *path) {
    if (dlopen(path, RTLD_NOW | RTLD_GLOBAL) == NULL) {
        fprintf(stderr, "cannot load %s: %s\n", path, dlerror());
        return -1;
    }
    /* Those of the virtual GPU are in a library that NCCL is linked with. */
#define LOOK_UP(result, name, arguments)                                                                     \
    *(void **)(&nccl->name) = dlsym(RTLD_DEFAULT, #name);                                                    \
    if (nccl->name == NULL) {                                                                                \
        fprintf(stderr, "%s has no %s: not an NCCL on a virtual GPU, or too old a release\n", path, #name);  \
        return -1;                                                                                           \
    }
    NCCL_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    return 0;
}
