/*
 * Expert FFN for many tokens of an expert on sm_90: wgmma, A (weights) from registers.
 *
 *   gate_up   h[pair] = act(W1 x + b1, W3 x + b3)     two warps: a slice
 *   down      part[pair] = routing * (W2 h + b2)       two warps: 64 rows
 *
 * A block is one warpgroup with 128 rows of weights, two pair tiles wide. A wgmma takes 16 rows of
 * each warp: warp 2i + u takes rows 16u .. 16u + 15 of tile A of pair i in one product and those of
 * tile B in another, so gate and up of an element of h meet in a lane. The codes of a lane are
 * words 2u and 2u + 1 of what moe_tile.cuh draws.
 *
 * wgmma takes the k of B in their order in memory, where the lane's word has an octet of its own:
 * x and h are laid out with each 32 k in the order of numoe_wgmma_place (stage_place.h). B comes to
 * shared memory by asynchronous copies, STAGES stages of 64 k, and the weights with it. Codes of
 * the next tile are decoded while the products of this one run; two blocks an SM cover each other's
 * ends.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "moe_kernels.h"
#include "moe_rows.cuh"
#include "wgmma.cuh"

namespace
{

enum { WARPS = 4, THREADS = 32 * WARPS, PAIRS = WARPS / 2 };
enum { STAGE_TILES = 2, STAGES = 5, AHEAD = STAGES - 2 };

/* Blocks an SM, which bound the registers: by n tiles. */
template <int N>
constexpr int BLOCKS = N <= 4 ? 4 : N <= 8 ? 3 : 2;

/* A lane's share of half a pair tile. */
struct half_pair {
    uint2 a, b;
    uint32_t scale_a, scale_b;
};

DI uint2 load_half(const void *p)
{
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

DI half_pair load_half_pair(const uint8_t *pair)
{
    const int lane = threadIdx.x & 31, upper = threadIdx.x >> 5 & 1;
    half_pair p;
    p.a = load_half(pair + lane_codes(lane) + 8 * upper);
    p.b = load_half(pair + lane_codes(lane) + 8 * upper + 512);
    p.scale_a = load_word(pair + lane_scales(lane));
    p.scale_b = load_word(pair + lane_scales(lane) + 32);
    return p;
}

/* The same from where pair_copier has put it, with the factors of the lane's rows. */
struct staged_half {
    uint2 a, b;
    uint32_t factor[2][2], scales;
};

DI staged_half staged_half_pair(uint32_t codes, uint32_t scales)
{
    staged_half p;
    p.a = load_shared_pair(codes);
    p.b = load_shared_pair(codes + 512);
    p.scales = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t e = load_shared_byte(scales + 32 * (i >> 1) + (i & 1));
        p.factor[i >> 1][i & 1] = operand_factor(e);
        p.scales |= e;
    }
    return p;
}

/* Shared memory: B of all stages, then their weights, [stage][pair][tile]. */
template <int N>
struct stage_layout {
    enum {
        B = N * 1024,
        WEIGHTS = STAGES * B,
        PAIR = STAGE_TILES * NUMOE_PAIR_BYTES,
        STAGE = PAIRS * PAIR
    };
};

/* B in the order of wgmma_descriptor. */
template <int N>
using b_rows = copied_rows<N, THREADS / 8, 128 * (THREADS / 8)>;

/* Returns the OR of all scales. Stages are whole: B is zero behind the last tile, so that no branch
 * divides the products. */
template <bool DOWN, int N>
DI uint32_t walk(const call &c, source<DOWN> from, const b_rows<N> &rows, uint8_t *shared,
                 float (*acc)[N][4])
{
    using layout = stage_layout<N>;
    const uint32_t k_tiles = from.k_tiles, stages = (k_tiles + STAGE_TILES - 1) / STAGE_TILES;
    const uint32_t at = shared_address(shared), warp = threadIdx.x >> 5;
    const uint32_t lane = threadIdx.x & 31, upper = warp & 1, mine = warp >> 1;
    const uint32_t weights = at + layout::WEIGHTS + mine * layout::PAIR;
    uint32_t codes_at = weights + numoe_code_place(lane >> 2, lane & 3) + 8 * upper;
    uint32_t scales_at = weights + lane_scales(lane) + 2 * upper;
    uint32_t first = upper; /* of the two warps of a pair, each copies one of the tiles of a stage */
    uint32_t a[STAGE_TILES][2][2][4]; /* [buffer][tile A, B][step] */
    uint32_t buffer = 0, ahead = AHEAD, scales = 0;
    pair_copier weights_to;
    const auto copy_weights = [&](uint32_t to, uint32_t stage) {
        weights_to.copy(to * layout::STAGE, from.pair(stage * STAGE_TILES + first));
    };

    keep(codes_at);
    keep(scales_at);
    keep(first);
    weights_to.open(weights + upper * NUMOE_PAIR_BYTES);
    from.base += 16 * lane;
    from.begin(warp & 1, STAGE_TILES);
#pragma unroll
    for (int s = 0; s < AHEAD; s++)
        copy_weights(s, s);
    wait_for_previous(); /* for h */
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
        rows.copy(s * layout::B, s, k_tiles);
        copy_commit();
    }
