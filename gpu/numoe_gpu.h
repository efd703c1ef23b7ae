/**
 * numoe_gpu.h - layers on a GPU: which device, whether it is used and why not, weights copied from
 * node memory while the layer before computes, and the calls themselves.
 *
 * Knows no model file, no pool and no CUDA type: the weights are described by callbacks. Built
 * without the CUDA toolkit it is the same interface, and every device is refused with that reason.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_H
#define NUMOE_GPU_H

#include "base/numoe_base.h"
#include "base/numoe_types.h"
#include "numoe_kernels.h"
#include "numoe_topo.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- devices -------------------------------------------------------------------------------- */

struct numoe_gpu_properties {
    uint32_t index;
    char name[96];
    char bus[24]; /**< PCI address, "0000:1b:00.0" */
    uint64_t memory_bytes, free_bytes;
    uint32_t multiprocessors;
    int major, minor;                    /**< compute capability */
    uint64_t shared_bytes;               /**< most shared memory that a block can opt in to */
    int driver_version, runtime_version; /**< of CUDA: 13000 is 13.0 */
    int ptx_version; /**< once open: of the kernels in use; 80 when the driver compiled them */
    bool locality_known;
    uint32_t os_node; /**< nearest memory node, OS index; NUMOE_NONE */
};

/** @return how many devices there are; -ENOTSUP built without CUDA, -ENODEV no driver or none, with
 *          the reason in error */
int numoe_gpu_count(struct numoe_error *error);

/** @param machine  NULL, or where to look for the device's locality before sysfs is asked
 *  @return 0; -ENODEV, -EINVAL */
int numoe_gpu_describe(uint32_t index, const struct numoe_machine *machine,
                       struct numoe_gpu_properties *properties, struct numoe_error *error);

/** What is asked for, with the environment's NUMOE_GPU=off|on|force before the caller's wish.
 *  @return 0; -EINVAL: the variable says something else */
int numoe_gpu_mode(enum numoe_gpu_mode wish, enum numoe_gpu_mode *mode, struct numoe_error *error);

/** Whether a device is used, and why (not). */
struct numoe_gpu_verdict {
    bool usable, forced; /**< forced: in spite of the reason */
    char reason[512];    /**< one sentence */
    double rel_l2;       /**< what the self-test measured; negative: not run */
};

struct numoe_gpu;

/**
 * Open a device if the evidence is for it: wanted, there, code for it loads, shared memory
 * suffices, and a small set of experts computed on it agrees with the reference.
 * @param log  NULL, or where faults and fallbacks are reported; copied
 * @return 0; else -ENODEV, -ENOTSUP, -EIO, -ENOMEM with the reason in verdict and error
 */
int numoe_gpu_open(uint32_t index, enum numoe_gpu_mode mode, const struct numoe_machine *machine,
                   const struct numoe_log *log, struct numoe_gpu **gpu,
                   struct numoe_gpu_verdict *verdict, struct numoe_error *error);
/** All models on it must have been destroyed. NULL is allowed. */
void numoe_gpu_close(struct numoe_gpu *gpu);
const struct numoe_gpu_properties *numoe_gpu_get(const struct numoe_gpu *gpu);

/** 0; -EIO once a fault has made the device unusable for this process, with what it was. */
int numoe_gpu_health(const struct numoe_gpu *gpu, struct numoe_error *error);

/* ---- models --------------------------------------------------------------------------------- */

/** Place of the first slice of an expert that is not there. */
#define NUMOE_GPU_ABSENT UINT32_MAX

/** A model's weights in host memory, as the device copies them. Callbacks run in the thread that
 *  calls, and not at once. */
struct numoe_gpu_source {
    void *user;
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    uint64_t layers, experts;
    uint32_t slices; /**< of an expert */
    bool down_bias;
    uint32_t region_count; /**< of a layer: one a memory node */
    /** The memory that all regions lie in, to be pinned: [index] of region_count. */
    void (*arena)(void *user, uint32_t index, void **address, uint64_t *bytes);
    /** Region `index` of a layer: copied as it is, the regions one after another, each begun at a
     *  multiple of 256 bytes. */
    void (*region)(void *user, uint64_t layer, uint32_t index, const void **address,
                   uint64_t *bytes);
    /** Fill [experts][slices] places in 64-byte units (NUMOE_GPU_ABSENT in an absent expert's
     *  first) with region i begun at region_at[i] units, and [experts][32 hidden_tiles] biases in
     *  lane order unless down_bias is NULL. */
    void (*tables)(void *user, uint64_t layer, const uint64_t *region_at, uint32_t *slice_at,
                   float *down_bias);
    /** Changes whenever weights of the layer change: a copy made before is made again. */
    uint32_t (*generation)(void *user, uint64_t layer);
    /** Copy rows between host memories, with as many threads as there are; NULL: memcpy. */
    void (*copy)(void *user, void *to, uint64_t to_stride, const void *from, uint64_t from_stride,
                 uint64_t row_bytes, uint64_t rows);
};

