/* Which of two kernel sets is taken. Nothing is timed here that could come out either way. */
#include "choose_kernels.h"
#include "model.h"

#include <criterion/criterion.h>

Test(runtime_choose_kernels, vectors_beat_plain_c, .timeout = 60)
{
    const struct numoe_kernels *plain = numoe_kernels_select(NUMOE_FAST, "ref", NULL);
    const struct numoe_kernels *best = numoe_kernels_at(NUMOE_FAST, 0);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_choice choice;
    struct numoe *context;

    if (best == plain)
        cr_skip_test("this CPU has no vector kernels");
    options.threads = 2;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    for (int swapped = 0; swapped < 2; swapped++) {
        numoe_choose_kernels(numoe_context_pool(context), swapped ? plain : best,
                             swapped ? best : plain, 100000000, &choice);
        cr_expect_eq(choice.chosen, best);
        cr_expect_gt(choice.rates[swapped], 0.0);
    }
    numoe_close(context);
}

Test(runtime_choose_kernels, equals_give_the_first, .timeout = 60)
{
    const struct numoe_kernels *best = numoe_kernels_at(NUMOE_FAST, 0);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_choice choice;
    struct numoe *context;

    options.threads = 1;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    numoe_choose_kernels(numoe_context_pool(context), best, best, 1, &choice);
    cr_expect_eq(choice.chosen, best);
    numoe_close(context);
}

/* An ISA that was asked for is never replaced. */
Test(runtime_choose_kernels, a_named_isa_stays, .timeout = 60)
{
    for (size_t i = 0; numoe_kernels_at(NUMOE_FAST, i); i++) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;
        struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
        struct numoe_model *model;
        struct numoe *context;

        options.threads = 1;
        options.isa = numoe_kernels_at(NUMOE_FAST, i)->isa;
        desc.layers = desc.experts = desc.experts_per_token = 1;
        desc.hidden = desc.intermediate = 32;
        desc.activation.kind = NUMOE_SILU;
        cr_assert_eq(numoe_open(&options, &context, NULL), 0);
        cr_assert_eq(numoe_model_create(context, &desc, &model, NULL), 0);
        cr_expect_eq(numoe_model_kernels(model), numoe_kernels_at(NUMOE_FAST, i));
        numoe_model_destroy(model);
        numoe_close(context);
    }
}
