/* Forms of sharding: where experts go, what fits, what a form costs and which is chosen. */
#include "predict.h"
#include "predict_box.h"
#include "topo/topo_fixture.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static struct numoe_plan_request request_of(const struct numoe_expert_shape *shape,
                                            enum numoe_form form, uint32_t groups)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = *shape;
    request.form = form;
    request.groups = groups;
    return request;
}

static int refused(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                   struct numoe_error *error)
{
    struct numoe_plan *plan = NULL;
    int rc = numoe_plan_create(machine, request, &plan, error);

    cr_assert(rc < 0);
    cr_assert_null(plan);
    cr_assert_eq(error->code, rc);
    return rc;
}

/* ---- placement ------------------------------------------------------------------------------- */

static const struct numoe_expert_shape small_shapes[] = {
    {3, 16, 8, 1088, 64, 2, 0},  {1, 7, 5, 1088, 64, 3, 256}, {5, 64, 24, 2176, 64, 8, 128},
    {2, 3, 90, 1088, 96, 2, 64}, {4, 1, 1, 1088, 32, 1, 0},
};
enum { SHAPES = sizeof small_shapes / sizeof small_shapes[0] };

/* Groups of nodes that hold some of an expert. */
static uint32_t holders(const struct numoe_plan *plan, uint64_t layer, uint64_t expert,
                        const uint32_t *group)
{
    uint32_t count = 0;

    for (uint32_t g = 0; g < plan->node_count; g++) {
        bool holds = false;

        for (uint32_t n = 0; n < plan->node_count; n++)
            holds |= group[n] == g && numoe_plan_boundary(plan, layer, expert, n + 1) >
                                          numoe_plan_boundary(plan, layer, expert, n);
        count += holds;
    }
    return count;
}

static void check_form(const struct numoe_machine *machine, const struct numoe_expert_shape *shape,
                       enum numoe_form form, uint32_t groups, const struct numoe_range *range)
{
    struct numoe_plan_request request = request_of(shape, form, groups);
    struct numoe_plan *plan;
    struct numoe_plan_reach reach[NUMOE_REACHES];
    uint32_t *group;

    request.range = *range;
    plan = plan_of(machine, &request);
    group = calloc(plan->node_count, sizeof *group);
    cr_assert_eq(plan->form, form);
    cr_assert(!groups || plan->shard_count == groups);
    check_plan(machine, plan);
    check_boundaries(plan);
    numoe_plan_reaches(plan, reach);
    for (enum numoe_reach r = NUMOE_REACH_DOMAIN; r < NUMOE_REACHES; r++) {
        numoe_plan_groups(plan, r, group);
        for (uint64_t l = 0; l < shape->layers; l++)
            for (uint64_t e = 0; e < shape->experts; e++)
                cr_assert(holders(plan, l, e, group) <= reach[r].rows);
        cr_assert(form != NUMOE_FORM_EXPERTS || reach[r].rows == 1);
    }
    free(group);
    numoe_plan_free(plan);
}

/* The whole, and some of the slices of some of the experts. */
static void check_forms(const struct numoe_machine *machine)
{
    for (size_t s = 0; s < 2 * SHAPES; s++) {
        const struct numoe_expert_shape *shape = &small_shapes[s / 2];
        struct numoe_range range = {0};

        if (s % 2) {
            range.first_slice = shape->slices / 3;
            range.end_slice = shape->slices / 3 + shape->slices / 2 + 1;
            range.end_slice = range.end_slice < shape->slices ? range.end_slice : 0;
            range.first_expert = shape->experts / 4;
        }
        check_form(machine, shape, NUMOE_FORM_EVERY_NODE, 0, &range);
        check_form(machine, shape, NUMOE_FORM_EXPERTS, 0, &range);
        for (uint32_t groups = 1; groups <= machine->node_count; groups++)
            check_form(machine, shape, NUMOE_FORM_GROUPS, groups, &range);
    }
}

Test(forms_place, every_slice_once_on_any_machine, .timeout = 120)
{
    static const char *const machines[] = {"numa:1(memory=1GB) core:2 pu:1",
                                           "numa:7(memory=1GB) core:2 pu:1",
                                           "pack:2 group:3 [numa(memory=1GB)] core:2 pu:1", EPYC};

    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        struct numoe_machine *machine = machine_of(machines[m]);

        check_forms(machine);
        numoe_machine_free(machine);
    }
}

