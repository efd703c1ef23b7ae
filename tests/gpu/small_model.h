/*
 * small_model.h - a model of a few small experts over two nodes, batches for it, and whether their
 * outputs are right.
 */
#ifndef NUMOE_TESTS_SMALL_MODEL_H
#define NUMOE_TESTS_SMALL_MODEL_H

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>

#include "../support/experts.h"
#include "fake_device.h"
#include "gpu_model.h"

#ifndef SMALL_HIDDEN
#define SMALL_HIDDEN 40
#endif
enum {
    HIDDEN = SMALL_HIDDEN,
    INTERMEDIATE = 64,
    SLICES = 2,
    EXPERTS = 4,
    LAYERS = 5,
    NODES = 2,
    TOP_K = 2
};
enum { ABSENT_LAYER = 2, ABSENT_EXPERT = 1 };

/* A small model over two nodes; the boundary between them moves with layer and expert. */
struct model {
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    uint8_t *arena[NODES];
    uint64_t arena_bytes[NODES];
    uint64_t start[NODES][LAYERS * EXPERTS + 1]; /* slices */
    float *down_bias;                            /* [LAYERS][EXPERTS][64] lane order */
    uint32_t generation[LAYERS];
    uint64_t layers;
    bool bias;
};

static inline uint64_t boundary(uint64_t q)
{
    return q % (SLICES + 1);
}

static inline void model_fill(struct model *m, uint64_t layer)
{
    const uint64_t width = 32 * m->shape.hidden_tiles;

    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint64_t q = layer * EXPERTS + e, cut = boundary(q);
        struct numoe_pack_report report = {0};
        struct test_expert expert;

        test_expert_make(&expert, HIDDEN, INTERMEDIATE, m->bias);
        if (cut)
            numoe_pack_slices(&m->shape, &expert.source, 0, cut,
                              m->arena[0] + m->start[0][q] * m->shape.bytes, &report);
        if (cut < SLICES)
            numoe_pack_slices(&m->shape, &expert.source, cut, SLICES - cut,
                              m->arena[1] + m->start[1][q] * m->shape.bytes, &report);
        for (uint64_t i = 0; m->bias && i < width; i++) {
            const uint64_t from = i / 32 * 32 + numoe_lane_row(i % 32);
            m->down_bias[q * width + i] = from < HIDDEN ? expert.bias[2][from] : 0;
        }
        test_expert_free(&expert);
    }
    m->generation[layer]++;
}

static inline struct model *model_make(uint64_t layers, bool bias)
{
    struct model *m = calloc(1, sizeof *m);

    numoe_slice_shape_init(&m->shape, HIDDEN, bias);
    m->activation = (struct numoe_activation){.kind = NUMOE_SILU};
    m->layers = layers;
    m->bias = bias;
    m->down_bias = calloc(LAYERS * EXPERTS * 32 * m->shape.hidden_tiles, sizeof(float));
    for (uint64_t q = 0; q < layers * EXPERTS; q++) {
        m->start[0][q + 1] = m->start[0][q] + boundary(q);
        m->start[1][q + 1] = m->start[1][q] + SLICES - boundary(q);
    }
    for (int n = 0; n < NODES; n++) {
        m->arena_bytes[n] = m->start[n][layers * EXPERTS] * m->shape.bytes;
        m->arena[n] = aligned_bytes(m->arena_bytes[n]);
    }
    for (uint64_t l = 0; l < layers; l++)
        model_fill(m, l);
    return m;
}

static inline void model_free(struct model *m)
{
    for (int n = 0; n < NODES; n++)
        free(m->arena[n]);
    free(m->down_bias);
    free(m);
}

static inline void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    struct model *m = user;
    *address = m->arena[index];
    *bytes = m->arena_bytes[index];
}

static inline uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                             const uint8_t **address)
{
    struct model *m = user;
    const uint64_t q = layer * EXPERTS + expert;
    *address = m->arena[index] + m->start[index][q] * m->shape.bytes;
    return m->start[index][q + 1] - m->start[index][q];
}

static inline bool present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    return layer != ABSENT_LAYER || expert != ABSENT_EXPERT;
}

static inline const float *bias(void *user, uint64_t layer, uint64_t expert)
{
    struct model *m = user;
    return m->down_bias + (layer * EXPERTS + expert) * 32 * m->shape.hidden_tiles;
}

static inline uint32_t generation(void *user, uint64_t layer)
{
    return ((struct model *)user)->generation[layer];
}

static inline struct numoe_gpu_source source_of(struct model *m)
{
    return (struct numoe_gpu_source){.user = m,
                                     .shape = m->shape,
                                     .activation = m->activation,
                                     .layers = m->layers,
                                     .experts = EXPERTS,
                                     .slices = SLICES,
                                     .down_bias = m->bias,
                                     .region_count = NODES,
                                     .arena = arena,
                                     .place = place,
                                     .present = present,
                                     .bias = bias,
                                     .generation = generation};
}

enum { TOKENS_MOST = 7, GAP = 3 };

struct batch {
    float x[TOKENS_MOST][HIDDEN], out[TOKENS_MOST][HIDDEN + GAP], before[TOKENS_MOST][HIDDEN + GAP];
    float routing[TOKENS_MOST][TOP_K];
    int32_t ids[TOKENS_MOST][TOP_K];
    struct numoe_gpu_call call;
};

