/*
 * Expert FFN, MXFP4 weights, bf16 activations, mma.sync m16n8k16.
 *
 *   gate_up   h[pair] = act(W1 x + b1, W3 x + b3)     one warp: a pair tile, 32 rows of each
 *   down      part[slot] = routing * (W2 h + b2)       one warp: a pair tile, 64 rows
 *   combine   out[token] = sum over its slots, in slot order
 *
 * W is the A operand (rows), tokens are n. Lane (g = lane / 4, t = lane % 4) takes the 16 bytes at
 * 128 t + 16 g of a tile: octet t of rows g, g + 8, g + 16, g + 24. They are the A registers of two
 * k steps and two m tiles (rows 0..15 and 16..31); the k of an octet go to step 0 (k 0..3) and step
 * 1 (k 4..7), and B follows: lane (g, t) holds x[token g][8t .. 8t + 7], 16 bytes.
 *
 *         word j of the lane: row g + 8 j        nibbles i, 4 + i: k 2i, 2i + 1 = one bf16x2
 *         mma(m, step):  a0 = word 2m, pair 2 step      a2 = word 2m, pair 2 step + 1
 *                        a1 = word 2m + 1, same         a3 = word 2m + 1, same
 *
 * Decoding: bits s e e m of a code go to the sign and to the two low exponent bits and the top
 * mantissa bit of a bf16: e2m1 * 2^-126 (a subnormal for 0.5), exactly. The scale byte e multiplies
 * by 2^(e - 1), which has a bf16 for e <= 128; a tile with a larger byte takes a second product.
 *
 * Forms: few tokens (the four warps of a block split k; B straight from global memory) and many
 * (each warp has rows of its own, B through shared memory by asynchronous copies, three stages of
 * 128 k).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_cuda.h"

#include <cuda_bf16.h>

#include "ptx.cuh"
#include "stage_place.h"

namespace
{

enum { WARPS = 4, THREADS = 32 * WARPS, STAGE_TILES = 4, STAGES = 3, ROUTE_THREADS = 1024 };

/* Dynamic shared memory that needs no opting in: 48 KiB less what a kernel has statically. */
enum { PLAIN_SHARED = 46 * 1024 };

/* Tokens of one expert that a block computes together. */
struct chunk {
    int expert, first, count, unused;
};

/* What every kernel gets. pairs are (token, slot) entries; sorted[] lists them by expert. */
struct call {
    const uint8_t *weights;
    const uint32_t *slice_at;
    const float *down_bias;
    const __nv_bfloat16 *x; /* [tokens][x_stride], hidden padded with zeros to 32 */
    const void *ids;
    const float *routing;
    void *out;
    __nv_bfloat16 *h; /* [pairs][32 slices], by sorted position */
    float *part;      /* [pairs][32 hidden_tiles], by pair */
    struct chunk *chunks;
    int *chunk_count;
    int *sorted;
    int *counters; /* [experts + 1] */
    uint64_t x_stride, out_stride;
    uint32_t hidden, hidden_tiles, slices, down_offset, bias_offset;
    uint32_t experts, tokens, top_k, id_bytes, chunk_tokens, chunk_bound;
    numoe_activation activation;
    float scale;
    bool add, out_bf16;
};

/* ---- routing ----------------------------------------------------------------------------------
 */

DI int pair_expert(const call &c, uint32_t pair)
{
    const long long id = c.id_bytes == 8 ? static_cast<const long long *>(c.ids)[pair]
                                         : static_cast<const int *>(c.ids)[pair];
    if (id < 0 || id >= static_cast<long long>(c.experts) ||
        c.slice_at[static_cast<uint64_t>(id) * c.slices] == NUMOE_CUDA_ABSENT)
        return -1;
    return static_cast<int>(id);
}

/* One block: count, scan, list the chunks, sort. Where a pair lands among its expert's decides
 * nothing about its value, so plain atomics do. */
