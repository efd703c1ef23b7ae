/*
 * Which node serves which PU.
 *
 * A PU's own node is the tightest allowed node with memory among those whose CPUs include it. A PU
 * without one (its node has no memory, is not allowed, or hwloc dropped it) gets the nearest:
 * by the table of distances when its own node is in it, else by the lowest common object. PUs of
 * one orphaned block stay together, and blocks even out over nodes that are equally near.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>

struct service {
    struct topo_build *build;
    bool *serves;          /* of nodes */
    uint32_t *load;        /* PUs of nodes */
    uint32_t *first_pu;    /* logical index of a node's first PU, where ties are broken */
    hwloc_bitmap_t served; /* CPUs that have a serving node */
};

static bool has_cpu(const struct topo_build *build, uint32_t node, const struct numoe_pu *pu)
{
    return hwloc_bitmap_isset(build->node_objects[node]->cpuset, pu->os_index);
}

/* DRAM serves; HBM serves where no allowed DRAM stands beside it; the rest when asked for. */
static bool may_serve(const struct numoe_machine *machine, uint32_t i, bool sizes_known)
{
    const struct numoe_node *node = &machine->nodes[i];

    if (!node->allowed || (sizes_known && !node->capacity_bytes))
        return false;
    if (node->kind == NUMOE_NODE_HBM)
        return node->beside == NUMOE_NONE || !machine->nodes[node->beside].allowed;
    return node->kind == NUMOE_NODE_DRAM;
}

/* Tightest node around a PU; only_serving, or any. */
static uint32_t own_node(const struct service *service, const struct numoe_pu *pu,
                         bool only_serving)
{
    const struct topo_build *build = service->build;
    uint32_t best = NUMOE_NONE;
    int best_weight = 0;

    for (uint32_t i = 0; i < build->machine->node_count; i++) {
        int weight;

        if ((only_serving && !service->serves[i]) || !has_cpu(build, i, pu))
            continue;
        weight = hwloc_bitmap_weight(build->node_objects[i]->cpuset);
        if (best == NUMOE_NONE || weight < best_weight) {
            best = i;
            best_weight = weight;
        }
    }
    return best;
}

/* Depth of the lowest object above the PU that also holds the node; deeper is nearer. */
static int common_depth(const struct topo_build *build, hwloc_obj_t pu, uint32_t node)
{
    hwloc_const_cpuset_t cpus = build->node_objects[node]->cpuset;

    if (hwloc_bitmap_iszero(cpus))
        return -1;
    for (hwloc_obj_t at = pu; at; at = at->parent)
        if (hwloc_bitmap_isincluded(cpus, at->cpuset))
            return at->depth;
    return -1;
}

static uint32_t nearest(const struct service *service, uint32_t pu)
{
    const struct topo_build *build = service->build;
    const struct numoe_machine *machine = build->machine;
    uint32_t own = own_node(service, &machine->pus[pu], false), best = NUMOE_NONE;
    int64_t best_key[4] = {0};

    for (uint32_t i = 0; i < machine->node_count; i++) {
        int64_t key[4];

        if (!service->serves[i])
            continue;
        key[0] =
            own != NUMOE_NONE && machine->distances ? numoe_machine_distance(machine, own, i) : 0;
        key[1] = -common_depth(build, build->pu_objects[pu], i);
        key[2] = service->load[i];
        key[3] = service->first_pu[i] == NUMOE_NONE
                     ? INT64_MAX
                     : llabs((int64_t)service->first_pu[i] - (int64_t)pu);
        for (int k = 0; k < 4 || best == NUMOE_NONE; k++) {
            if (best != NUMOE_NONE && key[k] == best_key[k])
                continue;
            if (best == NUMOE_NONE || key[k] < best_key[k]) {
                best = i;
                for (int m = 0; m < 4; m++)
                    best_key[m] = key[m];
            }
            break;
        }
    }
    return best;
}

