/* Experts that are finished into the next call's output. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "support/fixture.h"

enum { EXPERTS = 6, HIDDEN = 96, TOKENS = 5, K = 3, LAYERS = 2 };

static const uint8_t late[EXPERTS] = {0, 1, 0, 1, 1, 0}, prompt[EXPERTS] = {1, 0, 1, 0, 0, 1};

/* What a call gives when the experts of `without` are held elsewhere. */
static void part(struct fixture *f, uint64_t layer, const struct call *c, const uint8_t *without,
                 double *sum)
{
    float *out = malloc(c->tokens * HIDDEN * sizeof *out);
    struct numoe_batch b = call_batch(c);

    b.out = out;
    b.elsewhere = without;
    run(f, layer, &b);
    for (uint64_t i = 0; i < c->tokens * HIDDEN; i++)
        sum[i] += (double)out[i];
    free(out);
}

/* Layers one after another, each finishing what the one before deferred. */
static void check_chain(uint64_t tokens, bool submit, uint32_t threads)
{
    struct fixture f = fixture_of(LAYERS, EXPERTS, HIDDEN, 160, true, NUMOE_EXACT);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    const uint64_t cells = tokens * HIDDEN;
    double *want = malloc(cells * sizeof *want);
    struct call c[4];

    experts_make(&f, 41);
    options.topology = "pack:2 [numa(memory=16GB)] core:2 pu:1";
    options.threads = threads;
    open_model(&f, &options);
    for (int i = 0; i < 4; i++)
        c[i] = call_make(tokens, K, HIDDEN, EXPERTS, true);
    for (int i = 0; i < 4; i++) {
        struct numoe_result result = NUMOE_RESULT_INIT;
        struct numoe_batch b = call_batch(&c[i]);
        float *x = malloc(cells * sizeof *x);
        uint64_t deferred = 0, ticket;

        for (uint64_t p = 0; p < tokens * K; p++)
            deferred += i < 3 && c[i].ids[p] >= 0 && c[i].ids[p] < EXPERTS && late[c[i].ids[p]];
        memcpy(x, c[i].x, cells * sizeof *x);
        b.x = x;
        b.deferred = i < 3 ? late : NULL;
        if (submit) {
            cr_assert_eq(numoe_submit(f.model, (uint64_t)i % 2, &b, &ticket, NULL), 0);
            cr_assert_eq(numoe_wait(f.model, ticket, &result), 0);
        } else {
            cr_assert_eq(numoe_forward(f.model, (uint64_t)i % 2, &b, &result, NULL), 0);
        }
        /* x is not needed any more */
        memset(x, 0xFF, cells * sizeof *x);
        free(x);
        cr_expect_eq(result.deferred, deferred);
        cr_expect_geq(result.pairs, deferred);
    }
    for (int i = 0; i < 4; i++) {
        memset(want, 0, cells * sizeof *want);
        part(&f, (uint64_t)i % 2, &c[i], i < 3 ? late : NULL, want);
        if (i)
            part(&f, (uint64_t)(i - 1) % 2, &c[i - 1], prompt, want);
        cr_expect_leq(relative_l2(want, c[i].out, cells), 1e-6, "call %d of %lu tokens", i, tokens);
    }
    for (int i = 0; i < 4; i++)
        call_free(&c[i]);
    close_model(&f);
    experts_free(&f);
    free(want);
}

Test(deferred, joins_the_next_call, .timeout = 120)
{
    check_chain(1, false, 1);
    check_chain(1, false, 4);
    check_chain(TOKENS, false, 4);
    check_chain(64, false, 3);
}

Test(deferred, also_of_submissions, .timeout = 120)
{
    check_chain(1, true, 1);
    check_chain(TOKENS, true, 4);
    check_chain(64, true, 64);
}

/* A layer is not taken away under what it still computes. */
Test(deferred, unloading_a_layer_waits_for_them, .timeout = 120)
{
    enum { MANY = 64, INNER = 2048 };
    static const uint8_t all[EXPERTS] = {1, 1, 1, 1, 1, 1};
    struct fixture f = fixture_of(LAYERS, EXPERTS, HIDDEN, INNER, false, NUMOE_FAST);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    static float want[MANY * HIDDEN];

    experts_make(&f, 47);
    options.threads = 2;
    for (int turn = 0; turn < 12; turn++) {
        struct numoe_batch b;
        struct call c;

        open_model(&f, &options);
        random_state = 5;
        c = call_make(MANY, K, HIDDEN, EXPERTS, false);
        b = call_batch(&c);
        b.deferred = all;
        run(&f, 0, &b);
        if (turn)
            cr_assert_eq(numoe_layer_unload(f.model, 0, NULL), 0);
        b.deferred = NULL;
        run(&f, 1, &b);
        if (turn == 0)
            memcpy(want, c.out, sizeof want);
        else
            cr_assert_arr_eq(c.out, want, sizeof want, "turn %d", turn);
        call_free(&c);
        close_model(&f);
    }
    experts_free(&f);
}

