/* What workers count, and what an observer is told. */
#include "numoe_pool.h"
#include "pool_internal.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

#define MS ((uint64_t)1000000)

static void sleep_ns(uint64_t ns)
{
    struct timespec time = {(time_t)(ns / (1000 * MS)), (long)(ns % (1000 * MS))};

    nanosleep(&time, NULL);
}

static struct numoe_pool *make(const struct numoe_pool_config *config)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = NULL;

    cr_assert_eq(numoe_pool_create(config, &pool, &error), 0, "%s", error.message);
    return pool;
}

static struct numoe_pool_worker_stats stats_of(const struct numoe_pool *pool, uint32_t worker)
{
    struct numoe_pool_worker_stats stats;

    cr_assert_eq(numoe_pool_stats(pool, worker, &stats), 0);
    return stats;
}

static void nothing(void *context, uint32_t item, uint32_t worker)
{
    (void)context, (void)item, (void)worker;
}

static void doze(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    sleep_ns(*(const uint64_t *)context);
}

Test(pool_stats, times_are_not_counted_unless_asked_for, .timeout = 20)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    uint64_t nap = MS, items = 0;
    struct numoe_pool_job job = {&nap, 1, {{doze, 6, NULL}}};
    struct numoe_pool *pool;

    config.worker_count = 3;
    config.spin_ns = 0;
    pool = make(&config);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    for (uint32_t w = 0; w < 3; w++) {
        struct numoe_pool_worker_stats stats = stats_of(pool, w);

        items += stats.items;
        cr_expect(!stats.timed);
        cr_expect_eq(stats.busy_ns + stats.parked_ns + stats.wakes + stats.wake_ns, 0);
        for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++)
            cr_expect_eq(stats.wake_buckets[b], 0);
    }
    cr_expect_eq(items, 18);
    numoe_pool_destroy(pool);
}

Test(pool_stats, busy_is_the_time_of_items, .timeout = 20)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    uint64_t nap = 2 * MS, busy = 0, items = 0, began, took;
    struct numoe_pool_job job = {&nap, 2, {{doze, 10, NULL}, {nothing, 30, NULL}}};
    struct numoe_pool *pool;

    config.worker_count = 2;
    config.timed = true;
    pool = make(&config);
    began = numoe_now_ns();
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    took = numoe_now_ns() - began;
    for (uint32_t w = 0; w < 2; w++) {
        struct numoe_pool_worker_stats stats = stats_of(pool, w);

        cr_expect(stats.timed);
        cr_expect_leq(stats.busy_ns, took);
        busy += stats.busy_ns;
        items += stats.items;
    }
    cr_expect_eq(items, 40);
    cr_expect_geq(busy, 20 * MS, "%llu ns", (unsigned long long)busy);
    numoe_pool_destroy(pool);
}

/* Worker 1 is given everything and is held up; worker 0, so far away, takes from it. */
Test(pool_stats, steals_are_counted_by_distance, .timeout = 60)
{
    static const uint32_t first[] = {0, 0, 24};

    for (uint32_t distance = 0; distance < NUMOE_POOL_DISTANCES; distance++) {
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        uint64_t nap = MS, steals = 0, stolen = 0, items = 0;
        struct numoe_pool_job job = {&nap, 1, {{doze, 24, first}}};
        struct numoe_pool_worker workers[2] = {
            {.os_cpu = UINT32_MAX},
            {.os_cpu = UINT32_MAX,
             .l3 = distance > NUMOE_POOL_SAME_L3,
             .node = distance > NUMOE_POOL_SAME_NODE,
             .domain = distance > NUMOE_POOL_SAME_DOMAIN,
             .package = distance > NUMOE_POOL_SAME_PACKAGE},
        };
        struct numoe_pool *pool;

        config.worker_count = 2;
        config.workers = workers;
        pool = make(&config);
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
        for (uint32_t w = 0; w < 2; w++) {
            struct numoe_pool_worker_stats stats = stats_of(pool, w);

            for (uint32_t d = 0; d < NUMOE_POOL_DISTANCES; d++)
                cr_expect_eq(stats.steals_from[d], d == distance ? stats.steals : 0,
                             "distance %u: %llu from %u", distance,
                             (unsigned long long)stats.steals_from[d], d);
            steals += stats.steals;
            stolen += stats.stolen_items;
            items += stats.items;
        }
        cr_expect_eq(items, 24);
        /* worker 0 has nothing of its own: whatever it ran it took */
        cr_expect_geq(stats_of(pool, 0).steals, 1);
        cr_expect_geq(stolen, steals);
        cr_expect_geq(stats_of(pool, 0).stolen_items, stats_of(pool, 0).items);
        numoe_pool_destroy(pool);
    }
}

