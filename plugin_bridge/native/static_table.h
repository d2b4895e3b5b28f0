/* Static tables: text that decides without a control plane. docs/static_tables.md has the format. */
#ifndef DYNAMICCL_STATIC_TABLE_H
#define DYNAMICCL_STATIC_TABLE_H

#include <stddef.h>

#include "channel.h"

#define STATIC_ERROR_BYTES 512

/* Whom a block may be about. `name` is at most DCC_NAME_BYTES - 1 long, and empty where NCCL says none. */
struct static_comm {
    size_t ranks, nodes;
    const char *name;
};

enum static_result { STATIC_REFUSED, STATIC_NO_BLOCK, STATIC_FOUND };

/* Reads all of a table, and puts the block of one communicator into *table, as version 1. Refused, with one
 * line in `error` (STATIC_ERROR_BYTES) that begins with the line's number, if anything in it is wrong,
 * whichever block it is in. Allocates. */
enum static_result static_table_parse(const char *text, size_t bytes, const struct static_comm *comm,
                                      struct dcc_table *table, char *error);

/* The same of a file that nobody but its owner, which is this user or root, may write to. `error` names the
 * file.
 */
enum static_result static_table_read(const char *path, const struct static_comm *comm,
                                     struct dcc_table *table, char *error);

#endif
