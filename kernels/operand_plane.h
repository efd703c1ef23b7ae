/*
 * operand_plane.h - what the int8 operands share: a plane of 32 activations as int8, codes as
 * unsigned bytes, and their dot.
 *
 * A code becomes its doubled value + 12, a byte 0..24, so an unsigned-by-signed dot gives
 * sum((2w + 12) q); the accumulator starts at -12 sum(q), the plane's correction.
 *
 * Order of q: the low nibbles of a code word are k 0, 4, 1, 5 of the octet, the high ones
 * k 2, 6, 3, 7; so x word 2t holds q[8t + {0, 4, 1, 5}] and word 2t + 1 q[8t + {2, 6, 3, 7}].
 *
 * The including file defines INT8_PAIRS: 0 when a dot sums four products into 32 bits, 1 when it
 * sums two into 16 bits. Then the two halves of a word have corrections of their own, and 16-bit
 * adds wrap: the sum of the 16 products of a lane is at most 16 * 12 * 128 = 24,576, so the
 * wrapped result is exact.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_PLANE_H
#define NUMOE_OPERAND_PLANE_H

#define STEPS 2
#define STEPS_SHARE 0
#define FOLDED 0
#define WEIGHT_IN_GROUP 1

/* Bytes in lane order (lane 4g + t is k 8t + g) or natural order to the order of x words. */
INL __m256i plane_order(__m256i q, bool lanes)
{
    if (lanes) {
        /* transpose 4 x 4 bytes in each half (g 0..3, g 4..7), then g and g + 4 of the same octet
         * side by side */
        const __m256i columns =
            _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1,
                             5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m256i t = _mm256_shuffle_epi8(q, columns);
        const __m128i low = _mm256_castsi256_si128(t), high = _mm256_extracti128_si256(t, 1);
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(low, high)),
                                       _mm_unpackhi_epi8(low, high), 1);
    }
    return _mm256_shuffle_epi8(q, _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11,
                                                   15, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14,
                                                   11, 15));
}

/* Where q of k is in that order. */
static inline unsigned plane_place(unsigned k)
{
    return k / 8 * 8 + k % 4 * 2 + k % 8 / 4;
}

/* -12 sum(q), or two int16: over bytes 0, 1 of every word (low) and over bytes 2, 3 (high). */
INL int32_t plane_correction(__m256i q)
{
    const __m256i twelve = _mm256_set1_epi8(12);
    const __m256i pairs = _mm256_maddubs_epi16(twelve, q);
    __m128i s = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    s = _mm_add_epi16(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi16(s, _mm_shuffle_epi32(s, 0xB1));
    s = _mm_sub_epi16(_mm_setzero_si128(), s);
    if (INT8_PAIRS)
        return _mm_cvtsi128_si32(s);
    return (int16_t)_mm_extract_epi16(s, 0) + (int16_t)_mm_extract_epi16(s, 1);
}

INL vi decode(vi codes, int step)
{
    return vi_lookup(step ? vi_shift_right_16(codes, 4) : codes);
}

INL vi plane_dot(vi a, vi w, const void *word)
{
#if INT8_PAIRS
    return vi_dot_pairs(a, w, vi_word(word));
#else
    return vi_dot_quads(a, w, vi_word(word));
#endif
}

/* The 32-bit sum of every row. */
INL vi plane_sum(vi a)
{
    return INT8_PAIRS ? vi_add_halves(a) : a;
}

#endif
