/*
 * mxfp8.h - activations rounded to MXFP8 (E4M3 and one E8M0 scale for each group of 32), one value
 * at a time: what the MXFP8 modes mean.
 *
 * The scale byte of a group whose largest magnitude is a:
 *   rounded up  amax / 448, rounded up to a power of two: nothing saturates
 *   OCP         floor(log2 amax) - 8: values past 448 times it saturate
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_MXFP8_H
#define NUMOE_MXFP8_H

#include "base/numoe_types.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/** Scale byte, 0..254, for the bits of a finite amax. 448 is 1.75 x 2^8. */
static inline unsigned numoe_mxfp8_scale(uint32_t amax_bits, enum numoe_arithmetic mode)
{
    const int exponent = (int)(amax_bits >> 23), past = (amax_bits & 0x7FFFFF) > 0x600000;
    const int byte = exponent - 8 + (mode == NUMOE_MXFP8_UP ? past : 0);

    return byte < 0 ? 0 : (unsigned)byte;
}

/** 2^(127 - byte), what the group is divided by its scale with; byte 0..253. */
static inline float numoe_mxfp8_inverse(unsigned byte)
{
    const uint32_t bits = (uint32_t)(254 - byte) << 23;
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

/** 2^(byte - 127); byte 0..254. */
static inline float numoe_mxfp8_power(unsigned byte)
{
    const uint32_t bits = byte ? (uint32_t)byte << 23 : 0x00400000u;
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

/** A finite v to the nearest E4M3 value, ties to even, saturated. */
static inline float numoe_round_e4m3(float v)
{
    const float magnitude = fminf(fabsf(v), 448.0f);
    int exponent;

    frexpf(magnitude, &exponent); /* magnitude < 2^exponent */
    if (exponent < -5)            /* below 2^-6 steps are 2^-9 */
        exponent = -5;
    return copysignf(ldexpf(rintf(ldexpf(magnitude, 4 - exponent)), exponent - 4), v);
}

#endif
