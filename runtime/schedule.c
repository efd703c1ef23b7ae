/*
 * The schedule of one call (or of one pass of it, when it has very many tokens): from a batch to
 * hit experts, their lanes, and the rows that each token's output is the sum of.
 *
 * Lane: the unit that a worker takes, an ordered list of runs on the nodes of a group; its runs are
 * summed in order into rows of its own, one for each token it touches. Rows belong to lanes and
 * lanes do not depend on who computes them, so results are the same bits for any number of threads
 * and any stealing. The fixed reduction: a token's output is the sum of its rows in the order in
 * which the lanes were laid out (experts with many tokens first, group by group; then the others).
 *
 * schedule_lanes.c lays out lanes, with numoe_options.batch_invariant schedule_fixed.c;
 * schedule_run.c computes them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule_build.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"

/* ---- the batch ------------------------------------------------------------------------------- */

static bool known_type(enum numoe_type type)
{
    return type == NUMOE_BF16 || type == NUMOE_F32;
}

int numoe_schedule_check(const struct numoe_model *model, uint64_t layer,
                         const struct numoe_batch *batch, struct numoe_error *error)
{
    const struct numoe_model_desc *desc = &model->desc;
    uint64_t cells;

    if (layer >= desc->layers)
        return numoe_error_set(error, -EINVAL, "layer", "%llu of a model of %llu layers",
                               (unsigned long long)layer, (unsigned long long)desc->layers);
    if (batch->tokens == 0)
        return 0;
    if (batch->top_k < 1 || batch->top_k > 64)
        return numoe_error_set(error, -EINVAL, "top_k", "%llu is not in 1..64",
                               (unsigned long long)batch->top_k);
    if (batch->id_bytes != 4 && batch->id_bytes != 8)
        return numoe_error_set(error, -EINVAL, "id_bytes", "%u is neither 4 nor 8",
                               batch->id_bytes);
    if (!batch->x || !batch->ids || !batch->weights || !batch->out)
        return numoe_error_set(error, -EINVAL,
                               !batch->x         ? "x"
                               : !batch->ids     ? "ids"
                               : !batch->weights ? "weights"
                                                 : "out",
                               "is NULL");
    if (!known_type(batch->x_type) || !known_type(batch->out_type))
        return numoe_error_set(error, -EINVAL, known_type(batch->x_type) ? "out_type" : "x_type",
                               "is neither NUMOE_BF16 nor NUMOE_F32");
    if (batch->x_stride && batch->x_stride < desc->hidden)
        return numoe_error_set(error, -EINVAL, "x_stride", "%llu is less than hidden %llu",
                               (unsigned long long)batch->x_stride,
                               (unsigned long long)desc->hidden);
    if (batch->out_stride && batch->out_stride < desc->hidden)
        return numoe_error_set(error, -EINVAL, "out_stride", "%llu is less than hidden %llu",
                               (unsigned long long)batch->out_stride,
                               (unsigned long long)desc->hidden);
    if (!numoe_mul_u64(batch->tokens, batch->top_k, &cells) ||
        !numoe_mul_u64(batch->tokens,
                       batch->x_stride > desc->hidden ? batch->x_stride : desc->hidden, &cells) ||
        cells > INT64_MAX / 8 ||
        !numoe_mul_u64(batch->tokens,
                       batch->out_stride > desc->hidden ? batch->out_stride : desc->hidden,
                       &cells) ||
        cells > INT64_MAX / 8)
        return numoe_error_set(error, -EINVAL, "tokens", "%llu tokens overflow the address space",
                               (unsigned long long)batch->tokens);
    if (batch->strict)
        for (uint64_t i = 0; i < batch->tokens * batch->top_k; i++)
            if (numoe_batch_id(batch, i) >= 0 &&
                (uint64_t)numoe_batch_id(batch, i) >= desc->experts)
                return numoe_error_set(
                    error, -EINVAL, "ids", "token %llu, slot %llu: expert %lld of %llu",
                    (unsigned long long)(i / batch->top_k), (unsigned long long)(i % batch->top_k),
                    (long long)numoe_batch_id(batch, i), (unsigned long long)desc->experts);
    return 0;
}

/* With many tokens an expert is read once for each call of the many-token form. */
static enum numoe_reach choose_reach(const struct numoe_schedule *s)
{
    /* of all pairs the part that experts held here have on average */
    const uint64_t E = numoe_plan_held(s->model->plan).experts, all = s->model->desc.experts;
    const uint64_t slots = s->batch.tokens * s->batch.top_k;
    const uint64_t pairs = slots / all * E + slots % all * E / all;
    const uint64_t hit = pairs < E ? pairs : E, most = s->model->kernels->many_tokens;

