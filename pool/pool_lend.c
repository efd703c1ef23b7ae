/*
 * pool_lend.c - threads of the application's own that work for the pool for a while.
 *
 * A worker that is to be lent has no thread: its state is ABSENT, and `absent` counts it. Shares of
 * such workers are taken by others, as are those of workers that sleep. `lender` says who has the
 * place: FREE; LENT, by the thread that swapped it in; RECALLED.
 *
 * Leaving is like going to sleep (pool_park.c), and for the same reason: the publisher of a
 * submitted job may count on this worker as one that is awake. So it leaves only when it has found
 * nothing more in the sequence at hand, announces that it is absent, and looks at seq again.
 *
 *     lent thread                          publisher
 *     absent += 1                          seq = new
 *     state = ABSENT                       counts who is awake: not the sleepers, not the absent
 *     if seq is still what it was: leave
 *     else state = AWAKE, absent -= 1
 *
 * stress/model/pool_park.pml.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include <errno.h>

static bool is_for_lending(const struct numoe_pool *pool, uint32_t worker)
{
    return worker < pool->worker_count && worker >= pool->worker_count - pool->lent_workers;
}

static void come(struct numoe_pool_hand *hand)
{
    atomic_store_explicit(&hand->slot->state, NUMOE_POOL_AWAKE, memory_order_seq_cst);
    atomic_fetch_sub_explicit(&hand->pool->absent, 1, memory_order_seq_cst);
}

bool numoe_pool_go_absent(struct numoe_pool_hand *hand, uint64_t seq)
{
    struct numoe_pool *pool = hand->pool;

    /* Pair with the publisher's store of seq and its loads in numoe_pool_wake. */
    atomic_fetch_add_explicit(&pool->absent, 1, memory_order_seq_cst);
    atomic_store_explicit(&hand->slot->state, NUMOE_POOL_ABSENT, memory_order_seq_cst);
    if (atomic_load_explicit(&pool->seq, memory_order_seq_cst) == seq)
        return true;
    come(hand);
    return false;
}

int numoe_pool_lend(struct numoe_pool *pool, uint32_t worker)
{
    uint32_t lender = NUMOE_POOL_FREE;
    struct numoe_pool_worker_slot *slot;
    struct numoe_pool_frame frame;
    struct numoe_pool_hand hand;
    bool stopped;
    int rc;

    if (!pool || !is_for_lending(pool, worker))
        return -EINVAL;
    if ((rc = numoe_pool_refuse(pool)))
        return rc;
    slot = &pool->workers[worker];
    /* Acquire: what the lender before did as this worker. Pairs with the store below. */
    if (!atomic_compare_exchange_strong_explicit(&slot->lender, &lender, NUMOE_POOL_LENT,
                                                 memory_order_acq_rel, memory_order_relaxed))
        return -EBUSY;
    atomic_fetch_add_explicit(&pool->lenders, 1, memory_order_relaxed);
    numoe_pool_hand_init(&hand, pool, worker, 0);
    hand.lent = true;
    come(&hand);
    numoe_pool_enter(&frame, pool);
    numoe_pool_participate(&hand, NUMOE_POOL_STOP >> 1);
    numoe_pool_leave(&frame);
    stopped = numoe_pool_seq(pool) == NUMOE_POOL_STOP;
    atomic_store_explicit(&slot->lender, NUMOE_POOL_FREE, memory_order_release);
    /* Release: pairs with the load in numoe_pool_wait_lenders, after which the pool may be gone. */
    if (atomic_fetch_sub_explicit(&pool->lenders, 1, memory_order_release) == 1)
        numoe_pool_os_wake(&pool->lenders, NUMOE_POOL_OS_ANY);
    return stopped ? -ESHUTDOWN : 0;
}

int numoe_pool_recall(struct numoe_pool *pool, uint32_t worker)
{
    uint32_t lender = NUMOE_POOL_LENT;

    if (!pool || !is_for_lending(pool, worker))
        return -EINVAL;
    if (numoe_pool_forked(pool))
        return -ECHILD;
    /* Before the look at its state: pairs with the load in numoe_pool_is_recalled. */
    if (!atomic_compare_exchange_strong_explicit(&pool->workers[worker].lender, &lender,
                                                 NUMOE_POOL_RECALLED, memory_order_seq_cst,
                                                 memory_order_seq_cst))
        return lender == NUMOE_POOL_RECALLED ? 0 : -ESRCH;
    numoe_pool_wake_one(pool, worker);
    return 0;
}

void numoe_pool_wait_lenders(struct numoe_pool *pool)
{
    uint32_t lenders;

    /* Acquire: pairs with the subtraction in numoe_pool_lend. */
    while ((lenders = atomic_load_explicit(&pool->lenders, memory_order_acquire)) != 0)
        numoe_pool_os_wait(&pool->lenders, lenders, NUMOE_POOL_OS_ANY);
}
