/* bf16.h - bf16 and float, one value at a time. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_BF16_H
#define NUMOE_BF16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float numoe_bf16_to_float(uint16_t b)
{
    const uint32_t u = (uint32_t)b << 16;
    float f;

    memcpy(&f, &u, 4);
    return f;
}

/** To the nearest, ties to even; a NaN stays one. */
static inline uint16_t numoe_float_to_bf16(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    if (isnan(f))
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

#endif
