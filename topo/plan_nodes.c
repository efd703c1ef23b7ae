/* Which memory nodes a plan uses. SPDX-License-Identifier: Apache-2.0 */
#include "memory_node.h"
#include "plan_build.h"
#include "topo_print.h"

#include <errno.h>
#include <stdlib.h>

static const uint64_t most_kept_free = (uint64_t)256 << 20;
/* Populating stops at the margin; stacks, tables and buffers of loading come before it. */
static const uint64_t least_kept_free = MEMORY_MARGIN + ((uint64_t)16 << 20);

uint32_t plan_find_pu(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].os_index == os_index)
            return i;
    return NUMOE_NONE;
}

uint32_t plan_find_node(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].os_index == os_index)
            return i;
    return NUMOE_NONE;
}

static int choose_named(struct plan_build *build, bool *used, struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;

    for (uint32_t i = 0; i < build->request->node_count; i++) {
        uint32_t os = build->request->nodes[i], node = plan_find_node(machine, os);
        char where[32];

        snprintf(where, sizeof where, "node %u", os);
        if (node == NUMOE_NONE)
            return numoe_error_set(error, -EINVAL, where, "there is no memory node %u", os);
        if (!machine->nodes[node].allowed)
            return numoe_error_set(error, -EINVAL, where,
                                   "memory node %u is not allowed for this process", os);
        if (machine->live && !machine->nodes[node].capacity_bytes)
            return numoe_error_set(error, -EINVAL, where, "memory node %u has no memory", os);
        if (machine->nodes[node].kind == NUMOE_NODE_GPU)
            return numoe_error_set(error, -EINVAL, where,
                                   "memory node %u is a GPU's memory, which holds no experts", os);
        if (!used[node] && machine->nodes[node].kind != NUMOE_NODE_DRAM)
            plan_note(build, "node %u (%s) is used because it was named", os,
                      topo_kind_name(machine->nodes[node].kind));
        used[node] = true;
    }
    return 0;
}

static int choose_of_cpus(struct plan_build *build, bool *used, struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;

    for (uint32_t i = 0; i < build->request->cpu_count; i++) {
        uint32_t os = build->request->cpus[i], pu = plan_find_pu(machine, os);
        char where[32];

        snprintf(where, sizeof where, "CPU %u", os);
        if (pu == NUMOE_NONE)
            return numoe_error_set(error, -EINVAL, where, "there is no CPU %u here", os);
        if (!machine->pus[pu].allowed)
            return numoe_error_set(error, -EINVAL, where, "CPU %u is not allowed for this process",
                                   os);
        if (used && machine->pus[pu].node != NUMOE_NONE)
            used[machine->pus[pu].node] = true;
    }
    return 0;
}

/* One note for all nodes that are left out for the same reason. */
static void note_unused(struct plan_build *build, const bool *used, uint32_t *scratch)
{
    static const char *const reasons[] = {
        "not allowed for this process",
        "GPU memory, never used",
        "without memory",
        "high-bandwidth memory beside DRAM: used only when named",
        "slow memory: used only when named",
        "without an allowed CPU: used only when named",
        "left out by the request",
    };
    enum { REASONS = sizeof reasons / sizeof reasons[0] };
    const struct numoe_machine *machine = build->machine;

    for (unsigned r = 0; r < REASONS; r++) {
        char text[160];
        size_t count = 0;

        for (uint32_t i = 0; i < machine->node_count; i++) {
            const struct numoe_node *node = &machine->nodes[i];
            unsigned reason = !node->allowed                            ? 0
                              : node->kind == NUMOE_NODE_GPU            ? 1
                              : !node->capacity_bytes                   ? 2
                              : build->request->nodes || node->pu_count ? 6
                              : node->kind == NUMOE_NODE_HBM            ? 3
                              : node->kind == NUMOE_NODE_SLOW           ? 4
                                                                        : 5;

            if (!used[i] && reason == r)
                scratch[count++] = node->os_index;
        }
        if (count)
            plan_note(build, "node%s %s not used: %s", count > 1 ? "s" : "",
                      topo_sorted_ranges(text, sizeof text, scratch, count), reasons[r]);
    }
}

uint64_t plan_kept_free(const struct numoe_machine *machine, uint64_t asked,
                        uint64_t capacity_bytes)
{
    uint64_t kept = capacity_bytes / 50 < most_kept_free ? capacity_bytes / 50 : most_kept_free;

    if (asked)
        kept = asked;
    /* On the machine at hand whatever was asked for. */
    if ((machine->live || !asked) && kept < least_kept_free)
        kept = least_kept_free;
    return kept;
}

