/*
 * operand_int8.h - the operands of the fast mode: int8 activations, codes as unsigned bytes.
 *
 * A group of 32 activations is q = round(x 127 / amax) with scale amax / 127. A code becomes its
 * doubled value + 12, a byte 0..24, so an unsigned-by-signed dot gives sum((2w + 12) q); the
 * accumulator starts at -12 sum(q), and the doubling is taken back in the group's scale.
 *
 * Order of q: the low nibbles of a code word are k 0, 4, 1, 5 of the octet, the high ones
 * k 2, 6, 3, 7; so x word 2t holds q[8t + {0, 4, 1, 5}] and word 2t + 1 q[8t + {2, 6, 3, 7}].
 *
 * A group with an infinity or a NaN gets scale NaN; one smaller than 1e-35 everywhere is zero.
 *
 * The including file defines INT8_PAIRS: 0 when a dot sums four products into 32 bits, 1 when it
 * sums two into 16 bits. Then the two halves of a word have corrections of their own, and 16-bit
 * adds wrap: the sum of the 16 products of a lane is at most 16 * 12 * 127 = 24,384, so the
 * wrapped result is exact.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_INT8_H
#define NUMOE_OPERAND_INT8_H

struct group {
    int8_t q[32];
    int32_t correction; /* -12 sum(q), or two int16: of the low and of the high halves of words */
    float scale;        /* amax / 254 times a routing weight for h; NaN: not finite */
};

#define STEPS 2
#define FOLDED 0
#define WEIGHT_IN_GROUP 1
typedef vi acc;

/* -12 times the sums over bytes 0, 1 of every word (low 16 bits) and over bytes 2, 3 (high). */
INL int32_t correction_pairs(__m256i q)
{
    const __m256i twelve = _mm256_set1_epi8(12);
    const __m256i pairs = _mm256_maddubs_epi16(twelve, q);
    __m128i s = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    s = _mm_add_epi16(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi16(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), s));
}

INL void group_put(const vf v[NV], int lanes, float weight, struct group *g)
{
    const uint32_t bits = vf_amax_bits(v);
    vf scaled[NV];
    __m256i q;
    float amax;

    memcpy(&amax, &bits, 4);
    if (bits >= 0x7F800000u || !(amax > 1e-35f)) {
        memset(g, 0, sizeof *g);
        g->scale = bits >= 0x7F800000u ? __builtin_nanf("") : 0.0f;
        return;
    }
    const vf inverse = vf_set(127.0f / amax);
    UNROLL
    for (int r = 0; r < NV; r++)
        scaled[r] = v[r] * inverse;
    q = vf_to_int8(scaled);
    if (lanes) {
        /* byte 4g + t of q is k = 8t + g: transpose 4 x 4 bytes in each half (g 0..3, g 4..7),
         * then g and g + 4 of the same octet side by side */
        const __m256i columns =
            _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1,
                             5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m256i t = _mm256_shuffle_epi8(q, columns);
        const __m128i low = _mm256_castsi256_si128(t), high = _mm256_extracti128_si256(t, 1);
        q = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(low, high)),
                                    _mm_unpackhi_epi8(low, high), 1);
    } else {
        const __m256i order =
            _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6,
                             3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        q = _mm256_shuffle_epi8(q, order);
    }
    _mm256_storeu_si256((__m256i *)(void *)g->q, q);
    g->correction = correction_pairs(q);
    if (!INT8_PAIRS)
        g->correction = (int16_t)(g->correction & 0xFFFF) + (g->correction >> 16);
    g->scale = amax * (1.0f / 254.0f) * weight;
}

INL vi decode(vi codes, int step)
{
    return vi_lookup(step ? vi_shift_right_16(codes, 4) : codes);
}

INL acc acc_start(const struct group *g)
{
    return vi_word(&g->correction);
}

INL vf group_scale(vf e, const struct group *g)
{
    return e * vf_set(g->scale);
}

INL vf down_scale(vf e, const struct group *g, float weight)
{
    (void)weight; /* in g->scale */
    return e * vf_set(g->scale);
}

#endif