Test(forms_place, shares_follow_bandwidth, .timeout = 60)
{
    struct numoe_machine *machine = machine_of("numa:5(memory=1GB) core:2 pu:1");
    struct numoe_expert_shape shape = {4, 1000, 8, 1088, 64, 2, 0};
    struct numoe_plan_request request = request_of(&shape, NUMOE_FORM_EXPERTS, 0);
    uint64_t seed = 1;
    struct numoe_plan *plan;

    machine->together_mbs = calloc(5, sizeof *machine->together_mbs);
    for (uint32_t i = 0; i < 5; i++)
        machine->together_mbs[i] = i == 2 ? 10000 : 30000;
    plan = plan_of(machine, &request);
    for (uint32_t n = 0; n < 5; n++)
        cr_assert_float_eq(plan->nodes[n].weight, n == 2 ? 1 / 13.0 : 3 / 13.0, 1e-3);
    numoe_plan_free(plan);
    for (int round = 0; round < 30; round++) {
        for (uint32_t i = 0; i < 5; i++)
            machine->together_mbs[i] = 1 + next_random(&seed) % 100000;
        check_forms(machine);
    }
    numoe_machine_free(machine);
}

/* A group's nodes need not stand together. */
Test(forms_place, groups_of_nodes_that_are_apart, .timeout = 60)
{
    struct numoe_machine *machine = machine_of("numa:8(memory=1GB) core:2 pu:1");
    struct numoe_plan_request request = request_of(&small_shapes[2], NUMOE_FORM_GROUPS, 0);
    struct numoe_plan *plan;

    for (uint32_t i = 0; i < 8; i++)
        machine->nodes[i].domain = i % 3;
    check_forms(machine);
    plan = plan_of(machine, &request);
    check_boundaries(plan);
    cr_assert_eq(plan->shard_count, 3);
    for (uint32_t n = 3; n < 8; n++)
        cr_assert_eq(plan->nodes[n].shard, plan->nodes[n - 3].shard);
    cr_assert_eq(plan->shards[1].first_node, 1);
    cr_assert_eq(plan->shards[1].end_node, 8);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(forms_place, numbers_are_the_same_everywhere)
{
    /* 8 places of 4 experts in 2 layers, two to each of 4 nodes; 4 -> step 3 or 1 */
    struct numoe_machine *machine = machine_of("numa:4(memory=1GB) core:2 pu:1");
    struct numoe_expert_shape shape = {2, 4, 5, 1088, 32, 1, 0};
    struct numoe_plan_request request = request_of(&shape, NUMOE_FORM_EXPERTS, 0);
    struct numoe_plan *plan = plan_of(machine, &request);

    for (uint64_t l = 0; l < 2; l++)
        for (uint64_t e = 0; e < 4; e++) {
            uint64_t holder = ((e + l) * plan->expert_step % 4 * 2 + l) / 2;

            for (uint32_t n = 0; n <= 4; n++)
                cr_assert_eq(numoe_plan_boundary(plan, l, e, n), n > holder ? 5 : 0);
        }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* What many tokens hit often in one layer is somewhere else in the next. */
Test(forms_place, neighbours_and_layers_differ)
{
    struct numoe_machine *machine = machine_of("numa:8(memory=16GB) core:4 pu:1");
    struct numoe_expert_shape shape = {8, 256, 64, 1088, 2048, 8, 0};
    struct numoe_plan_request request = request_of(&shape, NUMOE_FORM_EXPERTS, 0);
    struct numoe_plan *plan = plan_of(machine, &request);

    for (int across = 0; across < 2; across++) {
        uint32_t used[8] = {0}, different = 0;

        for (uint64_t i = 0; i < 8; i++)
            for (uint32_t n = 0; n < 8; n++)
                used[n] += numoe_plan_boundary(plan, across ? i : 0, across ? 5 : i, n + 1) >
                           numoe_plan_boundary(plan, across ? i : 0, across ? 5 : i, n);
        for (uint32_t n = 0; n < 8; n++)
            different += used[n] > 0;
        cr_assert(different >= 5, "%u of 8 nodes", different);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* ---- dealing --------------------------------------------------------------------------------- */

Test(forms_deal, groups_are_whole_domains_or_within_one, .timeout = 60)
{
    static const char *const machines[] = {"pack:2 group:3 [numa(memory=1GB)] core:2 pu:1",
                                           "numa:7(memory=1GB) core:2 pu:1", EPYC};
    uint64_t seed = 3;

    for (int round = 0; round < 40; round++) {
        struct numoe_machine *machine =
            machine_of(machines[round % (sizeof machines / sizeof machines[0])]);
        struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
        uint32_t domains = 0, *group = calloc(machine->node_count, sizeof *group);
        struct numoe_plan *plan;

        for (uint32_t i = 0; round > 2 && i < machine->node_count; i++)
            machine->nodes[i].domain = (uint32_t)next_random(&seed) % machine->domain_count;
        plan = plan_of(machine, &request);
        for (uint32_t d = 0; d < machine->domain_count; d++) {
            bool used = false;

            for (uint32_t i = 0; i < machine->node_count; i++)
                used |= machine->nodes[i].domain == d;
            domains += used;
        }
        for (uint32_t groups = 1; groups <= plan->node_count; groups++) {
            uint32_t least = UINT32_MAX, most = 0;

            cr_assert_eq(numoe_plan_deal(plan, groups, group), 0);
            for (uint32_t g = 0; g < groups; g++) {
                uint32_t nodes = 0;

                for (uint32_t n = 0; n < plan->node_count; n++)
                    nodes += group[n] == g;
                least = nodes < least ? nodes : least;
                most = nodes > most ? nodes : most;
            }
            cr_assert(least > 0, "%u groups", groups);
            cr_assert(round > 2 || groups > domains || domains % groups || least == most);
            for (uint32_t a = 0; a < plan->node_count; a++)
                for (uint32_t b = 0; b < a; b++) {
                    bool one_domain = machine->nodes[plan->nodes[a].node].domain ==
                                      machine->nodes[plan->nodes[b].node].domain;

                    cr_assert(groups > domains ? group[a] != group[b] || one_domain
                                               : group[a] == group[b] || !one_domain);
                }
        }
        cr_assert_eq(numoe_plan_deal(plan, 0, group), -EINVAL);
        cr_assert_eq(numoe_plan_deal(plan, plan->node_count + 1, group), -EINVAL);
        numoe_plan_free(plan);
        numoe_machine_free(machine);
        free(group);
    }
}

/* ---- fitting --------------------------------------------------------------------------------- */

/* A machine of three nodes that have room for so many bytes each. */
static struct numoe_machine *machine_with_room(uint64_t a, uint64_t b, uint64_t c)
{
    struct numoe_machine *machine = machine_of("numa:3(memory=1GB) core:2 pu:1");
    uint64_t room[] = {a, b, c};

    for (uint32_t n = 0; n < 3; n++)
        machine->nodes[n].capacity_bytes = machine->nodes[n].free_bytes = room[n] + 1;
    return machine;
}

Test(forms_fit, as_many_whole_experts_as_there_is_room_for, .timeout = 60)
{
    /* slices of 1000 bytes, 4 an expert: room for 7.5, 3.25 and 9.75 experts, so 19 whole ones */
    struct numoe_machine *machine = machine_with_room(30000, 13000, 39999);
    struct numoe_expert_shape shape = {1, 19, 4, 1000, 64, 2, 0};
    struct numoe_plan_request request = request_of(&shape, NUMOE_FORM_EXPERTS, 0);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;

    request.keep_free_bytes = 1;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    check_boundaries(plan);
    cr_assert_eq(plan->nodes[0].slice_count, 28);
    cr_assert_eq(plan->nodes[1].slice_count, 12);
    cr_assert_eq(plan->nodes[2].slice_count, 36);
    cr_assert(has_note(plan->notes, plan->note_count, "form: whole experts: as asked"));
    numoe_plan_free(plan);

    request.shape.experts = 20;
    cr_assert_eq(refused(machine, &request, &error), -ENOSPC);
    cr_assert_not_null(strstr(error.message, "room for 19 of 20 whole experts, short by 1"), "%s",
                       error.message);

    /* 20 fit when they may be cut (30 + 13 + 39 slices), and nobody asked otherwise */
    request.form = NUMOE_FORM_AUTO;
    plan = plan_of(machine, &request);
    check_plan(machine, plan);
    cr_assert_eq(plan->form, NUMOE_FORM_EVERY_NODE);
    for (uint32_t i = 0; i < plan->form_count; i++)
        if (plan->forms[i].form == NUMOE_FORM_EXPERTS) {
            cr_assert(!plan->forms[i].fits && !plan->forms[i].chosen);
            cr_assert_not_null(strstr(plan->forms[i].reason, "does not fit"));
            cr_assert_eq(i, plan->form_count - 1, "what does not fit comes last");
        }
    numoe_plan_free(plan);

    request.form = NUMOE_FORM_EXPERTS;
    request.shape.experts = 21;
    cr_assert_eq(refused(machine, &request, &error), -ENOSPC);
    cr_assert_not_null(strstr(error.message, "short by"), "%s", error.message);
    numoe_machine_free(machine);
}

/* By trying: the most experts that fit whole is what each node holds on its own, added up. */
Test(forms_fit, refusals_are_exact, .timeout = 60)
{
    uint64_t seed = 11;

    for (int round = 0; round < 300; round++) {
        uint64_t slices = 1 + next_random(&seed) % 6, bytes = 64 * (1 + next_random(&seed) % 9);
        uint64_t extra = round % 2 ? next_random(&seed) % 500 : 0, fit = 0, room[3];
        struct numoe_machine *machine;
        struct numoe_error error = NUMOE_ERROR_INIT;

        for (int n = 0; n < 3; n++) {
            room[n] = next_random(&seed) % (20 * (slices * bytes + extra));
            fit += room[n] / (slices * bytes + extra);
        }
        machine = machine_with_room(room[0], room[1], room[2]);
        for (uint64_t experts = fit ? fit - 1 : 0; experts <= fit + 1; experts++) {
            struct numoe_expert_shape shape = {1, experts, slices, bytes, 64, 1, extra};
            struct numoe_plan_request request = request_of(&shape, NUMOE_FORM_EXPERTS, 0);

            request.keep_free_bytes = 1;
            if (!experts)
                continue;
            if (experts <= fit) {
                struct numoe_plan *plan = plan_of(machine, &request);

                check_plan(machine, plan);
                check_boundaries(plan);
                numoe_plan_free(plan);
            } else {
                cr_assert_eq(refused(machine, &request, &error), -ENOSPC, "%s", error.message);
                cr_assert_not_null(strstr(error.message, "short by"), "%s", error.message);
            }
        }
        numoe_machine_free(machine);
    }
}

Test(forms_fit, requests_that_cannot_be_are_refused)
{
    struct numoe_machine *machine = machine_of("pack:2 l3:2 [numa(memory=1GB)] core:2 pu:1");
    struct numoe_machine *one = machine_of("numa:1(memory=1GB) core:2 pu:1");
    struct numoe_plan_request request = request_of(&small_shapes[0], NUMOE_FORM_ROWS, 0);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan;

    cr_assert_eq(refused(machine, &request, &error), -ENOTSUP);
    cr_assert_not_null(strstr(error.message, "does not execute"), "%s", error.message);
    request.form = NUMOE_FORM_GROUPS;
    request.groups = 5;
    cr_assert_eq(refused(machine, &request, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "4 are used"), "%s", error.message);
    request.form = NUMOE_FORM_AUTO;
    request.groups = 2;
    cr_assert_eq(refused(machine, &request, &error), -EINVAL);
    request.groups = 0;
    request.form = (enum numoe_form)17;
    cr_assert_eq(refused(machine, &request, &error), -EINVAL);
    request.form = NUMOE_FORM_GROUPS;
    cr_assert_eq(refused(one, &request, &error), -EINVAL);
    cr_assert_not_null(strstr(error.message, "say how many groups"), "%s", error.message);
    request.form = NUMOE_FORM_EXPERTS; /* of one node: all of them */
    plan = plan_of(one, &request);
    check_boundaries(plan);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    numoe_machine_free(one);
}

/* ---- the busiest ----------------------------------------------------------------------------- */

/* Mean of the greatest load over trials of `tokens` tokens that each choose top_k experts. */
static double simulated(const struct box_bins *bins, uint32_t top_k, uint32_t tokens,
                        uint32_t trials, uint64_t *seed, double *hits)
{
    uint32_t experts = 0, *bin_of;
    double sum = 0, *load = calloc(bins->count, sizeof *load);
    uint32_t *seen;

    for (uint32_t b = 0; b < bins->count; b++)
        experts += (uint32_t)bins->experts[b];
    bin_of = calloc(experts, sizeof *bin_of);
    seen = calloc(experts, sizeof *seen);
    for (uint32_t b = 0, e = 0; b < bins->count; b++)
        for (uint32_t i = 0; i < (uint32_t)bins->experts[b]; i++)
            bin_of[e++] = b;
    *hits = 0;
    for (uint32_t trial = 1; trial <= trials; trial++) {
        double most = 0;

        memset(load, 0, bins->count * sizeof *load);
        for (uint32_t t = 0; t < tokens; t++) {
            uint32_t mine[64];

            for (uint32_t j = 0; j < top_k;) {
                uint32_t e = (uint32_t)(next_random(seed) % experts), i = 0;

                while (i < j && mine[i] != e)
                    i++;
                if (i < j)
                    continue;
                mine[j++] = e;
                if (seen[e] != trial) {
                    load[bin_of[e]] += bins->cost[bin_of[e]];
                    *hits += 1;
                }
                seen[e] = trial;
            }
        }
        for (uint32_t b = 0; b < bins->count; b++)
            most = fmax(most, load[b]);
        sum += most;
    }
    *hits /= trials;
    free(load);
    free(bin_of);
    free(seen);
    return sum / trials;
}

Test(forms_busiest, agrees_with_random_routing, .timeout = 120)
{
    static const struct {
        uint32_t bins, experts, top_k, tokens;
        bool even;
    } cases[] = {{2, 128, 6, 1, true},  {8, 32, 6, 1, true},   {8, 32, 6, 4, true},
                 {8, 32, 6, 40, true},  {32, 8, 6, 1, true},   {32, 8, 6, 16, true},
                 {2, 16, 4, 3, true},   {5, 12, 4, 2, false},  {7, 40, 8, 9, false},
                 {16, 56, 16, 2, true}, {3, 100, 1, 1, false}, {64, 14, 16, 30, false}};
    uint64_t seed = 99;

    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        double experts[64], cost[64], hits, wanted, got, all = 0;
        struct box_bins bins = {cases[c].bins, experts, cost};

        for (uint32_t b = 0; b < bins.count; b++) {
            experts[b] = cases[c].even ? cases[c].experts
                                       : 1 + (double)(next_random(&seed) % (2 * cases[c].experts));
            cost[b] = cases[c].even
                          ? bins.count
                          : bins.count * (0.5 + (double)(next_random(&seed) % 1000) / 999);
            all += experts[b];
        }
        wanted = simulated(&bins, cases[c].top_k, cases[c].tokens, 8000, &seed, &hits);
        got =
            predict_busiest(&bins, numoe_predict_experts_hit(all, cases[c].top_k, cases[c].tokens));
        cr_expect(fabs(got - wanted) < 0.015 * wanted,
                  "case %zu: %.3f, simulated %.3f, of %.2f experts", c, got, wanted, hits);
    }
}

Test(forms_busiest, ends_are_exact)
{
    double experts[] = {4, 3, 1}, cost[] = {1, 2, 1.5};
    struct box_bins bins = {3, experts, cost}, even = {1, experts, cost};

    /* one of eight: 4 chances of 1, 3 of 2, 1 of 1.5 */
    cr_assert_float_eq(predict_busiest(&bins, 1), (4 * 1 + 3 * 2 + 1.5) / 8, 1e-9);
    cr_assert_float_eq(predict_busiest(&bins, 8), 6, 1e-12);
    cr_assert_float_eq(predict_busiest(&bins, 9), 6, 1e-12);
    /* all but one: whichever it is, the second bin is busiest, with 3 or 2 of its experts */
    cr_assert_float_eq(predict_busiest(&bins, 7), (5 * 6 + 3 * 4) / 8., 1e-9);
    cr_assert_float_eq(predict_busiest(&bins, 7.5), ((5 * 6 + 3 * 4) / 8. + 6) / 2, 1e-9);
    cr_assert_eq(predict_busiest(&bins, 0), 0);
    cr_assert_float_eq(predict_busiest(&even, 2.5), 2.5, 1e-12);
}

/* Sizes far past any model are quick and sane. */
Test(forms_busiest, large_numbers_end, .timeout = 20)
{
    double experts[] = {500000, 548576}, cost[] = {2, 2};
    struct box_bins bins = {2, experts, cost};
    double got = predict_busiest(&bins, 300000);

    cr_assert(got > 300000 && got < 1.06 * 300000, "%g", got);
}

/* ---- costs ----------------------------------------------------------------------------------- */

static struct numoe_prediction_cell predicted(const struct numoe_machine *machine,
                                              const struct numoe_plan *plan, uint32_t tokens)
{
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_prediction *prediction = NULL;
    struct numoe_prediction_cell cell;

    options.tokens = &tokens;
    options.token_count = 1;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, NULL), 0);
    cell = prediction->cells[0];
    numoe_prediction_free(prediction);
    return cell;
}

/* Slices of the hit experts in each memory domain, by the plan's own boundaries. */
static double busiest_domain(const struct numoe_machine *machine, const struct numoe_plan *plan,
                             uint32_t tokens, uint64_t *seed)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    double *load = calloc(machine->domain_count, sizeof *load), most = 0;
    bool *hit = calloc(shape->experts, sizeof *hit);
    uint64_t layer = next_random(seed) % shape->layers;

    for (uint32_t t = 0; t < tokens; t++) {
        bool *mine = calloc(shape->experts, sizeof *mine);

        for (uint64_t j = 0; j < shape->experts_per_token;) {
            uint64_t e = next_random(seed) % shape->experts;

            if (mine[e])
                continue;
            mine[e] = hit[e] = true;
            j++;
        }
        free(mine);
    }
    for (uint64_t e = 0; e < shape->experts; e++)
        for (uint32_t n = 0; hit[e] && n < plan->node_count; n++)
            load[machine->nodes[plan->nodes[n].node].domain] +=
                (double)(numoe_plan_boundary(plan, layer, e, n + 1) -
                         numoe_plan_boundary(plan, layer, e, n));
    for (uint32_t d = 0; d < machine->domain_count; d++)
        most = fmax(most, load[d]);
    free(load);
    free(hit);
    return most;
}

