/* numoe run. SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "cli_gpu.h"
#include "cli_memory.h"
#include "cli_options.h"
#include "cli_output.h"
#include "cli_stats.h"
#include "numoe_gpu.h"
#include "stats_print.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t default_tokens[] = {1, 16};

enum { DEFAULT_TOKEN_COUNT = sizeof default_tokens / sizeof default_tokens[0] };

/* All that a run found out. */
struct report {
    struct numoe_model_info info;
    const struct numoe_machine *machine;
    struct numoe_node_info *nodes;
    struct cli_memory before, memory; /* after loading, before anything else was allocated */
    uint64_t cgroup_most;             /* most that the cgroup was seen to hold while loading */
    struct numoe_bench_cell *cells;
    uint64_t cell_count;
    uint64_t digest;     /* of the digests of all cells */
    double limit, worst; /* relative L2 */
    bool gpu_asked;
    struct numoe_gpu_report gpu;
    struct stats_snapshot stats;
    json_t *stats_json; /* of --stats with --json */
};

/*
 * The weights are whoever's: with int8 activations the error depends on how unlike the rows are
 * that share a scale, and reaches 1.4e-2 where they differ by powers of two. A wrong computation
 * is off by far more.
 */
static double error_limit(const struct numoe_model_info *info, uint64_t gpu_from_tokens)
{
    static const double limits[NUMOE_ARITHMETICS + 1] = {[NUMOE_FAST] = 2e-2,
                                                         [NUMOE_EXACT] = 2.5e-3,
                                                         [NUMOE_FINE] = 5e-4,
                                                         [NUMOE_MXFP8_UP] = 1e-1,
                                                         [NUMOE_MXFP8_OCP] = 1.5e-1};

    /* a GPU: exact arithmetic whatever the model's mode, sums in another order; and the CPUs' where
     * calls are divided */
    if (*info->gpu && (gpu_from_tokens == 1 || limits[info->desc.arithmetic] < 5e-3))
        return 5e-3;
    return limits[info->desc.arithmetic];
}

/* Shows the progress of loading and looks at the memory meanwhile. */
static int watch_loading(void *user, const struct numoe_load_progress *progress)
{
    struct report *report = user;
    uint64_t now = cli_memory_cgroup();

    if (now > report->cgroup_most)
        report->cgroup_most = now;
    return cli_progress_load(NULL, progress);
}

/* What the cgroup holds more than before; 0: not known, or others gave back more. */
static uint64_t cgroup_growth(const struct report *report, uint64_t now)
{
    return report->before.cgroup_bytes && now > report->before.cgroup_bytes
               ? now - report->before.cgroup_bytes
               : 0;
}

static int measure(struct numoe *context, struct numoe_model *model,
                   const struct cli_values *values, struct report *report)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    const uint32_t *tokens = values->tokens.count ? values->tokens.values : default_tokens;
    uint64_t kinds = values->tokens.count ? values->tokens.count : DEFAULT_TOKEN_COUNT;
    uint64_t layers = report->info.desc.layers;
    struct numoe_bench *bench = NULL;
    int code = CLI_OK;

    report->cells = calloc(layers * kinds, sizeof *report->cells);
    if (!report->cells) {
        cli_error("run", "no room for the results of %" PRIu64 " layers", layers);
        return CLI_NO_ROOM;
    }
    if (!values->once)
        cli_progress("measuring the machine");
    if (!values->once &&
        numoe_bench_create(context, numoe_model_kernels(model)->isa, &bench, &error))
        return cli_report("run", CLI_STAGE_WORK, &error);
    for (uint64_t i = 0; i < layers * kinds; i++) {
        struct numoe_bench_request request = {
            .layer = i / kinds,
            .tokens = tokens[i % kinds],
            .top_k = report->info.desc.experts_per_token,
            .seed = values->seed + i,
            .repeat = values->repeat,
            .seconds = 0.3,
            .check_tokens = 2,
        };

        cli_progress("layer %" PRIu64 " of %" PRIu64 ", %" PRIu64 " tokens", request.layer + 1,
                     layers, request.tokens);
        if (numoe_bench_layer(bench, model, &request, &report->cells[i], &error)) {
            code = cli_report("run", CLI_STAGE_WORK, &error);
            break;
        }
        report->cell_count++;
        report->digest = numoe_bench_digest(report->digest, &report->cells[i].digest,
                                            sizeof report->cells[i].digest);
        if (!(report->cells[i].rel_l2 <= report->worst))
            report->worst = report->cells[i].rel_l2;
    }
    numoe_bench_destroy(bench);
    cli_progress_end();
    return code;
}

