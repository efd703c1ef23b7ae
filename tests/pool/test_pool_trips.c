/* Far steals: who is near, what a trip costs, and when it is worth it. Schedules are fixed by items
 * that wait for what others do. */
#include "numoe_pool.h"
#include "pool_internal.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- victims --------------------------------------------------------------------------------- */

static struct numoe_pool *make(struct numoe_pool_config *config)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = NULL;

    cr_assert_eq(numoe_pool_create(config, &pool, &error), 0, "%s", error.message);
    return pool;
}

/* Every victim is in the ring of its distance and trip, nearer rings first. */
static void check_rings(const struct numoe_pool *pool, const struct numoe_pool_config *config)
{
    for (uint32_t w = 0; w < pool->worker_count; w++) {
        const struct numoe_pool_kin *kin = &pool->kins[pool->workers[w].kin];
        const struct numoe_pool_worker *self = &config->workers[w];
        enum numoe_pool_distance before = NUMOE_POOL_SAME_L3;
        uint64_t trip_before = 0;
        bool seen[64] = {false};

        cr_assert_eq(kin->ring[0], 0);
        cr_assert_eq(kin->ring[kin->rings], pool->worker_count);
        for (uint32_t d = 0; d < kin->rings; d++) {
            const struct numoe_pool_worker *first = &config->workers[kin->order[kin->ring[d]]];
            enum numoe_pool_distance distance = numoe_pool_distance(self, first);
            uint64_t trip = config->trip_ns[distance];

            cr_assert_lt(kin->ring[d], kin->ring[d + 1]);
            if (config->node_trip_ns && distance > NUMOE_POOL_SAME_NODE)
                trip = config->node_trip_ns[self->node * config->node_count + first->node];
            cr_assert_eq(kin->trip_ns[d], trip);
            if (d)
                cr_assert(distance > before || (distance == before && trip > trip_before));
            before = distance;
            trip_before = trip;
            for (uint32_t i = kin->ring[d]; i < kin->ring[d + 1]; i++) {
                const struct numoe_pool_worker *victim = &config->workers[kin->order[i]];
                cr_assert_eq(numoe_pool_distance(self, victim), distance);
                if (config->node_trip_ns && distance > NUMOE_POOL_SAME_NODE)
                    cr_assert_eq(
                        config->node_trip_ns[self->node * config->node_count + victim->node], trip);
                cr_assert(!seen[kin->order[i]]);
                seen[kin->order[i]] = true;
            }
        }
    }
}

Test(pool_trips, nearest_victims_come_first)
{
    struct numoe_pool_worker workers[12];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;

    /* Packages of six, nodes of three, the last node's workers in L3 groups of their own. */
    for (uint32_t w = 0; w < 12; w++)
        workers[w] =
            (struct numoe_pool_worker){UINT32_MAX, w < 9 ? w / 3 : 100 + w, w / 3, w / 6, w / 6};
    config.worker_count = 12;
    config.workers = workers;
    pool = make(&config);
    cr_assert_eq(pool->kin_count, 6);
    cr_assert_eq(pool->kins[0].rings, 3);
    check_rings(pool, &config);
    numoe_pool_destroy(pool);
}

Test(pool_trips, nodes_are_ordered_by_measured_trips)
{
    /* Four packages on a ring: the one across is two hops away. */
    static const uint32_t trips[16] = {500,  1200, 1900, 1250, 1200, 500,  1210, 1900,
                                       1900, 1210, 500,  1200, 1250, 1900, 1200, 500};
    struct numoe_pool_worker workers[16];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool;

    for (uint32_t w = 0; w < 16; w++)
        workers[w] = (struct numoe_pool_worker){UINT32_MAX, w / 2, w / 4, w / 4, w / 4};
    config.worker_count = 16;
    config.workers = workers;
    config.node_trip_ns = trips;
    config.node_count = 4;
    pool = make(&config);
    check_rings(pool, &config);
    cr_assert_eq(pool->kins[0].rings, 5); /* own L3, own node, 1200, 1250, 1900 */
    cr_assert_eq(pool->kins[0].order[pool->kins[0].ring[4]] / 4, 2);
    numoe_pool_destroy(pool);

    config.node_count = 3;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert(strstr(error.message, "node 3"), "%s", error.message);
}

