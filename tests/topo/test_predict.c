/* Predictions: each bound by hand, what must never make things slower, and the known numbers. */
#include "predict.h"
#include "predict_box.h"
#include "topo/topo_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>

#define EPYC DATA "epyc-7h12-2s-32n.xml"
#define ONE_NODE "pack:1 l3:1 [numa(memory=256GB)] core:4 pu:1"

/* What predict_guess.c states of AVX2 and of GPUs that compute by mma.sync. */
static const double read_fraction = 0.80, multiply_fraction = 0.50, tensor_fraction = 0.47;

static struct numoe_plan_request request_of(const struct numoe_expert_shape *shape)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = *shape;
    request.form = NUMOE_FORM_EVERY_NODE;
    return request;
}

static struct numoe_prediction *predict(const struct numoe_machine *machine,
                                        const struct numoe_plan *plan,
                                        const struct numoe_predict_options *options)
{
    struct numoe_prediction *prediction = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_predict(machine, plan, options, &prediction, &error);

    cr_assert_eq(rc, 0, "%s: %s", error.where, error.message);
    return prediction;
}

static const struct numoe_prediction_cell *cell_of(const struct numoe_prediction *prediction,
                                                   enum numoe_way way, uint32_t tokens)
{
    for (uint32_t i = 0; i < prediction->cell_count; i++)
        if (prediction->cells[i].way == way && prediction->cells[i].tokens == tokens)
            return &prediction->cells[i];
    cr_assert_fail("no cell for %s, %u tokens", numoe_way_name(way), tokens);
    return NULL;
}

static void assert_near(double value, double wanted, double tolerance, const char *what)
{
    cr_assert(fabs(value - wanted) <= tolerance * fabs(wanted), "%s is %.9g, not %.9g", what, value,
              wanted);
}

/* One size and way, everything made and freed. nodes_gbs: of every node, 0: not given. */
static struct numoe_prediction_cell
predict_one(const char *source, const struct numoe_expert_shape *shape, uint32_t workers,
            double nodes_gbs, double ghz, const struct numoe_predict_gpu *gpus, uint32_t gpu_count,
            enum numoe_way way, uint32_t tokens)
{
    struct numoe_machine *machine = machine_of(source);
    struct numoe_plan_request request = request_of(shape);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction_cell cell;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;
    double gbs[64];

    cr_assert_leq(machine->node_count, 64);
    for (int i = 0; i < 64; i++)
        gbs[i] = nodes_gbs;
    request.workers = workers;
    plan = plan_of(machine, &request);
    options.node_gbs = nodes_gbs > 0 ? gbs : NULL;
    options.gpus = gpus;
    options.gpu_count = gpu_count;
    options.tokens = &tokens;
    options.token_count = 1;
    options.isa = "avx2";
    options.ghz = ghz;
    prediction = predict(machine, plan, &options);
    cell = *cell_of(prediction, way, tokens);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    return cell;
}

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
    struct numoe_expert_shape tiny = {.layers = 1,
                                      .experts = 4,
                                      .slices = 4,
                                      .slice_bytes = 3264,
                                      .hidden = 32,
                                      .experts_per_token = 1};
    struct numoe_prediction_cell c =
        predict_one(ONE_NODE, &tiny, 0, 100, 3, NULL, 0, NUMOE_WAY_CPU, 1);

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
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    uint32_t half[16], tokens = 1;
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan = plan_of(machine, &request);
    double all;

    options.tokens = &tokens;
    options.token_count = 1;
    prediction = predict(machine, plan, &options);
    /* two packages of 204.8 GB/s, of which 0.75 */
    all = cell_of(prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY];
    assert_near(all, 80216064 / (read_fraction * 307.2e9) * 1e3, 1e-6, "all nodes");
    cr_assert_not_null(strstr(prediction->figures[0].source, "assumed: EPYC Rome"));
    cr_assert(prediction->figures[0].assumed);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);

    /* every second node of each domain: fewer nodes, the same channels */
    for (uint32_t i = 0; i < 16; i++)
        half[i] = 2 * i;
    request.nodes = half;
    request.node_count = 16;
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, &options);
    assert_near(cell_of(prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY], all, 1e-6,
                "every second node");
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);

    /* one package: half the channels */
    for (uint32_t i = 0; i < 16; i++)
        half[i] = 16 + i;
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, &options);
    assert_near(cell_of(prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY], 2 * all, 1e-6,
                "one package");
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(predict_cpu, what_the_machine_knows_comes_before_assumptions, .timeout = 30)
{
    struct numoe_machine *machine = machine_of("pack:2 [numa(memory=256GB)] core:8 pu:1");
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;
    double gbs[2] = {0, 50};

    machine->nodes[0].bandwidth_mbs = machine->nodes[1].bandwidth_mbs = 120000;
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, &options);
    assert_near(prediction->figures[0].value, 240, 1e-9, "known");
    cr_assert(!prediction->figures[0].assumed);
    numoe_prediction_free(prediction);

    /* what is given comes before that; the slowest domain is read last */
    options.node_gbs = gbs;
    prediction = predict(machine, plan, &options);
    assert_near(prediction->figures[0].value, 170, 1e-9, "one given");
    assert_near(cell_of(prediction, NUMOE_WAY_CPU, 1)->parts_ms[NUMOE_BOUND_MEMORY],
                80216064 / 2 / (read_fraction * 50e9) * 1e3, 1e-6, "slow node");
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

