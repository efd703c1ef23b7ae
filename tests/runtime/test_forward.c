/* The executor: against double precision, and the same bits whoever computes. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "model.h"
#include "numoe.h"
#include "support/fixture.h"

static void check_counts(enum numoe_arithmetic arithmetic, bool bias, uint64_t hidden,
                         uint64_t intermediate)
{
    static const uint64_t counts[] = {0, 1, 2, 7, 65, 300};
    struct fixture f = fixture_of(2, 5, hidden, intermediate, bias, arithmetic);
    const double limit = arithmetic == NUMOE_FAST ? 2e-2 : 4e-3;

    experts_make(&f, 7);
    open_model(&f, NULL);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        struct call c = call_make(counts[i], 3, hidden, f.desc.experts, true);
        struct numoe_batch b = call_batch(&c);
        run(&f, i % 2, &b);
        const double e = check(&f, i % 2, &c, counts[i] > 10 ? counts[i] / 9 : 1);
        cr_expect_leq(e, limit, "%d tokens %lu: %g", arithmetic, counts[i], e);
        call_free(&c);
    }
    close_model(&f);
    experts_free(&f);
}

Test(forward_reference, fast_narrow, .timeout = 120)
{
    check_counts(NUMOE_FAST, false, 96, 160);
}

Test(forward_reference, fast_with_biases_and_padding, .timeout = 120)
{
    check_counts(NUMOE_FAST, true, 130, 70);
}

Test(forward_reference, exact_narrow, .timeout = 120)
{
    check_counts(NUMOE_EXACT, false, 96, 160);
}

Test(forward_reference, exact_with_biases_and_padding, .timeout = 120)
{
    check_counts(NUMOE_EXACT, true, 130, 70);
}

Test(forward_reference, widths_of_real_models, .timeout = 240)
{
    static const struct {
        uint64_t hidden, intermediate;
        bool bias;
    } shapes[] = {{2880, 768, true}, {3584, 32, false}, {4096, 96, false}, {32, 3072, false}};

    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int arithmetic = NUMOE_FAST; arithmetic <= NUMOE_EXACT; arithmetic++) {
            struct fixture f = fixture_of(1, 3, shapes[s].hidden, shapes[s].intermediate,
                                          shapes[s].bias, arithmetic);
            experts_make(&f, 13);
            open_model(&f, NULL);
            for (uint64_t tokens = 7; tokens <= 300; tokens += 293) {
                struct call c = call_make(tokens, 2, shapes[s].hidden, 3, true);
                struct numoe_batch b = call_batch(&c);
                run(&f, 0, &b);
                const double e = check(&f, 0, &c, tokens / 2);
                cr_expect_leq(e, arithmetic == NUMOE_FAST ? 2e-2 : 4e-3,
                              "H %lu I %lu mode %d tokens %lu: %g", shapes[s].hidden,
                              shapes[s].intermediate, arithmetic, tokens, e);
                call_free(&c);
            }
            close_model(&f);
            experts_free(&f);
        }
}

/* The modes' promises are for a layer of real width: one V4-Flash expert set, top 2. */
Test(forward_reference, full_width_meets_the_stated_error, .timeout = 240)
{
    for (int arithmetic = NUMOE_FAST; arithmetic <= NUMOE_EXACT; arithmetic++) {
        struct fixture f = fixture_of(1, 2, 4096, 2048, false, arithmetic);
        const double limit = arithmetic == NUMOE_FAST ? 1.25e-2 : 2.5e-3;

        experts_make(&f, 3);
        open_model(&f, NULL);
        struct call c = call_make(40, 2, 4096, 2, false);
        struct numoe_batch b = call_batch(&c);
        run(&f, 0, &b);
        double e = check(&f, 0, &c, 39);
        cr_expect_leq(e, limit, "many tokens, mode %d: %g", arithmetic, e);
        b.tokens = c.tokens = 2;
        run(&f, 0, &b);
        e = check(&f, 0, &c, 1);
        cr_expect_leq(e, limit, "few tokens, mode %d: %g", arithmetic, e);
        call_free(&c);
        close_model(&f);
        experts_free(&f);
    }
}

