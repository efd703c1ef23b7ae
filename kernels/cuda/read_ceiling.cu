/*
 * Reading device memory as fast as it goes: the ceiling that the FFN kernels are measured against.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_cuda.h"

#include "ptx.cuh"

namespace
{

/* Four independent 16-byte loads a thread and step; the sum is stored only if it is one that never
 * is, so that no load can be dropped. */
__global__ void __launch_bounds__(512) read_all(const uint4 *from, uint64_t count, uint32_t *out)
{
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x;
    uint32_t sum = 0;

    for (; i + 3 * step < count; i += 4 * step) {
        const uint4 a = load_stream(from + i), b = load_stream(from + i + step);
        const uint4 c = load_stream(from + i + 2 * step), d = load_stream(from + i + 3 * step);
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += step) {
        const uint4 a = load_stream(from + i);
        sum ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x9E3779B9u)
        *out = sum;
}

} /* namespace */

extern "C" cudaError_t numoe_cuda_read(const void *from, uint64_t bytes, uint32_t *out,
                                       int multiprocessors, cudaStream_t stream)
{
    read_all<<<multiprocessors * 4, 512, 0, stream>>>(static_cast<const uint4 *>(from), bytes / 16,
                                                      out);
    return cudaGetLastError();
}
