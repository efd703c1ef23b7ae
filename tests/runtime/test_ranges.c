/* Ranks: models of some slices of some experts, whose outputs add up to the model's. */
#include <errno.h>

#include "context.h"
#include "loader_files.h"
#include "support/fixture.h"
#include "synth.h"

/* Tensor parallel by expert parallel; rank r has part r % tp of the slices and r / tp of experts.
 */
static struct numoe_range range_of(const struct numoe_model_desc *desc, uint64_t tp, uint64_t ep,
                                   uint64_t rank)
{
    const uint64_t slices = (desc->intermediate + 31) / 32, t = rank % tp, e = rank / tp;

    return (struct numoe_range){.first_slice = slices * t / tp,
                                .end_slice = slices * (t + 1) / tp,
                                .first_expert = desc->experts * e / ep,
                                .end_expert = desc->experts * (e + 1) / ep};
}

/* The model of f as far as a range goes, in a context of its own. */
static struct fixture rank_of(const struct fixture *f, const struct numoe_options *options,
                              const struct numoe_range *range)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct fixture r = *f;

    r.desc.range = *range;
    cr_assert_eq(numoe_open(options, &r.context, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_model_create(r.context, &r.desc, &r.model, &error), 0, "%s: %s", error.where,
                 error.message);
    return r;
}

static void load_held(struct fixture *r)
{
    for (uint64_t q = 0; q < r->desc.layers * r->desc.experts; q++) {
        const struct numoe_expert_weights w = expert_weights(&r->experts[q]);
        struct numoe_error error = NUMOE_ERROR_INIT;
        const uint64_t expert = q % r->desc.experts;
        const int rc = numoe_expert_load(r->model, q / r->desc.experts, expert, &w, &error);

        if (numoe_model_holds(r->model, expert)) {
            cr_assert_eq(rc, 0, "%s: %s", error.where, error.message);
        } else {
            cr_assert_eq(rc, -EINVAL);
            cr_assert(strstr(error.message, "held elsewhere"), "%s", error.message);
        }
    }
}

/* Outputs of all ranks, added up, against double precision; and what they count. */
static void check_sum(const struct fixture *f, const struct numoe_options *options, uint64_t tp,
                      uint64_t ep)
{
    static const uint64_t counts[] = {1, 3, 40, 200};
    enum { COUNTS = sizeof counts / sizeof counts[0] };
    const double limit = f->desc.arithmetic == NUMOE_FAST ? 2e-2 : 4e-3;
    const uint64_t hidden = f->desc.hidden;
    float *sum[COUNTS] = {NULL};
    struct numoe_model_info whole = {.size = sizeof whole};
    uint64_t pairs[COUNTS] = {0}, bytes = 0;
    struct call calls[COUNTS];

    for (size_t i = 0; i < COUNTS; i++) {
        random_state = 50 + counts[i];
        calls[i] = call_make(counts[i], 3, hidden, f->desc.experts, true);
        sum[i] = calloc(counts[i] * hidden, sizeof *sum[i]);
    }
    for (uint64_t rank = 0; rank < tp * ep; rank++) {
        const struct numoe_range range = range_of(&f->desc, tp, ep, rank);
        struct fixture r = rank_of(f, options, &range);
        struct numoe_model_info info = {.size = sizeof info};

        load_held(&r);
        cr_assert_eq(numoe_model_info(r.model, &info), 0);
        bytes += info.resident_bytes;
        for (size_t i = 0; i < COUNTS; i++) {
            struct numoe_batch b = call_batch(&calls[i]);
            struct numoe_result result = NUMOE_RESULT_INIT;
            uint64_t past = 0;

            cr_assert_eq(numoe_forward(r.model, 1, &b, &result, NULL), 0);
            for (uint64_t n = 0; n < counts[i] * hidden; n++)
                sum[i][n] += calls[i].out[n];
            for (uint64_t n = 0; n < counts[i] * 3; n++)
                past += calls[i].ids[n] >= (int64_t)f->desc.experts;
            cr_assert_eq(result.missing, 0, "what is held elsewhere is not missing");
            cr_assert_eq(result.skipped, past);
            cr_assert_eq(result.expert_bytes, result.experts_hit * info.expert_bytes);
            pairs[i] += result.pairs;
        }
        numoe_model_destroy(r.model);
        numoe_close(r.context);
    }
    cr_assert_eq(numoe_model_info(f->model, &whole), 0);
    cr_assert_eq(bytes, whole.resident_bytes, "nothing twice, nothing left out");
    for (size_t i = 0; i < COUNTS; i++) {
        uint64_t entries = 0;
        double e;

        for (uint64_t n = 0; n < counts[i] * 3; n++)
            entries += calls[i].ids[n] >= 0 && calls[i].ids[n] < (int64_t)f->desc.experts;
        cr_assert_eq(pairs[i], tp * entries, "each pair once for each part of its expert");
        memcpy(calls[i].out, sum[i], counts[i] * hidden * sizeof **sum);
        e = check(f, 1, &calls[i], counts[i] > 10 ? counts[i] / 10 : 1);
        cr_expect_leq(e, limit, "%lu x %lu ranks, %lu tokens: %g", tp, ep, counts[i], e);
        free(sum[i]);
        call_free(&calls[i]);
    }
}

