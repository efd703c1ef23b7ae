/* The pool: items, phases, shares, stealing. */
#include "pool_help.h"
#include "pool_range.h"

#include <errno.h>
#include <string.h>

static const uint32_t worker_counts[] = {1, 2, 3, 64, 256};
enum { WORKER_COUNTS = sizeof worker_counts / sizeof *worker_counts };

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
