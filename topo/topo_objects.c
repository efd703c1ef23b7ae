/* Nodes, PUs, cores, caches and packages. SPDX-License-Identifier: Apache-2.0 */
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/*
 * Packages are numbered here and not taken by hwloc's index: a description may put one package into
 * another, and then hwloc counts each level by itself. What counts is the outermost; its userdata
 * is its index plus one.
 */
static void number_packages(struct topo_build *build)
{
    int depths = hwloc_topology_get_depth(build->topology);

    for (int depth = 0; depth < depths; depth++) {
        hwloc_obj_t at = NULL;

        if (hwloc_get_depth_type(build->topology, depth) != HWLOC_OBJ_PACKAGE)
            continue;
        while ((at = hwloc_get_next_obj_by_depth(build->topology, depth, at)))
            if (topo_package_of(at->parent) == NUMOE_NONE)
                at->userdata = (void *)(uintptr_t)++build->machine->package_count;
    }
}

uint32_t topo_package_of(hwloc_obj_t object)
{
    hwloc_obj_t package = NULL;

    for (hwloc_obj_t at = object; at; at = at->parent)
        if (at->type == HWLOC_OBJ_PACKAGE)
            package = at;
    return package ? (uint32_t)(uintptr_t)package->userdata - 1 : NUMOE_NONE;
}

/* Two objects of one OS index would make every table that is keyed by it ambiguous. */
static int check_index(hwloc_bitmap_t seen, unsigned os_index, unsigned limit, const char *what,
                       struct numoe_error *error)
{
    if (os_index > limit)
        return numoe_error_set(error, -E2BIG, what,
                               "%s OS index %u is not supported; the highest is %u", what, os_index,
                               limit);
    if (hwloc_bitmap_isset(seen, os_index))
        return numoe_error_set(error, -EINVAL, what, "%s OS index %u appears twice", what,
                               os_index);
    if (hwloc_bitmap_set(seen, os_index))
        return numoe_error_set(error, -ENOMEM, what, "out of memory");
    return 0;
}

static int build_nodes(struct topo_build *build, hwloc_bitmap_t seen, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    hwloc_const_nodeset_t allowed = hwloc_topology_get_allowed_nodeset(build->topology);
    uint64_t total = 0;
    int rc;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        hwloc_obj_t object = hwloc_get_obj_by_type(build->topology, HWLOC_OBJ_NUMANODE, i);
        struct numoe_node *node = &machine->nodes[i];

        if (!object || !object->attr || !object->cpuset)
            return numoe_error_set(error, -EINVAL, machine->source, "NUMA node %u is damaged", i);
        rc = check_index(seen, object->os_index, TOPO_MAX_NODES - 1, "NUMA node", error);
        if (rc)
            return rc;
        build->node_objects[i] = object;
        node->os_index = object->os_index;
        node->allowed = hwloc_bitmap_isset(allowed, object->os_index);
        node->package = topo_package_of(object);
        node->beside = NUMOE_NONE;
        node->capacity_bytes = object->attr->numanode.local_memory;
        node->free_bytes = node->capacity_bytes;
        /* no machine has an exbibyte, and sums must not wrap */
        if (node->capacity_bytes >> 60 || (total += node->capacity_bytes) >> 60)
            return numoe_error_set(error, -EINVAL, machine->source,
                                   "NUMA node %u claims %llu bytes of memory", node->os_index,
                                   (unsigned long long)node->capacity_bytes);
    }
    if (total == 0)
        topo_build_note(build, "no memory size is known of any node");
    return 0;
}

/* The largest data cache that a PU is below; caches of more than one PU are not always L3. */
static hwloc_obj_t last_cache(hwloc_obj_t pu)
{
    hwloc_obj_t found = NULL;

    for (hwloc_obj_t at = pu->parent; at; at = at->parent)
        if (hwloc_obj_type_is_dcache(at->type))
            found = at;
    return found;
}

static uint32_t efficiency_of(struct topo_build *build, hwloc_obj_t pu)
{
    int kind = hwloc_cpukinds_get_by_cpuset(build->topology, pu->cpuset, 0), efficiency = 0;

    if (kind < 0 ||
        hwloc_cpukinds_get_info(build->topology, (unsigned)kind, NULL, &efficiency, NULL, NULL, 0))
        return 0;
    return efficiency > 0 ? (uint32_t)efficiency : 0;
}

