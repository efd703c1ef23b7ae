/**
 * numoe_cuda.h - the expert FFN on a CUDA device, on slices exactly as kernels/ packs them.
 *
 *     out[t] (+)= scale * sum_j weights[t, j] * expert(ids[t, j], x[t])
 *
 * Weights are MXFP4 slices (numoe_kernels.h) anywhere in one device buffer; activations are bf16
 * (f32 is rounded to bf16 first), products are exact, sums fp32, h is rounded to bf16: the exact
 * mode of the CPU. Each (token, slot) is computed on its own and a token's slots are added in slot
 * order, so results are the same bits from run to run. A weight is
 * held as bf16: scale bytes 253 and 254 with codes that reach 2^128 become infinite.
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

/** Device bytes that a call of so many tokens needs; 0 when they overflow. */
uint64_t numoe_cuda_workspace_bytes(const struct numoe_cuda_ffn *ffn);

/**
 * Queue the call on a stream. Never synchronises, allocates nothing; tokens == 0 queues nothing.
 * @return cudaSuccess, cudaErrorInvalidValue (limits: tokens * top_k < 2^31, experts <= 65536), or
 *         what a launch said
 */
cudaError_t numoe_cuda_ffn_launch(const struct numoe_cuda_ffn *ffn, cudaStream_t stream);

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

/** @return how many kernels there are; fills up to count of them */
size_t numoe_cuda_kernels(struct numoe_cuda_kernel_info *info, size_t count);

#ifdef __cplusplus
}
#endif

#endif
