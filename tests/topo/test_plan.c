/* What goes where: shares, boundaries, workers, refusals. */
#include "plan_shares.h"
#include "predict.h"
#include "topo/topo_fixture.h"

#include <errno.h>
#include <jansson.h>
#include <sched.h>
#include <time.h>

static int plan_error(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                      struct numoe_error *error)
{
    struct numoe_plan *plan = NULL;
    int rc = numoe_plan_create(machine, request, &plan, error);

    cr_assert(rc < 0);
    cr_assert_null(plan);
    cr_assert_eq(error->code, rc);
    return rc;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* ---- shares --------------------------------------------------------------------------------- */

Test(plan_shares, split_keeps_total_limits_and_proportion)
{
    uint64_t seed = 0x2545f4914f6cdd1du;

    for (int round = 0; round < 3000; round++) {
        enum { MOST = 128 };
        uint64_t weight[MOST], limit[MOST], share[MOST], cumulative[MOST + 1];
        uint64_t total = next_random(&seed) % (round % 2 ? 1000 : 10000000), given = 0;
        plan_u128 room = 0;
        uint32_t count = 1 + (uint32_t)(next_random(&seed) % MOST);
        bool fits;

        for (uint32_t i = 0; i < count; i++) {
            weight[i] = next_random(&seed) % (round % 3 ? 100 : 1u << 30);
            limit[i] = round % 5 ? (uint64_t)1 << 60 : next_random(&seed) % (3 * total / count + 2);
            room += limit[i];
        }
        fits = plan_split(total, count, weight, limit, share);
        cr_assert_eq(fits, room >= total);
        if (!fits)
            continue;
        for (uint32_t i = 0; i < count; i++) {
            cr_assert(share[i] <= limit[i]);
            given += share[i];
        }
        cr_assert_eq(given, total);
        for (uint32_t i = 0; i < count; i++)
            for (uint32_t j = 0; j < count; j++)
                /* one that could take more has no less than its weight says against another */
                if (share[i] < limit[i] && weight[i])
                    cr_assert((plan_u128)(share[i] + 1) * weight[j] + weight[j] >=
                                  (plan_u128)(share[j] ? share[j] - 1 : 0) * weight[i],
                              "%u has %lu of weight %lu, %u has %lu of %lu", i,
                              (unsigned long)share[i], (unsigned long)weight[i], j,
                              (unsigned long)share[j], (unsigned long)weight[j]);
        if (!total)
            continue;
        plan_accumulate(total, count, share, cumulative);
        for (uint32_t i = 0; i < count; i++)
            cr_assert_eq(plan_scale(total, cumulative[i + 1]) - plan_scale(total, cumulative[i]),
                         share[i]);
    }
}

Test(plan_shares, steps_are_coprime)
{
    for (uint64_t experts = 1; experts < 2000; experts++) {
        uint64_t a = experts, b = plan_expert_step(experts);

        cr_assert(b >= 1 && (b < experts || experts == 1));
        while (b) {
            uint64_t rest = a % b;

            a = b;
            b = rest;
        }
        cr_assert_eq(a, 1, "%lu", (unsigned long)experts);
    }
}

/* ---- boundaries ----------------------------------------------------------------------------- */

/* A plan of given shares, for boundaries alone. */
static struct numoe_plan *bare_plan(const struct numoe_expert_shape *shape, uint32_t nodes,
                                    uint64_t *seed)
{
    struct numoe_plan *plan = calloc(1, sizeof *plan);
    uint64_t total = shape->layers * shape->experts * shape->slices;
    uint64_t *weight = calloc(nodes, sizeof *weight), *limit = calloc(nodes, sizeof *limit);
    uint64_t *share = calloc(nodes, sizeof *share);

    plan->shape = *shape;
    plan->range = (struct numoe_range){0, shape->slices, 0, shape->experts};
    plan->node_count = nodes;
    plan->nodes = calloc(nodes, sizeof *plan->nodes);
    plan->form = NUMOE_FORM_EVERY_NODE;
    plan->shards = calloc(1, sizeof *plan->shards);
    plan->shards[0] = (struct numoe_plan_shard){0, nodes, 0, shape->layers * shape->experts};
    plan->shard_count = 1;
    plan->cumulative = calloc(nodes + 1, sizeof *plan->cumulative);
    plan->expert_step = plan_expert_step(shape->experts);
    for (uint32_t i = 0; i < nodes; i++) {
        weight[i] = next_random(seed) % 1000;
        limit[i] = (uint64_t)1 << 60;
    }
    cr_assert(plan_split(total, nodes, weight, limit, share));
    plan_accumulate(total, nodes, share, plan->cumulative);
    for (uint32_t i = 0; i < nodes; i++) {
        plan->nodes[i].slice_count = share[i];
        plan->nodes[i].weight =
            (double)(plan->cumulative[i + 1] - plan->cumulative[i]) / (double)PLAN_SHARE_ONE;
        plan->nodes[i].planned_bytes = share[i] * shape->slice_bytes;
    }
    free(weight);
    free(limit);
    free(share);
    return plan;
}

Test(plan_boundary, random_weights_cover_every_slice_once, .timeout = 120)
{
    static const uint32_t node_counts[] = {1, 2, 3, 5, 8, 13, 32, 33, 64, 127, 128};
    static const uint64_t slice_counts[] = {1, 2, 5, 24, 64, 90, 96, 191};
    uint64_t seed = 0x9e3779b97f4a7c15u;

    for (size_t n = 0; n < sizeof node_counts / sizeof node_counts[0]; n++)
        for (size_t s = 0; s < sizeof slice_counts / sizeof slice_counts[0]; s++)
            for (int round = 0; round < 6; round++) {
                struct numoe_expert_shape shape = {.layers = 1 + next_random(&seed) % 5,
                                                   .experts = 1 + next_random(&seed) % 40,
                                                   .slices = slice_counts[s],
                                                   .slice_bytes = 1088};
                struct numoe_plan *plan = bare_plan(&shape, node_counts[n], &seed);

                check_boundaries(plan);
                numoe_plan_free(plan);
            }
}

Test(plan_boundary, numbers_are_the_same_everywhere)
{
    /* from first principles: 5 slices over 3 equal nodes, 2 layers of 4 experts; 4 -> step 3 or 1
     */
    struct numoe_machine *machine = machine_of("numa:3(memory=1GB) core:2 pu:1");
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){2, 4, 5, 1088, 32, 1, 0});
    struct numoe_plan *plan;

    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    check_boundaries(plan);
    /* 40 slices: 14, 13, 13; C(1) = 0.35, 5 C(1) = 1.75: one more from phi = 0.25 on */
    cr_assert_eq(plan->nodes[0].slice_count, 14);
    for (uint64_t l = 0; l < 2; l++)
        for (uint64_t e = 0; e < 4; e++) {
            uint64_t eighths = (e + l) * plan->expert_step % 4 * 2 + l;

            cr_assert_eq(numoe_plan_boundary(plan, l, e, 1), eighths >= 2 ? 2 : 1);
        }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_boundary, neighbours_differ)
{
    struct numoe_machine *machine = machine_of("numa:32(memory=16GB) core:4 pu:1");
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){2, 64, 24, 104448, 2048, 8, 0});
    struct numoe_plan *plan;
    uint32_t idle = 0;

    /* 24 slices over 32 nodes: a node idle for one expert is not idle for the next few */
    plan = plan_of(machine, &request);
    for (uint64_t e = 0; e + 8 <= 64; e++)
        for (uint32_t n = 0; n < 32; n++) {
            uint64_t held = 0;

            for (uint64_t k = 0; k < 8; k++)
                held += numoe_plan_boundary(plan, 0, e + k, n + 1) -
                        numoe_plan_boundary(plan, 0, e + k, n);
            idle += held == 0;
        }
    cr_assert_eq(idle, 0);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* ---- fitting -------------------------------------------------------------------------------- */