/* The same bits whoever computes, and when. */
Test(deferred, same_bits_for_any_threads, .timeout = 120)
{
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, 320, false, NUMOE_FAST);
    float first[TOKENS * HIDDEN];

    experts_make(&f, 43);
    for (int n = 0; n < 4; n++) {
        static const uint32_t threads[] = {1, 2, 5, 64};
        struct numoe_options options = NUMOE_OPTIONS_INIT;

        options.topology = "pack:2 l3:4 [numa(memory=16GB)] core:4 pu:1";
        options.threads = threads[n];
        options.chaos_seed = (uint64_t)n;
        open_model(&f, &options);
        random_state = 3;
        struct call c = call_make(TOKENS, K, HIDDEN, EXPERTS, false);
        struct numoe_batch b = call_batch(&c);
        b.deferred = late;
        run(&f, 0, &b);
        run(&f, 0, &b);
        if (n == 0)
            memcpy(first, c.out, sizeof first);
        else
            cr_expect_arr_eq(c.out, first, sizeof first, "%u threads", threads[n]);
        call_free(&c);
        close_model(&f);
    }
    experts_free(&f);
}

Test(deferred, what_waits_is_collected_or_refused, .timeout = 120)
{
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, 64, false, NUMOE_EXACT), g = f;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *other = NULL;
    double want[TOKENS * HIDDEN] = {0};
    int64_t none[TOKENS * K];

    options.threads = 1; /* nobody computes while the caller does not */
    experts_make(&f, 47);
    open_model(&f, &options);
    struct call c = call_make(TOKENS, K, HIDDEN, EXPERTS, false);
    struct call more = call_make(65, K, HIDDEN, EXPERTS, false);
    struct numoe_batch b = call_batch(&c), large = call_batch(&more), empty = NUMOE_BATCH_INIT;
    b.deferred = late;
    run(&f, 0, &b);
    cr_assert_eq(numoe_forward(f.model, 0, &large, NULL, &error), -EINVAL);
    cr_expect(strstr(error.message, "5 tokens wait"), "%s", error.message);
    /* no call, and another model's call, leave it waiting */
    run(&f, 0, &empty);
    cr_assert_eq(numoe_model_create(f.context, &f.desc, &other, &error), 0, "%s", error.message);
    g.context = f.context;
    g.model = other;
    g.experts = f.experts;
    experts_load(&g);
    large.deferred = NULL;
    run(&g, 0, &large);
    cr_expect_leq(check(&g, 0, &more, 9), 4e-3);
    b.out = more.out;
    cr_assert_eq(numoe_forward(other, 0, &b, NULL, &error), -EINVAL);
    cr_expect(strstr(error.message, "another model"), "%s", error.message);
    b.out = c.out;
    /* ids of -1 and add: what waits alone */
    for (int i = 0; i < TOKENS * K; i++)
        none[i] = -1;
    b.deferred = NULL;
    b.ids = none;
    b.add = true;
    run(&f, 0, &b);
    cr_expect_leq(check(&f, 0, &c, 1), 4e-3, "both calls together are the whole");
    /* nothing waits any more */
    run(&f, 0, &large);
    large.deferred = late;
    cr_assert_eq(numoe_forward(f.model, 0, &large, NULL, &error), -EINVAL);
    cr_expect(strstr(error.message, "65 tokens are more than 64"), "%s", error.message);
    /* destroyed while it waits */
    b = call_batch(&c);
    b.deferred = late;
    run(&f, 0, &b);
    numoe_model_destroy(f.model);
    f.model = other;
    b.deferred = NULL;
    run(&f, 0, &b);
    cr_expect_leq(check(&f, 0, &c, 1), 4e-3);
    part(&f, 0, &c, NULL, want);
    call_free(&c);
    call_free(&more);
    close_model(&f);
    experts_free(&f);
}
