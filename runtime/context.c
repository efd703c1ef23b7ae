/*
 * Opening and closing a context: the machine, the workers' plan, the kernels, the pool.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const char *numoe_version(void)
{
    return NUMOE_VERSION;
}

struct numoe_pool *numoe_context_pool(struct numoe *context)
{
    return context->pool;
}

const struct numoe_machine *numoe_context_machine(const struct numoe *context)
{
    return context->machine;
}

const struct numoe_log *numoe_context_log(const struct numoe *context)
{
    return &context->log;
}

const struct numoe_plan *numoe_context_workers(const struct numoe *context)
{
    return context->described ? NULL : context->plan;
}

struct numoe_gpu *numoe_context_gpu(const struct numoe *context)
{
    return context->gpu;
}

/* The caller's struct may be an older, shorter one: fields it lacks keep their defaults. */
static int copy_options(const struct numoe_options *options, struct numoe_options *copy,
                        struct numoe_error *error)
{
    *copy = (struct numoe_options)NUMOE_OPTIONS_INIT;
    if (!options)
        return 0;
    if (options->size < offsetof(struct numoe_options, workers))
        return numoe_error_set(error, -EINVAL, "options",
                               "size %zu is not that of struct numoe_options", options->size);
    memcpy(copy, options, options->size < sizeof *copy ? options->size : sizeof *copy);
    copy->size = sizeof *copy;
    return 0;
}

static int copy_list(const uint32_t *list, uint32_t count, uint32_t **out, uint32_t *out_count)
{
    if (!list || count == 0)
        return 0;
    *out = malloc(count * sizeof **out);
    if (!*out)
        return -ENOMEM;
    memcpy(*out, list, count * sizeof **out);
    *out_count = count;
    return 0;
}

/* What every plan of this context asks for; a model adds its shape. */
static void plan_request(const struct numoe *context, struct numoe_plan_request *request)
{
    *request = (struct numoe_plan_request)NUMOE_PLAN_REQUEST_INIT;
    request->workers = context->worker_request;
    request->nodes = context->nodes;
    request->node_count = context->node_count;
    request->cpus = context->cpus;
    request->cpu_count = context->cpu_count;
    request->keep_free_bytes = context->keep_free_bytes;
}

int numoe_context_plan(struct numoe *context, const struct numoe_expert_shape *shape,
                       struct numoe_plan **plan, struct numoe_error *error)
{
    struct numoe_plan_request request;
    int rc;

    /* before the turn is touched: a fork may have copied it locked */
    if (context->pool && numoe_pool_forked(context->pool))
        return numoe_error_set(error, -ECHILD, "context",
                               "this process was forked from the one that opened it");
    plan_request(context, &request);
    request.shape = *shape;
    pthread_mutex_lock(&context->turn);
    /* earlier models have taken memory since */
    numoe_machine_refresh(context->machine);
    rc = numoe_plan_create(context->machine, &request, plan, error);
    pthread_mutex_unlock(&context->turn);
    return rc;
}

/* On CPUs without memory of their own, stacks and scratch come from where the experts do. A denied
 * policy is told of when arenas are bound. */
static void init_thread(void *user, uint32_t worker)
{
    const struct numoe *context = user;
    const struct numoe_plan *plan = context->plan;
    const struct numoe_plan_worker *of = &plan->workers[worker % plan->worker_count];

    if (!context->described && !context->machine->pus[of->pu].node_is_near)
        (void)numoe_memory_prefer(plan->nodes[of->plan_node].os_index);
}

static int start_pool(struct numoe *context, const struct numoe_options *options,
                      struct numoe_error *error)
{
    const struct numoe_plan *plan = context->plan;
    const uint32_t count = options->threads ? options->threads : plan->worker_count;
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker *workers;
    int rc;

    if (count > NUMOE_POOL_MAX_WORKERS)
        return numoe_error_set(error, -EINVAL, "threads", "%u is more than %d", count,
                               NUMOE_POOL_MAX_WORKERS);
    workers = calloc(count, sizeof *workers);
    if (!workers)
        return numoe_error_set(error, -ENOMEM, "workers", "no memory for %u workers", count);
    for (uint32_t w = 0; w < count; w++) {
        const struct numoe_plan_worker *from = &plan->workers[w % plan->worker_count];
        workers[w] = (struct numoe_pool_worker){
            /* threads beyond the plan share its CPUs, wherever the system puts them */
            .os_cpu = context->described || w >= plan->worker_count ? UINT32_MAX : from->os_cpu,
            .l3 = from->l3,
            .node = from->plan_node,
            .domain = from->domain,
            .package = from->package,
        };
    }
    config.worker_count = count;
    config.workers = workers;
    config.thread_init = init_thread;
    config.thread_init_user = context;
    config.pin_caller = options->pin_caller && !context->described;
    config.spin_ns = options->spin_ns;
    config.chaos_seed = options->chaos_seed;
    config.log = &context->log;
    rc = numoe_pool_create(&config, &context->pool, error);
    free(workers);
    return rc;
}

/* A GPU that cannot be used is no failure: the CPU computes, and the reason is kept and told. */
static int open_gpu(struct numoe *context, const struct numoe_options *options,
                    struct numoe_error *error)
{
    struct numoe_gpu_verdict verdict = {0};
    enum numoe_gpu_mode mode;
    int rc = numoe_gpu_mode(options->gpu, &mode, error);

