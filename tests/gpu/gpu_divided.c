/*
 * Layers whose slices lie in 32 arenas, on a device alone and as if it were several: divided by
 * arenas, as where devices have nearest nodes of their own; by arenas and then by experts; and by
 * experts, where arenas are too uneven. Beside float64. "small": for a sanitizer.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../support/experts.h"
#include "gpu_counts.h"
#include "gpu_several.h"

enum { REGIONS = 32, ABSENT = 5, LAYERS = 3, EXPERTS = 12, SLICES = 40, HIDDEN = 160, TOP_K = 3 };
enum { INTERMEDIATE = 32 * SLICES, TOKENS_MOST = 300 };

#include "regions.h"
#include "rows_call.h"

/* ---- experts over arenas --------------------------------------------------------------------- */

static struct numoe_slice_shape shape;
static const struct numoe_activation activation = {.kind = NUMOE_SILU_CLAMPED, .limit = 4.0f};
static uint8_t *whole; /* all slices in order */
static float *bias_of; /* [LAYERS * EXPERTS][32 hidden_tiles], lane order */
/* Where the slices of expert q that arena a has begin: by weights, the remainder moving. */
static uint64_t boundary(const uint32_t *weight, uint64_t q, uint32_t a)
{
    uint64_t before = 0, all = 0;

    for (uint32_t i = 0; i < REGIONS; i++) {
        before += i < a ? weight[i] : 0;
        all += weight[i];
    }
    return a == REGIONS ? SLICES : a ? (SLICES * before + q * 7 % all) / all : 0;
}

static void arenas_fill(const uint32_t *weight)
{
    for (uint32_t a = 0; a < REGIONS; a++) {
        for (uint64_t q = 0; q < LAYERS * EXPERTS; q++)
            starts[a][q + 1] = starts[a][q] + boundary(weight, q, a + 1) - boundary(weight, q, a);
        region_make(a);
        for (uint64_t q = 0; q < LAYERS * EXPERTS; q++)
            memcpy(arenas[a] + starts[a][q] * shape.bytes,
                   whole + (q * SLICES + boundary(weight, q, a)) * shape.bytes,
                   (starts[a][q + 1] - starts[a][q]) * shape.bytes);
    }
}

static const float *bias(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    return bias_of + (layer * EXPERTS + expert) * 32 * shape.hidden_tiles;
}

/* Device at node n is nearest to the arenas of its part of all. */
static uint32_t nodes;

static uint32_t distance(void *user, uint32_t index, uint32_t os_node)
{
    (void)user;
    return index * nodes / REGIONS == os_node ? 10 : 32;
}

static bool experts_make(void)
{
    const uint64_t width = 32 * (uint64_t)((HIDDEN + 31) / 32);

    if (!expect(!numoe_slice_shape_init(&shape, HIDDEN, true), "no shape"))
        return false;
    slice_bytes = shape.bytes;
    whole = aligned_bytes(LAYERS * EXPERTS * SLICES * shape.bytes);
    bias_of = calloc(LAYERS * EXPERTS * width, sizeof *bias_of);
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) {
        struct numoe_pack_report report = {0};
        struct test_expert expert;

        test_expert_make(&expert, HIDDEN, INTERMEDIATE, true);
        numoe_pack_slices(&shape, &expert.source, 0, SLICES, whole + q * SLICES * shape.bytes,
                          &report);
        for (uint64_t i = 0; i < width; i++) {
            const uint64_t from = i / 32 * 32 + numoe_lane_row(i % 32);
            bias_of[q * width + i] = from < HIDDEN ? expert.bias[2][from] : 0;
        }
        test_expert_free(&expert);
    }
    return true;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static float x[TOKENS_MOST * HIDDEN], out[TOKENS_MOST * HIDDEN], before[TOKENS_MOST * HIDDEN];
static float routing[TOKENS_MOST * TOP_K];
static int32_t ids[TOKENS_MOST * TOP_K];

static bool call(struct numoe_gpu_model *model, uint64_t layer, uint64_t tokens, bool add)
{
    struct numoe_gpu_call call = rows_call(tokens, HIDDEN, TOP_K, x, ids, routing, out);
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint64_t done = 0;
    double worst = 0;

    call.add = add;
    call.scale = 0.5f;
    for (uint64_t i = 0; i < tokens * HIDDEN; i++) {
        x[i] = round_to_bf16(random_normal());
        before[i] = random_normal();
        out[i] = add ? before[i] : NAN;
    }
    for (uint64_t i = 0; i < tokens * TOP_K; i++) {
        ids[i] = (int32_t)(random_u64() >> 20 & 0xFFFF) % (EXPERTS + 1) - 1;
        routing[i] = (float)random_unit();
    }
    if (!expect(!numoe_gpu_forward(model, layer, &call, &done, &error), "call: %s",
                error.message) ||
        !expect(done == tokens, "%d of %d tokens are done", (int)done, (int)tokens))
        return false;
    for (uint64_t t = 0; t < tokens; t += 1 + tokens / 9) {
        double want[HIDDEN] = {0}, l2;

        for (int j = 0; j < TOP_K; j++) {
            const int32_t e = ids[t * TOP_K + j];
            if (e < 0 || !present(NULL, layer, (uint64_t)e))
                continue;
            numoe_reference_slices(&shape, &activation,
                                   whole + (layer * EXPERTS + (uint64_t)e) * SLICES * shape.bytes,
                                   SLICES, x + t * HIDDEN, (double)routing[t * TOP_K + j],
                                   bias(NULL, layer, (uint64_t)e), true, want);
        }
        for (int k = 0; k < HIDDEN; k++)
            want[k] = want[k] * 0.5 + (add ? (double)before[t * HIDDEN + k] : 0);
        l2 = relative_l2(want, out + t * HIDDEN, HIDDEN);
        worst = l2 <= worst ? worst : l2;
    }
    return expect(worst <= 5e-3, "layer %d, %d tokens: relative L2 %.2e", (int)layer, (int)tokens,
                  worst);
}

