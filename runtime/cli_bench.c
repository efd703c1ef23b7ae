/* numoe bench. SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "cli_gpu.h"
#include "cli_model.h"
#include "cli_options.h"
#include "cli_output.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t default_tokens[] = {1, 4, 16, 64, 256, 1024};

enum { DEFAULT_TOKEN_COUNT = sizeof default_tokens / sizeof default_tokens[0] };

/* The relative L2 distance to float64 that these weights and activations must stay within. */
static const double limits[NUMOE_ARITHMETICS + 1] = {
    [NUMOE_FAST] = 1.25e-2,  [NUMOE_EXACT] = 2.5e-3,   [NUMOE_FINE] = 1e-4,
    [NUMOE_MXFP8_UP] = 6e-2, [NUMOE_MXFP8_OCP] = 1e-1,
};

/* One isa and arithmetic. */
struct series {
    char isa[24], kernels[64];
    enum numoe_arithmetic arithmetic;
    struct numoe_bench_cell *cells;
    uint32_t cell_count;
};

struct bench_report {
    char model[64], cpu[96];
    struct numoe_model_desc desc;
    uint32_t workers, nodes;
    enum numoe_bench_routing routing;
    uint64_t resident_bytes, huge_bytes, buffer_bytes;
    struct series *series;
    uint32_t series_count;
    struct numoe_bench_idle idle; /* with --idle: of the last series */
    bool wrong;                   /* some cell missed its limit */
};

static void fill_progress(uint64_t done, uint64_t total)
{
    cli_progress("making random experts: %" PRIu64 " of %" PRIu64, done, total);
}

static void print_header(const struct bench_report *report, const struct series *series, bool stats)
{
    printf("%s, %" PRIu64 " layer%s of %" PRIu64 " experts in memory (%.2f GB, %.0f %% on 2 MiB "
           "pages), %" PRIu64 " a token\n%s%s%" PRIu32 " worker%s on %" PRIu32
           " memory node%s, kernels %s\n\n",
           report->model, report->desc.layers, report->desc.layers == 1 ? "" : "s",
           report->desc.experts, (double)report->resident_bytes / 1e9,
           100 * fmin(1, (double)report->huge_bytes / (double)report->resident_bytes),
           report->desc.experts_per_token, report->cpu, *report->cpu ? ": " : "", report->workers,
           report->workers == 1 ? "" : "s", report->nodes, report->nodes == 1 ? "" : "s",
           series->kernels);
    printf("tokens        ms   (p10 - p90)            GB/s    of read     Gop/s   of peak"
           "   rel. L2   read GB/s  peak Gop/s%s\n",
           stats ? "    busy  most/mean    a call" : "");
}

static void print_cell(const struct numoe_bench_cell *cell, double limit)
{
    printf("%6" PRIu64 " %9.3f   (%.3f - %.3f)%*s %7.1f %10.3f %9.0f %9.3f  %8.2e %11.1f %11.0f",
           cell->tokens, cell->ms, cell->ms_p10, cell->ms_p90,
           19 - snprintf(NULL, 0, "(%.3f - %.3f)", cell->ms_p10, cell->ms_p90), "", cell->gbs,
           cell->bandwidth_fraction, cell->gops, cell->ops_fraction, cell->rel_l2, cell->read_gbs,
           cell->peak_gops);
    if (!isnan(cell->busy_fraction))
        printf(" %7.3f %10.3f %9.3f", cell->busy_fraction, cell->busy_imbalance,
               cell->busy_imbalance_call);
    printf("%s\n", cell->rel_l2 <= limit ? "" : "  WRONG");
    fflush(stdout);
}

static int measure_series(const struct cli_values *values, struct numoe *context,
                          struct numoe_model *model, struct series *series,
                          struct bench_report *report)
{
    const uint32_t *tokens = values->tokens.count ? values->tokens.values : default_tokens;
    uint32_t kinds = values->tokens.count ? values->tokens.count : DEFAULT_TOKEN_COUNT;
    double limit = limits[series->arithmetic];
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_bench *bench;
    int code = CLI_OK;

