/* Lent threads, cancelled jobs, and destroying a pool in every state. */
#include "numoe_pool.h"
#include "pool_internal.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct numoe_pool *make(uint32_t workers, uint32_t lent, uint64_t spin_ns)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = NULL;

    config.worker_count = workers;
    config.lent_workers = lent;
    config.spin_ns = spin_ns;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), 0, "%s", error.message);
    return pool;
}

/* Wait for what must come; a test that waits in vain runs into its time limit. */
#define AWAIT(condition)                                                                           \
    while (!(condition))                                                                           \
    sched_yield()

static uint64_t items_of(const struct numoe_pool *pool, uint32_t worker)
{
    struct numoe_pool_worker_stats stats;

    cr_assert_eq(numoe_pool_stats(pool, worker, &stats), 0);
    return stats.items;
}

/* ---- lending --------------------------------------------------------------------------------- */

struct lender {
    struct numoe_pool *pool;
    uint32_t worker;
    pthread_t thread;
    _Atomic int rc;
};

static void *lend(void *argument)
{
    struct lender *lender = argument;

    atomic_store(&lender->rc, numoe_pool_lend(lender->pool, lender->worker));
    return NULL;
}

static void start(struct lender *lender, struct numoe_pool *pool, uint32_t worker)
{
    *lender = (struct lender){.pool = pool, .worker = worker, .rc = 1};
    cr_assert_eq(pthread_create(&lender->thread, NULL, lend, lender), 0);
    AWAIT(atomic_load(&pool->workers[worker].state) != NUMOE_POOL_ABSENT ||
          atomic_load(&lender->rc) != 1);
}

struct meeting {
    _Atomic uint32_t here;
    uint32_t wanted;
    _Atomic uint32_t by[8];
};

/* Each item waits until as many have begun as are wanted: they run on so many threads. */
static void meet(void *context, uint32_t item, uint32_t worker)
{
    struct meeting *meeting = context;

    (void)item;
    atomic_fetch_add(&meeting->by[worker], 1);
    atomic_fetch_add(&meeting->here, 1);
    AWAIT(atomic_load(&meeting->here) >= meeting->wanted);
}

static void add_one(void *context, uint32_t item, uint32_t worker)
{
    (void)item, (void)worker;
    atomic_fetch_add((_Atomic uint32_t *)context, 1);
}

Test(pool_lend, a_lent_thread_works_and_comes_back, .timeout = 30)
{
    static const uint64_t spins[] = {0, 100000};
    cpu_set_t mask;

    /* With one CPU for both the second is not woken. */
    CPU_ZERO(&mask);
    cr_assert_eq(sched_getaffinity(0, sizeof mask, &mask), 0);
    if (CPU_COUNT(&mask) < 2)
        cr_skip_test("one CPU");
    for (int s = 0; s < 2; s++) {
        struct numoe_pool *pool = make(2, 1, spins[s]);
        struct lender lender;

        for (int round = 0; round < 20; round++) {
            struct meeting meeting = {.wanted = 2};
            static const uint32_t first[] = {0, 1, 2};
            struct numoe_pool_job job = {
                .context = &meeting, .phase_count = 1, .phases = {{meet, 2, first}}};

            start(&lender, pool, 1);
            cr_assert_eq(numoe_pool_run(pool, &job), 0);
            cr_assert_eq(meeting.by[0], 1);
            cr_assert_eq(meeting.by[1], 1);
            cr_assert_eq(numoe_pool_recall(pool, 1), 0);
            pthread_join(lender.thread, NULL);
            cr_assert_eq(lender.rc, 0);
            cr_assert_eq(pool->absent, 1);
            cr_assert_eq(pool->sleepers, 0);
            cr_assert_eq(numoe_pool_recall(pool, 1), -ESRCH);
        }
        cr_assert_eq(items_of(pool, 1), 20);
        numoe_pool_destroy(pool);
    }
}

