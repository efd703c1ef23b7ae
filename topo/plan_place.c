/*
 * How many slices go to which node, in whole numbers from beginning to end.
 *
 * The experts of all layers are split among the shards by weight, as many to each as its nodes have
 * room for; a shard's slices are split among its nodes likewise. The counts become exact shares,
 * and numoe_plan_boundary spreads those over layers and experts. With one shard every
 * node holds its part of every expert.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/checked.h"
#include "plan_build.h"
#include "plan_shares.h"
#include "topo_print.h"

#include <errno.h>
#include <stdlib.h>

enum { MOST_ROUNDS = 64 };

/* Stands for the model in a plan without one: fine enough for 1024 nodes. */
static const uint64_t no_model_slices = (uint64_t)1 << 40;

int plan_resolve_range(const struct numoe_expert_shape *shape, const struct numoe_range *asked,
                       struct numoe_range *range, struct numoe_error *error)
{
    const struct {
        const char *name, *of;
        uint64_t first, end, most;
    } ends[] = {{"slices", "an expert", asked->first_slice, asked->end_slice, shape->slices},
                {"experts", "a layer", asked->first_expert, asked->end_expert, shape->experts}};

    *range = (struct numoe_range){0};
    if (!shape->layers)
        return 0;
    for (int i = 0; i < 2; i++) {
        uint64_t end = ends[i].end ? ends[i].end : ends[i].most;

        /* a shape without any is not for here to judge */
        if ((ends[i].most || end) && (ends[i].first >= end || end > ends[i].most))
            return numoe_error_set(error, -EINVAL, "range",
                                   "%s %llu to %llu (not included) are none of the %llu of %s",
                                   ends[i].name, (unsigned long long)ends[i].first,
                                   (unsigned long long)end, (unsigned long long)ends[i].most,
                                   ends[i].of);
    }
    *range =
        (struct numoe_range){.first_slice = asked->first_slice,
                             .end_slice = asked->end_slice ? asked->end_slice : shape->slices,
                             .first_expert = asked->first_expert,
                             .end_expert = asked->end_expert ? asked->end_expert : shape->experts};
    return 0;
}

int plan_count_totals(const struct numoe_expert_shape *shape, struct plan_totals *totals,
                      struct numoe_error *error)
{
    uint64_t slice_bytes, expert_bytes;