    if (pairs == 0)
        return NUMOE_REACH_DOMAIN;
    return numoe_plan_best_reach(s->model->plan, s->model->reach, pairs, hit,
                                 (pairs / hit + most - 1) / most);
}

uint64_t numoe_schedule_pass_of(const struct numoe_model *model, enum numoe_reach reach,
                                uint64_t top_k)
{
    const uint64_t row = model->shape.hidden_tiles * NUMOE_TILE * sizeof(float);
    uint64_t tokens =
        numoe_plan_row_bytes(model->plan->node_count) / (row * top_k * model->reach[reach].rows);

    if (tokens < 64)
        tokens = 64;
    if (tokens > 65536)
        tokens = 65536;
    return tokens;
}

uint64_t numoe_schedule_pass(const struct numoe_schedule *s)
{
    /* without tokens nothing else of the batch was checked */
    return s->batch.tokens ? numoe_schedule_pass_of(s->model, s->reach, s->batch.top_k) : 0;
}

/* ---- building -------------------------------------------------------------------------------- */

/* Whether an entry is for this schedule to look at. */
static bool concerns(const struct numoe_schedule *s, int64_t id)
{
    const struct numoe_batch *batch = &s->batch;
    const bool known = (uint64_t)id < s->model->desc.experts;

    if (id < 0 || (known && (!numoe_model_holds(s->model, (uint64_t)id) ||
                             (batch->elsewhere && batch->elsewhere[id]))))
        return false;
    return (known && batch->deferred && batch->deferred[id]) == (s->part == SCHEDULE_DEFERRED);
}

/* What only the few-token form computes is laid out like others, but for fixed cuts: adding unit
 * after unit to one row is the many-token form's. */
static struct hit hit_of(uint64_t expert, uint32_t tokens, unsigned limit, uint8_t state,
                         bool fixed)
{
    const bool extreme = state & EXPERT_EXTREME;

    return (struct hit){.expert = (uint32_t)expert,
                        .tokens = tokens,
                        .many = tokens > limit && !(fixed && extreme),
                        .few_form = extreme};
}

/* Where the hits lie. */
static void find_parts(struct build *b)
{
    const struct numoe_model *model = b->s->model;

    for (uint32_t h = 0; h < b->hit_count; h++)
        numoe_model_parts(model, b->s->layer, b->hits[h].expert,
                          b->parts + (size_t)h * model->plan->node_count);
}

/* Count experts and sort (token, weight) by expert; equal ids of a token become one entry. */
static int collect(struct build *b, uint32_t *count, uint32_t *last)
{
    struct numoe_schedule *s = b->s;
    const struct numoe_model *model = s->model;
    const struct numoe_batch *batch = &s->batch;
    const uint64_t E = model->desc.experts, K = batch->top_k;
    const uint8_t *state = model->state + s->layer * E;
    const bool fixed = model->context->batch_invariant;
    /* forms that give other bits: always the one */
    const unsigned limit = fixed && !model->kernels->forms_agree ? 0 : model->kernels->few_limit;
    uint32_t pairs = 0, few;

    memset(count, 0, E * sizeof *count);
    memset(last, 0, E * sizeof *last);
    for (uint64_t t = 0; t < s->token_count; t++)
        for (uint64_t j = 0; j < K; j++) {
            const int64_t id = numoe_batch_id(batch, (s->token_begin + t) * K + j);
            if (!concerns(s, id))
                continue;
            if ((uint64_t)id >= E) {
                s->result.skipped++;
                continue;
            }
            if (!(state[id] & EXPERT_PRESENT)) {
                s->result.missing++;
                continue;
            }
            s->result.pairs++;
            if (last[id] != t + 1) {
                last[id] = (uint32_t)(t + 1);
                count[id]++;
            }
        }
    b->hit_count = b->many_count = 0;
    for (uint64_t e = 0; e < E && !fixed; e++)
        if (count[e] > limit)
            b->hits[b->many_count++] = hit_of(e, count[e], limit, state[e], fixed);
    /* most tokens first, stable; insertion from the back keeps ties by index */
    for (uint32_t i = 1; i < b->many_count; i++) {
        const struct hit hit = b->hits[i];
        uint32_t j = i;
        for (; j > 0 && b->hits[j - 1].tokens < hit.tokens; j--)
            b->hits[j] = b->hits[j - 1];
        b->hits[j] = hit;
    }
    few = b->many_count;
    for (uint64_t e = 0; e < E; e++)
        if (count[e] && (fixed || count[e] <= limit))
            b->hits[few++] = hit_of(e, count[e], limit, state[e], fixed);
    b->hit_count = few;
    for (uint32_t h = 0; h < b->hit_count; h++) {
        b->hits[h].first = pairs;
        count[b->hits[h].expert] = pairs; /* from here on: where its next entry goes */
        pairs += b->hits[h].tokens;
    }
    memset(last, 0, E * sizeof *last);
    for (uint64_t t = 0; t < s->token_count; t++)
        for (uint64_t j = 0; j < K; j++) {
            const uint64_t at = (s->token_begin + t) * K + j;
            const int64_t id = numoe_batch_id(batch, at);
            if (!concerns(s, id) || (uint64_t)id >= E || !(state[id] & EXPERT_PRESENT))
                continue;
            if (last[id] == t + 1) {
                b->pair_weight[count[id] - 1] += batch->weights[at];
                continue;
            }
            last[id] = (uint32_t)(t + 1);
            b->pair_token[count[id]] = (uint32_t)t;
            b->pair_weight[count[id]++] = batch->weights[at];
        }
    return 0;
}