static char *read_back(FILE *file)
{
    long size = ftell(file);
    char *text = calloc(1, (size_t)size + 1);

    rewind(file);
    cr_assert_eq(fread(text, 1, (size_t)size, file), (size_t)size);
    fclose(file);
    return text;
}

/* ---- GPU bounds by hand ---------------------------------------------------------------------- */

static const struct numoe_predict_gpu a10s[] = {
    {.name = "a10", .node = 4, .link_gbs = 25, .memory_bytes = 24000000000},
    {.name = "a10", .node = 20, .link_gbs = 25, .memory_bytes = 24000000000},
};

Test(predict_gpu, the_box_of_the_public_report, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    static const uint32_t large[] = {8192, 16384, 65536};
    const struct numoe_prediction_cell *cell;
    struct numoe_prediction *prediction;

    options.gpus = a10s;
    options.gpu_count = 2;
    prediction = predict(machine, plan, &options);
    /* 147.2 GB over 25 GB/s: 5.9 s a pass; 4096 tokens a pass cap near 700 tokens/s */
    cell = cell_of(prediction, NUMOE_WAY_STREAM_ONE, 4096);
    cr_assert_eq(cell->bound, NUMOE_BOUND_LINK, "%s", cell->why);
    assert_near(cell->pass_ms / 1e3, 147.166739 / 25, 1e-3, "pass");
    cr_assert(cell->tokens_per_s > 680 && cell->tokens_per_s < 700, "%g", cell->tokens_per_s);
    cr_assert_not_null(strstr(cell->why, "147 GB a pass over 25.0 GB/s"), "%s", cell->why);
    /* two links, each layer over all tokens of the pass: at least 2 x 650 */
    for (int i = 0; i < 3; i++) {
        cell = cell_of(prediction, NUMOE_WAY_STREAM, large[i]);
        cr_assert(cell->tokens_per_s >= 1300, "%u: %g", large[i], cell->tokens_per_s);
        cr_assert_eq(cell->gpus, 2);
        cr_assert(cell_of(prediction, NUMOE_WAY_CACHE, large[i])->tokens_per_s >=
                  cell->tokens_per_s);
        cr_assert(cell_of(prediction, NUMOE_WAY_SHARED, large[i])->tokens_per_s >=
                  cell->tokens_per_s);
    }
    /* the smallest passes do not copy what they do not hit */
    cell = cell_of(prediction, NUMOE_WAY_STREAM_ONE, 1);
    cr_assert_eq(cell->weight_bytes, 80216064);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* V4-Flash prefill on the box of the public report: at least 2 x 650 from 8k to 64k tokens. */
Test(predict_prefill, twice_the_public_report, .timeout = 60)
{
    static const uint32_t prompts[] = {4096, 8192, 16384, 32768, 65536};
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    const double layer = 256 * 13369344., each = 301989888. / (tensor_fraction * 125e12);
    struct numoe_prediction *prediction;

    options.gpus = a10s;
    options.gpu_count = 2;
    prediction = predict(machine, plan, &options);
    cr_assert_eq(prediction->prefill_count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        const struct numoe_prediction_prefill *p = &prediction->prefill[i];
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
        const struct numoe_prediction_prefill *p = &prediction->prefill[i];
        const uint32_t tokens = p->tokens;

        if (tokens == 32768)
            continue; /* in no table */
        assert_near(p->tokens_per_s[NUMOE_LEVER_LINKS],
                    cell_of(prediction, NUMOE_WAY_STREAM, tokens)->tokens_per_s / 1.02, 1e-9,
                    "links");
        assert_near(p->tokens_per_s[NUMOE_LEVER_CACHE],
                    cell_of(prediction, NUMOE_WAY_CACHE, tokens)->tokens_per_s / 1.02, 1e-9,
                    "cache");
        assert_near(p->tokens_per_s[NUMOE_LEVER_CPU],
                    cell_of(prediction, NUMOE_WAY_SHARED, tokens)->tokens_per_s / 1.08, 1e-9,
                    "CPUs");
        cr_assert_gt(p->tokens_per_s[NUMOE_LEVER_CPU], p->tokens_per_s[NUMOE_LEVER_CACHE]);
        cr_assert_eq(p->bound, cell_of(prediction, NUMOE_WAY_SHARED, tokens)->bound);
    }
    cr_assert_str_eq(numoe_lever_name(NUMOE_LEVER_LINKS), "links");
    cr_assert_str_eq(numoe_lever_name(NUMOE_LEVER_CACHE), "cache");
    cr_assert_str_eq(numoe_lever_name(NUMOE_LEVER_CPU), "cpu-share");
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* A prompt of a token more than a pass is two of half of it each. */
Test(predict_prefill, passes_are_even, .timeout = 60)
{
    static const uint32_t prompts[] = {4097, 8194};
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    const double layer = 256 * 13369344., each = 301989888. / (tensor_fraction * 125e12);
    struct numoe_prediction *prediction;

    options.gpus = a10s;
    options.gpu_count = 2;
    options.tokens = prompts;
    options.token_count = 2;
    prediction = predict(machine, plan, &options);
    for (uint32_t i = 0; i < 2; i++) {
        const double passes = i + 2, tokens = ceil(prompts[i] / passes);

        assert_near(prediction->prefill[i].tokens_per_s[NUMOE_LEVER_NONE],
                    prompts[i] / (passes * 43 * (layer / 25e9 + tokens * each + 50e-6)), 1e-9,
                    "serial");
    }
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* With next to nothing to compute, and CPUs of no use, all that is done about the link costs more
 * than it brings: nothing of it is counted. */
Test(predict_prefill, levers_that_cost_are_left_alone, .timeout = 60)
{
    static const uint32_t prompts[] = {512};
    struct numoe_machine *machine = machine_of(ONE_NODE);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_predict_gpu gpu = a10s[0];
    const struct numoe_prediction_prefill *p;
    struct numoe_prediction *prediction;

    gpu.node = 0;
    gpu.link_gbs = 5;
    gpu.memory_bytes = 8000000000;
    options.gpus = &gpu;
    options.gpu_count = 1;
    options.tokens = prompts;
    options.token_count = 1;
    options.ghz = 0.02;
    prediction = predict(machine, plan, &options);
    p = &prediction->prefill[0];
    cr_assert_gt(p->tokens_per_s[NUMOE_LEVER_NONE], 0);
    for (enum numoe_lever l = 1; l < NUMOE_LEVERS; l++)
        cr_expect_eq(p->tokens_per_s[l], p->tokens_per_s[NUMOE_LEVER_NONE], "%s",
                     numoe_lever_name(l));
    cr_expect_eq(p->lever, NUMOE_LEVER_NONE, "%s", numoe_lever_name(p->lever));
    cr_expect_eq(p->bound, NUMOE_BOUND_LINK);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* Two GPUs over slow links have more to tell each other than one has to compute: what sets the pace
 * is what did before them. */
Test(predict_prefill, a_lever_that_costs_sets_no_pace, .timeout = 60)
{
    static const uint32_t prompts[] = {65536};
    struct numoe_machine *machine = machine_of(ONE_NODE);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_expert_shape few = v4_flash;
    struct numoe_predict_gpu gpus[2] = {a10s[0], a10s[0]};
    const struct numoe_prediction_cell *shared;
    const struct numoe_prediction_prefill *p;
    struct numoe_plan_request request;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;

    few.experts = 8;
    request = request_of(&few);
    plan = plan_of(machine, &request);
    for (int i = 0; i < 2; i++) {
        gpus[i].node = 0;
        gpus[i].link_gbs = 1;
        gpus[i].memory_bytes = 200000000000;
    }
    options.gpus = gpus;
    options.gpu_count = 2;
    options.tokens = prompts;
    options.token_count = 1;
    options.ghz = 0.02;
    prediction = predict(machine, plan, &options);
    p = &prediction->prefill[0];
    cr_expect_eq(p->lever, NUMOE_LEVER_PASS, "%s", numoe_lever_name(p->lever));
    for (enum numoe_lever l = NUMOE_LEVER_LINKS; l < NUMOE_LEVERS; l++)
        cr_expect_eq(p->tokens_per_s[l], p->tokens_per_s[NUMOE_LEVER_PASS], "%s",
                     numoe_lever_name(l));
    cr_expect_eq(p->bound, NUMOE_BOUND_DEVICE, "%s", numoe_bound_name(p->bound));
    /* beside CPUs, which could compute for any token, each GPU gets all inputs over its link */
    shared = cell_of(prediction, NUMOE_WAY_SHARED, 65536);
    assert_near(shared->parts_ms[NUMOE_BOUND_LINK], 2 * 65536. * 4096 * 2 / 2e9 * 1e3, 1e-9,
                "inputs to both");
    cr_expect_eq(shared->bound, NUMOE_BOUND_LINK);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* What is not hit need not be copied: with few tokens of many experts it counts. */
Test(predict_prefill, levers_by_hand, .timeout = 30)
{
    struct numoe_machine *machine = machine_of(ONE_NODE);
    struct numoe_expert_shape many = v4_flash;
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    static const uint32_t tokens[] = {1, 512, 600};
    struct numoe_predict_gpu gpu = a10s[0];
    const struct numoe_prediction_prefill *p;
    struct numoe_plan_request request;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;

    many.layers = 1;
    many.experts = 1024;
    many.experts_per_token = 2;
    request = request_of(&many);
    plan = plan_of(machine, &request);
    gpu.node = 0;
    gpu.memory_bytes = 200000000000;
    options.gpus = &gpu;
    options.gpu_count = 1;
    options.tokens = tokens;
    options.token_count = 3;
    options.ghz = 0.1; /* CPUs that are of no use */
    prediction = predict(machine, plan, &options);
    cr_assert_eq(prediction->prefill_count, 2); /* one token is no prompt */
    p = &prediction->prefill[0];
    assert_near(p->tokens_per_s[NUMOE_LEVER_HIT] / p->tokens_per_s[NUMOE_LEVER_OVERLAP],
                1024 / numoe_predict_experts_hit(1024, 2, 512), 1e-2, "hit experts");
    cr_assert_eq(p->tokens_per_s[NUMOE_LEVER_LINKS], p->tokens_per_s[NUMOE_LEVER_HIT]);
    /* all of the model stays there */
    cr_assert_eq(p->lever, NUMOE_LEVER_CACHE, "%s", numoe_lever_name(p->lever));
    assert_near(p->tokens_per_s[NUMOE_LEVER_CPU], p->tokens_per_s[NUMOE_LEVER_CACHE], 0.02, "CPUs");
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    plan = NULL;
    options.gpus = NULL;
    options.gpu_count = 0;
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, &options);
    cr_assert_eq(prediction->prefill_count, 0); /* no GPU */
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* Devices without room for the whole prompt's rows take it in passes that they have room for. */
Test(predict_prefill, small_devices_take_shorter_passes, .timeout = 60)
{
    static const uint32_t prompts[] = {2048, 65536};
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_predict_gpu small = a10s[0];
    const struct numoe_prediction_prefill *p;
    struct numoe_prediction *prediction;
    double two_layers = 2 * 256 * 13369344.;

    /* 2048 tokens fit: x, outputs, h and what is to be added of the pass (predict_cell.c) */
    small.memory_bytes = (uint64_t)(two_layers + 2048. * 4096 * 6 + 2048. * 6 * 5 * 4096);
    options.gpus = &small;
    options.gpu_count = 1;
    options.tokens = prompts;
    options.token_count = 2;
    prediction = predict(machine, plan, &options);
    cr_assert_eq(prediction->prefill_count, 2);
    p = &prediction->prefill[0];
    for (enum numoe_lever l = 0; l < NUMOE_LEVERS; l++)
        cr_expect_gt(p->tokens_per_s[l], 300, "%s", numoe_lever_name(l));
    p = &prediction->prefill[1];
    cr_expect_eq(p->tokens_per_s[NUMOE_LEVER_HIT], 0, "4096 tokens a pass have no room");
    for (enum numoe_lever l = NUMOE_LEVER_PASS; l < NUMOE_LEVER_CPU; l++)
        assert_near(p->tokens_per_s[l], prediction->prefill[0].tokens_per_s[l], 1e-9,
                    "2048 a pass");
    /* the CPUs alone do 65536 at once; better is 2048 a pass with the GPU */
    cr_expect_geq(p->tokens_per_s[NUMOE_LEVER_CPU],
                  prediction->prefill[0].tokens_per_s[NUMOE_LEVER_CPU]);
    numoe_prediction_free(prediction);
    /* no room for a pass of any length: CPUs alone, and no lever */
    small.memory_bytes = (uint64_t)two_layers;
    prediction = predict(machine, plan, &options);
    p = &prediction->prefill[1];
    for (enum numoe_lever l = 0; l < NUMOE_LEVER_CPU; l++)
        cr_expect_eq(p->tokens_per_s[l], 0, "%s", numoe_lever_name(l));
    cr_expect_eq(p->lever, NUMOE_LEVER_NONE);
    assert_near(p->tokens_per_s[NUMOE_LEVER_CPU],
                cell_of(prediction, NUMOE_WAY_CPU, 65536)->tokens_per_s, 1e-9, "CPUs");
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
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
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_predict_gpu gpus[3];
    const double layer = 256 * 13369344. / 1e9;
    struct numoe_prediction *prediction;
    FILE *file;
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
        options.gpus = gpus;
        options.gpu_count = (uint32_t)count;
        prediction = predict(machine, plan, &options);
        p = &prediction->passing;
        assert_near(p->alone_ms, layer / slowest * 1e3, 1e-9, "alone");
        assert_near(p->passed_ms, passed_ms(links[i], count, layer, 1e9), 1e-9, "passed on");
        assert_near(passed_ms(links[i], count, layer, p->most_gbs), p->passed_ms, 1e-9, "most");
        cr_expect_gt(passed_ms(links[i], count, layer, 0.99 * p->most_gbs), p->passed_ms);
        assert_near(passed_ms(links[i], count, layer, p->least_gbs), p->alone_ms, 1e-9, "least");
        assert_near(p->tokens, 256 * 2048 * 17 / 64., 1e-9, "tokens"); /* docs/architecture.md */
        numoe_prediction_free(prediction);
    }
    for (int alone = 0; alone < 2; alone++) { /* one GPU; two that keep everything */
        options.gpus = alone ? a10s : gpus;
        options.gpu_count = alone ? 1 : 2;
        gpus[0].memory_bytes = gpus[1].memory_bytes = (uint64_t)200 << 30;
        prediction = predict(machine, plan, &options);
        cr_expect(prediction->passing.alone_ms == 0 && prediction->passing.tokens == 0);
        file = tmpfile();
        numoe_prediction_print(prediction, file);
        text = read_back(file);
        cr_expect_null(strstr(text, "whole experts on each GPU"));
        free(text);
        numoe_prediction_free(prediction);
    }
    options.gpus = a10s;
    options.gpu_count = 2;
    prediction = predict(machine, plan, &options);
    file = tmpfile();
    numoe_prediction_print(prediction, file);
    text = read_back(file);
    cr_expect_not_null(strstr(text, "a layer takes 136.9 ms over each link"), "%s", text);
    cr_expect_not_null(strstr(text, "down to 68.45 ms: where copies between them carry 25 GB/s"));
    cr_expect_not_null(strstr(text, "down to 12.5 GB/s"));
    cr_expect_not_null(strstr(text, "up to 139264 tokens a pass"));
    free(text);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
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
    struct numoe_predict_gpu fast = a10s[0];
    struct numoe_prediction_cell c;

    fast.node = 0;
    fast.link_gbs = 100;
    c = predict_one(ONE_NODE, &v4_flash, 0, 40, 3, &fast, 1, NUMOE_WAY_STREAM_ONE, 1024);
    cr_assert_eq(c.bound, NUMOE_BOUND_HOST_MEMORY, "%s", c.why);
    assert_near(c.parts_ms[NUMOE_BOUND_HOST_MEMORY], 3422552064. / 40e9 * 1e3, 1e-6, "host");
}

Test(predict_gpu, a_model_that_fits_is_copied_once, .timeout = 30)
{
    struct numoe_predict_gpu large = a10s[0];
    struct numoe_prediction_cell c;

    large.node = 0;
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
    struct numoe_expert_shape tiny = {.layers = 1,
                                      .experts = 4,
                                      .slices = 4,
                                      .slice_bytes = 3264,
                                      .hidden = 32,
                                      .experts_per_token = 1};
    struct numoe_predict_gpu gpu = a10s[0];
    struct numoe_prediction_cell c;

    gpu.node = 0;
    c = predict_one(ONE_NODE, &tiny, 0, 40, 3, &gpu, 1, NUMOE_WAY_CACHE, 1);
    cr_assert_eq(c.bound, NUMOE_BOUND_LAUNCH, "%s", c.why);
    /* sharing with it would only cost */
    c = predict_one(ONE_NODE, &tiny, 0, 40, 3, &gpu, 1, NUMOE_WAY_SHARED, 1);
    cr_assert_eq(c.gpu_part, 0);
}

Test(predict_gpu, too_little_device_memory_is_said, .timeout = 30)
{
    struct numoe_predict_gpu small = a10s[0];
    struct numoe_prediction_cell c;

    small.node = 0;
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
    struct numoe_machine *machine = machine_of(ONE_NODE);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
        struct numoe_predict_gpu gpu = a10s[0];
        struct numoe_prediction *prediction;

        gpu.node = 0;
        snprintf(gpu.name, sizeof gpu.name, "%s", cases[i].name);
        options.gpus = &gpu;
        options.gpu_count = 1;
        prediction = predict(machine, plan, &options);
        cr_expect_float_eq(prediction->gpus[0].tflops, cases[i].tflops, 1e-9);
        cr_expect_eq(has_note(prediction->notes, prediction->note_count, "no code"), cases[i].old);
        numoe_prediction_free(prediction);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* Of a machine with fast and slow cores the slow ones are worth half, as in its shares. */
Test(predict_cpu, slow_cores_count_half, .timeout = 30)
{
    struct numoe_machine *machine = machine_of(DATA "fast-cores-last.xml");
    struct numoe_expert_shape tiny = v4_flash;
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction *prediction[2];
    struct numoe_plan_request request;
    double slow = 0, all = 0;

    tiny.layers = 1;
    tiny.experts = 8;
    request = request_of(&tiny);
    for (int even = 0; even < 2; even++) {
        struct numoe_plan *plan;

        for (uint32_t i = 0; even && i < machine->pu_count; i++)
            machine->pus[i].efficiency = 0;
        plan = plan_of(machine, &request);
        for (uint32_t w = 0; !even && w < plan->worker_count; w++) {
            all++;
            slow += machine->pus[plan->workers[w].pu].efficiency == 0;
        }
        prediction[even] = predict(machine, plan, &options);
        numoe_plan_free(plan);
    }
    cr_assert(slow > 0 && slow < all);
    for (uint32_t f = 0; f < prediction[0]->figure_count; f++)
        if (!strcmp(prediction[0]->figures[f].name, "int8 arithmetic")) {
            cr_expect_float_eq(prediction[0]->figures[f].value / prediction[1]->figures[f].value,
                               (all - slow / 2) / all, 1e-9);
            cr_expect_not_null(strstr(prediction[0]->figures[f].source, "counted half"));
        }
    numoe_prediction_free(prediction[0]);
    numoe_prediction_free(prediction[1]);
    numoe_machine_free(machine);
}

/* A machine with GPUs is not predicted as one without, and nobody told. */
Test(predict_gpu, those_that_are_left_out_are_counted, .timeout = 30)
{
    struct numoe_machine *machine = machine_of(DATA "epyc-7h12-2s-32n.xml");
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;

    for (uint32_t i = 0; i < machine->device_count; i++)
        if (!strcmp(machine->devices[i].name, "cuda1"))
            machine->devices[i].link_gbs = 0;
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, &options);
    cr_expect_eq(prediction->gpu_count, 1);
    cr_expect(has_note(prediction->notes, prediction->note_count,
                       "1 GPU of the machine is not predicted with"));
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(predict_gpu, sharing_balances_both_sides, .timeout = 30)
{
    struct numoe_predict_gpu gpu = a10s[0];
    struct numoe_prediction_cell cpu, alone, shared;

    gpu.node = 0;
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

Test(predict_all, more_of_anything_is_never_slower, .timeout = 120)
{
    struct numoe_expert_shape shape = v4_flash;

    shape.layers = 3;
    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        struct numoe_machine *machine = machine_of(machines[m]);
        struct numoe_plan_request request = request_of(&shape);
        struct numoe_plan *plan = plan_of(machine, &request);
        struct numoe_prediction *first = NULL, *last = NULL;
        struct numoe_predict_gpu gpus[4];
        double gbs[64];

        for (int i = 0; i < 4; i++) {
            gpus[i] = a10s[0];
            gpus[i].node = machine->nodes[0].os_index;
            gpus[i].link_gbs = 25. / (i + 1);
            gpus[i].memory_bytes = 9000000000u >> i;
        }
        for (double rate = 1; rate < 1000; rate *= 1.7) {
            struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
            struct numoe_prediction *now;

            for (uint32_t i = 0; i < 64; i++)
                gbs[i] = rate * (1 + i % 3);
            options.node_gbs = gbs;
            options.gpus = gpus;
            options.gpu_count = 2;
            now = predict(machine, plan, &options);
            check_prediction(now);
            if (last)
                assert_no_slower(last, now, "more bandwidth");
            if (first != last)
                numoe_prediction_free(last);
            last = now;
            first = first ? first : now;
        }
        numoe_prediction_free(first);
        first = NULL;
        for (uint32_t count = 1; count <= 4; count++) {
            struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
            struct numoe_prediction *now;

            options.gpus = gpus;
            options.gpu_count = count;
            now = predict(machine, plan, &options);
            check_prediction(now);
            if (first)
                assert_no_slower(first, now, "one more link");
            numoe_prediction_free(first);
            first = now;
        }
        for (int i = 0; i < 4; i++)
            gpus[i].link_gbs *= 2;
        {
            struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
            struct numoe_prediction *now;

            options.gpus = gpus;
            options.gpu_count = 4;
            now = predict(machine, plan, &options);
            assert_no_slower(first, now, "faster links");
            numoe_prediction_free(first);
            first = now;
            for (int i = 0; i < 4; i++)
                gpus[i].memory_bytes *= 3;
            now = predict(machine, plan, &options);
            assert_no_slower(first, now, "more device memory");
            numoe_prediction_free(first);
            first = now;
            options.ghz = 9;
            now = predict(machine, plan, &options);
            assert_no_slower(first, now, "faster cores");
            numoe_prediction_free(now);
        }
        numoe_prediction_free(first);
        numoe_prediction_free(last);
        numoe_plan_free(plan);
        numoe_machine_free(machine);
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
        struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
        struct numoe_plan_request request = request_of(&small);
        struct numoe_prediction *prediction;
        struct numoe_machine *machine;
        struct numoe_plan *plan = NULL;
        char path[1024];

        if (!strstr(entry->d_name, ".xml"))
            continue;
        snprintf(path, sizeof path, "%s/%s", NUMOE_RECORDED_TOPOLOGIES, entry->d_name);
        machine = machine_of(path);
        /* some have less memory than even this needs */
        if (!numoe_plan_create(machine, &request, &plan, NULL)) {
            prediction = predict(machine, plan, &options);
            check_prediction(prediction);
            numoe_prediction_free(prediction);
        }
        numoe_plan_free(plan);
        numoe_machine_free(machine);
    }
    closedir(folder);
}

Test(predict_all, what_is_no_question_is_refused, .timeout = 30)
{
    struct numoe_machine *machine = machine_of(ONE_NODE);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request), *empty;
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_prediction *prediction = NULL;
    struct numoe_predict_gpu gpu = a10s[0];
    uint32_t zero = 0;
    double gbs = -1;

    options.gpus = &gpu;
    options.gpu_count = 1;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "node 4"), "%s", error.message);
    gpu.node = 0;
    gpu.link_gbs = 0;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), -EINVAL);
    options.gpus = NULL;
    options.node_gbs = &gbs;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), -EINVAL);
    gbs = NAN;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), -EINVAL);
    options.node_gbs = NULL;
    options.tokens = &zero;
    options.token_count = 1;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), -EINVAL);
    options.tokens = NULL;
    options.isa = "mmx";
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), -EINVAL);
    options.isa = NULL;
    request.shape.layers = 0;
    empty = plan_of(machine, &request);
    cr_assert_eq(numoe_predict(machine, empty, &options, &prediction, &error), -EINVAL);
    numoe_plan_free(empty);
    cr_assert_null(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
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

/* ---- domains and reserved CPUs --------------------------------------------------------------- */

Test(predict_domains, are_regrouped_in_order_within_packages, .timeout = 60)
{
    static const uint32_t counts[] = {2, 4, 8, 16, 32, 6};

    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        struct numoe_machine *machine = machine_of(EPYC);
        uint32_t nodes[64] = {0};

        cr_assert_eq(numoe_machine_regroup(machine, counts[c], NULL), 0);
        cr_assert_eq(machine->domain_count, counts[c]);
        check_machine(machine);
        for (uint32_t i = 0; i < machine->node_count; i++) {
            nodes[machine->nodes[i].domain]++;
            cr_assert_eq(machine->nodes[i].domain / (counts[c] / 2), machine->nodes[i].package);
            cr_assert(!i || machine->nodes[i].domain >= machine->nodes[i - 1].domain);
        }
        for (uint32_t d = 0; d < counts[c]; d++)
            cr_assert(nodes[d] == 32 / counts[c] || nodes[d] == 32 / counts[c] + 1);
        numoe_machine_free(machine);
    }
}

