/* Predictions: each bound by hand, what must never make things slower, and what is printed.
 * SPDX-License-Identifier: Apache-2.0 */
#include "predict_box.h"
#include "topo/predict_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>

/* ---- expected distinct experts --------------------------------------------------------------- */

Test(predict_hit, agrees_with_simulation)
{
    static const unsigned cases[][3] = {{64, 4, 10}, {256, 6, 1}, {256, 6, 16}, {32, 4, 3}};
    uint64_t state = 12345;

    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        unsigned experts = cases[c][0], top_k = cases[c][1], tokens = cases[c][2];
        enum { TRIALS = 4000 };
        double sum = 0;

        for (int trial = 0; trial < TRIALS; trial++) {
            bool hit[256] = {false};

            for (unsigned t = 0; t < tokens; t++) {
                bool mine[256] = {false};

                for (unsigned k = 0; k < top_k;) {
                    unsigned e;

                    state = state * 6364136223846793005u + 1442695040888963407u;
                    e = (unsigned)(state >> 33) % experts;
                    if (mine[e])
                        continue;
                    mine[e] = hit[e] = true;
                    k++;
                }
            }
            for (unsigned e = 0; e < experts; e++)
                sum += hit[e];
        }
        assert_near(numoe_predict_experts_hit(experts, top_k, tokens), sum / TRIALS, 0.01, "hit");
    }
}

Test(predict_hit, ends_are_exact)
{
    assert_near(numoe_predict_experts_hit(256, 6, 1), 6, 1e-12, "one token");
    cr_assert_eq(numoe_predict_experts_hit(256, 6, 0), 0);
    cr_assert_eq(numoe_predict_experts_hit(8, 8, 1), 8);
    cr_assert_eq(numoe_predict_experts_hit(8, 9, 1), 8);
    assert_near(numoe_predict_experts_hit(896, 16, 1e6), 896, 1e-12, "all");
}

/* ---- CPU bounds by hand ---------------------------------------------------------------------- */

/* A token of V4-Flash reads 6 experts of 13,369,344 bytes a layer, 80,216,064 in all, and takes
 * 6 * 6 * 4096 * 2048 = 301,989,888 operations. */

Test(predict_cpu, memory_sets_decode, .timeout = 30)
{
    struct numoe_prediction_cell c =
        predict_one(ONE_NODE, &v4_flash, 0, 100, 10, NULL, 0, NUMOE_WAY_CPU, 1);
    double memory = 80216064 / (read_fraction * 100e9) * 1e3;
    /* 4 cores of an unknown CPU, one 64-operation instruction a cycle, 10 GHz */
    double arithmetic = 301989888 / (multiply_fraction * 4 * 64 * 10e9) * 1e3;
    /* 384 slices on one node of 4 workers are 32 lanes, twice as many as the plan has: 32 rows of
     * 4096 floats, written and read, at half of 100 GB/s */
    double reduction = 32 * 16384 * 2 / 50e9 * 1e3;
    double sync = 3 * 2 * 0.75e-3;

    cr_assert_eq(c.bound, NUMOE_BOUND_MEMORY, "%s", c.why);
    assert_near(c.parts_ms[NUMOE_BOUND_MEMORY], memory, 1e-9, "memory");
    assert_near(c.parts_ms[NUMOE_BOUND_ARITHMETIC], arithmetic, 1e-9, "arithmetic");
    assert_near(c.parts_ms[NUMOE_BOUND_REDUCTION], reduction, 1e-9, "reduction");
    assert_near(c.parts_ms[NUMOE_BOUND_SYNC], sync, 1e-9, "sync");
    assert_near(c.layer_ms, hypot(memory, arithmetic) + reduction + sync, 1e-9, "layer");
    assert_near(c.pass_ms, 43 * c.layer_ms, 1e-12, "pass");
    assert_near(c.tokens_per_s, 1e3 / c.pass_ms, 1e-12, "tokens/s");
    cr_assert_eq(c.weight_bytes, 80216064);
    cr_assert_not_null(strstr(c.why, "100 GB/s"), "%s", c.why);
}