/* Rows of each token, in the order in which they were made; then those that came late. */
static int index_rows(struct numoe_schedule *s)
{
    const uint32_t *row_token = s->memory[MEMORY_ROW_TOKEN].data;
    const uint64_t width = s->model->shape.hidden_tiles * NUMOE_TILE;
    const uint32_t *late = s->late ? s->late->token_first + s->token_begin : NULL;
    const uint64_t late_rows = late ? late[s->token_count] - late[0] : 0;
    const bool fixed = s->model->context->batch_invariant;
    int rc = schedule_renew(s, MEMORY_TOKEN_FIRST, (s->token_count + 2) * sizeof *s->token_first);

    if (!rc)
        rc = schedule_renew(s, MEMORY_TOKEN_ROWS,
                            (s->row_count + late_rows + 1) * sizeof *s->token_rows);
    if (!rc)
        rc = schedule_renew(s, MEMORY_TOKEN_ENDS, fixed ? s->row_count + late_rows + 1 : 0);
    if (!rc)
        rc = schedule_renew(s, MEMORY_ROWS, s->row_count * width * sizeof(float));
    if (rc)
        return rc;
    s->token_first = s->memory[MEMORY_TOKEN_FIRST].data;
    s->token_rows = s->memory[MEMORY_TOKEN_ROWS].data;
    s->rows = s->memory[MEMORY_ROWS].data;
    s->token_ends = fixed ? s->memory[MEMORY_TOKEN_ENDS].data : NULL;
    memset(s->token_first, 0, (s->token_count + 2) * sizeof *s->token_first);
    for (uint32_t r = 0; r < s->row_count; r++)
        s->token_first[(row_token[r] & ~ROW_ENDS) + 2]++;
    for (uint64_t t = 0; late && t < s->token_count; t++)
        s->token_first[t + 2] += late[t + 1] - late[t];
    for (uint64_t t = 2; t < s->token_count + 2; t++)
        s->token_first[t] += s->token_first[t - 1];
    for (uint32_t r = 0; r < s->row_count; r++) {
        const uint32_t at = s->token_first[(row_token[r] & ~ROW_ENDS) + 1]++;

        s->token_rows[at] = s->rows + r * width;
        if (fixed)
            s->token_ends[at] = (row_token[r] & ROW_ENDS) != 0;
    }
    for (uint64_t t = 0; late && t < s->token_count; t++)
        for (uint32_t r = late[t]; r < late[t + 1]; r++) {
            const uint32_t at = s->token_first[t + 1]++;

            s->token_rows[at] = s->late->token_rows[r];
            if (fixed)
                s->token_ends[at] = s->late->token_ends[r];
        }
    return 0;
}

