/* What tests of the pool share: pools, clocks, and jobs whose items are counted.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef POOL_HELP_H
#define POOL_HELP_H

#include "numoe_pool.h"
#include "pool_internal.h"

#include <criterion/criterion.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static inline struct numoe_pool *make(uint32_t workers, uint64_t chaos_seed)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = NULL;

    config.worker_count = workers;
    config.chaos_seed = chaos_seed;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0, "%s", error.message);
    cr_assert_not_null(pool);
    return pool;
}

static inline void sleep_us(long us)
{
    struct timespec time = {us / 1000000, us % 1000000 * 1000};

    nanosleep(&time, NULL);
}

static inline uint64_t now_ns(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* How often each item of each phase was run, and by whom. */
enum { MOST = 70000 };
struct tally {
    _Atomic uint32_t runs[NUMOE_POOL_MAX_PHASES][MOST];
    _Atomic uint32_t total[NUMOE_POOL_MAX_PHASES];
    _Atomic uint32_t disorder; /* items that began before the phase before was done */
    uint32_t items[NUMOE_POOL_MAX_PHASES];
    uint32_t workers;
    _Atomic uint32_t strange_workers;
};

static inline void tally_item(struct tally *tally, uint32_t phase, uint32_t item, uint32_t worker)
{
    for (uint32_t p = 0; p < phase; p++) {
        if (atomic_load(&tally->total[p]) != tally->items[p])
            atomic_fetch_add(&tally->disorder, 1);
    }
    if (worker >= tally->workers)
        atomic_fetch_add(&tally->strange_workers, 1);
    atomic_fetch_add(&tally->runs[phase][item], 1);
    atomic_fetch_add(&tally->total[phase], 1);
}

#define PHASE(p)                                                                                   \
    static void run_phase_##p(void *context, uint32_t item, uint32_t worker)                       \
    {                                                                                              \
        tally_item(context, p, item, worker);                                                      \
    }
PHASE(0)
PHASE(1)
PHASE(2)
PHASE(3)
PHASE(4)
PHASE(5)
PHASE(6)
PHASE(7)
static numoe_pool_fn *const run_phase[NUMOE_POOL_MAX_PHASES] = {
    run_phase_0, run_phase_1, run_phase_2, run_phase_3,
    run_phase_4, run_phase_5, run_phase_6, run_phase_7};

static inline struct tally *new_tally(uint32_t workers)
{
    struct tally *tally = calloc(1, sizeof *tally);

    cr_assert_not_null(tally);
    tally->workers = workers;
    return tally;
}

static inline void check_tally(const struct tally *tally, uint32_t phases)
{
    for (uint32_t p = 0; p < phases; p++) {
        cr_assert_eq(tally->total[p], tally->items[p], "phase %u: %u runs of %u items", p,
                     tally->total[p], tally->items[p]);
        for (uint32_t i = 0; i < tally->items[p]; i++)
            cr_assert_eq(tally->runs[p][i], 1, "phase %u item %u ran %u times", p, i,
                         tally->runs[p][i]);
    }
    cr_assert_eq(tally->disorder, 0);
    cr_assert_eq(tally->strange_workers, 0);
}

/* Run one job of the given phase sizes and check it. */
static inline void run_and_check(struct numoe_pool *pool, uint32_t phases, const uint32_t *items,
                                 const uint32_t *const *first)
{
    struct tally *tally = new_tally(numoe_pool_worker_count(pool));
    struct numoe_pool_job job = {.context = tally, .phase_count = phases};

    for (uint32_t p = 0; p < phases; p++) {
        tally->items[p] = items[p];
        job.phases[p].run = run_phase[p];
        job.phases[p].items = items[p];
        job.phases[p].first = first ? first[p] : NULL;
    }
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    check_tally(tally, phases);
    free(tally);
}

static inline uint64_t items_in_stats(const struct numoe_pool *pool)
{
    struct numoe_pool_worker_stats stats;
    uint64_t sum = 0;

    for (uint32_t w = 0; w < numoe_pool_worker_count(pool); w++) {
        cr_assert_eq(numoe_pool_stats(pool, w, &stats), 0);
        sum += stats.items;
    }
    return sum;
}

static inline void count_item(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    atomic_fetch_add_explicit((_Atomic uint64_t *)context, item, memory_order_relaxed);
}

static inline uint32_t allowed_cpus(uint32_t *cpu, uint32_t most)
{
    cpu_set_t mask;
    uint32_t count = 0;

    CPU_ZERO(&mask);
    cr_assert_eq(sched_getaffinity(0, sizeof mask, &mask), 0);
    for (uint32_t c = 0; c < CPU_SETSIZE && count < most; c++) {
        if (CPU_ISSET(c, &mask))
            cpu[count++] = c;
    }
    return count;
}

struct slow {
    _Atomic uint32_t by[256];
};

static inline void slow_item(void *context, uint32_t item, uint32_t worker)
{
    struct slow *slow = context;

    sleep_us(item < 32 ? 2000 : 0);
    atomic_fetch_add(&slow->by[worker], 1);
}

/* Have every worker woken, though CPUs are fewer. */
static inline void make_all_regular(struct numoe_pool *pool)
{
    for (uint32_t w = 0; w < pool->worker_count; w++)
        atomic_store(&pool->workers[w].rank, NUMOE_POOL_REGULAR);
    atomic_store(&pool->regulars, pool->worker_count);
    numoe_pool_wake_all(pool);
}

#endif
