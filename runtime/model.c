/*
 * Models: placement, memory, and storing experts.
 *
 * One arena a node holds the slices that the plan puts there, ordered [layer][expert][slice], and
 * after them the b2 rows of the experts whose slice 0 is there.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "context.h"
#include "gpu_run.h"

const struct numoe_plan *numoe_model_plan(const struct numoe_model *model)
{
    return model->plan;
}

struct numoe *numoe_model_context(struct numoe_model *model)
{
    return model->context;
}

const struct numoe_slice_shape *numoe_model_shape(const struct numoe_model *model)
{
    return &model->shape;
}

struct numoe_memory *numoe_model_memory(const struct numoe_model *model, uint32_t plan_node)
{
    return model->nodes[plan_node].memory;
}

const struct numoe_kernels *numoe_model_kernels(const struct numoe_model *model)
{
    return model->kernels;
}

static int check_desc(const struct numoe_model_desc *desc, struct numoe_error *error)
{
    const struct {
        const char *name;
        uint64_t value, most;
    } fields[] = {
        {"layers", desc->layers, 1u << 20},
        {"experts", desc->experts, 1u << 20},
        {"hidden", desc->hidden, 1u << 24},
        {"intermediate", desc->intermediate, 1u << 24},
    };

    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].value < 1 || fields[i].value > fields[i].most)
            return numoe_error_set(error, -EINVAL, fields[i].name, "%llu is not in 1..%llu",
                                   (unsigned long long)fields[i].value,
                                   (unsigned long long)fields[i].most);
    if (!numoe_format_info(desc->format))
        return numoe_error_set(error, -EINVAL, "format", "%d is not known", (int)desc->format);
    return numoe_activation_check(&desc->activation, error);
}

int numoe_model_expert_shape(const struct numoe_model_desc *desc, struct numoe_expert_shape *expert,
                             struct numoe_error *error)
{
    struct numoe_format_sizes sizes;
    uint64_t total;
    int rc = check_desc(desc, error);

    if (rc)
        return rc;
    rc = numoe_format_sizes(desc->format, desc->hidden, desc->bias, &sizes);
    if (rc)
        return numoe_error_set(error, rc, "hidden", "%llu overflows",
                               (unsigned long long)desc->hidden);
    *expert = (struct numoe_expert_shape){
        .layers = desc->layers,
        .experts = desc->experts,
        .slices = (desc->intermediate + NUMOE_TILE - 1) / NUMOE_TILE,
        .slice_bytes = sizes.slice_bytes,
        .hidden = desc->hidden,
        .experts_per_token = desc->experts_per_token,
        .expert_bytes = sizes.expert_bytes,
    };
    if (!numoe_mul_u64(expert->slices, expert->slice_bytes, &total) ||
        !numoe_mul_u64(total, expert->experts * expert->layers, &total) || total > INT64_MAX)
        return numoe_error_set(error, -EOVERFLOW, "model", "its size overflows 63 bits");
    return 0;
}

/* The shapes of a model that is to be computed. */
static int shapes(struct numoe_model *model, struct numoe_expert_shape *expert,
                  struct numoe_error *error)
{
    const struct numoe_format_info *format = numoe_format_info(model->desc.format);
    int rc = numoe_model_expert_shape(&model->desc, expert, error);

    if (rc)
        return rc;
    if (!format->has_kernels)
        return numoe_error_set(error, -ENOTSUP, "format", "no kernel for %s yet", format->title);
    return numoe_slice_shape_init(&model->shape, model->desc.hidden, model->desc.bias);
}