static const char a1[] = "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2";

Test(plan_fit, v4_flash_on_thirty_two_small_nodes)
{
    struct numoe_machine *machine = machine_of(a1);
    struct numoe_plan_request request = on_every_node(&v4_flash);
    struct numoe_plan *plan;

    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->node_count, 32);
    cr_assert_eq(plan->worker_count, 128);
    for (uint32_t n = 0; n < 32; n++) {
        cr_assert_eq(plan->nodes[n].worker_count, 4);
        cr_assert_eq(plan->nodes[n].lanes, 16);
        cr_assert_eq(plan->nodes[n].planned_bytes, 43ull * 256 * 2 * 208896);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_fit, one_of_the_nodes_is_refused_with_the_shortfall)
{
    static const uint32_t zero[] = {0};
    struct numoe_machine *machine = machine_of(a1);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    request.shape = v4_flash;
    request.nodes = zero;
    request.node_count = 1;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    cr_assert(strstr(error.message, "do not fit"));
    cr_assert(strstr(error.message, "short by 122.41 GiB"), "%s", error.message);
    cr_assert(strstr(error.message, "nodes 1-31"), "%s", error.message);
    cr_assert_str_eq(error.where, "node 0");
    numoe_machine_free(machine);
}

/* What is said would fit does; nodes that are not enough are not offered. */
Test(plan_fit, a_refusal_says_what_would_fit)
{
    static const uint32_t zero[] = {0};
    struct numoe_machine *machine = machine_of(a1);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    request.shape = v4_flash;
    request.nodes = zero;
    request.node_count = 1;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    cr_expect(strstr(error.message, "it would fit with nodes 1-31 too, which would add 454.19 GiB"),
              "%s", error.message);
    cr_expect(strstr(error.message, "4 of the 43 layers"), "%s", error.message);
    request.shape.layers = 4;
    numoe_plan_free(plan_of(machine, &request));

    request.shape.layers = 400;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    cr_expect_not(strstr(error.message, "nodes 1-31"), "%s", error.message);
    cr_expect(strstr(error.message, "4 of the 400 layers"), "%s", error.message);

    request = (struct numoe_plan_request)NUMOE_PLAN_REQUEST_INIT;
    request.shape = v4_flash;
    request.keep_free_bytes = (uint64_t)20 << 30;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    cr_expect(strstr(error.message, "with at most 10872 MiB of each node kept free"), "%s",
              error.message);
    cr_expect_not(strstr(error.message, "more memory"), "%s", error.message);
    request.keep_free_bytes = 10872ull << 20;
    numoe_plan_free(plan_of(machine, &request));
    request.keep_free_bytes += 1 << 20;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    numoe_machine_free(machine);
}

