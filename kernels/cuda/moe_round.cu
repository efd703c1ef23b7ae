/*
 * Sums of several launches, rounded once: to = bf16(add ? to + from : from).
 *
 * Bound by memory: 6 bytes an output, or 8.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <cuda_bf16.h>

#include "numoe_cuda.h"

namespace
{

__global__ void round_rows(const float *from, __nv_bfloat16 *to, uint64_t to_stride, uint64_t rows,
                           uint64_t columns, bool add)
{
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;

    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x;
         i < rows * columns; i += step) {
        const uint64_t at = i / columns * to_stride + i % columns;
        to[at] = __float2bfloat16(add ? __bfloat162float(to[at]) + from[i] : from[i]);
    }
}

} /* namespace */

extern "C" cudaError_t numoe_cuda_round(const float *from, uint16_t *to, uint64_t to_stride,
                                        uint64_t rows, uint64_t columns, bool add,
                                        cudaStream_t stream)
{
    constexpr unsigned THREADS = 256, BLOCKS_MOST = 16384;
    const uint64_t blocks = (rows * columns + THREADS - 1) / THREADS;

    if (blocks == 0)
        return cudaSuccess;
    round_rows<<<static_cast<unsigned>(blocks < BLOCKS_MOST ? blocks : BLOCKS_MOST), THREADS, 0,
                 stream>>>(from, reinterpret_cast<__nv_bfloat16 *>(to), to_stride, rows, columns,
                           add);
    return cudaGetLastError();
}