#pragma unroll 1
    for (uint32_t s = 0; s < stages; s++) {
        copy_wait<AHEAD - 1>();
        wgmma_shared_fence();
        __syncthreads();
        rows.copy(ahead * layout::B, s + AHEAD, k_tiles);
        copy_weights(ahead, s + AHEAD);
        copy_commit();
#pragma unroll
        for (int tile = 0; tile < STAGE_TILES; tile++) {
            const uint32_t off = buffer * layout::STAGE + tile * NUMOE_PAIR_BYTES;
            const staged_half pair = staged_half_pair(codes_at + off, scales_at + off);

            scales |= pair.scales;
            wgmma_wait<1>(); /* the products that read this buffer of a are done */
            operand<false>(pair.a.x, pair.a.y, pair.factor[0], nullptr, a[tile][0]);
            operand<false>(pair.b.x, pair.b.y, pair.factor[1], nullptr, a[tile][1]);
            const uint64_t b = wgmma_descriptor(at + buffer * layout::B) + 4 * tile;
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int p = 0; p < 2; p++)
                    wgmma<N>(acc[p], a[tile][p][step], b + 2 * step);
            wgmma_commit();
        }
        buffer = buffer + 1 == STAGES ? 0 : buffer + 1;
        ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    }
    wgmma_wait<0>();
    copy_wait<0>();
    return scales;
}

/* The same for any scales, by mma.sync, which has the same accumulators; B straight from its rows.
 */
template <bool DOWN, int N, int MOST>
DI void walk_any(const call &c, source<DOWN> from, const __nv_bfloat16 *base, uint64_t stride,
                 const chunk_rows<MOST> &rows, float (*acc)[N][4])
{
    const int lane = threadIdx.x & 31, shift = 16 * (threadIdx.x >> 5 & 1);

    from.begin(0, 1);
#pragma unroll 1
    for (uint32_t k = 0; k < from.k_tiles; k++) {
        const half_pair p = load_half_pair(from.pair(k));
#pragma unroll
        for (int n = 0; n < N; n++) {
            /* the octet of the lane, from its places */
            const __nv_bfloat16 *at =
                base + rows.row[8 * n + (lane >> 2)] * stride + 32 * k + 2 * (lane & 3);
            const uint4 b = make_uint4(load_word(at), load_word(at + 8), load_word(at + 16),
                                       load_word(at + 24));
            multiply_any<1>(p.a.x, p.a.y, p.scale_a >> shift, 0, &b, &acc[0][n]);
            multiply_any<1>(p.b.x, p.b.y, p.scale_b >> shift, 0, &b, &acc[1][n]);
        }
    }
}

/* The warp's sums of gate and up to shared memory, [gate, up][token][place]. */
template <int N>
DI void put_sums(float *gate, float *up, const float (*acc)[N][4])
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int place = numoe_wgmma_place(g + 8 * (i >> 1) + 16 * (warp & 1));
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int at = (8 * n + 2 * t + (i & 1)) * SUMS_PITCH + place;
            gate[at] = acc[0][n][i];
            up[at] = acc[1][n][i];
        }
    }
}

template <bool DOWN, int N, int MOST>
DI void compute(const call &c, const chunk &ch, uint32_t unit, const chunk_rows<MOST> &rows,
                uint8_t *shared)
{
    const uint32_t all = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint32_t mine = unit * PAIRS + (threadIdx.x >> 6); /* slice, or 64 rows */
    const uint32_t there = mine < all ? mine : all - 1;      /* another's again, for company */
    const uint32_t *slice_at = c.slice_at + static_cast<uint64_t>(ch.expert) * c.slices;
    const uint8_t *slice = c.weights + static_cast<uint64_t>(slice_at[DOWN ? 0 : there]) * 64;
    const __nv_bfloat16 *base = DOWN ? c.h : c.x;
    const uint64_t stride = DOWN ? 32 * c.slices : c.x_stride;
    float acc[2][N][4] = {};
    source<DOWN> from;
    b_rows<N> copied;

    from.base = DOWN ? c.weights + c.down_offset + there * NUMOE_PAIR_BYTES : slice;
    from.slice_at = slice_at;
    from.k_tiles = DOWN ? c.slices : c.hidden_tiles;
    const uint32_t row = threadIdx.x >> 3, piece = threadIdx.x & 7;
    copied.open(base, rows, stride,
                shared_address(shared) + 128 * row + 16 * (piece ^ (row & 7)));
    const uint32_t scales = walk<DOWN, N>(c, from, copied, shared, acc);
    if (__syncthreads_or(met_large(scales))) {
        memset(acc, 0, sizeof acc);
        walk_any<DOWN, N>(c, from, base, stride, rows, acc);
    }
    if constexpr (DOWN) {
        if (mine < all)
#pragma unroll
            for (int p = 0; p < 2; p++)
                put_parts<N>(c, ch, 2 * mine + p, 16 * (threadIdx.x >> 5 & 1), rows, acc[p]);
    } else {
        float *const gate =
            reinterpret_cast<float *>(shared) + (threadIdx.x >> 6) * (2 * 8 * N * SUMS_PITCH);
        put_sums<N>(gate, gate + 8 * N * SUMS_PITCH, acc);
        __syncthreads();
        if (mine < all)
            put_h<true>(c, slice, mine, ch.count, rows.pair, gate, gate + 8 * N * SUMS_PITCH,
                        threadIdx.x & 63, 64);
    }
}

