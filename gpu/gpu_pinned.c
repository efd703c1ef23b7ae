/* Pinned host memory. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_pinned.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static int insert(struct gpu_pinned *p, uint8_t *address, uint64_t bytes)
{
    uint32_t at = p->count;

    if (p->count == p->room) {
        const uint32_t room = p->room ? 2 * p->room : 64;
        struct gpu_chunk *chunks = realloc(p->chunks, room * sizeof *chunks);
        if (!chunks)
            return -ENOMEM;
        p->chunks = chunks;
        p->room = room;
    }
    for (; at > 0 && p->chunks[at - 1].address > address; at--)
        p->chunks[at] = p->chunks[at - 1];
    p->chunks[at] = (struct gpu_chunk){address, bytes};
    p->count++;
    p->pinned_bytes += bytes;
    return 0;
}

int gpu_pinned_add(struct gpu_pinned *p, void *address, uint64_t bytes, uint64_t chunk_bytes,
                   struct numoe_error *error)
{
    struct numoe_gpu *gpu = p->gpu;
    uint8_t *at = address;

    p->wanted_bytes += bytes;
    while (bytes && !*p->refusal) {
        const uint64_t take = bytes < chunk_bytes ? bytes : chunk_bytes;
        struct numoe_error inner = NUMOE_ERROR_INIT;
        int rc = gpu_judge(gpu, gpu->ops->pin(gpu->device, at, take), &inner,
                           "pinning %llu MiB of host memory after %llu MiB",
                           (unsigned long long)(take >> 20),
                           (unsigned long long)(p->pinned_bytes >> 20));
        if (rc == -EIO) {
            if (error)
                *error = inner;
            return rc;
        }
        if (rc) {
            snprintf(p->refusal, sizeof p->refusal, "%.*s", (int)sizeof p->refusal - 1,
                     inner.message);
            break;
        }
        if (insert(p, at, take)) {
            gpu->ops->unpin(gpu->device, at);
            return numoe_error_set(error, -ENOMEM, "pinning", "out of memory");
        }
        at += take;
        bytes -= take;
    }
    return 0;
}

uint64_t gpu_pinned_reach(const struct gpu_pinned *p, const void *address, uint64_t bytes,
                          bool *is_pinned)
{
    const uint8_t *at = address;
    uint32_t low = 0, high = p->count;

    /* the first chunk that begins behind address */
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (p->chunks[middle].address > at)
            high = middle;
        else
            low = middle + 1;
    }
    if (low > 0) {
        const struct gpu_chunk *c = &p->chunks[low - 1];
        if (at < c->address + c->bytes) {
            const uint64_t left = (uint64_t)(c->address + c->bytes - at);
            *is_pinned = true;
            return bytes < left ? bytes : left;
        }
    }
    *is_pinned = false;
    if (low < p->count) {
        const uint64_t gap = (uint64_t)(p->chunks[low].address - at);
        return bytes < gap ? bytes : gap;
    }
    return bytes;
}

void gpu_pinned_fini(struct gpu_pinned *p)
{
    /* a dead device refuses, and its registrations go with the process */
    for (uint32_t i = p->count; i-- > 0;)
        gpu_judge(p->gpu, p->gpu->ops->unpin(p->gpu->device, p->chunks[i].address), NULL,
                  "unpinning host memory");
    free(p->chunks);
    *p = (struct gpu_pinned){.gpu = p->gpu};
}

/* ---- trying ---------------------------------------------------------------------------------- */

int numoe_gpu_try_pinning(struct numoe_gpu *gpu, uint64_t bytes, struct numoe_gpu_pinning *p,
                          struct numoe_error *error)
{
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_error refusal = NUMOE_ERROR_INIT;
    struct numoe_memory *memory;
    uint64_t since;
    int rc = gpu_enter(gpu, error);

    *p = (struct numoe_gpu_pinning){
        .os_node = gpu->properties.locality_known ? gpu->properties.os_node : NUMOE_NONE};
    if (rc)
        return rc;
    request.os_node = p->os_node;
    request.bytes = bytes;
    request.log = &gpu->log;
    rc = numoe_memory_create(&request, &memory, error);
    if (rc)
        return rc;
    rc = numoe_memory_populate(memory, 0, numoe_memory_bytes(memory), error);
    if (!rc) {
        void *address = numoe_memory_address(memory);

        p->tried_bytes = numoe_memory_bytes(memory);
        since = numoe_now_ns();
        rc = gpu_judge(gpu, gpu->ops->pin(gpu->device, address, p->tried_bytes), &refusal,
                       "pinning %llu MiB of host memory",
                       (unsigned long long)(p->tried_bytes >> 20));
        p->ms = (double)(numoe_now_ns() - since) * 1e-6;
        p->in_place = rc == 0;
        if (rc == 0) {
            rc = gpu_judge(gpu, gpu->ops->unpin(gpu->device, address), error,
                           "unpinning host memory");
            if (rc) /* the driver has it still: it stays mapped */
                return rc;
        } else if (rc == -EIO && error)
            *error = refusal;
        else {
            snprintf(p->reason, sizeof p->reason, "%.*s", (int)sizeof p->reason - 1,
                     refusal.message);
        }
    }
    numoe_memory_destroy(memory);
    return rc == -EIO || p->tried_bytes == 0 ? rc : 0;
}

