/*
 * numoe bench --gpu --share: calls of numoe_forward on host memory, layer after layer, by the CPUs
 * alone, by the GPU alone, and shared. Each way some calls are made first, in which experts come to
 * stay and speeds are learnt.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "cli_gpu.h"
#include "cli_model.h"
#include "cli_options.h"
#include "cli_output.h"
#include "gpu_run.h"

enum { WAYS = 3, DEFAULT_REPEAT = 15, SAMPLES = 4 };

static const char *const ways[WAYS] = {"cpu", "gpu", "shared"};
static const uint64_t from_tokens[WAYS] = {UINT64_MAX, 1, 0};
static const uint32_t default_tokens[] = {1, 4, 16, 64, 256, 1024, 4096};

struct share_cell {
    uint64_t tokens;
    double ms[WAYS]; /* a call's, mean: one call may copy what the next one computes with */
    double ms_median[WAYS], ms_p10[WAYS], ms_p90[WAYS], copied_bytes[WAYS], rel_l2[WAYS];
    double hit_bytes;   /* mean of a call */
    double found_bytes; /* of them, on the GPU when they were asked for; GPU alone */
    double link_ms;     /* that the rest takes over the link */
    double gpu_experts, cpu_experts, gpu_ms, cpu_ms; /* medians of the calls */
    /* of the calls that were shared: mean, and what they took over it; NAN: none was */
    double ideal_ms, of_ideal;
};

struct share_bench {
    const struct cli_values *values;
    struct numoe_model_desc desc;
    struct numoe *context;
    struct numoe_model *model;
    struct numoe_model_info info;
    double read_gbs, link_gbs, mma_gops;
    struct share_cell *cells;
    uint32_t cell_count;
};

struct share_batch {
    uint16_t *x;
    int32_t *ids;
    float *weights, *out;
    struct numoe_bench_router *router;
    struct numoe_bench_random random;
};

static void batch_free(struct share_batch *b)
{
    free(b->x);
    free(b->ids);
    free(b->weights);
    free(b->out);
    numoe_bench_router_destroy(b->router);
}

