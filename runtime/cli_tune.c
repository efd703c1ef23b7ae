/*
 * Timing the forms of the kernels: for some averages of tokens of an expert, each form on the same
 * random batches, in two rounds, of which the better counts, as clocks fall while a device is busy.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cli_tune.h"

#include "bench.h"
#include "cli_options.h"
#include "cli_output.h"
#include "gpu_tuning_file.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double averages[] = {0.25, 1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192};

enum { AVERAGES = sizeof averages / sizeof averages[0], ROUNDS = 2, REPEAT = 11 };

_Static_assert((int)AVERAGES <= (int)NUMOE_GPU_TUNED_POINTS, "they fit in a table");

/* As numoe bench --gpu wants of bf16 activations. */
static const double limit = 5e-3;

struct tune {
    const struct cli_values *values;
    struct numoe_model *model;
    const struct numoe_model_desc *desc;
    const struct numoe_gpu *gpu;
    uint32_t checked; /* bit f: outputs of form f have been compared */
};

struct batch {
    uint16_t *x;
    int32_t *ids;
    float *routing, *out;
};

static void batch_free(struct batch *b)
{
    free(b->x);
    free(b->ids);
    free(b->routing);
    free(b->out);
}

static bool batch_make(struct batch *b, const struct tune *t, uint64_t tokens, uint32_t routings)
{
    const uint64_t hidden = t->desc->hidden, top_k = t->desc->experts_per_token;
    struct numoe_bench_random random = {.state = t->values->seed + tokens};

    b->x = malloc(tokens * hidden * sizeof *b->x);
    b->ids = malloc(routings * tokens * top_k * sizeof *b->ids);
    b->routing = malloc(routings * tokens * top_k * sizeof *b->routing);
    b->out = malloc(tokens * hidden * sizeof *b->out);
    if (!b->x || !b->ids || !b->routing || !b->out)
        return false;
    numoe_bench_activations(&random, b->x, tokens * hidden);
    numoe_bench_route(&random, routings * tokens, top_k, t->desc->experts, b->ids, b->routing);
    return true;
}

