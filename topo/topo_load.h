/*
 * topo_load.h - where a machine's description comes from.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_LOAD_H
#define TOPO_LOAD_H

#include "numoe_topo.h"

#include <hwloc.h>
#include <sys/types.h>

enum topo_source_kind { TOPO_LIVE, TOPO_XML, TOPO_SYNTHETIC, TOPO_SAVED, TOPO_CAPTURE };

/* The largest recorded machine is under 300 kB. */
enum { TOPO_MAX_XML_BYTES = 64 << 20 };

/* A description, read but not yet interpreted. */
struct topo_source {
    enum topo_source_kind kind;
    const char *name; /* the caller's words */
    char *text;       /* XML, JSON or synthetic string, ending in a zero byte */
    size_t bytes;     /* of text, with its zero byte */
};

/* Tell what the words mean and read the file; sizes and plain nonsense are refused here. */
int topo_source_open(const char *words, struct topo_source *source, struct numoe_error *error);
void topo_source_close(struct topo_source *source);

/* Make the hwloc topology of a source. */
int topo_source_topology(const struct topo_source *source, hwloc_topology_t *topology,
                         struct numoe_error *error);

/* Interpret a source: topology and all of build steps. */
int topo_machine_build(const struct topo_source *source, struct numoe_machine **machine,
                       struct numoe_error *error);

/* Do that in a child process first. @return 0: it went well there; -EINVAL: it did not */
int topo_source_try(const struct topo_source *source, struct numoe_error *error);

/* Read a machine that was saved: JSON. */
int topo_saved_read(const struct topo_source *source, struct numoe_machine **machine,
                    struct numoe_error *error);

/* Whether a path is a directory with sys/ and proc/ in it. */
bool topo_capture_is(const char *path);
/* Read such a directory in a child process: the source becomes one of XML. */
int topo_capture_read(struct topo_source *source, struct numoe_error *error);

/*
 * A child process that does what might crash or not come to an end. It is confined before work
 * begins: signals as by default, limits of memory and of time, no output; it answers by writing to
 * out and ends when work returns.
 */
struct topo_child {
    pid_t pid;
    int in;      /* reads what the child writes */
    int64_t end; /* when the caller gives up, in ms */
};
typedef void topo_child_work(const struct topo_source *source, int out);
int topo_child_start(topo_child_work *work, const struct topo_source *source,
                     struct topo_child *child, struct numoe_error *error);
/* Read exactly so many bytes. @return false: it ended, or time ran out, before */
bool topo_child_read(struct topo_child *child, void *to, size_t bytes);
/* Reap it, by force if it has not answered. */
void topo_child_end(struct topo_child *child, bool answered);
void topo_child_write(int out, const void *from, size_t bytes);

/* What only the running system knows: free memory, affinity, limits. */
void topo_live_allowed(hwloc_topology_t topology, struct numoe_machine *machine);
void topo_live_memory(struct numoe_machine *machine);

#endif
