/*
 * Laying a batch out, and computing it in both ways. Items of the pool are lanes. Whatever is
 * written in one phase is read in a later one only, by way of the pool's barrier.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "row_share_layer.h"

#include "base/checked.h"
#include "numoe_topo.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((uint64_t)2 << 20)

enum {
    RECORD_TOKENS = 16, /* tokens of a record item */
    BLOCK_SLICES = 2, /* slices that stay in cache while several chunks of tokens pass over them */
    MOST_CHUNK = 4    /* tokens of a chunk: few_tokens of both kernel sets */
};

/* ---- memory ---------------------------------------------------------------------------------- */

struct touch {
    uint8_t *data;
    uint64_t bytes;
    uint32_t items;
};

static void touch_part(void *context, uint32_t item, uint32_t worker)
{
    const struct touch *touch = context;
    const uint64_t begin = row_share_begin(touch->bytes, touch->items, item);

    (void)worker;
    memset(touch->data + begin, 0, row_share_begin(touch->bytes, touch->items, item + 1) - begin);
}

/* At least so many bytes, which the lanes' workers have touched; what was there is lost. */
static int renew(struct row_share *l, enum row_share_use use, uint64_t bytes)
{
    struct row_share_memory *m = &l->memory[use];
    const uint64_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;
    struct touch touch = {.items = l->desc.lanes};
    const struct numoe_pool_job job = {
        .context = &touch, .phase_count = 1, .phases = {{.run = touch_part, .items = touch.items}}};

    if (bytes <= m->bytes)
        return 0;
    free(m->data);
    *m = (struct row_share_memory){NULL, 0};
    if (!numoe_round_up_u64(bytes + bytes / 2, unit, &touch.bytes) ||
        touch.bytes > numoe_memory_room())
        return -ENOMEM;
    touch.data = aligned_alloc(unit, touch.bytes);
    if (!touch.data)
        return -ENOMEM;
    if (unit == HUGE_PAGE)
        madvise(touch.data, touch.bytes, MADV_HUGEPAGE);
    *m = (struct row_share_memory){touch.data, touch.bytes};
    return numoe_pool_run(l->pool, &job);
}

/* ---- laying out ------------------------------------------------------------------------------ */

/* (token, weight) pairs by expert: those with many tokens first, else by index. */
static int collect(struct row_share *l)
{
    const struct row_share_batch *b = &l->batch;
    const uint64_t E = l->desc.experts, pairs = b->tokens * l->desc.top_k;
    uint32_t *next, first = 0;
    int rc = renew(l, ROW_SHARE_HITS, E * sizeof *l->hits);

    if (!rc)
        rc = renew(l, ROW_SHARE_PAIR_TOKEN, pairs * sizeof *l->pair_token);
    if (!rc)
        rc = renew(l, ROW_SHARE_PAIR_WEIGHT, pairs * sizeof *l->pair_weight);
    if (!rc)
        rc = renew(l, ROW_SHARE_PAIR_FRESH, pairs * sizeof *l->pair_fresh);
    if (!rc)
        rc = renew(l, ROW_SHARE_TOKEN_LANE, b->tokens * sizeof(uint32_t));
    next = calloc(E, sizeof *next);
    if (rc || !next) {
        free(next);
        return rc ? rc : -ENOMEM;
    }
    l->hits = (void *)l->memory[ROW_SHARE_HITS].data;
    l->pair_token = (void *)l->memory[ROW_SHARE_PAIR_TOKEN].data;
    l->pair_weight = (void *)l->memory[ROW_SHARE_PAIR_WEIGHT].data;
    l->pair_fresh = (void *)l->memory[ROW_SHARE_PAIR_FRESH].data;
    for (uint64_t i = 0; i < pairs; i++)
        next[b->ids[i]]++;
    l->hit_count = 0;
    for (int many = 1; many >= 0; many--)
        for (uint32_t e = 0; e < E; e++)
            if (next[e] && (next[e] > l->kernels->set.few_limit) == many)
                l->hits[l->hit_count++] = (struct row_share_hit){e, 0, next[e], many};
    for (uint32_t i = 0; i < l->hit_count; i++) {
        l->hits[i].first = next[l->hits[i].expert] = first;
        first += l->hits[i].tokens;
    }
    l->pair_count = first;
    for (uint64_t i = 0; i < pairs; i++) {
        const uint32_t at = next[b->ids[i]]++;

        l->pair_token[at] = (uint32_t)(i / l->desc.top_k);
        l->pair_weight[at] = b->weights[i];
    }
    free(next);
    uint32_t *seen = (void *)l->memory[ROW_SHARE_TOKEN_LANE].data;
    memset(seen, 0, b->tokens * sizeof *seen);
    for (uint32_t p = 0; p < l->pair_count; p++)
        l->pair_fresh[p] = !seen[l->pair_token[p]]++;
    return 0;
}

