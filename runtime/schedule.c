/*
 * The schedule of one call (or of one pass of it, when it has very many tokens).
 *
 * Lane: the unit that a worker takes, an ordered list of runs on the nodes of a group; its runs are
 * summed in order into rows of its own, one for each token it touches. Rows belong to lanes and
 * lanes do not depend on who computes them, so results are the same bits for any number of threads
 * and any stealing. The fixed reduction: a token's output is the sum of its rows in the order in
 * which the lanes were laid out (experts with many tokens first, group by group; then the others).
 *
 * Nodes work in groups, one row for a token of an expert in each: those that share memory channels
 * with few tokens, as far as the plan finds worth the trip with many (topo/plan_reach.c). Laying
 * out one group, with the share of each hit expert that the plan placed on its nodes:
 *
 *   many tokens   an expert with more tokens than the few-token form pays for: a lane for each
 *                 block of its tokens, and for each range of slices where one block would be more
 *                 than a lane's share of the work; when few experts are most of the work they
 *                 are cut so that the workers end together
 *   few tokens    the others, in expert order, as one sequence of slices cut into rounds of one
 *                 lane a worker, of equal cost within a round and less in the last ones, wherever
 *                 the cut falls; so one token's six experts fill any number of workers evenly, and
 *                 its rows are as many as lanes, not experts x lanes
 *
 * With numoe_options.batch_invariant lanes are laid out by schedule_fixed.c instead.
 *
 * schedule_run.c is what computes it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule_build.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"

enum {
    LANE_SLICES_LEAST = 2,  /* a few-token lane has fewer than it aims at only to give every
                               worker one */
    RANGE_SLICES_LEAST = 4, /* many tokens: fewer slices before down cost time */
    FEW_LANES = 2,          /* few tokens: at least so many times the plan's lanes of a node, and
                               one more where those are too short to be halved at the end ... */
    LANES_MOST = 8          /* ... and so many at most, as finely as few tokens are cut */
};

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

int schedule_push_lane(struct build *b)
{
    struct numoe_schedule *s = b->s;
    int rc = schedule_grow(s, MEMORY_LANES, (s->lane_count + 1) * sizeof *s->lanes);

    if (rc)
        return rc;
    if (s->lane_count + 1 >= NUMOE_POOL_MAX_ITEMS)
        return -EOVERFLOW;
    s->lanes = s->memory[MEMORY_LANES].data;
    s->lanes[s->lane_count++] = (struct schedule_lane){s->run_count, 0};
    b->row_set++;
    return 0;
}

int schedule_push_run(struct build *b, uint32_t h, uint32_t node, uint64_t first, uint64_t count,
                      uint32_t token, uint32_t tokens)
{
    struct numoe_schedule *s = b->s;
    const struct hit *hit = &b->hits[h];
    struct schedule_run *run;
    int rc = schedule_grow(s, MEMORY_RUNS, (s->run_count + 1) * sizeof *s->runs);

    if (!rc)
        rc = schedule_grow(s, MEMORY_ENTRIES,
                           ((uint64_t)s->entry_count + tokens) * sizeof *s->entries);
    if (!rc)
        rc = schedule_grow(s, MEMORY_ROW_TOKEN,
                           ((uint64_t)s->row_count + tokens) * sizeof(uint32_t));
    if (rc)
        return rc;
    if (s->entry_count > UINT32_MAX / 2)
        return -EOVERFLOW;
    s->runs = s->memory[MEMORY_RUNS].data;
    s->entries = s->memory[MEMORY_ENTRIES].data;
    uint32_t *row_token = s->memory[MEMORY_ROW_TOKEN].data;

    run = &s->runs[s->run_count++];
    *run = (struct schedule_run){
        .first_slice = first,
        .slice_count = count,
        .hit = h,
        .node = node,
        .first_pair = hit->first + token,
        .first_entry = s->entry_count,
        .tokens = tokens,
        .many = hit->many && !hit->few_form,
    };
    for (uint32_t i = token; i < token + tokens; i++) {
        const uint32_t t = b->pair_token[hit->first + i];
        struct schedule_entry *e = &s->entries[s->entry_count++];
        e->token = t;
        e->add = b->token_set[t] == b->row_set;
        if (!e->add) {
            b->token_set[t] = b->row_set;
            b->token_row[t] = s->row_count;
            row_token[s->row_count++] = t | (b->ends ? ROW_ENDS : 0);
        }
        e->row = b->token_row[t];
    }
    s->lanes[s->lane_count - 1].run_count++;
    return 0;
}

