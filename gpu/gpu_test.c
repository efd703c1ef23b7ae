/*
 * The self-test: a few random experts go the whole way (packed, pinned, copied, computed, copied
 * back) by every form of the kernels that is not off, and are compared with the reference.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_internal.h"

enum {
    HIDDEN = 96,
    INTERMEDIATE = 70, /* three slices, the last one padded */
    SLICES = 3,
    EXPERTS = 5,
    ABSENT = 2,
    TOP_K = 3,
    TOKENS_MOST = 100
};

struct test {
    struct numoe_slice_shape shape;
    uint8_t *packed; /* [EXPERTS][SLICES] */
    uint64_t bytes;
    float down_bias[EXPERTS][HIDDEN]; /* lane order */
    float x[TOKENS_MOST][HIDDEN], out[TOKENS_MOST][HIDDEN];
    float routing[TOKENS_MOST][TOP_K];
    int32_t ids[TOKENS_MOST][TOP_K];
    uint64_t random;
};

static const struct numoe_activation activation = {
    .kind = NUMOE_SWIGLU_OAI, .limit = 7.0f, .alpha = 1.702f};

static uint32_t draw(struct test *t)
{
    t->random = t->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(t->random >> 33);
}

/* In (-1, 1), exact in bf16. */
static float draw_unit(struct test *t)
{
    return (float)(int)(draw(t) % 255 - 127) / 128.0f;
}

static void draw_bytes(struct test *t, uint8_t *to, size_t count, unsigned low, unsigned kinds)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (uint8_t)(low + draw(t) % kinds);
}

static int pack(struct test *t)
{
    enum { IN = HIDDEN / 32, OUT = (INTERMEDIATE + 31) / 32 };
    uint8_t gate[INTERMEDIATE][HIDDEN / 2 + 16], up[INTERMEDIATE][HIDDEN / 2 + 16];
    uint8_t down[HIDDEN][OUT * 16], in_scales[2][INTERMEDIATE][IN], out_scales[HIDDEN][OUT];
    float bias[2][INTERMEDIATE];

    for (int e = 0; e < EXPERTS; e++) {
        struct numoe_pack_report report = {0};
        struct numoe_expert_source source = {.hidden = HIDDEN, .intermediate = INTERMEDIATE};
        int rc;

        draw_bytes(t, &gate[0][0], sizeof gate, 0, 256);
        draw_bytes(t, &up[0][0], sizeof up, 0, 256);
        draw_bytes(t, &down[0][0], sizeof down, 0, 256);
        draw_bytes(t, &in_scales[0][0][0], sizeof in_scales, 121, 4);
        draw_bytes(t, &out_scales[0][0], sizeof out_scales, 121, 4);
        for (int i = 0; i < INTERMEDIATE; i++) {
            bias[0][i] = draw_unit(t);
            bias[1][i] = draw_unit(t);
        }
        for (int i = 0; i < HIDDEN; i++)
            t->down_bias[e][i] = draw_unit(t);
        source.gate = (struct numoe_mxfp4){.codes = &gate[0][0],
                                           .scales = &in_scales[0][0][0],
                                           .code_stride = sizeof gate[0],
                                           .scale_stride = IN,
                                           .code_step = 16,
                                           .scale_step = 1,
                                           .nibbles = NUMOE_NIBBLES_ADJACENT};
        source.up = source.gate;
        source.up.codes = &up[0][0];
        source.up.scales = &in_scales[1][0][0];
        source.down = source.gate;
        source.down.codes = &down[0][0];
        source.down.scales = &out_scales[0][0];
        source.down.code_stride = sizeof down[0];
        source.down.scale_stride = OUT;
        source.gate_bias = bias[0];
        source.up_bias = bias[1];
        source.bias_step = 1;
        rc = numoe_pack_slices(&t->shape, &source, 0, SLICES,
                               t->packed + (uint64_t)e * SLICES * t->shape.bytes, &report);
        if (rc)
            return rc;
    }
    return 0;
}

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    struct test *t = user;

    (void)index;
    *address = t->packed;
    *bytes = t->bytes;
}

static uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                      const uint8_t **address)
{
    struct test *t = user;

    (void)layer;
    (void)index;
    *address = t->packed + expert * SLICES * t->shape.bytes;
    return SLICES;
}

static bool present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    return expert != ABSENT;
}

static const float *bias(void *user, uint64_t layer, uint64_t expert)
{
    struct test *t = user;

    (void)layer;
    return t->down_bias[expert];
}

static uint32_t generation(void *user, uint64_t layer)
{
    (void)user;
    (void)layer;
    return 0;
}

