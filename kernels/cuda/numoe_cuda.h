/**
 * numoe_cuda.h - the expert FFN on a CUDA device, on slices exactly as kernels/ packs them.
 *
 *     out[t] (+)= scale * sum_j weights[t, j] * expert(ids[t, j], x[t])
 *
 * Weights are MXFP4 slices (numoe_kernels.h) anywhere in one device buffer; activations are bf16
 * (f32 is rounded to bf16 first), products are exact, sums fp32, h is rounded to bf16: the exact
 * mode of the CPU. In the MXFP8 modes x and h are rounded by their rule instead, once, and
 * multiplied as bf16, which holds them exactly. Each (token, slot) is computed on its own and a
 * token's slots are added in slot order, so results are the same bits from run to run. Where a
 * scale byte is 128 or more, a weight is held as bf16: bytes 253 and 254 with codes that reach
 * 2^128 become infinite. x and h have to stay below 2^63.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CUDA_H
#define NUMOE_CUDA_H

#include <cuda_runtime_api.h>

#include "numoe_cuda_call.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How the few-token form runs. */
struct numoe_cuda_few {
    int stages;       /**< 3 or 4, each 12.5 KiB of a block's shared memory */
    int blocks_an_sm; /**< as many as fit */
};

/** What launches go by. */
struct numoe_cuda_device {
    int multiprocessors;
    struct numoe_cuda_few few;
    bool overlap;   /**< the kernels that load know how to start before the one before has ended */
    unsigned forms; /**< bit f: the kernels of enum numoe_cuda_form f load, and a block of each
                         has the shared memory that it needs */
};

/** Ask the current device. */
cudaError_t numoe_cuda_device_init(struct numoe_cuda_device *device);

/** Device bytes that a call of so many tokens needs; 0 when they overflow, or the device has not
 *  the form. */
uint64_t numoe_cuda_workspace_bytes(const struct numoe_cuda_device *device,
                                    const struct numoe_cuda_ffn *ffn);

/**
 * Queue the call on a stream. Never synchronises, allocates nothing; tokens == 0 queues nothing.
 * @param device  the current one
 * @return cudaSuccess, cudaErrorInvalidValue (limits: tokens * top_k < 2^31, experts <= 65536, x
 * and h 64 GiB each; a form that the device has not), or what a launch said
 */
cudaError_t numoe_cuda_ffn_launch(const struct numoe_cuda_device *device,
                                  const struct numoe_cuda_ffn *ffn, cudaStream_t stream);

/** Round fp32 sums [rows][columns] once to bf16 rows, or add them to what is there. */
cudaError_t numoe_cuda_round(const float *from, uint16_t *to, uint64_t to_stride, uint64_t rows,
                             uint64_t columns, bool add, cudaStream_t stream);

enum { NUMOE_CUDA_PARTS = 16 };
/** to[i] = from[0][i] + from[1][i] + ..., of up to NUMOE_CUDA_PARTS; `to` may be one of them. */
cudaError_t numoe_cuda_sum(float *to, const float *const *from, uint32_t count, uint64_t elements,
                           cudaStream_t stream);

/** Queue repacking to Marlin's layout. @return cudaErrorInvalidValue: it cannot have such experts
 */
cudaError_t numoe_cuda_marlin(const struct numoe_cuda_marlin *marlin, cudaStream_t stream);

/** Registers, spilled bytes and shared memory of each kernel on the current device. */
struct numoe_cuda_kernel_info {
    const char *name;
    int registers, local_bytes, static_shared_bytes, dynamic_shared_bytes, blocks_an_sm;
    int binary_version; /**< of the machine code: 90 for sm_90; 0: the kernel did not load */
    int ptx_version;    /**< of the PTX it was made from: 80 when the driver compiled it */
};

/** Read bytes of device memory, for measuring; out: a word of device memory. */
cudaError_t numoe_cuda_read(const void *from, uint64_t bytes, uint32_t *out, int multiprocessors,
                            cudaStream_t stream);

/** Multiply on the tensor cores by mma.sync, registers alone; operations: how many, of which a
 *  product and a sum are two; out: a float of device memory. */
cudaError_t numoe_cuda_multiply(uint32_t rounds, float *out, int multiprocessors,
                                double *operations, cudaStream_t stream);

/** Fill info with the kernels that the current device may use, if count is not too small.
 *  @return how many they are, or how many there may be */
size_t numoe_cuda_kernels(struct numoe_cuda_kernel_info *info, size_t count);

#ifdef __cplusplus
}
#endif

#endif
