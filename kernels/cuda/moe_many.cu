/*
 * Expert FFN for many tokens of an expert, MXFP4 weights, bf16 activations, mma.sync m16n8k16.
 *
 *   gate_up   h[pair] = act(W1 x + b1, W3 x + b3)     one warp: a slice, 32 rows of each
 *   down      part[pair] = routing * (W2 h + b2)       one warp: 64 rows
 *
 * Each warp of a block has rows of its own and decodes their codes once for all tokens of the
 * chunk. Weights and B (as fragments) go through shared memory by asynchronous copies, STAGES
 * stages of 64 k: loads to registers would wait for each other (docs/kernels.md). An n tile
 * is one 16-byte load a lane and eight products, four accumulators in turn, so that none waits for
 * the one before.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "moe_kernels.h"
#include "moe_rows.cuh"

namespace
{

enum { WARPS = 4, THREADS = 32 * WARPS, STAGE_TILES = 2 };

/* A stage: B, then the pair tiles of each warp. */
template <int N>
struct stage_layout {
    enum {
        B = N * STAGE_TILES * 512,
        WARP = STAGE_TILES * NUMOE_PAIR_BYTES,
        BYTES = B + WARPS * WARP
    };
};

/* B as fragments, at numoe_stage_place(). */
template <int N>
using b_rows = copied_rows<N, THREADS / 8, THREADS / 64 * STAGE_TILES * 512>;

/* A lane's share of one tile of a pair: codes of four rows, and the factors of their scales. */
struct staged_tile {
    uint32_t word[4], factor[4];
};

/* From where pair_copier has put it; returns scale bytes. */
DI uint32_t load_tile(uint32_t codes, uint32_t scales, staged_tile &tile)
{
    const uint4 of = load_shared_vector(codes);

    tile.word[0] = of.x;
    tile.word[1] = of.y;
    tile.word[2] = of.z;
    tile.word[3] = of.w;
#pragma unroll
    for (int j = 0; j < 4; j++)
        tile.factor[j] = operand_factor(load_shared_byte(scales + j));
    return load_shared_word(scales);
}

/* Word j of a tile to its places in the A registers a[m][step][4]. */
DI void decode_row(const staged_tile &tile, int j, uint32_t (*a)[2][4])
{
    uint32_t p[4];

    decode_word(tile.word[j], p);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[j >> 1][i >> 1][2 * (i & 1) + (j & 1)] = multiply_bf16x2(p[i], tile.factor[j]);
}

/* acc[m][n] += a . B, and meanwhile the next tile is decoded, a row after every N / 4 n tiles: so
 * the pipes of products and of decoding are busy at once. */
template <int N>
DI void multiply(const uint32_t (*a)[2][4], const uint4 *b, float (*acc)[N][4],
                 const staged_tile &next, uint32_t (*decoded)[2][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                mma_16816(acc[m][n], a[m][step][0], a[m][step][1], a[m][step][2], a[m][step][3],
                          step ? b[n].z : b[n].x, step ? b[n].w : b[n].y);
#pragma unroll
        for (int j = 4 * n / N; j < 4 * (n + 1) / N; j++)
            decode_row(next, j, decoded);
    }
}

/* All warps of the block together. Returns the OR of all scales. Stages are whole: B is zero behind
 * the last tile, so that no branch divides the products. A warp's weights are copied by itself, so
 * it may look at those of the next stage before the others have come there. */
template <bool DOWN, int N, int STAGES>
DI uint32_t walk(const call &c, source<DOWN> from, const b_rows<N> &rows, const uint8_t *shared,
                 float (*acc)[2][N][4])
{
    enum { BYTES = stage_layout<N>::BYTES };
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t at = shared_address(shared);
    const uint32_t mine = at + stage_layout<N>::B + (threadIdx.x >> 5) * stage_layout<N>::WARP;
    const uint32_t k_tiles = from.k_tiles, stages = (k_tiles + STAGE_TILES - 1) / STAGE_TILES;
    uint32_t codes_at = mine + numoe_code_place(lane >> 2, lane & 3);
    uint32_t scales_at = mine + lane_scales(lane);
    uint32_t b_at = at + numoe_stage_place(lane >> 2, 0, lane & 3, STAGE_TILES);
    uint32_t a[2][2][2][4], scales, buffer = 0, ahead = STAGES - 1;
    staged_tile tile;
    pair_copier weights;
    const auto copy = [&](uint32_t to, uint32_t stage) {
#pragma unroll
        for (int i = 0; i < STAGE_TILES; i++)
            weights.copy(to * BYTES + i * NUMOE_PAIR_BYTES, from.pair(stage * STAGE_TILES + i));
    };
    /* of pair `pair` of the stage at `off`, tile `which`; later its rows are decoded */
    const auto load = [&](uint32_t off, int pair, int which) {
        const uint32_t place = off + pair * NUMOE_PAIR_BYTES;
        return load_tile(codes_at + place + 512 * which, scales_at + place + 32 * which, tile);
    };

    keep(codes_at);
    keep(scales_at);
    keep(b_at);
    weights.open(mine);
    from.base += 16 * lane;
    from.begin(0, 1);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        copy(s, s);
    wait_for_previous(); /* for h */
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        rows.copy(s * BYTES, s, k_tiles);
        copy_commit();
    }
    copy_wait<STAGES - 2>();
    __syncwarp();
    scales = load(0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++)
        decode_row(tile, j, a[0]);
