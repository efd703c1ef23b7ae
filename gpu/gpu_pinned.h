/*
 * gpu_pinned.h - host memory that the device copies from: the arenas pinned where they lie, in
 * chunks; and a ring of pinned buffers near the device for what could not be pinned.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_PINNED_H
#define NUMOE_GPU_PINNED_H

#include "gpu_internal.h"

struct gpu_chunk {
    uint8_t *address;
    uint64_t bytes;
};

struct gpu_pinned {
    struct numoe_gpu *gpu;
    struct gpu_chunk *chunks; /* by address */
    uint32_t count, room;
    uint64_t pinned_bytes, wanted_bytes;
    char refusal[160]; /* why not all; "" */
};

/*
 * Pin [address, address + bytes) in chunks, after what was added before. The first refusal ends
 * it: what is pinned by then stays in use, and refusal says why. Returns 0 then too; -EIO when the
 * device is lost, -ENOMEM.
 */
int gpu_pinned_add(struct gpu_pinned *pinned, void *address, uint64_t bytes, uint64_t chunk_bytes,
                   struct numoe_error *error);

/* How many bytes from address on, at most `bytes`, are alike, and whether they are pinned. Never
 * beyond the end of a chunk: a copy must not cross from one registration to the next. */
uint64_t gpu_pinned_reach(const struct gpu_pinned *pinned, const void *address, uint64_t bytes,
                          bool *is_pinned);

/* Everything copied from the memory must be past. */
void gpu_pinned_fini(struct gpu_pinned *pinned);

enum { GPU_RING_BUFFERS = 4 };

struct gpu_ring {
    struct numoe_gpu *gpu;
    struct numoe_memory *memory; /* on the device's node; NULL: the driver's own memory */
    uint8_t *address;
    uint64_t buffer_bytes;
    uint32_t next;
    void *events[GPU_RING_BUFFERS]; /* after the copy out of each buffer */
    uint32_t node;
    bool pinned, host;
};

/* bytes in all. 0; -ENOMEM, -EIO */
int gpu_ring_init(struct gpu_ring *ring, struct numoe_gpu *gpu, uint64_t bytes,
                  struct numoe_error *error);
void gpu_ring_fini(struct gpu_ring *ring);

/* When that has happened the next buffer is free. */
static inline void *gpu_ring_event(const struct gpu_ring *ring)
{
    return ring->events[ring->next];
}
/* The next buffer once the copy out of it is past: *buffer is NULL when it is not yet and block is
 * false. */
int gpu_ring_take(struct gpu_ring *ring, bool block, uint8_t **buffer, struct numoe_error *error);
/* The buffer just taken is being copied on the stream: not free before that is past. */
int gpu_ring_sent(struct gpu_ring *ring, void *stream, struct numoe_error *error);

#endif