static void check_ranks(const char *topology, enum numoe_form form, bool bias,
                        enum numoe_arithmetic arithmetic)
{
    static const uint64_t ranks[][2] = {{1, 1}, {2, 1}, {1, 2}, {3, 2}, {7, 1}, {1, 9}};
    struct fixture f = fixture_of(2, 9, 96, 200, bias, arithmetic); /* 7 slices, the last short */
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.topology = topology;
    options.form = form;
    experts_make(&f, 31);
    open_model(&f, &options);
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        check_sum(&f, &options, ranks[i][0], ranks[i][1]);
    close_model(&f);
    experts_free(&f);
}

Test(ranges_sum, of_ranks_is_the_model_fast, .timeout = 240)
{
    check_ranks("pack:1 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_AUTO, true, NUMOE_FAST);
    check_ranks("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_EVERY_NODE, false,
                NUMOE_FAST);
}

Test(ranges_sum, of_ranks_is_the_model_exact, .timeout = 240)
{
    check_ranks("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_EXPERTS, true,
                NUMOE_EXACT);
    check_ranks(NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml", NUMOE_FORM_GROUPS, true,
                NUMOE_EXACT);
}

/* One rank's output is its own slices' part: against the reference of these slices alone. */
Test(ranges_sum, a_rank_computes_its_slices_alone, .timeout = 120)
{
    struct fixture f = fixture_of(1, 4, 64, 160, true, NUMOE_EXACT);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    const struct numoe_range range = {1, 4, 1, 3};

    options.topology = "numa:2(memory=16GB) core:2 pu:1";
    experts_make(&f, 77);
    struct fixture r = rank_of(&f, &options, &range);
    load_held(&r);
    struct call c = call_make(5, 2, 64, 4, false);
    struct numoe_batch b = call_batch(&c);
    run(&r, 0, &b);
    for (uint64_t t = 0; t < 5; t++) {
        double want[64] = {0};

        for (uint64_t j = 0; j < 2; j++) {
            const int64_t id = c.ids[t * 2 + j];
            const struct test_expert *e = &f.experts[id];

            if (id < 1 || id >= 3)
                continue;
            for (uint64_t i = 32; i < 128; i++) {
                double gate = (double)e->bias[0][i], up = (double)e->bias[1][i], h;

                for (uint64_t k = 0; k < 64; k++) {
                    gate += test_expert_weight(e, 0, i, k) * (double)c.x[t * 64 + k];
                    up += test_expert_weight(e, 1, i, k) * (double)c.x[t * 64 + k];
                }
                h = numoe_activation_reference(&f.desc.activation, gate, up);
                for (uint64_t row = 0; row < 64; row++)
                    want[row] +=
                        (double)c.weights[t * 2 + j] * test_expert_weight(e, 2, row, i) * h;
            }
        }
        cr_expect_leq(relative_l2(want, c.out + t * 64, 64), 5e-3, "token %lu", t);
    }
    call_free(&c);
    numoe_model_destroy(r.model);
    numoe_close(r.context);
    experts_free(&f);
}

/* The same bits for any threads, as a whole model. */
Test(ranges_sum, bits_do_not_depend_on_threads, .timeout = 120)
{
    struct fixture f = fixture_of(1, 8, 64, 320, true, NUMOE_FAST);
    const struct numoe_range range = {3, 8, 2, 7};
    float *first = NULL;

    experts_make(&f, 3);
    for (uint32_t threads = 1; threads < 40; threads = 3 * threads + 1) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;

        options.topology = "pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1";
        options.threads = threads;
        options.chaos_seed = threads;
        struct fixture r = rank_of(&f, &options, &range);
        load_held(&r);
        random_state = 9;
        struct call c = call_make(70, 3, 64, 8, true);
        struct numoe_batch b = call_batch(&c);
        run(&r, 0, &b);
        if (first)
            cr_assert_arr_eq(c.out, first, 70 * 64 * sizeof *first);
        else
            memcpy(first = malloc(70 * 64 * sizeof *first), c.out, 70 * 64 * sizeof *first);
        call_free(&c);
        numoe_model_destroy(r.model);
        numoe_close(r.context);
    }
    free(first);
    experts_free(&f);
}

/* ---- loading --------------------------------------------------------------------------------- */

static int keep_progress(void *user, const struct numoe_load_progress *progress)
{
    *(struct numoe_load_progress *)user = *progress;
    return 0;
}

