/*
 * The copy pipeline. One thread at a time calls; the device works on two streams.
 *
 *   copies    weights and tables into slots, and nothing else: a kernel there would wait for a
 *             processor behind a long computation and hold up the link
 *   compute   everything else
 *
 * A slot goes round:
 *
 *   empty --fill--> filling --last copy queued, `copied` recorded--> queued --acquire--> in use
 *     ^                                                                                   |
 *     +---- chosen again; the copy stream waits for `used` <--- release, `used` recorded --+
 *
 * - Copies into a slot wait (on the copy stream) for `used`: its last computation is past.
 * - Computation waits (on the compute stream) for `copied`: all of the layer has arrived.
 * - The host waits for `copied` before it fills the slot's host tables again, and for a ring
 *   buffer's event before it fills that.
 * - Pinned memory is queued at once. From the ring, copies are queued as buffers come free, by
 *   gpu_stream_pump: while the caller waits for a computation, or in acquire, which waits itself.
 * - Layers come in turn, so the slot to give up is that of the layer needed last: with k slots,
 *   k - 2 layers are found in place each pass; k = 2 is plain double buffering.
 * - A copy that fails leaves its slot empty. Work that was queued before is harmless: the next
 *   filling of the slot is behind it on the same stream.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gpu_stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { ALIGN = 256 };

_Static_assert(NUMOE_GPU_ABSENT == NUMOE_CUDA_ABSENT, "one mark of an absent expert");

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* ---- slots ----------------------------------------------------------------------------------- */

static int slot_init(struct gpu_stream *s, struct gpu_slot *slot, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    uint8_t *memory = NULL;
    int rc;

    *slot = (struct gpu_slot){.layer = GPU_NO_LAYER};
    rc = gpu_judge(gpu, ops->allocate(gpu->device, s->slot_bytes, (void **)&memory), error,
                   "allocating %llu MiB for a layer", (unsigned long long)(s->slot_bytes >> 20));
    if (rc)
        return rc;
    slot->weights = memory;
    slot->slice_at = (uint32_t *)(void *)(memory + aligned(s->weight_bytes));
    if (s->bias_bytes)
        slot->down_bias =
            (float *)(void *)(memory + aligned(s->weight_bytes) + aligned(s->table_bytes));
    rc = gpu_judge(gpu,
                   ops->host_allocate(gpu->device, aligned(s->table_bytes) + s->bias_bytes,
                                      (void **)&slot->tables),
                   error, "allocating pinned memory for tables");
    if (!rc)
        rc =
            gpu_judge(gpu, ops->event_create(gpu->device, &slot->copied), error, "making an event");
    if (!rc)
        rc = gpu_judge(gpu, ops->event_create(gpu->device, &slot->used), error, "making an event");
    return rc;
}

static void slot_fini(struct gpu_stream *s, struct gpu_slot *slot)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;

    if (slot->used)
        gpu_judge(gpu, ops->event_destroy(gpu->device, slot->used), NULL, "freeing an event");
    if (slot->copied)
        gpu_judge(gpu, ops->event_destroy(gpu->device, slot->copied), NULL, "freeing an event");
    if (slot->tables)
        gpu_judge(gpu, ops->host_release(gpu->device, slot->tables), NULL, "freeing tables");
    if (slot->weights)
        gpu_judge(gpu, ops->release(gpu->device, slot->weights), NULL, "freeing a slot");
    *slot = (struct gpu_slot){.layer = GPU_NO_LAYER};
}

/* The largest layer decides, and each region begins aligned. */
static int measure(struct gpu_stream *s, struct numoe_error *error)
{
    const struct numoe_gpu_source *source = s->source;
    const uint64_t width = 32 * source->shape.hidden_tiles;

    for (uint64_t layer = 0; layer < source->layers; layer++) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < source->region_count; i++) {
            const void *address;
            uint64_t bytes;
            source->region(source->user, layer, i, &address, &bytes);
            if (!numoe_add_u64(sum, aligned(bytes), &sum))
                return numoe_error_set(error, -EOVERFLOW, "model", "a layer overflows 64 bits");
        }
        if (sum > s->weight_bytes)
            s->weight_bytes = sum;
    }
    if (s->weight_bytes / 64 >= NUMOE_CUDA_ABSENT)
        return numoe_error_set(error, -EOVERFLOW, "model", "a layer of %llu bytes is too large",
                               (unsigned long long)s->weight_bytes);
    s->table_bytes = source->experts * source->slices * sizeof(uint32_t);
    s->bias_bytes = source->down_bias ? source->experts * width * sizeof(float) : 0;
    s->slot_bytes = aligned(s->weight_bytes) + aligned(s->table_bytes) + aligned(s->bias_bytes);
    return 0;
}