Test(predict_cpu, arithmetic_sets_prefill, .timeout = 30)
{
    struct numoe_prediction_cell c =
        predict_one(ONE_NODE, &v4_flash, 0, 100, 2, NULL, 0, NUMOE_WAY_CPU, 1024);
    double memory = 256 * 13369344. / (read_fraction * 100e9) * 1e3;
    double arithmetic = 1024 * 301989888. / (multiply_fraction * 4 * 64 * 2e9) * 1e3;

    cr_assert_eq(c.bound, NUMOE_BOUND_ARITHMETIC, "%s", c.why);
    assert_near(c.parts_ms[NUMOE_BOUND_MEMORY], memory, 1e-6, "memory");
    assert_near(c.parts_ms[NUMOE_BOUND_ARITHMETIC], arithmetic, 1e-9, "arithmetic");
    /* 6144 rows, each (token, expert) one, written and read */
    cr_assert_eq(c.reduction_bytes, 6144ull * 16384 * 2);
}

Test(predict_cpu, one_core_cannot_use_all_the_memory, .timeout = 30)
{
    /* 400 GB/s were given for 4 cores: 100 each */
    struct numoe_prediction_cell c =
        predict_one(ONE_NODE, &v4_flash, 1, 400, 100, NULL, 0, NUMOE_WAY_CPU, 1);

    cr_assert_eq(c.bound, NUMOE_BOUND_CORE_READ, "%s", c.why);
    assert_near(c.parts_ms[NUMOE_BOUND_CORE_READ], 80216064 / (read_fraction * 100e9) * 1e3, 1e-9,
                "core read");
}

Test(predict_cpu, reduction_counts_rows, .timeout = 30)
{
    /* narrow experts on wide rows: a slice of 100 bytes is nothing beside its partial output */
    struct numoe_expert_shape wide = {.layers = 2,
                                      .experts = 8,
                                      .slices = 32,
                                      .slice_bytes = 100,
                                      .hidden = 8192,
                                      .experts_per_token = 2};
    struct numoe_prediction_cell c = predict_one("pack:2 l3:16 [numa(memory=16GB)] core:4 pu:1",
                                                 &wide, 0, 10, 1e4, NULL, 0, NUMOE_WAY_CPU, 64);

    cr_assert_eq(c.bound, NUMOE_BOUND_REDUCTION, "%s", c.why);
    /* all 32 nodes work together; an expert has about 16 tokens and the 32 slices of its 16
     * workers: one or two blocks, cut in 8 to 16, each with rows of 32 KiB, written and read */
    const double ranges = (double)c.reduction_bytes / (128. * 32768 * 2);
    cr_assert(ranges > 8 && ranges < 16, "%.2f", ranges);
    assert_near(c.parts_ms[NUMOE_BOUND_REDUCTION], (double)c.reduction_bytes / 160e9 * 1e3, 1e-6,
                "reduction");
}

Test(predict_cpu, synchronisation_sets_a_tiny_layer, .timeout = 30)
{
    struct numoe_prediction_cell c =
        predict_one(ONE_NODE, &tiny_layer, 0, 100, 3, NULL, 0, NUMOE_WAY_CPU, 1);

    cr_assert_eq(c.bound, NUMOE_BOUND_SYNC, "%s", c.why);
}

Test(predict_cpu, rows_cut_a_batch_into_passes, .timeout = 30)
{
    /* 512 MiB / (16 KiB * 6) = 5461 tokens: 16384 take 4 passes, each reading the weights */
    struct numoe_prediction_cell c =
        predict_one(ONE_NODE, &v4_flash, 0, 10, 3, NULL, 0, NUMOE_WAY_CPU, 16384);
    double hit = numoe_predict_experts_hit(256, 6, 16384 / 4.);

    assert_near((double)c.weight_bytes, 4 * hit * 13369344, 1e-6, "bytes");
    cr_assert_not_null(strstr(c.why, "4 passes of 4096 tokens"), "%s", c.why);
}

