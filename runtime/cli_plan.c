/* numoe plan. SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint.h"
#include "cli_draw.h"
#include "cli_options.h"
#include "cli_output.h"
#include "cli_predict.h"
#include "model.h"
#include "numoe_kernels.h"
#include "numoe_topo.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* What the model is, from its name or its files. */
static int describe(const struct cli_values *values, struct numoe_model_desc *desc)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint = NULL;
    struct numoe_log log = cli_log();

    if (!values->model == !values->directory) {
        cli_error("plan", "either --model or a directory is needed; see numoe plan --help");
        return CLI_USAGE;
    }
    if (values->model)
        return cli_model_by_name("plan", values, values->model, desc);
    if (values->experts) {
        cli_error("plan", "--experts goes with --model: a checkpoint has the experts it has");
        return CLI_USAGE;
    }
    if (numoe_checkpoint_open(values->directory, &log, &checkpoint, &error))
        return cli_report(values->directory, CLI_STAGE_INPUT, &error);
    *desc = *numoe_checkpoint_desc(checkpoint);
    numoe_checkpoint_close(checkpoint);
    if (values->layers)
        desc->layers = values->layers;
    return CLI_OK;
}

static int run(const struct cli_values *values)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    struct numoe_predict_options predict;
    struct numoe_prediction *prediction = NULL;
    struct numoe_plan *plan = NULL;
    struct numoe_slice_shape shape;
    struct numoe_model_desc desc;
    double *node_gbs = NULL;
    int code, rc = 0;

    if (values->explain && values->json) {
        cli_error("plan", "--explain is text: it goes without --json");
        return CLI_USAGE;
    }
    code = describe(values, &desc);
    if (code)
        return code;
    if (numoe_model_shapes(&desc, &shape, &request.shape, &error))
        return cli_report("plan", values->model ? CLI_STAGE_OPTIONS : CLI_STAGE_INPUT, &error);
    request.workers = values->workers;
    request.nodes = values->nodes.values;
    request.node_count = values->nodes.count;
    request.cpus = values->cpus.values;
    request.cpu_count = values->cpus.count;
    request.reserved_cpus = values->reserved.values;
    request.reserved_count = values->reserved.count;
    request.smt = values->smt;
    request.keep_free_bytes = values->keep_free_bytes;
    request.form = values->form;
    request.groups = values->groups;
    request.objective = values->objective;
    request.predict = &predict;

    if (numoe_machine_load(values->topology, &machine, &error))
        return cli_report("plan", CLI_STAGE_INPUT, &error);
    if (values->domains && numoe_machine_regroup(machine, values->domains, &error)) {
        code = cli_report("plan", CLI_STAGE_OPTIONS, &error);
        goto free_machine;
    }
    code = cli_predict_options(values, machine, &predict, &node_gbs);
    if (code)
        goto free_machine;
    if (numoe_plan_create(machine, &request, &plan, &error)) {
        code = cli_report("plan", CLI_STAGE_OPTIONS, &error);
        goto free_machine;
    }
    code = cli_draw_plan(values, &desc, machine, plan);
    if (code)
        goto free_plan;
    if (values->explain) {
        if (numoe_plan_explain(machine, plan, values->explain, stdout, &error)) {
            code = cli_report("plan", CLI_STAGE_OPTIONS, &error);
            goto free_plan;
        }
        code = cli_flush(CLI_OK);
        goto free_plan;
    }
    if (numoe_predict(machine, plan, &predict, &prediction, &error)) {
        code = cli_report("plan", CLI_STAGE_OPTIONS, &error);
        goto free_plan;
    }
    if (values->json) {
        rc = numoe_prediction_print_json(plan, prediction, stdout);
    } else {
        uint64_t expert = request.shape.slices * shape.bytes + request.shape.expert_bytes;

        printf("%s: %" PRIu64 " MoE layers of %" PRIu64 " experts, %" PRIu64 " a token; hidden "
               "%" PRIu64 ", intermediate %" PRIu64 "; %.2f MB an expert, %.2f GB in all\n\n",
               values->model ? values->model : values->directory, desc.layers, desc.experts,
               desc.experts_per_token, desc.hidden, desc.intermediate, (double)expert / 1e6,
               (double)expert * (double)desc.layers * (double)desc.experts / 1e9);
        numoe_plan_print(plan, stdout);
        numoe_prediction_print(prediction, stdout);
    }
    code = cli_flush(rc ? CLI_FAILURE : CLI_OK);
free_plan:
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
free_machine:
    free(node_gbs);
    numoe_machine_free(machine);
    return code;
}

static const enum cli_option options[] = {
    CLI_MODEL,       CLI_LAYERS,   CLI_EXPERTS,      CLI_TOPOLOGY, CLI_WORKERS,
    CLI_NODES,       CLI_CPUS,     CLI_RESERVE_CPUS, CLI_SMT,      CLI_KEEP_FREE,
    CLI_FORM,        CLI_OPTIMIZE, CLI_DOMAINS,      CLI_GPU_AT,   CLI_NODE_BANDWIDTH,
    CLI_PASS_TOKENS, CLI_ISA,      CLI_EXPLAIN,      CLI_JSON,     CLI_SVG,
    CLI_PNG,         CLI_END};

const struct cli_verb cli_plan = {
    .name = "plan",
    .arguments = "--model NAME | DIR",
    .summary = "say what would go where, and whether it fits, without loading anything",
    .description =
        "Plan a model, named or found in the checkpoint directory DIR, on this machine or\n"
        "another: what each memory node would hold, which CPUs would work, and why; and how\n"
        "fast the experts can be on CPUs, on GPUs by streaming and on both, with the bound that\n"
        "sets it. Nothing is allocated and no weight is read.\n",
    .directory = CLI_DIRECTORY_OPTIONAL,
    .options = options,
    .run = run,
};
