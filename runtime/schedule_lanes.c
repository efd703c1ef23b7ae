/*
 * Lanes: how the work of hit experts is cut for workers.
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
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule_build.h"

#include <errno.h>

enum {
    LANE_SLICES_LEAST = 2,  /* a few-token lane has fewer than it aims at only to give every
                               worker one */
    RANGE_SLICES_LEAST = 4, /* many tokens: fewer slices before down cost time */
    FEW_LANES = 2,          /* few tokens: at least so many times the plan's lanes of a node, and
                               one more where those are too short to be halved at the end ... */
    LANES_MOST = 8          /* ... and so many at most, as finely as few tokens are cut */
};

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

int schedule_lay_out(struct build *b)
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