Test(pool_lend, others_do_what_falls_to_the_absent, .timeout = 30)
{
    static const uint32_t all_last[] = {0, 0, 0, 0, 12}, equal[] = {0, 3, 6, 9, 12};
    const uint32_t *const shares[] = {NULL, all_last, equal};

    for (uint32_t lent = 1; lent < 4; lent++) {
        struct numoe_pool *pool = make(4, lent, lent == 2 ? 0 : 100000);

        for (int s = 0; s < 3; s++)
            for (int submitted = 0; submitted < 2; submitted++) {
                _Atomic uint32_t count = 0;
                struct numoe_pool_job job = {
                    .context = (void *)&count,
                    .phase_count = 2,
                    .phases = {{add_one, 12, shares[s]}, {add_one, 1, NULL}}};
                uint64_t ticket;

                if (!submitted) {
                    cr_assert_eq(numoe_pool_run(pool, &job), 0);
                } else {
                    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
                    if (lent < 3) /* the threads that the pool has do it alone */
                        AWAIT(atomic_load(&count) == 13);
                    cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
                }
                cr_assert_eq(count, 13);
            }
        for (uint32_t w = 4 - lent; w < 4; w++)
            cr_assert_eq(items_of(pool, w), 0);
        numoe_pool_destroy(pool);
    }
}

Test(pool_lend, destroy_gives_threads_back, .timeout = 30)
{
    for (int round = 0; round < 20; round++) {
        struct numoe_pool *pool = make(4, 3, round % 2 ? 0 : 200000);
        struct lender lenders[3];

        for (uint32_t l = 0; l < 3; l++)
            start(&lenders[l], pool, 1 + l);
        if (round % 3 == 0)
            AWAIT(atomic_load(&pool->sleepers) == 3);
        numoe_pool_destroy(pool);
        for (uint32_t l = 0; l < 3; l++) {
            pthread_join(lenders[l].thread, NULL);
            cr_assert_eq(lenders[l].rc, -ESHUTDOWN);
        }
    }
}

static void call_lend(void *context, uint32_t item, uint32_t worker)
{
    struct numoe_pool **pool = context;

    (void)item, (void)worker;
    if (numoe_pool_lend(*pool, 2) != -EDEADLK)
        abort();
}

Test(pool_lend, bad_calls_are_refused, .timeout = 30)
{
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool *pool = make(3, 1, 0);
    struct numoe_pool_job job = {
        .context = &pool, .phase_count = 1, .phases = {{call_lend, 1, NULL}}};
    struct lender lender;
    int status;
    pid_t child;

    cr_assert_eq(numoe_pool_lend(pool, 0), -EINVAL);
    cr_assert_eq(numoe_pool_lend(pool, 1), -EINVAL);
    cr_assert_eq(numoe_pool_lend(pool, 3), -EINVAL);
    cr_assert_eq(numoe_pool_lend(NULL, 2), -EINVAL);
    cr_assert_eq(numoe_pool_recall(pool, 1), -EINVAL);
    cr_assert_eq(numoe_pool_recall(NULL, 2), -EINVAL);
    cr_assert_eq(numoe_pool_recall(pool, 2), -ESRCH);
    cr_assert_eq(numoe_pool_run(pool, &job), 0);
    start(&lender, pool, 2);
    cr_assert_eq(numoe_pool_lend(pool, 2), -EBUSY);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        alarm(10);
        _exit(numoe_pool_lend(pool, 2) == -ECHILD && numoe_pool_recall(pool, 2) == -ECHILD ? 0 : 2);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    cr_assert_eq(numoe_pool_recall(pool, 2), 0);
    pthread_join(lender.thread, NULL);
    cr_assert_eq(lender.rc, 0);
    numoe_pool_destroy(pool);

    config.worker_count = 3;
    config.lent_workers = 3;
    cr_assert_eq(numoe_pool_create(&config, &pool, &error), -EINVAL);
    cr_assert(strstr(error.message, "3 of 3"), "%s", error.message);
}

/* ---- cancelling ------------------------------------------------------------------------------ */

struct gate {
    struct numoe_pool *pool;
    _Atomic uint64_t ticket;
    _Atomic uint32_t begun, open, rc_wrong;
};

static void hold(void *context, uint32_t item, uint32_t worker)
{
    struct gate *gate = context;

    (void)item, (void)worker;
    atomic_fetch_add(&gate->begun, 1);
    AWAIT(atomic_load(&gate->open));
}

