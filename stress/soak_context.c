/* Contexts of the soak. SPDX-License-Identifier: Apache-2.0 */
#include "soak_walk.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const struct {
    const char *text;
    uint32_t groups; /* of nodes: a number that it can be divided in */
} topologies[] = {
    {NULL, 1}, /* this machine */
    {"pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2", 8},
    {"pack:2 l3:2 [numa(memory=4GB)] core:2 pu:1", 2},
    {"numa:3(memory=2GB) core:5 pu:1", 2},
    {"pack:1 [numa(memory=8GB)] core:3 pu:2", 1},
};
static const enum numoe_form forms[] = {NUMOE_FORM_AUTO, NUMOE_FORM_EVERY_NODE, NUMOE_FORM_GROUPS,
                                        NUMOE_FORM_EXPERTS};
static const uint32_t thread_counts[] = {0, 0, 1, 2, 3, 4, 7, 16, 64};
static const uint64_t spins_ns[] = {0, 1000, 20000, 200000};

#define PICK(random, list) (list)[soak_below((random), sizeof(list) / sizeof(list)[0])]

/* Everything that the plan and the kernels follow from. */
static void choose_plan(const struct soak *soak, struct soak_random *random,
                        struct soak_context *context)
{
    /* drawn in every case, so that an option does not change what else is done */
    const uint64_t machine = soak_below(random, sizeof topologies / sizeof topologies[0]);
    const uint32_t few = soak_once(random, 4) ? (uint32_t)soak_between(random, 1, 12) : 0;
    const uint64_t isa = soak_next(random);
    const enum numoe_form form = PICK(random, forms);
    const uint64_t half = soak_below(random, 4);

    context->topology = soak->options.topology ? soak->options.topology : topologies[machine].text;
    context->workers = soak->options.workers ? soak->options.workers : few;
    /* the last, plain C, is slow: a sixteenth of the contexts */
    context->isa =
        soak->isas[soak->isa_count == 1 || isa % 16 == 0 ? soak->isa_count - 1
                                                         : isa / 16 % (soak->isa_count - 1)];
    context->gpu = !soak_once(random, 4) && soak->options.gpu;
    context->form = form;
    if (form == NUMOE_FORM_GROUPS)
        context->groups = soak->options.topology ? 1 : topologies[machine].groups;
    /* pools of one process side by side, and over each other */
    if (!context->topology && half < 2 && soak->node_count > 1) {
        context->nodes = half ? soak->nodes + soak->node_count / 2 : soak->nodes;
        context->node_count = half ? soak->node_count - soak->node_count / 2 : soak->node_count / 2;
    }
}

static void choose_execution(const struct soak *soak, struct soak_random *random,
                             struct soak_context *context)
{
    const uint32_t threads = PICK(random, thread_counts);

    context->threads = soak->options.threads ? soak->options.threads : threads;
    context->chaos_seed = soak_once(random, 2) ? soak_next(random) | 1 : 0;
    context->spin_ns = PICK(random, spins_ns);
    context->pin_caller = soak_once(random, 3);
    context->gpu_stream = soak_once(random, 2);
    context->stats = soak_once(random, 2);
    context->trace_events = soak_once(random, 4) ? (uint32_t)soak_between(random, 1, 200) : 0;
}

