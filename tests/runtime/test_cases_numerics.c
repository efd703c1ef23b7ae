/* Reported faults of other engines, group D (numerics and formats), as small inputs with the right
 * values: gate and up order, nibble order, clamps, SiTU, odd widths, foreign ids, empty batches. */
#include "numoe_kernels.h"
#include "runtime/oracle_help.h"

#include <stdio.h>

static const struct numoe_activation silu = {.kind = NUMOE_SILU};

/* One token or more, one expert each (ids given), bf16-exact f32 inputs, f32 out. */
static struct numoe_batch simple_batch(uint64_t tokens, const float *x, const int32_t *ids,
                                       const float *weights, float *out)
{
    struct numoe_batch batch = NUMOE_BATCH_INIT;

    batch.tokens = tokens;
    batch.top_k = 1;
    batch.x = x;
    batch.x_type = NUMOE_F32;
    batch.ids = ids;
    batch.weights = weights;
    batch.out = out;
    batch.out_type = NUMOE_F32;
    return batch;
}

static float *random_x(uint64_t count, uint64_t *state)
{
    float *x = must_calloc(count, sizeof *x);

    for (uint64_t i = 0; i < count; i++)
        x[i] = bf16_float(float_bf16(random_normal(state)));
    return x;
}

/* ---- D1: order of gate and up --------------------------------------------------------------- */

enum { D1_HIDDEN = 32, D1_INTER = 32, D1_ROW = 16 };
enum order { INTERLEAVED, GATE_FIRST, UP_FIRST };

/* Lay the same gate and up rows out in one fused tensor, and describe them from there. */
static void load_fused(struct numoe_model *model, const struct plain_expert *expert,
                       enum order order, bool swap_labels)
{
    struct packed_matrix gate = pack_plain(&expert->gate, NUMOE_NIBBLES_ADJACENT, 0);
    struct packed_matrix up = pack_plain(&expert->up, NUMOE_NIBBLES_ADJACENT, 0);
    struct packed_matrix down = pack_plain(&expert->down, NUMOE_NIBBLES_ADJACENT, 0);
    uint8_t codes[2 * D1_INTER * D1_ROW], scales[2 * D1_INTER];
    uint64_t step = order == INTERLEAVED ? 2 : 1;
    uint64_t gate_first_row = order == UP_FIRST ? D1_INTER : 0;
    uint64_t up_first_row = order == INTERLEAVED ? 1 : order == GATE_FIRST ? D1_INTER : 0;
    struct numoe_expert_weights weights = {.size = sizeof weights};
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (uint64_t r = 0; r < D1_INTER; r++) {
        uint64_t g = gate_first_row + r * step, u = up_first_row + r * step;

        memcpy(codes + g * D1_ROW, gate.codes + r * D1_ROW, D1_ROW);
        memcpy(codes + u * D1_ROW, up.codes + r * D1_ROW, D1_ROW);
        scales[g] = gate.scales[r];
        scales[u] = up.scales[r];
    }
    weights.gate = gate.view;
    weights.gate.codes = codes + gate_first_row * D1_ROW;
    weights.gate.scales = scales + gate_first_row;
    weights.gate.code_stride = step * D1_ROW;
    weights.gate.scale_stride = step;
    weights.up = weights.gate;
    weights.up.codes = codes + up_first_row * D1_ROW;
    weights.up.scales = scales + up_first_row;
    weights.down = down.view;
    if (swap_labels) {
        struct numoe_mxfp4 other = weights.gate;

        weights.gate = weights.up;
        weights.up = other;
    }
    cr_assert_eq(numoe_expert_load(model, 0, 0, &weights, &error), 0, "%s", error.message);
    packed_free(&gate);
    packed_free(&up);
    packed_free(&down);
}

TEST_EACH_ISA(case_d1, three_gate_up_orders_give_equal_bits_and_swapped_labels_do_not)
{
    uint64_t state = 0xD1;
    struct numoe *context = open_on(isa, NULL, 0);
    float x[D1_HIDDEN], weight = 1;
    int32_t id = 0;

    /* The sum is 1, where silu is far from linear and from zero: the order shows. */
    for (int i = 0; i < D1_HIDDEN; i++)
        x[i] = (i & 1 ? 3.0f : -1.0f) / 32;
    for (size_t a = 0; a < 2; a++) {
        for (int random = 0; random < 2; random++) {
            struct plain_expert expert = plain_expert_random(D1_HIDDEN, D1_INTER, &state);
            struct numoe_model *model =
                create_model(context, D1_HIDDEN, D1_INTER, 1, silu, both_arithmetics[a]);
            float want[D1_HIDDEN], out[4][D1_HIDDEN];
            struct numoe_batch batch = simple_batch(1, x, &id, &weight, out[0]);

            if (!random) { /* the report's input: gate all ones, up all twos */
                memset(expert.gate.codes, 2, D1_INTER * D1_HIDDEN);
                memset(expert.up.codes, 4, D1_INTER * D1_HIDDEN);
                memset(expert.gate.scales, 127, D1_INTER);
                memset(expert.up.scales, 127, D1_INTER);
            }
            plain_output(&expert, &silu, x, 1, 0, want);
            for (int order = INTERLEAVED; order <= UP_FIRST; order++) {
                load_fused(model, &expert, (enum order)order, false);
                batch.out = out[order];
                run_ok(model, 0, &batch, NULL);
                /* A single token is a small sample for int8. */
                cr_expect(relative_l2(out[order], want, D1_HIDDEN) <=
                              2 * limit_of(both_arithmetics[a]),
                          "%s %s order %d: off by %.3e", isa, name_of(both_arithmetics[a]), order,
                          relative_l2(out[order], want, D1_HIDDEN));
            }
            cr_expect_arr_eq(out[GATE_FIRST], out[INTERLEAVED], sizeof out[0]);
            cr_expect_arr_eq(out[UP_FIRST], out[INTERLEAVED], sizeof out[0]);
            for (int order = INTERLEAVED; order <= UP_FIRST; order++) {
                load_fused(model, &expert, (enum order)order, true);
                batch.out = out[3];
                run_ok(model, 0, &batch, NULL);
                cr_expect_gt(relative_l2(out[3], want, D1_HIDDEN), 0.05,
                             "%s order %d: the label is not used", isa, order);
            }
            numoe_model_destroy(model);
            plain_expert_free(&expert);
        }
    }
    numoe_close(context);
}