static void print_cells(const struct report *report)
{
    double least = INFINITY, most = 0;

    printf("\nlayer  tokens        ms   (p10 - p90)       experts hit  GB read    GB/s  "
           "of read bw   rel. L2\n");
    for (uint64_t i = 0; i < report->cell_count; i++) {
        const struct numoe_bench_cell *cell = &report->cells[i];
        char fraction[32] = "-";

        if (isfinite(cell->bandwidth_fraction))
            snprintf(fraction, sizeof fraction, "%.3f", cell->bandwidth_fraction);
        printf("%5" PRIu64 " %7" PRIu64 " %9.3f   (%.3f - %.3f)%*s %6.1f  %8.4f %7.1f  %10s  "
               "%8.2e%s\n",
               cell->layer, cell->tokens, cell->ms, cell->ms_p10, cell->ms_p90,
               17 - snprintf(NULL, 0, "(%.3f - %.3f)", cell->ms_p10, cell->ms_p90), "",
               cell->experts_hit, cell->bytes / 1e9, cell->gbs, fraction, cell->rel_l2,
               cell->rel_l2 <= report->limit ? "" : "  WRONG");
        least = fmin(least, cell->read_gbs);
        most = fmax(most, cell->read_gbs);
    }
    putchar('\n');
    if (most > 0)
        printf("read bandwidth of this machine, measured in turns with the rows: %.1f to %.1f "
               "GB/s\n",
               least, most);
    printf("check against float64: largest relative L2 %.2e, limit %.2e (%s): %s\n", report->worst,
           report->limit, cli_arithmetic_name(report->info.desc.arithmetic),
           report->worst <= report->limit ? "passed" : "FAILED");
    printf("digest of the first outputs: %016" PRIx64 "\n", report->digest);
}

static void print_of_disk(const char *what, uint64_t bytes, uint64_t disk)
{
    printf("  %-37s %9.4f GB", what, (double)bytes / 1e9);
    if (disk)
        printf("   %.3f of disk", (double)bytes / (double)disk);
    putchar('\n');
}

static void print_memory(const struct report *report)
{
    const struct numoe_model_info *info = &report->info;

    printf("\nmemory after loading\n");
    print_of_disk("experts on disk", info->checkpoint_bytes, 0);
    print_of_disk("experts in memory", info->resident_bytes, info->checkpoint_bytes);
    if (report->memory.anonymous_bytes)
        print_of_disk("this process, all anonymous pages", report->memory.anonymous_bytes,
                      info->checkpoint_bytes);
    if (report->memory.peak_bytes)
        print_of_disk("its peak, all pages", report->memory.peak_bytes, info->checkpoint_bytes);
    if (cgroup_growth(report, report->memory.cgroup_bytes)) {
        print_of_disk("growth of the cgroup, page cache too",
                      cgroup_growth(report, report->memory.cgroup_bytes), info->checkpoint_bytes);
        print_of_disk("its most while loading", cgroup_growth(report, report->cgroup_most),
                      info->checkpoint_bytes);
    }

    printf("\n node  workers   capacity GB  experts GB  huge pages  on the node  bound\n");
    for (uint32_t n = 0; n < info->node_count; n++) {
        const struct numoe_node_info *node = &report->nodes[n];
        double planned = node->planned_bytes ? (double)node->planned_bytes : 1;

        printf("%5" PRIu32 " %8" PRIu32 " %13.3f %11.4f %11.0f %%", node->os_index, node->workers,
               (double)node->capacity_bytes / 1e9, (double)node->planned_bytes / 1e9,
               100 * fmin(1, (double)node->huge_bytes / planned));
        if (node->checked_bytes)
            printf(" %10.0f %%", 100 * (double)node->placed_bytes / (double)node->checked_bytes);
        else
            printf(" %12s", "not known");
        printf("  %s", node->bound ? "yes" : "no");
        if (node->spilled_bytes)
            printf(", %.3f GB had no room and lie elsewhere", (double)node->spilled_bytes / 1e9);
        printf("\n");
    }
}