/* More kinds of distance than are told apart: the farthest are one. */
Test(pool_trips, many_distances_end_in_one_ring)
{
    static uint32_t trips[40 * 40];
    struct numoe_pool_worker workers[40];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool *pool;

    for (uint32_t w = 0; w < 40; w++)
        workers[w] = (struct numoe_pool_worker){UINT32_MAX, w, w, w, w};
    for (uint32_t a = 0; a < 40; a++)
        for (uint32_t b = 0; b < 40; b++)
            trips[a * 40 + b] = 1000 + 10 * (a > b ? a - b : b - a);
    config.worker_count = 40;
    config.workers = workers;
    config.node_trip_ns = trips;
    config.node_count = 40;
    pool = make(&config);
    for (uint32_t w = 0; w < 40; w += 39) {
        const struct numoe_pool_kin *kin = &pool->kins[pool->workers[w].kin];
        cr_assert_eq(kin->rings, NUMOE_POOL_RINGS);
        cr_assert_eq(kin->ring[NUMOE_POOL_RINGS], 40);
        for (uint32_t d = 0; d < NUMOE_POOL_RINGS - 1; d++) {
            cr_assert_eq(kin->ring[d + 1] - kin->ring[d], 1);
            cr_assert_eq(kin->order[kin->ring[d]], w ? 39 - d : d);
        }
        cr_assert_eq(kin->ring[NUMOE_POOL_RINGS] - kin->ring[NUMOE_POOL_RINGS - 1], 25);
    }
    numoe_pool_destroy(pool);
}

Test(pool_trips, what_is_left_must_exceed_the_trip)
{
    cr_assert_eq(numoe_pool_worth(0, 0, 0), 1);
    cr_assert_eq(numoe_pool_worth(1000, 0, 1000), 2);
    cr_assert_eq(numoe_pool_worth(1000, 0, 1001), 1);
    cr_assert_eq(numoe_pool_worth(1000, 0, 300), 4);
    cr_assert_eq(numoe_pool_worth(1000, 500, 300), 2);
    cr_assert_eq(numoe_pool_worth(1000, 999, 1), 2);
    cr_assert_eq(numoe_pool_worth(1000, 1000, 1), 1);
    cr_assert_eq(numoe_pool_worth(1000, 0, 0), UINT32_MAX);
    cr_assert_eq(numoe_pool_worth(1000, 999, 0), UINT32_MAX);
    cr_assert_eq(numoe_pool_worth(1000, UINT64_MAX, 0), 1);
    cr_assert_eq(numoe_pool_worth(UINT64_MAX, 0, 1), UINT32_MAX);
}

/* ---- schedules ------------------------------------------------------------------------------- */

/* Nobody waits as long as this, so only the length of items can make a trip worth while. */
#define FAR_NS ((uint64_t)1 << 60)

struct play {
    struct numoe_pool *pool;
    uint32_t far_items;
    _Atomic uint32_t begun;  /* items of the far worker's share */
    _Atomic uint32_t stolen; /* of these, by worker 0 */
    bool until_stolen;       /* the far worker's first item waits for a theft; else for a refusal */
    _Atomic bool gave_up;
};

static bool refused(struct numoe_pool *pool)
{
    struct numoe_pool_worker_stats stats;

    numoe_pool_stats(pool, 0, &stats);
    return stats.refusals > 0;
}

/* Item 0 is worker 0's, the rest the far worker's. Item 0 ends when the far worker has begun, whose
 * first item then waits until worker 0 has looked: so worker 0 finds just the rest. */
