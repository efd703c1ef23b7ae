/*
 * Slices: shape, packing from checkpoint order, reading back, and the float64 reference.
 *
 * Packing is a lossless permutation of codes and scale bytes (numoe_kernels.h draws the tile).
 * Sixteen source bytes are one row's 32 codes of a group; they become four words, one in each
 * octet of the tile.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bf16.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <math.h>
#include <string.h>

_Static_assert(NUMOE_PAIR_BYTES == 2 * (512 + 32), "a pair tile is two tiles of codes and scales");

enum { SCALE_ONE = 127, SCALE_NAN = 255, SCALE_FOLD_MIN = 2, SCALE_FOLD_MAX = 251 };

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

/* Four bytes of adjacent codes (byte i: k 2i low, 2i + 1 high) to a tile word. */
static uint32_t word_of_adjacent(uint32_t v)
{
    uint32_t even = v & 0x0F0F0F0Fu, odd = v >> 4 & 0x0F0F0F0Fu;

    even = (even | even >> 4) & 0x00FF00FFu;
    odd = (odd | odd >> 4) & 0x00FF00FFu;
    even = (even | even >> 8) & 0xFFFFu;
    odd = (odd | odd >> 8) & 0xFFFFu;
    return even | odd << 16;
}

/* One row's group of 32 codes to its words of the four octets. */
static void words_of_block(const uint8_t *block, enum numoe_nibbles order, uint32_t word[4])
{
    if (order == NUMOE_NIBBLES_ADJACENT) {
        for (int t = 0; t < 4; t++)
            word[t] = word_of_adjacent(load32(block + 4 * t));
    } else {
        uint8_t adjacent[16];
        for (int i = 0; i < 8; i++) {
            adjacent[i] = (uint8_t)((block[2 * i] & 15) | (block[2 * i + 1] & 15) << 4);
            adjacent[8 + i] = (uint8_t)(block[2 * i] >> 4 | (block[2 * i + 1] & 0xF0));
        }
        for (int t = 0; t < 4; t++)
            word[t] = word_of_adjacent(load32(adjacent + 4 * t));
    }
}

/* The block of a group that the matrix ends in: codes past its last column become zero. */
static void cut_block(const uint8_t *block, enum numoe_nibbles order, unsigned columns,
                      uint8_t out[16])
{
    memset(out, 0, 16);
    for (unsigned k = 0; k < columns; k++) {
        unsigned code;
        if (order == NUMOE_NIBBLES_ADJACENT)
            code = block[k / 2] >> (k % 2 * 4) & 15;
        else
            code = block[k % 16] >> (k / 16 * 4) & 15;
        out[k / 2] = (uint8_t)(out[k / 2] | code << (k % 2 * 4));
    }
}

/* A tile's place in a pair tile. */
static uint8_t *tile_codes(uint8_t *pair, unsigned half)
{
    return pair + 512 * half;
}

static uint8_t *tile_scales(uint8_t *pair, unsigned half)
{
    return pair + 1024 + 32 * half;
}

/*
 * Fill half of a pair tile with rows [row, row + 32) and group `group` of a matrix of rows x
 * columns. Returns 0 or -EDOM.
 */
static int pack_tile(const struct numoe_mxfp4 *m, uint64_t rows, uint64_t columns, uint64_t row,
                     uint64_t group, uint8_t *pair, unsigned half, unsigned matrix,
                     struct numoe_pack_report *report)
{
    uint8_t *codes = tile_codes(pair, half), *scales = tile_scales(pair, half);
    const uint64_t left = columns - 32 * group;

    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        const uint64_t r = row + numoe_lane_row(lane);
        uint32_t word[4] = {0, 0, 0, 0};
        uint8_t scale = SCALE_ONE;

        if (r < rows) {
            const uint8_t *block = m->codes + r * m->code_stride + group * m->code_step;
            scale = m->scales[r * m->scale_stride + group * m->scale_step];
            if (scale == SCALE_NAN) {
                report->bad_matrix = matrix;
                report->bad_row = r;
                report->bad_group = group;
                return -EDOM;
            }
            if (left < 32) {
                uint8_t cut[16];
                cut_block(block, m->nibbles, (unsigned)left, cut);
                words_of_block(cut, NUMOE_NIBBLES_ADJACENT, word);
            } else {
                words_of_block(block, m->nibbles, word);
            }
            /* codes 0 and 8 are zeros whatever the scale */
            if ((scale < SCALE_FOLD_MIN || scale > SCALE_FOLD_MAX) &&
                ((word[0] | word[1] | word[2] | word[3]) & 0x77777777u))
                report->extreme_scales = true;
        }
        for (int t = 0; t < 4; t++)
            memcpy(codes + 128 * t + 4 * lane, &word[t], 4);
        scales[lane] = scale;
    }
    return 0;
}

static void pack_bias(const struct numoe_expert_source *source, uint64_t slice, float *out)
{
    const float *bias[2] = {source->gate_bias, source->up_bias};

    for (int m = 0; m < 2; m++)
        for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
            const uint64_t r = 32 * slice + numoe_lane_row(lane);
            out[32 * m + lane] =
                bias[m] && r < source->intermediate ? bias[m][r * source->bias_step] : 0.0f;
        }
}

int numoe_pack_slices(const struct numoe_slice_shape *shape,
                      const struct numoe_expert_source *source, uint64_t first, uint64_t count,
                      void *out, struct numoe_pack_report *report)
{
    const uint64_t H = source->hidden, I = source->intermediate, F = source->first_row;
    const uint64_t slices = I / 32 + (I % 32 != 0);

    if (H != shape->hidden || first > slices || count > slices - first || first < F / 32 ||
        F % 32 != 0)
        return -EINVAL;
    for (uint64_t s = first; s < first + count; s++) {
        uint8_t *slice = (uint8_t *)out + (s - first) * shape->bytes;
        uint8_t *down = slice + shape->down_offset;
        int rc;

        for (uint64_t b = 0; b < shape->hidden_tiles; b++) {
            uint8_t *pair = slice + b * NUMOE_PAIR_BYTES;
            rc = pack_tile(&source->gate, I - F, H, 32 * s - F, b, pair, 0, NUMOE_GATE, report);
            if (!rc)
                rc = pack_tile(&source->up, I - F, H, 32 * s - F, b, pair, 1, NUMOE_UP, report);
            if (rc) {
                report->bad_row += F;
                return rc;
            }
        }
        /* an odd last tile is paired with rows past H, which pack as zeros */
        for (uint64_t p = 0; p < (shape->hidden_tiles + 1) / 2 * 2; p++) {
            uint8_t *pair = down + p / 2 * NUMOE_PAIR_BYTES;
            rc = pack_tile(&source->down, H, I, 32 * p, s, pair, p % 2, NUMOE_DOWN, report);
            if (rc)
                return rc;
        }
        if (shape->bias)
            pack_bias(source, s, (float *)(void *)(slice + shape->bias_offset));
    }
    return 0;
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