/* start[] of every node, and where the b2 rows are. */
static int place(struct numoe_model *model, struct numoe_error *error)
{
    const struct numoe_model_desc *desc = &model->desc;
    const uint64_t experts = desc->layers * desc->experts;
    const uint32_t nodes = model->plan->node_count;
    uint32_t *biases;

    model->nodes = calloc(nodes, sizeof *model->nodes);
    model->state = calloc(experts, 1);
    model->away = calloc(desc->layers, sizeof *model->away);
    model->bias_place = calloc(experts, sizeof *model->bias_place);
    model->bias_node = calloc(experts, sizeof *model->bias_node);
    biases = calloc(nodes, sizeof *biases);
    if (!model->nodes || !model->state || !model->away || !model->bias_place || !model->bias_node ||
        !biases)
        goto fail;
    for (uint32_t n = 0; n < nodes; n++) {
        model->nodes[n].start = malloc((experts + 1) * sizeof(uint32_t));
        if (!model->nodes[n].start)
            goto fail;
        model->nodes[n].start[0] = 0;
    }
    for (uint64_t q = 0; q < experts; q++) {
        const uint64_t layer = q / desc->experts, expert = q % desc->experts;
        uint64_t from = numoe_plan_boundary(model->plan, layer, expert, 0);
        for (uint32_t n = 0; n < nodes; n++) {
            const uint64_t to = numoe_plan_boundary(model->plan, layer, expert, n + 1);
            const uint64_t next = model->nodes[n].start[q] + (to - from);
            if (next > UINT32_MAX) {
                free(biases);
                return numoe_error_set(error, -EOVERFLOW, "model", "too many slices on a node");
            }
            if (from == 0 && to > 0) {
                model->bias_node[q] = n;
                model->bias_place[q] = biases[n]++;
            }
            model->nodes[n].start[q + 1] = (uint32_t)next;
            from = to;
        }
    }
    for (uint32_t n = 0; n < nodes; n++)
        model->nodes[n].bias_offset = model->nodes[n].start[experts] * model->shape.bytes;
    free(biases);
    return 0;
fail:
    free(biases);
    return numoe_error_set(error, -ENOMEM, "model", "no memory for the placement tables");
}

/* OS indices of the nodes that the policy of plan node n may use besides it. */
static uint32_t list_nodes(const struct numoe_model *model, uint32_t n, uint32_t *nodes)
{
    const struct numoe_plan *here = model->context->plan;
    const uint32_t home = model->home[n];
    const bool all = home == NUMOE_NONE || model->context->memory_policy == NUMOE_MEMORY_INTERLEAVE;
    uint32_t count = 0;

    for (uint32_t i = 0; i < here->node_count; i++)
        if (all || here->nodes[i].domain == here->nodes[home].domain)
            nodes[count++] = here->nodes[i].os_index;
    return count;
}

static int reserve(struct numoe_model *model, enum numoe_residence residence,
                   const struct numoe_watch *watch, struct numoe_error *error)
{
    const struct numoe *context = model->context;
    const struct numoe_plan *plan = model->plan;
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    uint32_t *nodes = malloc(context->plan->node_count * sizeof *nodes);
    uint64_t total = 0;
    int rc = 0;

    if (!nodes)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    for (uint32_t n = 0; n < plan->node_count; n++)
        total += plan->nodes[n].planned_bytes;
    /* the plan of a described machine knows nothing of this one's memory: ask for all at once */
    if (context->described && plan->node_count > 1) {
        struct numoe_memory *all = NULL;

        request.bytes = total;
        rc = numoe_memory_create(&request, &all, error);
        numoe_memory_destroy(all);
    }
    request.strict = context->strict_memory;
    request.spill = context->memory_spill;
    request.log = &context->log;
    request.nodes = nodes;
    for (uint32_t n = 0; !rc && n < plan->node_count; n++) {
        struct model_node *node = &model->nodes[n];

        request.bytes = plan->nodes[n].planned_bytes;
        if (request.bytes == 0)
            continue;
        request.policy = model->home[n] == NUMOE_NONE && context->memory_policy == NUMOE_MEMORY_BIND
                             ? NUMOE_MEMORY_INTERLEAVE
                             : context->memory_policy;
        if (!context->described)
            request.os_node =
                context->plan->nodes[model->home[n] == NUMOE_NONE ? 0 : model->home[n]].os_index;
        request.node_count = list_nodes(model, n, nodes);
        rc = numoe_memory_create(&request, &node->memory, error);
        if (!request.beside)
            request.beside = node->memory; /* all nodes' are populated at once */
        if (!rc)
            node->base = numoe_memory_address(node->memory);
    }
    free(nodes);
    if (rc)
        return rc;
    return numoe_model_populate(
        model, residence == NUMOE_RESIDENT_LATER ? NUMOE_NO_LAYER : NUMOE_ALL_LAYERS, watch, error);
}

int numoe_look(const struct numoe_watch *watch, uint64_t done, uint64_t total)
{
    return watch ? watch->look(watch->user, done, total) : 0;
}

int numoe_model_create(struct numoe *context, const struct numoe_model_desc *desc,
                       struct numoe_model **out, struct numoe_error *error)
{
    return numoe_model_create_watched(context, desc, NUMOE_RESIDENT, NULL, out, error);
}

