/* The pool: items, phases, stealing, parking, errors. */
#include "numoe_pool.h"
#include "pool_internal.h"
#include "pool_range.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const uint32_t worker_counts[] = {1, 2, 3, 64, 256};
enum { WORKER_COUNTS = sizeof worker_counts / sizeof *worker_counts };

static struct numoe_pool *make(uint32_t workers, uint64_t chaos_seed)
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

static void sleep_us(long us)
{
    struct timespec time = {us / 1000000, us % 1000000 * 1000};

    nanosleep(&time, NULL);
}

static uint64_t now_ns(void)
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

static void tally_item(struct tally *tally, uint32_t phase, uint32_t item, uint32_t worker)
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

static struct tally *new_tally(uint32_t workers)
{
    struct tally *tally = calloc(1, sizeof *tally);

    cr_assert_not_null(tally);
    tally->workers = workers;
    return tally;
}

static void check_tally(const struct tally *tally, uint32_t phases)
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
static void run_and_check(struct numoe_pool *pool, uint32_t phases, const uint32_t *items,
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

static uint64_t items_in_stats(const struct numoe_pool *pool)
{
    struct numoe_pool_worker_stats stats;
    uint64_t sum = 0;

    for (uint32_t w = 0; w < numoe_pool_worker_count(pool); w++) {
        cr_assert_eq(numoe_pool_stats(pool, w, &stats), 0);
        sum += stats.items;
    }
    return sum;
}

Test(pool_items, every_item_once_for_many_sizes, .timeout = 60)
{
    static const uint32_t sizes[] = {0, 1, 2, 3, 5, 63, 64, 65, 255, 256, 257, 1000, 65537};

    for (uint32_t c = 0; c < WORKER_COUNTS; c++) {
        struct numoe_pool *pool = make(worker_counts[c], 0);
        uint64_t expected = 0;
        cr_assert_eq(numoe_pool_worker_count(pool), worker_counts[c]);
        for (uint32_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            run_and_check(pool, 1, &sizes[s], NULL);
            expected += sizes[s];
        }
        cr_assert_eq(items_in_stats(pool), expected);
        numoe_pool_destroy(pool);
    }
}

Test(pool_items, jobs_follow_each_other_thousands_of_times, .timeout = 60)
{
    for (uint32_t c = 0; c < WORKER_COUNTS; c++) {
        struct numoe_pool *pool = make(worker_counts[c], 0);
        struct tally *tally = new_tally(worker_counts[c]);
        struct numoe_pool_job job = {.context = tally,
                                     .phase_count = 2,
                                     .phases = {{run_phase_0, 7, NULL}, {run_phase_1, 3, NULL}}};

        tally->items[0] = 7;
        tally->items[1] = 3;
        for (int i = 0; i < 3000; i++) {
            memset(tally->runs[0], 0, 7 * sizeof tally->runs[0][0]);
            memset(tally->runs[1], 0, 3 * sizeof tally->runs[1][0]);
            tally->total[0] = tally->total[1] = 0;
            cr_assert_eq(numoe_pool_run(pool, &job), 0);
            check_tally(tally, 2);
        }
        numoe_pool_destroy(pool);
        free(tally);
    }
}

static void count_item(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    atomic_fetch_add_explicit((_Atomic uint64_t *)context, item, memory_order_relaxed);
}

Test(pool_items, the_largest_phase_fits, .timeout = 60)
{
    _Atomic uint64_t sum = 0;
    const uint64_t most = NUMOE_POOL_MAX_ITEMS;
    struct numoe_pool_job job = {
        .context = &sum, .phase_count = 1, .phases = {{count_item, 0, NULL}}};
    struct numoe_pool *pool = make(3, 0);

    job.phases[0].items = NUMOE_POOL_MAX_ITEMS;
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(sum, most * (most - 1) / 2);
    job.phases[0].items++;
    cr_assert_eq(numoe_pool_run(pool, &job), -EINVAL);
    cr_assert_eq(sum, most * (most - 1) / 2);
    numoe_pool_destroy(pool);
}

/* Both ends of 16 bits: more phases than epochs, the finished count past 2^32 is not reached but
 * the epoch comes round several times. */
Test(pool_items, the_epoch_comes_round, .timeout = 60)
{
    _Atomic uint64_t sum = 0;
    struct numoe_pool_job job = {.context = &sum,
                                 .phase_count = 2,
                                 .phases = {{count_item, 4, NULL}, {count_item, 4, NULL}}};
    struct numoe_pool *pool = make(2, 0);

    for (int i = 0; i < 3 * 65536 / NUMOE_POOL_MAX_PHASES + 5; i++)
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(sum, (3 * 65536 / NUMOE_POOL_MAX_PHASES + 5) * 12u);
    numoe_pool_destroy(pool);
}

Test(pool_phases, are_ordered, .timeout = 60)
{
    static const uint32_t items[] = {100, 1, 64, 3, 1000, 2, 65, 500};

    for (uint32_t c = 0; c < WORKER_COUNTS; c++) {
        struct numoe_pool *pool = make(worker_counts[c], 0);
        for (int i = 0; i < 10; i++) {
            for (uint32_t phases = 1; phases <= NUMOE_POOL_MAX_PHASES; phases++)
                run_and_check(pool, phases, items, NULL);
        }
        numoe_pool_destroy(pool);
    }
}

Test(pool_phases, empty_ones_are_passed_over, .timeout = 20)
{
    static const uint32_t cases[][4] = {
        {0, 0, 0, 0}, {0, 5, 0, 0}, {5, 0, 0, 5}, {0, 0, 0, 9}, {1, 0, 1, 0}};
    struct numoe_pool *pool = make(3, 0);

    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++)
        run_and_check(pool, 4, cases[i], NULL);
    run_and_check(pool, 0, NULL, NULL);
    numoe_pool_destroy(pool);
}

