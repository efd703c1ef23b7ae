/*
 * Device memory of the copy pipeline: what there is room for, and giving it back.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_stream.h"

/* ---- making ---------------------------------------------------------------------------------- */

static int count_experts(struct gpu_stream *s, struct numoe_error *error)
{
    const struct numoe_gpu_source *source = s->source;

    s->wanted = calloc(source->layers, sizeof *s->wanted);
    if (!s->wanted)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    for (uint64_t layer = 0; layer < source->layers; layer++)
        for (uint64_t e = 0; e < source->experts; e++) {
            uint64_t slices = 0;
            for (uint32_t i = 0; i < source->region_count; i++) {
                const uint8_t *address;
                slices += source->place(source->user, layer, e, i, &address);
            }
            s->wanted[layer] += slices != 0;
            s->uneven = s->uneven || (slices && slices < source->slices);
        }
    return 0;
}

/* How many cells there are of so much memory, and what is left for the window. */
static uint64_t divide(const struct gpu_stream *s, uint64_t bytes, uint64_t *window)
{
    const uint64_t least = 2 * s->cell_bytes;
    uint64_t count = 0, cells;

    for (uint64_t l = 0; l < s->source->layers; l++)
        count += s->wanted[l];
    cells = s->cache_wanted / s->cell_bytes < count ? s->cache_wanted / s->cell_bytes : count;
    *window = s->window_wanted < least ? least : s->window_wanted / 64 * 64;
    /* where all can stay, nothing passes through but what was replaced */
    if (cells == count && bytes - least >= count * s->cell_bytes)
        *window = least;
    if (*window > bytes / 2)
        *window = bytes / 2 > least ? bytes / 2 / 64 * 64 : least;
    return cells < (bytes - *window) / s->cell_bytes ? cells : (bytes - *window) / s->cell_bytes;
}

static uint64_t table_bytes(const struct gpu_stream *s)
{
    return (s->source->layers + GPU_PIECES) * gpu_stream_table_step(s);
}

/* The smallest: a window of two experts, and the slice of zeros. */
static uint64_t least_pool(const struct gpu_stream *s)
{
    return 2 * s->cell_bytes + (s->uneven ? s->source->shape.bytes : 0);
}

/* For who reads while calls run. */
static void tell_sizes(struct gpu_stream *s)
{
    gpu_tally_set(&s->tally, GPU_POOL_BYTES, s->pool_bytes);
    gpu_tally_set(&s->tally, GPU_WINDOW_BYTES, s->pool ? s->window.bytes : 0);
    gpu_tally_set(&s->tally, GPU_CELLS, s->pool ? s->cache.cells : 0);
    gpu_tally_set(&s->tally, GPU_RESIDENT, s->pool && gpu_stream_resident(s));
}

/* Nothing of it is used any more. */
static int release_pool(struct gpu_stream *s, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const int rc =
        gpu_judge(gpu, gpu->ops->release(gpu->device, s->pool), error, "freeing experts");

    if (rc)
        return rc;
    gpu_window_forget(&s->window);
    s->pool = NULL;
    s->pool_bytes = 0;
    tell_sizes(s);
    return 0;
}

/* The rest of what stands for device memory. */
static int set_out(struct gpu_stream *s, uint64_t cells, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;

    free(s->cell_user);
    s->cell_user = calloc((size_t)cells + 1, sizeof *s->cell_user);
    if (!s->cell_user || gpu_cache_resize(&s->cache, (uint32_t)cells, s->wanted))
        return numoe_error_set(error, -ENOMEM, "cells", "out of memory");
    for (uint64_t i = 0; i < cells; i++)
        s->cell_user[i] = GPU_NO_LAYER;
    if (!s->uneven)
        return 0;
    /* before every copy of weights, and so before every computation */
    return gpu_judge(gpu,
                     gpu->ops->copy_in(gpu->device, s->copies, s->pool + s->zero_at,
                                       s->host_tables + table_bytes(s), s->source->shape.bytes),
                     error, "copying a slice of zeros");
}

