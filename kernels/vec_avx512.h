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

/* A finite v rounded to four significant bits, ties to even. */
INL vf vf_round_4_bits(vf v)
{
    const vi u = _mm512_castps_si512(v);
    const vi lsb = _mm512_and_si512(_mm512_srli_epi32(u, 20), _mm512_set1_epi32(1));
    const vi r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7FFFF)));
    return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32((int)0xFFF00000u)));
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

INL vi vi_of_vf(vf v)
{
    return _mm512_cvtps_epi32(v);
}

/* q = 256 high + low for -32640 <= q <= 32639, both in -128..127 */
INL vi vi_high_plane(vi q)
{
    return _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
}

INL vi vi_low_plane(vi q, vi high)
{
    return _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
}

INL vi vi_join_planes(vi high, vi low)
{
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

/* Eight bits each: a + products of unsigned w and signed x, two summed into 16 bits. Adds wrap. */
INL vi vi_dot_pairs(vi a, vi w, vi x)
{
    a = _mm512_add_epi16(a, _mm512_maddubs_epi16(w, x));
    /* keep the chain: regrouped into a tree, the partial sums spill */
    __asm__("" : "+v"(a));
    return a;
}

/* The two 16-bit halves of every word, added. */
INL vi vi_add_halves(vi v)
{
    return _mm512_madd_epi16(v, _mm512_set1_epi16(1));
}

#ifdef __AVX512VNNI__
/* The same with four products summed into 32 bits. */
INL vi vi_dot_quads(vi a, vi w, vi x)
{
    return _mm512_dpbusd_epi32(a, w, x);
}
#endif

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

#ifdef __AVX512BF16__
/* Nibble `step` of each half of every word as the bf16 that the E2M1 code means. The look-up takes
 * five index bits, the fifth being a neighbour's, so the table holds its sixteen values twice. -0
 * becomes 0: what a scale is added to must have an exponent, or be no number but 0. */
INL vi vi_lookup_bf16(vi v, int step)
{
    static const uint16_t table[32] = {
        0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x0000, 0xBF00, 0xBF80,
        0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
        0x4080, 0x40C0, 0x0000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
    return _mm512_permutexvar_epi16(vi_shift_right_16(v, 4 * step), vi_load(table));
}

/* a + products of the two bf16 of every word. */
INL vf vf_dot_bf16(vf a, vi w, vi x)
{
    return _mm512_dpbf16_ps(a, (__m512bh)w, (__m512bh)x);
}

/* e - 127 in both halves of every word, as added to the exponent of a bf16. */
INL vi vi_e8m0_bf16(const uint8_t *e)
{
    const vi wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)e));
    const vi shifted = _mm512_slli_epi32(_mm512_sub_epi32(wide, _mm512_set1_epi32(127)), 7);
    return _mm512_or_si512(_mm512_and_si512(shifted, _mm512_set1_epi32(0xFFFF)),
                           _mm512_slli_epi32(shifted, 16));
}

/* 16-bit a + b where a is not 0. */
INL vi vi_add_to_nonzero_16(vi a, vi b)
{
    return _mm512_mask_add_epi16(a, _mm512_test_epi16_mask(a, a), a, b);
}
#endif

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

/* 32 integers to int8, saturated, in the same order. */
INL __m256i vi_to_int8(const vi v[NV])
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtsepi32_epi8(v[0])),
                                   _mm512_cvtsepi32_epi8(v[1]), 1);
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
