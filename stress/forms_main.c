/*
 * numoe-forms: up to how many tokens of an expert the few-token form is the faster one, for every
 * kernel set of this CPU (numoe_kernels.few_limit).
 *
 *     numoe-forms [ARITHMETIC]...
 *
 * All workers at once go through runs of slices of their own, far more than caches hold, for 1 to
 * MOST tokens of an expert: by few(), in as many calls as it needs, and by many(), in turns. Prints
 * for each count the time of a slice by few() and by many(), medians of ROUNDS, then the limit by
 * which all counts together take least.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/clock.h"
#include "bench.h"
#include "cli_output.h"
#include "model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HIDDEN = 4096, RUN = 32, RUNS = 6, MOST = 12, ROUNDS = 7 };

static const struct numoe_activation activation = {.kind = NUMOE_SILU};

/* A worker's own memory and time. */
struct seat {
    uint8_t *slices, *records, *rows, *scratch;
    uint64_t ns;
} __attribute__((aligned(64)));

struct trial {
    const struct numoe_kernels *kernels;
    struct numoe_slice_shape shape;
    struct seat *seats;
    unsigned tokens;
    bool many;
};

static void compute(const struct trial *trial, const struct seat *seat, const void *slices)
{
    const struct numoe_kernels *k = trial->kernels;
    const unsigned most = trial->many ? k->many_tokens : k->few_tokens;
    const size_t record = k->record_bytes(&trial->shape);
    const void *x[MOST];
    float *y[MOST], weight[MOST];

    for (unsigned t = 0; t < trial->tokens; t++) {
        x[t] = seat->records + t * record;
        y[t] = (float *)(void *)seat->rows + (size_t)t * HIDDEN;
        weight[t] = 0.5f;
    }
    for (unsigned at = 0; at < trial->tokens; at += most) {
        const struct numoe_ffn ffn = {
            .shape = &trial->shape,
            .activation = &activation,
            .arithmetic = k->arithmetic,
            .slices = slices,
            .slice_count = RUN,
            .tokens = trial->tokens - at < most ? trial->tokens - at : most,
            .x = x + at,
            .weight = weight + at,
            .y = y + at,
            .scratch = seat->scratch,
        };
        (trial->many ? k->many : k->few)(&ffn);
    }
}

static void take_seat(void *context, uint32_t item, uint32_t worker)
{
    struct trial *trial = context;
    struct seat *seat = &trial->seats[item];
    const unsigned saved = numoe_kernels_enter();
    const uint64_t began = numoe_now_ns();

    (void)worker;
    for (uint64_t r = 0; r < RUNS; r++)
        compute(trial, seat, seat->slices + r * RUN * trial->shape.bytes);
    seat->ns = numoe_now_ns() - began;
    numoe_kernels_leave(saved);
}

static void fill(void *context, uint32_t item, uint32_t worker)
{
    struct trial *trial = context;
    struct seat *seat = &trial->seats[item];
    const struct numoe_slice_shape *shape = &trial->shape;
    struct numoe_bench_random random = {.state = 1 + item};
    float x[HIDDEN];

    (void)worker;
    for (uint64_t i = 0; i < RUNS * RUN * shape->bytes; i++)
        seat->slices[i] =
            i % shape->bytes % NUMOE_PAIR_BYTES < 1024 ? (uint8_t)numoe_bench_random(&random) : 120;
    for (unsigned t = 0; t < MOST; t++) {
        for (int i = 0; i < HIDDEN; i++)
            x[i] = numoe_bench_random_float(&random) - 0.5f;
        trial->kernels->quantise(shape, x, NUMOE_F32,
                                 seat->records + t * trial->kernels->record_bytes(shape));
    }
}

static int for_all(struct numoe_pool *pool, struct trial *trial, numoe_pool_fn *run)
{
    const struct numoe_pool_job job = {
        .context = trial,
        .phase_count = 1,
        .phases = {{.run = run, .items = numoe_pool_worker_count(pool)}}};

    return numoe_pool_run(pool, &job);
}

/* Mean time of a slice on a worker, us. */
static double measure(struct numoe_pool *pool, struct trial *trial, unsigned tokens, bool many)
{
    const uint32_t workers = numoe_pool_worker_count(pool);
    uint64_t ns = 0;

    trial->tokens = tokens;
    trial->many = many;
    for_all(pool, trial, take_seat);
    for (uint32_t w = 0; w < workers; w++)
        ns += trial->seats[w].ns;
    return (double)ns * 1e-3 / workers / (RUNS * RUN);
}

