/*
 * form_common.h - what the two forms of every x86 kernel set share: activation records, combine.
 *
 * An ISA file first defines its vector vocabulary (vec_*.h) and its operand vocabulary:
 *
 *   STEPS                x words (4 bytes) for each 8 k: 2 int8, 4 bf16 pairs, 8 fp32
 *   STEPS_SHARE          1 when the operands that one load decodes to share operations
 *   struct group         32 activations of one token, its x words first: word 4t.. of octet t
 *   acc                  accumulator vector of one dot: vi or vf
 *   acc_start(g)         accumulator before a group
 *   decode(codes, step)  operand for x word `step` of an octet: 4 bytes a row
 *   acc_dot(a, w, word)  a + w . (x word at `word`), lane by lane
 *   acc_float(a)         a as floats
 *   group_scale(e, g)    factor of acc_float: weight scale e times what g carries
 *   down_scale(e, g, w)  the same for down, with the routing weight
 *   group_put(v, lanes, weight, mode, g)   make a group of 32 floats, in lane or natural order
 *   group_value(g, k)    what activation k became, times group_put's weight where it is in g
 *   FOLDED               many tokens: 1 when decode_fold puts the weight scale into the operand
 *   WEIGHT_IN_GROUP      1 when group_put's weight reaches the output through group_scale
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FORM_COMMON_H
#define NUMOE_FORM_COMMON_H

INL const uint8_t *x_word(const struct group *g, int word)
{
    return (const uint8_t *)g + 4 * word;
}

static size_t record_bytes(const struct numoe_slice_shape *shape)
{
    return (shape->hidden_tiles * sizeof(struct group) + NUMOE_ALIGNMENT - 1) / NUMOE_ALIGNMENT *
           NUMOE_ALIGNMENT;
}

INL void load_natural(const void *x, enum numoe_type type, uint64_t at, vf v[NV])
{
    UNROLL
    for (int r = 0; r < NV; r++)
        v[r] = type == NUMOE_BF16 ? vf_load_bf16((const uint16_t *)x + at + VL * r)
                                  : vf_load((const float *)x + at + VL * r);
}

INL void quantise(const struct numoe_slice_shape *shape, const void *x, enum numoe_type type,
                  enum numoe_arithmetic mode, void *record)
{
    struct group *g = record;
    const uint64_t whole = shape->hidden / NUMOE_TILE, tail = shape->hidden % NUMOE_TILE;
    vf v[NV];

    for (uint64_t b = 0; b < whole; b++) {
        load_natural(x, type, NUMOE_TILE * b, v);
        group_put(v, false, 1.0f, mode, &g[b]);
    }
    if (tail) {
        const size_t size = type == NUMOE_BF16 ? 2 : 4;
        uint8_t padded[4 * NUMOE_TILE] = {0};
        memcpy(padded, (const uint8_t *)x + NUMOE_TILE * whole * size, tail * size);
        load_natural(padded, type, 0, v);
        group_put(v, false, 1.0f, mode, &g[whole]);
    }
}

static void values(const struct numoe_slice_shape *shape, const void *record, float *x)
{
    for (uint64_t k = 0; k < shape->hidden; k++)
        x[k] = group_value((const struct group *)record + k / NUMOE_TILE, k % NUMOE_TILE);
}

/* h = act(gate, up) of one token and slice, made a group. Rare enough to be a call. */
static __attribute__((noinline)) void hidden_group(const struct numoe_ffn *f, const vf gate[NV],
                                                   const vf up[NV], float weight, struct group *h)
{
    vf v[NV];

    _Pragma("GCC unroll 1") for (int r = 0; r < NV; r++) v[r] =
        vf_activation(f->activation, gate[r], up[r]);
    group_put(v, true, weight, f->arithmetic, h);
}

INL void combine_tile(const struct numoe_combine *c, uint64_t p, vf sum[NV])
{
    vf part[NV], lanes[NV];

    UNROLL
    for (int r = 0; r < NV; r++)
        part[r] = lanes[r] = vf_set(0.0f);
    for (uint64_t i = 0; i < c->row_count; i++) {
        const float *row = c->rows[i] + NUMOE_TILE * p;
        UNROLL
        for (int r = 0; r < NV; r++)
            part[r] = part[r] + vf_load(row + VL * r);
        if (c->ends && c->ends[i]) {
            UNROLL
            for (int r = 0; r < NV; r++) {
                lanes[r] = lanes[r] + part[r];
                part[r] = vf_set(0.0f);
            }
        }
    }
    vf_natural(c->ends ? lanes : part, sum);
    UNROLL
    for (int r = 0; r < NV; r++)
        sum[r] = sum[r] * vf_set(c->scale);
}

static void combine(const struct numoe_combine *c)
{
    for (uint64_t p = c->tile_begin; p < c->tile_end; p++) {
        const uint64_t at = NUMOE_TILE * p;
        const size_t size = c->type == NUMOE_BF16 ? 2 : 4;
        uint8_t *out = (uint8_t *)c->out + at * size;
        uint8_t cut[4 * NUMOE_TILE];
        const size_t bytes = (c->hidden - at < NUMOE_TILE ? c->hidden - at : NUMOE_TILE) * size;
        vf sum[NV], old[NV];

        combine_tile(c, p, sum);
        if (c->add) {
            memset(cut, 0, sizeof cut);
            memcpy(cut, out, bytes);
            load_natural(cut, c->type, 0, old);
            UNROLL
            for (int r = 0; r < NV; r++)
                sum[r] = old[r] + sum[r];
        }
        UNROLL
        for (int r = 0; r < NV; r++) {
            if (c->type == NUMOE_BF16) {
                vf_store_bf16((uint16_t *)(void *)cut + VL * r, sum[r]);
            } else {
                const vf v = sum[r];
                memcpy((float *)(void *)cut + VL * r, &v, sizeof v);
            }
        }
        memcpy(out, cut, bytes);
    }
}

#endif