static uint32_t fewest(const struct gpu_stream *s)
{
    return s->source->layers == 1 ? 1 : 2;
}

int gpu_stream_init(struct gpu_stream *s, struct numoe_gpu *gpu,
                    const struct numoe_gpu_source *source, const struct gpu_pinned *pinned,
                    struct gpu_ring *ring, uint64_t slots, uint64_t budget_bytes,
                    struct numoe_error *error)
{
    const struct gpu_ops *ops = gpu->ops;
    struct numoe_error inner = NUMOE_ERROR_INIT;
    int rc;

    *s = (struct gpu_stream){.gpu = gpu, .source = source, .pinned = pinned, .ring = ring};
    rc = measure(s, error);
    if (rc)
        return rc;
    if (slots > source->layers)
        slots = source->layers;
    if (slots < fewest(s))
        slots = fewest(s);
    if (slots > budget_bytes / s->slot_bytes)
        slots = budget_bytes / s->slot_bytes;
    if (slots < fewest(s))
        return numoe_error_set(error, -ENOMEM, gpu->properties.name,
                               "%u layers of %llu MiB do not fit in the %llu MiB of device memory "
                               "that may be used",
                               fewest(s), (unsigned long long)(s->slot_bytes >> 20),
                               (unsigned long long)(budget_bytes >> 20));
    s->slots = calloc(slots, sizeof *s->slots);
    s->region_at = calloc(source->region_count, sizeof *s->region_at);
    if (!s->slots || !s->region_at) {
        numoe_error_set(error, -ENOMEM, "slots", "out of memory");
        rc = -ENOMEM;
        goto fail;
    }
    rc = gpu_judge(gpu, ops->stream_create(gpu->device, &s->copies), error, "making a stream");
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_create(gpu->device, &s->compute), error, "making a stream");
    if (rc)
        goto fail;
    while (s->slot_count < slots) {
        rc = slot_init(s, &s->slots[s->slot_count], &inner);
        if (rc) {
            slot_fini(s, &s->slots[s->slot_count]);
            break;
        }
        s->slot_count++;
    }
    /* short of memory: fewer slots do, if enough are left for copying beside computing */
    if (rc && (rc != -ENOMEM || s->slot_count < fewest(s))) {
        if (error)
            *error = inner;
        goto fail;
    }
    return 0;
fail:
    gpu_stream_fini(s);
    return rc;
}

void gpu_stream_fini(struct gpu_stream *s)
{
    if (!s->gpu)
        return;
    struct numoe_gpu *gpu = s->gpu;

    if (s->copies)
        gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->copies), NULL, "the last copies");
    if (s->compute)
        gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->compute), NULL,
                  "the last computation");
    for (uint32_t i = 0; s->slots && i < s->slot_count; i++)
        slot_fini(s, &s->slots[i]);
    if (s->compute)
        gpu_judge(gpu, gpu->ops->stream_destroy(gpu->device, s->compute), NULL, "freeing a stream");
    if (s->copies)
        gpu_judge(gpu, gpu->ops->stream_destroy(gpu->device, s->copies), NULL, "freeing a stream");
    free(s->slots);
    free(s->region_at);
    *s = (struct gpu_stream){0};
}

/* ---- choosing -------------------------------------------------------------------------------- */

static struct gpu_slot *find(struct gpu_stream *s, uint64_t layer)
{
    for (uint32_t i = 0; i < s->slot_count; i++)
        if (s->slots[i].layer == layer)
            return &s->slots[i];
    return NULL;
}

/* An empty slot, else that of the layer needed last when `layer` is next; never that of keep. */
static struct gpu_slot *victim(struct gpu_stream *s, uint64_t layer, uint64_t keep)
{
    struct gpu_slot *best = NULL;
    uint64_t furthest = 0;

    for (uint32_t i = 0; i < s->slot_count; i++) {
        struct gpu_slot *slot = &s->slots[i];
        uint64_t distance;
        if (slot->layer == GPU_NO_LAYER)
            return slot;
        if (slot->layer == keep || slot == s->filling)
            continue;
        distance = (slot->layer + s->source->layers - layer) % s->source->layers;
        if (!best || distance > furthest) {
            best = slot;
            furthest = distance;
        }
    }
    return best;
}

