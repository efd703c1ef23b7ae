/* The workers of a context: lent threads, reserved cores, contexts side by side, idleness. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "context.h"
#include "memory_node.h"
#include "model.h"
#include "numoe.h"
#include "pool_internal.h"
#include "support/fixture.h"

#define FOUR_NODES "pack:2 l3:2 [numa(memory=16GB)] core:2 pu:1"

/* ---- lent threads ---------------------------------------------------------------------------- */

struct lender {
    struct numoe *context;
    uint32_t index;
    pthread_t thread;
    int rc;
};

static void *lend(void *argument)
{
    struct lender *lender = argument;

    lender->rc = numoe_lend(lender->context, lender->index);
    return NULL;
}

static void lend_both(struct numoe *context, struct lender *lenders)
{
    for (uint32_t i = 0; i < 2; i++) {
        lenders[i] = (struct lender){.context = context, .index = i};
        cr_assert_eq(pthread_create(&lenders[i].thread, NULL, lend, &lenders[i]), 0);
    }
    while (context->pool->absent)
        sched_yield();
}

Test(workers_lent, results_are_the_same_bits, .timeout = 120)
{
    struct fixture f = fixture_of(1, 5, 96, 320, true, NUMOE_FAST);
    float *first[3] = {NULL};

    experts_make(&f, 21);
    for (int way = 0; way < 3; way++) { /* own threads; nobody lent; two lent */
        struct numoe_options options = NUMOE_OPTIONS_INIT;
        struct lender lenders[2];

        options.topology = FOUR_NODES;
        options.threads = 4;
        options.lent_threads = way ? 2 : 0;
        options.spin_ns = 1000;
        open_model(&f, &options);
        if (way == 2)
            lend_both(f.context, lenders);
        for (uint64_t i = 0; i < 3; i++) {
            random_state = 300 + i;
            struct call c = call_make(1 + 20 * i, 3, 96, 5, true);
            struct numoe_batch b = call_batch(&c);
            run(&f, 0, &b);
            if (way == 0) {
                first[i] = c.out;
                c.out = NULL;
            } else {
                cr_assert_arr_eq(c.out, first[i], (1 + 20 * i) * 96 * sizeof(float));
            }
            call_free(&c);
        }
        if (way == 2) {
            cr_assert_eq(numoe_lend(f.context, 1), -EBUSY);
            cr_assert_eq(numoe_recall(f.context, 0), 0);
            pthread_join(lenders[0].thread, NULL);
            cr_assert_eq(lenders[0].rc, 0);
            cr_assert_eq(numoe_recall(f.context, 0), -ESRCH);
        }
        close_model(&f);
        if (way == 2) {
            pthread_join(lenders[1].thread, NULL);
            cr_assert_eq(lenders[1].rc, -ESHUTDOWN);
        }
    }
    for (int i = 0; i < 3; i++)
        free(first[i]);
    experts_free(&f);
}

Test(workers_lent, bad_calls_are_refused, .timeout = 60)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context = NULL;

    options.topology = FOUR_NODES;
    options.threads = 3;
    options.lent_threads = 3;
    cr_assert_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_assert_str_eq(error.where, "lent_threads");
    options.lent_threads = 1;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_lend(context, 1), -EINVAL);
    cr_assert_eq(numoe_recall(context, 1), -EINVAL);
    cr_assert_eq(numoe_recall(context, 0), -ESRCH);
    cr_assert_eq(numoe_lend(NULL, 0), -EINVAL);
    cr_assert_eq(numoe_recall(NULL, 0), -EINVAL);
    numoe_close(context);
}

/* ---- reserved cores -------------------------------------------------------------------------- */

Test(workers_reserved, cores_get_no_worker, .timeout = 60)
{
    static const uint32_t reserved[] = {0, 5}, absent[] = {99};
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_stats stats = NUMOE_STATS_INIT;
    struct numoe *context = NULL;

    options.topology = FOUR_NODES; /* eight cores */
    options.reserved_cpus = reserved;
    options.reserved_count = 2;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_stats_get(context, &stats), 0);
    cr_assert_eq(stats.workers, 6);
    for (uint32_t w = 0; w < context->plan->worker_count; w++)
        cr_assert(context->plan->workers[w].os_cpu != 0 && context->plan->workers[w].os_cpu != 5);
    numoe_close(context);
    options.reserved_cpus = absent;
    options.reserved_count = 1;
    cr_assert_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_assert(strstr(error.message, "99"), "%s", error.message);
}

/* ---- what a steal costs ---------------------------------------------------------------------- */

