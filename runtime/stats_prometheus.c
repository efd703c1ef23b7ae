/*
 * Stats in Prometheus' text exposition format, version 0.0.4. Units are seconds and bytes; nothing
 * that was not measured is written.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "stats_print.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>

#include "numoe_gpu.h"

/* One metric with a sample for each worker or node: where its number is in the struct. */
struct column {
    const char *name, *help;
    size_t offset;
    bool seconds; /* the number is in nanoseconds */
    bool timed;   /* only when times are measured */
    bool gauge;
};

#define WORK(field) offsetof(struct numoe_worker_stats, work.field)
#define NODE(field) offsetof(struct numoe_node_stats, field)
#define GPU(field) offsetof(struct numoe_gpu_stats, field)

static const struct column worker_columns[] = {
    {.name = "numoe_worker_items_total", .help = "Pieces of work run.", .offset = WORK(items)},
    {.name = "numoe_worker_stolen_items_total",
     .help = "Pieces of work taken from other workers.",
     .offset = WORK(stolen_items)},
    {.name = "numoe_worker_refusals_total",
     .help = "Looks that found nothing but work not worth the trip.",
     .offset = WORK(refusals)},
    {.name = "numoe_worker_sleeps_total", .help = "Times parked.", .offset = WORK(sleeps)},
    {.name = "numoe_worker_read_bytes_total",
     .help = "Bytes of weights that kernels went over.",
     .offset = WORK(read_bytes)},
    {.name = "numoe_worker_remote_bytes_total",
     .help = "Bytes of weights read from another node than the worker's.",
     .offset = WORK(remote_bytes)},
    {.name = "numoe_worker_busy_seconds_total",
     .help = "Time running items.",
     .offset = WORK(busy_ns),
     .seconds = true,
     .timed = true},
    {.name = "numoe_worker_parked_seconds_total",
     .help = "Time asleep.",
     .offset = WORK(parked_ns),
     .seconds = true,
     .timed = true},
};

static const struct column node_columns[] = {
    {.name = "numoe_node_expert_bytes_total",
     .help = "Bytes of experts in the node's memory read at least once by a call.",
     .offset = NODE(expert_bytes)},
    {.name = "numoe_node_planned_bytes",
     .help = "Bytes of experts planned on the node.",
     .offset = NODE(planned_bytes),
     .gauge = true},
    {.name = "numoe_node_huge_bytes",
     .help = "Bytes of experts on pages of 2 MiB or 1 GiB.",
     .offset = NODE(huge_bytes),
     .gauge = true},
    {.name = "numoe_node_giant_bytes",
     .help = "Bytes of experts on pages of 1 GiB.",
     .offset = NODE(giant_bytes),
     .gauge = true},
    {.name = "numoe_node_spilled_bytes",
     .help = "Bytes of experts that the node had no room for.",
     .offset = NODE(spilled_bytes),
     .gauge = true},
    {.name = "numoe_node_checked_bytes",
     .help = "Bytes of pages whose place was looked at.",
     .offset = NODE(checked_bytes),
     .gauge = true},
    {.name = "numoe_node_placed_bytes",
     .help = "Bytes of these on the node that was planned.",
     .offset = NODE(placed_bytes),
     .gauge = true},
};