int gpu_stream_shrink(struct gpu_stream *s, uint64_t layer, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    struct gpu_slot *slot = s->slot_count > fewest(s) ? victim(s, layer, layer) : NULL, *last;
    int rc;

    if (!slot)
        return numoe_error_set(error, -ENOMEM, gpu->properties.name,
                               "out of device memory with %u slots left", s->slot_count);
    rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->copies), error, "the copies");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->compute), error,
                       "the computation");
    if (rc)
        return rc;
    slot_fini(s, slot); /* a victim is never being filled */
    last = &s->slots[--s->slot_count];
    if (slot != last) {
        *slot = *last;
        *last = (struct gpu_slot){.layer = GPU_NO_LAYER};
        if (s->filling == last)
            s->filling = slot;
    }
    return 0;
}

void gpu_stream_forget(struct gpu_stream *s)
{
    s->filling = NULL;
    for (uint32_t i = 0; i < s->slot_count; i++) {
        s->slots[i].layer = GPU_NO_LAYER;
        s->slots[i].queued = false;
    }
}

/* ---- filling --------------------------------------------------------------------------------- */

/* Give the filling up. Its host tables may be on their way: `copied` is recorded behind them. */
static int fill_failed(struct gpu_stream *s, int rc)
{
    struct gpu_slot *slot = s->filling;

    if (slot->tables_sent)
        gpu_judge(s->gpu, s->gpu->ops->event_record(s->gpu->device, slot->copied, s->copies), NULL,
                  "marking a layer as given up");
    slot->layer = GPU_NO_LAYER;
    slot->queued = false;
    s->filling = NULL;
    return rc;
}

static int begin(struct gpu_stream *s, struct gpu_slot *slot, uint64_t layer,
                 struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    int rc;

    slot->layer = layer;
    slot->generation = s->source->generation(s->source->user, layer);
    slot->queued = slot->tables_sent = false;
    slot->region = 0;
    slot->offset = 0;
    s->filling = slot;
    s->copies_begun++;
    rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, s->copies, slot->used), error,
                   "waiting for the slot of layer %llu", (unsigned long long)layer);
    return rc ? fill_failed(s, rc) : 0;
}

static int send_tables(struct gpu_stream *s, struct numoe_error *error)
{
    struct gpu_slot *slot = s->filling;
    const struct numoe_gpu_source *source = s->source;
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    uint64_t at = 0;
    int rc;

    rc = gpu_judge(gpu, ops->event_sync(gpu->device, slot->copied), error,
                   "waiting for the tables of a slot");
    if (rc)
        return rc;
    for (uint32_t i = 0; i < source->region_count; i++) {
        const void *address;
        uint64_t bytes;
        s->region_at[i] = at / 64;
        source->region(source->user, slot->layer, i, &address, &bytes);
        at += aligned(bytes);
    }
    source->tables(source->user, slot->layer, s->region_at, (uint32_t *)(void *)slot->tables,
                   slot->down_bias ? (float *)(void *)(slot->tables + aligned(s->table_bytes))
                                   : NULL);
    slot->tables_sent = true; /* on their way, whatever becomes of the rest */
    rc = gpu_judge(
        gpu, ops->copy_in(gpu->device, s->copies, slot->slice_at, slot->tables, s->table_bytes),
        error, "copying the tables of layer %llu", (unsigned long long)slot->layer);
    if (!rc && slot->down_bias)
        rc = gpu_judge(gpu,
                       ops->copy_in(gpu->device, s->copies, slot->down_bias,
                                    slot->tables + aligned(s->table_bytes), s->bias_bytes),
                       error, "copying the biases of layer %llu", (unsigned long long)slot->layer);
    return rc;
}

