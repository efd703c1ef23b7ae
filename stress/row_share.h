/*
 * row_share.h - one MoE layer computed in two ways of sharing it among lanes.
 *
 *   K-split      a lane has slices of the experts that are hit: gate, up, activation and down of
 *                them, summed into partial outputs; then all partial outputs of a token are summed
 *
 *                    [records] | gate, up, h, down: slices by lane | sum of rows
 *
 *   row-sharing  gate and up as before, h written where all read it; then a lane has a range of
 *                rows of down, for all slices of all experts that are hit, and with them these
 *                rows of all outputs: there is nothing left to sum
 *
 *                    [records] | gate, up, h: slices by lane | down: rows of the output by lane
 *
 * Lanes belong to memory domains, as many to each. A domain has a run of slices of every expert;
 * its share of those that are hit is cut among its lanes as the executor cuts it
 * (runtime/schedule_lanes.c), and its partial outputs are rows as the executor's: one a token of a
 * lane for experts with up to four tokens, else one for each (token, expert). Kernels are the
 * few-token form at any size, for more than four tokens of an expert in chunks of as many.
 *
 * Each way has weights of its own:
 *
 *   K-split      [domain][expert][slice of the domain]           whole slices
 *   row-sharing  [domain][expert][slice of the domain]           gate and up of a slice
 *                [lane][expert][slice][pair tile of the lane]    down: a lane reads a stream
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_ROW_SHARE_H
#define NUMOE_ROW_SHARE_H

#include "numoe.h"
#include "numoe_kernels.h"
#include "numoe_pool.h"
#include "row_share_kernels.h"

enum row_share_way { ROW_SHARE_K_SPLIT, ROW_SHARE_ROWS, ROW_SHARE_WAYS };

struct row_share_desc {
    uint64_t hidden;       /* a multiple of 64 */
    uint64_t intermediate; /* a multiple of 32 */
    uint64_t experts, top_k;
    struct numoe_activation activation;
    uint32_t lanes, domains; /* domains <= lanes, domains <= slices */
    uint64_t seed;
};

struct row_share;

/*
 * Make both copies of the weights at random, by the pool's workers: each lane's by the worker that
 * begins with it. desc is copied. Returns 0, -EINVAL or -ENOMEM with error filled.
 */
int row_share_create(const struct row_share_desc *desc, struct numoe_pool *pool,
                     const struct row_share_kernels *kernels, struct row_share **layer,
                     struct numoe_error *error);
void row_share_destroy(struct row_share *layer);

uint64_t row_share_weight_bytes(const struct row_share *layer); /* of each copy */

/* A batch, to be laid out. Everything is read until the next one is. */
struct row_share_batch {
    uint64_t tokens;
    const uint16_t *x;    /* [tokens, hidden] bf16 */
    const int32_t *ids;   /* [tokens, top_k], distinct for each token */
    const float *weights; /* likewise */
};

/* What a batch takes in each way. */
struct row_share_cost {
    uint64_t experts_hit;
    uint64_t weight_bytes;                    /* read at least once */
    uint64_t rows;                            /* partial outputs of K-split */
    uint64_t exchanged_bytes[ROW_SHARE_WAYS]; /* partial outputs, or h, written once and read: by
                                                 whom it concerns, h by every domain */
    uint32_t barriers[ROW_SHARE_WAYS];        /* fork and join among them */
};

/* Who does what, in both ways; not part of what is timed. Returns 0 or -ENOMEM. */
int row_share_lay_out(struct row_share *layer, const struct row_share_batch *batch,
                      struct row_share_cost *cost);

/* Compute the batch: out [tokens, hidden] fp32. Returns 0 or what the pool said. */
int row_share_run(struct row_share *layer, enum row_share_way way, float *out);

/* Relative L2 distance of some tokens, spread over the batch, to float64: -ENOMEM or 0. */
int row_share_check(struct row_share *layer, uint64_t count, const float *const out[ROW_SHARE_WAYS],
                    double rel_l2[ROW_SHARE_WAYS]);

#endif