/* As wide as the chunk's tokens need: M n tiles, or more. */
template <bool DOWN, int N, int M>
DI void compute_as(const call &c, const chunk &ch, uint32_t unit, const chunk_rows<N> &rows,
                   uint8_t *shared)
{
    if (M == N || ch.count <= 8 * M)
        compute<DOWN, M, N>(c, ch, unit, rows, shared);
    else
        compute_as<DOWN, N, M + 2 <= N ? M + 2 : N>(c, ch, unit, rows, shared);
}

/* Grid: chunk_bound x units, units of one chunk one after another, so that chunks of one expert
 * meet its weights in L2; unit: PAIRS slices (gate_up) or 64 PAIRS rows (down). */
template <bool DOWN, int N>
__global__ void __launch_bounds__(THREADS, BLOCKS<N>) many_tokens_wgmma(call c)
{
    extern __shared__ uint8_t wgmma_shared[];
    __shared__ chunk_rows<N> rows;
    uint8_t *const shared =
        wgmma_shared + (1024 - (__cvta_generic_to_shared(wgmma_shared) & 1023)) % 1024;
    const uint32_t all = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;
    const uint32_t units = (all + PAIRS - 1) / PAIRS;
    const uint32_t index = blockIdx.x / units, unit = blockIdx.x % units;

    if (!DOWN)
        wait_for_previous();
    let_next_start();
    if (index >= static_cast<uint32_t>(*c.chunk_count))
        return;
    const chunk ch = c.chunks[index];
    rows.open(c, ch, DOWN);
    __syncthreads();
    compute_as<DOWN, N, 2>(c, ch, unit, rows, shared);
}

/* Stages, or sums of gate and up. */
template <int N>
constexpr int shared_bytes()
{
    return (stage_layout<N>::WEIGHTS + STAGES * stage_layout<N>::STAGE >
                    PAIRS * 2 * 8 * N * SUMS_PITCH * 4
                ? stage_layout<N>::WEIGHTS + STAGES * stage_layout<N>::STAGE
                : PAIRS * 2 * 8 * N * SUMS_PITCH * 4) +
           1024;
}

template <bool DOWN, int N>
cudaError_t launch_form(const call &c, const launching &how)
{
    const uint64_t all = DOWN ? (c.hidden_tiles + 1) / 2 : c.slices;

    return launch(many_tokens_wgmma<DOWN, N>, (all + PAIRS - 1) / PAIRS * c.chunk_bound, THREADS,
                  shared_bytes<N>(), how.overlap, c, how.stream);
}

template <int N>
cudaError_t launch_half(const call &c, bool down, const launching &how)
{
    return down ? launch_form<true, N>(c, how) : launch_form<false, N>(c, how);
}

template <bool DOWN, int N>
void describe_form(const char *name, numoe_cuda_kernel_info *info)
{
    describe(many_tokens_wgmma<DOWN, N>, name, THREADS, shared_bytes<N>(), info);
}

} /* namespace */

cudaError_t launch_wgmma(const call &c, bool down, const launching &how)
{
    return c.chunk_tokens == 32   ? launch_half<4>(c, down, how)
           : c.chunk_tokens == 64 ? launch_half<8>(c, down, how)
                                  : launch_half<16>(c, down, how);
}

size_t describe_wgmma(numoe_cuda_kernel_info *info)
{
    describe_form<false, 4>("gate_up 32, wgmma", info++);
    describe_form<true, 4>("down 32, wgmma", info++);
    describe_form<false, 8>("gate_up 64, wgmma", info++);
    describe_form<true, 8>("down 64, wgmma", info++);
    describe_form<false, 16>("gate_up 128, wgmma", info++);
    describe_form<true, 16>("down 128, wgmma", info++);
    return WGMMA_KERNELS;
}
