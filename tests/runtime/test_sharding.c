/* Forms of sharding in the executor: right results, the same bits whoever computes, and as many
 * partial outputs as were predicted. */
#include <errno.h>

#include "context.h"
#include "predict.h"
#include "schedule.h"
#include "support/fixture.h"

#define EPYC NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml"

struct form {
    const char *topology;
    enum numoe_form form;
    uint32_t groups;
};

static const struct form forms[] = {
    {"pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_EVERY_NODE, 0},
    {"pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_GROUPS, 2},
    {"pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_EXPERTS, 0},
    {"numa:5(memory=16GB) core:1 pu:1", NUMOE_FORM_GROUPS, 3},
    {"pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2", NUMOE_FORM_GROUPS, 2},
    {"pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2", NUMOE_FORM_EXPERTS, 0},
    {EPYC, NUMOE_FORM_AUTO, 0},
    {EPYC, NUMOE_FORM_GROUPS, 0},
    {EPYC, NUMOE_FORM_EXPERTS, 0},
};
enum { FORMS = sizeof forms / sizeof forms[0] };

static struct numoe_options options_of(const struct form *form)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.topology = form->topology;
    options.form = form->form;
    options.groups = form->groups;
    options.spin_ns = 1000;
    return options;
}

/* One plan, different threads, random stealing: near the reference, and the same bits. */
static void check_bits(const struct form *form, bool bias, enum numoe_arithmetic arithmetic)
{
    static const uint32_t threads[] = {1, 3, 40};
    static const uint64_t counts[] = {1, 2, 7, 150};
    enum { COUNTS = sizeof counts / sizeof counts[0] };
    const double limit = arithmetic == NUMOE_FAST ? 2e-2 : 4e-3;
    struct fixture f = fixture_of(2, 11, 96, 200, bias, arithmetic);
    float *first[COUNTS] = {NULL};

    experts_make(&f, 11);
    for (size_t n = 0; n < sizeof threads / sizeof threads[0]; n++) {
        struct numoe_options options = options_of(form);

        options.threads = threads[n];
        options.chaos_seed = n;
        open_model(&f, &options);
        cr_assert(!form->form || numoe_model_plan(f.model)->form == form->form);
        for (size_t i = 0; i < COUNTS; i++) {
            random_state = 100 + counts[i];
            struct call c = call_make(counts[i], 3, 96, f.desc.experts, true);
            struct numoe_batch b = call_batch(&c);

            run(&f, i % 2, &b);
            if (!first[i]) {
                const double e = check(&f, i % 2, &c, counts[i] > 10 ? counts[i] / 5 : 1);

                cr_expect_leq(e, limit, "form %d of %s, %lu tokens: %g", (int)form->form,
                              form->topology, counts[i], e);
                first[i] = c.out;
                c.out = NULL;
            } else {
                cr_assert_arr_eq(c.out, first[i], counts[i] * 96 * sizeof(float),
                                 "%u threads, %lu tokens", threads[n], counts[i]);
            }
            call_free(&c);
        }
        close_model(&f);
    }
    for (size_t i = 0; i < COUNTS; i++)
        free(first[i]);
    experts_free(&f);
}

Test(sharding_forward, any_form_any_threads_fast, .timeout = 240)
{
    for (size_t i = 0; i < FORMS; i++)
        check_bits(&forms[i], i % 2, NUMOE_FAST);
}

Test(sharding_forward, any_form_any_threads_exact, .timeout = 240)
{
    for (size_t i = 0; i < FORMS; i++)
        check_bits(&forms[i], i % 2 == 0, NUMOE_EXACT);
}

/* A replaced expert is replaced on the nodes that have it. */
Test(sharding_forward, experts_are_replaced_where_they_are, .timeout = 60)
{
    struct fixture f = fixture_of(2, 5, 64, 96, true, NUMOE_EXACT);
    struct numoe_options options = options_of(&forms[2]);

    experts_make(&f, 5);
    open_model(&f, &options);
    for (uint64_t i = 0; i < 2 * 5; i++) {
        test_expert_free(&f.experts[i]);
        test_expert_make(&f.experts[i], 64, 96, true);
    }
    experts_load(&f);
    struct call c = call_make(20, 3, 64, 5, true);
    struct numoe_batch b = call_batch(&c);
    run(&f, 1, &b);
    cr_expect_leq(check(&f, 1, &c, 1), 4e-3);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

/* ---- as predicted ---------------------------------------------------------------------------- */

/* Rows that the executor lays out for random tokens, on average over some batches. */
static double rows_laid_out(struct numoe_model *model, uint64_t tokens, uint32_t batches)
{
    const uint64_t k = model->desc.experts_per_token, experts = model->desc.experts;
    struct numoe_schedule s = {0};
    struct numoe_batch b = NUMOE_BATCH_INIT;
    int64_t *ids = calloc(tokens * k, sizeof *ids);
    float *weights = calloc(tokens * k, sizeof *weights);
    double rows = 0;

    b.tokens = tokens;
    b.top_k = k;
    b.ids = ids;
    b.id_bytes = 8;
    b.weights = weights;
    b.x_type = b.out_type = NUMOE_F32;
    for (uint32_t n = 0; n < batches; n++) {
        for (uint64_t t = 0; t < tokens; t++)
            for (uint64_t j = 0, i; j < k; j += i == j) {
                ids[t * k + j] = (int64_t)((random_u64() >> 20) % experts);
                for (i = 0; i < j && ids[t * k + i] != ids[t * k + j];)
                    i++;
            }
        cr_assert_eq(numoe_schedule_begin(&s, model, n % model->desc.layers, &b), 0);
        s.token_begin = 0;
        s.token_count = tokens;
        cr_assert_eq(numoe_schedule_build(&s, 4), 0);
        rows += s.row_count;
    }
    numoe_schedule_free(&s);
    free(ids);
    free(weights);
    return rows / batches;
}

static void check_rows(const struct form *form, uint64_t experts, uint64_t hidden,
                       uint64_t intermediate)
{
    static const uint32_t tokens[] = {1, 4, 64, 2048};
    struct numoe_options options = options_of(form);
    struct numoe_predict_options predict = NUMOE_PREDICT_OPTIONS_INIT;
    struct fixture f = fixture_of(3, experts, hidden, intermediate, false, NUMOE_FAST);
    struct numoe_prediction *prediction;

    f.desc.experts_per_token = 6;
    options.threads = 2;
    cr_assert_eq(numoe_open(&options, &f.context, NULL), 0);
    cr_assert_eq(numoe_model_create(f.context, &f.desc, &f.model, NULL), 0);
    for (uint64_t q = 0; q < 3 * experts; q++)
        numoe_model_mark(f.model, q / experts, q % experts, true, false);
    predict.tokens = tokens;
    predict.token_count = sizeof tokens / sizeof tokens[0];
    cr_assert_eq(
        numoe_predict(f.context->machine, numoe_model_plan(f.model), &predict, &prediction, NULL),
        0);
    for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++) {
        const double rows = rows_laid_out(f.model, tokens[t], tokens[t] < 100 ? 60 : 3);
        const double predicted =
            (double)prediction->cells[t].reduction_bytes / ((double)hidden * 4 * 2);

        /* how few experts are cut depends on how tokens fall */
        const double within = experts < 100 && tokens[t] >= 64 ? 0.18 : 0.12;

        cr_expect(fabs(predicted - rows) < within * rows,
                  "form %d %u, %lu experts, %u tokens: %.1f rows predicted, %.1f laid out",
                  (int)form->form, form->groups, experts, tokens[t], predicted, rows);
    }
    numoe_prediction_free(prediction);
    close_model(&f);
}

/* Narrow rows, which nodes write for themselves; and wide ones, for which packages work together.
 */
Test(sharding_forward, partial_outputs_are_as_many_as_predicted, .timeout = 240)
{
    static const struct form cases[] = {{EPYC, NUMOE_FORM_EVERY_NODE, 0},
                                        {EPYC, NUMOE_FORM_GROUPS, 2},
                                        {EPYC, NUMOE_FORM_GROUPS, 8},
                                        {EPYC, NUMOE_FORM_EXPERTS, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_rows(&cases[i], 256, 32, 2048);
        check_rows(&cases[i], 48, 512, 1024);
    }
}

/* ---- options --------------------------------------------------------------------------------- */

Test(sharding_options, forms_that_cannot_be_are_refused, .timeout = 60)
{
    static const struct {
        struct form form;
        int code;
    } cases[] = {{{"numa:2(memory=4GB) core:1 pu:1", NUMOE_FORM_ROWS, 0}, -ENOTSUP},
                 {{"numa:2(memory=4GB) core:1 pu:1", NUMOE_FORM_GROUPS, 3}, -EINVAL},
                 {{"numa:2(memory=4GB) core:1 pu:1", (enum numoe_form)9, 0}, -EINVAL},
                 {{"numa:2(memory=4GB) core:1 pu:1", NUMOE_FORM_EXPERTS, 2}, -EINVAL}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct fixture f = fixture_of(1, 4, 64, 64, false, NUMOE_FAST);
        struct numoe_options options = options_of(&cases[i].form);
        struct numoe_error error = NUMOE_ERROR_INIT;

        cr_assert_eq(numoe_open(&options, &f.context, NULL), 0);
        cr_expect_eq(numoe_model_create(f.context, &f.desc, &f.model, &error), cases[i].code);
        cr_expect(error.message[0] && error.where[0]);
        numoe_close(f.context);
    }
}