/* Lanes by planned worker, keeping their order; then the share of each of the pool's workers. */
static int order_lanes(struct build *b, uint32_t workers)
{
    struct numoe_schedule *s = b->s;
    const uint32_t planned = s->model->plan->worker_count;
    uint32_t *first;
    struct schedule_lane *sorted;
    int rc = schedule_renew(s, MEMORY_LANE_FIRST, numoe_schedule_first_bytes(s->model, workers));

    if (!rc)
        rc = schedule_renew(s, MEMORY_LANE_SORTED, s->lane_count * sizeof *sorted);
    if (rc)
        return rc;
    first = s->memory[MEMORY_LANE_FIRST].data;
    sorted = s->memory[MEMORY_LANE_SORTED].data;
    memset(first, 0, (planned + 2) * sizeof *first);
    for (uint32_t i = 0; i < s->lane_count; i++)
        first[b->lane_worker[i] + 2]++;
    for (uint32_t w = 2; w < planned + 2; w++)
        first[w] += first[w - 1];
    for (uint32_t i = 0; i < s->lane_count; i++)
        sorted[first[b->lane_worker[i] + 1]++] = s->lanes[i];
    if (s->lane_count)
        memcpy(s->lanes, sorted, s->lane_count * sizeof *sorted);
    if (workers == planned) {
        s->lane_first = first;
    } else {
        s->lane_first = first + planned + 2;
        for (uint32_t w = 0; w <= workers; w++)
            s->lane_first[w] = (uint32_t)((uint64_t)s->lane_count * w / workers);
    }
    return 0;
}

uint64_t numoe_schedule_first_bytes(const struct numoe_model *model, uint32_t workers)
{
    return ((uint64_t)model->plan->worker_count + 2 + workers + 2) * sizeof(uint32_t);
}

uint64_t numoe_schedule_scratch(const struct numoe_model *model)
{
    const uint64_t page = (uint64_t)2 << 20;
    uint64_t bytes = model->kernels->scratch_bytes(&model->shape);

    return numoe_round_up_u64(bytes + 1, bytes > page ? page : 4096, &bytes) ? bytes : UINT64_MAX;
}

static int reserve_work(struct numoe_schedule *s, uint32_t workers)
{
    const struct numoe_slice_shape *shape = &s->model->shape;
    const struct numoe_kernels *k = s->model->kernels;
    const uint64_t scratch = numoe_schedule_scratch(s->model);
    uint64_t records, all;
    int rc;

    s->record_stride = k->record_bytes(shape);
    /* x is gone by the time that deferred experts are computed */
    s->own_records = s->part == SCHEDULE_NOW && s->token_count <= SCHEDULE_OWN_TOKENS;
    if (!numoe_mul_u64(s->own_records ? workers * (uint64_t)SCHEDULE_OWN_TOKENS : s->token_count,
                       s->record_stride, &records) ||
        !numoe_mul_u64(scratch, workers, &all))
        return -EOVERFLOW;
    s->scratch_stride = scratch;
    rc = schedule_renew(s, MEMORY_RECORDS, records);
    if (!rc)
        rc = schedule_renew(s, MEMORY_SCRATCH, all);
    if (!rc)
        rc = schedule_grow(s, MEMORY_OWN_EPOCH,
                           (uint64_t)workers * SCHEDULE_OWN_TOKENS * sizeof *s->own_epoch);
    if (rc)
        return rc;
    s->records = s->memory[MEMORY_RECORDS].data;
    s->scratch = s->memory[MEMORY_SCRATCH].data;
    s->own_epoch = s->memory[MEMORY_OWN_EPOCH].data;
    /* epoch 0 is what fresh memory says */
    if (++s->epoch == 0) {
        memset(s->own_epoch, 0, (size_t)workers * SCHEDULE_OWN_TOKENS * sizeof *s->own_epoch);
        s->epoch = 1;
    }
    /* enough combine items for everybody, whole rows when tokens alone are enough */
    s->combine_chunks = (uint32_t)((2 * (uint64_t)workers + s->token_count - 1) / s->token_count);
    if (s->combine_chunks > (shape->hidden_tiles + 7) / 8)
        s->combine_chunks = (uint32_t)((shape->hidden_tiles + 7) / 8);
    s->combine_tiles =
        (uint32_t)((shape->hidden_tiles + s->combine_chunks - 1) / s->combine_chunks);
    return 0;
}

int numoe_schedule_begin(struct numoe_schedule *s, struct numoe_model *model, uint64_t layer,
                         const struct numoe_batch *batch)
{
    const uint64_t node_bytes = model->context->plan->node_count * sizeof *s->node_bytes;
    int rc = schedule_renew(s, MEMORY_SEEN, model->desc.experts);

    if (!rc)
        rc = schedule_renew(s, MEMORY_NODE_BYTES, node_bytes);
    if (rc)
        return rc;
    memset(s->memory[MEMORY_SEEN].data, 0, model->desc.experts);
    s->node_bytes = s->memory[MEMORY_NODE_BYTES].data;
    memset(s->node_bytes, 0, node_bytes);
    s->model = model;
    s->layer = layer;
    s->batch = *batch;
    s->result = (struct numoe_result)NUMOE_RESULT_INIT;
    s->reach = model->context->batch_invariant ? NUMOE_REACH_DOMAIN : choose_reach(s);
    return 0;
}