#pragma unroll 1
    for (uint32_t s = 0; s < stages; s++) {
        const uint32_t off = buffer * BYTES, next = buffer + 1 == STAGES ? 0 : buffer + 1;

        __syncthreads();
        scales |= load(off, 0, 1);
        rows.copy(ahead * BYTES, s + STAGES - 1, k_tiles);
        copy(ahead, s + STAGES - 1);
        copy_commit();
#pragma unroll
        for (int i = 0; i < STAGE_TILES; i++) {
            uint4 b[N];
#pragma unroll
            for (int n = 0; n < N; n++) /* bit 2 of a place is flipped in odd tiles */
                b[n] = load_shared_vector((b_at ^ 64 * i) + 512 * i + off +
                                          n * (STAGE_TILES * 512));
            multiply<N>(a[0], b, acc[0], tile, a[1]);
            if (i + 1 < STAGE_TILES) {
                scales |= load(off, i + 1, 0);
            } else {
                copy_wait<STAGES - 2>();
                __syncwarp();
                scales |= load(next * BYTES, 0, 0);
            }
            multiply<N>(a[1], b, acc[1], tile, a[0]);
            if (i + 1 < STAGE_TILES)
                scales |= load(off, i + 1, 1);
        }
        ahead = buffer;
        buffer = next;
    }
    copy_wait<0>();
    return scales;
}

/* The same for any scales, B straight from its rows. */
template <bool DOWN, int N, int MOST>
DI void walk_any(const call &c, source<DOWN> from, const __nv_bfloat16 *base, uint64_t stride,
                 const chunk_rows<MOST> &rows, float (*acc)[2][N][4])
{
    const int lane = threadIdx.x & 31;
    uint4 b[N];

    from.begin(0, 1);
#pragma unroll 1
    for (uint32_t k = 0; k < from.k_tiles; k++) {
#pragma unroll
        for (int n = 0; n < N; n++)
            b[n] = load_vector(base + rows.row[8 * n + (lane >> 2)] * stride + 32 * k +
                               8 * (lane & 3));
        multiply_pair_any<N>(load_pair(from.pair(k), lane), b, acc);
    }
}

/* The warp's sums of gate and up to shared memory. */
template <int N>
DI void put_sums(float *gate, float *up, const float (*acc)[2][N][4])
{
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = (8 * n + 2 * t + (i & 1)) * SUMS_PITCH + g + 8 * acc_j(m, i);
                gate[at] = acc[0][m][n][i];
                up[at] = acc[1][m][n][i];
            }
}

template <bool DOWN, int N, int STAGES, int MOST>
DI void compute(const call &c, const chunk &ch, uint32_t unit, const chunk_rows<MOST> &rows,
                uint8_t *shared)
{
    const uint32_t all = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint32_t mine = unit * WARPS + (threadIdx.x >> 5); /* slice, or 64 rows */
    const uint32_t there = mine < all ? mine : all - 1;      /* another's again, for company */
    const uint32_t *slice_at = c.slice_at + static_cast<uint64_t>(ch.expert) * c.slices;
    const uint8_t *slice = c.weights + static_cast<uint64_t>(slice_at[DOWN ? 0 : there]) * 64;
    const __nv_bfloat16 *base = DOWN ? c.h : c.x;
    const uint64_t stride = DOWN ? 32 * c.slices : c.x_stride;
    float acc[2][2][N][4] = {};
    source<DOWN> from;
    b_rows<N> copied;

    from.base = DOWN ? c.weights + c.down_offset + there * NUMOE_PAIR_BYTES : slice;
    from.slice_at = slice_at;
    from.k_tiles = DOWN ? c.slices : c.hidden_tiles;
    const uint32_t piece = threadIdx.x & 7;
    copied.open(base, rows, stride,
                shared_address(shared) + numoe_stage_place(threadIdx.x >> 3, piece >> 2, piece & 3,
                                                           STAGE_TILES));
    const uint32_t scales = walk<DOWN, N, STAGES>(c, from, copied, shared, acc);
    if (__syncthreads_or(met_large(scales))) {
        memset(acc, 0, sizeof acc);
        walk_any<DOWN, N>(c, from, base, stride, rows, acc);
    }
    if (mine >= all)
        return;
    if constexpr (DOWN) {
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                put_parts<N>(c, ch, 2 * mine + p, 16 * m, rows, acc[p][m]);
    } else {
        float *const gate =
            reinterpret_cast<float *>(shared) + (threadIdx.x >> 5) * (2 * 8 * N * SUMS_PITCH);
        put_sums<N>(gate, gate + 8 * N * SUMS_PITCH, acc);
        __syncwarp();
        put_h<false>(c, slice, mine, ch.count, rows.pair, gate, gate + 8 * N * SUMS_PITCH,
                     threadIdx.x & 31, 32);
    }
}

