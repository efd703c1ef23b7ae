/*
 * pool_os.h - the seam between the pool and the system: clock, pause, futex, threads, CPUs, memory.
 *
 * Inline, so that no spin loop calls through a pointer. A test that is to see failures and times of
 * its own choice compiles the pool's files for itself with NUMOE_POOL_OS_TEST defined, and defines
 * the functions that are declared for it here.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_POOL_OS_H
#define NUMOE_POOL_OS_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

/* What can fail. */
enum numoe_pool_os_call {
    NUMOE_POOL_OS_MEMORY,
    NUMOE_POOL_OS_ATTRIBUTES,
    NUMOE_POOL_OS_THREAD,
    NUMOE_POOL_OS_NAME,
    NUMOE_POOL_OS_GET_AFFINITY,
    NUMOE_POOL_OS_SET_AFFINITY,
    NUMOE_POOL_OS_CALLS
};

#ifdef NUMOE_POOL_OS_TEST
/** 0: go on; else the positive errno that this call fails with. */
int numoe_pool_os_fault(enum numoe_pool_os_call call);
uint64_t numoe_pool_os_test_now_ns(void);
/** The CPU that a thread on `cpu` is told. */
int numoe_pool_os_test_cpu(int cpu);
#else
static inline int numoe_pool_os_fault(enum numoe_pool_os_call call)
{
    (void)call;
    return 0;
}
#endif

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
#ifdef NUMOE_POOL_OS_TEST
    return numoe_pool_os_test_now_ns();
#else
    return numoe_now_ns();
#endif
}

/**
 * Sleep while *word is expected. Returns for any reason (wake, change, signal), so callers look
 * again. Only a wake whose bits meet `bits` ends the sleep.
 */
static inline void numoe_pool_os_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t bits)
{
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, expected, NULL, NULL, bits);
}

/** Wake every sleeper on word whose bits meet `bits`. The word may be gone already. */
static inline void numoe_pool_os_wake(_Atomic uint32_t *word, uint32_t bits)
{
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, bits);
}

#define NUMOE_POOL_OS_ANY FUTEX_BITSET_MATCH_ANY

/** Zeroed memory for free(), or NULL. */
static inline void *numoe_pool_os_memory(size_t count, size_t size)
{
    return numoe_pool_os_fault(NUMOE_POOL_OS_MEMORY) ? NULL : calloc(count, size);
}

/** The same, beginning with a cache line; size: whole lines. */
static inline void *numoe_pool_os_lines(size_t size, size_t line)
{
    void *memory = numoe_pool_os_fault(NUMOE_POOL_OS_MEMORY) ? NULL : aligned_alloc(line, size);

    return memory ? memset(memory, 0, size) : NULL;
}

/* The calls below return 0 or a positive errno. */

static inline int numoe_pool_os_thread(pthread_t *thread, size_t stack_bytes, void *(*main)(void *),
                                       void *argument)
{
    pthread_attr_t attributes;
    int rc = numoe_pool_os_fault(NUMOE_POOL_OS_ATTRIBUTES);

    if (!rc)
        rc = pthread_attr_init(&attributes);
    if (rc)
        return rc;
    rc = pthread_attr_setstacksize(&attributes, stack_bytes);
    if (!rc)
        rc = numoe_pool_os_fault(NUMOE_POOL_OS_THREAD);
    if (!rc)
        rc = pthread_create(thread, &attributes, main, argument);
    pthread_attr_destroy(&attributes);
    return rc;
}

/** Name the calling thread. */
static inline int numoe_pool_os_name(const char *name)
{
    int rc = numoe_pool_os_fault(NUMOE_POOL_OS_NAME);

    return rc ? rc : pthread_setname_np(pthread_self(), name);
}

/** CPUs that the calling thread may run on. */
static inline int numoe_pool_os_get_affinity(size_t size, cpu_set_t *mask)
{
    int rc = numoe_pool_os_fault(NUMOE_POOL_OS_GET_AFFINITY);

    return rc ? rc : pthread_getaffinity_np(pthread_self(), size, mask);
}

static inline int numoe_pool_os_set_affinity(size_t size, const cpu_set_t *mask)
{
    int rc = numoe_pool_os_fault(NUMOE_POOL_OS_SET_AFFINITY);

    return rc ? rc : pthread_setaffinity_np(pthread_self(), size, mask);
}

/** The CPU that the calling thread is on, or -1. */
static inline int numoe_pool_os_cpu(void)
{
#ifdef NUMOE_POOL_OS_TEST
    return numoe_pool_os_test_cpu(sched_getcpu());
#else
    return sched_getcpu();
#endif
}

#endif
