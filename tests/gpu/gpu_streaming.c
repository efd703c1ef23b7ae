/*
 * Models on a device through the public API against float64 and the CPU: resident, streamed from
 * pinned memory, over one node and several, with biases, absent and replaced experts; and on the
 * device as if it were two.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "../support/models.h"
#include "gpu_counts.h"
#include "gpu_several.h"
#include "model.h"
#include "numoe.h"
#include "numoe_gpu.h"

enum { LAYERS = 6, EXPERTS = 12, TOP_K = 3, TESTS = 2 * 2 * 2 + 4 + 8 + 2 + 2 };

/* Bits of a call's variant. */
enum {
    X_BF16 = 1,
    OUT_BF16 = 2,
    IDS_32 = 4,
    X_APART = 8, /* rows lie further apart than they are long */
    OUT_APART = 16,
    ADD = 32,
    PLAIN = 64, /* scale 1 and nothing elsewhere */
    VARIANTS = 128
};

/* The devices of a context; NULL: the first. */
static const uint32_t twice[] = {0, 0}, *devices;
static enum numoe_gpu_sum sum;

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
    const struct numoe_expert_weights weights = expert_weights(from);

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
    options.gpu_from_tokens = 1;
    options.gpu_devices = devices;
    options.gpu_device_count = devices ? 2 : 0;
    options.gpu_sum = sum;
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

/* Rows of floats in a type, with a gap of `apart` elements behind each; NaN in the gaps. */
static void *encode(const float *from, uint64_t rows, uint64_t columns, uint64_t apart, bool bf16)
{
    const uint64_t stride = columns + apart;
    uint8_t *to = malloc(rows * stride * (bf16 ? 2 : 4));

    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < stride; c++) {
            const float v = c < columns ? from[r * columns + c] : NAN;
            if (bf16)
                ((uint16_t *)(void *)to)[r * stride + c] = isnan(v) ? 0x7FC0 : bf16_bits(v);
            else
                ((float *)(void *)to)[r * stride + c] = v;
        }
    return to;
}

/* One call; a sample of its tokens against float64. out: [tokens][hidden] as floats. */
static bool call(struct world *w, uint64_t layer, uint64_t tokens, unsigned variant,
                 struct numoe_result *result, float *out)
{
    const uint64_t hidden = w->hidden, pairs = tokens * TOP_K;
    const uint64_t x_apart = variant & X_APART ? 5 : 0, out_apart = variant & OUT_APART ? 3 : 0;
    const uint64_t stride = hidden + out_apart;
    const double scale = variant & PLAIN ? 1 : 0.5;
    float *x = malloc(tokens * hidden * sizeof *x), *routing = malloc(pairs * 4);
    int64_t *ids = malloc(pairs * sizeof *ids);
    int32_t *ids32 = malloc(pairs * sizeof *ids32);
    float *before = malloc(tokens * hidden * sizeof *before);
    double *want = malloc(hidden * sizeof *want);
    uint8_t elsewhere[EXPERTS] = {0};
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    void *x_rows, *out_rows;
    uint64_t touched = 0;
    bool ok;

    random_state = 1000 + layer * 7 + tokens;
    elsewhere[7] = !(variant & PLAIN);
    for (uint64_t i = 0; i < tokens * hidden; i++) {
        x[i] = round_to_bf16(random_normal());
        before[i] = round_to_bf16(random_normal());
    }
    for (uint64_t i = 0; i < pairs; i++) {
        ids[i] = (int64_t)(random_u64() >> 20) % (EXPERTS + 2) - 1;
        ids32[i] = (int32_t)ids[i];
        routing[i] = (float)random_unit();
    }
    x_rows = encode(x, tokens, hidden, x_apart, variant & X_BF16);
    out_rows = encode(before, tokens, hidden, out_apart, variant & OUT_BF16);
    batch.tokens = tokens;
    batch.top_k = TOP_K;
    batch.x = x_rows;
    batch.x_type = variant & X_BF16 ? NUMOE_BF16 : NUMOE_F32;
    batch.x_stride = x_apart ? hidden + x_apart : 0;
    batch.ids = variant & IDS_32 ? (const void *)ids32 : ids;
    batch.id_bytes = variant & IDS_32 ? 4 : 8;
    batch.weights = routing;
    batch.out = out_rows;
    batch.out_type = variant & OUT_BF16 ? NUMOE_BF16 : NUMOE_F32;
    batch.out_stride = out_apart ? stride : 0;
    batch.add = variant & ADD;
    batch.scale = (float)scale;
    batch.elsewhere = variant & PLAIN ? NULL : elsewhere;
    ok = expect(!numoe_forward(w->model, layer, &batch, result, &error), "forward: %s",
                error.message);
    for (uint64_t i = 0; i < tokens * stride; i++) {
        const float v =
            variant & OUT_BF16 ? bf16_value(((uint16_t *)out_rows)[i]) : ((float *)out_rows)[i];
        if (i % stride < hidden)
            out[i / stride * hidden + i % stride] = v;
        else
            touched += !isnan(v);
    }
    ok = ok && expect(touched == 0, "variant %u: %d values between rows were written", variant,
                      (int)touched);
    for (uint64_t t = 0; ok && t < tokens; t += 1 + tokens / 9) {
        memset(want, 0, hidden * sizeof *want);
        for (int j = 0; j < TOP_K; j++) {
            const int64_t e = ids[t * TOP_K + j];
            if (e < 0 || e >= EXPERTS || e == 5 || elsewhere[e])
                continue;
            test_expert_apply(&w->experts[layer][e], &w->activation, x + t * hidden,
                              (double)routing[t * TOP_K + j], want);
        }
        for (uint64_t k = 0; k < hidden; k++)
            want[k] = want[k] * scale + (variant & ADD ? (double)before[t * hidden + k] : 0);
        const double l2 = relative_l2(want, out + t * hidden, hidden);
        ok = expect(l2 <= 5e-3, "layer %d, token %d of %d, variant %u: relative L2 %.2e",
                    (int)layer, (int)t, (int)tokens, variant, l2);
    }
    free(x);
    free(routing);
    free(ids);
    free(ids32);
    free(before);
    free(want);
    free(x_rows);
    free(out_rows);
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
    static unsigned variant; /* goes on in the next world, so that all come */
    float *out = malloc(333 * w->hidden * sizeof *out);
    bool ok = on_gpu(w);