static void print_text(const char *directory, const struct report *report)
{
    const struct numoe_model_info *info = &report->info;
    double seconds = info->load_seconds > 0 ? info->load_seconds : 1e-9;

    printf("%s: %s, %" PRIu64 " MoE layers of %" PRIu64 " experts, %" PRIu64
           " a token, hidden %" PRIu64 ", intermediate %" PRIu64 "\n",
           directory, info->family, info->desc.layers, info->desc.experts,
           info->desc.experts_per_token, info->desc.hidden, info->desc.intermediate);
    printf("%s%s%" PRIu32 " worker%s on %" PRIu32 " memory node%s, kernels %s\n",
           report->machine->cpu_model, *report->machine->cpu_model ? ": " : "", info->worker_count,
           info->worker_count == 1 ? "" : "s", info->node_count, info->node_count == 1 ? "" : "s",
           info->kernels);
    printf("loaded %.3f GB in %.2f s, %.2f GB/s (%s", (double)info->checkpoint_bytes / 1e9,
           info->load_seconds, (double)info->checkpoint_bytes / seconds / 1e9, info->io_path);
    if (info->read_depth)
        printf(", %" PRIu32 " blocks of %" PRIu32 " KiB", info->read_depth,
               info->read_block_bytes >> 10);
    printf("): memory %.2f s, reading and placing %.2f s", info->resident_seconds,
           info->placing_seconds);
    if (info->meanwhile_seconds > 0)
        printf(" (%.2f s of them also memory)", info->meanwhile_seconds);
    putchar('\n');
    if (report->gpu_asked)
        cli_print_gpu(info, &report->stats, &report->gpu);
    print_cells(report);
    print_memory(report);
}

static json_t *json_of_report(const char *directory, const struct report *report)
{
    const struct numoe_model_info *info = &report->info;
    json_t *nodes = json_array(), *results = json_array();
    char digest[17]; /* a string: JSON readers disagree on integers past 2^53 */

    for (uint32_t n = 0; n < info->node_count; n++) {
        const struct numoe_node_info *node = &report->nodes[n];

        json_array_append_new(
            nodes,
            json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}", "os_index",
                      (json_int_t)node->os_index, "workers", (json_int_t)node->workers,
                      "capacity_bytes", (json_int_t)node->capacity_bytes, "planned_bytes",
                      (json_int_t)node->planned_bytes, "huge_bytes", (json_int_t)node->huge_bytes,
                      "checked_bytes", (json_int_t)node->checked_bytes, "placed_bytes",
                      (json_int_t)node->placed_bytes, "giant_bytes", (json_int_t)node->giant_bytes,
                      "spilled_bytes", (json_int_t)node->spilled_bytes, "bound", (int)node->bound));
    }
    for (uint64_t i = 0; i < report->cell_count; i++) {
        const struct numoe_bench_cell *cell = &report->cells[i];

        json_array_append_new(
            results,
            json_pack("{s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "layer",
                      (json_int_t)cell->layer, "tokens", (json_int_t)cell->tokens, "repetitions",
                      (json_int_t)cell->repetitions, "ms", cli_json_number(cell->ms), "ms_min",
                      cli_json_number(cell->ms_min), "ms_p10", cli_json_number(cell->ms_p10),
                      "ms_p90", cli_json_number(cell->ms_p90), "experts_hit",
                      cli_json_number(cell->experts_hit), "bytes",
                      json_integer((json_int_t)llround(cell->bytes)), "gbs",
                      cli_json_number(cell->gbs), "read_gbs", cli_json_number(cell->read_gbs),
                      "bandwidth_fraction", cli_json_number(cell->bandwidth_fraction), "rel_l2",
                      cli_json_number(cell->rel_l2)));
    }
    snprintf(digest, sizeof digest, "%016" PRIx64, report->digest);
    return json_pack(
        "{s:o*, s:o, s:{s:s, s:s, s:I, s:I, s:I, s:I, s:I}, s:{s:s, s:I, s:I, s:s}, s:{s:I, s:o, "
        "s:s, s:o, s:o, s:o, s:I, s:I},"
        " s:{s:I, s:I, s:I, s:I, s:I}, s:o, s:o, s:{s:o, s:o, s:b, s:s}}",
        "stats", report->stats_json, "gpu", cli_gpu_json(info, &report->stats, &report->gpu),
        "model", "directory", directory, "family", info->family, "layers",
        (json_int_t)info->desc.layers, "experts", (json_int_t)info->desc.experts,
        "experts_per_token", (json_int_t)info->desc.experts_per_token, "hidden",
        (json_int_t)info->desc.hidden, "intermediate", (json_int_t)info->desc.intermediate,
        "machine", "cpu", report->machine->cpu_model, "workers", (json_int_t)info->worker_count,
        "workers_pinned", (json_int_t)report->stats.all.workers_pinned, "kernels", info->kernels,
        "load", "bytes", (json_int_t)info->checkpoint_bytes, "seconds",
        cli_json_number(info->load_seconds), "io", info->io_path, "resident_seconds",
        cli_json_number(info->resident_seconds), "placing_seconds",
        cli_json_number(info->placing_seconds), "meanwhile_seconds",
        cli_json_number(info->meanwhile_seconds), "read_depth", (json_int_t)info->read_depth,
        "read_block_bytes", (json_int_t)info->read_block_bytes, "memory", "resident_bytes",
        (json_int_t)info->resident_bytes, "anonymous_bytes",
        (json_int_t)report->memory.anonymous_bytes, "peak_bytes",
        (json_int_t)report->memory.peak_bytes, "cgroup_growth_bytes",
        (json_int_t)cgroup_growth(report, report->memory.cgroup_bytes), "cgroup_growth_most_bytes",
        (json_int_t)cgroup_growth(report, report->cgroup_most), "nodes", nodes, "results", results,
        "check", "worst_rel_l2", cli_json_number(report->worst), "limit",
        cli_json_number(report->limit), "passed", report->worst <= report->limit, "digest", digest);
}