/* What a phase writes without atomics the next one reads. */
struct chain {
    uint32_t a[1000], b[1000];
    _Atomic uint32_t wrong;
};

static void write_a(void *context, uint32_t item, uint32_t worker)
{
    (void)worker;
    ((struct chain *)context)->a[item]++;
}

static void copy_b(void *context, uint32_t item, uint32_t worker)
{
    struct chain *chain = context;

    (void)worker;
    chain->b[item] = chain->a[999 - item];
}

static void check_b(void *context, uint32_t item, uint32_t worker)
{
    struct chain *chain = context;

    (void)worker;
    if (chain->b[item] != chain->b[0] || chain->a[item] != chain->b[item])
        atomic_fetch_add(&chain->wrong, 1);
}

Test(pool_phases, see_what_the_phase_before_wrote, .timeout = 30)
{
    struct chain *chain = calloc(1, sizeof *chain);
    struct numoe_pool_job job = {
        .context = chain,
        .phase_count = 3,
        .phases = {{write_a, 1000, NULL}, {copy_b, 1000, NULL}, {check_b, 1000, NULL}},
    };
    struct numoe_pool *pool = make(3, 0);

    for (int i = 0; i < 500; i++)
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(chain->wrong, 0);
    cr_assert_eq(chain->b[17], 500);
    numoe_pool_destroy(pool);
    free(chain);
}

Test(pool_first, given_shares_are_taken, .timeout = 20)
{
    static const uint32_t even[] = {0, 4, 8, 12}, all_last[] = {0, 0, 0, 12},
                          all_first[] = {0, 12, 12, 12}, hole[] = {0, 6, 6, 12};
    const uint32_t *const shares[] = {even, all_last, all_first, hole};
    static const uint32_t items[] = {12, 12, 12, 12};
    struct numoe_pool *pool = make(3, 0);

    for (int i = 0; i < 200; i++)
        run_and_check(pool, 4, items, shares);
    numoe_pool_destroy(pool);
}

struct owners {
    _Atomic uint32_t here;
    uint32_t by[3];
};

/* Each item waits until all three have begun, so no worker can take two. */
static void note_owner(void *context, uint32_t item, uint32_t worker)
{
    struct owners *owners = context;
    uint64_t until = now_ns() + 5000000000u;

    owners->by[item] = worker;
    atomic_fetch_add(&owners->here, 1);
    while (atomic_load(&owners->here) < 3 && now_ns() < until)
        sched_yield();
}

static uint32_t allowed_cpus(uint32_t *cpu, uint32_t most)
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

Test(pool_first, items_that_wait_for_each_other_get_a_worker_each, .timeout = 20)
{
    static const uint32_t one_each[] = {0, 1, 2, 3};
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    struct numoe_pool_worker workers[3] = {
        {.os_cpu = UINT32_MAX}, {.os_cpu = cpu[0]}, {.os_cpu = cpu[cpus - 1]}};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;

    if (cpus < 2)
        cr_skip_test("one CPU: not all are woken");
    config.worker_count = 3;
    config.workers = workers;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    for (int i = 0; i < 50; i++) {
        struct owners owners = {0};
        struct numoe_pool_job job = {
            .context = &owners, .phase_count = 1, .phases = {{note_owner, 3, one_each}}};
        if (i % 10 == 0)
            sleep_us(2000); /* from parked */
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
        cr_assert_eq(owners.here, 3);
        cr_assert(owners.by[0] != owners.by[1] && owners.by[1] != owners.by[2] &&
                  owners.by[0] != owners.by[2]);
    }
    numoe_pool_destroy(pool);
}

Test(pool_first, bad_ones_are_refused, .timeout = 20)
{
    static const uint32_t not_zero[] = {1, 4, 12}, falls[] = {0, 13, 12}, short_of[] = {0, 4, 11},
                          past[] = {0, 4, 13};
    const uint32_t *const bad[] = {not_zero, falls, short_of, past};
    struct numoe_pool *pool = make(2, 0);
    _Atomic uint64_t sum = 0;

    for (int i = 0; i < 4; i++) {
        struct numoe_pool_job job = {
            .context = &sum,
            .phase_count = 2,
            .phases = {{count_item, 3, NULL}, {count_item, 12, bad[i]}},
        };
        uint64_t ticket = 77;
        cr_assert_eq(numoe_pool_run(pool, &job), -EINVAL);
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), -EINVAL);
        cr_assert_eq(ticket, 77);
    }
    cr_assert_eq(sum, 0);
    numoe_pool_destroy(pool);
}

/* ------------------------------------------------------------------------ stealing */

struct slow {
    _Atomic uint32_t by[256];
};

static void slow_item(void *context, uint32_t item, uint32_t worker)
{
    struct slow *slow = context;

    sleep_us(item < 32 ? 2000 : 0);
    atomic_fetch_add(&slow->by[worker], 1);
}

/* Item 0 ends when 36 others have run, but only 32 are not behind it. */
static void wait_for_others(void *context, uint32_t item, uint32_t worker)
{
    struct slow *slow = context;
    uint64_t until = now_ns() + 10000000000u;

    while (item == 0 && atomic_load(&slow->by[0]) + atomic_load(&slow->by[1]) < 36 &&
           now_ns() < until)
        sched_yield();
    atomic_fetch_add(&slow->by[worker], 1);
}