static void play_item(void *context, uint32_t item, uint32_t worker)
{
    struct play *play = context;
    const time_t end = time(NULL) + 20;

    if (item == 0) {
        while (!atomic_load(&play->begun) && time(NULL) < end)
            sched_yield();
        return;
    }
    if (worker == 0)
        atomic_fetch_add(&play->stolen, 1);
    if (atomic_fetch_add(&play->begun, 1) > 0)
        return;
    while (!(play->until_stolen ? atomic_load(&play->stolen) > 0 : refused(play->pool))) {
        if (time(NULL) >= end) {
            atomic_store(&play->gave_up, true);
            return;
        }
        sched_yield();
    }
}

/* Workers in packages of their own. Pinned, so that all are woken on a single CPU too. */
static void place_apart(struct numoe_pool_worker *workers, uint32_t count)
{
    cpu_set_t mask;
    uint32_t cpu = 0;

    CPU_ZERO(&mask);
    cr_assert_eq(sched_getaffinity(0, sizeof mask, &mask), 0);
    for (uint32_t c = 0; c < CPU_SETSIZE; c++)
        cpu = CPU_ISSET(c, &mask) ? c : cpu;
    for (uint32_t w = 0; w < count; w++)
        workers[w] = (struct numoe_pool_worker){w ? cpu : UINT32_MAX, w, w, w, w};
}

/* The trip as given. @return how many items worker 0 took */
static uint32_t stolen_in(uint32_t far_items, uint32_t item_ns, uint64_t trip_ns, bool until_stolen)
{
    struct numoe_pool_worker workers[2];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct play play = {.far_items = far_items, .until_stolen = until_stolen};
    const uint32_t first[] = {0, 1, 1 + far_items};
    struct numoe_pool_job job = {
        .context = &play, .phase_count = 1, .phases = {{play_item, 1 + far_items, first, item_ns}}};

    place_apart(workers, 2);
    config.worker_count = 2;
    config.workers = workers;
    config.spin_ns = FAR_NS; /* and nobody sleeps */
    config.trip_ns[NUMOE_POOL_ELSEWHERE] = trip_ns;
    play.pool = make(&config);
    /* With one CPU for both the pool would spin shortly; the schedule holds all the same. */
    atomic_store(&play.pool->spin_ns, FAR_NS);
    cr_assert_eq(numoe_pool_run(play.pool, &job), 0);
    cr_assert(!play.gave_up);
    cr_assert_eq(play.begun, far_items);
    numoe_pool_destroy(play.pool);
    return play.stolen;
}

Test(pool_trips, few_items_are_left_where_they_are, .timeout = 60)
{
    /* 9 items of 100 ns are left, the trip costs more. */
    cr_assert_eq(stolen_in(10, 100, FAR_NS, false), 0);
    cr_assert_eq(stolen_in(2, UINT32_MAX, FAR_NS, false), 0);
}

Test(pool_trips, many_items_are_fetched, .timeout = 60)
{
    cr_assert_gt(stolen_in(10, 101, 900, true), 0);
    cr_assert_gt(stolen_in(1001, UINT32_MAX, (uint64_t)UINT32_MAX * 1000 - 1, true), 0);
    cr_assert_gt(stolen_in(2, 0, 0, true), 0);
}

Test(pool_trips, who_has_waited_fetches_anything, .timeout = 60)
{
    /* The far worker does not go on before something was stolen. */
    cr_assert_gt(stolen_in(2, 1, 100000, true), 0);
    cr_assert_gt(stolen_in(2, 0, 100000, true), 0);
}

