/*
 * row_share_kernels.h - the few-token form in two halves, so that down can be shared by rows: its
 * gate and up write h where others read it, its down takes a range of row tiles.
 *
 * An ISA file includes the vocabulary headers as the kernel set whose parameters it repeats does,
 * form_few.h, then this, and says ROW_SHARE_SET. Both forms are run from this one table, so they
 * are compiled alike.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_ROW_SHARE_KERNELS_H
#define NUMOE_ROW_SHARE_KERNELS_H

#include "numoe_kernels.h"

/* Gate and up of slices that stand `stride` bytes apart. */
struct row_share_gate_up {
    const struct numoe_ffn *ffn; /* its y is not looked at; the shape is without biases */
    uint64_t stride;
    void *const *h; /* tokens: where the groups of all slices go, one after the other */
};

/*
 * Down for a range of output rows. Weights: slice by slice the range's pair tiles, nothing between
 * them:
 *
 *     slice 0  pair a | pair a + 1 | ...    slice 1  pair a | pair a + 1 | ...    slice 2 ...
 */
struct row_share_down {
    const uint8_t *weights;
    uint64_t slice_count, slice_bytes, tiles; /* tiles: of the range, two a pair */
    unsigned tokens;
    void *const *h;      /* tokens: the groups of all slices */
    const float *weight; /* tokens routing weights */
    float *const *y;     /* tokens rows of 32 * tiles floats, lane order, 64-byte aligned */
    bool add;
};

struct row_share_kernels {
    struct numoe_kernels set; /* without many() and scratch_bytes() */
    size_t group_bytes;       /* of h: 32 values of a token */
    void (*gate_up)(const struct row_share_gate_up *gate_up);
    void (*down)(const struct row_share_down *down);
};

/* The best for this CPU, or the one that isa names ("avx2", "avx512vnni"); NULL: none. */
const struct row_share_kernels *row_share_kernels_select(const char *isa);

#if defined(__x86_64__)
extern const struct row_share_kernels row_share_avx2, row_share_avx512vnni;
#endif

#ifdef NUMOE_FORM_FEW_H

INL void row_share_gate_up_block(const int M, const int S, const struct row_share_gate_up *g,
                                 uint64_t first, uint64_t step)
{
    const uint8_t *slice[FEW_STREAMS_MAX];
    struct group *h[FEW_STREAMS_MAX][FEW_TOKENS];

    UNROLL
    for (int s = 0; s < S; s++) {
        const uint64_t n = first + (uint64_t)s * step;
        slice[s] = (const uint8_t *)g->ffn->slices + n * g->stride;
        UNROLL
        for (int i = 0; i < M; i++)
            h[s][i] = (struct group *)g->h[i] + n;
    }
    few_gate_up(M, S, g->ffn, slice, h);
}

INL void row_share_down_block(const int M, const int S, const struct row_share_down *d,
                              uint64_t first, uint64_t step, bool add)
{
    const uint8_t *down[FEW_STREAMS_MAX];
    struct group *h[FEW_STREAMS_MAX][FEW_TOKENS];

    UNROLL
    for (int s = 0; s < S; s++) {
        const uint64_t n = first + (uint64_t)s * step;
        down[s] = d->weights + n * d->slice_bytes;
        UNROLL
        for (int i = 0; i < M; i++)
            h[s][i] = (struct group *)d->h[i] + n;
    }
    few_down(M, S, down, h, d->weight, d->y, d->tiles, add);
}

/* Streams as few_run has them. */
INL void row_share_gate_up_run(const int M, const struct row_share_gate_up *g)
{
    const int S = FEW_STREAMS(M);
    const uint64_t count = g->ffn->slice_count, per = count / (uint64_t)S;

    for (uint64_t n = 0; n < per; n++)
        row_share_gate_up_block(M, S, g, n, per);
    for (uint64_t n = per * (uint64_t)S; n < count; n++)
        row_share_gate_up_block(M, 1, g, n, 0);
}

INL void row_share_down_run(const int M, const struct row_share_down *d)
{
    const int S = FEW_STREAMS(M);
    const uint64_t count = d->slice_count, per = count / (uint64_t)S;
    bool add = d->add;

    for (uint64_t n = 0; n < per; n++, add = true)
        row_share_down_block(M, S, d, n, per, add);
    for (uint64_t n = per * (uint64_t)S; n < count; n++, add = true)
        row_share_down_block(M, 1, d, n, 0, add);
}

#define ROW_SHARE_CASE(M)                                                                          \
    static __attribute__((noinline)) void gate_up_##M(const struct row_share_gate_up *g)           \
    {                                                                                              \
        row_share_gate_up_run(M, g);                                                               \
    }                                                                                              \
    static __attribute__((noinline)) void down_##M(const struct row_share_down *d)                 \
    {                                                                                              \
        row_share_down_run(M, d);                                                                  \
    }
ROW_SHARE_CASE(1)
ROW_SHARE_CASE(2)
ROW_SHARE_CASE(3)
ROW_SHARE_CASE(4)
#undef ROW_SHARE_CASE

static void gate_up(const struct row_share_gate_up *g)
{
    static void (*const by_tokens[])(const struct row_share_gate_up *) = {gate_up_1, gate_up_2,
                                                                          gate_up_3, gate_up_4};

    by_tokens[g->ffn->tokens - 1](g);
}

static void down(const struct row_share_down *d)
{
    static void (*const by_tokens[])(const struct row_share_down *) = {down_1, down_2, down_3,
                                                                       down_4};

    by_tokens[d->tokens - 1](d);
}

static void quantise_fast(const struct numoe_slice_shape *shape, const void *x,
                          enum numoe_type type, void *record)
{
    quantise(shape, x, type, NUMOE_FAST, record);
}

#define ROW_SHARE_SET(symbol, isa_name)                                                            \
    const struct row_share_kernels symbol = {                                                      \
        .set = {.isa = (isa_name),                                                                 \
                .name = "fast " isa_name,                                                          \
                .arithmetic = NUMOE_FAST,                                                          \
                .few_tokens = FEW_TOKENS,                                                          \
                .few_limit = FEW_LIMIT,                                                            \
                .record_bytes = record_bytes,                                                      \
                .quantise = quantise_fast,                                                         \
                .values = values,                                                                  \
                .few = few,                                                                        \
                .combine = combine},                                                               \
        .group_bytes = sizeof(struct group),                                                       \
        .gate_up = gate_up,                                                                        \
        .down = down,                                                                              \
    }

#endif

#endif
