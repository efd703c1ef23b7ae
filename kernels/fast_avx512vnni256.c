/*
 * Fast mode, AVX-512 VNNI in 256-bit vectors: the same instructions and bits as fast_avx512vnni.c.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h int8 in groups of 32
 *
 * For parts whose 512-bit units are halves of 256, or that lower their clock for 512 bits.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include "vec_avx2.h"

#include "vec_math.h"

#define INT8_PAIRS 0
#include "operand_int8.h"

#include "form_common.h"

enum {
    FEW_TOKENS = 4,
    FEW_LIMIT = FEW_TOKENS,
    FEW_AHEAD = 8704,
    MANY_TOKENS = 96,
    MANY_ROWS = 2,
    MANY_SUB = 6,
    MANY_CHUNK = 8,
    MANY_RUN = 8
};
#define FEW_STREAMS(M) 2
#define FEW_ROWS(M) ((M) == 1 ? 4 : 2)
#include "form_few.h"
#define MANY_BLOCK 6
#include "form_many.h"

KERNEL_SET(numoe_fast_avx512vnni256, "avx512vnni256", "fast avx512vnni256", NUMOE_FAST);
