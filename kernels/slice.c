/*
 * Slices: shape, packing from checkpoint order, reading back, and the float64 reference.
 *
 * Packing is a lossless permutation of codes and scale bytes (numoe_kernels.h draws the tile).
 * Sixteen source bytes are one row's 32 codes of a group; they become four words, one in each
 * octet of the tile. Rows of a source lie powers of two apart, where caches hold few of them at a
 * time: so FOUR groups that are next to each other, a cache line of each row, are packed at once.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bf16.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

/* A matrix that is being packed, and whether its scales are such that many() is not exact. */
struct matrix {
    const struct numoe_mxfp4 *from;
    uint64_t rows, columns;
    unsigned which;
    uint64_t ahead; /* bytes between codes of one row and those that are packed soon after */
    struct numoe_pack_report *report;
};

/* Where groups [group, group + count) of rows [row, row + 32) go: halves of pair tiles `stride`
 * bytes apart. */
struct tiles {
    uint64_t row, group, count;
    uint8_t *pair;
    uint64_t stride;
    unsigned half;
};

/* codes 0 and 8 are zeros whatever the scale */
static bool is_extreme(uint8_t scale, uint32_t words_or)
{
    return (scale < SCALE_FOLD_MIN || scale > SCALE_FOLD_MAX) && (words_or & 0x77777777u);
}

/* The i-th group, row by row. Returns 0 or -EDOM. */
static int pack_tile(const struct matrix *m, const struct tiles *tiles, uint64_t i)
{
    uint8_t *pair = tiles->pair + i * tiles->stride;
    uint8_t *codes = tile_codes(pair, tiles->half), *scales = tile_scales(pair, tiles->half);
    const uint64_t group = tiles->group + i, left = m->columns - 32 * group;

    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        const uint64_t r = tiles->row + numoe_lane_row(lane);
        uint32_t word[4] = {0, 0, 0, 0};
        uint8_t scale = SCALE_ONE;

        if (r < m->rows) {
            const uint8_t *block =
                m->from->codes + r * m->from->code_stride + group * m->from->code_step;
            scale = m->from->scales[r * m->from->scale_stride + group * m->from->scale_step];
            if (scale == SCALE_NAN) {
                m->report->bad_matrix = m->which;
                m->report->bad_row = r;
                m->report->bad_group = group;
                return -EDOM;
            }
            if (left < 32) {
                uint8_t cut[16];
                cut_block(block, m->from->nibbles, (unsigned)left, cut);
                words_of_block(cut, NUMOE_NIBBLES_ADJACENT, word);
            } else {
                words_of_block(block, m->from->nibbles, word);
            }
            if (is_extreme(scale, word[0] | word[1] | word[2] | word[3]))
                m->report->extreme_scales = true;
        }
        for (int t = 0; t < 4; t++)
            memcpy(codes + 128 * t + 4 * lane, &word[t], 4);
        scales[lane] = scale;
    }
    return 0;
}

enum { FOUR = 4 };

#ifdef __SSE2__

/* 16-bit lanes of two codes, one in each byte, to one byte each. */
static __m128i join(__m128i v)
{
    return _mm_and_si128(_mm_or_si128(v, _mm_srli_epi16(v, 4)), _mm_set1_epi16(0xFF));
}

/* words_of_block, four words as one vector. */
static __m128i words_of_block_sse2(const uint8_t *block, enum numoe_nibbles order)
{
    const __m128i nibble = _mm_set1_epi8(15);
    __m128i v = _mm_loadu_si128((const __m128i *)(const void *)block), even, odd;

    even = _mm_and_si128(v, nibble);
    odd = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
    if (order != NUMOE_NIBBLES_ADJACENT) {
        v = _mm_packus_epi16(join(even), join(odd));
        even = _mm_and_si128(v, nibble);
        odd = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
    }
    v = _mm_packus_epi16(join(even), join(odd));
    return _mm_unpacklo_epi16(v, _mm_srli_si128(v, 8));
}

/* Scale bytes of FOUR groups, in lane order. @return whether all are in SCALE_FOLD_MIN..MAX */
static bool four_scales(const struct matrix *m, const struct tiles *tiles,
                        uint8_t scales[FOUR][NUMOE_TILE])
{
    const uint64_t step = m->from->scale_step;
    uint8_t most = 0;

    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        const uint8_t *from = m->from->scales +
                              (tiles->row + numoe_lane_row(lane)) * m->from->scale_stride +
                              tiles->group * step;

        for (unsigned j = 0; j < FOUR; j++)
            scales[j][lane] = from[j * step];
    }
    for (unsigned j = 0; j < FOUR; j++)
        for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
            const uint8_t off = (uint8_t)(scales[j][lane] - SCALE_FOLD_MIN);
            most = off > most ? off : most;
        }
    return most <= SCALE_FOLD_MAX - SCALE_FOLD_MIN;
}