Test(predict_cpu, nodes_that_share_channels_count_once, .timeout = 60)
{
    struct outlook o = outlook_on(EPYC, &v4_flash);
    uint32_t half[16], tokens = 1;
    double all;

    with_tokens(&o, &tokens, 1);
    predict(&o);
    /* two packages of 204.8 GB/s, of which 0.75 */
    all = cell_of(o.prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY];
    assert_near(all, 80216064 / (read_fraction * 307.2e9) * 1e3, 1e-6, "all nodes");
    cr_assert_not_null(strstr(o.prediction->figures[0].source, "assumed: EPYC Rome"));
    cr_assert(o.prediction->figures[0].assumed);

    /* every second node of each domain: fewer nodes, the same channels */
    for (uint32_t i = 0; i < 16; i++)
        half[i] = 2 * i;
    o.request.nodes = half;
    o.request.node_count = 16;
    replan(&o);
    predict(&o);
    assert_near(cell_of(o.prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY], all, 1e-6,
                "every second node");

    /* one package: half the channels */
    for (uint32_t i = 0; i < 16; i++)
        half[i] = 16 + i;
    replan(&o);
    predict(&o);
    assert_near(cell_of(o.prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY], 2 * all,
                1e-6, "one package");
    outlook_free(&o);
}

Test(predict_cpu, what_the_machine_knows_comes_before_assumptions, .timeout = 30)
{
    struct outlook o = outlook_on("pack:2 [numa(memory=256GB)] core:8 pu:1", &v4_flash);
    double gbs[2] = {0, 50};

    o.machine->nodes[0].bandwidth_mbs = o.machine->nodes[1].bandwidth_mbs = 120000;
    replan(&o);
    predict(&o);
    assert_near(o.prediction->figures[0].value, 240, 1e-9, "known");
    cr_assert(!o.prediction->figures[0].assumed);

    /* what is given comes before that; the slowest domain is read last */
    o.options.node_gbs = gbs;
    predict(&o);
    assert_near(o.prediction->figures[0].value, 170, 1e-9, "one given");
    assert_near(cell_of(o.prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY],
                80216064 / 2 / (read_fraction * 50e9) * 1e3, 1e-6, "slow node");
    outlook_free(&o);
}

/* Of a machine with fast and slow cores the slow ones are worth half, as in its shares. */
Test(predict_cpu, slow_cores_count_half, .timeout = 30)
{
    struct numoe_expert_shape tiny = v4_flash;
    struct outlook o, even;
    double slow = 0, all;

    tiny.layers = 1;
    tiny.experts = 8;
    o = outlook_on(DATA "fast-cores-last.xml", &tiny);
    even = outlook_on(DATA "fast-cores-last.xml", &tiny);
    for (uint32_t i = 0; i < even.machine->pu_count; i++)
        even.machine->pus[i].efficiency = 0;
    replan(&even);
    all = o.plan->worker_count;
    for (uint32_t w = 0; w < o.plan->worker_count; w++)
        slow += o.machine->pus[o.plan->workers[w].pu].efficiency == 0;
    cr_assert(slow > 0 && slow < all);
    predict(&o);
    predict(&even);
    for (uint32_t f = 0; f < o.prediction->figure_count; f++)
        if (!strcmp(o.prediction->figures[f].name, "int8 arithmetic")) {
            cr_expect_float_eq(o.prediction->figures[f].value / even.prediction->figures[f].value,
                               (all - slow / 2) / all, 1e-9);
            cr_expect_not_null(strstr(o.prediction->figures[f].source, "counted half"));
        }
    outlook_free(&o);
    outlook_free(&even);
}

/* ---- what must hold of all ------------------------------------------------------------------- */

static void check_prediction(const struct numoe_prediction *prediction)
{
    for (uint32_t i = 0; i < prediction->cell_count; i++) {
        const struct numoe_prediction_cell *c = &prediction->cells[i];

        cr_assert_str_not_empty(c->why);
        if (!c->possible)
            continue;
        cr_assert(isfinite(c->layer_ms) && c->layer_ms > 0, "%s", c->why);
        cr_assert(c->tokens_per_s > 0 && isfinite(c->tokens_per_s));
        cr_assert(c->gpu_part >= 0 && c->gpu_part <= 1 && c->cached_part <= c->gpu_part);
        cr_assert(c->bound < NUMOE_BOUNDS);
        cr_assert(c->parts_ms[c->bound] > 0, "%s", c->why);
        for (int b = 0; b < NUMOE_BOUNDS; b++)
            cr_assert(c->parts_ms[b] <= c->layer_ms * 1.000001, "%s: %s alone is %g of %g", c->why,
                      numoe_bound_name(b), c->parts_ms[b], c->layer_ms);
    }
    for (uint32_t i = 0; i < prediction->what_if_count; i++) {
        cr_assert(prediction->what_ifs[i].gain >= 1.02);
        cr_assert(!i || prediction->what_ifs[i].gain <= prediction->what_ifs[i - 1].gain);
    }
}