/* What is said of GPUs must not be passed over in silence where none is asked for, by the options
 * or by the environment, which goes before them. */
static int check_gpu_options(const struct cli_values *values)
{
    const char *name = cli_gpu_option(values);
    struct numoe_error error = NUMOE_ERROR_INIT;
    enum numoe_gpu_mode mode = NUMOE_GPU_OFF;

    if (!name || values->gpu)
        return CLI_OK;
    if (numoe_gpu_mode(NUMOE_GPU_OFF, &mode, &error))
        return cli_report("run", CLI_STAGE_OPTIONS, &error);
    if (mode != NUMOE_GPU_OFF)
        return CLI_OK;
    cli_error("run", "--%s is for --gpu", name);
    return CLI_USAGE;
}

static int run(const struct cli_values *values)
{
    struct numoe_load_options load = NUMOE_LOAD_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct report report = {.info = {.size = sizeof report.info},
                            .digest = NUMOE_BENCH_DIGEST_INIT};
    struct numoe_model *model = NULL;
    struct numoe *context = NULL;
    FILE *trace = NULL;
    int code;

    if (values->once && values->repeat) {
        cli_error("run", "--once and --repeat contradict each other");
        return CLI_USAGE;
    }
    if (values->json && values->stats == CLI_STATS_PROMETHEUS) {
        cli_error("run", "--stats=prometheus does not go with --json; --stats does");
        return CLI_USAGE;
    }
    code = check_gpu_options(values);
    if (!code)
        code = cli_trace_open(values->trace, &trace);
    if (code)
        return code;
    cli_memory_read(&report.before);
    code = cli_open("run", values, values->isa_count ? values->isas[0] : NULL, &context);
    if (code)
        goto close;
    load.arithmetic = values->arithmetic_count ? values->arithmetics[0] : NUMOE_FAST;
    load.draft = values->draft;
    load.checksum = values->verify;
    load.family_file = values->family;
    load.read = values->read;
    load.progress = watch_loading;
    load.user = &report;
    if (numoe_model_load(context, values->directory, &load, &model, &error)) {
        /* how experts are to be divided is planned only when the model is known */
        code = cli_report(values->directory,
                          strcmp(error.where, "groups") == 0 ? CLI_STAGE_OPTIONS : CLI_STAGE_INPUT,
                          &error);
        goto close;
    }
    cli_progress_end();
    cli_memory_read(&report.memory);
    if (report.memory.cgroup_bytes > report.cgroup_most)
        report.cgroup_most = report.memory.cgroup_bytes;
    numoe_model_info(model, &report.info);
    report.machine = numoe_context_machine(context);
    report.limit = error_limit(&report.info, values->gpu_from_tokens);
    report.nodes = calloc(report.info.node_count, sizeof *report.nodes);
    if (!report.nodes) {
        cli_error("run", "out of memory");
        code = CLI_NO_ROOM;
        goto destroy;
    }
    for (uint32_t n = 0; n < report.info.node_count; n++) {
        report.nodes[n] = (struct numoe_node_info)NUMOE_NODE_INFO_INIT;
        numoe_model_node(model, n, &report.nodes[n]);
    }

    code = measure(context, model, values, &report);
    if (code)
        goto destroy;
    report.gpu_asked = values->gpu || *report.info.gpu;
    code = cli_stats_take(context, &report.stats);
    if (code)
        goto destroy;
    if (numoe_model_gpu(model))
        numoe_gpu_model_report(numoe_model_gpu(model), &report.gpu);
    numoe_model_info(model, &report.info);
    if (values->json) {
        if (values->stats != CLI_STATS_OFF)
            report.stats_json = numoe_stats_json(&report.stats);
        code = cli_print_json(json_of_report(values->directory, &report));
    } else {
        print_text(values->directory, &report);
        code = cli_print_stats(values, context);
    }
    if (values->gpu_profile && numoe_model_gpu(model) &&
        numoe_gpu_profile_save(numoe_model_gpu(model), values->gpu_profile, &error)) {
        cli_error("run", "%s: %s", error.where, error.message);
        code = code ? code : CLI_FAILURE;
    }
    if (trace) {
        const int written = cli_trace_write(values->trace, context, &trace);

        code = code ? code : written;
    }
    if (values->verify && numoe_model_verify(model, &error)) {
        cli_error("run", "%s", error.message);
        code = CLI_CHECK_FAILED;
    }
    if (!(report.worst <= report.limit)) {
        cli_error("run", "results differ from the reference by %.2e, more than %.2e", report.worst,
                  report.limit);
        code = CLI_CHECK_FAILED;
    }
destroy:
    free(report.cells);
    free(report.nodes);
    numoe_stats_snapshot_free(&report.stats);
    numoe_model_destroy(model);
close:
    cli_progress_end();
    numoe_close(context);
    if (trace)
        fclose(trace);
    return code;
}

