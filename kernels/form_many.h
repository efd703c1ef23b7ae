/*
 * form_many.h - many tokens of one expert: each tile is decoded once, for all tokens of the call.
 *
 * Tokens are cut into blocks of at most MANY_BLOCK and gathered into panels (rows of x lie 4 KiB
 * multiples apart and would share cache sets):
 *
 *     x panel      [block][group k/32][token of the block] struct group
 *     per slice    for k in chunks of MANY_CHUNK groups, gate and up in turn: decode the tiles of
 *                  the chunk to an L1 buffer, then for each block: sums += tiles . panel
 *                  h = act(sums), made groups: h panel [block][slice of the run][token]
 *     per run      of MANY_RUN slices, for p over down tiles: decode the MANY_RUN tiles of p,
 *                  then for each block: y[p] += tiles . h panel
 *     at the end   y is written to the rows once
 *
 * The inner product keeps 32 rows (MANY_ROWS vectors) x MANY_BLOCK tokens in registers. Decoding
 * and inner products alike bring the next chunk's codes to L2 meanwhile, so that memory is never
 * idle: with a few tokens they take as long as each other. Bound by the multiplier.
 *
 * Parameters: MANY_TOKENS, MANY_BLOCK (<= 12), MANY_SUB (tokens with sums in registers at once),
 * MANY_ROWS, MANY_CHUNK, MANY_RUN; and decode_fold
 * with FOLDED.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FORM_MANY_H
#define NUMOE_FORM_MANY_H

enum {
    SUMS_IN_REGISTERS = FOLDED || MANY_SUB >= MANY_BLOCK,
    TILE_WORDS = 4 * STEPS,                             /* x words of a group */
    TILE_BYTES = TILE_WORDS * 128 + (FOLDED ? 0 : 128), /* decoded tile, then scales */
    MANY_BLOCKS = (MANY_TOKENS + MANY_BLOCK - 1) / MANY_BLOCK,
    MANY_BUFFER = MANY_CHUNK > MANY_RUN ? MANY_CHUNK : MANY_RUN,
    PANEL_BYTES = (MANY_BLOCK * (int)sizeof(struct group) + 63) / 64 * 64,
    /* lines of a pair tile that go with one of its halves: brought by decoding, and by dots */
    AHEAD_LINES = (NUMOE_PAIR_BYTES / 64 + 1) / 2,
    AHEAD_DECODE = 4,
    AHEAD_DOTS = AHEAD_LINES - AHEAD_DECODE
};

/* Where things lie in scratch, all multiples of 64. */
struct many_scratch {
    uint8_t *tiles; /* MANY_BUFFER decoded tiles: gate, up or down */
    float *sums;    /* [block][gate, up][MANY_BLOCK][32] */
    uint8_t *h;     /* [block][MANY_RUN] panels */
    uint8_t *x;     /* [block][hidden_tiles] panels */
    float *y;       /* [block][hidden_tiles][MANY_BLOCK][32] */
};

enum {
    SUMS_BLOCK = 2 * MANY_BLOCK * 32,
    H_BLOCK = MANY_RUN * PANEL_BYTES,
    Y_TILE = MANY_BLOCK * 32
};

static size_t many_layout(const struct numoe_slice_shape *shape, uint8_t *base,
                          struct many_scratch *m)
{
    const size_t tiles = (size_t)MANY_BUFFER * TILE_BYTES;
    const size_t sums = (size_t)MANY_BLOCKS * SUMS_BLOCK * sizeof(float);
    const size_t h = (size_t)MANY_BLOCKS * H_BLOCK;
    const size_t x = (size_t)MANY_BLOCKS * shape->hidden_tiles * PANEL_BYTES;
    const size_t y = (size_t)MANY_BLOCKS * shape->hidden_tiles * Y_TILE * sizeof(float);

