/*
 * operand_bf16.h - the operands of the exact mode by vdpbf16ps: pairs of bf16.
 *
 * A group is 32 activations in natural order; x word 4t + j is the pair k 2j, 2j + 1 of octet t.
 * Shifting a code word right by 4j leaves nibble j at the bottom of each half: the codes of that
 * pair. The look-up takes five index bits, the fifth being a neighbour's, so the table holds its
 * sixteen values twice.
 *
 * Many tokens: the weight scale is added to the exponent of every value but zero. That is exact
 * for scale bytes 2..251 (vdpbf16ps takes subnormals as zero); the packer reports experts outside.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_BF16_H
#define NUMOE_OPERAND_BF16_H

struct group {
    uint16_t x[32];
};

#define STEPS 4
#define FOLDED 1
#define WEIGHT_IN_GROUP 0
typedef vf acc;
typedef vi fold;

INL void group_put(const vf v[NV], int lanes, float weight, struct group *g)
{
    /* k = 8j + g comes from lane 4g + j */
    static const uint16_t order[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                       2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    vi pairs = (vi)_mm512_cvtne2ps_pbh(v[1], v[0]);

    (void)weight; /* in down_scale */
    if (lanes)
        pairs = _mm512_permutexvar_epi16(vi_load(order), pairs);
    _mm512_storeu_si512(g->x, pairs);
}

INL vi decode(vi codes, int step)
{
    static const uint16_t table[32] = {
        0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x0000, 0xBF00, 0xBF80,
        0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
        0x4080, 0x40C0, 0x0000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
    return _mm512_permutexvar_epi16(vi_shift_right_16(codes, 4 * step), vi_load(table));
}

INL acc acc_start(const struct group *g)
{
    (void)g;
    return vf_set(0.0f);
}

INL acc acc_dot(acc a, vi w, const void *word)
{
    return _mm512_dpbf16_ps(a, (__m512bh)w, (__m512bh)vi_word(word));
}

INL vf acc_float(acc a)
{
    return a;
}

INL vf group_scale(vf e, const struct group *g)
{
    (void)g;
    return e;
}

INL vf down_scale(vf e, const struct group *g, float weight)
{
    (void)g;
    return e * vf_set(weight);
}

/* (e - 127) << 7 in both halves of each row's word */
INL fold fold_scale(const uint8_t *e)
{
    const vi wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)e));
    const vi shifted = _mm512_slli_epi32(_mm512_sub_epi32(wide, _mm512_set1_epi32(127)), 7);
    return _mm512_or_si512(_mm512_and_si512(shifted, _mm512_set1_epi32(0xFFFF)),
                           _mm512_slli_epi32(shifted, 16));
}

INL vi fold_into(vi w, fold scale)
{
    return _mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, w), w, scale);
}

#endif