/* One copy, as long as the memory is of one kind. *stuck: no staging buffer is free. */
static int send_some(struct gpu_stream *s, const uint8_t *from, uint64_t to, uint64_t bytes,
                     bool block, uint64_t *sent, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    struct gpu_slot *slot = s->filling;
    uint8_t *buffer;
    bool is_pinned;
    int rc;

    *sent = 0;
    bytes = gpu_pinned_reach(s->pinned, from, bytes, &is_pinned);
    if (!is_pinned) {
        if (!s->ring)
            return numoe_error_set(error, -EINVAL, "staging", "memory is not pinned");
        rc = gpu_ring_take(s->ring, block, &buffer, error);
        if (rc || !buffer)
            return rc;
        if (bytes > s->ring->buffer_bytes)
            bytes = s->ring->buffer_bytes;
        if (s->source->copy)
            s->source->copy(s->source->user, buffer, bytes, from, bytes, bytes, 1);
        else
            memcpy(buffer, from, bytes);
        from = buffer;
    }
    rc = gpu_judge(gpu, gpu->ops->copy_in(gpu->device, s->copies, slot->weights + to, from, bytes),
                   error, "copying layer %llu", (unsigned long long)slot->layer);
    if (!rc && !is_pinned)
        rc = gpu_ring_sent(s->ring, s->copies, error);
    if (rc)
        return rc;
    *sent = bytes;
    s->copied_bytes += bytes;
    return 0;
}

int gpu_stream_pump(struct gpu_stream *s, bool block, bool *more, struct numoe_error *error)
{
    struct gpu_slot *slot = s->filling;
    const struct numoe_gpu_source *source = s->source;
    uint64_t to = 0;
    int rc = 0;

    *more = false;
    if (!slot)
        return 0;
    if (!slot->tables_sent)
        rc = send_tables(s, error);
    for (uint32_t i = 0; !rc && i < source->region_count; i++) {
        const void *address;
        uint64_t bytes;
        source->region(source->user, slot->layer, i, &address, &bytes);
        while (!rc && i == slot->region && slot->offset < bytes) {
            uint64_t sent;
            rc = send_some(s, (const uint8_t *)address + slot->offset, to + slot->offset,
                           bytes - slot->offset, block, &sent, error);
            slot->offset += sent;
            if (!rc && !sent) {
                *more = true;
                return 0;
            }
        }
        if (i == slot->region) {
            slot->region++;
            slot->offset = 0;
        }
        to += aligned(bytes);
    }
    if (!rc)
        rc = gpu_judge(s->gpu, s->gpu->ops->event_record(s->gpu->device, slot->copied, s->copies),
                       error, "marking layer %llu as copied", (unsigned long long)slot->layer);
    if (rc)
        return fill_failed(s, rc);
    slot->queued = true;
    s->filling = NULL;
    return 0;
}

/* Whether the slot's copy is of the weights as they are now. */
static bool current(const struct gpu_stream *s, const struct gpu_slot *slot)
{
    return slot->generation == s->source->generation(s->source->user, slot->layer);
}

int gpu_stream_prefetch(struct gpu_stream *s, uint64_t layer, uint64_t keep,
                        struct numoe_error *error)
{
    struct gpu_slot *slot = find(s, layer);
    bool more;
    int rc;

    if (slot && current(s, slot))
        return 0;
    if (layer == keep)
        return 0;
    if (s->filling) /* its layer is not the next after all, or its weights have changed */
        fill_failed(s, 0);
    if (!slot)
        slot = victim(s, layer, keep);
    if (!slot)
        return 0;
    rc = begin(s, slot, layer, error);
    return rc ? rc : gpu_stream_pump(s, false, &more, error);
}

int gpu_stream_acquire(struct gpu_stream *s, uint64_t layer, struct gpu_slot **out,
                       struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    struct gpu_slot *slot = find(s, layer);
    bool more;
    int rc;

    if (slot && current(s, slot)) {
        s->hits += slot->queued;
    } else {
        if (s->filling)
            fill_failed(s, 0);
        if (!slot)
            slot = victim(s, layer, GPU_NO_LAYER);
        rc = begin(s, slot, layer, error);
        if (rc)
            return rc;
    }
    while (s->filling == slot) {
        rc = gpu_stream_pump(s, true, &more, error);
        if (rc)
            return rc;
    }
    rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, s->compute, slot->copied), error,
                   "waiting for layer %llu", (unsigned long long)layer);
    if (rc)
        return rc;
    *out = slot;
    return 0;
}

int gpu_stream_release(struct gpu_stream *s, struct gpu_slot *slot, struct numoe_error *error)
{
    return gpu_judge(s->gpu, s->gpu->ops->event_record(s->gpu->device, slot->used, s->compute),
                     error, "marking the end of layer %llu", (unsigned long long)slot->layer);
}
