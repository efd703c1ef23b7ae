/* Submissions that are called off, in every state. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "support/fixture.h"

enum { EXPERTS = 12, HIDDEN = 256, INNER = 512, TOKENS = 200, K = 4 };

struct ready {
    struct fixture f;
    struct call c;
    struct numoe_batch batch;
    float *want; /* what the batch gives */
};

static struct ready ready_make(uint32_t threads, uint64_t tokens)
{
    struct ready r = {.f = fixture_of(1, EXPERTS, HIDDEN, INNER, false, NUMOE_FAST)};
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.topology = "numa:2(memory=16GB) core:4 pu:1";
    options.threads = threads;
    options.spin_ns = 1000;
    experts_make(&r.f, 91);
    open_model(&r.f, &options);
    r.c = call_make(tokens, K, HIDDEN, EXPERTS, true);
    r.batch = call_batch(&r.c);
    run(&r.f, 0, &r.batch);
    r.want = r.c.out;
    r.c.out = malloc(tokens * HIDDEN * sizeof *r.c.out);
    r.batch.out = r.c.out;
    return r;
}

static void ready_free(struct ready *r)
{
    close_model(&r->f); /* what is submitted still writes */
    free(r->want);
    call_free(&r->c);
    experts_free(&r->f);
}

static void check_bits(struct ready *r)
{
    cr_assert_arr_eq(r->c.out, r->want, r->c.tokens * HIDDEN * sizeof *r->want);
}

/* However far the workers are: it is called off or it is right, and the next call is right. */
static void check_rounds(uint32_t threads)
{
    struct ready r = ready_make(threads, TOKENS);
    unsigned called_off = 0;

    for (int round = 0; round < 200; round++) {
        uint64_t ticket;
        int rc, said;

        cr_assert_eq(numoe_submit(r.f.model, 0, &r.batch, &ticket, NULL), 0);
        if (round % 3)
            usleep((useconds_t)(random_u64() % 2000));
        rc = numoe_cancel(r.f.model, ticket);
        cr_assert(rc == 0 || rc == -EALREADY);
        /* twice is as once */
        said = numoe_cancel(r.f.model, ticket);
        cr_assert(said == 0 || said == -EALREADY);
        said = numoe_wait(r.f.model, ticket, NULL);
        cr_assert(said == 0 || (rc == 0 && said == -ECANCELED), "%d", said);
        called_off += said != 0;
        if (said == 0)
            check_bits(&r);
        cr_assert_eq(numoe_cancel(r.f.model, ticket), -EALREADY);
        cr_assert_eq(numoe_wait(r.f.model, ticket, NULL), -EINVAL);
        if (round % 10 == 0) {
            memset(r.c.out, 0xFF, TOKENS * HIDDEN * sizeof *r.c.out);
            run(&r.f, 0, &r.batch);
            check_bits(&r);
        }
    }
    cr_expect_gt(called_off, 10);
    ready_free(&r);
}

Test(cancel, at_any_time, .timeout = 120)
{
    check_rounds(1);
    check_rounds(2);
    check_rounds(9);
}

struct other {
    struct numoe_model *model;
    _Atomic uint64_t ticket; /* 0: none; UINT64_MAX: go */
    unsigned called_off;
};

static void *call_off(void *argument)
{
    struct other *other = argument;

    for (;;) {
        const uint64_t ticket = atomic_exchange(&other->ticket, 0);

        if (ticket == UINT64_MAX)
            return NULL;
        if (ticket)
            other->called_off += numoe_cancel(other->model, ticket) == 0;
        else
            usleep(100);
    }
}

