/*
 * What kind of memory a node is.
 *
 * Evidence, strongest first: the subtype that hwloc gives; bandwidth compared with another node of
 * the same CPUs; being the second node of the same CPUs, or standing above nodes that already
 * serve all of its CPUs. The kernel gives such a node no CPUs at all, but hwloc shows it with the
 * CPUs that are nearest.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { NOT_SAID = -1, MAX_INITIATORS = 64 };

static uint64_t attribute(struct topo_build *build, hwloc_memattr_id_t id, hwloc_obj_t node)
{
    struct hwloc_location initiators[MAX_INITIATORS];
    hwloc_uint64_t values[MAX_INITIATORS], best = 0;
    unsigned count = MAX_INITIATORS;

    if (hwloc_memattr_get_initiators(build->topology, id, node, 0, &count, initiators, values))
        return 0;
    if (count > MAX_INITIATORS)
        count = MAX_INITIATORS;
    /* one node may be measured from several places; local ones have the highest */
    for (unsigned i = 0; i < count; i++)
        if (values[i] > best)
            best = values[i];
    return best;
}

static int said(const char *subtype)
{
    static const struct {
        const char *prefix;
        int kind;
    } known[] = {
        {"GPUMemory", NUMOE_NODE_GPU}, {"HBM", NUMOE_NODE_HBM},   {"MCDRAM", NUMOE_NODE_HBM},
        {"NVM", NUMOE_NODE_SLOW},      {"PMEM", NUMOE_NODE_SLOW}, {"CXL", NUMOE_NODE_SLOW},
        {"DRAM", NUMOE_NODE_DRAM},
    };

    if (subtype)
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
            if (!strncasecmp(subtype, known[i].prefix, strlen(known[i].prefix)))
                return known[i].kind;
    return NOT_SAID;
}

/* Second memory of the same CPUs: faster or smaller is HBM, else it is an extension. */
static enum numoe_node_kind second_kind(const struct numoe_node *node,
                                        const struct numoe_node *first, bool same_cpus)
{
    if (node->bandwidth_mbs && first->bandwidth_mbs)
        return node->bandwidth_mbs / 3 > first->bandwidth_mbs / 2 ? NUMOE_NODE_HBM
                                                                  : NUMOE_NODE_SLOW;
    return same_cpus && node->capacity_bytes < first->capacity_bytes ? NUMOE_NODE_HBM
                                                                     : NUMOE_NODE_SLOW;
}

/* Node whose CPUs are exactly those of node i, of kind DRAM and with memory; `before` limits the
 * search to nodes that are decided. */
static uint32_t same_cpus(const struct topo_build *build, const int *kinds, uint32_t i)
{
    for (uint32_t j = 0; j < build->machine->node_count; j++)
        if (j != i && kinds[j] == NUMOE_NODE_DRAM && build->machine->nodes[j].capacity_bytes &&
            hwloc_bitmap_isequal(build->node_objects[i]->cpuset, build->node_objects[j]->cpuset))
            return j;
    return NUMOE_NONE;
}

/* First of the nodes that lie strictly inside node i and together serve all of its CPUs. */
static uint32_t covered_by(const struct topo_build *build, const int *kinds, uint32_t i,
                           hwloc_bitmap_t covered)
{
    hwloc_const_cpuset_t cpus = build->node_objects[i]->cpuset;
    uint32_t first = NUMOE_NONE;

    hwloc_bitmap_zero(covered);
    for (uint32_t j = 0; j < build->machine->node_count; j++) {
        hwloc_const_cpuset_t inner = build->node_objects[j]->cpuset;

        if (j == i || !build->machine->nodes[j].capacity_bytes || kinds[j] == NUMOE_NODE_GPU ||
            kinds[j] == NUMOE_NODE_SLOW || hwloc_bitmap_isequal(inner, cpus) ||
            hwloc_bitmap_iszero(inner) || !hwloc_bitmap_isincluded(inner, cpus))
            continue;
        if (first == NUMOE_NONE)
            first = j;
        hwloc_bitmap_or(covered, covered, inner);
    }
    return first != NUMOE_NONE && hwloc_bitmap_isequal(covered, cpus) ? first : NUMOE_NONE;
}

int topo_build_kinds(struct topo_build *build, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    hwloc_bitmap_t scratch = hwloc_bitmap_alloc();
    int *kinds = calloc(machine->node_count, sizeof *kinds);
    uint32_t odd = 0;

    if (!kinds || !scratch) {
        free(kinds);
        hwloc_bitmap_free(scratch);
        return numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        struct numoe_node *node = &machine->nodes[i];
        hwloc_obj_t object = build->node_objects[i];

        kinds[i] = said(object->subtype);
        node->bandwidth_mbs = attribute(build, HWLOC_MEMATTR_ID_READ_BANDWIDTH, object);
        if (!node->bandwidth_mbs)
            node->bandwidth_mbs = attribute(build, HWLOC_MEMATTR_ID_BANDWIDTH, object);
        if (node->bandwidth_mbs >> 40) /* an exabyte a second is damage */
            node->bandwidth_mbs = 0;
    }
    /* in order: the first node of the same CPUs is their DRAM unless something says otherwise */
    for (uint32_t i = 0; i < machine->node_count; i++) {
        struct numoe_node *node = &machine->nodes[i];
        uint32_t first;

        if (kinds[i] == NOT_SAID && node->capacity_bytes &&
            !hwloc_bitmap_iszero(build->node_objects[i]->cpuset)) {
            first = same_cpus(build, kinds, i);
            if (first != NUMOE_NONE) {
                kinds[i] = (int)second_kind(node, &machine->nodes[first], true);
            } else {
                first = covered_by(build, kinds, i, scratch);
                if (first != NUMOE_NONE)
                    kinds[i] = (int)second_kind(node, &machine->nodes[first], false);
            }
        }
        if (kinds[i] == NOT_SAID)
            kinds[i] = NUMOE_NODE_DRAM;
        node->kind = (enum numoe_node_kind)kinds[i];
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        if (kinds[i] == NUMOE_NODE_DRAM)
            continue;
        odd++;
        machine->nodes[i].beside = same_cpus(build, kinds, i);
        for (uint32_t j = 0; j < machine->node_count && machine->nodes[i].beside == NUMOE_NONE; j++)
            if (kinds[j] == NUMOE_NODE_DRAM && machine->nodes[j].capacity_bytes &&
                hwloc_bitmap_intersects(build->node_objects[i]->cpuset,
                                        build->node_objects[j]->cpuset))
                machine->nodes[i].beside = j;
    }
    if (odd)
        topo_build_note(build, "%u of %u memory nodes are not ordinary DRAM", odd,
                        machine->node_count);
    free(kinds);
    hwloc_bitmap_free(scratch);
    return 0;
}