Test(pool_cancel, items_that_have_not_begun_are_not_run, .timeout = 30)
{
    for (uint32_t workers = 1; workers <= 3; workers++) {
        struct numoe_pool *pool = make(workers, 0, 1000);
        struct gate gate = {.pool = pool};
        struct numoe_pool_job job = {
            .context = &gate, .phase_count = 2, .phases = {{hold, 1000, NULL}, {hold, 1000, NULL}}};
        _Atomic uint32_t count = 0;
        struct numoe_pool_job after = {
            .context = (void *)&count, .phase_count = 1, .phases = {{add_one, 100, NULL}}};
        uint32_t begun;
        uint64_t ticket;

        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
        if (workers > 1)
            AWAIT(atomic_load(&gate.begun) >= 1);
        cr_assert_eq(numoe_pool_cancel(pool, ticket), 0);
        cr_assert_eq(numoe_pool_cancel(pool, ticket), 0);
        atomic_store(&gate.open, 1);
        cr_assert_eq(numoe_pool_wait(pool, ticket), -ECANCELED);
        begun = atomic_load(&gate.begun);
        cr_assert_leq(begun, workers - 1);
        cr_assert_eq(numoe_pool_wait(pool, ticket), -EINVAL);
        cr_assert_eq(numoe_pool_cancel(pool, ticket), -EALREADY);
        cr_assert_eq(numoe_pool_run(pool, &after), 0);
        cr_assert_eq(count, 100);
        cr_assert_eq(gate.begun, begun);
        numoe_pool_destroy(pool);
    }
}

Test(pool_cancel, bad_tickets_are_refused, .timeout = 30)
{
    struct numoe_pool *pool = make(2, 0, 1000);
    _Atomic uint32_t count = 0;
    struct numoe_pool_job job = {
        .context = (void *)&count, .phase_count = 1, .phases = {{add_one, 10, NULL}}};
    uint64_t ticket[2], first;

    cr_assert_eq(numoe_pool_cancel(NULL, 8), -EINVAL);
    cr_assert_eq(numoe_pool_cancel(pool, 0), -EINVAL);
    cr_assert_eq(numoe_pool_cancel(pool, 9), -EINVAL);
    cr_assert_eq(numoe_pool_cancel(pool, 16), -EINVAL);
    cr_assert_eq(numoe_pool_cancel(pool, UINT64_MAX), -EINVAL);
    cr_assert_eq(numoe_pool_submit(pool, &job, &first), 0);
    cr_assert_eq(numoe_pool_wait(pool, first), 0);
    cr_assert_eq(numoe_pool_cancel(pool, first), -EALREADY);
    /* A late call for an earlier job does nothing to a later one. */
    for (int i = 0; i < 600; i++) {
        cr_assert_eq(numoe_pool_submit(pool, &job, &ticket[0]), 0);
        cr_assert_eq(numoe_pool_cancel(pool, first), -EALREADY);
        cr_assert_eq(numoe_pool_wait(pool, ticket[0]), 0);
    }
    cr_assert_eq(count, 6010);
    cr_assert_eq(numoe_pool_cancel(pool, ticket[0] + 8), -EINVAL);
    numoe_pool_destroy(pool);
}

static void cancel_self(void *context, uint32_t item, uint32_t worker)
{
    struct gate *gate = context;

    (void)item, (void)worker;
    atomic_fetch_add(&gate->begun, 1);
    AWAIT(atomic_load(&gate->ticket));
    if (numoe_pool_cancel(gate->pool, atomic_load(&gate->ticket)))
        atomic_fetch_add(&gate->rc_wrong, 1);
}

Test(pool_cancel, an_item_may_cancel_its_own_job, .timeout = 30)
{
    struct numoe_pool *pool = make(2, 0, 1000);
    struct gate gate = {.pool = pool};
    struct numoe_pool_job job = {
        .context = &gate, .phase_count = 1, .phases = {{cancel_self, 1000, NULL}}};
    uint64_t ticket;

    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
    atomic_store(&gate.ticket, ticket);
    cr_assert_eq(numoe_pool_wait(pool, ticket), -ECANCELED);
    cr_assert_leq(gate.begun, 2);
    cr_assert_geq(gate.begun, 1);
    cr_assert_eq(gate.rc_wrong, 0);
    numoe_pool_destroy(pool);
}