__global__ void __launch_bounds__(ROUTE_THREADS) route(call c)
{
    __shared__ int pair_base, chunk_base, scan[2][ROUTE_THREADS];
    const int thread = threadIdx.x;
    const uint32_t pairs = c.tokens * c.top_k;

    for (uint32_t e = thread; e < c.experts; e += ROUTE_THREADS)
        c.counters[e] = 0;
    if (thread == 0)
        pair_base = chunk_base = 0;
    __syncthreads();
    for (uint32_t p = thread; p < pairs; p += ROUTE_THREADS) {
        const int e = pair_expert(c, p);
        if (e >= 0)
            atomicAdd(&c.counters[e], 1);
    }
    __syncthreads();
    for (uint32_t base = 0; base < c.experts; base += ROUTE_THREADS) {
        const uint32_t e = base + thread;
        const int count = e < c.experts ? c.counters[e] : 0;
        const int chunks = (count + c.chunk_tokens - 1) / c.chunk_tokens;
        scan[0][thread] = count;
        scan[1][thread] = chunks;
        __syncthreads();
        for (int step = 1; step < ROUTE_THREADS; step *= 2) {
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
        if (thread == ROUTE_THREADS - 1) {
            pair_base += scan[0][thread];
            chunk_base += scan[1][thread];
        }
        __syncthreads();
    }
    if (thread == 0)
        *c.chunk_count = chunk_base;
    for (uint32_t p = thread; p < pairs; p += ROUTE_THREADS) {
        const int e = pair_expert(c, p);
        if (e >= 0)
            c.sorted[atomicAdd(&c.counters[e], 1)] = static_cast<int>(p);
    }
}

/* x to bf16 rows of 32 hidden_tiles, zeros behind hidden. */
__global__ void pad_x(const void *x, bool is_f32, uint64_t stride, uint32_t hidden, uint32_t width,
                      uint64_t cells, __nv_bfloat16 *out)
{
    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < cells;
         i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
        const uint64_t row = i / width, k = i % width;
        __nv_bfloat16 v = __float2bfloat16(0.0f);
        if (k < hidden)
            v = is_f32 ? __float2bfloat16(static_cast<const float *>(x)[row * stride + k])
                       : static_cast<const __nv_bfloat16 *>(x)[row * stride + k];
        out[i] = v;
    }
}

/* ---- decoding ---------------------------------------------------------------------------------
 */

/* A code word to four bf16x2 of e2m1 * 2^-126. */
DI void decode_word(uint32_t q, uint32_t *pair)
{
    pair[0] = ((q << 6) & 0x01C001C0u) | ((q << 12) & 0x80008000u);
    pair[1] = ((q << 2) & 0x01C001C0u) | ((q << 8) & 0x80008000u);
    pair[2] = ((q >> 2) & 0x01C001C0u) | ((q << 4) & 0x80008000u);
    pair[3] = ((q >> 6) & 0x01C001C0u) | (q & 0x80008000u);
}

/* Byte j of `bytes` as the exponent of both halves of a bf16x2. */
DI uint32_t exponent_bf16x2(uint32_t bytes, int j)
{
    return __byte_perm(bytes, 0, 0x0404 + j * 0x1010) >> 1;
}

/* acc[m][n] += tile . B for the lane's 16 bytes of codes and 4 scale bytes */
template <int N>
DI void tile_mma(const uint4 &codes, uint32_t scales, const uint4 *b, float (*acc)[N][4])
{
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t low = scales, rest = 0;

    /* bytes over 128: 2^(128 - 1) first, then 2^(e - 128) */
    const bool large = __vcmpgtu4(scales, 0x80808080u) != 0;
    if (__any_sync(~0u, large)) {
        low = __vminu4(scales, 0x80808080u);
        rest = __vsub4(scales, low);
    }
    const uint32_t exponents = low + 0x7E7E7E7Eu;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint32_t p0[4], p1[4];
        decode_word(word[2 * m], p0);
        decode_word(word[2 * m + 1], p1);
        const uint32_t s0 = exponent_bf16x2(exponents, 2 * m);
        const uint32_t s1 = exponent_bf16x2(exponents, 2 * m + 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p0[i] = multiply_bf16x2(p0[i], s0);
            p1[i] = multiply_bf16x2(p1[i], s1);
        }
        if (__any_sync(~0u, rest != 0)) {
            const uint32_t r0 = exponent_bf16x2(rest + 0x7F7F7F7Fu, 2 * m);
            const uint32_t r1 = exponent_bf16x2(rest + 0x7F7F7F7Fu, 2 * m + 1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                p0[i] = multiply_bf16x2(p0[i], r0);
                p1[i] = multiply_bf16x2(p1[i], r1);
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            mma_16816(acc[m][n], p0[0], p1[0], p0[1], p1[1], b[n].x, b[n].y);
            mma_16816(acc[m][n], p0[2], p1[2], p0[3], p1[3], b[n].z, b[n].w);
        }
    }
}

