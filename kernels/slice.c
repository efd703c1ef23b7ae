/*
 * Slices: shape, reading back, and the float64 reference.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bf16.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <math.h>
#include <string.h>

_Static_assert(NUMOE_PAIR_BYTES == 2 * (512 + 32), "a pair tile is two tiles of codes and scales");

enum { SCALE_NAN = 255 };

/* E2M1, by code. */
static const double e2m1[16] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

int numoe_slice_shape_init(struct numoe_slice_shape *shape, uint64_t hidden, bool bias)
{
    struct numoe_format_sizes sizes;

    if (numoe_format_sizes(NUMOE_MXFP4, hidden, bias, &sizes))
        return -EINVAL;
    *shape = (struct numoe_slice_shape){
        .hidden = hidden,
        .hidden_tiles = sizes.hidden_tiles,
        .down_offset = sizes.gate_up_bytes,
        .bias_offset = bias ? sizes.gate_up_bytes + sizes.down_bytes : 0,
        .bytes = sizes.slice_bytes,
        .bias = bias,
    };
    return 0;
}

static uint32_t load32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* ---- reading back --------------------------------------------------------------------------- */

/* Code of tile position (row, k), both 0..31. */
static unsigned tile_code(const uint8_t *codes, unsigned row, unsigned k)
{
    const uint32_t word = load32(codes + k / 8 * 128 + 4 * numoe_row_lane(row));
    const unsigned nibble = (k % 8) / 2 + (k % 2) * 4;

    return word >> (4 * nibble) & 15;
}

/* E8M0: 2^(scale - 127), whose exponent a double holds as it is. */
static double scale_value(unsigned scale)
{
    const uint64_t bits = ((uint64_t)scale - 127 + 1023) << 52;
    double value;

    if (scale == SCALE_NAN)
        return (double)NAN;
    memcpy(&value, &bits, sizeof value);
    return value;
}

double numoe_slice_weight(const struct numoe_slice_shape *shape, const void *slice,
                          enum numoe_matrix matrix, uint64_t row, uint64_t k, unsigned *code,
                          unsigned *scale)
{
    const uint8_t *pair;
    unsigned half, c, e, tile_row, tile_k;

    if (matrix == NUMOE_DOWN) {
        pair = (const uint8_t *)slice + shape->down_offset + row / 64 * NUMOE_PAIR_BYTES;
        half = row / 32 % 2;
        tile_row = row % 32;
        tile_k = (unsigned)k;
    } else {
        pair = (const uint8_t *)slice + k / 32 * NUMOE_PAIR_BYTES;
        half = matrix == NUMOE_UP;
        tile_row = (unsigned)row;
        tile_k = k % 32;
    }
    c = tile_code(pair + 512 * half, tile_row, tile_k);
    e = pair[1024 + 32 * half + numoe_row_lane(tile_row)];
    if (code)
        *code = c;
    if (scale)
        *scale = e;
    return e2m1[c] * scale_value(e);
}

void numoe_reference_slices(const struct numoe_slice_shape *shape,
                            const struct numoe_activation *activation, const void *slices,
                            uint64_t count, const float *x, double weight, const float *down_bias,
                            bool round_h, double *y)
{
    for (uint64_t s = 0; s < count; s++) {
        const uint8_t *slice = (const uint8_t *)slices + s * shape->bytes;
        const float *bias = (const float *)(const void *)(slice + shape->bias_offset);
        double h[NUMOE_TILE];

        for (unsigned r = 0; r < NUMOE_TILE; r++) {
            double gate = shape->bias ? (double)bias[numoe_row_lane(r)] : 0.0;
            double up = shape->bias ? (double)bias[32 + numoe_row_lane(r)] : 0.0;
            for (uint64_t k = 0; k < shape->hidden; k++) {
                const double v = (double)x[k];
                gate += numoe_slice_weight(shape, slice, NUMOE_GATE, r, k, NULL, NULL) * v;
                up += numoe_slice_weight(shape, slice, NUMOE_UP, r, k, NULL, NULL) * v;
            }
            h[r] = numoe_activation_reference(activation, gate, up);
            if (round_h)
                h[r] = (double)numoe_bf16_to_float(numoe_float_to_bf16((float)h[r]));
        }
        for (uint64_t r = 0; r < shape->hidden; r++) {
            double sum = 0.0;
            for (unsigned k = 0; k < NUMOE_TILE; k++)
                sum += numoe_slice_weight(shape, slice, NUMOE_DOWN, r, k, NULL, NULL) * h[k];
            y[r] += weight * sum;
        }
    }
    if (down_bias)
        for (uint64_t r = 0; r < shape->hidden; r++)
            y[r] += weight * (double)down_bias[r / 32 * 32 + numoe_row_lane(r % 32)];
}
