/*
 * form_few.h - few tokens of one expert: weights are decoded as they stream past, once for all
 * tokens of the call.
 *
 * For one slice:  g, u = W1[s] x, W3[s] x  over pair tiles k = 0, 32, ...;  h = act(g, u), made a
 * group again;  y += W2[:, s] h  over down tiles. FEW_STREAMS slices that lie far apart advance
 * together, so that the memory system sees independent sequential streams (neighbours where slices
 * are to be added in order):
 *
 *     slice i       pair 0 | pair 1 | pair 2 | ...      \  one step of the loop takes
 *     slice i + n   pair 0 | pair 1 | pair 2 | ...      /  one pair tile from each
 *
 * All streams together are prefetched FEW_AHEAD bytes ahead, over the end of a slice into the next.
 * Prefetches may pass the end of the run, reads never do. Bound by memory bandwidth with one
 * token; by decoding and dots from about four tokens up.
 *
 * Parameters: FEW_TOKENS (most tokens), FEW_STREAMS(M), FEW_ROWS(M) (row vectors of a tile at
 * once, a divisor of NV), FEW_AHEAD (bytes; 0 is none).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FORM_FEW_H
#define NUMOE_FORM_FEW_H

enum { FEW_STREAMS_MAX = 4 };

INL void prefetch_lines(const uint8_t *p, int lines)
{
    UNROLL
    for (int i = 0; i < lines; i++)
        _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T0);
}

/*
 * a[i][r] = dots of row vectors r0 + r of a tile with token i's group. A decoded operand serves all
 * tokens, an x word all rows; where the operands of one load share operations, rows come one after
 * the other instead.
 */
INL void few_dots(const int M, const int rows, const uint8_t *codes, const int r0,
                  const struct group *const *g, acc a[FEW_TOKENS][NV])
{
    const int together = STEPS_SHARE ? 1 : rows;
#if STEPS_SHARE
    const int chains = M == 1 ? 2 : 1; /* one would wait for the latency of its dots */
    acc odd[NV];
#endif
    UNROLL
    for (int i = 0; i < M; i++)
        UNROLL
    for (int r = 0; r < rows; r++)
        a[i][r] = acc_start(g[i]);
#if STEPS_SHARE
    UNROLL
    for (int r = 0; r < rows; r++)
        odd[r] = acc_start(g[0]);
#endif
    UNROLL
    for (int t = 0; t < 4; t++)
        UNROLL
    for (int first = 0; first < rows; first += together)
        UNROLL
    for (int step = 0; step < STEPS; step++) {
        vi w[NV];
        UNROLL
        for (int r = first; r < first + together; r++)
            w[r] = decode(vi_load(codes + 128 * t + VB * (r0 + r)), step);
#if STEPS_SHARE
        if (chains == 2 && step % 2) {
            odd[first] = acc_dot(odd[first], w[first], x_word(g[0], t * STEPS + step));
            continue;
        }
#endif
        UNROLL
        for (int i = 0; i < M; i++)
            UNROLL
        for (int r = first; r < first + together; r++)
            a[i][r] = acc_dot(a[i][r], w[r], x_word(g[i], t * STEPS + step));
    }
#if STEPS_SHARE
    UNROLL
    for (int r = 0; r < rows && chains == 2; r++)
        a[0][r] = a[0][r] + odd[r];
#endif
}

/* Gate, up and the activation of slices slice[0..S) for M tokens, both constants after inlining:
 * h[s][i] becomes the group of slice s for token i. */
INL void few_gate_up(const int M, const int S, const struct numoe_ffn *f,
                     const uint8_t *const *slice, struct group *h[FEW_STREAMS_MAX][FEW_TOKENS])
{
    const struct numoe_slice_shape *shape = f->shape;
    const int rows = FEW_ROWS(M), ahead = FEW_AHEAD / FEW_STREAMS(M);
    vf sum[FEW_STREAMS_MAX][FEW_TOKENS][2][NV];

    UNROLL
    for (int s = 0; s < S; s++)
        UNROLL
    for (int i = 0; i < M; i++)
        UNROLL
    for (int m = 0; m < 2; m++)
        UNROLL
    for (int r = 0; r < NV; r++)
        sum[s][i][m][r] =
            shape->bias ? vf_load(slice[s] + shape->bias_offset + 128 * m + VB * r) : vf_set(0.0f);

    for (uint64_t b = 0; b < shape->hidden_tiles; b++) {
        const struct group *g[FEW_TOKENS];
        UNROLL
        for (int i = 0; i < M; i++)
            g[i] = (const struct group *)f->x[i] + b;
        UNROLL
        for (int s = 0; s < S; s++) {
            const uint8_t *pair = slice[s] + b * NUMOE_PAIR_BYTES;
            if (FEW_AHEAD)
                prefetch_lines(pair + ahead, NUMOE_PAIR_BYTES / 64);
            UNROLL
            for (int m = 0; m < 2; m++)
                UNROLL
            for (int r0 = 0; r0 < NV; r0 += rows) {
                acc a[FEW_TOKENS][NV];
                few_dots(M, rows, pair + 512 * m, r0, g, a);
                UNROLL
                for (int r = 0; r < rows; r++) {
                    const vf e = vf_e8m0(pair + 1024 + 32 * m + VL * (r0 + r));
                    UNROLL
                    for (int i = 0; i < M; i++)
                        sum[s][i][m][r0 + r] =
                            vf_fma(acc_float(a[i][r]), group_scale(e, g[i]), sum[s][i][m][r0 + r]);
                }
            }
        }
    }

    UNROLL
    for (int s = 0; s < S; s++)
        UNROLL
    for (int i = 0; i < M; i++)
        hidden_group(f, sum[s][i][0], sum[s][i][1], f->weight[i], h[s][i]);
}