struct group schedule_group(const struct model_groups *groups, const struct numoe_plan *plan,
                            uint32_t g)
{
    struct group group = {
        .nodes = groups->nodes + groups->first[g],
        .workers = groups->workers + groups->worker_first[g],
        .node_count = groups->first[g + 1] - groups->first[g],
        .worker_count = groups->worker_first[g + 1] - groups->worker_first[g],
    };

    for (uint32_t i = 0; i < group.node_count; i++)
        group.lanes += plan->nodes[group.nodes[i]].lanes;
    if (group.lanes == 0)
        group.lanes = 1;
    return group;
}

/* Whether the group's i-th worker comes before its j-th: less loaded, or as much and first. */
static bool comes_before(const struct build *b, const struct group *group, uint32_t i, uint32_t j)
{
    const uint64_t a = b->load[group->workers[i]], c = b->load[group->workers[j]];

    return a != c ? a < c : i < j;
}

/* The heap's entry at `at` may belong further down. */
static void sift(struct build *b, const struct group *group, uint32_t at)
{
    uint32_t *heap = b->heap;
    const uint32_t moved = heap[at];

    for (;;) {
        uint32_t child = 2 * at + 1;

        if (child + 1 < group->worker_count && comes_before(b, group, heap[child + 1], heap[child]))
            child++;
        if (child >= group->worker_count || !comes_before(b, group, heap[child], moved))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

int schedule_give_lane(struct build *b, const struct group *group, uint32_t lane, uint64_t cost)
{
    struct numoe_schedule *s = b->s;
    uint32_t worker;
    int rc = schedule_grow(s, MEMORY_LANE_WORKER, s->lane_count * sizeof *b->lane_worker);

    if (rc)
        return rc;
    b->lane_worker = s->memory[MEMORY_LANE_WORKER].data;
    if (b->heap_of != group->workers) {
        b->heap_of = group->workers;
        for (uint32_t i = 0; i < group->worker_count; i++)
            b->heap[i] = i;
        for (uint32_t i = group->worker_count / 2; i-- > 0;)
            sift(b, group, i);
    }
    worker = group->workers[b->heap[0]];
    b->load[worker] += cost;
    b->lane_worker[lane] = worker;
    sift(b, group, 0);
    return 0;
}

/* Slices [first, first + count) of hit h's share of the group, a run for each node's part. */
static int push_runs(struct build *b, const struct group *group, uint32_t h, uint64_t first,
                     uint64_t count, uint32_t token, uint32_t tokens)
{
    uint64_t before = 0;
    int rc = 0;

    for (uint32_t i = 0; !rc && i < group->node_count; i++) {
        const struct model_part *part = part_of(b, h, group->nodes[i]);
        const uint64_t begin = first > before ? first - before : 0;
        const uint64_t end = first + count > before ? first + count - before : 0;
        const uint64_t stop = end < part->count ? end : part->count;

        if (begin < stop)
            rc = schedule_push_run(b, h, group->nodes[i], begin, stop - begin, token, tokens);
        before += part->count;
    }
    return rc;
}

bool schedule_cut_evenly(const struct build *b, const struct group *group, uint32_t h,
                         uint64_t total, uint64_t unit, struct numoe_plan_cut *cut)
{
    const uint64_t slices = b->slice_count[h];
    const uint32_t tokens = b->hits[h].tokens;
    const uint64_t own = schedule_hit_cost(b, h);
    const uint64_t experts = own ? total / own + (total % own > own / 2) : 0;

    if (experts == 0 || !numoe_plan_cuts_evenly(group->worker_count, experts))
        return false;
    *cut = numoe_plan_even_cut(group->worker_count, experts, slices, unit, tokens,
                               b->s->model->kernels->many_tokens);
    return true;
}

struct numoe_plan_cut schedule_cut(const struct build *b, const struct group *group, uint32_t h,
                                   uint64_t total, uint64_t ranges_most)
{
    const uint64_t slices = b->slice_count[h], share = total / group->lanes + 1;
    const uint32_t tokens = b->hits[h].tokens, most = b->s->model->kernels->many_tokens;
    uint32_t blocks = (tokens + most - 1) / most;
    uint64_t ranges;

    /* by the largest block: one that is too large by a token would be cut in ranges */
    while (slices * numoe_plan_slice_cost((tokens + blocks - 1) / blocks) > share &&
           tokens / (blocks + 1) >= NUMOE_PLAN_BLOCK_TOKENS_LEAST)
        blocks++;
    ranges = (slices * numoe_plan_slice_cost((tokens + blocks - 1) / blocks) + share - 1) / share;
    if (ranges > ranges_most)
        ranges = ranges_most;
    return (struct numoe_plan_cut){blocks, 0, blocks * (ranges ? ranges : 1)};
}

/*
 * Where lanes are cut, by cost. When every worker gets several lanes, in rounds, those of the last
 * rounds are ever smaller, as long as they have slices enough: who is done early takes small ones
 * from others, and nobody is waited for longer than the smallest takes.
 */
struct cuts {
    uint64_t round, rounds; /* lanes of a round; how many rounds */
    uint64_t halvings;    /* the last round but so many, and all before it, weigh 2^halvings ... */
    uint64_t total, all;  /* cost and weight of all lanes */
    uint64_t cut, before; /* cuts made, and the weight before the last of them */
};

/* ... then each half of the one before, and the last two 1. */
static uint64_t weight_of(const struct cuts *c, uint64_t cut)
{
    const uint64_t left = c->rounds - 1 - cut / c->round, power = left ? left - 1 : 0;

    return (uint64_t)1 << (power < c->halvings ? power : c->halvings);
}

static struct cuts cuts_of(const struct group *group, uint64_t total, uint64_t slices,
                           uint64_t lanes)
{
    struct cuts c = {.round = lanes > group->worker_count ? group->worker_count : lanes,
                     .total = total};

    c.rounds = lanes / c.round;
    while (c.halvings + 2 < c.rounds && slices / lanes >> (c.halvings + 1) >= LANE_SLICES_LEAST)
        c.halvings++;
    for (uint64_t i = 0; i < c.rounds; i++)
        c.all += weight_of(&c, i * c.round) * c.round;
    return c;
}

/* Lanes of equal cost. */
static struct cuts cuts_evenly(uint64_t total, uint64_t lanes)
{
    return (struct cuts){.round = lanes, .rounds = 1, .total = total, .all = lanes};
}

/* The cost before the next cut that is ahead; several are passed at once when slices are coarse.
 * UINT64_MAX: all that is left belongs to one lane. Exact without overflow. */
static uint64_t next_cut(struct cuts *c, uint64_t done)
{
    const uint64_t last = c->round * c->rounds - 1;
    uint64_t cost = 0;

    while (c->cut < last && cost <= done) {
        c->before += weight_of(c, c->cut++);
        cost = c->total / c->all * c->before + c->total % c->all * c->before / c->all;
    }
    return cost <= done ? UINT64_MAX : cost;
}

uint64_t schedule_few_lanes(const struct group *group, uint64_t slices)
{
    uint64_t least = slices / LANE_SLICES_LEAST > group->worker_count ? slices / LANE_SLICES_LEAST
                                                                      : group->worker_count;
    uint64_t lanes = slices / SCHEDULE_LANE_SLICES, coarse = FEW_LANES * (uint64_t)group->lanes;

    if (slices < 2 * LANE_SLICES_LEAST * coarse)
        coarse += group->lanes;
    if (least > coarse)
        least = coarse;
    if (lanes < least)
        lanes = least;
    if (lanes > (uint64_t)LANES_MOST * group->lanes)
        lanes = (uint64_t)LANES_MOST * group->lanes;
    /* rounds of lanes, one for every worker in each */
    if (lanes > group->worker_count)
        lanes += group->worker_count - 1 - (lanes - 1) % group->worker_count;
    return lanes;
}

/* Pieces of work laid end to end and cut into lanes. */
struct line {
    struct build *b;
    const struct group *group;
    struct cuts cuts;
    bool open;                 /* a lane is */
    uint64_t done, begin, end; /* cost of what is laid; and where the open lane begins and ends */
};

static int end_lane(struct line *line)
{
    struct build *b = line->b;

    line->open = false;
    return schedule_give_lane(b, line->group, b->s->lane_count - 1, line->done - line->begin);
}

/* All slices of hit h for tokens [token, token + tokens) of it. */
static int lay_piece(struct line *line, uint32_t h, uint32_t token, uint32_t tokens)
{
    struct build *b = line->b;
    const uint64_t cost = numoe_plan_slice_cost(tokens);
    int rc = 0;

    for (uint64_t at = 0; !rc && at < b->slice_count[h];) {
        const uint64_t left = b->slice_count[h] - at;
        uint64_t take = left;

        if (!line->open) {
            line->end = next_cut(&line->cuts, line->done);
            rc = schedule_push_lane(b);
            if (rc)
                break;
            line->open = true;
            line->begin = line->done;
        }
        /* to the nearest slice, at least one */
        if (line->end != UINT64_MAX)
            take = (line->end - line->done + cost / 2) / cost;
        if (take == 0)
            take = 1;
        if (take > left)
            take = left;
        rc = push_runs(b, line->group, h, at, take, token, tokens);
        at += take;
        line->done += take * cost;
        if (!rc && line->end != UINT64_MAX && line->done + cost / 2 >= line->end)
            rc = end_lane(line);
    }
    return rc;
}

/* A lane, or several of equal cost, for a block alone. */
static int lay_block(struct build *b, const struct group *group, uint32_t h, uint32_t token,
                     uint32_t tokens, uint64_t lanes)
{
    struct line line = {.b = b, .group = group};
    int rc;

    line.cuts = cuts_evenly(b->slice_count[h] * numoe_plan_slice_cost(tokens), lanes);
    rc = lay_piece(&line, h, token, tokens);
    return !rc && line.open ? end_lane(&line) : rc;
}

/* Blocks of the first hits, one after another. */
struct walk {
    uint32_t h, i, token, tokens; /* block i of hit h is tokens [token, token + tokens) of it */
};

/* On to the next block of hits [0, end); it starts with .tokens 0. @return whether there is one */
static bool next_block(const struct build *b, struct walk *w, uint32_t end)
{
    const struct hit *hit = &b->hits[w->h];

    if (w->tokens && w->i + 1 < hit->cut.blocks) {
        w->i++;
        w->token += w->tokens;
    } else {
        w->h += w->tokens != 0;
        w->i = w->token = 0;
        while (w->h < end && !b->slice_count[w->h])
            w->h++; /* the group has none of it */
        hit = &b->hits[w->h];
    }
    if (w->h < end)
        w->tokens = schedule_block_end(hit->tokens, hit->cut.blocks, w->i) - w->token;
    return w->h < end;
}

/* The first hits, while each is too much for one worker. *laid: how many. */
static int lay_evenly(struct build *b, const struct group *group, uint64_t total, uint32_t *laid)
{
    struct line line = {.b = b, .group = group};
    struct numoe_plan_cut first = {0, 0, 0};
    struct walk walk = {.tokens = 0}, rest;
    uint64_t part = 0, whole, cost = 0, lanes;
    int rc = 0;

    for (*laid = 0; *laid < b->many_count; ++*laid) {
        if (!b->slice_count[*laid])
            continue;
        if (!schedule_cut_evenly(b, group, *laid, total, 1, &b->hits[*laid].cut))
            break;
        if (part == 0)
            first = b->hits[*laid].cut;
        part += schedule_hit_cost(b, *laid);
    }
    if (part == 0)
        return 0;
    /* the part of the first one's cut that these are of all the work */
    whole = first.whole * part / total;
    lanes = (first.lanes * part + total / 2) / total;
    for (uint64_t i = 0; !rc && i < whole && next_block(b, &walk, *laid); i++)
        rc = lay_block(b, group, walk.h, walk.token, walk.tokens, 1);
    for (rest = walk; next_block(b, &rest, *laid);)
        cost += b->slice_count[rest.h] * numoe_plan_slice_cost(rest.tokens);
    line.cuts = cuts_evenly(cost, lanes ? lanes : 1);
    while (!rc && next_block(b, &walk, *laid))
        rc = lay_piece(&line, walk.h, walk.token, walk.tokens);
    return !rc && line.open ? end_lane(&line) : rc;
}

static int lay_many(struct build *b, const struct group *group, uint64_t total)
{
    uint32_t h;
    int rc = lay_evenly(b, group, total, &h);

    for (; !rc && h < b->many_count; h++) {
        const uint64_t slices = b->slice_count[h];
        const uint32_t tokens = b->hits[h].tokens;
        struct numoe_plan_cut cut;

        if (slices == 0)
            continue;
        cut = schedule_cut(b, group, h, total, slices / RANGE_SLICES_LEAST);
        for (uint32_t i = 0, token = 0; !rc && i < cut.blocks; i++) {
            const uint32_t end = schedule_block_end(tokens, cut.blocks, i);

            rc = lay_block(b, group, h, token, end - token, cut.lanes / cut.blocks);
            token = end;
        }
    }
    return rc;
}

static int lay_few(struct build *b, const struct group *group)
{
    struct line line = {.b = b, .group = group};
    uint64_t total = 0, slices = 0;
    int rc = 0;

    for (uint32_t h = b->many_count; h < b->hit_count; h++) {
        slices += b->slice_count[h];
        total += schedule_hit_cost(b, h);
    }
    if (slices == 0)
        return 0;
    line.cuts = cuts_of(group, total, slices, schedule_few_lanes(group, slices));
    for (uint32_t h = b->many_count; !rc && h < b->hit_count; h++)
        rc = lay_piece(&line, h, 0, b->hits[h].tokens);
    return !rc && line.open ? end_lane(&line) : rc;
}

/* Experts with many tokens, or the others, on one group. */
static int lay_group(struct build *b, const struct group *group, bool many)
{
    uint64_t total = 0;

    for (uint32_t h = 0; h < b->hit_count; h++) {
        b->slice_count[h] = 0;
        for (uint32_t i = 0; i < group->node_count; i++)
            b->slice_count[h] += part_of(b, h, group->nodes[i])->count;
        total += schedule_hit_cost(b, h);
    }
    return many ? lay_many(b, group, total) : lay_few(b, group);
}

static int lay_out(struct build *b)
{
    const struct numoe_model *model = b->s->model;
    const struct numoe_plan *plan = model->plan;

    if (model->context->batch_invariant)
        return schedule_lay_fixed(b);
    for (int many = 1; many >= 0; many--) {
        const struct model_groups *groups = &model->groups[many ? b->s->reach : NUMOE_REACH_DOMAIN];

        if (many ? b->many_count == 0 : b->many_count == b->hit_count)
            continue;
        for (uint32_t g = 0; g < groups->count; g++) {
            const struct group group = schedule_group(groups, plan, g);
            int rc = lay_group(b, &group, many);

            if (rc)
                return rc;
        }
    }
    return 0;
}

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
    rc = lay_out(b);
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
