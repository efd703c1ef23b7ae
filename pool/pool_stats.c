/*
 * pool_stats.c - what workers count, and what an observer is told.
 *
 * Every counter has one writer, its worker, who adds by a relaxed load and store; readers come at
 * any time and want numbers, not order. Counts are always kept. Times are kept in a timed pool:
 * without, `clocks` is NULL and no clock is read.
 *
 * The time parked is one word, so that a reader finds it whole while the worker falls asleep or
 * wakes: asleep, the word holds the time parked before less the moment it fell asleep, and the
 * reader adds now. All of it modulo 2^63.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "pool_internal.h"
#include "pool_os.h"

#include "base/probes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct numoe_pool_clock) % NUMOE_POOL_LINE == 0, "no line is shared");

int numoe_pool_counters_create(struct numoe_pool *pool, const struct numoe_pool_config *config)
{
    const size_t count = pool->worker_count;

    pool->observe = config->observe;
    pool->observe_user = config->observe_user;
    if (config->workers) {
        pool->places = numoe_pool_os_memory(count, sizeof *pool->places);
        if (!pool->places)
            return -ENOMEM;
        memcpy(pool->places, config->workers, count * sizeof *pool->places);
    }
    if (!config->timed && !config->observe)
        return 0;
    pool->clocks = numoe_pool_os_lines(count * sizeof *pool->clocks, NUMOE_POOL_LINE);
    return pool->clocks ? 0 : -ENOMEM;
}

void numoe_pool_counters_destroy(struct numoe_pool *pool)
{
    free(pool->places);
    free(pool->clocks);
}

static uint64_t load(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit((_Atomic uint64_t *)counter, memory_order_relaxed);
}

static void store(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static void tell(struct numoe_pool *pool, const struct numoe_pool_event *event)
{
    pool->observe(pool->observe_user, event);
}

void numoe_pool_count_steal(struct numoe_pool_hand *hand, uint32_t victim, uint32_t items)
{
    struct numoe_pool *pool = hand->pool;
    enum numoe_pool_distance distance = NUMOE_POOL_SAME_L3;
    uint64_t now;

    if (pool->places)
        distance = numoe_pool_distance(&pool->places[hand->worker], &pool->places[victim]);
    numoe_pool_count(&hand->slot->steals[distance], 1);
    numoe_pool_count(&hand->slot->stolen_items, items);
    numoe_probe_steal(hand->worker, victim, distance, items);
    if (!pool->observe)
        return;
    now = numoe_pool_os_now_ns();
    tell(pool, &(struct numoe_pool_event){.kind = NUMOE_POOL_STEAL,
                                          .worker = hand->worker,
                                          .begin_ns = now,
                                          .end_ns = now,
                                          .victim = victim,
                                          .distance = distance,
                                          .items = items});
}

/* ---- sleeping -------------------------------------------------------------------------------- */

uint64_t numoe_pool_clock_sleep(struct numoe_pool_hand *hand)
{
    struct numoe_pool_clock *clock;
    uint64_t now;

    numoe_probe_park(hand->worker);
    if (!hand->pool->clocks)
        return 0;
    clock = &hand->pool->clocks[hand->worker];
    now = numoe_pool_os_now_ns();
    store(&clock->parked, ((load(&clock->parked) >> 1) - now) << 1 | 1);
    return now;
}

void numoe_pool_clock_wake(struct numoe_pool *pool, uint32_t worker)
{
    /* Ordered before the worker's next look at its state by the swap that wakes it. */
    store(&pool->clocks[worker].woken_ns, numoe_pool_os_now_ns());
}

static unsigned bucket_of(uint64_t latency_ns)
{
    unsigned bucket = 0;

    while (bucket < NUMOE_WAKE_BUCKETS - 1 && latency_ns > (uint64_t)1024 << bucket)
        bucket++;
    return bucket;
}

