/*
 * The reference kernel sets: plain C for any CPU, one code at a time. They round where the vector
 * sets round (x and h to what the mode carries), so they are both the fallback and a check of what
 * the modes mean.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bf16.h"
#include "kernel_sets.h"
#include "mxfp8.h"
#include "numoe_kernels.h"

#include <math.h>
#include <string.h>

enum { REF_TOKENS = 32 };

static const int doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 32 activations in natural order: integers and their scale, or values with scale 1. */
struct group {
    float v[NUMOE_TILE];
    float scale;
};

/* Integers up to `most`; groups smaller than `least` everywhere are zero. */
static void put_integers(const float v[NUMOE_TILE], float most, float least, struct group *g)
{
    float amax = 0.0f;
    bool finite = true;

    for (int k = 0; k < NUMOE_TILE; k++) {
        finite = finite && isfinite(v[k]);
        amax = fmaxf(amax, fabsf(v[k]));
    }
    memset(g, 0, sizeof *g);
    g->scale = finite ? 0.0f : (float)NAN;
    if (!finite || !(amax > least))
        return;
    for (int k = 0; k < NUMOE_TILE; k++)
        g->v[k] = rintf(v[k] * (most / amax));
    g->scale = amax / most;
}

static void put_bf16(const float v[NUMOE_TILE], struct group *g)
{
    for (int k = 0; k < NUMOE_TILE; k++)
        g->v[k] = numoe_bf16_to_float(numoe_float_to_bf16(v[k]));
    g->scale = 1.0f;
}

static void put_mxfp8(const float v[NUMOE_TILE], enum numoe_arithmetic mode, struct group *g)
{
    float amax = 0.0f;
    bool finite = true;
    uint32_t bits;
    unsigned byte;

    for (int k = 0; k < NUMOE_TILE; k++) {
        finite = finite && isfinite(v[k]);
        amax = fmaxf(amax, fabsf(v[k]));
    }
    memcpy(&bits, &amax, sizeof bits);
    byte = numoe_mxfp8_scale(bits, mode);
    for (int k = 0; k < NUMOE_TILE; k++)
        g->v[k] = finite ? numoe_round_e4m3(v[k] * numoe_mxfp8_inverse(byte)) : (float)NAN;
    g->scale = finite ? numoe_mxfp8_power(byte) : 1.0f;
}

static void put(const float v[NUMOE_TILE], enum numoe_arithmetic mode, struct group *g)
{
    switch (mode) {
    case NUMOE_FAST:
        put_integers(v, 127, 1e-35f, g);
        break;
    case NUMOE_FINE:
        put_integers(v, 32512, 1e-33f, g);
        break;
    case NUMOE_EXACT:
        put_bf16(v, g);
        break;
    case NUMOE_MXFP8_UP:
    case NUMOE_MXFP8_OCP:
        put_mxfp8(v, mode, g);
        break;
    }
}

static size_t record_bytes(const struct numoe_slice_shape *shape)
{
    return (shape->hidden_tiles * sizeof(struct group) + NUMOE_ALIGNMENT - 1) / NUMOE_ALIGNMENT *
           NUMOE_ALIGNMENT;
}

static size_t scratch_bytes(const struct numoe_slice_shape *shape)
{
    return shape->hidden_tiles * NUMOE_TILE * sizeof(float);
}

static void quantise(const struct numoe_slice_shape *shape, const void *x, enum numoe_type type,
                     enum numoe_arithmetic mode, void *record)
{
    struct group *g = record;

    for (uint64_t b = 0; b < shape->hidden_tiles; b++) {
        float v[NUMOE_TILE] = {0};
        for (uint64_t k = NUMOE_TILE * b; k < NUMOE_TILE * (b + 1) && k < shape->hidden; k++)
            v[k % NUMOE_TILE] = type == NUMOE_BF16 ? numoe_bf16_to_float(((const uint16_t *)x)[k])
                                                   : ((const float *)x)[k];
        put(v, mode, &g[b]);
    }
}

static void values(const struct numoe_slice_shape *shape, const void *record, float *x)
{
    const struct group *g = record;

    for (uint64_t k = 0; k < shape->hidden; k++)
        x[k] = g[k / NUMOE_TILE].v[k % NUMOE_TILE] * g[k / NUMOE_TILE].scale;
}

static float e8m0(uint8_t e)
{
    return ldexpf(1.0f, e - 127);
}

/* Dot of one tile row (by lane) with a group, in the group's units. */
static float dot(const uint8_t *codes, unsigned lane, const struct group *g)
{
    float sum = 0.0f;

    for (unsigned t = 0; t < 4; t++) {
        uint32_t word;
        memcpy(&word, codes + 128 * t + 4 * lane, 4);
        for (unsigned k = 0; k < 8; k++)
            sum += 0.5f * (float)doubled[word >> (4 * (k / 2 + k % 2 * 4)) & 15] * g->v[8 * t + k];
    }
    return sum * g->scale;
}

