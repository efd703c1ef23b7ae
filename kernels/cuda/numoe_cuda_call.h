/**
 * numoe_cuda_call.h - one call of the expert FFN on a CUDA device, as data. Needs no CUDA toolkit;
 * numoe_cuda.h says what is computed and runs it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CUDA_CALL_H
#define NUMOE_CUDA_CALL_H

#include "numoe_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/** slice_at of an expert that is not there: its entries are skipped. */
#define NUMOE_CUDA_ABSENT UINT32_MAX

/** How the products of a call are computed: so many tokens of an expert together, by mma.sync
 *  (sm_80 up) or by wgmma (sm_90). Any form computes any number of tokens. */
enum numoe_cuda_form {
    NUMOE_CUDA_8 = 1,
    NUMOE_CUDA_32,
    NUMOE_CUDA_64,
    NUMOE_CUDA_WGMMA_32,
    NUMOE_CUDA_WGMMA_64,
    NUMOE_CUDA_WGMMA_128,
    NUMOE_CUDA_FORMS = NUMOE_CUDA_WGMMA_128
};

/** One call. All pointers are to device memory; everything must stay until the stream is past. */
struct numoe_cuda_ffn {
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    /** NUMOE_MXFP8_UP, NUMOE_MXFP8_OCP: x and h are rounded so; any other: to bf16. */
    enum numoe_arithmetic arithmetic;
    uint32_t slices; /**< of an expert */
    uint32_t experts;
    const uint8_t *weights;   /**< 64-byte aligned */
    const uint32_t *slice_at; /**< [experts][slices]: where each slice begins, in 64-byte units
                                   from weights; NUMOE_CUDA_ABSENT in [e][0]: no such expert */
    const float *down_bias;   /**< [experts][32 * hidden_tiles] b2 in lane order, or NULL */
    uint32_t tokens, top_k;
    const void *x; /**< [tokens][x_stride] */
    enum numoe_type x_type;
    uint64_t x_stride;    /**< elements, >= hidden */
    const void *ids;      /**< [tokens][top_k] int32 or int64; negative, absent or >= experts:
                               skipped */
    uint32_t id_bytes;    /**< 4 or 8 */
    const float *routing; /**< [tokens][top_k] */
    void *out;            /**< [tokens][out_stride] */
    enum numoe_type out_type;
    uint64_t out_stride; /**< elements, >= hidden */
    bool add;
    float scale;
    enum numoe_cuda_form form;
    void *workspace; /**< numoe_cuda_workspace_bytes(), 256-byte aligned */
};

/** Experts to be repacked as numoe_kernels.h draws Marlin's layout. Pointers are to device memory.
 */
struct numoe_cuda_marlin {
    struct numoe_slice_shape shape;
    uint32_t slices, experts;
    const uint8_t *weights;
    const uint32_t *slice_at; /**< as above; experts that are absent are left out */
    const int32_t *slot_of;   /**< [experts] where each goes in what follows; negative: nowhere.
                                   NULL: its own number */
    bool interleaved;
    /** Of slot 0; those of the next follow at once (numoe_marlin_sizes). Words are 4-byte aligned.
     */
    struct numoe_marlin to;
};

#ifdef __cplusplus
}
#endif

#endif