DI float sigmoid(float v)
{
    return 1.0f / (1.0f + __expf(-v));
}

DI float activate(const numoe_activation &a, float gate, float up)
{
    switch (a.kind) {
    case NUMOE_SILU_CLAMPED:
        gate = gate > a.limit ? a.limit : gate;
        up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
        break;
    case NUMOE_SWIGLU_OAI:
        gate = gate > a.limit ? a.limit : gate;
        up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
        return gate * sigmoid(a.alpha * gate) * (up + 1.0f);
    case NUMOE_SITU:
        if (a.up_cap > 0)
            up = a.up_cap * tanhf(up / a.up_cap);
        return a.gate_cap * tanhf(gate / a.gate_cap) * sigmoid(gate) * up;
    default:
        break;
    }
    return gate * sigmoid(gate) * up;
}

/* ---- the walk over k --------------------------------------------------------------------------
 */

/* Where the pair tile of step k lies. gate_up: consecutive in a slice; down: one in each slice. */
template <bool DOWN>
struct walk {
    const uint8_t *base;      /* DOWN: weights + offset inside a slice; else the slice */
    const uint32_t *slice_at; /* DOWN: of the expert */

    DI const uint8_t *pair(uint32_t k) const
    {
        if (DOWN)
            return base + static_cast<uint64_t>(slice_at[k]) * 64;
        return base + static_cast<uint64_t>(k) * NUMOE_PAIR_BYTES;
    }
};

struct pair_tile {
    uint4 a, b;
    uint32_t scale_a, scale_b;
};

DI pair_tile load_pair(const uint8_t *pair, int lane)
{
    const int g = lane >> 2, t = lane & 3;
    pair_tile p;
    p.a = load_stream(pair + 128 * t + 16 * g);
    p.b = load_stream(pair + 512 + 128 * t + 16 * g);
    p.scale_a = load_word(pair + 1024 + 4 * g);
    p.scale_b = load_word(pair + 1056 + 4 * g);
    return p;
}

/*
 * Few tokens: this warp's k steps [from, to), B rows from global memory.
 * row[n]: the lane's token of n tile n at k octet t, or NULL.
 */
template <bool DOWN, int N>
DI void walk_few(const walk<DOWN> &w, const __nv_bfloat16 *const *row, uint32_t from, uint32_t to,
                 int lane, float (*acc)[2][N][4])
{
    pair_tile next;
    uint4 b[N], next_b[N];

    if (from >= to)
        return;
    next = load_pair(w.pair(from), lane);
#pragma unroll
    for (int n = 0; n < N; n++)
        next_b[n] = row[n] ? load_vector(row[n] + 32 * from) : make_uint4(0, 0, 0, 0);
#pragma unroll 2
    for (uint32_t k = from; k < to; k++) {
        const pair_tile now = next;
#pragma unroll
        for (int n = 0; n < N; n++)
            b[n] = next_b[n];
        if (k + 1 < to) {
            next = load_pair(w.pair(k + 1), lane);
#pragma unroll
            for (int n = 0; n < N; n++)
                if (row[n])
                    next_b[n] = load_vector(row[n] + 32 * (k + 1));
        }
        tile_mma<N>(now.a, now.scale_a, b, acc[0]);
        tile_mma<N>(now.b, now.scale_b, b, acc[1]);
    }
}

