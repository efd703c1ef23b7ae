/*
 * What surrounds the products of the expert FFN: laying out x, sorting entries by expert, and the
 * sum over a token's slots.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "moe_kernels.h"
#include "stage_place.h"

namespace
{

enum { SCAN_THREADS = 1024, THREADS = 256, ONE_BLOCK_PAIRS = 1024 };

/* ---- x ----------------------------------------------------------------------------------------
 */

/* x to bf16 rows of 32 hidden_tiles, zeros behind hidden; each 32 k in the order that wgmma wants,
 * if it is for that. */
DI void pad_x(const padding &p, uint64_t first, uint64_t step)
{
    for (uint64_t i = first; i < p.cells; i += step) {
        const uint64_t row = i / p.width;
        const uint32_t at = i % p.width;
        const uint32_t k = p.for_wgmma ? at / 32 * 32 + numoe_wgmma_row(at % 32) : at;
        float v = 0;
        if (k < p.hidden)
            v = p.is_f32
                    ? static_cast<const float *>(p.x)[row * p.stride + k]
                    : __bfloat162float(
                          static_cast<const __nv_bfloat16 *>(p.x)[row * p.stride + k]);
        if (rounds_mxfp8(p.arithmetic)) /* a warp has a group */
            v = round_mxfp8(v, __reduce_max_sync(~0u, __float_as_uint(v) & 0x7FFFFFFFu),
                            p.arithmetic);
        else
            v = __bfloat162float(__float2bfloat16(v));
        p.out[i] = __float2bfloat16(v * p.raise);
    }
}

/* The same for bf16 rows that are whole tiles and 16-byte aligned. In the order of wgmma octet t
 * gives word t of each 16 bytes. A thread: a tile. */
DI void arrange_x(const padding &p, uint64_t first, uint64_t step)
{
    for (uint64_t i = first; i < p.cells / 32; i += step) {
        const uint64_t row = i / (p.width / 32);
        const uint32_t tile = i % (p.width / 32);
        const uint4 *from = reinterpret_cast<const uint4 *>(
            static_cast<const __nv_bfloat16 *>(p.x) + row * p.stride + 32 * tile);
        const uint4 a = from[0], b = from[1], c = from[2], d = from[3];
        uint4 *to = reinterpret_cast<uint4 *>(p.out + row * p.width + 32 * tile);
        to[0] = make_uint4(a.x, b.x, c.x, d.x);
        to[1] = make_uint4(a.y, b.y, c.y, d.y);
        to[2] = make_uint4(a.z, b.z, c.z, d.z);
        to[3] = make_uint4(a.w, b.w, c.w, d.w);
    }
}

/* ... and in its own, multiplied. A thread: eight k. */
DI void raise_x(const padding &p, uint64_t first, uint64_t step)
{
    const __nv_bfloat162 by = __float2bfloat162_rn(p.raise);
    for (uint64_t i = first; i < p.cells / 8; i += step) {
        const uint64_t row = i / (p.width / 8);
        const uint32_t at = i % (p.width / 8);
        uint4 v = reinterpret_cast<const uint4 *>(static_cast<const __nv_bfloat16 *>(p.x) +
                                                  row * p.stride)[at];
        __nv_bfloat162 *const pairs = reinterpret_cast<__nv_bfloat162 *>(&v);
#pragma unroll
        for (int j = 0; j < 4; j++)
            pairs[j] = __hmul2(pairs[j], by);
        reinterpret_cast<uint4 *>(p.out)[i] = v;
    }
}

DI void lay_out_x(const padding &p, uint64_t first, uint64_t step)
{
    const bool whole = !p.is_f32 && !rounds_mxfp8(p.arithmetic) && p.hidden == p.width && p.stride % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(p.x) % 16 == 0;

    if (whole && p.for_wgmma && p.raise == 1.0f)
        arrange_x(p, first, step);
    else if (whole && !p.for_wgmma)
        raise_x(p, first, step);
    else
        pad_x(p, first, step);
}

__global__ void __launch_bounds__(THREADS) pad(padding p)
{
    wait_for_previous();
    let_next_start();
    lay_out_x(p, blockIdx.x * static_cast<uint64_t>(THREADS) + threadIdx.x,
              static_cast<uint64_t>(gridDim.x) * THREADS);
}

