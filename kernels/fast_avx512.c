/*
 * Fast mode, AVX-512 BW without VNNI: int8 activations, vpmaddubsw with wrapping 16-bit sums.
 *
 *   y = sum_s W2[:, s] act(W1[s] x, W3[s] x)   (numoe_kernels.h), x and h int8 in groups of 32
 *
 * Few tokens, one 64-byte load of codes: 2 and, 1 shift, 2 look-ups, then 2 vpmaddubsw and 2 adds
 * a token.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include "vec_avx512.h"

#include "vec_math.h"

#define INT8_PAIRS 1
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
#define FEW_ROWS(M) 2
#include "form_few.h"
#define MANY_BLOCK 6
#include "form_many.h"

KERNEL_SET(numoe_fast_avx512, "avx512", "fast avx512", NUMOE_FAST);
