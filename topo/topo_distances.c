/* Distances between NUMA nodes. SPDX-License-Identifier: Apache-2.0 */
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { LOCAL = 10, REMOTE = 20, MAX_MATRICES = 16 };

static uint32_t dense_node(const struct topo_build *build, hwloc_obj_t object)
{
    if (object && object->type == HWLOC_OBJ_NUMANODE)
        for (uint32_t i = 0; i < build->machine->node_count; i++)
            if (build->node_objects[i] == object)
                return i;
    return NUMOE_NONE;
}

/* Usable when it names each node once and no value is zero: a node is nearest to itself. One that
 * is 2^32 and more from itself is damage in any unit. */
static bool usable(const struct topo_build *build, const struct hwloc_distances_s *matrix)
{
    size_t count = matrix->nbobjs;

    if (count == 0 || count > build->machine->node_count)
        return false;
    for (size_t i = 0; i < count; i++) {
        if (dense_node(build, matrix->objs[i]) == NUMOE_NONE ||
            matrix->values[i * count + i] > UINT32_MAX)
            return false;
        for (size_t j = 0; j < i; j++)
            if (matrix->objs[i] == matrix->objs[j])
                return false;
        for (size_t j = 0; j < count; j++)
            if (matrix->values[i * count + j] == 0)
                return false;
    }
    return true;
}

static void fill(struct topo_build *build, const struct hwloc_distances_s *matrix)
{
    struct numoe_machine *machine = build->machine;
    size_t nodes = machine->node_count, count = matrix->nbobjs;

    for (size_t i = 0; i < nodes; i++)
        for (size_t j = 0; j < nodes; j++)
            machine->distances[i * nodes + j] = i == j ? LOCAL : REMOTE;
    for (size_t i = 0; i < count; i++) {
        size_t from = dense_node(build, matrix->objs[i]);
        hwloc_uint64_t self = matrix->values[i * count + i];

        /* a row in another unit (nanoseconds, say) is brought to "10 is local" */
        for (size_t j = 0; j < count; j++) {
            size_t to = dense_node(build, matrix->objs[j]);
            hwloc_uint64_t value = matrix->values[i * count + j];

            if (self != LOCAL)
                value = value > UINT32_MAX ? UINT32_MAX : (value * LOCAL + self / 2) / self;
            machine->distances[from * nodes + to] =
                value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
        }
    }
}

int topo_build_distances(struct topo_build *build, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    struct hwloc_distances_s *found[MAX_MATRICES], *best = NULL;
    unsigned count = MAX_MATRICES;
    int rc = 0;

    if (hwloc_distances_get_by_type(build->topology, HWLOC_OBJ_NUMANODE, &count, found,
                                    HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0))
        return 0;
    if (count > MAX_MATRICES)
        count = MAX_MATRICES;
    for (unsigned i = 0; i < count; i++) {
        const char *name;

        if (!usable(build, found[i]))
            continue;
        name = hwloc_distances_get_name(build->topology, found[i]);
        if (!best || (name && !strcmp(name, "NUMALatency"))) {
            best = found[i];
            if (name && !strcmp(name, "NUMALatency"))
                break;
        }
    }
    if (best) {
        machine->distances =
            calloc((size_t)machine->node_count * machine->node_count, sizeof *machine->distances);
        if (machine->distances)
            fill(build, best);
        else
            rc = numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    } else if (count) {
        topo_build_note(build, "the table of NUMA distances makes no sense and is left out");
    }
    for (unsigned i = 0; i < count; i++)
        hwloc_distances_release(build->topology, found[i]);
    return rc;
}

uint32_t numoe_machine_distance(const struct numoe_machine *machine, uint32_t a, uint32_t b)
{
    if (machine->distances && a < machine->node_count && b < machine->node_count)
        return machine->distances[(size_t)a * machine->node_count + b];
    return a == b ? LOCAL : REMOTE;
}