Test(forms_cost, reading_is_as_uneven_as_random_routing_makes_it, .timeout = 240)
{
    static const struct {
        enum numoe_form form;
        uint32_t groups;
    } forms[] = {{NUMOE_FORM_EVERY_NODE, 0}, {NUMOE_FORM_GROUPS, 2},  {NUMOE_FORM_GROUPS, 4},
                 {NUMOE_FORM_GROUPS, 8},     {NUMOE_FORM_GROUPS, 16}, {NUMOE_FORM_EXPERTS, 0}};
    static const uint32_t tokens[] = {1, 4, 16, 100};
    struct numoe_machine *machine = machine_of(EPYC);
    uint64_t seed = 7;

    for (size_t f = 0; f < sizeof forms / sizeof forms[0]; f++) {
        struct numoe_plan_request request = request_of(&v4_flash, forms[f].form, forms[f].groups);
        struct numoe_plan *plan = plan_of(machine, &request);

        for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
            double sum = 0, wanted, got;
            enum { TRIALS = 800 };

            for (int trial = 0; trial < TRIALS; trial++)
                sum += busiest_domain(machine, plan, tokens[i], &seed);
            /* 8 domains of 38.4 GB/s, 0.80 of which are reached */
            wanted = sum / TRIALS * 208896 / (0.80 * 38.4e9) * 1e3;
            got = predicted(machine, plan, tokens[i]).parts_ms[NUMOE_BOUND_MEMORY];
            cr_expect(fabs(got - wanted) < 0.03 * wanted, "%s, %u tokens: %.4f ms, simulated %.4f",
                      plan->forms[0].name, tokens[i], got, wanted);
        }
        numoe_plan_free(plan);
    }
    numoe_machine_free(machine);
}

