/*
 * An expert in the layout that Marlin kernels read, element by element: the oracle of the GPU's
 * repacking (kernels/cuda/moe_marlin.cu). numoe_kernels.h has the description.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "numoe_kernels.h"

#include <errno.h>

int numoe_marlin_sizes(const struct numoe_slice_shape *shape, uint64_t slices,
                       struct numoe_marlin_sizes *sizes)
{
    const uint64_t h = shape->hidden, i = 32 * slices;

    if (h % 64 != 0 || slices < 2 || h > UINT32_MAX || slices > UINT32_MAX / 64)
        return -EINVAL;
    *sizes = (struct numoe_marlin_sizes){
        .gate_up_words = h / 16 * (4 * i),
        .gate_up_scales = h / 32 * (2 * i),
        .down_words = i / 16 * (2 * h),
        .down_scales = i / 32 * h,
    };
    return 0;
}

struct reading {
    const struct numoe_slice_shape *shape;
    const uint8_t *slices;
    uint64_t count;
    bool down, interleaved;
};

/* Code and scale byte at output column n and input k of one of the two products. */
static unsigned read_at(const struct reading *r, uint64_t n, uint64_t k, unsigned *scale)
{
    const uint64_t rows = 32 * r->count; /* of gate, and of up */
    enum numoe_matrix matrix = NUMOE_DOWN;
    uint64_t row = n, slice = k / 32, at = k % 32;
    unsigned code;

    if (!r->down) {
        matrix = r->interleaved ? n % 2 ? NUMOE_UP : NUMOE_GATE : n < rows ? NUMOE_GATE : NUMOE_UP;
        row = r->interleaved ? n / 2 : n % rows;
        slice = row / 32;
        row %= 32;
        at = k;
    }
    numoe_slice_weight(r->shape, r->slices + slice * r->shape->bytes, matrix, row, at, &code,
                       scale);
    return code;
}

static void codes(const struct reading *r, uint64_t width, uint64_t depth, uint32_t *out)
{
    static const unsigned order[8] = {0, 2, 4, 6, 1, 3, 5, 7}, apart[4] = {0, 1, 8, 9};

    for (uint64_t k = 0; k < depth; k += 16)
        for (uint64_t n = 0; n < width; n += 64)
            for (unsigned lane = 0; lane < 32; lane++)
                for (unsigned block = 0; block < 4; block++) {
                    uint32_t word = 0;
                    for (unsigned nibble = 0; nibble < 8; nibble++) {
                        const unsigned e = order[nibble];
                        unsigned scale;
                        const unsigned code = read_at(r, n + 16 * block + 8 * (e / 4) + lane / 4,
                                                      k + 2 * (lane % 4) + apart[e % 4], &scale);
                        word |= (uint32_t)code << (4 * nibble);
                    }
                    *out++ = word;
                }
}

static void scales(const struct reading *r, uint64_t width, uint64_t depth, uint8_t *out)
{
    static const unsigned swap[4] = {0, 2, 1, 3};

    for (uint64_t k = 0; k < depth; k += 32)
        for (uint64_t n = 0; n < width; n += 64)
            for (unsigned i = 0; i < 64; i++) {
                const unsigned at = i / 4 * 4 + swap[i % 4];
                unsigned scale;
                read_at(r, n + at / 8 + 8 * (at % 8), k, &scale);
                *out++ = (uint8_t)scale;
            }
}

int numoe_marlin_reference(const struct numoe_slice_shape *shape, const void *slices,
                           uint64_t count, bool interleaved, const struct numoe_marlin *out)
{
    struct reading r = {shape, slices, count, false, interleaved};
    struct numoe_marlin_sizes sizes;
    const int rc = numoe_marlin_sizes(shape, count, &sizes);

    if (rc)
        return rc;
    codes(&r, 64 * count, shape->hidden, out->gate_up);
    scales(&r, 64 * count, shape->hidden, out->gate_up_scales);
    r.down = true;
    codes(&r, shape->hidden, 32 * count, out->down);
    scales(&r, shape->hidden, 32 * count, out->down_scales);
    return 0;
}
