/* Prefill by length of the prompt, lever by lever. SPDX-License-Identifier: Apache-2.0 */
#include "topo/predict_fixture.h"

/* V4-Flash prefill on the box of the public report: at least 2 x 650 from 8k to 64k tokens. */
Test(predict_prefill, twice_the_public_report, .timeout = 60)
{
    static const uint32_t prompts[] = {4096, 8192, 16384, 32768, 65536};
    struct outlook o = outlook_on(EPYC, &v4_flash);
    const double layer = 256 * 13369344., each = 301989888. / (tensor_fraction * 125e12);

    with_gpus(&o, a10s, 2);
    predict(&o);
    cr_assert_eq(o.prediction->prefill_count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        const struct numoe_prediction_prefill *p = &o.prediction->prefill[i];
        const double link = layer / 25e9, compute = prompts[i] * each;
        const double both = link > compute ? link : compute;

        cr_assert_eq(p->tokens, prompts[i]);
        /* copy, then compute, 4096 tokens a pass: what was reported as 650 */
        assert_near(p->tokens_per_s[NUMOE_LEVER_NONE], 4096 / (43 * (link + 4096 * each + 50e-6)),
                    1e-6, "serial");
        cr_assert(p->tokens_per_s[NUMOE_LEVER_NONE] > 585 &&
                  p->tokens_per_s[NUMOE_LEVER_NONE] < 715);
        assert_near(p->tokens_per_s[NUMOE_LEVER_PASS], prompts[i] / (43 * 1.02 * (both + 50e-6)),
                    1e-6, "one pass, one link");
        for (enum numoe_lever l = 1; l < NUMOE_LEVERS; l++)
            cr_assert(p->tokens_per_s[l] >= p->tokens_per_s[l - 1]);
        if (prompts[i] < 8192)
            continue;
        /* by links and tokens a pass alone, before cache and CPUs */
        cr_assert(p->tokens_per_s[NUMOE_LEVER_LINKS] >= 2 * 650., "%u: %g", p->tokens,
                  p->tokens_per_s[NUMOE_LEVER_LINKS]);
        cr_assert_eq(p->lever, NUMOE_LEVER_PASS, "%s", numoe_lever_name(p->lever));
    }
    /* the last levers are the ways of the tables above, at what overlap and sharing cost */
    for (uint32_t i = 0; i < 5; i++) {
        const struct numoe_prediction_prefill *p = &o.prediction->prefill[i];
        const uint32_t tokens = p->tokens;

        if (tokens == 32768)
            continue; /* in no table */
        assert_near(p->tokens_per_s[NUMOE_LEVER_LINKS],
                    cell_of(o.prediction, NUMOE_WAY_STREAM, tokens)->tokens_per_s / 1.02, 1e-9,
                    "links");
        assert_near(p->tokens_per_s[NUMOE_LEVER_CACHE],
                    cell_of(o.prediction, NUMOE_WAY_CACHE, tokens)->tokens_per_s / 1.02, 1e-9,
                    "cache");
        assert_near(p->tokens_per_s[NUMOE_LEVER_CPU],
                    cell_of(o.prediction, NUMOE_WAY_SHARED, tokens)->tokens_per_s / 1.08, 1e-9,
                    "CPUs");
        cr_assert_gt(p->tokens_per_s[NUMOE_LEVER_CPU], p->tokens_per_s[NUMOE_LEVER_CACHE]);
        cr_assert_eq(p->bound, cell_of(o.prediction, NUMOE_WAY_SHARED, tokens)->bound);
    }
    cr_assert_str_eq(numoe_lever_name(NUMOE_LEVER_LINKS), "links");
    cr_assert_str_eq(numoe_lever_name(NUMOE_LEVER_CACHE), "cache");
    cr_assert_str_eq(numoe_lever_name(NUMOE_LEVER_CPU), "cpu-share");
    outlook_free(&o);
}