Test(ranges_load, ranks_of_a_checkpoint_add_up, .timeout = 120)
{
    enum { TOKENS = 11, HIDDEN = 96, K = 3, EXPERTS = 6 };
    static const uint64_t ranks[][2] = {{2, 1}, {1, 3}, {4, 2}};
    struct numoe_synth_options synth = NUMOE_SYNTH_OPTIONS_INIT;
    char *directory = files_dir();
    struct numoe_model *whole;
    struct numoe *context;
    struct call c;

    synth.model = "v4-flash";
    synth.layers = 2;
    synth.experts = EXPERTS;
    synth.hidden = HIDDEN;
    synth.intermediate = 288;
    synth.shard_bytes = 50000;
    synth.seed = 5;
    cr_assert_eq(numoe_synth_write(directory, &synth, NULL), 0);
    cr_assert_eq(numoe_open(NULL, &context, NULL), 0);
    cr_assert_eq(numoe_model_load(context, directory, NULL, &whole, NULL), 0);
    c = call_make(TOKENS, K, HIDDEN, EXPERTS, false);
    struct numoe_batch b = call_batch(&c);
    cr_assert_eq(numoe_forward(whole, 1, &b, NULL, NULL), 0);
    double want[TOKENS * HIDDEN];
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        want[i] = (double)c.out[i];
    for (size_t n = 0; n < sizeof ranks / sizeof ranks[0]; n++) {
        const uint64_t tp = ranks[n][0], ep = ranks[n][1];
        float sum[TOKENS * HIDDEN] = {0};

        for (uint64_t rank = 0; rank < tp * ep; rank++) {
            struct numoe_load_options options = NUMOE_LOAD_OPTIONS_INIT;
            struct numoe_model_info all = {.size = sizeof all}, info = {.size = sizeof info};
            struct numoe_load_progress progress = {0};
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_model *model;
            uint64_t slices;

            cr_assert_eq(numoe_model_info(whole, &all), 0);
            options.range = range_of(&all.desc, tp, ep, rank);
            options.read = rank % 2 ? NUMOE_READ_DISK : NUMOE_READ_CACHED;
            options.progress = keep_progress;
            options.user = &progress;
            cr_assert_eq(numoe_model_load(context, directory, &options, &model, &error), 0,
                         "%s: %s", error.where, error.message);
            cr_assert_eq(numoe_forward(model, 1, &b, NULL, NULL), 0);
            for (int i = 0; i < TOKENS * HIDDEN; i++)
                sum[i] += c.out[i];
            /* of gate and up the rows of its slices, of down all */
            cr_assert_eq(numoe_model_info(model, &info), 0);
            slices = options.range.end_slice - options.range.first_slice;
            cr_expect_eq(info.checkpoint_bytes,
                         all.checkpoint_bytes / EXPERTS / 27 *
                             (options.range.end_expert - options.range.first_expert) *
                             (2 * slices + 9));
            cr_expect_eq(progress.bytes_done, info.checkpoint_bytes);
            cr_expect_eq(progress.bytes_total, info.checkpoint_bytes);
            numoe_model_destroy(model);
        }
        cr_expect_leq(relative_l2(want, sum, TOKENS * HIDDEN), 2e-2, "%lu x %lu", tp, ep);
    }
    call_free(&c);
    numoe_model_destroy(whole);
    numoe_close(context);
    files_drop(directory);
}

/* ---- what is refused ------------------------------------------------------------------------- */

Test(ranges_refused, ranges_that_are_none, .timeout = 60)
{
    static const struct numoe_range bad[] = {
        {5, 0, 0, 0}, {2, 2, 0, 0}, {3, 2, 0, 0}, {0, 6, 0, 0},
        {0, 0, 4, 0}, {0, 0, 1, 1}, {0, 0, 0, 5}, {0, 0, UINT64_MAX, UINT64_MAX}};
    struct fixture f = fixture_of(1, 4, 64, 160, false, NUMOE_FAST);
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_open(NULL, &f.context, NULL), 0);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        f.desc.range = bad[i];
        cr_expect_eq(numoe_model_create(f.context, &f.desc, &f.model, &error), -EINVAL, "%zu", i);
        cr_expect_str_eq(error.where, "range");
        cr_expect(strstr(error.message, "are none of the"), "%s", error.message);
    }
    numoe_close(f.context);
}

/* A plan of one rank is not another's. */
Test(ranges_refused, a_plan_of_another_rank, .timeout = 60)
{
    struct fixture f = fixture_of(1, 4, 64, 160, false, NUMOE_FAST);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    const struct numoe_range mine = {0, 3, 0, 0};
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    struct fixture r = rank_of(&f, NULL, &mine), s = f;

    cr_assert_eq(numoe_plan_print_json(numoe_model_plan(r.model), out), 0);
    fclose(out);
    numoe_model_destroy(r.model);
    numoe_close(r.context);
    options.plan = text;
    options.plan_bytes = bytes;
    s = rank_of(&f, &options, &mine);
    numoe_model_destroy(s.model);
    s.desc.range = (struct numoe_range){3, 5, 0, 0};
    cr_assert_eq(numoe_model_create(s.context, &s.desc, &s.model, &error), -ESTALE);
    cr_expect(strstr(error.message, "first slice held: 0, and 3 in this model"), "%s",
              error.message);
    numoe_close(s.context);
    free(text);
}
