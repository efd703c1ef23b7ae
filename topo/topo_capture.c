/*
 * A captured machine: a directory that holds the sys/ and proc/ of another system.
 *
 * hwloc takes such a root from the environment only: it is read in a child process (topo_try.c)
 * that has an environment of its own, and the caller's is never changed.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool topo_capture_is(const char *path)
{
    static const char *const parts[] = {"sys", "proc"};
    size_t size = strlen(path) + sizeof "/proc";
    struct stat info;
    bool is = true;
    char *name;

    if (stat(path, &info) || !S_ISDIR(info.st_mode))
        return false;
    name = malloc(size);
    if (!name)
        return false;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        snprintf(name, size, "%s/%s", path, parts[i]);
        is = is && stat(name, &info) == 0 && S_ISDIR(info.st_mode);
    }
    free(name);
    return is;
}

/* Not setenv: another thread of the caller may have held its lock when this process was forked. */
bool topo_capture_enter(const char *path)
{
    static char *variables[4];

    if (asprintf(&variables[0], "HWLOC_FSROOT=%s", path) < 0)
        return false;
    /* the other back ends would tell of this machine */
    variables[1] = "HWLOC_COMPONENTS=linux,stop";
    variables[2] = "HWLOC_THISSYSTEM=0";
    environ = variables;
    return true;
}