/* A prompt of a token more than a pass is two of half of it each. */
Test(predict_prefill, passes_are_even, .timeout = 60)
{
    static const uint32_t prompts[] = {4097, 8194};
    struct outlook o = outlook_on(EPYC, &v4_flash);
    const double layer = 256 * 13369344., each = 301989888. / (tensor_fraction * 125e12);

    with_gpus(&o, a10s, 2);
    with_tokens(&o, prompts, 2);
    predict(&o);
    for (uint32_t i = 0; i < 2; i++) {
        const double passes = i + 2, tokens = ceil(prompts[i] / passes);

        assert_near(o.prediction->prefill[i].tokens_per_s[NUMOE_LEVER_NONE],
                    prompts[i] / (passes * 43 * (layer / 25e9 + tokens * each + 50e-6)), 1e-9,
                    "serial");
    }
    outlook_free(&o);
}

/* With next to nothing to compute, and CPUs of no use, all that is done about the link costs more
 * than it brings: nothing of it is counted. */
Test(predict_prefill, levers_that_cost_are_left_alone, .timeout = 60)
{
    static const uint32_t prompts[] = {512};
    struct outlook o = outlook_on(ONE_NODE, &v4_flash);
    struct numoe_predict_gpu gpu = a10_at_home();
    const struct numoe_prediction_prefill *p;

    gpu.link_gbs = 5;
    gpu.memory_bytes = 8000000000;
    with_gpus(&o, &gpu, 1);
    with_tokens(&o, prompts, 1);
    o.options.ghz = 0.02;
    predict(&o);
    p = &o.prediction->prefill[0];
    cr_assert_gt(p->tokens_per_s[NUMOE_LEVER_NONE], 0);
    for (enum numoe_lever l = 1; l < NUMOE_LEVERS; l++)
        cr_expect_eq(p->tokens_per_s[l], p->tokens_per_s[NUMOE_LEVER_NONE], "%s",
                     numoe_lever_name(l));
    cr_expect_eq(p->lever, NUMOE_LEVER_NONE, "%s", numoe_lever_name(p->lever));
    cr_expect_eq(p->bound, NUMOE_BOUND_LINK);
    outlook_free(&o);
}

/* Two GPUs over slow links have more to tell each other than one has to compute: what sets the pace
 * is what did before them. */
Test(predict_prefill, a_lever_that_costs_sets_no_pace, .timeout = 60)
{
    static const uint32_t prompts[] = {65536};
    struct numoe_expert_shape few = v4_flash;
    struct numoe_predict_gpu gpus[2] = {a10_at_home(), a10_at_home()};
    struct outlook o;
    const struct numoe_prediction_cell *shared;
    const struct numoe_prediction_prefill *p;

    few.experts = 8;
    o = outlook_on(ONE_NODE, &few);
    for (int i = 0; i < 2; i++) {
        gpus[i].link_gbs = 1;
        gpus[i].memory_bytes = 200000000000;
    }
    with_gpus(&o, gpus, 2);
    with_tokens(&o, prompts, 1);
    o.options.ghz = 0.02;
    predict(&o);
    p = &o.prediction->prefill[0];
    cr_expect_eq(p->lever, NUMOE_LEVER_PASS, "%s", numoe_lever_name(p->lever));
    for (enum numoe_lever l = NUMOE_LEVER_LINKS; l < NUMOE_LEVERS; l++)
        cr_expect_eq(p->tokens_per_s[l], p->tokens_per_s[NUMOE_LEVER_PASS], "%s",
                     numoe_lever_name(l));
    cr_expect_eq(p->bound, NUMOE_BOUND_DEVICE, "%s", numoe_bound_name(p->bound));
    /* beside CPUs, which could compute for any token, each GPU gets all inputs over its link */
    shared = cell_of(o.prediction, NUMOE_WAY_SHARED, 65536);
    assert_near(shared->parts_ms[NUMOE_BOUND_LINK], 2 * 65536. * 4096 * 2 / 2e9 * 1e3, 1e-9,
                "inputs to both");
    cr_expect_eq(shared->bound, NUMOE_BOUND_LINK);
    outlook_free(&o);
}