/* y += what a token gets. */
static void ffn_token(const struct numoe_ffn *f, unsigned token, float *y)
{
    const struct numoe_slice_shape *shape = f->shape;
    const struct group *x = f->x[token];

    for (uint64_t s = 0; s < f->slice_count; s++) {
        const uint8_t *slice = (const uint8_t *)f->slices + s * shape->bytes;
        const float *bias = (const float *)(const void *)(slice + shape->bias_offset);
        float natural[NUMOE_TILE];
        struct group h;

        for (unsigned lane = 0; lane < NUMOE_TILE; lane++) {
            float gate = shape->bias ? bias[lane] : 0.0f, up = shape->bias ? bias[32 + lane] : 0.0f;
            for (uint64_t b = 0; b < shape->hidden_tiles; b++) {
                const uint8_t *pair = slice + b * NUMOE_PAIR_BYTES;
                gate += dot(pair, lane, &x[b]) * e8m0(pair[1024 + lane]);
                up += dot(pair + 512, lane, &x[b]) * e8m0(pair[1056 + lane]);
            }
            natural[numoe_lane_row(lane)] =
                (float)numoe_activation_reference(f->activation, (double)gate, (double)up);
        }
        put(natural, f->arithmetic, &h);
        for (uint64_t p = 0; p < shape->hidden_tiles; p++) {
            const uint8_t *pair = slice + shape->down_offset + p / 2 * NUMOE_PAIR_BYTES;
            const uint64_t half = p % 2;
            for (unsigned lane = 0; lane < NUMOE_TILE; lane++)
                y[NUMOE_TILE * p + lane] += f->weight[token] * dot(pair + 512 * half, lane, &h) *
                                            e8m0(pair[1024 + 32 * half + lane]);
        }
    }
    if (f->down_bias)
        for (uint64_t i = 0; i < shape->hidden_tiles * NUMOE_TILE; i++)
            y[i] += f->weight[token] * f->down_bias[i];
}

static void few(const struct numoe_ffn *f)
{
    for (unsigned i = 0; i < f->tokens; i++) {
        if (!f->add)
            memset(f->y[i], 0, f->shape->hidden_tiles * NUMOE_TILE * sizeof(float));
        ffn_token(f, i, f->y[i]);
    }
}

static void many(const struct numoe_ffn *f)
{
    const uint64_t width = f->shape->hidden_tiles * NUMOE_TILE;
    float *sum = f->scratch;

    for (unsigned i = 0; i < f->tokens; i++) {
        memset(sum, 0, width * sizeof *sum);
        ffn_token(f, i, sum);
        for (uint64_t j = 0; j < width; j++)
            f->y[i][j] = f->add ? f->y[i][j] + sum[j] : sum[j];
    }
}

static void combine(const struct numoe_combine *c)
{
    uint64_t end = c->tile_end * NUMOE_TILE;

    if (end > c->hidden)
        end = c->hidden;
    for (uint64_t i = c->tile_begin * NUMOE_TILE; i < end; i++) {
        const uint64_t at = i / NUMOE_TILE * NUMOE_TILE + numoe_row_lane(i % NUMOE_TILE);
        uint16_t *half = (uint16_t *)c->out + i;
        float *whole = (float *)c->out + i;
        float sum = 0.0f, part = 0.0f;
        for (uint64_t r = 0; r < c->row_count; r++) {
            part += c->rows[r][at];
            if (c->ends && c->ends[r]) {
                sum += part;
                part = 0.0f;
            }
        }
        sum = (c->ends ? sum : part) * c->scale;
        if (c->add)
            sum = (c->type == NUMOE_BF16 ? numoe_bf16_to_float(*half) : *whole) + sum;
        if (c->type == NUMOE_BF16)
            *half = numoe_float_to_bf16(sum);
        else
            *whole = sum;
    }
}

#define REF_SET(symbol, set_name, mode)                                                            \
    static void quantise_##mode(const struct numoe_slice_shape *shape, const void *x,              \
                                enum numoe_type type, void *record)                                \
    {                                                                                              \
        quantise(shape, x, type, mode, record);                                                    \
    }                                                                                              \
    const struct numoe_kernels symbol = {                                                          \
        .isa = "ref",                                                                              \
        .name = (set_name),                                                                        \
        .arithmetic = (mode),                                                                      \
        .few_tokens = REF_TOKENS,                                                                  \
        .few_limit = REF_TOKENS,                                                                   \
        .many_tokens = REF_TOKENS,                                                                 \
        .forms_agree = true,                                                                       \
        .record_bytes = record_bytes,                                                              \
        .scratch_bytes = scratch_bytes,                                                            \
        .quantise = quantise_##mode,                                                               \
        .values = values,                                                                          \
        .few = few,                                                                                \
        .many = many,                                                                              \
        .combine = combine,                                                                        \
    }

REF_SET(numoe_fast_ref, "fast ref", NUMOE_FAST);
REF_SET(numoe_exact_ref, "exact ref", NUMOE_EXACT);
REF_SET(numoe_fine_ref, "fine ref", NUMOE_FINE);
REF_SET(numoe_mxfp8_ref, "mxfp8 ref", NUMOE_MXFP8_UP);
REF_SET(numoe_mxfp8_ocp_ref, "mxfp8-ocp ref", NUMOE_MXFP8_OCP);
