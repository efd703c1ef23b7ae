/*
 * Opening and closing a context: the machine, the workers' plan, the kernels, the pool.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"
#include "gpu_tuning_file.h"

#include "base/clock.h"
#include "choose_kernels.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const char *numoe_version(void)
{
    return NUMOE_VERSION;
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

const char *numoe_context_gpu_note(const struct numoe *context)
{
    return context->gpu_note;
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

static uint32_t thread_count(const struct numoe *context, const struct numoe_options *options)
{
    return options->threads ? options->threads : context->plan->worker_count;
}

/* Where workers and calls count, and the rings of a trace. */
static int make_counters(struct numoe *context, const struct numoe_options *options,
                         struct numoe_error *error)
{
    const uint32_t threads = thread_count(context, options);
    const size_t bytes = threads * sizeof *context->reads;

    if (threads > NUMOE_POOL_MAX_WORKERS)
        return numoe_error_set(error, -EINVAL, "threads", "%u is more than %d", threads,
                               NUMOE_POOL_MAX_WORKERS);
    if (options->trace_events > 1u << 24)
        return numoe_error_set(error, -EINVAL, "trace_events", "%u is more than %u",
                               options->trace_events, 1u << 24);
    context->reads = aligned_alloc(alignof(struct worker_reads), bytes);
    context->node_bytes = calloc(context->plan->node_count, sizeof *context->node_bytes);
    if (!context->reads || !context->node_bytes)
        return numoe_error_set(error, -ENOMEM, "workers",
                               "no memory for the counters of %u workers", threads);
    memset(context->reads, 0, bytes);
    if (options->trace_events)
        context->trace = numoe_trace_create(threads, options->trace_events);
    if (options->trace_events && !context->trace)
        return numoe_error_set(error, -ENOMEM, "trace_events",
                               "no memory for %u events of each of %u workers",
                               options->trace_events, threads);
    return 0;
}

/* Where nothing is asked for and AVX-512 VNNI is there, the width of vectors is chosen by trial. */
static void choose_width(struct numoe *context)
{
    const struct numoe_kernels *wide = numoe_kernels_select(NUMOE_FAST, "avx512vnni", NULL);
    const struct numoe_kernels *half = numoe_kernels_select(NUMOE_FAST, "avx512vnni256", NULL);
    struct numoe_choice choice;

    if (*context->isa || !wide || !half)
        return;
    numoe_choose_kernels(context->pool, wide, half, 2000000, &choice);
    strncpy(context->isa, choice.chosen->isa, sizeof context->isa - 1);
    numoe_log_write(&context->log, NUMOE_LOG_INFO,
                    "%s: vectors of 512 and 256 bits reach 1 : %.2f with all workers", context->isa,
                    choice.rates[0] > 0 ? choice.rates[1] / choice.rates[0] : 1);
}

/* Those of several that can be used, in their order. The others are told of, and left out. */
static void open_gpus(struct numoe *context, const struct numoe_options *options,
                      enum numoe_gpu_mode mode, struct numoe_gpu_verdict *verdict)
{
    const struct numoe_machine *machine = context->described ? NULL : context->machine;
    bool refused[NUMOE_GPU_MOST] = {false};

    for (uint32_t i = 0; i < options->gpu_device_count; i++) {
        struct numoe_gpu_verdict v = {0};
        struct numoe_gpu *gpu;
        int rc;

        for (uint32_t k = 0; k < i; k++) /* one that is there twice is told of once */
            refused[i] |= refused[k] && options->gpu_devices[k] == options->gpu_devices[i];
        if (refused[i])
            continue;
        rc = numoe_gpu_open(options->gpu_devices[i], mode, machine, &context->log, &gpu, &v, NULL);
        refused[i] = rc != 0;
        if (i == 0 || (!rc && !context->gpu))
            *verdict = v;
        if (rc && mode != NUMOE_GPU_OFF)
            numoe_log_write(&context->log, NUMOE_LOG_WARNING, "GPU %u is left out: %s",
                            options->gpu_devices[i], v.reason);
        else if (!rc && !context->gpu)
            context->gpu = gpu;
        else if (!rc)
            context->more_gpus[context->more_gpu_count++] = gpu;
    }
}

/* Kernels of a device by a table that was read, or by the library's own, which may be of another.
 */
static int choose_by(const struct numoe *context, struct numoe_gpu *gpu,
                     const struct numoe_gpu_tuning *tuning, const char *file,
                     struct numoe_error *error)
{
    const struct numoe_gpu_numbers numbers = numoe_gpu_numbers(numoe_gpu_get(gpu));
    struct numoe_error differs = NUMOE_ERROR_INIT;

    if (tuning)
        return numoe_gpu_use_tuning(gpu, tuning, file, error);
    if (numoe_gpu_tuning_fits(numoe_gpu_tuned(gpu), &numbers, "kernels", &differs))
        numoe_log_write(&context->log, NUMOE_LOG_INFO,
                        "kernels of %s are chosen by the times of another device: %s",
                        numoe_gpu_get(gpu)->name, differs.message);
    return 0;
}

/* A GPU that cannot be used is no failure: the CPU computes, and the reason is kept and told. */
static int open_gpu(struct numoe *context, const struct numoe_options *options,
                    struct numoe_error *error)
{
    const char *tuning_file =
        options->gpu_tuning ? options->gpu_tuning : getenv("NUMOE_GPU_TUNING");
    struct numoe_gpu_tuning *tuning = NULL;
    struct numoe_gpu_verdict verdict = {0};
    enum numoe_gpu_mode mode;
    int rc = numoe_gpu_mode(options->gpu, &mode, error);

