/*
 * How many slices go to which node, in whole numbers from beginning to end.
 *
 * A node's weight is its bandwidth where that is known of all nodes (measured, else told by the
 * firmware), else its part of its memory domain (whose channels count once) averaged with its part
 * of the cores. Weights become whole
 * counts of slices over the model, none above what the node has room for; the counts become exact
 * shares, and numoe_plan_boundary spreads each share over layers and experts.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/checked.h"
#include "memory_node.h"
#include "plan_build.h"
#include "plan_shares.h"
#include "topo_print.h"

#include <errno.h>
#include <stdlib.h>

/* A domain's part is divided exactly by any number of nodes up to 16. */
enum { DOMAIN_UNITS = 720720, MOST_ROUNDS = 64 };

/* Stands for the model in a plan without one: fine enough for 1024 nodes. */
static const uint64_t no_model_slices = (uint64_t)1 << 40;

struct totals {
    uint64_t pairs;  /* (layer, expert) */
    uint64_t slices; /* over all */
    uint64_t bytes;
};

static int count_totals(const struct numoe_expert_shape *shape, struct totals *totals,
                        struct numoe_error *error)
{
    uint64_t slice_bytes, expert_bytes;

    *totals = (struct totals){0};
    if (!shape->layers)
        return 0;
    if (!shape->experts || !shape->slices || !shape->slice_bytes)
        return numoe_error_set(error, -EINVAL, "shape",
                               "a layer of %llu experts of %llu slices of %llu bytes is no layer",
                               (unsigned long long)shape->experts,
                               (unsigned long long)shape->slices,
                               (unsigned long long)shape->slice_bytes);
    if (!numoe_mul_u64(shape->layers, shape->experts, &totals->pairs) ||
        !numoe_mul_u64(totals->pairs, shape->slices, &totals->slices) ||
        !numoe_mul_u64(totals->slices, shape->slice_bytes, &slice_bytes) ||
        !numoe_mul_u64(totals->pairs, shape->expert_bytes, &expert_bytes) ||
        !numoe_add_u64(slice_bytes, expert_bytes, &totals->bytes) || totals->bytes > PLAN_SHARE_ONE)
        return numoe_error_set(
            error, -EOVERFLOW, "shape",
            "%llu layers of %llu experts of %llu slices of %llu bytes are more "
            "than any machine holds",
            (unsigned long long)shape->layers, (unsigned long long)shape->experts,
            (unsigned long long)shape->slices, (unsigned long long)shape->slice_bytes);
    return 0;
}

/* Bandwidth of a node, and whether it is the node's own part of channels that it shares. */
enum bandwidth_source {
    MEASURED_TOGETHER, /* while all nodes were read: its own part */
    MEASURED_ALONE,    /* by the domain that reads it fastest: the channels' */
    FIRMWARE,          /* the same, as memory attributes say */
    NOT_KNOWN
};

static uint64_t bandwidth_of(const struct numoe_machine *machine, uint32_t node,
                             enum bandwidth_source source)
{
    switch (source) {
    case MEASURED_TOGETHER:
        return machine->together_mbs ? machine->together_mbs[node] : 0;
    case MEASURED_ALONE:
        return numoe_machine_measured(machine, node);
    case FIRMWARE:
        return machine->nodes[node].bandwidth_mbs;
    case NOT_KNOWN:
        break;
    }
    return 0;
}

/* The best source that knows all of the plan's nodes; fills in their bandwidths. */
static enum bandwidth_source choose_source(const struct plan_build *build, uint64_t *bandwidth)
{
    const struct numoe_plan *plan = build->plan;
    enum bandwidth_source source;

    for (source = MEASURED_TOGETHER; source < NOT_KNOWN; source++) {
        bool known = true;

        for (uint32_t i = 0; i < plan->node_count; i++) {
            bandwidth[i] = bandwidth_of(build->machine, plan->nodes[i].node, source);
            known &= bandwidth[i] != 0;
        }
        if (known)
            break;
    }
    return source;
}

/* What was measured of equal nodes differs a little, and shares must not follow noise. */
static void even_out(uint64_t *bandwidth, uint32_t count)
{
    enum { NOISE_PERCENT = 5 };
    uint64_t least = UINT64_MAX, most = 0, sum = 0;

    for (uint32_t i = 0; i < count; i++) {
        least = bandwidth[i] < least ? bandwidth[i] : least;
        most = bandwidth[i] > most ? bandwidth[i] : most;
        sum += bandwidth[i];
    }
    if ((most - least) * 100 > most * NOISE_PERCENT)
        return;
    for (uint32_t i = 0; i < count; i++)
        bandwidth[i] = sum / count;
}

