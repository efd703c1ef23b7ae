/*
 * moe_call.cuh - what every kernel of the expert FFN gets, and the small functions they share.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_MOE_CALL_CUH
#define NUMOE_MOE_CALL_CUH

#include <cuda_bf16.h>

#include "numoe_cuda.h"
#include "ptx.cuh"

/* Tokens of one expert that a block computes together: sorted[first .. first + count). */
struct chunk {
    int expert, first, count, unused;
};

/* x as kernels want it, from the caller's: bf16 rows of whole tiles. */
struct padding {
    const void *x;
    __nv_bfloat16 *out;  /* NULL: the caller's does */
    uint64_t stride;     /* of x */
    uint64_t cells;      /* of out */
    uint32_t hidden, width;
    float raise;         /* power of two that it is multiplied by */
    numoe_arithmetic arithmetic;
    bool is_f32, for_wgmma;
};

/* pairs are (token, slot) entries; sorted[] lists them by expert. Rows of h and part are pairs. */
struct call {
    const uint8_t *weights;
    const uint32_t *slice_at;
    const float *down_bias;
    const __nv_bfloat16 *x; /* [tokens][x_stride], hidden padded with zeros to 32 */
    const void *ids;
    const float *routing;
    void *out;
    __nv_bfloat16 *h; /* [pairs][32 slices] */
    float *part;      /* [pairs][32 hidden_tiles] */
    chunk *chunks;
    int *chunk_count;
    int *sorted;
    int *counters;  /* [experts + 1] */
    uint32_t *next_item; /* items that blocks of the few-token form have taken */
    uint32_t *h_slices;  /* [chunks]: slices of h that are there, of the few-token form */
    uint32_t *valid;     /* [tokens]: bit j: slot j is not skipped */
    int *arrived;        /* [tokens][ceil(hidden_tiles / 2)]: parts that are written */
    uint64_t x_stride, out_stride;
    uint32_t hidden, hidden_tiles, slices, down_offset, bias_offset;
    uint32_t experts, tokens, top_k, id_bytes, chunk_tokens, chunk_bound;
    uint32_t two_23; /* 2^23, which the compiler is not to know */
    numoe_activation activation;
    numoe_arithmetic arithmetic;
    float scale;
    bool add, out_bf16, out_aligned; /* out_aligned: rows begin at multiples of 4 elements */
    bool fused;                      /* the few-token form sums a token's parts itself ... */
    bool local;                      /* ... and each of its blocks sorts the entries */
    bool for_wgmma;                  /* x and h have each 32 k in its order */
    padding pad;                     /* how x is made from what the caller gave */
};

DI int pair_expert(const call &c, uint32_t pair)
{
    const long long id = c.id_bytes == 8 ? static_cast<const long long *>(c.ids)[pair]
                                         : static_cast<const int *>(c.ids)[pair];
    if (id < 0 || id >= static_cast<long long>(c.experts) ||
        c.slice_at[static_cast<uint64_t>(id) * c.slices] == NUMOE_CUDA_ABSENT)
        return -1;
    return static_cast<int>(id);
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

DI bool rounds_mxfp8(numoe_arithmetic arithmetic)
{
    return arithmetic == NUMOE_MXFP8_UP || arithmetic == NUMOE_MXFP8_OCP;
}

/* v to MXFP8, by the rule of kernels/mxfp8.h; most: the bits of the largest magnitude of its group
 * of 32, of whatever is no number if there is one. Powers of two are exact, so the value times the
 * group's scale is the product of three floats. */
DI float round_mxfp8(float v, uint32_t most, numoe_arithmetic arithmetic)
{
    const int past = arithmetic == NUMOE_MXFP8_UP && (most & 0x7FFFFFu) > 0x600000u;
    const int exponent = static_cast<int>(most >> 23) - 8 + past, byte = exponent < 0 ? 0 : exponent;
    const float step = 0x1.8p14f; /* adding it leaves multiples of 2^-9 */

    if (most >= 0x7F800000u)
        return __uint_as_float(0x7FC00000u);
    const float scaled = v * __uint_as_float(static_cast<uint32_t>(254 - byte) << 23);
    const float a = fminf(fabsf(scaled), 448.0f);
    const uint32_t bits = __float_as_uint(a); /* four significant bits, ties to even */
    const float rounded =
        a < 0x1p-6f ? __fsub_rn(__fadd_rn(a, step), step)
                    : __uint_as_float((bits + 0x7FFFFu + (bits >> 20 & 1)) & 0xFFF00000u);
    return copysignf(rounded, scaled) *
           __uint_as_float(byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u);
}

/* Accumulator i of n tile n, m tile m: row g + 8 j, token 8 n + 2 t + (i & 1); j = 2 m + i / 2. */
DI int acc_j(int m, int i)
{
    return 2 * m + (i >> 1);
}

/* numoe_row_lane() of numoe_kernels.h */
DI int row_lane(int row)
{
    return 4 * (row & 7) + (row >> 3);
}

/* Add sum to an output, or set it, in the type of the output. */
DI void put_out(const call &c, uint32_t token, uint32_t k, float sum)
{
    const uint64_t at = token * c.out_stride + k;

    sum *= c.scale;
    if (c.out_bf16) {
        __nv_bfloat16 *out = static_cast<__nv_bfloat16 *>(c.out) + at;
        *out = __float2bfloat16(c.add ? __bfloat162float(*out) + sum : sum);
    } else {
        float *out = static_cast<float *>(c.out) + at;
        *out = c.add ? *out + sum : sum;
    }
}

/* Outputs k .. k + 3, those of them that there are. */
DI void put_four(const call &c, uint32_t token, uint32_t k, const float4 &sum)
{
    const uint64_t at = token * c.out_stride + k;

    if (!c.out_bf16 && !c.add && c.out_aligned && k + 4 <= c.hidden) {
        *reinterpret_cast<float4 *>(static_cast<float *>(c.out) + at) =
            make_float4(sum.x * c.scale, sum.y * c.scale, sum.z * c.scale, sum.w * c.scale);
        return;
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (k + i < c.hidden)
            put_out(c, token, k + i, v[i]);
}

#endif
