/*
 * Rows of several places summed on the host, block by block: what is between the places and `to`
 * stays in the first cache, and each loop is over two arrays, as vectors.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "bf16.h"
#include "numoe_gpu.h"

enum { BLOCK = 1024 };

static void add(float *restrict to, const float *restrict from, uint64_t n)
{
    for (uint64_t k = 0; k < n; k++)
        to[k] += from[k];
}

static void add_two(float *restrict to, const float *restrict a, const float *restrict b,
                    uint64_t n)
{
    for (uint64_t k = 0; k < n; k++)
        to[k] = a[k] + b[k];
}

static void add_narrow(uint16_t *restrict to, const float *restrict from, uint64_t n)
{
    for (uint64_t k = 0; k < n; k++)
        to[k] = numoe_float_to_bf16(numoe_bf16_to_float(to[k]) + from[k]);
}

static void narrow(uint16_t *restrict to, const float *restrict from, uint64_t n)
{
    for (uint64_t k = 0; k < n; k++)
        to[k] = numoe_float_to_bf16(from[k]);
}

/* The sum of n values of each place from `at` on: in `block`, or where it is already. */
static const float *sum_places(const float *const *from, uint32_t count, uint64_t at, uint64_t n,
                               float *block)
{
    if (count == 1)
        return from[0] + at;
    add_two(block, from[0] + at, from[1] + at, n);
    for (uint32_t i = 2; i < count; i++)
        add(block, from[i] + at, n);
    return block;
}

void numoe_gpu_sum_rows(void *to, enum numoe_type type, uint64_t to_stride,
                        const float *const *from, uint32_t count, bool keep, uint64_t columns,
                        uint64_t rows)
{
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < columns; c += BLOCK) {
            const uint64_t n = columns - c < BLOCK ? columns - c : BLOCK;
            float block[BLOCK];
            const float *sum = sum_places(from, count, r * columns + c, n, block);
            const uint64_t at = r * to_stride + c;

            if (type == NUMOE_BF16)
                (keep ? add_narrow : narrow)((uint16_t *)to + at, sum, n);
            else if (keep)
                add((float *)to + at, sum, n);
            else
                memcpy((float *)to + at, sum, n * sizeof *sum);
        }
}