static void weigh(struct plan_build *build, uint64_t *weight)
{
    static const char *const notes[] = {
        [MEASURED_TOGETHER] = "shares follow the bandwidth of nodes as measured, all at once",
        [MEASURED_ALONE] = "shares follow the bandwidth of nodes as measured, each alone",
        [FIRMWARE] = "shares follow the bandwidth of nodes as the firmware gives it",
        [NOT_KNOWN] = "bandwidth is not known: shares follow memory domains and cores",
    };
    const struct numoe_machine *machine = build->machine;
    const struct numoe_plan *plan = build->plan;
    enum bandwidth_source source = choose_source(build, weight);
    uint64_t cores = 0, parts = 0;
    bool known = source != NOT_KNOWN;

    if (source <= MEASURED_ALONE)
        even_out(weight, plan->node_count);
    for (uint32_t i = 0; i < plan->node_count; i++)
        cores += build->core_units[i];
    /* nodes of one domain share its channels; the fastest tells what those can do */
    for (uint32_t i = 0; known && i < plan->node_count; i++)
        for (uint32_t j = 0; j < i && source != MEASURED_TOGETHER; j++) {
            if (machine->nodes[plan->nodes[j].node].domain !=
                machine->nodes[plan->nodes[i].node].domain)
                continue;
            if (weight[j] > weight[i])
                weight[i] = weight[j];
            else
                weight[j] = weight[i];
        }
    for (uint32_t i = 0; i < plan->node_count; i++) {
        uint32_t domain = machine->nodes[plan->nodes[i].node].domain;
        uint64_t sharing = 0;

        for (uint32_t j = 0; j < plan->node_count; j++)
            sharing += machine->nodes[plan->nodes[j].node].domain == domain;
        if (source == MEASURED_TOGETHER)
            weight[i] <<= 16;
        else
            weight[i] = known ? (weight[i] << 16) / sharing : DOMAIN_UNITS / sharing;
        parts += weight[i];
    }
    if (!known && cores)
        for (uint32_t i = 0; i < plan->node_count; i++)
            weight[i] = weight[i] * cores + build->core_units[i] * parts;
    if (plan->node_count > 1)
        plan_note(build, "%s", notes[source]);
}

/* Experts whose slice 0 lies before a node, given the share before it: floor(x + phi) >= 1. */
static uint64_t experts_before(const struct totals *totals, const struct numoe_plan *plan,
                               uint32_t node)
{
    uint64_t before;

    if (node == plan->node_count)
        return totals->pairs;
    before = plan_scale(totals->slices, plan->cumulative[node]);
    return before < totals->pairs ? before : totals->pairs;
}

static void count_bytes(struct numoe_plan *plan, const struct totals *totals, const uint64_t *share)
{
    for (uint32_t i = 0; i < plan->node_count; i++) {
        uint64_t experts = experts_before(totals, plan, i + 1) - experts_before(totals, plan, i);

        plan->nodes[i].slice_count = share[i];
        plan->nodes[i].planned_bytes =
            share[i] * plan->shape.slice_bytes + experts * plan->shape.expert_bytes;
    }
}

/* What the cgroup's limit leaves for experts: populating keeps a margin there too. */
static uint64_t granted(const struct numoe_machine *machine)
{
    if (machine->cgroup_bytes == UINT64_MAX)
        return UINT64_MAX;
    return machine->cgroup_bytes > MEMORY_MARGIN ? machine->cgroup_bytes - MEMORY_MARGIN : 0;
}

/* Say what is missing, and which nodes could still help. */
static int refuse(const struct plan_build *build, const struct totals *totals, uint64_t have,
                  struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;
    const struct numoe_plan *plan = build->plan;
    uint32_t *numbers = calloc(machine->node_count, sizeof *numbers);
    uint64_t more = 0, lacking;
    char used[96] = "", unused[96] = "", need[32], room[32], lack[32], extra[32], help[256];
    char where[112];
    size_t count = 0;

    if (!numbers)
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    for (uint32_t i = 0; i < plan->node_count; i++)
        numbers[i] = plan->nodes[i].os_index;
    topo_sorted_ranges(used, sizeof used, numbers, plan->node_count);
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        if (build->place_of[i] != NUMOE_NONE || !node->allowed || node->kind == NUMOE_NODE_GPU ||
            !node->capacity_bytes)
            continue;
        numbers[count++] = node->os_index;
        more += machine->live ? node->free_bytes : node->capacity_bytes;
    }
    topo_sorted_ranges(unused, sizeof unused, numbers, count);
    free(numbers);
    /* room is lost where a node ends in part of a slice: never report a shortage of nothing */
    lacking = totals->bytes > have ? totals->bytes - have : plan->shape.slice_bytes;
    if (granted(machine) <= have)
        snprintf(help, sizeof help, "raise the memory limit of the cgroup, which still grants %s",
                 topo_bytes(extra, machine->cgroup_bytes));
    else if (!have && !machine->live && !plan->nodes[0].capacity_bytes)
        snprintf(help, sizeof help, "the memory size of that node is not known");
    else if (count)
        snprintf(help, sizeof help, "using node%s %s too would add %s", count > 1 ? "s" : "",
                 unused, topo_bytes(extra, more));
    else
        snprintf(help, sizeof help,
                 "more memory, fewer layers or experts, or less memory kept free would help");
    snprintf(where, sizeof where, "node%s %s", plan->node_count > 1 ? "s" : "", used);
    return numoe_error_set(error, -ENOSPC, where,
                           "the experts do not fit: %s (%.1f GB) needed, %s available on node%s "
                           "%s: short by %s (%.1f GB); %s",
                           topo_bytes(need, totals->bytes), (double)totals->bytes / 1e9,
                           topo_bytes(room, have), plan->node_count > 1 ? "s" : "", used,
                           topo_bytes(lack, lacking), (double)lacking / 1e9, help);
}