    if (m) {
        m->tiles = base;
        m->sums = (float *)(void *)(base + tiles);
        m->h = base + tiles + sums;
        m->x = m->h + h;
        m->y = (float *)(void *)(m->x + x);
    }
    return tiles + sums + h + x + y;
}

static size_t scratch_bytes(const struct numoe_slice_shape *shape)
{
    return many_layout(shape, NULL, NULL);
}

INL void decode_tile(const uint8_t *codes, const uint8_t *scales, uint8_t *out)
{
#if FOLDED
    fold scale[NV];
    UNROLL
    for (int r = 0; r < NV; r++)
        scale[r] = fold_scale(scales + VL * r);
#else
    UNROLL
    for (int r = 0; r < NV; r++)
        vf_store(out + TILE_WORDS * 128 + VB * r, vf_e8m0(scales + VL * r));
#endif
    UNROLL
    for (int t = 0; t < 4; t++)
        UNROLL
    for (int r = 0; r < NV; r++) {
        const vi v = vi_load(codes + 128 * t + VB * r);
        UNROLL
        for (int step = 0; step < STEPS; step++) {
#if FOLDED
            const vi w = fold_into(decode(v, step), scale[r]);
#else
            const vi w = decode(v, step);
#endif
            vi_store(out + (t * STEPS + step) * 128 + VB * r, w);
        }
    }
}

INL void bring(const uint8_t *p, int lines)
{
    _Pragma("GCC unroll 1") for (int i = 0; i < lines; i++)
        _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T1);
}

/* What the inner product brings closer meanwhile: `lines` lines at p, then at p + stride, ... */
struct ahead {
    const uint8_t *p;
    uint64_t stride;
    int lines;
};

/* The part of block i of the lines of half a pair tile, at p, that blocks share. */
static struct ahead ahead_of(const uint8_t *p, uint64_t stride, unsigned half, unsigned i,
                             unsigned blocks)
{
    const int lines = (AHEAD_DOTS + (int)blocks - 1) / (int)blocks;
    const int before = (int)i * lines, left = AHEAD_DOTS - before;

    return (struct ahead){p + 64 * (AHEAD_LINES * half + AHEAD_DECODE + (unsigned)before), stride,
                          left < 0       ? 0
                          : left < lines ? left
                                         : lines};
}

/* sums[T][32] += sum over `groups` decoded tiles of tile . panel. Sums of all T tokens are in
 * registers, or in L1 when only some tokens' dots fit there (MANY_SUB). */
