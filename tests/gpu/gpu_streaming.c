/*
 * Models on a device through the public API against float64 and the CPU: resident, streamed from
 * pinned memory, over one node and several, with biases, absent and replaced experts.
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "../support/experts.h"
#include "numoe.h"
#include "numoe_gpu.h"

enum { LAYERS = 6, EXPERTS = 12, TOP_K = 3, TESTS = 2 * 2 * 2 + 4 };

static int passed, failed, skipped;

__attribute__((format(printf, 2, 3))) static bool expect(bool fact, const char *format, ...)
{
    va_list args;

    if (fact)
        return true;
    va_start(args, format);
    printf("FAILED: ");
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    return false;
}

static void count(bool ok, const char *name)
{
    passed += ok;
    failed += !ok;
    printf("%s %s\n", ok ? "ok  " : "FAIL", name);
    fflush(stdout);
}

struct world {
    struct numoe *context;
    struct numoe_model *model;
    struct test_expert experts[LAYERS][EXPERTS];
    uint64_t hidden, intermediate;
    struct numoe_activation activation;
};

static bool load(struct world *w, uint64_t layer, uint64_t e)
{
    const struct test_expert *from = &w->experts[layer][e];
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_expert_weights weights = {
        .size = sizeof weights,
        .gate = from->source.gate,
        .up = from->source.up,
        .down = from->source.down,
        .gate_bias = from->bias[0],
        .up_bias = from->bias[1],
        .bias_step = 1,
        .down_bias = from->bias[2],
    };
    return expect(!numoe_expert_load(w->model, layer, e, &weights, &error), "expert: %s",
                  error.message);
}

static bool world_make(struct world *w, enum numoe_gpu_mode mode, bool stream, bool nodes,
                       bool bias)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;

    memset(w, 0, sizeof *w);
    w->hidden = 288;
    w->intermediate = 224;
    w->activation = (struct numoe_activation){.kind = NUMOE_SILU_CLAMPED, .limit = 4.0f};
    options.topology = nodes ? "pack:2 [numa(memory=4GB)] core:2 pu:1" : NULL;
    options.threads = 2;
    options.gpu = mode;
    options.gpu_stream = stream;
    if (!expect(!numoe_open(&options, &w->context, &error), "open: %s", error.message))
        return false;
    desc.layers = LAYERS;
    desc.experts = EXPERTS;
    desc.experts_per_token = TOP_K;
    desc.hidden = w->hidden;
    desc.intermediate = w->intermediate;
    desc.bias = bias;
    desc.activation = w->activation;
    desc.arithmetic = NUMOE_EXACT;
    if (!expect(!numoe_model_create(w->context, &desc, &w->model, &error), "model: %s",
                error.message))
        return false;
    random_state = 77;
    for (uint64_t l = 0; l < LAYERS; l++)
        for (uint64_t e = 0; e < EXPERTS; e++) {
            test_expert_make(&w->experts[l][e], w->hidden, w->intermediate, bias);
            if (e != 5 && !load(w, l, e)) /* 5 stays missing */
                return false;
        }
    return true;
}

static void world_free(struct world *w)
{
    numoe_model_destroy(w->model);
    numoe_close(w->context);
    for (int l = 0; l < LAYERS; l++)
        for (int e = 0; e < EXPERTS; e++)
            if (w->experts[l][e].hidden)
                test_expert_free(&w->experts[l][e]);
}

/* One call; sample of its tokens against float64. */
static bool call(struct world *w, uint64_t layer, uint64_t tokens, bool add,
                 struct numoe_result *result, float *out)
{
    const uint64_t hidden = w->hidden;
    float *x = malloc(tokens * hidden * sizeof *x), *routing = malloc(tokens * TOP_K * 4);
    int64_t *ids = malloc(tokens * TOP_K * sizeof *ids);
    float *before = malloc(tokens * hidden * sizeof *before);
    double *want = malloc(hidden * sizeof *want);
    uint8_t elsewhere[EXPERTS] = {0};
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    bool ok;

    random_state = 1000 + layer * 7 + tokens;
    elsewhere[7] = 1;
    for (uint64_t i = 0; i < tokens * hidden; i++) {
        x[i] = round_to_bf16(random_normal());
        before[i] = out[i] = random_normal();
    }
    for (uint64_t i = 0; i < tokens * TOP_K; i++) {
        ids[i] = (int64_t)(random_u64() >> 20) % (EXPERTS + 2) - 1;
        routing[i] = (float)random_unit();
    }
    batch.tokens = tokens;
    batch.top_k = TOP_K;
    batch.x = x;
    batch.x_type = NUMOE_F32;
    batch.ids = ids;
    batch.id_bytes = 8;
    batch.weights = routing;
    batch.out = out;
    batch.out_type = NUMOE_F32;
    batch.add = add;
    batch.scale = 0.5f;
    batch.elsewhere = elsewhere;
    ok = expect(!numoe_forward(w->model, layer, &batch, result, &error), "forward: %s",
                error.message);
    for (uint64_t t = 0; ok && t < tokens; t += 1 + tokens / 9) {
        memset(want, 0, hidden * sizeof *want);
        for (int j = 0; j < TOP_K; j++) {
            const int64_t e = ids[t * TOP_K + j];
            if (e < 0 || e >= EXPERTS || e == 5 || e == 7)
                continue;
            test_expert_apply(&w->experts[layer][e], &w->activation, x + t * hidden,
                              (double)routing[t * TOP_K + j], want);
        }
        for (uint64_t k = 0; k < hidden; k++)
            want[k] = want[k] * 0.5 + (add ? (double)before[t * hidden + k] : 0);
        const double l2 = relative_l2(want, out + t * hidden, hidden);
        ok = expect(l2 <= 5e-3, "layer %d, token %d of %d: relative L2 %.2e", (int)layer, (int)t,
                    (int)tokens, l2);
    }
    free(x);
    free(routing);
    free(ids);
    free(before);
    free(want);
    return ok;
}