    for (int i = 0; ok && i < 4; i++)
        for (uint64_t layer = 0; ok && layer < LAYERS; layer++) {
            struct numoe_result result = NUMOE_RESULT_INIT;
            ok = call(w, layer, tokens[i], variant++ % VARIANTS, &result, out) &&
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
            ok = call(w, layer, 64, 0, &result, out) &&
                 expect(result.gpu_tokens == 64, "%d of 64 tokens on the GPU",
                        (int)result.gpu_tokens);
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

static const struct gpu_division *division_of(const struct world *w)
{
    return &numoe_model_gpu(w->model)->several->division;
}

/* A world whose parts are summed by the host, divided as w is: the devices' shares follow from
 * measured links, which differ from world to world where others use the link. */
static bool world_like(const struct world *w, struct world *other)
{
    const bool bias = w->experts[0][0].bias[0] != NULL;
    bool alike = false;

    for (int tries = 0; !alike && tries < 20; tries++) {
        if (tries)
            world_free(other);
        if (!world_make(other, NUMOE_GPU_ON, true, true, bias))
            return false;
        alike = !memcmp(division_of(w), division_of(other), sizeof *division_of(w));
    }
    return expect(alike, "no two models are divided alike");
}

/* Where the parts of two are summed is as was asked for, and the bits are those of the other way.
 */
static bool same_by_host(struct world *w)
{
    static struct world other;
    float *a = calloc(333 * w->hidden, sizeof *a), *b = calloc(333 * w->hidden, sizeof *b);
    struct numoe_gpu_report report;
    bool ok = on_gpu(w);

    sum = NUMOE_GPU_SUM_HOST;
    ok = ok && world_like(w, &other);
    sum = NUMOE_GPU_SUM_PEER;
    for (uint64_t layer = 0; ok && layer < LAYERS; layer++)
        for (unsigned variant = 0; ok && variant < VARIANTS; variant += OUT_BF16 | ADD) {
            struct numoe_result ra = NUMOE_RESULT_INIT, rb = NUMOE_RESULT_INIT;

            ok = call(w, layer, 333, variant, &ra, a) && call(&other, layer, 333, variant, &rb, b);
            ok = ok && expect(!memcmp(a, b, 333 * w->hidden * sizeof *a),
                              "layer %d, variant %u: other bits", (int)layer, variant);
        }
    if (ok) {
        numoe_gpu_model_report(numoe_model_gpu(other.model), &report);
        ok = expect(report.sum == NUMOE_GPU_SUM_HOST && !report.summed_tokens, "not by the host");
        numoe_gpu_model_report(numoe_model_gpu(w->model), &report);
        ok = ok && expect(report.sum == NUMOE_GPU_SUM_PEER && report.summed_tokens == report.tokens,
                          "%d of %d tokens summed on devices: %s", (int)report.summed_tokens,
                          (int)report.tokens, report.sum_note);
    }
    world_free(&other);
    free(a);
    free(b);
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
        ok = call(w, layer, 50, 0, &ra, a) && call(&cpu, layer, 50, 0, &rb, b);
        for (uint64_t i = 0; i < 50 * w->hidden; i++)
            want[i] = (double)b[i];
        ok = ok &&
             expect(relative_l2(want, a, 50 * w->hidden) <= 5e-3, "layer %d differs", (int)layer);
        ok = ok &&
             expect(ra.skipped == rb.skipped && ra.missing == rb.missing && ra.pairs == rb.pairs &&
                        ra.experts_hit == rb.experts_hit && ra.expert_bytes == rb.expert_bytes &&
                        ra.gpu_tokens == 50 && rb.gpu_tokens == 0,
                    "layer %d is counted otherwise", (int)layer);
    }
    world_free(&cpu);
    free(a);
    free(b);
    free(want);
    return ok;
}

/* Layers large enough for the link to count, copied while the one before computes. small: of a size
 * and in a time that nothing is said about. */
static bool overlaps(uint64_t tokens, bool small)
{
    enum { ROUNDS = 5 };
    const uint64_t many = small ? 8 : 32;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_bench_stream result = {0};
    struct numoe_model *model = NULL;
    struct numoe *context = NULL;
    struct test_expert expert;
    double ms[ROUNDS], longest;
    uint16_t *x;
    int32_t *ids;
    float *routing;
    bool ok;

    options.gpu = NUMOE_GPU_ON;
    options.gpu_stream = true;
    desc.layers = LAYERS;
    desc.experts = many;
    desc.experts_per_token = TOP_K;
    desc.hidden = small ? 256 : 2048;
    desc.intermediate = small ? 128 : 1024;
    desc.activation = (struct numoe_activation){.kind = NUMOE_SILU};
    desc.arithmetic = NUMOE_EXACT;
    x = malloc(tokens * desc.hidden * sizeof *x);
    ids = malloc(tokens * TOP_K * sizeof *ids);
    routing = malloc(tokens * TOP_K * sizeof *routing);
    test_expert_make(&expert, desc.hidden, desc.intermediate, false);
    for (uint64_t i = 0; i < tokens * desc.hidden; i++)
        x[i] = bf16_bits(random_normal());
    for (uint64_t i = 0; i < tokens * TOP_K; i++) {
        ids[i] = (int32_t)(random_u64() >> 20 & 0xFFFF) % (int32_t)many;
        routing[i] = 1.0f / TOP_K;
    }
    ok = expect(!numoe_open(&options, &context, &error), "open: %s", error.message) &&
         expect(!numoe_model_create(context, &desc, &model, &error), "model: %s", error.message);
    for (uint64_t i = 0; ok && i < LAYERS * many; i++) {
        const struct numoe_expert_weights weights = {.size = sizeof weights,
                                                     .gate = expert.source.gate,
                                                     .up = expert.source.up,
                                                     .down = expert.source.down};
        ok = expect(!numoe_expert_load(model, i / many, i % many, &weights, &error), "expert: %s",
                    error.message);
    }
    struct numoe_gpu_bench bench = {.tokens = tokens,
                                    .top_k = TOP_K,
                                    .routings = 1,
                                    .repeat = small ? 1 : ROUNDS,
                                    .x = x,
                                    .ids = ids,
                                    .routing = routing,
                                    .ms = ms};
    ok = ok && expect(numoe_model_gpu(model) != NULL, "the model is not on the GPU") &&
         expect(!numoe_gpu_bench_layers(numoe_model_gpu(model), &bench, &result, &error),
                "measuring: %s", error.message);
    longest = result.copy_ms > result.compute_ms ? result.copy_ms : result.compute_ms;
    if (ok)
        printf("%d tokens: %.2f ms a pass, copies alone %.2f, computing alone %.2f\n", (int)tokens,
               result.total_ms, result.copy_ms, result.compute_ms);
    ok = ok && expect(small || result.total_ms <= 1.3 * longest,
                      "%d tokens: %.2f ms is more than 1.3 x %.2f", (int)tokens, result.total_ms,
                      longest);
    numoe_model_destroy(model);
    numoe_close(context);
    test_expert_free(&expert);
    free(x);
    free(ids);
    free(routing);
    return ok;
}

/* "small": what is measured is not judged, for a sanitizer. */
int main(int argc, char **argv)
{
    const bool small = argc > 1 && !strcmp(argv[1], "small");
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
    devices = twice;
    for (int v = 0; !skipped && v < 8; v++) {
        char name[96];
        bool ok;

        sum = v & 4 ? NUMOE_GPU_SUM_PEER : NUMOE_GPU_SUM_HOST;
        ok = world_make(&w, NUMOE_GPU_ON, v & 1, true, v & 2);
        ok = ok && expect(numoe_gpu_model_parts(numoe_model_gpu(w.model)) == 2, "not two parts");
        ok = ok && passes(&w);
        ok = ok && (v & 2 ? as_on_cpu(&w) : replaced(&w));
        snprintf(name, sizeof name, "two on one device, %s, %s, summed by %s",
                 v & 1 ? "streamed" : "resident", v & 2 ? "biases" : "no biases",
                 numoe_gpu_sum_names[sum]);
        count(ok, name);
        world_free(&w);
    }
    for (int v = 0; !skipped && v < 2; v++) {
        bool ok;

        sum = NUMOE_GPU_SUM_PEER;
        ok = world_make(&w, NUMOE_GPU_ON, true, true, v);
        count(ok && same_by_host(&w), v ? "peers' sums, biases" : "peers' sums");
        world_free(&w);
    }
    sum = NUMOE_GPU_SUM_AUTO;
    devices = NULL;
    for (int v = 0; !skipped && v < 2; v++)
        count(overlaps(v       ? (small ? 256 : 2048)
                       : small ? 8
                               : 64,
                       small),
              v ? "overlap, many tokens" : "overlap, few tokens");
    return finish();
}