/* As the executor has it (runtime/schedule_lanes.c): reading a slice takes as long as four and a
 * half tokens, decoding it, here once for each chunk, as one and a half. */
static uint64_t slice_cost(uint64_t tokens)
{
    const uint64_t compute = 24 * ((tokens + MOST_CHUNK - 1) / MOST_CHUNK) + 16 * tokens;

    return compute < 72 ? 72 : compute;
}

/* A piece at the end of the last lane; rows for its tokens. token_lane: 1 + the last lane that
 * made a row for the token, then that row. */
static void push_piece(struct row_share *l, uint32_t lane, const struct row_share_piece *piece,
                       uint32_t *entries, uint32_t *token_lane)
{
    const struct row_share_hit *hit = &l->hits[piece->hit];
    const uint64_t T = l->batch.tokens;

    l->pieces[l->lane_pieces[lane + 1]] = *piece;
    l->pieces[l->lane_pieces[lane + 1]++].first_entry = *entries;
    for (uint32_t i = 0; i < hit->tokens; i++, (*entries)++) {
        const uint32_t t = l->pair_token[hit->first + i];

        l->fresh[*entries] = hit->many || token_lane[t] != lane + 1;
        if (l->fresh[*entries]) {
            l->row[*entries] = l->row_count;
            l->row_token[l->row_count++] = t;
        }
        if (!hit->many && l->fresh[*entries]) {
            token_lane[t] = lane + 1;
            token_lane[T + t] = l->row[*entries];
        }
        if (!l->fresh[*entries])
            l->row[*entries] = token_lane[T + t];
    }
}

/* The domain's slices of all hits as one sequence, cut into parts of equal cost. */
static void cut_domain(struct row_share *l, uint32_t domain, uint32_t *entries,
                       uint32_t *token_lane)
{
    const uint64_t begin = row_share_slice(l, domain), end = row_share_slice(l, domain + 1);
    const uint32_t first = row_share_lane(l, domain);
    const uint64_t lanes = row_share_lane(l, domain + 1) - first;
    uint32_t lane = first;
    uint64_t total = 0, done = 0;

    for (uint32_t h = 0; h < l->hit_count; h++)
        total += (end - begin) * slice_cost(l->hits[h].tokens);
    l->lane_pieces[lane + 1] = l->lane_pieces[lane];
    for (uint32_t h = 0; h < l->hit_count; h++) {
        const uint64_t cost = slice_cost(l->hits[h].tokens);
        struct row_share_piece piece = {.hit = h, .first = begin};

        for (uint64_t s = begin; s < end; s++, done += cost) {
            const uint32_t of = first + (uint32_t)((2 * done + cost) * lanes / (2 * total));

            if (of != lane && piece.count) {
                push_piece(l, lane, &piece, entries, token_lane);
                piece = (struct row_share_piece){.hit = h, .first = s};
            }
            for (; lane < of; lane++)
                l->lane_pieces[lane + 2] = l->lane_pieces[lane + 1];
            piece.count++;
        }
        push_piece(l, lane, &piece, entries, token_lane);
    }
    for (; lane + 1 < first + lanes; lane++)
        l->lane_pieces[lane + 2] = l->lane_pieces[lane + 1];
}

