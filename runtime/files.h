/*
 * files.h - opening and reading files that nobody vouches for.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FILES_H
#define NUMOE_FILES_H

#include "base/numoe_base.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Words for the error record: names from files may hold anything, and may be long. */
struct numoe_quoted {
    char text[136];
};

/* Printable ASCII and UTF-8 as they are, control characters as '?', cut with "..." . */
struct numoe_quoted numoe_quote(const char *name);

/* directory + "/" + name, to be freed; NULL when out of memory. */
char *numoe_path_join(const char *directory, const char *name);

/* Which file it was, and in which state: what was read of it says nothing of another. */
struct numoe_file_id {
    uint64_t bytes;
    uint64_t device, inode;
    int64_t modified_s, modified_ns;
};

/*
 * Open a regular file for reading; anything else (a directory, a pipe: opening one would wait for
 * ever) is -EINVAL.
 * @return the descriptor (close-on-exec) with *id what it is, or negative errno
 */
int numoe_file_open(const char *path, struct numoe_file_id *id, struct numoe_error *error);

/* Whether a descriptor is of the file that it was, unchanged. @return 0; -EIO, and what differs */
int numoe_file_check(int fd, const char *path, const struct numoe_file_id *id,
                     struct numoe_error *error);

/* Whether the byte at offset is in the page cache; false where the system does not say. */
bool numoe_file_cached(int fd, uint64_t offset);

/*
 * For the header of a large file: from now on reads bring what they ask for into the page cache and
 * nothing ahead of it, and the second call takes it out again unless it was there before the first,
 * whose result it is given.
 */
bool numoe_file_begin_header(int fd);
void numoe_file_end_header(int fd, uint64_t bytes, bool begun);

/* Read exactly bytes at offset. @return 0; -EIO and the like; -EBADMSG when the file ends before */
int numoe_file_read(int fd, const char *path, void *buffer, uint64_t bytes, uint64_t offset,
                    struct numoe_error *error);

/*
 * Read a whole file of at most limit bytes, with a NUL after the last; to be freed.
 * @return 0; -ENOENT, ...; -EFBIG above the limit, which the message names
 */
int numoe_file_slurp(const char *path, uint64_t limit, char **text, uint64_t *bytes,
                     struct numoe_error *error);

struct json_t;

/*
 * Read a file that holds one JSON object with unique keys; to be released by json_decref.
 * @return as numoe_file_slurp; -EBADMSG when it is none, with the place. Then nothing is to be
 *         released: *root is NULL, or as it was
 */
int numoe_file_json(const char *path, uint64_t limit, struct json_t **root,
                    struct numoe_error *error);

#endif
