/*
 * How widely memory nodes work together.
 *
 * Nodes of a group share the work on their slices, and a token of an expert gets one row of partial
 * output for the whole group. Wider groups write fewer rows and read more weights from afar. For
 * `pairs` (token, expert) pairs on weights that are read `reads` times the costs, in bytes:
 *
 *     rows     pairs * groups that hold the expert * row, written and read once, at half of what
 * reads reach: 4 times weights  bytes of the hit experts * reads * mean over a group's (worker,
 * node) pairs of distance / 10 - 1, what reading there takes longer than at home
 *
 * Nodes that share channels are as near as the node itself, so a domain never pays for weights.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_topo.h"
#include "plan_shares.h"

static uint32_t group_key(const struct numoe_plan *plan, enum numoe_reach reach, uint32_t n)
{
    switch (reach) {
    case NUMOE_REACH_DOMAIN:
        return plan->nodes[n].domain;
    case NUMOE_REACH_PACKAGE:
        return plan->nodes[n].package;
    default:
        return 0;
    }
}

/* Groups that hold an expert of a shard. */
static uint32_t groups_of(const struct numoe_plan *plan, enum numoe_reach reach, uint32_t shard)
{
    uint32_t count = 0;

    for (uint32_t n = 0; n < plan->node_count; n++) {
        bool first = plan->nodes[n].shard == shard && plan->nodes[n].weight > 0;

        for (uint32_t m = 0; m < n && first; m++)
            first = plan->nodes[m].shard != shard || !(plan->nodes[m].weight > 0) ||
                    group_key(plan, reach, m) != group_key(plan, reach, n);
        count += first;
    }
    return count;
}

void numoe_plan_reaches(const struct numoe_plan *plan, struct numoe_plan_reach reach[NUMOE_REACHES])
{
    const struct numoe_expert_shape held = numoe_plan_held(plan);

    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES; r++) {
        struct numoe_plan_reach *to = &reach[r];

        *to = (struct numoe_plan_reach){0};
        for (uint32_t a = 0; a < plan->node_count; a++) {
            bool first = true;

            for (uint32_t b = 0; b < plan->node_count; b++) {
                const uint64_t workers = plan->nodes[a].worker_count;
                const uint32_t distance = plan->distances[(size_t)a * plan->node_count + b];

                if (group_key(plan, r, a) != group_key(plan, r, b))
                    continue;
                first &= b >= a;
                to->pairs += workers;
                if (plan->nodes[a].domain != plan->nodes[b].domain && distance > 10)
                    to->far_tenths += workers * (distance - 10);
            }
            to->groups += first;
        }
        to->rows = 1;
        for (uint32_t s = 0; s < plan->shard_count; s++) {
            const uint32_t groups = groups_of(plan, r, s);

            to->rows = groups > to->rows ? groups : to->rows;
        }
        if (held.slices && held.slices < to->rows)
            to->rows = (uint32_t)held.slices;
    }
}

void numoe_plan_groups(const struct numoe_plan *plan, enum numoe_reach reach, uint32_t *group)
{
    uint32_t count = 0;

    for (uint32_t n = 0; n < plan->node_count; n++) {
        uint32_t same = 0;

        while (same < n && group_key(plan, reach, same) != group_key(plan, reach, n))
            same++;
        group[n] = same < n ? group[same] : count++;
    }
}

enum numoe_reach numoe_plan_best_reach(const struct numoe_plan *plan,
                                       const struct numoe_plan_reach reach[NUMOE_REACHES],
                                       uint64_t pairs, uint64_t experts, uint64_t reads)
{
    const uint64_t row = plan->shape.hidden * sizeof(float);
    const struct numoe_expert_shape held = numoe_plan_held(plan);
    const plan_u128 weights = (plan_u128)(experts * reads) * (held.slices * held.slice_bytes);
    enum numoe_reach best = NUMOE_REACH_DOMAIN;
    plan_u128 least = 0;

    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES; r++) {
        plan_u128 cost = (plan_u128)pairs * (4 * row) * reach[r].rows;

        if (reach[r].pairs)
            cost += weights / (10 * reach[r].pairs) * reach[r].far_tenths;
        if (r == NUMOE_REACH_DOMAIN || cost < least) {
            least = cost;
            best = r;
        }
    }
    return best;
}
