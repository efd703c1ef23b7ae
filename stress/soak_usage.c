/* What the process holds of the system. SPDX-License-Identifier: Apache-2.0 */
#include "base/sanitized.h"
#include "cli_memory.h"
#include "soak_walk.h"

#include <dirent.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* How long a thread that was joined, or a ring that was closed, may still be seen. */
enum { SETTLE_MS = 3000, SETTLE_STEP_MS = 20 };

/* The C library keeps 40 MiB of the stacks of threads that ended, a pool's being 1 MiB: after so
 * many of them, it keeps nothing else. */
enum { STACKS = 48 };

static void level_stacks(void)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;

    config.worker_count = STACKS;
    if (!numoe_pool_create(&config, &pool, NULL))
        numoe_pool_destroy(pool);
}

static uint64_t count_lines(const char *path)
{
    FILE *file = fopen(path, "re");
    char block[4096];
    uint64_t lines = 0;
    size_t got;

    if (!file)
        return UINT64_MAX;
    while ((got = fread(block, 1, sizeof block, file)) > 0)
        for (size_t i = 0; i < got; i++)
            lines += block[i] == '\n';
    fclose(file);
    return lines;
}

/* Entries other than . and .. and, in a folder of descriptors, the one that reads it. */
static uint64_t count_entries(const char *path, uint64_t own)
{
    DIR *directory = opendir(path);
    uint64_t count = 0;

    if (!directory)
        return UINT64_MAX;
    while (readdir(directory))
        count++;
    closedir(directory);
    return count - 2 - own;
}

void soak_usage_read(struct numoe_soak_usage *usage)
{
    struct cli_memory memory;

    level_stacks();
    malloc_trim(0); /* what was freed is no growth */
    cli_memory_read(&memory);
    usage->anonymous_bytes =
        memory.anonymous_bytes && !SANITIZED ? memory.anonymous_bytes : UINT64_MAX;
    usage->maps = SANITIZED ? UINT64_MAX : count_lines("/proc/self/maps");
    usage->threads = count_entries("/proc/self/task", 0);
    usage->descriptors = count_entries("/proc/self/fd", 1);
}

/* What has grown past the slack, in words; false when nothing has. */
static bool grown(const struct numoe_soak_usage *from, const struct numoe_soak_usage *to,
                  char *text, size_t size)
{
    static const struct numoe_soak_usage slack = NUMOE_SOAK_USAGE_SLACK;
    const struct {
        const char *what;
        uint64_t from, to, slack, unit;
    } rows[] = {
        {"KiB of anonymous memory resident", from->anonymous_bytes, to->anonymous_bytes,
         slack.anonymous_bytes, 1024},
        {"mappings", from->maps, to->maps, slack.maps, 1},
        {"threads", from->threads, to->threads, slack.threads, 1},
        {"descriptors", from->descriptors, to->descriptors, slack.descriptors, 1},
    };
    size_t used = 0;

    *text = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].from == UINT64_MAX || rows[i].to == UINT64_MAX ||
            rows[i].to <= rows[i].from + rows[i].slack || used >= size)
            continue;
        used += (size_t)snprintf(
            text + used, size - used, "%s%" PRIu64 " %s where %" PRIu64 " were", used ? ", " : "",
            rows[i].to / rows[i].unit, rows[i].what, rows[i].from / rows[i].unit);
    }
    return used > 0;
}

int soak_usage_check(struct soak *soak)
{
    const struct timespec pause = {0, SETTLE_STEP_MS * 1000000L};
    struct numoe_soak_usage now;
    char text[256];

    for (int waited = 0;; waited += SETTLE_STEP_MS) {
        bool above;

        soak_usage_read(&now);
        above = grown(&soak->report.baseline, &now, text, sizeof text);
        soak->report.now = now;
        if (!above)
            return 0;
        if (waited >= SETTLE_MS)
            break;
        soak_beat(soak);
        nanosleep(&pause, NULL);
    }
    soak->by_history = true;
    return soak_fail(soak, SOAK_WRONG, "after everything was closed there are %s", text);
}
