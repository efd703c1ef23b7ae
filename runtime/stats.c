/*
 * What a context has done: counters of calls, workers, nodes and GPUs, and where models' pages are.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"

_Static_assert((int)NUMOE_DISTANCES == (int)NUMOE_POOL_DISTANCES &&
                   (int)NUMOE_SAME_MACHINE == (int)NUMOE_POOL_ELSEWHERE,
               "the pool's distances are those of the stats");
_Static_assert(sizeof(((struct numoe_gpu_stats *)0)->name) ==
                       sizeof(((struct numoe_gpu_properties *)0)->name) &&
                   sizeof(((struct numoe_gpu_stats *)0)->bus) ==
                       sizeof(((struct numoe_gpu_properties *)0)->bus) &&
                   sizeof(((struct numoe_gpu_stats *)0)->pin_refusal) ==
                       sizeof(((struct numoe_gpu_report *)0)->pin_refusal),
               "words about GPUs are copied whole");

#define PLACEMENT_NS ((uint64_t)60 * 1000000000) /* pages are looked at again after so long */

static uint64_t load(const atomic_uint_fast64_t *counter)
{
    return atomic_load_explicit((atomic_uint_fast64_t *)counter, memory_order_relaxed);
}

/* Give as much of a struct as the caller's size, which stays as it is, has room for. */
static int give(void *to, size_t room, const void *from, size_t size)
{
    if (room < sizeof room)
        return -EINVAL;
    memcpy((char *)to + sizeof room, (const char *)from + sizeof room,
           (room < size ? room : size) - sizeof room);
    return 0;
}

/* ---- workers --------------------------------------------------------------------------------- */

static void add_work(struct numoe_work_stats *sum, const struct numoe_work_stats *one)
{
    sum->items += one->items;
    for (int d = 0; d < NUMOE_DISTANCES; d++)
        sum->steals_from[d] += one->steals_from[d];
    sum->stolen_items += one->stolen_items;
    sum->refusals += one->refusals;
    sum->sleeps += one->sleeps;
    sum->read_bytes += one->read_bytes;
    sum->remote_bytes += one->remote_bytes;
    sum->busy_ns += one->busy_ns;
    sum->parked_ns += one->parked_ns;
    sum->wakes += one->wakes;
    sum->wake_ns += one->wake_ns;
    for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++)
        sum->wake_buckets[b] += one->wake_buckets[b];
}

static const struct numoe_plan_worker *planned(const struct numoe *context, uint32_t worker)
{
    return &context->plan->workers[worker % context->plan->worker_count];
}

static int read_worker(const struct numoe *context, uint32_t worker,
                       struct numoe_worker_stats *stats)
{
    struct numoe_pool_worker_stats pool;

    if (numoe_pool_stats(context->pool, worker, &pool))
        return -EINVAL;
    *stats = (struct numoe_worker_stats){
        .os_cpu = context->described || worker >= context->plan->worker_count
                      ? UINT32_MAX
                      : planned(context, worker)->os_cpu,
        .node = planned(context, worker)->plan_node,
        .pinned = pool.pinned,
        .pin_errno = pool.pin_errno,
        .work =
            {
                .items = pool.items,
                .stolen_items = pool.stolen_items,
                .refusals = pool.refusals,
                .sleeps = pool.sleeps,
                .read_bytes = load(&context->reads[worker].bytes),
                .remote_bytes = load(&context->reads[worker].remote_bytes),
                .busy_ns = pool.busy_ns,
                .parked_ns = pool.parked_ns,
                .wakes = pool.wakes,
                .wake_ns = pool.wake_ns,
            },
    };
    memcpy(stats->work.steals_from, pool.steals_from, sizeof pool.steals_from);
    memcpy(stats->work.wake_buckets, pool.wake_buckets, sizeof pool.wake_buckets);
    return 0;
}

int numoe_stats_worker(const struct numoe *context, uint32_t worker,
                       struct numoe_worker_stats *stats)
{
    struct numoe_worker_stats now;

    if (!context || !stats || read_worker(context, worker, &now))
        return -EINVAL;
    return give(stats, stats->size, &now, sizeof now);
}

static uint32_t gpu_count(const struct numoe *context)
{
    return context->gpu ? 1 + context->more_gpu_count : 0;
}

/* What a model's part on a GPU has done. *sum: where its outputs are summed. */
static void count_gpu(struct numoe_gpu_stats *stats, const struct numoe_model *model,
                      uint32_t index, const struct numoe_gpu_report *report,
                      enum numoe_gpu_sum *sum)
{
    uint64_t peer_bytes, summed_tokens;