static const enum cli_option options[] = {
    CLI_TOKENS,   CLI_REPEAT,       CLI_ONCE,        CLI_ARITHMETIC,
    CLI_ISA,      CLI_PLAN,         CLI_AS_IF,       CLI_BATCH_INVARIANT,
    CLI_WORKERS,  CLI_THREADS,      CLI_TOPOLOGY,    CLI_MEMORY,
    CLI_SPILL,    CLI_NODES,        CLI_CPUS,        CLI_FORM,
    CLI_OPTIMIZE, CLI_RESERVE_CPUS, CLI_KEEP_FREE,   CLI_SEED,
    CLI_GPU,      CLI_STREAM,       CLI_STATS,       CLI_TRACE,
    CLI_GPU_FROM, CLI_GPU_CACHE,    CLI_GPU_PROFILE, CLI_DRAFT,
    CLI_FAMILY,   CLI_VERIFY,       CLI_READ,        CLI_JSON,
    CLI_GPUS,     CLI_GPU_SUM,      CLI_GPU_TUNING,  CLI_END};

const struct cli_verb cli_run = {
    .name = "run",
    .arguments = "DIR",
    .summary = "load a checkpoint's experts, execute its MoE layers, check and time them",
    .description =
        "Recognise the checkpoint in DIR, a directory or a GGUF file, by its files, load its\n"
        "routed experts onto the memory nodes of this machine, and execute each MoE layer on\n"
        "random activations with random routing. Shows for each layer the time, the bytes of\n"
        "experts read and their share of the read bandwidth measured at the same time, the\n"
        "distance of some outputs to a float64 reference, and what memory is used where. The\n"
        "digest is of the bits of the first outputs of every row: the same weights, plan,\n"
        "kernels, --seed and --tokens give the same, on any machine and by any threads. With\n"
        "--topology the plan is made for that machine and executed on this one, unpinned. With\n"
        "--plan nothing is planned: nodes, CPUs and shares are those of the file, and a machine\n"
        "or model that is not what it was made for is refused. With --as-if the plan of another\n"
        "machine is replayed here: what it cuts and the order in which it adds are that plan's,\n"
        "so the digest is that machine's, while memory and workers are those of this one.\n"
        "--tokens is 1,16 unless given.\n",
    .directory = CLI_DIRECTORY_REQUIRED,
    .options = options,
    .run = run,
};
