/*
 * The walk: cycles, steps, and what follows from a failure.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak.h"

#include "cli_memory.h"
#include "soak_walk.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CYCLE_STEPS_LEAST = 15, CYCLE_STEPS_MOST = 60 };
#define WARMING_SEED 0x77616d75u
#define PROGRESS_S 0.5

static const char *const kind_names[NUMOE_SOAK_KINDS] = {
    [NUMOE_SOAK_OPEN] = "open",        [NUMOE_SOAK_CLOSE] = "close",
    [NUMOE_SOAK_CREATE] = "create",    [NUMOE_SOAK_LOAD] = "load",
    [NUMOE_SOAK_DESTROY] = "destroy",  [NUMOE_SOAK_REPLACE] = "replace",
    [NUMOE_SOAK_FORWARD] = "forward",  [NUMOE_SOAK_SUBMIT] = "submit",
    [NUMOE_SOAK_CALLERS] = "callers",  [NUMOE_SOAK_TWIN] = "twin",
    [NUMOE_SOAK_POOL] = "pool",        [NUMOE_SOAK_REFUSED] = "refused",
    [NUMOE_SOAK_TEARDOWN] = "teardown"};

/* How often each is chosen; a teardown ends the cycle and is not drawn. */
static const uint8_t kind_weights[NUMOE_SOAK_TEARDOWN] = {
    [NUMOE_SOAK_OPEN] = 5,     [NUMOE_SOAK_CLOSE] = 3,   [NUMOE_SOAK_CREATE] = 8,
    [NUMOE_SOAK_LOAD] = 4,     [NUMOE_SOAK_DESTROY] = 6, [NUMOE_SOAK_REPLACE] = 8,
    [NUMOE_SOAK_FORWARD] = 30, [NUMOE_SOAK_SUBMIT] = 8,  [NUMOE_SOAK_CALLERS] = 6,
    [NUMOE_SOAK_TWIN] = 6,     [NUMOE_SOAK_POOL] = 5,    [NUMOE_SOAK_REFUSED] = 6,
};

const char *numoe_soak_kind_name(enum numoe_soak_kind kind)
{
    return (unsigned)kind < NUMOE_SOAK_KINDS ? kind_names[kind] : "?";
}

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- one step -------------------------------------------------------------------------------- */

static uint64_t model_count(const struct soak *soak)
{
    uint64_t count = 0;

    for (uint32_t c = 0; c < soak->context_count; c++)
        count += soak->contexts[c]->model_count;
    return count;
}

static struct soak_context *choose_context(const struct soak *soak, struct soak_random *random)
{
    return soak->contexts[soak_below(random, soak->context_count)];
}

static struct soak_model *choose_model(const struct soak *soak, struct soak_random *random)
{
    uint64_t chosen = soak_below(random, model_count(soak));

    for (uint32_t c = 0; c < soak->context_count; c++) {
        if (chosen < soak->contexts[c]->model_count)
            return soak->contexts[c]->models[chosen];
        chosen -= soak->contexts[c]->model_count;
    }
    return NULL;
}

/* What is drawn, or what has to come before it. */
static enum numoe_soak_kind choose_kind(const struct soak *soak, struct soak_random *random)
{
    enum numoe_soak_kind kind = NUMOE_SOAK_OPEN;
    uint64_t all = 0, drawn;

    for (int k = 0; k < NUMOE_SOAK_TEARDOWN; k++)
        all += kind_weights[k];
    drawn = soak_below(random, all);
    while (drawn >= kind_weights[kind])
        drawn -= kind_weights[kind++];
    if (kind == NUMOE_SOAK_POOL)
        return kind;
    if (!soak->context_count)
        return NUMOE_SOAK_OPEN;
    if (kind == NUMOE_SOAK_OPEN && soak->context_count == SOAK_CONTEXTS)
        return NUMOE_SOAK_CLOSE;
    if (kind > NUMOE_SOAK_LOAD && !model_count(soak))
        return kind % 3 ? NUMOE_SOAK_CREATE : NUMOE_SOAK_LOAD;
    return kind;
}

static int step_open(struct soak *soak, struct soak_random *random)
{
    struct soak_context *context;
    int rc = soak_context_open(soak, random, NULL, &context);

    if (!rc)
        soak->contexts[soak->context_count++] = context;
    return rc;
}

