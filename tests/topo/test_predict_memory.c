/* Memory of nodes while a plan is executed. SPDX-License-Identifier: Apache-2.0 */
#include "predict.h"
#include "topo/topo_fixture.h"

#include <jansson.h>

#define GIB ((uint64_t)1 << 30)
#define FOUR "numa:4(memory=64GiB) core:8 pu:1"

static const uint32_t many = 4096;

static struct numoe_prediction *predict(const struct numoe_machine *machine,
                                        const struct numoe_plan *plan,
                                        const struct numoe_predict_gpu *gpus, uint32_t gpu_count,
                                        const uint32_t *tokens, uint32_t count)
{
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_prediction *prediction;

    options.tokens = tokens;
    options.token_count = count;
    options.gpus = gpus;
    options.gpu_count = gpu_count;
    options.record_bytes = 5000;
    options.scratch_bytes = 3000000;
    cr_assert_eq(numoe_predict(machine, plan, &options, &prediction, &error), 0, "%s",
                 error.message);
    cr_assert_eq(prediction->node_count, plan->node_count);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_prediction_node *node = &prediction->nodes[n];

        cr_assert_eq(node->os_index, plan->nodes[n].os_index);
        cr_assert_eq(node->capacity_bytes, plan->nodes[n].capacity_bytes);
        cr_assert_eq(node->expert_bytes, plan->nodes[n].planned_bytes);
        cr_assert_eq((int64_t)node->capacity_bytes,
                     node->left_bytes + (int64_t)(node->before_bytes + node->expert_bytes +
                                                  node->activation_bytes + node->pinned_bytes));
    }
    return prediction;
}

static struct numoe_plan *plan_v4(const struct numoe_machine *machine)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = v4_flash;
    return plan_of(machine, &request);
}