static void try_set(struct numoe_pool *pool, struct trial *trial)
{
    double us[2][MOST + 1] = {{0}}, all[MOST + 1] = {0};
    unsigned best = 0;

    printf("%s\n%9s", trial->kernels->name, "tokens");
    for (unsigned m = 1; m <= MOST; m++)
        printf(" %7u", m);
    for (unsigned m = 1; m <= MOST; m++) {
        double round[2][ROUNDS];

        for (int r = 0; r < ROUNDS; r++)
            for (int many = 0; many < 2; many++)
                round[many][r] = measure(pool, trial, m, many);
        for (int many = 0; many < 2; many++)
            us[many][m] = numoe_bench_quantile(round[many], ROUNDS, 0.5);
    }
    for (int many = 0; many < 2; many++) {
        printf("\n%9s", many ? "many, us" : "few, us");
        for (unsigned m = 1; m <= MOST; m++)
            printf(" %7.1f", us[many][m]);
    }
    for (unsigned limit = 0; limit <= MOST; limit++) {
        for (unsigned m = 1; m <= MOST; m++)
            all[limit] += us[m > limit][m] / us[1][m];
        best = all[limit] < all[best] ? limit : best;
    }
    printf("\nbest limit %u; the set's own, %u, takes %.3f of it\n", best,
           trial->kernels->few_limit,
           all[trial->kernels->few_limit < MOST ? trial->kernels->few_limit : MOST] / all[best]);
    fflush(stdout);
}

/* One block for all that a worker has. */
static bool take_memory(struct seat *seat, const struct numoe_kernels *k,
                        const struct numoe_slice_shape *shape)
{
    const size_t page = (size_t)2 << 20;
    const size_t slices = RUNS * RUN * shape->bytes, records = MOST * k->record_bytes(shape);
    const size_t rows = MOST * HIDDEN * sizeof(float);
    const size_t all = slices + records + rows + k->scratch_bytes(shape);

    seat->slices = aligned_alloc(page, (all + page - 1) / page * page);
    if (!seat->slices)
        return false;
    madvise(seat->slices, all, MADV_HUGEPAGE); /* only speed depends on it */
    seat->records = seat->slices + slices;
    seat->rows = seat->records + records;
    seat->scratch = seat->rows + rows;
    return true;
}

static int try_arithmetic(struct numoe_pool *pool, enum numoe_arithmetic arithmetic)
{
    const uint32_t workers = numoe_pool_worker_count(pool);
    struct trial trial = {.seats = aligned_alloc(64, workers * sizeof *trial.seats)};
    bool enough = trial.seats && numoe_slice_shape_init(&trial.shape, HIDDEN, false) == 0;

    for (size_t i = 0; enough && (trial.kernels = numoe_kernels_at(arithmetic, i)); i++) {
        if (!strcmp(trial.kernels->isa, "ref"))
            continue;
        memset(trial.seats, 0, workers * sizeof *trial.seats);
        for (uint32_t w = 0; w < workers; w++)
            enough &= take_memory(&trial.seats[w], trial.kernels, &trial.shape);
        if (enough && for_all(pool, &trial, fill) == 0)
            try_set(pool, &trial);
        for (uint32_t w = 0; w < workers; w++)
            free(trial.seats[w].slices);
    }
    free(trial.seats);
    return enough ? 0 : -ENOMEM;
}

int main(int argc, char **argv)
{
    static const enum numoe_arithmetic usual[] = {NUMOE_FAST, NUMOE_FINE, NUMOE_EXACT};
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = {0};
    struct numoe *context;
    int rc;

    for (int i = 1; i < argc; i++)
        if (!cli_arithmetic_by_name(argv[i], strlen(argv[i]))) {
            fprintf(stderr,
                    "numoe-forms: \"%s\" is no arithmetic\n"
                    "Usage: numoe-forms [ARITHMETIC]...\n",
                    argv[i]);
            return 2;
        }
    rc = numoe_open(&options, &context, &error);
    if (rc) {
        fprintf(stderr, "numoe-forms: %s: %s\n", error.where, error.message);
        return 1;
    }
    printf("%u workers, hidden %d, runs of %d slices\n",
           numoe_pool_worker_count(numoe_context_pool(context)), HIDDEN, RUN);
    for (int i = 1; !rc && i < argc; i++)
        rc =
            try_arithmetic(numoe_context_pool(context),
                           (enum numoe_arithmetic)cli_arithmetic_by_name(argv[i], strlen(argv[i])));
    for (size_t i = 0; argc == 1 && !rc && i < sizeof usual / sizeof usual[0]; i++)
        rc = try_arithmetic(numoe_context_pool(context), usual[i]);
    if (rc == -ENOMEM)
        fprintf(stderr, "numoe-forms: no memory\n");
    numoe_close(context);
    return cli_flush(rc ? 1 : 0);
}