/* All of it or none: half of it would be taken for whole by the next call. */
int gpu_stream_remake(struct gpu_stream *s, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const uint64_t least = 2 * s->cell_bytes;
    uint64_t most = s->pool_most;
    int rc;

    for (;;) {
        struct numoe_error inner = NUMOE_ERROR_INIT;
        uint64_t window, bytes;
        const uint64_t cells = divide(s, most > least ? most : least, &window);

        s->zero_at = cells * s->cell_bytes + window;
        bytes = s->zero_at + (s->uneven ? s->source->shape.bytes : 0);
        rc = bytes / 64 >= NUMOE_CUDA_ABSENT || cells >= UINT32_MAX
                 ? -ENOMEM /* beyond what a place can say: less will do */
                 : gpu_judge(gpu, gpu->ops->allocate(gpu->device, bytes, (void **)&s->pool), &inner,
                             "allocating %llu MiB for experts", (unsigned long long)(bytes >> 20));
        if (!rc) {
            s->pool_bytes = bytes;
            s->window.bytes = window;
            rc = set_out(s, cells, error);
            tell_sizes(s);
            if (rc && release_pool(s, NULL))
                s->pool = NULL; /* the device keeps it */
            return rc;
        }
        s->pool = NULL;
        if (rc != -ENOMEM || bytes <= least_pool(s)) {
            if (error)
                *error = inner;
            return rc;
        }
        most = s->zero_at - s->zero_at / 8 - 1;
    }
}

static int make_events(struct gpu_stream *s, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = gpu_judge(gpu, ops->stream_create(gpu->device, &s->copies), error, "making a stream");

    if (!rc)
        rc = gpu_judge(gpu, ops->stream_create(gpu->device, &s->compute), error, "making a stream");
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_create(gpu->device, &s->fills), error, "making a stream");
    if (!rc)
        rc =
            gpu_judge(gpu, ops->event_create(gpu->device, &s->bias_sent), error, "making an event");
    for (uint64_t l = 0; !rc && l < s->source->layers; l++)
        rc = gpu_judge(gpu, ops->event_create(gpu->device, &s->used[l]), error, "making an event");
    for (uint32_t i = 0; !rc && i < GPU_PIECES; i++) {
        struct gpu_piece *p = &s->window.pieces[i];
        rc = gpu_judge(gpu, ops->event_create(gpu->device, &p->copied), error, "making an event");
        if (!rc)
            rc = gpu_judge(gpu, ops->event_create(gpu->device, &p->used), error, "making an event");
    }
    return rc;
}

static int make_tables(struct gpu_stream *s, uint64_t bias_bytes, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    const uint64_t bytes = table_bytes(s), zeros = s->uneven ? s->source->shape.bytes : 0;
    int rc;

    s->fixed_bytes = bytes + bias_bytes;
    rc = gpu_judge(gpu, ops->allocate(gpu->device, bytes, (void **)&s->tables), error,
                   "allocating tables of experts");

    if (!rc)
        rc =
            gpu_judge(gpu, ops->host_allocate(gpu->device, bytes + zeros, (void **)&s->host_tables),
                      error, "allocating pinned memory for tables");
    if (!rc)
        memset(s->host_tables + bytes, 0, zeros);
    if (!rc && bias_bytes)
        rc = gpu_judge(gpu, ops->allocate(gpu->device, bias_bytes, (void **)&s->bias), error,
                       "allocating biases");
    if (!rc && bias_bytes)
        rc = gpu_judge(gpu, ops->host_allocate(gpu->device, bias_bytes, (void **)&s->host_bias),
                       error, "allocating pinned memory for biases");
    for (uint32_t i = 0; !rc && i < GPU_PIECES; i++) {
        s->window.pieces[i].host_table = gpu_stream_table(s, s->host_tables, s->source->layers + i);
        s->window.pieces[i].table = gpu_stream_table(s, s->tables, s->source->layers + i);
    }
    return rc;
}

