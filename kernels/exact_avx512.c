/*
 * Exact and MXFP8 modes, AVX-512 F: bf16 activations carried as floats, fp32 FMA.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h in bf16, sums in fp32
 *
 * Few tokens, one 64-byte load of codes (128 weights): 7 shifts, 8 look-ups, 8 FMA a token.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include "vec_avx512.h"

#include "vec_math.h"

#include "operand_f32.h"

#include "form_common.h"

enum {
    FEW_TOKENS = 4,
    FEW_LIMIT = FEW_TOKENS,
    FEW_AHEAD = 8704,
    MANY_TOKENS = 96,
    MANY_ROWS = 2,
    MANY_SUB = 12,
    MANY_CHUNK = 4,
    MANY_RUN = 4
};
#define FEW_STREAMS(M) 2
#define FEW_ROWS(M) 2
#include "form_few.h"
#define MANY_BLOCK 12
#include "form_many.h"

KERNEL_SET(numoe_exact_avx512, "avx512", "exact avx512", NUMOE_EXACT);
KERNEL_SET(numoe_mxfp8_avx512, "avx512", "mxfp8 avx512", NUMOE_MXFP8_UP);
KERNEL_SET(numoe_mxfp8_ocp_avx512, "avx512", "mxfp8-ocp avx512", NUMOE_MXFP8_OCP);
