/*
 * Races in the pool (case C5): rounds of create, submit, run, wait, destroy with random worker
 * counts, delays and callers, chaos on, every result checked. Also the arithmetic of tearing down
 * in every state, nested pools twelve deep, and callers against each other.
 *
 * race_pool [SEED [PERCENT]]: another seed, and a length in percent of the usual.
 */
#include "numoe_pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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
static unsigned percent = 100;
static _Atomic unsigned failures;

/* -------------------------------------------------------------------------- watchdog */

enum { WATCHDOG_S = 20 };
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
            fprintf(stderr, "no progress for %d s in %s; race_pool %llu %u\n", WATCHDOG_S,
                    atomic_load(&doing), (unsigned long long)seed, percent);
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
    uint32_t runs[MOST_ITEMS];
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
    work->runs[item]++;
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
    work->b[item] = work->a[work->items - 1 - item] * 3;
}

static void sum_items(void *context, uint32_t item, uint32_t worker)
{
    struct work *work = context;
    uint64_t sum = 0;

    (void)worker;
    for (uint32_t i = item; i < work->items; i += work->sums)
        sum += work->b[i];
    work->sum[item] = sum;
}

/* Prepare a job; first (worker_count + 1 numbers) is filled for phase 0 when `shares`. */
static void prepare(struct work *work, struct numoe_pool_job *job, uint64_t *state,
                    uint32_t workers, uint32_t *first)
{
    memset(work, 0, sizeof *work);
    memset(job, 0, sizeof *job);
    work->salt = next(state);
    work->items = (uint32_t)(next(state) % 4 ? next(state) % 20 : next(state) % MOST_ITEMS);
    work->sums = 1 + (uint32_t)(next(state) % 8);
    work->slow = next(state) % 8 == 0;
    job->context = work;
    job->phase_count = 3;
    job->phases[0].run = write_item;
    job->phases[0].items = work->items;
    job->phases[1].run = turn_item;
    job->phases[1].items = work->items;
    job->phases[2].run = sum_items;
    job->phases[2].items = work->sums;
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
        EXPECT(work->runs[i] == 1);
        expected += value(work->salt, i) * 3;
    }
    for (uint32_t s = 0; s < work->sums; s++)
        sum += work->sum[s];
    EXPECT(sum == expected);
}

static struct numoe_pool *create(uint64_t *state, uint32_t workers)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool_worker places[64];
    struct numoe_pool *pool = NULL;
    static const uint64_t spins[] = {0, 500, 5000, 200000};

    config.worker_count = workers;
    config.spin_ns = spins[next(state) % 4];
    config.chaos_seed = next(state) % 3 ? next(state) | 1 : 0;
    config.timed = next(state) % 2;
    if (next(state) % 2) {
        for (uint32_t w = 0; w < workers; w++)
            places[w] = (struct numoe_pool_worker){next(state) % 2 ? (uint32_t)(next(state) % 2)
                                                                   : UINT32_MAX,
                                                   w / 2, w / 4, w / 8, w / 16};
        config.workers = places;
        config.pin_caller = next(state) % 4 == 0;
    }
    if (numoe_pool_create(&config, &pool, &error)) {
        fprintf(stderr, "create: %s\n", error.message);
        abort();
    }
    return pool;
}

/* ----------------------------------------------------------------------------- rounds */

