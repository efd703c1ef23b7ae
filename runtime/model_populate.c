/*
 * Making the arenas of a model resident: by the workers of their nodes, a chunk an item.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <stdlib.h>

#define POPULATE_BYTES ((uint64_t)64 << 20) /* an item */

struct populate {
    struct numoe_model *model;
    const struct numoe_watch *watch;
    uint64_t total;
    atomic_uint_fast64_t done; /* bytes */
    uint32_t *item_node;
    uint64_t *item_offset, *node_end;
    atomic_int failed; /* the first failure's code */
    struct numoe_error error;
};

static void populate_chunk(void *context, uint32_t item, uint32_t worker)
{
    struct populate *p = context;
    struct numoe_memory *memory = p->model->nodes[p->item_node[item]].memory;
    const uint64_t left = p->node_end[p->item_node[item]] - p->item_offset[item];
    const uint64_t bytes = left < POPULATE_BYTES ? left : POPULATE_BYTES;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int none = 0, rc = 0;

    if (atomic_load_explicit(&p->failed, memory_order_relaxed))
        return;
    if (worker == 0) /* the thread that called */
        rc = numoe_look(p->watch, atomic_load_explicit(&p->done, memory_order_relaxed), p->total);
    if (!rc)
        rc = numoe_memory_populate(memory, p->item_offset[item], bytes, &error);
    atomic_fetch_add_explicit(&p->done, bytes, memory_order_relaxed);
    /* the winner alone writes the error; the job's end publishes it */
    if (rc && atomic_compare_exchange_strong_explicit(&p->failed, &none, rc, memory_order_relaxed,
                                                      memory_order_relaxed))
        p->error = error;
}

/* Bytes from *begin on of node n's memory. */
static uint64_t range_of(const struct numoe_model *model, uint32_t n, uint64_t layer,
                         uint64_t *begin)
{
    const struct model_node *node = &model->nodes[n];

    if (layer < NUMOE_NO_LAYER)
        return numoe_model_layer_bytes(model, layer, n, begin);
    *begin = layer == NUMOE_NO_LAYER && node->memory ? node->bias_offset : 0;
    return node->memory ? numoe_memory_bytes(node->memory) - *begin : 0;
}

int numoe_model_populate(struct numoe_model *model, uint64_t layer, const struct numoe_watch *watch,
                         struct numoe_error *error)
{
    const struct numoe_plan *plan = model->plan;
    const uint32_t workers = numoe_pool_worker_count(model->context->pool);
    struct populate p = {.model = model, .watch = watch, .error = NUMOE_ERROR_INIT};
    struct numoe_pool_job job = {.context = &p, .phase_count = 1};
    uint32_t *first = NULL;
    uint64_t items = 0;
    int rc = -ENOMEM;

    for (uint32_t n = 0; n < plan->node_count; n++) {
        uint64_t begin, bytes = range_of(model, n, layer, &begin);

        items += (bytes + POPULATE_BYTES - 1) / POPULATE_BYTES;
        p.total += bytes;
    }
    if (items >= NUMOE_POOL_MAX_ITEMS)
        return numoe_error_set(error, -EOVERFLOW, "model", "too large");
    p.item_node = malloc((items + 1) * sizeof *p.item_node);
    p.item_offset = malloc((items + 1) * sizeof *p.item_offset);
    p.node_end = malloc(plan->node_count * sizeof *p.node_end);
    first = calloc(workers + 1, sizeof *first);
    if (!p.item_node || !p.item_offset || !p.node_end || !first) {
        numoe_error_set(error, -ENOMEM, "model", "out of memory");
        goto out;
    }
    items = 0;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_plan_node *node = &plan->nodes[n];
        const uint64_t begin = items;
        uint64_t from, bytes = range_of(model, n, layer, &from);

        p.node_end[n] = from + bytes;
        for (uint64_t at = from; at < p.node_end[n]; at += POPULATE_BYTES) {
            p.item_node[items] = n;
            p.item_offset[items++] = at;
        }
        if (workers == plan->worker_count)
            for (uint32_t w = 0; w < node->worker_count; w++)
                first[node->first_worker + w] =
                    (uint32_t)(begin + (items - begin) * w / node->worker_count);
    }
    /* a node without workers leaves its chunks to the worker before it */
    for (uint32_t w = 0; w < workers && workers != plan->worker_count; w++)
        first[w] = (uint32_t)(items * w / workers);
    first[0] = 0;
    first[workers] = (uint32_t)items;
    job.phases[0] =
        (struct numoe_pool_phase){.run = populate_chunk, .items = (uint32_t)items, .first = first};
    rc = numoe_pool_run(model->context->pool, &job);
    if (!rc) {
        rc = atomic_load_explicit(&p.failed, memory_order_relaxed);
        /* without a message it is the watch's, who has said why */
        if (rc && p.error.message[0])
            numoe_error_set(error, rc, p.error.where, "%s", p.error.message);
    }
    if (!rc)
        rc = numoe_look(watch, p.total, p.total);
out:
    free(p.item_node);
    free(p.item_offset);
    free(p.node_end);
    free(first);
    return rc;
}
