/*
 * reader.h - byte ranges of files into memory: io_uring and O_DIRECT where they work, the next
 * lesser way where they do not.
 *
 * A range is read as whole blocks of NUMOE_READ_ALIGN bytes around it, straight into the caller's
 * window; numoe_read.data then points at its first byte. Many blocks are in flight at once; files,
 * and the memory that windows lie in, are registered with the kernel, which then need not look them
 * up and pin them for each block.
 * Fallbacks, each reported through log with its code: what cannot be registered is named in each
 * request; a file whose filesystem refuses O_DIRECT, at open or at the first read, is read through
 * the page cache, and dropped from it; without io_uring (no ring, or any failure of its calls or
 * requests) blocks are read by pread in the calling thread.
 * All memory is taken at creation.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_READER_H
#define NUMOE_READER_H

#include "files.h"

#include <stdbool.h>
#include <stdint.h>

enum { NUMOE_READ_ALIGN = 4096 };

struct numoe_reader;

/* A completed read, before the reader looks at it. */
struct numoe_reader_event {
    const char *path;
    void *buffer;
    uint64_t offset, bytes; /* asked for */
    bool ring;              /* by io_uring, else by pread */
    bool direct;            /* O_DIRECT */
    int64_t result;         /* bytes read or negative errno */
};

/* Seams for tests: answers in place of the system's. Each may be NULL. */
struct numoe_reader_hooks {
    void *user;
    int (*ring)(void *user);               /* 0, or -errno: no ring */
    int (*enlist)(void *user, bool files); /* 0, or -errno: files, or buffers, not registered */
    int (*open)(void *user, const char *path, bool direct); /* 0, or -errno: not opened */
    int64_t (*complete)(void *user, const struct numoe_reader_event *event); /* believed result */
};

struct numoe_reader_options {
    uint32_t queue_depth;        /* blocks in flight; 1 .. 64 */
    uint32_t block_bytes;        /* a multiple of NUMOE_READ_ALIGN */
    void *memory;                /* in which all windows lie, to be registered; NULL: nothing is */
    uint64_t memory_bytes;       /* it stays until the reader is destroyed */
    const struct numoe_log *log; /* copied; NULL drops messages */
    const struct numoe_reader_hooks *hooks; /* copied; NULL in use */
};

#define NUMOE_READER_OPTIONS_INIT                                                                  \
    {                                                                                              \
        .queue_depth = 16, .block_bytes = 2u << 20                                                 \
    }

/* A file that ranges are read from. */
struct numoe_reader_file {
    const char *path;        /* kept by the caller */
    struct numoe_file_id id; /* when its header was read; another, or a changed one, is an error */
};

/* One range; the caller's memory, untouched by him from submit to done. */
struct numoe_read {
    uint32_t file;          /* index into the files */
    uint64_t offset, bytes; /* 0 bytes are done at once */
    void *window; /* numoe_read_window(offset, bytes) bytes, aligned to NUMOE_READ_ALIGN */
    void *user;
    uint8_t *data; /* out: the byte at offset; valid from submit on */
    /* the reader's */
    uint64_t next, end; /* window offsets in the file: next block to start, end of the window */
    uint32_t blocks;    /* in flight */
    struct numoe_read *link;
};

/* Bytes of the aligned window around a range. */
static inline uint64_t numoe_read_window(uint64_t offset, uint64_t bytes)
{
    uint64_t begin = offset / NUMOE_READ_ALIGN * NUMOE_READ_ALIGN;

    return (offset + bytes - begin + NUMOE_READ_ALIGN - 1) / NUMOE_READ_ALIGN * NUMOE_READ_ALIGN;
}

/**
 * @param files  file_count of them; opened when first read from. The array is copied.
 * @return 0; -EINVAL; -ENOMEM. Lack of io_uring is not an error.
 */
int numoe_reader_create(const struct numoe_reader_options *options,
                        const struct numoe_reader_file *files, uint32_t file_count,
                        struct numoe_reader **reader, struct numoe_error *error);

/* Waits for what is in flight: no window is written to after the call. */
void numoe_reader_destroy(struct numoe_reader *reader);

/* From now on read so many blocks at once, at most those of the creation, each of so many bytes, a
 * multiple of NUMOE_READ_ALIGN. */
void numoe_reader_tune(struct numoe_reader *reader, uint32_t queue_depth, uint32_t block_bytes);

/**
 * Queue a range; done ranges come out of numoe_reader_wait.
 * @return 0; -EINVAL: no such file, window not aligned, or range past the file's end
 */
int numoe_reader_submit(struct numoe_reader *reader, struct numoe_read *read,
                        struct numoe_error *error);

/**
 * Make progress until a range is done.
 * @param timeout_ms  return after about so long, 0 at once; without io_uring after one block
 * @param done        a range that is complete, every byte of it
 * @return 1 with *done set; 0 when the time passed or nothing is queued; negative errno when a
 *         file cannot be opened or read, is not the one that it was, or ends early (-EIO; file and
 * offset in error). After an error every call returns it again.
 */
int numoe_reader_wait(struct numoe_reader *reader, unsigned timeout_ms, struct numoe_read **done,
                      struct numoe_error *error);

/* Bytes of windows that have arrived. */
uint64_t numoe_reader_bytes(const struct numoe_reader *reader);

/* How often nothing was in flight any more when it was looked for what had arrived. */
uint64_t numoe_reader_dry(const struct numoe_reader *reader);

/* How files were read so far: "io_uring O_DIRECT", "io_uring buffered", "io_uring mixed", "pread"
 */
const char *numoe_reader_path(const struct numoe_reader *reader);

#endif
