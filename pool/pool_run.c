/*
 * pool_run.c - jobs: checked, published phase by phase, worked on, waited for.
 *
 * A job's life (states and memory orders: pool_internal.h):
 *   publish   in the seat, seq closed: job data written, then seq opened for the first phase that
 *             has items.
 *   work      every worker, and worker 0 in numoe_pool_run or _wait: claim, run, count.
 *   advance   the finisher of a phase opens the next one, or closes seq.
 *   done      seq's number is past the job's. The caller returns when it has seen that; whoever
 *             still looks at the pool's copy of the job drops it (seqlock), and never touches the
 *             caller's memory without a claimed item.
 *
 * pool_cancel.c: tickets, by which a submitted job is waited for or cancelled.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include "base/probes.h"

#include <errno.h>
#include <string.h>

static _Thread_local struct numoe_pool_frame *innermost;

void numoe_pool_enter(struct numoe_pool_frame *frame, const struct numoe_pool *pool)
{
    frame->pool = pool;
    frame->outer = innermost;
    innermost = frame;
}

void numoe_pool_leave(struct numoe_pool_frame *frame)
{
    innermost = frame->outer;
}

static bool inside(const struct numoe_pool *pool)
{
    for (const struct numoe_pool_frame *frame = innermost; frame; frame = frame->outer) {
        if (frame->pool == pool)
            return true;
    }
    return false;
}

bool numoe_pool_forked(const struct numoe_pool *pool)
{
    if (pool->alive)
        return atomic_load_explicit((_Atomic uint32_t *)pool->alive, memory_order_relaxed) == 0;
    return getpid() != pool->pid;
}

int numoe_pool_refuse(const struct numoe_pool *pool)
{
    if (numoe_pool_forked(pool))
        return -ECHILD;
    return inside(pool) ? -EDEADLK : 0;
}

static int check_job(const struct numoe_pool *pool, const struct numoe_pool_job *job)
{
    if (job->phase_count > NUMOE_POOL_MAX_PHASES)
        return -EINVAL;
    for (uint32_t p = 0; p < job->phase_count; p++) {
        const struct numoe_pool_phase *phase = &job->phases[p];

        if (phase->items > NUMOE_POOL_MAX_ITEMS || (phase->items && !phase->run))
            return -EINVAL;
        if (!phase->first)
            continue;
        if (phase->first[0] != 0 || phase->first[pool->worker_count] != phase->items)
            return -EINVAL;
        for (uint32_t w = 0; w < pool->worker_count; w++) {
            if (phase->first[w] > phase->first[w + 1])
                return -EINVAL;
        }
    }
    return 0;
}

static bool is_regular(const struct numoe_pool *pool, uint32_t worker)
{
    return atomic_load_explicit(&pool->workers[worker].rank, memory_order_relaxed) ==
           NUMOE_POOL_REGULAR;
}

/* Copy the shares of phase p. @return how many of the workers worth waking begin with items */
static uint32_t copy_first(struct numoe_pool *pool, uint32_t p,
                           const struct numoe_pool_phase *phase)
{
    _Atomic uint32_t *first = pool->first + (size_t)p * (pool->worker_count + 1);
    uint32_t with_items = 0;

    for (uint32_t w = 0; w <= pool->worker_count; w++) {
        /* Pairs with the loads in numoe_pool_share. */
        atomic_store_explicit(&first[w], phase->first[w], memory_order_release);
        with_items +=
            w < pool->worker_count && phase->first[w] < phase->first[w + 1] && is_regular(pool, w);
    }
    return with_items;
}

/* The flags of a phase's info that say how its shares are and whom they concern. */
static uint64_t share_out(struct numoe_pool *pool, uint32_t p, const struct numoe_pool_phase *phase)
{
    uint32_t regulars = atomic_load_explicit(&pool->regulars, memory_order_relaxed);
    uint32_t could = phase->items < regulars ? phase->items : regulars;

    if (!phase->first) /* with others about, shares mostly fall to those */
        return regulars < pool->worker_count && phase->items > 1 ? NUMOE_POOL_INFO_CROWD : 0;
    return NUMOE_POOL_INFO_FIRST | (copy_first(pool, p, phase) < could ? NUMOE_POOL_INFO_CROWD : 0);
}

/*
 * In the seat with seq closed: write the job's data and open its first phase.
 * All stores are release and follow the closed seq (stored by the last finisher, seen by this
 * thread): a reader that meets one of them no longer meets an older open seq. Pairs with the loads
 * in numoe_pool_view_load.
 */
