/* Halves of the few-token form for row-sharing, AVX2: parameters of fast_avx2.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "numoe_kernels.h"

#include "vec_avx2.h"

#include "vec_math.h"

#define INT8_PAIRS 1
#include "operand_int8.h"

#include "form_common.h"

enum { FEW_TOKENS = 4, FEW_LIMIT = FEW_TOKENS, FEW_AHEAD = 4352 };
#define FEW_STREAMS(M) 1
#define FEW_ROWS(M) ((M) == 1 ? 4 : 2)
#include "form_few.h"

#include "row_share_kernels.h"

ROW_SHARE_SET(row_share_avx2, "avx2");
