/* Outputs against float64. SPDX-License-Identifier: Apache-2.0 */
#include "row_share_layer.h"

#include "bf16.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* A part: what one domain has of one (token, slot). */
struct check {
    const struct row_share *layer;
    uint64_t *tokens; /* the checked ones */
    float *inputs;    /* [checked, hidden] */
    double *parts;    /* [checked, top_k, domains, hidden] */
};

static void check_part(void *context, uint32_t item, uint32_t worker)
{
    const struct check *check = context;
    const struct row_share *l = check->layer;
    const uint64_t hidden = l->desc.hidden, top_k = l->desc.top_k;
    const uint32_t domain = item % l->desc.domains, pair = item / l->desc.domains;
    const uint64_t entry = check->tokens[pair / top_k] * top_k + pair % top_k;
    const uint64_t first = row_share_slice(l, domain);
    const uint64_t place = row_share_place(l, (uint64_t)l->batch.ids[entry], first);

    (void)worker;
    numoe_reference_slices(&l->shape, &l->desc.activation, l->k_split.data + place * l->shape.bytes,
                           row_share_slice(l, domain + 1) - first,
                           check->inputs + pair / top_k * hidden, (double)l->batch.weights[entry],
                           NULL, false, check->parts + item * hidden);
}

/* Infinite for what is no number, as wrong as can be. */
static double distance(const struct check *check, uint64_t count, const float *out)
{
    const uint64_t hidden = check->layer->desc.hidden;
    const uint64_t parts = check->layer->desc.top_k * check->layer->desc.domains;
    double difference = 0, size = 0, relative;

    for (uint64_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < hidden; k++) {
            double want = 0, off;

            for (uint64_t p = 0; p < parts; p++)
                want += check->parts[(i * parts + p) * hidden + k];
            off = (double)out[check->tokens[i] * hidden + k] - want;
            difference += off * off;
            size += want * want;
        }
    relative = sqrt(difference / size);
    return isfinite(relative) ? relative : INFINITY;
}

int row_share_check(struct row_share *l, uint64_t count, const float *const out[ROW_SHARE_WAYS],
                    double rel_l2[ROW_SHARE_WAYS])
{
    struct numoe_pool_job job = {.phase_count = 1, .phases = {{.run = check_part}}};
    const uint64_t tokens = l->batch.tokens, hidden = l->desc.hidden;
    const uint64_t parts = l->desc.top_k * l->desc.domains;
    struct check check = {.layer = l};
    int rc = -ENOMEM;

    count = count < tokens ? count : tokens;
    if (count > NUMOE_POOL_MAX_ITEMS / parts)
        return -EINVAL;
    check.tokens = calloc(count, sizeof *check.tokens);
    check.inputs = calloc(count * hidden, sizeof *check.inputs);
    check.parts = calloc(count * parts * hidden, sizeof *check.parts);
    if (!check.tokens || !check.inputs || !check.parts)
        goto out;
    for (uint64_t i = 0; i < count; i++) {
        check.tokens[i] = count > 1 ? i * (tokens - 1) / (count - 1) : 0;
        for (uint64_t k = 0; k < hidden; k++)
            check.inputs[i * hidden + k] =
                numoe_bf16_to_float(l->batch.x[check.tokens[i] * hidden + k]);
    }
    job.context = &check;
    job.phases[0].items = (uint32_t)(count * parts);
    rc = numoe_pool_run(l->pool, &job);
    for (int way = 0; !rc && way < ROW_SHARE_WAYS; way++)
        rel_l2[way] = distance(&check, count, out[way]);
out:
    free(check.tokens);
    free(check.inputs);
    free(check.parts);
    return rc;
}