static uint64_t publish(struct numoe_pool *pool, const struct numoe_pool_job *job, bool submitted)
{
    uint64_t base = pool->base;
    uint32_t previous = NUMOE_POOL_MAX_PHASES, first_phase = NUMOE_POOL_MAX_PHASES;
    uint64_t info[NUMOE_POOL_MAX_PHASES];
    uint64_t seq;

    for (uint32_t p = 0; p < job->phase_count; p++) {
        const struct numoe_pool_phase *phase = &job->phases[p];

        if (phase->items == 0)
            continue;
        info[p] = phase->items | (uint64_t)phase->item_ns << NUMOE_POOL_INFO_TIME;
        info[p] |= share_out(pool, p, phase);
        if (submitted)
            info[p] |= NUMOE_POOL_INFO_SUBMITTED;
        if (previous < NUMOE_POOL_MAX_PHASES)
            info[previous] |= (uint64_t)p << NUMOE_POOL_INFO_NEXT;
        else
            first_phase = p;
        previous = p;
        atomic_store_explicit(&pool->slots[p].run, phase->run, memory_order_release);
    }
    pool->base = base + NUMOE_POOL_MAX_PHASES;
    if (first_phase == NUMOE_POOL_MAX_PHASES) {
        /* Nothing to run: done at once. */
        atomic_store_explicit(&pool->seq, pool->base << 1, memory_order_release);
        return pool->base;
    }
    for (uint32_t p = 0; p < job->phase_count; p++) {
        if (job->phases[p].items)
            atomic_store_explicit(&pool->slots[p].info, info[p], memory_order_release);
    }
    atomic_store_explicit(&pool->context, job->context, memory_order_release);
    seq = (base + first_phase) << 1 | NUMOE_POOL_OPEN;
    if (pool->observe)
        numoe_pool_note_open(pool);
    /* Releases the data above; sequentially consistent against sleepers (pool_park.c). */
    atomic_store_explicit(&pool->seq, seq, memory_order_seq_cst);
    numoe_pool_wake(pool, seq);
    return pool->base;
}

/* The phase of hand->view is complete and this thread the one that completed it. */
static void advance(struct numoe_pool_hand *hand)
{
    struct numoe_pool *pool = hand->pool;
    uint64_t base = hand->view.seq >> 1 & ~(uint64_t)(NUMOE_POOL_MAX_PHASES - 1);
    uint32_t next = hand->view.next;
    uint64_t seq;

    if (next && numoe_pool_is_cancelled(pool, hand->view.seq)) {
        numoe_pool_ticket_mark(pool);
        next = 0;
    }
    if (pool->observe)
        numoe_pool_note_phase(hand);
    /* Both stores: release what all workers did in the phase (collected by numoe_pool_join) to
     * every load of seq; sequentially consistent against sleepers (pool_park.c). */
    if (next) {
        seq = (base + next) << 1 | NUMOE_POOL_OPEN;
        atomic_store_explicit(&pool->seq, seq, memory_order_seq_cst);
        numoe_pool_wake(pool, seq);
    } else {
        seq = (base + NUMOE_POOL_MAX_PHASES) << 1;
        atomic_store_explicit(&pool->seq, seq, memory_order_seq_cst);
        numoe_pool_wake_caller(pool);
    }
}

/* The job is cancelled: drop the item at hand and what is left of the range. @return how many */
static uint32_t pass_over(struct numoe_pool_hand *hand)
{
    uint64_t seq = hand->view.seq;
    uint32_t begin, end;

    numoe_pool_ticket_mark(hand->pool);
    if (numoe_pool_range_steal(&hand->slot->range, seq >> 1, 1, UINT32_MAX, &begin, &end) !=
        NUMOE_POOL_CAUGHT)
        return 1;
    return 1 + end - begin;
}

static inline void run_item(const struct numoe_pool_hand *hand, uint32_t item)
{
    const struct numoe_pool_view *view = &hand->view;

    numoe_probe_item_start(hand->worker, view->seq >> 1, item);
    view->run(view->context, item, hand->worker);
    numoe_probe_item_done(hand->worker, view->seq >> 1, item);
}