Test(predict_domains, impossible_numbers_are_refused, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static const uint32_t counts[] = {0, 1, 3, 34, 64, UINT32_MAX};

    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        cr_assert_eq(numoe_machine_regroup(machine, counts[c], &error), -EINVAL, "%u", counts[c]);
        cr_assert_str_not_empty(error.message);
    }
    cr_assert_eq(machine->domain_count, 8);
    numoe_machine_free(machine);
}

Test(predict_reserve, cores_are_left_alone_with_all_threads, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    uint32_t reserved[] = {0, 4, 5, 6, 7};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan, *none = NULL;
    uint32_t all[256];

    request.reserved_cpus = reserved;
    request.reserved_count = 5;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->worker_count, 123);
    /* node 1 has no core left, and is used all the same */
    cr_assert_eq(plan->node_count, 32);
    cr_assert_eq(plan->nodes[1].worker_count, 0);
    cr_assert(plan->nodes[1].slice_count > 0);
    for (uint32_t i = 0; i < plan->worker_count; i++)
        for (uint32_t r = 0; r < 5; r++)
            cr_assert_neq(machine->pus[plan->workers[i].pu].core,
                          cpu_at(machine, reserved[r])->core);
    cr_assert(has_note(plan->notes, plan->note_count, "5 cores reserved"));
    numoe_plan_free(plan);

    reserved[0] = 256;
    cr_assert_eq(numoe_plan_create(machine, &request, &none, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "256"));
    for (uint32_t i = 0; i < 256; i++)
        all[i] = i;
    request.reserved_cpus = all;
    request.reserved_count = 256;
    cr_assert_eq(numoe_plan_create(machine, &request, &none, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "reserved"), "%s", error.message);
    numoe_machine_free(machine);
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
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction *prediction;
    FILE *file = tmpfile();
    json_t *root, *predicted;
    char *text;

    options.gpus = a10s;
    options.gpu_count = 2;
    prediction = predict(machine, plan, &options);
    cr_assert_eq(numoe_prediction_print_json(plan, prediction, file), 0);
    text = read_back(file);
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
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