INL void many_dots(const int T, uint64_t groups, const uint8_t *tiles, const uint8_t *panel,
                   float *sums, struct ahead ahead)
{
    UNROLL
    for (int r0 = 0; r0 < NV; r0 += MANY_ROWS) {
        const uint8_t *tile = tiles + VB * r0, *x = panel;
        vf sum[MANY_BLOCK][MANY_ROWS];
        UNROLL
        for (int i = 0; i < T && SUMS_IN_REGISTERS; i++)
            UNROLL
        for (int r = 0; r < MANY_ROWS; r++)
            sum[i][r] = vf_load(sums + 32 * i + VL * (r0 + r));
        _Pragma("GCC unroll 1") for (uint64_t b = 0; b < groups;
                                     b++, tile += TILE_BYTES, x += PANEL_BYTES)
        {
            const struct group *g = (const struct group *)(const void *)x;
            if (r0 == 0) {
                bring(ahead.p, ahead.lines);
                ahead.p += ahead.stride;
            }
#if FOLDED
            UNROLL
            for (int q = 0; q < TILE_WORDS; q++) {
                vi w[MANY_ROWS];
                UNROLL
                for (int r = 0; r < MANY_ROWS; r++)
                    w[r] = vi_load(tile + 128 * q + VB * r);
                UNROLL
                for (int i = 0; i < T; i++)
                    UNROLL
                for (int r = 0; r < MANY_ROWS; r++)
                    sum[i][r] = acc_dot(sum[i][r], w[r], x_word(&g[i], q));
            }
#else
            UNROLL
            for (int i0 = 0; i0 < T; i0 += MANY_SUB) {
                const int n = T - i0 < MANY_SUB ? T - i0 : MANY_SUB;
                acc a[MANY_SUB][MANY_ROWS];
                /* load the tile anew: compilers would keep all of it on the stack instead */
                __asm__("" : "+r"(tile));
                UNROLL
                for (int i = 0; i < n; i++)
                    UNROLL
                for (int r = 0; r < MANY_ROWS; r++)
                    a[i][r] = acc_start(&g[i0 + i]);
                UNROLL
                for (int q = 0; q < TILE_WORDS; q++) {
                    vi w[MANY_ROWS];
                    UNROLL
                    for (int r = 0; r < MANY_ROWS; r++)
                        w[r] = vi_load(tile + 128 * q + VB * r);
                    UNROLL
                    for (int i = 0; i < n; i++)
                        UNROLL
                    for (int r = 0; r < MANY_ROWS; r++)
                        a[i][r] = acc_dot(a[i][r], w[r], x_word(&g[i0 + i], q));
                }
                UNROLL
                for (int r = 0; r < MANY_ROWS; r++) {
                    const vf e = vf_load(tile + TILE_WORDS * 128 + VB * r);
                    UNROLL
                    for (int i = 0; i < n; i++) {
                        const vf scale = group_scale(e, &g[i0 + i]), dot = acc_float(a[i][r]);
                        float *at = sums + 32 * (i0 + i) + VL * (r0 + r);
                        if (SUMS_IN_REGISTERS)
                            sum[i0 + i][r] = vf_fma(dot, scale, sum[i0 + i][r]);
                        else
                            vf_store(at, vf_fma(dot, scale, vf_load(at)));
                    }
                }
            }
#endif
        }
        UNROLL
        for (int i = 0; i < T && SUMS_IN_REGISTERS; i++)
            UNROLL
        for (int r = 0; r < MANY_ROWS; r++)
            vf_store(sums + 32 * i + VL * (r0 + r), sum[i][r]);
    }
}

#define MANY_CASE(T)                                                                               \
    static __attribute__((noinline)) void many_dots_##T(uint64_t groups, const uint8_t *tiles,     \
                                                        const uint8_t *panel, float *sums,         \
                                                        struct ahead ahead)                        \
    {                                                                                              \
        many_dots(T, groups, tiles, panel, sums, ahead);                                           \
    }
typedef void many_dots_fn(uint64_t groups, const uint8_t *tiles, const uint8_t *panel, float *sums,
                          struct ahead ahead);
MANY_CASE(1)
MANY_CASE(2)
#if MANY_BLOCK > 2
MANY_CASE(3)
#endif
#if MANY_BLOCK > 3
MANY_CASE(4)
#endif
#if MANY_BLOCK > 4
MANY_CASE(5)
#endif
#if MANY_BLOCK > 5
MANY_CASE(6)
#endif
#if MANY_BLOCK > 6
MANY_CASE(7)
MANY_CASE(8)
#endif
#if MANY_BLOCK > 8
MANY_CASE(9)
MANY_CASE(10)
MANY_CASE(11)
MANY_CASE(12)
#endif
#undef MANY_CASE

static many_dots_fn *const many_by_tokens[] = {
    many_dots_1, many_dots_2,
#if MANY_BLOCK > 2
    many_dots_3,
#endif
#if MANY_BLOCK > 3
    many_dots_4,
#endif
#if MANY_BLOCK > 4
    many_dots_5,
#endif
#if MANY_BLOCK > 5
    many_dots_6,
#endif
#if MANY_BLOCK > 6
    many_dots_7, many_dots_8,
#endif
#if MANY_BLOCK > 8
    many_dots_9, many_dots_10, many_dots_11, many_dots_12,
#endif
};

/* Tokens [first, first + count) of the call are block i. */
struct many_block {
    unsigned first, count;
};

