/* What tests of predictions share: a machine, a plan on it, and what is predicted of the two.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef PREDICT_FIXTURE_H
#define PREDICT_FIXTURE_H

#include "predict.h"
#include "topo/topo_fixture.h"

#include <math.h>

#define ONE_NODE "pack:1 l3:1 [numa(memory=256GB)] core:4 pu:1"

/* What predict_guess.c states of AVX2 and of GPUs that compute by mma.sync. */
static const double read_fraction = 0.80, multiply_fraction = 0.50, tensor_fraction = 0.47;

static const struct numoe_predict_gpu a10s[] = {
    {.name = "a10", .node = 4, .link_gbs = 25, .memory_bytes = 24000000000},
    {.name = "a10", .node = 20, .link_gbs = 25, .memory_bytes = 24000000000},
};

/* One of them on ONE_NODE. */
static inline struct numoe_predict_gpu a10_at_home(void)
{
    struct numoe_predict_gpu gpu = a10s[0];

    gpu.node = 0;
    return gpu;
}

/* A layer of next to nothing. */
static const struct numoe_expert_shape tiny_layer = {.layers = 1,
                                                     .experts = 4,
                                                     .slices = 4,
                                                     .slice_bytes = 3264,
                                                     .hidden = 32,
                                                     .experts_per_token = 1};

/* Whoever changes machine or request asks for another plan. */
struct outlook {
    struct numoe_machine *machine;
    struct numoe_plan_request request;
    struct numoe_plan *plan;
    struct numoe_predict_options options;
    struct numoe_prediction *prediction; /* the last; NULL: none yet */
};

static inline struct outlook outlook_on(const char *source, const struct numoe_expert_shape *shape)
{
    struct outlook o = {.machine = machine_of(source),
                        .request = on_every_node(shape),
                        .options = NUMOE_PREDICT_OPTIONS_INIT};

    o.plan = plan_of(o.machine, &o.request);
    return o;
}

static inline void outlook_free(struct outlook *o)
{
    numoe_prediction_free(o->prediction);
    numoe_plan_free(o->plan);
    numoe_machine_free(o->machine);
}

static inline void replan(struct outlook *o)
{
    numoe_plan_free(o->plan);
    o->plan = plan_of(o->machine, &o->request);
}

static inline void with_gpus(struct outlook *o, const struct numoe_predict_gpu *gpus,
                             uint32_t count)
{
    o->options.gpus = gpus;
    o->options.gpu_count = count;
}

static inline void with_tokens(struct outlook *o, const uint32_t *tokens, uint32_t count)
{
    o->options.tokens = tokens;
    o->options.token_count = count;
}

/* In place of what was predicted before. */
static inline const struct numoe_prediction *predict(struct outlook *o)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    numoe_prediction_free(o->prediction);
    o->prediction = NULL;
    rc = numoe_predict(o->machine, o->plan, &o->options, &o->prediction, &error);
    cr_assert_eq(rc, 0, "%s: %s", error.where, error.message);
    return o->prediction;
}

static inline const struct numoe_prediction_cell *cell_of(const struct numoe_prediction *prediction,
                                                          enum numoe_way way, uint32_t tokens)
{
    for (uint32_t i = 0; i < prediction->cell_count; i++)
        if (prediction->cells[i].way == way && prediction->cells[i].tokens == tokens)
            return &prediction->cells[i];
    cr_assert_fail("no cell for %s, %u tokens", numoe_way_name(way), tokens);
    return NULL;
}

static inline void assert_near(double value, double wanted, double tolerance, const char *what)
{
    cr_assert(fabs(value - wanted) <= tolerance * fabs(wanted), "%s is %.9g, not %.9g", what, value,
              wanted);
}

/* One size and way, everything made and freed. nodes_gbs: of every node, 0: not given. */
static inline struct numoe_prediction_cell
predict_one(const char *source, const struct numoe_expert_shape *shape, uint32_t workers,
            double nodes_gbs, double ghz, const struct numoe_predict_gpu *gpus, uint32_t gpu_count,
            enum numoe_way way, uint32_t tokens)
{
    struct outlook o = outlook_on(source, shape);
    struct numoe_prediction_cell cell;
    double gbs[64];

    cr_assert_leq(o.machine->node_count, 64);
    for (int i = 0; i < 64; i++)
        gbs[i] = nodes_gbs;
    o.request.workers = workers;
    replan(&o);
    o.options.node_gbs = nodes_gbs > 0 ? gbs : NULL;
    o.options.isa = "avx2";
    o.options.ghz = ghz;
    with_gpus(&o, gpus, gpu_count);
    with_tokens(&o, &tokens, 1);
    cell = *cell_of(predict(&o), way, tokens);
    outlook_free(&o);
    return cell;
}

#endif
