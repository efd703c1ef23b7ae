/*
 * Experts of the soak: their bytes as a caller or a checkpoint has them, and what they compute,
 * told from those bytes alone.
 *
 * A result is judged by the error that the arithmetic may be expected to make in it, output by
 * output, so that one wrong number stands out and shapes of a few columns, where sums cancel by
 * chance, raise no false alarm. An activation x_k is rounded to int8 in steps of the largest of its
 * group over 127 (fast) or to bf16 (exact), with a root mean square error q_k. Errors of different
 * places are taken as independent:
 *
 *     of gate g:  Eg^2 = sum_k W1_k^2 q_k^2          of up u: Eu likewise
 *     of h:       Eh <= 1.1 (|u| + c) Eg + |g| Eu    c = 1 where the activation adds 1 to u
 *     of y:       Ey^2 = sum_i W2_i^2 (Eh_i^2 + q(h)_i^2), times the routing weight
 *
 * 1.1 bounds the derivative of g sigmoid(a g), and of its capped form; clamps only make it less.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "soak_walk.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32 };

/* Root mean square of rounding: int8 to a step of amax / 127, bf16 to 2^-7 of the binade. */
#define FAST_STEP (1.0 / (127.0 * 3.4641016151377544))
#define EXACT_STEP (0x1p-7 / 3.4641016151377544)
/* Of fp32 sums and of vector forms of exp. */
#define FLOAT_ERROR 1e-6
#define ACTIVATION_ERROR 1e-5
#define DERIVATIVE 1.1

/* How the matrices of an expert lie. */
enum form {
    FORM_PLAIN,       /* codes and scales apart, rows as short as they can be */
    FORM_PADDED,      /* the same in whole groups, rows further apart */
    FORM_BLOCKS,      /* a scale byte before each 16 bytes of codes, nibbles split */
    FORM_INTERLEAVED, /* gate and up row by row in one matrix, biases likewise */
    FORM_COUNT
};

static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static uint64_t groups_of(uint64_t columns)
{
    return (columns + GROUP - 1) / GROUP;
}

/* One matrix to be placed at *bytes, or its size only when that is NULL. */
static uint64_t lay_matrix(struct numoe_mxfp4 *m, enum form form, uint64_t rows, uint64_t columns,
                           uint8_t *bytes)
{
    const uint64_t groups = groups_of(columns);
    uint64_t codes;

    if (form == FORM_BLOCKS) {
        *m = (struct numoe_mxfp4){.codes = bytes ? bytes + 1 : NULL,
                                  .scales = bytes,
                                  .code_stride = 17 * groups,
                                  .scale_stride = 17 * groups,
                                  .code_step = 17,
                                  .scale_step = 17,
                                  .nibbles = NUMOE_NIBBLES_SPLIT};
        return 17 * groups * rows;
    }
    *m = (struct numoe_mxfp4){.codes = bytes,
                              .code_stride =
                                  form == FORM_PADDED ? 16 * groups + 5 : (columns + 1) / 2,
                              .scale_stride = form == FORM_PADDED ? groups + 3 : groups,
                              .code_step = 16,
                              .scale_step = 1,
                              .nibbles = NUMOE_NIBBLES_ADJACENT};
    codes = m->code_stride * rows;
    m->scales = bytes ? bytes + codes : NULL;
    return codes + m->scale_stride * rows;
}

static uint64_t lay_expert(struct soak_expert *e, enum form form, uint8_t *bytes)
{
    const uint64_t H = e->hidden, I = e->intermediate;
    uint64_t used;

    if (form == FORM_INTERLEAVED) {
        struct numoe_mxfp4 *gate = &e->matrices[0], *up = &e->matrices[1];

        used = lay_matrix(gate, FORM_PLAIN, 2 * I, H, bytes);
        *up = *gate;
        if (bytes) {
            up->codes += up->code_stride;
            up->scales += up->scale_stride;
        }
        gate->code_stride = up->code_stride = 2 * gate->code_stride;
        gate->scale_stride = up->scale_stride = 2 * gate->scale_stride;
        form = FORM_PLAIN;
    } else {
        used = lay_matrix(&e->matrices[0], form, I, H, bytes);
        used += lay_matrix(&e->matrices[1], form, I, H, bytes ? bytes + used : NULL);
    }
    return used + lay_matrix(&e->matrices[2], form, H, I, bytes ? bytes + used : NULL);
}

