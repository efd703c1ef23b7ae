/*
 * stats_context.h - a small model of random experts in a context, and calls on it. For the tests of
 * stats and traces; plain C, so that programs for ThreadSanitizer can use it too.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TESTS_STATS_CONTEXT_H
#define NUMOE_TESTS_STATS_CONTEXT_H

#include "bench.h"
#include "numoe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TWO_NODES "pack:2 l3:1 [numa(memory=4GB)] core:2 pu:1"

enum { HIDDEN = 96, INTERMEDIATE = 320, SLICES = 10, LAYERS = 2, EXPERTS = 8 };

struct subject {
    struct numoe *context;
    struct numoe_model *model;
    struct numoe_model_info info;
};

static inline void must(int rc, const struct numoe_error *error, const char *what)
{
    if (!rc)
        return;
    fprintf(stderr, "%s: %d %s: %s\n", what, rc, error->where, error->message);
    abort();
}

static inline struct numoe_model *new_model(struct numoe *context, bool bias)
{
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;

    desc.layers = LAYERS;
    desc.experts = EXPERTS;
    desc.experts_per_token = 3;
    desc.hidden = HIDDEN;
    desc.intermediate = INTERMEDIATE;
    desc.bias = bias;
    desc.activation = (struct numoe_activation){.kind = NUMOE_SILU};
    must(numoe_model_create(context, &desc, &model, &error), &error, "numoe_model_create");
    must(numoe_bench_fill(model, 7, NULL, &error), &error, "numoe_bench_fill");
    return model;
}

static inline struct subject open_subject(const struct numoe_options *options, bool bias)
{
    struct subject s = {.info = NUMOE_MODEL_INFO_INIT};
    struct numoe_error error = NUMOE_ERROR_INIT;

    must(numoe_open(options, &s.context, &error), &error, "numoe_open");
    s.model = new_model(s.context, bias);
    numoe_model_info(s.model, &s.info);
    return s;
}

static inline void close_subject(struct subject *s)
{
    numoe_model_destroy(s->model);
    numoe_close(s->context);
}

/* Tokens that all ask for the same experts, first .. first + count - 1. */
struct request {
    struct numoe_batch batch;
    float *x, *out, *weights;
    int32_t *ids;
};

static inline struct request new_request(uint64_t tokens, int32_t first, uint64_t count)
{
    struct request r = {.batch = NUMOE_BATCH_INIT,
                        .x = malloc(tokens * HIDDEN * sizeof *r.x),
                        .out = malloc(tokens * HIDDEN * sizeof *r.out),
                        .weights = malloc(tokens * count * sizeof *r.weights),
                        .ids = malloc(tokens * count * sizeof *r.ids)};

    for (uint64_t i = 0; i < tokens * HIDDEN; i++)
        r.x[i] = (float)(i % 13) * 0.25f - 1.5f;
    for (uint64_t i = 0; i < tokens * count; i++) {
        r.ids[i] = first + (int32_t)(i % count);
        r.weights[i] = 0.25f;
    }
    r.batch.tokens = tokens;
    r.batch.top_k = count;
    r.batch.x = r.x;
    r.batch.x_type = NUMOE_F32;
    r.batch.ids = r.ids;
    r.batch.weights = r.weights;
    r.batch.out = r.out;
    r.batch.out_type = NUMOE_F32;
    return r;
}

static inline void free_request(struct request *r)
{
    free(r->x);
    free(r->out);
    free(r->weights);
    free(r->ids);
}

/* One call; experts first .. first + count - 1 for each token. */
static inline void call(const struct subject *s, uint64_t layer, uint64_t tokens, int32_t first,
                        uint64_t count)
{
    struct request r = new_request(tokens, first, count);
    struct numoe_error error = NUMOE_ERROR_INIT;

    must(numoe_forward(s->model, layer, &r.batch, NULL, &error), &error, "numoe_forward");
    free_request(&r);
}

#endif
