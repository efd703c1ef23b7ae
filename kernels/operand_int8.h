/*
 * operand_int8.h - the operands of the fast mode: one plane of int8 activations.
 *
 * A group of 32 activations is q = round(x 127 / amax) with scale amax / 127; the doubling of the
 * codes (operand_plane.h) is taken back in the scale. A group with an infinity or a NaN gets scale
 * NaN; one smaller than 1e-35 everywhere is zero.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_INT8_H
#define NUMOE_OPERAND_INT8_H

#include "operand_plane.h"

struct group {
    int8_t q[32];
    int32_t correction;
    float scale; /* amax / 254 times a routing weight for h; NaN: not finite */
};

typedef vi acc;

INL void group_put(const vf v[NV], bool lanes, float weight, enum numoe_arithmetic mode,
                   struct group *g)
{
    const uint32_t bits = vf_amax_bits(v);
    vi scaled[NV];
    __m256i q;
    float amax;

    (void)mode;
    memcpy(&amax, &bits, 4);
    if (bits >= 0x7F800000u || !(amax > 1e-35f)) {
        memset(g, 0, sizeof *g);
        g->scale = bits >= 0x7F800000u ? __builtin_nanf("") : 0.0f;
        return;
    }
    const vf inverse = vf_set(127.0f / amax);
    UNROLL
    for (int r = 0; r < NV; r++)
        scaled[r] = vi_of_vf(v[r] * inverse);
    q = plane_order(vi_to_int8(scaled), lanes);
    _mm256_storeu_si256((__m256i *)(void *)g->q, q);
    g->correction = plane_correction(q);
    g->scale = amax * (1.0f / 254.0f) * weight;
}

INL float group_value(const struct group *g, unsigned k)
{
    return (float)g->q[plane_place(k)] * (2 * g->scale);
}

INL acc acc_start(const struct group *g)
{
    return vi_word(&g->correction);
}

INL acc acc_dot(acc a, vi w, const void *word)
{
    return plane_dot(a, w, word);
}

INL vf acc_float(acc a)
{
    return vf_of_vi(plane_sum(a));
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
