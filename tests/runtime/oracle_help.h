/*
 * oracle_help.h - what the tests that compare with an oracle share: contexts by instruction set,
 * bf16, distances, and experts written out in plain C.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TESTS_ORACLE_HELP_H
#define NUMOE_TESTS_ORACLE_HELP_H

#include "numoe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The accuracy that every instruction set owes, as relative L2 to float64. */
#define FAST_LIMIT 1.25e-2
#define EXACT_LIMIT 2.5e-3

static inline double limit_of(enum numoe_arithmetic arithmetic)
{
    return arithmetic == NUMOE_FAST ? FAST_LIMIT : EXACT_LIMIT;
}

static inline const char *name_of(enum numoe_arithmetic arithmetic)
{
    return arithmetic == NUMOE_FAST ? "fast" : "exact";
}

static const enum numoe_arithmetic both_arithmetics[] = {NUMOE_FAST, NUMOE_EXACT};

/* One test a fact and instruction set, so that a missing one shows as skipped. */
#define TEST_EACH_ISA(suite, fact)                                                                 \
    static void suite##_##fact(const char *isa);                                                   \
    Test(suite, fact##_ref, .timeout = 120)                                                        \
    {                                                                                              \
        suite##_##fact("ref");                                                                     \
    }                                                                                              \
    Test(suite, fact##_avx2, .timeout = 120)                                                       \
    {                                                                                              \
        suite##_##fact("avx2");                                                                    \
    }                                                                                              \
    Test(suite, fact##_avx512, .timeout = 120)                                                     \
    {                                                                                              \
        suite##_##fact("avx512");                                                                  \
    }                                                                                              \
    Test(suite, fact##_avx512vnni, .timeout = 120)                                                 \
    {                                                                                              \
        suite##_##fact("avx512vnni");                                                              \
    }                                                                                              \
    static void suite##_##fact(const char *isa)

static inline void *must_calloc(size_t count, size_t bytes)
{
    void *memory = calloc(count ? count : 1, bytes ? bytes : 1);

    cr_assert_not_null(memory);
    return memory;
}

/* A context; skips the test when this CPU lacks the instruction set (never for ref). */
static inline struct numoe *open_on(const char *isa, const char *topology, uint32_t workers)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context = NULL;
    int rc;

    options.isa = isa;
    options.topology = topology;
    options.workers = workers;
    rc = numoe_open(&options, &context, &error);
    if (rc == -ENOTSUP && isa && strcmp(isa, "ref"))
        cr_skip_test("%s", error.message);
    cr_assert_eq(rc, 0, "numoe_open(%s, %s): %d %s: %s", isa ? isa : "best",
                 topology ? topology : "live", rc, error.where, error.message);
    return context;
}

static inline float bf16_float(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;

    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Nearest, ties to even; for numbers only. */
static inline uint16_t float_bf16(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* |a - b| / |b|; infinite when a holds a NaN, so that no comparison passes by accident. */
static inline double relative_l2(const float *a, const float *b, size_t count)
{
    double difference = 0, size = 0;

    for (size_t i = 0; i < count; i++) {
        double d = (double)a[i] - (double)b[i];

        if (isnan(d))
            return INFINITY;
        difference += d * d;
        size += (double)b[i] * (double)b[i];
    }
    if (size == 0)
        return difference == 0 ? 0 : INFINITY;
    return sqrt(difference / size);
}

static inline void run_ok(struct numoe_model *model, uint64_t layer,
                          const struct numoe_batch *batch, struct numoe_result *result)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_forward(model, layer, batch, result, &error);

    cr_assert_eq(rc, 0, "numoe_forward: %d %s: %s", rc, error.where, error.message);
}

/* ---- experts in plain C ---------------------------------------------------------------------- */

static const double e2m1_values[16] = {0,   0.5,  1,  1.5,  2,  3,  4,  6,
                                       -0., -0.5, -1, -1.5, -2, -3, -4, -6};

/* xorshift: the same numbers everywhere. */
static inline uint32_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 32);
}

/* Sum of four uniforms: near enough to normal, variance 1. */
static inline float random_normal(uint64_t *state)
{
    double sum = 0;

    for (int i = 0; i < 4; i++)
        sum += next_random(state) / 4294967296.0;
    return (float)((sum - 2) * sqrt(3));
}

/* A matrix as one code a byte and one scale byte for each 32 columns. */
struct plain_matrix {
    uint64_t rows, columns, groups;
    uint8_t *codes;  /* [rows, columns] */
    uint8_t *scales; /* [rows, groups] */
};

static inline struct plain_matrix plain_zero(uint64_t rows, uint64_t columns)
{
    struct plain_matrix matrix = {rows, columns, (columns + 31) / 32, NULL, NULL};

    matrix.codes = must_calloc(rows * columns, 1);
    matrix.scales = must_calloc(rows * matrix.groups, 1);
    memset(matrix.scales, 127, rows * matrix.groups);
    return matrix;
}

/* Random codes; scale bytes such that a product with unit inputs has a size near gain. */
static inline struct plain_matrix plain_random(uint64_t rows, uint64_t columns, double gain,
                                               uint64_t *state)
{
    struct plain_matrix matrix = plain_zero(rows, columns);
    int exponent = (int)lrint(log2(gain / (2.9 * sqrt((double)columns))));

    for (uint64_t i = 0; i < rows * columns; i++)
        matrix.codes[i] = next_random(state) & 15;
    for (uint64_t i = 0; i < rows * matrix.groups; i++)
        matrix.scales[i] = (uint8_t)(127 + exponent - 1 + (int)(next_random(state) % 3));
    return matrix;
}

static inline void plain_free(struct plain_matrix *matrix)
{
    free(matrix->codes);
    free(matrix->scales);
}

static inline double plain_value(const struct plain_matrix *matrix, uint64_t row, uint64_t column)
{
    return ldexp(e2m1_values[matrix->codes[row * matrix->columns + column]],
                 matrix->scales[row * matrix->groups + column / 32] - 127);
}

struct plain_expert {
    struct plain_matrix gate, up, down;
};

static inline struct plain_expert plain_expert_random(uint64_t hidden, uint64_t intermediate,
                                                      uint64_t *state)
{
    struct plain_expert expert;

    expert.gate = plain_random(intermediate, hidden, 3, state);
    expert.up = plain_random(intermediate, hidden, 3, state);
    expert.down = plain_random(hidden, intermediate, 1, state);
    return expert;
}

static inline void plain_expert_free(struct plain_expert *expert)
{
    plain_free(&expert->gate);
    plain_free(&expert->up);
    plain_free(&expert->down);
}

/* Written out again here, so that a mistake in the library's reference is not shared. */
static inline double plain_activation(const struct numoe_activation *a, double g, double u)
{
    if (a->kind == NUMOE_SILU_CLAMPED || a->kind == NUMOE_SWIGLU_OAI) {
        g = g > a->limit ? a->limit : g;
        u = u > a->limit ? a->limit : u < -a->limit ? -a->limit : u;
    }
    switch (a->kind) {
    case NUMOE_SILU:
    case NUMOE_SILU_CLAMPED:
        return g / (1 + exp(-g)) * u;
    case NUMOE_SWIGLU_OAI:
        return g / (1 + exp(-a->alpha * g)) * (u + 1);
    case NUMOE_SITU:
        if (a->up_cap > 0)
            u = a->up_cap * tanh(u / a->up_cap);
        return a->gate_cap * tanh(g / a->gate_cap) / (1 + exp(-g)) * u;
    }
    return NAN;
}

/* What a mode does to a vector before it is multiplied: int8 by groups of 32, or bf16; 0: nothing.
 */
static inline void plain_round(double *values, uint64_t count, int arithmetic)
{
    for (uint64_t group = 0; group < count && arithmetic == NUMOE_FAST; group += 32) {
        uint64_t end = group + 32 < count ? group + 32 : count;
        double amax = 0;

        for (uint64_t i = group; i < end; i++)
            amax = fmax(amax, fabs(values[i]));
        for (uint64_t i = group; i < end && amax > 0; i++)
            values[i] = rint(values[i] * 127 / amax) * amax / 127;
    }
    for (uint64_t i = 0; i < count && arithmetic == NUMOE_EXACT; i++)
        values[i] = bf16_float(float_bf16((float)values[i]));
}

/* y += weight * expert(x), all in double; x and h rounded as an arithmetic does, or 0: not. */
static inline void plain_add(const struct plain_expert *expert,
                             const struct numoe_activation *activation, const float *x,
                             double weight, int arithmetic, double *y)
{
    uint64_t hidden = expert->gate.columns, intermediate = expert->gate.rows;
    double *in = must_calloc(hidden, sizeof *in);
    double *h = must_calloc(intermediate, sizeof *h);

    for (uint64_t k = 0; k < hidden; k++)
        in[k] = x[k];
    plain_round(in, hidden, arithmetic);
    for (uint64_t i = 0; i < intermediate; i++) {
        double g = 0, u = 0;

        for (uint64_t k = 0; k < hidden; k++) {
            g += plain_value(&expert->gate, i, k) * in[k];
            u += plain_value(&expert->up, i, k) * in[k];
        }
        h[i] = plain_activation(activation, g, u);
    }
    plain_round(h, intermediate, arithmetic);
    for (uint64_t r = 0; r < hidden; r++)
        for (uint64_t i = 0; i < intermediate; i++)
            y[r] += weight * plain_value(&expert->down, r, i) * h[i];
    free(in);
    free(h);
}

/* The same as floats, from zero. */
static inline void plain_output(const struct plain_expert *expert,
                                const struct numoe_activation *activation, const float *x,
                                double weight, int arithmetic, float *y)
{
    double *sum = must_calloc(expert->down.rows, sizeof *sum);

    plain_add(expert, activation, x, weight, arithmetic, sum);
    for (uint64_t i = 0; i < expert->down.rows; i++)
        y[i] = (float)sum[i];
    free(sum);
}

/* The bytes of a matrix in blocks of 16, each row starting with a block of its own. Columns past
 * the last are filled with rubbish codes when rubbish is set: nothing may come of them. */
struct packed_matrix {
    uint8_t *codes, *scales;
    struct numoe_mxfp4 view;
};

static inline void pack_block(const uint8_t *codes, uint64_t count, enum numoe_nibbles nibbles,
                              uint8_t rubbish, uint8_t *out)
{
    uint8_t all[32];

    memset(all, rubbish & 15, sizeof all);
    memcpy(all, codes, count < 32 ? count : 32);
    for (unsigned j = 0; j < 16; j++) {
        if (nibbles == NUMOE_NIBBLES_ADJACENT)
            out[j] = (uint8_t)(all[2 * j] | all[2 * j + 1] << 4);
        else
            out[j] = (uint8_t)(all[j] | all[j + 16] << 4);
    }
}

/* ADJACENT: codes and scales apart, as Hugging Face has them. SPLIT: GGUF blocks of 17 bytes. */
static inline struct packed_matrix pack_plain(const struct plain_matrix *matrix,
                                              enum numoe_nibbles nibbles, uint8_t rubbish)
{
    uint64_t blocks = matrix->rows * matrix->groups;
    bool gguf = nibbles == NUMOE_NIBBLES_SPLIT;
    struct packed_matrix packed = {NULL, NULL, {0}};

    packed.codes = must_calloc(blocks, gguf ? 17 : 16);
    if (!gguf) {
        packed.scales = must_calloc(blocks, 1);
        memcpy(packed.scales, matrix->scales, blocks);
    }
    for (uint64_t row = 0; row < matrix->rows; row++) {
        for (uint64_t group = 0; group < matrix->groups; group++) {
            uint64_t block = row * matrix->groups + group;
            uint8_t *out = packed.codes + block * (gguf ? 17 : 16);

            if (gguf)
                *out++ = matrix->scales[block];
            pack_block(matrix->codes + row * matrix->columns + 32 * group,
                       matrix->columns - 32 * group, nibbles, rubbish, out);
        }
    }
    packed.view = (struct numoe_mxfp4){
        .codes = packed.codes + (gguf ? 1 : 0),
        .scales = gguf ? packed.codes : packed.scales,
        .code_stride = matrix->groups * (gguf ? 17 : 16),
        .scale_stride = matrix->groups * (gguf ? 17 : 1),
        .code_step = gguf ? 17 : 16,
        .scale_step = gguf ? 17 : 1,
        .nibbles = nibbles,
    };
    return packed;
}

static inline void packed_free(struct packed_matrix *packed)
{
    free(packed->codes);
    free(packed->scales);
}

static inline void load_plain(struct numoe_model *model, uint64_t layer, uint64_t index,
                              const struct plain_expert *expert, enum numoe_nibbles nibbles)
{
    struct packed_matrix gate = pack_plain(&expert->gate, nibbles, 7);
    struct packed_matrix up = pack_plain(&expert->up, nibbles, 15);
    struct packed_matrix down = pack_plain(&expert->down, nibbles, 6);
    struct numoe_expert_weights weights = {.size = sizeof weights};
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc;

    weights.gate = gate.view;
    weights.up = up.view;
    weights.down = down.view;
    rc = numoe_expert_load(model, layer, index, &weights, &error);
    cr_assert_eq(rc, 0, "numoe_expert_load: %d %s: %s", rc, error.where, error.message);
    packed_free(&gate);
    packed_free(&up);
    packed_free(&down);
}

static inline struct numoe_model *create_model(struct numoe *context, uint64_t hidden,
                                               uint64_t intermediate, uint64_t experts,
                                               struct numoe_activation activation,
                                               enum numoe_arithmetic arithmetic)
{
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model = NULL;
    int rc;

    desc.layers = 1;
    desc.experts = experts;
    desc.experts_per_token = 1;
    desc.hidden = hidden;
    desc.intermediate = intermediate;
    desc.activation = activation;
    desc.arithmetic = arithmetic;
    rc = numoe_model_create(context, &desc, &model, &error);
    cr_assert_eq(rc, 0, "numoe_model_create: %d %s: %s", rc, error.where, error.message);
    return model;
}

#endif