Test(pool_steal, items_behind_a_slow_one_are_taken, .timeout = 20)
{
    static const uint32_t first[] = {0, 32, 64};
    struct slow slow = {0};
    struct numoe_pool_job job = {
        .context = &slow, .phase_count = 1, .phases = {{wait_for_others, 64, first}}};
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    /* Pinned, so that both are woken on a single CPU too. */
    struct numoe_pool_worker workers[2] = {{.os_cpu = UINT32_MAX}, {.os_cpu = cpu[cpus - 1]}};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;
    struct numoe_pool_worker_stats stats[2];

    config.worker_count = 2;
    config.workers = workers;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats[0]), 0);
    cr_assert_eq(numoe_pool_stats(pool, 1, &stats[1]), 0);
    cr_assert_eq(stats[0].items + stats[1].items, 64);
    cr_assert_eq(slow.by[0], stats[0].items);
    cr_assert_geq(stats[0].steals + stats[1].steals, 1);
    cr_assert_geq(stats[0].stolen_items + stats[1].stolen_items, 4);
    numoe_pool_destroy(pool);
}

/* Have every worker woken, though CPUs are fewer. */
static void make_all_regular(struct numoe_pool *pool)
{
    for (uint32_t w = 0; w < pool->worker_count; w++)
        atomic_store(&pool->workers[w].rank, NUMOE_POOL_REGULAR);
    atomic_store(&pool->regulars, pool->worker_count);
    numoe_pool_wake_all(pool);
}

/* A worker that never gets its own share: all given to one. */
Test(pool_steal, one_share_for_all_is_spread, .timeout = 20)
{
    uint32_t first[9] = {0};
    struct slow slow = {0};
    struct numoe_pool_job job = {
        .context = &slow, .phase_count = 1, .phases = {{slow_item, 32, first}}};
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2), helpers = 0;
    struct numoe_pool_worker workers[8];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;

    for (int w = 0; w < 8; w++)
        workers[w] = (struct numoe_pool_worker){cpu[w % cpus], w / 2, w / 2, w / 4, 0};
    config.worker_count = 8;
    config.workers = workers;
    for (int w = 5; w <= 8; w++)
        first[w] = 32; /* worker 4 */
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    make_all_regular(pool);
    sleep_us(2000);
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    for (int w = 0; w < 8; w++)
        helpers += slow.by[w] > 0;
    cr_assert_geq(helpers, 3, "%u workers of 8 took part", helpers);
    numoe_pool_destroy(pool);
}

Test(pool_steal, chaos_runs_every_item_once, .timeout = 60)
{
    static const uint32_t items[] = {1000, 3, 64, 1, 500};
    uint64_t steals = 0;

    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct numoe_pool *pool = make(1 + seed * 7 % 33, seed);
        for (int i = 0; i < 10; i++)
            run_and_check(pool, 5, items, NULL);
        cr_assert_eq(items_in_stats(pool), 15680);
        for (uint32_t w = 0; w < numoe_pool_worker_count(pool); w++) {
            struct numoe_pool_worker_stats stats;
            cr_assert_eq(numoe_pool_stats(pool, w, &stats), 0);
            steals += stats.steals;
        }
        numoe_pool_destroy(pool);
    }
    cr_assert_gt(steals, 1000);
}

/* ---------------------------------------------------------------------- range word */

Test(pool_range, owner_takes_the_front_thief_half_of_the_back)
{
    numoe_pool_range range = 0;
    uint32_t item, begin, end;

    cr_assert(!numoe_pool_range_take(&range, &item));
    cr_assert(!numoe_pool_range_steal(&range, 0, 1, 0, &begin, &end));
    numoe_pool_range_put(&range, 10, 17, 5);
    cr_assert(numoe_pool_range_take(&range, &item));
    cr_assert_eq(item, 10);
    cr_assert(numoe_pool_range_steal(&range, 5, 1, 0, &begin, &end));
    cr_assert(begin == 14 && end == 17);
    cr_assert(numoe_pool_range_steal(&range, 5, 1, 1, &begin, &end));
    cr_assert(begin == 13 && end == 14);
    cr_assert(numoe_pool_range_take(&range, &item) && item == 11);
    cr_assert(numoe_pool_range_steal(&range, 5, 1, 0, &begin, &end));
    cr_assert(begin == 12 && end == 13);
    cr_assert(!numoe_pool_range_take(&range, &item));
    cr_assert(!numoe_pool_range_steal(&range, 5, 1, 0, &begin, &end));
}

Test(pool_range, another_epoch_is_not_stolen_from)
{
    numoe_pool_range range = 0;
    uint32_t begin, end;

    numoe_pool_range_put(&range, 0, 8, 41);
    cr_assert(!numoe_pool_range_steal(&range, 40, 1, 0, &begin, &end));
    cr_assert(!numoe_pool_range_steal(&range, 42, 1, 0, &begin, &end));
    cr_assert(numoe_pool_range_steal(&range, 41, 1, 0, &begin, &end));
}

Test(pool_range, the_last_items_do_not_carry)
{
    numoe_pool_range range = 0;
    uint32_t item, begin, end;

    numoe_pool_range_put(&range, NUMOE_POOL_MAX_ITEMS - 2, NUMOE_POOL_MAX_ITEMS, UINT64_MAX);
    cr_assert(numoe_pool_range_take(&range, &item) && item == NUMOE_POOL_MAX_ITEMS - 2);
    cr_assert(numoe_pool_range_take(&range, &item) && item == NUMOE_POOL_MAX_ITEMS - 1);
    cr_assert(!numoe_pool_range_take(&range, &item));
    cr_assert(!numoe_pool_range_steal(&range, UINT64_MAX, 1, 0, &begin, &end));
    cr_assert_eq(range >> 48, 0xffff);
}

/* ------------------------------------------------------------------ submit and wait */