/* While its owner waits for it, which holds the turn. */
Test(cancel, by_another_thread, .timeout = 120)
{
    struct ready r = ready_make(2, TOKENS);
    struct other other = {.model = r.f.model};
    unsigned cancelled = 0;
    pthread_t thread;

    cr_assert_eq(pthread_create(&thread, NULL, call_off, &other), 0);
    for (int round = 0; round < 200; round++) {
        uint64_t ticket;
        int rc;

        cr_assert_eq(numoe_submit(r.f.model, 0, &r.batch, &ticket, NULL), 0);
        atomic_store(&other.ticket, ticket);
        rc = numoe_wait(r.f.model, ticket, NULL);
        cr_assert(rc == 0 || rc == -ECANCELED);
        cancelled += rc != 0;
        if (rc == 0)
            check_bits(&r);
    }
    while (atomic_load(&other.ticket))
        usleep(100);
    atomic_store(&other.ticket, UINT64_MAX);
    pthread_join(thread, NULL);
    cr_expect_gt(cancelled, 0);
    cr_expect_leq(cancelled, other.called_off);
    ready_free(&r);
}

/* A call that finds the submission finishes it, and its fate waits for its owner. */
Test(cancel, fate_is_kept, .timeout = 60)
{
    struct ready r = ready_make(3, TOKENS);
    struct call c = call_make(2, K, HIDDEN, EXPERTS, false);
    struct numoe_batch b = call_batch(&c);
    unsigned cancelled = 0;

    for (int round = 0; round < 50; round++) {
        uint64_t ticket;
        int rc;

        cr_assert_eq(numoe_submit(r.f.model, 0, &r.batch, &ticket, NULL), 0);
        rc = numoe_cancel(r.f.model, ticket);
        run(&r.f, 0, &b);
        cr_assert_eq(numoe_cancel(r.f.model, ticket), -EALREADY);
        rc = numoe_wait(r.f.model, ticket, NULL) ? 1 : rc ? 0 : 2;
        cancelled += rc == 1;
    }
    cr_expect_gt(cancelled, 0);
    call_free(&c);
    ready_free(&r);
}

/* What a cancelled call deferred, and what it was to collect, is gone; the next call stands alone.
 */
Test(cancel, deferred_experts_go_with_it, .timeout = 60)
{
    static const uint8_t late[EXPERTS] = {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0};
    struct ready r = ready_make(4, 64);
    unsigned cancelled = 0;

    for (int round = 0; round < 100; round++) {
        struct numoe_batch b = r.batch;
        uint64_t ticket;
        int rc;

        b.deferred = late;
        if (round % 2)
            run(&r.f, 0, &b);
        cr_assert_eq(numoe_submit(r.f.model, 0, &b, &ticket, NULL), 0);
        rc = numoe_cancel(r.f.model, ticket);
        cr_assert(rc == 0 || rc == -EALREADY);
        rc = numoe_wait(r.f.model, ticket, NULL);
        cancelled += rc != 0;
        if (rc == 0) /* collects what waits */
            run(&r.f, 0, &r.batch);
        run(&r.f, 0, &r.batch);
        check_bits(&r);
    }
    cr_expect_gt(cancelled, 0);
    ready_free(&r);
}

Test(cancel, a_model_may_go_at_once, .timeout = 60)
{
    for (int round = 0; round < 20; round++) {
        struct ready r = ready_make(4, TOKENS);
        uint64_t ticket;

        cr_assert_eq(numoe_submit(r.f.model, 0, &r.batch, &ticket, NULL), 0);
        cr_assert_geq(numoe_cancel(r.f.model, ticket), -EALREADY);
        ready_free(&r);
    }
}

Test(cancel, what_is_none_is_refused)
{
    struct ready r = ready_make(2, 4);
    uint64_t ticket;

    cr_expect_eq(numoe_cancel(NULL, 1), -EINVAL);
    cr_expect_eq(numoe_cancel(r.f.model, 0), -EINVAL);
    cr_expect_eq(numoe_cancel(r.f.model, 1), -EINVAL);
    cr_expect_eq(numoe_cancel(r.f.model, UINT64_MAX), -EINVAL);
    cr_assert_eq(numoe_submit(r.f.model, 0, &r.batch, &ticket, NULL), 0);
    cr_expect_eq(numoe_cancel(r.f.model, ticket + 1), -EINVAL);
    cr_expect_eq(numoe_wait(r.f.model, ticket, NULL), 0);
    check_bits(&r);
    ready_free(&r);
}
