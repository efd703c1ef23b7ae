/* Opening and reading files that nobody vouches for. SPDX-License-Identifier: Apache-2.0 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Of one range, before they count as an error: a file system that answers so for ever. */
enum { INTERRUPTIONS = 1000 };

struct numoe_quoted numoe_quote(const char *name)
{
    struct numoe_quoted quoted;
    size_t i, room = sizeof quoted.text - 4;

    for (i = 0; i < room && name[i]; i++) {
        unsigned char c = (unsigned char)name[i];
        quoted.text[i] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    if (name[i]) {
        /* Do not end within a UTF-8 sequence. */
        while (i > 0 && ((unsigned char)name[i] & 0xC0) == 0x80)
            i--;
        memcpy(quoted.text + i, "...", 3);
        i += 3;
    }
    quoted.text[i] = 0;
    return quoted;
}

char *numoe_path_join(const char *directory, const char *name)
{
    char *path;

    return asprintf(&path, "%s/%s", directory, name) < 0 ? NULL : path;
}

static struct numoe_file_id id_of(const struct stat *status)
{
    return (struct numoe_file_id){.bytes = (uint64_t)status->st_size,
                                  .device = status->st_dev,
                                  .inode = status->st_ino,
                                  .modified_s = status->st_mtim.tv_sec,
                                  .modified_ns = status->st_mtim.tv_nsec};
}

int numoe_file_open(const char *path, struct numoe_file_id *id, struct numoe_error *error)
{
    struct stat status;
    int fd, code;

    /* O_NONBLOCK: a pipe put in place of a file must not hang the open. */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) {
        code = -errno;
        return numoe_error_set(error, code, path, "cannot open: %s", strerror(-code));
    }
    if (fstat(fd, &status) < 0) {
        code = numoe_error_set(error, -errno, path, "cannot stat: %s", strerror(errno));
        goto fail;
    }
    if (!S_ISREG(status.st_mode)) {
        code = numoe_error_set(error, -EINVAL, path, "is not a regular file");
        goto fail;
    }
    *id = id_of(&status);
    return fd;
fail:
    close(fd);
    return code;
}

int numoe_file_check(int fd, const char *path, const struct numoe_file_id *id,
                     struct numoe_error *error)
{
    struct numoe_file_id now;
    struct stat status;

    if (fstat(fd, &status) < 0)
        return numoe_error_set(error, -errno, path, "cannot stat: %s", strerror(errno));
    now = id_of(&status);
    if (!S_ISREG(status.st_mode) || now.bytes != id->bytes)
        return numoe_error_set(error, -EIO, path, "was changed: it has %llu bytes now, %llu before",
                               (unsigned long long)now.bytes, (unsigned long long)id->bytes);
    if (now.device != id->device || now.inode != id->inode)
        return numoe_error_set(error, -EIO, path,
                               "is another file than the one whose header was read");
    if (now.modified_s != id->modified_s || now.modified_ns != id->modified_ns)
        return numoe_error_set(error, -EIO, path, "was written to after its header was read");
    return 0;
}

bool numoe_file_cached(int fd, uint64_t offset)
{
    char byte;
    struct iovec one = {&byte, 1};

    return preadv2(fd, &one, 1, (off_t)offset, RWF_NOWAIT) == 1;
}

bool numoe_file_begin_header(int fd)
{
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    return numoe_file_cached(fd, 0);
}

void numoe_file_end_header(int fd, uint64_t bytes, bool begun)
{
    if (!begun)
        posix_fadvise(fd, 0, (off_t)bytes, POSIX_FADV_DONTNEED);
}

int numoe_file_read(int fd, const char *path, void *buffer, uint64_t bytes, uint64_t offset,
                    struct numoe_error *error)
{
    uint64_t done = 0;
    unsigned interrupted = 0;

    while (done < bytes) {
        uint64_t want = bytes - done < 1u << 30 ? bytes - done : 1u << 30;
        ssize_t got = pread(fd, (char *)buffer + done, want, (off_t)(offset + done));

        if (got < 0 && (errno == EINTR || errno == EAGAIN) && ++interrupted < INTERRUPTIONS)
            continue;
        if (got < 0) {
            int code = -errno;
            return numoe_error_set(error, code, path, "read at byte %llu failed: %s",
                                   (unsigned long long)(offset + done), strerror(-code));
        }
        if (got == 0)
            return numoe_error_set(error, -EBADMSG, path, "ends at byte %llu, %llu bytes short",
                                   (unsigned long long)(offset + done),
                                   (unsigned long long)(bytes - done));
        done += (uint64_t)got;
    }
    return 0;
}

int numoe_file_slurp(const char *path, uint64_t limit, char **text, uint64_t *bytes,
                     struct numoe_error *error)
{
    char *buffer = NULL;
    struct numoe_file_id id;
    uint64_t size;
    int fd, code;

    fd = numoe_file_open(path, &id, error);
    if (fd < 0)
        return fd;
    size = id.bytes;
    if (size > limit) {
        code = numoe_error_set(error, -EFBIG, path, "has %llu bytes, above the limit of %llu",
                               (unsigned long long)size, (unsigned long long)limit);
        goto out;
    }
    buffer = malloc(size + 1);
    if (!buffer) {
        code = numoe_error_set(error, -ENOMEM, path, "no memory for its %llu bytes",
                               (unsigned long long)size);
        goto out;
    }
    code = numoe_file_read(fd, path, buffer, size, 0, error);
    if (code < 0)
        goto out;
    buffer[size] = 0;
    *text = buffer;
    *bytes = size;
    buffer = NULL;
out:
    free(buffer);
    close(fd);
    return code;
}

int numoe_file_json(const char *path, uint64_t limit, json_t **root, struct numoe_error *error)
{
    json_error_t parse_error;
    char *text = NULL;
    uint64_t bytes;
    int code = numoe_file_slurp(path, limit, &text, &bytes, error);

    if (code < 0)
        return code;
    *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &parse_error);
    free(text);
    if (!*root)
        return numoe_error_set(
            error, json_error_code(&parse_error) == json_error_out_of_memory ? -ENOMEM : -EBADMSG,
            path, "is not sound JSON at byte %d: %s", parse_error.position,
            numoe_quote(parse_error.text).text);
    if (!json_is_object(*root)) {
        json_decref(*root);
        *root = NULL;
        return numoe_error_set(error, -EBADMSG, path, "is not a JSON object");
    }
    return 0;
}
