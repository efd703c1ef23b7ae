/* The pool: jobs that are submitted, callers that take turns, pools within pools. */
#include "pool_help.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

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
