/*
 * A model's weights as the GPU sees them: a node's arena is ordered [layer][expert][slice], so
 * consecutive experts of a layer are one contiguous region of each node.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_run.h"
#include "numoe_copy.h"

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    const struct numoe_model *model = user;
    const struct model_node *node = &model->nodes[index];

    *address = node->base;
    *bytes = node->base ? node->bias_offset : 0; /* the slices */
}

static uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                      const uint8_t **address)
{
    const struct numoe_model *model = user;
    const struct model_node *node = &model->nodes[index];
    const uint64_t q = layer * model->desc.experts + expert;

    *address = node->base ? node->base + node->start[q] * model->shape.bytes : NULL;
    return node->start[q + 1] - node->start[q];
}

static bool present(void *user, uint64_t layer, uint64_t expert)
{
    const struct numoe_model *model = user;
    return model->state[layer * model->desc.experts + expert] & EXPERT_PRESENT;
}

static const float *bias(void *user, uint64_t layer, uint64_t expert)
{
    const struct numoe_model *model = user;
    return numoe_model_holds(model, expert) ? numoe_model_down_bias(model, layer, expert) : NULL;
}

static uint32_t generation(void *user, uint64_t layer)
{
    const struct numoe_model *model = user;
    /* pairs with the increment in numoe_model_mark */
    return atomic_load_explicit(&model->generation[layer], memory_order_acquire);
}

/* Rows between host memories by the pool's workers, in items of some size. */
struct copy {
    uint8_t *to;
    const uint8_t *from;
    uint64_t to_stride, from_stride, row_bytes, rows;
    uint64_t rows_an_item; /* or, for a single row, bytes */
};

enum { COPY_ITEM_BYTES = 256 * 1024 };

static void copy_item(void *context, uint32_t item, uint32_t worker)
{
    const struct copy *c = context;
    const uint64_t begin = item * c->rows_an_item;

    (void)worker;
    if (c->rows == 1) {
        const uint64_t left = c->row_bytes - begin;
        memcpy(c->to + begin, c->from + begin, left < c->rows_an_item ? left : c->rows_an_item);
        return;
    }
    for (uint64_t r = begin; r < begin + c->rows_an_item && r < c->rows; r++)
        memcpy(c->to + r * c->to_stride, c->from + r * c->from_stride, c->row_bytes);
}

static void copy(void *user, void *to, uint64_t to_stride, const void *from, uint64_t from_stride,
                 uint64_t row_bytes, uint64_t rows)
{
    const struct numoe_model *model = user;
    struct copy c = {to, from, to_stride, from_stride, row_bytes, rows, 0};
    struct numoe_pool_job job = {.context = &c, .phase_count = 1};
    uint64_t items;

    if (rows == 1) {
        c.rows_an_item = COPY_ITEM_BYTES;
        items = (row_bytes + COPY_ITEM_BYTES - 1) / COPY_ITEM_BYTES;
    } else {
        c.rows_an_item = row_bytes < COPY_ITEM_BYTES ? COPY_ITEM_BYTES / row_bytes : 1;
        items = (rows + c.rows_an_item - 1) / c.rows_an_item;
    }
    if (items > 1 && items < NUMOE_POOL_MAX_ITEMS) {
        job.phases[0] = (struct numoe_pool_phase){.run = copy_item, .items = (uint32_t)items};
        if (!numoe_pool_run(model->context->pool, &job))
            return;
    }
    for (uint32_t i = 0; i < items; i++)
        copy_item(&c, i, 0);
}

/* A staging buffer filled past the caches, by the workers of the node that it lies on: the others'
 * stores would cross to it. They may still steal what is late. */
struct filling {
    uint8_t *to;
    const uint8_t *from;
    uint64_t bytes;
};

static void fill_item(void *context, uint32_t item, uint32_t worker)
{
    const struct filling *f = context;
    const uint64_t begin = (uint64_t)item * COPY_ITEM_BYTES, left = f->bytes - begin;

    (void)worker;
    numoe_copy_stream(f->to + begin, f->from + begin,
                      left < COPY_ITEM_BYTES ? left : COPY_ITEM_BYTES);
}

static bool is_on(const struct numoe_plan *plan, uint32_t worker, uint32_t os_node)
{
    const struct numoe_plan_worker *w = &plan->workers[worker % plan->worker_count];

    return plan->nodes[w->plan_node].os_index == os_node;
}

/* first[w] of the workers: equal shares for those of the node, none for others. Returns whether
 * there are any. */
static bool share_among(const struct numoe_plan *plan, uint32_t workers, uint32_t os_node,
                        uint32_t items, uint32_t *first)
{
    uint32_t there = 0, seen = 0;

    for (uint32_t w = 0; w < workers; w++)
        there += is_on(plan, w, os_node);
    for (uint32_t w = 0; w < workers; w++) {
        first[w] = there ? (uint32_t)((uint64_t)items * seen / there) : 0;
        seen += is_on(plan, w, os_node);
    }
    first[workers] = items;
    return there != 0;
}

