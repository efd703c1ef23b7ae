/*
 * What computes a schedule: the items of its phases, and the jobs that they make up. Phases are
 * records (many tokens only: with few, each worker makes its own), lanes, combine.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "schedule_build.h"

enum {
    RUN_TOKENS = 256,  /* most tokens of a call to a kernel */
    RECORD_TOKENS = 16 /* tokens of a record item */
};

static uint64_t x_stride(const struct numoe_schedule *s)
{
    return s->batch.x_stride ? s->batch.x_stride : s->model->desc.hidden;
}

static uint64_t out_stride(const struct numoe_schedule *s)
{
    return s->batch.out_stride ? s->batch.out_stride : s->model->desc.hidden;
}

static const uint8_t *token_x(const struct numoe_schedule *s, uint64_t token)
{
    const size_t size = s->batch.x_type == NUMOE_BF16 ? 2 : 4;
    return (const uint8_t *)s->batch.x + (s->token_begin + token) * x_stride(s) * size;
}

static void run_records(void *context, uint32_t item, uint32_t worker)
{
    const struct numoe_schedule *s = context;
    struct numoe_trace *trace = s->model->context->trace;
    const uint64_t since = numoe_trace_now(trace);
    const unsigned saved = numoe_kernels_enter();
    uint64_t end = (uint64_t)(item + 1) * RECORD_TOKENS;

    if (end > s->token_count)
        end = s->token_count;
    for (uint64_t t = (uint64_t)item * RECORD_TOKENS; t < end; t++)
        s->model->kernels->quantise(&s->model->shape, token_x(s, t), s->batch.x_type,
                                    s->records + t * s->record_stride);
    numoe_kernels_leave(saved);
    if (trace)
        numoe_trace_span(trace, worker, TRACE_RECORDS, since,
                         (uint32_t[TRACE_ARGS]){(uint32_t)s->layer, item * RECORD_TOKENS,
                                                (uint32_t)(end - (uint64_t)item * RECORD_TOKENS)});
}

static const void *token_record(const struct numoe_schedule *s, uint32_t worker, uint32_t token)
{
    uint8_t *record;
    uint32_t *epoch;

    if (!s->own_records)
        return s->records + token * s->record_stride;
    record = s->records + ((uint64_t)worker * SCHEDULE_OWN_TOKENS + token) * s->record_stride;
    epoch = &s->own_epoch[worker * SCHEDULE_OWN_TOKENS + token];
    if (*epoch != s->epoch) {
        s->model->kernels->quantise(&s->model->shape, token_x(s, token), s->batch.x_type, record);
        *epoch = s->epoch;
    }
    return record;
}

/* @return bytes of weights that the kernels went over */
static uint64_t compute_run(const struct numoe_schedule *s, const struct schedule_run *run,
                            uint32_t worker)
{
    const struct numoe_model *model = s->model;
    const struct numoe_kernels *k = model->kernels;
    const struct model_part *part =
        &s->parts[(size_t)run->hit * model->plan->node_count + run->node];
    /* added once, with slice 0 */
    const float *down_bias = part->first + run->first_slice == 0
                                 ? numoe_model_down_bias(model, s->layer, s->hits[run->hit].expert)
                                 : NULL;
    const uint64_t width = model->shape.hidden_tiles * NUMOE_TILE;
    const bool fixed = model->context->batch_invariant;
    const uint32_t most = run->many ? k->many_tokens : fixed && !k->forms_agree ? 1 : k->few_tokens;
    uint64_t bytes = 0;

    for (uint32_t at = 0; at < run->tokens;) {
        const struct schedule_entry *entry = &s->entries[run->first_entry + at];
        const float *of_pair = s->pair_weight + run->first_pair + at;
        const uint32_t tokens = run->tokens - at < most ? run->tokens - at : most;
        const void *x[RUN_TOKENS];
        float *y[RUN_TOKENS], weight[RUN_TOKENS];
        uint32_t fresh = 0;

        for (uint32_t i = 0; i < tokens; i++) {
            x[i] = token_record(s, worker, entry[i].token);
            y[i] = s->rows + entry[i].row * width;
            weight[i] = of_pair[i];
            fresh += !entry[i].add;
        }
        /* a call adds to all of its rows or to none */
        if (fresh && fresh < tokens)
            for (uint32_t i = 0; i < tokens; i++)
                if (!entry[i].add)
                    memset(y[i], 0, width * sizeof *y[i]);
        const struct numoe_ffn ffn = {
            .shape = &model->shape,
            .activation = &model->desc.activation,
            .arithmetic = k->arithmetic,
            .slices = part->slices + run->first_slice * model->shape.bytes,
            .slice_count = run->slice_count,
            .down_bias = down_bias,
            .tokens = tokens,
            .x = x,
            .weight = weight,
            .y = y,
            .add = fresh < tokens,
            .scratch = s->scratch + (uint64_t)worker * s->scratch_stride,
            .in_order = fixed,
        };
        (run->many ? k->many : k->few)(&ffn);
        bytes += run->slice_count * model->shape.bytes +
                 (down_bias ? model->plan->shape.expert_bytes : 0);
        at += tokens;
    }
    return bytes;
}

