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

/* A finite v rounded to four significant bits, ties to even. */
INL vf vf_round_4_bits(vf v)
{
    const vi u = _mm256_castps_si256(v);
    const vi lsb = _mm256_and_si256(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(1));
    const vi r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7FFFF)));
    return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32((int)0xFFF00000u)));
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

INL vi vi_of_vf(vf v)
{
    return _mm256_cvtps_epi32(v);
}

/* q = 256 high + low for -32640 <= q <= 32639, both in -128..127 */
INL vi vi_high_plane(vi q)
{
    return _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
}

INL vi vi_low_plane(vi q, vi high)
{
    return _mm256_sub_epi32(q, _mm256_slli_epi32(high, 8));
}

INL vi vi_join_planes(vi high, vi low)
{
    return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
}

/* Eight bits each: a + products of unsigned w and signed x, two summed into 16 bits. Adds wrap. */
INL vi vi_dot_pairs(vi a, vi w, vi x)
{
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w, x));
    /* keep the chain: regrouped into a tree, the partial sums spill */
    __asm__("" : "+x"(a));
    return a;
}

/* The two 16-bit halves of every word, added. */
INL vi vi_add_halves(vi v)
{
    return _mm256_madd_epi16(v, _mm256_set1_epi16(1));
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
/* The same with four products summed into 32 bits. */
INL vi vi_dot_quads(vi a, vi w, vi x)
{
#ifdef __AVX512VNNI__
    return _mm256_dpbusd_epi32(a, w, x);
#else
    return _mm256_dpbusd_avx_epi32(a, w, x);
#endif
}
#endif

/* Nibble `step` of every 32-bit word as the float that the E2M1 code means. Its upper half, a bf16,
 * is looked up as two bytes; bytes are woven to halves, and halves of the same bytes of all eight
 * words brought together. Steps share what they have in common: 23 operations for 64 weights. */
INL vi vi_lookup_f32(vi v, int step)
{
    const vi high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
    const vi low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -128, -64, 0, 0x40, -128, -64, 0, 0, -128, -64, 0, 0x40, -128, -64));
    const vi codes = _mm256_and_si256(step % 2 ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    const vi h = _mm256_shuffle_epi8(high, codes), l = _mm256_shuffle_epi8(low, codes);
    const vf p = _mm256_castsi256_ps(_mm256_unpacklo_epi8(l, h));
    const vf q = _mm256_castsi256_ps(_mm256_unpackhi_epi8(l, h));
    const vi halves = _mm256_castps_si256(step < 4 ? _mm256_shuffle_ps(p, q, 0x88)
                                                   : _mm256_shuffle_ps(p, q, 0xDD));
    return step / 2 % 2 ? _mm256_and_si256(halves, _mm256_set1_epi32((int)0xFFFF0000u))
                        : _mm256_slli_epi32(halves, 16);
}

INL vi vi_shift_right_16(vi v, int bits)
{
    return _mm256_srli_epi16(v, bits);
}

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
/* Nibble `step` of each half of every word as the bf16 that the E2M1 code means. */
INL vi vi_lookup_bf16(vi v, int step)
{
    const vi table =
        _mm256_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0, -0x4100,
                          -0x4080, -0x4040, -0x4000, -0x3FC0, -0x3F80, -0x3F40);
    return _mm256_permutexvar_epi16(vi_shift_right_16(v, 4 * step), table);
}

/* a + products of the two bf16 of every word. */
INL vf vf_dot_bf16(vf a, vi w, vi x)
{
    return _mm256_dpbf16_ps(a, (__m256bh)w, (__m256bh)x);
}

/* e - 127 in both halves of every word, as added to the exponent of a bf16. */
INL vi vi_e8m0_bf16(const uint8_t *e)
{
    const vi wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)e));
    const vi shifted = _mm256_slli_epi32(_mm256_sub_epi32(wide, _mm256_set1_epi32(127)), 7);
    return _mm256_or_si256(_mm256_and_si256(shifted, _mm256_set1_epi32(0xFFFF)),
                           _mm256_slli_epi32(shifted, 16));
}

/* 16-bit a + b where a is not 0. */
INL vi vi_add_to_nonzero_16(vi a, vi b)
{
    return _mm256_mask_add_epi16(a, _mm256_test_epi16_mask(a, a), a, b);
}
#endif

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

INL __m256i vi_to_int8(const vi v[NV])
{
    const vi ab = _mm256_packs_epi32(v[0], v[1]), cd = _mm256_packs_epi32(v[2], v[3]);
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