Test(pool_submit, others_run_it_without_the_submitter, .timeout = 20)
{
    for (int parked = 0; parked < 2; parked++) {
        static const uint32_t counts[] = {2, 3, 64};
        for (int c = 0; c < 3; c++) {
            struct numoe_pool *pool = make(counts[c], 0);
            struct tally *tally = new_tally(counts[c]);
            struct numoe_pool_job job = {
                .context = tally,
                .phase_count = 2,
                .phases = {{run_phase_0, 1, NULL}, {run_phase_1, 9, NULL}}};
            uint64_t ticket = 0, until = now_ns() + 10000000000u;
            struct numoe_pool_worker_stats stats;

            tally->items[0] = 1;
            tally->items[1] = 9;
            if (parked)
                sleep_us(20000);
            cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
            while (atomic_load(&tally->total[1]) < 9 && now_ns() < until)
                sleep_us(100);
            check_tally(tally, 2);
            cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
            cr_assert_eq(stats.items, 0);
            cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
            numoe_pool_destroy(pool);
            free(tally);
        }
    }
}

Test(pool_submit, wait_helps, .timeout = 20)
{
    struct numoe_pool *pool = make(1, 0);
    struct tally *tally = new_tally(1);
    struct numoe_pool_job job = {
        .context = tally, .phase_count = 1, .phases = {{run_phase_0, 9, NULL}}};
    uint64_t ticket = 0;

    tally->items[0] = 9;
    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
    cr_assert_eq(tally->total[0], 0);
    cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
    check_tally(tally, 1);
    numoe_pool_destroy(pool);
    free(tally);
}

Test(pool_submit, run_finishes_the_pending_job_first, .timeout = 20)
{
    static const uint32_t counts[] = {1, 2, 64};
    for (int c = 0; c < 3; c++) {
        struct numoe_pool *pool = make(counts[c], 0);
        struct tally *submitted = new_tally(counts[c]);
        struct numoe_pool_job job = {
            .context = submitted, .phase_count = 1, .phases = {{run_phase_0, 9, NULL}}};
        static const uint32_t items[] = {5};
        uint64_t ticket = 0;

        submitted->items[0] = 9;
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
        run_and_check(pool, 1, items, NULL);
        check_tally(submitted, 1);
        cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
        numoe_pool_destroy(pool);
        free(submitted);
    }
}

Test(pool_submit, tickets_are_good_once, .timeout = 20)
{
    struct numoe_pool *pool = make(2, 0);
    _Atomic uint64_t sum = 0;
    struct numoe_pool_job job = {
        .context = &sum, .phase_count = 1, .phases = {{count_item, 4, NULL}}};
    struct numoe_pool_job nothing = {.phase_count = 0};
    uint64_t ticket[3], late;

    cr_assert_eq(numoe_pool_wait(pool, 0), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, 1), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, 8), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, UINT64_MAX), -EINVAL);
    cr_assert_eq(numoe_pool_submit(pool, &job, NULL), -EINVAL);
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(numoe_pool_submit(pool, i == 1 ? &nothing : &job, &ticket[i]), 0);
    cr_assert(ticket[0] < ticket[1] && ticket[1] < ticket[2]);
    cr_assert_eq(numoe_pool_wait(pool, ticket[2]), 0);
    cr_assert_eq(sum, 18);
    cr_assert_eq(numoe_pool_wait(pool, ticket[0]), 0);
    cr_assert_eq(numoe_pool_wait(pool, ticket[0]), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, ticket[1]), 0);
    cr_assert_eq(numoe_pool_wait(pool, ticket[1]), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, ticket[2]), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, ticket[2] + 8), -EINVAL);

    /* Run, but forgotten: no more than 256 are kept to be waited for. */
    cr_assert_eq(numoe_pool_submit(pool, &job, &late), 0);
    for (int i = 0; i < 1000; i++)
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket[0]), 0);
    cr_assert_eq(numoe_pool_wait(pool, late), -EINVAL);
    cr_assert_eq(numoe_pool_wait(pool, ticket[0]), 0);
    cr_assert_eq(numoe_pool_wait(pool, ticket[0]), -EINVAL);
    cr_assert_eq(sum, 6u * 1004u);
    numoe_pool_destroy(pool);
}

Test(pool_submit, what_became_of_a_job_is_kept_until_it_is_asked_for, .timeout = 60)
{
    struct numoe_pool *pool = make(2, 0);
    _Atomic uint64_t sum = 0;
    struct numoe_pool_job job = {
        .context = &sum, .phase_count = 1, .phases = {{count_item, 4, NULL}}};
    struct numoe_pool_job many = {
        .context = &sum, .phase_count = 1, .phases = {{count_item, 1 << 20, NULL}}};
    uint64_t called_off, ticket, kept[255];

    do {
        /* Until it was early enough to spare some items. */
        cr_assert_eq(numoe_pool_submit(pool, &many, &called_off), 0);
    } while (numoe_pool_cancel(pool, called_off));
    for (int i = 0; i < 1000; i++) {
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
        cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
    }
    for (int i = 0; i < 255; i++)
        cr_assert_eq(numoe_pool_submit(pool, &job, &kept[i]), 0);
    cr_assert_eq(numoe_pool_wait(pool, called_off), -ECANCELED);
    for (int i = 0; i < 255; i++)
        cr_assert_eq(numoe_pool_wait(pool, kept[i]), 0);
    numoe_pool_destroy(pool);
}

Test(pool_submit, destroy_finishes_a_pending_job, .timeout = 20)
{
    static const uint32_t counts[] = {1, 2, 64};
    for (int c = 0; c < 3; c++) {
        struct numoe_pool *pool = make(counts[c], 0);
        struct tally *tally = new_tally(counts[c]);
        struct numoe_pool_job job = {.context = tally,
                                     .phase_count = 2,
                                     .phases = {{run_phase_0, 99, NULL}, {run_phase_1, 2, NULL}}};
        uint64_t ticket;

        tally->items[0] = 99;
        tally->items[1] = 2;
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
        numoe_pool_destroy(pool);
        check_tally(tally, 2);
        free(tally);
    }
}

