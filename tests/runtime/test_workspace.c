/*
 * What a plan predicts for activations is what a call takes, with the half that the executor adds
 * so that it need not grow at every call.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "model.h"
#include "numoe.h"
#include "predict.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const struct numoe_model_desc desc = {.size = sizeof desc,
                                             .layers = 1,
                                             .experts = 32,
                                             .experts_per_token = 4,
                                             .hidden = 1024,
                                             .intermediate = 512,
                                             .format = NUMOE_MXFP4,
                                             .activation = {.kind = NUMOE_SILU},
                                             .arithmetic = NUMOE_FAST};

static void load(struct numoe_model *model)
{
    uint8_t *codes = calloc(desc.hidden, desc.intermediate / 2), *scales;
    const uint64_t groups = desc.hidden * desc.intermediate / 32;

    scales = malloc(groups);
    memset(scales, 127, groups);
    for (uint64_t e = 0; e < desc.experts; e++) {
        struct numoe_expert_weights weights = NUMOE_EXPERT_WEIGHTS_INIT;
        struct numoe_mxfp4 wide = {.codes = codes,
                                   .scales = scales,
                                   .code_stride = desc.hidden / 2,
                                   .scale_stride = desc.hidden / 32,
                                   .code_step = 16,
                                   .scale_step = 1,
                                   .nibbles = NUMOE_NIBBLES_ADJACENT};
        struct numoe_error error = NUMOE_ERROR_INIT;

        weights.gate = weights.up = weights.down = wide;
        weights.down.code_stride = desc.intermediate / 2;
        weights.down.scale_stride = desc.intermediate / 32;
        cr_assert_eq(numoe_expert_load(model, 0, e, &weights, &error), 0, "%s", error.message);
    }
    free(codes);
    free(scales);
}

static uint64_t measured(struct numoe *context, struct numoe_model *model, uint64_t tokens)
{
    const uint64_t k = desc.experts_per_token;
    float *x = calloc(tokens * desc.hidden, sizeof *x),
          *y = calloc(tokens * desc.hidden, sizeof *y);
    int32_t *ids = calloc(tokens * k, sizeof *ids);
    float *weights = calloc(tokens * k, sizeof *weights);
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_stats stats = {.size = sizeof stats};

    for (uint64_t t = 0; t < tokens; t++)
        for (uint64_t j = 0; j < k; j++)
            ids[t * k + j] = (int32_t)((t * 7 + j * 8 + t / 32) % desc.experts);
    batch.tokens = tokens;
    batch.top_k = k;
    batch.x = x;
    batch.x_type = NUMOE_F32;
    batch.ids = ids;
    batch.weights = weights;
    batch.out = y;
    batch.out_type = NUMOE_F32;
    cr_assert_eq(numoe_forward(model, 0, &batch, NULL, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_stats_get(context, &stats), 0);
    free(x);
    free(y);
    free(ids);
    free(weights);
    return stats.workspace_bytes;
}

static uint64_t predicted(const struct numoe_model *model, const struct numoe_machine *machine,
                          uint32_t tokens)
{
    const struct numoe_kernels *kernels = numoe_model_kernels(model);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_prediction *prediction;
    uint64_t bytes = 0;

    options.tokens = &tokens;
    options.token_count = 1;
    options.record_bytes = kernels->record_bytes(numoe_model_shape(model));
    options.scratch_bytes = kernels->scratch_bytes(numoe_model_shape(model));
    cr_assert_eq(numoe_predict(machine, numoe_model_plan(model), &options, &prediction, &error), 0,
                 "%s", error.message);
    for (uint32_t n = 0; n < prediction->node_count; n++)
        bytes += prediction->nodes[n].activation_bytes;
    numoe_prediction_free(prediction);
    return bytes;
}

Test(workspace, is_as_predicted, .timeout = 120)
{
    static const char *const machines[] = {
        "pack:1 [numa(memory=16GB)] core:4 pu:1",
        "pack:2 [numa(memory=16GB)] core:2 pu:1",
        "pack:1 l3:8 [numa(memory=2GB)] core:2 pu:1",
        "pack:2 l3:8 [numa(memory=2GB)] core:1 pu:1",
    };
    static const uint32_t tokens[] = {1, 4, 16, 256, 2048};
    const double mib = 1 << 20;

    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++) {
            struct numoe_options options = NUMOE_OPTIONS_INIT;
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_model *model;
            struct numoe *context;
            double took, said;

            options.topology = machines[m];
            cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
            cr_assert_eq(numoe_model_create(context, &desc, &model, &error), 0, "%s",
                         error.message);
            load(model);
            took = (double)measured(context, model, tokens[t]);
            said = (double)predicted(model, numoe_context_machine(context), tokens[t]);
            /* three parts are rounded to 2 MiB; tables of the schedule are not predicted */
            cr_expect(took >= 1.4 * said && took <= 1.6 * said + 7 * mib,
                      "%s, %u tokens: %.2f MiB, predicted %.2f", machines[m], tokens[t], took / mib,
                      said / mib);
            numoe_model_destroy(model);
            numoe_close(context);
        }
    }
}
