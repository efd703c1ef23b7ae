/* Why a node, a worker or an expert is where the plan has it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "predict.h"
#include "topo/topo_fixture.h"

#include <errno.h>

static char *explained(const struct numoe_machine *machine, const struct numoe_plan *plan,
                       const char *what)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    return text_of(cr_assert_eq(numoe_plan_explain(machine, plan, what, out, &error), 0, "%s: %s",
                                what, error.message));
}

Test(plan_explain, says_why_from_the_plan, .timeout = 60)
{
    struct numoe_machine *machine = machine_of(EPYC);
    struct numoe_plan_request request = on_every_node(&v4_flash);
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
        text = text_of(cr_assert_eq(numoe_plan_explain(machine, plan, wrong[i], out, &error),
                                    -EINVAL, "%s", wrong[i]));
        cr_assert_str_empty(text, "%s", wrong[i]);
        free(text);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_explain, a_worker_of_no_package, .timeout = 60)
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

Test(plan_explain, unused_nodes_have_their_reason, .timeout = 60)
{
    struct numoe_machine *machine =
        machine_of("pack:2 group:4 [numa(memory=64GB)] [numa(memory=16GB)] core:12 pu:2");
    struct numoe_plan_request request = on_every_node(&v4_flash);
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
