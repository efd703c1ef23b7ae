/*
 * The workers of a context: one for each worker of the plan, or as many threads as the caller says,
 * and what a steal from one of them to another costs.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <stdlib.h>

/* A steal moves so many cache lines one after another: the victim's share and range, read and
 * swapped, and what the item needs to begin. */
#define TRIP_LINES 6.0
/* In a table of distances 10 is local: a line takes some 80 ns from local memory. */
#define DISTANCE_NS 8.0

struct numoe_pool *numoe_context_pool(struct numoe *context)
{
    return context->pool;
}

int numoe_context_check_fork(const struct numoe *context, struct numoe_error *error)
{
    if (!numoe_pool_forked(context->pool))
        return 0;
    return numoe_error_set(error, -ECHILD, "context",
                           "this process was forked from the one that opened it");
}

uint64_t numoe_context_spin_ns(const struct numoe *context)
{
    return context->spin_ns;
}

/* How long a line takes from memory of plan node b to CPUs of plan node a: as measured, else by the
 * table of distances. */
static double line_ns(const struct numoe *context, uint32_t a, uint32_t b)
{
    const struct numoe_plan *plan = context->plan;
    const struct numoe_machine *machine = context->machine;
    const struct numoe_pair_speed *speed = numoe_machine_speed(
        machine, machine->nodes[plan->nodes[a].node].domain, plan->nodes[b].node);

    if (speed && speed->latency_ns > 0)
        return speed->latency_ns;
    return (double)plan->distances[(size_t)a * plan->node_count + b] * DISTANCE_NS;
}

/* [a * node_count + b]: what a worker of plan node a pays for a steal from one of b, whose lines
 * and work are in b's memory. NULL: out of memory. */
static uint32_t *list_trips(const struct numoe *context, uint32_t percent)
{
    const uint32_t nodes = context->plan->node_count;
    uint32_t *trips = calloc((size_t)nodes * nodes, sizeof *trips);

    for (uint32_t a = 0; trips && a < nodes; a++)
        for (uint32_t b = 0; b < nodes; b++) {
            const double ns = line_ns(context, a, b) * TRIP_LINES * percent / 100;

            trips[(size_t)a * nodes + b] = ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
        }
    return trips;
}

static struct numoe_pool_worker *list_workers(const struct numoe *context, uint32_t count)
{
    const struct numoe_plan *plan = context->plan;
    struct numoe_pool_worker *workers = calloc(count, sizeof *workers);

    for (uint32_t w = 0; workers && w < count; w++) {
        const struct numoe_plan_worker *from = &plan->workers[w % plan->worker_count];
        workers[w] = (struct numoe_pool_worker){
            /* threads beyond the plan share its CPUs, wherever the system puts them */
            .os_cpu = context->described || w >= plan->worker_count ? UINT32_MAX : from->os_cpu,
            /* not known: one in each node */
            .l3 = from->l3 != NUMOE_NONE ? from->l3 : NUMOE_NONE - from->plan_node,
            .node = from->plan_node,
            .domain = from->domain,
            .package = from->package,
        };
    }
    return workers;
}

/* On CPUs without memory of their own, stacks and scratch come from where the experts do. A denied
 * policy is told of when arenas are bound. */
static void init_thread(void *user, uint32_t worker)
{
    const struct numoe *context = user;
    const struct numoe_plan *plan = context->plan;
    const struct numoe_plan_worker *of = &plan->workers[worker % plan->worker_count];

    if (!context->described && !context->machine->pus[of->pu].node_is_near)
        (void)numoe_memory_prefer(plan->nodes[of->plan_node].os_index);
}

int numoe_context_start_pool(struct numoe *context, const struct numoe_options *options,
                             struct numoe_error *error)
{
    const uint32_t count = options->threads ? options->threads : context->plan->worker_count;
    struct numoe_pool_config config = NUMOE_POOL_CONFIG_INIT;
    struct numoe_pool_worker *workers = NULL;
    uint32_t *trips = NULL;
    int rc;

    if (count > NUMOE_POOL_MAX_WORKERS)
        return numoe_error_set(error, -EINVAL, "threads", "%u is more than %d", count,
                               NUMOE_POOL_MAX_WORKERS);
    if (options->lent_threads >= count)
        return numoe_error_set(error, -EINVAL, "lent_threads",
                               "%u of %u threads are to be lent; one is the caller's",
                               options->lent_threads, count);
    workers = list_workers(context, count);
    trips = list_trips(context, options->steal_trip_percent);
    if (!workers || !trips) {
        rc = numoe_error_set(error, -ENOMEM, "workers", "no memory for %u workers", count);
        goto out;
    }
    for (uint32_t d = 0; d < NUMOE_POOL_DISTANCES; d++)
        config.trip_ns[d] = config.trip_ns[d] * options->steal_trip_percent / 100;
    config.worker_count = count;
    config.lent_workers = context->lent_threads = options->lent_threads;
    config.workers = workers;
    config.thread_init = init_thread;
    config.thread_init_user = context;
    config.node_trip_ns = trips;
    config.node_count = context->plan->node_count;
    config.pin_caller = options->pin_caller && !context->described;
    config.spin_ns = context->spin_ns = options->spin_ns;
    config.chaos_seed = options->chaos_seed;
    config.log = &context->log;
    config.timed = context->timed;
    if (context->trace) {
        config.observe = numoe_trace_pool_event;
        config.observe_user = context->trace;
    }
    rc = numoe_pool_create(&config, &context->pool, error);
out:
    free(trips);
    free(workers);
    return rc;
}

static uint32_t lent_worker(const struct numoe *context, uint32_t index)
{
    return numoe_pool_worker_count(context->pool) - context->lent_threads + index;
}

int numoe_lend(struct numoe *context, uint32_t index)
{
    if (!context || index >= context->lent_threads)
        return -EINVAL;
    return numoe_pool_lend(context->pool, lent_worker(context, index));
}

int numoe_recall(struct numoe *context, uint32_t index)
{
    if (!context || index >= context->lent_threads)
        return -EINVAL;
    return numoe_pool_recall(context->pool, lent_worker(context, index));
}
