/* Plain reads: any range of any file, whatever pread does. */
#include "loader_files.h"
#include "plain.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What pread is to do, in this process: at most so many bytes a call; every n-th call fails. */
static struct {
    size_t most;
    unsigned every, calls;
    int code;
} disturbed;

ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset)
{
    if (disturbed.every && ++disturbed.calls % disturbed.every == 0) {
        errno = disturbed.code;
        return -1;
    }
    if (disturbed.most && bytes > disturbed.most)
        bytes = disturbed.most;
    return syscall(SYS_pread64, fd, buffer, bytes, offset);
}

static struct numoe_reader_file put(const char *directory, const char *name, unsigned bytes)
{
    struct numoe_reader_file file = {.path = strdup(files_at(directory, name))};
    uint8_t *content = malloc(bytes + 1);

    for (unsigned i = 0; i < bytes; i++)
        content[i] = (uint8_t)(i * 7 + i / 251 + (unsigned)name[0]);
    files_put(file.path, content, bytes);
    free(content);
    int fd = numoe_file_open(file.path, &file.id, NULL);
    cr_assert(fd >= 0);
    close(fd);
    return file;
}

static void forget(struct numoe_reader_file file)
{
    free((char *)(uintptr_t)file.path);
}

static bool right(const uint8_t *buffer, const char *name, unsigned offset, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        if (buffer[i] != (uint8_t)((offset + i) * 7 + (offset + i) / 251 + (unsigned)name[0]))
            return false;
    return true;
}

Test(plain, all_bytes_or_one_error, .timeout = 60)
{
    static const struct {
        size_t most;
        unsigned every;
        int code, result;
    } cases[] = {{0, 0, 0, 0},       {1, 0, 0, 0},         {511, 0, 0, 0},     {4096, 3, EINTR, 0},
                 {77, 2, EAGAIN, 0}, {4096, 1, EINTR, -4}, {4096, 2, EIO, -5}, {0, 1, EISDIR, -21}};
    static const struct {
        unsigned offset, bytes;
    } ranges[] = {{0, 1}, {0, 30000}, {1, 29999}, {4095, 2}, {29999, 1}, {30000, 0}};
    char *directory = files_dir();
    struct numoe_reader_file file = put(directory, "a", 30000);
    uint8_t *buffer = malloc(30000);

    for (unsigned c = 0; c < sizeof cases / sizeof cases[0]; c++)
        for (unsigned r = 0; r < sizeof ranges / sizeof ranges[0]; r++) {
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_plain *plain;
            int code;

            cr_assert_eq(numoe_plain_create(&file, 1, &plain, NULL), 0);
            numoe_plain_begin(plain);
            cr_assert_eq(numoe_plain_open(plain, 0, &error), 0, "%s", error.message);
            memset(buffer, 0xA5, 30000);
            disturbed.most = cases[c].most;
            disturbed.every = cases[c].every;
            disturbed.code = cases[c].code;
            disturbed.calls = 0;
            code = numoe_plain_read(plain, 0, ranges[r].offset, ranges[r].bytes, buffer, &error);
            memset(&disturbed, 0, sizeof disturbed);
            if (code == 0) {
                cr_assert(right(buffer, "a", ranges[r].offset, ranges[r].bytes));
                cr_assert(cases[c].result == 0 || ranges[r].bytes <= cases[c].most);
            } else {
                cr_assert_eq(code, cases[c].result);
                cr_assert_str_eq(error.where, file.path);
                cr_assert_neq(error.message[0], 0);
            }
            numoe_plain_destroy(plain);
        }
    free(buffer);
    forget(file);
    files_drop(directory);
}

Test(plain, a_file_cut_or_replaced_is_an_error, .timeout = 20)
{
    for (unsigned way = 0; way < 3; way++) {
        char *directory = files_dir();
        struct numoe_reader_file file = put(directory, "a", 9000);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_plain *plain;
        uint8_t buffer[9000];

        forget(put(directory, "b", 9000));
        cr_assert_eq(numoe_plain_create(&file, 1, &plain, NULL), 0);
        numoe_plain_begin(plain);
        if (way == 0) {
            cr_assert_eq(rename(files_at(directory, "b"), file.path), 0);
            cr_assert_eq(numoe_plain_open(plain, 0, &error), -EIO);
        } else if (way == 1) {
            cr_assert_eq(unlink(file.path), 0);
            cr_assert_eq(numoe_plain_open(plain, 0, &error), -ENOENT);
        } else {
            cr_assert_eq(numoe_plain_open(plain, 0, &error), 0);
            cr_assert_eq(truncate(file.path, 5000), 0);
            cr_assert_eq(numoe_plain_read(plain, 0, 10, 8000, buffer, &error), -EIO);
            cr_assert_eq(error.code, -EIO);
            expect_text(error.message, "ends at byte 5000");
        }
        expect_text(error.where, file.path);
        numoe_plain_destroy(plain);
        forget(file);
        files_drop(directory);
    }
}

/* More files than are kept open, each read in a round of its own and all at once again. */
Test(plain, many_files, .timeout = 60)
{
    enum { FILES = 150 };
    char *directory = files_dir(), name[16];
    struct numoe_reader_file files[FILES];
    struct numoe_plain *plain;
    const int before = files_open_now();

    for (unsigned i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "%c%u", 'A' + (int)(i % 50), i);
        files[i] = put(directory, name, 100 + i);
    }
    cr_assert_eq(numoe_plain_create(files, FILES, &plain, NULL), 0);
    for (unsigned i = 0; i < 2 * FILES; i++) {
        const unsigned f = i * 7 % FILES;
        struct numoe_error error = NUMOE_ERROR_INIT;
        uint8_t buffer[300];

        snprintf(name, sizeof name, "%c", 'A' + (int)(f % 50));
        numoe_plain_begin(plain);
        cr_assert_eq(numoe_plain_open(plain, f, &error), 0, "%s", error.message);
        cr_assert_eq(numoe_plain_read(plain, f, 0, 100 + f, buffer, &error), 0);
        cr_assert(right(buffer, name, 0, 100 + f));
        cr_assert_leq(files_open_now(), before + 64);
    }
    numoe_plain_begin(plain);
    for (unsigned i = 0; i < FILES; i++)
        cr_assert_eq(numoe_plain_open(plain, i, NULL), 0);
    cr_assert_eq(files_open_now(), before + FILES, "what one round needs stays open");
    numoe_plain_destroy(plain);
    cr_assert_eq(files_open_now(), before);
    for (unsigned i = 0; i < FILES; i++)
        forget(files[i]);
    files_drop(directory);
}

Test(plain, whether_a_file_is_cached, .timeout = 60)
{
    char *directory = files_dir();
    struct numoe_reader_file file = put(directory, "a", 3000000);
    int fd = open(file.path, O_RDONLY | O_CLOEXEC);

    cr_expect(!numoe_plain_cached(files_at(directory, "none")));
    cr_assert(fd >= 0);
    if (!numoe_file_cached(fd, 0))
        cr_skip("the file system does not say what is cached");
    cr_expect(numoe_plain_cached(file.path));
    fdatasync(fd);
    posix_fadvise(fd, 2 << 20, 0, POSIX_FADV_DONTNEED);
    if (!numoe_file_cached(fd, 2999999))
        cr_expect(!numoe_plain_cached(file.path), "a part of it is not");
    close(fd);
    forget(file);
    files_drop(directory);
}
