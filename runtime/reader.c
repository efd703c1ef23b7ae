/*
 * Reading ranges of files.
 *
 * One thread. A range is cut into blocks; a block is FREE, READY (to be asked for, or asked for
 * again from where it got to) or RUNNING (in the kernel's hands). A completion moves it to READY
 * after a short read, else to FREE; a range is done when all of its blocks have been started and
 * none is in use. After an error nothing new starts, and what runs is waited for before any
 * memory is let go.
 *
 * A file that is open has a seat: its two descriptors, with O_DIRECT and without, are numbers
 * 2 seat and 2 seat + 1 among those registered with the ring.
 *
 * A direct read may only continue at an aligned offset. A short direct read that stops elsewhere
 * before the end of the file is continued through the page cache, where any offset will do.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "reader.h"

#include "base/checked.h"
#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FIXED_LIMIT ((uint64_t)1 << 30) /* the kernel's, of one buffer */

enum {
    OPEN_FILES = 64,  /* kept open, however many files there are; seats are bits of 64. No more
                         blocks than that are in flight */
    RETRIES = 1000,   /* EAGAIN and EINTR in a row before they count as an error */
    RETRY_PAUSE = 10, /* of these, without a pause of a millisecond */
};

enum block_state { FREE, READY, RUNNING };

struct block {
    struct numoe_read *read;
    uint64_t at;    /* next byte of the file to ask for */
    uint64_t end;   /* of the block, aligned */
    uint64_t need;  /* it is complete when at reaches this */
    uint64_t asked; /* bytes of the request that runs */
    struct block *link;
    enum block_state state;
    unsigned retries;
    bool buffered; /* to be read through the page cache */
    bool direct;   /* the request that runs is O_DIRECT */
};

struct file {
    const char *path;
    struct numoe_file_id id;
    int fds[2];    /* through the page cache, and direct; -1: not open */
    unsigned seat; /* while one of them is open */
    bool refuses_direct;
    uint32_t blocks; /* in use: its descriptors must stay */
    uint64_t last_use;
};

struct numoe_reader {
    struct numoe_log log;
    struct numoe_reader_hooks hooks;
    uint32_t depth;                /* of what there is */
    uint32_t at_once, block_bytes; /* in use */
    struct file *files;
    uint32_t file_count;
    uint32_t open_files;
    uint64_t seats; /* bit s: seat s is taken */
    uint64_t uses;
    struct block *blocks, *free_blocks;
    struct block *ready, **ready_tail;
    struct numoe_read *queued, **queued_tail; /* ranges with blocks to start */
    struct numoe_read *done, **done_tail;
    uint32_t used_blocks, running;
    uint64_t bytes; /* arrived */
    uint64_t dry;   /* times that the last block in flight came back */
    struct io_uring ring;
    bool has_ring, leaving_ring;
    bool fixed_files; /* descriptors are registered */
    uint8_t *fixed;   /* memory that is; NULL: none */
    uint64_t fixed_bytes;
    unsigned unsubmitted; /* entries prepared that the kernel has not taken */
    int status;
    struct numoe_error error;
};

static int fail(struct numoe_reader *r, int code, const char *path, const char *what,
                uint64_t offset)
{
    if (!r->status)
        r->status = numoe_error_set(&r->error, code, path, "%s at byte %llu failed: %s", what,
                                    (unsigned long long)offset, strerror(-code));
    return r->status;
}

/* ---- files ---------------------------------------------------------------------------------- */

static bool is_open(const struct file *file)
{
    return file->fds[0] >= 0 || file->fds[1] >= 0;
}

/* What was registered is let go: every request names what it needs from now on. */
static void leave_fixed_files(struct numoe_reader *r, int code)
{
    if (!r->fixed_files)
        return;
    r->fixed_files = false;
    numoe_log_write(&r->log, NUMOE_LOG_INFO, "files are not registered with io_uring: %s",
                    strerror(-code));
}

/* Tell the ring of a descriptor of a file, or with -1 that it goes. */
static void enlist(struct numoe_reader *r, const struct file *file, bool direct, int fd)
{
    int code;

    if (!r->fixed_files)
        return;
    code = io_uring_register_files_update(&r->ring, 2 * file->seat + direct, &fd, 1);
    if (code != 1)
        leave_fixed_files(r, code < 0 ? code : -EIO);
}