void numoe_pool_clock_awake(struct numoe_pool_hand *hand, uint64_t began)
{
    struct numoe_pool *pool = hand->pool;
    struct numoe_pool_clock *clock;
    uint64_t now, woken, latency;

    numoe_probe_wake(hand->worker);
    if (!pool->clocks)
        return;
    clock = &pool->clocks[hand->worker];
    woken = load(&clock->woken_ns);
    now = numoe_pool_os_now_ns();
    /* Another waker, too late to wake it, may have written a little later. */
    latency = now > woken ? now - woken : 0;
    store(&clock->parked, ((load(&clock->parked) >> 1) + now) << 1);
    numoe_pool_count(&clock->wake_ns, latency);
    numoe_pool_count(&clock->wake_buckets[bucket_of(latency)], 1);
    if (pool->observe)
        tell(pool, &(struct numoe_pool_event){.kind = NUMOE_POOL_PARK,
                                              .worker = hand->worker,
                                              .begin_ns = began,
                                              .end_ns = now,
                                              .latency_ns = latency});
}

/* ---- reading --------------------------------------------------------------------------------- */

/* A worker that reads its clock and is then held up before it writes has slept less, by what it
 * writes, than a reader saw meanwhile. So what was told once is the least of what is told later. */
static uint64_t never_less(struct numoe_pool_clock *clock, uint64_t parked)
{
    uint64_t told = load(&clock->parked_told);

    while (parked > told)
        if (atomic_compare_exchange_weak_explicit(&clock->parked_told, &told, parked,
                                                  memory_order_relaxed, memory_order_relaxed))
            return parked;
    return told;
}

static uint64_t parked_ns(struct numoe_pool_clock *clock)
{
    uint64_t word, now;

    /* A word that is the same before and after reading the clock was the worker's at that time. */
    do {
        word = atomic_load_explicit(&clock->parked, memory_order_acquire);
        now = numoe_pool_os_now_ns();
    } while (load(&clock->parked) != word);
    return never_less(clock, (word & 1 ? (word >> 1) + now : word >> 1) & UINT64_MAX >> 1);
}

int numoe_pool_stats(const struct numoe_pool *pool, uint32_t worker,
                     struct numoe_pool_worker_stats *stats)
{
    const struct numoe_pool_worker_slot *slot;
    struct numoe_pool_clock *clock;

    if (!pool || !stats || worker >= pool->worker_count)
        return -EINVAL;
    slot = &pool->workers[worker];
    *stats = (struct numoe_pool_worker_stats){
        .items = load(&slot->items),
        .stolen_items = load(&slot->stolen_items),
        .refusals = load(&slot->refusals),
        .sleeps = load(&slot->sleeps),
        .pinned = atomic_load_explicit((_Atomic bool *)&slot->pinned, memory_order_relaxed),
        .pin_errno = atomic_load_explicit((_Atomic int *)&slot->pin_errno, memory_order_relaxed),
        .timed = pool->clocks != NULL,
    };
    for (int d = 0; d < NUMOE_POOL_DISTANCES; d++) {
        stats->steals_from[d] = load(&slot->steals[d]);
        stats->steals += stats->steals_from[d];
    }
    if (!pool->clocks)
        return 0;
    clock = &pool->clocks[worker];
    stats->busy_ns = load(&clock->busy_ns);
    stats->parked_ns = parked_ns(clock);
    stats->wake_ns = load(&clock->wake_ns);
    for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++) {
        stats->wake_buckets[b] = load(&clock->wake_buckets[b]);
        stats->wakes += stats->wake_buckets[b];
    }
    return 0;
}

/* ---- the observer ---------------------------------------------------------------------------- */

void numoe_pool_note_open(struct numoe_pool *pool)
{
    store(&pool->changed_ns, numoe_pool_os_now_ns());
}

void numoe_pool_note_phase(struct numoe_pool_hand *hand)
{
    struct numoe_pool *pool = hand->pool;
    const uint64_t now = numoe_pool_os_now_ns();

    tell(pool, &(struct numoe_pool_event){.kind = NUMOE_POOL_PHASE,
                                          .worker = hand->worker,
                                          .begin_ns = load(&pool->changed_ns),
                                          .end_ns = now,
                                          .items = hand->view.items,
                                          .run = hand->view.run});
    /* Released by the store of seq that follows. */
    store(&pool->changed_ns, now);
}

void numoe_pool_note_join(struct numoe_pool *pool)
{
    tell(pool, &(struct numoe_pool_event){.kind = NUMOE_POOL_JOIN,
                                          .begin_ns = load(&pool->changed_ns),
                                          .end_ns = numoe_pool_os_now_ns()});
}