/* Down: row tiles [0, tiles) from pair tiles on at down[s], columns of slice s for each s, times
 * h[s][i], into the first 32 * tiles floats of out[i]. */
INL void few_down(const int M, const int S, const uint8_t *const *down,
                  struct group *h[FEW_STREAMS_MAX][FEW_TOKENS], const float *weight,
                  float *const *out, uint64_t tiles, const bool add)
{
    const int rows = FEW_ROWS(M), ahead = FEW_AHEAD / FEW_STREAMS(M);

    for (uint64_t p = 0; p < tiles; p++) {
        const uint64_t at = p / 2 * NUMOE_PAIR_BYTES;
        const uint64_t half = p % 2;
        vf y[FEW_TOKENS][NV];
        UNROLL
        for (int i = 0; i < M; i++)
            UNROLL
        for (int r = 0; r < NV; r++)
            y[i][r] = add ? vf_load(out[i] + NUMOE_TILE * p + VL * r) : vf_set(0.0f);
        UNROLL
        for (int s = 0; s < S; s++) {
            const uint8_t *codes = down[s] + at + 512 * half;
            const uint8_t *scales = down[s] + at + 1024 + 32 * half;
            const struct group *g[FEW_TOKENS];
            UNROLL
            for (int i = 0; i < M; i++)
                g[i] = h[s][i];
            if (FEW_AHEAD) {
                prefetch_lines(codes + ahead, 8);
                if (half)
                    prefetch_lines(codes + ahead + 512, 1);
            }
            UNROLL
            for (int r0 = 0; r0 < NV; r0 += rows) {
                acc a[FEW_TOKENS][NV];
                few_dots(M, rows, codes, r0, g, a);
                UNROLL
                for (int r = 0; r < rows; r++) {
                    const vf e = vf_e8m0(scales + VL * (r0 + r));
                    UNROLL
                    for (int i = 0; i < M; i++)
                        y[i][r0 + r] = vf_fma(acc_float(a[i][r]), down_scale(e, g[i], weight[i]),
                                              y[i][r0 + r]);
                }
            }
        }
        UNROLL
        for (int i = 0; i < M; i++)
            UNROLL
        for (int r = 0; r < NV; r++)
            vf_store(out[i] + NUMOE_TILE * p + VL * r, y[i][r]);
    }
}

/* Slices slice[0..S) for M tokens. */
INL void few_slices(const int M, const int S, const struct numoe_ffn *f,
                    const uint8_t *const *slice, const bool add)
{
    struct group group[FEW_STREAMS_MAX][FEW_TOKENS], *h[FEW_STREAMS_MAX][FEW_TOKENS];
    const uint8_t *down[FEW_STREAMS_MAX];

    UNROLL
    for (int s = 0; s < S; s++) {
        down[s] = slice[s] + f->shape->down_offset;
        UNROLL
        for (int i = 0; i < M; i++)
            h[s][i] = &group[s][i];
    }
    few_gate_up(M, S, f, slice, h);
    few_down(M, S, down, h, f->weight, f->y, f->shape->hidden_tiles, add);
}

INL void few_run(const int M, const struct numoe_ffn *f)
{
    const int S = FEW_STREAMS(M);
    const uint64_t per = f->slice_count / (uint64_t)S;
    const uint64_t apart = f->in_order ? 1 : per, step = f->in_order ? (uint64_t)S : 1;
    const uint8_t *base = f->slices;
    const uint8_t *slice[FEW_STREAMS_MAX];

    for (uint64_t n = 0; n < per; n++) {
        UNROLL
        for (int s = 0; s < S; s++)
            slice[s] = base + ((uint64_t)s * apart + n * step) * f->shape->bytes;
        few_slices(M, S, f, slice, f->add || n > 0);
    }
    for (uint64_t n = per * (uint64_t)S; S > 1 && n < f->slice_count; n++) {
        slice[0] = base + n * f->shape->bytes;
        few_slices(M, 1, f, slice, f->add || n > 0);
    }
}

INL void add_down_bias(const struct numoe_ffn *f)
{
    if (!f->down_bias)
        return;
    for (unsigned i = 0; i < f->tokens; i++) {
        const vf weight = vf_set(f->weight[i]);
        for (uint64_t at = 0; at < NUMOE_TILE * f->shape->hidden_tiles; at += VL)
            vf_store(f->y[i] + at,
                     vf_fma(weight, vf_load(f->down_bias + at), vf_load(f->y[i] + at)));
    }
}

/* A function for each token count keeps the register allocator's problem small. */
#define FEW_CASE(M)                                                                                \
    static __attribute__((noinline)) void few_##M(const struct numoe_ffn *f)                       \
    {                                                                                              \
        few_run(M, f);                                                                             \
    }
FEW_CASE(1)
FEW_CASE(2)
FEW_CASE(3)
FEW_CASE(4)
#undef FEW_CASE

static void few(const struct numoe_ffn *f)
{
    static void (*const by_tokens[])(const struct numoe_ffn *) = {few_1, few_2, few_3, few_4};

    by_tokens[f->tokens - 1](f);
    add_down_bias(f);
}

#endif