/* What is kept free is said of each node, not of the first. */
Test(plan_fit, what_is_kept_free_is_said, .timeout = 30)
{
    struct numoe_machine *machine = machine_of("pack:2 [numa(memory=64GiB)] core:4 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    static const struct {
        uint64_t keep;
        const char *words;
    } cases[] = {{0, "81.92 MiB to 256.00 MiB of each node kept free (2 %, 48 to 256 MiB)"},
                 {1, "nothing kept free of any node"},
                 {(uint64_t)1 << 30, "1.00 GiB of each node kept free"}};

    machine->nodes[1].capacity_bytes = machine->nodes[1].free_bytes = (uint64_t)4 << 30;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct numoe_plan *plan;

        request.keep_free_bytes = cases[i].keep;
        plan = plan_of(machine, &request);
        cr_expect(has_note(plan->notes, plan->note_count, cases[i].words), "%s", cases[i].words);
        numoe_plan_free(plan);
    }
    numoe_machine_free(machine);
}

/* Populating keeps 32 MiB of a node and of the cgroup's limit, and loading needs some more: what
 * fits is planned by that. */
Test(plan_fit, what_populating_keeps_is_not_promised, .timeout = 30)
{
    struct numoe_machine *machine = machine_of("[numa(memory=256MiB)] core:4 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;

    request.shape = (struct numoe_expert_shape){1, 1, 64, 64ull << 20, 4096, 1, 0};
    request.shape.slice_bytes /= 64; /* 64 MiB in all */
    for (request.keep_free_bytes = 0; request.keep_free_bytes < 2; request.keep_free_bytes++) {
        machine->live = true;
        machine->nodes[0].free_bytes = 112ull << 20;
        machine->cgroup_bytes = UINT64_MAX;
        plan = plan_of(machine, &request);
        cr_expect_eq(plan->nodes[0].available_bytes, 64ull << 20);
        numoe_plan_free(plan);
        machine->nodes[0].free_bytes--;
        cr_expect_eq(plan_error(machine, &request, &error), -ENOSPC);
        machine->nodes[0].free_bytes = 200ull << 20;
        machine->cgroup_bytes = 112ull << 20;
        numoe_plan_free(plan_of(machine, &request));
        machine->cgroup_bytes--;
        cr_expect_eq(plan_error(machine, &request, &error), -ENOSPC);
        cr_expect(strstr(error.message, "cgroup"), "%s", error.message);
    }
    numoe_machine_free(machine);
}

/* Bandwidths that a request gives go before all that is known. */
Test(plan_weights, follow_bandwidth_that_is_given)
{
    struct numoe_machine *machine = machine_of("pack:4 [numa(memory=64GB)] core:4 pu:1");
    struct numoe_predict_options predict = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_plan_request request = on_every_node(&v4_flash);
    double gbs[] = {10, 20, 30, 40};
    struct numoe_plan *plan;

    request.predict = &predict;
    predict.node_gbs = gbs;
    plan = plan_of(machine, &request);
    for (uint32_t n = 0; n < 4; n++)
        cr_expect_float_eq(plan->nodes[n].weight, 0.1 * (n + 1), 1e-4);
    cr_expect(has_note(plan->notes, plan->note_count, "of nodes as given"));
    numoe_plan_free(plan);

    /* of some nodes only: no node has less for not being named */
    gbs[3] = 0;
    plan = plan_of(machine, &request);
    for (uint32_t n = 0; n < 4; n++)
        cr_expect_float_eq(plan->nodes[n].weight, 0.25, 1e-4);
    cr_expect(has_note(plan->notes, plan->note_count, "given of some nodes only"));
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_fit, half_of_the_nodes_are_enough)
{
    uint32_t upper[16];
    struct numoe_machine *machine = machine_of(a1);
    struct numoe_plan_request request = on_every_node(&v4_flash);
    struct numoe_plan *plan;

    for (uint32_t i = 0; i < 16; i++)
        upper[i] = 16 + i;
    request.nodes = upper;
    request.node_count = 16;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->node_count, 16);
    cr_assert_eq(plan->worker_count, 64);
    for (uint32_t n = 0; n < 16; n++) {
        cr_assert_eq(plan->nodes[n].os_index, 16 + n);
        cr_assert_eq(plan->nodes[n].planned_bytes, 43ull * 256 * 4 * 208896);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_fit, orphan_cores_and_two_nodes)
{
    struct numoe_machine *machine = machine_of(DATA "two-of-four-nodes.xml");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;

    /* 100 GB, then 140 GB on 2 x 64 GB */
    request.shape = (struct numoe_expert_shape){100, 10, 10, 10000000, 4096, 6, 0};
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->node_count, 2);
    cr_assert_eq(plan->worker_count, 24);
    cr_assert_eq(plan->nodes[0].worker_count, 12);
    cr_assert_eq(plan->nodes[0].os_index, 1);
    numoe_plan_free(plan);
    request.shape.layers = 140;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    numoe_machine_free(machine);
}