/* Scale bytes of a matrix: near 1 / sqrt(columns), and in some experts now and then one so small
 * that it takes the slow way. */
static void put_scales(const struct numoe_mxfp4 *m, uint64_t rows, uint64_t columns, bool extreme,
                       struct soak_random *random)
{
    const uint64_t low = 127 - 2 - (uint64_t)lrint(0.5 * log2((double)columns));

    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t g = 0; g < groups_of(columns); g++) {
            uint8_t *to =
                (uint8_t *)(uintptr_t)(m->scales + r * m->scale_stride + g * m->scale_step);

            *to = (uint8_t)(low + soak_below(random, 4));
            if (extreme && soak_once(random, 64))
                *to = (uint8_t)soak_below(random, 3);
        }
}

static void put_biases(struct soak_expert *e, bool interleaved, struct soak_random *random)
{
    const uint64_t I = e->intermediate;

    for (uint64_t i = 0; i < 2 * I + e->hidden; i++)
        e->floats[i] = 0.3f * soak_normal(random);
    e->bias[0] = e->floats;
    e->bias[1] = e->floats + (interleaved ? 1 : I);
    e->bias[2] = e->floats + 2 * I;
    e->bias_step = interleaved ? 2 : 1;
}

int soak_expert_make(struct soak_expert *expert, const struct numoe_model_desc *desc,
                     struct soak_random *random)
{
    const enum form form = (enum form)soak_below(random, FORM_COUNT);
    const bool extreme = soak_once(random, 8);
    const uint64_t rows[3] = {desc->intermediate, desc->intermediate, desc->hidden};
    const uint64_t columns[3] = {desc->hidden, desc->hidden, desc->intermediate};
    uint64_t bytes;