/* Create, 0 to 3 jobs one way or another, destroy at a random moment. */
static void short_lives(uint64_t *state, unsigned rounds)
{
    struct work works[3];
    uint32_t first[65];

    for (unsigned r = 0; r < rounds; r++) {
        uint32_t workers = (uint32_t)(next(state) % 8 ? 1 + next(state) % 5 : 2 + next(state) % 63);
        struct numoe_pool *pool = create(state, workers);
        unsigned jobs = (unsigned)(next(state) % 4);

        for (unsigned j = 0; j < jobs; j++) {
            struct numoe_pool_job job;
            uint64_t ticket = 0;

            prepare(&works[j], &job, state, workers, first);
            delay(state);
            if (next(state) % 2) {
                EXPECT(numoe_pool_run(pool, &job) == 0);
                check(&works[j]);
            } else {
                EXPECT(numoe_pool_submit(pool, &job, &ticket) == 0);
                memset(first, 0xff, sizeof first); /* read during submit only */
                delay(state);
                if (next(state) % 2) {
                    EXPECT(numoe_pool_wait(pool, ticket) == 0);
                    EXPECT(numoe_pool_wait(pool, ticket) == -EINVAL);
                    check(&works[j]);
                }
            }
        }
        delay(state);
        numoe_pool_destroy(pool);
        for (unsigned j = 0; j < jobs; j++)
            check(&works[j]);
        beat();
    }
}

/* One pool, very many jobs, with gaps about as long as the spin. */
static void long_life(uint64_t *state, unsigned jobs, uint32_t workers)
{
    struct numoe_pool *pool = create(state, workers);
    struct work work;
    uint32_t first[65];

    for (unsigned j = 0; j < jobs; j++) {
        struct numoe_pool_job job;

        prepare(&work, &job, state, workers, first);
        EXPECT(numoe_pool_run(pool, &job) == 0);
        check(&work);
        if (j % 16 == 0)
            delay(state);
        beat();
    }
    numoe_pool_destroy(pool);
}

struct caller {
    struct numoe_pool *pool;
    uint64_t state;
    unsigned jobs;
    uint32_t workers;
};

static void *call(void *argument)
{
    struct caller *caller = argument;
    struct work works[2];
    uint32_t first[65];

    for (unsigned j = 0; j < caller->jobs; j++) {
        struct numoe_pool_job jobs[2];
        uint64_t ticket = 0;
        bool waits = next(&caller->state) % 2;

        prepare(&works[0], &jobs[0], &caller->state, caller->workers, first);
        if (next(&caller->state) % 3 == 0) {
            /* A run while the own submission is out. */
            EXPECT(numoe_pool_submit(caller->pool, &jobs[0], &ticket) == 0);
            if (waits) {
                delay(&caller->state);
                EXPECT(numoe_pool_wait(caller->pool, ticket) == 0);
                check(&works[0]);
            } else {
                prepare(&works[1], &jobs[1], &caller->state, caller->workers, first);
                EXPECT(numoe_pool_run(caller->pool, &jobs[1]) == 0);
                check(&works[1]);
                check(&works[0]); /* run comes after what was pending */
                EXPECT(numoe_pool_wait(caller->pool, ticket) == 0);
            }
        } else {
            EXPECT(numoe_pool_run(caller->pool, &jobs[0]) == 0);
            check(&works[0]);
        }
        if (next(&caller->state) % 4 == 0)
            delay(&caller->state);
        beat();
    }
    return NULL;
}

/* A worker's counters at any time, from any thread: none falls, and they agree. */
static void look(const struct numoe_pool *pool, uint32_t worker,
                 struct numoe_pool_worker_stats *before)
{
    struct numoe_pool_worker_stats now;
    uint64_t sum = 0;

    EXPECT(numoe_pool_stats(pool, worker, &now) == 0);
    EXPECT(now.items >= before->items && now.steals >= before->steals &&
           now.stolen_items >= before->stolen_items && now.sleeps >= before->sleeps);
    EXPECT(now.busy_ns >= before->busy_ns && now.parked_ns >= before->parked_ns &&
           now.wake_ns >= before->wake_ns && now.wakes >= before->wakes);
    for (int b = 0; b < NUMOE_WAKE_BUCKETS; b++)
        sum += now.wake_buckets[b];
    EXPECT(sum == now.wakes);
    EXPECT(now.timed || (now.busy_ns == 0 && now.parked_ns == 0 && now.wakes == 0));
    *before = now;
}

