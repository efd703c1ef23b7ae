/* numoe plan. SPDX-License-Identifier: Apache-2.0 */
#include "cli_draw.h"
#include "cli_model.h"
#include "cli_nodes.h"
#include "cli_options.h"
#include "cli_output.h"
#include "cli_predict.h"
#include "cli_ranks.h"
#include "model.h"
#include "numoe_kernels.h"
#include "numoe_topo.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_model(const struct cli_values *values, const struct numoe_model_desc *desc,
                        const struct numoe_expert_shape *shape)
{
    double expert = (double)(shape->slices * shape->slice_bytes + shape->expert_bytes);

    printf("%s: %" PRIu64 " MoE layers of %" PRIu64 " experts, %" PRIu64 " a token; hidden "
           "%" PRIu64 ", intermediate %" PRIu64 ", %s; %.2f MB an expert, %.2f GB in all, %.2f GB "
           "read for a token\n\n",
           cli_model_title(values), desc->layers, desc->experts, desc->experts_per_token,
           desc->hidden, desc->intermediate, numoe_format_info(desc->format)->title, expert / 1e6,
           expert * (double)desc->layers * (double)desc->experts / 1e9,
           expert * (double)desc->layers * (double)desc->experts_per_token / 1e9);
}

static int run(const struct cli_values *values)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;
    struct numoe_predict_options predict;
    struct numoe_prediction *prediction = NULL;
    struct numoe_plan *plan = NULL;
    struct numoe_model_desc desc;
    struct cli_ranks ranks = {0};
    double *node_gbs = NULL;
    uint32_t *nodes = NULL;
    int code, rc = 0;

    if (values->model && !strcmp(values->model, "list") && !values->directory)
        return cli_model_list(values);
    if (values->explain && values->json) {
        cli_error("plan", "--explain is text: it goes without --json");
        return CLI_USAGE;
    }
    code = cli_model_describe("plan", values, &desc);
    if (code)
        return code;
    if (numoe_model_expert_shape(&desc, &request.shape, &error))
        return cli_report("plan", values->directory ? CLI_STAGE_INPUT : CLI_STAGE_OPTIONS, &error);
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
    code = cli_predict_options(values, &desc, machine, &predict, &node_gbs);
    if (!code)
        code = cli_reserve_nodes("plan", values, machine, &request, &nodes);
    if (!code && cli_ranks_asked(values)) {
        code = cli_ranks_make(values, machine, &request, &ranks);
        if (!code && !values->rank_given) {
            code = cli_ranks_plan(values, machine, &request, &ranks);
            if (!code && !values->json)
                print_model(values, &desc, &request.shape);
            if (!code)
                code = cli_ranks_print(values, &ranks);
            goto free_machine;
        }
        if (!code)
            cli_ranks_narrow(&ranks, values->rank, &request);
    }
    if (code)
        goto free_machine;
    if (numoe_plan_create(machine, &request, &plan, &error)) {
        code = cli_report("plan", CLI_STAGE_OPTIONS, &error);
        goto free_machine;
    }
    if (numoe_predict(machine, plan, &predict, &prediction, &error)) {
        code = cli_report("plan", CLI_STAGE_OPTIONS, &error);
        goto free_plan;
    }
    code = cli_draw_plan(values, &desc, machine, plan, prediction);
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
    if (values->json) {
        rc = numoe_prediction_print_json(plan, prediction, stdout);
    } else {
        print_model(values, &desc, &request.shape);
        numoe_plan_print(plan, stdout);
        /* memory domains, orphan CPUs: what else the plan rests on */
        for (uint32_t i = 0; i < machine->note_count; i++)
            printf("note: %s\n", machine->notes[i]);
        numoe_prediction_print(prediction, stdout);
    }
    code = cli_flush(rc ? CLI_FAILURE : CLI_OK);
free_plan:
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
free_machine:
    cli_ranks_free(&ranks);
    free(node_gbs);
    free(nodes);
    numoe_machine_free(machine);
    return code;
}

static const enum cli_option options[] = {CLI_MODEL,
                                          CLI_LAYERS,
                                          CLI_EXPERTS,
                                          CLI_FORMAT,
                                          CLI_HIDDEN,
                                          CLI_INTERMEDIATE,
                                          CLI_EXPERTS_PER_TOKEN,
                                          CLI_TOPOLOGY,
                                          CLI_WORKERS,
                                          CLI_NODES,
                                          CLI_CPUS,
                                          CLI_RESERVE_CPUS,
                                          CLI_RESERVE_NODES,
                                          CLI_SMT,
                                          CLI_KEEP_FREE,
                                          CLI_FORM,
                                          CLI_OPTIMIZE,
                                          CLI_TP,
                                          CLI_EP,
                                          CLI_RANK,
                                          CLI_RANK_NODES,
                                          CLI_DOMAINS,
                                          CLI_GPU_AT,
                                          CLI_NODE_BANDWIDTH,
                                          CLI_PASS_TOKENS,
                                          CLI_ISA,
                                          CLI_EXPLAIN,
                                          CLI_DRAFT,
                                          CLI_FAMILY,
                                          CLI_JSON,
                                          CLI_SVG,
                                          CLI_PNG,
                                          CLI_END};

const struct cli_verb cli_plan = {
    .name = "plan",
    .arguments = "--model NAME | --hidden N ... | DIR",
    .summary = "say what would go where, and whether it fits, without loading anything",
    .description =
        "Plan a model on this machine or another; it is named (--model list shows which there\n"
        "are), found in the checkpoint directory DIR, or described by --hidden, --intermediate,\n"
        "--experts, --experts-per-token and --layers. What each memory node would hold, which\n"
        "CPUs would work, and why; and how fast the experts can be on CPUs, on GPUs by streaming\n"
        "and on both, with the bound that sets it. Nothing is allocated and no weight is read.\n"
        "With --tp and --ep the machine is divided among ranks: processes that hold parts of the\n"
        "model, on nodes of their own, and add up their outputs. All are summed up, or --rank\n"
        "shows one.\n",
    .directory = CLI_DIRECTORY_OPTIONAL,
    .options = options,
    .run = run,
};
