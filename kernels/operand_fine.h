/*
 * operand_fine.h - the operands of the fine mode: 16-bit fixed point as two planes of int8.
 *
 * A group of 32 activations is q = round(x 32512 / amax) with scale amax / 32512, and
 * q = 256 high + low with high in -127..127 and low in -128..127. Both planes go through the dot of
 * operand_plane.h; the sums are joined before the scale, exactly: a row's 32 products of 12 with
 * |256 high + low| <= 32512 stay below 2^24. So the only error is that of q, at most amax / 65024
 * in each activation, whatever the others are (docs/kernels.md).
 *
 * A group with an infinity or a NaN gets scale NaN; one smaller than 1e-33 everywhere is zero.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_FINE_H
#define NUMOE_OPERAND_FINE_H

#include "operand_plane.h"

struct group {
    int8_t high[32], low[32];
    int32_t correction[2]; /* of high, of low */
    float scale;           /* amax / 65024 times a routing weight for h; NaN: not finite */
};

typedef struct {
    vi high, low;
} acc;

INL void group_put(const vf v[NV], bool lanes, float weight, enum numoe_arithmetic mode,
                   struct group *g)
{
    const uint32_t bits = vf_amax_bits(v);
    vi high[NV], low[NV];
    __m256i h, l;
    float amax;

    (void)mode;
    memcpy(&amax, &bits, 4);
    if (bits >= 0x7F800000u || !(amax > 1e-33f)) {
        memset(g, 0, sizeof *g);
        g->scale = bits >= 0x7F800000u ? __builtin_nanf("") : 0.0f;
        return;
    }
    const vf inverse = vf_set(32512.0f / amax);
    UNROLL
    for (int r = 0; r < NV; r++) {
        const vi q = vi_of_vf(v[r] * inverse);
        high[r] = vi_high_plane(q);
        low[r] = vi_low_plane(q, high[r]);
    }
    h = plane_order(vi_to_int8(high), lanes);
    l = plane_order(vi_to_int8(low), lanes);
    _mm256_storeu_si256((__m256i *)(void *)g->high, h);
    _mm256_storeu_si256((__m256i *)(void *)g->low, l);
    g->correction[0] = plane_correction(h);
    g->correction[1] = plane_correction(l);
    g->scale = amax * (1.0f / 65024.0f) * weight;
}

INL float group_value(const struct group *g, unsigned k)
{
    return (float)(256 * g->high[plane_place(k)] + g->low[plane_place(k)]) * (2 * g->scale);
}

INL acc acc_start(const struct group *g)
{
    return (acc){vi_word(&g->correction[0]), vi_word(&g->correction[1])};
}

INL acc acc_dot(acc a, vi w, const void *word)
{
    a.high = plane_dot(a.high, w, word);
    a.low = plane_dot(a.low, w, (const int8_t *)word + sizeof((struct group *)NULL)->high);
    return a;
}

INL vf acc_float(acc a)
{
    return vf_of_vi(vi_join_planes(plane_sum(a.high), plane_sum(a.low)));
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