Test(workers_trips, follow_the_machines_distances, .timeout = 60)
{
    static const uint32_t percents[] = {100, 50, 0};
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe *context = NULL;

    for (int p = 0; p < 3; p++) {
        const uint64_t percent = percents[p];
        uint64_t before = 0;

        options.topology = NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml";
        options.threads = 128;
        options.steal_trip_percent = percents[p];
        cr_assert_eq(numoe_open(&options, &context, NULL), 0);
        for (uint32_t w = 0; w < 128; w += 60) {
            const struct numoe_pool_kin *kin = &context->pool->kins[context->pool->workers[w].kin];
            const uint32_t *distances = context->plan->distances;

            cr_assert_eq(kin->trip_ns[0], 0);
            for (uint32_t d = 1; d < kin->rings; d++) {
                const uint32_t victim = kin->order[kin->ring[d]];
                const uint32_t a = context->plan->workers[w].plan_node,
                               b = context->plan->workers[victim].plan_node;

                cr_assert_eq(kin->trip_ns[d],
                             distances[a * context->plan->node_count + b] * 48 * percent / 100);
                cr_assert(d == 1 || kin->trip_ns[d] >= before);
                before = kin->trip_ns[d];
            }
        }
        numoe_close(context);
    }
}

/* Where the machine does not say who shares a cache, workers of other nodes are far all the same.
 */
Test(workers_trips, caches_that_are_not_known_are_in_a_node, .timeout = 60)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe *context = NULL;

    options.topology = "numa:4(memory=16GB) core:2 pu:1";
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    for (uint32_t w = 0; w < 8; w++) {
        const struct numoe_pool_kin *kin = &context->pool->kins[context->pool->workers[w].kin];

        cr_assert_eq(context->plan->workers[w].l3, NUMOE_NONE);
        cr_expect_eq(kin->ring[1], 2);
        cr_expect_eq(kin->order[0] / 2, w / 2);
        cr_expect_eq(kin->order[1] / 2, w / 2);
        cr_expect_eq(kin->trip_ns[0], 0);
        cr_expect(kin->rings > 1 && kin->trip_ns[1] > 0);
    }
    numoe_close(context);
}

/* ---- several contexts and models ------------------------------------------------------------- */

struct side {
    struct fixture f;
    float *want;
    struct call c;
    unsigned wrong;
};

static void *call_side(void *argument)
{
    struct side *side = argument;
    const struct numoe_batch b = call_batch(&side->c);

    for (int i = 0; i < 30; i++) {
        memset(side->c.out, 0xff, side->c.tokens * 96 * sizeof(float));
        if (numoe_forward(side->f.model, 0, &b, NULL, NULL) ||
            memcmp(side->c.out, side->want, side->c.tokens * 96 * sizeof(float)))
            side->wrong++;
    }
    return NULL;
}