    if (rc)
        return rc;
    if ((unsigned)mode > NUMOE_GPU_FORCE)
        return numoe_error_set(error, -EINVAL, "gpu", "%d is no mode", (int)mode);
    context->gpu_stream = options->gpu_stream;
    rc = numoe_gpu_open(options->gpu_device, mode, context->described ? NULL : context->machine,
                        &context->log, &context->gpu, &verdict, NULL);
    memcpy(context->gpu_note, verdict.reason, sizeof context->gpu_note);
    if (mode == NUMOE_GPU_OFF && options->gpu != NUMOE_GPU_OFF)
        strcpy(context->gpu_note, "NUMOE_GPU=off in the environment");
    if (rc && (mode != NUMOE_GPU_OFF || options->gpu != NUMOE_GPU_OFF))
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the CPU computes, not a GPU: %s",
                        context->gpu_note);
    else if (!rc && verdict.forced)
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "a GPU is used because it is forced: %s",
                        verdict.reason);
    return 0;
}

int numoe_open(const struct numoe_options *options, struct numoe **out, struct numoe_error *error)
{
    const struct numoe_expert_shape nothing = {0};
    struct numoe_options o;
    struct numoe *context;
    struct numoe_error why = NUMOE_ERROR_INIT;
    const char *isa;
    int rc;

    rc = copy_options(options, &o, error);
    if (rc)
        return rc;
    if (!out)
        return numoe_error_set(error, -EINVAL, "context", "is NULL");
    isa = o.isa && *o.isa ? o.isa : getenv("NUMOE_ISA");
    if (!numoe_kernels_select(NUMOE_FAST, isa, &why))
        return numoe_error_set(error, why.code, why.where, "%s", why.message);
    context = calloc(1, sizeof *context);
    if (!context)
        return numoe_error_set(error, -ENOMEM, "context", "out of memory");
    if (isa)
        strncpy(context->isa, isa, sizeof context->isa - 1);
    context->log = o.log;
    context->described = o.topology && *o.topology && strcmp(o.topology, "live") != 0;
    context->strict_memory = o.strict_memory;
    context->keep_free_bytes = o.keep_free_bytes;
    context->worker_request = o.workers;
    context->next_ticket = 1;
    pthread_mutex_init(&context->turn, NULL);

    rc = copy_list(o.nodes, o.node_count, &context->nodes, &context->node_count);
    if (!rc)
        rc = copy_list(o.cpus, o.cpu_count, &context->cpus, &context->cpu_count);
    if (rc) {
        numoe_error_set(error, rc, "options", "out of memory");
        goto fail;
    }
    rc = numoe_machine_load(o.topology, &context->machine, error);
    if (rc)
        goto fail;
    rc = numoe_context_plan(context, &nothing, &context->plan, error);
    if (rc)
        goto fail;
    rc = start_pool(context, &o, error);
    if (!rc)
        rc = open_gpu(context, &o, error);
    if (rc)
        goto fail;
    *out = context;
    return 0;
fail:
    numoe_close(context);
    return rc;
}

void numoe_close(struct numoe *context)
{
    if (!context)
        return;
    numoe_gpu_close(context->gpu);
    if (context->pool)
        numoe_pool_destroy(context->pool);
    numoe_schedule_free(&context->schedule);
    numoe_plan_free(context->plan);
    numoe_machine_free(context->machine);
    pthread_mutex_destroy(&context->turn);
    free(context->nodes);
    free(context->cpus);
    free(context);
}

int numoe_stats_get(const struct numoe *context, struct numoe_stats *stats)
{
    struct numoe_stats now = {.size = sizeof now};

    if (!context || !stats || stats->size < sizeof stats->size)
        return -EINVAL;
    now.calls = atomic_load_explicit(&context->calls, memory_order_relaxed);
    now.tokens = atomic_load_explicit(&context->tokens, memory_order_relaxed);
    now.pairs = atomic_load_explicit(&context->pairs, memory_order_relaxed);
    now.skipped = atomic_load_explicit(&context->skipped, memory_order_relaxed);
    now.missing = atomic_load_explicit(&context->missing, memory_order_relaxed);
    now.expert_bytes = atomic_load_explicit(&context->expert_bytes, memory_order_relaxed);
    now.nanoseconds = atomic_load_explicit(&context->nanoseconds, memory_order_relaxed);
    now.workspace_bytes = atomic_load_explicit(&context->workspace_bytes, memory_order_relaxed);
    now.gpu_calls = atomic_load_explicit(&context->gpu_calls, memory_order_relaxed);
    now.gpu_tokens = atomic_load_explicit(&context->gpu_tokens, memory_order_relaxed);
    now.workers = numoe_pool_worker_count(context->pool);
    for (uint32_t w = 0; w < now.workers; w++) {
        struct numoe_pool_worker_stats worker;
        if (numoe_pool_stats(context->pool, w, &worker))
            continue;
        now.steals += worker.steals;
        now.sleeps += worker.sleeps;
        now.workers_pinned += worker.pinned;
    }
    now.size = stats->size;
    memcpy(stats, &now, stats->size < sizeof now ? stats->size : sizeof now);
    return 0;
}