static int lay_pieces(struct row_share *l)
{
    const uint64_t T = l->batch.tokens, lanes = l->desc.lanes, domains = l->desc.domains;
    const uint64_t most_entries = domains * l->pair_count + lanes * T;
    uint32_t entries = 0, *token_lane;
    int rc = renew(l, ROW_SHARE_PIECES, (domains * l->hit_count + lanes) * sizeof *l->pieces);

    if (!rc)
        rc = renew(l, ROW_SHARE_ROW, most_entries * sizeof *l->row);
    if (!rc)
        rc = renew(l, ROW_SHARE_FRESH, most_entries * sizeof *l->fresh);
    if (!rc)
        rc = renew(l, ROW_SHARE_ROW_TOKEN, most_entries * sizeof *l->row_token);
    if (!rc)
        rc = renew(l, ROW_SHARE_TOKEN_LANE, 2 * T * sizeof *token_lane);
    if (rc)
        return rc;
    l->pieces = (void *)l->memory[ROW_SHARE_PIECES].data;
    l->row = (void *)l->memory[ROW_SHARE_ROW].data;
    l->fresh = (void *)l->memory[ROW_SHARE_FRESH].data;
    l->row_token = (void *)l->memory[ROW_SHARE_ROW_TOKEN].data;
    token_lane = (void *)l->memory[ROW_SHARE_TOKEN_LANE].data;
    memset(token_lane, 0, 2 * T * sizeof *token_lane);
    l->row_count = 0;
    l->lane_pieces[0] = 0;
    for (uint32_t d = 0; d < domains; d++)
        cut_domain(l, d, &entries, token_lane);
    return 0;
}

/* Rows of each token, in the order in which they were made. */
static int index_rows(struct row_share *l)
{
    const uint64_t T = l->batch.tokens;
    int rc = renew(l, ROW_SHARE_TOKEN_FIRST, (T + 2) * sizeof *l->token_first);

    if (!rc)
        rc = renew(l, ROW_SHARE_TOKEN_ROWS, l->row_count * sizeof *l->token_rows);
    if (!rc)
        rc = renew(l, ROW_SHARE_OUTPUTS, l->row_count * l->desc.hidden * sizeof *l->outputs);
    if (rc)
        return rc;
    l->token_first = (void *)l->memory[ROW_SHARE_TOKEN_FIRST].data;
    l->token_rows = (void *)l->memory[ROW_SHARE_TOKEN_ROWS].data;
    l->outputs = (void *)l->memory[ROW_SHARE_OUTPUTS].data;
    memset(l->token_first, 0, (T + 2) * sizeof *l->token_first);
    for (uint32_t r = 0; r < l->row_count; r++)
        l->token_first[l->row_token[r] + 2]++;
    for (uint64_t t = 2; t < T + 2; t++)
        l->token_first[t] += l->token_first[t - 1];
    for (uint32_t r = 0; r < l->row_count; r++)
        l->token_rows[l->token_first[l->row_token[r] + 1]++] = l->outputs + r * l->desc.hidden;
    return 0;
}

static bool own_records(const struct row_share *l)
{
    return l->batch.tokens <= ROW_SHARE_OWN_TOKENS;
}

int row_share_lay_out(struct row_share *l, const struct row_share_batch *batch,
                      struct row_share_cost *cost)
{
    const uint64_t workers = numoe_pool_worker_count(l->pool);
    uint64_t widest = (l->pairs + l->desc.lanes - 1) / l->desc.lanes * 2 * NUMOE_TILE, h;
    int rc;