static double cost_by_hand(const struct numoe_plan_form *f, const struct numoe_plan *plan,
                           enum numoe_objective objective)
{
    double decode = INFINITY, prefill = INFINITY;

    for (uint32_t i = 0; i < plan->form_count; i++)
        if (plan->forms[i].fits && plan->forms[i].executable) {
            decode = fmin(decode, plan->forms[i].decode_ms);
            prefill = fmin(prefill, plan->forms[i].prefill_ms);
        }
    decode = f->decode_ms / decode;
    prefill = f->prefill_ms / prefill;
    return objective == NUMOE_OPTIMIZE_DECODE    ? decode
           : objective == NUMOE_OPTIMIZE_PREFILL ? prefill
                                                 : sqrt(decode * prefill);
}

Test(forms_cost, the_choice_is_the_one_with_least_cost, .timeout = 60)
{
    static const struct numoe_expert_shape shapes[] = {{43, 256, 64, 208896, 4096, 6, 0},
                                                       {36, 128, 90, 147136, 2880, 4, 11520},
                                                       {2, 60, 24, 104448, 2048, 8, 0},
                                                       {58, 256, 64, 365568, 7168, 8, 0}};
    struct numoe_machine *machine = machine_of(EPYC);

    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int objective = NUMOE_OPTIMIZE_BOTH; objective <= NUMOE_OPTIMIZE_PREFILL;
             objective++) {
            struct numoe_plan_request request = request_of(&shapes[s], NUMOE_FORM_AUTO, 0);
            struct numoe_plan *plan;
            double best = INFINITY, chosen;
            uint32_t rows = 0;

            request.objective = (enum numoe_objective)objective;
            plan = plan_of(machine, &request);
            check_plan(machine, plan);
            cr_assert_eq(plan->form_count, 5, "every node, domains, packages, experts, rows");
            cr_assert(plan->forms[0].chosen);
            cr_assert_eq(plan->forms[0].form, plan->form);
            cr_assert_eq(plan->forms[0].groups, plan->shard_count);
            chosen = cost_by_hand(&plan->forms[0], plan, request.objective);
            for (uint32_t i = 0; i < plan->form_count; i++) {
                const struct numoe_plan_form *f = &plan->forms[i];

                cr_assert(f->decode_ms > 0 && f->prefill_ms > 0 && f->reason[0] && f->fits);
                cr_assert(i == 0 || !f->chosen);
                cr_assert(i < 2 || f->cost >= plan->forms[i - 1].cost);
                rows += f->form == NUMOE_FORM_ROWS;
                if (f->form == NUMOE_FORM_ROWS) {
                    cr_assert(!f->executable);
                    cr_assert_not_null(strstr(f->reason, "not executed by this version"));
                    continue;
                }
                best = fmin(best, cost_by_hand(f, plan, request.objective));
                cr_assert_float_eq(f->cost * chosen, cost_by_hand(f, plan, request.objective),
                                   1e-2 * f->cost);
            }
            cr_assert_eq(rows, 1);
            cr_assert(chosen <= best * 1.001, "%s costs %g, the best %g", plan->forms[0].name,
                      chosen, best);
            /* what was weighed is what is predicted */
            if (objective == NUMOE_OPTIMIZE_BOTH) {
                cr_assert_float_eq(predicted(machine, plan, 1).layer_ms, plan->forms[0].decode_ms,
                                   1e-9);
                cr_assert_float_eq(predicted(machine, plan, 4096).layer_ms,
                                   plan->forms[0].prefill_ms, 1e-9);
                cr_assert_eq(predicted(machine, plan, 4096).reduction_bytes,
                             plan->forms[0].prefill_bytes);
            }
            numoe_plan_free(plan);
        }
    numoe_machine_free(machine);
}