static void fill(void *user, void *to, const void *from, uint64_t bytes, uint32_t os_node)
{
    const struct numoe_model *model = user;
    const uint32_t workers = numoe_pool_worker_count(model->context->pool);
    const uint64_t items = (bytes + COPY_ITEM_BYTES - 1) / COPY_ITEM_BYTES;
    struct filling f = {to, from, bytes};
    struct numoe_pool_job job = {.context = &f, .phase_count = 1};
    uint32_t *first = NULL;
    int rc = -EINVAL;

    if (items > 1 && items < NUMOE_POOL_MAX_ITEMS) {
        first = calloc(workers + 1u, sizeof *first);
        job.phases[0] = (struct numoe_pool_phase){.run = fill_item, .items = (uint32_t)items};
        /* of another machine's nodes none is the device's */
        if (first && !model->context->described &&
            share_among(model->context->plan, workers, os_node, (uint32_t)items, first))
            job.phases[0].first = first;
        rc = numoe_pool_run(model->context->pool, &job);
        free(first);
    }
    for (uint32_t i = 0; rc && i < items; i++)
        fill_item(&f, i, 0);
}

/* Rows of several places summed. */
struct addition {
    uint8_t *to;
    enum numoe_type type;
    const float *const *from;
    uint32_t count;
    bool keep;
    uint64_t to_stride, columns, rows, rows_an_item;
};

static void add_item(void *context, uint32_t item, uint32_t worker)
{
    const struct addition *a = context;
    const uint64_t begin = item * a->rows_an_item, left = a->rows - begin;
    const uint64_t size = a->type == NUMOE_BF16 ? 2 : 4;
    const float *from[NUMOE_GPU_MOST];

    (void)worker;
    for (uint32_t i = 0; i < a->count; i++)
        from[i] = a->from[i] + begin * a->columns;
    numoe_gpu_sum_rows(a->to + begin * a->to_stride * size, a->type, a->to_stride, from, a->count,
                       a->keep, a->columns, left < a->rows_an_item ? left : a->rows_an_item);
}

static void sum(void *user, void *to, enum numoe_type type, uint64_t to_stride,
                const float *const *from, uint32_t count, bool keep, uint64_t columns,
                uint64_t rows)
{
    const struct numoe_model *model = user;
    const uint64_t row_bytes = columns * sizeof **from;
    struct addition a = {to, type, from, count, keep, to_stride, columns, rows, 1};
    struct numoe_pool_job job = {.context = &a, .phase_count = 1};
    uint64_t items;

    a.rows_an_item = row_bytes < COPY_ITEM_BYTES ? COPY_ITEM_BYTES / row_bytes : 1;
    items = (rows + a.rows_an_item - 1) / a.rows_an_item;
    if (items > 1 && items < NUMOE_POOL_MAX_ITEMS) {
        job.phases[0] = (struct numoe_pool_phase){.run = add_item, .items = (uint32_t)items};
        if (!numoe_pool_run(model->context->pool, &job))
            return;
    }
    for (uint32_t i = 0; i < items; i++)
        add_item(&a, i, 0);
}

/* Of nodes of this machine: those of a plan for another are not where its numbers say. */
static uint32_t distance(void *user, uint32_t index, uint32_t os_node)
{
    const struct numoe_model *model = user;
    const struct numoe_machine *machine = model->context->machine;
    uint32_t from = NUMOE_NONE, to = NUMOE_NONE;

    if (model->context->described || model->context->as_if)
        return 0;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        if (machine->nodes[i].os_index == model->plan->nodes[index].os_index)
            from = i;
        if (machine->nodes[i].os_index == os_node)
            to = i;
    }
    return from == NUMOE_NONE || to == NUMOE_NONE ? 0 : numoe_machine_distance(machine, from, to);
}

/* Whoever finishes a call has the turn. */
static void trace_span(void *user, const struct numoe_gpu_span *span)
{
    struct numoe_trace *trace = user;
    const bool copy = span->kind == NUMOE_GPU_SPAN_COPY;
    const struct trace_event event = {
        .begin_ns = span->begin_ns,
        .end_ns = span->end_ns,
        .kind = copy ? TRACE_GPU_COPY : TRACE_GPU_COMPUTE,
        .args = {(uint32_t)span->layer, (uint32_t)span->experts, (uint32_t)(span->bytes >> 10)}};

    if (span->kind == NUMOE_GPU_SPAN_PASS)
        return; /* of whole experts, which a model of the runtime's has not */
    numoe_trace_add(trace, numoe_trace_gpu(trace, span->part, copy), &event);
}

