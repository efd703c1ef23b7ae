/*
 * The plans of a context: made for its machine and options, or one that the caller gives.
 *
 * A given plan is both the context's own and that of each of its models, which must have its
 * shape. One that is another machine's is the models' alone; nodes and workers of the context are
 * planned here.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"
#include "predict.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* What every plan of this context asks for; a model adds its shape. */
static int make(const struct numoe *context, const struct numoe_expert_shape *shape,
                const struct numoe_range *range, struct numoe_plan **plan,
                struct numoe_error *error)
{
    const struct numoe_kernels *kernels = numoe_kernels_select(NUMOE_FAST, context->isa, NULL);
    struct numoe_predict_options predict = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = *shape;
    request.range = *range;
    request.workers = context->worker_request;
    request.nodes = context->nodes;
    request.node_count = context->node_count;
    request.cpus = context->cpus;
    request.cpu_count = context->cpu_count;
    request.reserved_cpus = context->reserved_cpus;
    request.reserved_count = context->reserved_count;
    request.keep_free_bytes = context->keep_free_bytes;
    request.form = context->form;
    request.groups = context->groups;
    request.objective = context->objective;
    /* a described machine has instructions of its own */
    if (kernels && !context->described)
        predict.isa = kernels->isa;
    request.predict = &predict;
    return numoe_plan_create(context->machine, &request, plan, error);
}

static int load(const struct numoe_options *options, struct numoe_plan **plan,
                struct numoe_error *error)
{
    const struct {
        bool given;
        const char *name;
    } own[] = {
        {options->workers != 0 && !options->as_if, "workers"},
        {options->node_count != 0 && !options->as_if, "nodes"},
        {options->cpu_count != 0 && !options->as_if, "cpus"},
        {options->reserved_count != 0 && !options->as_if, "reserved CPUs"},
        {options->keep_free_bytes != 0 && !options->as_if, "memory to keep free"},
        {options->form || options->groups || options->objective, "the form of sharding"},
    };

    if (options->plan && options->plan_file)
        return numoe_error_set(error, -EINVAL, "plan", "is given as a file and in memory too");
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (own[i].given)
            return numoe_error_set(error, -EINVAL, "plan",
                                   "%s cannot be given with a plan, which has its own",
                                   own[i].name);
    return options->plan_file
               ? numoe_plan_load(options->plan_file, plan, error)
               : numoe_plan_parse(options->plan, options->plan_bytes, NULL, plan, error);
}

int numoe_context_make_plan(struct numoe *context, const struct numoe_options *options,
                            struct numoe_error *error)
{
    const struct numoe_expert_shape nothing = {0};
    const struct numoe_range none = {0};
    int rc;

    context->plan_given = options->plan || options->plan_file;
    if (options->as_if && !context->plan_given)
        return numoe_error_set(error, -EINVAL, "as_if", "is for a plan, and none is given");
    rc = context->plan_given
             ? load(options, options->as_if ? &context->as_if : &context->plan, error)
             : 0;
    if (rc)
        return rc;
    if (context->plan)
        return numoe_plan_check(context->plan, context->machine, &context->log, error);
    /* what the other machine's plan leaves to this one is room, and that is greatest so */
    if (context->as_if)
        context->form = NUMOE_FORM_EVERY_NODE;
    return make(context, &nothing, &none, &context->plan, error);
}

/* "layers 43, and 2 in this model" of each number that differs; empty: none. */
static void differences(const struct numoe_plan *plan, const struct numoe_expert_shape *model,
                        const struct numoe_range *range, char *text, size_t size)
{
    const struct {
        const char *name;
        uint64_t plan, model;
    } fields[] = {
        {"layers", plan->shape.layers, model->layers},
        {"experts a layer", plan->shape.experts, model->experts},
        {"experts a token", plan->shape.experts_per_token, model->experts_per_token},
        {"hidden", plan->shape.hidden, model->hidden},
        {"slices an expert", plan->shape.slices, model->slices},
        {"bytes a slice", plan->shape.slice_bytes, model->slice_bytes},
        {"bytes of biases an expert", plan->shape.expert_bytes, model->expert_bytes},
        {"first slice held", plan->range.first_slice, range->first_slice},
        {"slices held end with", plan->range.end_slice,
         range->end_slice ? range->end_slice : model->slices},
        {"first expert held", plan->range.first_expert, range->first_expert},
        {"experts held end with", plan->range.end_expert,
         range->end_expert ? range->end_expert : model->experts},
    };
    size_t used = 0;

    *text = 0;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].plan != fields[i].model && used < size)
            used += (size_t)snprintf(
                text + used, size - used, "%s%s: %" PRIu64 ", and %" PRIu64 " in this model",
                used ? "; " : "", fields[i].name, fields[i].plan, fields[i].model);
}

int numoe_context_plan_here(struct numoe *context, const struct numoe_expert_shape *shape,
                            const struct numoe_range *range, struct numoe_plan **plan,
                            struct numoe_error *error)
{
    int rc;

    rc = numoe_context_check_fork(context, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&context->turn);
    /* earlier models have taken memory since */
    numoe_machine_refresh(context->machine);
    rc = make(context, shape, range, plan, error);
    pthread_mutex_unlock(&context->turn);
    return rc;
}

int numoe_context_plan(struct numoe *context, const struct numoe_expert_shape *shape,
                       const struct numoe_range *range, struct numoe_plan **plan,
                       struct numoe_error *error)
{
    struct numoe_plan *given = context->as_if ? context->as_if : context->plan;
    char text[400];

    if (!context->plan_given)
        return numoe_context_plan_here(context, shape, range, plan, error);
    differences(given, shape, range, text, sizeof text);
    if (*text)
        return numoe_error_set(error, -ESTALE, "plan", "it is for another model: %s", text);
    *plan = given;
    return 0;
}

void numoe_context_drop_plan(const struct numoe *context, struct numoe_plan *plan)
{
    if (plan != context->plan && plan != context->as_if)
        numoe_plan_free(plan);
}
