/* row_share_layer.h - a layer's weights and the batch at hand. SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_ROW_SHARE_LAYER_H
#define NUMOE_ROW_SHARE_LAYER_H

#include "row_share.h"

/* A hit expert and its (token, weight) pairs. */
struct row_share_hit {
    uint32_t expert, first, tokens;
    bool many; /* more than the few-token form takes at once */
};

/* Consecutive slices of one expert, a lane's. */
struct row_share_piece {
    uint32_t hit;
    uint64_t first, count;
    uint32_t first_entry; /* of row and fresh, one a pair of the hit */
};

/* Memory that grows. */
struct row_share_memory {
    uint8_t *data;
    uint64_t bytes;
};

enum row_share_use {
    ROW_SHARE_HITS,
    ROW_SHARE_PAIR_TOKEN,
    ROW_SHARE_PAIR_WEIGHT,
    ROW_SHARE_PAIR_FRESH,
    ROW_SHARE_PIECES,
    ROW_SHARE_ROW,
    ROW_SHARE_FRESH,
    ROW_SHARE_ROW_TOKEN,
    ROW_SHARE_TOKEN_FIRST,
    ROW_SHARE_TOKEN_ROWS,
    ROW_SHARE_TOKEN_LANE,
    ROW_SHARE_RECORDS,
    ROW_SHARE_OUTPUTS,
    ROW_SHARE_H,
    ROW_SHARE_LOCAL,
    ROW_SHARE_USES
};

/* With so many tokens or fewer each worker makes its own records, which saves a barrier. */
enum { ROW_SHARE_OWN_TOKENS = 4 };

struct row_share {
    struct row_share_desc desc;
    struct numoe_pool *pool;
    const struct row_share_kernels *kernels;
    struct numoe_slice_shape shape;
    uint64_t slices, pairs; /* of an expert; pair tiles of down in a slice */
    struct row_share_memory k_split, gate_up, down;

    struct row_share_memory memory[ROW_SHARE_USES];
    struct row_share_batch batch;
    struct row_share_hit *hits;
    uint32_t hit_count, pair_count;
    uint32_t *pair_token;
    float *pair_weight;
    bool *pair_fresh; /* the first pair of its token, in the order of hits */
    struct row_share_piece *pieces;
    uint32_t *lane_pieces; /* lanes + 1: a lane's first piece */
    uint32_t *row;         /* of an entry */
    bool *fresh;           /* the entry is the first of its row */
    uint32_t row_count, *row_token;
    uint32_t *token_first; /* of a token's rows in token_rows */
    const float **token_rows;
    float *outputs; /* [rows, hidden], lane order */

    uint64_t record_stride;
    uint8_t *records;           /* of each token, or of each worker */
    uint32_t epoch, *own_epoch; /* [workers]: for which call a worker's own records are */
    uint8_t *h;                 /* [pairs, h_stride] */
    uint64_t h_stride;
    float *local;          /* [lanes]: [tokens, rows of the lane] */
    uint64_t local_stride; /* floats of a lane */
    float *out;
};

/* First of so many things that the part-th of parts has. */
static inline uint64_t row_share_begin(uint64_t count, uint64_t parts, uint64_t part)
{
    return count * part / parts;
}

/* Slices [begin, end) of every expert that a domain holds, and lanes that are its. */
static inline uint64_t row_share_slice(const struct row_share *l, uint32_t domain)
{
    return row_share_begin(l->slices, l->desc.domains, domain);
}

static inline uint32_t row_share_lane(const struct row_share *l, uint32_t domain)
{
    return (uint32_t)row_share_begin(l->desc.lanes, l->desc.domains, domain);
}

/* Down's pair tiles [begin, end) that a lane holds. */
static inline uint64_t row_share_pair(const struct row_share *l, uint32_t lane)
{
    return row_share_begin(l->pairs, l->desc.lanes, lane);
}

/* Where the domain that holds `slice` of an expert has it, in units of a slice. */
static inline uint64_t row_share_place(const struct row_share *l, uint64_t expert, uint64_t slice)
{
    const uint64_t domains = l->desc.domains;
    const uint32_t domain = (uint32_t)(((slice + 1) * domains - 1) / l->slices);
    const uint64_t begin = row_share_slice(l, domain), end = row_share_slice(l, domain + 1);

    return begin * l->desc.experts + expert * (end - begin) + slice - begin;
}

/* Where a lane has its part of down of an expert: bytes. */
static inline uint64_t row_share_down_place(const struct row_share *l, uint32_t lane,
                                            uint64_t expert)
{
    const uint64_t begin = row_share_pair(l, lane), end = row_share_pair(l, lane + 1);

    return (begin * l->desc.experts + expert * (end - begin)) * l->slices * NUMOE_PAIR_BYTES;
}

#endif
