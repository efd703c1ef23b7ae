/* Ceiling loop of vdpbf16ps, 512 bits. SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_loops.h"
#include "kernel_sets.h"
#include "vec_avx512.h"

INL vf bf16_pairs(vf a, vf w, vf x)
{
    return vf_dot_bf16(a, vi_bits(w), vi_bits(x));
}
CEILING_DOT(numoe_ceiling_exact_avx512bf16, vf, vf_set(0.0f), vf_set(1.0f), bf16_pairs, 64)