static const struct column gpu_columns[] = {
    {.name = "numoe_gpu_arena_bytes",
     .help = "Bytes of host memory that experts are copied from.",
     .offset = GPU(arena_bytes),
     .gauge = true},
    {.name = "numoe_gpu_pinned_bytes",
     .help = "Bytes of it that are pinned where they lie.",
     .offset = GPU(pinned_bytes),
     .gauge = true},
    {.name = "numoe_gpu_pinned_chunks",
     .help = "Registrations that they are pinned by.",
     .offset = GPU(pinned_chunks),
     .gauge = true},
    {.name = "numoe_gpu_ring_bytes",
     .help = "Bytes of pinned staging for what is not.",
     .offset = GPU(ring_bytes),
     .gauge = true},
    {.name = "numoe_gpu_ring_checked_bytes",
     .help = "Bytes of staging whose place was looked at.",
     .offset = GPU(ring_checked_bytes),
     .gauge = true},
    {.name = "numoe_gpu_ring_placed_bytes",
     .help = "Bytes of these on the node that was asked for.",
     .offset = GPU(ring_placed_bytes),
     .gauge = true},
    {.name = "numoe_gpu_device_bytes",
     .help = "Bytes of device memory taken.",
     .offset = GPU(device_bytes),
     .gauge = true},
    {.name = "numoe_gpu_window_bytes",
     .help = "Bytes of these that experts pass through.",
     .offset = GPU(window_bytes),
     .gauge = true},
    {.name = "numoe_gpu_cells",
     .help = "Experts that there is room for to stay.",
     .offset = GPU(cells),
     .gauge = true},
    {.name = "numoe_gpu_experts",
     .help = "Experts that it computes.",
     .offset = GPU(experts),
     .gauge = true},
    {.name = "numoe_gpu_device_calls_total",
     .help = "Calls that the device had a part in.",
     .offset = GPU(calls)},
    {.name = "numoe_gpu_device_tokens_total",
     .help = "Tokens of these calls.",
     .offset = GPU(tokens)},
    {.name = "numoe_gpu_copied_bytes_total",
     .help = "Bytes of experts copied over the link.",
     .offset = GPU(copied_bytes)},
    {.name = "numoe_gpu_copied_experts_total",
     .help = "Experts copied over the link.",
     .offset = GPU(copied_experts)},
    {.name = "numoe_gpu_found_experts_total",
     .help = "Experts asked for that were on the device.",
     .offset = GPU(found_experts)},
    {.name = "numoe_gpu_pieces_total",
     .help = "Parts of layers that were computed as they came.",
     .offset = GPU(pieces)},
    {.name = "numoe_gpu_batches_total",
     .help = "Copies that were queued as one.",
     .offset = GPU(batches)},
    {.name = "numoe_gpu_peer_bytes_total",
     .help = "Bytes copied to it from other GPUs.",
     .offset = GPU(peer_bytes)},
    {.name = "numoe_gpu_summed_tokens_total",
     .help = "Tokens whose outputs of several GPUs it has summed.",
     .offset = GPU(summed_tokens)},
};

static void put_head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* A number that was counted in nanoseconds, as seconds without rounding. */
static void put_seconds(FILE *out, uint64_t ns)
{
    fprintf(out, "%" PRIu64 ".%09" PRIu64 "\n", ns / 1000000000, ns % 1000000000);
}

static void put_value(FILE *out, const struct column *column, const void *from)
{
    const uint64_t value = *(const uint64_t *)(const void *)((const char *)from + column->offset);

    if (column->seconds)
        put_seconds(out, value);
    else
        fprintf(out, "%" PRIu64 "\n", value);
}

static void put_worker_label(FILE *out, const struct stats_snapshot *s, uint32_t w)
{
    fprintf(out, "worker=\"%" PRIu32 "\",node=\"%" PRIu32 "\"", w,
            s->nodes[s->workers[w].node].os_index);
}

static void put_workers(FILE *out, const struct stats_snapshot *s)
{
    for (size_t c = 0; c < sizeof worker_columns / sizeof worker_columns[0]; c++) {
        const struct column *column = &worker_columns[c];

        if (column->timed && !s->all.timed)
            continue;
        put_head(out, column->name, "counter", column->help);
        for (uint32_t w = 0; w < s->all.workers; w++) {
            fprintf(out, "%s{", column->name);
            put_worker_label(out, s, w);
            fputs("} ", out);
            put_value(out, column, &s->workers[w]);
        }
    }
}

static void put_steals(FILE *out, const struct stats_snapshot *s)
{
    static const char name[] = "numoe_worker_steals_total";

    put_head(out, name, "counter",
             "Times work was taken from another worker, by the nearest group of both.");
    for (uint32_t w = 0; w < s->all.workers; w++)
        for (int d = 0; d < NUMOE_DISTANCES; d++) {
            fprintf(out, "%s{", name);
            put_worker_label(out, s, w);
            fprintf(out, ",distance=\"%s\"} %" PRIu64 "\n", numoe_distance_names[d],
                    s->workers[w].work.steals_from[d]);
        }
}

