/* Timing layers beside the ceilings of the machine. SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include "base/checked.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    CHUNKS_PER_WORKER = 8, /* so that a worker that is held up leaves work for others */
    MOST_TURNS = 7,
    FEWEST_REPETITIONS = 7,
    MOST_REPETITIONS = 2000
};

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
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
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

/* Uniform in (0, 1]. */
static float random_float(struct numoe_bench_random *random)
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
            weights[j] = random_float(random);
            sum += weights[j];
        }
        for (uint64_t j = 0; j < top_k; j++)
            weights[j] /= sum;
    }
}

/* ---- ceilings ---------------------------------------------------------------------------------
 */

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
            return 1 + (uint64_t)((double)iterations * (LOOP_SECONDS / CHUNKS_PER_WORKER) / took);
        iterations *= 4;
    }
}

/* What the buffer may take: a quarter of what is free on the nodes and in the cgroup. */
static uint64_t buffer_budget(void)
{
    struct numoe_machine *machine;
    uint64_t free_bytes = 0;

    if (numoe_machine_load(NULL, &machine, NULL))
        return READ_BYTES_LEAST;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        if (machine->nodes[i].allowed)
            free_bytes += machine->nodes[i].free_bytes;
    }
    if (free_bytes > machine->cgroup_bytes)
        free_bytes = machine->cgroup_bytes;
    numoe_machine_free(machine);
    return free_bytes / 4;
}

