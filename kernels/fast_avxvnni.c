/*
 * Fast mode, AVX-VNNI: int8 activations, 256-bit vpdpbusd.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h int8 in groups of 32
 *
 * Few tokens, one 32-byte load of codes (64 weights): 2 and, 1 shift, 2 look-ups, 2 vpdpbusd a
 * token. SPDX-License-Identifier: Apache-2.0
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
    FEW_AHEAD = 4352,
    MANY_TOKENS = 96,
    MANY_ROWS = 2,
    MANY_SUB = 5,
    MANY_CHUNK = 8,
    MANY_RUN = 8
};
#define FEW_STREAMS(M) 1
#define FEW_ROWS(M) ((M) == 1 ? 4 : 2)
#include "form_few.h"
#define MANY_BLOCK 5
#include "form_many.h"

KERNEL_SET(numoe_fast_avxvnni, "avxvnni", "fast avxvnni", NUMOE_FAST);