/* Nothing was skipped: no error. */
Test(pool_cancel, the_last_item_may_cancel_nothing, .timeout = 30)
{
    struct numoe_pool *pool = make(1, 0, 1000);
    struct gate gate = {.pool = pool};
    struct numoe_pool_job job = {
        .context = &gate, .phase_count = 1, .phases = {{cancel_self, 1, NULL}}};
    uint64_t ticket;

    cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
    atomic_store(&gate.ticket, ticket);
    cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
    cr_assert_eq(gate.begun, 1);
    numoe_pool_destroy(pool);
}

/* ---- destroying in every state --------------------------------------------------------------- */

enum state { NEVER_USED, SPINNING, PARKED, AFTER_RUN, SUBMITTED, CANCELLED, WAITED, LENT, STATES };

Test(pool_destroy, is_bounded_in_every_state, .timeout = 60)
{
    static const uint32_t counts[] = {1, 2, 3, 64};

    for (int c = 0; c < 4; c++)
        for (int state = 0; state < STATES; state++) {
            uint32_t lent = state == LENT && counts[c] > 1 ? counts[c] / 2 : 0;
            struct numoe_pool *pool = make(counts[c], lent, state == PARKED ? 0 : 100000);
            _Atomic uint32_t count = 0;
            struct numoe_pool_job job = {.context = (void *)&count,
                                         .phase_count = 2,
                                         .phases = {{add_one, 300, NULL}, {add_one, 30, NULL}}};
            struct lender lenders[32];
            uint64_t ticket = 0;

            if (state == PARKED)
                AWAIT(atomic_load(&pool->sleepers) == counts[c] - 1);
            if (state == AFTER_RUN || state == LENT)
                cr_assert_eq(numoe_pool_run(pool, &job), 0);
            if (state == SUBMITTED || state == CANCELLED || state == WAITED)
                cr_assert_eq(numoe_pool_submit(pool, &job, &ticket), 0);
            if (state == CANCELLED)
                numoe_pool_cancel(pool, ticket);
            if (state == WAITED)
                cr_assert_eq(numoe_pool_wait(pool, ticket), 0);
            for (uint32_t l = 0; l < lent; l++)
                start(&lenders[l], pool, counts[c] - lent + l);
            numoe_pool_destroy(pool);
            for (uint32_t l = 0; l < lent; l++)
                pthread_join(lenders[l].thread, NULL);
            if (state >= AFTER_RUN && state != CANCELLED)
                cr_assert_eq(count, 330, "state %d", state);
            cr_assert_leq(count, 330);
        }
}

/* ---- fork while a job runs ------------------------------------------------------------------- */

static void *run_job(void *argument)
{
    struct gate *gate = argument;
    struct numoe_pool_job job = {.context = gate, .phase_count = 1, .phases = {{hold, 8, NULL}}};

    if (numoe_pool_run(gate->pool, &job))
        abort();
    return NULL;
}

Test(pool_fork, in_the_middle_of_a_job, .timeout = 30)
{
    struct numoe_pool *pool = make(3, 0, 1000);
    struct gate gate = {.pool = pool};
    pthread_t caller;
    int status;
    pid_t child;

    cr_assert_eq(pthread_create(&caller, NULL, run_job, &gate), 0);
    AWAIT(atomic_load(&gate.begun) > 0);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        _Atomic uint32_t count = 0;
        struct numoe_pool_job job = {
            .context = (void *)&count, .phase_count = 1, .phases = {{add_one, 10, NULL}}};
        struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
        struct numoe_pool *fresh;
        uint64_t ticket;

        alarm(10);
        /* The seat was taken when the process was copied: nobody waits for it here. */
        if (numoe_pool_run(pool, &job) != -ECHILD ||
            numoe_pool_submit(pool, &job, &ticket) != -ECHILD ||
            numoe_pool_cancel(pool, 16) != -ECHILD)
            _exit(2);
        numoe_pool_destroy(pool);
        config.worker_count = 3;
        if (numoe_pool_create(&config, &fresh, NULL) || numoe_pool_run(fresh, &job) || count != 10)
            _exit(3);
        numoe_pool_destroy(fresh);
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    atomic_store(&gate.open, 1);
    pthread_join(caller, NULL);
    cr_assert_eq(gate.begun, 8);
    numoe_pool_destroy(pool);
}
