/* GPUs in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#include "cli_gpu.h"

#include "bench.h"
#include "cli_model.h"
#include "cli_options.h"
#include "cli_output.h"
#include "cli_tune.h"
#include "numoe_gpu.h"
#include "stats_print.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- topo and run ---------------------------------------------------------------------------- */

/* How many devices there are to examine, or why none: negative. */
static int count_gpus(enum numoe_gpu_mode mode, struct numoe_error *error)
{
    if (mode == NUMOE_GPU_OFF)
        return numoe_error_set(error, -ENODEV, "GPU", "NUMOE_GPU=off in the environment");
    return numoe_gpu_count(error);
}

/* What the trial of pinning pins. */
#define TRIAL_BYTES ((uint64_t)64 << 20)

static void examine(uint32_t index, const struct numoe_machine *machine, enum numoe_gpu_mode mode,
                    struct numoe_gpu_properties *p, struct numoe_gpu_verdict *verdict,
                    struct numoe_gpu_pinning *pinning)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu *gpu;

    *pinning = (struct numoe_gpu_pinning){.os_node = NUMOE_NONE};
    *verdict = (struct numoe_gpu_verdict){.rel_l2 = -1};
    if (numoe_gpu_describe(index, machine, p, &error)) {
        snprintf(verdict->reason, sizeof verdict->reason, "%.*s", (int)sizeof verdict->reason - 1,
                 error.message);
        return;
    }
    if (!numoe_gpu_open(index, mode, machine, NULL, &gpu, verdict, NULL)) {
        *p = *numoe_gpu_get(gpu);
        if (numoe_gpu_try_pinning(gpu, TRIAL_BYTES, pinning, &error))
            snprintf(pinning->reason, sizeof pinning->reason, "%.*s",
                     (int)sizeof pinning->reason - 1, error.message);
        numoe_gpu_close(gpu);
    }
}

static void print_gpu(const struct numoe_gpu_properties *p, const struct numoe_gpu_verdict *v)
{
    printf("GPU %u: %s, %s, compute capability %d.%d, %u multiprocessors, %.1f of %.1f GB free, ",
           p->index, p->name, p->bus, p->major, p->minor, p->multiprocessors,
           (double)p->free_bytes / 1e9, (double)p->memory_bytes / 1e9);
    if (p->locality_known)
        printf("local to node %u\n", p->os_node);
    else
        printf("locality not known\n");
    printf("  %s: %s\n", v->usable ? v->forced ? "used because forced" : "can be used" : "not used",
           v->reason);
}

void cli_topo_gpus(const struct numoe_machine *machine, enum numoe_gpu_mode mode)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    int count;

    if (!machine->live) {
        cli_print_staging(machine);
        return;
    }
    cli_print_pinnable(machine);
    count = count_gpus(mode, &error);
    if (count < 0) {
        printf("no GPU is used: %s\n", error.message);
        return;
    }
    for (uint32_t i = 0; i < (uint32_t)count; i++) {
        struct numoe_gpu_properties p;
        struct numoe_gpu_verdict v;
        struct numoe_gpu_pinning pinning;
        examine(i, machine, mode, &p, &v, &pinning);
        print_gpu(&p, &v);
        if (v.usable)
            cli_print_pinning(&pinning);
    }
}

static json_t *gpu_json(const struct numoe_gpu_properties *p)
{
    char capability[32];

    snprintf(capability, sizeof capability, "%d.%d", p->major, p->minor);
    return json_pack("{s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "index",
                     (json_int_t)p->index, "name", p->name, "bus", p->bus, "compute_capability",
                     capability, "multiprocessors", (json_int_t)p->multiprocessors, "memory_bytes",
                     (json_int_t)p->memory_bytes, "free_bytes", (json_int_t)p->free_bytes,
                     "shared_bytes", (json_int_t)p->shared_bytes, "driver_version",
                     (json_int_t)p->driver_version, "ptx_version", (json_int_t)p->ptx_version,
                     "node", p->locality_known ? json_integer(p->os_node) : json_null());
}

