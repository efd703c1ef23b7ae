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
            return base + static_cast<uint64_t>(last(k)) * NUMOE_PAIR_BYTES;
        const uint8_t *here = base + static_cast<uint64_t>(place) * 64;
        place = load_word(slice_at + last(k + every));
        return here;
    }
};

/* A pair tile to shared memory, by all lanes of a warp. */
DI void stage_pair(uint32_t to, const uint8_t *pair)
{
    const int lane = threadIdx.x & 31;
    const uint32_t codes = to + numoe_code_place(lane & 7, lane >> 3);

    copy_async(codes, pair + 16 * lane, 16);
    copy_async(codes + 512, pair + 512 + 16 * lane, 16);
    if (lane < 4)
        copy_async(to + 1024 + 16 * lane, pair + 1024 + 16 * lane, 16);
}

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