/* Many tokens: stage `stage` of 128 k of the block's tokens to shared memory as B fragments, 16
 * bytes at a time (stage_place.h). */
template <int N>
DI void stage_b(uint32_t shared, const __nv_bfloat16 *base, const int *row, uint64_t stride,
                uint32_t stage, uint32_t k_tiles)
{
    const int piece = threadIdx.x & 15, tile = piece >> 2, t = piece & 3;

#pragma unroll
    for (int i = threadIdx.x >> 4; i < 8 * N; i += THREADS / 16) {
        const uint32_t to = shared + numoe_stage_place(i, tile, t);
        const bool there = row[i] >= 0 && stage * STAGE_TILES + tile < k_tiles;
        copy_async(to,
                   base + (there ? row[i] * stride + (stage * STAGE_TILES + tile) * 32 + 8 * t : 0),
                   there ? 16 : 0);
    }
}

/* All warps of the block call it together; a warp without rows of its own passes active = false. */
template <bool DOWN, int N>
DI void walk_many(const walk<DOWN> &w, bool active, const __nv_bfloat16 *base, const int *row,
                  uint64_t stride, uint32_t k_tiles, uint8_t *shared, float (*acc)[2][N][4])
{
    const int lane = threadIdx.x & 31;
    const uint32_t stages = (k_tiles + STAGE_TILES - 1) / STAGE_TILES;
    const uint32_t stage_bytes = N * STAGE_TILES * 512;
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    pair_tile next = {};

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < static_cast<int>(stages))
            stage_b<N>(at + s * stage_bytes, base, row, stride, s, k_tiles);
        copy_commit();
    }
    if (active)
        next = load_pair(w.pair(0), lane);
    uint32_t buffer = 0;
    for (uint32_t s = 0; s < stages; s++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (s + STAGES - 1 < stages)
            stage_b<N>(at + (buffer + STAGES - 1) % STAGES * stage_bytes, base, row, stride,
                       s + STAGES - 1, k_tiles);
        copy_commit();
        if (active) {
#pragma unroll
            for (int tile = 0; tile < STAGE_TILES; tile++) {
                const uint32_t k = s * STAGE_TILES + tile;
                if (k < k_tiles) {
                    const pair_tile now = next;
                    const uint8_t *from = shared + buffer * stage_bytes +
                                          numoe_stage_place(lane >> 2, tile, lane & 3);
                    uint4 b[N];
                    if (k + 1 < k_tiles)
                        next = load_pair(w.pair(k + 1), lane);
#pragma unroll
                    for (int n = 0; n < N; n++)
                        b[n] = *reinterpret_cast<const uint4 *>(from + n * STAGE_TILES * 512);
                    tile_mma<N>(now.a, now.scale_a, b, acc[0]);
                    tile_mma<N>(now.b, now.scale_b, b, acc[1]);
                }
            }
        }
        buffer = (buffer + 1) % STAGES;
    }
    copy_wait<0>();
}

/* ---- results ----------------------------------------------------------------------------------
 */

/* Accumulator i of n tile n, m tile m: row g + 8 j, token 8 n + 2 t + (i & 1); j = 2 m + i / 2. */
DI int acc_j(int m, int i)
{
    return 2 * m + (i >> 1);
}

/* h of one accumulator pair, gate beside up. */
DI void put_h(const call &c, const chunk &ch, const uint8_t *slice, uint32_t s, int g, int j,
              int token, float gate, float up)
{
    if (token >= ch.count)
        return;
    if (c.bias_offset) {
        const float *bias = reinterpret_cast<const float *>(slice + c.bias_offset);
        gate += bias[4 * g + j];
        up += bias[32 + 4 * g + j];
    }
    c.h[static_cast<uint64_t>(ch.first + token) * (32 * c.slices) + 32 * s + g + 8 * j] =
        __float2bfloat16(activate(c.activation, gate, up));
}

