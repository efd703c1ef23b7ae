/* Stats as JSON. SPDX-License-Identifier: Apache-2.0 */
#include "stats_print.h"

#include "numoe_gpu.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>

const char *const numoe_distance_names[NUMOE_DISTANCES] = {
    [NUMOE_SAME_L3] = "l3",           [NUMOE_SAME_NODE] = "node",
    [NUMOE_SAME_DOMAIN] = "domain",   [NUMOE_SAME_PACKAGE] = "package",
    [NUMOE_SAME_MACHINE] = "machine",
};

const char *const numoe_pinning_names[] = {
    [NUMOE_PINNING_NONE] = "none",
    [NUMOE_PINNING_IN_PLACE] = "in-place",
    [NUMOE_PINNING_MIXED] = "mixed",
    [NUMOE_PINNING_STAGING] = "staging",
};

int numoe_stats_snapshot(struct numoe *context, struct stats_snapshot *snapshot)
{
    int rc;

    *snapshot = (struct stats_snapshot){.all = NUMOE_STATS_INIT};
    rc = numoe_stats_get(context, &snapshot->all);
    if (rc)
        return rc;
    snapshot->workers = calloc(snapshot->all.workers, sizeof *snapshot->workers);
    snapshot->nodes = calloc(snapshot->all.nodes, sizeof *snapshot->nodes);
    snapshot->gpus = calloc((size_t)snapshot->all.gpus + 1, sizeof *snapshot->gpus);
    if (!snapshot->workers || !snapshot->nodes || !snapshot->gpus)
        rc = -ENOMEM;
    for (uint32_t w = 0; w < snapshot->all.workers && !rc; w++) {
        snapshot->workers[w] = (struct numoe_worker_stats)NUMOE_WORKER_STATS_INIT;
        rc = numoe_stats_worker(context, w, &snapshot->workers[w]);
    }
    for (uint32_t n = 0; n < snapshot->all.nodes && !rc; n++) {
        snapshot->nodes[n] = (struct numoe_node_stats)NUMOE_NODE_STATS_INIT;
        rc = numoe_stats_node(context, n, &snapshot->nodes[n]);
    }
    for (uint32_t g = 0; g < snapshot->all.gpus && !rc; g++) {
        snapshot->gpus[g] = (struct numoe_gpu_stats)NUMOE_GPU_STATS_INIT;
        rc = numoe_stats_gpu(context, g, &snapshot->gpus[g]);
    }
    if (rc)
        numoe_stats_snapshot_free(snapshot);
    return rc;
}

void numoe_stats_snapshot_free(struct stats_snapshot *snapshot)
{
    free(snapshot->workers);
    free(snapshot->nodes);
    free(snapshot->gpus);
    *snapshot = (struct stats_snapshot){0};
}

/* Whether all went well; takes value in every case. */
static bool set(json_t *object, const char *key, json_t *value)
{
    return json_object_set_new(object, key, value) == 0;
}

static bool set_number(json_t *object, const char *key, uint64_t number)
{
    return set(object, key, json_integer((json_int_t)number));
}

static json_t *steals_json(const struct numoe_work_stats *work)
{
    json_t *steals = json_object();

    for (int d = 0; d < NUMOE_DISTANCES; d++)
        if (!set_number(steals, numoe_distance_names[d], work->steals_from[d])) {
            json_decref(steals);
            return NULL;
        }
    return steals;
}

static json_t *buckets_json(const struct numoe_work_stats *work)
{
    json_t *buckets = json_array();

    for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++)
        if (json_array_append_new(buckets, json_integer((json_int_t)work->wake_buckets[b]))) {
            json_decref(buckets);
            return NULL;
        }
    return buckets;
}

/* Bounds of the buckets; the last has none. */
static json_t *bounds_json(void)
{
    json_t *bounds = json_array();

    for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++)
        if (json_array_append_new(bounds, b < NUMOE_WAKE_BUCKETS - 1
                                              ? json_integer((json_int_t)1024 << b)
                                              : json_null())) {
            json_decref(bounds);
            return NULL;
        }
    return bounds;
}

static bool set_work(json_t *object, const struct numoe_work_stats *work, bool timed)
{
    const struct {
        const char *name;
        uint64_t value;
    } counts[] =
        {
            {"items", work->items},           {"stolen_items", work->stolen_items},
            {"refusals", work->refusals},     {"sleeps", work->sleeps},
            {"read_bytes", work->read_bytes}, {"remote_bytes", work->remote_bytes},
        },
      times[] = {
          {"busy_ns", work->busy_ns},
          {"parked_ns", work->parked_ns},
          {"wakes", work->wakes},
          {"wake_ns", work->wake_ns},
      };
    bool ok = set(object, "steals", steals_json(work));

    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        ok = set_number(object, counts[i].name, counts[i].value) && ok;
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++)
        ok = (timed ? set_number(object, times[i].name, times[i].value)
                    : set(object, times[i].name, json_null())) &&
             ok;
    return set(object, "wake_buckets", timed ? buckets_json(work) : json_null()) && ok;
}

