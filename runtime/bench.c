/* Clock, order statistics, random routing, and the ceilings of the machine.
 * SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include "base/checked.h"
#include "base/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* So that a worker that is held up leaves work for others. */
enum { CHUNKS_PER_WORKER = 8 };

#define HUGE_PAGE ((uint64_t)2 << 20)
#define READ_BYTES_PER_WORKER ((uint64_t)64 << 20)
#define READ_BYTES_LEAST ((uint64_t)1 << 30)
/* A worker runs each arithmetic loop about so long. */
#define LOOP_SECONDS 0.025

struct numoe_bench {
    struct numoe_pool *pool;
    const char *isa;
    uint32_t chunks;
    uint8_t *buffer;
    uint64_t buffer_bytes, chunk_bytes;
    uint64_t iterations[NUMOE_CEILING_EXACT + 1]; /* a chunk; 0: no such loop */
    uint64_t *work;                               /* done by each chunk */
    enum numoe_ceiling ceiling;                   /* being measured */
};

double numoe_bench_seconds(void)
{
    return (double)numoe_now_ns() * 1e-9;
}

uint64_t numoe_bench_digest(uint64_t digest, const void *bytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        digest = (digest ^ ((const uint8_t *)bytes)[i]) * UINT64_C(1099511628211);
    return digest;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double numoe_bench_quantile(double *values, size_t count, double q)
{
    double place;
    size_t below;

    if (!count)
        return NAN;
    qsort(values, count, sizeof *values, compare_doubles);
    place = q * (double)(count - 1);
    below = (size_t)place;
    if (below + 1 >= count)
        return values[count - 1];
    return values[below] + (place - (double)below) * (values[below + 1] - values[below]);
}

/* splitmix64: a counter through a bijective mixer. */
uint64_t numoe_bench_random(struct numoe_bench_random *random)
{
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

float numoe_bench_random_float(struct numoe_bench_random *random)
{
    return (float)((numoe_bench_random(random) >> 40) + 1) * 0x1p-24f;
}

void numoe_bench_route(struct numoe_bench_random *random, uint64_t tokens, uint64_t top_k,
                       uint64_t experts, int32_t *ids, float *weights)
{
    for (uint64_t t = 0; t < tokens; t++, ids += top_k, weights += top_k) {
        float sum = 0;

        for (uint64_t j = 0; j < top_k; j++) {
            uint64_t seen;

            do {
                ids[j] = (int32_t)(numoe_bench_random(random) % experts);
                for (seen = 0; ids[seen] != ids[j]; seen++)
                    ;
            } while (seen < j);
            weights[j] = numoe_bench_random_float(random);
            sum += weights[j];
        }
        for (uint64_t j = 0; j < top_k; j++)
            weights[j] /= sum;
    }
}

/* ---- ceilings ---- */

static void touch_chunk(void *context, uint32_t item, uint32_t worker)
{
    struct numoe_bench *bench = context;

    (void)worker;
    memset(bench->buffer + item * bench->chunk_bytes, 1 + (int)(item & 63), bench->chunk_bytes);
}

static void ceiling_chunk(void *context, uint32_t item, uint32_t worker)
{
    struct numoe_bench *bench = context;
    const uint8_t *chunk = bench->buffer + item * bench->chunk_bytes;
    uint64_t amount = bench->ceiling == NUMOE_CEILING_READ ? bench->chunk_bytes
                                                           : bench->iterations[bench->ceiling];

    (void)worker;
    bench->work[item] += numoe_ceiling_run(bench->ceiling, bench->isa, chunk, amount);
}

/* Iterations that one worker needs for its share of LOOP_SECONDS in one chunk. */
static uint64_t calibrate(const char *isa, enum numoe_ceiling ceiling)
{
    uint64_t iterations = 1000;

    for (;;) {
        double begin = numoe_bench_seconds(), took;

        if (!numoe_ceiling_run(ceiling, isa, NULL, iterations))
            return 0;
        took = numoe_bench_seconds() - begin;
        if (took > 1e-3 || iterations > UINT64_MAX / 8)
            return 1 + (uint64_t)((double)iterations * LOOP_SECONDS / took) / CHUNKS_PER_WORKER;
        iterations *= 4;
    }
}

/* Dense index of the node whose memory a thread on this CPU touches; NUMOE_NONE: not known. */
static uint32_t node_of_cpu(const struct numoe_machine *machine, uint32_t os_cpu)
{
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].os_index == os_cpu)
            return machine->pus[i].node;
    return NUMOE_NONE;
}

uint64_t numoe_bench_budget(const struct numoe_machine *machine, const struct numoe_plan *plan)
{
    uint32_t workers = plan ? plan->worker_count : 0;
    uint32_t *here = calloc(machine->node_count, sizeof *here);
    uint64_t bytes = 0;

    for (uint32_t w = 0; here && w < workers; w++) {
        uint32_t node = node_of_cpu(machine, plan->workers[w].os_cpu);

        if (node != NUMOE_NONE)
            here[node]++;
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        if (machine->nodes[i].allowed)
            bytes += machine->nodes[i].free_bytes;
    }
    for (uint32_t i = 0; here && i < machine->node_count; i++) {
        uint64_t most;

        if (here[i] && numoe_mul_u64(machine->nodes[i].free_bytes / here[i], workers, &most) &&
            most < bytes)
            bytes = most;
    }
    free(here);
    if (bytes > machine->cgroup_bytes)
        bytes = machine->cgroup_bytes;
    return bytes / 4;
}