static int make_lists(struct gpu_stream *s)
{
    const uint64_t layers = s->source->layers, experts = s->source->experts;
    bool there = true;

    s->stale = calloc(layers, sizeof *s->stale);
    s->seen = calloc(layers, sizeof *s->seen);
    s->generation = calloc(layers, sizeof *s->generation);
    s->used = calloc(layers, sizeof *s->used);
    s->everything = calloc(experts, sizeof *s->everything);
    s->slices_had = calloc(experts, sizeof *s->slices_had);
    s->batch_to = calloc(GPU_BATCH, sizeof *s->batch_to);
    s->batch_from = calloc(GPU_BATCH, sizeof *s->batch_from);
    s->batch_bytes = calloc(GPU_BATCH, sizeof *s->batch_bytes);
    for (int i = 0; i < 2; i++) {
        s->jobs[i].layer = GPU_NO_LAYER;
        s->jobs[i].list = calloc(experts, sizeof *s->jobs[i].list);
        s->jobs[i].listed = calloc(experts, sizeof *s->jobs[i].listed);
        there = there && s->jobs[i].list && s->jobs[i].listed;
    }
    if (!there || !s->stale || !s->seen || !s->generation || !s->used || !s->everything ||
        !s->slices_had || !s->batch_to || !s->batch_from || !s->batch_bytes)
        return -ENOMEM;
    for (uint64_t l = 0; l < layers; l++)
        s->stale[l] = true;
    for (uint64_t e = 0; e < experts; e++)
        s->everything[e] = 1;
    return 0;
}

int gpu_stream_init(struct gpu_stream *s, struct numoe_gpu *gpu,
                    const struct numoe_gpu_source *source, const struct gpu_pinned *pinned,
                    struct gpu_ring *ring, const struct gpu_stream_sizes *sizes,
                    struct numoe_error *error)
{
    const uint64_t width = 32 * source->shape.hidden_tiles;
    const uint64_t bias_bytes =
        source->down_bias ? source->layers * source->experts * width * sizeof(float) : 0;
    uint64_t fixed;
    int rc;

    *s = (struct gpu_stream){.gpu = gpu, .source = source, .pinned = pinned, .ring = ring};
    s->cell_bytes = source->slices * source->shape.bytes;
    s->window_wanted = sizes->window;
    s->cache_wanted = sizes->cache;
    s->piece_least = sizes->piece;
    s->table_bytes = source->experts * source->slices * sizeof(uint32_t);
    fixed = table_bytes(s) + bias_bytes + source->shape.bytes;
    if (sizes->budget < fixed + 2 * s->cell_bytes) {
        rc = numoe_error_set(error, -ENOMEM, gpu->properties.name,
                             "two experts of %llu KiB and %llu KiB of tables and biases do not fit "
                             "in the %llu MiB of device memory that may be used",
                             (unsigned long long)(s->cell_bytes >> 10),
                             (unsigned long long)(fixed >> 10),
                             (unsigned long long)(sizes->budget >> 20));
        goto fail;
    }
    s->pool_most = sizes->budget - fixed;
    rc = count_experts(s, error);
    if (rc)
        goto fail;
    rc = make_lists(s);
    if (!rc)
        rc = gpu_cache_init(&s->cache, source->layers, (uint32_t)source->experts, 0, s->wanted);
    if (rc) {
        numoe_error_set(error, rc, "experts", "out of memory");
        goto fail;
    }
    rc = make_events(s, error);
    if (!rc)
        rc = make_tables(s, bias_bytes, error);
    if (!rc)
        rc = gpu_stream_remake(s, error);
    if (!rc)
        return 0;
fail:
    gpu_stream_fini(s);
    return rc;
}

static void drop_event(struct gpu_stream *s, void *event)
{
    if (event)
        gpu_judge(s->gpu, s->gpu->ops->event_destroy(s->gpu->device, event), NULL,
                  "freeing an event");
}