/* ---- D2: order of nibbles -------------------------------------------------------------------- */

static const uint8_t d2_bytes[16] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE,
                                     0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};

Test(case_d2, the_vector_reads_low_nibble_first_in_every_matrix)
{
    enum { N = 32 };
    static _Alignas(64) uint8_t slice[65536];
    uint8_t codes[N * 16], scales[N];
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    struct numoe_expert_source source = {.hidden = N, .intermediate = N, .bias_step = 1};

    for (int row = 0; row < N; row++) {
        memcpy(codes + row * 16, d2_bytes, 16);
        scales[row] = 127;
    }
    source.gate = source.up = source.down = (struct numoe_mxfp4){.codes = codes,
                                                                 .scales = scales,
                                                                 .code_stride = 16,
                                                                 .scale_stride = 1,
                                                                 .code_step = 16,
                                                                 .scale_step = 1,
                                                                 .nibbles = NUMOE_NIBBLES_ADJACENT};
    cr_assert_eq(numoe_slice_shape_init(&shape, N, false), 0);
    cr_assert_leq(shape.bytes, sizeof slice);
    cr_assert_eq(numoe_pack_slices(&shape, &source, 0, 1, slice, &report), 0);
    cr_expect(!report.extreme_scales);
    for (int matrix = NUMOE_GATE; matrix <= NUMOE_DOWN; matrix++) {
        for (unsigned row = 0; row < N; row++) {
            for (unsigned k = 0; k < N; k++) {
                unsigned code = 99, scale = 999;
                double value = numoe_slice_weight(&shape, slice, (enum numoe_matrix)matrix, row, k,
                                                  &code, &scale);

                cr_assert_eq(code, k % 16, "matrix %d row %u k %u: code %u", matrix, row, k, code);
                cr_assert_eq(scale, 127);
                cr_assert_eq(value, e2m1_values[k % 16]);
                cr_assert_eq(!!signbit(value), k % 16 >= 8, "matrix %d k %u: sign of %g", matrix, k,
                             value);
            }
        }
    }
}

Test(case_d2, adjacent_and_gguf_sources_of_the_same_weights_pack_to_equal_bytes)
{
    const uint64_t shapes[][2] = {{32, 32}, {96, 64}, {160, 130}, {70, 33}, {1, 1}};
    uint64_t state = 0xD2;

    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        uint64_t hidden = shapes[s][0], intermediate = shapes[s][1];
        uint64_t slices = (intermediate + 31) / 32;
        struct plain_expert expert = plain_expert_random(hidden, intermediate, &state);
        struct numoe_slice_shape shape;
        uint8_t *out[2];

        cr_assert_eq(numoe_slice_shape_init(&shape, hidden, false), 0);
        for (int n = 0; n < 2; n++) {
            enum numoe_nibbles nibbles = n ? NUMOE_NIBBLES_SPLIT : NUMOE_NIBBLES_ADJACENT;
            struct packed_matrix gate = pack_plain(&expert.gate, nibbles, 3);
            struct packed_matrix up = pack_plain(&expert.up, nibbles, 5);
            struct packed_matrix down = pack_plain(&expert.down, nibbles, 9);
            struct numoe_expert_source source = {.hidden = hidden,
                                                 .intermediate = intermediate,
                                                 .gate = gate.view,
                                                 .up = up.view,
                                                 .down = down.view,
                                                 .bias_step = 1};
            struct numoe_pack_report report = {0};

            out[n] = aligned_alloc(64, slices * shape.bytes);
            cr_assert_not_null(out[n]);
            memset(out[n], n ? 0xAA : 0x55, slices * shape.bytes);
            cr_assert_eq(numoe_pack_slices(&shape, &source, 0, slices, out[n], &report), 0);
            packed_free(&gate);
            packed_free(&up);
            packed_free(&down);
        }
        cr_expect_arr_eq(out[0], out[1], slices * shape.bytes, "H %d I %d", (int)hidden,
                         (int)intermediate);
        /* And both are the weights: every one of them, padding zero. */
        for (uint64_t i = 0; i < 32 * slices; i++) {
            const uint8_t *slice = out[0] + i / 32 * shape.bytes;

            for (uint64_t k = 0; k < 32 * shape.hidden_tiles; k++) {
                bool inside = i < intermediate && k < hidden;
                double gate = numoe_slice_weight(&shape, slice, NUMOE_GATE, i % 32, k, NULL, NULL);
                double up = numoe_slice_weight(&shape, slice, NUMOE_UP, i % 32, k, NULL, NULL);
                double down = numoe_slice_weight(&shape, slice, NUMOE_DOWN, k, i % 32, NULL, NULL);

                cr_assert_eq(gate, inside ? plain_value(&expert.gate, i, k) : 0);
                cr_assert_eq(up, inside ? plain_value(&expert.up, i, k) : 0);
                cr_assert_eq(down, inside ? plain_value(&expert.down, k, i) : 0);
            }
        }
        free(out[0]);
        free(out[1]);
        plain_expert_free(&expert);
    }
}

/* Decoded by the compute kernels: h is one number in column k of down, whose rows hold the
 * sixteen codes; each output over the output of code 2 (one) is then the code's value. */
