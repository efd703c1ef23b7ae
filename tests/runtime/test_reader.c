/* The reader: any range of any file, by every path, through every fault. */
#include "loader_files.h"
#include "reader.h"
#include "safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_RANGES = 64 };

struct range {
    uint32_t file;
    uint64_t offset, bytes;
};

struct faults {
    int ring, open_direct, open_any, enlist_files, enlist_buffers;
    unsigned completions;
    unsigned every; /* which completions are tampered with: each so-many-th; 0: none */
    unsigned last;  /* and none after this one; 0: no end */
    int64_t result; /* what they say: negative errno, or at most so many bytes */
    bool direct_only, ring_only;
    const char *truncate; /* cut this file to truncate_to at the second completion */
    uint64_t truncate_to;
    unsigned direct, buffered, by_ring, by_pread;
};

static int fault_ring(void *user)
{
    return ((struct faults *)user)->ring;
}

static int fault_enlist(void *user, bool files)
{
    const struct faults *faults = user;

    return files ? faults->enlist_files : faults->enlist_buffers;
}

static int fault_open(void *user, const char *path, bool direct)
{
    const struct faults *faults = user;

    (void)path;
    return faults->open_any ? faults->open_any : direct ? faults->open_direct : 0;
}

static int64_t fault_complete(void *user, const struct numoe_reader_event *event)
{
    struct faults *faults = user;
    int64_t result = event->result;

    faults->completions++;
    *(event->direct ? &faults->direct : &faults->buffered) += 1;
    *(event->ring ? &faults->by_ring : &faults->by_pread) += 1;
    if (faults->truncate && faults->completions == 2)
        cr_assert_eq(truncate(faults->truncate, (off_t)faults->truncate_to), 0);
    if (!faults->every || faults->completions % faults->every ||
        (faults->last && faults->completions > faults->last) ||
        (faults->direct_only && !event->direct) || (faults->ring_only && !event->ring))
        return result;
    if (faults->result < 0 || result < faults->result) {
        result = faults->result < 0 ? faults->result : result;
    } else {
        result = faults->result;
    }
    /* What a short or failed read leaves behind is stale. */
    if (result < (int64_t)event->bytes)
        memset((char *)event->buffer + (result > 0 ? result : 0), 0xA5,
               event->bytes - (uint64_t)(result > 0 ? result : 0));
    return result;
}

struct world {
    char *directory;
    char *paths[4];
    uint8_t *content[4];
    struct numoe_reader_file files[4];
    uint32_t count;
    struct files_log log;
    struct faults faults;
    struct numoe_reader_options options;
    struct numoe_error error;
    char way[64];
};

static struct numoe_reader_file file_now(const char *path)
{
    struct numoe_reader_file file = {.path = path};
    struct numoe_error error = NUMOE_ERROR_INIT;
    int fd = numoe_file_open(path, &file.id, &error);

    cr_assert(fd >= 0, "%s: %s", error.where, error.message);
    close(fd);
    return file;
}

static void add_file(struct world *w, size_t bytes)
{
    uint64_t state = 77 + w->count;
    char name[32];
    size_t i;

    snprintf(name, sizeof name, "f%u", w->count);
    w->paths[w->count] = strdup(files_at(w->directory, name));
    w->content[w->count] = malloc(bytes + 1);
    for (i = 0; i < bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        w->content[w->count][i] = (uint8_t)(state >> 56);
    }
    files_put(w->paths[w->count], w->content[w->count], bytes);
    w->files[w->count] = file_now(w->paths[w->count]);
    w->count++;
}

static struct world *world(size_t bytes)
{
    struct world *w = calloc(1, sizeof *w);

    w->directory = files_dir();
    w->options = (struct numoe_reader_options)NUMOE_READER_OPTIONS_INIT;
    w->options.queue_depth = 4;
    w->options.block_bytes = 16384;
    w->error = (struct numoe_error)NUMOE_ERROR_INIT;
    add_file(w, bytes);
    return w;
}

static void end_world(struct world *w)
{
    uint32_t i;

    for (i = 0; i < w->count; i++) {
        free(w->paths[i]);
        free(w->content[i]);
    }
    files_drop(w->directory);
    free(w);
}

