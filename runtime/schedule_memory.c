/*
 * The memory of a call. It grows with the largest call so far, or ahead of time: then its pages are
 * touched by the workers, each an even part in order, as lanes and their rows are spread, while
 * calls go on with what they have; only the exchange needs their turn.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule_build.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"

/* Growth below this is not worth looking at what is free. */
#define CHECKED_BYTES ((uint64_t)16 << 20)
#define HUGE_PAGE ((uint64_t)2 << 20)

/* Untouched memory. *data: at least `want` bytes; *got: how many. */
static int map_new(uint64_t want, void **data, uint64_t *got)
{
    if (!numoe_round_up_u64(want, want > HUGE_PAGE ? HUGE_PAGE : 4096, got) || *got > SIZE_MAX / 2)
        return -EOVERFLOW;
    *data = mmap(NULL, *got, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
    if (*data == MAP_FAILED)
        return -ENOMEM;
    if (*got >= HUGE_PAGE)
        madvise(*data, *got, MADV_HUGEPAGE); /* only speed depends on it */
    return 0;
}

static void unmap(struct grow *g)
{
    if (g->data)
        munmap(g->data, g->bytes);
    *g = (struct grow){NULL, 0};
}

/* Exactly `want`, more than there is. */
static int map(struct numoe_schedule *s, enum schedule_memory use, uint64_t want, bool keep)
{
    struct grow *g = &s->memory[use];
    void *data;
    int rc;

    if (!keep) {
        s->memory_bytes -= g->bytes;
        unmap(g);
    }
    rc = map_new(want, &data, &want);
    if (rc)
        return rc;
    if (g->data)
        memcpy(data, g->data, g->bytes);
    s->memory_bytes += want - g->bytes;
    unmap(g);
    *g = (struct grow){data, want};
    return 0;
}

/* The kernel promises what it has not, and kills who touches it. */
static bool has_room(uint64_t bytes)
{
    return bytes < CHECKED_BYTES || bytes <= numoe_memory_room();
}

int schedule_more(struct numoe_schedule *s, enum schedule_memory use, uint64_t bytes, bool keep)
{
    uint64_t want;

    if (!numoe_add_u64(bytes, bytes / 2, &want))
        return -EOVERFLOW;
    return has_room(bytes) ? map(s, use, want, keep) : -ENOMEM;
}

void numoe_schedule_forget(struct numoe_schedule *s)
{
    s->shape_count = 0;
}

void numoe_schedule_free(struct numoe_schedule *s)
{
    for (size_t i = 0; i < MEMORY_USES; i++)
        unmap(&s->memory[i]);
    memset(s, 0, sizeof *s);
}

/* ---- ahead of time --------------------------------------------------------------------------- */

/* The most that calls of up to so many tokens lay out, whatever their routing. */
struct most {
    uint64_t tokens, pairs, hits; /* of a pass */
    uint64_t lanes, runs, entries, rows;
};

static uint64_t least_of(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t most_of(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Bounds of schedule_fixed.c's: few tokens and what is split of many have rows of units; what only
 * the few-token form computes counts as few, whatever its tokens. */
static void bound_fixed(const struct numoe_model *model, uint64_t few_pairs, uint64_t lanes,
                        uint64_t workers, struct most *most)
{
    const uint64_t groups = model->groups[NUMOE_REACH_DOMAIN].count;
    uint64_t units, of_group, rows;

    for (uint64_t q = 0; q < model->desc.layers * model->desc.experts; q++)
        if (model->state[q] & EXPERT_EXTREME)
            few_pairs = most->pairs;

    schedule_count_units(model, &units, &of_group);
    rows = most->pairs * groups + few_pairs * units + 36 * lanes * of_group +
           least_of(most->pairs, workers * 4 * model->kernels->many_tokens) * units +
           6 * workers * least_of(most->tokens, model->kernels->many_tokens);
    most->rows = least_of(rows, most->pairs * units);
    most->lanes =
        (2 * most->pairs / NUMOE_PLAN_BLOCK_TOKENS_LEAST + most->hits + 6 * workers) * units;
    most->runs = most->lanes;
    most->entries = most->pairs * units;
}

/*
 * Bounds of schedule_lanes.c's layout. With few tokens a group is cut into lanes of LANE_SLICES, or
 * into three times its plan's lanes when that is more; m tokens of an expert that spans x lanes'
 * worth of slices write at most m (x + 3) rows. With many tokens a block has
 * NUMOE_PLAN_BLOCK_TOKENS_LEAST tokens or more and a row for each, unless it is a range of slices:
 * then it has less than twice as many tokens, and ranges are a tenth more than the plan's lanes at
 * most, but for one a block; when few experts are most of the work they have four lanes a worker,
 * and by rounding at most half as many more, beside one for each block of the most tokens.
 */
static void bound_of(const struct numoe_model *model, uint64_t tokens, uint64_t top_k,
                     struct most *most)
{
    enum { LEAST = NUMOE_PLAN_BLOCK_TOKENS_LEAST, SLICES = SCHEDULE_LANE_SLICES };
    const struct numoe_expert_shape held = numoe_plan_held(model->plan);
    const uint64_t nodes = model->plan->node_count;
    const struct model_groups *domains = &model->groups[NUMOE_REACH_DOMAIN];
    const uint64_t groups = domains->count, workers = domains->worker_first[groups];
    const uint64_t few = least_of(model->kernels->few_limit, tokens);
    uint64_t lanes = 0, wide = 0;
    uint64_t few_lanes, few_pairs, few_rows, few_runs, many_lanes, split;

    *most = (struct most){0};
    for (uint32_t n = 0; n < nodes; n++)
        lanes += model->plan->nodes[n].lanes;
    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES; r++) {
        const uint64_t pass = least_of(tokens, numoe_schedule_pass_of(model, r, top_k));

        most->tokens = most_of(most->tokens, pass);
        wide = most_of(wide, pass * top_k * model->reach[r].rows);
    }
    most->pairs = most->tokens * top_k;
    most->hits = least_of(held.experts, most->pairs);
    few_lanes = most->hits * held.slices / SLICES + 3 * lanes + groups + workers;
    few_pairs = least_of(most->pairs, few * most->hits);
    few_rows = few * few_lanes + 3 * few_pairs * model->reach[NUMOE_REACH_DOMAIN].rows;
    few_runs = few_lanes + most->hits * nodes;
    many_lanes = groups * (most->pairs / LEAST + most->hits) + 2 * lanes + 6 * workers;
    most->lanes = few_lanes + many_lanes;
    split = 36 * lanes + least_of(6 * workers * least_of(most->tokens, model->kernels->many_tokens),
                                  most->pairs * held.slices);
    most->rows = wide + split + few_rows;
    most->runs = few_runs + many_lanes * nodes;
    most->entries = few * few_runs + (most->pairs + split) * nodes;
    if (model->context->batch_invariant)
        bound_fixed(model, few_pairs, lanes, workers, most);
}

/* Of every top_k up to the one given: with fewer experts a token a pass has more tokens. */
static void bound(const struct numoe_model *model, uint64_t tokens, uint64_t top_k,
                  struct most *most)
{
    *most = (struct most){0};
    for (uint64_t k = 1; k <= top_k; k++) {
        struct most some;

        bound_of(model, tokens, k, &some);
        most->tokens = most_of(most->tokens, some.tokens);
        most->pairs = most_of(most->pairs, some.pairs);
        most->hits = most_of(most->hits, some.hits);
        most->lanes = most_of(most->lanes, some.lanes);
        most->runs = most_of(most->runs, some.runs);
        most->entries = most_of(most->entries, some.entries);
        most->rows = most_of(most->rows, some.rows);
    }
}

/* Bytes of every use. */
static void list_bytes(const struct numoe_model *model, const struct most *most, uint64_t late_rows,
                       uint64_t shape_bytes, uint32_t workers, bool deferred,
                       uint64_t bytes[MEMORY_USES])
{
    const struct numoe_slice_shape *shape = &model->shape;
    const uint64_t record = model->kernels->record_bytes(shape);
    const uint64_t own = deferred ? 0 : (uint64_t)workers * SCHEDULE_OWN_TOKENS;
    const bool fixed = model->context->batch_invariant;

    bytes[MEMORY_LANES] = (most->lanes + 1) * sizeof(struct schedule_lane);
    bytes[MEMORY_RUNS] = (most->runs + 1) * sizeof(struct schedule_run);
    bytes[MEMORY_ENTRIES] = most->entries * sizeof(struct schedule_entry);
    bytes[MEMORY_TOKEN_FIRST] = (most->tokens + 2) * sizeof(uint32_t);
    bytes[MEMORY_TOKEN_ROWS] = (most->rows + late_rows + 1) * sizeof(float *);
    bytes[MEMORY_LANE_FIRST] = numoe_schedule_first_bytes(model, workers);
    bytes[MEMORY_RECORDS] = (most->tokens > own ? most->tokens : own) * record;
    bytes[MEMORY_ROWS] = most->rows * shape->hidden_tiles * NUMOE_TILE * sizeof(float);
    bytes[MEMORY_SCRATCH] = numoe_schedule_scratch(model) * workers;
    bytes[MEMORY_OWN_EPOCH] = (uint64_t)workers * SCHEDULE_OWN_TOKENS * sizeof(uint32_t);
    bytes[MEMORY_BUILD] = numoe_schedule_build_bytes(model, most->tokens, most->pairs, most->hits);
    bytes[MEMORY_ROW_TOKEN] = most->rows * sizeof(uint32_t);
    bytes[MEMORY_SEEN] = model->desc.experts;
    bytes[MEMORY_NODE_BYTES] = model->context->plan->node_count * sizeof(uint64_t);
    bytes[MEMORY_LANE_WORKER] = (most->lanes + 1) * sizeof(uint32_t);
    bytes[MEMORY_LANE_SORTED] = (most->lanes + 1) * sizeof(struct schedule_lane);
    bytes[MEMORY_LANE_COST] = fixed ? (most->lanes + 1) * SCHEDULE_LANE_COST_BYTES : 0;
    bytes[MEMORY_LANE_ORDER] = fixed ? (most->lanes + 1) * sizeof(uint32_t) : 0;
    bytes[MEMORY_SHAPE] = shape_bytes;
    bytes[MEMORY_TOKEN_ENDS] = fixed ? most->rows + late_rows + 1 : 0;
}

void numoe_schedule_want(const struct numoe_schedule *s, const struct numoe_model *model,
                         uint64_t tokens, uint64_t top_k, uint64_t late_tokens,
                         struct schedule_stock *stock)
{
    struct most most, late = {0};

    memset(stock, 0, sizeof *stock);
    bound(model, tokens, top_k, &most);
    if (late_tokens)
        bound(model, late_tokens, top_k, &late);
    list_bytes(model, &most, late.rows, numoe_schedule_shape_bytes(model, tokens, top_k),
               numoe_pool_worker_count(model->context->pool), s->part == SCHEDULE_DEFERRED,
               stock->want);
    for (int use = 0; use < MEMORY_USES; use++)
        if (stock->want[use] <= s->memory[use].bytes)
            stock->want[use] = 0;
}

/* A range that workers touch, each `part` chunks of it from its first on; chunk `at` of each. */
struct touch {
    uint8_t *data;
    uint64_t bytes, part, at;
};

static void touch_chunk(void *context, uint32_t item, uint32_t worker)
{
    const struct touch *touch = context;
    const uint64_t begin = (item * touch->part + touch->at) * HUGE_PAGE;
    const uint64_t end = least_of(begin + HUGE_PAGE, touch->bytes);

    (void)worker;
    for (uint64_t at = begin; at < end; at += 4096)
        *(volatile uint8_t *)(touch->data + at) = 0;
}

/* A job for each chunk of a worker's part, so that calls run in between. */
static int touch_all(struct numoe_pool *pool, const struct grow *g)
{
    const uint32_t workers = numoe_pool_worker_count(pool);
    const uint64_t chunks = (g->bytes + HUGE_PAGE - 1) / HUGE_PAGE;
    struct touch touch = {g->data, g->bytes, (chunks + workers - 1) / workers, 0};
    struct numoe_pool_job job = {.phase_count = 1, .context = &touch};
    int rc = 0;

    job.phases[0] = (struct numoe_pool_phase){
        .run = touch_chunk, .items = (uint32_t)((chunks + touch.part - 1) / touch.part)};
    for (; !rc && touch.at < touch.part; touch.at++)
        rc = numoe_pool_run(pool, &job);
    return rc;
}

int numoe_schedule_stock(struct schedule_stock *stock, struct numoe_pool *pool)
{
    uint64_t all = 0;
    int rc = 0;

    for (int use = 0; use < MEMORY_USES; use++)
        if (!numoe_add_u64(all, stock->want[use], &all))
            return -EOVERFLOW;
    if (!has_room(all))
        return -ENOMEM;
    for (int use = 0; !rc && use < MEMORY_USES; use++) {
        struct grow *g = &stock->memory[use];
        void *data;

        if (!stock->want[use])
            continue;
        rc = map_new(stock->want[use], &data, &all);
        if (rc)
            break;
        *g = (struct grow){data, all};
        rc = touch_all(pool, g);
    }
    return rc;
}

void numoe_schedule_take(struct numoe_schedule *s, struct schedule_stock *stock)
{
    for (int use = 0; use < MEMORY_USES; use++) {
        const struct grow old = s->memory[use];

        if (stock->memory[use].bytes <= old.bytes)
            continue;
        s->memory_bytes += stock->memory[use].bytes - old.bytes;
        s->memory[use] = stock->memory[use];
        stock->memory[use] = old;
        numoe_schedule_forget(s);
    }
}

void numoe_schedule_stock_free(struct schedule_stock *stock)
{
    for (int use = 0; use < MEMORY_USES; use++)
        unmap(&stock->memory[use]);
}