    *sum = numoe_gpu_model_sums(model->gpu, index, &peer_bytes, &summed_tokens);
    stats->peer_bytes += peer_bytes;
    stats->summed_tokens += summed_tokens;
    stats->calls += report->calls;
    stats->tokens += report->tokens;
    stats->copied_bytes += report->copied_bytes;
    stats->copied_experts += report->copied_experts;
    stats->found_experts += report->found;
    stats->pieces += report->pieces;
    stats->batches += report->batches;
}

/* ---- placement ------------------------------------------------------------------------------- */

void numoe_stats_join(struct numoe_model *model)
{
    struct numoe *context = model->context;

    pthread_mutex_lock(&context->models_lock);
    model->next = context->models;
    context->models = model;
    numoe_counter_add(&context->model_count, 1);
    pthread_mutex_unlock(&context->models_lock);
}

void numoe_stats_leave(struct numoe_model *model)
{
    struct numoe *context = model->context;
    struct numoe_gpu_report report;
    enum numoe_gpu_sum sum;

    /* a fork may have copied the lock locked */
    if (numoe_pool_forked(context->pool))
        return;
    pthread_mutex_lock(&context->models_lock);
    for (struct numoe_model **at = &context->models; *at; at = &(*at)->next)
        if (*at == model) {
            *at = model->next;
            numoe_counter_add(&context->model_count, UINT64_MAX);
            for (uint32_t g = 0; model->gpu && g < gpu_count(context); g++) {
                numoe_gpu_model_report(numoe_gpu_model_part(model->gpu, g), &report);
                count_gpu(&context->gpu_past[g], model, g, &report, &sum);
            }
            break;
        }
    pthread_mutex_unlock(&context->models_lock);
}

/* models_lock held. */
static void inspect(struct numoe_model *model)
{
    const uint64_t now = numoe_now_ns();

    if (model->inspected_ns && now - model->inspected_ns < PLACEMENT_NS)
        return;
    for (uint32_t n = 0; n < model->plan->node_count; n++)
        if (model->nodes[n].memory)
            numoe_memory_inspect(model->nodes[n].memory, &model->nodes[n].report);
    model->inspected_ns = now;
}

static void add_placement(struct numoe *context, uint32_t node, struct numoe_node_stats *stats)
{
    stats->bound = true;
    pthread_mutex_lock(&context->models_lock);
    for (struct numoe_model *model = context->models; model; model = model->next) {
        inspect(model);
        for (uint32_t n = 0; n < model->plan->node_count; n++) {
            const struct numoe_memory_report *report = &model->nodes[n].report;

            if (!model->nodes[n].memory || !numoe_model_bytes_on(model, n, node, UINT64_MAX))
                continue;
            stats->planned_bytes +=
                numoe_model_bytes_on(model, n, node, model->plan->nodes[n].planned_bytes);
            stats->huge_bytes += numoe_model_bytes_on(model, n, node, report->huge_bytes);
            stats->giant_bytes += numoe_model_bytes_on(model, n, node, report->giant_bytes);
            stats->spilled_bytes += numoe_model_bytes_on(model, n, node, report->spilled_bytes);
            stats->checked_bytes += numoe_model_bytes_on(model, n, node, report->checked_bytes);
            stats->placed_bytes += numoe_model_bytes_on(model, n, node, report->placed_bytes);
            stats->bound = stats->bound && report->bound;
        }
    }
    pthread_mutex_unlock(&context->models_lock);
    stats->bound = stats->bound && stats->planned_bytes;
}

int numoe_stats_node(struct numoe *context, uint32_t node, struct numoe_node_stats *stats)
{
    struct numoe_node_stats now = {0};
    struct numoe_worker_stats worker;

    if (!context || !stats || node >= context->plan->node_count)
        return -EINVAL;
    if (numoe_pool_forked(context->pool))
        return -ECHILD;
    now.os_index = context->plan->nodes[node].os_index;
    now.expert_bytes = load(&context->node_bytes[node]);
    for (uint32_t w = 0; w < numoe_pool_worker_count(context->pool); w++) {
        if (planned(context, w)->plan_node != node || read_worker(context, w, &worker))
            continue;
        now.workers++;
        add_work(&now.work, &worker.work);
    }
    add_placement(context, node, &now);
    return give(stats, stats->size, &now, sizeof now);
}