static bool on_gpu(struct world *w)
{
    struct numoe_model_info info = {.size = sizeof info};

    numoe_model_info(w->model, &info);
    return expect(*info.gpu, "the model is not on the GPU: %s", info.gpu_note);
}

static bool passes(struct world *w)
{
    static const uint64_t tokens[] = {1, 7, 40, 333};
    float *out = malloc(333 * w->hidden * sizeof *out);
    bool ok = on_gpu(w);

    for (int i = 0; ok && i < 4; i++)
        for (uint64_t layer = 0; ok && layer < LAYERS; layer++) {
            struct numoe_result result = NUMOE_RESULT_INIT;
            ok = call(w, layer, tokens[i], i % 2, &result, out) &&
                 expect(result.gpu_tokens == tokens[i], "%llu tokens on the GPU",
                        (unsigned long long)result.gpu_tokens);
        }
    free(out);
    return ok;
}

/* An expert is replaced between passes: what was copied before must not be used. */
static bool replaced(struct world *w)
{
    float *out = malloc(64 * w->hidden * sizeof *out);
    struct numoe_result result = NUMOE_RESULT_INIT;
    bool ok = on_gpu(w);

    for (int round = 0; ok && round < 3; round++) {
        for (uint64_t layer = 0; ok && layer < LAYERS; layer++)
            ok = call(w, layer, 64, false, &result, out);
        for (uint64_t e = 0; ok && e < EXPERTS; e += 2) {
            test_expert_free(&w->experts[1 + round][e]);
            random_state = 555 + e + (uint64_t)round;
            test_expert_make(&w->experts[1 + round][e], w->hidden, w->intermediate,
                             w->experts[0][0].bias[0] != NULL);
            ok = load(w, 1 + (uint64_t)round, e);
        }
    }
    free(out);
    return ok;
}

/* The same counts and nearly the same numbers as on the CPU. */
static bool as_on_cpu(struct world *w)
{
    static struct world cpu;
    float *a = calloc(50 * w->hidden, sizeof *a), *b = calloc(50 * w->hidden, sizeof *b);
    double *want = calloc(50 * w->hidden, sizeof *want);
    bool ok = on_gpu(w) &&
              world_make(&cpu, NUMOE_GPU_OFF, false, false, w->experts[0][0].bias[0] != NULL);

    for (uint64_t layer = 0; ok && layer < LAYERS; layer++) {
        struct numoe_result ra = NUMOE_RESULT_INIT, rb = NUMOE_RESULT_INIT;
        ok = call(w, layer, 50, false, &ra, a) && call(&cpu, layer, 50, false, &rb, b);
        for (uint64_t i = 0; i < 50 * w->hidden; i++)
            want[i] = (double)b[i];
        ok = ok &&
             expect(relative_l2(want, a, 50 * w->hidden) <= 5e-3, "layer %d differs", (int)layer);
        ok = ok && expect(ra.skipped == rb.skipped && ra.missing == rb.missing &&
                              ra.pairs == rb.pairs && ra.experts_hit == rb.experts_hit &&
                              ra.expert_bytes == rb.expert_bytes && rb.gpu_tokens == 0,
                          "layer %d is counted otherwise", (int)layer);
    }
    world_free(&cpu);
    free(a);
    free(b);
    free(want);
    return ok;
}

int main(void)
{
    static struct world w;
    struct numoe_error error = NUMOE_ERROR_INIT;

    if (numoe_gpu_count(&error) <= 0) {
        printf("skipped: %s\n", error.message);
        skipped = TESTS;
    }
    for (int v = 0; !skipped && v < 8; v++) {
        char name[96];
        bool ok = world_make(&w, NUMOE_GPU_ON, v & 1, v & 2, v & 4);
        ok = ok && passes(&w);
        snprintf(name, sizeof name, "%s, %s, %s", v & 1 ? "streamed" : "resident",
                 v & 2 ? "two nodes" : "this machine", v & 4 ? "biases" : "no biases");
        count(ok, name);
        world_free(&w);
    }
    for (int v = 0; !skipped && v < 4; v++) {
        bool ok = world_make(&w, NUMOE_GPU_ON, v & 1, true, true);
        ok = ok && (v & 2 ? as_on_cpu(&w) : replaced(&w));
        count(ok, v & 2 ? "as on the CPU" : "replaced experts");
        world_free(&w);
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