int numoe_bench_create(struct numoe *context, const char *isa, struct numoe_bench **out,
                       struct numoe_error *error)
{
    struct numoe_pool *pool = numoe_context_pool(context);
    const struct numoe_kernels *kernels = numoe_kernels_select(NUMOE_FAST, isa, error);
    uint64_t workers = numoe_pool_worker_count(pool), bytes, budget = buffer_budget();
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
        rc = numoe_error_set(error, -ENOMEM, "bench", "no room for %" PRIu64 " MiB to read",
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
    struct numoe_pool_job job = {
        .context = bench,
        .phase_count = ceiling == NUMOE_CEILING_READ ? 2 : 1,
        .phases = {{ceiling_chunk, bench->chunks, NULL}, {ceiling_chunk, bench->chunks, NULL}}};
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

/* ---- random weights ---------------------------------------------------------------------------
 */

struct fill {
    struct numoe_model *model;
    struct numoe_model_desc desc;
    const struct numoe_plan *plan;
    uint64_t seed, first; /* expert, counted over all layers, of item 0 */
    uint64_t codes[3], scales[3], biases, worker_bytes; /* offsets in a worker's buffer */
    uint8_t *buffers;
    int *results; /* of the items */
    bool *extreme;
};

static void random_bytes(struct numoe_bench_random *random, uint8_t *bytes, uint64_t count)
{
    uint64_t i, word;

    for (i = 0; i + 8 <= count; i += 8) {
        word = numoe_bench_random(random);
        memcpy(bytes + i, &word, 8);
    }
    if (i < count) {
        word = numoe_bench_random(random);
        memcpy(bytes + i, &word, count - i);
    }
}

/*
 * The root mean square of uniform codes is 2.93, so a row over `width` columns gives 1.2 to 1.7
 * times the input's own when its scales are 2^(base - 127) times 1/4, 1/2, 1, 2.
 */
static unsigned scale_base(uint64_t width)
{
    return (unsigned)(128 - lrint(log2(2.93 * sqrt((double)width))));
}

static void random_scales(struct numoe_bench_random *random, uint8_t *scales, uint64_t count,
                          uint64_t width)
{
    unsigned base = scale_base(width) - 2;

    random_bytes(random, scales, count);
    for (uint64_t i = 0; i < count; i++)
        scales[i] = (uint8_t)(base + (scales[i] & 3));
}

static void random_biases(struct numoe_bench_random *random, float *biases, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        biases[i] = random_float(random) - 0.5f;
}

static void fill_expert(void *context, uint32_t item, uint32_t worker)
{
    struct fill *fill = context;
    const struct numoe_model_desc *desc = &fill->desc;
    uint64_t index = fill->first + item,
             width[3] = {desc->hidden, desc->hidden, desc->intermediate};
    uint64_t rows[3] = {desc->intermediate, desc->intermediate, desc->hidden};
    struct numoe_bench_random random = {fill->seed ^ index * 0xD1342543DE82EF95u};
    uint8_t *buffer = fill->buffers + worker * fill->worker_bytes;
    struct numoe_expert_source source = {.hidden = desc->hidden,
                                         .intermediate = desc->intermediate};
    struct numoe_mxfp4 *matrices[3] = {&source.gate, &source.up, &source.down};
    float *biases = (float *)(void *)(buffer + fill->biases);
    struct numoe_pack_report report = {0};
    int rc = 0;

    for (int m = 0; m < 3; m++) {
        uint64_t groups = (width[m] + NUMOE_TILE - 1) / NUMOE_TILE;

        *matrices[m] = (struct numoe_mxfp4){.codes = buffer + fill->codes[m],
                                            .scales = buffer + fill->scales[m],
                                            .code_stride = groups * 16,
                                            .scale_stride = groups,
                                            .code_step = 16,
                                            .scale_step = 1,
                                            .nibbles = NUMOE_NIBBLES_ADJACENT};
        random_bytes(&random, buffer + fill->codes[m], rows[m] * groups * 16);
        random_scales(&random, buffer + fill->scales[m], rows[m] * groups, width[m]);
    }
    if (desc->bias) {
        random_biases(&random, biases, 2 * desc->intermediate + desc->hidden);
        source.gate_bias = biases;
        source.up_bias = biases + desc->intermediate;
        source.bias_step = 1;
    }
    for (uint32_t n = 0; n < fill->plan->node_count && !rc; n++)
        rc = numoe_model_store(fill->model, index / desc->experts, index % desc->experts, n,
                               &source, &report);
    if (!rc && desc->bias)
        numoe_model_store_down_bias(fill->model, index / desc->experts, index % desc->experts,
                                    biases + 2 * desc->intermediate);
    fill->results[item] = rc;
    fill->extreme[item] = report.extreme_scales;
}

/* Offsets of one expert in checkpoint order; false when they overflow. */
static bool fill_layout(struct fill *fill)
{
    const struct numoe_model_desc *desc = &fill->desc;
    uint64_t rows[3] = {desc->intermediate, desc->intermediate, desc->hidden};
    uint64_t width[3] = {desc->hidden, desc->hidden, desc->intermediate}, end = 0, codes, scales;

    for (int m = 0; m < 3; m++) {
        if (!numoe_mul_u64(rows[m], width[m] / NUMOE_TILE + 1, &scales) ||
            !numoe_mul_u64(scales, 16, &codes))
            return false;
        fill->codes[m] = end;
        if (!numoe_add_u64(end, codes, &end) || !numoe_round_up_u64(end, 64, &end))
            return false;
        fill->scales[m] = end;
        if (!numoe_add_u64(end, scales, &end) || !numoe_round_up_u64(end, 64, &end))
            return false;
    }
    fill->biases = end;
    if (desc->bias && (!numoe_mul_u64(desc->intermediate, 8, &codes) ||
                       !numoe_mul_u64(desc->hidden, 4, &scales) ||
                       !numoe_add_u64(end, codes, &end) || !numoe_add_u64(end, scales, &end)))
        return false;
    return numoe_round_up_u64(end, 4096, &fill->worker_bytes);
}

int numoe_bench_fill(struct numoe_model *model, uint64_t seed,
                     void (*progress)(uint64_t done, uint64_t total), struct numoe_error *error)
{
    struct numoe_pool *pool = numoe_context_pool(numoe_model_context(model));
    uint32_t workers = numoe_pool_worker_count(pool), batch = workers * 4;
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_pool_job job = {.phase_count = 1, .phases = {{.run = fill_expert}}};
    struct fill fill = {.model = model, .plan = numoe_model_plan(model), .seed = seed};
    uint64_t total, bytes;
    int rc;

    rc = numoe_model_info(model, &info);
    if (rc)
        return numoe_error_set(error, rc, "bench", "the model does not describe itself");
    fill.desc = info.desc;
    total = info.desc.layers * info.desc.experts;
    if (!fill_layout(&fill) || !numoe_mul_u64(fill.worker_bytes, workers, &bytes))
        return numoe_error_set(error, -EOVERFLOW, "bench", "an expert's size overflows");
    fill.buffers = aligned_alloc(4096, bytes);
    fill.results = calloc(batch, sizeof *fill.results);
    fill.extreme = calloc(batch, sizeof *fill.extreme);
    if (!fill.buffers || !fill.results || !fill.extreme) {
        rc = numoe_error_set(error, -ENOMEM, "bench", "no room for an expert for each worker");
        goto out;
    }
    for (; fill.first < total; fill.first += job.phases[0].items) {
        job.context = &fill;
        job.phases[0].items = (uint32_t)(total - fill.first < batch ? total - fill.first : batch);
        rc = numoe_pool_run(pool, &job);
        for (uint32_t i = 0; i < job.phases[0].items && !rc; i++) {
            uint64_t index = fill.first + i;

            rc = fill.results[i];
            if (!rc)
                numoe_model_mark(model, index / info.desc.experts, index % info.desc.experts, true,
                                 fill.extreme[i]);
        }
        if (rc) {
            numoe_error_set(error, rc, "bench", "random weights could not be stored: %s",
                            strerror(-rc));
            goto out;
        }
        if (progress)
            progress(fill.first + job.phases[0].items, total);
    }
out:
    free(fill.buffers);
    free(fill.results);
    free(fill.extreme);
    return rc;
}

/* ---- the check against float64 ----------------------------------------------------------------
 */

struct check {
    const struct numoe_model *model;
    const struct numoe_model_desc *desc;
    const struct numoe_plan *plan;
    uint64_t layer, top_k;
    const uint16_t *x; /* of the whole batch */
    const int32_t *ids;
    const float *weights;
    const uint64_t *tokens; /* checked */
    float *inputs;          /* [checked, hidden] */
    double *parts;          /* [checked, top_k, nodes, hidden] */
};

static void check_part(void *context, uint32_t item, uint32_t worker)
{
    const struct check *check = context;
    uint32_t node = item % check->plan->node_count;
    uint64_t pair = item / check->plan->node_count, hidden = check->desc->hidden;
    uint64_t entry = check->tokens[pair / check->top_k] * check->top_k + pair % check->top_k;
    uint64_t expert = (uint64_t)check->ids[entry], first, count;
    const void *run = numoe_model_run(check->model, check->layer, expert, node, &first, &count);

    (void)worker;
    if (!count)
        return;
    numoe_reference_slices(
        numoe_model_shape(check->model), &check->desc->activation, run, count,
        check->inputs + pair / check->top_k * hidden, (double)check->weights[entry],
        first == 0 ? numoe_model_down_bias(check->model, check->layer, expert) : NULL, false,
        check->parts + item * hidden);
}

static float from_bf16(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &word, sizeof value);
    return value;
}

static uint16_t to_bf16(float value)
{
    uint32_t word;

    memcpy(&word, &value, sizeof word);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

/* Relative L2 distance of out to the reference over `count` tokens spread over the batch. */
static int check_tokens(struct numoe_pool *pool, struct check *check, uint64_t batch,
                        const float *out, uint64_t count, double *rel_l2, struct numoe_error *error)
{
    uint64_t hidden = check->desc->hidden, parts = check->top_k * check->plan->node_count;
    struct numoe_pool_job job = {
        .context = check,
        .phase_count = 1,
        .phases = {{check_part, (uint32_t)(count * parts), NULL}},
    };
    uint64_t *tokens = calloc(count, sizeof *tokens);
    double difference = 0, size = 0;
    int rc = -ENOMEM;

    check->tokens = tokens;
    check->inputs = calloc(count * hidden, sizeof *check->inputs);
    check->parts = calloc(count * parts * hidden, sizeof *check->parts);
    if (!tokens || !check->inputs || !check->parts) {
        numoe_error_set(error, rc, "check", "no room for the reference's results");
        goto out;
    }
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = count > 1 ? i * (batch - 1) / (count - 1) : 0;
        for (uint64_t h = 0; h < hidden; h++)
            check->inputs[i * hidden + h] = from_bf16(check->x[tokens[i] * hidden + h]);
    }
    rc = numoe_pool_run(pool, &job);
    if (rc) {
        numoe_error_set(error, rc, "check", "the workers took no job: %s", strerror(-rc));
        goto out;
    }
    for (uint64_t i = 0; i < count; i++) {
        for (uint64_t h = 0; h < hidden; h++) {
            double want = 0, off;

            for (uint64_t p = 0; p < parts; p++)
                want += check->parts[(i * parts + p) * hidden + h];
            off = (double)out[tokens[i] * hidden + h] - want;
            difference += off * off;
            size += want * want;
        }
    }
    *rel_l2 = size > 0 ? sqrt(difference / size) : difference > 0 ? INFINITY : 0;
    /* A result that is no number is as wrong as can be. */
    if (!isfinite(*rel_l2))
        *rel_l2 = INFINITY;
out:
    free(tokens);
    free(check->inputs);
    free(check->parts);
    return rc;
}

/* ---- one cell ---------------------------------------------------------------------------------
 */

struct cell_work {
    struct numoe_model *model;
    const struct numoe_bench_request *request;
    uint64_t hidden, top_k, experts;
    struct numoe_bench_random random;
    uint16_t *x;
    int32_t *ids;
    float *weights, *out;
};

static void random_activations(struct numoe_bench_random *random, uint16_t *x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i += 2) {
        float radius = sqrtf(-2 * logf(random_float(random)));
        float angle = 6.2831853f * random_float(random);

        x[i] = to_bf16(radius * cosf(angle));
        if (i + 1 < count)
            x[i + 1] = to_bf16(radius * sinf(angle));
    }
}