Test(plan_fit, weights_are_sharded_not_copied)
{
    struct numoe_machine *machine = machine_of("numa:4(memory=256GB) core:16 pu:1");
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){60, 100, 62, 1008064, 7168, 8, 0});
    struct numoe_plan *plan;

    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    for (uint32_t n = 0; n < 4; n++)
        cr_assert_float_eq((double)plan->nodes[n].planned_bytes, 93.75e9, 1e9);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_fit, cpus_of_three_nodes_use_the_memory_of_three)
{
    uint32_t cpus[96];
    struct numoe_machine *machine = machine_of("pack:2 group:3 [numa(memory=120GB)] core:32 pu:1");
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){60, 100, 50, 1000000, 7168, 8, 0}); /* 300 GB */
    struct numoe_plan *plan;

    request.cpus = cpus;
    request.cpu_count = 96;
    for (uint32_t half = 0; half < 2; half++) {
        for (uint32_t i = 0; i < 96; i++)
            cpus[i] = half * 96 + i;
        plan = plan_of(machine, &request);
        check_plan(machine, plan);
        cr_assert_eq(plan->node_count, 3);
        cr_assert_eq(plan->worker_count, 96);
        for (uint32_t n = 0; n < 3; n++) {
            cr_assert_eq(plan->nodes[n].os_index, half * 3 + n);
            cr_assert_eq(plan->nodes[n].worker_count, 32);
            cr_assert_float_eq(plan->nodes[n].weight, 1.0 / 3, 1e-4);
        }
        numoe_plan_free(plan);
    }
    numoe_machine_free(machine);
}