/* What the buffer may take now. */
static uint64_t buffer_budget(const struct numoe *context)
{
    struct numoe_machine *machine;
    uint64_t bytes;

    if (numoe_machine_load(NULL, &machine, NULL))
        return READ_BYTES_LEAST;
    bytes = numoe_bench_budget(machine, numoe_context_workers(context));
    numoe_machine_free(machine);
    return bytes;
}

int numoe_bench_create(struct numoe *context, const char *isa, struct numoe_bench **out,
                       struct numoe_error *error)
{
    struct numoe_pool *pool = numoe_context_pool(context);
    const struct numoe_kernels *kernels = numoe_kernels_select(NUMOE_FAST, isa, error);
    uint64_t workers = numoe_pool_worker_count(pool), bytes, budget = buffer_budget(context);
    struct numoe_pool_job job = {.phase_count = 1, .phases = {{.run = touch_chunk}}};
    struct numoe_bench *bench;
    void *buffer;
    int rc;

    if (!kernels)
        return error ? error->code : -EINVAL;
    bench = calloc(1, sizeof *bench);
    if (!bench)
        return numoe_error_set(error, -ENOMEM, "bench", "out of memory");
    bench->pool = pool;
    bench->isa = kernels->isa;
    bench->chunks = (uint32_t)workers * CHUNKS_PER_WORKER;
    bench->work = calloc(bench->chunks, sizeof *bench->work);
    if (!bench->work) {
        rc = numoe_error_set(error, -ENOMEM, "bench", "out of memory");
        goto free_bench;
    }

    bytes = workers * READ_BYTES_PER_WORKER;
    if (bytes < READ_BYTES_LEAST)
        bytes = READ_BYTES_LEAST;
    if (bytes > budget)
        bytes = budget;
    bench->chunk_bytes = bytes / bench->chunks / HUGE_PAGE * HUGE_PAGE;
    if (!bench->chunk_bytes)
        bench->chunk_bytes = HUGE_PAGE;
    bench->buffer_bytes = bench->chunk_bytes * bench->chunks;
    buffer = mmap(NULL, bench->buffer_bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (buffer == MAP_FAILED) {
        rc = numoe_error_set(error, -ENOMEM, "read bandwidth",
                             "no room for the %" PRIu64 " MiB that measuring it reads",
                             bench->buffer_bytes >> 20);
        goto free_work;
    }
    bench->buffer = (uint8_t *)(((uintptr_t)buffer + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    /* What lies before and after the aligned part is given back, so that one munmap frees it. */
    if (bench->buffer > (uint8_t *)buffer)
        munmap(buffer, (size_t)(bench->buffer - (uint8_t *)buffer));
    munmap(bench->buffer + bench->buffer_bytes,
           (size_t)((uint8_t *)buffer + HUGE_PAGE - bench->buffer));
    madvise(bench->buffer, bench->buffer_bytes, MADV_HUGEPAGE);

    job.context = bench;
    job.phases[0].items = bench->chunks;
    rc = numoe_pool_run(pool, &job);
    if (rc) {
        numoe_error_set(error, rc, "bench", "the workers took no job: %s", strerror(-rc));
        goto free_buffer;
    }
    bench->iterations[NUMOE_CEILING_INT8] = calibrate(bench->isa, NUMOE_CEILING_INT8);
    bench->iterations[NUMOE_CEILING_EXACT] = calibrate(bench->isa, NUMOE_CEILING_EXACT);
    *out = bench;
    return 0;
free_buffer:
    munmap(bench->buffer, bench->buffer_bytes);
free_work:
    free(bench->work);
free_bench:
    free(bench);
    return rc;
}

void numoe_bench_destroy(struct numoe_bench *bench)
{
    if (!bench)
        return;
    munmap(bench->buffer, bench->buffer_bytes);
    free(bench->work);
    free(bench);
}

uint64_t numoe_bench_buffer_bytes(const struct numoe_bench *bench)
{
    return bench->buffer_bytes;
}

double numoe_bench_ceiling(struct numoe_bench *bench, enum numoe_ceiling ceiling)
{
    /* Two passes over the buffer; the second begins as soon as the first is done. */
    struct numoe_pool_job job = {.context = bench,
                                 .phase_count = ceiling == NUMOE_CEILING_READ ? 2 : 1,
                                 .phases = {{.run = ceiling_chunk, .items = bench->chunks},
                                            {.run = ceiling_chunk, .items = bench->chunks}}};
    double begin, took, work = 0;

    if (ceiling != NUMOE_CEILING_READ && !bench->iterations[ceiling])
        return 0;
    bench->ceiling = ceiling;
    memset(bench->work, 0, bench->chunks * sizeof *bench->work);
    begin = numoe_bench_seconds();
    if (numoe_pool_run(bench->pool, &job))
        return 0;
    took = numoe_bench_seconds() - begin;
    for (uint32_t i = 0; i < bench->chunks; i++)
        work += (double)bench->work[i];
    return took > 0 ? work / took * 1e-9 : 0;
}