/* One output of the pair, row of y in natural order. */
DI void put_part(const call &c, const chunk &ch, uint32_t tile, int g, int j, int token, float v)
{
    if (token >= ch.count || tile >= c.hidden_tiles)
        return;
    const uint32_t pair = c.sorted[ch.first + token];
    if (c.down_bias)
        v += c.down_bias[(static_cast<uint64_t>(ch.expert) * c.hidden_tiles + tile) * 32 + 4 * g +
                         j];
    c.part[static_cast<uint64_t>(pair) * (32 * c.hidden_tiles) + 32 * tile + g + 8 * j] =
        v * c.routing[pair];
}

/* Sum the four warps' accumulators; each thread then handles some of them. */
template <bool DOWN, int N>
DI void finish_few(const call &c, const chunk &ch, const uint8_t *slice, uint32_t unit,
                   float (*acc)[2][N][4], float4 *shared)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    enum { CELLS = 4 * N }; /* float4s of a lane: [tile a, b][m][n] */

#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
                shared[(warp * CELLS + (p * 2 + m) * N + n) * 32 + lane] =
                    make_float4(acc[p][m][n][0], acc[p][m][n][1], acc[p][m][n][2], acc[p][m][n][3]);
    __syncthreads();
    /* thread: cell (m, n) of lane l; both tiles of it */
    for (int id = threadIdx.x; id < 2 * N * 32; id += THREADS) {
        const int l = id & 31, m = id / 32 / N, n = id / 32 % N, g = l >> 2, t = l & 3;
        float sum[2][4] = {};
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
            for (int v = 0; v < WARPS; v++) {
                const float4 from = shared[(v * CELLS + (p * 2 + m) * N + n) * 32 + l];
                sum[p][0] += from.x;
                sum[p][1] += from.y;
                sum[p][2] += from.z;
                sum[p][3] += from.w;
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 8 * n + 2 * t + (i & 1), j = acc_j(m, i);
            if (DOWN) {
                put_part(c, ch, 2 * unit, g, j, token, sum[0][i]);
                put_part(c, ch, 2 * unit + 1, g, j, token, sum[1][i]);
            } else {
                put_h(c, ch, slice, unit, g, j, token, sum[0][i], sum[1][i]);
            }
        }
    }
}

/* ---- kernels ----------------------------------------------------------------------------------
 */

/* Grid: chunk_bound x units; unit: a slice (gate_up) or 64 rows (down). */
template <bool DOWN, int N>
__global__ void __launch_bounds__(THREADS) few_tokens(call c)
{
    extern __shared__ float4 few_shared[];
    const uint32_t units = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint32_t index = blockIdx.x / units, unit = blockIdx.x % units;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

    if (index >= static_cast<uint32_t>(*c.chunk_count))
        return;
    const chunk ch = c.chunks[index];
    const uint32_t *slice_at = c.slice_at + static_cast<uint64_t>(ch.expert) * c.slices;
    const uint8_t *slice = c.weights + static_cast<uint64_t>(slice_at[DOWN ? 0 : unit]) * 64;
    const uint32_t k_tiles = DOWN ? c.slices : c.hidden_tiles;
    const uint32_t share = (k_tiles + WARPS - 1) / WARPS, from = warp * share;
    const uint32_t to = from + share < k_tiles ? from + share : k_tiles;
    const __nv_bfloat16 *row[N];
    float acc[2][2][N][4] = {};
    walk<DOWN> w;

    w.base = DOWN ? c.weights + c.down_offset + unit * NUMOE_PAIR_BYTES : slice;
    w.slice_at = slice_at;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int token = 8 * n + g;
        row[n] = nullptr;
        if (token < ch.count)
            row[n] = (DOWN ? c.h + static_cast<uint64_t>(ch.first + token) * (32 * c.slices)
                           : c.x + c.sorted[ch.first + token] / c.top_k * c.x_stride) +
                     8 * t;
    }
    walk_few<DOWN, N>(w, row, from, to, lane, acc);
    finish_few<DOWN, N>(c, ch, slice, unit, acc, few_shared);
}

