/* kernel_sets.h - every kernel set there is. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_KERNEL_SETS_H
#define NUMOE_KERNEL_SETS_H

#include "numoe_kernels.h"

extern const struct numoe_kernels numoe_fast_ref, numoe_exact_ref;
#if defined(__x86_64__)
extern const struct numoe_kernels numoe_fast_avx2, numoe_fast_avx512, numoe_fast_avx512vnni;
extern const struct numoe_kernels numoe_exact_avx2, numoe_exact_avx512, numoe_exact_avx512bf16;

/* Ceiling loops of one instruction set (ceiling_*.c): `amount` iterations or bytes; work done. */
uint64_t numoe_ceiling_read_avx2(const void *buffer, uint64_t bytes);
uint64_t numoe_ceiling_int8_avx2(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx2(uint64_t iterations);
uint64_t numoe_ceiling_read_avx512(const void *buffer, uint64_t bytes);
uint64_t numoe_ceiling_int8_avx512(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx512(uint64_t iterations);
uint64_t numoe_ceiling_int8_avx512vnni(uint64_t iterations);
uint64_t numoe_ceiling_exact_avx512bf16(uint64_t iterations);
#endif

#endif
