/*
 * topo_build.h - from an hwloc topology to the plain machine, in steps.
 *
 * Each step reads what the steps before it wrote; their order is that of this file.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_BUILD_H
#define TOPO_BUILD_H

#include "numoe_topo.h"

#include <hwloc.h>

enum {
    TOPO_MAX_NODES = 1024, /* what the kernel's node masks can hold */
    TOPO_MAX_PUS = 8192,   /* the kernel's limit on x86; hwloc takes seconds for as many */
    TOPO_MAX_CPU_INDEX = 65535
};

struct topo_build {
    hwloc_topology_t topology;
    struct numoe_machine *machine;
    hwloc_obj_t *node_objects; /* of machine->nodes */
    hwloc_obj_t *pu_objects;   /* of machine->pus */
};

/* Nodes, PUs, cores, caches, packages, what is allowed. */
int topo_build_objects(struct topo_build *build, struct numoe_error *error);
/* Dense index of the package that an object is or is in, or NUMOE_NONE. */
uint32_t topo_package_of(hwloc_obj_t object);
/* The matrix of NUMA latencies, if there is one. */
int topo_build_distances(struct topo_build *build, struct numoe_error *error);
/* Bandwidth and kind of each node, and beside which node's CPUs it stands. */
int topo_build_kinds(struct topo_build *build, struct numoe_error *error);
/* Nodes that share memory channels. */
int topo_build_domains(struct topo_build *build, struct numoe_error *error);
/* Which node serves which PU. */
int topo_build_service(struct topo_build *build, struct numoe_error *error);
/* GPUs and drives. */
int topo_build_devices(struct topo_build *build, struct numoe_error *error);

#define topo_build_note(build, ...)                                                                \
    ((void)topo_note(&(build)->machine->notes, &(build)->machine->note_count, __VA_ARGS__))

#endif