/* Grid: units x chunk_bound, so that the chunks of an expert meet its weights in L2; unit: WARPS
 * slices (gate_up) or 64 WARPS rows (down). */
template <bool DOWN, int N>
__global__ void __launch_bounds__(THREADS, 2) many_tokens(call c)
{
    extern __shared__ __align__(128) uint8_t many_shared[];
    __shared__ int row[8 * N];
    const uint32_t unit = blockIdx.x / c.chunk_bound, index = blockIdx.x % c.chunk_bound;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

    if (index >= static_cast<uint32_t>(*c.chunk_count))
        return;
    const chunk ch = c.chunks[index];
    const uint32_t mine = unit * WARPS + warp; /* slice, or 64 rows */
    const bool active = mine < (DOWN ? (c.hidden_tiles + 1) / 2 : c.slices);
    const uint32_t *slice_at = c.slice_at + static_cast<uint64_t>(ch.expert) * c.slices;
    const uint8_t *slice =
        c.weights + static_cast<uint64_t>(slice_at[!DOWN && active ? mine : 0]) * 64;
    float acc[2][2][N][4] = {};
    walk<DOWN> w;

    w.base = DOWN ? c.weights + c.down_offset + mine * NUMOE_PAIR_BYTES : slice;
    w.slice_at = slice_at;
    for (int i = threadIdx.x; i < 8 * N; i += THREADS)
        row[i] = i >= ch.count ? -1
                 : DOWN        ? ch.first + i
                               : static_cast<int>(c.sorted[ch.first + i] / c.top_k);
    __syncthreads();
    walk_many<DOWN, N>(w, active, DOWN ? c.h : c.x, row, DOWN ? 32 * c.slices : c.x_stride,
                       DOWN ? c.slices : c.hidden_tiles, many_shared, acc);
    if (!active)
        return;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = 8 * n + 2 * t + (i & 1), j = acc_j(m, i);
                if (DOWN) {
                    put_part(c, ch, 2 * mine, g, j, token, acc[0][m][n][i]);
                    put_part(c, ch, 2 * mine + 1, g, j, token, acc[1][m][n][i]);
                } else {
                    put_h(c, ch, slice, mine, g, j, token, acc[0][m][n][i], acc[1][m][n][i]);
                }
            }
}

/* Slots of a token in slot order; a skipped slot has no part. */
__global__ void combine(call c)
{
    const uint64_t cells = static_cast<uint64_t>(c.tokens) * c.hidden;

    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < cells;
         i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
        const uint32_t token = static_cast<uint32_t>(i / c.hidden), k = i % c.hidden;
        float sum = 0.0f;
        for (uint32_t j = 0; j < c.top_k; j++) {
            const uint32_t pair = token * c.top_k + j;
            if (pair_expert(c, pair) >= 0)
                sum += c.part[static_cast<uint64_t>(pair) * (32 * c.hidden_tiles) + k];
        }
        sum *= c.scale;
        const uint64_t at = token * c.out_stride + k;
        if (c.out_bf16) {
            __nv_bfloat16 *out = static_cast<__nv_bfloat16 *>(c.out) + at;
            *out = __float2bfloat16(c.add ? __bfloat162float(*out) + sum : sum);
        } else {
            float *out = static_cast<float *>(c.out) + at;
            *out = c.add ? *out + sum : sum;
        }
    }
}

/* ---- launching --------------------------------------------------------------------------------
 */

struct layout {
    uint64_t x, h, part, chunks, sorted, counters, bytes;
    uint32_t chunk_tokens, chunk_bound;
    bool pad;
};

uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

bool too_large(const numoe_cuda_ffn *f)
{
    return f->experts == 0 || f->experts > 65536 || f->slices == 0 || f->top_k == 0 ||
           static_cast<uint64_t>(f->tokens) * f->top_k >= 0x7FFFFFFFu ||
           f->shape.hidden > (1u << 24) || f->slices > (1u << 19);
}

