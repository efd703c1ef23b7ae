/*
 * A call that is like the one before keeps its layout: the same bits as laid out anew, whatever
 * came in between, and biases, weights and slices of its own experts.
 */
#include <criterion/criterion.h>

#include "context.h"
#include "schedule_build.h"
#include "support/fixture.h"

#define MARK ((uint32_t)0xC0FFEE)

enum { LAYERS = 2, EXPERTS = 9, HIDDEN = 96, INNER = 256, K = 3, MODELS = 2, MOST = 6 };

/* What only laying out writes: whether it was done since the mark was set. */
static uint32_t *mark_of(const struct numoe_schedule *s)
{
    return s->memory[MEMORY_LANE_WORKER].data;
}

static void forget(struct numoe *context)
{
    numoe_schedule_forget(&context->schedule);
    for (int i = 0; i < 2; i++)
        numoe_schedule_forget(&context->later[i]);
}

/* Two models of one context, of other widths. */
struct pair {
    struct fixture f[MODELS];
};

static struct pair open_pair(const char *topology, uint32_t threads, bool batch_invariant)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct pair p;

    options.topology = topology;
    options.threads = threads;
    options.batch_invariant = batch_invariant;
    for (int m = 0; m < MODELS; m++) {
        struct numoe_error error = NUMOE_ERROR_INIT;

        p.f[m] = fixture_of(LAYERS, EXPERTS, HIDDEN, m ? 320 : INNER, true, NUMOE_EXACT);
        experts_make(&p.f[m], 7 + (uint64_t)m);
        if (m)
            p.f[m].context = p.f[0].context;
        else
            cr_assert_eq(numoe_open(&options, &p.f[m].context, &error), 0, "%s", error.message);
        cr_assert_eq(numoe_model_create(p.f[m].context, &p.f[m].desc, &p.f[m].model, &error), 0,
                     "%s", error.message);
        experts_load(&p.f[m]);
    }
    return p;
}

static void close_pair(struct pair *p)
{
    for (int m = 0; m < MODELS; m++)
        numoe_model_destroy(p->f[m].model);
    numoe_close(p->f[0].context);
    for (int m = 0; m < MODELS; m++)
        experts_free(&p->f[m]);
}

/* Calls of all kinds in random order, drawn from a seed. @return how many kept their layout */
static unsigned run_calls(struct pair *p, unsigned calls, bool anew, float *out)
{
    struct numoe *context = p->f[0].context;
    static const uint8_t elsewhere[EXPERTS] = {0, 0, 1, 0, 0, 0, 1}, late[EXPERTS] = {1, 0, 0, 1};
    struct fixture *waits = NULL; /* whose deferred experts the next call has to collect */
    unsigned kept = 0;

    random_state = 99;
    for (unsigned i = 0; i < calls; i++) {
        /* mostly one token, in runs of the same kind */
        const uint64_t kind = random_u64() >> 33, turn = i / 8;
        const uint64_t tokens = kind % 7 == 0 && !waits ? 1 + kind / 7 % MOST : 1;
        struct fixture *f = waits ? waits : &p->f[turn % 5 == 4];
        struct call c = call_make(tokens, K, HIDDEN, EXPERTS, kind % 5 == 1);
        struct numoe_batch b = call_batch(&c);
        struct numoe_error error = NUMOE_ERROR_INIT;

        b.out = out + (size_t)i * MOST * HIDDEN;
        if (turn % 3 == 1)
            b.elsewhere = elsewhere;
        b.deferred = turn % 6 == 5 && tokens == 1 ? late : NULL;
        if (kind % 11 == 3) {
            cr_assert_eq(numoe_layer_unload(f->model, kind & 1, &error), 0, "%s", error.message);
            experts_load(f);
        }
        if (kind % 13 == 3 && !waits)
            cr_assert_eq(numoe_reserve(f->model, tokens + i, K, 0, NULL), 0);
        if (anew)
            forget(context);
        if (mark_of(&context->schedule))
            *mark_of(&context->schedule) = MARK;
        cr_assert_eq(numoe_forward(f->model, i % LAYERS, &b, NULL, &error), 0, "%s: %s",
                     error.where, error.message);
        waits = b.deferred ? f : NULL;
        kept += mark_of(&context->schedule) && *mark_of(&context->schedule) == MARK;
        call_free(&c);
    }
    return kept;
}

static void compare(const char *topology, uint32_t threads, bool batch_invariant)
{
    enum { CALLS = 240 };
    const size_t cells = (size_t)CALLS * MOST * HIDDEN;
    float *out[2];
    unsigned kept[2];

    for (int anew = 0; anew < 2; anew++) {
        struct pair p = open_pair(topology, threads, batch_invariant);

        out[anew] = malloc(cells * sizeof *out[anew]);
        memset(out[anew], 0xFF, cells * sizeof *out[anew]);
        kept[anew] = run_calls(&p, CALLS, anew, out[anew]);
        close_pair(&p);
    }
    cr_expect_eq(kept[1], 0);
    cr_expect_geq(kept[0], CALLS / 8, "%u of %d", kept[0], CALLS);
    cr_expect_arr_eq(out[0], out[1], cells * sizeof *out[0]);
    free(out[0]);
    free(out[1]);
}

Test(kept_layout, gives_the_bits_of_a_new_one, .timeout = 240)
{
    compare("numa:1(memory=16GB) core:2 pu:1", 2, false);
    compare("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", 3, false);
    compare("pack:2 l3:4 [numa(memory=16GB)] core:2 pu:1", 16, false);
}