static const struct numoe_plan_form *find_form(const struct numoe_plan *plan, enum numoe_form form,
                                               uint32_t groups)
{
    for (uint32_t i = 0; i < plan->form_count; i++)
        if (plan->forms[i].form == form && (!groups || plan->forms[i].groups == groups))
            return &plan->forms[i];
    cr_assert_fail("no form %d", (int)form);
    return NULL;
}

/* What each form trades on the machine of the public report. */
Test(forms_cost, thirty_two_nodes_trade_reading_for_partial_outputs, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash, NUMOE_FORM_AUTO, 0);
    const struct numoe_plan_form *every, *packages, *domains, *experts, *rows;
    struct numoe_plan *plan;
    const uint64_t row = 4096ull * 6 * 4096 * 4 * 2; /* one a (token, expert), there and back */

    request.objective = NUMOE_OPTIMIZE_DECODE;
    plan = plan_of(machine, &request);
    cr_assert_eq(plan->form, NUMOE_FORM_EVERY_NODE);
    every = find_form(plan, NUMOE_FORM_EVERY_NODE, 0);
    packages = find_form(plan, NUMOE_FORM_GROUPS, 2);
    domains = find_form(plan, NUMOE_FORM_GROUPS, 8);
    experts = find_form(plan, NUMOE_FORM_EXPERTS, 0);
    rows = find_form(plan, NUMOE_FORM_ROWS, 0);
    /* nodes of a package work together, those of two do not */
    cr_assert_eq(every->prefill_bytes, 2 * row);
    cr_assert_eq(packages->prefill_bytes, row);
    cr_assert_eq(domains->prefill_bytes, row);
    cr_assert_eq(experts->prefill_bytes, row);
    /* h of 2048 int8 and their scales: written once, read by 32 nodes */
    cr_assert_eq(rows->prefill_bytes, row + 4096ull * 6 * 2304 * 33);
    cr_assert(every->decode_ms < packages->decode_ms && packages->decode_ms < domains->decode_ms);
    cr_assert(every->prefill_ms > packages->prefill_ms &&
              packages->prefill_ms > domains->prefill_ms);
    numoe_plan_free(plan);

    request.objective = NUMOE_OPTIMIZE_PREFILL;
    plan = plan_of(machine, &request);
    /* nodes of a domain work on one row anyway: its experts need not be whole on one of them */
    cr_assert_eq(plan->form, NUMOE_FORM_GROUPS);
    cr_assert_eq(plan->shard_count, 8);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* Bandwidth that is given is what the choice rests on. */