/* Average tokens of a hit expert choose the form; every count computes right in either. */
layout lay_out(const numoe_cuda_ffn *f)
{
    const uint64_t pairs = static_cast<uint64_t>(f->tokens) * f->top_k;
    const uint64_t hit = pairs < f->experts ? pairs : f->experts;
    const uint64_t average = hit ? pairs / hit : 0;
    const uint64_t width = 32 * f->shape.hidden_tiles;
    const bool aligned = f->x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(f->x) % 16 == 0;
    layout l = {};
    uint64_t at = 0;

    l.chunk_tokens = average <= 6 ? 8 : average <= 12 ? 16 : average <= 28 ? 32 : 64;
    const uint64_t bound = hit + pairs / l.chunk_tokens;
    l.chunk_bound = static_cast<uint32_t>(bound < pairs ? bound : pairs);
    l.pad = f->x_type == NUMOE_F32 || f->shape.hidden % 32 != 0 || !aligned;
    l.x = take(&at, l.pad ? f->tokens * width * 2 : 0);
    l.h = take(&at, pairs * 32 * f->slices * 2);
    l.part = take(&at, pairs * width * 4);
    l.chunks = take(&at, (l.chunk_bound + 1) * sizeof(chunk));
    l.sorted = take(&at, pairs * 4);
    l.counters = take(&at, (static_cast<uint64_t>(f->experts) + 2) * 4);
    l.bytes = at;
    return l;
}

template <class KERNEL>
cudaError_t launch(KERNEL kernel, uint64_t blocks, int shared, const call &c, cudaStream_t stream)
{
    if (blocks > 0x7FFFFFFFu)
        return cudaErrorInvalidValue;
    if (shared > PLAIN_SHARED) {
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (e)
            return e;
    }
    kernel<<<static_cast<unsigned>(blocks), THREADS, shared, stream>>>(c);
    return cudaGetLastError();
}

template <int N>
constexpr int few_bytes()
{
    return WARPS * 4 * N * 32 * static_cast<int>(sizeof(float4));
}

template <int N>
constexpr int many_bytes()
{
    return STAGES * STAGE_TILES * 512 * N;
}

template <bool DOWN>
cudaError_t launch_half(const call &c, cudaStream_t stream)
{
    const uint64_t units = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint64_t blocks = (units + WARPS - 1) / WARPS * c.chunk_bound;

    switch (c.chunk_tokens) {
    case 8:
        return launch(few_tokens<DOWN, 1>, units * c.chunk_bound, few_bytes<1>(), c, stream);
    case 16:
        return launch(few_tokens<DOWN, 2>, units * c.chunk_bound, few_bytes<2>(), c, stream);
    case 32:
        return launch(many_tokens<DOWN, 4>, blocks, many_bytes<4>(), c, stream);
    default:
        return launch(many_tokens<DOWN, 8>, blocks, many_bytes<8>(), c, stream);
    }
}

template <class KERNEL>
void describe(KERNEL kernel, int shared, numoe_cuda_kernel_info *info)
{
    cudaFuncAttributes a = {};

    if (cudaFuncGetAttributes(&a, kernel) != cudaSuccess)
        return;
    if (shared > PLAIN_SHARED)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    info->registers = a.numRegs;
    info->local_bytes = static_cast<int>(a.localSizeBytes);
    info->static_shared_bytes = static_cast<int>(a.sharedSizeBytes);
    info->dynamic_shared_bytes = shared;
    info->binary_version = a.binaryVersion;
    info->ptx_version = a.ptxVersion;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&info->blocks_an_sm, kernel, THREADS, shared);
}

} /* namespace */

extern "C" uint64_t numoe_cuda_workspace_bytes(const struct numoe_cuda_ffn *f)
{
    return too_large(f) ? 0 : lay_out(f).bytes;
}