    series->cells = calloc(kinds, sizeof *series->cells);
    if (!series->cells) {
        cli_error("bench", "out of memory");
        return CLI_NO_ROOM;
    }
    snprintf(series->isa, sizeof series->isa, "%s", numoe_model_kernels(model)->isa);
    numoe_model_info(model, &info);
    snprintf(series->kernels, sizeof series->kernels, "%s", info.kernels);
    snprintf(report->cpu, sizeof report->cpu, "%s", numoe_context_machine(context)->cpu_model);
    report->workers = info.worker_count;
    report->nodes = info.node_count;
    report->resident_bytes = info.resident_bytes;
    report->huge_bytes = 0;
    for (uint32_t n = 0; n < info.node_count; n++) {
        struct numoe_node_info node = NUMOE_NODE_INFO_INIT;

        if (!numoe_model_node(model, n, &node))
            report->huge_bytes += node.huge_bytes;
    }
    if (numoe_bench_create(context, series->isa, &bench, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    report->buffer_bytes = numoe_bench_buffer_bytes(bench);
    cli_progress_end();
    if (!values->json)
        print_header(report, series, values->stats != CLI_STATS_OFF);
    for (uint32_t i = 0; i < kinds; i++) {
        struct numoe_bench_request request = {
            .layer = i % report->desc.layers,
            .tokens = tokens[i],
            .top_k = report->desc.experts_per_token,
            .seed = values->seed + i,
            .routing = values->routing,
            .repeat = values->repeat,
            .seconds = 2,
            .check_tokens = 2,
        };

        cli_progress("%" PRIu64 " tokens", request.tokens);
        if (numoe_bench_layer(bench, model, &request, &series->cells[i], &error)) {
            code = cli_report("bench", CLI_STAGE_WORK, &error);
            break;
        }
        cli_progress_end();
        series->cell_count++;
        if (!(series->cells[i].rel_l2 <= limit))
            report->wrong = true;
        if (!values->json)
            print_cell(&series->cells[i], limit);
    }
    numoe_bench_destroy(bench);
    cli_progress_end();
    return code;
}

static void measure_idle(const struct cli_values *values, struct numoe *context,
                         struct bench_report *report)
{
    const struct numoe_bench_idle *idle = &report->idle;

    cli_progress("sleeping for %" PRIu64 " s", values->idle_s);
    numoe_bench_idle(context, (double)values->idle_s, &report->idle);
    cli_progress_end();
    if (!values->json)
        printf("\nasleep for %.0f s: %.6f s of CPU time, %.4f %% of a CPU\n"
               "an empty call of all workers: first after sleep %.1f us (p99 %.1f), warm %.2f us"
               " (p99 %.2f), %" PRIu32 " calls each\n",
               idle->seconds, idle->cpu_s, 100 * idle->cpu_s / idle->seconds, idle->first_us_p50,
               idle->first_us_p99, idle->warm_us_p50, idle->warm_us_p99, idle->calls);
}

static int run_series(const struct cli_values *values, const char *isa,
                      enum numoe_arithmetic arithmetic, bool last, struct bench_report *report)
{
    struct series *series = &report->series[report->series_count];
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    struct numoe *context = NULL;
    int code;

    code = cli_open("bench", values, isa, &context);
    if (code)
        return code;
    series->arithmetic = arithmetic;
    report->desc.arithmetic = arithmetic;
    if (numoe_model_create(context, &report->desc, &model, &error)) {
        code = cli_report("bench", CLI_STAGE_OPTIONS, &error);
        goto close;
    }
    if (numoe_bench_fill(model, values->seed, fill_progress, &error)) {
        code = cli_report("bench", CLI_STAGE_WORK, &error);
        goto destroy;
    }
    if (!values->json && report->series_count)
        putchar('\n');
    report->series_count++;
    code = measure_series(values, context, model, series, report);
    if (!code && last && values->idle_s)
        measure_idle(values, context, report);
destroy:
    numoe_model_destroy(model);
close:
    cli_progress_end();
    numoe_close(context);
    return code;
}

/* Median over the cells of a series of what was measured in turns with them. */
static double series_ceiling(const struct series *series, bool peak)
{
    double *values = calloc(series->cell_count + 1, sizeof *values), median;

    if (!values)
        return NAN;
    for (uint32_t i = 0; i < series->cell_count; i++)
        values[i] = peak ? series->cells[i].peak_gops : series->cells[i].read_gbs;
    median = numoe_bench_quantile(values, series->cell_count, 0.5);
    free(values);
    return median;
}

static json_t *json_of_report(const struct bench_report *report)
{
    json_t *results = json_array(), *peaks = json_array();
    double read = NAN;

    for (uint32_t s = 0; s < report->series_count; s++) {
        const struct series *series = &report->series[s];
        const char *arithmetic = cli_arithmetic_name(series->arithmetic);

        read = fmax(read, series_ceiling(series, false));
        json_array_append_new(
            peaks, json_pack("{s:s, s:s, s:o, s:o}", "isa", series->isa, "arithmetic", arithmetic,
                             "gops", cli_json_number(series_ceiling(series, true)), "read_gbs",
                             cli_json_number(series_ceiling(series, false))));
        for (uint32_t i = 0; i < series->cell_count; i++) {
            const struct numoe_bench_cell *cell = &series->cells[i];

            json_array_append_new(
                results,
                json_pack(
                    "{s:s, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o,"
                    " s:o, s:o, s:o, s:o, s:o}",
                    "isa", series->isa, "arithmetic", arithmetic, "tokens",
                    (json_int_t)cell->tokens, "repetitions", (json_int_t)cell->repetitions, "ms",
                    cli_json_number(cell->ms), "ms_min", cli_json_number(cell->ms_min), "ms_p10",
                    cli_json_number(cell->ms_p10), "ms_p90", cli_json_number(cell->ms_p90), "bytes",
                    json_integer((json_int_t)llround(cell->bytes)), "gbs",
                    cli_json_number(cell->gbs), "gops", cli_json_number(cell->gops), "read_gbs",
                    cli_json_number(cell->read_gbs), "peak_gops", cli_json_number(cell->peak_gops),
                    "bandwidth_fraction", cli_json_number(cell->bandwidth_fraction), "ops_fraction",
                    cli_json_number(cell->ops_fraction), "rel_l2", cli_json_number(cell->rel_l2),
                    "busy_fraction", cli_json_number(cell->busy_fraction), "busy_imbalance",
                    cli_json_number(cell->busy_imbalance), "busy_imbalance_call",
                    cli_json_number(cell->busy_imbalance_call)));
        }
    }
    return json_pack(
        "{s:o, s:s, s:{s:o, s:I, s:o}, s:{s:s, s:I, s:I},"
        " s:{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}}",
        "results", results, "routing", numoe_bench_routing_name(report->routing), "ceilings",
        "read_gbs", cli_json_number(read), "read_buffer_bytes", (json_int_t)report->buffer_bytes,
        "peaks", peaks, "machine", "cpu", report->cpu, "workers", (json_int_t)report->workers,
        "nodes", (json_int_t)report->nodes, "model", "name", report->model, "layers",
        (json_int_t)report->desc.layers, "experts", (json_int_t)report->desc.experts,
        "experts_per_token", (json_int_t)report->desc.experts_per_token, "hidden",
        (json_int_t)report->desc.hidden, "intermediate", (json_int_t)report->desc.intermediate,
        "resident_bytes", (json_int_t)report->resident_bytes, "huge_bytes",
        (json_int_t)report->huge_bytes);
}

/* Adds the members of --idle. */
static json_t *json_with_idle(const struct bench_report *report, json_t *root)
{
    const struct numoe_bench_idle *idle = &report->idle;

    if (!root || !idle->calls)
        return root;
    json_object_set_new(root, "idle_seconds", cli_json_number(idle->seconds));
    json_object_set_new(root, "idle_cpu_s", cli_json_number(idle->cpu_s));
    json_object_set_new(root, "first_call_us_p50", cli_json_number(idle->first_us_p50));
    json_object_set_new(root, "first_call_us_p99", cli_json_number(idle->first_us_p99));
    json_object_set_new(root, "warm_call_us_p50", cli_json_number(idle->warm_us_p50));
    json_object_set_new(root, "warm_call_us_p99", cli_json_number(idle->warm_us_p99));
    return root;
}

static int run(const struct cli_values *values)
{
    struct bench_report report = {.desc = NUMOE_MODEL_DESC_INIT, .routing = values->routing};
    struct cli_values sized = *values;
    uint32_t isas = values->isa_count ? values->isa_count : 1;
    uint32_t arithmetics = values->arithmetic_count ? values->arithmetic_count : 1;
    const char *of_gpus = cli_gpu_option(values);
    int code;

    if (values->gpu && values->idle_s) {
        cli_error("bench", "--idle is for the CPU's workers, without --gpu");
        return CLI_USAGE;
    }
    if (values->gpu && values->stats != CLI_STATS_OFF) {
        cli_error("bench", "--stats is for workers, not for --gpu");
        return CLI_USAGE;
    }
    if (values->gpu && values->share && values->tune) {
        cli_error("bench", "--share and --tune exclude each other");
        return CLI_USAGE;
    }
    if (values->gpu)
        return values->share ? cli_bench_share(values) : cli_bench_gpu(values);
    if (of_gpus) {
        cli_error("bench", "--%s is for --gpu", of_gpus);
        return CLI_USAGE;
    }
    snprintf(report.model, sizeof report.model, "%s", values->model ? values->model : "v4-flash");
    if (!sized.layers)
        sized.layers = 1;
    code = cli_model_by_name("bench", &sized, report.model, &report.desc);
    if (code)
        return code;
    report.series = calloc(isas * arithmetics, sizeof *report.series);
    if (!report.series) {
        cli_error("bench", "out of memory");
        return CLI_NO_ROOM;
    }
    for (uint32_t i = 0; i < isas * arithmetics && !code; i++)
        code =
            run_series(values, values->isa_count ? values->isas[i / arithmetics] : NULL,
                       values->arithmetic_count ? values->arithmetics[i % arithmetics] : NUMOE_FAST,
                       i + 1 == isas * arithmetics, &report);
    if (!code)
        code = values->json ? cli_print_json(json_with_idle(&report, json_of_report(&report)))
                            : cli_flush(CLI_OK);
    if (!code && report.wrong) {
        cli_error("bench", "results differ from the reference by more than the limit");
        code = CLI_CHECK_FAILED;
    }
    for (uint32_t i = 0; i < report.series_count; i++)
        free(report.series[i].cells);
    free(report.series);
    return code;
}

static const enum cli_option options[] = {
    CLI_MODEL,        CLI_LAYERS,      CLI_EXPERTS,  CLI_TOKENS,    CLI_ISAS,
    CLI_ARITHMETICS,  CLI_REPEAT,      CLI_PLAN,     CLI_AS_IF,     CLI_BATCH_INVARIANT,
    CLI_WORKERS,      CLI_THREADS,     CLI_TOPOLOGY, CLI_NODES,     CLI_CPUS,
    CLI_FORM,         CLI_OPTIMIZE,    CLI_SEED,     CLI_ROUTING,   CLI_GPU,
    CLI_RESIDENT,     CLI_STREAM,      CLI_SHARE,    CLI_GPU_CACHE, CLI_IDLE,
    CLI_RESERVE_CPUS, CLI_STATS_CELLS, CLI_JSON,     CLI_GPUS,      CLI_TUNE,
    CLI_GPU_TUNING,   CLI_GPU_SUM,     CLI_END};

const struct cli_verb cli_bench = {
    .name = "bench",
    .arguments = "",
    .summary = "time a layer of random experts in memory beside the machine's ceilings",
    .description =
        "Make one layer (or --layers) of a model in memory with random weights and time it on\n"
        "random activations with fresh random routing in each repetition. The read bandwidth\n"
        "and the multiplier's peak of the same workers are measured in turns with it; the\n"
        "fractions are medians over the turns. Some outputs are compared with a float64\n"
        "reference. With --topology another machine's plan is executed here. --model is\n"
        "v4-flash and --tokens 1,4,16,64,256,1024 unless given. A plan for --plan is made with the "
        "same\n"
        "--model, --layers and --experts.\n"
        "With --gpu the layer is timed on a GPU: --resident with its weights in device memory,\n"
        "beside the device's read bandwidth; --stream copies eight layers (or --layers) from host\n"
        "memory while they compute, beside the best rate of the link. --tokens is then\n"
        "1,16,64,1024,8192 unless given. --tune times every form of the kernels on the GPU for\n"
        "the model's shape, from few tokens of an expert to many, and writes what kernels are\n"
        "then chosen by.\n",
    .directory = CLI_DIRECTORY_NONE,
    .options = options,
    .run = run,
};
