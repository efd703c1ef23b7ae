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

/* Within one isa name the first that the CPU has is the one meant. */
static const struct {
    const struct numoe_kernels *kernels;
    bool (*available)(void);
} variants[] = {
#if defined(__x86_64__)
    {&numoe_fast_avx512vnni, has_vnni}, {&numoe_fast_avx512, has_avx512},
    {&numoe_fast_avx2, has_avx2},       {&numoe_exact_avx512bf16, has_bf16},
    {&numoe_exact_avx512, has_avx512},  {&numoe_exact_avx2, has_avx2},
#endif
    {&numoe_fast_ref, always},          {&numoe_exact_ref, always},
};

enum { VARIANTS = sizeof variants / sizeof variants[0] };

const struct numoe_kernels *numoe_kernels_at(enum numoe_arithmetic arithmetic, size_t index)
{
    for (size_t i = 0; i < VARIANTS; i++)
        if (variants[i].kernels->arithmetic == arithmetic && variants[i].available() &&
            index-- == 0)
            return variants[i].kernels;
    return NULL;
}

const struct numoe_kernels *numoe_kernels_select(enum numoe_arithmetic arithmetic, const char *isa,
                                                 struct numoe_error *error)
{
    static const char *const names[] = {"ref", "avx2", "avx512", "avx512vnni"};
    bool known = false;

    if (arithmetic != NUMOE_FAST && arithmetic != NUMOE_EXACT) {
        numoe_error_set(error, -EINVAL, "arithmetic", "mode %d is not known", (int)arithmetic);
        return NULL;
    }
    if (!isa || !*isa)
        return numoe_kernels_at(arithmetic, 0);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        known = known || !strcmp(isa, names[i]);
    if (!known) {
        numoe_error_set(error, -EINVAL, "isa",
                        "\"%.40s\" is not one of ref, avx2, avx512, avx512vnni", isa);
        return NULL;
    }
#if defined(__x86_64__)
    /* A part with VNNI and without BF16 (Cascade Lake) runs the exact mode of "avx512". */
    if (arithmetic == NUMOE_EXACT && !strcmp(isa, "avx512vnni") && has_vnni() && !has_bf16())
        isa = "avx512";
#endif
    for (size_t i = 0; i < VARIANTS; i++)
        if (variants[i].kernels->arithmetic == arithmetic &&
            !strcmp(variants[i].kernels->isa, isa) && variants[i].available())
            return variants[i].kernels;
    numoe_error_set(error, -ENOTSUP, "isa", "this CPU or its OS does not support %s", isa);
    return NULL;
}