    *totals = (struct plan_totals){0};
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

/* The nodes of a shard, gathered from wherever they stand among the plan's nodes. */
struct members {
    uint32_t *node; /* plan nodes, ascending */
    uint32_t count;
    uint64_t *weight, *room, *limit, *share, *cumulative;
};

static void free_members(struct members *m)
{
    free(m->node);
    free(m->weight);
    free(m->room);
    free(m->limit);
    free(m->share);
    free(m->cumulative);
}

static int make_members(struct members *m, uint32_t nodes)
{
    m->node = calloc(nodes, sizeof *m->node);
    m->weight = calloc(nodes, sizeof *m->weight);
    m->room = calloc(nodes, sizeof *m->room);
    m->limit = calloc(nodes, sizeof *m->limit);
    m->share = calloc(nodes, sizeof *m->share);
    m->cumulative = calloc((size_t)nodes + 1, sizeof *m->cumulative);
    if (m->node && m->weight && m->room && m->limit && m->share && m->cumulative)
        return 0;
    free_members(m);
    return -ENOMEM;
}

static void gather(const struct plan_build *build, const uint32_t *shard, uint32_t which,
                   struct members *m)
{
    m->count = 0;
    for (uint32_t n = 0; n < build->plan->node_count; n++) {
        if (shard[n] != which)
            continue;
        m->node[m->count] = n;
        m->weight[m->count] = build->weight[n];
        m->room[m->count++] = build->plan->nodes[n].available_bytes;
    }
}

/* Experts of `experts` of so many slices in all whose slice 0 lies before a share of them:
 * floor(x + phi) >= 1. */
static uint64_t experts_before(uint64_t experts, uint64_t slices, uint64_t share)
{
    uint64_t before = plan_scale(slices, share);

    return share == PLAN_SHARE_ONE || before > experts ? experts : before;
}

static uint64_t bytes_between(const struct numoe_expert_shape *shape, uint64_t experts,
                              uint64_t from, uint64_t to)
{
    uint64_t slices = experts * shape->slices;

    return (plan_scale(slices, to) - plan_scale(slices, from)) * shape->slice_bytes +
           (experts_before(experts, slices, to) - experts_before(experts, slices, from)) *
               shape->expert_bytes;
}

/* Split so many experts among a shard's members by weight; then, as bytes besides slices fall on
 * whoever holds slice 0, lower the limit of one that overflows and split again. */
static bool split_by_weight(struct members *m, const struct numoe_expert_shape *shape,
                            uint64_t experts)
{
    for (int round = 0; round < MOST_ROUNDS; round++) {
        bool over = false;

        if (!plan_split(experts * shape->slices, m->count, m->weight, m->limit, m->share))
            return false;
        plan_accumulate(experts * shape->slices, m->count, m->share, m->cumulative);
        for (uint32_t i = 0; i < m->count; i++) {
            uint64_t planned =
                bytes_between(shape, experts, m->cumulative[i], m->cumulative[i + 1]);
            uint64_t less;

            if (planned <= m->room[i])
                continue;
            over = true;
            less = (planned - m->room[i] - 1) / shape->slice_bytes + 1;
            m->limit[i] = m->share[i] > less ? m->share[i] - less : 0;
        }
        if (!over)
            return true;
    }
    return false;
}

static bool split(struct members *m, const struct numoe_expert_shape *shape, uint64_t experts)
{
    for (uint32_t i = 0; i < m->count; i++) {
        m->limit[i] = m->room[i] / shape->slice_bytes;
        m->share[i] = m->cumulative[i] = 0;
    }
    if (!experts || split_by_weight(m, shape, experts))
        return true;
    /* limits that were lowered can miss by a little what fits to the last slice */
    if (!shape->expert_bytes || !plan_fill(experts, shape, m->count, m->room, m->share))
        return false;
    plan_accumulate(experts * shape->slices, m->count, m->share, m->cumulative);
    return true;
}

/* The most whole experts that a shard has room for, up to `most`. */
static uint64_t room_for_experts(struct members *m, const struct numoe_expert_shape *shape,
                                 uint64_t most)
{
    uint64_t slices = 0, low = 0, high;

    for (uint32_t i = 0; i < m->count; i++)
        slices += m->room[i] / shape->slice_bytes;
    high = slices / shape->slices;
    high = high < most ? high : most;
    if (split(m, shape, high))
        return high;
    while (low + 1 < high) {
        uint64_t middle = low + (high - low) / 2;

        if (split(m, shape, middle))
            low = middle;
        else
            high = middle;
    }
    return low;
}

void plan_bound_shard(struct numoe_plan *plan, uint32_t shard)
{
    struct numoe_plan_shard *of = &plan->shards[shard];

    of->first_node = of->end_node = 0;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        if (plan->nodes[n].shard != shard)
            continue;
        of->first_node = of->end_node ? of->first_node : n;
        of->end_node = n + 1;
    }
}

/* The share of a shard's nodes up to and with this one. */
static uint64_t share_to(const struct numoe_plan *plan, uint32_t plan_node)
{
    uint32_t shard = plan->nodes[plan_node].shard;

    for (uint32_t n = plan_node + 1; n < plan->shards[shard].end_node; n++)
        if (plan->nodes[n].shard == shard)
            return plan->cumulative[n];
    return PLAN_SHARE_ONE;
}

void plan_count_node(struct numoe_plan *plan, const struct plan_totals *totals, uint32_t plan_node)
{
    const struct numoe_expert_shape held = numoe_plan_held(plan);
    struct numoe_plan_node *node = &plan->nodes[plan_node];
    uint64_t experts = plan->shards[node->shard].places, slices = experts * held.slices;
    uint64_t from = plan->cumulative[plan_node], to = share_to(plan, plan_node);

    node->slice_count = plan_scale(slices, to) - plan_scale(slices, from);
    node->planned_bytes = bytes_between(&held, experts, from, to);
    node->weight = totals->slices ? (double)node->slice_count / (double)totals->slices
                                  : (double)(to - from) / (double)PLAN_SHARE_ONE;
}

