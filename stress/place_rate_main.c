/*
 * numoe-place-rate DIR [LOADS]: how fast a checkpoint that is in the page cache is placed, beside
 * how fast as many threads copy memory, in turns.
 *
 * A copy is memcpy of half a GiB in all, before and after each load, by as many threads as the
 * loads have workers, from one part of memory to another, that are both resident; its rate is bytes
 * copied a second, each of which is read and written. Placing is reading and packing to memory that
 * was made resident before; making it resident is the kernel's clearing of pages, and shown apart.
 * The first load may find memory that a virtual machine's host has not given yet.
 *
 * Answers on stdout: a line a load, then medians of all but the first.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/clock.h"
#include "cli_output.h"
#include "numoe.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LOADS_MAX = 64, WORKERS_MAX = 1024, COPIES = 3 };
#define COPY_BYTES ((size_t)512 << 20)

struct copier {
    pthread_t thread;
    pthread_barrier_t *start;
    unsigned char *to, *from;
    size_t bytes;
};

static void *copy(void *context)
{
    struct copier *c = context;

    for (int i = 0; i <= COPIES; i++) {
        if (i == 1) /* the first is not timed */
            pthread_barrier_wait(c->start);
        memcpy(c->to, c->from, c->bytes);
    }
    pthread_barrier_wait(c->start);
    return NULL;
}

/* GB/s of memcpy by so many threads, of the first half of memory to the second. */
static double copy_rate(unsigned char *memory, unsigned threads)
{
    static struct copier copiers[WORKERS_MAX];
    const size_t bytes = COPY_BYTES / threads / 4096 * 4096;
    pthread_barrier_t start;
    uint64_t began, ended;

    pthread_barrier_init(&start, NULL, threads + 1);
    for (unsigned i = 0; i < threads; i++) {
        copiers[i] = (struct copier){.start = &start,
                                     .to = memory + COPY_BYTES + i * bytes,
                                     .from = memory + i * bytes,
                                     .bytes = bytes};
        if (pthread_create(&copiers[i].thread, NULL, copy, &copiers[i])) {
            fprintf(stderr, "numoe-place-rate: no thread\n");
            exit(1);
        }
    }
    pthread_barrier_wait(&start);
    began = (uint64_t)numoe_now_ns();
    pthread_barrier_wait(&start);
    ended = (uint64_t)numoe_now_ns();
    for (unsigned i = 0; i < threads; i++)
        pthread_join(copiers[i].thread, NULL);
    pthread_barrier_destroy(&start);
    return (double)(COPIES * bytes * threads) / (double)(ended - began);
}

/* Bring all files of a directory into the page cache. */
static void read_files(const char *directory)
{
    static char buffer[1 << 20];
    DIR *dir = opendir(directory);
    struct dirent *entry;

    while (dir && (entry = readdir(dir))) {
        int fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_CLOEXEC);

        while (fd >= 0 && read(fd, buffer, sizeof buffer) > 0)
            ;
        if (fd >= 0)
            close(fd);
    }
    if (dir)
        closedir(dir);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *values, unsigned count)
{
    qsort(values, count, sizeof *values, by_value);
    return values[count / 2];
}

int main(int argc, char **argv)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_load_options loading = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    double placing[LOADS_MAX], whole[LOADS_MAX], copying[LOADS_MAX], before = 0, after;
    const unsigned loads = argc > 2 ? (unsigned)atoi(argv[2]) : 6;
    unsigned char *memory =
        mmap(NULL, 2 * COPY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct numoe *context;
    unsigned i;

    if (argc < 2 || argc > 3 || argv[1][0] == '-' || loads < 2 || loads > LOADS_MAX) {
        fprintf(stderr, "Usage: numoe-place-rate DIR [LOADS, 2 to %d]\n", LOADS_MAX);
        return 2;
    }
    if (numoe_open(&options, &context, &error) < 0)
        goto fail;
    if (memory == MAP_FAILED) {
        fprintf(stderr, "numoe-place-rate: no memory to copy\n");
        return 1;
    }
    madvise(memory, 2 * COPY_BYTES, MADV_HUGEPAGE);
    memset(memory, 1, 2 * COPY_BYTES);
    loading.read = NUMOE_READ_CACHED;
    printf("copy GB/s  clearing GB/s  placing GB/s  of copy  loading GB/s  of copy\n");
    for (i = 0; i < loads; i++) {
        struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
        struct numoe_model *model;
        unsigned threads;
        double bytes;

        read_files(argv[1]);
        if (numoe_model_load(context, argv[1], &loading, &model, &error) < 0) {
            numoe_close(context);
            goto fail;
        }
        numoe_model_info(model, &info);
        numoe_model_destroy(model);
        threads = info.worker_count < WORKERS_MAX ? info.worker_count : WORKERS_MAX;
        after = copy_rate(memory, threads);
        copying[i] = before > 0 ? (before + after) / 2 : after;
        before = after;
        bytes = (double)info.checkpoint_bytes * 1e-9;
        placing[i] = bytes / info.placing_seconds;
        whole[i] = bytes / info.load_seconds;
        printf("%9.2f %14.2f %13.2f %8.3f %13.2f %8.3f\n", copying[i],
               (double)info.resident_bytes * 1e-9 / info.resident_seconds, placing[i],
               placing[i] / copying[i], whole[i], whole[i] / copying[i]);
        fflush(stdout);
        placing[i] /= copying[i];
        whole[i] /= copying[i];
    }
    printf("medians: placing %.3f of copy, loading %.3f\n", median(placing + 1, loads - 1),
           median(whole + 1, loads - 1));
    numoe_close(context);
    return cli_flush(0);
fail:
    fprintf(stderr, "numoe-place-rate: %s: %s\n", error.where, error.message);
    return 1;
}