Test(plan_fit, a_small_node_is_filled_and_the_rest_goes_elsewhere)
{
    static const uint32_t both[] = {0, 1};
    struct numoe_machine *machine =
        machine_of("pack:1 [numa(memory=64GB)] [numa(memory=16GB)] core:8 pu:1");
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){50, 100, 15, 1000000, 4096, 8, 1000});
    struct numoe_plan *plan;

    request.nodes = both;
    request.node_count = 2;
    request.keep_free_bytes = 1000000000;
    plan = plan_of(machine, &request); /* 75 GB in 63 + 15 */
    check_plan(machine, plan);
    check_boundaries(plan);
    cr_assert(plan->nodes[1].planned_bytes > 14990000000ull);
    cr_assert(has_note(plan->notes, plan->note_count, "full"));
    cr_assert(has_note(plan->notes, plan->note_count, "named"));
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_fit, the_last_slice_fits_exactly)
{
    struct numoe_machine *machine = machine_of("numa:3(memory=1000000) core:2 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;
    uint64_t room;

    request.keep_free_bytes = 1;
    request.shape = (struct numoe_expert_shape){1, 1, 1, 1088, 32, 1, 0};
    plan = plan_of(machine, &request);
    room = plan->nodes[0].available_bytes / 1088 * 3;
    numoe_plan_free(plan);
    request.shape.slices = room;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    numoe_plan_free(plan);
    request.shape.slices = room + 1;
    cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
    cr_assert(strstr(error.message, "short by"));
    numoe_machine_free(machine);
}

Test(plan_fit, sizes_that_overflow_are_refused)
{
    struct numoe_machine *machine = machine_of(a1);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    request.shape = (struct numoe_expert_shape){1ull << 40, 1ull << 40, 1, 1088, 32, 1, 0};
    cr_assert_eq(plan_error(machine, &request, &error), -EOVERFLOW);
    request.shape = (struct numoe_expert_shape){1, 1, UINT64_MAX, UINT64_MAX, 32, 1, 0};
    cr_assert_eq(plan_error(machine, &request, &error), -EOVERFLOW);
    request.shape = (struct numoe_expert_shape){1, 1, 1, 1088, 32, 1, UINT64_MAX};
    cr_assert_eq(plan_error(machine, &request, &error), -EOVERFLOW);
    request.shape = (struct numoe_expert_shape){1, 0, 1, 1088, 32, 1, 0};
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    numoe_machine_free(machine);
}

Test(plan_fit, what_does_not_divide_is_spread)
{
    static const struct {
        const char *machine;
        uint64_t experts, slices;
    } cases[] = {{"numa:8(memory=64GB) core:4 pu:1", 160, 80},
                 {"numa:8(memory=64GB) core:4 pu:1", 2, 5},
                 {"numa:8(memory=64GB) core:4 pu:1", 30, 64},
                 {"numa:32(memory=64GB) core:4 pu:1", 3, 64},
                 {"numa:32(memory=64GB) core:4 pu:1", 3, 1}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct numoe_machine *machine = machine_of(cases[i].machine);
        struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
        struct numoe_plan *plan;
        uint64_t least = UINT64_MAX, most = 0;

        request.shape = (struct numoe_expert_shape){
            1, cases[i].experts, cases[i].slices, 313344, 6144, 2, 24576};
        plan = plan_of(machine, &request);
        check_plan(machine, plan);
        check_boundaries(plan);
        for (uint32_t n = 0; n < plan->node_count; n++) {
            least = plan->nodes[n].slice_count < least ? plan->nodes[n].slice_count : least;
            most = plan->nodes[n].slice_count > most ? plan->nodes[n].slice_count : most;
        }
        cr_assert(most - least <= 1);
        numoe_plan_free(plan);
        numoe_machine_free(machine);
    }
}

Test(plan_fit, a_large_model_on_many_nodes_is_quick)
{
    struct numoe_machine *machine = machine_of("pack:2 numa:64(memory=64GB) core:4 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct timespec begin, end;
    struct numoe_plan *plan;
    double ms;

    request.shape = (struct numoe_expert_shape){93, 896, 64, 365568, 7168, 8, 28672};
    clock_gettime(CLOCK_MONOTONIC, &begin);
    plan = plan_of(machine, &request);
    clock_gettime(CLOCK_MONOTONIC, &end);
    ms = (double)(end.tv_sec - begin.tv_sec) * 1e3 + (double)(end.tv_nsec - begin.tv_nsec) / 1e6;
    check_plan(machine, plan);
    cr_assert_eq(plan->node_count, 128);
    cr_assert(ms < 500, "%.1f ms", ms);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_fit, expert_bytes_are_counted_where_slice_zero_lies)
{
    struct numoe_machine *machine = machine_of("numa:7(memory=1GB) core:2 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    for (uint64_t slices = 1; slices < 20; slices++) {
        struct numoe_plan *plan;

        request.shape = (struct numoe_expert_shape){3, 11, slices, 1088, 32, 1, 5000};
        plan = plan_of(machine, &request);
        check_plan(machine, plan);
        check_boundaries(plan);
        numoe_plan_free(plan);
    }
    numoe_machine_free(machine);
}

/* ---- weights -------------------------------------------------------------------------------- */

Test(plan_weights, a_domain_counts_once)
{
    static const uint32_t nodes[] = {0, 1, 2, 3, 4};
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){1, 64, 64, 208896, 4096, 6, 0});
    struct numoe_plan *plan;

    /* a whole quadrant and one node of another: half by domains, 4 to 1 by cores */
    request.nodes = nodes;
    request.node_count = 5;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_float_eq(plan->nodes[0].weight, (1.0 / 8 + 1.0 / 5) / 2, 0.001);
    cr_assert_float_eq(plan->nodes[4].weight, (1.0 / 2 + 1.0 / 5) / 2, 0.001);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* ---- nodes ---------------------------------------------------------------------------------- */

Test(plan_nodes, hbm_is_used_only_when_named)
{
    static const uint32_t fast[] = {1, 3};
    struct numoe_machine *machine =
        machine_of("pack:2 group:4 [numa(memory=64GB)] [numa(memory=16GB)] core:12 pu:2");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan = plan_of(machine, &request);

    cr_assert_eq(plan->node_count, 8);
    cr_assert_eq(plan->worker_count, 96);
    for (uint32_t n = 0; n < 8; n++) {
        cr_assert_eq(plan->nodes[n].os_index, 2 * n);
        cr_assert_eq(plan->nodes[n].worker_count, 12);
    }
    cr_assert(has_note(plan->notes, plan->note_count, "nodes 1,3,5,7,9,11,13,15 not used"));
    numoe_plan_free(plan);
    request.nodes = fast;
    request.node_count = 2;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->node_count, 2);
    cr_assert_eq(plan->worker_count, 24, "the cores beside them");
    cr_assert_eq(plan->nodes[1].worker_count, 12);
    cr_assert(has_note(plan->notes, plan->note_count, "node 3 (HBM) is used because"));
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* Where bandwidth is not known, HBM beside DRAM has more than its part by number. */
Test(plan_weights, hbm_beside_dram_has_three_times_the_share)
{
    static const uint32_t both[] = {0, 1, 2, 3};
    struct numoe_machine *machine =
        machine_of("pack:1 group:2 [numa(memory=64GB)] [numa(memory=64GB)] core:12 pu:2");
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){10, 64, 64, 208896, 4096, 6, 0});
    struct numoe_plan *plan;

    for (uint32_t n = 0; n < 4; n++)
        machine->nodes[n].kind = n % 2 ? NUMOE_NODE_HBM : NUMOE_NODE_DRAM;
    request.nodes = both;
    request.node_count = 4;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_expect(has_note(plan->notes, plan->note_count, "HBM taken for three times"));
    for (uint32_t n = 0; n < 4; n++)
        cr_expect_eq(plan->nodes[n].slice_count, n % 2 ? 10u * 64 * 24 : 10u * 64 * 8,
                     "node %u: %llu", n, (unsigned long long)plan->nodes[n].slice_count);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_nodes, holes_are_named_by_os_index)
{
    struct numoe_machine *machine =
        machine_of("pack:4 [numa(memory=64GB indexes=0,1,16,17)] core:4 pu:1");
    static const uint32_t absent[] = {2}, last[] = {17};
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;

    request.nodes = absent;
    request.node_count = 1;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert_str_eq(error.where, "node 2");
    request.nodes = last;
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->nodes[0].os_index, 17);
    cr_assert_eq(plan->workers[0].os_cpu, 12);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_nodes, gpu_disallowed_and_absent_nodes_are_refused)
{
    static const uint32_t gpu[] = {250}, disallowed[] = {2};
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = machine_of(DATA "cpuless-gpu-and-far-nodes.xml");
    struct numoe_plan *plan = plan_of(machine, &request);

    cr_assert_eq(plan->node_count, 2);
    cr_assert(has_note(plan->notes, plan->note_count, "node 250 not used: GPU"));
    cr_assert(has_note(plan->notes, plan->note_count, "40-41 not used"));
    numoe_plan_free(plan);
    request.nodes = gpu;
    request.node_count = 1;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert(strstr(error.message, "GPU"));
    numoe_machine_free(machine);
    machine = machine_of(DATA "allowed-sets-disagree.xml");
    request.nodes = disallowed;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert(strstr(error.message, "node 2 is not allowed"));
    numoe_machine_free(machine);
    machine = machine_of("numa:3(memory=1GB) core:2 pu:1");
    machine->live = true;
    machine->nodes[2].capacity_bytes = machine->nodes[2].free_bytes = 0;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert(strstr(error.message, "node 2 has no memory"), "%s", error.message);
    numoe_machine_free(machine);
}

