/* Order statistics, random routing, and measuring a layer against its reference. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

Test(bench_quantile, interpolates_between_neighbours)
{
    double values[] = {4, 1, 3, 2}, one[] = {7};

    cr_assert_eq(numoe_bench_quantile(values, 4, 0), 1);
    cr_assert_eq(numoe_bench_quantile(values, 4, 1), 4);
    cr_assert_eq(numoe_bench_quantile(values, 4, 0.5), 2.5);
    cr_assert_eq(numoe_bench_quantile(one, 1, 0.9), 7);
    cr_assert(isnan(numoe_bench_quantile(NULL, 0, 0.5)));
}

Test(bench_route, ids_are_distinct_in_range_and_spread, .timeout = 10)
{
    enum { TOKENS = 4096, TOP_K = 6, EXPERTS = 8 };
    struct numoe_bench_random random = {3};
    int32_t *ids = calloc(TOKENS * TOP_K, sizeof *ids);
    float *weights = calloc(TOKENS * TOP_K, sizeof *weights);
    unsigned counts[EXPERTS] = {0};

    numoe_bench_route(&random, TOKENS, TOP_K, EXPERTS, ids, weights);
    for (int t = 0; t < TOKENS; t++) {
        unsigned seen = 0;
        double sum = 0;

        for (int j = 0; j < TOP_K; j++) {
            int32_t id = ids[t * TOP_K + j];

            cr_assert(id >= 0 && id < EXPERTS);
            cr_assert(!(seen & 1u << id));
            seen |= 1u << id;
            counts[id]++;
            cr_assert_gt(weights[t * TOP_K + j], 0);
            sum += (double)weights[t * TOP_K + j];
        }
        cr_assert_float_eq(sum, 1, 1e-5);
    }
    /* Each expert is in 3/4 of the tokens; five standard deviations are 139. */
    for (int e = 0; e < EXPERTS; e++)
        cr_assert(abs((int)counts[e] - TOKENS * TOP_K / EXPERTS) < 139);
    free(ids);
    free(weights);
}

Test(bench_route, all_experts_of_a_full_row, .timeout = 10)
{
    struct numoe_bench_random random = {4};
    int32_t ids[5];
    float weights[5];
    unsigned seen = 0;

    numoe_bench_route(&random, 1, 5, 5, ids, weights);
    for (int j = 0; j < 5; j++)
        seen |= 1u << ids[j];
    cr_assert_eq(seen, 31);
}

/* A small model with biases and awkward widths, filled and measured. */
struct small {
    struct numoe *context;
    struct numoe_model *model;
    struct numoe_bench *bench;
};

static void small_open(struct small *small, enum numoe_arithmetic arithmetic, uint32_t workers)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    options.workers = workers;
    desc.layers = 2;
    desc.experts = 5;
    desc.experts_per_token = 3;
    desc.hidden = 352;
    desc.intermediate = 160;
    desc.bias = true;
    desc.activation =
        (struct numoe_activation){.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f};
    desc.arithmetic = arithmetic;
    cr_assert_eq(numoe_open(&options, &small->context, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_model_create(small->context, &desc, &small->model, &error), 0, "%s",
                 error.message);
    cr_assert_eq(numoe_bench_create(small->context, numoe_model_kernels(small->model)->isa,
                                    &small->bench, &error),
                 0, "%s", error.message);
    cr_assert_eq(numoe_bench_fill(small->model, 11, NULL, &error), 0, "%s", error.message);
}

static void small_close(struct small *small)
{
    numoe_bench_destroy(small->bench);
    numoe_model_destroy(small->model);
    numoe_close(small->context);
}

static struct numoe_bench_cell small_measure(struct small *small, uint64_t tokens)
{
    struct numoe_bench_request request = {
        .layer = 1, .tokens = tokens, .top_k = 3, .seed = 5, .repeat = 3, .check_tokens = 4};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_bench_cell cell;