TEST_EACH_ISA(case_d2, every_code_reads_the_same_through_down)
{
    struct numoe *context = open_on(isa, NULL, 0);
    int32_t ids[12] = {0};
    float weights[12], x[12][32];

    for (size_t a = 0; a < 2; a++) {
        struct plain_expert expert = {plain_zero(32, 32), plain_zero(32, 32), plain_zero(32, 32)};
        struct numoe_model *model = create_model(context, 32, 32, 1, silu, both_arithmetics[a]);

        for (unsigned i = 0; i < 32; i++) {
            expert.gate.codes[i * 32 + i] = expert.up.codes[i * 32 + i] = 2;
            for (unsigned k = 0; k < 32; k++)
                expert.down.codes[i * 32 + k] = (uint8_t)((i + k) & 15);
        }
        load_plain(model, 0, 0, &expert, NUMOE_NIBBLES_ADJACENT);
        for (unsigned k = 0; k < 32; k++) {
            /* 1 token takes the form for few, 12 the form for many. */
            for (unsigned tokens = 1; tokens <= 12; tokens += 11) {
                float out[12][32];
                struct numoe_batch batch = simple_batch(tokens, x[0], ids, weights, out[0]);

                for (unsigned t = 0; t < tokens; t++) {
                    memset(x[t], 0, sizeof x[t]);
                    x[t][k] = 1;
                    weights[t] = 1;
                }
                run_ok(model, 0, &batch, NULL);
                for (unsigned t = 0; t < tokens; t++) {
                    float one = out[t][(2 - k) & 15];

                    cr_assert_float_eq(one, 0.7310585786, 0.7310585786 / 256);
                    for (unsigned r = 0; r < 32; r++)
                        cr_assert_float_eq(out[t][r] / one, e2m1_values[(r + k) & 15], 2e-6,
                                           "%s %s, %u tokens, row %u, k %u: %.9g of %.9g", isa,
                                           name_of(both_arithmetics[a]), tokens, r, k,
                                           (double)out[t][r], (double)one);
                }
            }
        }
        numoe_model_destroy(model);
        plain_expert_free(&expert);
    }
    numoe_close(context);
}

/* ---- D3, D4: activations through a whole expert ---------------------------------------------- */

/* Hidden 64: x[0] is the gate's value and x[32] the up's, each alone in its group of 32 and so
 * exact in int8. Row 5 of gate and up picks them, and output 40 is the activation itself. */
static struct numoe_model *activation_probe(struct numoe *context,
                                            const struct numoe_activation *activation,
                                            enum numoe_arithmetic arithmetic)
{
    struct plain_expert expert = {plain_zero(32, 64), plain_zero(32, 64), plain_zero(64, 32)};
    struct numoe_model *model = create_model(context, 64, 32, 1, *activation, arithmetic);

    expert.gate.codes[5 * 64] = 2;
    expert.up.codes[5 * 64 + 32] = 2;
    expert.down.codes[40 * 32 + 5] = 2;
    load_plain(model, 0, 0, &expert, NUMOE_NIBBLES_ADJACENT);
    plain_expert_free(&expert);
    return model;
}

/* The activation of pairs (g, u), all bf16 numbers. at_once: in one batch, else one by one. */
static void probe(struct numoe_model *model, const float (*pairs)[2], unsigned count, bool at_once,
                  float *values)
{
    unsigned step = at_once ? count : 1;
    float *x = must_calloc(count * 64, sizeof *x);
    float *out = must_calloc(count * 64, sizeof *out);
    int32_t *ids = must_calloc(count, sizeof *ids);
    float *weights = must_calloc(count, sizeof *weights);

    for (unsigned t = 0; t < count; t++) {
        x[t * 64] = pairs[t][0];
        x[t * 64 + 32] = pairs[t][1];
        weights[t] = 1;
    }
    for (unsigned t = 0; t < count; t += step) {
        struct numoe_batch batch = simple_batch(step, x + t * 64, ids, weights, out + t * 64);

        run_ok(model, 0, &batch, NULL);
    }
    for (unsigned t = 0; t < count; t++) {
        values[t] = out[t * 64 + 40];
        /* With SWIGLU_OAI the rows of zeros give 0 as well: g is 0 there. */
        for (unsigned i = 0; i < 64; i++)
            cr_assert(i == 40 || out[t * 64 + i] == 0, "output %u of token %u is %g", i, t,
                      (double)out[t * 64 + i]);
    }
    free(x);
    free(out);
    free(ids);
    free(weights);
}

/* exact rounds h to bf16, by up to 2^-8; fast carries the largest of a group as 127/127. */
static double probe_tolerance(enum numoe_arithmetic arithmetic)
{
    return arithmetic == NUMOE_EXACT ? 1.0 / 256 + 2e-6 : 4e-6;
}

static void expect_point(const char *isa, struct numoe_activation activation, float g, float u,
                         double want)
{
    struct numoe *context = open_on(isa, NULL, 0);
    float pair[1][2] = {{g, u}}, value;

    /* The reports give five or six digits. */
    cr_assert_float_eq(plain_activation(&activation, g, u), want, 2e-5 * fabs(want));
    want = plain_activation(&activation, g, u);
    for (size_t a = 0; a < 2; a++) {
        struct numoe_model *model = activation_probe(context, &activation, both_arithmetics[a]);

        probe(model, (const float(*)[2])pair, 1, true, &value);
        cr_expect_float_eq(
            value, want, (probe_tolerance(both_arithmetics[a]) + 5e-7 * fabsf(g)) * fabs(want),
            "%s %s: kind %d of (%g, %g) is %.7g, not %.7g", isa, name_of(both_arithmetics[a]),
            (int)activation.kind, (double)g, (double)u, (double)value, want);
        numoe_model_destroy(model);
    }
    numoe_close(context);
}