/* Read ranges and compare with the files' content. @return 0 or the reader's error */
static int read_ranges(struct world *w, const struct range *ranges, unsigned count)
{
    struct numoe_log log = {files_log_fn, &w->log};
    struct numoe_reader_hooks hooks = {&w->faults, fault_ring, fault_enlist, fault_open,
                                       fault_complete};
    struct numoe_reader *reader;
    struct numoe_read reads[MAX_RANGES], *done;
    void *windows[MAX_RANGES];
    uint8_t *next_window = w->options.memory;
    unsigned i, finished = 0;
    int code, before = files_open_now();

    cr_assert(count <= MAX_RANGES);
    w->options.log = &log;
    w->options.hooks = &hooks;
    code = numoe_reader_create(&w->options, w->files, w->count, &reader, &w->error);
    cr_assert_eq(code, 0, "%s", w->error.message);
    for (i = 0; i < count; i++) {
        uint64_t window = numoe_read_window(ranges[i].offset, ranges[i].bytes);
        /* Exactly what is promised to suffice, so that one byte more is an overrun. */
        if (w->options.memory)
            windows[i] = next_window, next_window += window;
        else
            cr_assert_eq(posix_memalign(&windows[i], NUMOE_READ_ALIGN, window ? window : 1), 0);
        memset(windows[i], 0x5A, window);
        reads[i] = (struct numoe_read){.file = ranges[i].file,
                                       .offset = ranges[i].offset,
                                       .bytes = ranges[i].bytes,
                                       .window = windows[i],
                                       .user = (void *)(uintptr_t)i};
        code = numoe_reader_submit(reader, &reads[i], &w->error);
        cr_assert_eq(code, 0, "%s", w->error.message);
    }
    while (finished < count && (code = numoe_reader_wait(reader, 1000, &done, &w->error)) >= 0) {
        if (code == 0)
            continue;
        i = (unsigned)(uintptr_t)done->user;
        cr_assert(
            !memcmp(done->data, w->content[ranges[i].file] + ranges[i].offset, ranges[i].bytes),
            "range %u: %llu bytes at %llu", i, (unsigned long long)ranges[i].bytes,
            (unsigned long long)ranges[i].offset);
        finished++;
    }
    if (code >= 0) {
        cr_expect_eq(numoe_reader_wait(reader, 0, &done, &w->error), 0);
        code = 0;
    } else {
        cr_expect_eq(numoe_reader_wait(reader, 0, &done, &w->error), code, "the error stays");
    }
    snprintf(w->way, sizeof w->way, "%s", numoe_reader_path(reader));
    numoe_reader_destroy(reader);
    for (i = 0; i < count && !w->options.memory; i++)
        free(windows[i]);
    cr_expect_eq(files_open_now(), before);
    return code;
}

/* Awkward ranges of a file of 300,001 bytes, the last ending at its end. */
static const struct range awkward[] = {
    {0, 513, 1},       {0, 1152, 511}, {0, 4097, 4095}, {0, 4096, 4096},   {0, 0, 4097},
    {0, 4095, 2},      {0, 300000, 1}, {0, 20000, 0},   {0, 8191, 16385},  {0, 100000, 90000},
    {0, 295000, 5001}, {0, 1, 300000}, {0, 300001, 0},  {0, 12288, 16384}, {0, 299008, 993},
};
enum { AWKWARD = sizeof awkward / sizeof awkward[0] };

static bool io_uring_works(void)
{
    struct world *w = world(4096);
    bool works;

    cr_assert_eq(read_ranges(w, &(struct range){0, 0, 4096}, 1), 0);
    works = strncmp(w->way, "io_uring", 8) == 0;
    end_world(w);
    return works;
}

Test(reader, any_range_by_io_uring, .timeout = 20)
{
    struct world *w = world(300001);

    if (!io_uring_works())
        cr_skip_test("io_uring is not available here");
    cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0, "%s", w->error.message);
    cr_expect_eq(w->faults.by_pread, 0);
    cr_expect(w->faults.by_ring > 20);
    end_world(w);
}

