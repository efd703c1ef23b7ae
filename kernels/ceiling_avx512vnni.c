/* Ceiling loop of vpdpbusd, 512 bits. SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_loops.h"
#include "kernel_sets.h"
#include "vec_avx512.h"

CEILING_DOT(numoe_ceiling_int8_avx512vnni, vi, vi_zero(), _mm512_set1_epi8(1), vi_dot_quads, 128)
