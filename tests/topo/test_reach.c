/* How widely nodes work together. SPDX-License-Identifier: Apache-2.0 */
#include "topo_fixture.h"

static struct numoe_plan *plan_on(const char *source)
{
    struct numoe_machine *machine = machine_of(source);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;

    request.form = NUMOE_FORM_EVERY_NODE;
    request.shape = v4_flash;
    request.shape.layers = 2;
    cr_assert_eq(numoe_plan_create(machine, &request, &plan, &error), 0, "%s", error.message);
    numoe_machine_free(machine);
    return plan;
}

Test(plan_reach, groups_of_two_epyc_7h12)
{
    struct numoe_plan *plan = plan_on(EPYC);
    struct numoe_plan_reach reach[NUMOE_REACHES];
    uint32_t group[32];

    numoe_plan_reaches(plan, reach);
    cr_expect_eq(reach[NUMOE_REACH_DOMAIN].groups, 8);
    cr_expect_eq(reach[NUMOE_REACH_PACKAGE].groups, 2);
    cr_expect_eq(reach[NUMOE_REACH_MACHINE].groups, 1);
    cr_expect_eq(reach[NUMOE_REACH_DOMAIN].far_tenths, 0, "nodes that share channels are near");
    cr_expect_gt(reach[NUMOE_REACH_PACKAGE].far_tenths, 0);
    numoe_plan_groups(plan, NUMOE_REACH_DOMAIN, group);
    for (uint32_t n = 0; n < 32; n++)
        cr_expect_eq(group[n], n / 4, "node %u", n);
    numoe_plan_groups(plan, NUMOE_REACH_PACKAGE, group);
    for (uint32_t n = 0; n < 32; n++)
        cr_expect_eq(group[n], n / 16, "node %u", n);
    numoe_plan_free(plan);
}

/* 32 nodes: rows weigh more the more tokens share a reading of the weights. */
Test(plan_reach, more_tokens_reach_further)
{
    struct numoe_plan *plan = plan_on(EPYC);
    struct numoe_plan_reach reach[NUMOE_REACHES];
    enum numoe_reach last = NUMOE_REACH_DOMAIN;

    numoe_plan_reaches(plan, reach);
    for (uint64_t tokens = 1; tokens <= 1 << 16; tokens *= 2) {
        const uint64_t pairs = tokens * 6, hit = pairs < 256 ? pairs : 256;
        const enum numoe_reach best = numoe_plan_best_reach(plan, reach, pairs, hit, 1);

        cr_expect_geq(best, last, "%lu tokens", tokens);
        last = best;
    }
    cr_expect_eq(numoe_plan_best_reach(plan, reach, 64 * 6, 200, 1), NUMOE_REACH_DOMAIN);
    cr_expect_eq(numoe_plan_best_reach(plan, reach, 1024 * 6, 256, 1), NUMOE_REACH_PACKAGE);
    cr_expect_eq(last, NUMOE_REACH_MACHINE);
    numoe_plan_free(plan);
}

/* The costs of the file's head, in floating point. */
Test(plan_reach, the_least_of_the_stated_costs)
{
    static const char *const machines[] = {
        EPYC, DATA "xeon-8336c-2s-2n.xml", "pack:4 [numa(memory=64GB)] core:3 pu:1",
        "pack:1 [numa(memory=640GB)] core:3 pu:1", "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2"};

    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        struct numoe_plan *plan = plan_on(machines[m]);
        struct numoe_plan_reach reach[NUMOE_REACHES];
        const double expert = 64.0 * 208896, row = 4096 * 4.0;

        numoe_plan_reaches(plan, reach);
        for (uint64_t tokens = 1; tokens <= 1 << 16; tokens *= 2)
            for (uint64_t reads = 1; reads < 20; reads *= 3) {
                const uint64_t pairs = tokens * 6, hit = pairs < 256 ? pairs : 256;
                double cost[NUMOE_REACHES], least = 0;

                for (int r = 0; r < NUMOE_REACHES; r++) {
                    cost[r] = 4.0 * (double)pairs * reach[r].rows * row +
                              (double)(hit * reads) * expert * (double)reach[r].far_tenths / 10 /
                                  (double)reach[r].pairs;
                    least = r && least < cost[r] ? least : cost[r];
                }
                cr_expect_leq(cost[numoe_plan_best_reach(plan, reach, pairs, hit, reads)],
                              least * (1 + 1e-9), "%s, %lu tokens", machines[m], tokens);
            }
        numoe_plan_free(plan);
    }
}

Test(plan_reach, one_node_has_one_group)
{
    struct numoe_plan *plan = plan_on("pack:1 [numa(memory=64GB)] core:3 pu:1");
    struct numoe_plan_reach reach[NUMOE_REACHES];

    numoe_plan_reaches(plan, reach);
    for (int r = 0; r < NUMOE_REACHES; r++) {
        cr_expect_eq(reach[r].groups, 1);
        cr_expect_eq(reach[r].rows, 1);
        cr_expect_eq(reach[r].far_tenths, 0);
    }
    cr_expect_eq(numoe_plan_best_reach(plan, reach, 600000, 256, 9), NUMOE_REACH_DOMAIN);
    numoe_plan_free(plan);
}