/* ---- workers -------------------------------------------------------------------------------- */

Test(plan_workers, pinned_by_os_index_first_threads_only)
{
    struct numoe_machine *machine =
        machine_of("pack:2 [numa(memory=128GB)] core:32 pu:2(indexes=2*64:64*1)");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan = plan_of(machine, &request);

    cr_assert_eq(plan->worker_count, 64);
    for (uint32_t w = 0; w < 64; w++) {
        cr_assert_eq(plan->workers[w].os_cpu, w);
        cr_assert_eq(plan->workers[w].plan_node, w / 32);
    }
    numoe_plan_free(plan);
    request.smt = true;
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->worker_count, 128);
    cr_assert_eq(plan->nodes[1].first_worker, 64);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_workers, uneven_numbers_differ_by_one_a_node)
{
    static const uint32_t wanted[] = {1, 2, 3, 41, 42, 43, 47, 48};
    struct numoe_machine *machine = machine_of("pack:2 [numa(memory=64GB)] core:24 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        struct numoe_plan *plan;
        int difference;

        request.workers = wanted[i];
        plan = plan_of(machine, &request);
        check_plan(machine, plan);
        cr_assert_eq(plan->worker_count, wanted[i]);
        difference = (int)plan->nodes[0].worker_count - (int)plan->nodes[1].worker_count;
        cr_assert(abs(difference) <= 1);
        for (uint32_t a = 0; a < plan->worker_count; a++)
            for (uint32_t b = 0; b < a; b++)
                cr_assert_neq(plan->workers[a].os_cpu, plan->workers[b].os_cpu);
        cr_assert_float_eq(plan->nodes[0].weight, 0.5, 1e-9, "shares are the node's, not theirs");
        numoe_plan_free(plan);
    }
    numoe_machine_free(machine);
}

Test(plan_workers, few_workers_go_to_different_domains)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan;
    uint32_t seen = 0;

    request.workers = 8;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    for (uint32_t w = 0; w < 8; w++)
        seen |= 1u << plan->workers[w].domain;
    cr_assert_eq(seen, 0xff);
    for (uint32_t n = 0; n < 32; n++)
        cr_assert(plan->nodes[n].lanes >= 1);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_workers, faster_cores_first)
{
    struct numoe_machine *machine = machine_of(DATA "fast-cores-last.xml");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan;

    request.workers = 4;
    plan = plan_of(machine, &request);
    for (uint32_t w = 0; w < 4; w++)
        cr_assert_eq(plan->workers[w].os_cpu, 4 + w);
    cr_assert(has_note(plan->notes, plan->note_count, "4 workers on the fastest"));
    numoe_plan_free(plan);
    request.workers = 0;
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->worker_count, 8);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_workers, more_than_cpus_share_them)
{
    static const uint32_t sixteen[] = {16};
    struct numoe_machine *machine = machine_of("pack:1 [numa(memory=16GB)] core:2 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;
    uint32_t on_first = 0;

    request.workers = 64;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->worker_count, 64);
    for (uint32_t w = 0; w < 64; w++)
        on_first += plan->workers[w].os_cpu == 0;
    cr_assert_eq(on_first, 32);
    cr_assert(has_note(plan->notes, plan->note_count, "64 workers as asked share 2 CPUs"));
    numoe_plan_free(plan);
    request.workers = 4097;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    numoe_machine_free(machine);

    machine = machine_of(a1);
    request.nodes = sixteen;
    request.node_count = 1;
    request.workers = 28;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->worker_count, 28);
    for (uint32_t w = 0; w < 28; w++)
        cr_assert_eq(cpu_at(machine, plan->workers[w].os_cpu)->node, 16);
    cr_assert(has_note(plan->notes, plan->note_count, "28 workers as asked share 8 CPUs"));
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_workers, cpus_outside_the_allowed_set_are_refused_by_name)
{
    static const uint32_t disallowed[] = {0, 1}, absent[] = {77}, fine[] = {3, 0};
    struct numoe_machine *machine = machine_of(DATA "allowed-sets-disagree.xml");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;

    request.cpus = disallowed;
    request.cpu_count = 2;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert_str_eq(error.where, "CPU 1");
    request.cpus = absent;
    request.cpu_count = 1;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert(strstr(error.message, "no CPU 77"));
    request.cpus = fine;
    request.cpu_count = 2;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->worker_count, 2);
    cr_assert_eq(plan->node_count, 2);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_workers, reserved_cores_are_left_alone_with_all_threads, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = on_every_node(&v4_flash);
    uint32_t reserved[] = {0, 4, 5, 6, 7};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;
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
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "256"));
    for (uint32_t i = 0; i < 256; i++)
        all[i] = i;
    request.reserved_cpus = all;
    request.reserved_count = 256;
    cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "reserved"), "%s", error.message);
    numoe_machine_free(machine);
}