Test(kept_layout, also_with_fixed_cuts, .timeout = 120)
{
    compare("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", 3, true);
}

/* Other experts, layers and weights each time, and each near float64. */
Test(kept_layout, computes_its_own_experts, .timeout = 120)
{
    struct pair p = open_pair("pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1", 4, false);
    const struct numoe_schedule *s = &p.f[0].context->schedule;
    unsigned kept = 0;

    for (uint64_t i = 0; i < 3 * EXPERTS; i++) {
        struct call c = call_make(1, K, HIDDEN, EXPERTS, false);
        struct numoe_batch b = call_batch(&c);

        for (uint64_t j = 0; j < K; j++)
            c.ids[j] = (int64_t)((i + 4 * j) % EXPERTS);
        if (i)
            *mark_of(s) = MARK;
        run(&p.f[0], i % LAYERS, &b);
        kept += *mark_of(s) == MARK;
        cr_expect_leq(check(&p.f[0], i % LAYERS, &c, 1), 4e-3, "call %lu", i);
        call_free(&c);
    }
    cr_expect_eq(kept, 3 * EXPERTS - 1);
    close_pair(&p);
}

/* A model that comes to lie where another was is laid out for itself. */
Test(kept_layout, ends_with_its_model, .timeout = 120)
{
    struct pair p = open_pair("numa:1(memory=16GB) core:2 pu:1", 2, false);
    struct call c = call_make(1, K, HIDDEN, EXPERTS, false);
    struct numoe_batch b = call_batch(&c);

    for (uint64_t j = 0; j < K; j++)
        c.ids[j] = (int64_t)j;
    run(&p.f[1], 0, &b);
    cr_assert_gt(p.f[0].context->schedule.shape_count, 0);
    numoe_model_destroy(p.f[1].model);
    cr_expect_eq(p.f[0].context->schedule.shape_count, 0);
    cr_assert_eq(numoe_model_create(p.f[0].context, &p.f[1].desc, &p.f[1].model, NULL), 0);
    experts_load(&p.f[1]);
    run(&p.f[1], 0, &b);
    cr_expect_leq(check(&p.f[1], 0, &c, 1), 4e-3);
    call_free(&c);
    close_pair(&p);
}

/* A call of one layer, near float64. @return whether it kept the layout that was there */
static bool call_near(struct fixture *f, uint64_t tokens, const int64_t *ids)
{
    struct call c = call_make(tokens, K, f->desc.hidden, EXPERTS, false);
    struct numoe_batch b = call_batch(&c);
    uint32_t *mark = mark_of(&f->context->schedule);
    bool kept;

    memcpy(c.ids, ids, tokens * K * sizeof *ids);
    if (mark)
        *mark = MARK;
    run(f, 0, &b);
    kept = mark && *mark_of(&f->context->schedule) == MARK;
    cr_expect_leq(check(f, 0, &c, 1), 4e-3);
    call_free(&c);
    return kept;
}

/* As many experts with as many tokens, but of other tokens. */
Test(kept_layout, is_of_the_same_tokens, .timeout = 120)
{
    static const int64_t first[] = {0, 1, -1, 2, -1, -1}, second[] = {0, -1, -1, 1, 2, -1};
    struct pair p = open_pair("numa:1(memory=16GB) core:2 pu:1", 2, false);

    call_near(&p.f[0], 2, first);
    cr_expect(call_near(&p.f[0], 2, first));
    cr_expect(!call_near(&p.f[0], 2, second));
    close_pair(&p);
}

/* Rows of deferred experts join the call that collects them and not the next, which is like it. */
Test(kept_layout, lets_go_of_rows_that_came_late, .timeout = 120)
{
    static const uint8_t deferred[EXPERTS] = {1};
    static const int64_t ids[] = {0, 1, 2}, others[] = {3, 4, 5};
    struct pair p = open_pair("numa:1(memory=16GB) core:2 pu:1", 2, false);
    struct call c = call_make(1, K, HIDDEN, EXPERTS, false);
    struct numoe_batch b = call_batch(&c);

    memcpy(c.ids, ids, sizeof ids);
    b.deferred = deferred;
    run(&p.f[0], 0, &b);
    b.deferred = NULL;
    memcpy(c.ids, others, sizeof others);
    run(&p.f[0], 0, &b);
    cr_expect(call_near(&p.f[0], 1, others));
    call_free(&c);
    close_pair(&p);
}

/* Models whose experts have as many slices, in rows of other widths. */
Test(kept_layout, is_of_one_model, .timeout = 120)
{
    static const int64_t ids[] = {0, 1, 2};
    struct pair p = open_pair("numa:1(memory=16GB) core:2 pu:1", 2, false);
    struct fixture wide = fixture_of(LAYERS, EXPERTS, 5 * HIDDEN, INNER, true, NUMOE_EXACT);

    wide.context = p.f[0].context;
    experts_make(&wide, 21);
    cr_assert_eq(numoe_model_create(wide.context, &wide.desc, &wide.model, NULL), 0);
    experts_load(&wide);
    call_near(&p.f[0], 1, ids);
    cr_expect(!call_near(&wide, 1, ids));
    cr_expect(!call_near(&p.f[0], 1, ids));
    numoe_model_destroy(wide.model);
    experts_free(&wide);
    close_pair(&p);
}
