/*
 * ceiling_loops.h - the loops whose rates are a machine's ceilings. Include after a vec_*.h.
 *
 * read: four sequential streams a thread, one per quarter of the buffer, two vectors of each in a
 * turn; sums keep the loads alive. dots: CHAINS independent accumulators, enough to cover the
 * latency of the dot; no memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CEILING_LOOPS_H
#define NUMOE_CEILING_LOOPS_H

enum { CHAINS = 12 };

/* Keep v in a register, as if changed: the loop around can be neither hoisted nor dropped. */
#ifdef __AVX512F__
#define KEEP(v) __asm__ volatile("" : "+v"(v))
#else
#define KEEP(v) __asm__ volatile("" : "+x"(v))
#endif

#define CEILING_READ(name, add)                                                                    \
    uint64_t name(const void *buffer, uint64_t bytes)                                              \
    {                                                                                              \
        const uint64_t quarter = bytes / 4 / 256 * 256;                                            \
        const uint8_t *p = buffer;                                                                 \
        vi sum[4] = {vi_zero(), vi_zero(), vi_zero(), vi_zero()};                                  \
                                                                                                   \
        for (uint64_t i = 0; i < quarter; i += 128)                                                \
            UNROLL                                                                                 \
        for (int s = 0; s < 4; s++)                                                                \
            UNROLL                                                                                 \
        for (int j = 0; j < 128; j += VB)                                                          \
            sum[s] = add(sum[s], vi_load(p + (uint64_t)s * quarter + i + (uint64_t)j));            \
        UNROLL                                                                                     \
        for (int s = 0; s < 4; s++)                                                                \
            KEEP(sum[s]);                                                                          \
        return 4 * quarter;                                                                        \
    }

/* dot(a, w, x): one instruction chain link; ops: operations in it */
#define CEILING_DOT(name, type, zero, one, dot, ops)                                               \
    uint64_t name(uint64_t iterations)                                                             \
    {                                                                                              \
        type a[CHAINS], w = one, x = one;                                                          \
                                                                                                   \
        UNROLL                                                                                     \
        for (int i = 0; i < CHAINS; i++)                                                           \
            a[i] = zero;                                                                           \
        KEEP(w);                                                                                   \
        KEEP(x);                                                                                   \
        for (uint64_t n = 0; n < iterations; n++)                                                  \
            UNROLL                                                                                 \
        for (int i = 0; i < CHAINS; i++) {                                                         \
            a[i] = dot(a[i], w, x);                                                                \
            KEEP(a[i]);                                                                            \
        }                                                                                          \
        return iterations * CHAINS * (ops);                                                        \
    }

#endif