int numoe_gpu_attach(struct numoe_model *model, struct numoe_error *error)
{
    struct numoe *context = model->context;
    const struct numoe_gpu_source source = {
        .user = model,
        .shape = model->shape,
        .activation = model->desc.activation,
        .arithmetic = model->desc.arithmetic,
        .layers = model->desc.layers,
        .experts = model->desc.experts,
        .slices = (uint32_t)numoe_plan_held(model->plan).slices,
        .down_bias = model->desc.bias && !model->plan->range.first_slice,
        .region_count = model->plan->node_count,
        .arena = arena,
        .place = place,
        .present = present,
        .bias = bias,
        .generation = generation,
        .copy = copy,
        .fill = fill,
        .sum = sum,
        .distance = distance,
    };
    struct numoe_gpu *gpus[NUMOE_GPU_MOST] = {context->gpu};
    const struct numoe_gpu_model_options options = {.stream = context->gpu_stream,
                                                    .cache_bytes = context->gpu_cache_bytes,
                                                    .profile = context->gpu_profile,
                                                    .sum = context->gpu_sum};
    struct numoe_error why = NUMOE_ERROR_INIT;

    memcpy(model->gpu_note, context->gpu_note, sizeof model->gpu_note);
    if (!context->gpu)
        return 0;
    model->generation = calloc(model->desc.layers, sizeof *model->generation);
    if (!model->generation)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    /* its copies call the pool: no call may be under way */
    pthread_mutex_lock(&context->turn);
    memcpy(gpus + 1, context->more_gpus, context->more_gpu_count * sizeof *gpus);
    if (numoe_gpu_model_create_over(gpus, 1 + context->more_gpu_count, &source, &options,
                                    &model->gpu, &why)) {
        model->gpu = NULL;
        memcpy(model->gpu_note, why.message, sizeof model->gpu_note);
        model->gpu_note[sizeof model->gpu_note - 1] = 0;
        numoe_log_write(&context->log, NUMOE_LOG_WARNING,
                        "the CPU computes this model, not the GPU: %s", why.message);
    } else if (numoe_gpu_run_make(model)) {
        numoe_gpu_model_destroy(model->gpu);
        model->gpu = NULL;
        pthread_mutex_unlock(&context->turn);
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    }
    if (model->gpu && context->trace &&
        numoe_gpu_trace(model->gpu, trace_span, context->trace, &why))
        numoe_log_write(&context->log, NUMOE_LOG_WARNING, "the trace is without the GPU: %s",
                        why.message);
    pthread_mutex_unlock(&context->turn);
    return 0;
}

void numoe_gpu_detach(struct numoe_model *model)
{
    /* a forked child has neither the turn, which may be locked for ever, nor a device */
    if (model->gpu && !numoe_pool_forked(model->context->pool)) {
        pthread_mutex_lock(&model->context->turn);
        numoe_gpu_model_destroy(model->gpu);
        pthread_mutex_unlock(&model->context->turn);
    }
    model->gpu = NULL;
    free(model->generation);
    model->generation = NULL;
    free(model->gpu_ids);
    model->gpu_ids = NULL;
    numoe_gpu_run_free(model);
}

struct numoe_gpu_model *numoe_model_gpu(const struct numoe_model *model)
{
    return model ? model->gpu : NULL;
}

/* "NVIDIA A10", "2 x NVIDIA A10", "NVIDIA A10 and 1 other" */
static void name_gpus(const struct numoe *context, char *text, size_t size)
{
    const char *first = numoe_gpu_get(context->gpu)->name;
    uint32_t alike = 1;

    for (uint32_t i = 0; i < context->more_gpu_count; i++)
        alike += !strcmp(numoe_gpu_get(context->more_gpus[i])->name, first);
    if (context->more_gpu_count == 0)
        snprintf(text, size, "%.64s", first);
    else if (alike == 1 + context->more_gpu_count)
        snprintf(text, size, "%u x %.64s", alike, first);
    else
        snprintf(text, size, "%.64s and %u other%s", first, context->more_gpu_count,
                 context->more_gpu_count == 1 ? "" : "s");
}

void numoe_gpu_inform(const struct numoe_model *model, struct numoe_model_info *info)
{
    struct numoe_gpu_report report;
    struct numoe_error lost = NUMOE_ERROR_INIT;

    memcpy(info->gpu_note, model->gpu_note, sizeof info->gpu_note);
    if (!model->gpu)
        return;
    if (numoe_gpu_model_health(model->gpu, &lost)) {
        memcpy(info->gpu_note, lost.message, sizeof info->gpu_note);
        info->gpu_note[sizeof info->gpu_note - 1] = 0;
        return;
    }
    numoe_gpu_model_report(model->gpu, &report);
    name_gpus(model->context, info->gpu, sizeof info->gpu);
    info->gpu_resident = report.resident;
    info->gpu_experts = report.cells;
    info->gpu_bytes = report.device_bytes;
    info->gpu_pinned_bytes = report.pinned_bytes;
}
