/* Directories and files that the loader's tests are run on. */
#ifndef LOADER_FILES_H
#define LOADER_FILES_H

#include "base/numoe_base.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A new directory below the build's; files_drop removes it with all files in it. */
static inline char *files_dir(void)
{
    char *path;

    cr_assert(asprintf(&path, "%s/files-XXXXXX", NUMOE_BINARY_DIR) > 0);
    cr_assert_not_null(mkdtemp(path));
    return path;
}

static inline void files_drop(char *path)
{
    DIR *directory = opendir(path);
    struct dirent *entry;

    while (directory && (entry = readdir(directory)))
        unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory)
        closedir(directory);
    rmdir(path);
    free(path);
}

/* A path in the directory; from a few rotating buffers. */
static inline const char *files_at(const char *directory, const char *name)
{
    static char paths[8][1024];
    static unsigned next;
    char *path = paths[next++ % 8];

    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

static inline void files_put(const char *path, const void *bytes, size_t count)
{
    FILE *file = fopen(path, "wb");

    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fwrite(bytes, 1, count, file), count);
    cr_assert_eq(fflush(file), 0);
    fdatasync(fileno(file));
    cr_assert_eq(fclose(file), 0);
}

static inline char *files_get(const char *path, size_t *count)
{
    FILE *file = fopen(path, "rb");
    struct stat status;
    char *bytes;

    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fstat(fileno(file), &status), 0);
    bytes = malloc((size_t)status.st_size + 1);
    cr_assert_eq(fread(bytes, 1, (size_t)status.st_size, file), (size_t)status.st_size);
    bytes[status.st_size] = 0;
    fclose(file);
    if (count)
        *count = (size_t)status.st_size;
    return bytes;
}

/* The first occurrence of one text by another; the file changes its length with it. */
static inline void files_replace(const char *path, const char *from, const char *to)
{
    size_t count;
    char *text = files_get(path, &count), *at = strstr(text, from), *out;

    cr_assert_not_null(at, "%s does not hold %s", path, from);
    out = malloc(count + strlen(to) + 1);
    sprintf(out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    files_put(path, out, strlen(out));
    free(out);
    free(text);
}

/* A safetensors file: length, header, `data_bytes` bytes counting up (or `data`). */
static inline void files_put_tensors(const char *path, const char *header, size_t header_bytes,
                                     const void *data, size_t data_bytes)
{
    uint8_t *all = malloc(8 + header_bytes + data_bytes);
    size_t i;

    for (i = 0; i < 8; i++)
        all[i] = (uint8_t)((uint64_t)header_bytes >> 8 * i);
    memcpy(all + 8, header, header_bytes);
    for (i = 0; i < data_bytes; i++)
        all[8 + header_bytes + i] = data ? ((const uint8_t *)data)[i] : (uint8_t)(i * 7 + i / 251);
    files_put(path, all, 8 + header_bytes + data_bytes);
    free(all);
}

/* Descriptors that this process holds. */
static inline int files_open_now(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;

    cr_assert_not_null(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* Messages that a part sends to the log. */
struct files_log {
    unsigned count, warnings;
    char text[8192];
};

static inline void files_log_fn(void *user, enum numoe_log_level level, const char *message)
{
    struct files_log *log = user;
    size_t used = strlen(log->text);

    log->count++;
    log->warnings += level == NUMOE_LOG_WARNING;
    snprintf(log->text + used, sizeof log->text - used, "%s\n", message);
}

#define expect_text(text, part)                                                                    \
    cr_expect(strstr((text), (part)) != NULL, "\"%s\" is not in \"%s\"", (part), (text))

#endif
