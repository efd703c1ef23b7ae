/*
 * The layout whose sums do not depend on the batch (numoe_options.batch_invariant).
 *
 * What an expert gives a token is cut by the plan alone: on each node its slices are cut into
 * units of equal length, of which one token's experts would give the node's group its lanes. A
 * token's output is then a sum of parts in a fixed order, a part for each
 *
 *     group of nodes that share channels, and in it each expert, by index:
 *         its units there from first to last, each summed from zero over its slices in order
 *
 * and that order does not say who computes a unit, with how many tokens, or where rows are:
 *
 *     few tokens    a row for each unit; consecutive units of an expert make a lane
 *     many tokens   a lane for each block of tokens; it adds unit after unit to one row, as they
 *                   would be added later. A block that is more than a share of the work is cut
 *                   between units: what does not begin with the first unit keeps a row for each
 *
 * Forms are chosen by an expert's tokens where both give the same bits, which is so with integer
 * activations; else all is computed as many, and experts that only few computes one token at a
 * time.
 *
 * Lanes are dealt out last, the longest first.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule_build.h"

#include <string.h>

enum {
    UNIT_SLICES_LEAST = 4, /* many tokens: fewer slices before down cost time */
    COST_CLASSES = 64 * 4  /* by the highest bit of a cost and the two after it */
};

struct lane_cost {
    uint64_t cost;
    uint32_t group;
};
_Static_assert(sizeof(struct lane_cost) == SCHEDULE_LANE_COST_BYTES, "what is reserved");

/* Slices of a unit of an expert that has so many on the group. */
static uint64_t unit_slices(const struct numoe_model *model, const struct group *group,
                            uint64_t slices)
{
    const uint64_t k = model->desc.experts_per_token ? model->desc.experts_per_token : 1;
    const uint64_t lanes = schedule_few_lanes(group, k * slices);
    const uint64_t unit = lanes ? (k * slices + lanes / 2) / lanes : slices;

    return unit > UNIT_SLICES_LEAST ? unit : UNIT_SLICES_LEAST;
}

static uint64_t units_of(uint64_t slices, uint64_t unit)
{
    const uint64_t units = (slices + unit / 2) / unit;

    return slices && !units ? 1 : units;
}

/* Note what the last lane costs. */
static int end_lane(struct build *b, uint32_t group, uint64_t cost)
{
    struct numoe_schedule *s = b->s;
    struct lane_cost *costs;
    int rc = schedule_grow(s, MEMORY_LANE_COST, s->lane_count * sizeof *costs);

    if (rc)
        return rc;
    costs = s->memory[MEMORY_LANE_COST].data;
    costs[s->lane_count - 1] = (struct lane_cost){cost, group};
    return 0;
}

/* Where hit h's units are, in order. */
struct walk {
    const struct group *group;
    uint64_t unit;       /* slices */
    uint32_t node, next; /* place in the group, unit there */
};

/* Push the next unit for tokens [token, token + tokens). *slices: how many it has. */
static int push_unit(struct build *b, uint32_t h, struct walk *walk, uint32_t token,
                     uint32_t tokens, uint64_t *slices)
{
    const struct model_part *part = part_of(b, h, walk->group->nodes[walk->node]);
    uint64_t units, first, end;

    while (walk->next == units_of(part->count, walk->unit)) {
        walk->next = 0;
        part = part_of(b, h, walk->group->nodes[++walk->node]);
    }
    units = units_of(part->count, walk->unit);
    first = part->count * walk->next / units;
    end = part->count * (walk->next + 1) / units;
    walk->next++;
    *slices = end - first;
    return schedule_push_run(b, h, walk->group->nodes[walk->node], first, end - first, token,
                             tokens);
}