int numoe_model_create_watched(struct numoe *context, const struct numoe_model_desc *desc,
                               enum numoe_residence residence, const struct numoe_watch *watch,
                               struct numoe_model **out, struct numoe_error *error)
{
    struct numoe_model_desc d = NUMOE_MODEL_DESC_INIT;
    struct numoe_error why = NUMOE_ERROR_INIT;
    struct numoe_expert_shape shape;
    struct numoe_model *model;
    int rc;

    if (!context || !desc || !out)
        return numoe_error_set(error, -EINVAL,
                               !context ? "context"
                               : !desc  ? "desc"
                                        : "model",
                               "is NULL");
    if (desc->size < offsetof(struct numoe_model_desc, arithmetic))
        return numoe_error_set(error, -EINVAL, "desc",
                               "size %zu is not that of struct numoe_model_desc", desc->size);
    memcpy(&d, desc, desc->size < sizeof d ? desc->size : sizeof d);
    d.size = sizeof d;
    model = calloc(1, sizeof *model);
    if (!model)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    model->context = context;
    model->desc = d;
    model->kernels = numoe_kernels_select(d.arithmetic, context->isa, &why);
    if (!model->kernels) {
        rc = numoe_error_set(error, why.code, why.where, "%s", why.message);
        goto fail;
    }
    rc = shapes(model, &shape, error);
    if (rc)
        goto fail;
    rc = numoe_context_plan(context, &shape, &d.range, &model->plan, error);
    if (rc)
        goto fail;
    rc = numoe_model_settle(model, &shape, error);
    if (rc)
        goto fail;
    rc = numoe_model_group(model);
    if (rc) {
        numoe_error_set(error, rc, "model", "out of memory");
        goto fail;
    }
    rc = place(model, error);
    if (!rc)
        rc = reserve(model, residence, watch, error);
    if (!rc)
        rc = numoe_gpu_attach(model, error);
    if (rc)
        goto fail;
    numoe_stats_join(model);
    *out = model;
    return 0;
fail:
    numoe_model_destroy(model);
    return rc;
}

void numoe_model_destroy(struct numoe_model *model)
{
    if (!model)
        return;
    numoe_context_forget(model); /* the last call of it is counted */
    numoe_stats_leave(model);
    numoe_gpu_detach(model);
    for (uint32_t n = 0; model->nodes && n < model->plan->node_count; n++) {
        if (model->nodes[n].memory)
            numoe_memory_destroy(model->nodes[n].memory);
        free(model->nodes[n].start);
    }
    free(model->nodes);
    free(model->state);
    free(model->away);
    free(model->sums);
    free(model->bias_place);
    free(model->bias_node);
    free(model->home);
    numoe_model_ungroup(model);
    numoe_context_drop_plan(model->context, model->plan);
    free(model);
}

/* ---- storing --------------------------------------------------------------------------------- */

/* What node n has of expert q, whose slices on the nodes before it end at `first`. */
static struct model_part part_of(const struct numoe_model *model, uint64_t q, uint32_t n,
                                 uint64_t first)
{
    const struct model_node *node = &model->nodes[n];
    const uint64_t begin = node->start[q], count = node->start[q + 1] - begin;

    return (struct model_part){
        .slices = count ? node->base + begin * model->shape.bytes : NULL,
        .first = first,
        .count = count,
    };
}

void numoe_model_parts(const struct numoe_model *model, uint64_t layer, uint64_t expert,
                       struct model_part *parts)
{
    const uint64_t q = layer * model->desc.experts + expert;
    uint64_t first = model->plan->range.first_slice;

    for (uint32_t n = 0; n < model->plan->node_count; n++) {
        parts[n] = part_of(model, q, n, first);
        first += parts[n].count;
    }
}

const void *numoe_model_run(const struct numoe_model *model, uint64_t layer, uint64_t expert,
                            uint32_t plan_node, uint64_t *first, uint64_t *count)
{
    const uint64_t q = layer * model->desc.experts + expert;
    struct model_part part;

    *first = model->plan->range.first_slice;
    for (uint32_t n = 0; n < plan_node; n++)
        *first += model->nodes[n].start[q + 1] - model->nodes[n].start[q];
    part = part_of(model, q, plan_node, *first);
    *count = part.count;
    return part.slices;
}

