/* Outputs of a layer against the float64 reference. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

/* The reference of one run of slices of one (token, slot): an item of the pool. */
struct check {
    const struct numoe_bench_outputs *of;
    const struct numoe_model *model;
    const struct numoe_plan *plan;
    struct numoe_model_desc desc;
    uint64_t *tokens; /* of the batch: the checked ones */
    float *inputs;    /* [checked, hidden] */
    double *parts;    /* [checked, top_k, nodes, hidden] */
};

static void check_part(void *context, uint32_t item, uint32_t worker)
{
    const struct check *check = context;
    const struct numoe_bench_outputs *of = check->of;
    uint32_t node = item % check->plan->node_count;
    uint64_t pair = item / check->plan->node_count, hidden = check->desc.hidden, first, count;
    uint64_t entry = check->tokens[pair / of->top_k] * of->top_k + pair % of->top_k;
    uint64_t expert = (uint64_t)of->ids[entry];
    const void *run = numoe_model_run(check->model, of->layer, expert, node, &first, &count);

    (void)worker;
    if (!count)
        return;
    numoe_reference_slices(numoe_model_shape(check->model), &check->desc.activation, run, count,
                           check->inputs + pair / of->top_k * hidden, (double)of->weights[entry],
                           first == 0 ? numoe_model_down_bias(check->model, of->layer, expert)
                                      : NULL,
                           false, check->parts + item * hidden);
}

static float from_bf16(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &word, sizeof value);
    return value;
}

/* |out - reference| / |reference|; infinite for what is no number, as wrong as can be. */
static double distance(const struct check *check, uint64_t count)
{
    uint64_t hidden = check->desc.hidden, parts = check->of->top_k * check->plan->node_count;
    double difference = 0, size = 0, relative;

    for (uint64_t i = 0; i < count; i++) {
        for (uint64_t h = 0; h < hidden; h++) {
            double want = 0, off;

            for (uint64_t p = 0; p < parts; p++)
                want += check->parts[(i * parts + p) * hidden + h];
            off = (double)check->of->out[check->tokens[i] * hidden + h] - want;
            difference += off * off;
            size += want * want;
        }
    }
    if (difference == 0 && size == 0)
        return 0;
    relative = sqrt(difference / size);
    return isfinite(relative) ? relative : INFINITY;
}

int numoe_bench_check(struct numoe_model *model, const struct numoe_bench_outputs *outputs,
                      uint64_t count, double *rel_l2, struct numoe_error *error)
{
    struct numoe_pool *pool = numoe_context_pool(numoe_model_context(model));
    struct check check = {.of = outputs, .model = model, .plan = numoe_model_plan(model)};
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_pool_job job = {.phase_count = 1, .phases = {{.run = check_part}}};
    uint64_t hidden, parts;
    int rc;

    rc = numoe_model_info(model, &info);
    if (rc)
        return numoe_error_set(error, rc, "check", "the model does not describe itself");
    check.desc = info.desc;
    hidden = info.desc.hidden;
    parts = outputs->top_k * check.plan->node_count;
    if (count > outputs->tokens)
        count = outputs->tokens;
    if (!count || !parts || count > NUMOE_POOL_MAX_ITEMS / parts)
        return numoe_error_set(error, -EINVAL, "check",
                               "%" PRIu64 " tokens in %" PRIu64 " parts cannot be checked", count,
                               parts);

    check.tokens = calloc(count, sizeof *check.tokens);
    check.inputs = calloc(count * hidden, sizeof *check.inputs);
    check.parts = calloc(count * parts * hidden, sizeof *check.parts);
    if (!check.tokens || !check.inputs || !check.parts) {
        rc = numoe_error_set(error, -ENOMEM, "check", "no room for the reference's results");
        goto out;
    }
    for (uint64_t i = 0; i < count; i++) {
        check.tokens[i] = count > 1 ? i * (outputs->tokens - 1) / (count - 1) : 0;
        for (uint64_t h = 0; h < hidden; h++)
            check.inputs[i * hidden + h] = from_bf16(outputs->x[check.tokens[i] * hidden + h]);
    }
    job.context = &check;
    job.phases[0].items = (uint32_t)(count * parts);
    rc = numoe_pool_run(pool, &job);
    if (rc)
        numoe_error_set(error, rc, "check", "the workers took no job: %s", strerror(-rc));
    else
        *rel_l2 = distance(&check, count);
out:
    free(check.tokens);
    free(check.inputs);
    free(check.parts);
    return rc;
}