/* One repetition with fresh routing. */
static int repeat_once(struct cell_work *work, struct numoe_result *result, double *seconds,
                       struct numoe_error *error)
{
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    double begin;
    int rc;

    numoe_bench_route(&work->random, work->request->tokens, work->top_k, work->experts, work->ids,
                      work->weights);
    batch.tokens = work->request->tokens;
    batch.top_k = work->top_k;
    batch.x = work->x;
    batch.x_type = NUMOE_BF16;
    batch.ids = work->ids;
    batch.weights = work->weights;
    batch.out = work->out;
    batch.out_type = NUMOE_F32;
    batch.strict = true;
    *result = (struct numoe_result)NUMOE_RESULT_INIT;
    begin = numoe_bench_seconds();
    rc = numoe_forward(work->model, work->request->layer, &batch, result, error);
    *seconds = numoe_bench_seconds() - begin;
    if (!rc && result->missing)
        rc = numoe_error_set(error, -EIO, "bench", "%" PRIu64 " routed experts are not loaded",
                             result->missing);
    return rc;
}

struct ceilings {
    double read, peak;
};

static struct ceilings measure_ceilings(struct numoe_bench *bench, enum numoe_ceiling peak)
{
    struct ceilings now;

    now.read = numoe_bench_ceiling(bench, NUMOE_CEILING_READ);
    now.peak = numoe_bench_ceiling(bench, peak);
    return now;
}

