/*
 * experts.h - random experts, tokens and comparisons for tests. Deterministic in the seed.
 */
#ifndef NUMOE_TESTS_EXPERTS_H
#define NUMOE_TESTS_EXPERTS_H

#include "numoe_kernels.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static inline uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* In [0, 1). */
static inline double random_unit(void)
{
    return (double)(random_u64() >> 11) * 0x1p-53;
}

static inline float random_normal(void)
{
    const double u = 1.0 - random_unit(), v = random_unit();
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static inline float round_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    u = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t bf16_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static inline float bf16_value(uint16_t b)
{
    const uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline void *aligned_bytes(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!p)
        abort();
    memset(p, 0xA5, (bytes + 63) / 64 * 64 + 64);
    return p;
}

/* An expert in checkpoint order, with storage of its own. */
struct test_expert {
    uint64_t hidden, intermediate;
    uint8_t *codes[3], *scales[3];
    float *bias[3]; /* gate, up, down; NULL without */
    struct numoe_expert_source source;
};

static inline void test_expert_matrix(struct test_expert *e, int m, uint64_t rows, uint64_t columns,
                                      int scale_low, int scale_count)
{
    const uint64_t code_row = (columns + 1) / 2, scale_row = (columns + 31) / 32;
    struct numoe_mxfp4 *to[3] = {&e->source.gate, &e->source.up, &e->source.down};
    /* the packer may read whole blocks of the last group */
    e->codes[m] = malloc(rows * code_row + 16);
    e->scales[m] = malloc(rows * scale_row);
    for (uint64_t i = 0; i < rows * code_row; i++)
        e->codes[m][i] = (uint8_t)(random_u64() >> 33);
    for (uint64_t i = 0; i < rows * scale_row; i++)
        e->scales[m][i] = (uint8_t)(scale_low + (int)(random_u64() >> 40) % scale_count);
    *to[m] = (struct numoe_mxfp4){.codes = e->codes[m],
                                  .scales = e->scales[m],
                                  .code_stride = code_row,
                                  .scale_stride = scale_row,
                                  .code_step = 16,
                                  .scale_step = 1,
                                  .nibbles = NUMOE_NIBBLES_ADJACENT};
}

/* Weights around 1 / sqrt(width), so that g and u are of order 1. */
static inline void test_expert_make(struct test_expert *e, uint64_t hidden, uint64_t intermediate,
                                    bool bias)
{
    const int low_in = 127 - 2 - (int)lround(0.5 * log2((double)hidden));
    const int low_out = 127 - 2 - (int)lround(0.5 * log2((double)intermediate));

    *e = (struct test_expert){.hidden = hidden, .intermediate = intermediate};
    test_expert_matrix(e, 0, intermediate, hidden, low_in, 4);
    test_expert_matrix(e, 1, intermediate, hidden, low_in, 4);
    test_expert_matrix(e, 2, hidden, intermediate, low_out, 4);
    e->source.hidden = hidden;
    e->source.intermediate = intermediate;
    if (bias) {
        const uint64_t count[3] = {intermediate, intermediate, hidden};
        for (int m = 0; m < 3; m++) {
            e->bias[m] = malloc(count[m] * sizeof(float));
            for (uint64_t i = 0; i < count[m]; i++)
                e->bias[m][i] = 0.3f * random_normal();
        }
        e->source.gate_bias = e->bias[0];
        e->source.up_bias = e->bias[1];
        e->source.bias_step = 1;
    }
}

static inline void test_expert_free(struct test_expert *e)
{
    for (int m = 0; m < 3; m++) {
        free(e->codes[m]);
        free(e->scales[m]);
        free(e->bias[m]);
    }
}

/* E2M1 x E8M0 read straight from the checkpoint bytes, independent of the packer. */
static inline double test_expert_weight(const struct test_expert *e, int m, uint64_t row,
                                        uint64_t column)
{
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const struct numoe_mxfp4 *from[3] = {&e->source.gate, &e->source.up, &e->source.down};
    const struct numoe_mxfp4 *w = from[m];
    const uint8_t byte = w->codes[row * w->code_stride + column / 2];
    const unsigned code = column % 2 ? byte >> 4 : byte & 15;
    const uint8_t scale = w->scales[row * w->scale_stride + column / 32];
    return (code & 8 ? -1 : 1) * magnitude[code & 7] * ldexp(1.0, scale - 127);
}

/* y[hidden] += weight * expert(x), in double from checkpoint bytes. */
static inline void test_expert_apply(const struct test_expert *e,
                                     const struct numoe_activation *activation, const float *x,
                                     double weight, double *y)
{
    double *h = malloc(e->intermediate * sizeof *h);

    for (uint64_t i = 0; i < e->intermediate; i++) {
        double gate = e->bias[0] ? (double)e->bias[0][i] : 0;
        double up = e->bias[1] ? (double)e->bias[1][i] : 0;
        for (uint64_t k = 0; k < e->hidden; k++) {
            gate += test_expert_weight(e, 0, i, k) * (double)x[k];
            up += test_expert_weight(e, 1, i, k) * (double)x[k];
        }
        h[i] = numoe_activation_reference(activation, gate, up);
    }
    for (uint64_t r = 0; r < e->hidden; r++) {
        double sum = e->bias[2] ? (double)e->bias[2][r] : 0;
        for (uint64_t i = 0; i < e->intermediate; i++)
            sum += test_expert_weight(e, 2, r, i) * h[i];
        y[r] += weight * sum;
    }
    free(h);
}

static inline double relative_l2(const double *want, const float *got, uint64_t count)
{
    double error = 0, norm = 0;

    for (uint64_t i = 0; i < count; i++) {
        const double d = want[i] - (double)got[i];
        error += d * d;
        norm += want[i] * want[i];
    }
    return norm > 0 ? sqrt(error / norm) : sqrt(error);
}

#endif
