/*
 * Slices to Marlin's layout (numoe_kernels.h draws both). A thread makes one word of 8 codes, or one
 * scale byte.
 *
 * The two layouts fit: a word here has the even k of its octet in the low half, in order, and so has
 * one there, of four places. Word (lane, block) of a tile there is nibble t = lane % 4 of both halves
 * of four words here: rows n and n + 8, octets k / 8 and the next. No code is looked at.
 *
 * Bound by memory: every byte is read once from DRAM (four threads read each word, from L1) and
 * written once, in order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_cuda.h"

namespace
{

struct product {
    uint32_t columns, depth; /* N, K */
    bool down;
};

/* The tile with output column n and input k of an expert: its codes, its scales, the column's lane. */
__device__ const uint8_t *find(const struct numoe_cuda_marlin &m, const uint32_t *slice_at, bool down,
                               uint32_t n, uint32_t k, uint32_t *scales, uint32_t *lane)
{
    uint32_t row = n, half, pair;
    uint64_t slice;
    const uint8_t *at;

    if (down) {
        slice = k / 32;
        half = n / 32 % 2;
        pair = n / 64;
    } else {
        const uint32_t rows = 32 * m.slices;
        half = m.interleaved ? n % 2 : n >= rows;
        row = m.interleaved ? n / 2 : n - half * rows;
        slice = row / 32;
        pair = k / 32;
    }
    row %= 32;
    *lane = 4 * (row % 8) + row / 8;
    *scales = 1024 - 512 * half + 32 * half; /* from the codes that are returned */
    at = m.weights + static_cast<uint64_t>(slice_at[slice]) * 64;
    return at + (down ? m.shape.down_offset : 0) + static_cast<uint64_t>(pair) * NUMOE_PAIR_BYTES +
           512 * half;
}

__device__ uint32_t word_of(const struct numoe_cuda_marlin &m, const uint32_t *slice_at, const product &p,
                            uint64_t index)
{
    const uint32_t block = index % 4, lane = index / 4 % 32, t = lane % 4;
    const uint32_t tiles = p.columns / 64, tile = index / 128 % tiles;
    const uint32_t k = static_cast<uint32_t>(index / 128 / tiles) * 16;
    uint32_t word = 0, scales, row;

    for (uint32_t i = 0; i < 4; i++) { /* octet i % 2 of row i / 2 */
        const uint32_t n = 64 * tile + 16 * block + 8 * (i / 2) + lane / 4;
        const uint8_t *codes = find(m, slice_at, p.down, n, k, &scales, &row);
        const uint32_t octet = k / 8 % 4 + i % 2;
        const uint32_t from = *reinterpret_cast<const uint32_t *>(codes + 128 * octet + 4 * row);
        word |= (from >> (4 * t) & 0x000F000Fu) << (4 * i);
    }
    return word;
}

__device__ uint8_t scale_of(const struct numoe_cuda_marlin &m, const uint32_t *slice_at, const product &p,
                            uint64_t index)
{
    const uint32_t i = index % 64, tiles = p.columns / 64, tile = index / 64 % tiles;
    const uint32_t k = static_cast<uint32_t>(index / 64 / tiles) * 32;
    /* the middle two of each four change places */
    const uint32_t j = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
    uint32_t scales, row;
    const uint8_t *codes =
        find(m, slice_at, p.down, 64 * tile + j / 8 + 8 * (j % 8), k, &scales, &row);

    return codes[scales + row];
}

__device__ void repack(const struct numoe_cuda_marlin &m, const uint32_t *slice_at, const product &p,
                       uint32_t *words, uint8_t *scales)
{
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    const uint64_t first = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x;

    for (uint64_t i = first; i < static_cast<uint64_t>(p.depth) / 8 * p.columns; i += step)
        words[i] = word_of(m, slice_at, p, i);
    for (uint64_t i = first; i < static_cast<uint64_t>(p.depth) / 32 * p.columns; i += step)
        scales[i] = scale_of(m, slice_at, p, i);
}

__global__ void __launch_bounds__(256) repack_experts(const struct numoe_cuda_marlin m)
{
    const uint32_t hidden = static_cast<uint32_t>(m.shape.hidden), inner = 32 * m.slices;
    const product gate_up = {2 * inner, hidden, false}, down = {hidden, inner, true};
    const uint64_t words = static_cast<uint64_t>(hidden) * inner;

    for (uint32_t e = blockIdx.y; e < m.experts; e += gridDim.y) {
        const uint32_t *slice_at = m.slice_at + static_cast<uint64_t>(e) * m.slices;
        const int64_t slot = m.slot_of ? m.slot_of[e] : static_cast<int64_t>(e);
        if (slice_at[0] == NUMOE_CUDA_ABSENT || slot < 0)
            continue;
        repack(m, slice_at, gate_up, m.to.gate_up + slot * (words / 4),
               m.to.gate_up_scales + slot * (words / 16));
        repack(m, slice_at, down, m.to.down + slot * (words / 8),
               m.to.down_scales + slot * (words / 32));
    }
}

} /* namespace */

extern "C" cudaError_t numoe_cuda_marlin(const struct numoe_cuda_marlin *m, cudaStream_t stream)
{
    constexpr unsigned BLOCKS = 64, EXPERTS_MOST = 65535;
    struct numoe_marlin_sizes sizes;

    if (numoe_marlin_sizes(&m->shape, m->slices, &sizes))
        return cudaErrorInvalidValue;
    repack_experts<<<dim3(BLOCKS, m->experts < EXPERTS_MOST ? m->experts : EXPERTS_MOST), 256, 0,
                     stream>>>(*m);
    return cudaGetLastError();
}
