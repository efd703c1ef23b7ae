/* clock.h - time that only goes forward. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_CLOCK_H
#define NUMOE_CLOCK_H

#include <stdint.h>
#include <time.h>

/** Nanoseconds of the monotonic clock. */
static inline uint64_t numoe_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif
