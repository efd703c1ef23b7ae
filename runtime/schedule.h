/*
 * schedule.h - one call as data: which lanes there are, what each computes, which rows add up.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SCHEDULE_H
#define NUMOE_SCHEDULE_H

#include "model.h"
#include "trace.h"

/* Consecutive slices of one expert on one node, for some of its tokens. Which expert, where its
 * slices lie and the tokens' weights are the hit's: a layout holds for any experts that are alike.
 */
struct schedule_run {
    uint64_t first_slice, slice_count; /* of the hit's part on the node */
    uint32_t hit, node;                /* of schedule.hits; the plan node whose memory it is in */
    uint32_t first_pair;  /* pairs [first_pair, first_pair + tokens) of schedule.pair_weight */
    uint32_t first_entry; /* entries [first_entry, first_entry + tokens) of schedule.entries */
    uint32_t tokens;
    bool many;
};

/* One (token, slot) of a run and the row it adds to. */
struct schedule_entry {
    uint32_t token;
    uint32_t row;
    bool add; /* an earlier run of the lane wrote the row already */
};

/* The unit that a worker takes: runs in order, summed into the lane's own rows. */
struct schedule_lane {
    uint32_t first_run, run_count;
};

/* An array that grows and keeps what it holds. */
struct grow {
    void *data;
    size_t bytes;
};

enum { SCHEDULE_MEMORY_USES = 20 }; /* schedule_memory.h */

/* Which entries of a batch a schedule computes. */
enum schedule_part {
    SCHEDULE_NOW,     /* those of experts that are not deferred */
    SCHEDULE_DEFERRED /* the others: rows only, which a later schedule adds up */
};

struct numoe_schedule {
    /* the call */
    enum schedule_part part;
    const struct numoe_schedule *late; /* NULL, or whose rows join the sums, token by token */
    struct numoe_model *model;
    uint64_t layer;
    struct numoe_batch batch;
    uint64_t token_begin, token_count; /* of the batch, this pass */
    enum numoe_reach reach;            /* of experts with many tokens */
    struct numoe_result result;

    /* filled by numoe_schedule_build: what is read, anew each time ... */
    const struct hit *hits;         /* schedule_build.h */
    const struct model_part *parts; /* [hits][plan nodes] */
    const float *pair_weight;       /* by hit, then token */
    /* ... and the layout, kept while calls are alike (schedule.c) */
    uint64_t shape_count; /* numbers in memory[MEMORY_SHAPE]; 0: no layout to keep */
    bool late_indexed;    /* token_rows has those of a late schedule */
    uint64_t lane_ns;     /* of a lane, about */
    uint32_t lane_count, run_count, entry_count, row_count;
    struct schedule_lane *lanes;
    struct schedule_run *runs;
    struct schedule_entry *entries;
    uint32_t *token_first; /* [token_count + 1] into token_rows */
    const float **token_rows;
    uint8_t
        *token_ends; /* NULL, or as token_rows: whether the row ends a part (numoe_combine.ends) */
    uint32_t *lane_first; /* [workers + 1]: which lanes each worker begins with */

    /* memory of the call */
    uint8_t *records;    /* [token_count] activation records, or [workers][token_count] */
    float *rows;         /* [row_count][32 * hidden_tiles] */
    uint8_t *scratch;    /* [workers] */
    uint32_t *own_epoch; /* [workers][SCHEDULE_OWN_TOKENS] when each own record was made */
    size_t record_stride, scratch_stride;
    uint32_t epoch;   /* of this pass */
    bool own_records; /* few tokens: each worker makes its own records */
    uint32_t combine_chunks, combine_tiles;

    uint64_t *node_bytes; /* [nodes of the context] of experts that workers read in this call,
                             wherever they are */

    struct grow memory[SCHEDULE_MEMORY_USES];
    uint64_t memory_bytes;
};

/* Up to so many tokens each worker quantises for itself instead of meeting at a barrier. */
enum { SCHEDULE_OWN_TOKENS = 4, SCHEDULE_DEFERRED_TOKENS = 64 };

enum { SCHEDULE_LANE_SLICES = 32 }; /* few tokens: what a lane aims at */