/* -------------------------------------------------------------- callers and nesting */

struct nest {
    struct numoe_pool *own, *inner;
    _Atomic uint32_t deadlocks, inner_runs, inner_items, strange;
};

static void count_inner(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    atomic_fetch_add(&((struct nest *)context)->inner_items, 1);
}

/* From inside an item of the inner pool that this thread runs, the outer one is busy too. */
static void inner_calls_outer(void *context, uint32_t item, uint32_t worker)
{
    struct nest *nest = context;
    struct numoe_pool_job job = {
        .context = nest, .phase_count = 1, .phases = {{count_inner, 1, NULL}}};

    (void)item;
    if (worker == 0 && numoe_pool_run(nest->own, &job) != -EDEADLK)
        atomic_fetch_add(&nest->strange, 1);
}

static void nested_item(void *context, uint32_t item, uint32_t worker)
{
    struct nest *nest = context;
    struct numoe_pool_job job = {
        .context = nest, .phase_count = 1, .phases = {{count_inner, 3, NULL}}};
    struct numoe_pool_job back = {
        .context = nest, .phase_count = 1, .phases = {{inner_calls_outer, 1, NULL}}};
    uint64_t ticket = 0;

    (void)item, (void)worker;
    if (numoe_pool_run(nest->own, &job) == -EDEADLK &&
        numoe_pool_submit(nest->own, &job, &ticket) == -EDEADLK &&
        numoe_pool_wait(nest->own, 8) == -EDEADLK)
        atomic_fetch_add(&nest->deadlocks, 1);
    if (numoe_pool_run(nest->inner, &job) == 0 && numoe_pool_run(nest->inner, &back) == 0)
        atomic_fetch_add(&nest->inner_runs, 1);
}

Test(pool_nested, own_pool_is_refused_another_works, .timeout = 20)
{
    struct nest nest = {.own = make(3, 0), .inner = make(2, 0)};
    struct numoe_pool_job job = {
        .context = &nest, .phase_count = 1, .phases = {{nested_item, 40, NULL}}};

    cr_assert_eq(numoe_pool_run(nest.own, &job), 0);
    cr_assert_eq(nest.deadlocks, 40);
    cr_assert_eq(nest.inner_runs, 40);
    cr_assert_eq(nest.inner_items, 120);
    cr_assert_eq(nest.strange, 0);
    /* And afterwards the thread is outside again. */
    cr_assert_eq(numoe_pool_run(nest.own, &job), 0);
    numoe_pool_destroy(nest.own);
    numoe_pool_destroy(nest.inner);
}

struct caller {
    struct numoe_pool *pools[2];
    uint32_t number;
    _Atomic uint32_t *failures;
};

static void add_one(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    atomic_fetch_add((_Atomic uint32_t *)context, 1);
}

static void *call_both(void *argument)
{
    struct caller *caller = argument;

    for (uint32_t i = 0; i < 500; i++) {
        _Atomic uint32_t count = 0;
        struct numoe_pool *pool = caller->pools[(i + caller->number) & 1];
        struct numoe_pool_job job = {.context = (void *)&count,
                                     .phase_count = 2,
                                     .phases = {{add_one, 5, NULL}, {add_one, 2, NULL}}};
        uint64_t ticket;

        if (i % 3 == 0) {
            if (numoe_pool_submit(pool, &job, &ticket) || numoe_pool_wait(pool, ticket))
                atomic_fetch_add(caller->failures, 1);
        } else if (numoe_pool_run(pool, &job)) {
            atomic_fetch_add(caller->failures, 1);
        }
        if (count != 7)
            atomic_fetch_add(caller->failures, 1);
    }
    return NULL;
}

Test(pool_callers, take_turns_on_two_pools, .timeout = 60)
{
    _Atomic uint32_t failures = 0;
    struct numoe_pool *pools[2] = {make(2, 0), make(5, 0)};
    pthread_t threads[4];
    struct caller callers[4];

    for (uint32_t t = 0; t < 4; t++) {
        callers[t] = (struct caller){{pools[0], pools[1]}, t, &failures};
        cr_assert_eq(pthread_create(&threads[t], NULL, call_both, &callers[t]), 0);
    }
    for (uint32_t t = 0; t < 4; t++)
        pthread_join(threads[t], NULL);
    cr_assert_eq(failures, 0);
    cr_assert_eq(items_in_stats(pools[0]) + items_in_stats(pools[1]), 4u * 500u * 7u);
    numoe_pool_destroy(pools[0]);
    numoe_pool_destroy(pools[1]);
}

/* --------------------------------------------------------------------- create, errors */

static void keep_message(void *user, enum numoe_log_level level, const char *message)
{
    char *kept = user;

    if (level == NUMOE_LOG_WARNING)
        snprintf(kept, 256, "%s", message);
}

Test(pool_create, bad_configs_are_refused, .timeout = 20)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = (void *)1;

    config.worker_count = 0;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert_eq(error.code, -EINVAL);
    cr_assert_null(pool);
    config.worker_count = NUMOE_POOL_MAX_WORKERS + 1;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert(strstr(error.message, "4097"), "%s", error.message);
    config.worker_count = 1;
    config.size = 3;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), -EINVAL);
    config.size = sizeof config + 8;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert(strstr(error.where, "size"), "%s", error.where);
    cr_assert_eq(numoe_pool_create(NULL, &pool, &error), -EINVAL);
    cr_assert_eq(numoe_pool_create(&config, NULL, &error), -EINVAL);
    /* An older caller, whose config ends earlier. */
    config.size = offsetof(struct numoe_pool_config, spin_ns);
    config.chaos_seed = 5;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0);
    cr_assert_eq(pool->chaos_seed, 0);
    cr_assert_eq(pool->spin_ns, 200000);
    numoe_pool_destroy(pool);
}