int cli_topo_json(const struct numoe_machine *machine, const struct numoe_warnings *warnings,
                  enum numoe_gpu_mode mode)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&text, &size);
    json_t *object, *gpus = json_array(), *warned;
    int count, rc;

    if (!memory) {
        json_decref(gpus);
        return -ENOMEM;
    }
    rc = numoe_machine_print_json(machine, memory);
    if (fclose(memory) && !rc)
        rc = -ENOMEM;
    object = rc ? NULL : json_loads(text, 0, NULL);
    free(text);
    if (!object) {
        json_decref(gpus);
        return rc ? rc : -ENOMEM;
    }
    count = machine->live ? count_gpus(mode, &error) : 0;
    for (uint32_t i = 0; count > 0 && i < (uint32_t)count; i++) {
        struct numoe_gpu_properties p;
        struct numoe_gpu_verdict v;
        struct numoe_gpu_pinning pinning;
        json_t *gpu;
        examine(i, machine, mode, &p, &v, &pinning);
        gpu = gpu_json(&p);
        json_object_set_new(gpu, "pinning", v.usable ? cli_pinning_json(&pinning) : json_null());
        json_object_set_new(gpu, "usable", json_boolean(v.usable));
        json_object_set_new(gpu, "forced", json_boolean(v.forced));
        json_object_set_new(gpu, "reason", json_string(v.reason));
        json_array_append_new(gpus, gpu);
    }
    json_object_set_new(object, "gpus", gpus);
    json_object_set_new(object, "pinning", cli_pinnable_json(machine));
    if (!machine->live)
        json_object_set_new(object, "staging", cli_staging_json(machine));
    warned = json_array();
    for (uint32_t i = 0; i < warnings->count; i++) {
        const struct numoe_warning *w = &warnings->list[i];

        json_array_append_new(warned, json_pack("{s:s, s:s, s:s}", "what", w->what, "message",
                                                w->message, "fix", w->fix));
    }
    json_object_set_new(object, "warnings", warned);
    json_object_set_new(object, "gpu_reason", json_string(count < 0 ? error.message : ""));
    rc = json_dumpf(object, stdout, JSON_INDENT(2)) ? -EIO : 0;
    putchar('\n');
    json_decref(object);
    return rc;
}

/* How a GPU gets at host memory, and what has come over its link. */
static void print_row(uint32_t index, const struct numoe_gpu_stats *g)
{
    printf("GPU %" PRIu32 ", %s %s%s: ", index, g->name, g->bus, g->lost ? ", lost" : "");
    if (g->pinning == NUMOE_PINNING_NONE)
        printf("no host memory to copy from");
    else
        printf("%.2f of %.2f GB of host memory pinned in place, %" PRIu64 " chunks",
               (double)g->pinned_bytes / 1e9, (double)g->arena_bytes / 1e9, g->pinned_chunks);
    if (g->ring_bytes) {
        printf("; staging for the rest: %" PRIu64 " MiB ", g->ring_bytes >> 20);
        if (g->ring_node == UINT32_MAX)
            printf("wherever the system put it");
        else
            printf("on node %" PRIu32, g->ring_node);
        if (g->ring_checked_bytes && g->ring_node != UINT32_MAX)
            printf(", %.0f %% of it there",
                   100 * (double)g->ring_placed_bytes / (double)g->ring_checked_bytes);
    }
    if (*g->pin_refusal)
        printf("; %s", g->pin_refusal);
    printf("\n  %.2f GB copied: %" PRIu64 " experts, computed in %" PRIu64 " pieces; %" PRIu64
           " were there when they were asked for\n",
           (double)g->copied_bytes / 1e9, g->copied_experts, g->pieces, g->found_experts);
}

/* Where several GPUs' outputs are summed; nothing where workers were asked to. */
static void print_sums(const struct numoe_gpu_report *report)
{
    if (report->sum == NUMOE_GPU_SUM_HOST && !*report->sum_note)
        return;
    if (report->sum == NUMOE_GPU_SUM_HOST)
        printf("outputs summed by workers");
    else
        printf("outputs of %" PRIu64 " tokens summed by %s", report->summed_tokens,
               report->sum == NUMOE_GPU_SUM_NCCL ? "NCCL" : "GPUs");
    if (report->peer_bytes)
        printf("; %.2f GB copied between GPUs", (double)report->peer_bytes / 1e9);
    if (report->peer_gbs > 0)
        printf(", at %.1f GB/s where all do", report->peer_gbs);
    if (*report->sum_note)
        printf("; %s", report->sum_note);
    putchar('\n');
}

