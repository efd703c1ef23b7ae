/*
 * pool_range.h - the range word: what a worker still has to run, in one 64-bit atomic.
 *
 *      63        48 47            24 23             0
 *     +------------+----------------+----------------+
 *     |   epoch    |      end       |     begin      |     items begin .. end-1; empty: begin = end
 *     +------------+----------------+----------------+
 *
 * Protocol
 *   - Only its owner makes an empty word non-empty (numoe_pool_range_put), and only with items that
 *     it has already claimed, from its own share or from another's word. The word being empty,
 *     nobody else can change it: a plain store is enough.
 *   - The owner takes single items from the front, thieves any number from the back, both by
 *     compare-and-swap of the whole word. What a swap removed belongs to the swapper alone.
 *   - The epoch is the low 16 bits of the phase number. A thief that was held up since another
 *     phase finds another epoch and its swap fails.
 *
 * The epoch comes round every 65536 phase numbers, so a thief held up for just that long may swap a
 * word of phase n + 65536 that looks like the one it had read in phase n. That is harmless, because
 * no safety rests on the epoch: a successful swap removes items from the range that stands there
 * *now*, whatever the word looked like in between, and unfinished items keep their phase from
 * ending. So the thief reads the full 64-bit phase sequence after the swap, and the phase's data
 * are taken for that sequence (numoe_pool_claim in pool_steal.c). The epoch only makes the rare
 * path rare. stress/model/pool_steal.pml checks this with an epoch of one bit and of none.
 *
 * Memory orders: put is a release store and heads a release sequence that every later swap (an RMW)
 * continues; a thief's swap is an acquire and so sees all that the putter saw, its phase sequence
 * included. The owner's swaps order nothing and are relaxed.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_POOL_RANGE_H
#define NUMOE_POOL_RANGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef _Atomic uint64_t numoe_pool_range;

enum { NUMOE_POOL_RANGE_BITS = 24 };
#define NUMOE_POOL_RANGE_MASK (((uint64_t)1 << NUMOE_POOL_RANGE_BITS) - 1)

static inline uint64_t numoe_pool_range_pack(uint32_t begin, uint32_t end, uint64_t number)
{
    return (number & 0xffff) << 48 | (uint64_t)end << NUMOE_POOL_RANGE_BITS | begin;
}

static inline uint32_t numoe_pool_range_begin(uint64_t word)
{
    return (uint32_t)(word & NUMOE_POOL_RANGE_MASK);
}

static inline uint32_t numoe_pool_range_end(uint64_t word)
{
    return (uint32_t)(word >> NUMOE_POOL_RANGE_BITS & NUMOE_POOL_RANGE_MASK);
}

/** Owner only, on an empty word: make it hold [begin, end) of phase `number`. */
static inline void numoe_pool_range_put(numoe_pool_range *range, uint32_t begin, uint32_t end,
                                        uint64_t number)
{
    /* Pairs with the swap in numoe_pool_range_steal. */
    atomic_store_explicit(range, numoe_pool_range_pack(begin, end, number), memory_order_release);
}

/** Owner only: take the first item. */
static inline bool numoe_pool_range_take(numoe_pool_range *range, uint32_t *item)
{
    uint64_t word = atomic_load_explicit(range, memory_order_relaxed);

    for (;;) {
        uint32_t begin = numoe_pool_range_begin(word);
        if (begin >= numoe_pool_range_end(word))
            return false;
        /* begin + 1 <= end <= MAX_ITEMS: never carries into end. */
        if (atomic_compare_exchange_weak_explicit(range, &word, word + 1, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *item = begin;
            return true;
        }
    }
}

enum numoe_pool_catch { NUMOE_POOL_NOTHING, NUMOE_POOL_TOO_FEW, NUMOE_POOL_CAUGHT };

/**
 * Anyone: take items from the back, if the word is of phase `number` (mod 65536).
 * @param least  only if there are so many or more
 * @param most   at most so many; 0: half, rounded up
 */
static inline enum numoe_pool_catch numoe_pool_range_steal(numoe_pool_range *range, uint64_t number,
                                                           uint32_t least, uint32_t most,
                                                           uint32_t *begin, uint32_t *end)
{
    uint64_t word = atomic_load_explicit(range, memory_order_relaxed);

    for (;;) {
        uint32_t first = numoe_pool_range_begin(word);
        uint32_t last = numoe_pool_range_end(word);
        uint32_t count;

        if (first >= last || word >> 48 != (number & 0xffff))
            return NUMOE_POOL_NOTHING;
        count = last - first;
        if (count < least)
            return NUMOE_POOL_TOO_FEW;
        if (most == 0)
            count -= count / 2;
        else if (count > most)
            count = most;
        /* Acquire pairs with the store in numoe_pool_range_put. */
        if (atomic_compare_exchange_weak_explicit(
                range, &word, numoe_pool_range_pack(first, last - count, number),
                memory_order_acquire, memory_order_relaxed)) {
            *begin = last - count;
            *end = last;
            return NUMOE_POOL_CAUGHT;
        }
    }
}

#endif
