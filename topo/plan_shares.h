/*
 * plan_shares.h - how many slices each node gets, in whole numbers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLAN_SHARES_H
#define PLAN_SHARES_H

#include "numoe_topo.h"

#include <stdbool.h>
#include <stdint.h>

__extension__ typedef unsigned __int128 plan_u128;

/* A share of 1 in fixed point. */
enum { PLAN_SHARE_BITS = 62 };
#define PLAN_SHARE_ONE ((uint64_t)1 << PLAN_SHARE_BITS)

/*
 * Split total into whole counts in proportion to weight, none above its limit: nodes that would
 * get more than they can hold are filled, and the rest is split among the others.
 * @param weight  below 2^63; a node of weight 0 gets something only when the others are full
 * @param limit   below 2^63
 * @return false when the limits together are below total
 */
bool plan_split(uint64_t total, uint32_t count, const uint64_t *weight, const uint64_t *limit,
                uint64_t *share);

/*
 * Fill nodes in their order with the slices of `experts` experts, each of which also needs
 * expert_bytes where its slice 0 is: on the first node with any of its slices, in the order that
 * numoe_plan_boundary gives, so that the first n slices in this order are slice 0 of n experts.
 * Room that holds a slice in this way is never left while later nodes get some, so this fits when
 * any shares do.
 * @return false when it does not
 */
bool plan_fill(uint64_t experts, const struct numoe_expert_shape *shape, uint32_t count,
               const uint64_t *room, uint64_t *share);

/* Turn counts into cumulative fixed-point shares such that floor(total * share) is the exact sum
 * of the counts before each node. cumulative has count + 1 elements. */
void plan_accumulate(uint64_t total, uint32_t count, const uint64_t *share, uint64_t *cumulative);

/* floor(units * share). */
uint64_t plan_scale(uint64_t units, uint64_t share);

uint64_t plan_common_divisor(uint64_t a, uint64_t b);

/* A number coprime with experts near 0.618 times it: neighbours' starting points lie far apart. */
uint64_t plan_expert_step(uint64_t experts);

#endif
