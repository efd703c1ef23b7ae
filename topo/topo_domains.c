/*
 * Memory domains: nodes that share memory channels, so that bandwidth does not grow with their
 * number.
 *
 * Firmware can present each L3 cache as a NUMA node; then several nodes hang on the channels of
 * one quadrant or socket. Told by either of
 *  - a Group below a Package that holds several nodes (hwloc makes one from distances; people and
 *    synthetic strings write one);
 *  - a distance of at most 11 between nodes of one package that are one L3 cache each. Without the
 *    caches 11 proves nothing: sub-NUMA clusters of some Xeons are at 11 and have channels of
 *    their own, below a common L3.
 * All else is a domain by itself.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>

/* hwloc's values of obj->attr->group.kind, from its XML files. */
enum { GROUP_USER = 0, GROUP_SYNTHETIC = 10, GROUP_DISTANCE = 900 };
enum { SHARED_CHANNELS = 11 };

struct place {
    hwloc_obj_t group;
    hwloc_obj_t cache;
    bool dram;
};

static hwloc_obj_t own_cache(struct topo_build *build, hwloc_obj_t node)
{
    hwloc_obj_t cache = NULL;

    while ((cache = hwloc_get_next_obj_by_type(build->topology, HWLOC_OBJ_L3CACHE, cache)))
        if (hwloc_bitmap_isequal(cache->cpuset, node->cpuset))
            return cache;
    return NULL;
}

/* The lowest Group above a node that may stand for shared channels and reaches beyond the node. */
static hwloc_obj_t channel_group(struct topo_build *build, hwloc_obj_t node, bool has_cache)
{
    for (hwloc_obj_t at = node->parent; at; at = at->parent) {
        unsigned kind;

        if (at->type == HWLOC_OBJ_PACKAGE || at->type == HWLOC_OBJ_MACHINE)
            return NULL;
        if (at->type != HWLOC_OBJ_GROUP || !at->attr ||
            hwloc_bitmap_isequal(at->cpuset, node->cpuset))
            continue;
        kind = at->attr->group.kind;
        if (kind != GROUP_USER && kind != GROUP_SYNTHETIC && !(kind == GROUP_DISTANCE && has_cache))
            continue;
        return hwloc_get_ancestor_obj_by_type(build->topology, HWLOC_OBJ_PACKAGE, at) ? at : NULL;
    }
    return NULL;
}

static bool together(const struct topo_build *build, const struct place *places, uint32_t a,
                     uint32_t b)
{
    const struct numoe_machine *machine = build->machine;

    if (!places[a].dram || !places[b].dram)
        return false;
    if (places[a].group && places[a].group == places[b].group)
        return true;
    return machine->distances && places[a].cache && places[b].cache &&
           places[a].cache != places[b].cache && machine->nodes[a].package != NUMOE_NONE &&
           machine->nodes[a].package == machine->nodes[b].package &&
           numoe_machine_distance(machine, a, b) <= SHARED_CHANNELS &&
           numoe_machine_distance(machine, b, a) <= SHARED_CHANNELS;
}

int topo_build_domains(struct topo_build *build, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    struct place *places = calloc(machine->node_count, sizeof *places);

    if (!places)
        return numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    for (uint32_t i = 0; i < machine->node_count; i++) {
        hwloc_obj_t object = build->node_objects[i];

        places[i].dram = machine->nodes[i].kind == NUMOE_NODE_DRAM &&
                         machine->nodes[i].capacity_bytes && !hwloc_bitmap_iszero(object->cpuset);
        if (!places[i].dram)
            continue;
        places[i].cache = own_cache(build, object);
        places[i].group = channel_group(build, object, places[i].cache != NULL);
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        uint32_t first = 0;

        while (first < i && !together(build, places, first, i))
            first++;
        machine->nodes[i].domain =
            first < i ? machine->nodes[first].domain : machine->domain_count++;
    }
    if (machine->domain_count < machine->node_count)
        topo_build_note(build,
                        "%u memory nodes are %u memory domains: nodes of one domain share "
                        "its channels",
                        machine->node_count, machine->domain_count);
    free(places);
    return 0;
}
