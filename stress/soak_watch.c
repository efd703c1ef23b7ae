/*
 * Failures, and the watchdog: a thread that ends the process when nothing has moved for a while.
 *
 * Whatever moves adds to `beats`. The watchdog counts its own ticks and not the clock, so that a
 * process that was stopped for an hour is not taken for one that hangs.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak_walk.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SHOWN_THREADS = 40 };
#define TICK_S 0.1

int soak_fail(struct soak *soak, int code, const char *format, ...)
{
    va_list args;

    pthread_mutex_lock(&soak->lock);
    if (!soak->report.failed) {
        char text[sizeof soak->error.message];

        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        soak->report.failed = true;
        soak->report.failed_step = soak->report.steps;
        numoe_error_set(&soak->error, code, "soak", "%s", text);
        snprintf(soak->report.failure, sizeof soak->report.failure,
                 *soak->doing ? "%s (during: %s)" : "%s", text, soak->doing);
    }
    pthread_mutex_unlock(&soak->lock);
    return code;
}

int soak_fail_call(struct soak *soak, const char *call, int code, const struct numoe_error *error)
{
    const bool said = error && *error->message;

    return soak_fail(soak, code, "%s returned %d: %s%s%s", call, code,
                     said && *error->where ? error->where : "", said && *error->where ? ": " : "",
                     said ? error->message : strerror(-code));
}

void soak_doing(struct soak *soak, const char *format, ...)
{
    va_list args;

    pthread_mutex_lock(&soak->lock);
    va_start(args, format);
    vsnprintf(soak->doing, sizeof soak->doing, format, args);
    va_end(args);
    pthread_mutex_unlock(&soak->lock);
    soak_beat(soak);
}

void soak_beat(struct soak *soak)
{
    /* only that it changes matters */
    atomic_fetch_add_explicit(&soak->beats, 1, memory_order_relaxed);
}

/* A shell takes it as one word. */
static size_t put_quoted(char *line, size_t size, size_t used, const char *word)
{
    if (used < size)
        used += (size_t)snprintf(line + used, size - used, "'");
    for (; *word && used < size; word++)
        used += (size_t)snprintf(line + used, size - used, *word == '\'' ? "'\\''" : "%c", *word);
    if (used < size)
        used += (size_t)snprintf(line + used, size - used, "'");
    return used;
}

void soak_reproduce(const struct soak *soak, char *line, size_t size)
{
    const struct numoe_soak_options *o = &soak->options;
    const bool whole = soak->by_history || soak->warming;
    const uint64_t steps = whole ? soak->report.steps : soak->cycle_step;
    size_t used;

    used = (size_t)snprintf(line, size, "numoe soak --seed %" PRIu64 " --steps %" PRIu64,
                            whole ? o->seed : soak->cycle_seed, steps ? steps : 1);
    if (o->topology && used < size) {
        used += (size_t)snprintf(line + used, size - used, " --topology ");
        used = put_quoted(line, size, used, o->topology);
    }
    if (o->workers && used < size)
        used += (size_t)snprintf(line + used, size - used, " --workers %" PRIu32, o->workers);
    if (o->threads && used < size)
        used += (size_t)snprintf(line + used, size - used, " --threads %" PRIu32, o->threads);
    if (o->gpu && used < size)
        used += (size_t)snprintf(line + used, size - used, " --gpu");
    if (o->batch_invariant && used < size)
        snprintf(line + used, size - used, " --batch-invariant");
}

/* First line of a file of /proc, or nothing. */
static void first_line(const char *task, const char *name, char *text, size_t size)
{
    char path[300];
    FILE *file;

    *text = 0;
    snprintf(path, sizeof path, "/proc/self/task/%s/%s", task, name);
    file = fopen(path, "re");
    if (!file)
        return;
    if (!fgets(text, (int)size, file))
        *text = 0;
    text[strcspn(text, "\n")] = 0;
    fclose(file);
}

static void show_threads(const struct numoe_log *log)
{
    DIR *directory = opendir("/proc/self/task");
    struct dirent *entry;
    int shown = 0;

    while (directory && (entry = readdir(directory)) && shown < SHOWN_THREADS) {
        char name[64], stat[512], wait[64];
        const char *state;

        if (*entry->d_name == '.')
            continue;
        first_line(entry->d_name, "comm", name, sizeof name);
        first_line(entry->d_name, "stat", stat, sizeof stat);
        first_line(entry->d_name, "wchan", wait, sizeof wait);
        state = strrchr(stat, ')');
        numoe_log_write(log, NUMOE_LOG_ERROR, "thread %s \"%s\" is in state %c%s%s", entry->d_name,
                        name, state && state[1] ? state[2] : '?', *wait ? ", waiting in " : "",
                        wait);
        shown++;
    }
    if (directory)
        closedir(directory);
}

/* Removes what the walk wrote. Nothing here waits for a lock that a hung thread may hold. */
static void drop_scratch(const struct soak *soak)
{
    DIR *directory = opendir(soak->scratch);
    struct dirent *entry;

    while (directory && (entry = readdir(directory))) {
        char path[4400];

        if (*entry->d_name == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", soak->scratch, entry->d_name);
        soak_folder_drop(strdup(path));
    }
    if (directory)
        closedir(directory);
    rmdir(soak->scratch);
}

static _Noreturn void give_up(struct soak *soak, double seconds)
{
    const struct numoe_log *log = &soak->options.log;
    char line[sizeof soak->report.reproduce];

    /* lock is held, and never over anything that can hang */
    numoe_log_write(log, NUMOE_LOG_ERROR,
                    "soak: no progress for %.0f s in step %" PRIu64 " of seed %" PRIu64 ": %s",
                    seconds, soak->report.steps, soak->options.seed, soak->doing);
    soak_reproduce(soak, line, sizeof line);
    numoe_log_write(log, NUMOE_LOG_ERROR, "reproduce: %s", line);
    show_threads(log);
    drop_scratch(soak);
    _exit(1);
}

static void *watch(void *user)
{
    struct soak *soak = user;
    const double limit = soak->options.watchdog_s > 0 ? soak->options.watchdog_s : 60;
    uint64_t last = 0, still = 0;

    pthread_mutex_lock(&soak->lock);
    while (!soak->watchdog_stop) {
        struct timespec until;
        uint64_t beats;

        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)(TICK_S * 1e9);
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        if (pthread_cond_timedwait(&soak->watchdog_over, &soak->lock, &until) != ETIMEDOUT)
            continue;
        beats = atomic_load_explicit(&soak->beats, memory_order_relaxed);
        still = beats == last ? still + 1 : 0;
        last = beats;
        if ((double)still * TICK_S >= limit)
            give_up(soak, limit);
    }
    pthread_mutex_unlock(&soak->lock);
    return NULL;
}

int soak_watchdog_start(struct soak *soak)
{
    int rc = pthread_create(&soak->watchdog, NULL, watch, soak);

    soak->watchdog_running = rc == 0;
    return rc ? soak_fail(soak, -rc, "the watchdog's thread could not be started: %s", strerror(rc))
              : 0;
}

void soak_watchdog_stop(struct soak *soak)
{
    if (!soak->watchdog_running)
        return;
    pthread_mutex_lock(&soak->lock);
    soak->watchdog_stop = true;
    pthread_cond_signal(&soak->watchdog_over);
    pthread_mutex_unlock(&soak->lock);
    pthread_join(soak->watchdog, NULL);
    soak->watchdog_running = false;
}
