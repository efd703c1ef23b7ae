/* Predictions with GPUs: each bound by hand, and what copying between them takes.
 * SPDX-License-Identifier: Apache-2.0 */
#include "topo/predict_fixture.h"

Test(predict_gpu, the_box_of_the_public_report, .timeout = 60)
{
    struct outlook o = outlook_on(EPYC, &v4_flash);
    static const uint32_t large[] = {8192, 16384, 65536};
    const struct numoe_prediction_cell *cell;

    with_gpus(&o, a10s, 2);
    predict(&o);
    /* 147.2 GB over 25 GB/s: 5.9 s a pass; 4096 tokens a pass cap near 700 tokens/s */
    cell = cell_of(o.prediction, NUMOE_WAY_STREAM_ONE, 4096);
    cr_assert_eq(cell->bound, NUMOE_BOUND_LINK, "%s", cell->why);
    assert_near(cell->pass_ms / 1e3, 147.166739 / 25, 1e-3, "pass");
    cr_assert(cell->tokens_per_s > 680 && cell->tokens_per_s < 700, "%g", cell->tokens_per_s);
    cr_assert_not_null(strstr(cell->why, "147 GB a pass over 25.0 GB/s"), "%s", cell->why);
    /* two links, each layer over all tokens of the pass: at least 2 x 650 */
    for (int i = 0; i < 3; i++) {
        cell = cell_of(o.prediction, NUMOE_WAY_STREAM, large[i]);
        cr_assert(cell->tokens_per_s >= 1300, "%u: %g", large[i], cell->tokens_per_s);
        cr_assert_eq(cell->gpus, 2);
        cr_assert(cell_of(o.prediction, NUMOE_WAY_CACHE, large[i])->tokens_per_s >=
                  cell->tokens_per_s);
        cr_assert(cell_of(o.prediction, NUMOE_WAY_SHARED, large[i])->tokens_per_s >=
                  cell->tokens_per_s);
    }
    /* the smallest passes do not copy what they do not hit */
    cell = cell_of(o.prediction, NUMOE_WAY_STREAM_ONE, 1);
    cr_assert_eq(cell->weight_bytes, 80216064);
    outlook_free(&o);
}

Test(predict_gpu, several_links_exchange_outputs, .timeout = 30)
{
    struct numoe_prediction_cell c =
        predict_one(EPYC, &v4_flash, 0, 0, 0, a10s, 2, NUMOE_WAY_STREAM, 8192);
    /* each copies half of a layer and one bf16 row of 4096 a token from the other */
    double link = (3422552064. / 2 + 8192 * 8192.) / 25e9 * 1e3;

    assert_near(c.parts_ms[NUMOE_BOUND_LINK], link, 1e-9, "link");
    assert_near(c.layer_ms, link + 0.05, 1e-9, "layer");
}

Test(predict_gpu, arithmetic_sets_the_largest_pass, .timeout = 30)
{
    struct numoe_prediction_cell c =
        predict_one(EPYC, &v4_flash, 0, 0, 0, a10s, 1, NUMOE_WAY_STREAM_ONE, 65536);

    cr_assert_eq(c.bound, NUMOE_BOUND_DEVICE, "%s", c.why);
    assert_near(c.parts_ms[NUMOE_BOUND_DEVICE],
                65536 * 301989888. / (tensor_fraction * 125e12) * 1e3, 1e-9, "arithmetic");
}

Test(predict_gpu, slow_host_memory_starves_fast_links, .timeout = 30)
{
    struct numoe_predict_gpu fast = a10_at_home();
    struct numoe_prediction_cell c;

    fast.link_gbs = 100;
    c = predict_one(ONE_NODE, &v4_flash, 0, 40, 3, &fast, 1, NUMOE_WAY_STREAM_ONE, 1024);
    cr_assert_eq(c.bound, NUMOE_BOUND_HOST_MEMORY, "%s", c.why);
    assert_near(c.parts_ms[NUMOE_BOUND_HOST_MEMORY], 3422552064. / 40e9 * 1e3, 1e-6, "host");
}

