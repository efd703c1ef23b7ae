/* One layer timed beside the ceilings. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "bench.h"
#include "bf16.h"

enum { MOST_TURNS = 7 };
#define FEWEST_REPETITIONS 7.0
#define MOST_REPETITIONS 2000.0

struct cell_work {
    struct numoe_model *model;
    const struct numoe_bench_request *request;
    uint64_t hidden, top_k, experts;
    struct numoe_bench_random random;
    struct numoe_bench_router *router;
    uint16_t *x;
    int32_t *ids;
    float *weights, *out;
    uint32_t workers;
    uint64_t *busy_ns; /* [workers] within the measured calls, [workers] when one began */
    double imbalance;  /* of the last measured call */
};

void numoe_bench_activations(struct numoe_bench_random *random, uint16_t *x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i += 2) {
        float radius = sqrtf(-2 * logf(numoe_bench_random_float(random)));
        float angle = 6.2831853f * numoe_bench_random_float(random);

        x[i] = numoe_float_to_bf16(radius * cosf(angle));
        if (i + 1 < count)
            x[i + 1] = numoe_float_to_bf16(radius * sinf(angle));
    }
}

/* One repetition with fresh routing. */
static int repeat_once(struct cell_work *work, struct numoe_result *result, double *seconds,
                       struct numoe_error *error)
{
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    double begin;
    int rc;

    numoe_bench_router_route(work->router, &work->random, work->request->tokens,
                             work->request->top_k, work->ids, work->weights);
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

static uint64_t busy_ns(const struct cell_work *work, uint32_t worker)
{
    struct numoe_worker_stats stats = NUMOE_WORKER_STATS_INIT;

    numoe_stats_worker(numoe_model_context(work->model), worker, &stats);
    return stats.work.busy_ns;
}

/* The same with what workers are busy counted: they do other things between the calls. */
static int measure_once(struct cell_work *work, struct numoe_result *result, double *seconds,
                        struct numoe_error *error)
{
    uint64_t sum = 0, most = 0;
    int rc;

    for (uint32_t w = 0; w < work->workers; w++)
        work->busy_ns[work->workers + w] = busy_ns(work, w);
    rc = repeat_once(work, result, seconds, error);
    for (uint32_t w = 0; w < work->workers; w++) {
        const uint64_t busy = busy_ns(work, w) - work->busy_ns[work->workers + w];

        work->busy_ns[w] += busy;
        sum += busy;
        most = busy > most ? busy : most;
    }
    work->imbalance = sum ? (double)most * work->workers / (double)sum : NAN;
    return rc;
}

static void compare_workers(const struct cell_work *work, double seconds,
                            struct numoe_bench_cell *cell)
{
    uint64_t sum = 0, most = 0;

    for (uint32_t w = 0; w < work->workers; w++) {
        sum += work->busy_ns[w];
        most = work->busy_ns[w] > most ? work->busy_ns[w] : most;
    }
    if (sum == 0) /* not timed */
        return;
    cell->busy_fraction = (double)sum * 1e-9 / work->workers / seconds;
    cell->busy_imbalance = (double)most * work->workers / (double)sum;
}

/* The measuring itself: turns of repetitions between ceilings. */
static int measure(struct numoe_bench *bench, struct cell_work *work, enum numoe_ceiling peak,
                   double ops_per_pair, uint32_t repetitions, struct numoe_bench_cell *cell,
                   struct numoe_error *error)
{
    double reads[MOST_TURNS], peaks[MOST_TURNS], of_read[MOST_TURNS], of_peak[MOST_TURNS];
    uint32_t turns = repetitions < MOST_TURNS ? repetitions : MOST_TURNS, done = 0;
    double *ms = calloc(repetitions, 6 * sizeof *ms);
    double *gbs, *gops, *turn_gbs, *turn_gops, *imbalance;
    struct ceilings before, after;
    double sum = 0;
    int rc = 0;