/* With everything registered, with either refused, and with both. */
Test(reader, what_is_not_registered_is_named_in_each_request, .timeout = 20)
{
    const uint64_t room = 2 << 20;
    unsigned refused;

    if (!io_uring_works())
        cr_skip_test("io_uring is not available here");
    for (refused = 0; refused < 4; refused++) {
        struct world *w = world(300001);

        w->options.memory =
            mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        w->options.memory_bytes = room;
        w->faults.enlist_files = refused & 1 ? -ENOSYS : 0;
        w->faults.enlist_buffers = refused & 2 ? -ENOMEM : 0;
        cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0, "%s", w->error.message);
        cr_expect_str_eq(w->way, "io_uring O_DIRECT");
        cr_expect_eq(w->log.warnings, 0);
        if (refused & 1)
            expect_text(w->log.text, "files are not registered with io_uring: Function not");
        if (refused & 2)
            expect_text(w->log.text, "2 MiB of buffers are not registered with io_uring: Cannot");
        if (!refused)
            cr_expect_eq(w->log.count, 0, "%s", w->log.text);
        munmap(w->options.memory, room);
        end_world(w);
    }
}

Test(reader, without_a_ring_it_is_pread_and_said_once, .timeout = 20)
{
    static const int codes[] = {-EPERM, -ENOSYS, -ENOMEM};
    unsigned i;

    for (i = 0; i < 3; i++) {
        struct world *w = world(300001);
        w->faults.ring = codes[i];
        cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0, "%s", w->error.message);
        cr_expect_str_eq(w->way, "pread");
        cr_expect_eq(w->faults.by_ring, 0);
        cr_expect_eq(w->log.warnings, 1);
        expect_text(w->log.text, strerror(-codes[i]));
        end_world(w);
    }
}

Test(reader, a_denied_opcode_turns_to_pread_midway, .timeout = 20)
{
    static const int codes[] = {-EPERM, -ENOSYS, -ENOMEM, -EOPNOTSUPP, -EIO, -EBADF, -EFAULT};
    unsigned i, every;

    if (!io_uring_works())
        cr_skip_test("io_uring is not available here");
    for (i = 0; i < sizeof codes / sizeof codes[0]; i++)
        for (every = 1; every <= 7; every += 3) {
            struct world *w = world(300001);
            w->faults.every = every;
            w->faults.result = codes[i];
            w->faults.ring_only = true;
            cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0, "%s", w->error.message);
            cr_expect_str_eq(w->way, "pread");
            cr_expect_eq(w->log.warnings, 1, "%s", w->log.text);
            cr_expect(w->faults.by_pread > 0);
            end_world(w);
        }
}

/* Case E3, E4: every tampering by either engine must give equal bytes. */
static void tampered(int64_t result, bool direct_only, unsigned last)
{
    static const unsigned every[] = {1, 2, 3, 5};
    unsigned i, engine;

    for (engine = 0; engine < 2; engine++)
        for (i = 0; i < 4; i++) {
            struct world *w = world(300001);
            w->faults.ring = engine ? -ENOSYS : 0;
            w->faults.every = every[i];
            w->faults.result = result;
            w->faults.direct_only = direct_only;
            w->faults.last = last;
            cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0, "%lld every %u: %s",
                         (long long)result, every[i], w->error.message);
            end_world(w);
        }
}

Test(reader, short_reads_are_continued, .timeout = 60)
{
    tampered(4096, false, 0);
    tampered(8192, false, 0);
    tampered(512, false, 0);
    tampered(1, true, 0);
    tampered(4095, false, 0);
    tampered(4097, false, 0);
}

Test(reader, interrupted_reads_are_asked_again, .timeout = 60)
{
    tampered(-EINTR, false, 5);
    tampered(-EAGAIN, false, 5);
}

Test(reader, o_direct_refused_at_the_first_read, .timeout = 20)
{
    struct world *w = world(300001);

    tampered(-EINVAL, true, 0);
    w->faults.every = 1;
    w->faults.result = -EINVAL;
    w->faults.direct_only = true;
    cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0);
    cr_expect(w->faults.buffered > 0);
    if (io_uring_works())
        cr_expect_str_eq(w->way, "io_uring buffered");
    expect_text(w->log.text, "O_DIRECT refused at the first read");
    end_world(w);
}

Test(reader, o_direct_refused_at_open, .timeout = 20)
{
    struct world *w = world(300001);

    w->faults.open_direct = -EINVAL;
    cr_assert_eq(read_ranges(w, awkward, AWKWARD), 0, "%s", w->error.message);
    cr_expect_eq(w->faults.direct, 0);
    expect_text(w->log.text, "O_DIRECT refused at open");
    cr_expect_eq(w->log.count, 1 + !io_uring_works(), "one notice: %s", w->log.text);
    end_world(w);
}