struct numoe_gpu_model_options {
    bool stream;              /**< copy layers each time even if all fit */
    uint32_t slots;           /**< layers held at once; 0: as many as fit (2 with stream) */
    uint64_t chunk_bytes;     /**< pinned at a time; 0: 1 GiB */
    uint64_t ring_bytes;      /**< staging for what is not pinned; 0: 64 MiB */
    uint64_t keep_free_bytes; /**< device memory left for workspace; 0: an eighth, at most 4 GiB */
    bool no_pinning;          /**< staging only: for tests and measurement */
};

struct numoe_gpu_model;

/**
 * Reserve device memory for a model and pin its host memory. Nothing is copied yet.
 * @param options  NULL for defaults
 * @return 0; -ENOMEM: not even two layers fit; -EIO; -EOVERFLOW
 */
int numoe_gpu_model_create(struct numoe_gpu *gpu, const struct numoe_gpu_source *source,
                           const struct numoe_gpu_model_options *options,
                           struct numoe_gpu_model **model, struct numoe_error *error);
/** Waits for what runs. NULL is allowed. */
void numoe_gpu_model_destroy(struct numoe_gpu_model *model);

/** One call on host memory; see struct numoe_batch of numoe.h. */
struct numoe_gpu_call {
    uint64_t tokens, top_k;
    const void *x;
    enum numoe_type x_type;
    uint64_t x_stride;    /**< elements, >= hidden */
    const int32_t *ids;   /**< [tokens][top_k]; negative: skipped */
    const float *routing; /**< [tokens][top_k] */
    void *out;
    enum numoe_type out_type;
    uint64_t out_stride; /**< elements, >= hidden */
    bool add;
    float scale;
};

/**
 * Compute one layer and start copying the next. Blocks until out is written.
 * @param done  tokens whose output is final, also when the call fails: the rest is untouched
 * @return 0; -ENOMEM, -EIO (the device is lost, see numoe_gpu_health), -EINVAL
 */
int numoe_gpu_forward(struct numoe_gpu_model *model, uint64_t layer,
                      const struct numoe_gpu_call *call, uint64_t *done, struct numoe_error *error);

struct numoe_gpu_report {
    uint32_t slots;
    bool resident;                       /**< every layer has a slot of its own */
    uint64_t slot_bytes, device_bytes;   /**< of weights; with workspace */
    uint64_t pinned_bytes, arena_bytes;  /**< of host memory: pinned, in all */
    uint64_t ring_bytes;                 /**< staging for the rest */
    uint32_t ring_node;                  /**< OS index it was asked for on; NUMOE_NONE */
    uint64_t ring_checked, ring_placed;  /**< its pages looked at; of them, on that node */
    char pin_refusal[160];               /**< why not all is pinned; "" */
    uint64_t copies, copied_bytes, hits; /**< layers copied; bytes; layers that were there */
    uint64_t calls, tokens;
};

void numoe_gpu_model_report(const struct numoe_gpu_model *model, struct numoe_gpu_report *report);

/* ---- measuring ------------------------------------------------------------------------------ */

/** Ceilings of the device: reading its memory, and the link to it from pinned memory, 10^9 bytes a
 *  second; bf16 products by mma.sync from registers, 10^9 operations a second. */
int numoe_gpu_ceilings(struct numoe_gpu *gpu, double *read_gbs, double *link_gbs, double *mma_gops,
                       struct numoe_error *error);

struct numoe_gpu_bench {
    uint64_t tokens, top_k;
    uint32_t routings;    /**< different ones that are measured in turn */
    uint32_t repeat;      /**< measurements of all of them */
    const uint16_t *x;    /**< bf16 [tokens][hidden] */
    const int32_t *ids;   /**< [routings][tokens][top_k] */
    const float *routing; /**< likewise */
    float *out;           /**< bench_layer: [tokens][hidden] of the last routing */
    double *ms;           /**< [repeat]: a layer, mean over the routings */
    /** bench_layers: the tokens [samples] whose outputs are kept of each layer ... */
    const uint64_t *sample;
    uint32_t samples;
    float *sampled; /**< ... [layers][samples][hidden], or NULL */
};

/** Time a layer with its weights in device memory, by replay of a captured graph. */
int numoe_gpu_bench_layer(struct numoe_gpu_model *model, uint64_t layer,
                          struct numoe_gpu_bench *bench, struct numoe_error *error);

struct numoe_gpu_bench_stream {
    double total_ms, copy_ms, compute_ms; /**< of all layers once: together, each alone */
    uint64_t bytes;                       /**< copied in one pass */
};

/** Time all layers in order, each copied while the one before computes; routing 0 of bench.
 *  sampled, if given, is of the last pass that copied and computed: what was timed is what is
 *  shown. Medians over bench.repeat passes. */
int numoe_gpu_bench_layers(struct numoe_gpu_model *model, struct numoe_gpu_bench *bench,
                           struct numoe_gpu_bench_stream *result, struct numoe_error *error);

#ifdef __cplusplus
}
#endif

#endif
