/*
 * How few experts with many tokens are cut for many workers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_topo.h"

/* What workers take for `lanes` of so many slices and tokens: a lane's own is its partial outputs,
 * as much as another slice takes; and who is held up is waited for, as long as a quarter of a
 * lane. */
static uint64_t cost_of(uint64_t workers, uint64_t lanes, uint64_t slices, uint64_t tokens)
{
    const uint64_t turns = (lanes + workers - 1) / workers;

    return (4 * turns + 1) * (slices + 1) * numoe_plan_slice_cost(tokens);
}

struct numoe_plan_cut numoe_plan_even_cut(uint32_t workers, uint64_t experts, uint64_t slices,
                                          uint32_t tokens, uint64_t ranges_most,
                                          uint32_t tokens_most)
{
    const uint32_t fewest = (tokens + tokens_most - 1) / tokens_most;
    const uint64_t lanes_most = 4 * (uint64_t)workers / experts;
    const uint64_t blocks_most = fewest + lanes_most;
    const uint64_t unit = (slices + ranges_most - 1) / ranges_most;
    struct numoe_plan_cut best = {fewest, 1};
    uint64_t least = UINT64_MAX;

    for (uint32_t blocks = fewest;
         blocks == fewest ||
         (blocks <= blocks_most && tokens / blocks >= NUMOE_PLAN_BLOCK_TOKENS_LEAST / 2);
         blocks++)
        for (uint64_t ranges = 1;
             ranges <= ranges_most && (ranges == 1 || blocks * ranges <= lanes_most); ranges++) {
            const uint64_t cost =
                cost_of(workers, experts * blocks * ranges,
                        (ranges_most + ranges - 1) / ranges * unit, (tokens + blocks - 1) / blocks);

            if (cost < least) {
                least = cost;
                best = (struct numoe_plan_cut){blocks, ranges};
            }
        }
    return best;
}
