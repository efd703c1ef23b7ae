/*
 * numoe-read-rate FILE...: how fast the loader's reader reads whole files, for pairs of a number of
 * blocks in flight and a block's size, and without io_uring. Nothing is done with what is read. The
 * page cache of the files is dropped before each pass.
 *
 * Answers on stdout, a line a pass: blocks in flight, KiB of a block, GB/s, and by which way.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/clock.h"
#include "cli_output.h"
#include "files.h"
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WINDOWS = 16, WINDOW_BYTES = 4 << 20 };

static int no_ring(void *user)
{
    (void)user;
    return -ENOSYS;
}

static void drop_cache(const struct numoe_reader_file *files, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        int fd = open(files[i].path, O_RDONLY | O_CLOEXEC);

        if (fd < 0)
            continue;
        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

/* Where reading is. */
struct cursor {
    const struct numoe_reader_file *files;
    uint32_t count, file;
    uint64_t at;
};

/* The next range of at most a window; false behind the last file. */
static bool next_range(struct cursor *c, struct numoe_read *read)
{
    while (c->file < c->count && c->at == c->files[c->file].id.bytes) {
        c->file++;
        c->at = 0;
    }
    if (c->file == c->count)
        return false;
    read->file = c->file;
    read->offset = c->at;
    read->bytes = c->files[c->file].id.bytes - c->at;
    if (read->bytes > WINDOW_BYTES)
        read->bytes = WINDOW_BYTES;
    c->at += read->bytes;
    return true;
}

/* Read all of it once. @return bytes, or a negative errno */
static int64_t read_all(struct numoe_reader *reader, struct cursor cursor, uint8_t *memory,
                        struct numoe_error *error)
{
    struct numoe_read reads[WINDOWS], *done;
    unsigned running = 0;
    int64_t bytes = 0;
    int code = 0;

    for (unsigned i = 0; i < WINDOWS && code == 0; i++) {
        reads[i] = (struct numoe_read){.window = memory + (size_t)i * WINDOW_BYTES};
        if (!next_range(&cursor, &reads[i]))
            break;
        code = numoe_reader_submit(reader, &reads[i], error);
        running++;
    }
    while (running && code >= 0) {
        code = numoe_reader_wait(reader, 1000, &done, error);
        if (code <= 0)
            continue;
        bytes += (int64_t)done->bytes;
        running--;
        if (next_range(&cursor, done)) {
            code = numoe_reader_submit(reader, done, error);
            running++;
        }
    }
    return code < 0 ? code : bytes;
}

static int measure(const struct numoe_reader_file *files, uint32_t count, uint8_t *memory,
                   uint32_t depth, uint32_t block_bytes, bool ring)
{
    struct numoe_reader_options options = NUMOE_READER_OPTIONS_INIT;
    const struct numoe_reader_hooks plain = {.ring = no_ring};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_reader *reader;
    uint64_t began;
    int64_t bytes;

    options.queue_depth = depth;
    options.block_bytes = block_bytes;
    options.memory = memory;
    options.memory_bytes = (uint64_t)WINDOWS * WINDOW_BYTES;
    options.hooks = ring ? NULL : &plain;
    drop_cache(files, count);
    if (numoe_reader_create(&options, files, count, &reader, &error) < 0) {
        fprintf(stderr, "numoe-read-rate: %s\n", error.message);
        return -1;
    }
    began = (uint64_t)numoe_now_ns();
    bytes = read_all(reader, (struct cursor){files, count, 0, 0}, memory, &error);
    if (bytes < 0)
        fprintf(stderr, "numoe-read-rate: %s: %s\n", error.where, error.message);
    else
        printf("%6u %8u %8.3f  %s\n", depth, block_bytes >> 10,
               (double)bytes / (double)((uint64_t)numoe_now_ns() - began),
               numoe_reader_path(reader));
    fflush(stdout);
    numoe_reader_destroy(reader);
    return bytes < 0 ? -1 : 0;
}

/* The files opened once and closed again, so that they are known to be there. 0 or 1, with a
 * message. */
static int find_files(char **paths, uint32_t count, struct numoe_reader_file *files)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (uint32_t i = 0; i < count; i++) {
        const int fd = numoe_file_open(paths[i], &files[i].id, &error);

        if (fd < 0) {
            fprintf(stderr, "numoe-read-rate: %s: %s\n", error.where, error.message);
            return 1;
        }
        close(fd);
        files[i].path = paths[i];
    }
    return 0;
}

static int measure_all(struct numoe_reader_file *files, uint32_t count, uint8_t *memory)
{
    static const uint32_t depths[] = {2, 4, 8, 16, 32}, kib[] = {256, 512, 1024, 2048, 4096};
    int status = 0;

    printf("blocks      KiB     GB/s  way\n");
    for (unsigned b = 0; b < sizeof kib / sizeof kib[0]; b++)
        for (unsigned d = 0; d < sizeof depths / sizeof depths[0]; d++)
            status |= measure(files, count, memory, depths[d], kib[b] << 10, true);
    status |= measure(files, count, memory, 1, 2 << 20, false);
    return cli_flush(status ? 1 : 0);
}

int main(int argc, char **argv)
{
    struct numoe_reader_file *files;
    uint8_t *memory;
    int status = 1;

    if (argc < 2 || argv[1][0] == '-') {
        fprintf(stderr, "Usage: numoe-read-rate FILE...\n");
        return 2;
    }
    files = calloc((size_t)argc - 1, sizeof *files);
    memory = mmap(NULL, (size_t)WINDOWS * WINDOW_BYTES, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!files || memory == MAP_FAILED)
        fprintf(stderr, "numoe-read-rate: no memory to read to\n");
    else
        status = find_files(argv + 1, (uint32_t)argc - 1, files);
    if (!status) {
        madvise(memory, (size_t)WINDOWS * WINDOW_BYTES, MADV_HUGEPAGE);
        status = measure_all(files, (uint32_t)argc - 1, memory);
    }
    if (memory != MAP_FAILED)
        munmap(memory, (size_t)WINDOWS * WINDOW_BYTES);
    free(files);
    return status;
}
