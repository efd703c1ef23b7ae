/* What workers cost while there is nothing to do, and what the first call after that takes.
 * SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include "base/clock.h"

#include <time.h>

enum { CALLS = 200, GAP_MS = 5, SETTLE_MS = 100 };

static double cpu_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

    nanosleep(&t, NULL);
}

static void do_nothing(void *context, uint32_t item, uint32_t worker)
{
    (void)context, (void)item, (void)worker;
}

static double call_us(struct numoe_pool *pool, const struct numoe_pool_job *job)
{
    uint64_t begin = numoe_now_ns();

    numoe_pool_run(pool, job);
    return 1e-3 * (double)(numoe_now_ns() - begin);
}

void numoe_bench_idle(struct numoe *context, double seconds, struct numoe_bench_idle *idle)
{
    struct numoe_pool *pool = numoe_context_pool(context);
    const uint64_t spin_ns = numoe_context_spin_ns(context);
    const struct numoe_pool_job job = {
        .phase_count = 1, .phases = {{.run = do_nothing, .items = numoe_pool_worker_count(pool)}}};
    double first[CALLS], warm[CALLS], cpu;

    numoe_pool_run(pool, &job);
    sleep_ns(spin_ns + SETTLE_MS * 1000000u);
    cpu = cpu_seconds();
    sleep_ns((uint64_t)(seconds * 1e9));
    idle->cpu_s = cpu_seconds() - cpu;
    idle->seconds = seconds;
    for (int i = 0; i < CALLS; i++) {
        sleep_ns(spin_ns + GAP_MS * 1000000u);
        first[i] = call_us(pool, &job);
    }
    for (int i = 0; i < CALLS; i++)
        warm[i] = call_us(pool, &job);
    idle->calls = CALLS;
    idle->first_us_p50 = numoe_bench_quantile(first, CALLS, 0.5);
    idle->first_us_p99 = numoe_bench_quantile(first, CALLS, 0.99);
    idle->warm_us_p50 = numoe_bench_quantile(warm, CALLS, 0.5);
    idle->warm_us_p99 = numoe_bench_quantile(warm, CALLS, 0.99);
}
