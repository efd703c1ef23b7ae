/*
 * pool_park.c - idle workers: how they wait, sleep, and are woken.
 *
 * An idle worker spins on seq for spin_ns, now and then looking for something to steal, looks a
 * last time for anything at all, and then sleeps on its own word `state`. States: AWAKE; SLEEPING,
 * or SPARE for one that is not worth waking (pool_cpus.c: it has no CPU to itself); ABSENT
 * (pool_lend.c). The worker alone sets SLEEPING or SPARE; waker or worker, whoever's swap succeeds,
 * sets AWAKE and takes one off `sleepers`, and off `wanted` if it was SLEEPING.
 *
 *     worker                               publisher
 *     sleepers += 1, wanted += 1           seq = new
 *     state = SLEEPING                     if wanted != 0: for workers that are needed:
 *     if seq is still what it was:             if state == SLEEPING, swap to AWAKE:
 *         futex wait while SLEEPING                sleepers -= 1, wanted -= 1, futex wake
 *     else swap back, both -= 1
 *
 * No lost wake-up: all of these are sequentially consistent. If the worker's second look at seq
 * still saw the old value, it precedes the publisher's store in the single order, and so do the
 * worker's stores: the publisher sees them all. The futex compares state again in the kernel, so a
 * wake between the look and the sleep is not lost either. stress/model/pool_park.pml.
 *
 * A publisher may leave sleepers asleep: those whose share of the phase is empty, the spare, and
 * all when a worker alone is through sooner than another would be awake. Nothing depends on them:
 * the publisher of a later phase works itself; that of a first phase either works itself, or
 * (submit) sees that somebody else is awake or wakes one, who sees the new seq before it sleeps.
 * Shares of those left asleep are taken by whoever is awake.
 *
 * Wakes spread as a tree by domain (pool_tree.c): a waker skips down through those that are awake
 * and stops at those it woke, who go on below themselves before they work.
 *
 * Being recalled (pool_lend.c) or of another rank (pool_cpus.c) works like a new seq: it is written
 * before the state is looked at, and looked at after the state was set.
 *
 * The clock is read every 64 turns only.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

enum { CLOCK_TURNS = 64, FIRST_LOOK = 16, MOST_LOOK = 1024 };

static void wake_below(struct numoe_pool *pool, const struct numoe_pool_view *view, uint32_t from);

/* Pair with the publisher's store of seq and its loads in numoe_pool_wake; see the top. */
static void announce(struct numoe_pool *pool, struct numoe_pool_worker_slot *slot, uint32_t state)
{
    atomic_fetch_add_explicit(&pool->sleepers, 1, memory_order_seq_cst);
    if (state == NUMOE_POOL_SLEEPING)
        atomic_fetch_add_explicit(&pool->wanted, 1, memory_order_seq_cst);
    atomic_store_explicit(&slot->state, state, memory_order_seq_cst);
}

/* By waker or worker. @return whether it was this one who ended the sleep */
static bool rouse(struct numoe_pool *pool, struct numoe_pool_worker_slot *slot)
{
    uint32_t state = atomic_load_explicit(&slot->state, memory_order_seq_cst);

    if (state != NUMOE_POOL_SLEEPING && state != NUMOE_POOL_SPARE)
        return false;
    if (!atomic_compare_exchange_strong_explicit(&slot->state, &state, NUMOE_POOL_AWAKE,
                                                 memory_order_seq_cst, memory_order_seq_cst))
        return false;
    if (state == NUMOE_POOL_SLEEPING)
        atomic_fetch_sub_explicit(&pool->wanted, 1, memory_order_seq_cst);
    atomic_fetch_sub_explicit(&pool->sleepers, 1, memory_order_seq_cst);
    return true;
}

static void park(struct numoe_pool_hand *hand, uint64_t seen)
{
    struct numoe_pool *pool = hand->pool;
    struct numoe_pool_worker_slot *slot = hand->slot;
    uint32_t rank = atomic_load_explicit(&slot->rank, memory_order_seq_cst);
    uint32_t state = rank == NUMOE_POOL_REGULAR ? NUMOE_POOL_SLEEPING : NUMOE_POOL_SPARE;
    struct numoe_pool_view view;
    uint64_t seq, began;

    announce(pool, slot, state);
    if (atomic_load_explicit(&pool->seq, memory_order_seq_cst) != seen ||
        atomic_load_explicit(&slot->rank, memory_order_seq_cst) != rank ||
        numoe_pool_is_recalled(hand)) {
        rouse(pool, slot);
        return;
    }
    numoe_pool_count(&slot->sleeps, 1);
    began = numoe_pool_clock_sleep(hand);
    do {
        numoe_pool_os_wait(&slot->state, state, NUMOE_POOL_OS_ANY);
    } while (atomic_load_explicit(&slot->state, memory_order_seq_cst) == state);
    numoe_pool_clock_awake(hand, began);

    /* Somebody woke this worker and counts on it for those below. */
    seq = numoe_pool_seq(pool);
    if (seq != NUMOE_POOL_STOP && (seq & NUMOE_POOL_OPEN) && numoe_pool_view_load(pool, seq, &view))
        wake_below(pool, &view, hand->worker);
}

/* Sleep, but not before a look at which no trip is too far. @return whether it slept */
static bool sleep_or_look(struct numoe_pool_hand *hand, uint64_t seq)
{
    if ((seq & NUMOE_POOL_OPEN) && !hand->greedy) {
        hand->greedy = true;
        return false;
    }
    hand->greedy = false;
    numoe_pool_watch(hand);
    park(hand, seq);
    return true;
}