/* As wide as the chunk's tokens need: M n tiles, or more. */
template <bool DOWN, int N, int STAGES, int M>
DI void compute_as(const call &c, const chunk &ch, uint32_t unit, const chunk_rows<N> &rows,
                   uint8_t *shared)
{
    if (M >= N || ch.count <= 8 * M)
        compute<DOWN, M, STAGES>(c, ch, unit, rows, shared);
    else
        compute_as<DOWN, N, STAGES, M + 1 <= N ? M + 1 : N>(c, ch, unit, rows, shared);
}

/* Grid: chunk_bound x units, units of one chunk one after another, so that chunks of one expert
 * meet its weights in L2; unit: WARPS slices (gate_up) or 64 WARPS rows (down). */
template <bool DOWN, int N, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) many_tokens(call c)
{
    extern __shared__ __align__(128) uint8_t many_shared[];
    __shared__ chunk_rows<N> rows;
    const uint32_t all = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint32_t units = (all + WARPS - 1) / WARPS;
    const uint32_t index = blockIdx.x / units, unit = blockIdx.x % units;

    if (!DOWN)
        wait_for_previous();
    let_next_start();
    if (index >= static_cast<uint32_t>(*c.chunk_count))
        return;
    const chunk ch = c.chunks[index];
    rows.open(c, ch, DOWN);
    __syncthreads();
    compute_as<DOWN, N, STAGES, N / 2>(c, ch, unit, rows, many_shared);
}

/* Stages of 64 k, and blocks an SM, which bound the registers: by n tiles. */
template <int N>
struct tuned {
    enum { STAGES = N <= 4 ? 5 : 4, BLOCKS = N <= 4 ? 3 : 2 };
};

/* Stages, or sums of gate and up. */
template <int N>
constexpr int shared_bytes()
{
    return tuned<N>::STAGES * stage_layout<N>::BYTES > WARPS * 2 * 8 * N * SUMS_PITCH * 4
               ? tuned<N>::STAGES * stage_layout<N>::BYTES
               : WARPS * 2 * 8 * N * SUMS_PITCH * 4;
}

template <bool DOWN, int N>
cudaError_t launch_form(const call &c, const launching &how)
{
    const uint64_t all = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;

    return launch(many_tokens<DOWN, N, tuned<N>::STAGES, tuned<N>::BLOCKS>,
                  (all + WARPS - 1) / WARPS * c.chunk_bound, THREADS, shared_bytes<N>(),
                  how.overlap, c, how.stream);
}

template <bool DOWN>
cudaError_t launch_half(const call &c, const launching &how)
{
    return c.chunk_tokens == 32 ? launch_form<DOWN, 4>(c, how) : launch_form<DOWN, 8>(c, how);
}

template <bool DOWN, int N>
void describe_form(const char *name, numoe_cuda_kernel_info *info)
{
    describe(many_tokens<DOWN, N, tuned<N>::STAGES, tuned<N>::BLOCKS>, name, THREADS,
             shared_bytes<N>(), info);
}

} /* namespace */

cudaError_t launch_many(const call &c, bool down, const launching &how)
{
    return down ? launch_half<true>(c, how) : launch_half<false>(c, how);
}

size_t describe_many(numoe_cuda_kernel_info *info)
{
    describe_form<false, 4>("gate_up 32", info++);
    describe_form<true, 4>("down 32", info++);
    describe_form<false, 8>("gate_up 64", info++);
    describe_form<true, 8>("down 64", info++);
    return MANY_KERNELS;
}