static json_t *worker_json(const struct stats_snapshot *s, uint32_t index)
{
    const struct numoe_worker_stats *worker = &s->workers[index];
    json_t *object =
        json_pack("{s:I, s:o, s:I, s:b, s:i}", "worker", (json_int_t)index, "os_cpu",
                  worker->os_cpu == UINT32_MAX ? json_null() : json_integer(worker->os_cpu), "node",
                  (json_int_t)s->nodes[worker->node].os_index, "pinned", (int)worker->pinned,
                  "pin_errno", worker->pin_errno);

    if (object && !set_work(object, &worker->work, s->all.timed)) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static json_t *node_json(const struct stats_snapshot *s, uint32_t index)
{
    const struct numoe_node_stats *node = &s->nodes[index];
    json_t *object =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}", "os_index",
                  (json_int_t)node->os_index, "giant_bytes", (json_int_t)node->giant_bytes,
                  "spilled_bytes", (json_int_t)node->spilled_bytes, "workers",
                  (json_int_t)node->workers, "expert_bytes", (json_int_t)node->expert_bytes,
                  "planned_bytes", (json_int_t)node->planned_bytes, "huge_bytes",
                  (json_int_t)node->huge_bytes, "checked_bytes", (json_int_t)node->checked_bytes,
                  "placed_bytes", (json_int_t)node->placed_bytes, "bound", (int)node->bound);

    if (object && !set_work(object, &node->work, s->all.timed)) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static json_t *node_or_null(uint32_t os_index)
{
    return os_index == UINT32_MAX ? json_null() : json_integer(os_index);
}

json_t *numoe_stats_gpu_json(const struct numoe_gpu_stats *gpu, uint32_t index)
{
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"gpu", index},
        {"device", gpu->device},
        {"models", gpu->models},
        {"arena_bytes", gpu->arena_bytes},
        {"pinned_bytes", gpu->pinned_bytes},
        {"pinned_chunks", gpu->pinned_chunks},
        {"ring_bytes", gpu->ring_bytes},
        {"ring_checked_bytes", gpu->ring_checked_bytes},
        {"ring_placed_bytes", gpu->ring_placed_bytes},
        {"device_bytes", gpu->device_bytes},
        {"window_bytes", gpu->window_bytes},
        {"cells", gpu->cells},
        {"experts", gpu->experts},
        {"calls", gpu->calls},
        {"tokens", gpu->tokens},
        {"copied_bytes", gpu->copied_bytes},
        {"copied_experts", gpu->copied_experts},
        {"found_experts", gpu->found_experts},
        {"pieces", gpu->pieces},
        {"batches", gpu->batches},
        {"peer_bytes", gpu->peer_bytes},
        {"summed_tokens", gpu->summed_tokens},
    };
    json_t *object = json_object(), *sums = json_object();
    bool ok =
        set(object, "name", json_string(gpu->name)) && set(object, "bus", json_string(gpu->bus)) &&
        set(object, "node", node_or_null(gpu->os_node)) &&
        set(object, "lost", json_boolean(gpu->lost)) &&
        set(object, "path", json_string(numoe_pinning_names[gpu->pinning])) &&
        set(object, "pin_refusal", json_string(gpu->pin_refusal)) &&
        set(object, "ring_node", gpu->ring_bytes ? node_or_null(gpu->ring_node) : json_null());

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ok = set_number(object, rows[i].name, rows[i].value) && ok;
    for (int i = NUMOE_GPU_SUM_HOST; i <= NUMOE_GPU_SUM_NCCL; i++)
        ok = set_number(sums, numoe_gpu_sum_names[i], gpu->sums[i]) && ok;
    ok = set(object, "sums", sums) && ok;
    if (!ok) {
        json_decref(object);
        return NULL;
    }
    return object;
}

json_t *numoe_stats_json(const struct stats_snapshot *s)
{
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"calls", s->all.calls},
        {"tokens", s->all.tokens},
        {"pairs", s->all.pairs},
        {"skipped", s->all.skipped},
        {"missing", s->all.missing},
        {"expert_bytes", s->all.expert_bytes},
        {"call_ns", s->all.nanoseconds},
        {"workspace_bytes", s->all.workspace_bytes},
        {"gpu_calls", s->all.gpu_calls},
        {"gpu_tokens", s->all.gpu_tokens},
        {"uptime_ns", s->all.uptime_ns},
        {"models", s->all.models},
        {"workers_pinned", s->all.workers_pinned},
    };
    json_t *root = json_object(), *workers = json_array(), *nodes = json_array();
    json_t *gpus = json_array();
    bool ok = set(root, "timed", json_boolean(s->all.timed));

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ok = set_number(root, rows[i].name, rows[i].value) && ok;
    for (uint32_t w = 0; w < s->all.workers; w++)
        ok = json_array_append_new(workers, worker_json(s, w)) == 0 && ok;
    for (uint32_t n = 0; n < s->all.nodes; n++)
        ok = json_array_append_new(nodes, node_json(s, n)) == 0 && ok;
    for (uint32_t g = 0; g < s->all.gpus; g++)
        ok = json_array_append_new(gpus, numoe_stats_gpu_json(&s->gpus[g], g)) == 0 && ok;
    ok = set(root, "wake_bounds_ns", bounds_json()) && ok;
    ok = set(root, "workers", workers) && ok;
    ok = set(root, "nodes", nodes) && ok;
    ok = set(root, "gpus", gpus) && ok;
    if (!ok) {
        json_decref(root);
        return NULL;
    }
    return root;
}

int numoe_stats_print_json(struct numoe *context, FILE *out)
{
    struct stats_snapshot snapshot;
    json_t *root;
    int rc;

    if (!out)
        return -EINVAL;
    rc = numoe_stats_snapshot(context, &snapshot);
    if (rc)
        return rc;
    root = numoe_stats_json(&snapshot);
    numoe_stats_snapshot_free(&snapshot);
    if (!root)
        return -ENOMEM;
    rc = json_dumpf(root, out, JSON_INDENT(2));
    json_decref(root);
    return rc || fputc('\n', out) == EOF || fflush(out) || ferror(out) ? -EIO : 0;
}