static int build_pus(struct topo_build *build, hwloc_bitmap_t seen, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    hwloc_const_cpuset_t allowed = hwloc_topology_get_allowed_cpuset(build->topology);
    bool hybrid = hwloc_cpukinds_get_nr(build->topology, 0) > 1;
    hwloc_obj_t last_core = NULL, cache = NULL;
    bool coreless = false;
    int rc;

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        hwloc_obj_t object = hwloc_get_obj_by_type(build->topology, HWLOC_OBJ_PU, i), core, found;
        struct numoe_pu *pu = &machine->pus[i];

        if (!object || !object->cpuset)
            return numoe_error_set(error, -EINVAL, machine->source, "PU %u is damaged", i);
        rc = check_index(seen, object->os_index, TOPO_MAX_CPU_INDEX, "CPU", error);
        if (rc)
            return rc;
        build->pu_objects[i] = object;
        pu->os_index = object->os_index;
        pu->allowed = hwloc_bitmap_isset(allowed, object->os_index);
        pu->package = topo_package_of(object);
        pu->node = pu->domain = pu->l3 = NUMOE_NONE;
        pu->efficiency = hybrid ? efficiency_of(build, object) : 0;

        /* PUs come in the tree's order, so those of a core or a cache are neighbours */
        core = hwloc_get_ancestor_obj_by_type(build->topology, HWLOC_OBJ_CORE, object);
        if (!core || core != last_core)
            machine->core_count++;
        pu->core = machine->core_count - 1;
        coreless |= !core;
        last_core = core;
        found = last_cache(object);
        if (found) {
            if (found != cache)
                machine->l3_count++;
            pu->l3 = machine->l3_count - 1;
            cache = found;
        }
    }
    if (coreless)
        topo_build_note(build, "some CPUs belong to no known core: each counts as a core");
    return 0;
}

static void note_kinds(struct topo_build *build)
{
    const struct numoe_machine *machine = build->machine;
    uint32_t low = UINT32_MAX, high = 0;

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        low = machine->pus[i].efficiency < low ? machine->pus[i].efficiency : low;
        high = machine->pus[i].efficiency > high ? machine->pus[i].efficiency : high;
    }
    if (high > low)
        topo_build_note(build, "cores are of %u kinds; faster ones are taken first",
                        high - low + 1);
}

static void note_absent(struct topo_build *build)
{
    hwloc_const_cpuset_t all = hwloc_topology_get_complete_cpuset(build->topology);
    hwloc_const_cpuset_t online = hwloc_topology_get_topology_cpuset(build->topology);
    int absent = hwloc_bitmap_weight(all) - hwloc_bitmap_weight(online);

    if (absent > 0)
        topo_build_note(build, "%d CPUs are offline", absent);
}

int topo_build_objects(struct topo_build *build, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    int nodes = hwloc_get_nbobjs_by_type(build->topology, HWLOC_OBJ_NUMANODE);
    int pus = hwloc_get_nbobjs_by_type(build->topology, HWLOC_OBJ_PU);
    hwloc_bitmap_t seen;
    int rc;

    if (nodes < 1 || pus < 1)
        return numoe_error_set(error, -EINVAL, machine->source,
                               "the topology has %d NUMA nodes and %d CPUs", nodes, pus);
    if (nodes > TOPO_MAX_NODES || pus > TOPO_MAX_PUS)
        return numoe_error_set(error, -E2BIG, machine->source,
                               "%d NUMA nodes and %d CPUs are too many; %d and %d are supported",
                               nodes, pus, TOPO_MAX_NODES, TOPO_MAX_PUS);
    machine->node_count = (uint32_t)nodes;
    machine->pu_count = (uint32_t)pus;
    number_packages(build);
    machine->nodes = calloc((size_t)nodes, sizeof *machine->nodes);
    machine->pus = calloc((size_t)pus, sizeof *machine->pus);
    build->node_objects = calloc((size_t)nodes, sizeof(hwloc_obj_t));
    build->pu_objects = calloc((size_t)pus, sizeof(hwloc_obj_t));
    seen = hwloc_bitmap_alloc();
    if (!machine->nodes || !machine->pus || !build->node_objects || !build->pu_objects || !seen) {
        hwloc_bitmap_free(seen);
        return numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    }
    rc = build_nodes(build, seen, error);
    if (!rc) {
        hwloc_bitmap_zero(seen);
        rc = build_pus(build, seen, error);
    }
    hwloc_bitmap_free(seen);
    if (!rc) {
        note_kinds(build);
        note_absent(build);
    }
    return rc;
}