/* The bytes of an expert on each node, for numoe_node_stats. */
static void count_nodes(const struct numoe_schedule *s, uint64_t expert, uint64_t bias_bytes)
{
    const struct numoe_model *model = s->model;
    const uint64_t q = s->layer * model->desc.experts + expert;
    const uint32_t nodes = model->context->plan->node_count;

    for (uint32_t n = 0; n < model->plan->node_count; n++) {
        const uint32_t *start = &model->nodes[n].start[q];
        const uint64_t bytes = (start[1] - start[0]) * model->shape.bytes +
                               (n == model->bias_node[q] ? bias_bytes : 0);

        if (model->home[n] != NUMOE_NONE)
            s->node_bytes[model->home[n]] += bytes;
        for (uint32_t r = 0; model->home[n] == NUMOE_NONE && r < nodes; r++)
            s->node_bytes[r] += numoe_model_bytes_on(model, n, r, bytes);
    }
}

void numoe_schedule_see(struct numoe_schedule *s, uint64_t expert, bool by_workers)
{
    enum { SEEN = 1, READ = 2 };
    const struct numoe_expert_shape held = numoe_plan_held(s->model->plan);
    uint8_t *seen = s->memory[MEMORY_SEEN].data;

    if (by_workers && !(seen[expert] & READ)) {
        seen[expert] |= READ;
        count_nodes(s, expert, held.expert_bytes);
    }
    if (seen[expert] & SEEN)
        return;
    seen[expert] |= SEEN;
    s->result.experts_hit++;
    s->result.expert_bytes += held.slices * held.slice_bytes + held.expert_bytes;
}

/*
 * A layout is kept. It depends on how many tokens each hit expert has and which, on how many slices
 * of it each node holds, and on the workers; not on which experts they are, where these lie or what
 * they weigh. So one token's call is mostly laid out as the one before, layer after layer, and what
 * would be as many lines of lanes and runs as cores have read is not written again. The shape is
 * all that as numbers; it is written down for as few tokens as workers quantise for themselves,
 * since with more no two calls are alike.
 */
enum { SHAPE_OF_CALL = 7, SHAPE_OF_HIT = 2 };

uint64_t numoe_schedule_shape_bytes(const struct numoe_model *model, uint64_t tokens,
                                    uint64_t top_k)
{
    const uint64_t few = tokens < SCHEDULE_OWN_TOKENS ? tokens : SCHEDULE_OWN_TOKENS;
    const uint64_t pairs = few * top_k, held = numoe_plan_held(model->plan).experts;
    const uint64_t hits = pairs < held ? pairs : held;

    return (SHAPE_OF_CALL + hits * (SHAPE_OF_HIT + model->plan->node_count) + pairs) *
           sizeof(uint64_t);
}

struct shape {
    uint64_t *numbers, count;
    bool differs;
};

static void note(struct shape *shape, uint64_t number)
{
    shape->differs |= shape->numbers[shape->count] != number;
    shape->numbers[shape->count++] = number;
}

/* Write the shape down; *same: as it was when the layout that is there was made. */
static int note_shape(struct build *b, uint32_t workers, bool *same)
{
    struct numoe_schedule *s = b->s;
    const uint32_t nodes = s->model->plan->node_count;
    const uint64_t had = s->shape_count;
    struct shape shape = {0};
    int rc;

    *same = false;
    s->shape_count = 0;
    if (s->token_count > SCHEDULE_OWN_TOKENS)
        return 0;
    rc = schedule_grow(s, MEMORY_SHAPE,
                       numoe_schedule_shape_bytes(s->model, s->token_count, s->batch.top_k));
    if (rc)
        return rc;
    shape.numbers = s->memory[MEMORY_SHAPE].data;
    note(&shape, (uintptr_t)s->model);
    note(&shape, s->part);
    note(&shape, s->token_count);
    note(&shape, workers);
    note(&shape, s->reach);
    note(&shape, b->hit_count);
    note(&shape, b->many_count);
    for (uint32_t h = 0; h < b->hit_count; h++) {
        note(&shape, b->hits[h].tokens);
        note(&shape, (uint64_t)b->hits[h].many << 1 | b->hits[h].few_form);
        for (uint32_t i = 0; i < nodes; i++)
            note(&shape, part_of(b, h, i)->count);
        for (uint32_t i = 0; i < b->hits[h].tokens; i++)
            note(&shape, b->pair_token[b->hits[h].first + i]);
    }
    *same = !shape.differs && shape.count == had;
    s->shape_count = shape.count;
    return 0;
}