/* ---- GPUs ------------------------------------------------------------------------------------ */

static enum numoe_pinning pinning_of(const struct numoe_gpu_stats *stats)
{
    return stats->arena_bytes == 0                     ? NUMOE_PINNING_NONE
           : stats->pinned_bytes == stats->arena_bytes ? NUMOE_PINNING_IN_PLACE
           : stats->pinned_bytes                       ? NUMOE_PINNING_MIXED
                                                       : NUMOE_PINNING_STAGING;
}

static void add_model(struct numoe_gpu_stats *stats, const struct numoe_model *model,
                      uint32_t index)
{
    struct numoe_gpu_report part, *report = &part;
    enum numoe_gpu_sum sum;

    numoe_gpu_model_report(numoe_gpu_model_part(model->gpu, index), report);
    stats->models++;
    stats->arena_bytes += report->arena_bytes;
    stats->pinned_bytes += report->pinned_bytes;
    stats->pinned_chunks += report->pinned_chunks;
    if (!*stats->pin_refusal)
        memcpy(stats->pin_refusal, report->pin_refusal, sizeof stats->pin_refusal);
    if (!stats->ring_bytes)
        stats->ring_node = report->ring_node;
    stats->ring_bytes += report->ring_bytes;
    stats->ring_checked_bytes += report->ring_checked;
    stats->ring_placed_bytes += report->ring_placed;
    stats->device_bytes += report->device_bytes;
    stats->window_bytes += report->window_bytes;
    stats->cells += report->cells;
    stats->experts += report->experts;
    count_gpu(stats, model, index, report, &sum);
    stats->sums[sum] += sum != NUMOE_GPU_SUM_AUTO;
}

int numoe_stats_gpu(struct numoe *context, uint32_t index, struct numoe_gpu_stats *stats)
{
    const struct numoe_gpu_properties *properties;
    struct numoe_gpu_stats now;
    const struct numoe_gpu *gpu;

    if (!context || !stats || index >= gpu_count(context))
        return -EINVAL;
    if (numoe_pool_forked(context->pool))
        return -ECHILD;
    /* a model is on a GPU from before it is in the list until it has left it */
    pthread_mutex_lock(&context->models_lock);
    now = context->gpu_past[index];
    now.ring_node = UINT32_MAX;
    for (struct numoe_model *model = context->models; model; model = model->next)
        if (model->gpu)
            add_model(&now, model, index);
    pthread_mutex_unlock(&context->models_lock);
    gpu = index ? context->more_gpus[index - 1] : context->gpu;
    properties = numoe_gpu_get(gpu);
    now.device = properties->index;
    now.os_node = properties->locality_known ? properties->os_node : UINT32_MAX;
    memcpy(now.name, properties->name, sizeof now.name);
    memcpy(now.bus, properties->bus, sizeof now.bus);
    now.lost = numoe_gpu_health(gpu, NULL) != 0;
    now.pinning = pinning_of(&now);
    return give(stats, stats->size, &now, sizeof now);
}

/* ---- all ------------------------------------------------------------------------------------- */

int numoe_stats_get(const struct numoe *context, struct numoe_stats *stats)
{
    struct numoe_stats now = {0};

    if (!context || !stats)
        return -EINVAL;
    now.calls = load(&context->calls);
    now.tokens = load(&context->tokens);
    now.pairs = load(&context->pairs);
    now.skipped = load(&context->skipped);
    now.missing = load(&context->missing);
    now.expert_bytes = load(&context->expert_bytes);
    now.nanoseconds = load(&context->nanoseconds);
    now.workspace_bytes = load(&context->workspace_bytes);
    now.gpu_calls = load(&context->gpu_calls);
    now.gpu_tokens = load(&context->gpu_tokens);
    now.uptime_ns = numoe_now_ns() - context->opened_ns;
    now.nodes = context->plan->node_count;
    now.gpus = gpu_count(context);
    now.models = (uint32_t)load(&context->model_count);
    now.timed = context->timed;
    now.workers = numoe_pool_worker_count(context->pool);
    for (uint32_t w = 0; w < now.workers; w++) {
        struct numoe_worker_stats worker;

        if (read_worker(context, w, &worker))
            continue;
        add_work(&now.work, &worker.work);
        now.workers_pinned += worker.pinned;
    }
    for (int d = 0; d < NUMOE_DISTANCES; d++)
        now.steals += now.work.steals_from[d];
    now.sleeps = now.work.sleeps;
    return give(stats, stats->size, &now, sizeof now);
}
