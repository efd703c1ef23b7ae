/*
 * Limits of cgroups, versions 1 and 2, for this process and all groups above it.
 *
 * /proc/self/cgroup says in which group the process is, /proc/self/mountinfo where hierarchies are
 * mounted and which part of them: in a container the group's path often begins above the mount, or
 * is not below it at all, and then the mount's own directory is the nearest that can be seen.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_system.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE_BYTES = 3 * PATH_MAX };

/* Limits at or above this mean none: version 1 writes LONG_MAX rounded down to a page. */
static const uint64_t no_limit = (uint64_t)1 << 60;

/* True when item is one of the comma-separated words of list. */
static bool has_word(const char *list, const char *item)
{
    size_t length = strlen(item);

    while (list && *list) {
        size_t word = strcspn(list, ",");

        if (word == length && !strncmp(list, item, length))
            return true;
        list += word;
        if (*list == ',')
            list++;
    }
    return false;
}

/* Path of this process's group for a controller of version 1, or of version 2 (NULL). */
static bool group_path(const char *root, const char *controller, char *path)
{
    char name[PATH_MAX], line[LINE_BYTES];
    bool found = false;
    FILE *file;

    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    file = topo_open_text(name);
    if (!file)
        return false;
    for (int n = 0; n < TOPO_MOST_LINES && !found && fgets(line, sizeof line, file); n++) {
        char *controllers = strchr(line, ':'), *group;

        line[strcspn(line, "\n")] = 0;
        if (!controllers)
            continue;
        controllers++;
        group = strchr(controllers, ':');
        if (!group)
            continue;
        *group++ = 0;
        if (controller ? !has_word(controllers, controller) : controllers[0] != 0)
            continue;
        found = strlen(group) < PATH_MAX;
        if (found)
            strcpy(path, group);
    }
    fclose(file);
    return found;
}

/* mountinfo writes space, tab, newline and backslash as three octal digits. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *from = text; *from; from++) {
        if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' &&
            from[2] <= '7' && from[3] >= '0' && from[3] <= '7') {
            *to++ = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
            from += 3;
        } else {
            *to++ = *from;
        }
    }
    *to = 0;
}

/* Mount point of the hierarchy of a controller (NULL: version 2) and the part of it mounted. */
static bool hierarchy(const char *root, const char *controller, char *mount_root, char *mount)
{
    char name[PATH_MAX], line[LINE_BYTES];
    bool found = false;
    FILE *file;

    snprintf(name, sizeof name, "%s/proc/self/mountinfo", root);
    file = topo_open_text(name);
    if (!file)
        return false;
    for (int n = 0; n < TOPO_MOST_LINES && !found && fgets(line, sizeof line, file); n++) {
        char *fields[5], *rest, *save = NULL, *type, *options = NULL;
        int i;

        line[strcspn(line, "\n")] = 0;
        rest = strstr(line, " - ");
        if (!rest)
            continue;
        *rest = 0;
        rest += 3;
        fields[0] = strtok_r(line, " ", &save);
        for (i = 1; i < 5 && fields[i - 1]; i++)
            fields[i] = strtok_r(NULL, " ", &save);
        if (i < 5 || !fields[4])
            continue;
        type = strtok_r(rest, " ", &save);
        for (char *word = type; word; word = strtok_r(NULL, " ", &save))
            options = word;
        if (!type || strcmp(type, controller ? "cgroup" : "cgroup2") != 0 ||
            (controller && !has_word(options, controller)))
            continue;
        unescape(fields[3]);
        unescape(fields[4]);
        found = strlen(fields[3]) < PATH_MAX && strlen(fields[4]) < PATH_MAX;
        if (found) {
            strcpy(mount_root, fields[3]);
            strcpy(mount, fields[4]);
        }
    }
    fclose(file);
    return found;
}

