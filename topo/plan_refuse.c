/*
 * Why experts do not fit, and what would make them.
 *
 * Whatever is suggested is tried first: fewer layers and less memory kept free by placing the model
 * so, more nodes by counting the slices that they have room for.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "topo_print.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>

enum { MIB_SHIFT = 20 };
/* More than is lost where GiB are printed with two digits. */
static const uint64_t rounding = 6 << MIB_SHIFT;

struct refusal {
    struct plan_build *build;
    const struct plan_grouping *forms; /* that will do */
    uint32_t form_count;
    uint64_t need;     /* bytes */
    uint32_t *scratch; /* for as many numbers as there are nodes */
    char help[256];
    size_t length, helps;
};

/* One more thing that would do. */
static void suggest(struct refusal *r, const char *format, ...) NUMOE_PRINTF(2, 3);

static void suggest(struct refusal *r, const char *format, ...)
{
    char text[128];
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (length < 0 || r->length + (size_t)length + 6 >= sizeof r->help)
        return;
    r->length += (size_t)snprintf(r->help + r->length, sizeof r->help - r->length, "%s%s",
                                  r->helps ? ", or " : "", text);
    r->helps++;
}

/* Whether so many layers fit with so much kept free of each node; 0: as the plan is. */
static bool fits(struct refusal *r, uint64_t layers, uint64_t keep)
{
    struct numoe_plan *plan = r->build->plan;
    struct numoe_expert_shape held;
    struct plan_totals totals;
    uint64_t room, was = plan->shape.layers;
    bool yes;

    for (uint32_t i = 0; keep && i < plan->node_count; i++) {
        uint64_t have = plan_node_memory(r->build->machine, plan->nodes[i].node);

        plan->nodes[i].available_bytes = have > keep ? have - keep : 0;
    }
    plan->shape.layers = layers;
    held = numoe_plan_held(plan);
    yes = false;
    if (!plan_count_totals(&held, &totals, NULL) && totals.bytes <= plan_granted(r->build->machine))
        for (uint32_t i = 0; i < r->form_count && !yes; i++)
            yes =
                !plan_place_shards(r->build, &totals, r->forms[i].group, r->forms[i].groups, &room);
    plan->shape.layers = was;
    return yes;
}

static void try_layers(struct refusal *r)
{
    uint64_t all = r->build->plan->shape.layers, low = 0, high = all;

    while (low + 1 < high) {
        uint64_t middle = low + (high - low) / 2;

        if (fits(r, middle, 0))
            low = middle;
        else
            high = middle;
    }
    if (low)
        suggest(r, "with %llu of the %llu layers", (unsigned long long)low,
                (unsigned long long)all);
}

/* In whole MiB. Changes what is available: last. */
static void try_keeping_less(struct refusal *r)
{
    uint64_t layers = r->build->plan->shape.layers, low = 0, high = 0;

    for (uint32_t i = 0; i < r->build->plan->node_count; i++) {
        uint64_t kept = plan_kept_free(r->build->machine, r->build->request->keep_free_bytes,
                                       r->build->plan->nodes[i].capacity_bytes) >>
                        MIB_SHIFT;

        high = kept > high ? kept : high;
    }
    while (low + 1 < high) {
        uint64_t middle = low + (high - low) / 2;

        if (fits(r, layers, middle << MIB_SHIFT))
            low = middle;
        else
            high = middle;
    }
    if (low)
        suggest(r, "with at most %llu MiB of each node kept free", (unsigned long long)low);
}

/* Nodes that are not used: those that may be, or those that may not. */
static void try_nodes(struct refusal *r, bool allowed)
{
    const struct numoe_machine *machine = r->build->machine;
    const struct numoe_plan *plan = r->build->plan;
    const uint64_t slice = plan->shape.slice_bytes, besides = plan->shape.expert_bytes;
    bool part = plan->range.first_slice || plan->range.first_expert ||
                plan->range.end_slice != plan->shape.slices ||
                plan->range.end_expert != plan->shape.experts;
    uint64_t slices = 0, more = 0, nodes = plan->node_count;
    char unused[96], extra[32];
    uint32_t count = 0;

    for (uint32_t i = 0; i < plan->node_count; i++)
        slices += plan->nodes[i].available_bytes / slice;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];
        uint64_t have = plan_node_memory(machine, i);
        uint64_t keep =
            plan_kept_free(machine, r->build->request->keep_free_bytes, node->capacity_bytes);

        if (r->build->place_of[i] != NUMOE_NONE || node->allowed != allowed ||
            node->kind == NUMOE_NODE_GPU || have <= keep)
            continue;
        r->scratch[count++] = node->os_index;
        more += have - keep;
        slices += (have - keep) / slice;
        nodes++;
    }
    /* what lies besides slices may cost each node's last slices */
    if (!count || r->need > plan_granted(machine) || r->forms[0].groups > 1 ||
        slices < r->need / slice + nodes * (2 + besides / slice))
        return;
    suggest(r, "with node%s %s too, which %s %s%s", count > 1 ? "s" : "",
            topo_sorted_ranges(unused, sizeof unused, r->scratch, count),
            allowed ? "would add" : "this process may not use and which would add",
            topo_bytes(extra, more), part ? ", where no other rank needs them" : "");
}