/* One plan (of a described machine), different threads, random stealing: the same bits. */
static void check_bits(const char *topology, uint64_t experts, uint64_t hidden,
                       uint64_t intermediate)
{
    static const uint32_t threads[] = {1, 2, 3, 64};
    static const uint64_t counts[] = {1, 2, 7, 65, 300};
    struct fixture f = fixture_of(1, experts, hidden, intermediate, true, NUMOE_FAST);
    float *first[5] = {NULL};

    experts_make(&f, 11);
    for (size_t n = 0; n < sizeof threads / sizeof threads[0]; n++)
        for (uint64_t chaos = 0; chaos < 3; chaos++) {
            struct numoe_options options = NUMOE_OPTIONS_INIT;
            options.topology = topology;
            options.threads = threads[n];
            options.chaos_seed = chaos;
            options.spin_ns = 1000;
            open_model(&f, &options);
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
                random_state = 100 + counts[i];
                struct call c = call_make(counts[i], 3, hidden, experts, true);
                struct numoe_batch b = call_batch(&c);
                run(&f, 0, &b);
                if (!first[i]) {
                    const double e = check(&f, 0, &c, counts[i] > 10 ? counts[i] / 5 : 1);
                    cr_assert_leq(e, 2e-2, "%lu tokens: %g", counts[i], e);
                    first[i] = c.out;
                    c.out = NULL;
                } else {
                    cr_assert_arr_eq(c.out, first[i], counts[i] * hidden * sizeof(float),
                                     "%u threads, chaos %lu, %lu tokens", threads[n], chaos,
                                     counts[i]);
                }
                call_free(&c);
            }
            close_model(&f);
        }
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        free(first[i]);
    experts_free(&f);
}

Test(forward_bits, one_node_any_threads, .timeout = 240)
{
    check_bits("pack:1 [numa(memory=64GB)] core:3 pu:1", 9, 96, 320);
}

Test(forward_bits, four_nodes_any_threads, .timeout = 240)
{
    check_bits("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", 9, 96, 320);
}

Test(forward_bits, thirty_two_nodes_fewer_slices_than_nodes, .timeout = 240)
{
    check_bits("pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2", 7, 64, 768);
}

