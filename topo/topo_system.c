/* Memory of nodes and of the system, as sysfs and procfs tell. SPDX-License-Identifier: Apache-2.0
 */
#include "topo_system.h"

#include "base/checked.h"

#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* All of sysfs, procfs and cgroups is regular files. */
static int open_regular(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;

    if (fd >= 0 && (fstat(fd, &info) || !S_ISREG(info.st_mode))) {
        close(fd);
        return -1;
    }
    return fd;
}

FILE *topo_open_text(const char *path)
{
    int fd = open_regular(path);
    FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;

    if (fd >= 0 && !file)
        close(fd);
    return file;
}

long topo_read_text(const char *path, char *text, size_t size)
{
    int fd = open_regular(path);
    size_t used = 0;

    if (fd < 0)
        return -1;
    while (used + 1 < size) {
        ssize_t got = read(fd, text + used, size - 1 - used);

        if (got < 0) {
            close(fd);
            return -1;
        }
        if (got == 0)
            break;
        used += (size_t)got;
    }
    close(fd);
    text[used] = 0;
    return (long)used;
}

/* The number after "name:" in kB, as bytes. The name is a whole word of its line. */
static bool field(const char *text, const char *name, uint64_t *bytes)
{
    size_t length = strlen(name);

    for (const char *at = strstr(text, name); at; at = strstr(at + 1, name)) {
        char *end;
        unsigned long long value;

        if (at[length] != ':' || (at > text && !isspace((unsigned char)at[-1])))
            continue;
        value = strtoull(at + length + 1, &end, 10);
        if (end == at + length + 1)
            return false;
        return numoe_mul_u64(value, 1024, bytes);
    }
    return false;
}

static uint64_t field_or_zero(const char *text, const char *name)
{
    uint64_t bytes = 0;

    return field(text, name, &bytes) ? bytes : 0;
}

static uint64_t huge_pages(const char *directory, const char *kilobytes)
{
    char path[PATH_MAX], text[64];

    snprintf(path, sizeof path, "%s/hugepages/hugepages-%skB/free_hugepages", directory, kilobytes);
    if (topo_read_text(path, text, sizeof text) < 0)
        return 0;
    return strtoull(text, NULL, 10);
}

bool topo_system_node(const char *root, uint32_t os_index, struct topo_node_memory *memory)
{
    char directory[PATH_MAX - 64], path[PATH_MAX], text[8192];

    snprintf(directory, sizeof directory, "%s/sys/devices/system/node/node%u", root, os_index);
    snprintf(path, sizeof path, "%s/meminfo", directory);
    if (topo_read_text(path, text, sizeof text) < 0 ||
        !field(text, "MemTotal", &memory->total_bytes) ||
        !field(text, "MemFree", &memory->free_bytes))
        return false;
    memory->free_bytes += field_or_zero(text, "Active(file)");
    memory->free_bytes += field_or_zero(text, "Inactive(file)");
    memory->free_bytes += field_or_zero(text, "SReclaimable");
    memory->huge_2m_free = huge_pages(directory, "2048");
    memory->huge_1g_free = huge_pages(directory, "1048576");
    return true;
}

bool topo_system_memory(const char *root, struct topo_node_memory *memory)
{
    char path[PATH_MAX - 64], text[8192];

    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (topo_read_text(path, text, sizeof text) < 0 ||
        !field(text, "MemTotal", &memory->total_bytes))
        return false;
    if (!field(text, "MemAvailable", &memory->free_bytes))
        memory->free_bytes = field_or_zero(text, "MemFree") + field_or_zero(text, "Active(file)") +
                             field_or_zero(text, "Inactive(file)");
    snprintf(path, sizeof path, "%s/sys/kernel/mm", root);
    memory->huge_2m_free = huge_pages(path, "2048");
    memory->huge_1g_free = huge_pages(path, "1048576");
    return true;
}

bool topo_system_single_node(const char *root)
{
    char path[PATH_MAX], text[4096];

    snprintf(path, sizeof path, "%s/sys/devices/system/node/has_memory", root);
    if (topo_read_text(path, text, sizeof text) < 0)
        return true;
    return !strpbrk(text, "-,");
}