static void close_file(struct numoe_reader *r, struct file *file)
{
    if (!is_open(file))
        return;
    /* Read-ahead may have brought in what no block asked for. */
    if (file->fds[0] >= 0)
        posix_fadvise(file->fds[0], 0, 0, POSIX_FADV_DONTNEED);
    for (unsigned direct = 0; direct < 2; direct++)
        if (file->fds[direct] >= 0) {
            enlist(r, file, direct, -1);
            close(file->fds[direct]);
            file->fds[direct] = -1;
        }
    r->seats &= ~((uint64_t)1 << file->seat);
    r->open_files--;
}

/* There is one: there are no more blocks than seats, one of them is of this file, and a file
 * without any was closed. */
static void take_seat(struct numoe_reader *r, struct file *file)
{
    file->seat = (unsigned)__builtin_ctzll(~r->seats);
    r->seats |= (uint64_t)1 << file->seat;
    r->open_files++;
}

static void close_oldest(struct numoe_reader *r)
{
    struct file *oldest = NULL;
    uint32_t i;

    for (i = 0; i < r->file_count; i++) {
        struct file *file = &r->files[i];
        if (file->blocks || !is_open(file))
            continue;
        if (!oldest || file->last_use < oldest->last_use)
            oldest = file;
    }
    if (oldest)
        close_file(r, oldest);
}

static int open_one(struct numoe_reader *r, const char *path, bool direct)
{
    int fd, code;

    if (r->hooks.open) {
        code = r->hooks.open(r->hooks.user, path, direct);
        if (code < 0)
            return code;
    }
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (direct ? O_DIRECT : 0));
    return fd < 0 ? -errno : fd;
}

static void refuse_direct(struct numoe_reader *r, struct file *file, int code, const char *when)
{
    if (file->refuses_direct)
        return;
    file->refuses_direct = true;
    numoe_log_write(&r->log, NUMOE_LOG_INFO,
                    "%s: O_DIRECT refused at %s (%s); reading through the page cache", file->path,
                    when, strerror(-code));
}

/* A descriptor for a block; may turn a direct request into a buffered one. */
static int block_fd(struct numoe_reader *r, struct block *block)
{
    struct file *file = &r->files[block->read->file];
    bool direct = !block->buffered && !file->refuses_direct;
    int fd = file->fds[direct];

    block->direct = direct;
    if (fd >= 0)
        return fd;
    if (!is_open(file) && r->open_files >= OPEN_FILES)
        close_oldest(r);
    fd = open_one(r, file->path, direct);
    if (direct && (fd == -EINVAL || fd == -EOPNOTSUPP)) {
        refuse_direct(r, file, fd, "open");
        return block_fd(r, block);
    }
    if (fd < 0) {
        r->status = numoe_error_set(&r->error, fd, file->path, "cannot open: %s", strerror(-fd));
        return fd;
    }
    r->status = numoe_file_check(fd, file->path, &file->id, &r->error);
    if (r->status) {
        close(fd);
        return r->status;
    }
    if (!is_open(file))
        take_seat(r, file);
    file->fds[direct] = fd;
    enlist(r, file, direct, fd);
    return fd;
}

/* ---- blocks --------------------------------------------------------------------------------- */

static void make_ready(struct numoe_reader *r, struct block *block)
{
    block->state = READY;
    block->link = NULL;
    *r->ready_tail = block;
    r->ready_tail = &block->link;
}

static struct block *take_ready(struct numoe_reader *r)
{
    struct block *block = r->ready;

    if (block) {
        r->ready = block->link;
        if (!r->ready)
            r->ready_tail = &r->ready;
    }
    return block;
}

static void finish_read(struct numoe_reader *r, struct numoe_read *read)
{
    read->link = NULL;
    *r->done_tail = read;
    r->done_tail = &read->link;
}

static void release(struct numoe_reader *r, struct block *block)
{
    struct numoe_read *read = block->read;

    r->files[read->file].blocks--;
    r->used_blocks--;
    block->state = FREE;
    block->read = NULL;
    block->link = r->free_blocks;
    r->free_blocks = block;
    if (--read->blocks == 0 && read->next == read->end)
        finish_read(r, read);
}