static void keep(struct plan_build *build, const struct plan_totals *totals, uint32_t which,
                 uint64_t first, uint64_t experts, const struct members *m)
{
    struct numoe_plan *plan = build->plan;

    plan->shards[which].first_place = first;
    plan->shards[which].places = experts;
    for (uint32_t i = 0; i < m->count; i++) {
        plan->cumulative[m->node[i]] = m->cumulative[i];
        build->full[m->node[i]] = m->share[i] == m->limit[i];
    }
    plan_bound_shard(plan, which);
    for (uint32_t i = 0; i < m->count; i++)
        plan_count_node(plan, totals, m->node[i]);
}

/* How many experts each shard gets: by weight, within its room. */
static bool share_experts(const struct plan_build *build, const struct plan_totals *totals,
                          const uint32_t *shard, uint32_t shards, struct members *m,
                          struct members *of, uint64_t *room)
{
    const struct numoe_expert_shape held = numoe_plan_held(build->plan);

    *room = 0;
    of->count = shards;
    for (uint32_t g = 0; g < shards; g++) {
        gather(build, shard, g, m);
        of->weight[g] = 0;
        for (uint32_t i = 0; i < m->count; i++)
            of->weight[g] += m->weight[i];
        of->limit[g] = shards == 1 ? totals->pairs : room_for_experts(m, &held, totals->pairs);
        *room += of->limit[g];
    }
    return plan_split(totals->pairs, shards, of->weight, of->limit, of->share);
}

int plan_place_shards(struct plan_build *build, const struct plan_totals *totals,
                      const uint32_t *shard, uint32_t shards, uint64_t *room)
{
    struct numoe_plan *plan = build->plan;
    const struct numoe_expert_shape held = numoe_plan_held(plan);
    struct members m = {0}, of = {0};
    uint64_t first = 0;
    int rc = -ENOMEM;

    free(plan->shards);
    plan->shard_count = 0;
    plan->shards = calloc(shards, sizeof *plan->shards);
    if (!plan->shards || make_members(&m, plan->node_count))
        return -ENOMEM;
    if (make_members(&of, shards))
        goto out;
    for (uint32_t n = 0; n < plan->node_count; n++)
        plan->nodes[n].shard = shard[n];
    rc = -ENOSPC;
    if (!share_experts(build, totals, shard, shards, &m, &of, room))
        goto out;
    for (uint32_t g = 0; g < shards; g++) {
        gather(build, shard, g, &m);
        if (!split(&m, &held, of.share[g]))
            goto out;
        keep(build, totals, g, first, of.share[g], &m);
        /* a shard that is full is so as a whole, though its nodes may have room for part of one
         * expert more */
        for (uint32_t i = 0; i < m.count && shards > 1; i++)
            build->full[m.node[i]] |= of.share[g] == of.limit[g];
        first += of.share[g];
    }
    plan->cumulative[plan->node_count] = PLAN_SHARE_ONE;
    plan->shard_count = shards;
    rc = 0;
out:
    free_members(&m);
    free_members(&of);
    return rc;
}

int plan_place_nothing(struct plan_build *build)
{
    const struct plan_totals none = {0};
    struct numoe_plan *plan = build->plan;
    uint64_t *limit = calloc(plan->node_count, sizeof *limit);
    uint64_t *share = calloc(plan->node_count, sizeof *share);

    plan->shards = calloc(1, sizeof *plan->shards);
    if (limit && share && plan->shards) {
        for (uint32_t i = 0; i < plan->node_count; i++)
            limit[i] = no_model_slices;
        (void)plan_split(no_model_slices, plan->node_count, build->weight, limit, share);
        plan_accumulate(no_model_slices, plan->node_count, share, plan->cumulative);
        plan->shard_count = 1;
        plan_bound_shard(plan, 0);
        for (uint32_t i = 0; i < plan->node_count; i++)
            plan_count_node(plan, &none, i);
    }
    free(limit);
    free(share);
    return plan->shard_count ? 0 : -ENOMEM;
}

void plan_note_full(struct plan_build *build, uint32_t *scratch)
{
    const struct numoe_plan *plan = build->plan;
    char text[160];
    size_t count = 0;

    for (uint32_t i = 0; i < plan->node_count; i++)
        if (build->full[i])
            scratch[count++] = plan->nodes[i].os_index;
    if (count && count < plan->node_count)
        plan_note(build, "node%s %s full: the others hold more than their share",
                  count > 1 ? "s" : "", topo_sorted_ranges(text, sizeof text, scratch, count));
}