int numoe_model_store(struct numoe_model *model, uint64_t layer, uint64_t expert,
                      uint32_t plan_node, const struct numoe_expert_source *source,
                      struct numoe_pack_report *report)
{
    uint64_t first, count;
    const void *run = numoe_model_run(model, layer, expert, plan_node, &first, &count);

    return count ? numoe_pack_slices(&model->shape, source, first, count, (void *)(uintptr_t)run,
                                     report)
                 : 0;
}

int numoe_model_store_range(struct numoe_model *model, uint64_t layer, uint64_t expert,
                            uint64_t first, uint64_t count,
                            const struct numoe_expert_source *source,
                            struct numoe_pack_report *report)
{
    const uint64_t end = first + count, q = layer * model->desc.experts + expert;
    uint64_t from = model->plan->range.first_slice;

    for (uint32_t n = 0; n < model->plan->node_count; n++) {
        const struct model_part part = part_of(model, q, n, from);
        const uint64_t begin = first > from ? first : from;
        const uint64_t stop = end < from + part.count ? end : from + part.count;
        int rc = 0;

        if (begin < stop)
            rc = numoe_pack_slices(
                &model->shape, source, begin, stop - begin,
                (uint8_t *)(uintptr_t)part.slices + (begin - from) * model->shape.bytes, report);
        if (rc)
            return rc;
        from += part.count;
    }
    return 0;
}

bool numoe_model_holds(const struct numoe_model *model, uint64_t expert)
{
    const struct numoe_range *range = &model->plan->range;

    return expert >= range->first_expert && expert < range->end_expert;
}

/* NULL when another rank has the expert's slice 0. */
static float *bias_row(const struct numoe_model *model, uint64_t layer, uint64_t expert)
{
    const uint64_t q = layer * model->desc.experts + expert;
    const struct model_node *node = &model->nodes[model->bias_node[q]];
    const uint64_t row = model->shape.hidden_tiles * NUMOE_TILE * sizeof(float);

    if (model->plan->range.first_slice || !numoe_model_holds(model, expert))
        return NULL;
    return (float *)(void *)(node->base + node->bias_offset + model->bias_place[q] * row);
}

void numoe_model_store_down_bias(struct numoe_model *model, uint64_t layer, uint64_t expert,
                                 const float *down_bias)
{
    float *row = bias_row(model, layer, expert);

    for (uint64_t i = 0; row && i < model->shape.hidden_tiles * NUMOE_TILE; i++) {
        const uint64_t from = i / NUMOE_TILE * NUMOE_TILE + numoe_lane_row(i % NUMOE_TILE);
        row[i] = from < model->desc.hidden ? down_bias[from] : 0.0f;
    }
}

const float *numoe_model_down_bias(const struct numoe_model *model, uint64_t layer, uint64_t expert)
{
    return model->desc.bias ? bias_row(model, layer, expert) : NULL;
}

void numoe_model_mark(struct numoe_model *model, uint64_t layer, uint64_t expert, bool present,
                      bool extreme_scales)
{
    model->state[layer * model->desc.experts + expert] =
        (uint8_t)((present ? EXPERT_PRESENT : 0) | (extreme_scales ? EXPERT_EXTREME : 0));
    /* pairs with the load in gpu_attach.c: a copy begun before is made again */
    if (model->generation)
        atomic_fetch_add_explicit(&model->generation[layer], 1, memory_order_release);
}

void numoe_model_set_origin(struct numoe_model *model, const struct numoe_model_origin *origin)
{
    strncpy(model->family, origin->family, sizeof model->family - 1);
    strncpy(model->io_path, origin->io_path, sizeof model->io_path - 1);
    model->origin = *origin;
    model->origin.family = model->origin.io_path = NULL;
}

struct store_job {
    struct numoe_model *model;
    const struct numoe_expert_source *source;
    uint64_t layer, expert;
    uint64_t slices_an_item;
    struct numoe_pack_report *reports; /* one an item */
    int *results;
};

static void store_item(void *context, uint32_t item, uint32_t worker)
{
    struct store_job *job = context;
    const struct numoe_range *range = &job->model->plan->range;
    const uint64_t first = range->first_slice + item * job->slices_an_item;
    const uint64_t left = range->end_slice - first;

    (void)worker;
    job->results[item] = numoe_model_store_range(
        job->model, job->layer, job->expert, first,
        left < job->slices_an_item ? left : job->slices_an_item, job->source, &job->reports[item]);
}