    l->batch = *batch;
    rc = collect(l);
    if (!rc)
        rc = lay_pieces(l);
    if (!rc)
        rc = index_rows(l);
    if (rc)
        return rc;
    h = l->slices * l->kernels->group_bytes;
    l->h_stride = (h + NUMOE_ALIGNMENT - 1) / NUMOE_ALIGNMENT * NUMOE_ALIGNMENT;
    l->record_stride = l->kernels->set.record_bytes(&l->shape);
    l->local_stride = batch->tokens * widest;
    rc =
        renew(l, ROW_SHARE_RECORDS,
              (own_records(l) ? workers * ROW_SHARE_OWN_TOKENS : batch->tokens) * l->record_stride);
    if (!rc)
        rc = renew(l, ROW_SHARE_H, l->pair_count * l->h_stride);
    if (!rc)
        rc = renew(l, ROW_SHARE_LOCAL, l->desc.lanes * l->local_stride * sizeof *l->local);
    if (rc)
        return rc;
    l->records = l->memory[ROW_SHARE_RECORDS].data;
    l->h = l->memory[ROW_SHARE_H].data;
    l->local = (void *)l->memory[ROW_SHARE_LOCAL].data;
    *cost = (struct row_share_cost){
        .experts_hit = l->hit_count,
        .weight_bytes = l->hit_count * l->slices * l->shape.bytes,
        .rows = l->row_count,
        .exchanged_bytes = {2 * l->row_count * l->desc.hidden * sizeof(float),
                            l->pair_count * h * (1 + (uint64_t)l->desc.domains)},
    };
    /* fork, between two phases, join */
    for (int way = 0; way < ROW_SHARE_WAYS; way++)
        cost->barriers[way] = own_records(l) ? 3 : 4;
    return 0;
}

/* ---- items ----------------------------------------------------------------------------------- */

static void quantise(const struct row_share *l, uint64_t token, uint8_t *record)
{
    l->kernels->set.quantise(&l->shape, l->batch.x + token * l->desc.hidden, NUMOE_BF16, record);
}

static void make_records(void *context, uint32_t item, uint32_t worker)
{
    const struct row_share *l = context;
    const unsigned saved = numoe_kernels_enter();

    (void)worker;
    for (uint64_t t = (uint64_t)item * RECORD_TOKENS;
         t < l->batch.tokens && t < ((uint64_t)item + 1) * RECORD_TOKENS; t++)
        quantise(l, t, l->records + t * l->record_stride);
    numoe_kernels_leave(saved);
}

/* The records that a worker reads; its own are made at its first lane. */
static const uint8_t *records_of(const struct row_share *l, uint32_t worker)
{
    uint8_t *own = l->records + (uint64_t)worker * ROW_SHARE_OWN_TOKENS * l->record_stride;

    if (!own_records(l))
        return l->records;
    if (l->own_epoch[worker] != l->epoch) {
        for (uint64_t t = 0; t < l->batch.tokens; t++)
            quantise(l, t, own + t * l->record_stride);
        l->own_epoch[worker] = l->epoch;
    }
    return own;
}

/* The next chunk of a hit of so many tokens of which `done` are done. */
static uint32_t chunk_of(uint32_t tokens, uint32_t done, uint32_t *chunks)
{
    const uint32_t left = (*chunks)--;

    return (tokens - done + left - 1) / left;
}

static uint32_t chunks_of(uint32_t tokens)
{
    return (tokens + MOST_CHUNK - 1) / MOST_CHUNK;
}

/* A call adds to all of its rows or to none: fresh ones are cleared where some are not. Returns
 * whether it adds. */
static bool clear_fresh(const bool *fresh, float *const *y, uint32_t tokens, uint64_t width)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < tokens; i++)
        count += fresh[i];
    for (uint32_t i = 0; i < tokens && count < tokens; i++)
        if (fresh[i])
            memset(y[i], 0, width * sizeof **y);
    return count < tokens;
}