static void many_gate_up(const struct numoe_ffn *f, const struct many_scratch *m,
                         const struct many_block *block, unsigned blocks, const uint8_t *slice,
                         unsigned place)
{
    const struct numoe_slice_shape *shape = f->shape;
    const uint64_t groups = shape->hidden_tiles;

    for (unsigned i = 0; i < blocks; i++) {
        float *sums = m->sums + (size_t)i * SUMS_BLOCK;
        for (unsigned j = 0; j < block[i].count; j++)
            for (int half = 0; half < 2; half++)
                for (int r = 0; r < NV; r++)
                    vf_store(sums + half * Y_TILE + 32 * j + VL * r,
                             shape->bias ? vf_load(slice + shape->bias_offset + 128 * half + VB * r)
                                         : vf_set(0.0f));
    }
    for (uint64_t k = 0; k < groups; k += MANY_CHUNK) {
        const uint64_t n = groups - k < MANY_CHUNK ? groups - k : MANY_CHUNK;
        const uint8_t *pair = slice + k * NUMOE_PAIR_BYTES;
        const uint8_t *next = pair + MANY_CHUNK * NUMOE_PAIR_BYTES;
        for (unsigned half = 0; half < 2; half++) {
            for (uint64_t b = 0; b < n; b++) {
                const uint8_t *tile = pair + b * NUMOE_PAIR_BYTES;
                decode_tile(tile + 512 * half, tile + 1024 + 32 * half, m->tiles + b * TILE_BYTES);
                bring(next + b * NUMOE_PAIR_BYTES + 64 * AHEAD_LINES * half, AHEAD_DECODE);
            }
            for (unsigned i = 0; i < blocks; i++)
                many_by_tokens[block[i].count - 1](
                    n, m->tiles, m->x + (i * groups + k) * PANEL_BYTES,
                    m->sums + (size_t)i * SUMS_BLOCK + half * Y_TILE,
                    ahead_of(next, NUMOE_PAIR_BYTES, half, i, blocks));
        }
    }
    for (unsigned i = 0; i < blocks; i++) {
        const float *sums = m->sums + (size_t)i * SUMS_BLOCK;
        struct group *h =
            (struct group *)(void *)(m->h + (size_t)i * H_BLOCK + (size_t)place * PANEL_BYTES);
        for (unsigned j = 0; j < block[i].count; j++) {
            vf gate[NV], up[NV];
            UNROLL
            for (int r = 0; r < NV; r++) {
                gate[r] = vf_load(sums + 32 * j + VL * r);
                up[r] = vf_load(sums + Y_TILE + 32 * j + VL * r);
            }
            hidden_group(f, gate, up, f->weight[block[i].first + j], &h[j]);
        }
    }
}

static void many_down(const struct numoe_ffn *f, const struct many_scratch *m,
                      const struct many_block *block, unsigned blocks, const uint8_t *slice,
                      unsigned run)
{
    const struct numoe_slice_shape *shape = f->shape;
    const uint8_t *down = slice + shape->down_offset;

    for (uint64_t p = 0; p < shape->hidden_tiles; p++) {
        const uint8_t *pair = down + p / 2 * NUMOE_PAIR_BYTES;
        const unsigned half = p % 2;
        for (unsigned s = 0; s < run; s++) {
            const uint8_t *tile = pair + s * shape->bytes;
            decode_tile(tile + 512 * half, tile + 1024 + 32 * half, m->tiles + s * TILE_BYTES);
            bring(tile + NUMOE_PAIR_BYTES + 64 * AHEAD_LINES * half, AHEAD_DECODE);
        }
        for (unsigned i = 0; i < blocks; i++)
            many_by_tokens[block[i].count - 1](
                run, m->tiles, m->h + (size_t)i * H_BLOCK,
                m->y + (i * shape->hidden_tiles + p) * Y_TILE,
                ahead_of(pair + NUMOE_PAIR_BYTES, shape->bytes, half, i, blocks));
    }
}