static void put_pinned(FILE *out, const struct stats_snapshot *s)
{
    static const char name[] = "numoe_worker_pinned";

    put_head(out, name, "gauge", "Whether the worker is pinned to its CPU.");
    for (uint32_t w = 0; w < s->all.workers; w++) {
        const struct numoe_worker_stats *worker = &s->workers[w];

        fprintf(out, "%s{", name);
        put_worker_label(out, s, w);
        if (worker->os_cpu == UINT32_MAX)
            fputs(",cpu=\"\"", out);
        else
            fprintf(out, ",cpu=\"%" PRIu32 "\"", worker->os_cpu);
        fprintf(out, "} %d\n", worker->pinned);
    }
}

static void put_wakes(FILE *out, const struct stats_snapshot *s)
{
    static const char name[] = "numoe_worker_wake_latency_seconds";

    if (!s->all.timed)
        return;
    put_head(out, name, "histogram", "From the decision to wake a parked worker until it ran.");
    for (uint32_t w = 0; w < s->all.workers; w++) {
        const struct numoe_work_stats *work = &s->workers[w].work;
        uint64_t sum = 0;

        for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++) {
            sum += work->wake_buckets[b];
            fprintf(out, "%s_bucket{", name);
            put_worker_label(out, s, w);
            if (b < NUMOE_WAKE_BUCKETS - 1)
                fprintf(out, ",le=\"%.9f\"} %" PRIu64 "\n", (double)((uint64_t)1024 << b) * 1e-9,
                        sum);
            else
                fprintf(out, ",le=\"+Inf\"} %" PRIu64 "\n", sum);
        }
        fprintf(out, "%s_sum{", name);
        put_worker_label(out, s, w);
        fputs("} ", out);
        put_seconds(out, work->wake_ns);
        fprintf(out, "%s_count{", name);
        put_worker_label(out, s, w);
        fprintf(out, "} %" PRIu64 "\n", sum);
    }
}

static void put_nodes(FILE *out, const struct stats_snapshot *s)
{
    for (size_t c = 0; c < sizeof node_columns / sizeof node_columns[0]; c++) {
        const struct column *column = &node_columns[c];

        put_head(out, column->name, column->gauge ? "gauge" : "counter", column->help);
        for (uint32_t n = 0; n < s->all.nodes; n++) {
            fprintf(out, "%s{node=\"%" PRIu32 "\"} ", column->name, s->nodes[n].os_index);
            put_value(out, column, &s->nodes[n]);
        }
    }
    put_head(out, "numoe_node_bound", "gauge", "Whether the kernel accepted every binding.");
    for (uint32_t n = 0; n < s->all.nodes; n++)
        fprintf(out, "numoe_node_bound{node=\"%" PRIu32 "\"} %d\n", s->nodes[n].os_index,
                s->nodes[n].bound);
}

/* In quotes; what comes from drivers may have any character. */
static void put_label(FILE *out, const char *name, const char *value)
{
    fprintf(out, ",%s=\"", name);
    for (; *value; value++) {
        if (*value == '\\' || *value == '"')
            fputc('\\', out);
        if (*value == '\n')
            fputs("\\n", out);
        else
            fputc(*value, out);
    }
    fputc('"', out);
}

static void put_gpu_label(FILE *out, const struct stats_snapshot *s, uint32_t g)
{
    fprintf(out, "gpu=\"%" PRIu32 "\",device=\"%" PRIu32 "\"", g, s->gpus[g].device);
}

static void put_node_label(FILE *out, const char *name, bool known, uint32_t os_index)
{
    fprintf(out, ",%s=\"", name);
    if (known)
        fprintf(out, "%" PRIu32, os_index);
    fputc('"', out);
}

