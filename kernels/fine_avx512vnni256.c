/*
 * Fine mode, AVX-512 VNNI in 256-bit vectors: the same bits as fine_avx512vnni.c.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h as two int8 planes
 *
 * See fast_avx512vnni256.c for when.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include "vec_avx2.h"

#include "vec_math.h"

#define INT8_PAIRS 0
#include "operand_fine.h"

#include "form_common.h"

enum {
    FEW_TOKENS = 4,
    FEW_LIMIT = FEW_TOKENS,
    FEW_AHEAD = 8704,
    MANY_TOKENS = 96,
    MANY_ROWS = 2,
    MANY_SUB = 5,
    MANY_CHUNK = 8,
    MANY_RUN = 8
};
#define FEW_STREAMS(M) 2
#define FEW_ROWS(M) 2
#include "form_few.h"
#define MANY_BLOCK 5
#include "form_many.h"

KERNEL_SET(numoe_fine_avx512vnni256, "avx512vnni256", "fine avx512vnni256", NUMOE_FINE);