/* Some slices of a piece for one chunk of its tokens. */
static void compute_chunk(const struct row_share *l, const struct row_share_piece *piece,
                          uint64_t at, uint64_t count, uint32_t token, uint32_t tokens,
                          const uint8_t *records, enum row_share_way way)
{
    const struct row_share_hit *hit = &l->hits[piece->hit];
    const uint64_t slice = piece->first + at, place = row_share_place(l, hit->expert, slice);
    const uint32_t *row = l->row + piece->first_entry + token;
    const bool *fresh = l->fresh + piece->first_entry + token;
    const void *x[MOST_CHUNK];
    float *y[MOST_CHUNK];
    void *h[MOST_CHUNK];
    struct numoe_ffn ffn = {.shape = &l->shape,
                            .activation = &l->desc.activation,
                            .arithmetic = NUMOE_FAST,
                            .slice_count = count,
                            .tokens = tokens,
                            .x = x,
                            .weight = l->pair_weight + hit->first + token,
                            .y = y,
                            .add = true};

    for (uint32_t i = 0; i < tokens; i++)
        x[i] = records + l->pair_token[hit->first + token + i] * l->record_stride;
    if (way == ROW_SHARE_K_SPLIT) {
        for (uint32_t i = 0; i < tokens; i++)
            y[i] = l->outputs + row[i] * l->desc.hidden;
        if (at == 0)
            ffn.add = clear_fresh(fresh, y, tokens, l->desc.hidden);
        ffn.slices = l->k_split.data + place * l->shape.bytes;
        l->kernels->set.few(&ffn);
    } else {
        const struct row_share_gate_up gate_up = {&ffn, l->shape.down_offset, h};

        for (uint32_t i = 0; i < tokens; i++)
            h[i] = l->h + (hit->first + token + i) * l->h_stride + slice * l->kernels->group_bytes;
        ffn.slices = l->gate_up.data + place * l->shape.down_offset;
        l->kernels->gate_up(&gate_up);
    }
}

static void compute_lane(const struct row_share *l, uint32_t lane, uint32_t worker,
                         enum row_share_way way)
{
    const unsigned saved = numoe_kernels_enter();
    const uint8_t *records = records_of(l, worker);

    for (uint32_t p = l->lane_pieces[lane]; p < l->lane_pieces[lane + 1]; p++) {
        const struct row_share_piece *piece = &l->pieces[p];
        const uint32_t all = l->hits[piece->hit].tokens;
        const uint64_t step = chunks_of(all) > 1 ? BLOCK_SLICES : piece->count;

        for (uint64_t at = 0; at < piece->count; at += step) {
            const uint64_t count = piece->count - at < step ? piece->count - at : step;
            uint32_t chunks = chunks_of(all);

            for (uint32_t token = 0; token < all;) {
                const uint32_t tokens = chunk_of(all, token, &chunks);

                compute_chunk(l, piece, at, count, token, tokens, records, way);
                token += tokens;
            }
        }
    }
    numoe_kernels_leave(saved);
}

static void k_split_lane(void *context, uint32_t item, uint32_t worker)
{
    compute_lane(context, item, worker, ROW_SHARE_K_SPLIT);
}

static void gate_up_lane(void *context, uint32_t item, uint32_t worker)
{
    compute_lane(context, item, worker, ROW_SHARE_ROWS);
}

/* An equal part of all (token, tile). */
static void combine_lane(void *context, uint32_t item, uint32_t worker)
{
    const struct row_share *l = context;
    const uint64_t tiles = l->shape.hidden_tiles, all = l->batch.tokens * tiles;
    const uint64_t end = row_share_begin(all, l->desc.lanes, item + 1);
    const unsigned saved = numoe_kernels_enter();

    (void)worker;
    for (uint64_t at = row_share_begin(all, l->desc.lanes, item); at < end;) {
        const uint64_t token = at / tiles,
                       stop = (token + 1) * tiles < end ? (token + 1) * tiles : end;
        const uint32_t first = l->token_first[token];
        const struct numoe_combine combine = {.rows = l->token_rows + first,
                                              .row_count = l->token_first[token + 1] - first,
                                              .tile_begin = at % tiles,
                                              .tile_end = at % tiles + stop - at,
                                              .hidden = l->desc.hidden,
                                              .scale = 1,
                                              .type = NUMOE_F32,
                                              .out = l->out + token * l->desc.hidden};

        l->kernels->set.combine(&combine);
        at = stop;
    }
    numoe_kernels_leave(saved);
}