static void run_lane(void *context, uint32_t item, uint32_t worker)
{
    const struct numoe_schedule *s = context;
    const struct schedule_lane *lane = &s->lanes[item];
    const struct numoe_plan *here = s->model->context->plan;
    const uint32_t home = here->workers[worker % here->worker_count].plan_node;
    struct numoe_trace *trace = s->model->context->trace;
    struct worker_reads *reads = &s->model->context->reads[worker];
    uint64_t all = 0, remote = 0, since = numoe_trace_now(trace);
    const unsigned saved = numoe_kernels_enter();

    for (uint32_t i = 0; i < lane->run_count; i++) {
        const struct schedule_run *run = &s->runs[lane->first_run + i];
        const uint64_t bytes = compute_run(s, run, worker);

        all += bytes;
        remote += s->model->home[run->node] == home ? 0 : bytes;
        if (trace)
            since = numoe_trace_span(
                trace, worker, TRACE_EXPERT, since,
                (uint32_t[TRACE_ARGS]){(uint32_t)s->layer, s->hits[run->hit].expert,
                                       (uint32_t)run->slice_count, run->tokens, item});
    }
    numoe_kernels_leave(saved);
    numoe_counter_add(&reads->bytes, all);
    numoe_counter_add(&reads->remote_bytes, remote);
}

static void run_combine(void *context, uint32_t item, uint32_t worker)
{
    const struct numoe_schedule *s = context;
    const uint32_t token = item / s->combine_chunks, chunk = item % s->combine_chunks;
    const struct numoe_slice_shape *shape = &s->model->shape;
    const uint32_t first = s->token_first[token];
    const size_t size = s->batch.out_type == NUMOE_BF16 ? 2 : 4;
    uint64_t end = (uint64_t)(chunk + 1) * s->combine_tiles;
    struct numoe_combine combine = {
        .rows = s->token_rows + first,
        .ends = s->token_ends ? s->token_ends + first : NULL,
        .row_count = s->token_first[token + 1] - first,
        .tile_begin = (uint64_t)chunk * s->combine_tiles,
        .hidden = shape->hidden,
        .scale = s->batch.scale,
        .add = s->batch.add,
        .type = s->batch.out_type,
        .out = (uint8_t *)s->batch.out + (s->token_begin + token) * out_stride(s) * size,
    };
    struct numoe_trace *trace = s->model->context->trace;
    const uint64_t since = numoe_trace_now(trace);
    unsigned saved;

    if (combine.add && combine.row_count == 0)
        return;
    combine.tile_end = end < shape->hidden_tiles ? end : shape->hidden_tiles;
    if (combine.tile_begin >= combine.tile_end)
        return;
    saved = numoe_kernels_enter();
    s->model->kernels->combine(&combine);
    numoe_kernels_leave(saved);
    if (trace)
        numoe_trace_span(
            trace, worker, TRACE_COMBINE, since,
            (uint32_t[TRACE_ARGS]){(uint32_t)s->layer, token, (uint32_t)combine.row_count, chunk});
}

enum trace_phase numoe_schedule_phase(numoe_pool_fn *run)
{
    return run == run_records   ? TRACE_PHASE_RECORDS
           : run == run_lane    ? TRACE_PHASE_EXPERTS
           : run == run_combine ? TRACE_PHASE_COMBINE
                                : TRACE_PHASE_OTHER;
}

/* Whole numbers: the host's floating-point flags stay as they are. */
static void add_phase(struct numoe_pool_job *job, numoe_pool_fn *run, uint64_t items,
                      const uint32_t *first, uint64_t item_ns)
{
    job->phases[job->phase_count++] = (struct numoe_pool_phase){
        .run = run,
        .items = (uint32_t)items,
        .first = first,
        .item_ns = item_ns < 1            ? 1
                   : item_ns < UINT32_MAX ? (uint32_t)item_ns
                                          : UINT32_MAX,
    };
}

/* How long items take is known well enough to judge whether a steal or a wake-up is worth it. */
static void add_records(const struct numoe_schedule *s, struct numoe_pool_job *job)
{
    const uint64_t token_ns = s->model->shape.hidden / 4;

    add_phase(job, run_records, (s->token_count + RECORD_TOKENS - 1) / RECORD_TOKENS, NULL,
              token_ns * RECORD_TOKENS);
}

static void add_lanes(const struct numoe_schedule *s, struct numoe_pool_job *job)
{
    add_phase(job, run_lane, s->lane_count, s->lane_first, s->lane_ns);
}

static void add_combine(const struct numoe_schedule *s, struct numoe_pool_job *job)
{
    const uint64_t rows = s->token_first[s->token_count], row = s->combine_tiles * NUMOE_TILE;

    add_phase(job, run_combine, s->token_count * s->combine_chunks, NULL,
              rows * row * sizeof(float) / (10 * (s->token_count + 1)));
}

void numoe_schedule_job(struct numoe_schedule *s, struct numoe_pool_job *job)
{
    *job = (struct numoe_pool_job){.context = s};
    if (!s->own_records)
        add_records(s, job);
    add_lanes(s, job);
    add_combine(s, job);
}

void numoe_schedule_deferred_jobs(struct numoe_schedule *s, struct numoe_pool_job *records,
                                  struct numoe_pool_job *lanes)
{
    *records = *lanes = (struct numoe_pool_job){.context = s};
    add_records(s, records);
    add_lanes(s, lanes);
}