/* Cut queued ranges into blocks, as far as there are free ones. */
static void start_blocks(struct numoe_reader *r)
{
    while (r->queued && r->free_blocks && r->used_blocks < r->at_once) {
        struct numoe_read *read = r->queued;
        struct block *block = r->free_blocks;
        uint64_t left = read->end - read->next, last = read->offset + read->bytes;

        r->free_blocks = block->link;
        *block = (struct block){.read = read, .at = read->next};
        block->end = read->next + (left < r->block_bytes ? left : r->block_bytes);
        block->need = block->end < last ? block->end : last;
        read->next = block->end;
        read->blocks++;
        r->used_blocks++;
        r->files[read->file].blocks++;
        r->files[read->file].last_use = ++r->uses;
        make_ready(r, block);
        if (read->next == read->end) {
            r->queued = read->link;
            if (!r->queued)
                r->queued_tail = &r->queued;
        }
    }
}

static char *block_buffer(const struct block *block)
{
    const struct numoe_read *read = block->read;

    return (char *)read->window + (block->at - read->offset / NUMOE_READ_ALIGN * NUMOE_READ_ALIGN);
}

static void leave_ring(struct numoe_reader *r, const char *what, int code)
{
    if (r->leaving_ring)
        return;
    r->leaving_ring = true;
    numoe_log_write(&r->log, NUMOE_LOG_WARNING,
                    "io_uring is not usable (%s: %s); reading with pread", what, strerror(-code));
}

/* What a request came back with. */
static void complete(struct numoe_reader *r, struct block *block, int64_t result, bool ring)
{
    struct file *file = &r->files[block->read->file];
    const char *path = file->path;
    uint64_t before = block->at;

    if (--r->running == 0)
        r->dry++;
    if (r->hooks.complete) {
        struct numoe_reader_event event = {path, block_buffer(block), block->at, block->asked,
                                           ring, block->direct,       result};
        result = r->hooks.complete(r->hooks.user, &event);
    }
    if (r->status) {
        release(r, block);
        return;
    }
    if ((result == -EINTR || result == -EAGAIN) && ++block->retries <= RETRIES) {
        if (block->retries > RETRY_PAUSE)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        make_ready(r, block);
        return;
    }
    if ((result == -EINVAL || result == -EOPNOTSUPP) && block->direct) {
        refuse_direct(r, file, (int)result, "the first read");
        make_ready(r, block);
        return;
    }
    /* Whatever it is that the ring cannot, pread may: it says so itself if not. */
    if (ring && result < 0) {
        leave_ring(r, "read", (int)result);
        block->retries = 0;
        make_ready(r, block);
        return;
    }
    if (result < 0) {
        fail(r, (int)result, path, "read", block->at);
        release(r, block);
        return;
    }
    if (result == 0) {
        r->status = numoe_error_set(&r->error, -EIO, path,
                                    "ends at byte %llu, before byte %llu of the %llu it had",
                                    (unsigned long long)block->at, (unsigned long long)block->need,
                                    (unsigned long long)file->id.bytes);
        release(r, block);
        return;
    }
    if ((uint64_t)result > block->asked) {
        fail(r, -EIO, path, "read", block->at);
        release(r, block);
        return;
    }
    block->retries = 0;
    block->at += (uint64_t)result;
    r->bytes += (uint64_t)result;
    if (!block->direct)
        posix_fadvise(file->fds[0], (off_t)(before / NUMOE_READ_ALIGN * NUMOE_READ_ALIGN),
                      (off_t)(block->end - before / NUMOE_READ_ALIGN * NUMOE_READ_ALIGN),
                      POSIX_FADV_DONTNEED);
    if (block->at >= block->need) {
        release(r, block);
        return;
    }
    if (block->direct && block->at % NUMOE_READ_ALIGN)
        block->buffered = true;
    make_ready(r, block);
}

/* ---- the two engines ------------------------------------------------------------------------ */

static void close_ring(struct numoe_reader *r)
{
    /* The kernel lets go of a closed ring's buffers some time later, and only then of pages that
     * were unmapped meanwhile. */
    if (r->fixed)
        (void)io_uring_unregister_buffers(&r->ring);
    io_uring_queue_exit(&r->ring);
    r->has_ring = r->leaving_ring = r->fixed_files = false;
    r->fixed = NULL;
}

/* Take back what was prepared but never reached the kernel, when it will not take it. */
static void take_back(struct numoe_reader *r)
{
    uint32_t i;

    /* Without anything in flight, all that runs is unsubmitted. */
    if (r->running != r->unsubmitted)
        return;
    for (i = 0; i < r->depth; i++)
        if (r->blocks[i].state == RUNNING)
            make_ready(r, &r->blocks[i]);
    r->running = r->unsubmitted = 0;
}