static void put_gpus(FILE *out, const struct stats_snapshot *s)
{
    if (!s->all.gpus)
        return;
    put_head(out, "numoe_gpu_info", "gauge",
             "What each GPU is, how it gets at host memory, and why not all of it is pinned.");
    for (uint32_t g = 0; g < s->all.gpus; g++) {
        const struct numoe_gpu_stats *gpu = &s->gpus[g];

        fputs("numoe_gpu_info{", out);
        put_gpu_label(out, s, g);
        put_label(out, "name", gpu->name);
        put_label(out, "bus", gpu->bus);
        put_node_label(out, "node", gpu->os_node != UINT32_MAX, gpu->os_node);
        put_label(out, "path", numoe_pinning_names[gpu->pinning]);
        put_label(out, "reason", gpu->pin_refusal);
        put_node_label(out, "ring_node", gpu->ring_bytes && gpu->ring_node != UINT32_MAX,
                       gpu->ring_node);
        fputs("} 1\n", out);
    }
    put_head(out, "numoe_gpu_lost", "gauge", "Whether a fault has made the GPU unusable.");
    for (uint32_t g = 0; g < s->all.gpus; g++) {
        fputs("numoe_gpu_lost{", out);
        put_gpu_label(out, s, g);
        fprintf(out, "} %d\n", s->gpus[g].lost);
    }
    for (size_t c = 0; c < sizeof gpu_columns / sizeof gpu_columns[0]; c++) {
        const struct column *column = &gpu_columns[c];

        put_head(out, column->name, column->gauge ? "gauge" : "counter", column->help);
        for (uint32_t g = 0; g < s->all.gpus; g++) {
            fprintf(out, "%s{", column->name);
            put_gpu_label(out, s, g);
            fputs("} ", out);
            put_value(out, column, &s->gpus[g]);
        }
    }
    put_head(out, "numoe_gpu_sum_models", "gauge",
             "Models on several GPUs, by where their outputs are summed.");
    for (uint32_t g = 0; g < s->all.gpus; g++)
        for (int i = NUMOE_GPU_SUM_HOST; i <= NUMOE_GPU_SUM_NCCL; i++) {
            fputs("numoe_gpu_sum_models{", out);
            put_gpu_label(out, s, g);
            put_label(out, "sum", numoe_gpu_sum_names[i]);
            fprintf(out, "} %" PRIu64 "\n", s->gpus[g].sums[i]);
        }
}

static void put_all(FILE *out, const struct stats_snapshot *s)
{
    const struct {
        const char *name, *type, *help;
        uint64_t value;
        bool seconds;
    } rows[] = {
        {"numoe_calls_total", "counter", "Layers computed.", s->all.calls, false},
        {"numoe_tokens_total", "counter", "Tokens of these calls.", s->all.tokens, false},
        {"numoe_pairs_total", "counter", "Pairs of token and expert computed.", s->all.pairs,
         false},
        {"numoe_skipped_total", "counter", "Entries with an id past the experts.", s->all.skipped,
         false},
        {"numoe_missing_total", "counter", "Entries whose expert was never loaded.", s->all.missing,
         false},
        {"numoe_expert_bytes_total", "counter", "Bytes of experts read at least once by a call.",
         s->all.expert_bytes, false},
        {"numoe_call_seconds_total", "counter", "Time inside calls.", s->all.nanoseconds, true},
        {"numoe_gpu_calls_total", "counter", "Calls computed by a GPU.", s->all.gpu_calls, false},
        {"numoe_gpu_tokens_total", "counter", "Tokens computed by a GPU.", s->all.gpu_tokens,
         false},
        {"numoe_uptime_seconds", "gauge", "Time since the context was opened.", s->all.uptime_ns,
         true},
        {"numoe_models", "gauge", "Models of the context.", s->all.models, false},
        {"numoe_workers", "gauge", "Workers of the context.", s->all.workers, false},
        {"numoe_workspace_bytes", "gauge", "Memory of the calls' workspace.",
         s->all.workspace_bytes, false},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        put_head(out, rows[i].name, rows[i].type, rows[i].help);
        fprintf(out, "%s ", rows[i].name);
        if (rows[i].seconds)
            put_seconds(out, rows[i].value);
        else
            fprintf(out, "%" PRIu64 "\n", rows[i].value);
    }
}

int numoe_stats_print_prometheus(struct numoe *context, FILE *out)
{
    struct stats_snapshot snapshot;
    int rc;

    if (!out)
        return -EINVAL;
    rc = numoe_stats_snapshot(context, &snapshot);
    if (rc)
        return rc;
    put_all(out, &snapshot);
    put_workers(out, &snapshot);
    put_steals(out, &snapshot);
    put_pinned(out, &snapshot);
    put_wakes(out, &snapshot);
    put_nodes(out, &snapshot);
    put_gpus(out, &snapshot);
    numoe_stats_snapshot_free(&snapshot);
    return fflush(out) || ferror(out) ? -EIO : 0;
}
