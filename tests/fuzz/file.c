#define _GNU_SOURCE
#include "file.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "input.h"

/* The build names these in place of libc's. */
int fuzz_fstat(int fd, struct stat *st);
ssize_t fuzz_pread(int fd, void *out, size_t bytes, off_t offset);
void *fuzz_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int fuzz_munmap(void *at, size_t bytes);
uid_t fuzz_geteuid(void);

static struct {
    void *content;
    size_t bytes;
    mode_t mode;
    uid_t owner;
} file;

void file_is(void *content, size_t bytes, mode_t mode, uid_t owner) {
    file.content = content;
    file.bytes = bytes;
    file.mode = mode;
    file.owner = owner;
}

int fuzz_fstat(int fd, struct stat *st) {
    (void)fd;
    memset(st, 0, sizeof *st);
    st->st_size = (off_t)file.bytes;
    st->st_mode = file.mode;
    st->st_uid = file.owner;
    return 0;
}

ssize_t fuzz_pread(int fd, void *out, size_t bytes, off_t offset) {
    (void)fd;
    if ((size_t)offset >= file.bytes)
        return 0;
    if (bytes > file.bytes - (size_t)offset)
        bytes = file.bytes - (size_t)offset;
    memcpy(out, (char *)file.content + offset, bytes);
    return (ssize_t)bytes;
}

void *fuzz_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    (void)at, (void)protection, (void)flags, (void)fd, (void)offset;
    MUST(bytes <= file.bytes); /* a SIGBUS otherwise */
    return file.content;
}

int fuzz_munmap(void *at, size_t bytes) {
    MUST(at == file.content && bytes <= file.bytes);
    return 0;
}

uid_t fuzz_geteuid(void) {
    return FILE_OWNER;
}