static int lay_few(struct build *b, uint32_t g, uint32_t h, struct walk walk, uint64_t units,
                   uint64_t lane_slices)
{
    const uint32_t tokens = b->hits[h].tokens;

    for (uint64_t u = 0; u < units;) {
        uint64_t all = 0;
        int rc = schedule_push_lane(b);

        while (!rc && u < units && all < lane_slices) {
            uint64_t slices = 0;

            b->row_set++;
            b->ends = ++u == units;
            rc = push_unit(b, h, &walk, 0, tokens, &slices);
            all += slices;
        }
        if (!rc)
            rc = end_lane(b, g, all * numoe_plan_slice_cost(tokens));
        if (rc)
            return rc;
    }
    return 0;
}

/* Units [from, to) of all for a block of tokens, in the lane that is open. */
static int lay_range(struct build *b, uint32_t h, struct walk *walk, uint64_t from, uint64_t to,
                     uint64_t all, uint32_t token, uint32_t tokens, uint64_t *cost)
{
    int rc = 0;

    b->row_set++;
    b->ends = to == all;
    for (uint64_t u = from; !rc && u < to; u++) {
        uint64_t slices = 0;

        if (from) {
            b->row_set++;
            b->ends = u + 1 == all;
        }
        rc = push_unit(b, h, walk, token, tokens, &slices);
        *cost += slices * numoe_plan_slice_cost(tokens);
    }
    return rc;
}

/* Blocks end to end, cut between units. before: cost of the hits before this one, of total. */
static int lay_many(struct build *b, uint32_t g, uint32_t h, struct walk begin, uint64_t units,
                    uint64_t before, uint64_t total)
{
    const uint32_t tokens = b->hits[h].tokens;
    struct walk walk = begin;
    struct numoe_plan_cut cut;
    uint64_t whole = 0, lanes, at = 0; /* blocks that are lanes; lanes for the others */

    if (schedule_cut_evenly(b, begin.group, h, total, (b->slice_count[h] + units - 1) / units,
                            &cut)) {
        const uint64_t own = schedule_hit_cost(b, h);
        const uint64_t experts = (total + own / 2) / own;

        /* each hit's part of both, so that all have so many lanes whatever the rounding */
        whole = cut.whole / experts;
        lanes = (cut.lanes * (before + own) + total / 2) / total -
                (cut.lanes * before + total / 2) / total;
    } else {
        cut = schedule_cut(b, begin.group, h, total, units);
        lanes = cut.lanes;
    }
    if (lanes > (cut.blocks - whole) * units)
        lanes = (cut.blocks - whole) * units;
    if (lanes == 0)
        lanes = 1;
    for (uint64_t i = 1; i <= whole + lanes; i++) {
        const uint64_t end =
            i <= whole ? i * units
                       : (whole * lanes + (cut.blocks - whole) * (i - whole)) * units / lanes;
        uint64_t cost = 0;
        int rc = schedule_push_lane(b);

        while (!rc && at < end) {
            const uint32_t block = (uint32_t)(at / units);
            const uint64_t first = block * units;
            const uint64_t to = end - first < units ? end - first : units;
            const uint32_t token = block ? schedule_block_end(tokens, cut.blocks, block - 1) : 0;

            if (at == first)
                walk = begin;
            rc = lay_range(b, h, &walk, at - first, to, units, token,
                           schedule_block_end(tokens, cut.blocks, block) - token, &cost);
            at = first + to;
        }
        if (!rc)
            rc = end_lane(b, g, cost);
        if (rc)
            return rc;
    }
    return 0;
}

static int lay_group(struct build *b, uint32_t g, const struct group *group)
{
    uint64_t total = 0, few = 0, before = 0, lanes;

    for (uint32_t h = 0; h < b->hit_count; h++) {
        b->slice_count[h] = 0;
        for (uint32_t i = 0; i < group->node_count; i++)
            b->slice_count[h] += part_of(b, h, group->nodes[i])->count;
        total += schedule_hit_cost(b, h);
        few += b->hits[h].many ? 0 : b->slice_count[h];
    }
    lanes = schedule_few_lanes(group, few);
    for (uint32_t h = 0; h < b->hit_count; h++) {
        const struct walk walk = {.group = group,
                                  .unit = unit_slices(b->s->model, group, b->slice_count[h])};
        uint64_t units = 0;
        int rc;

        for (uint32_t i = 0; i < group->node_count; i++)
            units += units_of(part_of(b, h, group->nodes[i])->count, walk.unit);
        if (units == 0)
            continue;
        rc = b->hits[h].many ? lay_many(b, g, h, walk, units, before, total)
                             : lay_few(b, g, h, walk, units, lanes ? (few + lanes - 1) / lanes : 1);
        if (rc)
            return rc;
        before += schedule_hit_cost(b, h);
    }
    return 0;
}