/* A core reads some 20 bytes a ns and does some 300 operations. */
static uint64_t lane_time(const struct numoe_schedule *s)
{
    enum { BYTES_A_NS = 20, TOKEN_BYTES_A_NS = 80 };
    uint64_t ns = 0;

    for (uint32_t r = 0; r < s->run_count; r++) {
        const uint64_t bytes = s->runs[r].slice_count * s->model->shape.bytes;

        ns += bytes / BYTES_A_NS + bytes / TOKEN_BYTES_A_NS * s->runs[r].tokens;
    }
    return ns / ((uint64_t)s->lane_count + 1);
}

/* The layout anew. */
static int lay_out_anew(struct build *b, uint32_t workers)
{
    struct numoe_schedule *s = b->s;
    const struct numoe_plan *plan = s->model->plan;
    int rc;

    s->lane_count = s->run_count = s->entry_count = s->row_count = 0;
    memset(b->load, 0, plan->worker_count * sizeof *b->load);
    memset(b->token_set, 0, s->token_count * sizeof *b->token_set);
    rc = schedule_lay_out(b);
    if (!rc)
        rc = order_lanes(b, workers);
    if (!rc)
        s->lane_ns = lane_time(s);
    return rc;
}

/* The builder's arrays, widest elements first. */
uint64_t numoe_schedule_build_bytes(const struct numoe_model *model, uint64_t tokens,
                                    uint64_t pairs, uint64_t hits)
{
    return hits * model->plan->node_count * sizeof(struct model_part) + hits * sizeof(uint64_t) +
           model->plan->worker_count * sizeof(uint64_t) + hits * sizeof(struct hit) +
           (2 * pairs + 2 * model->desc.experts + 2 * tokens + model->plan->worker_count) *
               sizeof(uint32_t);
}

int numoe_schedule_build(struct numoe_schedule *s, uint32_t workers)
{
    const struct numoe_model *model = s->model;
    const uint64_t E = model->desc.experts, T = s->token_count;
    const uint64_t pairs = T * s->batch.top_k, held = numoe_plan_held(model->plan).experts;
    const uint64_t hits = pairs < held ? pairs : held;
    struct build b = {.s = s};
    uint8_t *p;
    uint32_t *count, *last;
    unsigned saved;
    bool same = false;
    int rc;

    rc = schedule_renew(s, MEMORY_BUILD, numoe_schedule_build_bytes(model, T, pairs, hits));
    if (rc)
        return rc;
    p = s->memory[MEMORY_BUILD].data;
    b.parts = (struct model_part *)(void *)p;
    b.slice_count = (uint64_t *)(void *)(b.parts + hits * model->plan->node_count);
    b.load = b.slice_count + hits;
    b.hits = (struct hit *)(void *)(b.load + model->plan->worker_count);
    b.pair_token = (uint32_t *)(void *)(b.hits + hits);
    b.pair_weight = (float *)(void *)(b.pair_token + pairs);
    count = (uint32_t *)(void *)(b.pair_weight + pairs);
    last = count + E;
    b.token_set = last + E;
    b.token_row = b.token_set + T;
    b.heap = b.token_row + T;
    s->hits = b.hits;
    s->parts = b.parts;
    s->pair_weight = b.pair_weight;

    /* weights of equal ids are added here: not under the host's floating-point modes */
    saved = numoe_kernels_enter();
    rc = collect(&b, count, last);
    numoe_kernels_leave(saved);
    if (!rc) {
        find_parts(&b);
        rc = note_shape(&b, workers, &same);
    }
    if (!rc && !same)
        rc = lay_out_anew(&b, workers);
    /* a late schedule's rows are other ones each time */
    if (!rc && (!same || s->late || s->late_indexed))
        rc = index_rows(s);
    if (!rc)
        rc = reserve_work(s, workers);
    if (rc) {
        numoe_schedule_forget(s);
        return rc;
    }
    s->late_indexed = s->late != NULL;
    for (uint32_t h = 0; h < b.hit_count; h++)
        numoe_schedule_see(s, b.hits[h].expert, true);
    return 0;
}
