/*
 * pool_cancel.c - what becomes of a submitted job: tickets, waiting, cancelling.
 *
 * A ticket is the number that seq has once its job is done (a multiple of 8) and the entry where
 * its fate is kept:
 *
 *      63                       8 7       0
 *     +--------------------------+---------+
 *     |   number / 8             |  entry  |
 *     +--------------------------+---------+
 *
 * An entry is taken (OPEN) in the seat before the job is published: one that is not open, or, if
 * there is none such, the oldest that nobody waits for. Of two waits for a ticket the one whose
 * swap sets CLAIMED has it; it clears OPEN when it knows the job's fate, and until then the entry
 * stands. CANCELLED is set by a worker that passes over items, before it counts them (or, for whole
 * phases, by the finisher): who has seen the job done sees it.
 *
 * Cancelling changes nothing in how items are claimed and counted; they are only not run.
 * `cancelled` is the number of the job that is being cancelled. It only grows, so a late call for
 * an earlier job cannot call a later one off, nor undo that.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"

#include <errno.h>

enum { ENTRY_BITS = 8 };
_Static_assert(NUMOE_POOL_TICKETS == 1 << ENTRY_BITS, "an entry's index fits in a ticket");

static _Atomic uint64_t *entry_of(struct numoe_pool *pool, uint64_t ticket)
{
    return &pool->tickets[ticket & (NUMOE_POOL_TICKETS - 1)];
}

static uint64_t number_of(uint64_t ticket)
{
    return ticket >> ENTRY_BITS << NUMOE_POOL_PHASE_BITS;
}

static bool is_for(uint64_t entry, uint64_t number)
{
    return (entry & ~(uint64_t)NUMOE_POOL_TICKET_BITS) == number;
}

uint64_t numoe_pool_ticket_open(struct numoe_pool *pool, uint64_t number)
{
    uint32_t chosen = 0;
    uint64_t found = UINT64_MAX; /* in the entry chosen */

    for (uint32_t i = 1; i <= NUMOE_POOL_TICKETS; i++) {
        uint32_t at = (pool->ticket_entry + i) % NUMOE_POOL_TICKETS;
        uint64_t entry = atomic_load_explicit(&pool->tickets[at], memory_order_relaxed);
        bool open = entry & NUMOE_POOL_TICKET_OPEN;

        if (!open || (!(entry & NUMOE_POOL_TICKET_CLAIMED) && entry < found)) {
            found = entry;
            chosen = at;
        }
        if (!open)
            break;
    }
    /* Acquire and release pair with the swaps in numoe_pool_wait. It fails if the oldest has just
     * been claimed. */
    if (found == UINT64_MAX || !atomic_compare_exchange_strong_explicit(
                                   &pool->tickets[chosen], &found, number | NUMOE_POOL_TICKET_OPEN,
                                   memory_order_acq_rel, memory_order_relaxed))
        return 0;
    /* Read by workers of this job only, who see it by the store of seq that publishes the job. */
    pool->ticket_entry = chosen;
    return number >> NUMOE_POOL_PHASE_BITS << ENTRY_BITS | chosen;
}

void numoe_pool_ticket_mark(struct numoe_pool *pool)
{
    /* Released by the count of the items, or the store of seq, that follows. */
    atomic_fetch_or_explicit(&pool->tickets[pool->ticket_entry], NUMOE_POOL_TICKET_CANCELLED,
                             memory_order_relaxed);
}

int numoe_pool_wait(struct numoe_pool *pool, uint64_t ticket)
{
    uint64_t now, number = number_of(ticket);
    _Atomic uint64_t *entry;
    int rc;

    if (!pool || !ticket)
        return -EINVAL;
    if ((rc = numoe_pool_refuse(pool)))
        return rc;
    entry = entry_of(pool, ticket);
    /* Pairs with the swap in numoe_pool_ticket_open; one of two waits for a ticket gets it. */
    now = atomic_load_explicit(entry, memory_order_acquire);
    do {
        if (!is_for(now, number) || !(now & NUMOE_POOL_TICKET_OPEN) ||
            (now & NUMOE_POOL_TICKET_CLAIMED))
            return -EINVAL;
    } while (!atomic_compare_exchange_weak_explicit(entry, &now, now | NUMOE_POOL_TICKET_CLAIMED,
                                                    memory_order_acq_rel, memory_order_acquire));
    /* Acquires what the job did, and what it left in the entry. */
    if (numoe_pool_seq(pool) >> 1 < number) {
        numoe_pool_turn_take(pool);
        numoe_pool_help(pool, number);
        numoe_pool_turn_give(pool);
    }
    now = atomic_fetch_and_explicit(entry, ~(uint64_t)NUMOE_POOL_TICKET_OPEN, memory_order_release);
    return now & NUMOE_POOL_TICKET_CANCELLED ? -ECANCELED : 0;
}

int numoe_pool_cancel(struct numoe_pool *pool, uint64_t ticket)
{
    uint64_t entry, before, number = number_of(ticket);

    if (!pool || !ticket)
        return -EINVAL;
    if (numoe_pool_forked(pool))
        return -ECHILD;
    if (!number)
        return -EINVAL;
    entry = atomic_load_explicit(entry_of(pool, ticket), memory_order_acquire);
    if (!is_for(entry, number))
        return entry > number ? -EALREADY : -EINVAL;
    if (numoe_pool_seq(pool) >> 1 >= number)
        return -EALREADY;
    before = atomic_load_explicit(&pool->cancelled, memory_order_relaxed);
    while (before < number &&
           !atomic_compare_exchange_weak_explicit(&pool->cancelled, &before, number,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
    return 0;
}