Test(predict_gpu, a_model_that_fits_is_copied_once, .timeout = 30)
{
    struct numoe_predict_gpu large = a10_at_home();
    struct numoe_prediction_cell c;

    large.memory_bytes = 200000000000;
    c = predict_one(ONE_NODE, &v4_flash, 0, 40, 3, &large, 1, NUMOE_WAY_CACHE, 1);
    cr_assert_eq(c.bound, NUMOE_BOUND_DEVICE_MEMORY, "%s", c.why);
    cr_assert_eq(c.cached_part, 1);
    cr_assert_eq(c.weight_bytes, 0);
    assert_near(c.parts_ms[NUMOE_BOUND_DEVICE_MEMORY], 80216064 / (0.75 * 600e9) * 1e3, 1e-9,
                "device memory");
}

Test(predict_gpu, launches_set_a_tiny_layer, .timeout = 30)
{
    struct numoe_predict_gpu gpu = a10_at_home();
    struct numoe_prediction_cell c;

    c = predict_one(ONE_NODE, &tiny_layer, 0, 40, 3, &gpu, 1, NUMOE_WAY_CACHE, 1);
    cr_assert_eq(c.bound, NUMOE_BOUND_LAUNCH, "%s", c.why);
    /* sharing with it would only cost */
    c = predict_one(ONE_NODE, &tiny_layer, 0, 40, 3, &gpu, 1, NUMOE_WAY_SHARED, 1);
    cr_assert_eq(c.gpu_part, 0);
}

Test(predict_gpu, too_little_device_memory_is_said, .timeout = 30)
{
    struct numoe_predict_gpu small = a10_at_home();
    struct numoe_prediction_cell c;

    small.memory_bytes = 2000000000;
    c = predict_one(ONE_NODE, &v4_flash, 0, 40, 3, &small, 1, NUMOE_WAY_STREAM_ONE, 1024);
    cr_assert(!c.possible);
    cr_assert_not_null(strstr(c.why, "two layers"), "%s", c.why);
    cr_assert_eq(c.tokens_per_s, 0);
    /* and sharing goes on without it */
    c = predict_one(ONE_NODE, &v4_flash, 0, 40, 3, &small, 1, NUMOE_WAY_SHARED, 1024);
    cr_assert(c.possible && c.gpu_part == 0);
}

Test(predict_gpu, those_without_code_are_said, .timeout = 30)
{
    static const struct {
        const char *name;
        double tflops;
        bool old;
    } cases[] = {
        {"T4", 65, true}, {"l40s", 362, false}, {"NVIDIA L40", 181, false}, {"L4", 121, false}};
    struct outlook o = outlook_on(ONE_NODE, &v4_flash);

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct numoe_predict_gpu gpu = a10_at_home();

        snprintf(gpu.name, sizeof gpu.name, "%s", cases[i].name);
        with_gpus(&o, &gpu, 1);
        predict(&o);
        cr_expect_float_eq(o.prediction->gpus[0].tflops, cases[i].tflops, 1e-9);
        cr_expect_eq(has_note(o.prediction->notes, o.prediction->note_count, "no code"),
                     cases[i].old);
    }
    outlook_free(&o);
}

/* A machine with GPUs is not predicted as one without, and nobody told. */
Test(predict_gpu, those_that_are_left_out_are_counted, .timeout = 30)
{
    struct outlook o = outlook_on(EPYC, &v4_flash);

    for (uint32_t i = 0; i < o.machine->device_count; i++)
        if (!strcmp(o.machine->devices[i].name, "cuda1"))
            o.machine->devices[i].link_gbs = 0;
    replan(&o);
    predict(&o);
    cr_expect_eq(o.prediction->gpu_count, 1);
    cr_expect(has_note(o.prediction->notes, o.prediction->note_count,
                       "1 GPU of the machine is not predicted with"));
    outlook_free(&o);
}

