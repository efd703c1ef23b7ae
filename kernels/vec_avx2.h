/*
 * vec_avx2.h - the vector vocabulary of the forms for 256-bit vectors (AVX2, FMA).
 *
 * As vec_avx512.h, with 8 lanes: NV = 4 vectors hold the 32 rows of a tile in lane order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_VEC_AVX2_H
#define NUMOE_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "unroll.h"

#define INL static inline __attribute__((always_inline))

typedef __m256i vi;
typedef __m256 vf;
enum { VB = 32, VL = 8, NV = 4 };

INL vi vi_load(const void *p)
{
    return _mm256_loadu_si256(p);
}

INL void vi_store(void *p, vi v)
{
    _mm256_store_si256(p, v);
}

INL vi vi_word(const void *p)
{
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

INL vi vi_zero(void)
{
    return _mm256_setzero_si256();
}

INL vf vf_set(float v)
{
    return _mm256_set1_ps(v);
}

INL vf vf_load(const void *p)
{
    return _mm256_loadu_ps(p);
}

INL void vf_store(void *p, vf v)
{
    _mm256_store_ps(p, v);
}

INL vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INL vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

INL vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

INL vf vf_abs(vf v)
{
    return _mm256_andnot_ps(vf_set(-0.0f), v);
}

INL vf vf_of_vi(vi v)
{
    return _mm256_cvtepi32_ps(v);
}

INL vf vf_round(vf v)
{
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* p 2^n for integral n in -252..254: in two steps, so that neither power leaves the format. */
INL vf vf_times_power(vf p, vf n)
{
    const vi whole = _mm256_cvtps_epi32(n);
    const vi half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const vi bias = _mm256_set1_epi32(127);
    const vf a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const vf b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(p, a), b);
}

INL vf vf_where_small(vf v, float limit, vf a, vf b)
{
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(vf_abs(v), vf_set(limit), _CMP_LT_OQ));
}

INL vf vf_copy_sign(vf magnitude, vf sign)
{
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, vf_set(-0.0f)));
}

INL vf vf_e8m0(const uint8_t *e)
{
    const vi wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)e));
    return _mm256_castsi256_ps(
        _mm256_max_epu32(_mm256_slli_epi32(wide, 23), _mm256_set1_epi32(0x00400000)));
}

INL vf vf_load_bf16(const uint16_t *p)
{
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INL vi vi_round_bf16(vf v)
{
    const vi u = _mm256_castps_si256(v);
    const vi lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const vi r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7FFF)));
    const vi quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x00400000));
    const vi nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_and_si256(_mm256_blendv_epi8(r, quiet, nan), _mm256_set1_epi32((int)0xFFFF0000u));
}

INL void vf_store_bf16(uint16_t *p, vf v)
{
    const vi u = _mm256_srli_epi32(vi_round_bf16(v), 16);
    const __m128i half =
        _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
    _mm_storeu_si128((__m128i *)(void *)p, half);
}

INL vf vf_bits(vi v)
{
    return _mm256_castsi256_ps(v);
}

INL vi vi_bits(vf v)
{
    return _mm256_castps_si256(v);
}

/* The magnitude by a permutation of 8 floats (three index bits), the sign from bit 3. */
INL vi vi_lookup_f32(vi v, int step)
{
    const vf table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const vf magnitude = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4 * step));
    const vi sign = _mm256_slli_epi32(v, 28 - 4 * step);
    return _mm256_or_si256(vi_bits(magnitude),
                           _mm256_and_si256(sign, _mm256_set1_epi32((int)0x80000000u)));
}

INL vi vi_shift_right_16(vi v, int bits)
{
    return _mm256_srli_epi16(v, bits);
}

INL vi vi_lookup(vi v)
{
    const vi table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(v, _mm256_set1_epi8(15)));
}

INL uint32_t vf_amax_bits(const vf v[NV])
{
    const vi a =
        _mm256_max_epu32(_mm256_castps_si256(vf_abs(v[0])), _mm256_castps_si256(vf_abs(v[1])));
    const vi b =
        _mm256_max_epu32(_mm256_castps_si256(vf_abs(v[2])), _mm256_castps_si256(vf_abs(v[3])));
    const vi c = _mm256_max_epu32(a, b);
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

INL __m256i vf_to_int8(const vf v[NV])
{
    const vi ab = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
    const vi cd = _mm256_packs_epi32(_mm256_cvtps_epi32(v[2]), _mm256_cvtps_epi32(v[3]));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Eight quads of 4 lanes, quad g = rows g, g + 8, g + 16, g + 24: a transposition 8 x 4. */
INL void vf_natural(const vf v[NV], vf out[NV])
{
    const vf a = _mm256_permute2f128_ps(v[0], v[2], 0x20),
             b = _mm256_permute2f128_ps(v[0], v[2], 0x31);
    const vf c = _mm256_permute2f128_ps(v[1], v[3], 0x20),
             d = _mm256_permute2f128_ps(v[1], v[3], 0x31);
    const vf ab_lo = _mm256_unpacklo_ps(a, b), ab_hi = _mm256_unpackhi_ps(a, b);
    const vf cd_lo = _mm256_unpacklo_ps(c, d), cd_hi = _mm256_unpackhi_ps(c, d);
    out[0] = _mm256_shuffle_ps(ab_lo, cd_lo, 0x44);
    out[1] = _mm256_shuffle_ps(ab_lo, cd_lo, 0xEE);
    out[2] = _mm256_shuffle_ps(ab_hi, cd_hi, 0x44);
    out[3] = _mm256_shuffle_ps(ab_hi, cd_hi, 0xEE);
}

#endif
