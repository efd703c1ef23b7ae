/*
 * replay_TARGET DIRECTORY DAMAGED: a fuzz target over its corpus and over damaged copies of it, the
 * same ones each time.  replay_TARGET FILE...: over these inputs alone.
 *
 * The inputs run in a child process, one after the other. When it ends before its time or rests on
 * one input for too long, that input is written to the current directory, and a new child goes on
 * with the next.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "fuzz.h"
#include "support/damage.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A damaged description may keep hwloc busy for as long as its child is given. */
enum { MOST_FAILURES = 5, POLL_MS = 20, SLOW_MS = 3000, PATIENCE_MS = 90000 };

struct input {
    char *name;
    uint8_t *bytes;
    size_t size;
};

static struct input *inputs;
static size_t input_count, damaged_count;

static struct {
    volatile size_t current; /* input that runs: those of the corpus first, then damaged ones */
} * progress;

static void fail(const char *what)
{
    fprintf(stderr, "replay: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- inputs ---- */

static void read_input(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct input *input;
    struct stat info;

    if (fd < 0 || fstat(fd, &info))
        fail(path);
    inputs = realloc(inputs, (input_count + 1) * sizeof *inputs);
    if (!inputs)
        fail(path);
    input = &inputs[input_count++];
    input->size = (size_t)info.st_size;
    input->name = strdup(path);
    input->bytes = malloc(input->size + 1);
    if (!input->name || !input->bytes || read(fd, input->bytes, input->size) != info.st_size)
        fail(path);
    close(fd);
}

static void read_directory(const char *path)
{
    struct dirent **entries;
    int count = scandir(path, &entries, NULL, alphasort);
    char name[4096];

    if (count < 0)
        fail(path);
    for (int i = 0; i < count; i++) {
        if (entries[i]->d_name[0] != '.') {
            snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
            read_input(name);
        }
        free(entries[i]);
    }
    free(entries);
}

/* ---- damage ---- */

static uint64_t state;

static size_t below(size_t most)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return most ? (size_t)((state >> 16) % most) : 0;
}

/* The digits at or after a place become another number. */
static size_t renumber(uint8_t *bytes, size_t size, size_t room, size_t at)
{
    static const char *const numbers[] = {"0",
                                          "-1",
                                          "1",
                                          "3",
                                          "255",
                                          "64",
                                          "65536",
                                          "4294967295",
                                          "4294967296",
                                          "9223372036854775807",
                                          "18446744073709551615",
                                          "1e400",
                                          "99999999999999999999999"};
    const char *number = numbers[below(sizeof numbers / sizeof numbers[0])];
    size_t length = strlen(number), end;

    while (at < size && (bytes[at] < '0' || bytes[at] > '9'))
        at++;
    for (end = at; end < size && bytes[end] >= '0' && bytes[end] <= '9';)
        end++;
    if (end == at || size - (end - at) + length > room)
        return size;
    memmove(bytes + at + length, bytes + end, size - end);
    memcpy(bytes + at, number, length);
    return size - (end - at) + length;
}

/* A piece is there twice. */
static size_t repeat(uint8_t *bytes, size_t size, size_t room, size_t at)
{
    size_t length = 1 + below(200);

    if (length > size - at)
        length = size - at;
    if (size + length > room)
        return size;
    memmove(bytes + at + length, bytes + at, size - at);
    return size + length;
}

/* Input i of all: a copy, to be freed. */
static uint8_t *make_input(size_t i, size_t *size)
{
    const struct input *from = &inputs[i < input_count ? i : (i - input_count) % input_count];
    size_t room = from->size + 4096;
    uint8_t *bytes = malloc(room);

    if (!bytes)
        fail("memory");
    memcpy(bytes, from->bytes, from->size);
    *size = from->size;
    if (i < input_count || !from->size)
        return bytes;
    state = 0x9E3779B97F4A7C15u * (i + 1);
    if (below(2))
        *size = damage((char *)bytes, (const char *)from->bytes, from->size, (uint32_t)i, &state);
    else
        *size = renumber(bytes, *size, room, below(*size));
    if (below(4) == 0)
        *size = repeat(bytes, *size, room, below(*size));
    return bytes;
}

/* ---- running ---- */

static void run_from(size_t first)
{
    for (size_t i = first; i < input_count + damaged_count; i++) {
        size_t size;
        uint8_t *bytes = make_input(i, &size), *exact = malloc(size ? size : 1);

        /* of exactly that length, so that reading past its end is seen */
        if (!exact)
            fail("memory");
        memcpy(exact, bytes, size);
        free(bytes);
        progress->current = i;
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    progress->current = input_count + damaged_count;
    exit(0);
}

/* Write an input to the current directory and say where it is. */
static void keep(const char *target, size_t i, const char *what)
{
    char name[256];
    size_t size;
    uint8_t *bytes = make_input(i, &size);

    snprintf(name, sizeof name, "%s.%zu.%s", target, i, what);
    fuzz_write(name, bytes, size, 0);
    fprintf(stderr, "replay: input %zu, %s%s, is now in %s\n", i, i < input_count ? "" : "damaged ",
            inputs[i < input_count ? i : (i - input_count) % input_count].name, name);
    free(bytes);
}

/* Wait for the child; kill it when it rests. @return its status */
static int watch(pid_t child, const char *target)
{
    size_t seen = SIZE_MAX;
    int status, rests = 0;

    for (;;) {
        struct timespec pause = {0, POLL_MS * 1000000L};

        if (waitpid(child, &status, WNOHANG) == child)
            return status;
        nanosleep(&pause, NULL);
        rests = progress->current == seen ? rests + 1 : 0;
        seen = progress->current;
        if (rests == SLOW_MS / POLL_MS && seen < input_count + damaged_count)
            keep(target, seen, "slow");
        if (rests > PATIENCE_MS / POLL_MS) {
            fprintf(stderr, "replay: no end of input %zu\n", seen);
            kill(child, SIGKILL);
            rests = 0;
        }
    }
}

static void report(const char *target, size_t i, int status)
{
    if (WIFSIGNALED(status))
        fprintf(stderr, "replay: %s died of %s\n", target, strsignal(WTERMSIG(status)));
    else
        fprintf(stderr, "replay: %s ended with status %d\n", target, WEXITSTATUS(status));
    if (i < input_count + damaged_count) /* else after all inputs: a leak */
        keep(target, i, "failed");
}

int main(int argc, char **argv)
{
    const char *target = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    int failures = 0, status = -1;
    struct stat info;

    if (argc == 3 && !stat(argv[1], &info) && S_ISDIR(info.st_mode)) {
        read_directory(argv[1]);
        damaged_count = strtoul(argv[2], NULL, 10);
    } else {
        for (int i = 1; i < argc; i++)
            read_input(argv[i]);
    }
    if (!input_count) {
        fprintf(stderr, "usage: %s DIRECTORY DAMAGED | FILE...\n", target);
        return 2;
    }
    progress =
        mmap(NULL, sizeof *progress, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (progress == MAP_FAILED)
        fail("memory");
    fuzz_directory();
    for (size_t next = 0; status && failures < MOST_FAILURES; next = progress->current + 1) {
        pid_t child = fork();

        if (child < 0)
            fail("fork");
        if (child == 0)
            run_from(next);
        status = watch(child, target);
        if (status) {
            failures++;
            report(target, progress->current, status);
            if (progress->current >= input_count + damaged_count)
                break;
        }
    }
    printf("%s: %zu inputs and %zu damaged ones, %d failures\n", target, input_count, damaged_count,
           failures);
    for (size_t i = 0; i < input_count; i++) {
        free(inputs[i].name);
        free(inputs[i].bytes);
    }
    free(inputs);
    return failures != 0;
}
