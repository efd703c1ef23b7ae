/* gpu_model.h - a model on a device. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_GPU_MODEL_H
#define NUMOE_GPU_MODEL_H

#include "gpu_stream.h"

/* Where the parts of a call lie in one block of memory. */
struct gpu_parts {
    uint64_t x, ids, routing, out, work, bytes;
};

struct numoe_gpu_model {
    struct numoe_gpu *gpu;
    struct numoe_gpu_source source;
    struct gpu_pinned pinned;
    struct gpu_ring ring; /* gpu NULL: not needed */
    struct gpu_stream stream;
    uint64_t keep_free_bytes, ring_bytes;
    uint8_t *device; /* parts of a call, workspace too */
    uint64_t device_bytes;
    uint8_t *host; /* pinned: parts of a call */
    uint64_t host_bytes;
    void *done; /* event: out has arrived */
    uint64_t calls, tokens;
    uint64_t ring_checked, ring_placed;
};

/* The device's view of one call on the given slot. */
void gpu_model_ffn(const struct numoe_gpu_model *model, const struct gpu_slot *slot,
                   struct numoe_cuda_ffn *ffn);

#endif
