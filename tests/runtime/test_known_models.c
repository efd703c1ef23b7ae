/* Models known by name, and what their experts take in memory. SPDX-License-Identifier: Apache-2.0
 */
#include "families.h"
#include "model.h"
#include "numoe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <string.h>

/*
 * Bytes as the checkpoints have them: exactly of an expert, in 10^9 of a layer, of all layers, and
 * read for a token. format 0: the model's own.
 */
static const struct {
    const char *name;
    enum numoe_format format;
    uint64_t expert;
    double layer, all, token;
} sizes[] = {
    {"v4-flash", 0, 13369344, 3.423, 147.2, 3.449},
    {"v4-pro", 0, 35094528, 13.48, 822, 12.85},
    {"v4.1-flash", 0, 18800640, 7.219, 288.8, 4.512},
    {"kimi-k3", 0, 17547264, 15.72, 1446, 25.83},
    {"gpt-oss-20b", 0, 13236480, 0.424, 10.2, 1.27},
    {"gpt-oss-120b", 0, 13236480, 1.694, 61.0, 1.91},
    {"deepseek-v3", 0, 44050944, 11.28, 654, 20.4},
    {"deepseek-r1", 0, 44050944, 11.28, 654, 20.4},
    {"kimi-k2", 0, 24772608, 9.51, 571, 11.9},
    {"qwen3-30b", 0, 9437184, 1.21, 58.0, 3.62},
    {"qwen3-235b", 0, 37748736, 4.83, 454, 28.4},
    {"qwen3-next", 0, 6291456, 3.221, 154.6, 3.020},
    {"glm-4.5", 0, 47185920, 7.550, 671.9, 33.60},
    {"glm-4.5", NUMOE_FP8_CHANNEL, 23625728, 3.780, 336.4, 16.82},
    {"glm-4.5-air", 0, 34603008, 4.429, 199.3, 12.46},
    {"glm-5", 0, 75497472, 19.33, 1450, 45.30},
    {"glm-5", NUMOE_FP8_BLOCK128, 37757952, 9.67, 725, 22.7},
    {"minimax-m2", 0, 14159232, 3.62, 225, 7.02},
    {"minimax-m3", 0, 58392576, 7.47, 426, 13.3},
    {"mixtral-8x7b", 0, 352321536, 2.819, 90.19, 22.55},
};

enum { SIZES = sizeof sizes / sizeof sizes[0] };

static uint64_t expert_bytes(const struct numoe_model_desc *desc)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_expert_shape shape;

    cr_assert_eq(numoe_model_expert_shape(desc, &shape, &error), 0, "%s", error.message);
    cr_assert_eq(shape.slices, (desc->intermediate + 31) / 32);
    cr_assert_eq(shape.slice_bytes % 64, 0);
    return shape.slices * shape.slice_bytes + shape.expert_bytes;
}

static bool near(double value, double printed)
{
    /* printed with three digits or four */
    return fabs(value / printed - 1) < 5e-3;
}

/* An expert here is never smaller than on disk, and by how much it is larger depends on the
 * format: groups of 32 cost nothing; biases, bf16 on disk, are fp32; a block's scale is repeated
 * in each of its 16 tiles. Never by 2 %. */
Test(known_models, sizes_are_those_of_the_checkpoints)
{
    for (size_t i = 0; i < SIZES; i++) {
        struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
        double here, most, disk = (double)sizes[i].expert;

        cr_assert_eq(numoe_model_by_name(sizes[i].name, &desc, NULL), 0, "%s", sizes[i].name);
        if (sizes[i].format)
            desc.format = sizes[i].format;
        here = (double)expert_bytes(&desc);
        most = desc.format == NUMOE_FP8_BLOCK128  ? 1.004
               : desc.bias                        ? 1.0014
               : desc.format == NUMOE_FP8_CHANNEL ? 1.0001
                                                  : 1;
        cr_expect(here >= disk && here <= most * disk, "%s: %.0f bytes, %.0f on disk",
                  sizes[i].name, here, disk);
        cr_expect(near(disk * (double)desc.experts / 1e9, sizes[i].layer), "%s", sizes[i].name);
        cr_expect(near(disk * (double)(desc.experts * desc.layers) / 1e9, sizes[i].all), "%s",
                  sizes[i].name);
        cr_expect(near(disk * (double)(desc.experts_per_token * desc.layers) / 1e9, sizes[i].token),
                  "%s", sizes[i].name);
    }
}

Test(known_models, each_is_in_the_table_above_and_complete)
{
    struct numoe_model_desc desc;
    const char *name;
    size_t count = 0;

    for (; (name = numoe_model_name_at(count)); count++) {
        const struct numoe_known_model *known = numoe_known_model(name);
        bool found = false;

        cr_assert_eq(numoe_model_by_name(name, &desc, NULL), 0);
        cr_expect_eq(desc.size, sizeof desc);
        cr_expect(desc.layers && desc.experts > desc.experts_per_token && desc.experts_per_token);
        cr_expect(desc.hidden % 32 == 0 && desc.intermediate % 32 == 0);
        cr_expect_not_null(numoe_format_info(desc.format));
        cr_expect_eq(numoe_activation_check(&desc.activation, NULL), 0, "%s", name);
        cr_expect(!known->family || numoe_family_by_name(known->family), "%s", name);
        for (size_t i = 0; i < SIZES; i++)
            found |= !strcmp(sizes[i].name, name);
        cr_expect(found, "%s", name);
        for (size_t i = 0; i < count; i++)
            cr_expect_str_neq(numoe_model_name_at(i), name);
    }
    cr_expect_eq(count, 18);
    cr_assert_eq(numoe_model_by_name("gpt-oss-120b", &desc, NULL), 0);
    cr_expect(desc.bias && desc.activation.kind == NUMOE_SWIGLU_OAI);
    cr_assert_eq(numoe_model_by_name("minimax-m3", &desc, NULL), 0);
    cr_expect(!desc.bias && desc.activation.kind == NUMOE_SWIGLU_OAI);
}

Test(known_models, an_unknown_name_is_answered_with_all_that_are_known)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_desc desc;

    cr_assert_eq(numoe_model_by_name("v5", &desc, &error), -EINVAL);
    for (size_t i = 0; numoe_model_name_at(i); i++)
        cr_expect(strstr(error.message, numoe_model_name_at(i)), "%s", error.message);
    cr_assert_eq(numoe_model_by_name(NULL, &desc, &error), -EINVAL);
    cr_expect_null(numoe_family_by_name(NULL));
}

Test(known_models, what_has_no_kernel_is_refused_by_name, .timeout = 60)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    struct numoe *context;

    options.topology = "pack:1 [numa(memory=64GB)] core:2 pu:1";
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    for (size_t i = 0; numoe_format_at(i); i++) {
        const struct numoe_format_info *format = numoe_format_at(i);
        struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;

        desc.layers = desc.experts = desc.experts_per_token = 1;
        desc.hidden = desc.intermediate = 64;
        desc.activation.kind = NUMOE_SILU;
        desc.format = format->format;
        if (format->has_kernels) {
            cr_assert_eq(numoe_model_create(context, &desc, &model, &error), 0);
            numoe_model_destroy(model);
            model = NULL;
            continue;
        }
        cr_expect_eq(numoe_model_create(context, &desc, &model, &error), -ENOTSUP);
        cr_expect_null(model);
        cr_expect(strstr(error.message, "no kernel for ") && strstr(error.message, format->title),
                  "%s", error.message);
        desc.format = (enum numoe_format)99;
        cr_expect_eq(numoe_model_create(context, &desc, &model, &error), -EINVAL);
    }
    numoe_close(context);
}