/* Down of the lane's rows, then these rows of all outputs. */
static void down_lane(void *context, uint32_t item, uint32_t worker)
{
    const struct row_share *l = context;
    const uint64_t begin = row_share_pair(l, item), pairs = row_share_pair(l, item + 1) - begin;
    const uint64_t width = pairs * 2 * NUMOE_TILE;
    float *local = l->local + item * l->local_stride, *y[MOST_CHUNK];
    const unsigned saved = numoe_kernels_enter();
    void *h[MOST_CHUNK];

    (void)worker;
    for (uint32_t i = 0; i < l->hit_count && pairs; i++) {
        const struct row_share_hit *hit = &l->hits[i];
        uint32_t chunks = chunks_of(hit->tokens);

        for (uint32_t done = 0; done < hit->tokens;) {
            const uint32_t tokens = chunk_of(hit->tokens, done, &chunks), first = hit->first + done;
            struct row_share_down down = {.weights = l->down.data +
                                                     row_share_down_place(l, item, hit->expert),
                                          .slice_count = l->slices,
                                          .slice_bytes = pairs * NUMOE_PAIR_BYTES,
                                          .tiles = pairs * 2,
                                          .tokens = tokens,
                                          .h = h,
                                          .weight = l->pair_weight + first,
                                          .y = y};

            for (uint32_t t = 0; t < tokens; t++) {
                h[t] = l->h + (first + t) * l->h_stride;
                y[t] = local + l->pair_token[first + t] * width;
            }
            down.add = clear_fresh(l->pair_fresh + first, y, tokens, width);
            l->kernels->down(&down);
            done += tokens;
        }
    }
    for (uint64_t t = 0; t < l->batch.tokens && pairs; t++) {
        const float *row = local + t * width;
        const struct numoe_combine combine = {.rows = &row,
                                              .row_count = 1,
                                              .tile_end = pairs * 2,
                                              .hidden = width,
                                              .scale = 1,
                                              .type = NUMOE_F32,
                                              .out = l->out + t * l->desc.hidden +
                                                     begin * 2 * NUMOE_TILE};

        l->kernels->set.combine(&combine);
    }
    numoe_kernels_leave(saved);
}

/* ---- jobs ------------------------------------------------------------------------------------ */

/* A core reads some 20 bytes a ns, as the executor says. */
static void add_phase(struct numoe_pool_job *job, numoe_pool_fn *run, uint64_t items,
                      uint64_t bytes)
{
    const uint64_t ns = bytes / items / 20;

    job->phases[job->phase_count++] =
        (struct numoe_pool_phase){.run = run,
                                  .items = (uint32_t)items,
                                  .item_ns = ns < 1            ? 1
                                             : ns < UINT32_MAX ? (uint32_t)ns
                                                               : UINT32_MAX};
}

int row_share_run(struct row_share *l, enum row_share_way way, float *out)
{
    const uint64_t T = l->batch.tokens, lanes = l->desc.lanes;
    const uint64_t slices = l->hit_count * l->slices;
    struct numoe_pool_job job = {.context = l};

    l->out = out;
    l->epoch++;
    if (!own_records(l))
        add_phase(&job, make_records, (T + RECORD_TOKENS - 1) / RECORD_TOKENS,
                  T * l->desc.hidden * 5);
    if (way == ROW_SHARE_K_SPLIT) {
        add_phase(&job, k_split_lane, lanes, slices * l->shape.bytes);
        add_phase(&job, combine_lane, lanes, 2 * l->row_count * l->desc.hidden * sizeof(float));
    } else {
        add_phase(&job, gate_up_lane, lanes, slices * l->shape.down_offset);
        add_phase(&job, down_lane, lanes, slices * (l->shape.bytes - l->shape.down_offset));
    }
    return numoe_pool_run(l->pool, &job);
}