/* What is not hit need not be copied: with few tokens of many experts it counts. */
Test(predict_prefill, levers_by_hand, .timeout = 30)
{
    struct numoe_expert_shape many = v4_flash;
    static const uint32_t tokens[] = {1, 512, 600};
    struct numoe_predict_gpu gpu = a10_at_home();
    struct outlook o;
    const struct numoe_prediction_prefill *p;

    many.layers = 1;
    many.experts = 1024;
    many.experts_per_token = 2;
    o = outlook_on(ONE_NODE, &many);
    gpu.memory_bytes = 200000000000;
    with_gpus(&o, &gpu, 1);
    with_tokens(&o, tokens, 3);
    o.options.ghz = 0.1; /* CPUs that are of no use */
    predict(&o);
    cr_assert_eq(o.prediction->prefill_count, 2); /* one token is no prompt */
    p = &o.prediction->prefill[0];
    assert_near(p->tokens_per_s[NUMOE_LEVER_HIT] / p->tokens_per_s[NUMOE_LEVER_OVERLAP],
                1024 / numoe_predict_experts_hit(1024, 2, 512), 1e-2, "hit experts");
    cr_assert_eq(p->tokens_per_s[NUMOE_LEVER_LINKS], p->tokens_per_s[NUMOE_LEVER_HIT]);
    /* all of the model stays there */
    cr_assert_eq(p->lever, NUMOE_LEVER_CACHE, "%s", numoe_lever_name(p->lever));
    assert_near(p->tokens_per_s[NUMOE_LEVER_CPU], p->tokens_per_s[NUMOE_LEVER_CACHE], 0.02, "CPUs");
    with_gpus(&o, NULL, 0);
    cr_assert_eq(predict(&o)->prefill_count, 0); /* no GPU */
    outlook_free(&o);
}

/* Devices without room for the whole prompt's rows take it in passes that they have room for. */
Test(predict_prefill, small_devices_take_shorter_passes, .timeout = 60)
{
    static const uint32_t prompts[] = {2048, 65536};
    struct outlook o = outlook_on(EPYC, &v4_flash);
    struct numoe_predict_gpu small = a10s[0];
    const struct numoe_prediction_prefill *p;
    double two_layers = 2 * 256 * 13369344.;

    /* 2048 tokens fit: x, outputs, h and what is to be added of the pass (predict_cell.c) */
    small.memory_bytes = (uint64_t)(two_layers + 2048. * 4096 * 6 + 2048. * 6 * 5 * 4096);
    with_gpus(&o, &small, 1);
    with_tokens(&o, prompts, 2);
    predict(&o);
    cr_assert_eq(o.prediction->prefill_count, 2);
    p = &o.prediction->prefill[0];
    for (enum numoe_lever l = 0; l < NUMOE_LEVERS; l++)
        cr_expect_gt(p->tokens_per_s[l], 300, "%s", numoe_lever_name(l));
    p = &o.prediction->prefill[1];
    cr_expect_eq(p->tokens_per_s[NUMOE_LEVER_HIT], 0, "4096 tokens a pass have no room");
    for (enum numoe_lever l = NUMOE_LEVER_PASS; l < NUMOE_LEVER_CPU; l++)
        assert_near(p->tokens_per_s[l], o.prediction->prefill[0].tokens_per_s[l], 1e-9,
                    "2048 a pass");
    /* the CPUs alone do 65536 at once; better is 2048 a pass with the GPU */
    cr_expect_geq(p->tokens_per_s[NUMOE_LEVER_CPU],
                  o.prediction->prefill[0].tokens_per_s[NUMOE_LEVER_CPU]);
    /* no room for a pass of any length: CPUs alone, and no lever */
    small.memory_bytes = (uint64_t)two_layers;
    predict(&o);
    p = &o.prediction->prefill[1];
    for (enum numoe_lever l = 0; l < NUMOE_LEVER_CPU; l++)
        cr_expect_eq(p->tokens_per_s[l], 0, "%s", numoe_lever_name(l));
    cr_expect_eq(p->lever, NUMOE_LEVER_NONE);
    assert_near(p->tokens_per_s[NUMOE_LEVER_CPU],
                cell_of(o.prediction, NUMOE_WAY_CPU, 65536)->tokens_per_s, 1e-9, "CPUs");
    outlook_free(&o);
}