/* Pointers and steps of the three matrices. */
static int check_weights(const struct numoe_model *model, const struct numoe_expert_weights *w,
                         struct numoe_error *error)
{
    static const char *const names[3] = {"gate", "up", "down"};
    const struct numoe_mxfp4 *m[3] = {&w->gate, &w->up, &w->down};

    for (int i = 0; i < 3; i++) {
        if (!m[i]->codes || !m[i]->scales)
            return numoe_error_set(error, -EINVAL, names[i], "codes or scales are NULL");
        if (m[i]->nibbles != NUMOE_NIBBLES_ADJACENT && m[i]->nibbles != NUMOE_NIBBLES_SPLIT)
            return numoe_error_set(error, -EINVAL, names[i], "nibble order %d is not known",
                                   (int)m[i]->nibbles);
        if (m[i]->code_step < 16 || m[i]->scale_step < 1)
            return numoe_error_set(
                error, -EINVAL, names[i], "steps %llu and %llu overlap: at least 16 and 1",
                (unsigned long long)m[i]->code_step, (unsigned long long)m[i]->scale_step);
    }
    if (model->desc.bias && (!w->gate_bias || !w->up_bias || !w->down_bias || w->bias_step < 1))
        return numoe_error_set(error, -EINVAL, "bias",
                               "the model has biases: gate_bias, up_bias, down_bias and bias_step "
                               "must be given");
    if (!model->desc.bias && (w->gate_bias || w->up_bias || w->down_bias))
        return numoe_error_set(error, -EINVAL, "bias", "the model was created without biases");
    return 0;
}

int numoe_expert_load(struct numoe_model *model, uint64_t layer, uint64_t expert,
                      const struct numoe_expert_weights *weights, struct numoe_error *error)
{
    static const char *const names[3] = {"gate", "up", "down"};
    struct numoe_expert_weights w = {0};
    struct numoe_expert_source source;
    struct store_job job;
    struct numoe_pool_job pool_job;
    uint32_t items;
    bool extreme = false;
    int rc;

    if (!model || !weights)
        return numoe_error_set(error, -EINVAL, !model ? "model" : "weights", "is NULL");
    rc = numoe_context_check_fork(model->context, error);
    if (rc)
        return rc;
    if (layer >= model->desc.layers || expert >= model->desc.experts)
        return numoe_error_set(error, -EINVAL, "expert",
                               "layer %llu, expert %llu of a model of %llu layers, %llu experts",
                               (unsigned long long)layer, (unsigned long long)expert,
                               (unsigned long long)model->desc.layers,
                               (unsigned long long)model->desc.experts);
    if (!numoe_model_holds(model, expert))
        return numoe_error_set(
            error, -EINVAL, "expert", "expert %llu is held elsewhere: here are %llu to %llu",
            (unsigned long long)expert, (unsigned long long)model->plan->range.first_expert,
            (unsigned long long)model->plan->range.end_expert - 1);
    memcpy(&w, weights, weights->size < sizeof w ? weights->size : sizeof w);
    rc = check_weights(model, &w, error);
    if (!rc)
        rc = numoe_layer_return(model, layer, error);
    if (rc)
        return rc;
    source = (struct numoe_expert_source){
        .hidden = model->desc.hidden,
        .intermediate = model->desc.intermediate,
        .gate = w.gate,
        .up = w.up,
        .down = w.down,
        .gate_bias = w.gate_bias,
        .up_bias = w.up_bias,
        .bias_step = w.bias_step,
    };
    job = (struct store_job){.model = model, .source = &source, .layer = layer, .expert = expert};
    job.slices_an_item = 8;
    items = (uint32_t)((numoe_plan_held(model->plan).slices + 7) / 8);
    job.reports = calloc(items, sizeof *job.reports);
    job.results = calloc(items, sizeof *job.results);
    if (!job.reports || !job.results) {
        rc = numoe_error_set(error, -ENOMEM, "expert", "out of memory");
        goto out;
    }
    numoe_model_mark(model, layer, expert, false, false);
    pool_job = (struct numoe_pool_job){.context = &job, .phase_count = 1};
    pool_job.phases[0] = (struct numoe_pool_phase){.run = store_item, .items = items};
    rc = numoe_pool_run(model->context->pool, &pool_job);
    if (rc)
        numoe_error_set(error, rc, "workers", "could not run the job: %s", strerror(-rc));
    for (uint32_t i = 0; !rc && i < items; i++) {
        extreme = extreme || job.reports[i].extreme_scales;
        rc = job.results[i];
        if (rc == -EDOM)
            numoe_error_set(error, rc, names[job.reports[i].bad_matrix],
                            "layer %llu, expert %llu: scale byte 255 (NaN) in row %llu, group %llu",
                            (unsigned long long)layer, (unsigned long long)expert,
                            (unsigned long long)job.reports[i].bad_row,
                            (unsigned long long)job.reports[i].bad_group);
        else if (rc)
            numoe_error_set(error, rc, "expert", "could not be packed");
    }
    if (!rc) {
        if (model->desc.bias)
            numoe_model_store_down_bias(model, layer, expert, w.down_bias);
        numoe_model_mark(model, layer, expert, true, extreme);
        if (model->sums)
            numoe_expert_checksum(model, layer, expert,
                                  &model->sums[layer * model->desc.experts + expert]);
    }
out:
    free(job.reports);
    free(job.results);
    return rc;
}