/* Domains of four nodes, which share work; with many tokens more of them do. */
Test(forward_bits, thirty_two_nodes_of_eight_domains, .timeout = 240)
{
    check_bits(NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml", 7, 64, 1280);
}

/* Deciding tokens one after another or all at once must agree within rounding, on any plan. */
Test(forward_bits, schedules_agree_within_rounding, .timeout = 240)
{
    static const char *const machines[] = {
        "pack:1 [numa(memory=64GB)] core:1 pu:1", "pack:2 l3:4 [numa(memory=16GB)] core:4 pu:1",
        "numa:3(memory=64GB) core:5 pu:1", NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml"};
    struct fixture f = fixture_of(1, 6, 128, 352, false, NUMOE_EXACT);
    float *first = NULL;

    experts_make(&f, 23);
    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;
        options.topology = machines[m];
        open_model(&f, &options);
        random_state = 5;
        struct call c = call_make(50, 3, 128, 6, false);
        struct numoe_batch b = call_batch(&c);
        run(&f, 0, &b);
        if (!first) {
            first = c.out;
            c.out = NULL;
        } else {
            double *want = malloc(50 * 128 * sizeof *want);
            for (int i = 0; i < 50 * 128; i++)
                want[i] = (double)first[i];
            const double e = relative_l2(want, c.out, 50 * 128);
            cr_expect_leq(e, 5e-4, "%s: %g", machines[m], e);
            free(want);
        }
        call_free(&c);
        close_model(&f);
    }
    free(first);
    experts_free(&f);
}

Test(forward_numbers, a_nan_or_infinity_stays_in_its_token, .timeout = 120)
{
    for (int arithmetic = NUMOE_FAST; arithmetic <= NUMOE_EXACT; arithmetic++)
        for (uint64_t tokens = 5; tokens <= 80; tokens += 75) {
            struct fixture f = fixture_of(1, 3, 96, 96, false, arithmetic);
            experts_make(&f, 41);
            open_model(&f, NULL);
            struct call c = call_make(tokens, 2, 96, 3, false);
            struct numoe_batch b = call_batch(&c);
            float *clean = malloc(tokens * 96 * sizeof *clean);
            run(&f, 0, &b);
            memcpy(clean, c.out, tokens * 96 * sizeof *clean);
            c.x[1 * 96 + 17] = NAN;
            c.x[3 * 96 + 95] = INFINITY;
            run(&f, 0, &b);
            for (uint64_t t = 0; t < tokens; t++) {
                if (t == 1 || t == 3) {
                    uint64_t odd = 0;
                    for (int i = 0; i < 96; i++)
                        odd += !isfinite(c.out[t * 96 + i]);
                    cr_expect_gt(odd, 48, "token %lu says that its input was not a number", t);
                } else {
                    cr_expect_arr_eq(c.out + t * 96, clean + t * 96, 96 * sizeof(float),
                                     "mode %d, token %lu of %lu", arithmetic, t, tokens);
                }
            }
            free(clean);
            call_free(&c);
            close_model(&f);
            experts_free(&f);
        }
}

Test(forward_numbers, add_scale_strides_and_types, .timeout = 120)
{
    enum { T = 3, H = 70, XS = 80, OS = 77 };
    struct fixture f = fixture_of(1, 4, H, 64, false, NUMOE_EXACT);
    uint16_t x[T * XS], out16[T * OS];
    int32_t ids[T * 2];
    float out[T * OS];

    experts_make(&f, 17);
    open_model(&f, NULL);
    struct call c = call_make(T, 2, H, 4, false);
    struct numoe_batch b = call_batch(&c);
    run(&f, 0, &b);

    for (int t = 0; t < T; t++)
        for (int i = 0; i < XS; i++)
            x[t * XS + i] = i < H ? bf16_bits(c.x[t * H + i]) : 0x7FC0; /* padding is NaN */
    for (int i = 0; i < T * 2; i++)
        ids[i] = (int32_t)c.ids[i];
    for (int i = 0; i < T * OS; i++) {
        out[i] = 3.0f;
        out16[i] = bf16_bits(3.0f);
    }
    b.x = x;
    b.x_type = NUMOE_BF16;
    b.x_stride = XS;
    b.ids = ids;
    b.id_bytes = 4;
    b.out = out;
    b.out_stride = OS;
    b.add = true;
    b.scale = 2.5f;
    run(&f, 0, &b);
    b.out = out16;
    b.out_type = NUMOE_BF16;
    run(&f, 0, &b);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < OS; i++) {
            const float want = i < H ? 3.0f + 2.5f * c.out[t * H + i] : 3.0f;
            cr_assert_eq(out[t * OS + i], want, "token %d, %d", t, i);
            cr_assert_eq(out16[t * OS + i], bf16_bits(want), "token %d, %d", t, i);
        }
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

Test(forward_numbers, elsewhere_and_the_rest_add_up, .timeout = 120)
{
    struct fixture f = fixture_of(1, 6, 96, 64, false, NUMOE_EXACT);
    const uint8_t here[6] = {0, 1, 0, 1, 1, 0}, there[6] = {1, 0, 1, 0, 0, 1};
    struct numoe_result result = NUMOE_RESULT_INIT;

    experts_make(&f, 29);
    open_model(&f, NULL);
    struct call c = call_make(20, 3, 96, 6, false);
    struct numoe_batch b = call_batch(&c);
    run(&f, 0, &b);
    double want[20 * 96];
    for (int i = 0; i < 20 * 96; i++)
        want[i] = (double)c.out[i];
    b.elsewhere = here;
    cr_assert_eq(numoe_forward(f.model, 0, &b, &result, NULL), 0);
    cr_assert_leq(result.experts_hit, 3);
    cr_assert_eq(result.skipped + result.missing, 0);
    b.elsewhere = there;
    b.add = true;
    run(&f, 0, &b);
    cr_expect_leq(relative_l2(want, c.out, 20 * 96), 1e-6);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

Test(forward_numbers, experts_never_loaded_are_counted_and_reload_replaces, .timeout = 120)
{
    struct fixture f = fixture_of(1, 3, 64, 64, false, NUMOE_EXACT);
    struct numoe_result result = NUMOE_RESULT_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    experts_make(&f, 51);
    cr_assert_eq(numoe_open(NULL, &f.context, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_model_create(f.context, &f.desc, &f.model, &error), 0, "%s", error.message);
    struct call c = call_make(4, 2, 64, 3, false);
    struct numoe_batch b = call_batch(&c);
    cr_assert_eq(numoe_forward(f.model, 0, &b, &result, NULL), 0);
    cr_assert_eq(result.missing, 8);
    for (int i = 0; i < 4 * 64; i++)
        cr_assert_eq(c.out[i], 0.0f);
    experts_load(&f);
    run(&f, 0, &b);
    cr_expect_leq(check(&f, 0, &c, 1), 4e-3);

    /* a damaged replacement leaves the expert missing, and says where the damage is */
    uint8_t *scale = &f.experts[1].scales[1][5 * 2 + 1], kept = *scale;
    const struct numoe_expert_weights w = {.size = sizeof w,
                                           .gate = f.experts[1].source.gate,
                                           .up = f.experts[1].source.up,
                                           .down = f.experts[1].source.down};
    *scale = 255;
    cr_assert_eq(numoe_expert_load(f.model, 0, 1, &w, &error), -EDOM);
    cr_assert_str_eq(error.where, "up");
    cr_assert(strstr(error.message, "expert 1") && strstr(error.message, "row 5"));
    *scale = kept;
    cr_assert_eq(numoe_expert_load(f.model, 0, 1, &w, &error), 0);
    run(&f, 0, &b);
    cr_expect_leq(check(&f, 0, &c, 1), 4e-3);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

Test(forward_calls, bad_batches_are_refused_and_touch_nothing, .timeout = 60)
{
    struct fixture f = fixture_of(2, 3, 64, 32, false, NUMOE_FAST);
    struct numoe_error error = NUMOE_ERROR_INIT;

    experts_make(&f, 61);
    open_model(&f, NULL);
    struct call c = call_make(4, 2, 64, 3, false);
    const struct numoe_batch good = call_batch(&c);
    struct numoe_batch b;
#define REFUSED(change, name)                                                                      \
    b = good;                                                                                      \
    change;                                                                                        \
    cr_expect_eq(numoe_forward(f.model, 1, &b, NULL, &error), -EINVAL, #change);                   \
    cr_expect_str_eq(error.where, name);                                                           \
    for (int i = 0; i < 4 * 64; i++)                                                               \
        cr_assert(isnan(c.out[i]));
    REFUSED(b.x = NULL, "x")
    REFUSED(b.ids = NULL, "ids")
    REFUSED(b.weights = NULL, "weights")
    REFUSED(b.out = NULL, "out")
    REFUSED(b.top_k = 0, "top_k")
    REFUSED(b.top_k = 65, "top_k")
    REFUSED(b.id_bytes = 2, "id_bytes")
    REFUSED(b.x_type = 0, "x_type")
    REFUSED(b.out_type = 9, "out_type")
    REFUSED(b.x_stride = 63, "x_stride")
    REFUSED(b.out_stride = 63, "out_stride")
    REFUSED(b.tokens = UINT64_MAX / 2, "tokens")
    REFUSED(b.size = 8, "batch")
    c.ids[5] = 3;
    REFUSED(b.strict = true, "ids")
    cr_expect(strstr(error.message, "token 2, slot 1"), "%s", error.message);
    c.ids[5] = 0;
    cr_expect_eq(numoe_forward(f.model, 2, &good, NULL, &error), -EINVAL);
    cr_expect_str_eq(error.where, "layer");
    cr_expect_eq(numoe_forward(NULL, 0, &good, NULL, &error), -EINVAL);
    cr_expect_eq(numoe_forward(f.model, 0, NULL, NULL, &error), -EINVAL);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

Test(forward_calls, submit_and_wait_give_the_same_bits, .timeout = 60)
{
    struct fixture f = fixture_of(2, 5, 96, 128, false, NUMOE_FAST);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_result result = NUMOE_RESULT_INIT;
    uint64_t ticket, other;

    experts_make(&f, 71);
    open_model(&f, NULL);
    struct call c = call_make(30, 3, 96, 5, false), d = call_make(3, 3, 96, 5, false);
    const struct numoe_batch b = call_batch(&c), e = call_batch(&d);
    float want[30 * 96];
    run(&f, 1, &b);
    memcpy(want, c.out, sizeof want);
    memset(c.out, 0xFF, sizeof want);
    cr_assert_eq(numoe_submit(f.model, 1, &b, &ticket, &error), 0);
    cr_assert_eq(numoe_submit(f.model, 0, &e, &other, &error), -EAGAIN);
    cr_assert_eq(numoe_wait(f.model, ticket + 1, NULL), -EINVAL);
    cr_assert_eq(numoe_wait(f.model, ticket, &result), 0);
    cr_assert_eq(result.pairs, 90);
    cr_assert_arr_eq(c.out, want, sizeof want);
    cr_assert_eq(numoe_wait(f.model, ticket, NULL), -EINVAL, "each ticket once");

    /* a call of the same thread while its submission is outstanding finishes that one first */
    memset(c.out, 0xFF, sizeof want);
    cr_assert_eq(numoe_submit(f.model, 1, &b, &ticket, &error), 0);
    run(&f, 0, &e);
    cr_assert_arr_eq(c.out, want, sizeof want);
    cr_expect_leq(check(&f, 0, &d, 1), 2e-2);
    cr_assert_eq(numoe_wait(f.model, ticket, &result), 0);

    /* no tokens: a ticket like any other */
    struct numoe_batch none = NUMOE_BATCH_INIT;
    cr_assert_eq(numoe_submit(f.model, 0, &none, &ticket, &error), 0);
    cr_assert_eq(numoe_wait(f.model, ticket, &result), 0);
    cr_assert_eq(result.pairs, 0);

    /* destroying a model finishes what it left running */
    cr_assert_eq(numoe_submit(f.model, 1, &b, &ticket, &error), 0);
    call_free(&d);
    close_model(&f);
    call_free(&c);
    experts_free(&f);
}

Test(forward_calls, several_models_share_a_context, .timeout = 60)
{
    struct fixture f = fixture_of(1, 4, 96, 64, false, NUMOE_FAST);
    struct fixture g = fixture_of(2, 3, 64, 96, true, NUMOE_EXACT);
    struct numoe_stats stats = {.size = sizeof stats};

    experts_make(&f, 81);
    experts_make(&g, 82);
    open_model(&f, NULL);
    g.context = f.context;
    cr_assert_eq(numoe_model_create(g.context, &g.desc, &g.model, NULL), 0);
    experts_load(&g);
    for (uint64_t i = 0; i < 6; i++) {
        struct call c = call_make(1 + 9 * i, 3, 96, 4, false),
                    d = call_make(50 - 9 * i, 2, 64, 3, false);
        struct numoe_batch b = call_batch(&c), e = call_batch(&d);
        run(&f, 0, &b);
        run(&g, i % 2, &e);
        cr_expect_leq(check(&f, 0, &c, 7), 2e-2);
        cr_expect_leq(check(&g, i % 2, &d, 7), 4e-3);
        call_free(&c);
        call_free(&d);
    }
    cr_assert_eq(numoe_stats_get(f.context, &stats), 0);
    cr_expect_eq(stats.calls, 12);
    cr_expect_gt(stats.expert_bytes, 0);
    numoe_model_destroy(g.model);
    close_model(&f);
    experts_free(&f);
    experts_free(&g);
}

Test(forward_calls, models_that_cannot_be_are_refused_by_name, .timeout = 60)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    struct numoe *context = NULL;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct fixture f = fixture_of(1, 4, 96, 64, false, NUMOE_FAST);
    struct numoe_model_desc d;

    options.topology = "pack:1 [numa(memory=4GB)] core:2 pu:1";
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
#define MODEL_REFUSED(change, name)                                                                \
    d = f.desc;                                                                                    \
    change;                                                                                        \
    cr_expect_eq(numoe_model_create(context, &d, &model, &error), -EINVAL, #change);               \
    cr_expect_str_eq(error.where, name, "%s", error.where);
    MODEL_REFUSED(d.layers = 0, "layers")
    MODEL_REFUSED(d.experts = UINT64_MAX, "experts")
    MODEL_REFUSED(d.hidden = 0, "hidden")
    MODEL_REFUSED(d.intermediate = 1ull << 40, "intermediate")
    MODEL_REFUSED(d.format = 9, "format")
    MODEL_REFUSED(d.activation.limit = -1, "activation")
    MODEL_REFUSED(d.arithmetic = 9, "arithmetic")
    d = f.desc;
    d.layers = d.experts = 1u << 20;
    d.hidden = d.intermediate = 1u << 24;
    const int rc = numoe_model_create(context, &d, &model, &error);
    cr_expect(rc == -EOVERFLOW || rc == -ENOSPC, "%d", rc);
    d = f.desc;
    d.hidden = 4096;
    d.intermediate = 2048;
    d.experts = 256;
    d.layers = 43;
    cr_expect_eq(numoe_model_create(context, &d, &model, &error), -ENOSPC);
    cr_expect(strstr(error.message, "short by"), "%s", error.message);
    numoe_close(context);

    options.isa = "sse2";
    cr_expect_eq(numoe_open(&options, &context, &error), -EINVAL);
    options.isa = NULL;
    options.topology = "pack:nonsense";
    cr_expect_eq(numoe_open(&options, &context, &error), -EINVAL);
}

/* A forked child may only destroy and close, and is told so; it neither hangs nor invents results.
 */
Test(forward_calls, a_forked_child_is_told, .timeout = 60)
{
    struct fixture f = fixture_of(1, 4, 96, 64, false, NUMOE_FAST);
    uint64_t ticket;
    int status;

    experts_make(&f, 121);
    open_model(&f, NULL);
    struct call c = call_make(6, 2, 96, 4, false);
    const struct numoe_batch b = call_batch(&c);
    cr_assert_eq(numoe_submit(f.model, 0, &b, &ticket, NULL), 0);
    const pid_t child = fork();
    if (child == 0) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        uint64_t other;
        int wrong = 0;
        alarm(20);
        wrong += numoe_forward(f.model, 0, &b, NULL, &error) != -ECHILD;
        wrong += !strstr(error.message, "forked");
        wrong += numoe_submit(f.model, 0, &b, &other, NULL) != -ECHILD;
        wrong += numoe_wait(f.model, ticket, NULL) != -ECHILD;
        close_model(&f);
        _exit(wrong);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
    cr_assert_eq(numoe_wait(f.model, ticket, NULL), 0);
    cr_expect_leq(check(&f, 0, &c, 1), 2e-2);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

/* The host may flush subnormals or have raised flags: results and its state are as they were. */
Test(forward_numbers, the_hosts_floating_point_modes_neither_matter_nor_change, .timeout = 60)
{
#if defined(__x86_64__)
    struct fixture f = fixture_of(1, 4, 96, 64, false, NUMOE_EXACT);

    experts_make(&f, 131);
    open_model(&f, NULL);
    struct call c = call_make(9, 2, 96, 4, false);
    const struct numoe_batch b = call_batch(&c);
    for (int i = 0; i < 18; i += 2) {
        c.ids[i] = c.ids[i + 1];                     /* merged before anything is computed ... */
        c.weights[i] = c.weights[i + 1] = 0x1p-130f; /* ... from subnormal weights */
    }
    for (int i = 0; i < 9 * 96; i++)
        c.x[i] *= 0x1p12f;
    float want[9 * 96];
    run(&f, 0, &b);
    memcpy(want, c.out, sizeof want);
    uint64_t zeros = 0;
    for (int i = 0; i < 9 * 96; i++)
        zeros += want[i] == 0.0f;
    cr_expect_lt(zeros, 96);
    const unsigned modes[] = {0x1F80, 0x9FC0, 0x1FA0, 0x3F80 | 0x8000};
    for (int i = 0; i < 4; i++) {
        const unsigned before = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(modes[i]);
        const int rc = numoe_forward(f.model, 0, &b, NULL, NULL);
        const unsigned after = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(before);
        cr_expect_eq(rc, 0);
        cr_expect_eq(after, modes[i], "%#x became %#x", modes[i], after);
        cr_expect_arr_eq(c.out, want, sizeof want, "mode %#x", modes[i]);
    }
    call_free(&c);
    close_model(&f);
    experts_free(&f);
#else
    cr_skip_test("MXCSR is x86's");
#endif
}

/* Several threads call at once; every one gets its own answer. */
struct caller {
    struct fixture *f;
    struct call c;
    float *want;
    int wrong;
};

static void *call_often(void *argument)
{
    struct caller *a = argument;
    const struct numoe_batch b = call_batch(&a->c);

    for (int i = 0; i < 200; i++) {
        uint64_t ticket;
        memset(a->c.out, 0xFF, a->c.tokens * a->c.hidden * sizeof(float));
        if (i % 3 == 0 && numoe_submit(a->f->model, 0, &b, &ticket, NULL) == 0)
            a->wrong += numoe_wait(a->f->model, ticket, NULL) != 0;
        else
            a->wrong += numoe_forward(a->f->model, 0, &b, NULL, NULL) != 0;
        a->wrong += memcmp(a->c.out, a->want, a->c.tokens * a->c.hidden * sizeof(float)) != 0;
    }
    return NULL;
}

/* More tokens than one pass holds: 64 slots of 16 KiB rows. */
Test(forward_calls, several_passes_count_an_expert_once, .timeout = 120)
{
    struct fixture f = fixture_of(1, 3, 4096, 32, false, NUMOE_FAST);
    struct numoe_result result = NUMOE_RESULT_INIT;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    uint64_t ticket;

    experts_make(&f, 111);
    open_model(&f, NULL);
    struct call c = call_make(700, 64, 4096, 2, true);
    struct numoe_batch b = call_batch(&c);
    cr_assert_eq(numoe_forward(f.model, 0, &b, &result, NULL), 0);
    cr_assert_eq(numoe_model_info(f.model, &info), 0);
    cr_expect_eq(result.experts_hit, 3); /* ids 0, 1 and, among the odd ones, 2 */
    cr_expect_eq(result.expert_bytes, 3 * info.expert_bytes);
    cr_expect_eq(result.skipped, 0);
    cr_expect_leq(check(&f, 0, &c, 347), 2e-2);
    float *forward = c.out;
    c.out = malloc(700 * 4096 * sizeof *c.out);
    b.out = c.out;
    cr_assert_eq(numoe_submit(f.model, 0, &b, &ticket, NULL), 0);
    cr_assert_eq(numoe_wait(f.model, ticket, &result), 0);
    cr_expect_eq(result.experts_hit, 3);
    cr_assert_arr_eq(c.out, forward, 700 * 4096 * sizeof *c.out);
    free(forward);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

Test(forward_calls, callers_take_turns, .timeout = 120)
{
    struct fixture f = fixture_of(1, 4, 64, 64, false, NUMOE_FAST);
    struct caller callers[4];
    pthread_t threads[4];

    experts_make(&f, 91);
    open_model(&f, NULL);
    for (int i = 0; i < 4; i++) {
        callers[i] = (struct caller){&f, call_make(1 + 6 * (uint64_t)i, 2, 64, 4, false), NULL, 0};
        const struct numoe_batch b = call_batch(&callers[i].c);
        run(&f, 0, &b);
        callers[i].want = callers[i].c.out;
        callers[i].c.out = malloc(callers[i].c.tokens * 64 * sizeof(float));
    }
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, call_often, &callers[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        cr_expect_eq(callers[i].wrong, 0, "caller %d", i);
        free(callers[i].want);
        call_free(&callers[i].c);
    }
    close_model(&f);
    experts_free(&f);
}

/* ---- plans that are given ---- */

/* A plan of a described machine for the fixture's model, as numoe plan --json prints it. */
static char *plan_text(const struct fixture *f, const char *topology,
                       struct numoe_plan_request *request)
{
    struct numoe_machine *machine = NULL;
    struct numoe_plan *plan = NULL;
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    cr_assert_eq(numoe_model_expert_shape(&f->desc, &request->shape, NULL), 0);
    cr_assert_eq(numoe_machine_load(topology, &machine, NULL), 0);
    cr_assert_eq(numoe_plan_create(machine, request, &plan, NULL), 0);
    cr_assert_eq(numoe_plan_print_json(plan, out), 0);
    fclose(out);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    return text;
}

/* Outputs of a small and a large batch, one after the other; freed by the caller. */
static float *outputs_of(struct fixture *f, const struct numoe_options *options)
{
    static const uint64_t counts[] = {3, 70};
    const uint64_t hidden = f->desc.hidden;
    float *all = malloc(73 * hidden * sizeof *all), *at = all;

    open_model(f, options);
    for (size_t i = 0; i < 2; i++) {
        random_state = 300 + i;
        struct call c = call_make(counts[i], 3, hidden, f->desc.experts, true);
        struct numoe_batch b = call_batch(&c);
        run(f, 0, &b);
        cr_expect_leq(check(f, 0, &c, 11), 2e-2);
        memcpy(at, c.out, counts[i] * hidden * sizeof *at);
        at += counts[i] * hidden;
        call_free(&c);
    }
    return all;
}

Test(forward_plan, given_or_made_gives_the_same_bits, .timeout = 120)
{
    static const char machine[] = "pack:2 l3:2 [numa(memory=16GB)] core:2 pu:2";
    static const uint32_t workers[] = {0, 3};
    struct fixture f = fixture_of(1, 6, 96, 320, true, NUMOE_FAST);

    experts_make(&f, 31);
    for (size_t i = 0; i < 2; i++) {
        struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
        struct numoe_options made = NUMOE_OPTIONS_INIT, given = NUMOE_OPTIONS_INIT;
        char *text, path[] = "/tmp/numoe-plan-XXXXXX";
        float *want, *got;
        int fd;

        made.topology = given.topology = machine;
        made.workers = request.workers = workers[i];
        want = outputs_of(&f, &made);
        close_model(&f);

        text = plan_text(&f, machine, &request);
        given.plan = text;
        given.plan_bytes = strlen(text);
        given.threads = 2;
        got = outputs_of(&f, &given);
        close_model(&f);
        cr_assert_arr_eq(got, want, 73 * 96 * sizeof *want);
        free(got);

        fd = mkstemp(path);
        cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
        close(fd);
        given.plan = NULL;
        given.plan_bytes = 0;
        given.plan_file = path;
        got = outputs_of(&f, &given);
        close_model(&f);
        cr_assert_arr_eq(got, want, 73 * 96 * sizeof *want);
        cr_assert_eq(unlink(path), 0);
        free(got);
        free(want);
        free(text);
    }
    experts_free(&f);
}

Test(forward_plan, its_nodes_and_workers_are_used_by_all_models, .timeout = 60)
{
    static const char machine[] = "pack:2 l3:2 [numa(memory=16GB)] core:2 pu:2";
    static const uint32_t nodes[] = {1, 3};
    struct fixture f = fixture_of(1, 6, 96, 320, true, NUMOE_FAST);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    struct numoe_node_info node = NUMOE_NODE_INFO_INIT;
    struct numoe_model *second = NULL;
    char *text;

    experts_make(&f, 32);
    request.nodes = nodes;
    request.node_count = 2;
    request.workers = 5;
    text = plan_text(&f, machine, &request);
    options.topology = machine;
    options.plan = text;
    options.plan_bytes = strlen(text);
    free(outputs_of(&f, &options));
    cr_assert_eq(numoe_model_create(f.context, &f.desc, &second, NULL), 0);
    cr_assert_eq(numoe_model_info(second, &info), 0);
    cr_assert_eq(info.node_count, 2);
    cr_assert_eq(info.worker_count, 5);
    for (uint32_t n = 0; n < 2; n++) {
        cr_assert_eq(numoe_model_node(second, n, &node), 0);
        cr_assert_eq(node.os_index, nodes[n]);
    }
    numoe_model_destroy(second);
    close_model(&f);
    free(text);
    experts_free(&f);
}

Test(forward_plan, another_machine_or_model_is_refused, .timeout = 60)
{
    static const char machine[] = "pack:2 [numa(memory=16GB)] core:2 pu:1";
    struct fixture f = fixture_of(2, 6, 96, 320, true, NUMOE_FAST);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    struct numoe *context = NULL;
    const uint32_t cpu = 0;
    char *text = plan_text(&f, machine, &request);

    options.plan = text;
    options.plan_bytes = strlen(text);
    options.topology = "pack:1 [numa(memory=16GB)] core:2 pu:1";
    cr_assert_eq(numoe_open(&options, &context, &error), -ESTALE);
    cr_assert(strstr(error.message, "memory node 1 is not there") &&
                  strstr(error.message, "CPUs 2-3 are not there"),
              "%s", error.message);

    options.topology = machine;
    cr_assert_eq(numoe_open(&options, &context, &error), 0);
    f.desc.layers = 1;
    f.desc.bias = false;
    f.desc.activation.kind = NUMOE_SILU;
    cr_assert_eq(numoe_model_create(context, &f.desc, &model, &error), -ESTALE);
    cr_assert(strstr(error.message, "layers: 2, and 1 in this model") &&
                  strstr(error.message, "bytes of biases an expert: 384, and 0 in this model") &&
                  !strstr(error.message, "hidden"),
              "%s", error.message);
    numoe_close(context);
    context = NULL;

    options.plan_bytes--;
    options.plan_bytes--;
    cr_assert_eq(numoe_open(&options, &context, &error), -EBADMSG);
    options.plan_bytes += 2;
    options.plan_file = "/tmp";
    cr_assert_eq(numoe_open(&options, &context, &error), -EINVAL);
    options.plan_file = NULL;
    options.workers = 1;
    cr_assert_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "workers"), "%s", error.message);
    options.workers = 0;
    options.cpus = &cpu;
    options.cpu_count = 1;
    cr_assert_eq(numoe_open(&options, &context, &error), -EINVAL);
    options.cpus = NULL;
    options.cpu_count = 0;
    options.reserved_cpus = &cpu;
    options.reserved_count = 1;
    cr_assert_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "reserved"), "%s", error.message);
    cr_assert_null(context);
    free(text);
}

/* Scales that only the few-token form computes, of experts with few tokens and with many, on one
 * node and on several. */
Test(forward, extreme_scales_with_any_number_of_tokens, .timeout = 60)
{
    static const char *const machines[] = {NULL, "numa:5(memory=16GB) core:2 pu:1"};
    static const uint64_t counts[] = {3, 40, 300};

    for (size_t m = 0; m < 2; m++) {
        struct fixture f = fixture_of(1, 8, 160, 192, false, NUMOE_EXACT);
        struct numoe_options options = NUMOE_OPTIONS_INIT;

        options.topology = machines[m];
        options.threads = 3;
        experts_make(&f, 83);
        for (int e = 0; e < 8; e += 2)
            memset(f.experts[e].scales[2], 252, 24);
        open_model(&f, &options);
        for (size_t i = 0; i < 3; i++) {
            struct call c = call_make(counts[i], 3, 160, 8, true);
            struct numoe_batch b = call_batch(&c);

            /* so that sums stay below the largest float */
            for (uint64_t p = 0; p < counts[i] * 3; p++)
                c.weights[p] *= 0x1p-40F;
            run(&f, 0, &b);
            cr_expect_leq(check(&f, 0, &c, counts[i] / 3), 5e-3, "machine %zu, %lu tokens", m,
                          counts[i]);
            call_free(&c);
        }
        close_model(&f);
        experts_free(&f);
    }
}