void numoe_pool_rest_begin(struct numoe_pool_rest *rest)
{
    rest->turns = 0;
    rest->look = FIRST_LOOK;
    rest->look_step = FIRST_LOOK;
    rest->until_ns = 0;
}

void numoe_pool_rest(struct numoe_pool_hand *hand, struct numoe_pool_rest *rest, uint64_t seq)
{
    struct numoe_pool *pool = hand->pool;
    uint64_t spin_ns = atomic_load_explicit(&pool->spin_ns, memory_order_relaxed);

    if (spin_ns == 0) {
        sleep_or_look(hand, seq);
        return;
    }
    for (;;) {
        if (numoe_pool_seq(pool) != seq) {
            numoe_pool_rest_begin(rest);
            return;
        }
        numoe_pool_os_pause();
        rest->turns++;
        if (rest->turns % CLOCK_TURNS == 0) {
            uint64_t now = numoe_pool_os_now_ns();
            if (numoe_pool_is_recalled(hand))
                return;
            if (rest->until_ns == 0) {
                rest->until_ns = spin_ns < UINT64_MAX - now ? now + spin_ns : UINT64_MAX;
            } else if (now >= rest->until_ns) {
                if (sleep_or_look(hand, seq))
                    numoe_pool_rest_begin(rest);
                return;
            }
        }
        if ((seq & NUMOE_POOL_OPEN) && rest->turns >= rest->look) {
            /* Each look reads a line of every worker; ever more rarely. */
            if (rest->look_step < MOST_LOOK)
                rest->look_step *= 2;
            rest->look = rest->turns + rest->look_step;
            return;
        }
    }
}

void numoe_pool_wake_one(struct numoe_pool *pool, uint32_t worker)
{
    struct numoe_pool_worker_slot *slot = &pool->workers[worker];

    if (pool->clocks)
        numoe_pool_clock_wake(pool, worker);
    if (rouse(pool, slot))
        numoe_pool_os_wake(&slot->state, NUMOE_POOL_OS_ANY);
}

/* Worker 0 counts as awake, which with a submitted job it may not be. */
static uint32_t awake(const struct numoe_pool *pool)
{
    return pool->worker_count - atomic_load_explicit(&pool->sleepers, memory_order_seq_cst) -
           atomic_load_explicit(&pool->absent, memory_order_seq_cst);
}

/* All are awake that are worth it; also when the phase is over meanwhile. */
static bool enough(const struct numoe_pool *pool, const struct numoe_pool_view *view)
{
    if (numoe_pool_seq(pool) != view->seq)
        return true;
    if (view->item_ns && (uint64_t)view->items * view->item_ns <= pool->wake_ns)
        return awake(pool) >= 1u + view->submitted;
    return atomic_load_explicit(view->submitted ? &pool->sleepers : &pool->wanted,
                                memory_order_seq_cst) == 0;
}

static bool needed(struct numoe_pool *pool, const struct numoe_pool_view *view, uint32_t worker)
{
    uint32_t rank = atomic_load_explicit(&pool->workers[worker].rank, memory_order_relaxed);
    uint32_t begin, end;

    if (rank > (view->submitted ? NUMOE_POOL_RESERVE : NUMOE_POOL_REGULAR))
        return false;
    return view->crowd || numoe_pool_share(pool, view, worker, &begin, &end);
}

/* A job that the caller does not help with needs somebody, whatever the shares. */
static void wake_somebody(struct numoe_pool *pool)
{
    for (uint32_t worker = 1; worker < pool->worker_count && awake(pool) < 2; worker++)
        numoe_pool_wake_one(pool, worker);
}

/* Wake the workers below `from` in the tree. */
static void wake_below(struct numoe_pool *pool, const struct numoe_pool_view *view, uint32_t from)
{
    const struct numoe_pool_worker_slot *slot = &pool->workers[from];

    for (uint32_t i = 0; i < slot->wake_count; i++) {
        uint32_t child = pool->wake_order[slot->wake_begin + i];

        if (enough(pool, view))
            return;
        if (numoe_pool_asleep(pool, child) && needed(pool, view, child))
            numoe_pool_wake_one(pool, child);
        else
            wake_below(pool, view, child);
    }
}

void numoe_pool_wake(struct numoe_pool *pool, uint64_t seq)
{
    struct numoe_pool_view view;

    /* Pairs with the add in park. */
    if (atomic_load_explicit(&pool->sleepers, memory_order_seq_cst) == 0)
        return;
    if (!numoe_pool_view_load(pool, seq, &view))
        return; /* over already, done by workers that were awake */
    if (view.submitted && awake(pool) < 2)
        wake_somebody(pool);
    if (!enough(pool, &view) && numoe_pool_asleep(pool, 0) && needed(pool, &view, 0))
        numoe_pool_wake_one(pool, 0);
    wake_below(pool, &view, 0);
}

void numoe_pool_wake_caller(struct numoe_pool *pool)
{
    if (numoe_pool_asleep(pool, 0))
        numoe_pool_wake_one(pool, 0);
}

void numoe_pool_wake_all(struct numoe_pool *pool)
{
    for (uint32_t worker = 0; worker < pool->worker_count; worker++)
        numoe_pool_wake_one(pool, worker);
}