TEST_EACH_ISA(case_d3, clamps_are_honoured)
{
    const struct numoe_activation clamped = {.kind = NUMOE_SILU_CLAMPED, .limit = 10};
    const struct numoe_activation oai = {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f};

    expect_point(isa, clamped, 20, -30, -99.9955);
    expect_point(isa, silu, 20, -30, -600);
    expect_point(isa, oai, 9, -9, -41.9997);
    /* The gate is free downwards: clamped at -10 this would be -4.5e-4. */
    expect_point(isa, clamped, -30, 1, -30 / (1 + exp(30)));
}

TEST_EACH_ISA(case_d4, situ_has_its_own_parameters)
{
    const struct numoe_activation situ = {.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = 25};
    const struct numoe_activation tiny = {.kind = NUMOE_SILU_CLAMPED, .limit = 0.03125f};

    expect_point(isa, situ, 8, 50, 92.9038);
    expect_point(isa, silu, 8, 50, 399.87);
    expect_point(isa, tiny, 8, 50, 0.03125 / (1 + exp(-0.03125)) * 0.03125);
}

Test(case_d4, a_cap_of_zero_or_less_is_refused)
{
    struct numoe *context = open_on("ref", NULL, 0);
    const float caps[] = {0, -4, NAN};

    for (size_t i = 0; i < 3; i++) {
        struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_model *model = NULL;

        desc.layers = desc.experts = desc.experts_per_token = 1;
        desc.hidden = desc.intermediate = 32;
        desc.activation =
            (struct numoe_activation){.kind = NUMOE_SITU, .gate_cap = caps[i], .up_cap = 25};
        cr_expect_eq(numoe_model_create(context, &desc, &model, &error), -EINVAL);
        cr_expect(strstr(error.message, "gate_cap") || strstr(error.where, "gate_cap"),
                  "\"%s\" \"%s\"", error.where, error.message);
        cr_expect_null(model);
    }
    numoe_close(context);
}

TEST_EACH_ISA(case_d4, all_activations_over_their_range)
{
    const struct numoe_activation all[] = {
        {.kind = NUMOE_SILU},
        {.kind = NUMOE_SILU_CLAMPED, .limit = 10},
        {.kind = NUMOE_SWIGLU_OAI, .limit = 7, .alpha = 1.702f},
        {.kind = NUMOE_SITU, .gate_cap = 4, .up_cap = 25},
        {.kind = NUMOE_SITU, .gate_cap = 4},
    };
    enum { COUNT = 400 };
    static float pairs[COUNT][2], values[COUNT];
    struct numoe *context = open_on(isa, NULL, 0);
    uint64_t state = 0xD4;

    /* Sizes from 2^-20 to 2^7, so that small arguments show a relative error, not only large. */
    for (unsigned i = 0; i < COUNT; i++)
        for (unsigned j = 0; j < 2; j++) {
            double size = exp2((double)(next_random(&state) % 2700) / 100 - 20);

            pairs[i][j] = bf16_float(float_bf16((float)(next_random(&state) & 1 ? size : -size)));
        }
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) {
        for (size_t a = 0; a < 2; a++) {
            struct numoe_model *model = activation_probe(context, &all[k], both_arithmetics[a]);

            for (int at_once = 0; at_once < 2; at_once++) {
                double worst = 0;
                unsigned at = 0;

                probe(model, (const float(*)[2])pairs, at_once ? COUNT : COUNT / 8, at_once,
                      values);
                for (unsigned i = 0; i < (at_once ? COUNT : COUNT / 8); i++) {
                    double g = pairs[i][0], u = pairs[i][1];
                    double want = plain_activation(&all[k], g, u);
                    /* Below 1e-30 (gates under -70) nothing of h is left in any sum. What is
                     * owed besides: a last-place error of g times |g| in an exponential, and
                     * one of u where u + 1 cancels. */
                    double owed = probe_tolerance(both_arithmetics[a]) + 5e-7 * fabs(g) +
                                  (all[k].kind == NUMOE_SWIGLU_OAI ? 3e-7 / fabs(u + 1) : 0);
                    double error = fabs(values[i] - want) / fmax(fabs(want), 1e-30) / owed;

                    if (error > worst) {
                        worst = error;
                        at = i;
                    }
                }
                cr_expect_leq(worst, 1,
                              "%s %s %s, activation %zu of (%g, %g) is %.9g, not %.9g: %.2f times "
                              "what rounding allows",
                              isa, name_of(both_arithmetics[a]), at_once ? "many" : "few", k,
                              (double)pairs[at][0], (double)pairs[at][1], (double)values[at],
                              plain_activation(&all[k], pairs[at][0], pairs[at][1]), worst);
            }
            numoe_model_destroy(model);
        }
    }
    numoe_close(context);
}

/* ---- D5: widths and counts that do not divide ------------------------------------------------ */

/* Build experts, run tokens over them, and compare with plain double. A few products are a small
 * sample: what is allowed is the limit, or a little more than the mode's own rounding of x and h
 * costs on these very numbers where that is larger. */
static void check_shape(struct numoe *context, const char *what, uint64_t hidden,
                        uint64_t intermediate, uint64_t experts, uint64_t tokens,
                        enum numoe_nibbles nibbles)
{
    uint64_t state = 0xD5 + hidden * 131 + intermediate;
    struct numoe_activation clamped = {.kind = NUMOE_SILU_CLAMPED, .limit = 10};
    struct plain_expert *plain = must_calloc(experts, sizeof *plain);
    float *x = random_x(tokens * hidden, &state);
    int32_t *ids = must_calloc(tokens, sizeof *ids);
    float *weights = must_calloc(tokens, sizeof *weights);
    float *want = must_calloc(tokens * hidden, sizeof *want);
    float *rounded = must_calloc(tokens * hidden, sizeof *rounded);
    float *out = must_calloc(tokens * hidden, sizeof *out);