static int step_close(struct soak *soak, struct soak_random *random)
{
    const uint64_t c = soak_below(random, soak->context_count);
    struct soak_context *context = soak->contexts[c];

    soak->contexts[c] = soak->contexts[--soak->context_count];
    return soak_context_close(soak, context);
}

/* The last of a context's models takes the place of one that goes. */
static void drop_model(struct soak_model *model)
{
    struct soak_context *context = model->context;

    for (uint32_t m = 0; m < context->model_count; m++)
        if (context->models[m] == model)
            context->models[m] = context->models[--context->model_count];
    soak_model_free(model);
}

static int step_model(struct soak *soak, struct soak_random *random, bool load)
{
    struct soak_context *context = choose_context(soak, random);
    struct numoe_model_desc desc;
    struct soak_model *model;
    int rc;

    if (context->model_count == SOAK_MODELS)
        drop_model(context->models[soak_below(random, SOAK_MODELS)]);
    if (load) {
        rc = soak_model_load(soak, random, context, &model);
    } else {
        soak_desc_make(random, &desc);
        soak_doing(soak,
                   "creating a model of %" PRIu64 " layers, %" PRIu64 " experts %" PRIu64
                   " x %" PRIu64,
                   desc.layers, desc.experts, desc.hidden, desc.intermediate);
        rc = soak_model_create(soak, random, context, &desc, &model);
    }
    if (!rc)
        context->models[context->model_count++] = model;
    return rc;
}

static int step_destroy(struct soak *soak, struct soak_random *random)
{
    soak_doing(soak, "destroying a model");
    drop_model(choose_model(soak, random));
    return 0;
}

static int close_all(struct soak *soak)
{
    int rc = 0;

    while (soak->context_count) {
        int closed = soak_context_close(soak, soak->contexts[--soak->context_count]);

        if (!rc)
            rc = closed;
    }
    return rc;
}

/* Contexts may pin the thread that calls, for the time of the call. */
static int check_cpus(struct soak *soak)
{
    cpu_set_t now[SOAK_CPU_SETS] = {0};

    if (sched_getaffinity(0, sizeof now, now) < 0 || !memcmp(now, soak->cpus, sizeof now))
        return 0;
    return soak_fail(soak, SOAK_WRONG, "the calling thread may no longer run where it could");
}

static int teardown(struct soak *soak)
{
    int rc = close_all(soak);

    soak_doing(soak, "comparing what is left after a teardown");
    if (!rc)
        rc = check_cpus(soak);
    return rc ? rc : soak_usage_check(soak);
}

static int take_step(struct soak *soak, enum numoe_soak_kind kind, struct soak_random *random)
{
    switch (kind) {
    case NUMOE_SOAK_OPEN:
        return step_open(soak, random);
    case NUMOE_SOAK_CLOSE:
        return step_close(soak, random);
    case NUMOE_SOAK_CREATE:
        return step_model(soak, random, false);
    case NUMOE_SOAK_LOAD:
        return step_model(soak, random, true);
    case NUMOE_SOAK_DESTROY:
        return step_destroy(soak, random);
    case NUMOE_SOAK_REPLACE:
        return soak_model_replace(soak, random, choose_model(soak, random));
    case NUMOE_SOAK_FORWARD:
        return soak_step_forward(soak, random, choose_model(soak, random));
    case NUMOE_SOAK_SUBMIT:
        return soak_step_submit(soak, random, choose_model(soak, random));
    case NUMOE_SOAK_CALLERS:
        return soak_step_callers(soak, random);
    case NUMOE_SOAK_TWIN:
        return soak_step_twin(soak, random, choose_model(soak, random));
    case NUMOE_SOAK_POOL:
        return soak_step_pool(soak, random);
    case NUMOE_SOAK_REFUSED:
        return soak_step_refused(soak, random, choose_model(soak, random));
    case NUMOE_SOAK_TEARDOWN:
    case NUMOE_SOAK_KINDS:
        break;
    }
    return teardown(soak);
}

/* ---- the walk -------------------------------------------------------------------------------- */

/* Once everything, as large as it gets, so that what the process keeps for good (arenas and stacks
 * of the C library, files that were mapped) is there before the baseline is taken. */
