/*
 * fixture.h - a model of random experts, and calls on it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TEST_FIXTURE_H
#define TEST_FIXTURE_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/models.h"

/* A model of random experts in memory. */
struct fixture {
    struct numoe *context;
    struct numoe_model *model;
    struct test_expert *experts;
    struct numoe_model_desc desc;
};

static inline void experts_make(struct fixture *f, uint64_t seed)
{
    const uint64_t count = f->desc.layers * f->desc.experts;

    random_state = seed;
    f->experts = calloc(count, sizeof *f->experts);
    for (uint64_t i = 0; i < count; i++)
        test_expert_make(&f->experts[i], f->desc.hidden, f->desc.intermediate, f->desc.bias);
}

static inline void experts_load(struct fixture *f)
{
    for (uint64_t q = 0; q < f->desc.layers * f->desc.experts; q++) {
        const struct numoe_expert_weights w = expert_weights(&f->experts[q]);
        struct numoe_error error = NUMOE_ERROR_INIT;
        cr_assert_eq(
            numoe_expert_load(f->model, q / f->desc.experts, q % f->desc.experts, &w, &error), 0,
            "%s: %s", error.where, error.message);
    }
}

static inline void open_model(struct fixture *f, const struct numoe_options *options)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_open(options, &f->context, &error), 0, "%s: %s", error.where, error.message);
    cr_assert_eq(numoe_model_create(f->context, &f->desc, &f->model, &error), 0, "%s: %s",
                 error.where, error.message);
    experts_load(f);
}

static inline void close_model(struct fixture *f)
{
    numoe_model_destroy(f->model);
    numoe_close(f->context);
}

static inline void experts_free(struct fixture *f)
{
    for (uint64_t i = 0; i < f->desc.layers * f->desc.experts; i++)
        test_expert_free(&f->experts[i]);
    free(f->experts);
}

static inline struct fixture fixture_of(uint64_t layers, uint64_t experts, uint64_t hidden,
                                        uint64_t intermediate, bool bias,
                                        enum numoe_arithmetic arithmetic)
{
    struct fixture f = {.desc = NUMOE_MODEL_DESC_INIT};

    f.desc.layers = layers;
    f.desc.experts = experts;
    f.desc.experts_per_token = 3;
    f.desc.hidden = hidden;
    f.desc.intermediate = intermediate;
    f.desc.bias = bias;
    f.desc.arithmetic = arithmetic;
    f.desc.activation =
        bias ? (struct numoe_activation){.kind = NUMOE_SWIGLU_OAI, .limit = 7.0f, .alpha = 1.702f}
             : (struct numoe_activation){.kind = NUMOE_SILU_CLAMPED, .limit = 10.0f};
    return f;
}

/* Tokens with ids, some skipped, some repeated, some past the end. */
struct call {
    uint64_t tokens, k, hidden;
    float *x, *weights, *out;
    int64_t *ids;
};

static inline struct call call_make(uint64_t tokens, uint64_t k, uint64_t hidden, uint64_t experts,
                                    bool odd_ids)
{
    struct call c = {tokens, k, hidden, NULL, NULL, NULL, NULL};

    c.x = malloc((tokens * hidden + 1) * sizeof *c.x);
    c.weights = malloc((tokens * k + 1) * sizeof *c.weights);
    c.out = malloc((tokens * hidden + 1) * sizeof *c.out);
    c.ids = malloc((tokens * k + 1) * sizeof *c.ids);
    for (uint64_t i = 0; i < tokens * hidden; i++) {
        c.x[i] = round_to_bf16(random_normal());
        c.out[i] = NAN;
    }
    for (uint64_t i = 0; i < tokens * k; i++) {
        c.weights[i] = 0.2f + (float)random_unit();
        c.ids[i] = (int64_t)(random_u64() >> 20) % (int64_t)experts;
        if (odd_ids && i % 7 == 3)
            c.ids[i] = -1;
        if (odd_ids && i % 11 == 5)
            c.ids[i] = (int64_t)experts;
        if (odd_ids && i % 13 == 6 && i % k)
            c.ids[i] = c.ids[i - 1];
    }
    return c;
}

static inline void call_free(struct call *c)
{
    free(c->x);
    free(c->weights);
    free(c->out);
    free(c->ids);
}

static inline struct numoe_batch call_batch(const struct call *c)
{
    struct numoe_batch b = NUMOE_BATCH_INIT;

    b.tokens = c->tokens;
    b.top_k = c->k;
    b.x = c->x;
    b.x_type = NUMOE_F32;
    b.ids = c->ids;
    b.id_bytes = 8;
    b.weights = c->weights;
    b.out = c->out;
    b.out_type = NUMOE_F32;
    return b;
}

static inline void run(struct fixture *f, uint64_t layer, const struct numoe_batch *b)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(numoe_forward(f->model, layer, b, NULL, &error), 0, "%s: %s", error.where,
                 error.message);
}

/* Relative L2 over some tokens, to double precision. */
static inline double check(const struct fixture *f, uint64_t layer, const struct call *c,
                           uint64_t step)
{
    double error = 0, norm = 0;
    double *want = malloc(c->hidden * sizeof *want);

    for (uint64_t t = 0; t < c->tokens; t += step) {
        memset(want, 0, c->hidden * sizeof *want);
        for (uint64_t j = 0; j < c->k; j++) {
            const int64_t id = c->ids[t * c->k + j];
            if (id >= 0 && id < (int64_t)f->desc.experts)
                test_expert_apply(&f->experts[layer * f->desc.experts + (uint64_t)id],
                                  &f->desc.activation, c->x + t * c->hidden,
                                  (double)c->weights[t * c->k + j], want);
        }
        for (uint64_t i = 0; i < c->hidden; i++) {
            const double d = want[i] - (double)c->out[t * c->hidden + i];
            error += d * d;
            norm += want[i] * want[i];
        }
    }
    free(want);
    return norm > 0 ? sqrt(error / norm) : sqrt(error);
}

#endif
