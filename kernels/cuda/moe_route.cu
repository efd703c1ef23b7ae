/*
 * What surrounds the products of the expert FFN: sorting entries by expert, laying out x, and the
 * sum over a token's slots.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "moe_kernels.h"
#include "stage_place.h"

namespace
{

enum { SCAN_THREADS = 1024, THREADS = 256, ONE_BLOCK_PAIRS = 1024 };

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
        c.next_item[0] = c.next_item[1] = 0;
    }
}

DI void sort_entries(const call &c, uint32_t first, uint32_t step)
{
    for (uint32_t p = first; p < c.tokens * c.top_k; p += step) {
        const int e = pair_expert(c, p);
        if (e >= 0)
            c.sorted[atomicAdd(&c.counters[e], 1)] = static_cast<int>(p);
    }
    for (uint32_t t = first; c.fused && t < c.tokens; t += step) {
        int valid = 0;
        for (uint32_t j = 0; j < c.top_k; j++)
            valid += pair_expert(c, t * c.top_k + j) >= 0;
        c.valid[t] = valid;
    }
}

__global__ void __launch_bounds__(SCAN_THREADS) route_few(call c)
{
    let_next_start();
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

/* ---- x ----------------------------------------------------------------------------------------
 */

struct padding {
    const void *x;
    bool is_f32, for_wgmma;
    uint64_t stride, cells;
    uint32_t hidden, width;
    __nv_bfloat16 *out;
};

/* x to bf16 rows of 32 hidden_tiles, zeros behind hidden; each 32 k in the order that wgmma wants,
 * if it is for that. */
__global__ void pad_x(padding p)
{
    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < p.cells;
         i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
        const uint64_t row = i / p.width;
        const uint32_t at = i % p.width;
        const uint32_t k = p.for_wgmma ? at / 32 * 32 + numoe_wgmma_row(at % 32) : at;
        __nv_bfloat16 v = __float2bfloat16(0.0f);
        if (k < p.hidden)
            v = p.is_f32 ? __float2bfloat16(static_cast<const float *>(p.x)[row * p.stride + k])
                         : static_cast<const __nv_bfloat16 *>(p.x)[row * p.stride + k];
        p.out[i] = v;
    }
}

/* The same for bf16 rows that are whole tiles and 16-byte aligned, in the order of wgmma: octet t
 * gives word t of each 16 bytes. A thread: a tile. */
__global__ void arrange_x(padding p)
{
    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x;
         i < p.cells / 32; i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
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
    cudaError_t e;

    if (pairs <= ONE_BLOCK_PAIRS)
        return launch(route_few, 1, SCAN_THREADS, 0, false, c, how.stream);
    e = launch(route_zero, blocks_of(c.experts), THREADS, 0, false, c, how.stream);
    if (!e)
        e = launch(route_count, blocks_of(pairs), THREADS, 0, how.overlap, c, how.stream);
    if (!e)
        e = launch(route_scan, 1, SCAN_THREADS, 0, how.overlap, c, how.stream);
    if (!e)
        e = launch(route_sort, blocks_of(pairs), THREADS, 0, how.overlap, c, how.stream);
    return e;
}

cudaError_t launch_pad(const call &c, const void *x, bool is_f32, uint64_t stride,
                       __nv_bfloat16 *out, const launching &how)
{
    const uint32_t width = 32 * c.hidden_tiles;
    const padding p = {
        x,        is_f32, c.for_wgmma, stride, static_cast<uint64_t>(c.tokens) * width,
        c.hidden, width,  out};

    if (c.for_wgmma && !is_f32 && c.hidden == width && stride % 8 == 0 &&
        reinterpret_cast<uintptr_t>(x) % 16 == 0)
        arrange_x<<<blocks_of(p.cells / 32), THREADS, 0, how.stream>>>(p);
    else
        pad_x<<<blocks_of(p.cells / 4), THREADS, 0, how.stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_combine(const call &c, const launching &how)
{
    return launch(combine, c.tokens < 65535 ? c.tokens : 65535, THREADS, 0, how.overlap, c,
                  how.stream);
}