    *expert = (struct soak_expert){.hidden = desc->hidden, .intermediate = desc->intermediate};
    bytes = lay_expert(expert, form, NULL);
    expert->bytes = malloc(bytes);
    if (desc->bias)
        expert->floats = malloc((2 * desc->intermediate + desc->hidden) * sizeof(float));
    if (!expert->bytes || (desc->bias && !expert->floats)) {
        soak_expert_free(expert);
        return -ENOMEM;
    }
    lay_expert(expert, form, expert->bytes);
    for (uint64_t i = 0; i < bytes; i += 8) {
        const uint64_t word = soak_next(random);

        memcpy(expert->bytes + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
    for (int m = 0; m < 3; m++)
        put_scales(&expert->matrices[m], rows[m], columns[m], extreme, random);
    if (desc->bias)
        put_biases(expert, form == FORM_INTERLEAVED, random);
    return 0;
}

void soak_expert_free(struct soak_expert *expert)
{
    free(expert->bytes);
    free(expert->floats);
    *expert = (struct soak_expert){0};
}

void soak_expert_weights(const struct soak_expert *expert, struct numoe_expert_weights *weights)
{
    *weights = (struct numoe_expert_weights){
        .size = sizeof *weights,
        .gate = expert->matrices[0],
        .up = expert->matrices[1],
        .down = expert->matrices[2],
        .gate_bias = expert->bias[0],
        .up_bias = expert->bias[1],
        .bias_step = expert->bias_step,
        .down_bias = expert->bias[2],
    };
}

void soak_expert_code(const struct soak_expert *expert, unsigned matrix, uint64_t row,
                      uint64_t column, unsigned *code, unsigned *scale)
{
    const struct numoe_mxfp4 *m = &expert->matrices[matrix];
    const uint64_t group = column / GROUP, k = column % GROUP;
    const uint8_t *block = m->codes + row * m->code_stride + group * m->code_step;

    if (m->nibbles == NUMOE_NIBBLES_ADJACENT)
        *code = block[k / 2] >> (k % 2 ? 4 : 0) & 15u;
    else
        *code = block[k % 16] >> (k / 16 ? 4 : 0) & 15u;
    *scale = m->scales[row * m->scale_stride + group * m->scale_step];
}

static void decode_row(const struct soak_expert *expert, unsigned matrix, uint64_t row,
                       uint64_t columns, double *out)
{
    double unit = 0;

    for (uint64_t k = 0; k < columns; k++) {
        unsigned code, scale;

        soak_expert_code(expert, matrix, row, k, &code, &scale);
        if (k % GROUP == 0)
            unit = ldexp(1.0, (int)scale - 127);
        out[k] = (code & 8 ? -unit : unit) * magnitudes[code & 7];
    }
}

/* Squares of the errors that rounding makes in count values. */
static void rounding(enum numoe_arithmetic arithmetic, const double *values, uint64_t count,
                     double *squares)
{
    for (uint64_t first = 0; first < count; first += GROUP) {
        const uint64_t end = first + GROUP < count ? first + GROUP : count;
        double most = 0;

        for (uint64_t i = first; i < end; i++)
            most = fmax(most, fabs(values[i]));
        for (uint64_t i = first; i < end; i++) {
            const double step =
                arithmetic == NUMOE_FAST ? most * FAST_STEP : fabs(values[i]) * EXACT_STEP;

            squares[i] = step * step;
        }
    }
}

/* Dot product of a decoded row, and the square of its error. */
static double dot(const double *row, const double *x, const double *squares, uint64_t count,
                  double *error)
{
    double sum = 0, off = 0, size = 0;

    for (uint64_t k = 0; k < count; k++) {
        const double term = row[k] * x[k];

        sum += term;
        size += term * term;
        off += row[k] * row[k] * squares[k];
    }
    *error = off + FLOAT_ERROR * FLOAT_ERROR * size;
    return sum;
}

int soak_expert_apply(const struct soak_expert *expert, const struct numoe_activation *activation,
                      enum numoe_arithmetic arithmetic, const float *x, double factor, double *want,
                      double *variance)
{
    const uint64_t H = expert->hidden, I = expert->intermediate, most = H > I ? H : I;
    const double plus = activation->kind == NUMOE_SWIGLU_OAI ? 1 : 0;
    double *room = malloc((2 * H + 3 * I + most) * sizeof *room);
    double *in = room, *in_error = in + H, *h = in_error + H, *h_error = h + I;
    double *h_rounding = h_error + I, *row = h_rounding + I;

    if (!room)
        return -ENOMEM;
    for (uint64_t k = 0; k < H; k++)
        in[k] = (double)x[k];
    rounding(arithmetic, in, H, in_error);
    for (uint64_t i = 0; i < I; i++) {
        double gate, up, gate_error, up_error, slope;

        decode_row(expert, 0, i, H, row);
        gate = dot(row, in, in_error, H, &gate_error);
        decode_row(expert, 1, i, H, row);
        up = dot(row, in, in_error, H, &up_error);
        if (expert->bias[0]) {
            gate += (double)expert->bias[0][i * expert->bias_step];
            up += (double)expert->bias[1][i * expert->bias_step];
        }
        h[i] = numoe_activation_reference(activation, gate, up);
        slope = DERIVATIVE * (fabs(up) + plus);
        h_error[i] = slope * slope * gate_error + gate * gate * up_error +
                     ACTIVATION_ERROR * ACTIVATION_ERROR * h[i] * h[i];
    }
    rounding(arithmetic, h, I, h_rounding);
    for (uint64_t i = 0; i < I; i++)
        h_error[i] += h_rounding[i];
    for (uint64_t r = 0; r < H; r++) {
        double sum, error;

        decode_row(expert, 2, r, I, row);
        sum = dot(row, h, h_error, I, &error);
        if (expert->bias[2])
            sum += (double)expert->bias[2][r];
        want[r] += factor * sum;
        variance[r] += factor * factor * (error + FLOAT_ERROR * FLOAT_ERROR * sum * sum);
    }
    free(room);
    return 0;
}