static inline void batch_make(struct batch *b)
{
    for (int t = 0; t < TOKENS_MOST; t++) {
        for (int k = 0; k < HIDDEN; k++)
            b->x[t][k] = round_to_bf16(random_normal());
        for (int k = 0; k < HIDDEN + GAP; k++)
            b->out[t][k] = b->before[t][k] = random_normal();
        for (int j = 0; j < TOP_K; j++) {
            b->ids[t][j] = (int32_t)(random_u64() >> 20) % (EXPERTS + 1) - (random_u64() % 5 == 0);
            if (b->ids[t][j] == EXPERTS)
                b->ids[t][j] = -1;
            b->routing[t][j] = (float)random_unit();
        }
    }
    b->call = (struct numoe_gpu_call){.tokens = 1 + random_u64() % TOKENS_MOST,
                                      .top_k = TOP_K,
                                      .x = b->x,
                                      .x_type = NUMOE_F32,
                                      .x_stride = HIDDEN,
                                      .ids = &b->ids[0][0],
                                      .routing = &b->routing[0][0],
                                      .out = b->out,
                                      .out_type = NUMOE_F32,
                                      .out_stride = HIDDEN + GAP,
                                      .add = random_u64() % 2,
                                      .scale = 1.5f};
}

static inline bool same_bits(const void *a, const void *b, size_t bytes)
{
    return memcmp(a, b, bytes) == 0;
}

/* Outputs of tokens below done, and that the rest is as before. */
static inline bool batch_right(const struct model *m, uint64_t layer, const struct batch *b,
                               uint64_t done)
{
    uint8_t slices[SLICES * 16384];
    const uint64_t width = 32 * m->shape.hidden_tiles, bytes = m->shape.bytes;

    for (uint64_t t = 0; t < TOKENS_MOST; t++) {
        double want[HIDDEN] = {0};
        if (!same_bits(&b->out[t][HIDDEN], &b->before[t][HIDDEN], GAP * sizeof(float)))
            return false;
        if (t >= done) {
            if (!same_bits(b->out[t], b->before[t], sizeof b->out[t]))
                return false;
            continue;
        }
        for (int j = 0; j < TOP_K; j++) {
            const int32_t e = b->ids[t][j];
            const uint64_t q = layer * EXPERTS + (uint64_t)(e < 0 ? 0 : e), cut = boundary(q);
            if (e < 0 || (layer == ABSENT_LAYER && e == ABSENT_EXPERT))
                continue;
            memcpy(slices, m->arena[0] + m->start[0][q] * bytes, cut * bytes);
            memcpy(slices + cut * bytes, m->arena[1] + m->start[1][q] * bytes,
                   (SLICES - cut) * bytes);
            numoe_reference_slices(&m->shape, &m->activation, slices, SLICES, b->x[t],
                                   (double)b->routing[t][j],
                                   m->bias ? m->down_bias + q * width : NULL, true, want);
        }
        for (int k = 0; k < HIDDEN; k++) {
            want[k] = want[k] * 1.5 + (b->call.add ? (double)b->before[t][k] : 0);
            if (!(fabs(want[k] - (double)b->out[t][k]) <= 1e-5 * (1 + fabs(want[k]))))
                return false;
        }
    }
    return true;
}

static inline struct numoe_gpu *wrap(struct fake *f)
{
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe_gpu *gpu;

    cr_assert_eq(gpu_wrap(&fake_ops, f, &p, NULL, &gpu), 0);
    return gpu;
}

/* A model on a device that refuses nothing. */
static inline struct numoe_gpu_model *model_on(struct numoe_gpu *gpu, struct model *m,
                                               const struct numoe_gpu_model_options *options)
{
    const struct numoe_gpu_source source = source_of(m);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model = NULL;

    cr_assert_eq(numoe_gpu_model_create(gpu, &source, options, &model, &error), 0, "%s",
                 error.message);
    return model;
}

static inline void expect_clean(struct fake *f)
{
    uint32_t streams = 0;

    cr_expect_eq(f->wrong, 0, "%s", f->text);
    cr_expect_leq(f->range_count, f->lost, "%u ranges were left", f->range_count);
    cr_expect_leq(f->events, f->lost, "%u events were left", f->events);
    for (int i = 0; i < FAKE_STREAMS; i++)
        streams += f->streams[i].used;
    cr_expect_leq(streams, f->lost, "%u streams were left", streams);
}

/* The end of a test: of the model, and of the device, on which nothing is left. */
static inline void close_clean(struct numoe_gpu_model *model, struct numoe_gpu *gpu, struct fake *f)
{
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* Calls this small pass through several stages, or one after the other again through the same; and
 * copies of experts go ahead of inputs. */
static inline void many_stages(struct numoe_gpu_model *model, uint64_t seed)
{
    const uint64_t token = 2 * HIDDEN * sizeof(float) + 8 * TOP_K + 4 * 256;

    if (seed % 4 == 0)
        return;
    model->stage_least = 1;
    model->stage_most = seed % 4 == 1 ? token : seed % 4 * token;
}

#endif
