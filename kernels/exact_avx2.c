/*
 * Exact mode, AVX2: bf16 activations carried as floats, fp32 FMA.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h in bf16, sums in fp32
 *
 * Few tokens, one 32-byte load of codes (64 weights): for each 8 weights a shift, a look-up and
 * three operations for the sign, then 1 FMA a token. Bound by instructions, not memory.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include "vec_avx2.h"

#include "vec_math.h"

#include "operand_f32.h"

#include "form_common.h"

enum {
    FEW_TOKENS = 4,
    FEW_AHEAD = 2176,
    MANY_TOKENS = 96,
    MANY_ROWS = 2,
    MANY_CHUNK = 2,
    MANY_RUN = 4
};
#define FEW_STREAMS(M) 1
#define FEW_ROWS(M) ((M) == 1 ? 4 : (M) == 2 ? 4 : 2)
#include "form_few.h"
#define MANY_BLOCK 6
#include "form_many.h"

KERNEL_SET(numoe_exact_avx2, "avx2", "exact avx2", NUMOE_EXACT);