/* Four rows, 8 apart, of FOUR groups: words transposed, so that each octet gets 16 bytes. */
static void four_rows(const struct matrix *m, const struct tiles *tiles, unsigned g)
{
    const struct numoe_mxfp4 *from = m->from;
    const uint8_t *block =
        from->codes + (tiles->row + g) * from->code_stride + tiles->group * from->code_step;
    uint8_t *out = tile_codes(tiles->pair, tiles->half) + 16 * g;

    for (unsigned j = 0; j < FOUR; j++, block += from->code_step, out += tiles->stride) {
        __m128i w[4], low[2], high[2];

        for (unsigned i = 0; i < 4; i++) {
            const uint8_t *codes = block + 8 * i * from->code_stride;

            if (j == 0)
                _mm_prefetch((const char *)codes + m->ahead, _MM_HINT_T0);
            w[i] = words_of_block_sse2(codes, from->nibbles);
        }
        for (unsigned i = 0; i < 2; i++) {
            low[i] = _mm_unpacklo_epi32(w[2 * i], w[2 * i + 1]);
            high[i] = _mm_unpackhi_epi32(w[2 * i], w[2 * i + 1]);
        }
        _mm_store_si128((__m128i *)(void *)out, _mm_unpacklo_epi64(low[0], low[1]));
        _mm_store_si128((__m128i *)(void *)(out + 128), _mm_unpackhi_epi64(low[0], low[1]));
        _mm_store_si128((__m128i *)(void *)(out + 256), _mm_unpacklo_epi64(high[0], high[1]));
        _mm_store_si128((__m128i *)(void *)(out + 384), _mm_unpackhi_epi64(high[0], high[1]));
    }
}

/* FOUR groups whose rows and columns are all there and whose scales are no NaN. @return false: they
 * are not, and nothing was done */
static bool pack_four(const struct matrix *m, const struct tiles *tiles)
{
    uint8_t scales[FOUR][NUMOE_TILE];
    bool ordinary;

    if (tiles->count != FOUR || tiles->row + NUMOE_TILE > m->rows ||
        (tiles->group + FOUR) * 32 > m->columns)
        return false;
    ordinary = four_scales(m, tiles, scales);
    if (!ordinary && memchr(scales, SCALE_NAN, sizeof scales))
        return false;
    for (unsigned g = 0; g < 8; g++)
        four_rows(m, tiles, g);
    for (unsigned j = 0; j < FOUR; j++) {
        uint8_t *pair = tiles->pair + j * tiles->stride;
        const uint8_t *codes = tile_codes(pair, tiles->half);

        memcpy(tile_scales(pair, tiles->half), scales[j], NUMOE_TILE);
        for (unsigned lane = 0; lane < NUMOE_TILE && !ordinary; lane++) {
            uint32_t words = 0;

            for (unsigned t = 0; t < 4; t++)
                words |= load32(codes + 128 * t + 4 * lane);
            if (is_extreme(scales[j][lane], words))
                m->report->extreme_scales = true;
        }
    }
    return true;
}

#else

static bool pack_four(const struct matrix *m, const struct tiles *tiles)
{
    (void)m, (void)tiles;
    return false;
}

#endif

static int pack_tiles(const struct matrix *m, const struct tiles *tiles)
{
    int rc = 0;

    if (pack_four(m, tiles))
        return 0;
    for (uint64_t i = 0; !rc && i < tiles->count; i++)
        rc = pack_tile(m, tiles, i);
    return rc;
}

static uint64_t at_most_four(uint64_t count)
{
    return count < FOUR ? count : FOUR;
}

static int pack_gate_up(const struct numoe_slice_shape *shape,
                        const struct numoe_expert_source *source, uint64_t s, uint8_t *slice,
                        struct numoe_pack_report *report)
{
    enum { AHEAD = 3 };
    const struct numoe_mxfp4 *const from[] = {&source->gate, &source->up};

    for (uint64_t b = 0; b < shape->hidden_tiles; b += FOUR)
        for (unsigned half = 0; half < 2; half++) {
            const struct matrix m = {from[half],
                                     source->intermediate - source->first_row,
                                     source->hidden,
                                     half ? NUMOE_UP : NUMOE_GATE,
                                     AHEAD * FOUR * from[half]->code_step,
                                     report};
            const struct tiles tiles = {32 * s - source->first_row,
                                        b,
                                        at_most_four(shape->hidden_tiles - b),
                                        slice + b * NUMOE_PAIR_BYTES,
                                        NUMOE_PAIR_BYTES,
                                        half};
            const int rc = pack_tiles(&m, &tiles);

            if (rc) {
                report->bad_row += source->first_row;
                return rc;
            }
        }
    return 0;
}

/* Of slices [first, first + count): row by row, as they lie, for all slices. */
static int pack_down(const struct numoe_slice_shape *shape,
                     const struct numoe_expert_source *source, uint64_t first, uint64_t count,
                     uint8_t *slice, struct numoe_pack_report *report)
{
    const struct matrix m = {&source->down,
                             source->hidden,
                             source->intermediate,
                             NUMOE_DOWN,
                             NUMOE_TILE * source->down.code_stride,
                             report};

    /* an odd last tile is paired with rows past H, which pack as zeros */
    for (uint64_t p = 0; p < (shape->hidden_tiles + 1) / 2 * 2; p++)
        for (uint64_t s = 0; s < count; s += FOUR) {
            const struct tiles tiles = {32 * p,
                                        first + s,
                                        at_most_four(count - s),
                                        slice + s * shape->bytes + shape->down_offset +
                                            p / 2 * NUMOE_PAIR_BYTES,
                                        shape->bytes,
                                        p % 2};
            const int rc = pack_tiles(&m, &tiles);

            if (rc)
                return rc;
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
    const uint64_t I = source->intermediate, F = source->first_row;
    const uint64_t slices = I / 32 + (I % 32 != 0);

    if (source->hidden != shape->hidden || first > slices || count > slices - first ||
        first < F / 32 || F % 32 != 0)
        return -EINVAL;
    for (uint64_t i = 0; i < count; i++) {
        uint8_t *slice = (uint8_t *)out + i * shape->bytes;
        int rc = pack_gate_up(shape, source, first + i, slice, report);

        if (rc)
            return rc;
        if (shape->bias)
            pack_bias(source, first + i, (float *)(void *)(slice + shape->bias_offset));
    }
    return pack_down(shape, source, first, count, out, report);
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