static char *explained(const struct numoe_machine *machine, const struct numoe_plan *plan,
                       const char *what)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    FILE *file = tmpfile();
    int rc = numoe_plan_explain(machine, plan, what, file, &error);

    cr_assert_eq(rc, 0, "%s", error.message);
    return read_back(file);
}

Test(predict_explain, says_why_from_the_plan, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    static const char *const wrong[] = {
        "",           "node",        "node:",
        "node:x",     "node:32",     "node:-1",
        "worker:128", "worker:1x",   "expert:3",
        "expert:3.",  "expert:43.0", "expert:0.256",
        "expert:.1",  "cpu:1",       "node:99999999999999999999999"};
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *text = explained(machine, plan, "node:17");

    cr_assert_not_null(strstr(text, "node 17 holds 3.125 % of every expert: 2.00 of its 64"), "%s",
                       text);
    cr_assert_not_null(strstr(text, "nodes 16-19 share"), "%s", text);
    cr_assert_not_null(strstr(text, "4 workers, on CPUs 68-71"), "%s", text);
    free(text);
    text = explained(machine, plan, "worker:5");
    cr_assert_not_null(strstr(text, "CPU 5 "), "%s", text);
    cr_assert_not_null(strstr(text, "node 1 first"), "%s", text);
    free(text);
    text = explained(machine, plan, "expert:3.200");
    cr_assert_not_null(strstr(text, "node 31: slices 62-63"), "%s", text);
    free(text);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        FILE *file = tmpfile();

        cr_assert_eq(numoe_plan_explain(machine, plan, wrong[i], file, &error), -EINVAL, "%s",
                     wrong[i]);
        cr_assert_eq(ftell(file), 0);
        fclose(file);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(predict_explain, a_worker_of_no_package, .timeout = 60)
{
    struct numoe_machine *machine = machine_of("core:2 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan = plan_of(machine, &request);
    char *text = explained(machine, plan, "worker:1");

    cr_assert_not_null(strstr(text, "worker 1 runs on CPU 1 (core 1) and works on node 0 first."),
                       "%s", text);
    free(text);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(predict_explain, unused_nodes_have_their_reason, .timeout = 60)
{
    struct numoe_machine *machine =
        machine_of("pack:2 group:4 [numa(memory=64GB)] [numa(memory=16GB)] core:12 pu:2");
    struct numoe_plan_request request = request_of(&v4_flash);
    struct numoe_plan *plan = plan_of(machine, &request);
    uint32_t unused = 0;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        char what[32], *text;

        snprintf(what, sizeof what, "node:%u", machine->nodes[i].os_index);
        text = explained(machine, plan, what);
        unused += strstr(text, "holds nothing") != NULL;
        free(text);
    }
    cr_assert_eq(unused, machine->node_count - plan->node_count);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}
