/*
 * vec_round.h - what a mode rounds activations to before they become operands of the exact dots:
 * nothing (the operand's bf16 is the rounding), or MXFP8. Every MXFP8 value with a normal exponent
 * is a bf16 value.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_VEC_ROUND_H
#define NUMOE_VEC_ROUND_H

#include "mxfp8.h"

/* A group of 32 in any order. With an infinity or a NaN in it, all NaN. */
INL void group_round(const vf in[NV], enum numoe_arithmetic mode, vf out[NV])
{
    const uint32_t bits = mode == NUMOE_EXACT ? 0 : vf_amax_bits(in);
    const unsigned byte = numoe_mxfp8_scale(bits, mode);
    const bool finite = bits < 0x7F800000u;
    const vf up = vf_set(finite ? numoe_mxfp8_inverse(byte) : __builtin_nanf(""));
    const vf down = vf_set(numoe_mxfp8_power(byte));
    const vf step = vf_set(0x1.8p14f); /* adding it leaves multiples of 2^-9 */

    UNROLL
    for (int r = 0; r < NV; r++) {
        if (mode == NUMOE_EXACT) {
            out[r] = in[r];
            continue;
        }
        const vf scaled = in[r] * up;
        const vf v = vf_min(vf_set(448.0f), vf_abs(scaled));
        const vf rounded = vf_where_small(v, 0x1p-6f, (v + step) - step, vf_round_4_bits(v));
        out[r] = vf_copy_sign(rounded, scaled) * down;
    }
}

#endif