/* Outputs are written once and read once; a record a token and scratch a worker come on top. */
Test(predict_memory, activations_are_rows_records_and_scratch)
{
    struct numoe_machine *machine = machine_of(FOUR);
    struct numoe_plan *plan = plan_v4(machine);
    struct numoe_prediction *prediction = predict(machine, plan, NULL, 0, (uint32_t[]){many, 1}, 2);
    const struct numoe_prediction_cell *cell = &prediction->cells[0];

    cr_assert_eq(cell->tokens, many);
    cr_assert_eq(prediction->memory_tokens, many);
    cr_assert_not(prediction->before_known);
    for (uint32_t n = 0; n < 4; n++) {
        double each =
            ((double)cell->reduction_bytes / 2 + (double)many * 5000) / (double)cell->passes / 4 +
            8 * 3e6;

        cr_expect_float_eq((double)prediction->nodes[n].activation_bytes, each, 2);
        cr_expect_float_eq(prediction->nodes[n].slices, 16, 1e-9);
        cr_expect_eq(prediction->nodes[n].before_bytes, 0);
        cr_expect_eq(prediction->nodes[n].pinned_bytes, 0);
    }
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* Inputs and outputs in fp32, ids and routing weights, halved until they are 512 MiB at most. */
Test(predict_memory, staging_is_on_the_node_of_the_gpu)
{
    static const struct numoe_predict_gpu gpus[] = {
        {.name = "a10", .node = 2, .link_gbs = 25, .memory_bytes = 24000000000},
        {.name = "a10", .node = 2, .link_gbs = 25, .memory_bytes = 24000000000}};
    const uint64_t token = 4096 * 8 + 6 * 8;
    struct numoe_machine *machine = machine_of(FOUR);
    struct numoe_plan *plan = plan_v4(machine);
    struct numoe_prediction *prediction = predict(machine, plan, gpus, 1, &many, 1);

    cr_expect_eq(prediction->nodes[2].pinned_bytes, many * token);
    cr_expect_eq(prediction->nodes[0].pinned_bytes + prediction->nodes[1].pinned_bytes +
                     prediction->nodes[3].pinned_bytes,
                 0);
    numoe_prediction_free(prediction);
    prediction = predict(machine, plan, gpus, 2, (uint32_t[]){65536}, 1);
    cr_expect_eq(prediction->nodes[2].pinned_bytes, 2 * 8192 * token);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(predict_memory, what_others_use_counts_on_a_live_machine)
{
    struct numoe_machine *machine = machine_of(FOUR);
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;
    char *text;

    machine->live = true;
    machine->nodes[1].free_bytes = 61 * GIB;
    machine->nodes[1].huge_2m_free = 512; /* a GiB that is as good as free */
    plan = plan_v4(machine);
    prediction = predict(machine, plan, NULL, 0, &many, 1);
    cr_assert(prediction->before_known);
    cr_expect_eq(prediction->nodes[0].before_bytes, 0);
    cr_expect_eq(prediction->nodes[1].before_bytes, 2 * GIB);
    text = text_of(numoe_prediction_print(prediction, out));
    cr_expect_null(strstr(text, "not known"), "%s", text);
    cr_expect(strstr(text, "2.00 GiB"), "%s", text);
    free(text);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* A line for equal neighbours; what is not known is null. */
Test(predict_memory, text_and_json)
{
    static const struct numoe_predict_gpu gpu = {
        .name = "a10", .node = 2, .link_gbs = 25, .memory_bytes = 24000000000};
    struct numoe_machine *machine = machine_of(FOUR);
    struct numoe_plan *plan = plan_v4(machine);
    struct numoe_prediction *prediction = predict(machine, plan, &gpu, 1, &many, 1);
    char *text = text_of(numoe_prediction_print(prediction, out));
    json_t *root, *nodes, *node;
    size_t i;

    cr_expect(strstr(text, "memory of nodes, with passes of up to 4096 tokens:"));
    cr_expect(strstr(text, "\n     0-1      16"), "%s", text);
    cr_expect(strstr(text, "\n       2      16"), "%s", text);
    cr_expect(strstr(text, "\n   total      64"), "%s", text);
    free(text);
    text = text_of(numoe_prediction_print_json(plan, prediction, out));
    root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    nodes = json_object_get(json_object_get(root, "predicted"), "nodes");
    cr_assert_eq(json_array_size(nodes), 4);
    json_array_foreach(nodes, i, node)
    {
        const struct numoe_prediction_node *of = &prediction->nodes[i];

        cr_expect(json_is_null(json_object_get(node, "before_bytes")));
        cr_expect_eq(json_integer_value(json_object_get(node, "activation_bytes")),
                     (json_int_t)of->activation_bytes);
        cr_expect_eq(json_integer_value(json_object_get(node, "pinned_bytes")),
                     (json_int_t)of->pinned_bytes);
        cr_expect_eq(json_integer_value(json_object_get(node, "left_bytes")), of->left_bytes);
    }
    json_decref(root);
    free(text);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(predict_memory, a_pass_that_does_not_fit_beside_the_experts_is_said)
{
    struct numoe_machine *machine = machine_of(FOUR);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_prediction *prediction;
    struct numoe_plan *plan;
    uint64_t experts;

    request.shape = v4_flash;
    request.keep_free_bytes = 1;
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, NULL, 0, &many, 1);
    cr_expect_not(has_note(prediction->notes, prediction->note_count, "smaller passes"));
    experts = plan->nodes[0].planned_bytes;
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    for (uint32_t n = 0; n < 4; n++)
        machine->nodes[n].capacity_bytes = experts + (n == 3 ? GIB : 100000000);
    plan = plan_of(machine, &request);
    prediction = predict(machine, plan, NULL, 0, &many, 1);
    for (uint32_t n = 0; n < 4; n++)
        cr_expect_eq(prediction->nodes[n].left_bytes < 0, n < 3);
    cr_expect(has_note(prediction->notes, prediction->note_count,
                       "nodes 0-2: a pass of 4096 tokens takes more than the experts leave"));
    cr_expect(has_note(prediction->notes, prediction->note_count, "kept free, would help"));
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}