Test(predict_gpu, sharing_balances_both_sides, .timeout = 30)
{
    struct numoe_predict_gpu gpu = a10_at_home();
    struct numoe_prediction_cell cpu, alone, shared;

    gpu.memory_bytes = 7100000000; /* two layers and little more */
    cpu = predict_one(ONE_NODE, &v4_flash, 0, 200, 3, NULL, 0, NUMOE_WAY_CPU, 1024);
    alone = predict_one(ONE_NODE, &v4_flash, 0, 200, 3, &gpu, 1, NUMOE_WAY_CACHE, 1024);
    shared = predict_one(ONE_NODE, &v4_flash, 0, 200, 3, &gpu, 1, NUMOE_WAY_SHARED, 1024);
    cr_assert(shared.tokens_per_s > cpu.tokens_per_s && shared.tokens_per_s > alone.tokens_per_s);
    /* inputs and outputs, launches and barriers are all that keeps it from their sum */
    cr_assert(shared.tokens_per_s <= (cpu.tokens_per_s + alone.tokens_per_s) * 1.0001);
    cr_assert(shared.tokens_per_s >= (cpu.tokens_per_s + alone.tokens_per_s) * 0.98, "%g of %g, %g",
              shared.tokens_per_s, cpu.tokens_per_s, alone.tokens_per_s);
}

/* Bytes that copies of a layer take when each GPU pulls by its link and gets the rest from others
 * at p, all at once: until the last is there. */
static double passed_ms(const double *links, int count, double layer, double p)
{
    double all = 0, last = 0;

    for (int i = 0; i < count; i++)
        all += links[i];
    for (int i = 0; i < count; i++)
        last = fmax(last, fmax(layer / all, layer * (all - links[i]) / all / p));
    return last * 1e3;
}

/* What is said of passing on, against what copies take when they are reckoned one by one. */
Test(predict_gpu, whole_experts_passed_on, .timeout = 60)
{
    static const double links[][3] = {{25, 25}, {25, 25, 25}, {10, 25, 20}};
    struct outlook o = outlook_on(EPYC, &v4_flash);
    struct numoe_predict_gpu gpus[3];
    const double layer = 256 * 13369344. / 1e9;
    char *text;

    for (int i = 0; i < 3; i++) {
        const int count = i ? 3 : 2;
        const struct numoe_prediction_passing *p;
        double slowest = 25;

        for (int g = 0; g < count; g++) {
            gpus[g] = a10s[0];
            gpus[g].link_gbs = links[i][g];
            slowest = fmin(slowest, links[i][g]);
        }
        with_gpus(&o, gpus, (uint32_t)count);
        predict(&o);
        p = &o.prediction->passing;
        assert_near(p->alone_ms, layer / slowest * 1e3, 1e-9, "alone");
        assert_near(p->passed_ms, passed_ms(links[i], count, layer, 1e9), 1e-9, "passed on");
        assert_near(passed_ms(links[i], count, layer, p->most_gbs), p->passed_ms, 1e-9, "most");
        cr_expect_gt(passed_ms(links[i], count, layer, 0.99 * p->most_gbs), p->passed_ms);
        assert_near(passed_ms(links[i], count, layer, p->least_gbs), p->alone_ms, 1e-9, "least");
        assert_near(p->tokens, 256 * 2048 * 17 / 64., 1e-9, "tokens"); /* docs/architecture.md */
    }
    for (int alone = 0; alone < 2; alone++) { /* one GPU; two that keep everything */
        with_gpus(&o, alone ? a10s : gpus, alone ? 1 : 2);
        gpus[0].memory_bytes = gpus[1].memory_bytes = (uint64_t)200 << 30;
        predict(&o);
        cr_expect(o.prediction->passing.alone_ms == 0 && o.prediction->passing.tokens == 0);
        text = text_of(numoe_prediction_print(o.prediction, out));
        cr_expect_null(strstr(text, "whole experts on each GPU"));
        free(text);
    }
    with_gpus(&o, a10s, 2);
    predict(&o);
    text = text_of(numoe_prediction_print(o.prediction, out));
    cr_expect_not_null(strstr(text, "a layer takes 136.9 ms over each link"), "%s", text);
    cr_expect_not_null(strstr(text, "down to 68.45 ms: where copies between them carry 25 GB/s"));
    cr_expect_not_null(strstr(text, "down to 12.5 GB/s"));
    cr_expect_not_null(strstr(text, "up to 139264 tokens a pass"));
    free(text);
    outlook_free(&o);
}
