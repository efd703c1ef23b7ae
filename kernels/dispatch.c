/*
 * Which kernel set runs: every variant with the CPU features it needs, best first. Built without
 * ISA flags. The feature tests also ask the OS whether it saves the registers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "kernel_sets.h"

#include <errno.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>

static bool has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_vnni(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}

static bool has_bf16(void)
{
    return has_vnni() && __builtin_cpu_supports("avx512bf16");
}

/* Compilers name this feature only since a while: CPUID 7.1, EAX bit 4. */
static bool has_avxvnni(void)
{
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;

    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}

unsigned numoe_kernels_enter(void)
{
    const unsigned saved = _mm_getcsr();

    if (saved != 0x1F80)
        _mm_setcsr(0x1F80);
    return saved;
}

void numoe_kernels_leave(unsigned saved)
{
    /* sticky exception flags count as the host's too */
    if (_mm_getcsr() != saved)
        _mm_setcsr(saved);
}
#else
unsigned numoe_kernels_enter(void)
{
    return 0;
}

void numoe_kernels_leave(unsigned saved)
{
    (void)saved;
}
#endif

static bool always(void)
{
    return true;
}

/* Best first; an arithmetic has at most one set of an isa. */
static const struct {
    const struct numoe_kernels *kernels;
    bool (*available)(void);
} variants[] = {
#if defined(__x86_64__)
    {&numoe_fast_avx512vnni, has_vnni},
    {&numoe_fast_avx512vnni256, has_vnni},
    {&numoe_fast_avx512, has_avx512},
    {&numoe_fast_avxvnni, has_avxvnni},
    {&numoe_fast_avx2, has_avx2},
    {&numoe_fine_avx512vnni, has_vnni},
    {&numoe_fine_avx512vnni256, has_vnni},
    {&numoe_fine_avxvnni, has_avxvnni},
    {&numoe_fine_avx2, has_avx2},
    {&numoe_exact_avx512bf16, has_bf16},
    {&numoe_exact_avx512bf16_256, has_bf16},
    {&numoe_exact_avx512, has_avx512},
    {&numoe_exact_avx2, has_avx2},
    {&numoe_mxfp8_avx512bf16, has_bf16},
    {&numoe_mxfp8_avx512bf16_256, has_bf16},
    {&numoe_mxfp8_avx512, has_avx512},
    {&numoe_mxfp8_avx2, has_avx2},
    {&numoe_mxfp8_ocp_avx512bf16, has_bf16},
    {&numoe_mxfp8_ocp_avx512bf16_256, has_bf16},
    {&numoe_mxfp8_ocp_avx512, has_avx512},
    {&numoe_mxfp8_ocp_avx2, has_avx2},
#endif
    {&numoe_fast_ref, always},
    {&numoe_fine_ref, always},
    {&numoe_exact_ref, always},
    {&numoe_mxfp8_ref, always},
    {&numoe_mxfp8_ocp_ref, always},
};

enum { VARIANTS = sizeof variants / sizeof variants[0] };

/* Names of instruction sets, each with the one that serves where it has no set of an arithmetic, or
 * where the CPU lacks what that set takes beyond the name (BF16). */
static const struct {
    const char *name, *next;
#if defined(__x86_64__)
    bool (*available)(void);
#endif
} isas[] = {
#if defined(__x86_64__)
    {"avx512vnni", "avx512", has_vnni}, {"avx512vnni256", "avx512", has_vnni},
    {"avx512", "avx2", has_avx512},     {"avxvnni", "avx2", has_avxvnni},
    {"avx2", "ref", has_avx2},          {"ref", NULL, always},
#else
    {"avx512vnni", NULL}, {"avx512vnni256", NULL}, {"avx512", NULL},
    {"avxvnni", NULL},    {"avx2", NULL},          {"ref", NULL},
#endif
};

enum { ISAS = sizeof isas / sizeof isas[0] };

const struct numoe_kernels *numoe_kernels_at(enum numoe_arithmetic arithmetic, size_t index)
{
    for (size_t i = 0; i < VARIANTS; i++)
        if (variants[i].kernels->arithmetic == arithmetic && variants[i].available() &&
            index-- == 0)
            return variants[i].kernels;
    return NULL;
}

static size_t isa_index(const char *name)
{
    size_t i = 0;

    while (i < ISAS && strcmp(isas[i].name, name) != 0)
        i++;
    return i;
}

const struct numoe_kernels *numoe_kernels_select(enum numoe_arithmetic arithmetic, const char *isa,
                                                 struct numoe_error *error)
{
    size_t named;

    if ((int)arithmetic < 1 || (int)arithmetic > NUMOE_ARITHMETICS) {
        numoe_error_set(error, -EINVAL, "arithmetic", "mode %d is not known", (int)arithmetic);
        return NULL;
    }
    if (!isa || !*isa)
        return numoe_kernels_at(arithmetic, 0);
    named = isa_index(isa);
    if (named == ISAS) {
        numoe_error_set(error, -EINVAL, "isa",
                        "\"%.40s\" is not one of ref, avx2, avxvnni, avx512, avx512vnni, "
                        "avx512vnni256",
                        isa);
        return NULL;
    }
#if defined(__x86_64__)
    if (!isas[named].available())
        goto absent;
#endif
    for (const char *name = isa; name; name = isas[isa_index(name)].next)
        for (size_t i = 0; i < VARIANTS; i++)
            if (variants[i].kernels->arithmetic == arithmetic &&
                !strcmp(variants[i].kernels->isa, name) && variants[i].available())
                return variants[i].kernels;
absent:
    numoe_error_set(error, -ENOTSUP, "isa", "this CPU or its OS does not support %s", isa);
    return NULL;
}
