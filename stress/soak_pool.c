/*
 * A pool alone: made, given jobs by one or several callers, and destroyed. The memory of a job is
 * plain, so that a missing order between phases shows as a wrong sum, and under ThreadSanitizer as
 * a race.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak_walk.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { PHASES = 3, MOST_ITEMS = 2000, MOST_JOBS = 6, MOST_POOL_WORKERS = 96 };

struct pool_job {
    uint32_t items[PHASES];
    uint64_t salt;
    uint64_t *values[PHASES]; /* by item */
    uint32_t *runs[PHASES];   /* how often each ran */
    uint32_t *first;          /* of phase 0, or NULL */
    uint32_t item_ns;
    bool submit;
};

/* What an item is: a number of its own, then of what others left in the phase before. */
static uint64_t value_of(const struct pool_job *job, unsigned phase, uint32_t item)
{
    const uint32_t before = phase ? job->items[phase - 1] : 0;
    uint64_t value = soak_mix(job->salt, (uint64_t)phase << 32 | item);

    for (uint32_t i = 0; before && i < 3; i++)
        value += job->values[phase - 1][(item * 7 + i * 1031) % before];
    return value;
}

static void run_item(struct pool_job *job, unsigned phase, uint32_t item)
{
    job->values[phase][item] = value_of(job, phase, item);
    job->runs[phase][item]++;
}

static void run_0(void *context, uint32_t item, uint32_t worker)
{
    (void)worker;
    run_item(context, 0, item);
}

static void run_1(void *context, uint32_t item, uint32_t worker)
{
    (void)worker;
    run_item(context, 1, item);
}

static void run_2(void *context, uint32_t item, uint32_t worker)
{
    (void)worker;
    run_item(context, 2, item);
}

static void job_free(struct pool_job *job)
{
    for (int p = 0; p < PHASES; p++) {
        free(job->values[p]);
        free(job->runs[p]);
    }
    free(job->first);
}

static int job_make(struct soak *soak, struct soak_random *random, uint32_t workers,
                    struct pool_job *job)
{
    static const uint32_t item_ns[] = {0, 1, 100, 100000};

    *job = (struct pool_job){.salt = soak_next(random),
                             .submit = soak_once(random, 3),
                             .item_ns = item_ns[soak_below(random, 4)]};
    for (int p = 0; p < PHASES; p++) {
        job->items[p] = (uint32_t)(soak_once(random, 2) ? soak_between(random, 1, 40)
                                                        : soak_between(random, 1, MOST_ITEMS));
        job->values[p] = calloc(job->items[p], sizeof *job->values[p]);
        job->runs[p] = calloc(job->items[p], sizeof *job->runs[p]);
        if (!job->values[p] || !job->runs[p])
            goto fail;
    }
    if (soak_once(random, 2)) {
        /* shares of the workers, from all to one to about equal */
        job->first = calloc(workers + 1, sizeof *job->first);
        if (!job->first)
            goto fail;
        for (uint32_t w = 1; w < workers; w++) {
            const uint32_t left = job->items[0] - job->first[w - 1];

            job->first[w] = job->first[w - 1] +
                            (uint32_t)soak_below(random, 2 * (uint64_t)left / (workers - w) + 2);
            if (job->first[w] > job->items[0])
                job->first[w] = job->items[0];
        }
        job->first[workers] = job->items[0];
    }
    return 0;
fail:
    job_free(job);
    soak_fail(soak, -ENOMEM, "no memory for a job");
    return -ENOMEM;
}

static int job_check(struct soak *soak, const struct pool_job *job)
{
    for (unsigned p = 0; p < PHASES; p++)
        for (uint32_t i = 0; i < job->items[p]; i++)
            if (job->runs[p][i] != 1 || job->values[p][i] != value_of(job, p, i))
                return soak_fail(soak, SOAK_WRONG,
                                 "item %" PRIu32 " of %" PRIu32 " of phase %u ran %" PRIu32
                                 " times and left a %s value",
                                 i, job->items[p], p, job->runs[p][i],
                                 job->values[p][i] == value_of(job, p, i) ? "right" : "wrong");
    return 0;
}

static int job_run(struct soak *soak, struct numoe_pool *pool, struct pool_job *job)
{
    const struct numoe_pool_job what = {
        .context = job,
        .phase_count = PHASES,
        .phases = {{run_0, job->items[0], job->first, job->item_ns},
                   {run_1, job->items[1], NULL, job->item_ns},
                   {run_2, job->items[2], NULL, job->item_ns}},
    };
    uint64_t ticket;
    int rc;

    if (!job->submit) {
        rc = numoe_pool_run(pool, &what);
        return rc ? soak_fail_call(soak, "numoe_pool_run", rc, NULL) : 0;
    }
    rc = numoe_pool_submit(pool, &what, &ticket);
    if (rc)
        return soak_fail_call(soak, "numoe_pool_submit", rc, NULL);
    rc = numoe_pool_wait(pool, ticket);
    return rc ? soak_fail_call(soak, "numoe_pool_wait", rc, NULL) : 0;
}

struct pool_caller {
    struct soak *soak;
    struct numoe_pool *pool;
    pthread_t thread;
    struct pool_job jobs[MOST_JOBS];
    uint32_t job_count;
    int rc;
};