    for (uint64_t e = 0; e < experts; e++)
        plain[e] = plain_expert_random(hidden, intermediate, &state);
    for (uint64_t t = 0; t < tokens; t++) {
        ids[t] = (int32_t)(t % experts);
        weights[t] = 0.5f + (float)(t % 5);
        plain_output(&plain[ids[t]], &clamped, x + t * hidden, weights[t], 0, want + t * hidden);
    }
    for (size_t a = 0; a < 2; a++) {
        struct numoe_model *model =
            create_model(context, hidden, intermediate, experts, clamped, both_arithmetics[a]);
        double allowed, distance;

        for (uint64_t t = 0; t < tokens; t++)
            plain_output(&plain[ids[t]], &clamped, x + t * hidden, weights[t], both_arithmetics[a],
                         rounded + t * hidden);
        allowed =
            fmax(limit_of(both_arithmetics[a]), 1.2 * relative_l2(rounded, want, tokens * hidden));
        for (uint64_t e = 0; e < experts; e++)
            load_plain(model, 0, e, &plain[e], nibbles);
        for (int whole = 0; whole < 2; whole++) {
            uint64_t step = whole ? tokens : 1;

            memset(out, 0x7F, tokens * hidden * sizeof *out);
            for (uint64_t t = 0; t < tokens; t += step) {
                struct numoe_batch batch =
                    simple_batch(step, x + t * hidden, ids + t, weights + t, out + t * hidden);

                run_ok(model, 0, &batch, NULL);
            }
            distance = relative_l2(out, want, tokens * hidden);
            cr_expect(distance <= allowed,
                      "%s, H %d, I %d, %d experts, %d tokens %s, %s: off by %.3e, allowed %.3e",
                      what, (int)hidden, (int)intermediate, (int)experts, (int)tokens,
                      whole ? "at once" : "one by one", name_of(both_arithmetics[a]), distance,
                      allowed);
        }
        numoe_model_destroy(model);
    }
    for (uint64_t e = 0; e < experts; e++)
        plain_expert_free(&plain[e]);
    free(plain);
    free(x);
    free(ids);
    free(weights);
    free(want);
    free(rounded);
    free(out);
}

static const char eight_nodes[] = "numa:8(memory=1GB) core:2 pu:1";
static const char thirty_two_nodes[] = "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2";

TEST_EACH_ISA(case_d5, width_130_hidden_256_on_1_8_and_32_nodes)
{
    const char *topologies[] = {NULL, eight_nodes, thirty_two_nodes};

    for (size_t i = 0; i < 3; i++) {
        struct numoe *context = open_on(isa, topologies[i], i ? 3 : 0);

        check_shape(context, topologies[i] ? topologies[i] : "live", 256, 130, 2, 26,
                    NUMOE_NIBBLES_ADJACENT);
        check_shape(context, topologies[i] ? topologies[i] : "live", 256, 130, 2, 26,
                    NUMOE_NIBBLES_SPLIT);
        numoe_close(context);
    }
}

TEST_EACH_ISA(case_d5, three_experts_on_32_nodes)
{
    struct numoe *context = open_on(isa, thirty_two_nodes, 3);

    check_shape(context, thirty_two_nodes, 128, 96, 3, 30, NUMOE_NIBBLES_ADJACENT);
    numoe_close(context);
}

/* As many workers as the planned machine has cores, far more than this one. */
Test(case_d5, one_worker_a_planned_core, .timeout = 120)
{
    struct numoe *context = open_on(NULL, thirty_two_nodes, 0);

    check_shape(context, thirty_two_nodes, 256, 130, 2, 26, NUMOE_NIBBLES_ADJACENT);
    numoe_close(context);
}

/* 30 experts of one slice over 8 nodes: 4 or 3 on each, none idle. */
Test(case_d5, thirty_experts_on_8_nodes_differ_by_one_at_most, .timeout = 60)
{
    struct numoe *context = open_on(NULL, eight_nodes, 3);
    struct numoe_model *model = create_model(context, 256, 32, 30, silu, NUMOE_FAST);
    struct numoe_model_info info = {.size = sizeof info};
    uint64_t least = UINT64_MAX, most = 0, total = 0;

    cr_assert_eq(numoe_model_info(model, &info), 0);
    cr_expect_eq(info.node_count, 8);
    for (uint32_t n = 0; n < info.node_count; n++) {
        struct numoe_node_info node = NUMOE_NODE_INFO_INIT;

        cr_assert_eq(numoe_model_node(model, n, &node), 0);
        least = node.planned_bytes < least ? node.planned_bytes : least;
        most = node.planned_bytes > most ? node.planned_bytes : most;
        total += node.planned_bytes;
    }
    cr_expect_eq(total, 30 * info.expert_bytes);
    cr_expect_eq(least, 3 * info.expert_bytes);
    cr_expect_eq(most, 4 * info.expert_bytes);
    cr_expect_eq(
        numoe_model_node(model, info.node_count, &(struct numoe_node_info)NUMOE_NODE_INFO_INIT),
        -EINVAL);
    numoe_model_destroy(model);
    check_shape(context, eight_nodes, 256, 32, 30, 60, NUMOE_NIBBLES_ADJACENT);
    numoe_close(context);
}

/* ---- D6: ids that are not ours --------------------------------------------------------------- */

enum { D6_HIDDEN = 96, D6_INTER = 64, D6_EXPERTS = 4, D6_TOKENS = 4, D6_K = 4 };

struct d6 {
    struct plain_expert experts[D6_EXPERTS];
    struct numoe_model *model;
    float *x, weights[D6_TOKENS * D6_K], want[D6_TOKENS * D6_HIDDEN];
    float out[D6_TOKENS * D6_HIDDEN];
    int64_t ids[D6_TOKENS * D6_K];
    int32_t ids32[D6_TOKENS * D6_K];
};

