/*
 * Making memory resident on the way.
 *
 * A system may give pages no faster than the disk gives bytes: a virtual machine's host, at the
 * first touch. Both at once take as long as the slower of the two. So a job that places experts
 * begins with a phase that makes the chunks resident that they go to, while the reads of the next
 * experts are in flight. Chunks are made resident by workers of their node, once, each after a look
 * at what the node and the cgroup have left (numoe_memory_populate): what is not there is an error
 * of the load, or lies elsewhere where that was asked for, as if it had been asked for before.
 *
 * Where a chunk is needed, those behind it are too, soon: then each of the node's workers has one.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load.h"

#include "base/clock.h"

#include <errno.h>
#include <stdlib.h>

#define CHUNK_BYTES ((uint64_t)8 << 20) /* what is looked at and made resident as one */

enum { AHEAD_CHUNKS = 8 }; /* of all nodes: reads wait for whoever is in a job too long */

int load_make_resident(struct load *l)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    const uint32_t workers = numoe_pool_worker_count(l->pool);
    struct resident *r = &l->resident;
    uint64_t chunks = 0;

    r->error = (struct numoe_error)NUMOE_ERROR_INIT;
    r->begin = calloc(plan->node_count + 1, sizeof *r->begin);
    if (!r->begin)
        goto no_memory;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_memory *memory = numoe_model_memory(l->model, n);

        r->begin[n] = chunks;
        if (memory)
            chunks += (numoe_memory_bytes(memory) + CHUNK_BYTES - 1) / CHUNK_BYTES;
    }
    r->begin[plan->node_count] = chunks;
    if (chunks > NUMOE_POOL_MAX_ITEMS)
        return numoe_error_set(l->error, -EOVERFLOW, numoe_checkpoint_directory(l->ckpt),
                               "%llu chunks of memory are too many", (unsigned long long)chunks);
    r->taken = calloc(chunks + 1, sizeof *r->taken);
    r->chunks = malloc((chunks + 1) * sizeof *r->chunks);
    if (!r->taken || !r->chunks)
        goto no_memory;
    if (plan->worker_count == workers) {
        r->first = calloc(workers + 1, sizeof *r->first);
        if (!r->first)
            goto no_memory;
    }
    return 0;
no_memory:
    return numoe_error_set(l->error, -ENOMEM, numoe_checkpoint_directory(l->ckpt),
                           "no memory for the list of what is resident");
}

void load_free_resident(struct load *l)
{
    free(l->resident.begin);
    free(l->resident.taken);
    free(l->resident.chunks);
    free(l->resident.first);
}

static void take_chunk(struct resident *r, uint32_t node, uint64_t index)
{
    r->taken[r->begin[node] + index] = true;
    r->chunks[r->count++] = (struct chunk){.node = node, .index = (uint32_t)index};
}

/* Chunks of a node that experts go to and that were not taken before, and some behind them. */
static void list_node(struct load *l, struct slot *const *slots, unsigned count, uint32_t node)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    struct resident *r = &l->resident;
    const uint64_t chunks = r->begin[node + 1] - r->begin[node];
    const uint32_t began = r->count;
    uint64_t ahead = AHEAD_CHUNKS / plan->node_count, next = 0;

    for (unsigned s = 0; s < count; s++) {
        const struct turn *turn = &slots[s]->turn;
        uint64_t first, slices, at;
        const uint8_t *run =
            numoe_model_run(l->model, turn->layer, turn->expert, node, &first, &slices);

        if (!slices)
            continue;
        at = (uint64_t)(run -
                        (const uint8_t *)numoe_memory_address(numoe_model_memory(l->model, node)));
        next = at / CHUNK_BYTES;
        at += slices * numoe_model_shape(l->model)->bytes;
        for (; next < (at + CHUNK_BYTES - 1) / CHUNK_BYTES; next++)
            if (!r->taken[r->begin[node] + next])
                take_chunk(r, node, next);
    }
    if (r->count == began)
        return;
    if (ahead > plan->nodes[node].worker_count)
        ahead = plan->nodes[node].worker_count;
    for (; r->count - began < ahead && next < chunks && !r->taken[r->begin[node] + next]; next++)
        take_chunk(r, node, next);
}

uint32_t load_list_chunks(struct load *l, struct slot *const *slots, unsigned count)
{
    const struct numoe_plan *plan = numoe_model_plan(l->model);
    struct resident *r = &l->resident;
    uint32_t worker = 0;

    r->count = 0;
    for (uint32_t node = 0; node < plan->node_count; node++) {
        const uint32_t begin = r->count;

        list_node(l, slots, count, node);
        load_share(l, r->first, &worker, node, begin, r->count);
    }
    load_share_end(l, r->first, worker, r->count);
    r->began = r->count ? numoe_now_ns() : 0;
    atomic_store_explicit(&r->ended, r->began, memory_order_relaxed);
    return r->count;
}

void load_populate_chunk(void *context, uint32_t index, uint32_t worker)
{
    struct load *l = context;
    struct resident *r = &l->resident;
    const struct chunk *chunk = &r->chunks[index];
    struct numoe_memory *memory = numoe_model_memory(l->model, chunk->node);
    const uint64_t at = chunk->index * CHUNK_BYTES, left = numoe_memory_bytes(memory) - at;
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t now, last;
    int none = 0, code;

    (void)worker;
    if (atomic_load_explicit(&r->failed, memory_order_relaxed))
        return;
    code = numoe_memory_populate(memory, at, left < CHUNK_BYTES ? left : CHUNK_BYTES, &error);
    /* the winner alone writes the error; the job's end publishes it */
    if (code && atomic_compare_exchange_strong_explicit(&r->failed, &none, code,
                                                        memory_order_relaxed, memory_order_relaxed))
        r->error = error;
    now = numoe_now_ns();
    last = atomic_load_explicit(&r->ended, memory_order_relaxed);
    while (last < now && !atomic_compare_exchange_weak_explicit(
                             &r->ended, &last, now, memory_order_relaxed, memory_order_relaxed))
        ;
}

int load_take_chunks(struct load *l)
{
    struct resident *r = &l->resident;
    const int code = atomic_load_explicit(&r->failed, memory_order_relaxed);

    r->seconds += (double)(atomic_load_explicit(&r->ended, memory_order_relaxed) - r->began) * 1e-9;
    if (code)
        return numoe_error_set(l->error, code, r->error.where, "%s", r->error.message);
    return 0;
}