static void ring_submit(struct numoe_reader *r)
{
    unsigned refused = 0;

    while (r->unsubmitted) {
        int taken = io_uring_submit(&r->ring);
        if (taken == -EAGAIN || taken == -EBUSY || taken == -EINTR) {
            if (r->running > r->unsubmitted)
                return; /* completions must be taken first */
            if (++refused > RETRIES) {
                leave_ring(r, "io_uring_enter", taken);
                return;
            }
            nanosleep(&(struct timespec){0, 1000000}, NULL);
            continue;
        }
        if (taken <= 0) {
            leave_ring(r, "io_uring_enter", taken ? taken : -EIO);
            return;
        }
        r->unsubmitted -= (unsigned)taken < r->unsubmitted ? (unsigned)taken : r->unsubmitted;
    }
}

static void prepare(const struct numoe_reader *r, struct io_uring_sqe *sqe, struct block *block,
                    int fd)
{
    const struct file *file = &r->files[block->read->file];
    uint8_t *buffer = (uint8_t *)block_buffer(block);
    const uint64_t at = (uint64_t)((uintptr_t)buffer - (uintptr_t)r->fixed);

    if (r->fixed && at < r->fixed_bytes && block->asked <= r->fixed_bytes - at)
        io_uring_prep_read_fixed(sqe, fd, buffer, (unsigned)block->asked, block->at, 0);
    else
        io_uring_prep_read(sqe, fd, buffer, (unsigned)block->asked, block->at);
    if (r->fixed_files) {
        sqe->fd = (int)(2 * file->seat + block->direct);
        sqe->flags |= IOSQE_FIXED_FILE;
    }
    io_uring_sqe_set_data(sqe, block);
}

static void ring_fill(struct numoe_reader *r)
{
    while (r->ready && !r->status && !r->leaving_ring) {
        struct block *block = r->ready;
        struct io_uring_sqe *sqe;
        int fd = block_fd(r, block);

        if (fd < 0)
            return;
        sqe = io_uring_get_sqe(&r->ring);
        if (!sqe)
            return;
        take_ready(r);
        block->asked = block->end - block->at;
        prepare(r, sqe, block, fd);
        block->state = RUNNING;
        r->running++;
        r->unsubmitted++;
    }
}

static void ring_reap(struct numoe_reader *r)
{
    struct io_uring_cqe *cqe;

    while (io_uring_peek_cqe(&r->ring, &cqe) == 0) {
        struct block *block = io_uring_cqe_get_data(cqe);
        int result = cqe->res;
        io_uring_cqe_seen(&r->ring, cqe);
        complete(r, block, result, true);
    }
}

/* Wait for a completion, at most so long. */
static void ring_wait(struct numoe_reader *r, int64_t nanoseconds)
{
    struct __kernel_timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    struct io_uring_cqe *cqe;
    int code = io_uring_wait_cqe_timeout(&r->ring, &cqe, &limit);

    /* When waiting itself is denied, completions still arrive in shared memory. */
    if (code < 0 && code != -ETIME && code != -EINTR && code != -EAGAIN)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static void pread_one(struct numoe_reader *r)
{
    struct block *block = r->ready;
    ssize_t got;
    int fd;

    if (!block || r->status)
        return;
    fd = block_fd(r, block);
    if (fd < 0)
        return;
    take_ready(r);
    block->asked = block->end - block->at;
    block->state = RUNNING;
    r->running++;
    got = pread(fd, block_buffer(block), block->asked, (off_t)block->at);
    complete(r, block, got < 0 ? -errno : got, false);
}

/* Whether what is locked counts against the limit. */
static bool is_limited(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};

    return syscall(SYS_capget, &header, data) == 0 && !(data[0].effective >> CAP_IPC_LOCK & 1);
}

static void log_not_registered(const struct numoe_reader *r, uint64_t bytes, int code)
{
    struct rlimit limit;
    char why[96] = "";

    /* said only where it is the cause, as raising it would change nothing elsewhere */
    if (code == -ENOMEM && is_limited() && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
        limit.rlim_cur < bytes)
        snprintf(why, sizeof why, ": no more than %llu KiB may be locked (ulimit -l)",
                 (unsigned long long)(limit.rlim_cur >> 10));
    numoe_log_write(&r->log, NUMOE_LOG_INFO,
                    "%llu MiB of buffers are not registered with io_uring: %s%s",
                    (unsigned long long)(bytes >> 20), strerror(-code), why);
}

