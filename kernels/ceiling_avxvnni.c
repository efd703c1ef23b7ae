/* Ceiling loop of vpdpbusd, 256 bits, VEX. SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_loops.h"
#include "kernel_sets.h"
#include "vec_avx2.h"

CEILING_DOT(numoe_ceiling_int8_avxvnni, vi, vi_zero(), _mm256_set1_epi8(1), vi_dot_quads, 64)
