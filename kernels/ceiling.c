/* Choosing a ceiling loop. Built without ISA flags. SPDX-License-Identifier: Apache-2.0 */
#include "kernel_sets.h"

#include <string.h>

/* Plain C, for CPUs without vector kernels. */
static uint64_t read_plain(const void *buffer, uint64_t bytes)
{
    const uint64_t *p = buffer;
    uint64_t sum[4] = {0, 0, 0, 0};
    const uint64_t quarter = bytes / 4 / sizeof *p;

    for (uint64_t i = 0; i < quarter; i++)
        for (int s = 0; s < 4; s++)
            sum[s] += p[(uint64_t)s * quarter + i];
    for (int s = 0; s < 4; s++)
        __asm__ volatile("" : "+r"(sum[s]));
    return 4 * quarter * sizeof *p;
}

static uint64_t multiply_plain(uint64_t iterations)
{
    float a[8] = {0};

    for (uint64_t n = 0; n < iterations; n++)
        for (int i = 0; i < 8; i++) {
            a[i] = a[i] * 0.5f + 1.0f;
            __asm__ volatile("" : "+m"(a[i]));
        }
    return iterations * 8 * 2;
}

#if defined(__x86_64__)
/* Loops beside the kernel set whose mode they are the ceiling of. */
static const struct {
    const struct numoe_kernels *kernels;
    uint64_t (*loop)(uint64_t iterations);
} loops[] = {
    {&numoe_fast_avx512vnni, numoe_ceiling_int8_avx512vnni},
    {&numoe_fast_avx512vnni256, numoe_ceiling_int8_avx512vnni256},
    {&numoe_fast_avx512, numoe_ceiling_int8_avx512},
    {&numoe_fast_avxvnni, numoe_ceiling_int8_avxvnni},
    {&numoe_fast_avx2, numoe_ceiling_int8_avx2},
    {&numoe_exact_avx512bf16, numoe_ceiling_exact_avx512bf16},
    {&numoe_exact_avx512bf16_256, numoe_ceiling_exact_avx512bf16_256},
    {&numoe_exact_avx512, numoe_ceiling_exact_avx512},
    {&numoe_exact_avx2, numoe_ceiling_exact_avx2},
};
#endif

uint64_t numoe_ceiling_run(enum numoe_ceiling ceiling, const char *isa, const void *buffer,
                           uint64_t amount)
{
    const enum numoe_arithmetic arithmetic =
        ceiling == NUMOE_CEILING_EXACT ? NUMOE_EXACT : NUMOE_FAST;
    const struct numoe_kernels *k = numoe_kernels_select(arithmetic, isa, NULL);

    if (!k)
        return 0;
#if defined(__x86_64__)
    if (ceiling == NUMOE_CEILING_READ) {
        if (!strncmp(k->isa, "avx512", 6))
            return numoe_ceiling_read_avx512(buffer, amount);
        if (!strncmp(k->isa, "avx", 3))
            return numoe_ceiling_read_avx2(buffer, amount);
    } else {
        for (size_t i = 0; i < sizeof loops / sizeof loops[0]; i++)
            if (loops[i].kernels == k)
                return loops[i].loop(amount);
    }
#endif
    return ceiling == NUMOE_CEILING_READ ? read_plain(buffer, amount) : multiply_plain(amount);
}