static void many_write(const struct numoe_ffn *f, const struct many_scratch *m,
                       const struct many_block *block, unsigned blocks)
{
    const uint64_t tiles = f->shape->hidden_tiles;

    for (unsigned i = 0; i < blocks; i++)
        for (unsigned j = 0; j < block[i].count; j++) {
            const unsigned token = block[i].first + j;
            const vf weight = vf_set(f->weight[token]);
            const float *from = m->y + i * tiles * Y_TILE + 32 * j;
            float *to = f->y[token];
            for (uint64_t p = 0; p < tiles; p++, from += Y_TILE, to += NUMOE_TILE)
                UNROLL
            for (int r = 0; r < NV; r++) {
                vf v = vf_load(from + VL * r);
                if (!WEIGHT_IN_GROUP)
                    v = v * weight;
                if (f->down_bias)
                    v = vf_fma(weight, vf_load(f->down_bias + NUMOE_TILE * p + VL * r), v);
                if (f->add)
                    v = vf_load(to + VL * r) + v;
                vf_store(to + VL * r, v);
            }
        }
}

static void many(const struct numoe_ffn *f)
{
    const struct numoe_slice_shape *shape = f->shape;
    const uint64_t tiles = shape->hidden_tiles;
    const unsigned blocks = (f->tokens + MANY_BLOCK - 1) / MANY_BLOCK;
    struct many_block block[MANY_BLOCKS];
    struct many_scratch m;
    unsigned first = 0;

    many_layout(shape, f->scratch, &m);
    for (unsigned i = 0; i < blocks; i++) {
        block[i].first = first;
        block[i].count = (f->tokens - first + blocks - i - 1) / (blocks - i);
        for (unsigned j = 0; j < block[i].count; j++) {
            const struct group *g = f->x[first + j];
            for (uint64_t b = 0; b < tiles; b++)
                memcpy(m.x + (i * tiles + b) * PANEL_BYTES + j * sizeof *g, &g[b], sizeof *g);
        }
        memset(m.y + i * tiles * Y_TILE, 0, tiles * Y_TILE * sizeof(float));
        first += block[i].count;
    }
    for (uint64_t s = 0; s < f->slice_count; s += MANY_RUN) {
        const uint8_t *slice = (const uint8_t *)f->slices + s * shape->bytes;
        const unsigned run =
            f->slice_count - s < MANY_RUN ? (unsigned)(f->slice_count - s) : MANY_RUN;
        for (unsigned r = 0; r < run; r++)
            many_gate_up(f, &m, block, blocks, slice + r * shape->bytes, r);
        many_down(f, &m, block, blocks, slice, run);
    }
    many_write(f, &m, block, blocks);
}

/* The table of an ISA file: `symbol` is declared in kernel_sets.h. */
#define KERNEL_SET(symbol, isa_name, set_name, mode)                                               \
    static void quantise_##mode(const struct numoe_slice_shape *shape, const void *x,              \
                                enum numoe_type type, void *record)                                \
    {                                                                                              \
        quantise(shape, x, type, mode, record);                                                    \
    }                                                                                              \
    const struct numoe_kernels symbol = {                                                          \
        .isa = (isa_name),                                                                         \
        .name = (set_name),                                                                        \
        .arithmetic = (mode),                                                                      \
        .few_tokens = FEW_TOKENS,                                                                  \
        .few_limit = FEW_LIMIT,                                                                    \
        .many_tokens = MANY_TOKENS,                                                                \
        .forms_agree = !FOLDED,                                                                    \
        .record_bytes = record_bytes,                                                              \
        .scratch_bytes = scratch_bytes,                                                            \
        .quantise = quantise_##mode,                                                               \
        .values = values,                                                                          \
        .few = few,                                                                                \
        .many = many,                                                                              \
        .combine = combine,                                                                        \
    }

#endif