uint64_t plan_granted(const struct numoe_machine *machine)
{
    const uint64_t left = machine->cgroup_bytes;

    if (left == UINT64_MAX || !machine->live)
        return left;
    return left > least_kept_free ? left - least_kept_free : 0;
}

uint64_t plan_node_memory(const struct numoe_machine *machine, uint32_t node)
{
    const struct numoe_node *at = &machine->nodes[node];
    uint64_t bytes = at->free_bytes + (at->huge_2m_free << 21) + (at->huge_1g_free << 30);

    return machine->live && bytes < at->capacity_bytes ? bytes : at->capacity_bytes;
}

static int fill(struct plan_build *build, const bool *used, uint32_t count,
                struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;
    struct numoe_plan *plan = build->plan;

    plan->nodes = calloc(count, sizeof *plan->nodes);
    plan->distances = calloc((size_t)count * count, sizeof *plan->distances);
    build->core_units = calloc(count, sizeof *build->core_units);
    if (!plan->nodes || !plan->distances || !build->core_units)
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];
        struct numoe_plan_node *place = &plan->nodes[plan->node_count];
        uint64_t have = plan_node_memory(machine, i);
        uint64_t keep =
            plan_kept_free(machine, build->request->keep_free_bytes, node->capacity_bytes);

        if (!used[i])
            continue;
        place->node = i;
        place->os_index = node->os_index;
        place->domain = node->domain;
        place->package = node->package;
        place->capacity_bytes = node->capacity_bytes;
        place->available_bytes = have > keep ? have - keep : 0;
        build->place_of[i] = plan->node_count++;
    }
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = 0; b < count; b++)
            plan->distances[(size_t)a * count + b] =
                numoe_machine_distance(machine, plan->nodes[a].node, plan->nodes[b].node);
    return 0;
}

/* By default a part of each node, which differs where nodes do. */
static void note_kept_free(struct plan_build *build)
{
    const struct numoe_plan *plan = build->plan;
    const uint64_t asked = build->request->keep_free_bytes;
    uint64_t least = UINT64_MAX, most = 0;
    char text[2][32];

    for (uint32_t i = 0; i < plan->node_count; i++) {
        uint64_t kept = plan_kept_free(build->machine, asked, plan->nodes[i].capacity_bytes);

        least = kept < least ? kept : least;
        most = kept > most ? kept : most;
    }
    if (most <= 1)
        plan_note(build, "nothing kept free of any node, as asked");
    else if (least == most)
        plan_note(build, "%s of each node kept free%s", topo_bytes(text[0], most),
                  asked ? "" : " (2 %, 48 to 256 MiB)");
    else
        plan_note(build, "%s to %s of each node kept free (2 %%, 48 to 256 MiB)",
                  topo_bytes(text[0], least), topo_bytes(text[1], most));
}

int plan_choose_nodes(struct plan_build *build, struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;
    const struct numoe_plan_request *request = build->request;
    bool *used = calloc(machine->node_count, sizeof *used);
    uint32_t *scratch = calloc(machine->node_count, sizeof *scratch), count = 0;
    int rc = 0;

    build->place_of = calloc(machine->node_count, sizeof *build->place_of);
    if (!used || !scratch || !build->place_of) {
        rc = numoe_error_set(error, -ENOMEM, build->plan->source, "out of memory");
        goto out;
    }
    for (uint32_t i = 0; i < machine->node_count; i++)
        build->place_of[i] = NUMOE_NONE;
    if (request->cpus)
        rc = choose_of_cpus(build, request->nodes ? NULL : used, error);
    if (!rc && request->nodes)
        rc = choose_named(build, used, error);
    if (rc)
        goto out;
    if (!request->nodes && !request->cpus)
        for (uint32_t i = 0; i < machine->node_count; i++)
            used[i] = machine->nodes[i].pu_count != 0;
    for (uint32_t i = 0; i < machine->node_count; i++)
        count += used[i];
    if (!count) {
        rc = numoe_error_set(error, -EINVAL, build->plan->source,
                             "no memory node may be used: none is allowed, has memory and serves "
                             "an allowed CPU");
        goto out;
    }
    note_unused(build, used, scratch);
    rc = fill(build, used, count, error);
    if (!rc)
        note_kept_free(build);
out:
    free(used);
    free(scratch);
    return rc;
}
