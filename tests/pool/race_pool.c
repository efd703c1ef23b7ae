/*
 * Races in the pool (case C5): rounds of create, submit, run, wait, cancel, destroy with random
 * worker counts, delays and callers, chaos on, every result checked. Also the arithmetic of tearing
 * down in every state, nested pools twelve deep, and callers against each other.
 *
 * race_pool [SEED [PERCENT]]: another seed, and a length in percent of the usual.
 */
#include "race_work.h"

static unsigned percent = 100;

/* ----------------------------------------------------------------------------- rounds */

/* Create, 0 to 3 jobs one way or another, destroy at a random moment. */
static void short_lives(uint64_t *state, unsigned rounds)
{
    struct work works[3];
    uint32_t first[65];

    for (unsigned r = 0; r < rounds; r++) {
        uint32_t workers = (uint32_t)(next(state) % 8 ? 1 + next(state) % 5 : 2 + next(state) % 63);
        uint32_t lent = workers > 1 && next(state) % 4 == 0;
        struct numoe_pool *pool = create(state, workers, lent);
        unsigned jobs = (unsigned)(next(state) % 4);
        bool cancelled[3] = {false};
        struct lender lender;

        start_lenders(pool, workers, lent, &lender, state);

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
                if (next(state) % 3 == 0) {
                    int rc = numoe_pool_cancel(pool, ticket);
                    EXPECT(rc == 0 || rc == -EALREADY);
                    cancelled[j] = true;
                    if (next(state) % 2)
                        delay(state);
                }
                if (next(state) % 2) {
                    int rc = numoe_pool_wait(pool, ticket);
                    EXPECT(rc == 0 || cancelled[j]);
                    EXPECT(numoe_pool_wait(pool, ticket) == -EINVAL);
                    check_cancelled(&works[j], rc);
                    cancelled[j] &= rc != 0;
                }
            }
        }
        delay(state);
        end_lenders(&lender, lent);
        numoe_pool_destroy(pool);
        for (unsigned j = 0; j < jobs; j++)
            if (!cancelled[j])
                check(&works[j]);
        beat();
    }
}

/* One pool, very many jobs, with gaps about as long as the spin. */
static void long_life(uint64_t *state, unsigned jobs, uint32_t workers)
{
    struct numoe_pool *pool = create(state, workers, 0);
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
        struct numoe_pool *pool = create(state, workers, 0);
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
        level.pools[d] = create(state, 2, 0);
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
    snprintf(repeat_line, sizeof repeat_line, "race_pool %llu %u", (unsigned long long)seed,
             percent);
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