Test(pool_stats, chaos_counts_distances_too, .timeout = 20)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker workers[8];
    uint64_t nap = MS / 10, steals = 0;
    struct numoe_pool_job job = {&nap, 1, {{doze, 200, NULL}}};
    struct numoe_pool *pool;

    for (uint32_t w = 0; w < 8; w++)
        workers[w] = (struct numoe_pool_worker){UINT32_MAX, w, w / 2, w / 4, 0};
    config.worker_count = 8;
    config.workers = workers;
    config.chaos_seed = 5;
    pool = make(&config);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    for (uint32_t w = 0; w < 8; w++) {
        struct numoe_pool_worker_stats stats = stats_of(pool, w);

        /* nobody shares a cache with another, and all are in one package */
        cr_expect_eq(stats.steals_from[NUMOE_POOL_SAME_L3], 0);
        cr_expect_eq(stats.steals_from[NUMOE_POOL_ELSEWHERE], 0);
        steals += stats.steals;
    }
    cr_expect_gt(steals, 0);
    numoe_pool_destroy(pool);
}

/* Until worker w is asleep, and nobody has woken it yet. */
static struct numoe_pool_worker_stats wait_asleep(const struct numoe_pool *pool, uint32_t w)
{
    for (;;) {
        struct numoe_pool_worker_stats stats = stats_of(pool, w);

        if (stats.sleeps == stats.wakes + 1 && !numoe_pool_awake(pool, w))
            return stats;
        sleep_ns(MS / 10);
    }
}

Test(pool_stats, each_sleep_that_ended_is_in_the_histogram, .timeout = 60)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_job job = {NULL, 1, {{nothing, 2, NULL}}};
    struct numoe_pool_worker_stats before, after;
    struct numoe_pool *pool;
    uint64_t began, ticket, sum = 0;

    config.worker_count = 2;
    config.spin_ns = 0;
    config.timed = true;
    pool = make(&config);
    began = numoe_now_ns();
    before = wait_asleep(pool, 1);
    for (int i = 0; i < 20; i++) {
        /* worker 0 is away: it is for worker 1 to run all */
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
        while (stats_of(pool, 1).items < 2 * (uint64_t)(i + 1))
            sleep_ns(MS / 10);
        cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
        wait_asleep(pool, 1);
    }
    after = wait_asleep(pool, 1);
    for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++)
        sum += after.wake_buckets[b];
    cr_expect_eq(sum, after.wakes);
    /* more if it slept again before the submitter was through with waking */
    cr_expect_geq(after.wakes, before.wakes + 20);
    cr_expect_leq(after.wakes, before.wakes + 40);
    /* each latency is part of the time since the pool was made */
    cr_expect_leq(after.wake_ns, numoe_now_ns() - began);

    /* the sum is as large as the buckets say */
    uint64_t least = 0;
    for (int b = 1; b < NUMOE_WAKE_BUCKETS; b++)
        least += after.wake_buckets[b] * ((uint64_t)512 << b);
    cr_expect_geq(after.wake_ns, least);
    numoe_pool_destroy(pool);
}

Test(pool_stats, parked_grows_while_a_worker_sleeps, .timeout = 20)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats before, after;
    struct numoe_pool *pool;
    uint64_t began;

    config.worker_count = 2;
    config.spin_ns = 0;
    config.timed = true;
    began = numoe_now_ns();
    pool = make(&config);
    before = wait_asleep(pool, 1);
    sleep_ns(5 * MS);
    after = stats_of(pool, 1);
    /* nobody has woken it meanwhile: it slept all the time between the two looks */
    cr_assert_eq(after.wakes, before.wakes);
    cr_expect_geq(after.parked_ns, before.parked_ns + 5 * MS);
    cr_expect_leq(after.parked_ns, numoe_now_ns() - began);
    numoe_pool_destroy(pool);
}

