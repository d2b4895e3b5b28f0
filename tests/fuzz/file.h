/* What the reader's system calls answer: one open file, whose content is a segment in memory. */
#ifndef FUZZ_FILE_H
#define FUZZ_FILE_H

#include <stddef.h>
#include <sys/types.h>

#define FILE_OWNER 1000

void file_is(void *content, size_t bytes, mode_t mode, uid_t owner);

#endif