static bool is_directory(const char *path)
{
    struct stat info;

    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* Add the directories from the process's group up to the mount point. */
static void add_levels(const char *root, const char *controller, bool v2, char **levels,
                       bool *level_v2, uint32_t *count)
{
    char group[PATH_MAX], mount_root[PATH_MAX], mount[PATH_MAX], path[3 * PATH_MAX];
    size_t base, shared;

    if (!group_path(root, controller, group) || !hierarchy(root, controller, mount_root, mount))
        return;
    base = (size_t)snprintf(path, sizeof path, "%s%s", root, mount);
    shared = strlen(mount_root);
    if (shared == 1)
        shared = 0;
    if (!strncmp(group, mount_root, shared) && (group[shared] == '/' || !group[shared]) &&
        !strstr(group, "/.."))
        snprintf(path + base, sizeof path - base, "%s", group + shared);
    if (!is_directory(path))
        path[base] = 0;
    for (size_t length = strlen(path); *count < TOPO_CGROUP_LEVELS;) {
        while (length > base && path[length - 1] == '/')
            path[--length] = 0;
        levels[*count] = strdup(path);
        if (!levels[*count])
            return;
        level_v2[(*count)++] = v2;
        if (length <= base)
            return;
        while (length > base && path[length - 1] != '/')
            path[--length] = 0;
    }
}

void topo_cgroup_find(const char *root, struct topo_cgroup *cgroup)
{
    memset(cgroup, 0, sizeof *cgroup);
    add_levels(root, NULL, true, cgroup->memory, cgroup->memory_v2, &cgroup->memory_count);
    add_levels(root, "memory", false, cgroup->memory, cgroup->memory_v2, &cgroup->memory_count);
    add_levels(root, NULL, true, cgroup->cpu, cgroup->cpu_v2, &cgroup->cpu_count);
    add_levels(root, "cpu", false, cgroup->cpu, cgroup->cpu_v2, &cgroup->cpu_count);
}

void topo_cgroup_free(struct topo_cgroup *cgroup)
{
    for (uint32_t i = 0; i < cgroup->memory_count; i++)
        free(cgroup->memory[i]);
    for (uint32_t i = 0; i < cgroup->cpu_count; i++)
        free(cgroup->cpu[i]);
    memset(cgroup, 0, sizeof *cgroup);
}

static bool read_number(const char *directory, const char *name, uint64_t *value)
{
    char path[PATH_MAX], text[128], *end;

    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path ||
        topo_read_text(path, text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9')
        return false;
    *value = strtoull(text, &end, 10);
    return end != text;
}

/* The number after a word at the beginning of a line of memory.stat. */
static uint64_t stat_field(const char *text, const char *name)
{
    size_t length = strlen(name);

    for (const char *line = text; line && *line;) {
        if (!strncmp(line, name, length) && line[length] == ' ')
            return strtoull(line + length + 1, NULL, 10);
        line = strchr(line, '\n');
        if (line)
            line++;
    }
    return 0;
}

/* What the kernel would give back before it kills: file cache (and slab where it is counted). */
static uint64_t reclaimable(const char *directory, bool v2)
{
    char path[PATH_MAX], text[16384];

    if (snprintf(path, sizeof path, "%s/memory.stat", directory) >= (int)sizeof path ||
        topo_read_text(path, text, sizeof text) <= 0)
        return 0;
    if (v2)
        return stat_field(text, "inactive_file") + stat_field(text, "active_file") +
               stat_field(text, "slab_reclaimable");
    return stat_field(text, "total_inactive_file") + stat_field(text, "total_active_file");
}

static uint64_t level_left(const char *directory, bool v2)
{
    uint64_t limit = UINT64_MAX, high, used, cache;

    if (!read_number(directory, v2 ? "memory.max" : "memory.limit_in_bytes", &limit))
        limit = UINT64_MAX;
    /* past memory.high the group is slowed down to a crawl: as good as a limit */
    if (v2 && read_number(directory, "memory.high", &high) && high < limit)
        limit = high;
    if (limit >= no_limit)
        return UINT64_MAX;
    if (!read_number(directory, v2 ? "memory.current" : "memory.usage_in_bytes", &used))
        return limit;
    cache = reclaimable(directory, v2);
    used = used > cache ? used - cache : 0;
    return limit > used ? limit - used : 0;
}

uint64_t topo_cgroup_memory_left(const struct topo_cgroup *cgroup)
{
    uint64_t least = UINT64_MAX;

    for (uint32_t i = 0; i < cgroup->memory_count; i++) {
        uint64_t left = level_left(cgroup->memory[i], cgroup->memory_v2[i]);

        if (left < least)
            least = left;
    }
    return least;
}

static double level_cpus(const char *directory, bool v2)
{
    uint64_t quota, period;

    if (v2) {
        char path[PATH_MAX], text[128], *end;

        if (snprintf(path, sizeof path, "%s/cpu.max", directory) >= (int)sizeof path ||
            topo_read_text(path, text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9')
            return 0;
        quota = strtoull(text, &end, 10);
        period = strtoull(end, NULL, 10);
    } else if (!read_number(directory, "cpu.cfs_quota_us", &quota) ||
               !read_number(directory, "cpu.cfs_period_us", &period)) {
        return 0; /* a quota of -1 is no number here: no limit */
    }
    return quota && period ? (double)quota / (double)period : 0;
}

double topo_cgroup_cpus(const struct topo_cgroup *cgroup)
{
    double least = 0;

    for (uint32_t i = 0; i < cgroup->cpu_count; i++) {
        double cpus = level_cpus(cgroup->cpu[i], cgroup->cpu_v2[i]);

        if (cpus > 0 && (least == 0 || cpus < least))
            least = cpus;
    }
    return least;
}