/* The measuring itself: turns of repetitions between ceilings. */
static int measure(struct numoe_bench *bench, struct cell_work *work, enum numoe_ceiling peak,
                   double ops_per_pair, uint32_t repetitions, struct numoe_bench_cell *cell,
                   struct numoe_error *error)
{
    double reads[MOST_TURNS], peaks[MOST_TURNS], of_read[MOST_TURNS], of_peak[MOST_TURNS];
    uint32_t turns = repetitions < MOST_TURNS ? repetitions : MOST_TURNS, done = 0;
    double *ms = calloc(repetitions, 5 * sizeof *ms);
    double *gbs, *gops, *turn_gbs, *turn_gops;
    struct ceilings before, after;
    int rc = 0;

    if (!ms)
        return numoe_error_set(error, -ENOMEM, "bench", "no room for %" PRIu32 " timings",
                               repetitions);
    gbs = ms + repetitions;
    gops = gbs + repetitions;
    turn_gbs = gops + repetitions;
    turn_gops = turn_gbs + repetitions;
    before = measure_ceilings(bench, peak);
    for (uint32_t turn = 0; turn < turns; turn++) {
        uint32_t end = (uint32_t)((uint64_t)repetitions * (turn + 1) / turns), begin = done;

        for (; done < end; done++) {
            struct numoe_result result;
            double seconds;

            rc = repeat_once(work, &result, &seconds, error);
            if (rc)
                goto out;
            ms[done] = seconds * 1e3;
            gbs[done] = (double)result.expert_bytes / seconds * 1e-9;
            gops[done] = (double)result.pairs * ops_per_pair / seconds * 1e-9;
            cell->bytes += (double)result.expert_bytes / repetitions;
            cell->experts_hit += (double)result.experts_hit / repetitions;
            cell->pairs += (double)result.pairs / repetitions;
        }
        after = measure_ceilings(bench, peak);
        reads[turn] = (before.read + after.read) / 2;
        peaks[turn] = (before.peak + after.peak) / 2;
        memcpy(turn_gbs, gbs + begin, (done - begin) * sizeof *gbs);
        memcpy(turn_gops, gops + begin, (done - begin) * sizeof *gops);
        of_read[turn] = numoe_bench_quantile(turn_gbs, done - begin, 0.5) / reads[turn];
        of_peak[turn] = numoe_bench_quantile(turn_gops, done - begin, 0.5) / peaks[turn];
        before = after;
    }
    cell->repetitions = repetitions;
    cell->ms = numoe_bench_quantile(ms, repetitions, 0.5);
    cell->ms_min = numoe_bench_quantile(ms, repetitions, 0);
    cell->ms_p10 = numoe_bench_quantile(ms, repetitions, 0.1);
    cell->ms_p90 = numoe_bench_quantile(ms, repetitions, 0.9);
    cell->gbs = numoe_bench_quantile(gbs, repetitions, 0.5);
    cell->gops = numoe_bench_quantile(gops, repetitions, 0.5);
    cell->read_gbs = numoe_bench_quantile(reads, turns, 0.5);
    cell->peak_gops = numoe_bench_quantile(peaks, turns, 0.5);
    cell->bandwidth_fraction = cell->read_gbs > 0 ? numoe_bench_quantile(of_read, turns, 0.5) : NAN;
    cell->ops_fraction = cell->peak_gops > 0 ? numoe_bench_quantile(of_peak, turns, 0.5) : NAN;
out:
    free(ms);
    return rc;
}

