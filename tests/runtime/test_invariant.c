/* With batch_invariant a token's bits are its own: alone, in any batch, by any threads. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "model.h"
#include "numoe.h"
#include "support/fixture.h"

enum { EXPERTS = 12, K = 4, HIDDEN = 96, INNER = 640 };

enum routing { UNIFORM, ZIPF, ONE, ROUTINGS };

static void route(struct call *c, enum routing routing)
{
    double cumulative[EXPERTS], total = 0;

    for (int e = 0; e < EXPERTS; e++)
        cumulative[e] = total += 1.0 / (e + 1);
    for (uint64_t i = 0; i < c->tokens * c->k; i++) {
        const double at = random_unit() * total;
        int64_t zipf = 0;

        while (zipf < EXPERTS - 1 && at > cumulative[zipf])
            zipf++;
        if (routing == ZIPF)
            c->ids[i] = zipf;
        else if (routing == ONE && c->ids[i] >= 0 && c->ids[i] < EXPERTS)
            c->ids[i] = (int64_t)(i % c->k);
    }
}

/* Every token of a batch, alone, gives what it gives in the batch. */
static void check_batch(struct fixture *f, struct call *c, const uint8_t *elsewhere, uint64_t step,
                        const char *name)
{
    struct numoe_batch b = call_batch(c);
    float alone[HIDDEN];

    b.elsewhere = elsewhere;
    run(f, 0, &b);
    for (uint64_t t = 0; t < c->tokens; t += step) {
        struct numoe_batch one = b;

        one.tokens = 1;
        one.x = c->x + t * HIDDEN;
        one.ids = c->ids + t * c->k;
        one.weights = c->weights + t * c->k;
        one.out = alone;
        run(f, 0, &one);
        cr_assert_arr_eq(alone, c->out + t * HIDDEN, sizeof alone, "%s: token %lu of %lu", name, t,
                         c->tokens);
    }
    /* and in two halves */
    if (c->tokens > 1) {
        float *want = c->out;
        const uint64_t half = c->tokens / 3 + 1;

        c->out = malloc(c->tokens * HIDDEN * sizeof *c->out);
        b.out = c->out;
        b.tokens = half;
        run(f, 0, &b);
        b.x = c->x + half * HIDDEN;
        b.ids = c->ids + half * c->k;
        b.weights = c->weights + half * c->k;
        b.out = c->out + half * HIDDEN;
        b.tokens = c->tokens - half;
        run(f, 0, &b);
        cr_assert_arr_eq(c->out, want, c->tokens * HIDDEN * sizeof *want, "%s: %lu tokens in two",
                         name, c->tokens);
        free(want);
    }
}

static void check_plan(const char *topology, enum numoe_form form, const char *isa,
                       enum numoe_arithmetic arithmetic, uint32_t threads, bool extreme)
{
    static const uint64_t counts[] = {1, 2, 5, 16, 64, 300};
    static const uint8_t mask[EXPERTS] = {0, 1, 0, 0, 1};
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, true, arithmetic);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    char name[160];

    f.desc.experts_per_token = K;
    options.topology = topology;
    options.form = form;
    options.isa = isa;
    options.threads = threads;
    options.chaos_seed = threads;
    options.spin_ns = 1000;
    options.batch_invariant = true;
    experts_make(&f, 81);
    /* scales that only the few-token form computes exactly */
    for (int e = 0; extreme && e < EXPERTS; e += 3)
        memset(f.experts[e].scales[2], 253, 16);
    open_model(&f, &options);
    for (int routing = 0; routing < ROUTINGS; routing++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            random_state = 900 + i;
            struct call c = call_make(counts[i], K, HIDDEN, EXPERTS, true);

            route(&c, routing);
            snprintf(name, sizeof name, "%.60s, form %d, %s, mode %d, routing %d%s",
                     topology ? topology : "this machine", form, isa, arithmetic, routing,
                     i % 2 ? ", masked" : "");
            check_batch(&f, &c, i % 2 ? mask : NULL, counts[i] > 64 ? 7 : 1, name);
            if (!extreme && i % 2 == 0)
                cr_expect_leq(check(&f, 0, &c, counts[i] / 3 + 1), 1.2e-1, "%s", name);
            call_free(&c);
        }
    close_model(&f);
    experts_free(&f);
}

