/*
 * Packing: slices from checkpoint order to tile order.
 *
 * A lossless permutation of codes and scale bytes (numoe_kernels.h draws the tile). Sixteen source
 * bytes are one row's 32 codes of a group; they become four words, one in each octet of the tile.
 * Rows of a source lie powers of two apart, where caches hold few of them at a time: so groups that
 * are next to each other, a cache line of each row, are packed at once, and pairs of tiles
 * together, so that whole lines are written. That is pack_pairs (pack_avx2.c); what is not whole,
 * or has a scale that is no number, is packed row by row here.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pack_pairs.h"

#include <errno.h>
#include <string.h>

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

/* A matrix that is being packed. */
struct matrix {
    const struct numoe_mxfp4 *from;
    uint64_t rows, columns;
    unsigned which;
    uint64_t ahead; /* bytes between codes of one row and those to fetch meanwhile; 0: none */
};

/* Rows [row, row + 32) of a matrix. */
struct rows {
    const struct matrix *matrix;
    uint64_t row;
};

/* Groups [group, group + count) of two times 32 rows, to pair tiles `stride` bytes apart. */
struct pairs {
    struct rows half[2];
    uint64_t group, count;
    uint8_t *out;
    uint64_t stride;
};

/* codes 0 and 8 are zeros whatever the scale */
static bool is_extreme(uint8_t scale, uint32_t words_or)
{
    return (scale < SCALE_FOLD_MIN || scale > SCALE_FOLD_MAX) && (words_or & 0x77777777u);
}

/* Tile `half` of the pair tile of the i-th group, row by row. Returns 0 or -EDOM. */
static int pack_tile(const struct pairs *pairs, uint64_t i, unsigned half,
                     struct numoe_pack_report *report)
{
    const struct matrix *m = pairs->half[half].matrix;
    uint8_t *pair = pairs->out + i * pairs->stride;
    uint8_t *codes = pair + 512 * half, *scales = pair + 1024 + 32 * half;
    const uint64_t group = pairs->group + i, left = m->columns - 32 * group;

    for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
        const uint64_t r = pairs->half[half].row + numoe_lane_row(lane);
        uint32_t word[4] = {0, 0, 0, 0};
        uint8_t scale = SCALE_ONE;

        if (r < m->rows) {
            const uint8_t *block =
                m->from->codes + r * m->from->code_stride + group * m->from->code_step;
            scale = m->from->scales[r * m->from->scale_stride + group * m->from->scale_step];
            if (scale == SCALE_NAN) {
                report->bad_matrix = m->which;
                report->bad_row = r;
                report->bad_group = group;
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
                report->extreme_scales = true;
        }
        for (int t = 0; t < 4; t++)
            memcpy(codes + 128 * t + 4 * lane, &word[t], 4);
        scales[lane] = scale;
    }
    return 0;
}

#if defined(__x86_64__)