static void set_sums(json_t *object, const struct numoe_gpu_report *report)
{
    json_object_set_new(object, "sum", json_string(numoe_gpu_sum_names[report->sum]));
    json_object_set_new(object, "sum_note", json_string(report->sum_note));
    json_object_set_new(object, "summed_tokens", json_integer((json_int_t)report->summed_tokens));
    json_object_set_new(object, "peer_bytes", json_integer((json_int_t)report->peer_bytes));
    json_object_set_new(object, "peer_gbs", json_real(report->peer_gbs));
}

void cli_print_gpu(const struct numoe_model_info *info, const struct stats_snapshot *stats,
                   const struct numoe_gpu_report *report)
{
    if (!*info->gpu) {
        printf("computed on the CPU, not on a GPU: %s\n", info->gpu_note);
        return;
    }
    printf("computed on %s: %" PRIu64 " of %" PRIu64 " calls; %s; ", info->gpu,
           stats->all.gpu_calls, stats->all.calls, info->gpu_note);
    if (info->gpu_resident)
        printf("all experts stay in device memory");
    else
        printf("room for %" PRIu64 " of %" PRIu64 " experts to stay in device memory",
               info->gpu_experts, report->experts);
    printf(" (%.2f GB)\n", (double)info->gpu_bytes / 1e9);
    for (uint32_t g = 0; g < stats->all.gpus; g++)
        print_row(g, &stats->gpus[g]);
    print_sums(report);
}

static void set_ring(json_t *object, const struct numoe_gpu_report *report)
{
    json_object_set_new(object, "pin_refusal", json_string(report->pin_refusal));
    json_object_set_new(object, "ring_bytes", json_integer((json_int_t)report->ring_bytes));
    json_object_set_new(object, "ring_node",
                        !report->ring_bytes || report->ring_node == NUMOE_NONE
                            ? json_null()
                            : json_integer(report->ring_node));
    json_object_set_new(object, "ring_checked_bytes",
                        json_integer((json_int_t)report->ring_checked));
    json_object_set_new(object, "ring_placed_bytes", json_integer((json_int_t)report->ring_placed));
}

