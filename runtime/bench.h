/*
 * bench.h - timing layers of a model beside the ceilings of the machine, on the same workers.
 *
 * Ceilings and layers are measured in turns: ceilings, some repetitions, ceilings, ... A fraction
 * is taken within each turn against the ceilings just before and after it, and the median over the
 * turns is reported: a machine that slows down or speeds up meanwhile does not distort it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_BENCH_H
#define NUMOE_BENCH_H

#include "model.h"

#include <stddef.h>
#include <stdint.h>

/* Seconds on a clock that only goes forward. */
double numoe_bench_seconds(void);

/* Order statistic q (0..1) of values, which are sorted by the call; NaN when there are none. */
double numoe_bench_quantile(double *values, size_t count, double q);

/* FNV-1a: of so many bytes after those that `digest` stands for. */
#define NUMOE_BENCH_DIGEST_INIT UINT64_C(14695981039346656037)
uint64_t numoe_bench_digest(uint64_t digest, const void *bytes, uint64_t count);

/* Reproducible random bits. */
struct numoe_bench_random {
    uint64_t state;
};
uint64_t numoe_bench_random(struct numoe_bench_random *random);
/* Uniform in (0, 1]. */
float numoe_bench_random_float(struct numoe_bench_random *random);

/*
 * Random routing: for each token top_k distinct ids below experts, uniform, and positive weights
 * whose sum is 1. top_k <= experts.
 */
void numoe_bench_route(struct numoe_bench_random *random, uint64_t tokens, uint64_t top_k,
                       uint64_t experts, int32_t *ids, float *weights);

/* How tokens choose experts. */
enum numoe_bench_routing {
    NUMOE_ROUTING_UNIFORM,
    NUMOE_ROUTING_ZIPF,     /* the popularity of the n-th expert is 1 / n; always the same ones */
    NUMOE_ROUTING_SHIFTING, /* the same, of others in each repetition */
    NUMOE_ROUTING_SAME,     /* all tokens the same experts, as many as one token has */
    NUMOE_ROUTING_ONE       /* all tokens one and the same expert, and no other */
};

/* "uniform", "zipf", "shifting", "same", "one"; by_name: -1 for any other. */
const char *numoe_bench_routing_name(enum numoe_bench_routing routing);
int numoe_bench_routing_by_name(const char *name);

/* NULL: no memory. Routes by the uniform one are those of numoe_bench_route. */
struct numoe_bench_router;
struct numoe_bench_router *numoe_bench_router_create(enum numoe_bench_routing routing,
                                                     uint64_t experts,
                                                     struct numoe_bench_random *random);
void numoe_bench_router_destroy(struct numoe_bench_router *router);
/* Of the top_k that are asked for, how many ids a token gets. */
uint64_t numoe_bench_router_top_k(const struct numoe_bench_router *router, uint64_t top_k);
/* As numoe_bench_route; of each token so many ids. */
void numoe_bench_router_route(struct numoe_bench_router *router, struct numoe_bench_random *random,
                              uint64_t tokens, uint64_t top_k, int32_t *ids, float *weights);

/* Normally distributed bf16 values. */
void numoe_bench_activations(struct numoe_bench_random *random, uint16_t *x, uint64_t count);

/* The ceilings of a context's workers: a buffer to read and calibrated loops. */
struct numoe_bench;

/*
 * isa: of the loops; NULL as numoe_open chooses. The buffer takes 64 MiB a worker, at least 1 GiB,
 * at most numoe_bench_budget; each worker reads what it has touched first.
 * @return 0; -ENOMEM, -EINVAL, -ENOTSUP with error filled
 */
int numoe_bench_create(struct numoe *context, const char *isa, struct numoe_bench **bench,
                       struct numoe_error *error);
void numoe_bench_destroy(struct numoe_bench *bench);

/*
 * What the buffer may take of a machine, that plan's workers being pinned (NULL: none is). Equal
 * parts are touched by all workers, so the node that is filled first limits all.
 */
uint64_t numoe_bench_budget(const struct numoe_machine *machine, const struct numoe_plan *plan);