int numoe_bench_layer(struct numoe_bench *bench, struct numoe_model *model,
                      const struct numoe_bench_request *request, struct numoe_bench_cell *cell,
                      struct numoe_error *error)
{
    struct numoe_model_info info = {.size = sizeof info};
    struct cell_work work = {.model = model, .request = request, .top_k = request->top_k};
    uint64_t tokens = request->tokens, elements, entries, checked = request->check_tokens;
    uint32_t repetitions = request->repeat;
    struct numoe_result result;
    enum numoe_ceiling peak;
    double seconds;
    int rc;

    *cell = (struct numoe_bench_cell){.layer = request->layer, .tokens = tokens, .rel_l2 = NAN};
    rc = numoe_model_info(model, &info);
    if (rc)
        return numoe_error_set(error, rc, "bench", "the model does not describe itself");
    work.hidden = info.desc.hidden;
    work.experts = info.desc.experts;
    work.random.state = request->seed;
    if (!tokens || !work.top_k || work.top_k > work.experts)
        return numoe_error_set(error, -EINVAL, "bench",
                               "%" PRIu64 " tokens with %" PRIu64 " of %" PRIu64
                               " experts cannot be routed",
                               tokens, work.top_k, work.experts);
    if (!numoe_mul_u64(tokens, work.hidden, &elements) || elements > SIZE_MAX / sizeof(float) ||
        !numoe_mul_u64(tokens, work.top_k, &entries) || entries > SIZE_MAX / sizeof(float))
        return numoe_error_set(error, -EOVERFLOW, "bench", "%" PRIu64 " tokens overflow", tokens);

    work.x = malloc(elements * sizeof *work.x);
    work.out = malloc(elements * sizeof *work.out);
    work.ids = malloc(entries * sizeof *work.ids);
    work.weights = malloc(entries * sizeof *work.weights);
    if (!work.x || !work.out || !work.ids || !work.weights) {
        rc = numoe_error_set(error, -ENOMEM, "bench", "no room for %" PRIu64 " tokens", tokens);
        goto out;
    }
    random_activations(&work.random, work.x, elements);

    /* The first repetition grows the workspace; the second tells how long one takes. */
    rc = repeat_once(&work, &result, &seconds, error);
    if (!rc && !repetitions) {
        rc = repeat_once(&work, &result, &seconds, error);
        seconds = request->seconds / (seconds > 1e-6 ? seconds : 1e-6);
        repetitions = seconds < FEWEST_REPETITIONS ? FEWEST_REPETITIONS
                      : seconds > MOST_REPETITIONS ? MOST_REPETITIONS
                                                   : (uint32_t)seconds;
    }
    if (rc)
        goto out;
    peak = info.desc.arithmetic == NUMOE_EXACT ? NUMOE_CEILING_EXACT : NUMOE_CEILING_INT8;
    rc = measure(bench, &work, peak, 6 * (double)info.desc.hidden * (double)info.desc.intermediate,
                 repetitions, cell, error);
    if (!rc && checked) {
        struct check check = {.model = model,
                              .desc = &info.desc,
                              .plan = numoe_model_plan(model),
                              .layer = request->layer,
                              .top_k = work.top_k,
                              .x = work.x,
                              .ids = work.ids,
                              .weights = work.weights};

        rc = check_tokens(bench->pool, &check, tokens, work.out,
                          checked < tokens ? checked : tokens, &cell->rel_l2, error);
    }
out:
    free(work.x);
    free(work.out);
    free(work.ids);
    free(work.weights);
    return rc;
}