Test(reader, buffered_reads_leave_no_page_cache, .timeout = 20)
{
    struct world *w = world(1 << 20);
    const struct range whole = {0, 0, 1 << 20};
    unsigned char present[256];
    unsigned i, left = 0;
    void *map;
    int fd;

    fd = open(w->paths[0], O_RDONLY | O_CLOEXEC);
    if (posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
        cr_skip_test("no advice on this file system");
    map = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, fd, 0);
    cr_assert_eq(mincore(map, 1 << 20, present), 0);
    for (i = 0; i < 256; i++)
        left += present[i] & 1;
    if (left)
        cr_skip_test("this file system keeps files in memory");
    w->faults.open_direct = -EINVAL;
    cr_assert_eq(read_ranges(w, &whole, 1), 0);
    cr_expect(w->faults.buffered > 0);
    cr_assert_eq(mincore(map, 1 << 20, present), 0);
    for (i = 0; i < 256; i++)
        left += present[i] & 1;
    cr_expect_eq(left, 0, "%u pages", left);
    munmap(map, 1 << 20);
    close(fd);
    end_world(w);
}

Test(reader, errors_name_file_and_offset, .timeout = 20)
{
    unsigned engine;

    for (engine = 0; engine < 2; engine++) {
        struct world *w = world(300001);
        w->faults.ring = engine ? -ENOSYS : 0;
        w->faults.every = 9;
        w->faults.result = -EIO;
        cr_assert_eq(read_ranges(w, awkward, AWKWARD), -EIO);
        expect_text(w->error.where, w->paths[0]);
        expect_text(w->error.message, "read at byte ");
        end_world(w);

        w = world(300001);
        w->faults.ring = engine ? -ENOSYS : 0;
        w->faults.open_any = -EACCES;
        cr_assert_eq(read_ranges(w, awkward, AWKWARD), -EACCES);
        expect_text(w->error.message, "cannot open");
        end_world(w);

        w = world(300001);
        w->faults.ring = engine ? -ENOSYS : 0;
        w->faults.every = 1;
        w->faults.result = -EAGAIN;
        w->options.queue_depth = 1;
        cr_assert_eq(read_ranges(w, awkward, 1), -EAGAIN, "not for ever");
        end_world(w);
    }
}

Test(reader, a_file_cut_while_it_is_read, .timeout = 20)
{
    static const uint64_t cuts[] = {200000, 196608, 5000, 0};
    unsigned engine, i;

    for (engine = 0; engine < 2; engine++)
        for (i = 0; i < 4; i++) {
            struct world *w = world(300001);
            w->faults.ring = engine ? -ENOSYS : 0;
            w->options.queue_depth = 1;
            w->faults.truncate = w->paths[0];
            w->faults.truncate_to = cuts[i];
            cr_assert_eq(read_ranges(w, &(struct range){0, 1, 300000}, 1), -EIO);
            expect_text(w->error.where, w->paths[0]);
            cr_expect(strstr(w->error.message, "ends at byte") ||
                          strstr(w->error.message, "was changed"),
                      "%s", w->error.message);
            end_world(w);
        }
}

Test(reader, a_file_of_another_size_than_before, .timeout = 20)
{
    struct world *w = world(5000);

    cr_assert_eq(truncate(w->paths[0], 6000), 0);
    cr_assert_eq(read_ranges(w, &(struct range){0, 0, 10}, 1), -EIO);
    expect_text(w->error.message, "was changed: it has 6000 bytes now, 5000 before");
    end_world(w);
}

/* What its header said need not hold of another file, or of what was written since. */
Test(reader, a_file_that_was_replaced_or_written_to, .timeout = 20)
{
    for (unsigned i = 0; i < 2; i++) {
        struct world *w = world(5000);

        add_file(w, 5000);
        if (i == 0) {
            cr_assert_eq(rename(w->paths[1], w->paths[0]), 0);
        } else {
            struct timespec times[2] = {
                {.tv_nsec = UTIME_OMIT},
                {w->files[0].id.modified_s, w->files[0].id.modified_ns ^ 1}};
            cr_assert_eq(utimensat(AT_FDCWD, w->paths[0], times, 0), 0);
        }
        cr_assert_eq(read_ranges(w, &(struct range){0, 0, 10}, 1), -EIO);
        expect_text(w->error.where, w->paths[0]);
        expect_text(w->error.message, i == 0 ? "is another file than the one whose header was read"
                                             : "was written to after its header was read");
        end_world(w);
    }
}

