/*
 * vec_avx512.h - the vector vocabulary of the forms for 512-bit vectors (F, BW, DQ, VL).
 *
 * vf: 16 floats, vi: the same bits as integers. NV vectors hold the 32 rows of a tile in lane
 * order. Every min and max keeps a NaN that stands second.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_VEC_AVX512_H
#define NUMOE_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "unroll.h"

#define INL static inline __attribute__((always_inline))

typedef __m512i vi;
typedef __m512 vf;
enum { VB = 64, VL = 16, NV = 2 };

INL vi vi_load(const void *p)
{
    return _mm512_loadu_si512(p);
}

INL void vi_store(void *p, vi v)
{
    _mm512_store_si512(p, v);
}

/* The 4 bytes at p in every lane. */
INL vi vi_word(const void *p)
{
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

INL vi vi_zero(void)
{
    return _mm512_setzero_si512();
}

INL vf vf_set(float v)
{
    return _mm512_set1_ps(v);
}

INL vf vf_load(const void *p)
{
    return _mm512_loadu_ps(p);
}

INL void vf_store(void *p, vf v)
{
    _mm512_store_ps(p, v);
}

INL vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INL vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

INL vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

INL vf vf_abs(vf v)
{
    return _mm512_abs_ps(v);
}

INL vf vf_of_vi(vi v)
{
    return _mm512_cvtepi32_ps(v);
}

INL vf vf_round(vf v)
{
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* p 2^n for integral n, exact as far as the result is a normal number. */
INL vf vf_times_power(vf p, vf n)
{
    return _mm512_scalef_ps(p, n);
}

/* a where |v| < limit, else b. */
INL vf vf_where_small(vf v, float limit, vf a, vf b)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(v), vf_set(limit), _CMP_LT_OQ), b,
                                a);
}

INL vf vf_copy_sign(vf magnitude, vf sign)
{
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, vf_set(-0.0f)));
}

/* E8M0: byte e is 2^(e-127); 0 is the subnormal 2^-127. 255 never gets here (the packer refuses).
 */
INL vf vf_e8m0(const uint8_t *e)
{
    const vi wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)e));
    return _mm512_castsi512_ps(
        _mm512_max_epu32(_mm512_slli_epi32(wide, 23), _mm512_set1_epi32(0x00400000)));
}

INL vf vf_load_bf16(const uint16_t *p)
{
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Bits of v rounded to bf16 (nearest even, NaN stays NaN), in the high half of each lane. */
INL vi vi_round_bf16(vf v)
{
    const vi u = _mm512_castps_si512(v);
    const vi lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const vi r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_and_si512(_mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x00400000)),
                            _mm512_set1_epi32((int)0xFFFF0000u));
}

INL void vf_store_bf16(uint16_t *p, vf v)
{
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(vi_round_bf16(v), 16));
    _mm256_storeu_si256((__m256i *)(void *)p, half);
}

INL vf vf_bits(vi v)
{
    return _mm512_castsi512_ps(v);
}

INL vi vi_bits(vf v)
{
    return _mm512_castps_si512(v);
}

/* Nibble `step` of every 32-bit word as the float that the E2M1 code means. */
INL vi vi_lookup_f32(vi v, int step)
{
    const vf table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                    -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return vi_bits(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * (unsigned)step), table));
}

INL vi vi_shift_right_16(vi v, int bits)
{
    return _mm512_srli_epi16(v, (unsigned)bits);
}

/* Doubled E2M1 + 12 of the low nibble of every byte. */
INL vi vi_lookup(vi v)
{
    const vi table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm512_shuffle_epi8(table, _mm512_and_si512(v, _mm512_set1_epi8(15)));
}

/* Largest of the 32 absolute values, as float bits: an infinity or NaN is >= 0x7F800000. */
INL uint32_t vf_amax_bits(const vf v[NV])
{
    const vi a =
        _mm512_max_epu32(_mm512_castps_si512(vf_abs(v[0])), _mm512_castps_si512(vf_abs(v[1])));
    return _mm512_reduce_max_epu32(a);
}

/* 32 floats to int8, rounded to nearest, saturated, in the same order. */
INL __m256i vf_to_int8(const vf v[NV])
{
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v[0]))),
        _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v[1])), 1);
}

/* Lane order to natural order. */
INL void vf_natural(const vf v[NV], vf out[NV])
{
    const vi low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const vi high = _mm512_add_epi32(low, _mm512_set1_epi32(2));
    out[0] = _mm512_permutex2var_ps(v[0], low, v[1]);
    out[1] = _mm512_permutex2var_ps(v[0], high, v[1]);
}

#endif
