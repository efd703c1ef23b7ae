/*
 * topo_load.h - where a machine's description comes from.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_LOAD_H
#define TOPO_LOAD_H

#include "numoe_topo.h"

#include <hwloc.h>

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

/* Do that in a child process. */
int topo_machine_try(const struct topo_source *source, struct numoe_machine **machine,
                     struct numoe_error *error);

/* Read a machine that was saved: JSON. */
int topo_saved_read(const struct topo_source *source, struct numoe_machine **machine,
                    struct numoe_error *error);
/* That JSON, on one line, to be freed; NULL: out of memory. */
char *topo_saved_text(const struct numoe_machine *machine);

/* Whether a path is a directory with sys/ and proc/ in it. */
bool topo_capture_is(const char *path);
/* From now on hwloc reads that directory in place of this system. In a child process only: it
 * replaces the environment. @return false: out of memory */
bool topo_capture_enter(const char *path);

/* What only the running system knows: free memory, affinity, limits. */
void topo_live_allowed(hwloc_topology_t topology, struct numoe_machine *machine);
void topo_live_memory(struct numoe_machine *machine);

#endif
