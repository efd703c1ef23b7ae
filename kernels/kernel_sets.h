/* kernel_sets.h - every kernel set there is. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_KERNEL_SETS_H
#define NUMOE_KERNEL_SETS_H

#include "numoe_kernels.h"

extern const struct numoe_kernels numoe_fast_ref, numoe_fine_ref;
extern const struct numoe_kernels numoe_exact_ref, numoe_mxfp8_ref, numoe_mxfp8_ocp_ref;
#if defined(__x86_64__)
extern const struct numoe_kernels numoe_fast_avx2, numoe_fast_avxvnni, numoe_fast_avx512;
extern const struct numoe_kernels numoe_fast_avx512vnni, numoe_fast_avx512vnni256;
extern const struct numoe_kernels numoe_fine_avx2, numoe_fine_avxvnni;
extern const struct numoe_kernels numoe_fine_avx512vnni, numoe_fine_avx512vnni256;
/* One set of functions each for exact and the two MXFP8 modes. */
extern const struct numoe_kernels numoe_exact_avx2, numoe_mxfp8_avx2, numoe_mxfp8_ocp_avx2;
extern const struct numoe_kernels numoe_exact_avx512, numoe_mxfp8_avx512, numoe_mxfp8_ocp_avx512;
extern const struct numoe_kernels numoe_exact_avx512bf16, numoe_mxfp8_avx512bf16,
    numoe_mxfp8_ocp_avx512bf16;
extern const struct numoe_kernels numoe_exact_avx512bf16_256, numoe_mxfp8_avx512bf16_256,
    numoe_mxfp8_ocp_avx512bf16_256;

/* Ceiling loops of one instruction set (ceiling_*.c): `amount` iterations or bytes; work done. */
uint64_t numoe_ceiling_read_avx2(const void *buffer, uint64_t bytes);
uint64_t numoe_ceiling_int8_avx2(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx2(uint64_t iterations);
uint64_t numoe_ceiling_int8_avxvnni(uint64_t iterations);
uint64_t numoe_ceiling_read_avx512(const void *buffer, uint64_t bytes);
uint64_t numoe_ceiling_int8_avx512(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx512(uint64_t iterations);
uint64_t numoe_ceiling_int8_avx512vnni(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx512bf16(uint64_t iterations);
uint64_t numoe_ceiling_int8_avx512vnni256(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx512bf16_256(uint64_t iterations);
#endif

#endif
