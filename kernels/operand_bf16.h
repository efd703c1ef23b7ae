/*
 * operand_bf16.h - the operands of the exact mode by vdpbf16ps: pairs of bf16.
 *
 * A group is 32 activations in natural order; x word 4t + j is the pair k 2j, 2j + 1 of octet t.
 * Shifting a code word right by 4j leaves nibble j at the bottom of each half: the codes of that
 * pair.
 *
 * Many tokens: the weight scale is added to the exponent of every value but zero. That is exact
 * for scale bytes 2..251 (vdpbf16ps takes subnormals as zero); the packer reports experts outside.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_OPERAND_BF16_H
#define NUMOE_OPERAND_BF16_H

#include "bf16.h"
#include "vec_round.h"

struct group {
    uint16_t x[32];
};

#define STEPS 4
#define STEPS_SHARE 0
#define FOLDED 1
#define WEIGHT_IN_GROUP 0
typedef vf acc;
typedef vi fold;

INL void group_put(const vf v[NV], bool lanes, float weight, enum numoe_arithmetic mode,
                   struct group *g)
{
    vf rounded[NV], natural[NV];

    (void)weight; /* in down_scale */
    group_round(v, mode, rounded);
    if (lanes)
        vf_natural(rounded, natural);
    UNROLL
    for (int r = 0; r < NV; r++)
        vf_store_bf16(g->x + VL * r, lanes ? natural[r] : rounded[r]);
}

INL float group_value(const struct group *g, unsigned k)
{
    return numoe_bf16_to_float(g->x[k]);
}

INL vi decode(vi codes, int step)
{
    return vi_lookup_bf16(codes, step);
}

INL acc acc_start(const struct group *g)
{
    (void)g;
    return vf_set(0.0f);
}

INL acc acc_dot(acc a, vi w, const void *word)
{
    return vf_dot_bf16(a, w, vi_word(word));
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
    return vi_e8m0_bf16(e);
}

INL vi fold_into(vi w, fold scale)
{
    return vi_add_to_nonzero_16(w, scale);
}

#endif