/* Check a batch's pointers, sizes and (strict) ids. Returns 0 or -EINVAL with error filled. */
int numoe_schedule_check(const struct numoe_model *model, uint64_t layer,
                         const struct numoe_batch *batch, struct numoe_error *error);

static inline int64_t numoe_batch_id(const struct numoe_batch *batch, uint64_t at)
{
    return batch->id_bytes == 8 ? ((const int64_t *)batch->ids)[at]
                                : ((const int32_t *)batch->ids)[at];
}

/* Start a call: nothing counted yet, no expert seen. Returns 0 or -ENOMEM. */
int numoe_schedule_begin(struct numoe_schedule *schedule, struct numoe_model *model, uint64_t layer,
                         const struct numoe_batch *batch);

/* Count a hit expert in the result, once a call. by_workers: they read it, not a GPU; counts the
 * bytes on each node, once a call likewise. */
void numoe_schedule_see(struct numoe_schedule *schedule, uint64_t expert, bool by_workers);

/* How many tokens of the batch one pass takes, so that its rows stay within bounds. After
 * numoe_schedule_begin. */
uint64_t numoe_schedule_pass(const struct numoe_schedule *schedule);

/*
 * Lay out tokens [token_begin, token_begin + token_count) of schedule->batch. Depends on the
 * batch and the model's plan only, never on the pool. Returns 0, -ENOMEM or -EOVERFLOW.
 */
int numoe_schedule_build(struct numoe_schedule *schedule, uint32_t workers);

/* The job that computes the pass. schedule is the job's context. */
void numoe_schedule_job(struct numoe_schedule *schedule, struct numoe_pool_job *job);

/* The two jobs of a deferred schedule: records, which need the batch's x, and the rest. */
void numoe_schedule_deferred_jobs(struct numoe_schedule *schedule, struct numoe_pool_job *records,
                                  struct numoe_pool_job *lanes);

/* What a phase with this function does. */
enum trace_phase numoe_schedule_phase(numoe_pool_fn *run);

/* The next call is laid out anew. The memory stays. */
void numoe_schedule_forget(struct numoe_schedule *schedule);

void numoe_schedule_free(struct numoe_schedule *schedule);

/*
 * The memory of calls on a model of up to `tokens` tokens, got ahead of time while others go on:
 *   numoe_schedule_want    with the turn: what it lacks, with room to index rows of late_tokens
 *                          deferred ones besides
 *   numoe_schedule_stock   without: get that, pages and all. A call meanwhile waits for 2 MiB of a
 *                          worker's at most. Returns 0, -ENOMEM, -EOVERFLOW, or as numoe_pool_run
 *   numoe_schedule_take    with the turn, pool free: what is still more than there is, for what
 *                          there was; loses what was laid out
 *   numoe_schedule_stock_free  without, whatever came before
 */
struct schedule_stock {
    uint64_t want[SCHEDULE_MEMORY_USES]; /* bytes; 0: there is enough */
    struct grow memory[SCHEDULE_MEMORY_USES];
};

void numoe_schedule_want(const struct numoe_schedule *schedule, const struct numoe_model *model,
                         uint64_t tokens, uint64_t top_k, uint64_t late_tokens,
                         struct schedule_stock *stock);
int numoe_schedule_stock(struct schedule_stock *stock, struct numoe_pool *pool);
void numoe_schedule_take(struct numoe_schedule *schedule, struct schedule_stock *stock);
void numoe_schedule_stock_free(struct schedule_stock *stock);

/* Sizes that a call and a reservation agree on. */
uint64_t numoe_schedule_pass_of(const struct numoe_model *model, enum numoe_reach reach,
                                uint64_t top_k);
uint64_t numoe_schedule_first_bytes(const struct numoe_model *model, uint32_t workers);
uint64_t numoe_schedule_scratch(const struct numoe_model *model); /* of a worker */
uint64_t numoe_schedule_build_bytes(const struct numoe_model *model, uint64_t tokens,
                                    uint64_t pairs, uint64_t hits);
uint64_t numoe_schedule_shape_bytes(const struct numoe_model *model, uint64_t tokens,
                                    uint64_t top_k);

#endif
