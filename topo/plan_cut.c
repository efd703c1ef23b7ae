/*
 * How few experts with many tokens are cut for many workers: into blocks of tokens. Blocks are
 * lanes as they are while every worker has two or more; the last ones, laid end to end, are cut
 * into lanes of equal cost wherever that falls. So any number of workers end together; what remains
 * to be chosen is how often weights are decoded against how many rows there are.
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

/* What workers take with such a cut: each block that a lane has a part of is partial outputs, as
 * much as another slice takes; and who is held up is waited for, as long as a quarter of a lane. */
static uint64_t cost_of(const struct numoe_plan_cut *cut, uint64_t workers, uint64_t experts,
                        uint64_t units, uint64_t unit, uint64_t tokens)
{
    const uint64_t rest = experts * cut->blocks - cut->whole;
    const uint64_t lane = 16 * ((rest * units + cut->lanes - 1) / cut->lanes * unit) +
                          16 * numoe_plan_cut_parts(cut, experts) / cut->lanes;
    const uint64_t turns = (cut->lanes + workers - 1) / workers;

    return (4 * (cut->whole / workers) * 16 * (units * unit + 1) + (4 * turns + 1) * lane) *
           numoe_plan_slice_cost(tokens);
}

uint64_t numoe_plan_cut_parts(const struct numoe_plan_cut *cut, uint64_t experts)
{
    const uint64_t rest = experts * cut->blocks - cut->whole;

    /* blocks of one expert are as long as each other; those of others are not, so that hardly any
     * lane ends where a block does */
    return cut->lanes + rest - (experts == 1 ? common_divisor(cut->lanes, rest) : 1);
}

struct numoe_plan_cut numoe_plan_even_cut(uint32_t workers, uint64_t experts, uint64_t slices,
                                          uint64_t unit, uint32_t tokens, uint32_t tokens_most)
{
    enum { TURNS_MOST = 4 };
    const uint32_t fewest = (tokens + tokens_most - 1) / tokens_most;
    const uint64_t most = fewest + TURNS_MOST * (uint64_t)workers / experts;
    const uint64_t units = (slices + unit - 1) / unit;
    struct numoe_plan_cut best = {fewest, 0, workers};
    uint64_t least = UINT64_MAX;

    for (uint32_t blocks = fewest;
         blocks == fewest ||
         (blocks <= most && tokens / blocks >= NUMOE_PLAN_BLOCK_TOKENS_LEAST / 2);
         blocks++)
        for (uint64_t turns = 1; turns <= TURNS_MOST; turns++) {
            const uint64_t each = experts * blocks / workers;
            const struct numoe_plan_cut cut = {blocks, each > 1 ? (each - 1) * workers : 0,
                                               turns * workers};
            const uint64_t cost =
                cost_of(&cut, workers, experts, units, unit, (tokens + blocks - 1) / blocks);

            if (cost < least) {
                least = cost;
                best = cut;
            }
        }
    return best;
}
