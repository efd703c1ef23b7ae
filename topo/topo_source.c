/*
 * Where a machine's description comes from: this system, a file of XML or JSON, a directory, a
 * synthetic string.
 *
 * Files and strings are not trusted. What can be refused by looking at the bytes is refused here;
 * the rest is interpreted in a child process (topo_try.c).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/checked.h"
#include "topo_build.h"
#include "topo_load.h"
#include "topo_read.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_SYNTHETIC_BYTES = 4096 };

/* Entities could make a small file expand without bound; hwloc writes none. */
static int check_xml(const struct topo_source *source, struct numoe_error *error)
{
    const char *at = source->text;

    while (isspace((unsigned char)*at))
        at++;
    if (*at != '<')
        return numoe_error_set(error, -EINVAL, source->name,
                               "not a topology: neither XML nor JSON");
    if (strstr(at, "<!ENTITY"))
        return numoe_error_set(error, -EINVAL, source->name,
                               "XML entities are not allowed in a topology");
    if (!strstr(at, "<topology"))
        return numoe_error_set(error, -EINVAL, source->name,
                               "not a topology: no <topology> element");
    return 0;
}

/* What the first character that is not blank says: XML, or a machine that was saved. */
static int check_text(struct topo_source *source, struct numoe_error *error)
{
    const char *at = source->text;

    if (strlen(source->text) != source->bytes - 1)
        return numoe_error_set(error, -EINVAL, source->name,
                               "not a topology: a zero byte at offset %zu", strlen(source->text));
    while (isspace((unsigned char)*at))
        at++;
    if (*at != '{') {
        source->kind = TOPO_XML;
        return check_xml(source, error);
    }
    source->kind = TOPO_SAVED;
    if (source->bytes - 1 > TOPO_MAX_JSON_BYTES)
        return numoe_error_set(error, -E2BIG, source->name,
                               "%zu bytes are too many for a saved machine; %d are allowed",
                               source->bytes - 1, TOPO_MAX_JSON_BYTES);
    return 0;
}

static int open_file(const char *path, struct topo_source *source, struct numoe_error *error)
{
    size_t size;
    int rc = topo_file_read(path, TOPO_MAX_XML_BYTES, "topology", &source->text, &size, error);

    if (rc)
        return rc;
    source->bytes = size + 1;
    return check_text(source, error);
}

/*
 * Bound what a synthetic string may multiply up to before hwloc begins to allocate. Numbers inside
 * parentheses or after '=' are sizes and lists, not counts.
 */
static int check_synthetic(const char *text, struct numoe_error *error)
{
    uint64_t product = 1;
    int depth = 0;

    for (const char *at = text; *at; at++) {
        if ((unsigned char)*at < 0x20 || (unsigned char)*at > 0x7e)
            return numoe_error_set(error, -EINVAL, NULL,
                                   "byte 0x%02x at offset %zu does not belong in a synthetic "
                                   "topology",
                                   (unsigned char)*at, (size_t)(at - text));
        if (*at == '(') {
            depth++;
        } else if (*at == ')') {
            depth--;
        } else if (depth <= 0 && isdigit((unsigned char)*at) &&
                   (at == text || at[-1] == ':' || at[-1] == ' ')) {
            char *end;
            uint64_t count = strtoull(at, &end, 10);

            if (count && (!numoe_mul_u64(product, count, &product) || product > TOPO_MAX_PUS))
                return numoe_error_set(error, -E2BIG, text,
                                       "the topology would have more than %d CPUs", TOPO_MAX_PUS);
            at = end - 1;
        }
    }
    return 0;
}

static int open_synthetic(const char *words, struct topo_source *source, struct numoe_error *error)
{
    int rc;

    source->kind = TOPO_SYNTHETIC;
    if (strlen(words) > MAX_SYNTHETIC_BYTES)
        return numoe_error_set(error, -E2BIG, words,
                               "%zu bytes are too many for a synthetic topology; %d are allowed",
                               strlen(words), MAX_SYNTHETIC_BYTES);
    rc = check_synthetic(words, error);
    if (rc)
        return rc;
    source->text = strdup(words);
    if (!source->text)
        return numoe_error_set(error, -ENOMEM, words, "out of memory");
    source->bytes = strlen(words) + 1;
    return 0;
}

int topo_source_open(const char *words, struct topo_source *source, struct numoe_error *error)
{
    struct stat info;
    int rc;

    memset(source, 0, sizeof *source);
    if (!words || !*words || !strcmp(words, "live")) {
        source->kind = TOPO_LIVE;
        source->name = "live";
        return 0;
    }
    source->name = words;
    if (topo_capture_is(words)) {
        source->kind = TOPO_CAPTURE;
        return 0;
    }
    if (stat(words, &info) == 0)
        rc = S_ISDIR(info.st_mode)
                 ? numoe_error_set(error, -EINVAL, words,
                                   "not a captured machine: a directory without sys/ and proc/")
                 : open_file(words, source, error);
    else if (strchr(words, '/') ||
             (strlen(words) > 4 && !strcmp(words + strlen(words) - 4, ".xml")))
        rc = numoe_error_set(error, -errno, words, "no topology file: %s", strerror(errno));
    else
        rc = open_synthetic(words, source, error);
    if (rc)
        topo_source_close(source);
    return rc;
}

void topo_source_close(struct topo_source *source)
{
    free(source->text);
    source->text = NULL;
}

/* Back ends that start a GPU driver, threads or a display connection have no place in a library
 * that only wants to know where PCI devices are. "pci" is libpciaccess, which leaks; sysfs tells
 * the same. */
static void leave_out_drivers(hwloc_topology_t topology)
{
    static const char *const drivers[] = {"cuda", "opencl", "gl", "rsmi", "levelzero", "pci"};

    for (size_t i = 0; i < sizeof drivers / sizeof drivers[0]; i++)
        (void)hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST,
                                            drivers[i]);
}

int topo_source_topology(const struct topo_source *source, hwloc_topology_t *topology,
                         struct numoe_error *error)
{
    hwloc_topology_t made;

    if (hwloc_topology_init(&made))
        return numoe_error_set(error, -ENOMEM, source->name, "out of memory");
    if (source->kind == TOPO_LIVE)
        leave_out_drivers(made);
    errno = 0;
    if (hwloc_topology_set_flags(made, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) ||
        hwloc_topology_set_io_types_filter(made, HWLOC_TYPE_FILTER_KEEP_IMPORTANT) ||
        (source->kind == TOPO_XML &&
         hwloc_topology_set_xmlbuffer(made, source->text, (int)source->bytes)) ||
        (source->kind == TOPO_SYNTHETIC && hwloc_topology_set_synthetic(made, source->text)) ||
        hwloc_topology_load(made)) {
        hwloc_topology_destroy(made);
        return numoe_error_set(
            error, errno == ENOMEM ? -ENOMEM : -EINVAL, source->name,
            source->kind == TOPO_XML ? "hwloc cannot read this XML as a topology (version 2 is "
                                       "needed)"
            : source->kind == TOPO_SYNTHETIC
                ? "neither a file nor a synthetic topology, which is like \"pack:2 "
                  "[numa(memory=16GB)] core:4 pu:2\" and ends in pu"
            : source->kind == TOPO_CAPTURE
                ? "hwloc cannot read this directory as a captured machine"
                : "hwloc cannot read this machine");
    }
    *topology = made;
    return 0;
}
