/* Ceiling loops, AVX2. SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_loops.h"
#include "kernel_sets.h"
#include "vec_avx2.h"
CEILING_READ(numoe_ceiling_read_avx2, _mm256_add_epi64)

/* The multiplication alone counts: the adds go to other ports. */
INL vi int8_pairs(vi a, vi w, vi x)
{
    (void)w;
    return _mm256_maddubs_epi16(a, x);
}
CEILING_DOT(numoe_ceiling_int8_avx2, vi, vi_zero(), _mm256_set1_epi8(1), int8_pairs, 64)

INL vf fma_f32(vf a, vf w, vf x)
{
    return vf_fma(w, x, a);
}
CEILING_DOT(numoe_ceiling_exact_avx2, vf, vf_set(0.0f), vf_set(1.0f), fma_f32, 16)
