/*
 * Expert FFN for many tokens of an expert, MXFP4 weights, bf16 activations, mma.sync m16n8k16.
 *
 *   gate_up   h[pair] = act(W1 x + b1, W3 x + b3)     one warp: a slice, 32 rows of each
 *   down      part[pair] = routing * (W2 h + b2)       one warp: 64 rows
 *
 * Each warp of a block has rows of its own and decodes their codes once for all tokens of the
 * chunk. Weights and B (as fragments) go through shared memory by asynchronous copies, STAGES
 * stages of 64 k: loads to registers would wait for each other, as pair_queue.cuh says. An n tile
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

/* Of the tokens of a block, those that one thread copies: rows of B begin at 16 off[] bytes. */
template <int N>
struct copied_rows {
    enum { COPIES = (N + 1) / 2, ROWS = THREADS / 8 };
    const uint8_t *base; /* with the thread's piece of 16 bytes */
    uint32_t off[COPIES], to;

    template <class CHUNK_ROWS>
    DI void open(const __nv_bfloat16 *b, const CHUNK_ROWS &rows, uint64_t stride)
    {
        const uint32_t piece = threadIdx.x & 7, first = threadIdx.x >> 3;

        base = reinterpret_cast<const uint8_t *>(b) + 16 * piece;
        to = numoe_stage_place(first, piece >> 2, piece & 3, STAGE_TILES);
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            off[i] = static_cast<uint32_t>(rows.row[(first + ROWS * i) % (8 * N)] * (stride / 8));
    }

    /* 64 k to a stage; zeros behind the last tile */
    DI void copy(uint32_t shared, uint32_t stage, uint32_t k_tiles) const
    {
        const int bytes = stage * STAGE_TILES + (threadIdx.x >> 2 & 1) < k_tiles ? 16 : 0;

#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i * ROWS + ROWS <= 8 * N || (threadIdx.x >> 3) + i * ROWS < 8 * N)
                copy_async(shared + to + i * (ROWS / 8 * STAGE_TILES * 512),
                           base + static_cast<uint64_t>(off[i]) * 16 + stage * (STAGE_TILES * 64),
                           bytes);
    }
};

/* A lane's share of a pair tile, and the factors of its rows. */
struct staged_tile {
    uint4 a, b;
    uint32_t factor[2][4];
    uint32_t scales; /* some byte of which is large if one is */
};

DI staged_tile staged_pair(const uint8_t *from)
{
    const int lane = threadIdx.x & 31;
    const uint8_t *codes = from + numoe_code_place(lane >> 2, lane & 3);
    const uint8_t *scales = from + lane_scales(lane);
    staged_tile p;
    p.a = *reinterpret_cast<const uint4 *>(codes);
    p.b = *reinterpret_cast<const uint4 *>(codes + 512);
    p.scales = *reinterpret_cast<const uint32_t *>(scales) |
               *reinterpret_cast<const uint32_t *>(scales + 32);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        p.factor[0][j] = operand_factor(scales[j]);
        p.factor[1][j] = operand_factor(scales[32 + j]);
    }
    return p;
}

/* acc += a pair tile . B of one k tile, at `from` in shared memory for the lane. */
template <int N>
DI void multiply(const staged_tile &tile, const uint8_t *from,
                 float (*acc)[2][N][4])
{
    uint32_t a[2][2][2][4];

    operand<false>(tile.a.x, tile.a.y, tile.factor[0], nullptr, a[0][0]);
    operand<false>(tile.a.z, tile.a.w, tile.factor[0] + 2, nullptr, a[0][1]);
    operand<false>(tile.b.x, tile.b.y, tile.factor[1], nullptr, a[1][0]);
    operand<false>(tile.b.z, tile.b.w, tile.factor[1] + 2, nullptr, a[1][1]);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint4 b = *reinterpret_cast<const uint4 *>(from + n * (STAGE_TILES * 512));
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    mma_16816(acc[p][m][n], a[p][m][step][0], a[p][m][step][1], a[p][m][step][2],
                              a[p][m][step][3], step ? b.z : b.x, step ? b.w : b.y);
    }
}

/* All warps of the block together. Returns the OR of all scales. Stages are whole: B is zero behind
 * the last tile, so that no branch divides the products. */
template <bool DOWN, int N, int STAGES>
DI uint32_t walk(const call &c, source<DOWN> from, const copied_rows<N> &rows,
                 const uint8_t *shared, float (*acc)[2][N][4])
{
    enum { BYTES = stage_layout<N>::BYTES };
    const int lane = threadIdx.x & 31;
    const uint32_t warp_at = stage_layout<N>::B + (threadIdx.x >> 5) * stage_layout<N>::WARP;
    const uint32_t k_tiles = from.k_tiles, stages = (k_tiles + STAGE_TILES - 1) / STAGE_TILES;
    const uint32_t at = shared_address(shared);
    uint32_t scales = 0, buffer = 0, ahead = STAGES - 1;
    const auto copy = [&](uint32_t to, uint32_t stage) {
#pragma unroll
        for (int tile = 0; tile < STAGE_TILES; tile++)
            stage_pair(at + to * BYTES + warp_at + tile * NUMOE_PAIR_BYTES,
                       from.pair(stage * STAGE_TILES + tile));
    };

    from.begin(0, 1);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        copy(s, s);
    wait_for_previous(); /* for h */
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        rows.copy(at + s * BYTES, s, k_tiles);
        copy_commit();
    }
#pragma unroll 1
    for (uint32_t s = 0; s < stages; s++) {
        const uint8_t *stage = shared + buffer * BYTES;

        copy_wait<STAGES - 2>();
        __syncthreads();
        rows.copy(at + ahead * BYTES, s + STAGES - 1, k_tiles);
        copy(ahead, s + STAGES - 1);
        copy_commit();
#pragma unroll
        for (int tile = 0; tile < STAGE_TILES; tile++) {
            const staged_tile pair = staged_pair(stage + warp_at + tile * NUMOE_PAIR_BYTES);

            scales |= pair.scales;
            multiply<N>(pair,
                        stage + numoe_stage_place(lane >> 2, tile, lane & 3, STAGE_TILES), acc);
        }
        ahead = buffer;
        buffer = buffer + 1 == STAGES ? 0 : buffer + 1;
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
    copied_rows<N> copied;

    from.base = DOWN ? c.weights + c.down_offset + there * NUMOE_PAIR_BYTES : slice;
    from.slice_at = slice_at;
    from.k_tiles = DOWN ? c.slices : c.hidden_tiles;
    copied.open(base, rows, stride);
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
    describe_form<false, 8>("gate_up 64", info++);
    describe_form<true, 4>("down 32", info++);
    describe_form<true, 8>("down 64", info++);
    return MANY_KERNELS;
}
