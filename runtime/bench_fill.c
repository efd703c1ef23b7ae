/* A model's experts made of random weights, in memory. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "bench.h"

struct fill {
    struct numoe_model *model;
    struct numoe_model_desc desc;
    const struct numoe_plan *plan;
    uint64_t seed, first; /* expert, counted over all layers, of item 0 */
    uint64_t codes[3], scales[3], biases, worker_bytes; /* offsets in a worker's buffer */
    uint8_t *buffers;
    int *results; /* of the items */
    bool *extreme;
};

static void random_bytes(struct numoe_bench_random *random, uint8_t *bytes, uint64_t count)
{
    uint64_t i, word;

    for (i = 0; i + 8 <= count; i += 8) {
        word = numoe_bench_random(random);
        memcpy(bytes + i, &word, 8);
    }
    if (i < count) {
        word = numoe_bench_random(random);
        memcpy(bytes + i, &word, count - i);
    }
}

/*
 * The root mean square of uniform codes is 2.93, so a row over `width` columns gives 1.2 to 1.7
 * times the input's own when its scales are 2^(base - 127) times 1/4, 1/2, 1, 2.
 */
static unsigned scale_base(uint64_t width)
{
    return (unsigned)(128 - lrint(log2(2.93 * sqrt((double)width))));
}

static void random_scales(struct numoe_bench_random *random, uint8_t *scales, uint64_t count,
                          uint64_t width)
{
    unsigned base = scale_base(width) - 2;

    random_bytes(random, scales, count);
    for (uint64_t i = 0; i < count; i++)
        scales[i] = (uint8_t)(base + (scales[i] & 3));
}

static void random_biases(struct numoe_bench_random *random, float *biases, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        biases[i] = numoe_bench_random_float(random) - 0.5f;
}

static void fill_expert(void *context, uint32_t item, uint32_t worker)
{
    struct fill *fill = context;
    const struct numoe_model_desc *desc = &fill->desc;
    uint64_t index = fill->first + item,
             width[3] = {desc->hidden, desc->hidden, desc->intermediate};
    uint64_t rows[3] = {desc->intermediate, desc->intermediate, desc->hidden};
    struct numoe_bench_random random = {fill->seed ^ index * 0xD1342543DE82EF95u};
    uint8_t *buffer = fill->buffers + worker * fill->worker_bytes;
    struct numoe_expert_source source = {.hidden = desc->hidden,
                                         .intermediate = desc->intermediate};
    struct numoe_mxfp4 *matrices[3] = {&source.gate, &source.up, &source.down};
    float *biases = (float *)(void *)(buffer + fill->biases);
    struct numoe_pack_report report = {0};
    int rc = 0;

    for (int m = 0; m < 3; m++) {
        uint64_t groups = (width[m] + NUMOE_TILE - 1) / NUMOE_TILE;

        *matrices[m] = (struct numoe_mxfp4){.codes = buffer + fill->codes[m],
                                            .scales = buffer + fill->scales[m],
                                            .code_stride = groups * 16,
                                            .scale_stride = groups,
                                            .code_step = 16,
                                            .scale_step = 1,
                                            .nibbles = NUMOE_NIBBLES_ADJACENT};
        random_bytes(&random, buffer + fill->codes[m], rows[m] * groups * 16);
        random_scales(&random, buffer + fill->scales[m], rows[m] * groups, width[m]);
    }
    if (desc->bias) {
        random_biases(&random, biases, 2 * desc->intermediate + desc->hidden);
        source.gate_bias = biases;
        source.up_bias = biases + desc->intermediate;
        source.bias_step = 1;
    }
    for (uint32_t n = 0; n < fill->plan->node_count && !rc; n++)
        rc = numoe_model_store(fill->model, index / desc->experts, index % desc->experts, n,
                               &source, &report);
    if (!rc && desc->bias)
        numoe_model_store_down_bias(fill->model, index / desc->experts, index % desc->experts,
                                    biases + 2 * desc->intermediate);
    fill->results[item] = rc;
    fill->extreme[item] = report.extreme_scales;
}

/* Offsets of one expert in checkpoint order; false when they overflow. */
static bool fill_layout(struct fill *fill)
{
    const struct numoe_model_desc *desc = &fill->desc;
    uint64_t rows[3] = {desc->intermediate, desc->intermediate, desc->hidden};
    uint64_t width[3] = {desc->hidden, desc->hidden, desc->intermediate}, end = 0, codes, scales;

    for (int m = 0; m < 3; m++) {
        if (!numoe_mul_u64(rows[m], width[m] / NUMOE_TILE + 1, &scales) ||
            !numoe_mul_u64(scales, 16, &codes))
            return false;
        fill->codes[m] = end;
        if (!numoe_add_u64(end, codes, &end) || !numoe_round_up_u64(end, 64, &end))
            return false;
        fill->scales[m] = end;
        if (!numoe_add_u64(end, scales, &end) || !numoe_round_up_u64(end, 64, &end))
            return false;
    }
    fill->biases = end;
    if (desc->bias && (!numoe_mul_u64(desc->intermediate, 8, &codes) ||
                       !numoe_mul_u64(desc->hidden, 4, &scales) ||
                       !numoe_add_u64(end, codes, &end) || !numoe_add_u64(end, scales, &end)))
        return false;
    return numoe_round_up_u64(end, 4096, &fill->worker_bytes);
}

int numoe_bench_fill(struct numoe_model *model, uint64_t seed,
                     void (*progress)(uint64_t done, uint64_t total), struct numoe_error *error)
{
    struct numoe_pool *pool = numoe_context_pool(numoe_model_context(model));
    uint32_t workers = numoe_pool_worker_count(pool), batch = workers * 4;
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_pool_job job = {.phase_count = 1, .phases = {{.run = fill_expert}}};
    struct fill fill = {.model = model, .plan = numoe_model_plan(model), .seed = seed};
    uint64_t total, bytes;
    int rc;

    rc = numoe_model_info(model, &info);
    if (rc)
        return numoe_error_set(error, rc, "bench", "the model does not describe itself");
    fill.desc = info.desc;
    total = info.desc.layers * info.desc.experts;
    if (!fill_layout(&fill) || !numoe_mul_u64(fill.worker_bytes, workers, &bytes))
        return numoe_error_set(error, -EOVERFLOW, "bench", "an expert's size overflows");
    fill.buffers = aligned_alloc(4096, bytes);
    fill.results = calloc(batch, sizeof *fill.results);
    fill.extreme = calloc(batch, sizeof *fill.extreme);
    if (!fill.buffers || !fill.results || !fill.extreme) {
        rc = numoe_error_set(error, -ENOMEM, "bench", "no room for an expert for each worker");
        goto out;
    }
    for (; fill.first < total; fill.first += job.phases[0].items) {
        job.context = &fill;
        job.phases[0].items = (uint32_t)(total - fill.first < batch ? total - fill.first : batch);
        rc = numoe_pool_run(pool, &job);
        for (uint32_t i = 0; i < job.phases[0].items && !rc; i++) {
            uint64_t index = fill.first + i;

            rc = fill.results[i];
            if (!rc)
                numoe_model_mark(model, index / info.desc.experts, index % info.desc.experts, true,
                                 fill.extreme[i]);
        }
        if (rc) {
            numoe_error_set(error, rc, "bench", "random weights could not be stored: %s",
                            strerror(-rc));
            goto out;
        }
        if (progress)
            progress(fill.first + job.phases[0].items, total);
    }
out:
    free(fill.buffers);
    free(fill.results);
    free(fill.extreme);
    return rc;
}
