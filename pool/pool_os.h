/*
 * pool_os.h - the seam between the pool and the system: clock, pause, futex.
 *
 * Inline, so that no spin loop calls through a pointer; a test build may put its own file of the
 * same name earlier on the include path.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_POOL_OS_H
#define NUMOE_POOL_OS_H

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

/** One turn of a spin loop. */
static inline void numoe_pool_os_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    __asm__ __volatile__("" ::: "memory");
#endif
}

static inline uint64_t numoe_pool_os_now_ns(void)
{
    return numoe_now_ns();
}

/**
 * Sleep while *word is expected. Returns for any reason (wake, change, signal), so callers look
 * again. Only a wake whose bits meet `bits` ends the sleep.
 */
static inline void numoe_pool_os_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t bits)
{
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, expected, NULL, NULL, bits);
}

/** Wake every sleeper on word whose bits meet `bits`. */
static inline void numoe_pool_os_wake(_Atomic uint32_t *word, uint32_t bits)
{
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, bits);
}

#define NUMOE_POOL_OS_ANY FUTEX_BITSET_MATCH_ANY

#endif