Test(plan_workers, quota_and_affinity_of_this_machine)
{
    struct numoe_machine *machine = machine_of("live");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *plan;
    uint32_t allowed = 0;

    for (uint32_t i = 0; i < machine->pu_count; i++)
        allowed += machine->pus[i].allowed;
    machine->cpu_quota = 0.5;
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->worker_count, 1);
    numoe_plan_free(plan);
    request.workers = allowed;
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->worker_count, allowed, "asked explicitly");
    numoe_plan_free(plan);
    request.workers = 0;
    machine->cpu_quota = 0;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    numoe_plan_free(plan);
    machine->cgroup_bytes = 1000000;
    request.shape = (struct numoe_expert_shape){1, 1, 1000, 1088, 32, 1, 0};
    {
        struct numoe_error error = NUMOE_ERROR_INIT;

        cr_assert_eq(plan_error(machine, &request, &error), -ENOSPC);
        cr_assert(strstr(error.message, "cgroup"), "%s", error.message);
    }
    numoe_machine_free(machine);
}

/* As in a container of one CPU: its number counts, not its place. */
/* One worker a core, but not more than whole CPUs of the quota. */
Test(plan_workers, as_many_as_cores_and_quota_allow)
{
    static const struct {
        double quota;
        uint32_t workers;
    } cases[] = {{0, 8},    {0.3, 1}, {1, 1},    {1.99, 1}, {2, 2},
                 {2.99, 2}, {7.5, 7}, {8.01, 8}, {100, 8}};
    struct numoe_machine *machine = machine_of("pack:2 [numa(memory=16GB)] core:4 pu:2");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct numoe_plan *plan;

        machine->cpu_quota = cases[c].quota;
        plan = plan_of(machine, &request);
        cr_assert_eq(plan->worker_count, cases[c].workers, "quota %g", cases[c].quota);
        numoe_plan_free(plan);
    }
    numoe_machine_free(machine);
}

Test(plan_workers, a_mask_of_one_cpu_gives_one_worker_there)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;
    struct numoe_plan *plan;
    uint32_t first = CPU_SETSIZE, last = 0;
    cpu_set_t set;

    cr_assert_eq(sched_getaffinity(0, sizeof set, &set), 0);
    for (uint32_t i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &set)) {
            first = first == CPU_SETSIZE ? i : first;
            last = i;
        }
    CPU_ZERO(&set);
    CPU_SET(last, &set);
    cr_assert_eq(sched_setaffinity(0, sizeof set, &set), 0);
    machine = machine_of("live");
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->worker_count, 1);
    cr_assert_eq(plan->workers[0].os_cpu, last);
    numoe_plan_free(plan);
    if (first != last) {
        request.cpus = &first;
        request.cpu_count = 1;
        cr_assert_eq(plan_error(machine, &request, &error), -EINVAL);
        cr_assert(strstr(error.message, "not allowed"));
    }
    numoe_machine_free(machine);
}

Test(plan_workers, do_not_depend_on_the_model)
{
    static const char *const machines[] = {a1, EPYC, DATA "two-of-four-nodes.xml",
                                           DATA "hbm-numbered-last.xml"};

    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++)
        for (uint32_t workers = 0; workers < 200; workers = workers * 3 + 1) {
            struct numoe_machine *machine = machine_of(machines[m]);
            struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
            struct numoe_plan *none, *some;

            request.workers = workers;
            none = plan_of(machine, &request);
            request.shape = (struct numoe_expert_shape){2, 7, 13, 208896, 4096, 6, 100};
            some = plan_of(machine, &request);
            cr_assert_eq(none->worker_count, some->worker_count);
            cr_assert_eq(none->node_count, some->node_count);
            for (uint32_t w = 0; w < none->worker_count; w++) {
                cr_assert_eq(none->workers[w].os_cpu, some->workers[w].os_cpu);
                cr_assert_eq(none->workers[w].plan_node, some->workers[w].plan_node);
            }
            numoe_plan_free(none);
            numoe_plan_free(some);
            numoe_machine_free(machine);
        }
}

