/*
 * moe_tile.cuh - from the bytes of a tile to the A operand of mma.sync.
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
 * mantissa bit of a bf16: e2m1 * 2^-126 (a subnormal for 0.5), exactly.
 *
 * The scale byte e of a row's group of 32 is applied in one of two ways. On sums (few tokens): the
 * two products of a group go to an accumulator of their own, which is multiplied by 2^(e - 127 +
 * 62); B is kept times 2^64 for that, so that nothing is lost below fp32's range. On operands (many
 * tokens): a bf16 product with 2^(e - 1). Both hold for bytes up to 128. Larger ones are only noted
 * on the way, so that no branch divides the loop; whoever met one computes his rows again, slowly.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_MOE_TILE_CUH
#define NUMOE_MOE_TILE_CUH

#include "moe_call.cuh"

/* A lane's share of a pair tile. */
struct pair_tile {
    uint4 a, b;
    uint32_t scale_a, scale_b;
};

/* Where a lane's codes and scales begin in a pair tile. */
DI uint32_t lane_codes(int lane)
{
    return 128 * (lane & 3) + 16 * (lane >> 2);
}

DI uint32_t lane_scales(int lane)
{
    return 1024 + 4 * (lane >> 2);
}

/* A code word to four bf16x2 of e2m1 * 2^-126. One product moves a code's two parts, which then
 * lie between those of no other: the pipe of shifts and logic, which is what decoding is short of,
 * has 9 operations a word and the other 3. */
DI void decode_word(uint32_t q, uint32_t *pair)
{
    const uint32_t high = q >> 6;
    pair[0] = (q & 0x000F000Fu) * (1u << 6 | 1u << 12) & 0x81C081C0u;
    pair[1] = (q & 0x00F000F0u) * (1u << 2 | 1u << 8) & 0x81C081C0u;
    pair[2] = (high & 0x003C003Cu) * (1u << 4 | 1u << 10) & 0x81C081C0u;
    pair[3] = (high & 0x01C001C0u) | (q & 0x80008000u);
}

/* Of the OR of scale words: whether there may have been a byte of 128 or more. */
DI bool met_large(uint32_t scales)
{
    return (scales & 0x80808080u) != 0;
}

DI pair_tile load_pair(const uint8_t *pair, int lane)
{
    pair_tile p;
    p.a = load_stream(pair + lane_codes(lane));
    p.b = load_stream(pair + lane_codes(lane) + 512);
    p.scale_a = load_word(pair + lane_scales(lane));
    p.scale_b = load_word(pair + lane_scales(lane) + 32);
    return p;
}

/* ---- scales on sums ---------------------------------------------------------------------------
 */

/* 2^(e - 65) for a byte below 128. A product and a sum in one, where shifts have a pipe that is
 * busier; two_23 is a number that the compiler does not know. */
DI float sum_factor(uint32_t e, uint32_t two_23)
{
    return __uint_as_float(e * two_23 + (62u << 23));
}

/* B, which is kept times 2^64 for this, as it was. */
DI uint4 lower_b(const uint4 &b)
{
    const uint32_t by = 0x1F801F80u;
    return make_uint4(multiply_bf16x2(b.x, by), multiply_bf16x2(b.y, by), multiply_bf16x2(b.z, by),
                      multiply_bf16x2(b.w, by));
}

/* acc[m][n] += tile . B, B raised; f: of rows g + 8 j */
template <int N>
DI void tile_sums(const uint4 &codes, const float *f, const uint4 *b, float (*acc)[N][4])
{
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t p[4][4];

#pragma unroll
    for (int j = 0; j < 4; j++)
        decode_word(word[j], p[j]);
#pragma unroll
    for (int n = 0; n < N; n++) {
        float s[2][4] = {};
#pragma unroll
        for (int m = 0; m < 2; m++)
            mma_16816(s[m], p[2 * m][0], p[2 * m + 1][0], p[2 * m][1], p[2 * m + 1][1], b[n].x,
                      b[n].y);
#pragma unroll
        for (int m = 0; m < 2; m++)
            mma_16816(s[m], p[2 * m][2], p[2 * m + 1][2], p[2 * m][3], p[2 * m + 1][3], b[n].z,
                      b[n].w);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][n][i] = fmaf(s[m][i], f[acc_j(m, i)], acc[m][n][i]);
    }
}

/* ---- scales on operands -----------------------------------------------------------------------
 */

/* 2^(e - 1) in both halves, for a byte of up to 128. */
DI uint32_t operand_factor(uint32_t e)
{
    return e * 0x00800080u + 0x3F003F00u;
}

/* The A registers a[step][4] of an m tile: words of rows g and g + 8, their factors, and further
 * ones where these do not reach. */
template <bool LARGE>
DI void operand(uint32_t word0, uint32_t word1, const uint32_t *factor, const uint32_t *rest,
                uint32_t (*a)[4])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t p[4];
        decode_word(j ? word1 : word0, p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = multiply_bf16x2(p[i], factor[j]);
            if (LARGE)
                p[i] = multiply_bf16x2(p[i], rest[j]);
            a[i >> 1][2 * (i & 1) + j] = p[i];
        }
    }
}

/* acc[n] += an m tile . B, for any scale bytes `first` and first + 1 of scales */
template <int N>
DI void multiply_any(uint32_t word0, uint32_t word1, uint32_t scales, int first, const uint4 *b,
                     float (*acc)[4])
{
    uint32_t a[2][4], factor[2], rest[2];

#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint32_t e = scales >> 8 * (first + j) & 255, low = e < 128 ? e : 128;
        factor[j] = operand_factor(low);
        rest[j] = operand_factor(e - low + 1);
    }
    operand<true>(word0, word1, factor, rest, a);
#pragma unroll
    for (int n = 0; n < N; n++) {
        mma_16816(acc[n], a[0][0], a[0][1], a[0][2], a[0][3], b[n].x, b[n].y);
        mma_16816(acc[n], a[1][0], a[1][1], a[1][2], a[1][3], b[n].z, b[n].w);
    }
}

/* acc += a pair tile . B, likewise */
template <int N>
DI void multiply_pair_any(const pair_tile &tile, const uint4 *b, float (*acc)[2][N][4])
{
    multiply_any<N>(tile.a.x, tile.a.y, tile.scale_a, 0, b, acc[0][0]);
    multiply_any<N>(tile.a.z, tile.a.w, tile.scale_a, 2, b, acc[0][1]);
    multiply_any<N>(tile.b.x, tile.b.y, tile.scale_b, 0, b, acc[1][0]);
    multiply_any<N>(tile.b.z, tile.b.w, tile.scale_b, 2, b, acc[1][1]);
}

#endif