/* Claim once and run until the own range is empty. @return false: nothing to be had. */
static bool work(struct numoe_pool_hand *hand)
{
    struct numoe_pool_worker_slot *slot = hand->slot;
    struct numoe_pool_view *view = &hand->view;
    struct numoe_pool_clock *clocks = hand->pool->clocks;
    uint32_t item, end, extra, extras = 0, done = 0;
    uint64_t began = 0;

    if (!numoe_pool_claim(hand, &item, &end))
        return false;
    if (clocks)
        began = numoe_pool_os_now_ns();
    hand->greedy = false;
    hand->idle_since_ns = 0;
    /* The first item is not put where others could take it: each claim runs something, and two
     * thieves cannot pass one item to and fro. */
    if (item + 1 < end)
        numoe_pool_range_put(&slot->range, item + 1, end, view->seq >> 1);
    do {
        if (numoe_pool_is_cancelled(hand->pool, view->seq)) {
            done += pass_over(hand);
            break;
        }
        run_item(hand, item);
        done++;
        if (hand->random) {
            if (numoe_pool_random(hand) % 4 == 0 && numoe_pool_claim_random(hand, &extra)) {
                run_item(hand, extra);
                extras++;
                /* Never the phase's last: `item` is not counted yet. */
                numoe_pool_join(hand->pool, view, numoe_pool_leaf_of(hand->pool, view, extra), 1);
            }
            if (numoe_pool_random(hand) % 32 == 0)
                sched_yield();
        }
    } while (numoe_pool_range_take(&slot->range, &item));

    numoe_pool_count(&slot->items, done + extras);
    if (clocks)
        numoe_pool_count(&clocks[hand->worker].busy_ns, numoe_pool_os_now_ns() - began);
    if (numoe_pool_join(hand->pool, view, hand->leaf, done))
        advance(hand);
    return true;
}

/* Have the view be of seq. @return false: seq is over. */
static bool see(struct numoe_pool_hand *hand, uint64_t seq)
{
    if (seq == hand->view.seq)
        return true;
    hand->cursor = 0;
    hand->greedy = false;
    hand->idle_since_ns = 0;
    return numoe_pool_view_load(hand->pool, seq, &hand->view);
}

void numoe_pool_participate(struct numoe_pool_hand *hand, uint64_t until)
{
    struct numoe_pool *pool = hand->pool;
    struct numoe_pool_rest rest;

    numoe_pool_rest_begin(&rest);
    for (;;) {
        uint64_t seq = numoe_pool_seq(pool);

        if (seq >> 1 >= until)
            return;
        if ((seq & NUMOE_POOL_OPEN) && see(hand, seq)) {
            if (numoe_pool_is_recalled(hand))
                hand->greedy = true;
            if (work(hand)) {
                numoe_pool_rest_begin(&rest);
                continue;
            }
        }
        if (numoe_pool_is_recalled(hand)) {
            if (numoe_pool_go_absent(hand, seq))
                return;
            continue;
        }
        numoe_pool_rest(hand, &rest, seq);
    }
}

/* In the seat: be worker 0 until seq's number is `until`. */
static void sit(struct numoe_pool *pool, uint64_t until)
{
    struct numoe_pool_hand hand;
    struct numoe_pool_frame frame;
    bool restore = pool->pin_caller && numoe_pool_pin_caller(pool);

    numoe_pool_hand_init(&hand, pool, 0, pool->chaos_turn++);
    numoe_pool_enter(&frame, pool);
    numoe_pool_participate(&hand, until);
    numoe_pool_leave(&frame);
    if (pool->observe)
        numoe_pool_note_join(pool);
    if (restore)
        numoe_pool_unpin_caller(pool);
}

void numoe_pool_help(struct numoe_pool *pool, uint64_t until)
{
    if (numoe_pool_seq(pool) >> 1 < until)
        sit(pool, until);
}

int numoe_pool_run(struct numoe_pool *pool, const struct numoe_pool_job *job)
{
    int rc;

    if (!pool || !job)
        return -EINVAL;
    if ((rc = numoe_pool_refuse(pool)) || (rc = check_job(pool, job)))
        return rc;
    numoe_pool_turn_take(pool);
    numoe_pool_tell_changes(pool);
    numoe_pool_help(pool, pool->base); /* a submitted job comes first */
    numoe_pool_help(pool, publish(pool, job, false));
    numoe_pool_turn_give(pool);
    return 0;
}

int numoe_pool_submit(struct numoe_pool *pool, const struct numoe_pool_job *job, uint64_t *ticket)
{
    uint64_t mine;
    int rc;

    if (!pool || !job || !ticket)
        return -EINVAL;
    if ((rc = numoe_pool_refuse(pool)) || (rc = check_job(pool, job)))
        return rc;
    numoe_pool_turn_take(pool);
    numoe_pool_tell_changes(pool);
    for (;;) {
        numoe_pool_help(pool, pool->base);
        mine = numoe_pool_ticket_open(pool, pool->base + NUMOE_POOL_MAX_PHASES);
        if (mine)
            break;
        /* Every entry is kept for a thread that waits, and they may be in line for the seat. */
        numoe_pool_turn_give(pool);
        numoe_pool_turn_take(pool);
    }
    publish(pool, job, true);
    numoe_pool_turn_give(pool);
    *ticket = mine;
    return 0;
}