static void callers(uint64_t *state, unsigned rounds, unsigned jobs)
{
    for (unsigned r = 0; r < rounds; r++) {
        struct caller callers[4];
        pthread_t threads[4];
        uint32_t workers = 1 + (uint32_t)(next(state) % 6);
        struct numoe_pool *pool = create(state, workers);
        unsigned count = 2 + (unsigned)(next(state) % 3);
        struct numoe_pool_worker_stats stats[6] = {{0}};

        for (unsigned t = 0; t < count; t++) {
            callers[t] = (struct caller){pool, next(state), jobs, workers};
            if (pthread_create(&threads[t], NULL, call, &callers[t]))
                abort();
        }
        for (uint32_t i = 0; i < 2000; i++)
            look(pool, i % workers, &stats[i % workers]);
        for (unsigned t = 0; t < count; t++)
            pthread_join(threads[t], NULL);
        numoe_pool_destroy(pool);
        beat();
    }
}

/* Each item of a pool runs two jobs on the next pool, twelve deep. */
enum { DEEP = 12 };
struct level {
    struct numoe_pool *pools[DEEP];
    _Atomic uint32_t runs[DEEP];
};
struct place {
    struct level *level;
    int depth;
};

static void nested(void *context, uint32_t item, uint32_t worker)
{
    struct place *place = context;
    struct place below = {place->level, place->depth + 1};
    struct numoe_pool_job job = {
        .context = &below, .phase_count = 1, .phases = {{nested, 1, NULL}}};

    (void)item, (void)worker;
    beat();
    atomic_fetch_add(&place->level->runs[place->depth], 1);
    if (below.depth == DEEP)
        return;
    for (int i = 0; i < 2; i++)
        EXPECT(numoe_pool_run(place->level->pools[below.depth], &job) == 0);
    EXPECT(numoe_pool_run(place->level->pools[place->depth], &job) == -EDEADLK);
}

static void nesting(uint64_t *state)
{
    struct level level;
    struct place top = {&level, 0};
    struct numoe_pool_job job = {.context = &top, .phase_count = 1, .phases = {{nested, 1, NULL}}};

    memset(&level, 0, sizeof level);
    for (int d = 0; d < DEEP; d++)
        level.pools[d] = create(state, 2);
    EXPECT(numoe_pool_run(level.pools[0], &job) == 0);
    for (int d = 0; d < DEEP; d++) {
        EXPECT(level.runs[d] == 1u << d);
        numoe_pool_destroy(level.pools[d]);
    }
}

static unsigned passed, failed;

static void done(const char *name)
{
    static unsigned before;
    unsigned now = atomic_load(&failures);

    if (now == before)
        passed++;
    else
        failed++;
    printf("%s %s\n", now == before ? "ok  " : "FAIL", name);
    fflush(stdout);
    before = now;
}

int main(int argc, char **argv)
{
    unsigned scale;
    uint64_t state;
    pthread_t watcher;

    if (argc > 1)
        seed = strtoull(argv[1], NULL, 0);
    if (argc > 2)
        percent = (unsigned)strtoul(argv[2], NULL, 0);
    scale = percent / (UNDER_TSAN ? 2 : 1);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    state = seed;
    if (pthread_create(&watcher, NULL, watch, NULL))
        return 1;

    atomic_store(&doing, "short lives");
    short_lives(&state, 100 * scale);
    done("short lives");

    atomic_store(&doing, "long lives");
    for (uint32_t workers = 1; workers <= 64; workers = workers < 4 ? workers + 1 : workers * 4)
        long_life(&state, 50 * scale, workers);
    done("long lives");

    atomic_store(&doing, "callers");
    callers(&state, 1 + scale / 5, 100);
    done("callers");

    atomic_store(&doing, "nesting");
    for (unsigned i = 0; i < 1 + scale / 50; i++)
        nesting(&state);
    done("nesting");

    atomic_store(&over, true);
    pthread_join(watcher, NULL);
    printf("%u passed, %u failed\n", passed, failed);
    return failed ? 1 : 0;
}