    if (!ms)
        return numoe_error_set(error, -ENOMEM, "bench", "no room for %" PRIu32 " timings",
                               repetitions);
    gbs = ms + repetitions;
    gops = gbs + repetitions;
    turn_gbs = gops + repetitions;
    turn_gops = turn_gbs + repetitions;
    imbalance = turn_gops + repetitions;
    before = measure_ceilings(bench, peak);
    for (uint32_t turn = 0; turn < turns; turn++) {
        uint32_t end = (uint32_t)((uint64_t)repetitions * (turn + 1) / turns), begin = done;

        for (; done < end; done++) {
            struct numoe_result result;
            double seconds;

            rc = measure_once(work, &result, &seconds, error);
            if (rc)
                goto out;
            sum += seconds;
            ms[done] = seconds * 1e3;
            imbalance[done] = work->imbalance;
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
    compare_workers(work, sum, cell);
    cell->busy_imbalance_call =
        isnan(cell->busy_imbalance) ? NAN : numoe_bench_quantile(imbalance, repetitions, 0.5);
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

/* As many repetitions as are asked for, else by how long one takes. */
static int take_time(struct numoe_bench *bench, struct cell_work *work,
                     const struct numoe_model_desc *desc, struct numoe_bench_cell *cell,
                     struct numoe_error *error)
{
    enum numoe_ceiling peak = desc->arithmetic == NUMOE_FAST || desc->arithmetic == NUMOE_FINE
                                  ? NUMOE_CEILING_INT8
                                  : NUMOE_CEILING_EXACT;
    /* two int8 products for each weight of the fine mode */
    const double ops = (desc->arithmetic == NUMOE_FINE ? 12 : 6) * (double)desc->hidden *
                       (double)desc->intermediate;
    uint32_t repetitions = work->request->repeat;

    if (!repetitions) {
        struct numoe_result result;
        double seconds;
        int rc = repeat_once(work, &result, &seconds, error);

        if (rc)
            return rc;
        seconds = work->request->seconds / (seconds > 1e-6 ? seconds : 1e-6);
        repetitions = (uint32_t)fmax(FEWEST_REPETITIONS, fmin(MOST_REPETITIONS, seconds));
    }
    return measure(bench, work, peak, ops, repetitions, cell, error);
}

/* The only time of a layer that is computed once. */
static void take_once(const struct numoe_result *result, double seconds,
                      struct numoe_bench_cell *cell)
{
    cell->repetitions = 1;
    cell->ms = cell->ms_min = cell->ms_p10 = cell->ms_p90 = seconds * 1e3;
    cell->bytes = (double)result->expert_bytes;
    cell->experts_hit = (double)result->experts_hit;
    cell->pairs = (double)result->pairs;
    cell->gbs = cell->bytes / seconds * 1e-9;
    cell->gops = cell->read_gbs = cell->peak_gops = NAN;
    cell->bandwidth_fraction = cell->ops_fraction = NAN;
}

int numoe_bench_room(uint64_t tokens, uint64_t hidden, uint64_t entries, struct numoe_error *error)
{
    const uint64_t room = numoe_memory_room();
    const double bytes = (double)tokens * (double)hidden * (sizeof(uint16_t) + sizeof(float)) +
                         (double)entries * (sizeof(int32_t) + sizeof(float));

    if (bytes <= (double)room)
        return 0;
    return numoe_error_set(error, -ENOMEM, NULL,
                           "inputs and outputs of %" PRIu64 " tokens take %.2f GB, and %.2f GB of "
                           "memory are left",
                           tokens, bytes * 1e-9, (double)room * 1e-9);
}

int numoe_bench_layer(struct numoe_bench *bench, struct numoe_model *model,
                      const struct numoe_bench_request *request, struct numoe_bench_cell *cell,
                      struct numoe_error *error)
{
    struct numoe_model_info info = {.size = sizeof info};
    struct cell_work work = {.model = model, .request = request, .top_k = request->top_k};
    uint64_t tokens = request->tokens, elements, entries, checked = request->check_tokens;
    struct numoe_result result;
    double seconds;
    int rc;

    *cell = (struct numoe_bench_cell){.layer = request->layer,
                                      .tokens = tokens,
                                      .rel_l2 = NAN,
                                      .busy_fraction = NAN,
                                      .busy_imbalance = NAN,
                                      .busy_imbalance_call = NAN};
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
    rc = numoe_bench_room(tokens, work.hidden, entries, error);
    if (rc)
        return rc;

    work.router = numoe_bench_router_create(request->routing, work.experts, &work.random);
    work.x = malloc(elements * sizeof *work.x);
    work.out = malloc(elements * sizeof *work.out);
    work.ids = malloc(entries * sizeof *work.ids);
    work.weights = malloc(entries * sizeof *work.weights);
    work.workers = info.worker_count;
    work.busy_ns = calloc(2 * (size_t)work.workers, sizeof *work.busy_ns);
    if (work.router)
        work.top_k = numoe_bench_router_top_k(work.router, request->top_k);
    if (!work.router || !work.x || !work.out || !work.ids || !work.weights || !work.busy_ns) {
        rc = numoe_error_set(error, -ENOMEM, "bench", "no room for %" PRIu64 " tokens", tokens);
        goto out;
    }
    numoe_bench_activations(&work.random, work.x, elements);

    /* The first repetition grows the workspace. */
    rc = repeat_once(&work, &result, &seconds, error);
    if (rc)
        goto out;
    cell->digest =
        numoe_bench_digest(NUMOE_BENCH_DIGEST_INIT, work.out, elements * sizeof *work.out);
    if (bench)
        rc = take_time(bench, &work, &info.desc, cell, error);
    else
        take_once(&result, seconds, cell);
    if (!rc && checked) {
        struct numoe_bench_outputs outputs = {.layer = request->layer,
                                              .tokens = tokens,
                                              .top_k = work.top_k,
                                              .x = work.x,
                                              .ids = work.ids,
                                              .weights = work.weights,
                                              .out = work.out};

        rc = numoe_bench_check(model, &outputs, checked, &cell->rel_l2, error);
    }
out:
    numoe_bench_router_destroy(work.router);
    free(work.x);
    free(work.out);
    free(work.ids);
    free(work.weights);
    free(work.busy_ns);
    return rc;
}