/* ---- routing ----------------------------------------------------------------------------------
 *
 * Count, scan and list the chunks, sort: in one block when there are few entries, else the first
 * and the last in many. Where an entry lands among its expert's decides nothing about its value, so
 * plain atomics do.
 */

DI void zero_counters(const call &c, uint32_t first, uint32_t step)
{
    for (uint32_t e = first; e < c.experts; e += step)
        c.counters[e] = 0;
}

DI void count_entries(const call &c, uint32_t first, uint32_t step)
{
    for (uint32_t p = first; p < c.tokens * c.top_k; p += step) {
        const int e = pair_expert(c, p);
        if (e >= 0)
            atomicAdd(&c.counters[e], 1);
    }
}

/* Of all experts: counts to first positions, and the chunks. One block. */
DI void scan_experts(const call &c)
{
    __shared__ int pair_base, chunk_base, scan[2][SCAN_THREADS];
    const int thread = threadIdx.x;

    if (thread == 0)
        pair_base = chunk_base = 0;
    __syncthreads();
    for (uint32_t base = 0; base < c.experts; base += SCAN_THREADS) {
        const uint32_t e = base + thread;
        const int count = e < c.experts ? c.counters[e] : 0;
        const int chunks = (count + c.chunk_tokens - 1) / c.chunk_tokens;
        scan[0][thread] = count;
        scan[1][thread] = chunks;
        __syncthreads();
        for (int step = 1; step < SCAN_THREADS; step *= 2) {
            const int a = thread >= step ? scan[0][thread - step] : 0;
            const int b = thread >= step ? scan[1][thread - step] : 0;
            __syncthreads();
            scan[0][thread] += a;
            scan[1][thread] += b;
            __syncthreads();
        }
        const int first = pair_base + scan[0][thread] - count;
        const int at = chunk_base + scan[1][thread] - chunks;
        if (e < c.experts)
            c.counters[e] = first;
        for (int i = 0; i < chunks; i++) {
            /* equal shares, so that no block is nearly empty */
            const int from = static_cast<int>(static_cast<long long>(count) * i / chunks);
            const int to = static_cast<int>(static_cast<long long>(count) * (i + 1) / chunks);
            c.chunks[at + i] = {static_cast<int>(e), first + from, to - from, 0};
            if (c.chunk_tokens == 8)
                c.h_slices[at + i] = 0;
        }
        __syncthreads();
        if (thread == SCAN_THREADS - 1) {
            pair_base += scan[0][thread];
            chunk_base += scan[1][thread];
        }
        __syncthreads();
    }
    if (thread == 0) {
        *c.chunk_count = chunk_base;
        *c.next_item = 0;
    }
}

DI void sort_entries(const call &c, uint32_t first, uint32_t step)
{
    for (uint32_t p = first; p < c.tokens * c.top_k; p += step) {
        const int e = pair_expert(c, p);
        if (e >= 0)
            c.sorted[atomicAdd(&c.counters[e], 1)] = static_cast<int>(p);
    }
}

/* What the few-token form needs when it sums a token's parts itself. */
DI void count_valid(const call &c, uint32_t first, uint32_t step)
{
    const uint32_t units = (c.hidden_tiles + 1) / 2;

    for (uint32_t t = first; !c.local && t < c.tokens; t += step) {
        uint32_t valid = 0;
#pragma unroll 1
        for (uint32_t j = 0; j < c.top_k; j++)
            valid |= static_cast<uint32_t>(pair_expert(c, t * c.top_k + j) >= 0) << j;
        c.valid[t] = valid;
    }
    for (uint32_t i = first; i < c.tokens * units; i += step)
        c.arrived[i] = 0;
}

