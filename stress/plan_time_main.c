/*
 * numoe-plan-time: how long planning takes, apart from hwloc's reading of the machine: time of one
 * processor, so that others at work do not count.
 *
 *     numoe-plan-time [TOPOLOGY]...
 *
 * For each topology (as of `numoe plan --topology`; without any a list from 1 node to 128 nodes and
 * 2048 CPUs) and each of six models, what a plan, its predictions and its JSON take: the least and
 * the median of ROUNDS. A machine on which a model does not fit gets memory until it does.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench.h"
#include "cli_options.h"
#include "cli_output.h"
#include "families.h"
#include "model.h"
#include "predict.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 11 };

static const char *const usual[] = {
    "pack:1 [numa(memory=256GB)] core:8 pu:2",
    "pack:2 [numa(memory=512GB)] core:64 pu:2",
    "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2",
    "pack:8 group:8 [numa(memory=64GB)] core:4 pu:2",
    "pack:16 group:8 [numa(memory=64GB)] core:16 pu:1",
    "pack:16 group:8 [numa(memory=64GB)] l3:2 core:4 pu:2",
    "pack:1 [numa(memory=4TB)] core:512 pu:4",
};

static const char *const models[] = {"v4-flash",     "v4-pro",      "kimi-k3",
                                     "gpt-oss-120b", "deepseek-v3", "qwen3-30b"};

enum { MODELS = sizeof models / sizeof models[0] };

struct times {
    double plan[ROUNDS], predict[ROUNDS], print[ROUNDS];
};

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void grow(struct numoe_machine *machine, const struct numoe_expert_shape *shape)
{
    uint64_t need =
        shape->layers * shape->experts * (shape->slices * shape->slice_bytes + shape->expert_bytes);

    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].capacity_bytes)
            machine->nodes[i].capacity_bytes += need / machine->node_count * 2;
}

static int once(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                uint32_t round, struct times *times, struct numoe_error *error)
{
    struct numoe_prediction *prediction = NULL;
    struct numoe_plan *plan = NULL;
    double start = now_ms();
    char *text = NULL;
    size_t size = 0;
    FILE *out;
    int rc = numoe_plan_create(machine, request, &plan, error);

    if (rc)
        return rc;
    times->plan[round] = now_ms() - start;
    start = now_ms();
    rc = numoe_predict(machine, plan, NULL, &prediction, error);
    times->predict[round] = now_ms() - start;
    start = now_ms();
    out = rc ? NULL : open_memstream(&text, &size);
    if (out) {
        rc = numoe_prediction_print_json(plan, prediction, out);
        fclose(out);
    } else if (!rc) {
        rc = numoe_error_set(error, -ENOMEM, "json", "out of memory");
    }
    times->print[round] = now_ms() - start;
    free(text);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
    return rc;
}

static int time_model(struct numoe_machine *machine, const char *name)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_desc desc;
    struct times times;
    double median[3];

    if (numoe_model_by_name(name, &desc, &error) ||
        numoe_model_expert_shape(&desc, &request.shape, &error))
        return cli_report("plan-time", CLI_STAGE_OPTIONS, &error);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        int rc = once(machine, &request, round, &times, &error);

        if (rc == -ENOSPC) {
            grow(machine, &request.shape);
            rc = once(machine, &request, round, &times, &error);
        }
        if (rc)
            return cli_report("plan-time", CLI_STAGE_OPTIONS, &error);
    }
    median[0] = numoe_bench_quantile(times.plan, ROUNDS, 0.5);
    median[1] = numoe_bench_quantile(times.predict, ROUNDS, 0.5);
    median[2] = numoe_bench_quantile(times.print, ROUNDS, 0.5);
    printf("  %-14s %8.3f %8.3f %8.3f %8.3f %8.3f %8.3f\n", name, times.plan[0], median[0],
           times.predict[0], median[1], times.print[0], median[2]);
    return CLI_OK;
}

static int time_machine(const char *source)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;
    double start = now_ms();
    int code = CLI_OK;

    if (numoe_machine_load(source, &machine, &error))
        return cli_report("plan-time", CLI_STAGE_INPUT, &error);
    printf("%s: %u nodes, %u CPUs; loaded in %.1f ms\n", source, machine->node_count,
           machine->pu_count, now_ms() - start);
    printf("  %-14s %8s %8s %8s %8s %8s %8s  ms\n", "", "plan", "median", "predict", "median",
           "JSON", "median");
    for (size_t i = 0; i < MODELS && !code; i++)
        code = time_model(machine, models[i]);
    numoe_machine_free(machine);
    return code;
}

int main(int argc, char **argv)
{
    int code = CLI_OK;

    if (argc > 1 && argv[1][0] == '-') {
        fprintf(stderr, "Usage: numoe-plan-time [TOPOLOGY]...\n");
        return CLI_USAGE;
    }
    for (int i = 1; i < argc && !code; i++)
        code = time_machine(argv[i]);
    for (size_t i = 0; argc < 2 && i < sizeof usual / sizeof usual[0] && !code; i++)
        code = time_machine(usual[i]);
    return cli_flush(code);
}