static unsigned cost_class(uint64_t cost)
{
    const unsigned top = 63 - (unsigned)__builtin_clzll(cost | 4);

    return top * 4 + (unsigned)(cost >> (top - 2) & 3);
}

/* Lanes by falling cost, near enough, and each to the least loaded worker of its group. */
static int deal(struct build *b)
{
    struct numoe_schedule *s = b->s;
    const struct numoe_model *model = s->model;
    const struct model_groups *groups = &model->groups[NUMOE_REACH_DOMAIN];
    const struct lane_cost *costs = s->memory[MEMORY_LANE_COST].data;
    uint32_t first[COST_CLASSES] = {0}, *order;
    struct schedule_lane *sorted;
    int rc = schedule_renew(s, MEMORY_LANE_SORTED, s->lane_count * sizeof *sorted);

    if (!rc)
        rc = schedule_renew(s, MEMORY_LANE_ORDER, s->lane_count * sizeof *order);
    if (rc)
        return rc;
    sorted = s->memory[MEMORY_LANE_SORTED].data;
    order = s->memory[MEMORY_LANE_ORDER].data;
    for (uint32_t i = 0; i < s->lane_count; i++)
        first[cost_class(costs[i].cost)]++;
    for (uint32_t c = COST_CLASSES, before = 0; c-- > 0;) {
        const uint32_t count = first[c];

        first[c] = before;
        before += count;
    }
    for (uint32_t i = 0; i < s->lane_count; i++)
        order[first[cost_class(costs[i].cost)]++] = i;
    for (uint32_t i = 0; !rc && i < s->lane_count; i++) {
        const struct lane_cost *cost = &costs[order[i]];
        const struct group group = schedule_group(groups, model->plan, cost->group);

        sorted[i] = s->lanes[order[i]];
        rc = schedule_give_lane(b, &group, i, cost->cost);
    }
    if (!rc && s->lane_count)
        memcpy(s->lanes, sorted, s->lane_count * sizeof *sorted);
    return rc;
}

int schedule_lay_fixed(struct build *b)
{
    const struct numoe_model *model = b->s->model;
    const struct model_groups *groups = &model->groups[NUMOE_REACH_DOMAIN];

    for (uint32_t g = 0; g < groups->count; g++) {
        const struct group group = schedule_group(groups, model->plan, g);
        int rc = lay_group(b, g, &group);

        if (rc)
            return rc;
    }
    return deal(b);
}

void schedule_count_units(const struct numoe_model *model, uint64_t *all, uint64_t *most)
{
    const struct model_groups *groups = &model->groups[NUMOE_REACH_DOMAIN];
    const uint64_t experts = model->desc.layers * model->desc.experts;

    *all = *most = 0;
    for (uint64_t q = 0; q < experts; q++) {
        uint64_t of_expert = 0;

        for (uint32_t g = 0; g < groups->count; g++) {
            const struct group group = schedule_group(groups, model->plan, g);
            uint64_t slices = 0, units = 0, unit;

            for (uint32_t i = 0; i < group.node_count; i++)
                slices += model->nodes[group.nodes[i]].start[q + 1] -
                          model->nodes[group.nodes[i]].start[q];
            unit = unit_slices(model, &group, slices);
            for (uint32_t i = 0; i < group.node_count; i++)
                units += units_of(model->nodes[group.nodes[i]].start[q + 1] -
                                      model->nodes[group.nodes[i]].start[q],
                                  unit);
            of_expert += units;
            *most = units > *most ? units : *most;
        }
        *all = of_expert > *all ? of_expert : *all;
    }
}