Test(pool_create, bad_calls_are_refused, .timeout = 20)
{
    struct numoe_pool *pool = make(2, 0);
    struct numoe_pool_worker_stats stats;
    struct numoe_pool_job job = {.phase_count = NUMOE_POOL_MAX_PHASES + 1};
    struct numoe_pool_job no_function = {.phase_count = 1, .phases = {{NULL, 1, NULL}}};

    cr_assert_eq(numoe_pool_run(pool, &job), -EINVAL);
    cr_assert_eq(numoe_pool_run(pool, &no_function), -EINVAL);
    cr_assert_eq(numoe_pool_run(pool, NULL), -EINVAL);
    cr_assert_eq(numoe_pool_run(NULL, &job), -EINVAL);
    cr_assert_eq(numoe_pool_stats(pool, 2, &stats), -EINVAL);
    cr_assert_eq(numoe_pool_stats(pool, 0, NULL), -EINVAL);
    cr_assert_eq(numoe_pool_worker_count(pool), 2);
    numoe_pool_destroy(pool);
    numoe_pool_destroy(NULL);
}

Test(pool_create, an_absent_cpu_is_reported_not_fatal, .timeout = 20)
{
    static const uint32_t absent[] = {CPU_SETSIZE - 1, 1u << 20};
    for (int i = 0; i < 2; i++) {
        uint32_t cpu[1];
        char message[256] = "";
        struct numoe_log log = {keep_message, message};
        struct numoe_pool_worker workers[3];
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_pool_worker_stats stats;
        struct numoe_pool *pool;
        static const uint32_t items[] = {100};

        allowed_cpus(cpu, 1);
        memset(workers, 0, sizeof workers);
        workers[0].os_cpu = workers[1].os_cpu = cpu[0];
        workers[2].os_cpu = absent[i];
        config.worker_count = 3;
        config.workers = workers;
        config.log = &log;
        cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0, "%s", error.message);
        cr_assert(strstr(message, "worker 2") && strstr(message, "CPU"), "%s", message);
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
        cr_assert(stats.pinned && stats.pin_errno == 0);
        cr_assert_eq(numoe_pool_stats(pool, 2, &stats), 0);
        cr_assert(!stats.pinned && stats.pin_errno == EINVAL);
        run_and_check(pool, 1, items, NULL);
        numoe_pool_destroy(pool);
    }
}

Test(pool_create, pinned_caller_gets_its_mask_back, .timeout = 20)
{
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    char message[256] = "";
    struct numoe_log log = {keep_message, message};
    struct numoe_pool_worker workers[1] = {{.os_cpu = cpu[cpus - 1]}};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    struct numoe_pool *pool;
    cpu_set_t before, after;
    static const uint32_t items[] = {100};

    cr_assert_eq(sched_getaffinity(0, sizeof before, &before), 0);
    config.worker_count = 1; /* so that the caller always has something to do */
    config.workers = workers;
    config.pin_caller = true;
    config.log = &log;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    run_and_check(pool, 1, items, NULL);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
    cr_assert(stats.pinned && stats.pin_errno == 0);
    cr_assert_eq(sched_getaffinity(0, sizeof after, &after), 0);
    cr_assert(CPU_EQUAL(&before, &after));
    numoe_pool_destroy(pool);

    workers[0].os_cpu = CPU_SETSIZE - 1;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    run_and_check(pool, 1, items, NULL);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
    cr_assert(!stats.pinned && stats.pin_errno == EINVAL);
    cr_assert(strstr(message, "worker 0"), "%s", message);
    cr_assert_eq(sched_getaffinity(0, sizeof after, &after), 0);
    cr_assert(CPU_EQUAL(&before, &after));
    numoe_pool_destroy(pool);
}

/* C1: names fit and are distinct, with four digits too. */
Test(pool_create, thread_names_are_distinct_and_fit, .timeout = 60)
{
    enum { COUNT = 1030 };
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool;
    static bool seen[COUNT];
    uint32_t found = 0;
    struct dirent *entry;
    DIR *tasks;
    int rc;

    config.worker_count = COUNT;
    rc = numoe_pool_create(&config, &pool, &error);
    if (rc == -EAGAIN)
        cr_skip_test("too few threads allowed: %s", error.message);
    cr_assert_eq(rc, 0, "%s", error.message);
    tasks = opendir("/proc/self/task");
    if (!tasks) {
        numoe_pool_destroy(pool);
        cr_skip_test("/proc/self/task cannot be read");
    }
    while ((entry = readdir(tasks))) {
        char path[300], name[64] = "";
        unsigned worker;
        FILE *file;

        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        file = fopen(path, "r");
        if (!file)
            continue;
        if (fgets(name, sizeof name, file) && sscanf(name, "numoe-%u", &worker) == 1) {
            cr_assert_lt(worker, COUNT);
            cr_assert_leq(strlen(name), 16); /* 15 and a newline */
            cr_assert(!seen[worker], "two threads are named %s", name);
            seen[worker] = true;
            found++;
        }
        fclose(file);
    }
    closedir(tasks);
    cr_assert_eq(found, COUNT - 1);
    numoe_pool_destroy(pool);
}

static void note_init(void *user, uint32_t worker)
{
    _Atomic uint32_t *calls = user;
    sigset_t mask;

    atomic_fetch_add(&calls[worker], 1);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    if (sigismember(&mask, SIGINT) && sigismember(&mask, SIGUSR1) && sigismember(&mask, SIGALRM) &&
        !sigismember(&mask, SIGSEGV))
        atomic_fetch_add(&calls[worker], 100);
}