static const char *const machines[] = {
    ONE_NODE,
    "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2",
    "pack:2 group:4 [numa(memory=64GB)] [numa(memory=16GB)] core:12 pu:2",
    "pack:4 [numa(memory=64GB indexes=0,1,16,17)] core:4 pu:1",
    "numa:64(memory=8GB) core:2 pu:1",
    "pack:1 [numa(memory=200GB)] core:1 pu:1",
    EPYC,
    DATA "xeon-8336c-2s-2n.xml",
    DATA "hbm-numbered-last.xml",
};

/* Every way and size: with `after` never slower than with `before`. */
static void assert_no_slower(const struct numoe_prediction *before,
                             const struct numoe_prediction *after, const char *what)
{
    for (uint32_t i = 0; i < before->cell_count; i++) {
        const struct numoe_prediction_cell *b = &before->cells[i];

        if (!b->possible)
            continue;
        for (uint32_t j = 0; j < after->cell_count; j++) {
            const struct numoe_prediction_cell *a = &after->cells[j];

            if (a->way == b->way && a->tokens == b->tokens)
                cr_assert(a->possible && a->layer_ms <= b->layer_ms * 1.000001,
                          "%s: %s, %u tokens: %g ms, then %g", what, numoe_way_name(b->way),
                          b->tokens, b->layer_ms, a->layer_ms);
        }
    }
}

/* What is predicted now, against what was before. */
static void predict_no_slower(struct outlook *o, const char *what)
{
    struct numoe_prediction *before = o->prediction;

    o->prediction = NULL;
    check_prediction(predict(o));
    assert_no_slower(before, o->prediction, what);
    numoe_prediction_free(before);
}

Test(predict_all, more_of_anything_is_never_slower, .timeout = 120)
{
    struct numoe_expert_shape shape = v4_flash;

    shape.layers = 3;
    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        struct outlook o = outlook_on(machines[m], &shape);
        struct numoe_predict_gpu gpus[4];
        double gbs[64];

        for (int i = 0; i < 4; i++) {
            gpus[i] = a10s[0];
            gpus[i].node = o.machine->nodes[0].os_index;
            gpus[i].link_gbs = 25. / (i + 1);
            gpus[i].memory_bytes = 9000000000u >> i;
        }
        with_gpus(&o, gpus, 2);
        o.options.node_gbs = gbs;
        for (double rate = 1; rate < 1000; rate *= 1.7) {
            for (uint32_t i = 0; i < 64; i++)
                gbs[i] = rate * (1 + i % 3);
            if (rate == 1)
                check_prediction(predict(&o));
            else
                predict_no_slower(&o, "more bandwidth");
        }
        o.options.node_gbs = NULL;
        with_gpus(&o, gpus, 1);
        check_prediction(predict(&o));
        for (uint32_t count = 2; count <= 4; count++) {
            with_gpus(&o, gpus, count);
            predict_no_slower(&o, "one more link");
        }
        for (int i = 0; i < 4; i++)
            gpus[i].link_gbs *= 2;
        predict_no_slower(&o, "faster links");
        for (int i = 0; i < 4; i++)
            gpus[i].memory_bytes *= 3;
        predict_no_slower(&o, "more device memory");
        o.options.ghz = 9;
        predict_no_slower(&o, "faster cores");
        outlook_free(&o);
    }
}