extern "C" cudaError_t numoe_cuda_ffn_launch(const struct numoe_cuda_ffn *f, cudaStream_t stream)
{
    if (f->tokens == 0)
        return cudaSuccess;
    if (too_large(f))
        return cudaErrorInvalidValue;
    const layout l = lay_out(f);
    uint8_t *work = static_cast<uint8_t *>(f->workspace);
    const uint32_t width = static_cast<uint32_t>(32 * f->shape.hidden_tiles);
    call c = {};
    cudaError_t e;

    c.weights = f->weights;
    c.slice_at = f->slice_at;
    c.down_bias = f->down_bias;
    c.x = static_cast<const __nv_bfloat16 *>(f->x);
    c.x_stride = f->x_stride;
    c.ids = f->ids;
    c.routing = f->routing;
    c.out = f->out;
    c.h = reinterpret_cast<__nv_bfloat16 *>(work + l.h);
    c.part = reinterpret_cast<float *>(work + l.part);
    c.chunks = reinterpret_cast<chunk *>(work + l.chunks);
    c.sorted = reinterpret_cast<int *>(work + l.sorted);
    c.counters = reinterpret_cast<int *>(work + l.counters);
    c.chunk_count = c.counters + f->experts + 1;
    c.out_stride = f->out_stride;
    c.hidden = static_cast<uint32_t>(f->shape.hidden);
    c.hidden_tiles = static_cast<uint32_t>(f->shape.hidden_tiles);
    c.slices = f->slices;
    c.down_offset = static_cast<uint32_t>(f->shape.down_offset);
    c.bias_offset = static_cast<uint32_t>(f->shape.bias_offset);
    c.experts = f->experts;
    c.tokens = f->tokens;
    c.top_k = f->top_k;
    c.id_bytes = f->id_bytes;
    c.chunk_tokens = l.chunk_tokens;
    c.chunk_bound = l.chunk_bound;
    c.activation = f->activation;
    c.scale = f->scale;
    c.add = f->add;
    c.out_bf16 = f->out_type == NUMOE_BF16;

    const uint64_t cells = static_cast<uint64_t>(f->tokens) * width;
    if (l.pad) {
        __nv_bfloat16 *x = reinterpret_cast<__nv_bfloat16 *>(work + l.x);
        pad_x<<<static_cast<unsigned>(cells / 1024 + 1 < 65535 ? cells / 1024 + 1 : 65535), 256, 0,
                stream>>>(f->x, f->x_type == NUMOE_F32, f->x_stride, c.hidden, width, cells, x);
        c.x = x;
        c.x_stride = width;
        e = cudaGetLastError();
        if (e)
            return e;
    }
    route<<<1, ROUTE_THREADS, 0, stream>>>(c);
    e = cudaGetLastError();
    if (!e)
        e = launch_half<false>(c, stream);
    if (!e)
        e = launch_half<true>(c, stream);
    if (e)
        return e;
    combine<<<static_cast<unsigned>(cells / 512 + 1 < 65535 ? cells / 512 + 1 : 65535), 256, 0,
              stream>>>(c);
    return cudaGetLastError();
}

extern "C" size_t numoe_cuda_kernels(struct numoe_cuda_kernel_info *info, size_t count)
{
    static const char *const names[] = {"gate_up 8", "gate_up 16", "gate_up 32", "gate_up 64",
                                        "down 8",    "down 16",    "down 32",    "down 64"};

    for (size_t i = 0; i < 8 && i < count; i++) {
        info[i] = {};
        info[i].name = names[i];
    }
    if (count >= 8) {
        describe(few_tokens<false, 1>, few_bytes<1>(), &info[0]);
        describe(few_tokens<false, 2>, few_bytes<2>(), &info[1]);
        describe(many_tokens<false, 4>, many_bytes<4>(), &info[2]);
        describe(many_tokens<false, 8>, many_bytes<8>(), &info[3]);
        describe(few_tokens<true, 1>, few_bytes<1>(), &info[4]);
        describe(few_tokens<true, 2>, few_bytes<2>(), &info[5]);
        describe(many_tokens<true, 4>, many_bytes<4>(), &info[6]);
        describe(many_tokens<true, 8>, many_bytes<8>(), &info[7]);
    }
    return 8;
}
