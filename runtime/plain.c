/*
 * Ordinary reads of files in any thread. SPDX-License-Identifier: Apache-2.0
 */
#include "plain.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

struct plain_file {
    const char *path;
    struct numoe_file_id id;
    int fd;        /* -1: not open */
    uint64_t used; /* in which round */
};

enum { OPEN_FILES = 64 }; /* kept open, however many files there are */

struct numoe_plain {
    uint32_t count, open;
    uint64_t round;
    struct plain_file files[];
};

int numoe_plain_create(const struct numoe_reader_file *files, uint32_t file_count,
                       struct numoe_plain **plain, struct numoe_error *error)
{
    struct numoe_plain *p = malloc(sizeof *p + file_count * sizeof p->files[0]);

    if (!p)
        return numoe_error_set(error, -ENOMEM, NULL, "no memory for %u files", file_count);
    p->count = file_count;
    p->open = 0;
    p->round = 0;
    for (uint32_t i = 0; i < file_count; i++)
        p->files[i] = (struct plain_file){files[i].path, files[i].id, -1, 0};
    *plain = p;
    return 0;
}

/* What is left of it in the page cache is dropped. */
static void close_file(struct numoe_plain *plain, struct plain_file *f)
{
    if (f->fd < 0)
        return;
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
    close(f->fd);
    f->fd = -1;
    plain->open--;
}

void numoe_plain_destroy(struct numoe_plain *plain)
{
    if (!plain)
        return;
    for (uint32_t i = 0; i < plain->count; i++)
        close_file(plain, &plain->files[i]);
    free(plain);
}

void numoe_plain_begin(struct numoe_plain *plain)
{
    plain->round++;
}

static void close_unused(struct numoe_plain *plain)
{
    for (uint32_t i = 0; i < plain->count; i++)
        if (plain->files[i].used != plain->round)
            close_file(plain, &plain->files[i]);
}

int numoe_plain_open(struct numoe_plain *plain, uint32_t file, struct numoe_error *error)
{
    struct plain_file *f = &plain->files[file];
    struct numoe_file_id id;
    int fd, code;

    f->used = plain->round;
    if (f->fd >= 0)
        return 0;
    if (plain->open >= OPEN_FILES)
        close_unused(plain);
    fd = numoe_file_open(f->path, &id, error);
    if (fd < 0)
        return fd;
    code = numoe_file_check(fd, f->path, &f->id, error);
    if (code < 0) {
        close(fd);
        return code;
    }
    f->fd = fd;
    plain->open++;
    return 0;
}

int numoe_plain_read(const struct numoe_plain *plain, uint32_t file, uint64_t offset,
                     uint64_t bytes, void *buffer, struct numoe_error *error)
{
    const struct plain_file *f = &plain->files[file];
    struct numoe_error why = NUMOE_ERROR_INIT;
    int code = numoe_file_read(f->fd, f->path, buffer, bytes, offset, &why);

    /* that it ends early is no fault of what it holds: it was longer when it was opened */
    if (code < 0)
        return numoe_error_set(error, code == -EBADMSG ? -EIO : code, f->path, "%s", why.message);
    return 0;
}

void numoe_plain_drop(const struct numoe_plain *plain, uint32_t file, uint64_t offset,
                      uint64_t bytes)
{
    posix_fadvise(plain->files[file].fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
}

bool numoe_plain_cached(const char *path)
{
    enum { SAMPLES = 64 };
    struct numoe_file_id id;
    struct statfs system;
    int fd = numoe_file_open(path, &id, NULL);
    bool cached;

    if (fd < 0)
        return false;
    cached =
        fstatfs(fd, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
    for (uint64_t i = 0; !cached && i <= SAMPLES; i++) {
        const uint64_t at = id.bytes > SAMPLES ? (id.bytes - 1) / SAMPLES * i : 0;

        if (!numoe_file_cached(fd, at))
            break;
        cached = i == SAMPLES;
    }
    close(fd);
    return cached;
}