/* A trip that is never worth it, but a short spin: the last look before sleep takes anything. */
Test(pool_trips, who_would_sleep_fetches_anything, .timeout = 60)
{
    static const uint64_t spins[] = {0, 5000};

    for (int s = 0; s < 2; s++) {
        struct numoe_pool_worker workers[2];
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        struct play play = {.far_items = 9, .until_stolen = true};
        const uint32_t first[] = {0, 1, 10};
        struct numoe_pool_job job = {
            .context = &play, .phase_count = 1, .phases = {{play_item, 10, first, 1}}};

        place_apart(workers, 2);
        config.worker_count = 2;
        config.workers = workers;
        config.spin_ns = spins[s];
        config.trip_ns[NUMOE_POOL_ELSEWHERE] = FAR_NS;
        config.wake_ns = 0;
        play.pool = make(&config);
        cr_assert_eq(numoe_pool_run(play.pool, &job), 0);
        cr_assert(!play.gave_up);
        cr_assert_gt(play.stolen, 0);
        numoe_pool_destroy(play.pool);
    }
}

static void note_worker(void *context, uint32_t item, uint32_t worker)
{
    ((_Atomic uint32_t *)context)[item] = worker;
}

/* The kernel has no other thread of this process that runs or would like to: one that has announced
 * its sleep, and waits for a CPU to look up a last time, would. */
static bool others_rest(void)
{
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *entry;
    bool rest = tasks != NULL;

    while (rest && (entry = readdir(tasks))) {
        char path[64], state = 'S';
        FILE *file;

        if (atoi(entry->d_name) <= 0 || atoi(entry->d_name) == getpid())
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", atoi(entry->d_name));
        file = fopen(path, "r");
        /* the name, in brackets, has none in it */
        rest = !file || (fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state == 'S');
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return rest;
}

/* Asleep for good: as their rank has it, which create may have changed while they fell asleep. */
static bool all_asleep(struct numoe_pool *pool)
{
    if (!others_rest())
        return false;
    for (uint32_t w = 1; w < pool->worker_count; w++)
        if (numoe_pool_state(pool, w) !=
            (pool->workers[w].rank == NUMOE_POOL_REGULAR ? NUMOE_POOL_SLEEPING : NUMOE_POOL_SPARE))
            return false;
    return true;
}

/* A phase that is over sooner than anybody is awake wakes nobody: worker 0 runs all of it, and
 * takes the shares of those that sleep however far they are. */
Test(pool_trips, a_short_phase_wakes_nobody, .timeout = 60)
{
    struct numoe_pool_worker workers[4];
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker_stats stats, before;
    _Atomic uint32_t by[40];
    struct numoe_pool_job job = {
        .context = (void *)by,
        .phase_count = 2,
        .phases = {{note_worker, 40, NULL, 50}, {note_worker, 9, NULL, 1}}};
    struct numoe_pool *pool;

    place_apart(workers, 4);
    config.worker_count = 4;
    config.workers = workers;
    config.spin_ns = 0;
    config.trip_ns[NUMOE_POOL_ELSEWHERE] = FAR_NS;
    config.wake_ns = 2000;
    pool = make(&config);
    /* One that has just announced that it sleeps may still look up. */
    do {
        while (!all_asleep(pool))
            sched_yield();
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    } while (!all_asleep(pool));
    for (uint32_t i = 0; i < 40; i++)
        by[i] = 77;
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    for (uint32_t i = 0; i < 40; i++)
        cr_assert_eq(by[i], 0, "item %u by worker %u", i, by[i]);
    for (uint32_t w = 1; w < 4; w++) {
        cr_assert_eq(numoe_pool_stats(pool, w, &stats), 0);
        cr_assert_eq(stats.items, 0);
    }
    /* One ns more, and worker 1 is woken; the others have no CPU of their own. */
    cr_assert_eq(numoe_pool_stats(pool, 1, &before), 0);
    job.phases[0].item_ns = 51;
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    do {
        sched_yield();
        cr_assert_eq(numoe_pool_stats(pool, 1, &stats), 0);
    } while (stats.sleeps <= before.sleeps);
    numoe_pool_destroy(pool);
}