static int warm_up(struct soak *soak)
{
    static const enum numoe_soak_kind kinds[] = {
        NUMOE_SOAK_OPEN,    NUMOE_SOAK_CREATE,  NUMOE_SOAK_LOAD,   NUMOE_SOAK_OPEN,
        NUMOE_SOAK_CREATE,  NUMOE_SOAK_FORWARD, NUMOE_SOAK_SUBMIT, NUMOE_SOAK_CALLERS,
        NUMOE_SOAK_CALLERS, NUMOE_SOAK_TWIN,    NUMOE_SOAK_POOL,   NUMOE_SOAK_REFUSED,
        NUMOE_SOAK_REFUSED, NUMOE_SOAK_REPLACE, NUMOE_SOAK_CLOSE};
    enum { KINDS = sizeof kinds / sizeof kinds[0], ROUNDS = 2 };
    int rc = 0;

    soak->warming = true;
    for (uint64_t i = 0; i < ROUNDS * KINDS && !rc; i++) {
        struct soak_random random = {soak_mix(WARMING_SEED, i)};

        rc = take_step(soak, kinds[i % KINDS], &random);
        if (!rc && i % KINDS == KINDS - 1)
            rc = close_all(soak);
    }
    if (!rc)
        soak_usage_read(&soak->report.baseline);
    soak->report.now = soak->report.baseline;
    soak->warming = false;
    return rc;
}

static void show_progress(struct soak *soak, double since, double *shown, bool last)
{
    const double now = now_s();
    struct numoe_soak_report copy;

    soak->report.seconds = now - since;
    if (!soak->options.progress || (!last && now - *shown < PROGRESS_S))
        return;
    *shown = now;
    pthread_mutex_lock(&soak->lock);
    copy = soak->report;
    pthread_mutex_unlock(&soak->lock);
    soak->options.progress(soak->options.progress_user, &copy);
}

/* Whether the walk has come to its end, before another step. */
static bool over(const struct soak *soak, double since)
{
    const struct numoe_soak_options *o = &soak->options;

    return (o->steps && soak->report.steps >= o->steps) ||
           (o->duration_s > 0 && now_s() - since >= o->duration_s) ||
           (o->stop && atomic_load_explicit(o->stop, memory_order_relaxed));
}

static int walk_cycle(struct soak *soak, uint64_t cycle, double since, double *shown)
{
    const struct numoe_soak_hooks *hooks = soak->options.hooks;
    struct soak_random random;
    uint64_t length;
    int rc;

    /* the first has the walk's own seed: what any cycle does, a walk of its seed does first */
    pthread_mutex_lock(&soak->lock);
    soak->cycle_seed = cycle ? soak_mix(soak->options.seed, cycle) : soak->options.seed;
    soak->cycle_step = 0;
    pthread_mutex_unlock(&soak->lock);
    random.state = soak_mix(soak->cycle_seed, 0);
    length = soak_between(&random, CYCLE_STEPS_LEAST, CYCLE_STEPS_MOST);
    for (uint64_t step = 1; step <= length; step++) {
        enum numoe_soak_kind kind = NUMOE_SOAK_TEARDOWN;

        if (over(soak, since))
            return 0;
        random.state = soak_mix(soak->cycle_seed, step);
        if (step < length)
            kind = choose_kind(soak, &random);
        pthread_mutex_lock(&soak->lock);
        soak->cycle_step = step;
        soak->report.steps++;
        soak->report.operations[kind]++;
        pthread_mutex_unlock(&soak->lock);
        rc = take_step(soak, kind, &random);
        if (rc)
            return rc;
        if (hooks && hooks->stepped)
            hooks->stepped(hooks->user, kind);
        show_progress(soak, since, shown, false);
    }
    soak->report.cycles++;
    return 0;
}

static void find_isas(struct soak *soak)
{
    const struct numoe_kernels *kernels;

    for (size_t i = 0; (kernels = numoe_kernels_at(NUMOE_FAST, i)) && i < SOAK_ISAS; i++)
        soak->isas[soak->isa_count++] = kernels->isa;
}

static int find_nodes(struct soak *soak)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_node_stats node = NUMOE_NODE_STATS_INIT;
    struct numoe *context;
    int rc;

    options.gpu = NUMOE_GPU_OFF;
    options.threads = 1;
    rc = numoe_open(&options, &context, &error);
    if (rc)
        return soak_fail_call(soak, "numoe_open", rc, &error);
    for (uint32_t n = 0; n < SOAK_NODES && !numoe_stats_node(context, n, &node); n++)
        soak->nodes[soak->node_count++] = node.os_index;
    numoe_close(context);
    return 0;
}