Test(pool_create, thread_init_once_a_thread_signals_blocked, .timeout = 20)
{
    _Atomic uint32_t calls[8] = {0};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;
    sigset_t before, after;

    config.worker_count = 8;
    config.thread_init = note_init;
    config.thread_init_user = (void *)calls;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int number = 1; number < NSIG; number++)
        cr_assert_eq(sigismember(&before, number), sigismember(&after, number));
    cr_assert_eq(calls[0], 0);
    for (int w = 1; w < 8; w++)
        cr_assert_eq(calls[w], 101);
    numoe_pool_destroy(pool);
}

/* A thread limit: those started end, the message counts them, and the process goes on. */
static int create_under_limit(void)
{
    struct rlimit limit;
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = (void *)1;
    unsigned number = 0, of = 0, were = 0;
    rlim_t before;
    int rc;

    /* The limit counts a user's threads and does not hold for root. */
    if (geteuid() == 0 && setresuid(61234, 61234, 61234))
        return 2;
    if (getrlimit(RLIMIT_NPROC, &limit))
        return 2;
    before = limit.rlim_cur;
    limit.rlim_cur = 40;
    if (setrlimit(RLIMIT_NPROC, &limit))
        return 2;
    config.worker_count = 200;
    rc = numoe_pool_create(&config, &pool, &error);
    if (rc == 0)
        return 2; /* not enforced here */
    if (rc != -EAGAIN || pool || error.code != rc)
        return 3;
    if (sscanf(error.message, "thread %u of %u could not be started, %u were", &number, &of,
               &were) != 3)
        return 4;
    if (of != 199 || were + 1 != number || were > 40)
        return 5;
    limit.rlim_cur = before;
    if (setrlimit(RLIMIT_NPROC, &limit))
        return 2;
    config.worker_count = 4;
    if (numoe_pool_create(&config, &pool, &error))
        return 6;
    numoe_pool_destroy(pool);
    return 0;
}

Test(pool_create, a_thread_that_cannot_start_fails_the_call, .timeout = 30)
{
    pid_t child = fork();
    int status;

    cr_assert_geq(child, 0);
    if (child == 0)
        _exit(create_under_limit());
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == 2)
        cr_skip_test("threads cannot be limited here");
    cr_assert_eq(WEXITSTATUS(status), 0, "exit code %d", WEXITSTATUS(status));
}

Test(pool_create, and_destroy_without_a_job, .timeout = 60)
{
    for (int i = 0; i < 500; i++) {
        struct numoe_pool *pool = make(2 + i % 7, 0);
        numoe_pool_destroy(pool);
    }
    for (int i = 0; i < 20; i++) {
        struct numoe_pool *pool = make(64, 0);
        if (i & 1)
            sleep_us(500); /* now and then parked */
        numoe_pool_destroy(pool);
    }
}

/* ------------------------------------------------------------------------------- fork */

Test(pool_fork, the_child_is_refused_and_may_destroy, .timeout = 30)
{
    static const uint32_t items[] = {50};
    struct numoe_pool *pool = make(3, 0);
    int status;
    pid_t child;

    run_and_check(pool, 1, items, NULL);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        _Atomic uint64_t sum = 0;
        struct numoe_pool_job job = {
            .context = &sum, .phase_count = 1, .phases = {{count_item, 9, NULL}}};
        uint64_t ticket;
        struct numoe_pool *fresh;
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;

        alarm(10);
        if (numoe_pool_run(pool, &job) != -ECHILD ||
            numoe_pool_submit(pool, &job, &ticket) != -ECHILD ||
            numoe_pool_wait(pool, 8) != -ECHILD || sum)
            _exit(2);
        numoe_pool_destroy(pool);
        config.worker_count = 3;
        if (numoe_pool_create(&config, &fresh, NULL) || numoe_pool_run(fresh, &job) || sum != 36)
            _exit(3);
        numoe_pool_destroy(fresh);
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    run_and_check(pool, 1, items, NULL);
    numoe_pool_destroy(pool);
}

/* The same where the kernel cannot wipe a page on fork. */
Test(pool_fork, the_pid_tells_as_well, .timeout = 30)
{
    struct numoe_pool *pool = make(2, 0);
    _Atomic uint64_t sum = 0;
    struct numoe_pool_job job = {
        .context = &sum, .phase_count = 1, .phases = {{count_item, 9, NULL}}};
    const _Atomic uint32_t *alive = pool->alive;
    int status;
    pid_t child;

    pool->alive = NULL;
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        alarm(10);
        if (numoe_pool_run(pool, &job) != -ECHILD)
            _exit(2);
        numoe_pool_destroy(pool);
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    pool->alive = alive;
    numoe_pool_destroy(pool);
}

/* ---------------------------------------------------------------------------- parking */

