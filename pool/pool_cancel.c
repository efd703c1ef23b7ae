/*
 * pool_cancel.c - what becomes of a submitted job: tickets, waiting, cancelling.
 *
 * A ticket's entry is written in the seat before its job is published and goes to a later job after
 * 256 others. Of two waits for it the one whose swap clears OPEN has it. CANCELLED is set by a
 * worker that passes over items, before it counts them (or, for whole phases, by the finisher): who
 * has seen the job done sees it.
 *
 * Cancelling changes nothing in how items are claimed and counted; they are only not run.
 * `cancelled` is the ticket of the job that is being cancelled. It only grows, so a late call for
 * an earlier job cannot call a later one off, nor undo that.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"

#include <errno.h>

static _Atomic uint64_t *entry_of(struct numoe_pool *pool, uint64_t ticket)
{
    return &pool->tickets[ticket / NUMOE_POOL_MAX_PHASES % NUMOE_POOL_TICKETS];
}

static bool is_for(uint64_t entry, uint64_t ticket)
{
    return (entry & ~(uint64_t)NUMOE_POOL_TICKET_BITS) == ticket;
}

static bool possible(uint64_t ticket)
{
    return ticket != 0 && ticket % NUMOE_POOL_MAX_PHASES == 0 && ticket >> 62 == 0;
}

void numoe_pool_ticket_open(struct numoe_pool *pool, uint64_t ticket)
{
    /* Pairs with the swap in numoe_pool_wait. */
    atomic_store_explicit(entry_of(pool, ticket), ticket | NUMOE_POOL_TICKET_OPEN,
                          memory_order_release);
}

void numoe_pool_ticket_mark(struct numoe_pool *pool, uint64_t seq)
{
    uint64_t base = seq >> 1 & ~(uint64_t)(NUMOE_POOL_MAX_PHASES - 1);

    /* Released by the count of the items, or the store of seq, that follows. */
    atomic_fetch_or_explicit(entry_of(pool, base + NUMOE_POOL_MAX_PHASES),
                             NUMOE_POOL_TICKET_CANCELLED, memory_order_relaxed);
}

int numoe_pool_wait(struct numoe_pool *pool, uint64_t ticket)
{
    _Atomic uint64_t *entry;
    uint64_t now;
    bool done;
    int rc;

    if (!pool || !possible(ticket))
        return -EINVAL;
    if ((rc = numoe_pool_refuse(pool)))
        return rc;
    entry = entry_of(pool, ticket);
    /* Before the entry: if the job is done, what the entry says of it is final. */
    done = numoe_pool_seq(pool) >> 1 >= ticket;
    /* Pairs with the store in numoe_pool_ticket_open; one of two waits for a ticket gets it. */
    now = atomic_load_explicit(entry, memory_order_acquire);
    do {
        if (!is_for(now, ticket) || !(now & NUMOE_POOL_TICKET_OPEN))
            /* One that has gone to a later job: this one is long done. */
            return now > (ticket | NUMOE_POOL_TICKET_BITS) ? 0 : -EINVAL;
    } while (!atomic_compare_exchange_weak_explicit(entry, &now,
                                                    now & ~(uint64_t)NUMOE_POOL_TICKET_OPEN,
                                                    memory_order_acq_rel, memory_order_acquire));
    if (!done) {
        numoe_pool_turn_take(pool);
        numoe_pool_help(pool, ticket);
        now = atomic_load_explicit(entry, memory_order_relaxed);
        numoe_pool_turn_give(pool);
    }
    return is_for(now, ticket) && (now & NUMOE_POOL_TICKET_CANCELLED) ? -ECANCELED : 0;
}

int numoe_pool_cancel(struct numoe_pool *pool, uint64_t ticket)
{
    uint64_t entry, before;

    if (!pool || !possible(ticket))
        return -EINVAL;
    if (numoe_pool_forked(pool))
        return -ECHILD;
    entry = atomic_load_explicit(entry_of(pool, ticket), memory_order_acquire);
    if (!is_for(entry, ticket))
        return entry > ticket ? -EALREADY : -EINVAL;
    if (numoe_pool_seq(pool) >> 1 >= ticket)
        return -EALREADY;
    before = atomic_load_explicit(&pool->cancelled, memory_order_relaxed);
    while (before < ticket &&
           !atomic_compare_exchange_weak_explicit(&pool->cancelled, &before, ticket,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
    return 0;
}
