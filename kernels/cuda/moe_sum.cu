/*
 * Parts of outputs from several devices, summed in their order: to = from[0] + from[1] + ...
 *
 * Bound by memory, 4 bytes a part and output, far above the links that parts come and sums go over.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_cuda.h"

namespace
{

struct parts {
    const float *from[NUMOE_CUDA_PARTS];
};

/* `to` may be one of the parts: nobody else reads what a thread writes. */
__global__ void sum_parts(float *to, parts p, uint32_t count, uint64_t elements)
{
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;

    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < elements;
         i += step) {
        float sum = p.from[0][i];
        for (uint32_t k = 1; k < count; k++)
            sum += p.from[k][i];
        to[i] = sum;
    }
}

} /* namespace */

extern "C" cudaError_t numoe_cuda_sum(float *to, const float *const *from, uint32_t count,
                                      uint64_t elements, cudaStream_t stream)
{
    constexpr unsigned THREADS = 256, BLOCKS_MOST = 16384;
    const uint64_t blocks = (elements + THREADS - 1) / THREADS;
    parts p = {};

    if (count < 1 || count > NUMOE_CUDA_PARTS)
        return cudaErrorInvalidValue;
    if (blocks == 0)
        return cudaSuccess;
    for (uint32_t i = 0; i < count; i++)
        p.from[i] = from[i];
    sum_parts<<<static_cast<unsigned>(blocks < BLOCKS_MOST ? blocks : BLOCKS_MOST), THREADS, 0,
                stream>>>(to, p, count, elements);
    return cudaGetLastError();
}
