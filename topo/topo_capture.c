/*
 * A captured machine: a directory that holds the sys/ and proc/ of another system.
 *
 * hwloc takes such a root from the environment only, so it is read in a child process that has an
 * environment of its own, and comes back as XML, to be treated like any other: the caller's
 * environment is never changed, and what hwloc makes of strange files stays in the child.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct answer {
    int rc; /* 0 or -errno */
    size_t bytes;
};

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
static bool point_at(const char *root)
{
    static char *variables[4];

    if (asprintf(&variables[0], "HWLOC_FSROOT=%s", root) < 0)
        return false;
    /* the other back ends would tell of this machine */
    variables[1] = "HWLOC_COMPONENTS=linux,stop";
    variables[2] = "HWLOC_THISSYSTEM=0";
    environ = variables;
    return true;
}

static void capture(const struct topo_source *source, int out)
{
    struct answer answer = {.rc = -EINVAL};
    hwloc_topology_t topology;
    char *text = NULL;
    int bytes = 0;

    if (!point_at(source->name) || hwloc_topology_init(&topology)) {
        answer.rc = -ENOMEM;
    } else if (!hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) &&
               !hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT) &&
               !hwloc_topology_load(topology) &&
               !hwloc_topology_export_xmlbuffer(topology, &text, &bytes, 0) && bytes > 0) {
        answer.rc = bytes <= TOPO_MAX_XML_BYTES ? 0 : -E2BIG;
        answer.bytes = (size_t)bytes;
    }
    topo_child_write(out, &answer, sizeof answer);
    if (!answer.rc)
        topo_child_write(out, text, answer.bytes);
}

int topo_capture_read(struct topo_source *source, struct numoe_error *error)
{
    struct topo_child child;
    struct answer answer;
    bool answered;
    int rc = topo_child_start(capture, source, &child, error);

    if (rc)
        return rc;
    answered = topo_child_read(&child, &answer, sizeof answer);
    if (answered && !answer.rc) {
        /* hwloc counts the zero byte at the end */
        source->text = malloc(answer.bytes + 1);
        answered = source->text && topo_child_read(&child, source->text, answer.bytes);
        if (!source->text)
            answer.rc = -ENOMEM;
        else
            source->text[answer.bytes] = 0;
    }
    topo_child_end(&child, answered);
    if (answered && !answer.rc) {
        source->kind = TOPO_XML;
        source->bytes = strlen(source->text) + 1;
        return 0;
    }
    free(source->text);
    source->text = NULL;
    if (answered && answer.rc == -ENOMEM)
        return numoe_error_set(error, -ENOMEM, source->name, "out of memory");
    return numoe_error_set(error, -EINVAL, source->name,
                           answered ? "hwloc cannot read this directory as a captured machine"
                                    : "damaged capture: hwloc crashes or does not come to an end "
                                      "on it");
}