static void d6_fill(struct d6 *d, struct numoe *context, enum numoe_arithmetic arithmetic)
{
    static const int64_t ids[D6_TOKENS * D6_K] = {0, -1, 2, -1, -1, -1, -1, -1,
                                                  3, 3,  3, 3,  0,  1,  2,  D6_EXPERTS};
    uint64_t state = 0xD6;

    d->x = random_x(D6_TOKENS * D6_HIDDEN, &state);
    d->model = create_model(context, D6_HIDDEN, D6_INTER, D6_EXPERTS, silu, arithmetic);
    for (int e = 0; e < D6_EXPERTS; e++) {
        d->experts[e] = plain_expert_random(D6_HIDDEN, D6_INTER, &state);
        load_plain(d->model, 0, (uint64_t)e, &d->experts[e], NUMOE_NIBBLES_ADJACENT);
    }
    for (int t = 0; t < D6_TOKENS; t++) {
        double sum[D6_HIDDEN] = {0};

        for (int j = 0; j < D6_K; j++) {
            int64_t id = ids[t * D6_K + j];

            d->ids[t * D6_K + j] = id;
            d->ids32[t * D6_K + j] = (int32_t)id;
            d->weights[t * D6_K + j] = 0.25f * (float)(1 + j);
            if (id >= 0 && id < D6_EXPERTS)
                plain_add(&d->experts[id], &silu, d->x + t * D6_HIDDEN, d->weights[t * D6_K + j], 0,
                          sum);
            else
                d->weights[t * D6_K + j] = NAN;
        }
        for (int i = 0; i < D6_HIDDEN; i++)
            d->want[t * D6_HIDDEN + i] = (float)sum[i];
    }
}

static void d6_free(struct d6 *d)
{
    for (int e = 0; e < D6_EXPERTS; e++)
        plain_expert_free(&d->experts[e]);
    numoe_model_destroy(d->model);
    free(d->x);
}

static struct numoe_batch d6_batch(struct d6 *d, bool wide)
{
    struct numoe_batch batch = simple_batch(D6_TOKENS, d->x, d->ids32, d->weights, d->out);

    batch.top_k = D6_K;
    if (wide) {
        batch.ids = d->ids;
        batch.id_bytes = 8;
    }
    return batch;
}

TEST_EACH_ISA(case_d6, foreign_ids_contribute_nothing_and_repeats_add_up)
{
    struct numoe *context = open_on(isa, NULL, 0);

    for (size_t a = 0; a < 2; a++) {
        for (int wide = 0; wide < 2; wide++) {
            struct d6 d;
            struct numoe_batch batch;
            struct numoe_result result = NUMOE_RESULT_INIT;

            d6_fill(&d, context, both_arithmetics[a]);
            batch = d6_batch(&d, wide);
            memset(d.out, 0x7F, sizeof d.out);
            run_ok(d.model, 0, &batch, &result);
            cr_expect_eq(result.skipped, 1);
            cr_expect_eq(result.missing, 0);
            cr_expect_eq(result.pairs, 9);
            cr_expect_eq(result.experts_hit, 4);
            for (int t = 0; t < D6_TOKENS; t++) {
                /* Single tokens are small samples for int8. */
                double distance =
                    relative_l2(d.out + t * D6_HIDDEN, d.want + t * D6_HIDDEN, D6_HIDDEN);

                cr_expect(distance <= 2 * limit_of(both_arithmetics[a]), "%s %s row %d: %.3e", isa,
                          name_of(both_arithmetics[a]), t, distance);
            }
            for (int i = 0; i < D6_HIDDEN; i++)
                cr_assert_eq(d.out[D6_HIDDEN + i], 0, "row 1 is not zero");
            /* With add, the row of -1 is left as it is, to the bit. */
            for (int i = 0; i < D6_TOKENS * D6_HIDDEN; i++)
                d.out[i] = 0.1f * (float)i;
            batch.add = true;
            run_ok(d.model, 0, &batch, NULL);
            for (int i = D6_HIDDEN; i < 2 * D6_HIDDEN; i++)
                cr_assert_eq(d.out[i], 0.1f * (float)i, "row 1 changed at %d", i - D6_HIDDEN);
            d6_free(&d);
        }
    }
    numoe_close(context);
}

Test(case_d6, strict_refuses_naming_token_and_slot_before_anything_is_written, .timeout = 60)
{
    struct numoe *context = open_on("ref", NULL, 0);

    for (int wide = 0; wide < 2; wide++) {
        struct d6 d;
        struct numoe_batch batch;
        struct numoe_result result = NUMOE_RESULT_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        float before[D6_TOKENS * D6_HIDDEN];

        d6_fill(&d, context, NUMOE_FAST);
        batch = d6_batch(&d, wide);
        batch.strict = true;
        memset(d.out, 0x5A, sizeof d.out);
        memcpy(before, d.out, sizeof before);
        cr_expect_eq(numoe_forward(d.model, 0, &batch, &result, &error), -EINVAL);
        cr_expect(strstr(error.message, "token 3") && strstr(error.message, "slot 3"), "\"%s\"",
                  error.message);
        cr_expect_arr_eq(d.out, before, sizeof before);
        cr_expect_eq(numoe_forward(d.model, 0, &batch, NULL, NULL), -EINVAL);
        cr_expect_arr_eq(d.out, before, sizeof before);
        /* Negative ids are no fault, strict or not. */
        d.ids[15] = d.ids32[15] = -1;
        run_ok(d.model, 0, &batch, &result);
        cr_expect_eq(result.skipped, 0);
        cr_expect_eq(result.pairs, 9);
        d6_free(&d);
    }
    numoe_close(context);
}