uint64_t numoe_bench_buffer_bytes(const struct numoe_bench *bench);

/* Measure once, all workers together, in some 30 ms: 10^9 bytes or operations a second; 0 when
 * the loop does not exist for the isa. */
double numoe_bench_ceiling(struct numoe_bench *bench, enum numoe_ceiling ceiling);

/*
 * Fill all experts of a model with random weights: codes uniform, scales of four neighbouring
 * powers of two around 1 / sqrt(width). The same seed and shape give the same weights whatever the
 * workers. progress may be NULL; told experts done and in all.
 */
int numoe_bench_fill(struct numoe_model *model, uint64_t seed,
                     void (*progress)(uint64_t done, uint64_t total), struct numoe_error *error);

/* A batch that was computed with bf16 inputs and fp32 outputs; all ids below the experts. */
struct numoe_bench_outputs {
    uint64_t layer, tokens, top_k;
    const uint16_t *x;    /* [tokens, hidden] */
    const int32_t *ids;   /* [tokens, top_k] */
    const float *weights; /* likewise */
    const float *out;     /* [tokens, hidden] */
};

/*
 * Compare `count` tokens, spread over the batch, with the float64 reference. rel_l2: the relative
 * L2 distance over them; infinite when an output is no number.
 */
int numoe_bench_check(struct numoe_model *model, const struct numoe_bench_outputs *outputs,
                      uint64_t count, double *rel_l2, struct numoe_error *error);

struct numoe_bench_request {
    uint64_t layer, tokens, top_k, seed;
    enum numoe_bench_routing routing;
    uint32_t repeat;       /* 0: by time */
    double seconds;        /* with repeat 0: about so long, at least 7 repetitions */
    uint64_t check_tokens; /* so many tokens of the last repetition against the reference */
};

struct numoe_bench_cell {
    uint64_t layer, tokens;
    uint32_t repetitions;
    double ms, ms_min, ms_p10, ms_p90;
    double bytes, experts_hit, pairs;        /* mean over the repetitions */
    double gbs, gops;                        /* median over the repetitions */
    double read_gbs, peak_gops;              /* median over the turns; peak 0: not known */
    double bandwidth_fraction, ops_fraction; /* median over the turns; NaN: not known */
    double rel_l2; /* to float64 over the checked tokens; NaN: not checked */
    /* with numoe_options.stats, else NaN: part of the calls' time that workers are busy, mean over
     * the workers, and how much longer than the mean the busiest of them is */
    double busy_fraction, busy_imbalance;
    double busy_imbalance_call; /* the same of a call, median over the repetitions */
    /* Of the first outputs, bit by bit. They follow from the seed, the weights, the plan and the
     * kernels alone. */
    uint64_t digest;
};

/* Whether so many tokens' activations in bf16, outputs in fp32 and routings fit in what memory is
 * left: 0, or -ENOMEM with both numbers, before overcommit would make it a kill. */
int numoe_bench_room(uint64_t tokens, uint64_t hidden, uint64_t entries, struct numoe_error *error);

/*
 * Measure one layer with random bf16 activations and fresh random routing in each repetition.
 * bench: NULL computes once, and leaves what needs a second time or a ceiling 0 or NaN.
 */
int numoe_bench_layer(struct numoe_bench *bench, struct numoe_model *model,
                      const struct numoe_bench_request *request, struct numoe_bench_cell *cell,
                      struct numoe_error *error);

struct numoe_bench_idle {
    double seconds, cpu_s;             /* slept, and CPU time of the process meanwhile */
    uint32_t calls;                    /* of each kind */
    double first_us_p50, first_us_p99; /* an empty job of all workers that find themselves asleep */
    double warm_us_p50, warm_us_p99;   /* the same right after another */
};

/*
 * Sleep for so long, once the workers have ended their spin, and see what they use meanwhile; then
 * time some first calls after a sleep of 5 ms.
 */
void numoe_bench_idle(struct numoe *context, double seconds, struct numoe_bench_idle *idle);

#endif
