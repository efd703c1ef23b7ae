/* Halves of the few-token form for row-sharing, AVX-512 VNNI: parameters of fast_avx512vnni.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "numoe_kernels.h"

#include "vec_avx512.h"

#include "vec_math.h"

#define INT8_PAIRS 0
#include "operand_int8.h"

#include "form_common.h"

enum { FEW_TOKENS = 4, FEW_LIMIT = FEW_TOKENS, FEW_AHEAD = 8704 };
#define FEW_STREAMS(M) 2
#define FEW_ROWS(M) 2
#include "form_few.h"

#include "row_share_kernels.h"

ROW_SHARE_SET(row_share_avx512vnni, "avx512vnni");