/* Median of a form on a batch. Its outputs are compared the first time that it computes. */
static int time_form(struct tune *t, const struct batch *b, uint64_t tokens, uint32_t routings,
                     uint32_t form, double *ms)
{
    const uint64_t top_k = t->desc->experts_per_token, last = (routings - 1) * tokens * top_k;
    const bool check = !(t->checked >> form & 1);
    struct numoe_error error = NUMOE_ERROR_INIT;
    double all[REPEAT], rel_l2;
    struct numoe_gpu_bench bench = {
        .tokens = tokens,
        .top_k = top_k,
        .routings = routings,
        .repeat = REPEAT,
        .form = form,
        .x = b->x,
        .ids = b->ids,
        .routing = b->routing,
        .out = check ? b->out : NULL,
        .ms = all,
    };
    const struct numoe_bench_outputs outputs = {
        .tokens = tokens,
        .top_k = top_k,
        .x = b->x,
        .ids = b->ids + last,
        .weights = b->routing + last,
        .out = b->out,
    };

    if (numoe_gpu_bench_layer(numoe_model_gpu(t->model), 0, &bench, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    *ms = numoe_bench_quantile(all, REPEAT, 0.5);
    if (!check)
        return CLI_OK;
    if (numoe_bench_check(t->model, &outputs, 1, &rel_l2, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    t->checked |= 1u << form;
    if (rel_l2 <= limit)
        return CLI_OK;
    cli_error("bench", "form %s is off by a relative L2 of %.2e, more than %.0e",
              numoe_gpu_form_names[form], rel_l2, limit);
    return CLI_CHECK_FAILED;
}

static int time_point(struct tune *t, uint64_t tokens, struct numoe_gpu_tuned_point *point)
{
    const uint32_t routings = tokens <= 64 ? 8 : tokens <= 1024 ? 4 : 2;
    const uint32_t forms = numoe_gpu_forms(t->gpu);
    struct batch b = {0};
    int code = CLI_OK;

    if (!batch_make(&b, t, tokens, routings)) {
        cli_error("bench", "no room for %" PRIu64 " tokens", tokens);
        code = CLI_NO_ROOM;
    }
    for (uint32_t i = 0; !code && i < ROUNDS * NUMOE_GPU_FORMS; i++) {
        const uint32_t form = 1 + i % NUMOE_GPU_FORMS;
        double ms;
        if (!(forms >> form & 1))
            continue;
        cli_progress("%" PRIu64 " tokens, form %s", tokens, numoe_gpu_form_names[form]);
        code = time_form(t, &b, tokens, routings, form, &ms);
        if (!code && (!(point->ms[form] > 0) || ms < point->ms[form]))
            point->ms[form] = ms;
    }
    cli_progress_end();
    batch_free(&b);
    return code;
}

static void print_header(const struct tune *t, const struct numoe_gpu_numbers *n)
{
    printf("hidden %" PRIu64 ", intermediate %" PRIu64 ", %" PRIu64 " experts, %" PRIu64
           " a token\ncompute capability %d.%d, %" PRIu32 " multiprocessors, %" PRIu64
           " bytes of shared memory for a block, %" PRIu64 " of L2\n\n%8s %10s",
           t->desc->hidden, t->desc->intermediate, t->desc->experts, t->desc->experts_per_token,
           n->major, n->minor, n->multiprocessors, n->shared_bytes, n->l2_bytes, "tokens",
           "an expert");
    for (int f = 1; f <= NUMOE_GPU_FORMS; f++)
        printf(" %9s", numoe_gpu_form_names[f]);
    printf("   chosen\n");
}

static void print_point(uint64_t tokens, const struct numoe_gpu_tuned_point *point)
{
    uint32_t best = 0;

    printf("%8" PRIu64 " %10.2f", tokens, point->tokens);
    for (uint32_t f = 1; f <= NUMOE_GPU_FORMS; f++) {
        if (point->ms[f] > 0)
            printf(" %9.4f", point->ms[f]);
        else
            printf(" %9s", "-");
        if (point->ms[f] > 0 && (!best || point->ms[f] < point->ms[best]))
            best = f;
    }
    printf("   %s\n", numoe_gpu_form_names[best]);
    fflush(stdout);
}

/* The table that there is, of this device, with room for the shape at *shape. */
static int begin_table(const struct tune *t, struct numoe_gpu_tuning *table,
                       struct numoe_gpu_tuned_shape **shape)
{
    const struct numoe_gpu_numbers numbers = numoe_gpu_numbers(numoe_gpu_get(t->gpu));
    const char *path = t->values->tune;
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint32_t i = 0;

    *table = (struct numoe_gpu_tuning){.device = numbers};
    if (access(path, F_OK) == 0 && (numoe_gpu_tuning_load(path, table, &error) ||
                                    numoe_gpu_tuning_fits(table, &numbers, path, &error)))
        return cli_report("bench", CLI_STAGE_INPUT, &error);
    while (i < table->shape_count && (table->shapes[i].hidden != t->desc->hidden ||
                                      table->shapes[i].intermediate != t->desc->intermediate))
        i++;
    if (i == NUMOE_GPU_TUNED_SHAPES) {
        cli_error(path, "holds %d shapes already", NUMOE_GPU_TUNED_SHAPES);
        return CLI_BAD_INPUT;
    }
    if (i == table->shape_count)
        table->shape_count++;
    *shape = &table->shapes[i];
    **shape = (struct numoe_gpu_tuned_shape){.hidden = t->desc->hidden,
                                             .intermediate = t->desc->intermediate};
    return CLI_OK;
}

static int end_table(const struct tune *t, const struct numoe_gpu_tuning *table)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    if (numoe_gpu_tuning_check(table, t->values->tune, &error) ||
        numoe_gpu_tuning_save(t->values->tune, table, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    return t->values->json ? cli_print_json(json_load_file(t->values->tune, 0, NULL))
                           : cli_flush(CLI_OK);
}

int cli_tune(const struct cli_values *values, struct numoe_model *model,
             const struct numoe_model_desc *desc)
{
    struct tune t = {.values = values,
                     .model = model,
                     .desc = desc,
                     .gpu = numoe_context_gpu(numoe_model_context(model))};
    struct numoe_gpu_tuning *table = malloc(sizeof *table);
    struct numoe_gpu_tuned_shape *shape;
    uint64_t before = 0;
    int code;

    if (!table) {
        cli_error("bench", "out of memory");
        return CLI_NO_ROOM;
    }
    code = begin_table(&t, table, &shape);
    if (!code && !values->json)
        print_header(&t, &table->device);
    for (int i = 0; !code && i < AVERAGES; i++) {
        const double each = (double)desc->experts_per_token / (double)desc->experts;
        const uint64_t tokens = (uint64_t)ceil(averages[i] / each);
        struct numoe_gpu_tuned_point *point = &shape->points[shape->point_count];

        if (tokens <= before)
            continue;
        before = tokens;
        *point = (struct numoe_gpu_tuned_point){.tokens = (double)tokens * each};
        code = time_point(&t, tokens, point);
        if (code)
            break;
        shape->point_count++;
        if (!values->json)
            print_point(tokens, point);
    }
    if (!code)
        code = end_table(&t, table);
    free(table);
    return code;
}