    if (rc)
        return rc;
    if ((unsigned)mode > NUMOE_GPU_FORCE)
        return numoe_error_set(error, -EINVAL, "gpu", "%d is no mode", (int)mode);
    if (options->gpu_device_count > NUMOE_GPU_MOST ||
        (options->gpu_device_count && !options->gpu_devices))
        return numoe_error_set(error, -EINVAL, "gpu_devices", "%u are not 1 to %d",
                               options->gpu_device_count, (int)NUMOE_GPU_MOST);
    if ((unsigned)options->gpu_sum > NUMOE_GPU_SUM_NCCL)
        return numoe_error_set(error, -EINVAL, "gpu_sum", "%d is no way to sum",
                               (int)options->gpu_sum);
    context->gpu_sum = options->gpu_sum;
    context->gpu_stream = options->gpu_stream;
    context->gpu_from_tokens = options->gpu_from_tokens;
    context->gpu_cache_bytes = options->gpu_cache_bytes;
    if (options->gpu_profile) {
        context->gpu_profile = strdup(options->gpu_profile);
        if (!context->gpu_profile)
            return numoe_error_set(error, -ENOMEM, "gpu_profile", "out of memory");
    }
    if (context->batch_invariant) {
        strcpy(context->gpu_note, "batches were to be invariant, which the GPU's are not");
        if (mode != NUMOE_GPU_OFF)
            numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the CPU computes, not a GPU: %s",
                            context->gpu_note);
        return 0;
    }
    if (mode != NUMOE_GPU_OFF && tuning_file && *tuning_file) {
        tuning = malloc(sizeof *tuning);
        rc = tuning ? numoe_gpu_tuning_load(tuning_file, tuning, error)
                    : numoe_error_set(error, -ENOMEM, "gpu_tuning", "out of memory");
        if (rc)
            goto out;
    }
    if (options->gpu_device_count) {
        open_gpus(context, options, mode, &verdict);
        rc = context->gpu ? 0 : -ENODEV;
    } else {
        rc = numoe_gpu_open(options->gpu_device, mode, context->described ? NULL : context->machine,
                            &context->log, &context->gpu, &verdict, NULL);
    }
    memcpy(context->gpu_note, verdict.reason, sizeof context->gpu_note);
    if (mode == NUMOE_GPU_OFF && options->gpu != NUMOE_GPU_OFF)
        strcpy(context->gpu_note, "NUMOE_GPU=off in the environment");
    if (rc && (mode != NUMOE_GPU_OFF || options->gpu != NUMOE_GPU_OFF))
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the CPU computes, not a GPU: %s",
                        context->gpu_note);
    else if (!rc && verdict.forced)
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "a GPU is used because it is forced: %s",
                        verdict.reason);
    rc = 0;
    if (context->gpu)
        rc = choose_by(context, context->gpu, tuning, tuning_file, error);
    for (uint32_t i = 0; !rc && i < context->more_gpu_count; i++)
        rc = choose_by(context, context->more_gpus[i], tuning, tuning_file, error);
out:
    free(tuning);
    return rc;
}

int numoe_open(const struct numoe_options *options, struct numoe **out, struct numoe_error *error)
{
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
    context->batch_invariant = o.batch_invariant;
    context->described = o.topology && *o.topology && strcmp(o.topology, "live") != 0;
    context->timed = o.stats || o.trace_events;
    context->strict_memory = o.strict_memory;
    context->memory_spill = o.memory_spill;
    context->memory_policy = o.memory_policy;
    context->keep_free_bytes = o.keep_free_bytes;
    context->worker_request = o.workers;
    context->form = o.form;
    context->groups = o.groups;
    context->objective = o.objective;
    atomic_init(&context->next_ticket, 1);
    context->opened_ns = numoe_now_ns();
    pthread_mutex_init(&context->models_lock, NULL);
    pthread_mutex_init(&context->turn, NULL);
    pthread_mutex_init(&context->cancel_lock, NULL);

    rc = copy_list(o.nodes, o.node_count, &context->nodes, &context->node_count);
    if (!rc)
        rc = copy_list(o.cpus, o.cpu_count, &context->cpus, &context->cpu_count);
    if (!rc)
        rc = copy_list(o.reserved_cpus, o.reserved_count, &context->reserved_cpus,
                       &context->reserved_count);
    if (rc) {
        numoe_error_set(error, rc, "options", "out of memory");
        goto fail;
    }
    rc = numoe_machine_load(o.topology, &context->machine, error);
    if (rc)
        goto fail;
    rc = numoe_context_make_plan(context, &o, error);
    if (rc)
        goto fail;
    rc = make_counters(context, &o, error);
    if (!rc)
        rc = numoe_context_start_pool(context, &o, error);
    if (!rc)
        choose_width(context);
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
    for (uint32_t i = 0; i < context->more_gpu_count; i++)
        numoe_gpu_close(context->more_gpus[i]);
    free(context->gpu_profile);
    if (context->pool)
        numoe_pool_destroy(context->pool);
    numoe_schedule_free(&context->schedule);
    numoe_schedule_free(&context->later[0]);
    numoe_schedule_free(&context->later[1]);
    numoe_plan_free(context->plan);
    numoe_plan_free(context->as_if);
    numoe_machine_free(context->machine);
    pthread_mutex_destroy(&context->cancel_lock);
    pthread_mutex_destroy(&context->turn);
    pthread_mutex_destroy(&context->models_lock);
    numoe_trace_free(context->trace);
    free(context->node_bytes);
    free(context->reads);
    free(context->nodes);
    free(context->cpus);
    free(context->reserved_cpus);
    free(context);
}