Test(forms_cost, what_is_given_decides, .timeout = 60)
{
    struct numoe_machine *machine = machine_of("pack:2 l3:2 [numa(memory=128GB)] core:16 pu:1");
    struct numoe_plan_request request = request_of(&v4_flash, NUMOE_FORM_AUTO, 0);
    struct numoe_predict_options predict = NUMOE_PREDICT_OPTIONS_INIT;
    double gbs[4] = {1e5, 1e5, 1e5, 1e5}, before;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = plan_of(machine, &request);

    before = plan->forms[0].decode_ms;
    numoe_plan_free(plan);
    predict.node_gbs = gbs;
    predict.isa = "ref";
    request.predict = &predict;
    plan = plan_of(machine, &request);
    cr_assert(plan->forms[0].decode_ms != before);
    /* reading is nothing then, and plain C is slow: one form is as good as another */
    cr_assert_eq(plan->form, NUMOE_FORM_EVERY_NODE);
    numoe_plan_free(plan);
    predict.isa = "abacus";
    cr_assert_eq(refused(machine, &request, &error), -EINVAL);
    numoe_machine_free(machine);
}

Test(forms_cost, a_model_that_says_too_little_is_not_weighed)
{
    struct numoe_machine *machine = machine_of("numa:4(memory=1GB) core:2 pu:1");
    struct numoe_expert_shape shape = {2, 8, 8, 1088, 64, 0, 0};
    struct numoe_plan_request request = request_of(&shape, NUMOE_FORM_AUTO, 0);
    struct numoe_plan *plan = plan_of(machine, &request);

    cr_assert_eq(plan->form, NUMOE_FORM_EVERY_NODE);
    cr_assert_not_null(strstr(plan->forms[0].reason, "not weighed"));
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* A rank of half of the experts is hit half as often, one of half of the slices as often. */
Test(forms_cost, ranges_are_read_as_far_as_they_are_held, .timeout = 60)
{
    struct numoe_machine *machine = machine_of("numa:1(memory=256GB) core:8 pu:1");
    struct numoe_plan_request request = request_of(&v4_flash, NUMOE_FORM_AUTO, 0);
    struct numoe_prediction_cell whole, half;
    struct numoe_plan *plan = plan_of(machine, &request);

    whole = predicted(machine, plan, 64);
    numoe_plan_free(plan);
    request.range = (struct numoe_range){.first_expert = 128};
    plan = plan_of(machine, &request);
    half = predicted(machine, plan, 64);
    cr_assert_float_eq(half.experts_hit, whole.experts_hit / 2, 1e-9);
    cr_assert_float_eq((double)half.weight_bytes, (double)whole.weight_bytes / 2, 1);
    cr_assert_float_eq(half.parts_ms[NUMOE_BOUND_ARITHMETIC],
                       whole.parts_ms[NUMOE_BOUND_ARITHMETIC] / 2, 1e-9);
    numoe_plan_free(plan);
    request.range = (struct numoe_range){.first_slice = 32};
    plan = plan_of(machine, &request);
    half = predicted(machine, plan, 64);
    cr_assert_float_eq(half.experts_hit, whole.experts_hit, 1e-9);
    cr_assert_float_eq((double)half.weight_bytes, (double)whole.weight_bytes / 2, 1);
    cr_assert_float_eq(half.parts_ms[NUMOE_BOUND_ARITHMETIC],
                       whole.parts_ms[NUMOE_BOUND_ARITHMETIC] / 2, 1e-9);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* ---- printing -------------------------------------------------------------------------------- */

Test(forms_print, text_and_json_show_the_choice_and_the_others, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = request_of(&v4_flash, NUMOE_FORM_GROUPS, 8);
    struct numoe_plan *plan = plan_of(machine, &request);
    static const char *const names[] = {"every node", "8 groups of nodes (memory domains)",
                                        "2 groups of nodes (packages)", "whole experts",
                                        "row-sharing of down"};
    json_t *root, *forms, *form, *shards, *nodes;
    char *text = text_of(numoe_plan_print(plan, out));

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        cr_assert_not_null(strstr(text, names[i]), "%s", text);
    cr_assert_not_null(strstr(text, "*8 groups"), "%s", text);
    free(text);
    text = text_of(cr_assert_eq(numoe_plan_print_json(plan, out), 0));
    root = json_loads(text, 0, NULL);
    cr_assert_not_null(root);
    cr_assert_str_eq(json_string_value(json_object_get(root, "form")), "groups");
    forms = json_object_get(root, "forms");
    cr_assert_eq(json_array_size(forms), 5);
    form = json_array_get(forms, 0);
    cr_assert(json_is_true(json_object_get(form, "chosen")));
    cr_assert_eq(json_integer_value(json_object_get(form, "groups")), 8);
    cr_assert_str_eq(json_string_value(json_object_get(form, "reason")), "as asked");
    cr_assert(json_real_value(json_object_get(form, "decode_ms")) > 0);
    shards = json_object_get(root, "shards");
    cr_assert_eq(json_array_size(shards), 8);
    cr_assert_eq(json_integer_value(json_object_get(json_array_get(shards, 7), "experts")),
                 43 * 32);
    nodes = json_object_get(json_array_get(shards, 7), "nodes");
    cr_assert_eq(json_array_size(nodes), 4);
    cr_assert_eq(json_integer_value(json_array_get(nodes, 3)), 31);
    json_decref(root);
    free(text);
    text = text_of(cr_assert_eq(numoe_plan_explain(machine, plan, "expert:3.200", out, NULL), 0));
    cr_assert_not_null(strstr(text, "go whole to 8 groups of nodes"), "%s", text);
    free(text);
    text = text_of(cr_assert_eq(numoe_plan_explain(machine, plan, "node:17", out, NULL), 0));
    cr_assert_not_null(strstr(text, "of 32.00 of 256 experts, 16.00 of their 64"), "%s", text);
    free(text);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}