/* ---- the observer ---------------------------------------------------------------------------- */

enum { MOST_EVENTS = 100000 };

struct log {
    pthread_mutex_t lock;
    struct numoe_pool_event *events;
    uint32_t count;
};

static void note(void *user, const struct numoe_pool_event *event)
{
    struct log *log = user;

    pthread_mutex_lock(&log->lock);
    if (log->count < MOST_EVENTS)
        log->events[log->count++] = *event;
    pthread_mutex_unlock(&log->lock);
}

Test(pool_observer, is_told_of_every_phase_steal_and_sleep, .timeout = 60)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct log log = {.lock = PTHREAD_MUTEX_INITIALIZER,
                      .events = calloc(MOST_EVENTS, sizeof *log.events)};
    uint64_t nap = MS / 5, began = numoe_now_ns(), ended;
    struct numoe_pool_job job = {
        &nap, 3, {{doze, 9, NULL}, {nothing, 0, NULL}, {nothing, 7, NULL}}};
    uint64_t told[4] = {0}, stolen = 0, latency = 0, last_phase_ns = 0, ticket;
    uint64_t steals = 0, stolen_items = 0, wakes = 0, wake_ns = 0;
    struct numoe_pool *pool;

    cr_assert_not_null(log.events);
    config.worker_count = 4;
    config.spin_ns = 0;
    config.observe = note;
    config.observe_user = &log;
    pool = make(&config);
    for (int i = 0; i < 30; i++)
        cr_assert_eq(numoe_pool_run(pool, &job), 0);
    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
    cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
    for (uint32_t w = 1; w < 4; w++)
        wait_asleep(pool, w);
    pthread_mutex_lock(&log.lock);
    ended = numoe_now_ns();
    for (uint32_t w = 0; w < 4; w++) {
        struct numoe_pool_worker_stats stats = stats_of(pool, w);

        cr_expect(stats.timed);
        steals += stats.steals;
        stolen_items += stats.stolen_items;
        wakes += stats.wakes;
        wake_ns += stats.wake_ns;
    }
    for (uint32_t i = 0; i < log.count; i++) {
        const struct numoe_pool_event *event = &log.events[i];

        told[event->kind]++;
        cr_expect_lt(event->worker, 4);
        cr_expect_geq(event->begin_ns, began);
        cr_expect_leq(event->begin_ns, event->end_ns);
        cr_expect_leq(event->end_ns, ended);
        switch (event->kind) {
        case NUMOE_POOL_STEAL:
            stolen += event->items;
            cr_expect_lt(event->victim, 4);
            cr_expect_neq(event->victim, event->worker);
            cr_expect_eq(event->distance, NUMOE_POOL_SAME_L3);
            break;
        case NUMOE_POOL_PARK:
            latency += event->latency_ns;
            break;
        case NUMOE_POOL_PHASE:
            /* phases follow each other */
            cr_expect_geq(event->begin_ns, last_phase_ns);
            cr_expect_eq(event->items, event->run == doze ? 9 : 7);
            last_phase_ns = event->end_ns;
            break;
        case NUMOE_POOL_JOIN:
            cr_expect_eq(event->begin_ns, last_phase_ns);
            cr_expect_eq(event->worker, 0);
        }
    }
    pthread_mutex_unlock(&log.lock);
    cr_expect_eq(told[NUMOE_POOL_PHASE], 2 * 31);
    cr_expect_eq(told[NUMOE_POOL_STEAL], steals);
    cr_expect_eq(stolen, stolen_items);
    cr_expect_eq(told[NUMOE_POOL_PARK], wakes);
    cr_expect_eq(latency, wake_ns);
    /* a job may be over before its caller comes to take part */
    cr_expect_leq(told[NUMOE_POOL_JOIN], 31);
    cr_expect_geq(told[NUMOE_POOL_JOIN], 1);
    numoe_pool_destroy(pool);
    free(log.events);
}