/* ---- measured bandwidth --------------------------------------------------------------------- */

static struct numoe_plan *measured_plan(const struct numoe_machine *machine)
{
    struct numoe_plan_request request =
        on_every_node(&(struct numoe_expert_shape){4, 16, 64, 208896, 4096, 6, 0});
    struct numoe_plan *plan;

    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    check_boundaries(plan);
    return plan;
}

Test(plan_measured, shares_follow_nodes_read_all_at_once)
{
    struct numoe_machine *machine = machine_of("numa:4(memory=8GB) core:4 pu:1");
    struct numoe_plan *plan;

    machine->nodes[0].bandwidth_mbs = 1; /* what the firmware says comes after */
    machine->together_mbs = calloc(4, sizeof *machine->together_mbs);
    for (uint32_t i = 0; i < 4; i++)
        machine->together_mbs[i] = i == 3 ? 20000 : 40000;
    plan = measured_plan(machine);
    cr_assert_float_eq(plan->nodes[0].weight, 2 / 7.0, 1e-3);
    cr_assert_float_eq(plan->nodes[3].weight, 1 / 7.0, 1e-3);
    cr_assert(has_note(plan->notes, plan->note_count, "as measured, all at once"));
    numoe_plan_free(plan);
    /* noise is no reason for different shares */
    for (uint32_t i = 0; i < 4; i++)
        machine->together_mbs[i] = 40000 + 300 * i;
    plan = measured_plan(machine);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(plan->nodes[i].slice_count, 1024);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_measured, pairs_count_where_a_node_was_not_read_with_all)
{
    struct numoe_machine *machine = machine_of("pack:2 group:1 [numa(memory=8GB)] core:4 pu:1");
    struct numoe_plan *plan;

    cr_assert_eq(machine->node_count, 2);
    machine->together_mbs = calloc(2, sizeof *machine->together_mbs);
    machine->together_mbs[0] = 1;
    machine->pairs = calloc(4, sizeof *machine->pairs);
    machine->pair_count = 4;
    for (uint32_t i = 0; i < 4; i++)
        machine->pairs[i] = (struct numoe_pair_speed){
            i / 2, i % 2, i / 2 == i % 2 ? (i ? 10000 : 30000) : 5000, 100};
    plan = measured_plan(machine);
    cr_assert_float_eq(plan->nodes[0].weight, 0.75, 1e-3);
    cr_assert(has_note(plan->notes, plan->note_count, "as measured, each alone"));
    numoe_plan_free(plan);
    machine->pair_count = 1;
    machine->nodes[0].bandwidth_mbs = 10000;
    machine->nodes[1].bandwidth_mbs = 20000;
    plan = measured_plan(machine);
    cr_assert_float_eq(plan->nodes[1].weight, 2 / 3.0, 1e-3);
    cr_assert(has_note(plan->notes, plan->note_count, "as the firmware gives it"));
    numoe_plan_free(plan);
    machine->nodes[1].bandwidth_mbs = 0;
    plan = measured_plan(machine);
    cr_assert(has_note(plan->notes, plan->note_count, "bandwidth is not known"));
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* ---- printing ------------------------------------------------------------------------------- */

Test(plan_print, text_and_json_say_what_each_node_holds)
{
    struct numoe_machine *machine = machine_of(a1);
    struct numoe_plan_request request = on_every_node(&v4_flash);
    struct numoe_plan *plan;
    json_error_t where;
    json_t *root, *node;
    char *text;

    plan = plan_of(machine, &request);
    text = text_of(numoe_plan_print(plan, out));
    cr_assert(strstr(text, "total"));
    cr_assert(strstr(text, "4.28 GiB"));
    cr_assert(strstr(text, "128,130,132,134"));
    free(text);
    text = text_of(cr_assert_eq(numoe_plan_print_json(plan, out), 0));
    root = json_loads(text, 0, &where);
    cr_assert(root, "%s", where.text);
    cr_assert_eq(json_array_size(json_object_get(root, "nodes")), 32);
    cr_assert_eq(json_array_size(json_object_get(root, "workers")), 128);
    cr_assert_eq(json_integer_value(json_object_get(root, "total_bytes")),
                 (json_int_t)(43ull * 256 * 64 * 208896));
    node = json_array_get(json_object_get(root, "nodes"), 16);
    cr_assert_eq(json_integer_value(json_object_get(node, "os_index")), 16);
    cr_assert_eq(json_integer_value(json_object_get(node, "capacity_bytes")), 16000000000);
    cr_assert_eq(json_integer_value(json_object_get(node, "planned_bytes")),
                 (json_int_t)(43ull * 256 * 2 * 208896));
    cr_assert_eq(json_integer_value(json_object_get(node, "workers")), 4);
    json_decref(root);
    free(text);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}