/* Two pools on different nodes of one machine, and a third on all of them, at work at once. */
Test(workers_side_by_side, pools_on_disjoint_nodes, .timeout = 120)
{
    static const uint32_t low[] = {0, 1}, high[] = {2, 3};
    struct side sides[3];
    pthread_t threads[3];

    for (int s = 0; s < 3; s++) {
        struct numoe_options options = NUMOE_OPTIONS_INIT;

        memset(&sides[s], 0, sizeof sides[s]);
        sides[s].f = fixture_of(1, 4, 96, 256, false, NUMOE_FAST);
        experts_make(&sides[s].f, 40 + s);
        options.topology = FOUR_NODES;
        options.spin_ns = 20000;
        options.nodes = s == 0 ? low : s == 1 ? high : NULL;
        options.node_count = s == 2 ? 0 : 2;
        open_model(&sides[s].f, &options);
        cr_assert_eq(sides[s].f.context->plan->node_count, s == 2 ? 4 : 2);
        cr_assert_eq(sides[s].f.context->plan->worker_count, s == 2 ? 8 : 4);
        for (uint32_t n = 0; n < sides[s].f.context->plan->node_count; n++)
            cr_assert_eq(sides[s].f.context->plan->nodes[n].os_index, n + (s == 1 ? 2 : 0));
        sides[s].c = call_make(5 + 10 * (uint64_t)s, 3, 96, 4, false);
        {
            const struct numoe_batch b = call_batch(&sides[s].c);
            run(&sides[s].f, 0, &b);
        }
        cr_assert_leq(check(&sides[s].f, 0, &sides[s].c, 3), 2e-2);
        sides[s].want = sides[s].c.out;
        sides[s].c.out = malloc(sides[s].c.tokens * 96 * sizeof(float));
    }
    for (int s = 0; s < 3; s++)
        cr_assert_eq(pthread_create(&threads[s], NULL, call_side, &sides[s]), 0);
    for (int s = 0; s < 3; s++) {
        pthread_join(threads[s], NULL);
        cr_assert_eq(sides[s].wrong, 0, "context %d", s);
    }
    for (int s = 0; s < 3; s++) {
        free(sides[s].want);
        call_free(&sides[s].c);
        close_model(&sides[s].f);
        experts_free(&sides[s].f);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Each node's memory is made resident by its own workers. One node has a piece of 64 MiB more than
 * the other, which has as many workers; nobody takes anything from afar. */
Test(workers_memory, of_a_node_is_touched_by_the_nodes_workers, .timeout = 120)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_pool_worker_stats before[2], after;
    uint64_t pieces[2], all = 0;
    struct numoe *context;
    struct numoe_model *model;
    cpu_set_t mask;

    cr_assert_eq(sched_getaffinity(0, sizeof mask, &mask), 0);
    if (CPU_COUNT(&mask) < 2)
        cr_skip_test("one CPU");
    options.topology = "numa:2(memory=16GB) core:1 pu:1";
    options.steal_trip_percent = UINT32_MAX;
    options.spin_ns = UINT64_MAX;
    desc.layers = desc.experts = desc.experts_per_token = 1;
    desc.hidden = 4096;
    desc.intermediate = (uint64_t)643 * 32;
    desc.activation.kind = NUMOE_SILU;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    for (uint32_t w = 0; w < 2; w++)
        cr_assert_eq(numoe_pool_stats(context->pool, w, &before[w]), 0);
    cr_assert_eq(numoe_model_create(context, &desc, &model, &error), 0, "%s", error.message);
    for (uint32_t n = 0; n < 2; n++) {
        pieces[n] = (numoe_memory_bytes(model->nodes[n].memory) + (64 << 20) - 1) / (64 << 20);
        all += pieces[n];
    }
    cr_assert_eq(all, 3);
    /* they share what the cgroup leaves */
    cr_assert_eq(model->nodes[1].memory->together, &model->nodes[0].memory->of_all);
    for (uint32_t w = 0; w < 2; w++) {
        cr_assert_eq(context->plan->workers[w].plan_node, w);
        cr_assert_eq(numoe_pool_stats(context->pool, w, &after), 0);
        cr_expect_eq(after.items - before[w].items, pieces[w], "worker %u: %lu of %lu", w,
                     after.items - before[w].items, pieces[w]);
    }
    /* shared out without regard for nodes, the first worker would have had as many as the second
     * has, or the other way round */
    cr_assert_eq(pieces[0], 2);
    numoe_model_destroy(model);
    numoe_close(context);
}

/* ---- lanes ----------------------------------------------------------------------------------- */

/* A call's job as the pool gets it: each worker begins with lanes in the memory of its own node,
 * and is told how long they take, by which it judges far steals. */
Test(workers_lanes, are_first_those_of_the_workers_node, .timeout = 60)
{
    struct fixture f = fixture_of(1, 8, 96, 512, false, NUMOE_FAST);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    const struct numoe_plan *plan;
    struct numoe_schedule *s;

    experts_make(&f, 77);
    options.topology = "pack:2 [numa(memory=16GB)] core:3 pu:1";
    options.workers = 5;
    open_model(&f, &options);
    s = &f.context->schedule;
    plan = f.context->plan;
    cr_assert_eq(plan->nodes[0].worker_count + plan->nodes[1].worker_count, 5);
    cr_assert_neq(plan->nodes[0].worker_count, plan->nodes[1].worker_count);
    for (uint64_t tokens = 1; tokens < 12; tokens += 5) {
        struct call c = call_make(tokens, 3, 96, 8, false);
        const struct numoe_batch b = call_batch(&c);
        const struct numoe_pool_phase *lanes = NULL;
        struct numoe_pool_job job;
        uint64_t weighed = 0;

        run(&f, 0, &b);
        numoe_schedule_job(s, &job);
        for (uint32_t p = 0; p < job.phase_count; p++)
            if (numoe_schedule_phase(job.phases[p].run) == TRACE_PHASE_EXPERTS)
                lanes = &job.phases[p];
        cr_assert_not_null(lanes);
        cr_assert_not_null(lanes->first);
        cr_expect_eq(lanes->items, s->lane_count);
        cr_expect_eq(lanes->first[5], s->lane_count);
        for (uint32_t w = 0; w < 5; w++)
            for (uint32_t i = lanes->first[w]; i < lanes->first[w + 1]; i++)
                for (uint32_t r = 0; r < s->lanes[i].run_count; r++) {
                    const struct schedule_run *run = &s->runs[s->lanes[i].first_run + r];

                    cr_expect_eq(run->node, plan->workers[w].plan_node, "%lu tokens, worker %u",
                                 tokens, w);
                    weighed += run->slice_count * f.model->shape.bytes;
                }
        /* a core reads 5 to 50 bytes a ns */
        cr_expect(lanes->item_ns >= weighed / s->lane_count / 50 &&
                      lanes->item_ns <= weighed / s->lane_count,
                  "%u ns for %lu bytes", lanes->item_ns, weighed / s->lane_count);
        call_free(&c);
    }
    close_model(&f);
    experts_free(&f);
}

/* ---- idleness -------------------------------------------------------------------------------- */

/* C3: 64 workers, after a call and their spin, use less than a thousandth of a core for ten
 * seconds: one that polled each millisecond would use more. */
Test(workers_idle, use_no_cpu, .timeout = 120)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_bench_idle idle;
    struct numoe *context = NULL;

    options.topology = FOUR_NODES;
    options.threads = 64;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    numoe_bench_idle(context, 10, &idle);
    cr_log_info("64 workers asleep for 10 s: %.6f s of CPU time; first call %.1f us, p99 %.1f us",
                idle.cpu_s, idle.first_us_p50, idle.first_us_p99);
    cr_assert_lt(idle.cpu_s, 0.01);
    cr_assert_eq(idle.calls, 200);
    cr_assert_leq(idle.first_us_p50, idle.first_us_p99);
    numoe_close(context);
}