/* ---- the ring -------------------------------------------------------------------------------- */

/* Memory on the device's node, touched there before it is pinned. */
static int ring_on_node(struct gpu_ring *r, uint64_t bytes)
{
    struct numoe_gpu *gpu = r->gpu;
    const uint32_t node = gpu->properties.locality_known ? gpu->properties.os_node : NUMOE_NONE;
    struct numoe_memory_request request = NUMOE_MEMORY_REQUEST_INIT;

    request.os_node = node;
    request.bytes = bytes;
    request.log = &gpu->log;
    if (numoe_memory_create(&request, &r->memory, NULL))
        return -ENOMEM;
    r->node = node;
    if (!numoe_memory_populate(r->memory, 0, numoe_memory_bytes(r->memory), NULL) &&
        !gpu_judge(gpu,
                   gpu->ops->pin(gpu->device, numoe_memory_address(r->memory),
                                 numoe_memory_bytes(r->memory)),
                   NULL, "pinning the staging ring")) {
        r->address = numoe_memory_address(r->memory);
        r->pinned = true;
        return 0;
    }
    numoe_memory_destroy(r->memory);
    r->memory = NULL;
    r->node = NUMOE_NONE;
    return -ENOMEM;
}

int gpu_ring_init(struct gpu_ring *r, struct numoe_gpu *gpu, uint64_t bytes,
                  struct numoe_error *error)
{
    int rc;

    *r = (struct gpu_ring){.gpu = gpu, .node = NUMOE_NONE};
    r->buffer_bytes = bytes / GPU_RING_BUFFERS / 4096 * 4096;
    if (r->buffer_bytes == 0)
        r->buffer_bytes = 4096;
    bytes = r->buffer_bytes * GPU_RING_BUFFERS;
    for (int i = 0; i < GPU_RING_BUFFERS; i++) {
        rc = gpu_judge(gpu, gpu->ops->event_create(gpu->device, &r->events[i]), error,
                       "making an event");
        if (rc)
            goto fail;
    }
    if (ring_on_node(r, bytes)) {
        /* the driver's own pinned memory: its place is the driver's choice, and shown as such */
        rc =
            gpu_judge(gpu, gpu->ops->host_allocate(gpu->device, bytes, (void **)&r->address), error,
                      "allocating %llu MiB of pinned staging", (unsigned long long)(bytes >> 20));
        if (rc)
            goto fail;
        r->host = true;
    }
    return 0;
fail:
    gpu_ring_fini(r);
    return rc;
}

void gpu_ring_fini(struct gpu_ring *r)
{
    if (!r->gpu)
        return;
    struct numoe_gpu *gpu = r->gpu;

    if (r->pinned)
        gpu_judge(gpu, gpu->ops->unpin(gpu->device, r->address), NULL, "unpinning the ring");
    if (r->host)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, r->address), NULL, "freeing the ring");
    if (r->memory)
        numoe_memory_destroy(r->memory);
    for (int i = 0; i < GPU_RING_BUFFERS; i++)
        if (r->events[i])
            gpu->ops->event_destroy(gpu->device, r->events[i]);
    *r = (struct gpu_ring){0};
}

int gpu_ring_take(struct gpu_ring *r, bool block, uint8_t **buffer, struct numoe_error *error)
{
    const struct gpu_ops *ops = r->gpu->ops;
    bool done = true;
    int rc;

    *buffer = NULL;
    rc = gpu_judge(r->gpu,
                   block ? ops->event_sync(r->gpu->device, gpu_ring_event(r))
                         : ops->event_query(r->gpu->device, gpu_ring_event(r), &done),
                   error, "waiting for a staging buffer");
    if (!rc && done)
        *buffer = r->address + r->next * r->buffer_bytes;
    return rc;
}

int gpu_ring_sent(struct gpu_ring *r, void *stream, struct numoe_error *error)
{
    int rc =
        gpu_judge(r->gpu, r->gpu->ops->event_record(r->gpu->device, r->events[r->next], stream),
                  error, "marking a staging buffer");
    r->next = (r->next + 1) % GPU_RING_BUFFERS;
    return rc;
}