static bool calls(struct numoe_gpu_model *model, bool small)
{
    static const uint64_t tokens[] = {1, 7, 64, TOKENS_MOST};
    bool ok = true;

    for (int round = 0; ok && round < (small ? 1 : 3); round++)
        for (int i = 0; ok && i < (small ? 3 : 4); i++)
            for (uint64_t layer = 0; ok && layer < LAYERS; layer++)
                ok = call(model, layer, tokens[i], (i + round) % 2);
    return ok;
}

/* ---- cases ----------------------------------------------------------------------------------- */

struct division {
    const char *name;
    uint32_t devices, nodes; /* device i is at node i modulo nodes */
    uint32_t uneven;         /* weight of the first half of the arenas: others' is 1 */
    uint32_t groups;         /* that it comes to */
};

static const struct division divisions[] = {
    {"alone", 1, 1, 1, 0},
    {"two, by arenas", 2, 2, 1, 2},
    {"four, by arenas", 4, 4, 1, 4},
    {"four, two by two", 4, 2, 1, 2},
    {"two, arenas too uneven", 2, 2, 3, 1},
};

/* Whether slices are where the case has them. */
static bool as_divided(const struct numoe_gpu_model *model, const struct division *d)
{
    bool ok = true;

    if (d->devices == 1)
        return expect(!model->several, "one device is several");
    if (!expect(model->several && model->several->division.groups == d->groups,
                "divided otherwise"))
        return false;
    for (uint32_t i = 0; i < d->devices; i++)
        ok = expect(model->several->parts[i].regions == REGIONS / d->groups,
                    "device %u has %u arenas", i, model->several->parts[i].regions) &&
             ok;
    return ok;
}

/* way 0: nothing stays; 1: some experts do; 2: all. */
/* Opened once: each opening computes by every form, which takes a sanitizer long. */
static struct numoe_gpu *gpus[4];

static bool devices_open(void)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_verdict verdict;
    bool ok = true;

    for (int i = 0; ok && i < 4; i++) {
        ok = expect(!numoe_gpu_open(0, NUMOE_GPU_ON, NULL, NULL, &gpus[i], &verdict, &error), "%s",
                    error.message);
        if (ok)
            gpus[i]->properties.locality_known = true;
    }
    return ok;
}

static bool run_case(const struct division *d, int way, bool small)
{
    static const uint32_t shares[4] = {1, 1, 1, 1};
    const uint64_t expert = SLICES * shape.bytes;
    const struct numoe_gpu_source source = {.shape = shape,
                                            .activation = activation,
                                            .arithmetic = NUMOE_EXACT,
                                            .layers = LAYERS,
                                            .experts = EXPERTS,
                                            .slices = SLICES,
                                            .down_bias = true,
                                            .region_count = REGIONS,
                                            .arena = arena,
                                            .place = place,
                                            .present = present,
                                            .bias = bias,
                                            .generation = generation,
                                            .distance = distance};
    const struct numoe_gpu_model_options options = {
        .stream = way == 0,
        .cache_bytes = way == 1 ? EXPERTS * expert : 0,
        .window_bytes = 8 * expert,
        .piece_bytes = 1,
        .keep_free_bytes = (uint64_t)1 << 30,
        .shares = shares, /* as measured, the same link carries now more, now less */
    };
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model = NULL;
    uint32_t weight[REGIONS];
    bool ok;

    for (uint32_t a = 0; a < REGIONS; a++)
        weight[a] = a < REGIONS / 2 ? d->uneven : 1;
    arenas_fill(weight);
    nodes = d->nodes;
    for (uint32_t i = 0; i < d->devices; i++)
        gpus[i]->properties.os_node = i % d->nodes;
    ok = expect(!numoe_gpu_model_create_over(gpus, d->devices, &source, &options, &model, &error),
                "model: %s", error.message);
    ok = ok && as_divided(model, d) && calls(model, small);
    numoe_gpu_model_destroy(model);
    regions_free();
    return ok;
}

int main(int argc, char **argv)
{
    enum { DIVISIONS = sizeof divisions / sizeof divisions[0], WAYS = 3 };
    static const char *const ways[WAYS] = {"nothing stays", "some stay", "all stay"};
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    struct numoe_error error = NUMOE_ERROR_INIT;

    if (numoe_gpu_count(&error) <= 0) {
        printf("skipped: no device: %s\n", error.message);
        skipped = DIVISIONS * WAYS;
    } else if (!experts_make() || !devices_open()) {
        failed++;
    }
    for (int i = 0; !skipped && !failed && i < DIVISIONS; i++)
        for (int way = 0; way < WAYS; way++) {
            char name[96];

            snprintf(name, sizeof name, "%s, %s", divisions[i].name, ways[way]);
            count(run_case(&divisions[i], way, small), name);
        }
    for (int i = 0; i < 4; i++)
        numoe_gpu_close(gpus[i]);
    free(whole);
    free(bias_of);
    return finish();
}
