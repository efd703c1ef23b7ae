/*
 * Where an expert is cut.
 *
 * A shard has the places [first, first + m); of one layer these are every layers-th, so within one
 * of m / layers. With phi = r / m for its r-th place, the sum of floor(x + phi) over all of them is
 * floor(m * x) (Hermite's identity): a node's slices over all layers are its share exactly. Those
 * of one layer are as evenly apart: with one shard, phi = (perm(expert) + layer /
 * layers) / experts, and the sum over the experts of a layer is floor(experts * x + layer /
 * layers), within one of the share, whatever that is.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_topo.h"
#include "plan_shares.h"

/* The shard that has a place. Shards without places are passed over. */
static uint32_t shard_of(const struct numoe_plan *plan, uint64_t place)
{
    uint32_t low = 0, high = plan->shard_count;

    while (low + 1 < high) {
        uint32_t middle = low + (high - low) / 2;

        if (plan->shards[middle].first_place <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

uint64_t numoe_plan_boundary(const struct numoe_plan *plan, uint64_t layer, uint64_t expert,
                             uint32_t plan_node)
{
    const struct numoe_range *range = &plan->range;
    const uint64_t layers = plan->shape.layers, experts = range->end_expert - range->first_expert;
    const uint64_t slices = range->end_slice - range->first_slice;
    const struct numoe_plan_shard *shard;
    uint64_t place;
    plan_u128 exact, part;
    uint32_t which;

    if (plan_node == 0 || !layers || expert < range->first_expert || expert >= range->end_expert)
        return range->first_slice;
    if (plan_node >= plan->node_count)
        return range->end_slice;
    place = (uint64_t)((plan_u128)(expert - range->first_expert + layer) * plan->expert_step %
                       experts) *
                layers +
            layer;
    which = shard_of(plan, place);
    shard = &plan->shards[which];
    if (plan_node <= shard->first_node)
        return range->first_slice;
    while (plan_node < shard->end_node && plan->nodes[plan_node].shard != which)
        plan_node++;
    if (plan_node >= shard->end_node)
        return range->end_slice;
    exact = (plan_u128)slices * plan->cumulative[plan_node];
    part = exact & (PLAN_SHARE_ONE - 1);
    /* phi is (place - first) / places */
    return range->first_slice + (uint64_t)(exact >> PLAN_SHARE_BITS) +
           (part * shard->places + ((plan_u128)(place - shard->first_place) << PLAN_SHARE_BITS) >=
            (plan_u128)shard->places << PLAN_SHARE_BITS);
}

struct numoe_expert_shape numoe_plan_held(const struct numoe_plan *plan)
{
    struct numoe_expert_shape held = plan->shape;

    held.experts = plan->range.end_expert - plan->range.first_expert;
    held.slices = plan->range.end_slice - plan->range.first_slice;
    if (plan->range.first_slice)
        held.expert_bytes = 0;
    return held;
}

uint64_t numoe_plan_row_bytes(uint32_t node_count)
{
    const uint64_t mib = (uint64_t)1 << 20, by_nodes = 256 * mib * node_count;

    return by_nodes > 512 * mib ? by_nodes : 512 * mib;
}
