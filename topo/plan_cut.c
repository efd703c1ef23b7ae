/*
 * How few experts with many tokens are cut for many workers: into blocks of tokens, and these, laid
 * end to end, into lanes of equal cost wherever that falls. So any number of workers end together;
 * what remains to be chosen is how often weights are decoded against how many rows there are.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_topo.h"

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        const uint64_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/* What workers take for `lanes` that share `blocks` of so many units and tokens: each block that a
 * lane has a part of is partial outputs, as much as another slice takes; and who is held up is
 * waited for, as long as a quarter of a lane. */
static uint64_t cost_of(uint64_t workers, uint64_t lanes, uint64_t blocks, uint64_t units,
                        uint64_t unit, uint64_t tokens)
{
    const uint64_t turns = (lanes + workers - 1) / workers;
    const uint64_t of_lane = (blocks * units + lanes - 1) / lanes * unit;
    const uint64_t parts = lanes + blocks - common_divisor(lanes, blocks);

    return (4 * turns + 1) * (16 * of_lane + 16 * parts / lanes) * numoe_plan_slice_cost(tokens);
}

struct numoe_plan_cut numoe_plan_even_cut(uint32_t workers, uint64_t experts, uint64_t slices,
                                          uint64_t unit, uint32_t tokens, uint32_t tokens_most)
{
    enum { TURNS_MOST = 4 };
    const uint32_t fewest = (tokens + tokens_most - 1) / tokens_most;
    const uint64_t most = fewest + TURNS_MOST * (uint64_t)workers / experts;
    const uint64_t units = (slices + unit - 1) / unit;
    struct numoe_plan_cut best = {fewest, workers};
    uint64_t least = UINT64_MAX;

    for (uint32_t blocks = fewest;
         blocks == fewest ||
         (blocks <= most && tokens / blocks >= NUMOE_PLAN_BLOCK_TOKENS_LEAST / 2);
         blocks++)
        /* lanes for so many turns of the workers; and whole blocks, if they come out even */
        for (uint64_t turns = 0; turns <= TURNS_MOST; turns++) {
            const uint64_t all = experts * blocks;
            const uint64_t lanes = turns || all % workers ? turns * workers : all;
            const uint64_t cost =
                lanes ? cost_of(workers, lanes, all, units, unit, (tokens + blocks - 1) / blocks)
                      : UINT64_MAX;

            if (cost < least) {
                least = cost;
                best = (struct numoe_plan_cut){blocks, lanes};
            }
        }
    return best;
}
