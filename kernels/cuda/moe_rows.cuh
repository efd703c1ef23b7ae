/*
 * moe_rows.cuh - the forms for many tokens: where weights and rows come from and results go.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_MOE_ROWS_CUH
#define NUMOE_MOE_ROWS_CUH

#include "moe_tile.cuh"
#include "stage_place.h"

/* Where the pair tile of k tile k lies. gate_up: consecutive in a slice; down: one in each slice.
 * They are asked for in order, each `every`-th; the place of the next is on its way while this one
 * is used. */
template <bool DOWN>
struct source {
    const uint8_t *base;      /* DOWN: weights + offset inside a slice; else the slice */
    const uint32_t *slice_at; /* DOWN: of the expert */
    uint32_t k_tiles, every, place;

    DI uint32_t last(uint32_t k) const
    {
        return k < k_tiles ? k : k_tiles - 1;
    }

    DI void begin(uint32_t first, uint32_t step)
    {
        every = step;
        if (DOWN)
            place = load_word(slice_at + last(first));
    }

    /* behind the last: the last again */
    DI const uint8_t *pair(uint32_t k)
    {
        if (!DOWN)
            return place_of<NUMOE_PAIR_BYTES>(base, last(k));
        const uint8_t *here = place_of<64>(base, place);
        place = load_word(place_of<4>(reinterpret_cast<const uint8_t *>(slice_at), last(k + every)));
        return here;
    }
};

/* Pair tiles to shared memory, by all lanes of a warp: where a lane's pieces of one go. */
struct pair_copier {
    uint32_t codes, scales, lane;

    DI void open(uint32_t to)
    {
        lane = threadIdx.x & 31;
        codes = to + numoe_code_place(lane & 7, lane >> 3);
        scales = to + 1024 + 16 * lane;
        keep(lane);
        keep(codes);
        keep(scales);
    }

    /* pair: with the lane's 16 bytes */
    DI void copy(uint32_t off, const uint8_t *pair) const
    {
        copy_async(codes + off, pair, 16);
        copy_async(codes + off + 512, pair + 512, 16);
        if (lane < 4)
            copy_async(scales + off, pair + 1024, 16);
    }
};

/* Of the tokens of a block, those that one thread copies: rows of B begin at 16 off[] bytes. PLACE
 * says where in a stage of 64 k the thread's piece of a row is; rows it copies are ROWS apart, and
 * STEP bytes in shared memory. */
template <int N, int ROWS, int STEP>
struct copied_rows {
    enum { COPIES = (8 * N + ROWS - 1) / ROWS, STAGE_TILES = 2 };
    const uint8_t *base; /* with the thread's piece of 16 bytes */
    uint32_t off[COPIES], to, first, tile;

    /* to: where the first row's piece goes */
    template <class CHUNK_ROWS>
    DI void open(const __nv_bfloat16 *b, const CHUNK_ROWS &rows, uint64_t stride, uint32_t place)
    {
        const uint32_t piece = threadIdx.x & 7;

        first = threadIdx.x >> 3;
        tile = piece >> 2;
        to = place;
        base = reinterpret_cast<const uint8_t *>(b) + 16 * piece;
        keep(first);
        keep(tile);
        keep(to);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            off[i] = static_cast<uint32_t>(rows.row[(first + ROWS * i) % (8 * N)] * (stride / 8));
            keep(off[i]);
        }
    }

    /* Stage `stage` of 64 k to `at` bytes behind; zeros behind the last tile. */
    DI void copy(uint32_t at, uint32_t stage, uint32_t k_tiles) const
    {
        const int bytes = stage * STAGE_TILES + tile < k_tiles ? 16 : 0;
        const uint8_t *const here = place_of<64 * STAGE_TILES>(base, stage);

#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i * ROWS + ROWS <= 8 * N || first + i * ROWS < 8 * N)
                copy_async(to + at + i * STEP, place_of<16>(here, off[i]), bytes);
    }
};

/* Of each token of a chunk: its row of x or h, its entry and its routing weight. Past the last
 * token: some row that is there, for columns that nobody looks at. */
template <int N>
struct chunk_rows {
    int row[8 * N], pair[8 * N];
    float routing[8 * N];

    DI void open(const call &c, const chunk &ch, bool down)
    {
        for (int i = threadIdx.x; i < 8 * N; i += blockDim.x) {
            pair[i] = c.sorted[ch.first + (i < ch.count ? i : 0)];
            row[i] = down ? pair[i] : static_cast<int>(pair[i] / c.top_k);
            routing[i] = down ? c.routing[pair[i]] : 0.0f;
        }
    }
};

/* Floats between tokens where sums of gate and up lie in shared memory: [token][place]. */
enum { SUMS_PITCH = 33 };

/* h of a slice from its sums, eight places a thread; thread is one of `threads`. Places are rows,
 * or what wgmma wants. */
template <bool WGMMA>
DI void put_h(const call &c, const uint8_t *slice, uint32_t s, int count, const int *pair,
              const float *gate, const float *up, int thread, int threads)
{
    const float *const bias = reinterpret_cast<const float *>(slice + c.bias_offset);

#pragma unroll 1
    for (int id = thread; id < 4 * count; id += threads) {
        const int token = id >> 2, first = 8 * (id & 3);
        __nv_bfloat162 h[4];
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int at = token * SUMS_PITCH + first + e;
            const int l = row_lane(WGMMA ? numoe_wgmma_row(first + e) : first + e);
            v[e] = activate(c.activation, gate[at] + (c.bias_offset ? bias[l] : 0.0f),
                            up[at] + (c.bias_offset ? bias[32 + l] : 0.0f));
        }
        if (rounds_mxfp8(c.arithmetic)) { /* four threads have a group */
            const uint32_t mates = 0xFu << (threadIdx.x & 28);
            uint32_t most = 0;
#pragma unroll
            for (int e = 0; e < 8; e++)
                most = umax(most, __float_as_uint(v[e]) & 0x7FFFFFFFu);
            most = umax(most, __shfl_xor_sync(mates, most, 1));
            most = umax(most, __shfl_xor_sync(mates, most, 2));
#pragma unroll
            for (int e = 0; e < 8; e++)
                v[e] = round_mxfp8(v[e], most, c.arithmetic);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            h[e] = __floats2bfloat162_rn(v[2 * e], v[2 * e + 1]);
        *reinterpret_cast<uint4 *>(c.h + static_cast<uint64_t>(pair[token]) * (32 * c.slices) +
                                   32 * s + first) = *reinterpret_cast<const uint4 *>(h);
    }
}

/* b2 of a row of a tile of y. */
DI float down_bias(const call &c, int expert, uint32_t tile, int row)
{
    return c.down_bias ? c.down_bias[(static_cast<uint64_t>(expert) * c.hidden_tiles + tile) * 32 +
                                     row_lane(row)]
                       : 0.0f;
}

/* The outputs of a tile that a lane has of an m tile: rows first + g and first + g + 8. */
template <int N, int MOST>
DI void put_parts(const call &c, const chunk &ch, uint32_t tile, int first,
                  const chunk_rows<MOST> &rows, const float (*acc)[4])
{
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

    if (tile >= c.hidden_tiles)
        return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = first + g + 8 * (i >> 1);
        const float bias = down_bias(c, ch.expert, tile, row);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int token = 8 * n + 2 * t + (i & 1);
            if (token < ch.count)
                c.part[static_cast<uint64_t>(rows.pair[token]) * (32 * c.hidden_tiles) + 32 * tile +
                       row] = (acc[n][i] + bias) * rows.routing[token];
        }
    }
}

#endif