/* The largest object around a PU that has no served CPU: what lost its memory as a whole. */
static hwloc_obj_t orphan_block(const struct service *service, hwloc_obj_t pu)
{
    hwloc_obj_t at = pu;

    while (at->parent && !hwloc_bitmap_intersects(at->parent->cpuset, service->served))
        at = at->parent;
    return at;
}

static void serve(struct service *service, uint32_t index, uint32_t node, bool near)
{
    struct numoe_machine *machine = service->build->machine;
    struct numoe_pu *pu = &machine->pus[index];

    pu->node = node;
    pu->node_is_near = near;
    pu->domain = machine->nodes[node].domain;
    if (service->first_pu[node] == NUMOE_NONE)
        service->first_pu[node] = index;
    if (pu->allowed)
        service->load[node]++;
}

static void count_cores(struct topo_build *build)
{
    struct numoe_machine *machine = build->machine;
    uint32_t core = NUMOE_NONE, node = NUMOE_NONE, thread = 0;

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        struct numoe_pu *pu = &machine->pus[i];

        if (!pu->allowed)
            continue;
        thread = pu->core == core ? thread + 1 : 0;
        pu->smt = thread;
        if (pu->node != NUMOE_NONE) {
            machine->nodes[pu->node].pu_count++;
            if (pu->core != core || pu->node != node)
                machine->nodes[pu->node].core_count++;
        }
        core = pu->core;
        node = pu->node;
    }
}

static void assign(struct service *service)
{
    struct topo_build *build = service->build;
    struct numoe_machine *machine = build->machine;
    hwloc_obj_t block = NULL;
    uint32_t node = NUMOE_NONE, orphans = 0;

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        uint32_t own = own_node(service, &machine->pus[i], true);

        if (own == NUMOE_NONE)
            continue;
        serve(service, i, own, true);
        hwloc_bitmap_set(service->served, machine->pus[i].os_index);
    }
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        hwloc_obj_t around;

        if (machine->pus[i].node != NUMOE_NONE)
            continue;
        around = orphan_block(service, build->pu_objects[i]);
        if (around != block || node == NUMOE_NONE) {
            node = nearest(service, i);
            block = around;
        }
        if (node == NUMOE_NONE)
            break;
        serve(service, i, node, false);
        orphans += machine->pus[i].allowed;
    }
    if (orphans)
        topo_build_note(build,
                        "%u CPUs have no memory of their own that may be used; each is "
                        "served by the nearest node that has",
                        orphans);
}

int topo_build_service(struct topo_build *build, struct numoe_error *error)
{
    struct numoe_machine *machine = build->machine;
    struct service service = {.build = build};
    bool sizes_known = false, any = false;
    int rc = 0;

    service.serves = calloc(machine->node_count, sizeof *service.serves);
    service.load = calloc(machine->node_count, sizeof *service.load);
    service.first_pu = calloc(machine->node_count, sizeof *service.first_pu);
    service.served = hwloc_bitmap_alloc();
    if (!service.serves || !service.load || !service.first_pu || !service.served) {
        rc = numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
        goto out;
    }
    for (uint32_t i = 0; i < machine->node_count; i++)
        sizes_known |= machine->nodes[i].capacity_bytes != 0;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        service.first_pu[i] = NUMOE_NONE;
        service.serves[i] = may_serve(machine, i, sizes_known);
        any |= service.serves[i];
    }
    /* slow memory is better than none */
    for (uint32_t i = 0; i < machine->node_count && !any; i++)
        service.serves[i] = machine->nodes[i].allowed && machine->nodes[i].capacity_bytes &&
                            machine->nodes[i].kind != NUMOE_NODE_GPU;
    assign(&service);
    count_cores(build);
out:
    hwloc_bitmap_free(service.served);
    free(service.first_pu);
    free(service.load);
    free(service.serves);
    return rc;
}