static int make_scratch(struct soak *soak)
{
    const char *where = soak->options.scratch, *temporary = getenv("TMPDIR");

    if (!where)
        where = temporary && *temporary ? temporary : "/tmp";
    if (asprintf(&soak->scratch, "%s/numoe-soak-XXXXXX", where) < 0) {
        soak->scratch = NULL;
        return soak_fail(soak, -ENOMEM, "no memory for a name");
    }
    if (!mkdtemp(soak->scratch)) {
        const int code = -errno;

        free(soak->scratch);
        soak->scratch = NULL;
        return soak_fail(soak, code, "no folder can be made in %s: %s", where, strerror(-code));
    }
    return 0;
}

static int check_options(const struct numoe_soak_options *o, struct numoe_error *error)
{
    struct numoe_options open = NUMOE_OPTIONS_INIT;
    struct numoe *context;
    int rc;

    if (!o->steps && !(o->duration_s > 0))
        return numoe_error_set(error, -EINVAL, "soak", "neither steps nor a duration is given");
    /* what the options make impossible is no finding of the walk */
    open.topology = o->topology;
    open.workers = o->workers;
    open.threads = o->threads;
    open.gpu = o->gpu ? NUMOE_GPU_ON : NUMOE_GPU_OFF;
    rc = numoe_open(&open, &context, error);
    if (rc)
        return rc;
    if (o->gpu && !numoe_context_gpu(context))
        rc = numoe_error_set(error, -ENOTSUP, "gpu", "none is used: %s",
                             numoe_context_gpu_note(context));
    numoe_close(context);
    return rc;
}

int numoe_soak_run(const struct numoe_soak_options *options, struct numoe_soak_report *report,
                   struct numoe_error *error)
{
    struct soak *soak;
    const double since = now_s();
    struct cli_memory memory;
    pthread_condattr_t clock;
    double shown = since;
    int rc;

    *report = (struct numoe_soak_report){.seed = options->seed};
    /* One arena for all threads, from the first allocation of a caller on: others keep what was
     * freed in them, which would look like growth. */
    mallopt(M_ARENA_MAX, 1);
    rc = check_options(options, error);
    if (rc)
        return rc;
    soak = calloc(1, sizeof *soak);
    if (!soak)
        return numoe_error_set(error, -ENOMEM, "soak", "out of memory");
    soak->options = *options;
    soak->cycle_seed = options->seed;
    soak->report.seed = options->seed;
    soak->error = (struct numoe_error)NUMOE_ERROR_INIT;
    pthread_mutex_init(&soak->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&soak->watchdog_over, &clock);
    pthread_condattr_destroy(&clock);
    if (sched_getaffinity(0, sizeof soak->cpus, soak->cpus) < 0)
        rc = soak_fail(soak, -errno, "the calling thread's CPUs cannot be read");
    find_isas(soak);
    if (!rc)
        rc = find_nodes(soak);
    if (!rc)
        rc = make_scratch(soak);
    if (!rc)
        rc = soak_watchdog_start(soak);
    if (!rc)
        rc = warm_up(soak);
    for (uint64_t cycle = 0; !rc && !over(soak, since); cycle++)
        rc = walk_cycle(soak, cycle, since, &shown);
    if (rc) {
        soak_reproduce(soak, soak->report.reproduce, sizeof soak->report.reproduce);
        close_all(soak);
    } else {
        rc = teardown(soak);
        if (rc)
            soak_reproduce(soak, soak->report.reproduce, sizeof soak->report.reproduce);
    }
    soak_watchdog_stop(soak);
    show_progress(soak, since, &shown, true);
    if (soak->scratch)
        rmdir(soak->scratch);
    cli_memory_read(&memory);
    soak->report.peak_bytes = memory.peak_bytes;
    *report = soak->report;
    if (rc && error)
        *error = soak->error;
    pthread_cond_destroy(&soak->watchdog_over);
    pthread_mutex_destroy(&soak->lock);
    free(soak->scratch);
    free(soak);
    return rc;
}
