/*
 * Where an expert is cut.
 *
 * With phi = (perm(expert) + layer / layers) / experts, the sum of floor(x + phi) over the experts
 * of a layer is floor(experts * x + layer / layers), and over all layers floor(layers * experts *
 * x) (Hermite's identity). So a node's slices in each layer, and over all, are within one of its
 * share, whatever the share is.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_topo.h"
#include "plan_shares.h"

uint64_t numoe_plan_boundary(const struct numoe_plan *plan, uint64_t layer, uint64_t expert,
                             uint32_t plan_node)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    uint64_t pairs = shape->layers * shape->experts, place;
    plan_u128 exact, part;

    if (plan_node == 0 || !pairs)
        return 0;
    if (plan_node >= plan->node_count)
        return shape->slices;
    /* numerator of phi over pairs */
    place =
        (uint64_t)((plan_u128)expert * plan->expert_step % shape->experts) * shape->layers + layer;
    exact = (plan_u128)shape->slices * plan->cumulative[plan_node];
    part = exact & (PLAN_SHARE_ONE - 1);
    return (uint64_t)(exact >> PLAN_SHARE_BITS) +
           (part * pairs + ((plan_u128)place << PLAN_SHARE_BITS) >= (plan_u128)pairs
                                                                        << PLAN_SHARE_BITS);
}

uint64_t numoe_plan_row_bytes(uint32_t node_count)
{
    const uint64_t mib = (uint64_t)1 << 20, by_nodes = 256 * mib * node_count;

    return by_nodes > 512 * mib ? by_nodes : 512 * mib;
}