/* A limit on locked memory may refuse either; both only save time. */
static void register_all(struct numoe_reader *r, const struct numoe_reader_options *options)
{
    const struct iovec memory = {options->memory, options->memory_bytes};
    int none[2 * OPEN_FILES], code = 0;

    for (unsigned i = 0; i < 2 * OPEN_FILES; i++)
        none[i] = -1;
    if (r->hooks.enlist)
        code = r->hooks.enlist(r->hooks.user, true);
    if (code == 0)
        code = io_uring_register_files(&r->ring, none, 2 * OPEN_FILES);
    r->fixed_files = true;
    if (code < 0)
        leave_fixed_files(r, code);
    if (!options->memory || options->memory_bytes > FIXED_LIMIT)
        return;
    code = r->hooks.enlist ? r->hooks.enlist(r->hooks.user, false) : 0;
    if (code == 0)
        code = io_uring_register_buffers(&r->ring, &memory, 1);
    if (code < 0) {
        log_not_registered(r, options->memory_bytes, code);
        return;
    }
    r->fixed = options->memory;
    r->fixed_bytes = options->memory_bytes;
}

static int open_ring(struct numoe_reader *r)
{
    struct io_uring_probe *probe;
    unsigned entries = r->depth;
    bool reads;
    int code;

    if (r->hooks.ring) {
        code = r->hooks.ring(r->hooks.user);
        if (code < 0)
            return code;
    }
    /* A memlock limit may hold a small ring where it refuses a large one. */
    do
        code = io_uring_queue_init(entries, &r->ring, 0);
    while (code == -ENOMEM && (entries /= 2) >= 4);
    if (code < 0)
        return code;
    probe = io_uring_get_probe_ring(&r->ring);
    reads = probe && io_uring_opcode_supported(probe, IORING_OP_READ);
    if (probe)
        io_uring_free_probe(probe);
    if (!reads) {
        io_uring_queue_exit(&r->ring);
        return -ENOSYS;
    }
    io_uring_ring_dontfork(&r->ring);
    return 0;
}

/* ---- the interface -------------------------------------------------------------------------- */

int numoe_reader_create(const struct numoe_reader_options *options,
                        const struct numoe_reader_file *files, uint32_t file_count,
                        struct numoe_reader **reader, struct numoe_error *error)
{
    struct numoe_reader *r;
    uint32_t i;
    int code;

    if (!options->queue_depth || options->queue_depth > OPEN_FILES || !options->block_bytes ||
        options->block_bytes % NUMOE_READ_ALIGN || options->block_bytes > 1u << 30)
        return numoe_error_set(error, -EINVAL, "reader", "queue depth %u or block size %u is bad",
                               options->queue_depth, options->block_bytes);
    r = calloc(1, sizeof *r);
    if (!r)
        goto no_memory;
    r->error = (struct numoe_error)NUMOE_ERROR_INIT;
    r->depth = r->at_once = options->queue_depth;
    r->block_bytes = options->block_bytes;
    if (options->log)
        r->log = *options->log;
    if (options->hooks)
        r->hooks = *options->hooks;
    r->ready_tail = &r->ready;
    r->queued_tail = &r->queued;
    r->done_tail = &r->done;
    r->file_count = file_count;
    r->files = calloc(file_count ? file_count : 1, sizeof *r->files);
    r->blocks = calloc(r->depth, sizeof *r->blocks);
    if (!r->files || !r->blocks)
        goto no_memory;
    for (i = 0; i < file_count; i++)
        r->files[i] = (struct file){.path = files[i].path, .id = files[i].id, .fds = {-1, -1}};
    for (i = r->depth; i-- > 0;) {
        r->blocks[i].link = r->free_blocks;
        r->free_blocks = &r->blocks[i];
    }
    code = open_ring(r);
    r->has_ring = code == 0;
    if (code < 0)
        numoe_log_write(&r->log, NUMOE_LOG_WARNING,
                        "io_uring is not usable (setup: %s); reading with pread", strerror(-code));
    else
        register_all(r, options);
    *reader = r;
    return 0;
no_memory:
    if (r) {
        free(r->files);
        free(r->blocks);
        free(r);
    }
    return numoe_error_set(error, -ENOMEM, "reader", "no memory for a queue of %u blocks",
                           options->queue_depth);
}

