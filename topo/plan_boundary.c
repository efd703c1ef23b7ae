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
    const struct numoe_expert_shape *shape = &plan->shape;
    const struct numoe_plan_shard *shard;
    uint64_t place;
    plan_u128 exact, part;
    uint32_t which;

    if (plan_node == 0 || !shape->layers)
        return 0;
    if (plan_node >= plan->node_count)
        return shape->slices;
    place = (uint64_t)((plan_u128)(expert + layer) * plan->expert_step % shape->experts) *
                shape->layers +
            layer;
    which = shard_of(plan, place);
    shard = &plan->shards[which];
    if (plan_node <= shard->first_node)
        return 0;
    while (plan_node < shard->end_node && plan->nodes[plan_node].shard != which)
        plan_node++;
    if (plan_node >= shard->end_node)
        return shape->slices;
    exact = (plan_u128)shape->slices * plan->cumulative[plan_node];
    part = exact & (PLAN_SHARE_ONE - 1);
    /* phi is (place - first) / places */
    return (uint64_t)(exact >> PLAN_SHARE_BITS) +
           (part * shard->places + ((plan_u128)(place - shard->first_place) << PLAN_SHARE_BITS) >=
            (plan_u128)shard->places << PLAN_SHARE_BITS);
}

uint64_t numoe_plan_row_bytes(uint32_t node_count)
{
    const uint64_t mib = (uint64_t)1 << 20, by_nodes = 256 * mib * node_count;

    return by_nodes > 512 * mib ? by_nodes : 512 * mib;
}