/* As much more on each node as is missing of all. */
static void try_memory(struct refusal *r, uint64_t lacking)
{
    const struct numoe_plan *plan = r->build->plan;
    uint64_t each = lacking / plan->node_count + plan->shape.slice_bytes + plan->shape.expert_bytes;
    char text[32];

    each += rounding;
    /* a node that keeps free all that it has would keep free what is added */
    for (uint32_t i = 0; i < plan->node_count; i++)
        if (!plan->nodes[i].available_bytes)
            return;
    if (r->need > plan_granted(r->build->machine) || r->forms[0].groups > 1)
        return;
    suggest(r, "with %s more %s%s", topo_bytes(text, each),
            r->build->machine->live ? "free" : "memory",
            plan->node_count > 1 ? " on each of these nodes" : "");
}

static void collect(struct refusal *r, uint64_t have, uint64_t lacking)
{
    const struct numoe_machine *machine = r->build->machine;
    char extra[32];

    if (r->need > plan_granted(machine)) {
        r->length =
            (size_t)snprintf(r->help, sizeof r->help, "the memory limit of the cgroup grants %s",
                             topo_bytes(extra, machine->cgroup_bytes));
        r->length +=
            (size_t)snprintf(r->help + r->length, sizeof r->help - r->length, "; it would fit ");
        if (have >= r->need)
            suggest(r, "with that raised to %s", topo_bytes(extra, r->need + rounding));
    } else if (!have && !machine->live && !r->build->plan->nodes[0].capacity_bytes) {
        snprintf(r->help, sizeof r->help, "the memory size of that node is not known");
        return;
    } else {
        r->length = (size_t)snprintf(r->help, sizeof r->help, "it would fit ");
    }
    try_nodes(r, true);
    try_nodes(r, false);
    try_memory(r, lacking);
    try_layers(r);
    try_keeping_less(r);
    if (!r->helps)
        snprintf(r->help, sizeof r->help, "more memory is needed");
}

int plan_refuse(struct plan_build *build, const struct plan_totals *totals,
                const struct plan_grouping *forms, uint32_t form_count, struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;
    const struct numoe_plan *plan = build->plan;
    uint32_t *scratch = calloc(machine->node_count, sizeof *scratch);
    struct refusal r = {.build = build,
                        .forms = forms,
                        .form_count = form_count,
                        .need = totals->bytes,
                        .scratch = scratch};
    uint64_t room = 0, have, lacking;
    char used[96], need[32], available[32], lack[32], where[112];

    if (!scratch)
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    for (uint32_t i = 0; i < plan->node_count; i++) {
        scratch[i] = plan->nodes[i].os_index;
        room += plan->nodes[i].available_bytes;
    }
    topo_sorted_ranges(used, sizeof used, scratch, plan->node_count);
    /* the limit only counts where it is what experts do not fit in */
    have = totals->bytes > plan_granted(machine) && plan_granted(machine) < room
               ? plan_granted(machine)
               : room;
    /* room is lost where a node ends in part of a slice: never report a shortage of nothing */
    lacking = totals->bytes > have ? totals->bytes - have : plan->shape.slice_bytes;
    collect(&r, room, lacking);
    snprintf(where, sizeof where, "node%s %s", plan->node_count > 1 ? "s" : "", used);
    free(scratch);
    return numoe_error_set(error, -ENOSPC, where,
                           "the experts do not fit: %s (%.1f GB) needed, %s available on node%s "
                           "%s: short by %s (%.1f GB); %s",
                           topo_bytes(need, totals->bytes), (double)totals->bytes / 1e9,
                           topo_bytes(available, have), plan->node_count > 1 ? "s" : "", used,
                           topo_bytes(lack, lacking), (double)lacking / 1e9, r.help);
}