void numoe_reader_tune(struct numoe_reader *reader, uint32_t queue_depth, uint32_t block_bytes)
{
    reader->at_once = queue_depth < reader->depth ? queue_depth : reader->depth;
    reader->block_bytes = block_bytes;
}

void numoe_reader_destroy(struct numoe_reader *reader)
{
    uint32_t i;

    if (!reader)
        return;
    if (!reader->status)
        reader->status = -ECANCELED;
    if (reader->has_ring) {
        while (reader->running > reader->unsubmitted) {
            ring_wait(reader, 100000000);
            ring_reap(reader);
        }
        close_ring(reader);
    }
    for (i = 0; i < reader->file_count; i++)
        close_file(reader, &reader->files[i]);
    free(reader->files);
    free(reader->blocks);
    free(reader);
}

int numoe_reader_submit(struct numoe_reader *reader, struct numoe_read *read,
                        struct numoe_error *error)
{
    uint64_t end, begin;

    if (read->file >= reader->file_count)
        return numoe_error_set(error, -EINVAL, "reader", "there is no file %u", read->file);
    if (!numoe_add_u64(read->offset, read->bytes, &end) || end > reader->files[read->file].id.bytes)
        return numoe_error_set(error, -EINVAL, reader->files[read->file].path,
                               "range of %llu bytes at %llu passes the file's %llu",
                               (unsigned long long)read->bytes, (unsigned long long)read->offset,
                               (unsigned long long)reader->files[read->file].id.bytes);
    if ((uintptr_t)read->window % NUMOE_READ_ALIGN)
        return numoe_error_set(error, -EINVAL, reader->files[read->file].path,
                               "window is not aligned to %d bytes", NUMOE_READ_ALIGN);
    begin = read->offset / NUMOE_READ_ALIGN * NUMOE_READ_ALIGN;
    read->next = begin;
    read->end = begin + numoe_read_window(read->offset, read->bytes);
    read->data = (uint8_t *)read->window + (read->offset - begin);
    read->blocks = 0;
    read->link = NULL;
    if (!read->bytes) {
        read->next = read->end;
        finish_read(reader, read);
        return 0;
    }
    *reader->queued_tail = read;
    reader->queued_tail = &read->link;
    return 0;
}

int numoe_reader_wait(struct numoe_reader *reader, unsigned timeout_ms, struct numoe_read **done,
                      struct numoe_error *error)
{
    struct numoe_reader *r = reader;
    int64_t deadline = (int64_t)numoe_now_ns() + (int64_t)timeout_ms * 1000000, left;

    for (;;) {
        if (r->has_ring)
            ring_reap(r);
        if (!r->status)
            start_blocks(r);
        if (r->has_ring) {
            ring_fill(r);
            ring_submit(r);
            if (r->leaving_ring) {
                take_back(r);
                if (!r->running)
                    close_ring(r);
            }
        }
        if (r->status)
            return numoe_error_set(error, r->status, r->error.where, "%s", r->error.message);
        if (r->done) {
            *done = r->done;
            r->done = r->done->link;
            if (!r->done)
                r->done_tail = &r->done;
            return 1;
        }
        left = deadline - (int64_t)numoe_now_ns();
        if (!r->used_blocks && !r->queued)
            return 0;
        if (!r->has_ring) {
            pread_one(r);
            if (left <= 0 && !r->done && !r->status)
                return 0;
            continue;
        }
        if (left <= 0)
            return 0;
        if (r->running > r->unsubmitted)
            ring_wait(r, left);
    }
}

uint64_t numoe_reader_bytes(const struct numoe_reader *reader)
{
    return reader->bytes;
}

uint64_t numoe_reader_dry(const struct numoe_reader *reader)
{
    return reader->dry;
}

const char *numoe_reader_path(const struct numoe_reader *reader)
{
    uint32_t i, refused = 0, used = 0;

    if (!reader->has_ring)
        return "pread";
    for (i = 0; i < reader->file_count; i++) {
        used += reader->files[i].last_use != 0;
        refused += reader->files[i].last_use != 0 && reader->files[i].refuses_direct;
    }
    if (!refused)
        return "io_uring O_DIRECT";
    return refused == used ? "io_uring buffered" : "io_uring mixed";
}