/* ---- information ----------------------------------------------------------------------------- */

int numoe_model_info(const struct numoe_model *model, struct numoe_model_info *info)
{
    struct numoe_model_info now = {.size = sizeof now};
    struct numoe_expert_shape held;

    if (!model || !info || info->size < sizeof info->size)
        return -EINVAL;
    held = numoe_plan_held(model->plan);
    now.desc = model->desc;
    memcpy(now.family, model->family, sizeof now.family);
    strncpy(now.kernels, model->kernels->name, sizeof now.kernels - 1);
    now.node_count = model->context->plan->node_count;
    now.worker_count = numoe_pool_worker_count(model->context->pool);
    now.expert_bytes = held.slices * held.slice_bytes + held.expert_bytes;
    for (uint32_t n = 0; n < model->plan->node_count; n++)
        now.resident_bytes += model->plan->nodes[n].planned_bytes;
    now.checkpoint_bytes = model->origin.checkpoint_bytes;
    now.load_seconds = model->origin.seconds;
    now.resident_seconds = model->origin.resident_seconds;
    now.placing_seconds = model->origin.placing_seconds;
    now.meanwhile_seconds = model->origin.meanwhile_seconds;
    now.read_depth = model->origin.read_depth;
    now.read_block_bytes = model->origin.read_block_bytes;
    memcpy(now.io_path, model->io_path, sizeof now.io_path);
    numoe_gpu_inform(model, &now);
    now.size = info->size;
    memcpy(info, &now, info->size < sizeof now ? info->size : sizeof now);
    return 0;
}

int numoe_model_node(const struct numoe_model *model, uint32_t index, struct numoe_node_info *info)
{
    const struct numoe_plan_node *node;
    struct numoe_node_info now;

    if (!model || !info || info->size < sizeof info->size ||
        index >= model->context->plan->node_count)
        return -EINVAL;
    node = &model->context->plan->nodes[index];
    now = (struct numoe_node_info){
        .size = info->size,
        .os_index = node->os_index,
        .workers = node->worker_count,
        .capacity_bytes = node->capacity_bytes,
    };
    for (uint32_t n = 0; n < model->plan->node_count; n++) {
        struct numoe_memory_report report = {0};

        if (!model->nodes[n].memory || !numoe_model_bytes_on(model, n, index, UINT64_MAX))
            continue;
        numoe_memory_inspect(model->nodes[n].memory, &report);
        now.bound = (now.bound || !now.planned_bytes) && report.bound;
        now.planned_bytes +=
            numoe_model_bytes_on(model, n, index, model->plan->nodes[n].planned_bytes);
        now.huge_bytes += numoe_model_bytes_on(model, n, index, report.huge_bytes);
        now.checked_bytes += numoe_model_bytes_on(model, n, index, report.checked_bytes);
        now.placed_bytes += numoe_model_bytes_on(model, n, index, report.placed_bytes);
        now.giant_bytes += numoe_model_bytes_on(model, n, index, report.giant_bytes);
        now.spilled_bytes += numoe_model_bytes_on(model, n, index, report.spilled_bytes);
    }
    memcpy(info, &now, info->size < sizeof now ? info->size : sizeof now);
    return 0;
}
