/*
 * pool_turn.c - who sits as worker 0.
 *
 * A ticket lock whose waiters sleep. turn_next hands out numbers, turn_now says whose turn it is;
 * the holder alone writes turn_now. First come, first served, so a thread that runs job after job
 * cannot keep another out.
 *
 * No lost wake-up: a waiter adds to turn_next before it sleeps on the old value of turn_now; the
 * giver stores turn_now before it looks at turn_next. All four are sequentially consistent (the
 * kernel's comparison in the wait is ordered by its own lock): if the kernel still saw the old
 * turn_now, the giver sees the waiter's add and wakes it. Waiters sleep under one of 32 bits chosen
 * by their number, so that a wake disturbs the next in line only (and those 32 behind it).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

void numoe_pool_turn_take(struct numoe_pool *pool)
{
    uint32_t mine = atomic_fetch_add_explicit(&pool->turn_next, 1, memory_order_seq_cst);

    for (;;) {
        /* Acquires what the last holder did; pairs with the store in numoe_pool_turn_give. */
        uint32_t now = atomic_load_explicit(&pool->turn_now, memory_order_seq_cst);
        if (now == mine)
            return;
        numoe_pool_os_wait(&pool->turn_now, now, (uint32_t)1 << (mine & 31));
    }
}

void numoe_pool_turn_give(struct numoe_pool *pool)
{
    uint32_t now = atomic_load_explicit(&pool->turn_now, memory_order_relaxed) + 1;

    /* Releases to the load in numoe_pool_turn_take. */
    atomic_store_explicit(&pool->turn_now, now, memory_order_seq_cst);
    if (atomic_load_explicit(&pool->turn_next, memory_order_seq_cst) != now)
        numoe_pool_os_wake(&pool->turn_now, (uint32_t)1 << (now & 31));
}
