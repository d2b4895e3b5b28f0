/* Plugins' shared objects: found by the names that NCCL finds them by. */
#ifndef DYNAMICCL_EMULATED_LIBRARY_H
#define DYNAMICCL_EMULATED_LIBRARY_H

/* `kind` is tuner or profiler. The variable NCCL_TUNER_PLUGIN or NCCL_PROFILER_PLUGIN may hold a path, a
 * file's name, or NAME for libnccl-KIND-NAME.so; not set, libnccl-KIND.so is tried. NULL: there is none. */
void *library_open(const char *kind);
void library_close(void *library);
/* NULL too for symbols that EMULATED_NCCL_HIDE lists, with commas between: a plugin built with fewer. */
void *library_symbol(void *library, const char *name);

#endif