json_t *cli_gpu_json(const struct numoe_model_info *info, const struct stats_snapshot *stats,
                     const struct numoe_gpu_report *report)
{
    json_t *object = json_pack(
        "{s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "name", info->gpu, "note",
        info->gpu_note, "resident", (int)info->gpu_resident, "cells", (json_int_t)info->gpu_experts,
        "device_bytes", (json_int_t)info->gpu_bytes, "pinned_bytes",
        (json_int_t)info->gpu_pinned_bytes, "calls", (json_int_t)stats->all.gpu_calls, "tokens",
        (json_int_t)stats->all.gpu_tokens, "copied_bytes", (json_int_t)report->copied_bytes,
        "copied_experts", (json_int_t)report->copied_experts, "found_experts",
        (json_int_t)report->found, "pieces", (json_int_t)report->pieces);
    json_t *rows = json_array();

    set_ring(object, report);
    for (uint32_t g = 0; g < stats->all.gpus; g++)
        json_array_append_new(rows, numoe_stats_gpu_json(&stats->gpus[g], g));
    json_object_set_new(object, "gpus", rows);
    set_sums(object, report);
    return object;
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const uint32_t default_tokens[] = {1, 16, 64, 1024, 8192};

enum { DEFAULT_TOKEN_COUNT = sizeof default_tokens / sizeof default_tokens[0] };

/* The relative L2 distance to float64 that results must stay within. */
static double limit_of(enum numoe_arithmetic arithmetic)
{
    return arithmetic == NUMOE_MXFP8_UP ? 6e-2 : arithmetic == NUMOE_MXFP8_OCP ? 1e-1 : 5e-3;
}

enum { SAMPLES = 4 }; /* tokens that are compared */

struct cell {
    uint64_t tokens;
    uint32_t repetitions, routings, form;
    double ms, ms_min, ms_p10, ms_p90, bytes, gbs, gops, rel_l2;
    struct numoe_gpu_bench_stream stream;
};

struct bench_gpu {
    const struct cli_values *values;
    struct numoe_model_desc desc;
    struct numoe_model *model;
    const struct numoe_gpu_properties *gpu;
    struct numoe_gpu_report report;
    uint64_t expert_bytes;
    double read_gbs, link_gbs, mma_gops;
    struct cell *cells;
    uint32_t cell_count;
};

/* The inputs of a cell. */
struct batch {
    struct numoe_gpu_bench bench;
    uint16_t *x;
    int32_t *ids;
    float *routing, *out;
    double *ms;
};

static void batch_free(struct batch *b)
{
    free(b->x);
    free(b->ids);
    free(b->routing);
    free(b->out);
    free(b->ms);
}

static int batch_make(struct batch *b, const struct bench_gpu *g, uint64_t tokens,
                      uint32_t routings, uint32_t repeat)
{
    const uint64_t hidden = g->desc.hidden, top_k = g->desc.experts_per_token;
    struct numoe_bench_random random = {.state = g->values->seed + tokens};
    struct numoe_error error = NUMOE_ERROR_INIT;

    *b = (struct batch){0};
    if (numoe_bench_room(tokens, hidden, routings * tokens * top_k, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    b->x = malloc(tokens * hidden * sizeof *b->x);
    b->ids = malloc(routings * tokens * top_k * sizeof *b->ids);
    b->routing = malloc(routings * tokens * top_k * sizeof *b->routing);
    b->out = malloc(tokens * hidden * sizeof *b->out);
    b->ms = calloc(repeat, sizeof *b->ms);
    if (!b->x || !b->ids || !b->routing || !b->out || !b->ms) {
        cli_error("bench", "no room for %" PRIu64 " tokens", tokens);
        return CLI_NO_ROOM;
    }
    numoe_bench_activations(&random, b->x, tokens * hidden);
    numoe_bench_route(&random, routings * tokens, top_k, g->desc.experts, b->ids, b->routing);
    b->bench = (struct numoe_gpu_bench){
        .tokens = tokens,
        .top_k = top_k,
        .routings = routings,
        .repeat = repeat,
        .x = b->x,
        .ids = b->ids,
        .routing = b->routing,
        .out = b->out,
        .ms = b->ms,
    };
    return CLI_OK;
}

/* Some tokens against float64; routing: the one that out is of. */
static int check(const struct bench_gpu *g, const struct batch *b, uint64_t layer, uint32_t routing,
                 double *rel_l2)
{
    const uint64_t pairs = b->bench.tokens * b->bench.top_k;
    const struct numoe_bench_outputs outputs = {
        .layer = layer,
        .tokens = b->bench.tokens,
        .top_k = b->bench.top_k,
        .x = b->x,
        .ids = b->ids + routing * pairs,
        .weights = b->routing + routing * pairs,
        .out = b->out,
    };
    struct numoe_error error = NUMOE_ERROR_INIT;

    return numoe_bench_check(g->model, &outputs, SAMPLES, rel_l2, &error)
               ? cli_report("bench", CLI_STAGE_WORK, &error)
               : CLI_OK;
}

/* The sampled tokens of every layer of the streamed pass; rel_l2: the worst layer's. */
static int check_sampled(const struct bench_gpu *g, const struct batch *b, double *rel_l2)
{
    const uint64_t hidden = g->desc.hidden, top_k = b->bench.top_k, samples = b->bench.samples;
    uint16_t *x = calloc(samples * hidden, sizeof *x);
    int32_t *ids = calloc(samples * top_k, sizeof *ids);
    float *weights = calloc(samples * top_k, sizeof *weights);
    int code = CLI_OK;

    *rel_l2 = 0;
    if (!x || !ids || !weights) {
        cli_error("bench", "out of memory");
        code = CLI_NO_ROOM;
        goto out;
    }
    for (uint64_t i = 0; i < samples; i++) {
        const uint64_t t = b->bench.sample[i];
        memcpy(x + i * hidden, b->x + t * hidden, hidden * sizeof *x);
        memcpy(ids + i * top_k, b->ids + t * top_k, top_k * sizeof *ids);
        memcpy(weights + i * top_k, b->routing + t * top_k, top_k * sizeof *weights);
    }
    for (uint64_t layer = 0; !code && layer < g->desc.layers; layer++) {
        const struct numoe_bench_outputs outputs = {
            .layer = layer,
            .tokens = samples,
            .top_k = top_k,
            .x = x,
            .ids = ids,
            .weights = weights,
            .out = b->bench.sampled + layer * samples * hidden,
        };
        struct numoe_error error = NUMOE_ERROR_INIT;
        double distance;

        if (numoe_bench_check(g->model, &outputs, samples, &distance, &error))
            code = cli_report("bench", CLI_STAGE_WORK, &error);
        else if (!(distance <= *rel_l2))
            *rel_l2 = distance;
    }
out:
    free(x);
    free(ids);
    free(weights);
    return code;
}

/* Mean bytes of the distinct experts of a routing. */
static double hit_bytes(const struct bench_gpu *g, const struct batch *b)
{
    const uint64_t pairs = b->bench.tokens * b->bench.top_k;
    uint32_t *seen = calloc(g->desc.experts, sizeof *seen);
    uint64_t hits = 0;

    if (!seen)
        return NAN;
    for (uint32_t r = 0; r < b->bench.routings; r++)
        for (uint64_t i = 0; i < pairs; i++) {
            uint32_t *s = &seen[b->ids[r * pairs + i]];
            hits += *s != r + 1;
            *s = r + 1;
        }
    free(seen);
    return (double)hits / b->bench.routings * (double)g->expert_bytes;
}

static double operations(const struct bench_gpu *g, uint64_t tokens)
{
    return 6.0 * (double)tokens * (double)g->desc.experts_per_token * (double)g->desc.hidden *
           (double)g->desc.intermediate;
}

static int measure_resident(struct bench_gpu *g, uint64_t tokens, uint32_t index)
{
    const uint32_t repeat = g->values->repeat ? g->values->repeat : 24;
    const uint32_t routings = tokens <= 64 ? 8 : tokens <= 1024 ? 4 : 2;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct cell *cell = &g->cells[index];
    struct batch b;
    int code = batch_make(&b, g, tokens, routings, repeat);

    if (code)
        goto out;
    if (numoe_gpu_bench_layer(numoe_model_gpu(g->model), index % g->desc.layers, &b.bench,
                              &error)) {
        code = cli_report("bench", CLI_STAGE_WORK, &error);
        goto out;
    }
    *cell = (struct cell){
        .tokens = tokens, .repetitions = repeat, .routings = routings, .form = b.bench.form};
    code = check(g, &b, index % g->desc.layers, routings - 1, &cell->rel_l2);
    cell->ms = numoe_bench_quantile(b.ms, repeat, 0.5);
    cell->ms_min = numoe_bench_quantile(b.ms, repeat, 0);
    cell->ms_p10 = numoe_bench_quantile(b.ms, repeat, 0.1);
    cell->ms_p90 = numoe_bench_quantile(b.ms, repeat, 0.9);
    cell->bytes = hit_bytes(g, &b);
    cell->gbs = cell->bytes / cell->ms / 1e6;
    cell->gops = operations(g, tokens) / cell->ms / 1e6;
out:
    batch_free(&b);
    return code;
}

static int measure_stream(struct bench_gpu *g, uint64_t tokens, uint32_t index)
{
    const uint32_t repeat = g->values->repeat ? g->values->repeat : 5;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct cell *cell = &g->cells[index];
    struct batch b;
    int code = batch_make(&b, g, tokens, 1, repeat);
    const uint32_t samples = tokens < SAMPLES ? (uint32_t)tokens : SAMPLES;
    uint64_t sample[SAMPLES];
    float *sampled = NULL;

    if (code)
        goto out;
    sampled = calloc(g->desc.layers * samples * g->desc.hidden, sizeof *sampled);
    if (!sampled) {
        cli_error("bench", "no room for the outputs of %" PRIu64 " layers", g->desc.layers);
        code = CLI_NO_ROOM;
        goto out;
    }
    for (uint32_t i = 0; i < samples; i++)
        sample[i] = samples > 1 ? i * (tokens - 1) / (samples - 1) : 0;
    b.bench.sample = sample;
    b.bench.samples = samples;
    b.bench.sampled = sampled;
    *cell = (struct cell){.tokens = tokens, .repetitions = repeat, .routings = 1};
    if (numoe_gpu_bench_layers(numoe_model_gpu(g->model), &b.bench, &cell->stream, &error)) {
        code = cli_report("bench", CLI_STAGE_WORK, &error);
        goto out;
    }
    code = check_sampled(g, &b, &cell->rel_l2);
    cell->ms = cell->stream.total_ms;
    cell->bytes = (double)cell->stream.bytes;
    cell->gbs = cell->bytes / cell->ms / 1e6;
    cell->gops = operations(g, tokens) * (double)g->desc.layers / cell->ms / 1e6;
out:
    free(sampled);
    batch_free(&b);
    return code;
}

static void print_header(const struct bench_gpu *g, const char *model)
{
    printf("%s, %" PRIu64 " layer%s of %" PRIu64 " experts, %" PRIu64 " a token\n"
           "%s, compute capability %d.%d, %s; reads %.0f GB/s, link %.1f GB/s from pinned memory, "
           "mma %.0f Gop/s\n",
           model, g->desc.layers, g->desc.layers == 1 ? "" : "s", g->desc.experts,
           g->desc.experts_per_token, g->gpu->name, g->gpu->major, g->gpu->minor,
           g->gpu->ptx_version == 10 * g->gpu->major + g->gpu->minor ? "machine code"
                                                                     : "compiled from PTX",
           g->read_gbs, g->link_gbs, g->mma_gops);
    if (g->values->stream)
        printf("%.2f GB a layer through %.2f GB, %.0f %% of host memory pinned\n\n"
               "tokens  total ms   copy ms  compute ms  total/max    GB/s  of link  (copies)  "
               "host CPU   rel. L2\n",
               (double)(g->desc.experts * g->report.expert_bytes) / 1e9,
               (double)g->report.window_bytes / 1e9,
               100 * (double)g->report.pinned_bytes / (double)g->report.arena_bytes);
    else
        printf("weights in device memory\n\n"
               "tokens        ms   (p10 - p90)            GB/s   of read     Gop/s    of mma   "
               "rel. L2  form\n");
}

static double longest(const struct cell *cell)
{
    return fmax(cell->stream.copy_ms, cell->stream.compute_ms);
}

static void print_cell(const struct bench_gpu *g, const struct cell *cell)
{
    const char *wrong = cell->rel_l2 <= limit_of(g->desc.arithmetic) ? "" : "  WRONG";

    if (g->values->stream)
        printf("%6" PRIu64 " %9.2f %9.2f %11.2f %10.3f %7.1f %8.3f %9.3f %8.1f%%  %8.2e%s\n",
               cell->tokens, cell->stream.total_ms, cell->stream.copy_ms, cell->stream.compute_ms,
               cell->ms / longest(cell), cell->gbs, cell->stream.link_fraction,
               cell->stream.copy_link_fraction, 100 * cell->stream.host_cpu, cell->rel_l2, wrong);
    else
        printf("%6" PRIu64 " %9.4f   (%.4f - %.4f)%*s %7.0f %9.3f %9.0f %9.3f  %8.2e  %s%s\n",
               cell->tokens, cell->ms, cell->ms_p10, cell->ms_p90,
               19 - snprintf(NULL, 0, "(%.4f - %.4f)", cell->ms_p10, cell->ms_p90), "", cell->gbs,
               cell->gbs / g->read_gbs, cell->gops, cell->gops / g->mma_gops, cell->rel_l2,
               numoe_gpu_form_names[cell->form], wrong);
    fflush(stdout);
}

static json_t *cell_json(const struct bench_gpu *g, const struct cell *cell)
{
    json_t *object =
        json_pack("{s:s, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "arithmetic",
                  cli_arithmetic_name(g->desc.arithmetic), "tokens", (json_int_t)cell->tokens,
                  "repetitions", (json_int_t)cell->repetitions, "routings",
                  (json_int_t)cell->routings, "ms", cli_json_number(cell->ms), "bytes",
                  json_integer((json_int_t)llround(cell->bytes)), "gbs", cli_json_number(cell->gbs),
                  "gops", cli_json_number(cell->gops), "rel_l2", cli_json_number(cell->rel_l2));

    if (g->values->stream) {
        json_object_set_new(object, "copy_ms", cli_json_number(cell->stream.copy_ms));
        json_object_set_new(object, "compute_ms", cli_json_number(cell->stream.compute_ms));
        json_object_set_new(object, "total_over_max", cli_json_number(cell->ms / longest(cell)));
        json_object_set_new(object, "link_gbs", cli_json_number(cell->stream.link_gbs));
        json_object_set_new(object, "link_fraction", cli_json_number(cell->stream.link_fraction));
        json_object_set_new(object, "copy_link_fraction",
                            cli_json_number(cell->stream.copy_link_fraction));
        json_object_set_new(object, "host_cpu_cores", cli_json_number(cell->stream.host_cpu));
    } else {
        json_object_set_new(object, "form", json_string(numoe_gpu_form_names[cell->form]));
        json_object_set_new(object, "ms_min", cli_json_number(cell->ms_min));
        json_object_set_new(object, "ms_p10", cli_json_number(cell->ms_p10));
        json_object_set_new(object, "ms_p90", cli_json_number(cell->ms_p90));
        json_object_set_new(object, "bandwidth_fraction", cli_json_number(cell->gbs / g->read_gbs));
        json_object_set_new(object, "mma_fraction", cli_json_number(cell->gops / g->mma_gops));
    }
    return object;
}

static json_t *json_of(const struct bench_gpu *g, const char *model)
{
    json_t *results = json_array(), *memory;

    for (uint32_t i = 0; i < g->cell_count; i++)
        json_array_append_new(results, cell_json(g, &g->cells[i]));
    memory = json_pack("{s:I, s:I, s:I, s:I, s:I}", "cells", (json_int_t)g->report.cells,
                       "expert_bytes", (json_int_t)g->report.expert_bytes, "window_bytes",
                       (json_int_t)g->report.window_bytes, "pinned_bytes",
                       (json_int_t)g->report.pinned_bytes, "arena_bytes",
                       (json_int_t)g->report.arena_bytes);
    set_ring(memory, &g->report);
    return json_pack("{s:s, s:o, s:{s:o, s:o, s:o}, s:o, s:{s:s, s:I, s:I, s:I, s:I, s:I, s:I},"
                     " s:o}",
                     "mode", g->values->stream ? "stream" : "resident", "results", results,
                     "ceilings", "read_gbs", cli_json_number(g->read_gbs), "link_gbs",
                     cli_json_number(g->link_gbs), "mma_gops", cli_json_number(g->mma_gops), "gpu",
                     gpu_json(g->gpu), "model", "name", model, "layers", (json_int_t)g->desc.layers,
                     "experts", (json_int_t)g->desc.experts, "experts_per_token",
                     (json_int_t)g->desc.experts_per_token, "hidden", (json_int_t)g->desc.hidden,
                     "intermediate", (json_int_t)g->desc.intermediate, "expert_bytes",
                     (json_int_t)g->expert_bytes, "memory", memory);
}

static void progress(uint64_t done, uint64_t total)
{
    cli_progress("making random experts: %" PRIu64 " of %" PRIu64, done, total);
}

static int measure(struct bench_gpu *g, const char *name)
{
    const struct cli_values *values = g->values;
    const uint32_t *tokens = values->tokens.count ? values->tokens.values : default_tokens;
    const uint32_t kinds = values->tokens.count ? values->tokens.count : DEFAULT_TOKEN_COUNT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    bool wrong = false;
    int code = CLI_OK;

    g->cells = calloc(kinds, sizeof *g->cells);
    if (!g->cells) {
        cli_error("bench", "out of memory");
        return CLI_NO_ROOM;
    }
    if (numoe_gpu_ceilings(numoe_context_gpu(numoe_model_context(g->model)), &g->read_gbs,
                           &g->link_gbs, &g->mma_gops, &error))
        return cli_report("bench", CLI_STAGE_WORK, &error);
    cli_progress_end();
    if (!values->json)
        print_header(g, name);
    for (uint32_t i = 0; i < kinds && !code; i++) {
        cli_progress("%" PRIu32 " tokens", tokens[i]);
        code = values->stream ? measure_stream(g, tokens[i], i) : measure_resident(g, tokens[i], i);
        cli_progress_end();
        if (code)
            break;
        g->cell_count++;
        wrong = wrong || !(g->cells[i].rel_l2 <= limit_of(g->desc.arithmetic));
        if (!values->json)
            print_cell(g, &g->cells[i]);
    }
    if (code)
        return code;
    code = values->json ? cli_print_json(json_of(g, name)) : cli_flush(CLI_OK);
    if (!code && wrong) {
        cli_error("bench", "results differ from the reference by more than %.0e",
                  limit_of(g->desc.arithmetic));
        code = CLI_CHECK_FAILED;
    }
    return code;
}

int cli_bench_gpu(const struct cli_values *values)
{
    const char *name = values->model ? values->model : "v4-flash";
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct bench_gpu g = {.values = values};
    struct cli_values sized = *values;
    struct numoe *context = NULL;
    int code;

    if (values->resident && values->stream) {
        cli_error("bench", "--resident and --stream exclude each other");
        return CLI_USAGE;
    }
    if (values->tune && (values->stream || values->tokens.count)) {
        cli_error("bench", "--tune measures by itself, without --%s",
                  values->stream ? "stream" : "tokens");
        return CLI_USAGE;
    }
    const enum numoe_arithmetic arithmetic =
        values->arithmetic_count ? values->arithmetics[0] : NUMOE_EXACT;
    if (values->arithmetic_count > 1 || arithmetic == NUMOE_FAST || arithmetic == NUMOE_FINE) {
        cli_error("bench", "a GPU computes one of exact, mxfp8 and mxfp8-ocp");
        return CLI_USAGE;
    }
    if (!sized.layers)
        sized.layers = values->stream ? 8 : 1;
    code = cli_model_by_name("bench", &sized, name, &g.desc);
    if (code)
        return code;
    g.desc.arithmetic = arithmetic;
    code = cli_open("bench", values, values->isa_count ? values->isas[0] : NULL, &context);
    if (code)
        return code;
    if (!numoe_context_gpu(context)) { /* the reason has been told by the log */
        cli_error("bench", "there is no GPU to measure");
        code = CLI_FAILURE;
        goto close;
    }
    if (numoe_model_create(context, &g.desc, &g.model, &error)) {
        code = cli_report("bench", CLI_STAGE_OPTIONS, &error);
        goto close;
    }
    numoe_model_info(g.model, &info);
    g.expert_bytes = info.expert_bytes;
    g.gpu = numoe_gpu_get(numoe_context_gpu(context));
    if (!numoe_model_gpu(g.model)) {
        code = CLI_FAILURE;
        goto destroy;
    }
    numoe_gpu_model_report(numoe_model_gpu(g.model), &g.report);
    if (numoe_bench_fill(g.model, values->seed, progress, &error)) {
        code = cli_report("bench", CLI_STAGE_WORK, &error);
        goto destroy;
    }
    code = values->tune ? cli_tune(values, g.model, &g.desc) : measure(&g, name);
destroy:
    free(g.cells);
    numoe_model_destroy(g.model);
close:
    cli_progress_end();
    numoe_close(context);
    return code;
}