static double cpu_seconds(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* C3. */
Test(pool_park, an_idle_pool_costs_nothing, .timeout = 60)
{
    static const uint32_t counts[] = {2, 64, 256}, items[] = {1000};

    for (int c = 0; c < 3; c++) {
        struct numoe_pool *pool = make(counts[c], 0);
        double begin;

        run_and_check(pool, 1, items, NULL);
        sleep_us(100000);
        begin = cpu_seconds();
        sleep_us(1000000);
        cr_assert_lt(cpu_seconds() - begin, 0.01, "%u workers", counts[c]);
        numoe_pool_destroy(pool);
    }
}

static void sleep_item(void *context, uint32_t item, uint32_t worker)
{
    (void)context, (void)item, (void)worker;
    sleep_us(300000);
}

/* One item of 0.3 s, everyone else idle inside the job. */
Test(pool_park, waiting_inside_a_job_costs_nothing, .timeout = 60)
{
    static const uint32_t counts[] = {2, 64};

    for (int c = 0; c < 2; c++) {
        struct numoe_pool *pool = make(counts[c], 0);
        struct numoe_pool_job job = {.phase_count = 2,
                                     .phases = {{sleep_item, 1, NULL}, {sleep_item, 1, NULL}}};
        double begin = cpu_seconds();

        cr_assert_eq(numoe_pool_run(pool, &job), 0);
        cr_assert_lt(cpu_seconds() - begin, 0.03, "%u workers", counts[c]);
        numoe_pool_destroy(pool);
    }
}

/* Item 0 ends once item 1 has begun; item 1 takes 10 ms. So the caller, who has item 0, has nothing
 * left in the middle of the job, sleeps, and is woken for the next phase and the end. */
struct pair {
    _Atomic uint32_t begun, wrong;
};

static void short_and_long(void *context, uint32_t item, uint32_t worker)
{
    struct pair *pair = context;
    uint64_t until = now_ns() + 5000000000u;

    if (item == 1) {
        atomic_store(&pair->begun, 1);
        sleep_us(10000);
        atomic_store(&pair->begun, 0);
    } else {
        if (worker != 0)
            atomic_fetch_add(&pair->wrong, 1);
        while (!atomic_load(&pair->begun) && now_ns() < until)
            sched_yield();
    }
}

Test(pool_park, the_caller_sleeps_and_is_woken, .timeout = 60)
{
    static const uint32_t first[] = {0, 1, 2};
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    struct numoe_pool_worker workers[2] = {{.os_cpu = UINT32_MAX}, {.os_cpu = cpu[cpus - 1]}};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct pair pair = {0};
    struct numoe_pool_job job = {
        .context = &pair,
        .phase_count = 1,
        .phases = {{short_and_long, 2, first}},
    };
    struct numoe_pool_worker_stats stats;
    struct numoe_pool *pool;

    config.worker_count = 2;
    config.workers = workers;
    config.spin_ns = 50000;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    for (int i = 0; i < 30; i++)
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(numoe_pool_stats(pool, 0, &stats), 0);
    cr_assert_eq(pair.wrong, 0);
    cr_assert_geq(stats.sleeps, 25);
    numoe_pool_destroy(pool);
}

Test(pool_park, every_gap_between_jobs_is_survived, .timeout = 60)
{
    static const uint64_t spins[] = {0, 1, 20000, 200000};
    static const uint32_t items[] = {6, 1, 6};

    for (int s = 0; s < 4; s++) {
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        struct numoe_pool *pool;

        config.worker_count = 2 + s;
        config.spin_ns = spins[s];
        cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
        for (int gap = 0; gap < 300; gap += 3) {
            run_and_check(pool, 3, items, NULL);
            sleep_us(gap);
        }
        numoe_pool_destroy(pool);
    }
}

/* More workers than CPUs: who is worth waking. */
Test(pool_park, workers_without_a_cpu_are_left_asleep, .timeout = 60)
{
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    struct numoe_pool_worker workers[64];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats;
    uint64_t items = 0, sleeps = 0, sleeps_before = 0;
    struct numoe_pool *pool;

    if (cpus < 2)
        cr_skip_test("one CPU");
    memset(workers, 0, sizeof workers);
    for (int w = 0; w < 64; w++)
        workers[w].os_cpu = w < 32 ? cpu[w % 2] : UINT32_MAX;
    config.worker_count = 64;
    config.workers = workers;
    config.spin_ns = 0;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    if (pool->cpus != 2) {
        numoe_pool_destroy(pool);
        cr_skip_test("more than two CPUs");
    }
    cr_assert_eq(pool->regulars, 2);
    for (uint32_t w = 0; w < 64; w++)
        cr_assert_eq(pool->workers[w].rank, w < 2    ? NUMOE_POOL_REGULAR
                                            : w == 2 ? NUMOE_POOL_RESERVE
                                                     : NUMOE_POOL_SURPLUS);
    while (atomic_load(&pool->sleepers) < 63)
        sched_yield();
    for (int job = 0; job < 300; job++) {
        static const uint32_t sizes[] = {64, 7};
        run_and_check(pool, 2, sizes, NULL);
        if (job == 0)
            for (uint32_t w = 2; w < 64; w++) {
                cr_assert_eq(numoe_pool_stats(pool, w, &stats), 0);
                sleeps_before += stats.sleeps;
            }
    }
    for (uint32_t w = 2; w < 64; w++) {
        cr_assert_eq(numoe_pool_stats(pool, w, &stats), 0);
        sleeps += stats.sleeps;
        items += stats.items;
    }
    /* One a second is woken to look at its CPUs. */
    cr_assert_leq(sleeps, sleeps_before + 60);
    cr_assert_lt(items, 300u * 71u / 4);
    numoe_pool_destroy(pool);
}

Test(pool_park, parked_workers_come_back, .timeout = 60)
{
    uint32_t cpu[2];
    uint32_t cpus = allowed_cpus(cpu, 2);
    struct numoe_pool_worker workers[64];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;
    uint32_t took_part = 0;

    memset(workers, 0, sizeof workers);
    for (int w = 0; w < 64; w++)
        workers[w].os_cpu = cpu[w % cpus];
    config.worker_count = 64;
    config.workers = workers;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    make_all_regular(pool);
    for (int i = 0; i < 5; i++) {
        struct slow slow = {0};
        struct numoe_pool_job job = {
            .context = &slow, .phase_count = 1, .phases = {{slow_item, 256, NULL}}};
        sleep_us(30000);
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
        for (int w = 0; w < 64; w++)
            took_part += slow.by[w] > 0;
    }
    /* All were woken, level by level of the tree; on a busy machine some come too late. */
    cr_assert_gt(took_part, 5 * 16);
    numoe_pool_destroy(pool);
}