/* Until computations on streams of the caller's, too, are past. */
static int await_users(struct gpu_stream *s, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = 0;

    for (uint64_t l = 0; !rc && s->used && l < s->source->layers; l++)
        if (s->used[l])
            rc = gpu_judge(gpu, ops->event_sync(gpu->device, s->used[l]), error, "a computation");
    for (uint32_t i = 0; !rc && i < GPU_PIECES; i++)
        if (s->window.pieces[i].used)
            rc = gpu_judge(gpu, ops->event_sync(gpu->device, s->window.pieces[i].used), error,
                           "a computation");
    return rc;
}

void gpu_stream_fini(struct gpu_stream *s)
{
    struct numoe_gpu *gpu = s->gpu;

    if (!gpu)
        return;
    const struct gpu_ops *ops = gpu->ops;

    if (s->copies)
        gpu_still(gpu, s->copies, "the last copies");
    if (s->compute)
        gpu_still(gpu, s->compute, "the last computation");
    if (s->fills)
        gpu_still(gpu, s->fills, "the last copies");
    await_users(s, NULL);
    for (uint32_t i = 0; i < GPU_PIECES; i++) {
        drop_event(s, s->window.pieces[i].copied);
        drop_event(s, s->window.pieces[i].used);
    }
    for (uint64_t l = 0; s->used && l < s->source->layers; l++)
        drop_event(s, s->used[l]);
    drop_event(s, s->bias_sent);
    if (s->pool)
        gpu_judge(gpu, ops->release(gpu->device, s->pool), NULL, "freeing experts");
    if (s->bias)
        gpu_judge(gpu, ops->release(gpu->device, s->bias), NULL, "freeing biases");
    if (s->tables)
        gpu_judge(gpu, ops->release(gpu->device, s->tables), NULL, "freeing tables");
    if (s->host_bias)
        gpu_judge(gpu, ops->host_release(gpu->device, s->host_bias), NULL, "freeing biases");
    if (s->host_tables)
        gpu_judge(gpu, ops->host_release(gpu->device, s->host_tables), NULL, "freeing tables");
    if (s->fills)
        gpu_judge(gpu, ops->stream_destroy(gpu->device, s->fills), NULL, "freeing a stream");
    if (s->compute)
        gpu_judge(gpu, ops->stream_destroy(gpu->device, s->compute), NULL, "freeing a stream");
    if (s->copies)
        gpu_judge(gpu, ops->stream_destroy(gpu->device, s->copies), NULL, "freeing a stream");
    gpu_cache_fini(&s->cache);
    for (int i = 0; i < 2; i++) {
        free(s->jobs[i].list);
        free(s->jobs[i].listed);
    }
    free(s->wanted);
    free(s->cell_user);
    free(s->stale);
    free(s->seen);
    free(s->generation);
    free(s->used);
    free(s->everything);
    free(s->slices_had);
    free(s->copy);
    free(s->batch_to);
    free(s->batch_from);
    free(s->batch_bytes);
    *s = (struct gpu_stream){0};
}

bool gpu_stream_resident(const struct gpu_stream *s)
{
    for (uint64_t l = 0; l < s->source->layers; l++)
        if (s->cache.limit[l] < s->wanted[l])
            return false;
    return true;
}

/* ---- giving up memory ------------------------------------------------------------------------ */

int gpu_stream_shrink(struct gpu_stream *s, uint64_t bytes, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const uint64_t had = s->pool_bytes;
    int rc;

    for (uint64_t l = 0; l < s->source->layers; l++)
        if (s->cache.frozen[l])
            return numoe_error_set(error, -ENOMEM, gpu->properties.name,
                                   "out of device memory, and layer %llu is held for graphs",
                                   (unsigned long long)l);
    if (s->pool_bytes <= least_pool(s))
        return numoe_error_set(error, -ENOMEM, gpu->properties.name,
                               "out of device memory with room for two experts left");
    gpu_stream_forget(s);
    rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->copies), error, "the copies");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->compute), error,
                       "the computation");
    if (!rc)
        rc = await_users(s, error);
    if (!rc)
        rc = release_pool(s, error);
    if (rc)
        return rc;
    s->pool_most = had > bytes ? had - bytes : 0;
    return gpu_stream_remake(s, error);
}