static uint64_t room_of(const struct plan_build *build)
{
    uint64_t have = 0;

    for (uint32_t i = 0; i < build->plan->node_count; i++)
        have += build->plan->nodes[i].available_bytes;
    return have;
}

/* Split; then, as bytes besides slices fall on whoever holds slice 0, lower the limit of a node
 * that overflows and split again. */
static int split(struct plan_build *build, const struct totals *totals, const uint64_t *weight,
                 uint64_t *limit, uint64_t *share, struct numoe_error *error)
{
    struct numoe_plan *plan = build->plan;
    uint64_t have = room_of(build);

    if (totals->bytes > granted(build->machine))
        return refuse(build, totals,
                      have < granted(build->machine) ? have : granted(build->machine), error);
    for (uint32_t i = 0; i < plan->node_count; i++)
        limit[i] = plan->nodes[i].available_bytes / plan->shape.slice_bytes;
    for (int round = 0; round < MOST_ROUNDS; round++) {
        bool over = false;

        if (!plan_split(totals->slices, plan->node_count, weight, limit, share))
            break;
        plan_accumulate(totals->slices, plan->node_count, share, plan->cumulative);
        count_bytes(plan, totals, share);
        for (uint32_t i = 0; i < plan->node_count; i++) {
            uint64_t planned = plan->nodes[i].planned_bytes;
            uint64_t room = plan->nodes[i].available_bytes, less;

            if (planned <= room)
                continue;
            over = true;
            less = (planned - room - 1) / plan->shape.slice_bytes + 1;
            limit[i] = share[i] > less ? share[i] - less : 0;
        }
        if (!over)
            return 0;
    }
    return refuse(build, totals, have, error);
}

static void note_full(struct plan_build *build, const uint64_t *limit, const uint64_t *share,
                      uint32_t *scratch)
{
    const struct numoe_plan *plan = build->plan;
    char text[160];
    size_t count = 0;

    for (uint32_t i = 0; i < plan->node_count; i++)
        if (share[i] == limit[i])
            scratch[count++] = plan->nodes[i].os_index;
    if (count && count < plan->node_count)
        plan_note(build, "node%s %s full: the others hold more than their share",
                  count > 1 ? "s" : "", topo_sorted_ranges(text, sizeof text, scratch, count));
}

int plan_place(struct plan_build *build, struct numoe_error *error)
{
    struct numoe_plan *plan = build->plan;
    uint32_t nodes = plan->node_count;
    uint64_t *weight = calloc(nodes, sizeof *weight), *limit = calloc(nodes, sizeof *limit);
    uint64_t *share = calloc(nodes, sizeof *share);
    uint32_t *scratch = calloc(nodes, sizeof *scratch);
    struct totals totals;
    int rc;

    plan->cumulative = calloc((size_t)nodes + 1, sizeof *plan->cumulative);
    if (!weight || !limit || !share || !scratch || !plan->cumulative) {
        rc = numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
        goto out;
    }
    plan->expert_step = plan_expert_step(plan->shape.experts);
    rc = count_totals(&plan->shape, &totals, error);
    if (rc)
        goto out;
    weigh(build, weight);
    if (totals.slices) {
        rc = split(build, &totals, weight, limit, share, error);
        if (!rc)
            note_full(build, limit, share, scratch);
    } else {
        for (uint32_t i = 0; i < nodes; i++)
            limit[i] = no_model_slices;
        (void)plan_split(no_model_slices, nodes, weight, limit, share);
        plan_accumulate(no_model_slices, nodes, share, plan->cumulative);
    }
    for (uint32_t i = 0; i < nodes && !rc; i++)
        plan->nodes[i].weight =
            (double)(plan->cumulative[i + 1] - plan->cumulative[i]) / (double)PLAN_SHARE_ONE;
out:
    free(weight);
    free(limit);
    free(share);
    free(scratch);
    return rc;
}
