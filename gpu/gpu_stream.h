/*
 * gpu_stream.h - layers in slots of device memory, copied while others compute.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_STREAM_H
#define NUMOE_GPU_STREAM_H

#include "gpu_pinned.h"

#define GPU_NO_LAYER UINT64_MAX

struct gpu_slot {
    uint64_t layer; /* that it holds or is being filled with; GPU_NO_LAYER */
    uint32_t generation;
    uint8_t *weights;
    uint32_t *slice_at;
    float *down_bias;
    uint8_t *tables; /* pinned host memory that slice_at and down_bias are copied from */
    void *copied;    /* event: all of it has arrived */
    void *used;      /* event: the last computation with it is past */
    bool queued;     /* every copy of the layer is queued, and copied recorded */
    bool tables_sent;
    uint32_t region; /* being copied, while not queued ... */
    uint64_t offset; /* ... and how far */
};

struct gpu_stream {
    struct numoe_gpu *gpu;
    const struct numoe_gpu_source *source;
    const struct gpu_pinned *pinned;
    struct gpu_ring *ring;  /* NULL: everything is pinned */
    void *copies, *compute; /* streams */
    struct gpu_slot *slots;
    uint32_t slot_count;
    struct gpu_slot *filling; /* the one slot whose copies are not all queued; NULL */
    uint64_t weight_bytes, table_bytes, bias_bytes; /* of a slot */
    uint64_t slot_bytes;
    uint64_t *region_at; /* [region_count] scratch */
    uint64_t copies_begun, copied_bytes, hits;
};

/*
 * slots: wanted, at least 1; as many as memory and budget_bytes allow are made, and it is -ENOMEM
 * when that is less than two, or than one with a single layer.
 */
int gpu_stream_init(struct gpu_stream *stream, struct numoe_gpu *gpu,
                    const struct numoe_gpu_source *source, const struct gpu_pinned *pinned,
                    struct gpu_ring *ring, uint64_t slots, uint64_t budget_bytes,
                    struct numoe_error *error);
/* Waits for both streams first. */
void gpu_stream_fini(struct gpu_stream *stream);

/* Give back the device memory of the slot that is needed last when `layer` is next, whose own slot
 * stays; -ENOMEM when that would leave too few. Waits for all copies and computations. When it
 * fails, slots are as before. No slot may be in use by the caller: they move. */
int gpu_stream_shrink(struct gpu_stream *stream, uint64_t layer, struct numoe_error *error);

/* Begin to copy a layer unless a slot holds it. keep: a layer whose slot must stay. Queues what
 * needs no waiting. */
int gpu_stream_prefetch(struct gpu_stream *stream, uint64_t layer, uint64_t keep,
                        struct numoe_error *error);

/* Queue more copies of a prefetch, without waiting unless block. *more: some are left. */
int gpu_stream_pump(struct gpu_stream *stream, bool block, bool *more, struct numoe_error *error);

/* The slot of a layer; what is queued on the compute stream from now on finds it complete. */
int gpu_stream_acquire(struct gpu_stream *stream, uint64_t layer, struct gpu_slot **slot,
                       struct numoe_error *error);

/* What was queued on the compute stream until now was the last use of the slot. */
int gpu_stream_release(struct gpu_stream *stream, struct gpu_slot *slot, struct numoe_error *error);

/* Forget what all slots hold. */
void gpu_stream_forget(struct gpu_stream *stream);

#endif