    cr_assert_eq(numoe_bench_layer(small->bench, small->model, &request, &cell, &error), 0, "%s",
                 error.message);
    return cell;
}

Test(bench_layer, agrees_with_float64_in_both_modes, .timeout = 120)
{
    for (int arithmetic = NUMOE_FAST; arithmetic <= NUMOE_EXACT; arithmetic++) {
        struct small small;
        struct numoe_bench_cell cell;

        small_open(&small, arithmetic, 0);
        cell = small_measure(&small, 9);
        cr_assert_eq(cell.repetitions, 3);
        cr_assert_eq(cell.pairs, 27);
        cr_assert(cell.ms_min <= cell.ms && cell.ms <= cell.ms_p90);
        cr_assert_gt(cell.read_gbs, 0);
        cr_assert_gt(cell.bandwidth_fraction, 0);
        cr_assert_gt(cell.rel_l2, 1e-6);
        cr_assert_lt(cell.rel_l2, arithmetic == NUMOE_FAST ? 1.5e-2 : 3e-3);
        small_close(&small);
    }
}

Test(bench_check, sees_outputs_that_are_off_and_those_that_are_no_numbers, .timeout = 120)
{
    enum { TOKENS = 3, HIDDEN = 352 };
    static uint16_t x[TOKENS * HIDDEN];
    static float out[TOKENS * HIDDEN];
    const int32_t ids[TOKENS * 2] = {0, 1, 4, 2, 3, 3};
    const float weights[TOKENS * 2] = {0.5f, 0.5f, 1, 0.25f, -1, 2};
    struct numoe_bench_outputs outputs = {0, TOKENS, 2, x, ids, weights, out};
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    double before, after;
    struct small small;

    small_open(&small, NUMOE_EXACT, 2);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = (uint16_t)(0x3F00 + i * 37 % 256 + (i % 3 == 0) * 0x8000); /* 0.5 to 2, signed */
    batch.tokens = TOKENS;
    batch.top_k = 2;
    batch.x = x;
    batch.x_type = NUMOE_BF16;
    batch.ids = ids;
    batch.weights = weights;
    batch.out = out;
    batch.out_type = NUMOE_F32;
    cr_assert_eq(numoe_forward(small.model, 0, &batch, NULL, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_bench_check(small.model, &outputs, TOKENS, &before, &error), 0);
    cr_assert_lt(before, 3e-3);

    for (int i = 0; i < HIDDEN; i++)
        out[HIDDEN + i] *= 1.5f;
    cr_assert_eq(numoe_bench_check(small.model, &outputs, TOKENS, &after, &error), 0);
    cr_assert_gt(after, 0.01);
    out[2 * HIDDEN + 7] = NAN;
    cr_assert_eq(numoe_bench_check(small.model, &outputs, TOKENS, &after, &error), 0);
    cr_assert(isinf(after));
    small_close(&small);
}

Test(bench_fill, the_same_seed_gives_the_same_experts_whatever_the_workers, .timeout = 120)
{
    struct small one, two;
    uint64_t first, count, first_two, count_two;

    small_open(&one, NUMOE_FAST, 1);
    small_open(&two, NUMOE_FAST, 2);
    for (uint64_t expert = 0; expert < 5; expert++) {
        const void *a = numoe_model_run(one.model, 1, expert, 0, &first, &count);
        const void *b = numoe_model_run(two.model, 1, expert, 0, &first_two, &count_two);

        cr_assert_eq(first, first_two);
        cr_assert_eq(count, count_two);
        cr_assert_arr_eq(a, b, count * numoe_model_shape(one.model)->bytes);
        if (expert) {
            const void *other = numoe_model_run(one.model, 1, 0, 0, &first, &count);

            cr_assert_arr_neq(a, other, count * numoe_model_shape(one.model)->bytes);
        }
    }
    small_close(&one);
    small_close(&two);
}

Test(bench_digest, is_fnv_1a)
{
    cr_assert_eq(numoe_bench_digest(NUMOE_BENCH_DIGEST_INIT, "", 0), UINT64_C(0xcbf29ce484222325));
    cr_assert_eq(numoe_bench_digest(NUMOE_BENCH_DIGEST_INIT, "a", 1), UINT64_C(0xaf63dc4c8601ec8c));
    cr_assert_eq(
        numoe_bench_digest(numoe_bench_digest(NUMOE_BENCH_DIGEST_INIT, "foo", 3), "bar", 3),
        UINT64_C(0x85944171f73967e8));
}

Test(bench_layer, once_is_the_first_of_several, .timeout = 120)
{
    struct numoe_bench_request request = {
        .layer = 1, .tokens = 9, .top_k = 3, .seed = 5, .check_tokens = 4};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_bench_cell timed, once;
    struct small small;

    small_open(&small, NUMOE_EXACT, 2);
    timed = small_measure(&small, 9);
    cr_assert_eq(numoe_bench_layer(NULL, small.model, &request, &once, &error), 0, "%s",
                 error.message);
    cr_assert_eq(once.repetitions, 1);
    cr_assert_eq(once.pairs, 27);
    cr_assert_gt(once.ms, 0);
    cr_assert(isnan(once.bandwidth_fraction));
    cr_assert(isnan(once.ops_fraction));
    cr_assert_lt(once.rel_l2, 3e-3);
    cr_assert_eq(once.digest, timed.digest);
    request.seed++;
    cr_assert_eq(numoe_bench_layer(NULL, small.model, &request, &once, &error), 0);
    cr_assert_neq(once.digest, timed.digest);
    small_close(&small);
}

/* A buffer of equal parts, touched by workers where they run, must not overflow their nodes. */
Test(bench_budget, the_node_that_fills_first_limits_all)
{
    const uint64_t gib = (uint64_t)1 << 30;
    const uint32_t one = 2;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;
    struct numoe_plan *all, *alone;

    cr_assert_eq(numoe_machine_load("numa:4(memory=4GiB) core:2 pu:1", &machine, &error), 0, "%s",
                 error.message);
    cr_assert_eq(numoe_plan_create(machine, &request, &all, &error), 0, "%s", error.message);
    request.nodes = &one;
    request.node_count = 1;
    cr_assert_eq(numoe_plan_create(machine, &request, &alone, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_bench_budget(machine, NULL), 4 * gib);
    cr_assert_eq(numoe_bench_budget(machine, all), 4 * gib);
    cr_assert_eq(numoe_bench_budget(machine, alone), gib);
    machine->nodes[1].free_bytes = gib;
    cr_assert_eq(numoe_bench_budget(machine, NULL), 13 * gib / 4);
    cr_assert_eq(numoe_bench_budget(machine, all), gib);
    cr_assert_eq(numoe_bench_budget(machine, alone), gib);
    machine->cgroup_bytes = gib / 2;
    cr_assert_eq(numoe_bench_budget(machine, alone), gib / 8);
    numoe_plan_free(alone);
    numoe_plan_free(all);
    numoe_machine_free(machine);
}

Test(bench_layer, more_experts_a_token_than_there_are_is_refused, .timeout = 120)
{
    struct numoe_bench_request request = {.tokens = 1, .top_k = 6, .repeat = 1};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_bench_cell cell;
    struct small small;

    small_open(&small, NUMOE_FAST, 1);
    cr_assert_eq(numoe_bench_layer(small.bench, small.model, &request, &cell, &error), -22);
    cr_assert_neq(error.message[0], 0);
    small_close(&small);
}

/* ---- routing ---- */

enum { ROUTED = 2000, OF = 32, CHOICES = 4 };

static void count_ids(enum numoe_bench_routing routing, unsigned count[2][OF])
{
    struct numoe_bench_random random = {.state = 11};
    struct numoe_bench_router *router = numoe_bench_router_create(routing, OF, &random);
    const uint64_t k = numoe_bench_router_top_k(router, CHOICES);
    int32_t *ids = malloc(ROUTED * CHOICES * sizeof *ids);
    float *weights = malloc(ROUTED * CHOICES * sizeof *weights);

    cr_assert_eq(k, routing == NUMOE_ROUTING_ONE ? 1 : CHOICES);
    for (int call = 0; call < 2; call++) {
        memset(count[call], 0, sizeof count[call]);
        numoe_bench_router_route(router, &random, ROUTED, CHOICES, ids, weights);
        for (uint64_t t = 0; t < ROUTED; t++) {
            float sum = 0;

            for (uint64_t j = 0; j < k; j++) {
                const int32_t id = ids[t * k + j];

                cr_assert(id >= 0 && id < OF);
                for (uint64_t i = 0; i < j; i++)
                    cr_assert_neq(ids[t * k + i], id);
                count[call][id]++;
                sum += weights[t * k + j];
            }
            cr_assert_float_eq(sum, 1, 1e-5);
        }
    }
    numoe_bench_router_destroy(router);
    free(ids);
    free(weights);
}

static unsigned most_of(const unsigned count[OF])
{
    unsigned best = 0;

    for (unsigned e = 1; e < OF; e++)
        if (count[e] > count[best])
            best = e;
    return best;
}

Test(bench_routing, kinds_are_what_they_say)
{
    unsigned count[2][OF], most, least = ROUTED;

    count_ids(NUMOE_ROUTING_UNIFORM, count);
    most = most_of(count[0]);
    cr_expect_leq(count[0][most], 1.4 * ROUTED * CHOICES / OF);
    count_ids(NUMOE_ROUTING_ZIPF, count);
    most = most_of(count[0]);
    for (unsigned e = 0; e < OF; e++)
        least = count[0][e] < least ? count[0][e] : least;
    cr_expect_gt(count[0][most], 10 * least);
    cr_expect_eq(most_of(count[1]), most, "always the same ones");
    count_ids(NUMOE_ROUTING_SHIFTING, count);
    cr_expect_neq(most_of(count[0]), most_of(count[1]));
    count_ids(NUMOE_ROUTING_SAME, count);
    for (unsigned e = 0; e < OF; e++)
        cr_expect(count[0][e] == 0 || count[0][e] == ROUTED, "expert %u: %u", e, count[0][e]);
    count_ids(NUMOE_ROUTING_ONE, count);
    cr_expect_eq(count[0][most_of(count[0])], ROUTED);
    for (int r = NUMOE_ROUTING_UNIFORM; r <= NUMOE_ROUTING_ONE; r++)
        cr_expect_eq(
            numoe_bench_routing_by_name(numoe_bench_routing_name((enum numoe_bench_routing)r)), r);
    cr_expect_eq(numoe_bench_routing_by_name("zipfian"), -1);
}

/* Overcommit would promise it, and the process be killed. */
Test(bench_layer, tokens_that_have_no_room_are_an_error, .timeout = 120)
{
    struct numoe_bench_request request = {.layer = 1, .top_k = 3, .seed = 5};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    struct numoe_bench_cell cell;
    struct small small;

    if (numoe_memory_room() == UINT64_MAX)
        cr_skip_test("what memory is left is not known here");
    small_open(&small, NUMOE_EXACT, 2);
    numoe_model_info(small.model, &info);
    request.tokens = numoe_memory_room() / (6 * info.desc.hidden) * 2;
    cr_assert_eq(numoe_bench_layer(NULL, small.model, &request, &cell, &error), -ENOMEM);
    cr_expect_not_null(strstr(error.message, " tokens take "), "%s", error.message);
    cr_expect_not_null(strstr(error.message, " of memory are left"), "%s", error.message);
    small_close(&small);
}