static int batch_make(const struct share_bench *s, uint64_t tokens, struct share_batch *b)
{
    const uint64_t hidden = s->desc.hidden, top_k = s->desc.experts_per_token;
    struct numoe_error error = NUMOE_ERROR_INIT;

    *b = (struct share_batch){.random.state = s->values->seed + tokens};
    if (numoe_bench_room(tokens, hidden, tokens * top_k, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    b->x = malloc(tokens * hidden * sizeof *b->x);
    b->out = malloc(tokens * hidden * sizeof *b->out);
    b->ids = malloc(tokens * top_k * sizeof *b->ids);
    b->weights = malloc(tokens * top_k * sizeof *b->weights);
    b->router = numoe_bench_router_create(s->values->routing, s->desc.experts, &b->random);
    if (!b->x || !b->out || !b->ids || !b->weights || !b->router) {
        cli_error("bench", "no room for %" PRIu64 " tokens", tokens);
        return CLI_NO_ROOM;
    }
    numoe_bench_activations(&b->random, b->x, tokens * hidden);
    return CLI_OK;
}

static int call(const struct share_bench *s, struct share_batch *b, uint64_t tokens, uint64_t layer,
                struct numoe_result *result, double *ms)
{
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    double since;
    int rc;

    numoe_bench_router_route(b->router, &b->random, tokens, s->desc.experts_per_token, b->ids,
                             b->weights);
    batch.tokens = tokens;
    batch.top_k = numoe_bench_router_top_k(b->router, s->desc.experts_per_token);
    batch.x = b->x;
    batch.x_type = NUMOE_BF16;
    batch.ids = b->ids;
    batch.id_bytes = 4;
    batch.weights = b->weights;
    batch.out = b->out;
    batch.out_type = NUMOE_F32;
    *result = (struct numoe_result)NUMOE_RESULT_INIT;
    since = numoe_bench_seconds();
    rc = numoe_forward(s->model, layer, &batch, result, &error);
    *ms = (numoe_bench_seconds() - since) * 1e3;
    return rc ? cli_report("bench", CLI_STAGE_WORK, &error) : CLI_OK;
}

static double median(double *values, uint32_t count)
{
    return numoe_bench_quantile(values, count, 0.5);
}

static int check(const struct share_bench *s, const struct share_batch *b, uint64_t tokens,
                 uint64_t layer, double *rel_l2)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_bench_outputs outputs = {
        .layer = layer,
        .tokens = tokens,
        .top_k = numoe_bench_router_top_k(b->router, s->desc.experts_per_token),
        .x = b->x,
        .ids = b->ids,
        .weights = b->weights,
        .out = b->out};

    return numoe_bench_check(s->model, &outputs, tokens < SAMPLES ? tokens : SAMPLES, rel_l2,
                             &error)
               ? cli_report("bench", CLI_STAGE_WORK, &error)
               : CLI_OK;
}

/* One way of computing: calls in the order of the layers. */
static int measure_way(struct share_bench *s, uint32_t way, uint64_t tokens,
                       struct share_cell *cell)
{
    const uint32_t repeat = s->values->repeat ? s->values->repeat : DEFAULT_REPEAT;
    /* experts come to stay two a call: a layer needs many calls for that */
    const uint32_t warm = (uint32_t)s->desc.layers *
                          (tokens <= 64 && !s->values->stream ? (uint32_t)s->desc.experts / 4 : 2);
    double *values = calloc((size_t)5 * repeat, sizeof *values);
    struct numoe_gpu_report before, after;
    struct numoe_result result = NUMOE_RESULT_INIT;
    struct share_batch b = {0};
    double hit = 0, ideal = 0, both = 0, ms;
    uint32_t shared_calls = 0;
    int code = CLI_NO_ROOM;

    if (!values) {
        cli_error("bench", "out of memory");
        return code;
    }
    s->context->gpu_from_tokens = from_tokens[way];
    code = batch_make(s, tokens, &b);
    for (uint32_t i = 0; !code && i < (way ? warm : s->desc.layers); i++)
        code = call(s, &b, tokens, i % s->desc.layers, &result, &ms);
    numoe_gpu_model_report(numoe_model_gpu(s->model), &before);
    for (uint32_t i = 0; !code && i < repeat; i++) {
        struct gpu_shared shared;

        code = call(s, &b, tokens, i % s->desc.layers, &result, &values[i]);
        if (code)
            break;
        cell->ms[way] += values[i] / repeat;
        hit += (double)result.expert_bytes / repeat;
        numoe_gpu_shared(s->model, &shared);
        values[repeat + i] = (double)shared.gpu_experts;
        values[2 * repeat + i] = (double)shared.cpu_experts;
        values[3 * repeat + i] = shared.gpu_ms;
        values[4 * repeat + i] = shared.cpu_ms;
        if (!shared.gpu_experts)
            continue;
        shared_calls++;
        both += values[i];
        ideal += (double)(shared.gpu_experts + shared.cpu_experts) /
                 ((double)shared.gpu_experts / shared.gpu_ms +
                  (double)shared.cpu_experts / shared.cpu_ms);
    }
    numoe_gpu_model_report(numoe_model_gpu(s->model), &after);
    if (!code)
        code = check(s, &b, tokens, (repeat - 1) % s->desc.layers, &cell->rel_l2[way]);
    cell->copied_bytes[way] = (double)(after.copied_bytes - before.copied_bytes) / repeat;
    cell->ms_median[way] = median(values, repeat);
    cell->ms_p10[way] = numoe_bench_quantile(values, repeat, 0.1);
    cell->ms_p90[way] = numoe_bench_quantile(values, repeat, 0.9);
    if (way == 1) {
        cell->hit_bytes = hit;
        cell->found_bytes =
            (double)(after.found - before.found) / repeat * (double)s->info.expert_bytes;
        cell->link_ms = (hit - cell->found_bytes) / s->link_gbs / 1e6;
    }
    if (way == 2) {
        cell->gpu_experts = median(values + repeat, repeat);
        cell->cpu_experts = median(values + 2 * repeat, repeat);
        cell->gpu_ms = median(values + 3 * repeat, repeat);
        cell->cpu_ms = median(values + 4 * repeat, repeat);
        cell->ideal_ms = shared_calls ? ideal / shared_calls : NAN;
        cell->of_ideal = shared_calls ? both / ideal : NAN;
    }
    batch_free(&b);
    free(values);
    return code;
}

static double better(const struct share_cell *c)
{
    return fmin(c->ms[0], c->ms[1]);
}

static void print_cell(const struct share_cell *c)
{
    char of_ideal[16] = "-";

    if (isfinite(c->of_ideal))
        snprintf(of_ideal, sizeof of_ideal, "%.3f", c->of_ideal);
    printf("%6" PRIu64 " %9.3f %9.3f %9.3f %7.3f %9.3f %7.2f %7.1f + %-5.1f %9.3f %9.3f %7s  "
           "%8.1e %8.1e %8.1e\n",
           c->tokens, c->ms[0], c->ms[1], c->ms[2], c->ms[2] / better(c), c->link_ms,
           c->ms[1] / c->link_ms, c->gpu_experts, c->cpu_experts, c->gpu_ms, c->cpu_ms, of_ideal,
           c->rel_l2[0], c->rel_l2[1], c->rel_l2[2]);
    fflush(stdout);
}

static void print_header(const struct share_bench *s)
{
    struct numoe_gpu_report report;

    numoe_gpu_model_report(numoe_model_gpu(s->model), &report);
    printf("%" PRIu64 " layers of %" PRIu64 " experts, %" PRIu64 " a token; room for %" PRIu64
           " experts to stay; link %.1f GB/s; %.0f %% of host memory pinned; %" PRIu32
           " workers\n\n"
           "tokens    CPU ms    GPU ms    shared of best   link ms  GPU/it  experts GPU+CPU   "
           " GPU part  CPU part /ideal  rel. L2 of each\n",
           s->desc.layers, s->desc.experts, s->desc.experts_per_token, report.cells, s->link_gbs,
           100 * (double)report.pinned_bytes / (double)report.arena_bytes, s->info.worker_count);
}

static json_t *json_of(const struct share_bench *s)
{
    json_t *results = json_array();

    for (uint32_t i = 0; i < s->cell_count; i++) {
        const struct share_cell *c = &s->cells[i];
        json_t *object = json_pack(
            "{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "tokens",
            (json_int_t)c->tokens, "hit_bytes", cli_json_number(c->hit_bytes), "found_bytes",
            cli_json_number(c->found_bytes), "link_ms", cli_json_number(c->link_ms), "gpu_experts",
            cli_json_number(c->gpu_experts), "cpu_experts", cli_json_number(c->cpu_experts),
            "gpu_part_ms", cli_json_number(c->gpu_ms), "cpu_part_ms", cli_json_number(c->cpu_ms),
            "ideal_ms", cli_json_number(c->ideal_ms), "of_ideal", cli_json_number(c->of_ideal),
            "of_better", cli_json_number(c->ms[2] / better(c)));
        for (int w = 0; w < WAYS; w++) {
            char key[32];
            snprintf(key, sizeof key, "%s_ms", ways[w]);
            json_object_set_new(object, key, cli_json_number(c->ms[w]));
            snprintf(key, sizeof key, "%s_ms_median", ways[w]);
            json_object_set_new(object, key, cli_json_number(c->ms_median[w]));
            snprintf(key, sizeof key, "%s_ms_p10", ways[w]);
            json_object_set_new(object, key, cli_json_number(c->ms_p10[w]));
            snprintf(key, sizeof key, "%s_ms_p90", ways[w]);
            json_object_set_new(object, key, cli_json_number(c->ms_p90[w]));
            snprintf(key, sizeof key, "%s_copied_bytes", ways[w]);
            json_object_set_new(object, key, cli_json_number(c->copied_bytes[w]));
            snprintf(key, sizeof key, "%s_rel_l2", ways[w]);
            json_object_set_new(object, key, cli_json_number(c->rel_l2[w]));
        }
        json_array_append_new(results, object);
    }
    return json_pack("{s:s, s:o, s:o}", "mode", "share", "results", results, "link_gbs",
                     cli_json_number(s->link_gbs));
}

static int measure(struct share_bench *s)
{
    const struct cli_values *values = s->values;
    const uint32_t *tokens = values->tokens.count ? values->tokens.values : default_tokens;
    const uint32_t kinds = values->tokens.count ? values->tokens.count
                                                : sizeof default_tokens / sizeof default_tokens[0];
    const double limits[WAYS] = {s->desc.arithmetic == NUMOE_EXACT ? 2.5e-3 : 2e-2, 5e-3,
                                 s->desc.arithmetic == NUMOE_EXACT ? 5e-3 : 2e-2};
    struct numoe_error error = NUMOE_ERROR_INIT;
    bool wrong = false;
    int code = CLI_OK;

    s->cells = calloc(kinds, sizeof *s->cells);
    if (!s->cells) {
        cli_error("bench", "out of memory");
        return CLI_NO_ROOM;
    }
    if (numoe_gpu_ceilings(numoe_context_gpu(s->context), &s->read_gbs, &s->link_gbs, &s->mma_gops,
                           &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    cli_progress_end();
    if (!values->json)
        print_header(s);
    for (uint32_t i = 0; i < kinds && !code; i++) {
        struct share_cell *cell = &s->cells[i];

        cell->tokens = tokens[i];
        for (uint32_t way = 0; way < WAYS && !code; way++) {
            cli_progress("%" PRIu32 " tokens, %s", tokens[i], ways[way]);
            code = measure_way(s, way, tokens[i], cell);
            wrong = wrong || !(cell->rel_l2[way] <= limits[way]);
        }
        cli_progress_end();
        if (code)
            break;
        s->cell_count++;
        if (!values->json)
            print_cell(cell);
    }
    if (code)
        return code;
    code = values->json ? cli_print_json(json_of(s)) : cli_flush(CLI_OK);
    if (!code && wrong) {
        cli_error("bench", "results differ from the reference by more than the limit");
        code = CLI_CHECK_FAILED;
    }
    return code;
}

static void progress(uint64_t done, uint64_t total)
{
    cli_progress("making random experts: %" PRIu64 " of %" PRIu64, done, total);
}

int cli_bench_share(const struct cli_values *values)
{
    const char *name = values->model ? values->model : "v4-flash";
    struct share_bench s = {.values = values};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct cli_values sized = *values;
    int code;

    if (values->resident) {
        cli_error("bench", "--resident and --share exclude each other");
        return CLI_USAGE;
    }
    if (!sized.layers)
        sized.layers = 8;
    code = cli_model_by_name("bench", &sized, name, &s.desc);
    if (code)
        return code;
    s.desc.arithmetic = values->arithmetic_count ? values->arithmetics[0] : NUMOE_FAST;
    code = cli_open("bench", values, values->isa_count ? values->isas[0] : NULL, &s.context);
    if (code)
        return code;
    if (!numoe_context_gpu(s.context)) { /* the reason has been told by the log */
        cli_error("bench", "there is no GPU to measure");
        code = CLI_FAILURE;
        goto close;
    }
    if (numoe_model_create(s.context, &s.desc, &s.model, &error)) {
        code = cli_report("bench", CLI_STAGE_OPTIONS, &error);
        goto close;
    }
    s.info.size = sizeof s.info;
    numoe_model_info(s.model, &s.info);
    if (!numoe_model_gpu(s.model)) {
        code = CLI_FAILURE;
        goto destroy;
    }
    if (numoe_bench_fill(s.model, values->seed, progress, &error)) {
        code = cli_report("bench", CLI_STAGE_WORK, &error);
        goto destroy;
    }
    code = measure(&s);
destroy:
    free(s.cells);
    numoe_model_destroy(s.model);
close:
    cli_progress_end();
    numoe_close(s.context);
    return code;
}