int soak_context_open(struct soak *soak, struct soak_random *random,
                      const struct soak_context *like, struct soak_context **out)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct soak_context *context = calloc(1, sizeof *context);
    int rc;

    if (!context)
        return soak_fail(soak, -ENOMEM, "no memory for a context");
    choose_plan(soak, random, context);
    if (like) {
        context->topology = like->topology;
        context->workers = like->workers;
        context->isa = like->isa;
        context->gpu = like->gpu;
        context->form = like->form;
        context->groups = like->groups;
        context->nodes = like->nodes;
        context->node_count = like->node_count;
    }
    choose_execution(soak, random, context);
    options.topology = context->topology;
    options.workers = context->workers;
    options.nodes = context->nodes;
    options.node_count = context->node_count;
    options.threads = context->threads;
    options.isa = context->isa;
    options.spin_ns = context->spin_ns;
    options.chaos_seed = context->chaos_seed;
    options.pin_caller = context->pin_caller;
    options.gpu = context->gpu ? NUMOE_GPU_ON : NUMOE_GPU_OFF;
    options.gpu_stream = context->gpu_stream;
    options.gpu_from_tokens = 1; /* not the CPUs' part now and the GPU's then */
    options.batch_invariant = soak->options.batch_invariant;
    options.form = context->form;
    options.groups = context->groups;
    options.stats = context->stats;
    options.trace_events = context->trace_events;
    if (soak->warming) /* later contexts would say the same again and again */
        options.log = soak->options.log;
    soak_doing(soak,
               "opening a context on %s, %" PRIu32 " nodes from %" PRIu32 ", %" PRIu32
               " workers, %" PRIu32 " threads, %s, form %d, spin %" PRIu64 " ns, chaos %" PRIu64,
               context->topology ? context->topology : "this machine", context->node_count,
               context->nodes ? context->nodes[0] : 0, context->workers, context->threads,
               context->isa, (int)context->form, context->spin_ns, context->chaos_seed);
    rc = numoe_open(&options, &context->numoe, &error);
    if (rc) {
        free(context);
        return soak_fail_call(soak, "numoe_open", rc, &error);
    }
    *out = context;
    return 0;
}

/* Nodes sum to all, and every form can be written. */
static int compare_nodes(struct soak *soak, struct numoe *numoe, bool traced)
{
    struct numoe_stats all = NUMOE_STATS_INIT;
    uint64_t items = 0, bytes = 0;
    FILE *null = fopen("/dev/null", "we");
    int rc = numoe_stats_get(numoe, &all);

    for (uint32_t n = 0; n < all.nodes && !rc; n++) {
        struct numoe_node_stats node = NUMOE_NODE_STATS_INIT;

        rc = numoe_stats_node(numoe, n, &node);
        items += node.work.items;
        bytes += node.expert_bytes;
    }
    if (rc)
        soak_fail_call(soak, "numoe_stats_node", rc, NULL);
    else if (items != all.work.items || (bytes != all.expert_bytes && !all.gpu_calls))
        rc = soak_fail(soak, SOAK_WRONG,
                       "nodes count %" PRIu64 " items of %" PRIu64 " and %" PRIu64
                       " bytes of %" PRIu64,
                       items, all.work.items, bytes, all.expert_bytes);
    if (null && !rc &&
        ((rc = numoe_stats_print_json(numoe, null)) ||
         (rc = numoe_stats_print_prometheus(numoe, null)) ||
         (traced && (rc = numoe_trace_write(numoe, null)))))
        soak_fail_call(soak, "printing stats", rc, NULL);
    if (null)
        fclose(null);
    return rc;
}

/* The library's counters against those of the callers. */
static int compare_counters(struct soak *soak, const struct soak_context *context)
{
    struct numoe_stats stats = {.size = sizeof stats};
    const struct {
        const char *name;
        uint64_t want;
        const uint64_t *have;
    } rows[] = {
        {"calls", atomic_load(&context->calls), &stats.calls},
        {"tokens", atomic_load(&context->tokens), &stats.tokens},
        {"pairs", atomic_load(&context->pairs), &stats.pairs},
        {"skipped", atomic_load(&context->skipped), &stats.skipped},
        {"missing", atomic_load(&context->missing), &stats.missing},
    };
    int rc = numoe_stats_get(context->numoe, &stats);

    if (rc)
        return soak_fail_call(soak, "numoe_stats_get", rc, NULL);
    pthread_mutex_lock(&soak->lock);
    soak->report.steals += stats.steals;
    pthread_mutex_unlock(&soak->lock);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].want != *rows[i].have)
            return soak_fail(soak, SOAK_WRONG,
                             "a context counted %" PRIu64 " %s where %" PRIu64 " were made",
                             *rows[i].have, rows[i].name, rows[i].want);
    return compare_nodes(soak, context->numoe, context->trace_events != 0);
}

int soak_context_close(struct soak *soak, struct soak_context *context)
{
    int rc = 0;

    if (!context)
        return 0;
    soak_doing(soak, "closing a context of %" PRIu32 " models", context->model_count);
    if (!soak->report.failed)
        rc = compare_counters(soak, context);
    for (uint32_t m = 0; m < context->model_count; m++)
        soak_model_free(context->models[m]);
    numoe_close(context->numoe);
    free(context);
    return rc;
}
