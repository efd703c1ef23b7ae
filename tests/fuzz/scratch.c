/* Inputs, files and text of fuzz targets. SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Noreturn void fuzz_broken(const char *file, int line, const char *condition, const char *format,
                           ...)
{
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dprintf(STDERR_FILENO, "%s:%d: does not hold: %s:%s\n", file, line, condition, text);
    __builtin_trap();
}

/* ---- files ---- */

static char directory[256];

static void remove_below(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *opened = fd >= 0 ? fdopendir(fd) : NULL;
    struct dirent *entry;

    if (opened) {
        while ((entry = readdir(opened)))
            if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
                remove_below(fd, entry->d_name);
        closedir(opened);
        unlinkat(parent, name, AT_REMOVEDIR);
    } else {
        unlinkat(parent, name, 0);
    }
}

void fuzz_remove(const char *path)
{
    remove_below(AT_FDCWD, path);
}

static void clean(void)
{
    fuzz_remove(directory);
}

const char *fuzz_directory(void)
{
    const char *base = getenv("TMPDIR");

    if (*directory)
        return directory;
    if (!base || !*base)
        base = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
    snprintf(directory, sizeof directory, "%s/numoe-fuzz-XXXXXX", base);
    check_that(mkdtemp(directory), "%s: %s", directory, strerror(errno));
    atexit(clean);
    return directory;
}

const char *fuzz_path(const char *name)
{
    static char paths[2][512];
    static unsigned turn;
    char *path = paths[turn++ % 2];

    snprintf(path, sizeof paths[0], "%s/%s", fuzz_directory(), name);
    return path;
}

void fuzz_write(const char *path, const void *bytes, size_t count, uint64_t more)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

    check_that(fd >= 0, "%s: %s", path, strerror(errno));
    for (size_t done = 0; done < count;) {
        ssize_t wrote = write(fd, (const char *)bytes + done, count - done);

        check_that(wrote > 0, "%s: %s", path, strerror(errno));
        done += (size_t)wrote;
    }
    check_that(!ftruncate(fd, (off_t)(count + more)), "%s: %s", path, strerror(errno));
    close(fd);
}

/* ---- text ---- */

char *fuzz_text(const uint8_t *data, size_t size)
{
    char *text;

    if (size && memchr(data, 0, size))
        return NULL;
    text = malloc(size + 1);
    check_that(text);
    if (size)
        memcpy(text, data, size);
    text[size] = 0;
    return text;
}

void fuzz_print_open(struct fuzz_print *print)
{
    *print = (struct fuzz_print){0};
    print->out = open_memstream(&print->text, &print->bytes);
    check_that(print->out);
}

char *fuzz_print_take(struct fuzz_print *print)
{
    check_that(!ferror(print->out) && !fclose(print->out));
    check_that(strlen(print->text) == print->bytes, "a zero byte was printed");
    return print->text;
}

static bool printable(const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            return false;
    return true;
}

void fuzz_check_error(int rc, const struct numoe_error *error)
{
    check_that(rc < 0 && error->code == rc, "returned %d, error.code %d", rc, error->code);
    check_that(*error->message, "an error without words");
    check_that(printable(error->message), "%s", error->message);
    check_that(printable(error->where), "%s", error->where);
}

void fuzz_check_text(const char *text, const char *input)
{
    /* NUMOE_NONE, UINT64_MAX; "inf" also begins words */
    static const char *const odd[] = {"4294967295", "18446744073709551615", "nan", " inf ", "-inf",
                                      "(null)"};

    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++)
        if (!strstr(input, odd[i]))
            check_that(!strstr(text, odd[i]), "\"%s\" in:\n%.600s", odd[i], strstr(text, odd[i]));
}

void fuzz_check_json(const char *text)
{
    json_error_t where;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &where);

    check_that(root, "%s at %d:%d of %.600s", where.text, where.line, where.column, text);
    json_decref(root);
}
