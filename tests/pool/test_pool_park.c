/* The pool: who sleeps, who is woken, and what that costs. */
#include "pool_help.h"

#include <string.h>
#include <sys/resource.h>

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

struct meeting {
    _Atomic uint32_t begun;
    _Atomic bool missed;
};

/* Waits for the other item for five seconds. */
static void meet(void *context, uint32_t item, uint32_t worker)
{
    struct meeting *meeting = context;

    (void)item, (void)worker;
    atomic_fetch_add(&meeting->begun, 1);
    for (int ms = 0; atomic_load(&meeting->begun) < 2; ms++) {
        if (ms == 5000) {
            atomic_store(&meeting->missed, true);
            return;
        }
        sleep_us(1000);
    }
}

/* 64 workers of two CPUs, all asleep. NULL: there are other than two. */
static struct numoe_pool *crowd_asleep(void)
{
    static struct numoe_pool_worker workers[64];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    uint32_t cpu[2];
    struct numoe_pool *pool;

    if (allowed_cpus(cpu, 2) < 2)
        return NULL;
    for (int w = 0; w < 64; w++)
        workers[w] = (struct numoe_pool_worker){.os_cpu = cpu[w % 2]};
    config.worker_count = 64;
    config.workers = workers;
    config.spin_ns = 0;
    cr_assert_eq(numoe_pool_create(&config, &pool, NULL), 0);
    if (pool->cpus != 2) {
        numoe_pool_destroy(pool);
        return NULL;
    }
    /* with a call, as one a second wakes a worker to look at its CPUs */
    cr_assert_eq(numoe_pool_run(pool, &(struct numoe_pool_job){.phase_count = 0}), 0);
    while (atomic_load(&pool->sleepers) < 63)
        sched_yield();
    return pool;
}

/* The second share is a worker's that has no CPU: one that has is woken for it. */
Test(pool_park, a_worker_with_a_cpu_is_woken_for_another_ones_share, .timeout = 60)
{
    struct meeting meeting = {0};
    const struct numoe_pool_job job = {
        .context = &meeting, .phase_count = 1, .phases = {{.run = meet, .items = 2}}};
    struct numoe_pool *pool = crowd_asleep();

    if (!pool)
        cr_skip_test("not two CPUs");
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert(!meeting.missed);
    numoe_pool_destroy(pool);
}

/* The caller is away, so its CPU is free. */
Test(pool_park, the_reserve_is_woken_for_a_job_that_was_submitted, .timeout = 60)
{
    struct meeting meeting = {0};
    const struct numoe_pool_job job = {
        .context = &meeting, .phase_count = 1, .phases = {{.run = meet, .items = 2}}};
    struct numoe_pool *pool = crowd_asleep();
    uint64_t ticket;

    if (!pool)
        cr_skip_test("not two CPUs");
    cr_assert_eq(pool->workers[2].rank, NUMOE_POOL_RESERVE);
    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
    while (atomic_load(&meeting.begun) < 2) /* without this thread's help */
        sleep_us(1000);
    cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
    cr_assert(!meeting.missed);
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
