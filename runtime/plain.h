/*
 * plain.h - byte ranges of files by ordinary reads, in the threads that want them.
 *
 * For what lies in the page cache, or in a file system of memory, there is nothing to wait for:
 * a read is a copy, and is best made by the thread and into the cache that go on with it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_PLAIN_H
#define NUMOE_PLAIN_H

#include "reader.h"

struct numoe_plain;

/* @param files  file_count of them; the array is copied, paths are not. @return 0 or -ENOMEM */
int numoe_plain_create(const struct numoe_reader_file *files, uint32_t file_count,
                       struct numoe_plain **plain, struct numoe_error *error);
void numoe_plain_destroy(struct numoe_plain *plain);

/* Files that were opened before may be closed when others are opened. Not while other threads
 * read. */
void numoe_plain_begin(struct numoe_plain *plain);

/*
 * Have a file open until numoe_plain_begin at least. Not while other threads read.
 * @return 0; what opening returns; -EIO: it is not the file that it was
 */
int numoe_plain_open(struct numoe_plain *plain, uint32_t file, struct numoe_error *error);

/*
 * Read a range of an open file, all of it. Any thread.
 * @return 0; negative errno with file and offset in error; -EIO: the file ends before
 */
int numoe_plain_read(const struct numoe_plain *plain, uint32_t file, uint64_t offset,
                     uint64_t bytes, void *buffer, struct numoe_error *error);

/* Drop a range of an open file from the page cache. */
void numoe_plain_drop(const struct numoe_plain *plain, uint32_t file, uint64_t offset,
                      uint64_t bytes);

/* Whether a file is in memory: all of 64 places of it. false where the system does not say. */
bool numoe_plain_cached(const char *path);

#endif