Test(case_d6, ids_at_the_ends_of_their_types_are_only_numbers, .timeout = 60)
{
    struct numoe *context = open_on("ref", NULL, 0);
    struct d6 d;
    struct numoe_batch batch;
    struct numoe_result result = NUMOE_RESULT_INIT;

    d6_fill(&d, context, NUMOE_EXACT);
    batch = d6_batch(&d, true);
    d.ids[1] = INT64_MIN;
    d.ids[3] = INT64_MAX;
    d.ids[4] = (int64_t)1 << 32;       /* 0 when cut to 32 bits */
    d.ids[5] = 2 - ((int64_t)1 << 32); /* 2 when cut */
    d.weights[4] = d.weights[5] = 1;
    run_ok(d.model, 0, &batch, &result);
    cr_expect_eq(result.skipped, 3);
    cr_expect_eq(result.pairs, 9);
    for (int i = 0; i < D6_HIDDEN; i++)
        cr_assert_eq(d.out[D6_HIDDEN + i], 0, "a 64-bit id was cut to 32 bits");
    d6_free(&d);
    numoe_close(context);
}

/* ---- D7: nothing to do, or next to nothing --------------------------------------------------- */

TEST_EACH_ISA(case_d7, zero_tokens_need_no_pointer_and_leave_the_next_call_alone)
{
    struct numoe *context = open_on(isa, NULL, 0);

    for (size_t a = 0; a < 2; a++) {
        struct d6 d;
        struct numoe_batch empty = NUMOE_BATCH_INIT, one;
        struct numoe_result result = NUMOE_RESULT_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        uint64_t ticket = 0;

        d6_fill(&d, context, both_arithmetics[a]);
        empty.top_k = D6_K;
        empty.x_type = NUMOE_BF16;
        empty.out_type = NUMOE_BF16;
        result.pairs = result.experts_hit = 77;
        cr_assert_eq(numoe_forward(d.model, 0, &empty, &result, &error), 0, "%s", error.message);
        cr_expect_eq(result.pairs, 0);
        cr_expect_eq(result.experts_hit, 0);
        cr_expect_eq(result.expert_bytes, 0);
        cr_assert_eq(numoe_submit(d.model, 0, &empty, &ticket, &error), 0, "%s", error.message);
        cr_assert_eq(numoe_wait(d.model, ticket, NULL), 0);
        one = d6_batch(&d, false);
        one.tokens = 1;
        memset(d.out, 0x7F, sizeof d.out);
        run_ok(d.model, 0, &one, &result);
        cr_expect_eq(result.pairs, 2);
        cr_expect_eq(result.experts_hit, 2);
        cr_expect_leq(relative_l2(d.out, d.want, D6_HIDDEN), 2 * limit_of(both_arithmetics[a]));
        d6_free(&d);
    }
    numoe_close(context);
}

TEST_EACH_ISA(case_d7, one_token_on_one_of_896_experts)
{
    enum { EXPERTS = 896, HIDDEN = 64, INTER = 32, WANTED = 700 };
    struct numoe *context = open_on(isa, NULL, 0);
    uint64_t state = 0xD7;
    float *x = random_x(HIDDEN, &state), out[HIDDEN], want[HIDDEN], weight = 1;
    int32_t id = WANTED;

    for (size_t a = 0; a < 2; a++) {
        struct numoe_model *model =
            create_model(context, HIDDEN, INTER, EXPERTS, silu, both_arithmetics[a]);
        struct plain_expert expert = plain_expert_random(HIDDEN, INTER, &state);
        struct plain_expert other = plain_expert_random(HIDDEN, INTER, &state);
        struct numoe_batch batch = simple_batch(1, x, &id, &weight, out);
        struct numoe_result result = NUMOE_RESULT_INIT;
        struct numoe_model_info info = {.size = sizeof info};

        for (uint64_t e = 0; e < EXPERTS; e++)
            load_plain(model, 0, e, e == WANTED ? &expert : &other, NUMOE_NIBBLES_ADJACENT);
        plain_output(&expert, &silu, x, 1, 0, want);
        run_ok(model, 0, &batch, &result);
        cr_assert_eq(numoe_model_info(model, &info), 0);
        cr_expect_eq(result.pairs, 1);
        cr_expect_eq(result.experts_hit, 1);
        cr_expect_eq(result.expert_bytes, info.expert_bytes);
        cr_expect_leq(relative_l2(out, want, HIDDEN), 2 * limit_of(both_arithmetics[a]));
        numoe_model_destroy(model);
        plain_expert_free(&expert);
        plain_expert_free(&other);
    }
    free(x);
    numoe_close(context);
}

TEST_EACH_ISA(case_d7, tiny_and_odd_shapes)
{
    const uint64_t shapes[][2] = {{1, 1},  {2, 3},   {31, 33}, {33, 31},
                                  {32, 1}, {65, 97}, {7, 200}, {130, 34}};
    struct numoe *context = open_on(isa, NULL, 0);

    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        check_shape(context, "tiny", shapes[i][0], shapes[i][1], 3, 24, NUMOE_NIBBLES_ADJACENT);
    numoe_close(context);
}

/* ---- experts that are not there, numbers that are not numbers -------------------------------- */

Test(case_missing, an_expert_never_given_is_counted_and_adds_nothing, .timeout = 60)
{
    struct numoe *context = open_on("ref", NULL, 0);
    uint64_t state = 0x315;
    float *x = random_x(32, &state), out[32], weights[2] = {1, 1};
    int32_t ids[2] = {0, 1};
    struct numoe_model *model = create_model(context, 32, 32, 2, silu, NUMOE_EXACT);
    struct plain_expert expert = plain_expert_random(32, 32, &state);
    struct numoe_batch batch = simple_batch(1, x, ids, weights, out);
    struct numoe_result result = NUMOE_RESULT_INIT;
    float want[32];

    batch.top_k = 2;
    load_plain(model, 0, 1, &expert, NUMOE_NIBBLES_ADJACENT);
    run_ok(model, 0, &batch, &result);
    cr_expect_eq(result.missing, 1);
    cr_expect_eq(result.skipped, 0);
    cr_expect_eq(result.pairs, 1);
    plain_output(&expert, &silu, x, 1, 0, want);
    cr_expect_leq(relative_l2(out, want, 32), EXACT_LIMIT);
    numoe_model_destroy(model);
    plain_expert_free(&expert);
    free(x);
    numoe_close(context);
}

