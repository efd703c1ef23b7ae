/*
 * Exact and MXFP8 modes, AVX2: bf16 activations carried as floats, fp32 FMA.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h in bf16, sums in fp32
 *
 * Few tokens, one 32-byte load of codes (64 weights): 23 operations of decoding (vec_avx2.h), then
 * 8 FMA a token. Bound by instructions, not memory.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include "vec_avx2.h"

#include "vec_math.h"

#include "operand_f32.h"

#include "form_common.h"

enum {
    FEW_TOKENS = 4,
    FEW_LIMIT = FEW_TOKENS,
    FEW_AHEAD = 4352,
    MANY_TOKENS = 96,
    MANY_ROWS = 2,
    MANY_SUB = 6,
    MANY_CHUNK = 2,
    MANY_RUN = 4
};
#define FEW_STREAMS(M) 1
#define FEW_ROWS(M) ((M) == 1 ? 1 : (M) == 2 ? 4 : 2)
#include "form_few.h"
#define MANY_BLOCK 6
#include "form_many.h"

KERNEL_SET(numoe_exact_avx2, "avx2", "exact avx2", NUMOE_EXACT);
KERNEL_SET(numoe_mxfp8_avx2, "avx2", "mxfp8 avx2", NUMOE_MXFP8_UP);
KERNEL_SET(numoe_mxfp8_ocp_avx2, "avx2", "mxfp8-ocp avx2", NUMOE_MXFP8_OCP);
