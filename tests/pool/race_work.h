/*
 * race_work.h - what the pool's race programs share: random jobs whose every item is checked, pools
 * of every kind, and a watchdog.
 */
#ifndef NUMOE_RACE_WORK_H
#define NUMOE_RACE_WORK_H

#include "numoe_pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

static uint64_t seed = 20260902;
static char repeat_line[80]; /* how to run the same again */
static _Atomic unsigned failures;

/* -------------------------------------------------------------------------- watchdog */

enum { WATCHDOG_S = 60 };
static _Atomic uint64_t heartbeat;
static _Atomic bool over;
static const char *_Atomic doing = "nothing";

static void *watch(void *unused)
{
    uint64_t last = 0;
    int still = 0;

    (void)unused;
    while (!atomic_load(&over)) {
        struct timespec time = {0, 100000000};
        uint64_t now = atomic_load(&heartbeat);
        nanosleep(&time, NULL);
        still = now == last ? still + 1 : 0;
        last = now;
        if (still > WATCHDOG_S * 10) {
            fprintf(stderr, "no progress for %d s in %s; %s\n", WATCHDOG_S, atomic_load(&doing),
                    repeat_line);
            abort();
        }
    }
    return NULL;
}

static void beat(void)
{
    atomic_fetch_add_explicit(&heartbeat, 1, memory_order_relaxed);
}

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition) && atomic_fetch_add(&failures, 1) < 20)                                   \
            fprintf(stderr, "%s:%d: %s in %s\n", __FILE__, __LINE__, #condition,                   \
                    atomic_load(&doing));                                                          \
    } while (0)

/* ------------------------------------------------------------------------------- work */