Test(case_missing, scale_byte_255_is_refused_by_place_and_the_expert_is_then_missing, .timeout = 60)
{
    struct numoe *context = open_on("ref", NULL, 0);
    uint64_t state = 0x255;
    float *x = random_x(96, &state), out[96], weight = 1;
    int32_t id = 0;
    struct numoe_model *model = create_model(context, 96, 64, 1, silu, NUMOE_EXACT);
    struct plain_expert expert = plain_expert_random(96, 64, &state);
    struct numoe_batch batch = simple_batch(1, x, &id, &weight, out);
    const char *names[] = {"gate", "up", "down"};
    struct plain_matrix *matrices[] = {&expert.gate, &expert.up, &expert.down};
    struct numoe_result result = NUMOE_RESULT_INIT;

    for (int m = 0; m < 3; m++) {
        /* gate and up: row 37, group 2 of 3; down: row 37, group 1 of 2 */
        unsigned group = m == 2 ? 1 : 2;
        uint8_t *byte = &matrices[m]->scales[37 * matrices[m]->groups + group];
        uint8_t sound = *byte;
        struct packed_matrix packed[3];
        struct numoe_expert_weights weights = {.size = sizeof weights};
        struct numoe_error error = NUMOE_ERROR_INIT;
        char row_words[32], group_words[32];

        load_plain(model, 0, 0, &expert, NUMOE_NIBBLES_ADJACENT);
        *byte = 255;
        for (int i = 0; i < 3; i++)
            packed[i] = pack_plain(matrices[i], NUMOE_NIBBLES_ADJACENT, 0);
        weights.gate = packed[0].view;
        weights.up = packed[1].view;
        weights.down = packed[2].view;
        cr_expect_eq(numoe_expert_load(model, 0, 0, &weights, &error), -EDOM);
        snprintf(row_words, sizeof row_words, "row 37");
        snprintf(group_words, sizeof group_words, "group %u", group);
        cr_expect((strstr(error.message, names[m]) || strstr(error.where, names[m])) &&
                      strstr(error.message, row_words) && strstr(error.message, group_words),
                  "%s: \"%s\" \"%s\"", names[m], error.where, error.message);
        *byte = sound;
        for (int i = 0; i < 3; i++)
            packed_free(&packed[i]);
        run_ok(model, 0, &batch, &result);
        cr_expect_eq(result.missing, 1);
        cr_expect_eq(result.pairs, 0);
        for (int i = 0; i < 96; i++)
            cr_assert_eq(out[i], 0);
    }
    load_plain(model, 0, 0, &expert, NUMOE_NIBBLES_ADJACENT);
    run_ok(model, 0, &batch, &result);
    cr_expect_eq(result.missing, 0);
    cr_expect_eq(result.pairs, 1);
    numoe_model_destroy(model);
    plain_expert_free(&expert);
    free(x);
    numoe_close(context);
}

TEST_EACH_ISA(case_nan, one_bad_token_changes_no_bit_of_the_others)
{
    enum { TOKENS = 13, BAD = 6, HIDDEN = 96, INTER = 64 };
    const float bad[] = {NAN, INFINITY, -INFINITY};
    struct numoe *context = open_on(isa, NULL, 0);
    uint64_t state = 0x7A7;
    float *x = random_x(TOKENS * HIDDEN, &state), keep = x[BAD * HIDDEN + 40];
    float *clean = must_calloc(TOKENS * HIDDEN, sizeof *clean);
    float *out = must_calloc(TOKENS * HIDDEN, sizeof *out);
    int32_t ids[TOKENS];
    float weights[TOKENS];

    for (int t = 0; t < TOKENS; t++) {
        ids[t] = t & 1 ? 0 : 1;
        weights[t] = 1;
    }
    for (size_t a = 0; a < 2; a++) {
        struct numoe_model *model =
            create_model(context, HIDDEN, INTER, 2, silu, both_arithmetics[a]);
        struct numoe_batch batch = simple_batch(TOKENS, x, ids, weights, clean);

        for (int e = 0; e < 2; e++) {
            struct plain_expert expert = plain_expert_random(HIDDEN, INTER, &state);

            load_plain(model, 0, (uint64_t)e, &expert, NUMOE_NIBBLES_ADJACENT);
            plain_expert_free(&expert);
        }
        x[BAD * HIDDEN + 40] = keep;
        run_ok(model, 0, &batch, NULL);
        for (size_t b = 0; b < 3; b++) {
            x[BAD * HIDDEN + 40] = bad[b];
            batch.out = out;
            run_ok(model, 0, &batch, NULL);
            for (int t = 0; t < TOKENS; t++) {
                if (t != BAD) {
                    cr_expect_arr_eq(out + t * HIDDEN, clean + t * HIDDEN, HIDDEN * sizeof *out,
                                     "%s %s: token %d changed", isa, name_of(both_arithmetics[a]),
                                     t);
                    continue;
                }
                for (int i = 0; i < HIDDEN; i++)
                    cr_assert(isnan(out[t * HIDDEN + i]), "%s %s: %g in, output %d is %g", isa,
                              name_of(both_arithmetics[a]), (double)bad[b], i,
                              (double)out[t * HIDDEN + i]);
            }
        }
        numoe_model_destroy(model);
    }
    free(x);
    free(clean);
    free(out);
    numoe_close(context);
}