Test(predict_all, every_recorded_machine_is_predicted, .timeout = 120)
{
    DIR *folder = opendir(NUMOE_RECORDED_TOPOLOGIES);
    struct numoe_expert_shape small = v4_flash;
    struct dirent *entry;

    if (!folder)
        cr_skip_test("no recorded topologies beside this checkout");
    small.layers = 1;
    small.experts = 8;
    while ((entry = readdir(folder))) {
        struct outlook o = {.request = on_every_node(&small),
                            .options = NUMOE_PREDICT_OPTIONS_INIT};
        char path[1024];

        if (!strstr(entry->d_name, ".xml"))
            continue;
        snprintf(path, sizeof path, "%s/%s", NUMOE_RECORDED_TOPOLOGIES, entry->d_name);
        o.machine = machine_of(path);
        /* some have less memory than even this needs */
        if (!numoe_plan_create(o.machine, &o.request, &o.plan, NULL))
            check_prediction(predict(&o));
        outlook_free(&o);
    }
    closedir(folder);
}

/* Refused, with a message, and nothing comes back. */
static void assert_no_question(const struct outlook *o, const char *words)
{
    struct numoe_prediction *prediction = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_predict(o->machine, o->plan, &o->options, &prediction, &error), -EINVAL,
                 "%s", words);
    cr_assert_not_null(strstr(error.message, words), "%s", error.message);
    cr_assert_null(prediction);
}

Test(predict_all, what_is_no_question_is_refused, .timeout = 30)
{
    struct outlook o = outlook_on(ONE_NODE, &v4_flash);
    struct numoe_predict_gpu gpu = a10s[0];
    uint32_t zero = 0;
    double gbs = -1;

    with_gpus(&o, &gpu, 1);
    assert_no_question(&o, "node 4");
    gpu.node = 0;
    gpu.link_gbs = 0;
    assert_no_question(&o, "a link of 0 GB/s");
    with_gpus(&o, NULL, 0);
    o.options.node_gbs = &gbs;
    assert_no_question(&o, "-1 GB/s is no bandwidth");
    gbs = NAN;
    assert_no_question(&o, "nan GB/s is no bandwidth");
    o.options.node_gbs = NULL;
    with_tokens(&o, &zero, 1);
    assert_no_question(&o, "a pass of 0 tokens");
    with_tokens(&o, NULL, 0);
    o.options.isa = "mmx";
    assert_no_question(&o, "mmx");
    o.options.isa = NULL;
    o.request.shape.layers = 0;
    replan(&o);
    assert_no_question(&o, "without a model");
    outlook_free(&o);
}

Test(predict_guess, cpus_are_known_by_their_names)
{
    static const struct {
        const char *model, *name, *isa;
        double package_gbs, ghz, ops_a_cycle;
    } cases[] = {
        {"AMD EPYC 7H12 64-Core Processor", "EPYC Rome", "avx2", 204.8, 2.6, 64},
        {"AMD EPYC 7763 64-Core Processor", "EPYC Milan", "avx2", 204.8, 2.8, 128},
        {"AMD EPYC 7551 32-Core Processor", "EPYC Naples", "avx2", 170.7, 2.5, 64},
        {"AMD EPYC 9654 96-Core Processor", "EPYC Genoa", "avx512vnni", 460.8, 3.0, 128},
        {"AMD EPYC 9755 128-Core Processor", "EPYC Turin", "avx512vnni", 576, 3.1, 256},
        {"AMD EPYC", "EPYC of an unknown generation", "avx2", 204.8, 2.6, 64},
        {"Intel(R) Xeon(R) Platinum 8336C CPU @ 2.30GHz", "Xeon Ice Lake", "avx512vnni", 204.8, 2.3,
         256},
        {"Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", "Xeon Cascade Lake", "avx512vnni", 140.8, 2.1,
         256},
        {"Intel(R) Xeon(R) Platinum 8174 CPU @ 3.10GHz", "Xeon Skylake", "avx512", 128, 3.1, 256},
        {"Intel(R) Xeon(R) Platinum 8480+", "Xeon Sapphire Rapids", "avx512vnni", 307.2, 2.4, 256},
        {"Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz", "Xeon E5 v3", "avx2", 68.3, 2.5, 64},
        {"Intel(R) Xeon(R) CPU           E5472  @ 3.00GHz", NULL, "avx2", 51.2, 3.0, 64},
        {"Intel(R) Xeon(R) 6980P", "Xeon 6 (6900)", "avx512vnni", 614.4, 2.7, 256},
        {"AMD Ryzen 9 7950X 16-Core Processor", "Ryzen 7000", "avx512vnni", 83.2, 4.6, 128},
        {"13th Gen Intel(R) Core(TM) i7-1370P", "Core desktop", "avx2", 51.2, 3.5, 64},
        {"", NULL, "avx2", 51.2, 2.4, 64},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct cpu_guess guess;

        cr_assert(predict_guess_cpu(cases[i].model, NULL, &guess));
        if (cases[i].name)
            cr_assert_str_eq(guess.name, cases[i].name, "%s", cases[i].model);
        else
            cr_assert_null(guess.name, "%s: %s", cases[i].model, guess.name);
        cr_assert_str_eq(guess.isa, cases[i].isa, "%s", cases[i].model);
        assert_near(guess.package_gbs, cases[i].package_gbs, 1e-9, cases[i].model);
        assert_near(guess.ghz, cases[i].ghz, 1e-9, cases[i].model);
        assert_near(guess.ops_a_cycle, cases[i].ops_a_cycle, 1e-9, cases[i].model);
    }
}

