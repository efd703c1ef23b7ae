/*
 * checked.h - 64-bit arithmetic on numbers that come from outside.
 *
 * Each function returns true and writes *out when the exact result fits, else returns false and
 * leaves *out alone.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CHECKED_H
#define NUMOE_CHECKED_H

#include <stdbool.h>
#include <stdint.h>

static inline bool numoe_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

static inline bool numoe_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

/** a rounded up to a multiple of unit (unit > 0). */
static inline bool numoe_round_up_u64(uint64_t a, uint64_t unit, uint64_t *out)
{
    uint64_t sum;
    if (!numoe_add_u64(a, unit - 1, &sum))
        return false;
    *out = sum / unit * unit;
    return true;
}

#endif