/* The first block; the others lay out x. */
__global__ void __launch_bounds__(SCAN_THREADS) route_few(call c)
{
    wait_for_previous();
    let_next_start();
    if (blockIdx.x) {
        lay_out_x(c.pad, (blockIdx.x - 1) * uint64_t{SCAN_THREADS} + threadIdx.x,
                  (gridDim.x - 1) * uint64_t{SCAN_THREADS});
        return;
    }
    if (c.fused)
        count_valid(c, threadIdx.x, SCAN_THREADS);
    if (c.local) {
        if (threadIdx.x < c.chunk_bound)
            c.h_slices[threadIdx.x] = 0;
        if (threadIdx.x == 0)
            *c.next_item = 0;
        return;
    }
    zero_counters(c, threadIdx.x, SCAN_THREADS);
    __syncthreads();
    count_entries(c, threadIdx.x, SCAN_THREADS);
    __syncthreads();
    scan_experts(c);
    __syncthreads();
    sort_entries(c, threadIdx.x, SCAN_THREADS);
}

__global__ void __launch_bounds__(THREADS) route_zero(call c)
{
    wait_for_previous();
    let_next_start();
    zero_counters(c, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}

__global__ void __launch_bounds__(THREADS) route_count(call c)
{
    wait_for_previous();
    let_next_start();
    count_entries(c, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}

__global__ void __launch_bounds__(SCAN_THREADS) route_scan(call c)
{
    wait_for_previous();
    let_next_start();
    scan_experts(c);
}

__global__ void __launch_bounds__(THREADS) route_sort(call c)
{
    wait_for_previous();
    let_next_start();
    sort_entries(c, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}

/* ---- the sum ----------------------------------------------------------------------------------
 */

/* Slots of a token in slot order; a skipped slot has no part. A block: a token; a thread: four
 * outputs at a time. */
__global__ void __launch_bounds__(THREADS) combine(call c)
{
    __shared__ bool there[THREADS]; /* of the first slots */
    const uint32_t quads = 8 * c.hidden_tiles;

    wait_for_previous();
    for (uint32_t token = blockIdx.x; token < c.tokens; token += gridDim.x) {
        const uint32_t first = token * c.top_k;
        const float4 *part = reinterpret_cast<const float4 *>(c.part) + uint64_t{first} * quads;

        __syncthreads();
        if (threadIdx.x < c.top_k)
            there[threadIdx.x] = pair_expert(c, first + threadIdx.x) >= 0;
        __syncthreads();
        for (uint32_t q = threadIdx.x; q < quads; q += THREADS) {
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
            for (uint32_t j = 0; j < c.top_k; j++)
                if (j < THREADS ? there[j] : pair_expert(c, first + j) >= 0) {
                    const float4 v = __ldcs(&part[uint64_t{j} * quads + q]);
                    sum.x += v.x;
                    sum.y += v.y;
                    sum.z += v.z;
                    sum.w += v.w;
                }
            put_four(c, token, 4 * q, sum);
        }
    }
}

unsigned blocks_of(uint64_t items)
{
    const uint64_t blocks = (items + THREADS - 1) / THREADS;
    return static_cast<unsigned>(blocks < 16384 ? blocks : 16384);
}

} /* namespace */

cudaError_t launch_route(const call &c, const launching &how)
{
    const uint32_t pairs = c.tokens * c.top_k;
    cudaError_t e = cudaSuccess;

    if (pairs <= ONE_BLOCK_PAIRS) {
        const uint64_t most = 2 * static_cast<uint64_t>(how.multiprocessors);
        const uint64_t fill = (c.pad.cells / 8 + SCAN_THREADS - 1) / SCAN_THREADS;
        return launch(route_few, c.pad.out ? 1 + (fill < most ? fill : most) : 1, SCAN_THREADS, 0,
                      how.overlap, c, how.stream);
    }
    if (c.pad.out)
        e = launch(pad, blocks_of(c.pad.cells / 8), THREADS, 0, how.overlap, c.pad, how.stream);
    if (!e)
        e = launch(route_zero, blocks_of(c.experts), THREADS, 0, how.overlap, c, how.stream);
    if (!e)
        e = launch(route_count, blocks_of(pairs), THREADS, 0, how.overlap, c, how.stream);
    if (!e)
        e = launch(route_scan, 1, SCAN_THREADS, 0, how.overlap, c, how.stream);
    if (!e)
        e = launch(route_sort, blocks_of(pairs), THREADS, 0, how.overlap, c, how.stream);
    return e;
}

cudaError_t launch_combine(const call &c, const launching &how)
{
    return launch(combine, c.tokens < 65535 ? c.tokens : 65535, THREADS, 0, how.overlap, c,
                  how.stream);
}