static void *call_pool(void *user)
{
    struct pool_caller *caller = user;

    for (uint32_t j = 0; j < caller->job_count && !caller->rc; j++) {
        caller->rc = job_run(caller->soak, caller->pool, &caller->jobs[j]);
        if (!caller->rc)
            caller->rc = job_check(caller->soak, &caller->jobs[j]);
        soak_beat(caller->soak);
    }
    return NULL;
}

static int call_all(struct soak *soak, struct pool_caller *callers, uint32_t count)
{
    uint32_t started = 1;
    int rc = 0;

    for (; started < count; started++) {
        rc = pthread_create(&callers[started].thread, NULL, call_pool, &callers[started]);
        if (rc) {
            rc = soak_fail(soak, -rc, "caller %" PRIu32 " could not be started: %s", started,
                           strerror(rc));
            break;
        }
    }
    call_pool(&callers[0]);
    for (uint32_t c = 1; c < started; c++)
        pthread_join(callers[c].thread, NULL);
    for (uint32_t c = 0; c < started && !rc; c++)
        rc = callers[c].rc;
    return rc;
}

/* Every item ran on some worker: their counters add up. */
static int check_stats(struct soak *soak, const struct numoe_pool *pool, uint64_t items)
{
    uint64_t sum = 0, steals = 0;

    for (uint32_t w = 0; w < numoe_pool_worker_count(pool); w++) {
        struct numoe_pool_worker_stats stats;
        int rc = numoe_pool_stats(pool, w, &stats);

        if (rc)
            return soak_fail_call(soak, "numoe_pool_stats", rc, NULL);
        sum += stats.items;
        steals += stats.steals;
    }
    pthread_mutex_lock(&soak->lock);
    soak->report.steals += steals;
    pthread_mutex_unlock(&soak->lock);
    return sum == items ? 0
                        : soak_fail(soak, SOAK_WRONG, "workers count %" PRIu64 " items of %" PRIu64,
                                    sum, items);
}

/* Groups as a machine has them, of random size. */
static void place_workers(struct soak_random *random, struct numoe_pool_worker *workers,
                          uint32_t count)
{
    const uint32_t l3 = (uint32_t)soak_between(random, 1, 8);
    const uint32_t node = l3 * (uint32_t)soak_between(random, 1, 3);

    for (uint32_t w = 0; w < count; w++)
        workers[w] = (struct numoe_pool_worker){.os_cpu = UINT32_MAX,
                                                .l3 = w / l3,
                                                .node = w / node,
                                                .domain = w / (2 * node),
                                                .package = w / (8 * node)};
}

int soak_step_pool(struct soak *soak, struct soak_random *random)
{
    static const uint64_t spins_ns[] = {0, 1000, 50000};
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    const uint32_t count = (uint32_t)soak_between(random, 1, SOAK_CALLERS);
    struct pool_caller *callers = calloc(count, sizeof *callers);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool_worker *workers;
    struct numoe_pool *pool = NULL;
    uint64_t items = 0;
    int rc = 0;

    config.worker_count =
        (uint32_t)(soak_once(random, 2) ? soak_between(random, 1, 8)
                                        : soak_between(random, 1, MOST_POOL_WORKERS));
    config.chaos_seed = soak_once(random, 2) ? soak_next(random) | 1 : 0;
    config.timed = soak_once(random, 2);
    config.spin_ns = spins_ns[soak_below(random, sizeof spins_ns / sizeof spins_ns[0])];
    if (soak_once(random, 4)) /* and nobody comes for them */
        config.lent_workers = (uint32_t)soak_below(random, config.worker_count);
    config.trip_ns[NUMOE_POOL_ELSEWHERE] = soak_below(random, 3) ? soak_below(random, 5000) : 0;
    workers = calloc(config.worker_count, sizeof *workers);
    if (!callers || !workers) {
        rc = soak_fail(soak, -ENOMEM, "no memory for a pool");
        goto out;
    }
    place_workers(random, workers, config.worker_count);
    config.workers = soak_once(random, 2) ? workers : NULL;
    soak_doing(soak, "a pool of %" PRIu32 " workers, %" PRIu32 " callers, chaos %" PRIu64,
               config.worker_count, count, config.chaos_seed);
    rc = numoe_pool_create(&config, &pool, &error);
    if (rc) {
        soak_fail_call(soak, "numoe_pool_create", rc, &error);
        goto out;
    }
    for (uint32_t c = 0; c < count && !rc; c++) {
        const uint32_t jobs = (uint32_t)soak_between(random, 0, MOST_JOBS);

        callers[c].soak = soak;
        callers[c].pool = pool;
        for (uint32_t j = 0; j < jobs && !rc; j++) {
            rc = job_make(soak, random, config.worker_count, &callers[c].jobs[j]);
            if (rc)
                break;
            callers[c].job_count++;
            for (int p = 0; p < PHASES; p++)
                items += callers[c].jobs[j].items[p];
        }
    }
    if (!rc)
        rc = call_all(soak, callers, count);
    if (!rc)
        rc = check_stats(soak, pool, items);
    numoe_pool_destroy(pool);
out:
    for (uint32_t c = 0; callers && c < count; c++)
        for (uint32_t j = 0; j < callers[c].job_count; j++)
            job_free(&callers[c].jobs[j]);
    free(callers);
    free(workers);
    return rc;
}
