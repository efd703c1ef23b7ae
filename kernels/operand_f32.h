/*
 * operand_f32.h - the operands of the exact mode by fp32 FMA: activations rounded to bf16 and
 * carried as floats, codes as exact floats.
 *
 * Order: x word 8t + j is nibble j of the octet's code word: k = 8t + 2j for j < 4, else
 * 8t + 2(j - 4) + 1. Many tokens: the weight scale is multiplied into the operand, which is exact
 * (E2M1 x E8M0 fits fp32 for the scale bytes that reach that form).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_F32_H
#define NUMOE_OPERAND_F32_H

#include "vec_round.h"

struct group {
    float x[32];
};

#define STEPS 8
#define STEPS_SHARE 1
#define FOLDED 1
#define WEIGHT_IN_GROUP 0
typedef vf acc;
typedef vf fold;

/* Where k of a group is. */
static inline unsigned f32_place(unsigned k)
{
    return k / 8 * 8 + k % 8 / 2 + k % 2 * 4;
}

INL void group_put(const vf v[NV], bool lanes, float weight, enum numoe_arithmetic mode,
                   struct group *g)
{
    float bf16[32] __attribute__((aligned(64)));
    vf rounded[NV];

    (void)weight; /* in down_scale */
    group_round(v, mode, rounded);
    UNROLL
    for (int r = 0; r < NV; r++)
        vi_store(bf16 + VL * r, vi_round_bf16(rounded[r]));
    for (unsigned k = 0; k < 32; k++)
        g->x[f32_place(k)] = bf16[lanes ? numoe_row_lane(k) : k];
}

INL float group_value(const struct group *g, unsigned k)
{
    return g->x[f32_place(k)];
}

INL vi decode(vi codes, int step)
{
    return vi_lookup_f32(codes, step);
}

INL acc acc_start(const struct group *g)
{
    (void)g;
    return vf_set(0.0f);
}

INL acc acc_dot(acc a, vi w, const void *word)
{
    float x;
    memcpy(&x, word, 4);
    return vf_fma(vf_bits(w), vf_set(x), a);
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

INL fold fold_scale(const uint8_t *e)
{
    return vf_e8m0(e);
}

INL vi fold_into(vi w, fold scale)
{
    return vi_bits(vf_bits(w) * scale);
}

#endif