static bool has_fast(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

/* Pair tiles whose rows and columns are all there. @return false: nothing was done */
static bool pack_fast(const struct pairs *pairs, struct numoe_pack_report *report)
{
    struct numoe_pack_pairs fast = {.nibbles = pairs->half[0].matrix->from->nibbles,
                                    .count = (unsigned)pairs->count,
                                    .out = pairs->out,
                                    .stride = pairs->stride};
    enum numoe_packed packed;

    for (unsigned half = 0; half < 2; half++) {
        const struct matrix *m = pairs->half[half].matrix;
        const struct numoe_mxfp4 *from = m->from;
        const uint64_t row = pairs->half[half].row;

        if (row + NUMOE_TILE > m->rows || (pairs->group + pairs->count) * 32 > m->columns ||
            from->nibbles != fast.nibbles)
            return false;
        fast.side[half] = (struct numoe_pack_side){
            .codes = from->codes + row * from->code_stride + pairs->group * from->code_step,
            .scales = from->scales + row * from->scale_stride + pairs->group * from->scale_step,
            .code_stride = from->code_stride,
            .code_step = from->code_step,
            .scale_stride = from->scale_stride,
            .scale_step = from->scale_step,
            .ahead = m->ahead};
    }
    packed = numoe_pack_pairs_avx2(&fast);
    if (packed == NUMOE_PACKED_EXTREME)
        report->extreme_scales = true;
    return packed != NUMOE_NOT_PACKED;
}

static void pack_done(void)
{
    numoe_pack_done_avx2();
}

#else

static bool has_fast(void)
{
    return false;
}

static bool pack_fast(const struct pairs *pairs, struct numoe_pack_report *report)
{
    (void)pairs, (void)report;
    return false;
}

static void pack_done(void)
{
}

#endif

static int pack_pairs(const struct pairs *pairs, bool fast, struct numoe_pack_report *report)
{
    int rc = 0;

    if (fast && pack_fast(pairs, report))
        return 0;
    for (uint64_t i = 0; !rc && i < pairs->count; i++) {
        rc = pack_tile(pairs, i, 0, report);
        if (!rc)
            rc = pack_tile(pairs, i, 1, report);
    }
    return rc;
}

static uint64_t at_most_pairs(uint64_t count)
{
    return count < PACK_PAIRS ? count : PACK_PAIRS;
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

/* Gate and up of slice s. */
static int pack_slice(const struct numoe_slice_shape *shape,
                      const struct numoe_expert_source *source, uint64_t s, uint8_t *slice,
                      bool fast, struct numoe_pack_report *report)
{
    const uint64_t ahead = source->near ? 0 : 8 * PACK_PAIRS;
    const uint64_t rows = source->intermediate - source->first_row;
    const uint64_t row = 32 * s - source->first_row;
    const struct matrix gate = {&source->gate, rows, source->hidden, NUMOE_GATE,
                                ahead * source->gate.code_step};
    const struct matrix up = {&source->up, rows, source->hidden, NUMOE_UP,
                              ahead * source->up.code_step};

    for (uint64_t b = 0; b < shape->hidden_tiles; b += PACK_PAIRS) {
        const struct pairs pairs = {{{&gate, row}, {&up, row}},
                                    b,
                                    at_most_pairs(shape->hidden_tiles - b),
                                    slice + b * NUMOE_PAIR_BYTES,
                                    NUMOE_PAIR_BYTES};
        const int rc = pack_pairs(&pairs, fast, report);

        if (rc) {
            report->bad_row += source->first_row;
            return rc;
        }
    }
    return 0;
}

static int check(const struct numoe_slice_shape *shape, const struct numoe_expert_source *source,
                 uint64_t first, uint64_t count)
{
    const uint64_t I = source->intermediate;
    const uint64_t slices = I / 32 + (I % 32 != 0);

    if (source->hidden != shape->hidden || first > slices || count > slices - first)
        return -EINVAL;
    return 0;
}

int numoe_pack_gate_up(const struct numoe_slice_shape *shape,
                       const struct numoe_expert_source *source, uint64_t first, uint64_t count,
                       void *out, struct numoe_pack_report *report)
{
    const bool fast = has_fast();
    int rc = check(shape, source, first, count);

    if (!rc && (first < source->first_row / 32 || source->first_row % 32))
        rc = -EINVAL;
    for (uint64_t i = 0; !rc && i < count; i++) {
        uint8_t *slice = (uint8_t *)out + i * shape->bytes;

        rc = pack_slice(shape, source, first + i, slice, fast, report);
        if (!rc && shape->bias)
            pack_bias(source, first + i, (float *)(void *)(slice + shape->bias_offset));
    }
    if (fast)
        pack_done();
    return rc;
}

/* Row by row, as they lie, for all slices. */
int numoe_pack_down(const struct numoe_slice_shape *shape, const struct numoe_expert_source *source,
                    uint64_t first, uint64_t count, uint64_t pair, uint64_t pairs, void *out,
                    struct numoe_pack_report *report)
{
    const uint64_t row = source->down_row, column = source->down_column;
    const uint64_t all = (shape->hidden_tiles + 1) / 2, end = pair + pairs;
    const struct matrix down = {&source->down, source->hidden - row, source->intermediate - column,
                                NUMOE_DOWN,
                                source->near ? 0 : 2 * NUMOE_TILE * source->down.code_stride};
    const bool fast = has_fast();
    int rc = check(shape, source, first, count);

    if (!rc && (pair > all || pairs > all - pair || pair < row / 64 || row % 64 ||
                first < column / 32 || column % 32))
        rc = -EINVAL;
    /* an odd last tile is paired with rows past H, which pack as zeros */
    for (; !rc && pair < end; pair++)
        for (uint64_t s = 0; !rc && s < count; s += PACK_PAIRS) {
            const uint64_t at = 64 * pair - row;
            const struct pairs tiles = {{{&down, at}, {&down, at + 32}},
                                        first + s - column / 32,
                                        at_most_pairs(count - s),
                                        (uint8_t *)out + s * shape->bytes + shape->down_offset +
                                            pair * NUMOE_PAIR_BYTES,
                                        shape->bytes};
            rc = pack_pairs(&tiles, fast, report);
        }
    if (rc == -EDOM) {
        report->bad_row += row;
        report->bad_group += column / 32;
    }
    if (fast)
        pack_done();
    return rc;
}

int numoe_pack_slices(const struct numoe_slice_shape *shape,
                      const struct numoe_expert_source *source, uint64_t first, uint64_t count,
                      void *out, struct numoe_pack_report *report)
{
    int rc = numoe_pack_gate_up(shape, source, first, count, out, report);

    if (!rc)
        rc = numoe_pack_down(shape, source, first, count, 0, (shape->hidden_tiles + 1) / 2, out,
                             report);
    return rc;
}