Test(reader, several_files_and_blocks_of_any_size, .timeout = 60)
{
    static const uint32_t sizes[] = {4096, 8192, 1 << 20}, depths[] = {1, 3, 64};
    unsigned i, j, k;

    for (i = 0; i < 3; i++)
        for (j = 0; j < 3; j++) {
            struct world *w = world(70000);
            struct range ranges[60];
            uint64_t state = i * 3 + j;
            add_file(w, 1);
            add_file(w, 4096);
            add_file(w, 130001);
            w->options.block_bytes = sizes[i];
            w->options.queue_depth = depths[j];
            for (k = 0; k < 60; k++) {
                uint64_t size;
                state = state * 6364136223846793005u + 1442695040888963407u;
                ranges[k].file = (uint32_t)(state >> 62);
                size = w->files[ranges[k].file].id.bytes;
                ranges[k].offset = (state >> 30) % (size + 1);
                ranges[k].bytes = (state >> 10 & 0xFFFFF) % (size - ranges[k].offset + 1);
            }
            cr_assert_eq(read_ranges(w, ranges, 60), 0, "%s", w->error.message);
            end_world(w);
        }
}

Test(reader, more_files_than_descriptors_kept, .timeout = 60)
{
    enum { FILES = 150 };
    char *directory = files_dir(), *paths[FILES], name[16];
    struct numoe_reader_file files[FILES];
    struct numoe_reader_options options = NUMOE_READER_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_reader *reader;
    struct numoe_read read, *done;
    void *window = NULL;
    int before = files_open_now(), most = 0, code;
    unsigned i;

    cr_assert_eq(posix_memalign(&window, NUMOE_READ_ALIGN, NUMOE_READ_ALIGN), 0);
    for (i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "%u", i);
        paths[i] = strdup(files_at(directory, name));
        files_put(paths[i], name, strlen(name));
        files[i] = file_now(paths[i]);
    }
    cr_assert_eq(numoe_reader_create(&options, files, FILES, &reader, &error), 0);
    for (i = 0; i < 2 * FILES; i++) {
        unsigned file = i * 7 % FILES;
        snprintf(name, sizeof name, "%u", file);
        read =
            (struct numoe_read){.file = file, .offset = 0, .bytes = strlen(name), .window = window};
        cr_assert_eq(numoe_reader_submit(reader, &read, &error), 0);
        while ((code = numoe_reader_wait(reader, 1000, &done, &error)) == 0)
            ;
        cr_assert_eq(code, 1, "%s", error.message);
        cr_assert(!memcmp(done->data, name, strlen(name)));
        if (files_open_now() > most)
            most = files_open_now();
    }
    cr_expect(most < before + 70, "%d", most);
    numoe_reader_destroy(reader);
    cr_expect_eq(files_open_now(), before);
    for (i = 0; i < FILES; i++)
        free(paths[i]);
    free(window);
    files_drop(directory);
}

Test(reader, destroyed_with_reads_in_flight, .timeout = 20)
{
    struct world *w = world(300001);
    struct numoe_reader *reader;
    struct numoe_read read = {.file = 0, .offset = 0, .bytes = 300001}, *done;
    unsigned i;

    for (i = 0; i < 20; i++) {
        cr_assert_eq(numoe_reader_create(&w->options, w->files, 1, &reader, NULL), 0);
        cr_assert_eq(posix_memalign(&read.window, NUMOE_READ_ALIGN, numoe_read_window(0, 300001)),
                     0);
        cr_assert_eq(numoe_reader_submit(reader, &read, NULL), 0);
        cr_assert(numoe_reader_wait(reader, 0, &done, NULL) >= 0);
        numoe_reader_destroy(reader);
        free(read.window); /* a late write would be caught */
    }
    end_world(w);
}