#define DUAL_IN_DOMAINS NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml"

static void check_plans(enum numoe_arithmetic arithmetic)
{
    const struct numoe_kernels *k;

    for (size_t i = 0; (k = numoe_kernels_at(arithmetic, i)); i++) {
        if (!strcmp(k->isa, "ref")) {
            check_plan("pack:1 [numa(memory=64GB)] core:3 pu:1", NUMOE_FORM_AUTO, k->isa,
                       arithmetic, 2, false);
            continue;
        }
        check_plan(NULL, NUMOE_FORM_AUTO, k->isa, arithmetic, 0, false);
        check_plan(NULL, NUMOE_FORM_AUTO, k->isa, arithmetic, 0, true);
        check_plan("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", NUMOE_FORM_EVERY_NODE, k->isa,
                   arithmetic, 3, false);
        check_plan("pack:2 [numa(memory=16GB)] core:3 pu:1", NUMOE_FORM_EXPERTS, k->isa, arithmetic,
                   2, false);
        check_plan(DUAL_IN_DOMAINS, NUMOE_FORM_GROUPS, k->isa, arithmetic, 2, true);
    }
}

Test(invariant, fast, .timeout = 240)
{
    check_plans(NUMOE_FAST);
}

Test(invariant, exact, .timeout = 240)
{
    check_plans(NUMOE_EXACT);
}

Test(invariant, fine, .timeout = 240)
{
    check_plans(NUMOE_FINE);
}

Test(invariant, mxfp8, .timeout = 240)
{
    check_plans(NUMOE_MXFP8_UP);
    check_plans(NUMOE_MXFP8_OCP);
}

/* Deferred experts join a call's sums with their own parts. */
Test(invariant, deferred, .timeout = 60)
{
    static const uint8_t deferred[EXPERTS] = {1, 0, 1, 0, 0, 1};
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, true, NUMOE_FAST);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    float alone[2][HIDDEN], *first;

    options.batch_invariant = true;
    experts_make(&f, 82);
    open_model(&f, &options);
    random_state = 83;
    struct call c = call_make(30, K, HIDDEN, EXPERTS, true);
    struct numoe_batch b = call_batch(&c);
    first = malloc(30 * HIDDEN * sizeof *first);
    b.deferred = deferred;
    b.out = first;
    run(&f, 0, &b);
    b.deferred = NULL;
    b.out = c.out;
    run(&f, 0, &b);
    for (uint64_t t = 0; t < 30; t++) {
        struct numoe_batch one = b;

        one.tokens = 1;
        one.x = c.x + t * HIDDEN;
        one.ids = c.ids + t * c.k;
        one.weights = c.weights + t * c.k;
        one.deferred = deferred;
        one.out = alone[0];
        run(&f, 0, &one);
        one.deferred = NULL;
        one.out = alone[1];
        run(&f, 0, &one);
        cr_assert_arr_eq(alone[0], first + t * HIDDEN, sizeof alone[0], "token %lu", t);
        cr_assert_arr_eq(alone[1], c.out + t * HIDDEN, sizeof alone[1], "token %lu", t);
    }
    free(first);
    call_free(&c);
    close_model(&f);
    experts_free(&f);
}

/* Plan and call alike, whatever the threads. */
Test(invariant, any_threads, .timeout = 120)
{
    static const uint32_t threads[] = {1, 2, 7, 64};
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, true, NUMOE_FAST);
    float *want = NULL;

    experts_make(&f, 84);
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;

        options.topology = "pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1";
        options.threads = threads[i];
        options.chaos_seed = i;
        options.batch_invariant = true;
        open_model(&f, &options);
        random_state = 85;
        struct call c = call_make(100, K, HIDDEN, EXPERTS, true);
        struct numoe_batch b = call_batch(&c);
        run(&f, 0, &b);
        if (want) {
            cr_assert_arr_eq(c.out, want, 100 * HIDDEN * sizeof *want, "%u threads", threads[i]);
        } else {
            want = c.out;
            c.out = NULL;
        }
        call_free(&c);
        close_model(&f);
    }
    free(want);
    experts_free(&f);
}
