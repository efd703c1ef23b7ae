/* gpu_model.h - a model on a device. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_GPU_MODEL_H
#define NUMOE_GPU_MODEL_H

#include "gpu_stream.h"

/* Where the parts of a pass lie in one block of device memory. */
struct gpu_parts {
    uint64_t x, ids, routing, out, sum, work, bytes;
};

/* Tokens that are computed together, weights crossing the link once for all of them. */
struct gpu_pass {
    uint64_t layer, first, tokens;
    uint64_t chunk;  /* tokens of a launch */
    uint64_t staged; /* tokens that a half of the staging memory has room for */
    uint64_t sent;   /* tokens whose outputs are queued on their way to the host */
    struct gpu_parts parts;
};

struct numoe_gpu_model {
    struct numoe_gpu *gpu;
    struct numoe_gpu_source source;
    struct gpu_pinned pinned;
    struct gpu_ring ring; /* gpu NULL: not needed */
    struct gpu_stream stream;
    bool warm; /* the profile's experts have been copied, or there is none */
    uint64_t keep_free_bytes, ring_bytes;
    uint8_t *device; /* parts of a pass */
    uint64_t device_bytes;
    uint8_t *host; /* pinned: two halves for inputs and outputs on their way */
    uint64_t half_bytes;
    void *half_free[2];  /* events: the half's last copy is past */
    void *results;       /* stream of outputs to the host */
    void *computed;      /* event: the pass is */
    void *began, *ended; /* timers of the pass */
    double took_ms;
    uint32_t *need;   /* [experts] of the pass */
    uint64_t experts; /* of all layers, that there are */
    bool running;     /* between start and finish */
    struct gpu_pass pass;
    uint64_t calls, tokens;
    uint64_t ring_checked, ring_placed;
};

/* The device's view of a call on one part of a layer. */
void gpu_model_ffn(const struct numoe_gpu_model *model, const struct gpu_part *part,
                   struct numoe_cuda_ffn *ffn);

/* Of the profile, what is not yet on the device. Failing costs time later and is no error. */
void gpu_model_warm(struct numoe_gpu_model *model);

/* need: 1 for the hottest experts of a layer, those that stay among them, then any; else 0. */
void gpu_model_hottest(struct numoe_gpu_model *model, uint64_t layer, uint64_t most,
                       uint32_t *need);

/* Most experts of a layer were hit: so will those of the next be. */
bool gpu_model_most(const struct numoe_gpu_model *model, uint64_t layer, const uint32_t *need);

#endif