/* ---- what is printed ------------------------------------------------------------------------- */

Test(predict_print, json_has_every_documented_field, .timeout = 60)
{
    static const char *const of_cell[] = {"way",      "tokens",   "possible",     "experts_hit",
                                          "layer_ms", "pass_ms",  "tokens_per_s", "bound",
                                          "why",      "parts_ms", "weight_bytes", "reduction_bytes",
                                          "passes",   "gpus",     "gpu_part",     "cached_part"};
    static const char *const of_node[] = {"os_index",     "slices",       "capacity_bytes",
                                          "before_bytes", "expert_bytes", "activation_bytes",
                                          "pinned_bytes", "left_bytes"};
    static const char *const of_figure[] = {"name", "value", "unit", "assumed", "source"};
    static const char *const of_gpu[] = {"name",         "node",   "link_gbs",
                                         "memory_bytes", "tflops", "memory_gbs"};
    static const char *const of_prefill[] = {"tokens", "tokens_per_s", "lever", "gain", "bound"};
    static const char *const of_passing[] = {"alone_ms", "passed_ms", "least_gbs", "most_gbs",
                                             "tokens"};
    static const char *const of_what_if[] = {"what",   "way",   "tokens", "tokens_after",
                                             "before", "after", "gain"};
    static const struct {
        const char *array;
        const char *const *fields;
        size_t count;
    } arrays[] = {{"cells", of_cell, 16}, {"nodes", of_node, 8},      {"figures", of_figure, 5},
                  {"gpus", of_gpu, 6},    {"prefill", of_prefill, 5}, {"what_ifs", of_what_if, 7}};
    struct outlook o = outlook_on(EPYC, &v4_flash);
    json_t *root, *predicted;
    char *text;

    with_gpus(&o, a10s, 2);
    predict(&o);
    text = text_of(cr_assert_eq(numoe_prediction_print_json(o.plan, o.prediction, out), 0));
    root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    cr_assert_not_null(root);
    cr_assert_eq(json_array_size(json_object_get(root, "nodes")), 32);
    predicted = json_object_get(root, "predicted");
    cr_assert(json_is_array(json_object_get(predicted, "notes")));
    cr_assert_eq(json_object_size(json_object_get(predicted, "passing")), 5);
    for (size_t f = 0; f < 5; f++)
        cr_assert(
            json_is_real(json_object_get(json_object_get(predicted, "passing"), of_passing[f])),
            "%s", of_passing[f]);
    for (size_t a = 0; a < sizeof arrays / sizeof arrays[0]; a++) {
        json_t *array = json_object_get(predicted, arrays[a].array), *one;
        size_t i;

        cr_assert(json_array_size(array) > 0, "%s", arrays[a].array);
        json_array_foreach(array, i, one)
        {
            cr_assert_eq(json_object_size(one), arrays[a].count);
            for (size_t f = 0; f < arrays[a].count; f++)
                cr_assert_not_null(json_object_get(one, arrays[a].fields[f]), "%s.%s",
                                   arrays[a].array, arrays[a].fields[f]);
        }
    }
    cr_assert_eq(json_object_size(json_object_get(
                     json_array_get(json_object_get(predicted, "cells"), 0), "parts_ms")),
                 NUMOE_BOUNDS);
    json_decref(root);
    free(text);
    outlook_free(&o);
}