Test(reader, bad_requests_are_refused, .timeout = 20)
{
    struct world *w = world(5000);
    struct numoe_reader *reader;
    struct numoe_read read;
    static _Alignas(4096) uint8_t window[8192];
    struct numoe_reader_options options = w->options;

    options.block_bytes = 5000;
    cr_expect_eq(numoe_reader_create(&options, w->files, 1, &reader, &w->error), -EINVAL);
    options = w->options;
    options.queue_depth = 0;
    cr_expect_eq(numoe_reader_create(&options, w->files, 1, &reader, &w->error), -EINVAL);
    cr_assert_eq(numoe_reader_create(&w->options, w->files, 1, &reader, &w->error), 0);
    read = (struct numoe_read){.file = 1, .bytes = 1, .window = window};
    cr_expect_eq(numoe_reader_submit(reader, &read, &w->error), -EINVAL);
    read = (struct numoe_read){.offset = 4000, .bytes = 1001, .window = window};
    cr_expect_eq(numoe_reader_submit(reader, &read, &w->error), -EINVAL);
    expect_text(w->error.message, "range of 1001 bytes at 4000 passes the file's 5000");
    read = (struct numoe_read){.offset = UINT64_MAX, .bytes = 2, .window = window};
    cr_expect_eq(numoe_reader_submit(reader, &read, &w->error), -EINVAL);
    read = (struct numoe_read){.bytes = 1, .window = window + 1};
    cr_expect_eq(numoe_reader_submit(reader, &read, &w->error), -EINVAL);
    numoe_reader_destroy(reader);
    numoe_reader_destroy(NULL);
    end_world(w);
}

/* Case E4: data that begins at 513, 1152 and 4097, odd lengths, the last tensor ending the file. */
Test(reader, tensors_off_block_boundaries, .timeout = 20)
{
    static const unsigned begins[] = {513, 1152, 4097}, lengths[] = {1, 511, 4095, 4097};
    unsigned i, j;

    for (i = 0; i < 3; i++) {
        char *directory = files_dir(), *header = malloc(begins[i] + 1);
        const char *path = files_at(directory, "model.safetensors");
        struct numoe_reader_options options = NUMOE_READER_OPTIONS_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_reader_file file = {.path = path};
        struct numoe_tensors *tensors;
        struct numoe_reader *reader;
        uint64_t offset = 0;
        size_t used = 0, count;
        char *content;

        for (j = 0; j < 4; j++) {
            used +=
                (size_t)sprintf(header + used,
                                "%c\"t%u\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":["
                                "%llu,%llu]}",
                                j ? ',' : '{', lengths[j], lengths[j], (unsigned long long)offset,
                                (unsigned long long)offset + lengths[j]);
            offset += lengths[j];
        }
        header[used++] = '}';
        memset(header + used, ' ', begins[i] - 8 - used);
        files_put_tensors(path, header, begins[i] - 8, NULL, offset);
        content = files_get(path, &count);
        cr_assert_eq(numoe_tensors_create(&tensors, NULL), 0);
        cr_assert_eq(numoe_tensors_read(tensors, path, 0, &file.id, &error), 0, "%s",
                     error.message);
        cr_assert_eq(numoe_tensors_at(tensors, 0)->begin, begins[i]);
        cr_assert_eq(numoe_tensors_at(tensors, 3)->end, count);
        cr_assert_eq(numoe_reader_create(&options, &file, 1, &reader, &error), 0);
        for (j = 0; j < 4; j++) {
            const struct numoe_tensor *t = numoe_tensors_at(tensors, j);
            struct numoe_read read = {.offset = t->begin, .bytes = t->end - t->begin}, *done;
            int code;
            cr_assert_eq(posix_memalign(&read.window, NUMOE_READ_ALIGN,
                                        numoe_read_window(read.offset, read.bytes)),
                         0);
            cr_assert_eq(numoe_reader_submit(reader, &read, &error), 0);
            while ((code = numoe_reader_wait(reader, 1000, &done, &error)) == 0)
                ;
            cr_assert_eq(code, 1, "%s", error.message);
            cr_assert_eq(read.bytes, lengths[j]);
            cr_assert(!memcmp(read.data, content + t->begin, read.bytes));
            free(read.window);
        }
        numoe_reader_destroy(reader);
        numoe_tensors_destroy(tensors);
        free(content);
        free(header);
        files_drop(directory);
    }
}
