/*
 * small_context.h - a context on a described machine of three nodes with a fake device, a small
 * model in it, and calls of it.
 */
#ifndef NUMOE_TESTS_SMALL_CONTEXT_H
#define NUMOE_TESTS_SMALL_CONTEXT_H

#include <criterion/criterion.h>

#include "../support/models.h"
#include "context.h"
#include "fake_device.h"

enum { HIDDEN = 40, INTERMEDIATE = 70, EXPERTS = 6, LAYERS = 3, TOP_K = 3, TOKENS = 9 };

static int warnings;
/* How contexts divide experts. */
static enum numoe_form form;

static inline void hear(void *user, enum numoe_log_level level, const char *message)
{
    (void)user;
    (void)message;
    warnings += level <= NUMOE_LOG_WARNING;
}

/* A context on a described machine of three nodes; with a fake device unless f is NULL. */
static inline struct numoe *context_make(struct fake *f)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;

    unsetenv("NUMOE_GPU");
    options.topology = "pack:3 [numa(memory=4GB)] core:1 pu:1";
    options.threads = 2;
    options.gpu_from_tokens = 1;
    options.form = form;
    options.log.fn = hear;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    if (f)
        cr_assert_eq(gpu_wrap(&fake_ops, f, &p, &context->log, &context->gpu), 0);
    return context;
}

static inline void load(struct numoe_model *model, uint64_t layer, uint64_t e, uint64_t seed)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct test_expert from;
    struct numoe_expert_weights w;

    random_state = seed * 77 + layer * 1001 + e + 5;
    test_expert_make(&from, HIDDEN, INTERMEDIATE, true);
    w = expert_weights(&from);
    cr_assert_eq(numoe_expert_load(model, layer, e, &w, &error), 0, "%s", error.message);
    test_expert_free(&from);
}

static inline struct numoe_model *model_make(struct numoe *context)
{
    const struct numoe_model_desc desc =
        plain_desc(LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, true);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model;

    cr_assert_eq(numoe_model_create(context, &desc, &model, &error), 0, "%s", error.message);
    for (uint64_t l = 0; l < LAYERS; l++)
        for (uint64_t e = 0; e < EXPERTS; e++)
            if (e != 4) /* missing */
                load(model, l, e, 1);
    return model;
}

struct call {
    float x[TOKENS][HIDDEN], routing[TOKENS][TOP_K], out[TOKENS][HIDDEN];
    int64_t ids[TOKENS][TOP_K];
    uint8_t elsewhere[EXPERTS];
    struct numoe_batch batch;
    struct numoe_result result;
};

static inline void call_make(struct call *c, uint64_t seed)
{
    random_state = seed + 99;
    *c = (struct call){.batch = NUMOE_BATCH_INIT, .result = NUMOE_RESULT_INIT};
    for (int t = 0; t < TOKENS; t++) {
        for (int k = 0; k < HIDDEN; k++) {
            c->x[t][k] = round_to_bf16(random_normal());
            c->out[t][k] = random_normal();
        }
        for (int j = 0; j < TOP_K; j++) {
            c->ids[t][j] = (int64_t)(random_u64() >> 30) % (EXPERTS + 3) - 2;
            c->routing[t][j] = (float)random_unit();
        }
    }
    c->elsewhere[3] = 1;
    c->batch.tokens = TOKENS;
    c->batch.top_k = TOP_K;
    c->batch.x = c->x;
    c->batch.x_type = NUMOE_F32;
    c->batch.ids = c->ids;
    c->batch.id_bytes = 8;
    c->batch.weights = &c->routing[0][0];
    c->batch.out = c->out;
    c->batch.out_type = NUMOE_F32;
    c->batch.add = seed % 2;
    c->batch.scale = 0.75f;
    c->batch.elsewhere = seed % 3 ? c->elsewhere : NULL;
}

static inline double distance(const struct call *a, const struct call *b)
{
    double want[TOKENS * HIDDEN];

    for (int i = 0; i < TOKENS * HIDDEN; i++)
        want[i] = (double)(&b->out[0][0])[i];
    return relative_l2(want, &a->out[0][0], TOKENS * HIDDEN);
}

#endif
