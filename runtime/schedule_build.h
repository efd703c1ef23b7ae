/*
 * schedule_build.h - what the layouts of a call share: hit experts, the parts of them that nodes
 * hold, and lanes that are pushed one after another.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SCHEDULE_BUILD_H
#define NUMOE_SCHEDULE_BUILD_H

#include "context.h"
#include "schedule_memory.h"

/* A hit expert and its distinct tokens. */
struct hit {
    uint32_t expert, first, tokens;
    bool many;                 /* laid out as one with many tokens */
    bool few_form;             /* computed by the few-token form, however many they are */
    struct numoe_plan_cut cut; /* of the group being laid out, if it is an even one */
};

struct build {
    struct numoe_schedule *s;
    struct hit *hits; /* experts with many tokens first, most tokens first; then by index. Fixed
                         cuts: all by index */
    uint32_t hit_count, many_count;
    uint32_t *pair_token; /* by hit, ascending tokens */
    float *pair_weight;
    struct model_part *parts; /* [hits][plan nodes] */
    uint64_t *slice_count;    /* [hits] slices on the group being laid out */
    uint32_t *token_set;      /* [tokens] the last set of rows that has one of the token ... */
    uint32_t *token_row;      /* ... and that row */
    uint32_t row_set;         /* the set that runs add to; a lane begins one */
    bool ends;                /* rows made now end a part */
    uint32_t *lane_worker;    /* [lanes] planned worker */
    uint64_t *load;           /* [workers] cost given so far */
    uint32_t *heap; /* [workers] of the group whose lanes are being given: its workers, the least
                       loaded first */
    const uint32_t *heap_of; /* that group's workers */
};

/* Plan nodes whose parts are one sequence, and the workers that lanes are dealt to. */
struct group {
    const uint32_t *nodes, *workers;
    uint32_t node_count, worker_count, lanes;
};

/* In a row's token, beside the number: the row ends a part. */
#define ROW_ENDS ((uint32_t)1 << 31)

static inline const struct model_part *part_of(const struct build *b, uint32_t h, uint32_t n)
{
    return &b->parts[(size_t)h * b->s->model->plan->node_count + n];
}

/* Of hit h on the group that is being laid out, in one block. */
static inline uint64_t schedule_hit_cost(const struct build *b, uint32_t h)
{
    return b->slice_count[h] * numoe_plan_slice_cost(b->hits[h].tokens);
}

struct group schedule_group(const struct model_groups *groups, const struct numoe_plan *plan,
                            uint32_t g);

/* Lanes for so many slices of experts with few tokens. */
uint64_t schedule_few_lanes(const struct group *group, uint64_t slices);

/* Hit h's cut, of lanes of its own: so that a block is no more than a lane's share of the group's
 * total cost while it has tokens enough, and then a range, of which there are ranges_most at most.
 */
struct numoe_plan_cut schedule_cut(const struct build *b, const struct group *group, uint32_t h,
                                   uint64_t total, uint64_t ranges_most);
/* Whether an expert is so much of the group's total that workers would wait for one; then *cut is
 * that of as many like it as make up the total. */
bool schedule_cut_evenly(const struct build *b, const struct group *group, uint32_t h,
                         uint64_t total, uint64_t unit, struct numoe_plan_cut *cut);
/* Where the i-th block of them ends. */
static inline uint32_t schedule_block_end(uint32_t tokens, uint32_t blocks, uint32_t i)
{
    return (uint32_t)((uint64_t)tokens * (i + 1) / blocks);
}

/* All of these return 0, -ENOMEM or -EOVERFLOW. A lane, with a set of rows of its own. */
int schedule_push_lane(struct build *b);
/* Slices [first, first + count) of a node's part of hit h, tokens [token, token + tokens) of it. */
int schedule_push_run(struct build *b, uint32_t h, uint32_t node, uint64_t first, uint64_t count,
                      uint32_t token, uint32_t tokens);
/* Give a lane to the least loaded worker of the group. */
int schedule_give_lane(struct build *b, const struct group *group, uint32_t lane, uint64_t cost);

/* Lanes for all hits, each given to a worker, by whichever layout the context has. */
int schedule_lay_out(struct build *b);
/* Fixed cuts, whatever else is in the batch (schedule_fixed.c). */
int schedule_lay_fixed(struct build *b);
/* Most units of an expert, on all nodes and in a group of them. */
void schedule_count_units(const struct numoe_model *model, uint64_t *all, uint64_t *most);
/* Bytes of what schedule_lay_fixed notes of a lane. */
enum { SCHEDULE_LANE_COST_BYTES = 16 };

#endif
