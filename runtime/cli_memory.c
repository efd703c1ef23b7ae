/* What the system says this process has taken. SPDX-License-Identifier: Apache-2.0 */
#include "cli_memory.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number that text begins with, after blanks; false when there is none. */
static bool leading_number(const char *text, uint64_t *number)
{
    char *end;

    errno = 0;
    *number = strtoull(text, &end, 10);
    return end != text && !errno;
}

/* "Name:   123 kB" -> bytes. */
static bool status_line(const char *line, const char *name, uint64_t *bytes)
{
    size_t length = strlen(name);
    uint64_t kilobytes;

    if (strncmp(line, name, length) != 0 || line[length] != ':' ||
        !leading_number(line + length + 1, &kilobytes))
        return false;
    *bytes = kilobytes * 1024;
    return true;
}

static bool read_number(const char *path, uint64_t *number)
{
    FILE *file = fopen(path, "re");
    char line[64];
    bool read = file && fgets(line, sizeof line, file) && leading_number(line, number);

    if (file)
        fclose(file);
    return read;
}

/*
 * In a container the path that /proc names may not be visible; the cgroup's files then stand at
 * the mount point. The root group of version 2 has none.
 */
uint64_t cli_memory_cgroup(void)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[1024], path[1400];
    uint64_t bytes = 0;

    if (!file)
        return 0;
    while (!bytes && fgets(line, sizeof line, file)) {
        const char *mount = NULL, *name = NULL, *group;

        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "0::", 3)) {
            mount = "/sys/fs/cgroup";
            name = "memory.current";
        } else if (strstr(line, ":memory:")) {
            mount = "/sys/fs/cgroup/memory";
            name = "memory.usage_in_bytes";
        }
        group = strrchr(line, ':');
        if (!mount || !group)
            continue;
        snprintf(path, sizeof path, "%s%s/%s", mount, group + 1, name);
        if (read_number(path, &bytes))
            break;
        snprintf(path, sizeof path, "%s/%s", mount, name);
        if (!read_number(path, &bytes))
            bytes = 0;
    }
    fclose(file);
    return bytes;
}

void cli_memory_read(struct cli_memory *memory)
{
    FILE *file = fopen("/proc/self/status", "re");
    uint64_t anonymous = 0, hugetlb = 0, peak = 0;
    char line[256];

    while (file && fgets(line, sizeof line, file)) {
        if (!status_line(line, "RssAnon", &anonymous) &&
            !status_line(line, "HugetlbPages", &hugetlb))
            status_line(line, "VmHWM", &peak);
    }
    if (file)
        fclose(file);
    memory->anonymous_bytes = anonymous + hugetlb;
    memory->peak_bytes = peak ? peak + hugetlb : 0;
    memory->cgroup_bytes = cli_memory_cgroup();
}