static void draw_batch(struct test *t, uint32_t tokens)
{
    for (uint32_t i = 0; i < tokens; i++) {
        for (int k = 0; k < HIDDEN; k++) {
            t->x[i][k] = draw_unit(t);
            t->out[i][k] = NAN;
        }
        for (int j = 0; j < TOP_K; j++) {
            const uint32_t d = draw(t);
            t->routing[i][j] = 0.5f + draw_unit(t) / 4;
            t->ids[i][j] = d % 16 == 0   ? -1
                           : d % 16 == 1 ? EXPERTS
                           : d % 16 == 2 ? INT32_MAX
                                         : (int32_t)(d / 16 % EXPERTS);
        }
    }
}

static double compare(const struct test *t, uint32_t tokens)
{
    double off = 0, size = 0;

    for (uint32_t i = 0; i < tokens; i++) {
        double want[HIDDEN] = {0};
        for (int j = 0; j < TOP_K; j++) {
            const int32_t id = t->ids[i][j];
            if (id < 0 || id >= EXPERTS || id == ABSENT)
                continue;
            numoe_reference_slices(&t->shape, &activation,
                                   t->packed + (uint64_t)id * SLICES * t->shape.bytes, SLICES,
                                   t->x[i], (double)t->routing[i][j], t->down_bias[id], true, want);
        }
        for (int k = 0; k < HIDDEN; k++) {
            const double d = (double)t->out[i][k] - want[k];
            off += d * d;
            size += want[k] * want[k];
        }
    }
    const double relative = size > 0 ? sqrt(off / size) : sqrt(off);
    return isfinite(relative) ? relative : INFINITY;
}

int gpu_self_test(struct numoe_gpu *gpu, double *rel_l2, struct numoe_error *error)
{
    static const uint32_t counts[] = {1, 40, TOKENS_MOST};
    enum { COUNTS = sizeof counts / sizeof counts[0] };
    const uint32_t off = gpu->forms_off, forms = numoe_gpu_forms(gpu);
    struct numoe_gpu_model *model = NULL;
    struct test *t = calloc(1, sizeof *t);
    struct numoe_gpu_source source;
    int rc = -ENOMEM;

    if (!t)
        return numoe_error_set(error, -ENOMEM, "self-test", "out of memory");
    t->random = 20240229;
    rc = numoe_slice_shape_init(&t->shape, HIDDEN, true);
    if (rc)
        goto out;
    t->bytes = (EXPERTS * SLICES * t->shape.bytes + 4095) / 4096 * 4096;
    t->packed = aligned_alloc(4096, t->bytes);
    if (!t->packed) {
        rc = numoe_error_set(error, -ENOMEM, "self-test", "out of memory");
        goto out;
    }
    memset(t->packed, 0, t->bytes);
    rc = pack(t);
    if (rc) {
        numoe_error_set(error, rc, "self-test", "its experts could not be packed");
        goto out;
    }
    source = (struct numoe_gpu_source){
        .user = t,
        .shape = t->shape,
        .activation = activation,
        .layers = 1,
        .experts = EXPERTS,
        .slices = SLICES,
        .down_bias = true,
        .region_count = 1,
        .arena = arena,
        .place = place,
        .present = present,
        .bias = bias,
        .generation = generation,
    };
    rc = numoe_gpu_model_create(
        gpu, &source, &(struct numoe_gpu_model_options){.ring_bytes = 1 << 20}, &model, error);
    *rel_l2 = forms ? 0 : INFINITY;
    for (uint32_t i = COUNTS; !rc && i < (NUMOE_GPU_FORMS + 1) * COUNTS; i++) {
        const uint32_t form = i / COUNTS, tokens = counts[i % COUNTS];
        const struct numoe_gpu_call call = {
            .tokens = tokens,
            .top_k = TOP_K,
            .x = t->x,
            .x_type = NUMOE_F32,
            .x_stride = HIDDEN,
            .ids = &t->ids[0][0],
            .routing = &t->routing[0][0],
            .out = t->out,
            .out_type = NUMOE_F32,
            .out_stride = HIDDEN,
            .scale = 1.0f,
        };
        uint64_t done;
        double distance;

        if (!(forms >> form & 1))
            continue;
        gpu->forms_off = ~(1u << form); /* leaves it alone to be chosen */
        draw_batch(t, tokens);
        rc = numoe_gpu_forward(model, 0, &call, &done, error);
        distance = rc ? 0 : compare(t, tokens);
        if (distance > *rel_l2)
            *rel_l2 = distance;
    }
    gpu->forms_off = off;
    numoe_gpu_model_destroy(model);
out:
    free(t->packed);
    free(t);
    return rc;
}