static uint64_t next(uint64_t *state)
{
    uint64_t x = (*state += 0x9e3779b97f4a7c15u);

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static void delay(uint64_t *state)
{
    switch (next(state) % 8) {
    case 0: {
        struct timespec time = {0, (long)(next(state) % 300000)};
        nanosleep(&time, NULL);
        break;
    }
    case 1:
        sched_yield();
        break;
    case 2:
        for (volatile unsigned i = (unsigned)(next(state) % 2000); i; i--)
            ;
        break;
    default:
        break;
    }
}

/*
 * A job of three phases over plain (not atomic) memory, so that ThreadSanitizer sees any missing
 * order: phase 0 writes, phase 1 reads what other items wrote, phase 2 sums up in few items.
 */
enum { MOST_ITEMS = 300 };
struct work {
    uint32_t items, sums;
    uint64_t salt;
    uint32_t runs[3][MOST_ITEMS]; /* by phase */
    uint64_t a[MOST_ITEMS], b[MOST_ITEMS];
    uint64_t sum[8];
    bool slow;
};

static uint64_t value(uint64_t salt, uint32_t item)
{
    uint64_t state = salt + item * 0x632be59bd9b4e019u;

    return next(&state);
}

static void write_item(void *context, uint32_t item, uint32_t worker)
{
    struct work *work = context;

    (void)worker;
    work->runs[0][item]++;
    work->a[item] = value(work->salt, item);
    if (work->slow && item % 16 == 3) {
        uint64_t state = work->salt + item;
        delay(&state);
    }
}

static void turn_item(void *context, uint32_t item, uint32_t worker)
{
    struct work *work = context;

    (void)worker;
    work->runs[1][item]++;
    work->b[item] = work->a[work->items - 1 - item] * 3;
}

static void sum_items(void *context, uint32_t item, uint32_t worker)
{
    struct work *work = context;
    uint64_t sum = 0;

    (void)worker;
    work->runs[2][item]++;
    for (uint32_t i = item; i < work->items; i += work->sums)
        sum += work->b[i];
    work->sum[item] = sum;
}

/* Prepare a job; first (worker_count + 1 numbers) is filled for phase 0 when `shares`. */
static void prepare(struct work *work, struct numoe_pool_job *job, uint64_t *state,
                    uint32_t workers, uint32_t *first)
{
    static const uint32_t item_ns[] = {0, 0, 1, 100, 10000};

    memset(job, 0, sizeof *job);
    work->salt = next(state);
    work->items = (uint32_t)(next(state) % 4 ? next(state) % 20 : next(state) % MOST_ITEMS);
    work->sums = 1 + (uint32_t)(next(state) % 8);
    work->slow = next(state) % 8 == 0;
    memset(work->runs[0], 0, work->items * sizeof work->runs[0][0]);
    memset(work->runs[1], 0, work->items * sizeof work->runs[1][0]);
    memset(work->runs[2], 0, work->sums * sizeof work->runs[2][0]);
    job->context = work;
    job->phase_count = 3;
    job->phases[0].run = write_item;
    job->phases[0].items = work->items;
    job->phases[1].run = turn_item;
    job->phases[1].items = work->items;
    job->phases[2].run = sum_items;
    job->phases[2].items = work->sums;
    for (int p = 0; p < 3; p++)
        job->phases[p].item_ns = item_ns[next(state) % 5];
    if (first && next(state) % 3 == 0) {
        first[0] = 0;
        for (uint32_t w = 1; w < workers; w++)
            first[w] =
                first[w - 1] +
                (uint32_t)(next(state) % 3 ? 0 : next(state) % (work->items - first[w - 1] + 1));
        first[workers] = work->items;
        job->phases[0].first = first;
    }
}

static void check(const struct work *work)
{
    uint64_t expected = 0, sum = 0;

    for (uint32_t i = 0; i < work->items; i++) {
        EXPECT(work->runs[0][i] == 1 && work->runs[1][i] == 1);
        expected += value(work->salt, i) * 3;
    }
    for (uint32_t s = 0; s < work->sums; s++) {
        EXPECT(work->runs[2][s] == 1);
        sum += work->sum[s];
    }
    EXPECT(sum == expected);
}

/* After numoe_pool_wait of a job that was cancelled: nothing twice, phases in order, and what ran
 * is right. */
static void check_cancelled(const struct work *work, int rc)
{
    uint32_t ran[3] = {0};

    if (rc == 0) {
        check(work);
        return;
    }
    EXPECT(rc == -ECANCELED);
    for (int p = 0; p < 3; p++)
        for (uint32_t i = 0; i < (p < 2 ? work->items : work->sums); i++) {
            EXPECT(work->runs[p][i] <= 1);
            ran[p] += work->runs[p][i];
            if (p == 0 && work->runs[0][i])
                EXPECT(work->a[i] == value(work->salt, i));
        }
    EXPECT(ran[1] == 0 || ran[0] == work->items);
    EXPECT(ran[2] == 0 || ran[1] == work->items);
    EXPECT(ran[0] + ran[1] + ran[2] < 2 * work->items + work->sums);
}

/* lent: so many of the workers have no thread of the pool's own. */
static struct numoe_pool *create(uint64_t *state, uint32_t workers, uint32_t lent)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool_worker places[64];
    struct numoe_pool *pool = NULL;
    static const uint64_t spins[] = {0, 500, 5000, 200000};

    config.worker_count = workers;
    config.lent_workers = lent;
    config.spin_ns = spins[next(state) % 4];
    config.chaos_seed = next(state) % 3 ? next(state) | 1 : 0;
    config.timed = next(state) % 2;
    if (next(state) % 2) {
        for (uint32_t w = 0; w < workers; w++)
            places[w] = (struct numoe_pool_worker){next(state) % 2 ? (uint32_t)(next(state) % 2)
                                                                   : UINT32_MAX,
                                                   w / 2, w / 4, w / 8, w / 16};
        config.workers = places;
        config.trip_ns[NUMOE_POOL_ELSEWHERE] = next(state) % 3 ? next(state) % 5000 : UINT64_MAX;
        config.pin_caller = next(state) % 4 == 0;
    }
    if (numoe_pool_create(&config, &pool, &error)) {
        fprintf(stderr, "create: %s\n", error.message);
        abort();
    }
    return pool;
}

/* ---------------------------------------------------------------------------- lenders */

/* Threads of the program's own that come and go as the last workers of a pool. */
struct lender {
    struct numoe_pool *pool;
    uint32_t worker;
    uint64_t state;
    pthread_t thread;
    _Atomic bool last; /* the recall after this is the last */
};

static void *lend(void *argument)
{
    struct lender *lender = argument;
    int rc;

    do {
        rc = numoe_pool_lend(lender->pool, lender->worker);
        EXPECT(rc == 0 || rc == -ESHUTDOWN);
        if (next(&lender->state) % 4 == 0)
            delay(&lender->state);
    } while (rc == 0 && !atomic_load(&lender->last));
    return NULL;
}

static void start_lenders(struct numoe_pool *pool, uint32_t workers, uint32_t lent,
                          struct lender *lenders, uint64_t *state)
{
    for (uint32_t l = 0; l < lent; l++) {
        lenders[l].pool = pool;
        lenders[l].worker = workers - lent + l;
        lenders[l].state = next(state);
        atomic_store(&lenders[l].last, false);
        if (pthread_create(&lenders[l].thread, NULL, lend, &lenders[l]))
            abort();
    }
}

static void end_lenders(struct lender *lenders, uint32_t lent)
{
    for (uint32_t l = 0; l < lent; l++) {
        atomic_store(&lenders[l].last, true);
        do { /* it may be on its way in or out */
            numoe_pool_recall(lenders[l].pool, lenders[l].worker);
            sched_yield();
        } while (pthread_tryjoin_np(lenders[l].thread, NULL));
    }
}

#endif
