/* Every kernel set against double precision, over awkward shapes, and the packer. */
#include "support/experts.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdio.h>

static const struct numoe_activation silu = {.kind = NUMOE_SILU};
static const struct numoe_activation clamped = {.kind = NUMOE_SILU_CLAMPED, .limit = 1.5f};
static const struct numoe_activation oai = {
    .kind = NUMOE_SWIGLU_OAI, .limit = 2.0f, .alpha = 1.702f};
static const struct numoe_activation situ = {.kind = NUMOE_SITU, .gate_cap = 1.0f, .up_cap = 2.5f};

struct errors {
    double exact;   /* relative L2 over all compared tokens, to double precision */
    double rounded; /* to the reference set, which rounds at the same points */
};

/* An expert, some tokens, one form of one kernel set: how far from the truth? */
static struct errors run_form(const struct numoe_kernels *k, bool few,
                              const struct test_expert *expert,
                              const struct numoe_activation *activation, unsigned tokens, bool add)
{
    const struct numoe_kernels *ref = numoe_kernels_select(k->arithmetic, "ref", NULL);
    struct numoe_slice_shape shape;
    const uint64_t slices = (expert->intermediate + 31) / 32;
    const uint64_t H = expert->hidden;
    struct numoe_pack_report report = {0};
    uint64_t compared = 0;

    cr_assert_eq(numoe_slice_shape_init(&shape, H, expert->bias[0] != NULL), 0);
    const uint64_t width = shape.hidden_tiles * NUMOE_TILE;
    uint8_t *packed = aligned_bytes(slices * shape.bytes);
    cr_assert_eq(numoe_pack_slices(&shape, &expert->source, 0, slices, packed, &report), 0);
    cr_assert(!report.extreme_scales);

    float *x = aligned_bytes(tokens * H * sizeof *x);
    uint8_t *records = aligned_bytes(tokens * k->record_bytes(&shape));
    void *ref_record = aligned_bytes(ref->record_bytes(&shape));
    float *y = aligned_bytes(tokens * width * sizeof *y);
    float *ref_y = aligned_bytes(width * sizeof *ref_y);
    float *down_bias = NULL;
    void *scratch = aligned_bytes(k->scratch_bytes(&shape));
    const void **xp = malloc(tokens * sizeof *xp);
    float **yp = malloc(tokens * sizeof *yp);
    float *weight = malloc(tokens * sizeof *weight);
    double *want = malloc(tokens * H * sizeof *want),
           *rounded = malloc(tokens * H * sizeof *rounded);
    float *got = malloc(tokens * H * sizeof *got);

    if (expert->bias[2]) {
        down_bias = aligned_bytes(width * sizeof *down_bias);
        for (uint64_t i = 0; i < width; i++) {
            const uint64_t row = i / 32 * 32 + numoe_lane_row(i % 32);
            down_bias[i] = row < H ? expert->bias[2][row] : 0.0f;
        }
    }
    for (unsigned t = 0; t < tokens; t++) {
        for (uint64_t i = 0; i < H; i++)
            x[t * H + i] = round_to_bf16(random_normal());
        xp[t] = records + t * k->record_bytes(&shape);
        yp[t] = y + t * width;
        weight[t] = 0.1f + (float)random_unit();
        k->quantise(&shape, x + t * H, NUMOE_F32, records + t * k->record_bytes(&shape));
        for (uint64_t i = 0; i < width; i++)
            yp[t][i] = add ? 0.25f : NAN; /* poison: overwriting must overwrite all */
    }
    struct numoe_ffn ffn = {.shape = &shape,
                            .activation = activation,
                            .arithmetic = k->arithmetic,
                            .slices = packed,
                            .slice_count = slices,
                            .down_bias = down_bias,
                            .tokens = tokens,
                            .x = xp,
                            .weight = weight,
                            .y = yp,
                            .add = add,
                            .scratch = scratch};
    (few ? k->few : k->many)(&ffn);
    /* the references are slow: some tokens of many */
    for (unsigned t = 0; t<tokens; t += tokens> 8 ? 7 : 1, compared++) {
        const float *row = yp[t], *ref_row = ref_y;
        const void *ref_x = ref_record;
        struct numoe_combine combine = {.rows = &row,
                                        .row_count = 1,
                                        .tile_end = shape.hidden_tiles,
                                        .hidden = H,
                                        .scale = 1.0f,
                                        .type = NUMOE_F32,
                                        .out = got + compared * H};
        for (uint64_t i = 0; i < H; i++)
            want[compared * H + i] = add ? 0.25 : 0;
        test_expert_apply(expert, activation, x + t * H, (double)weight[t], want + compared * H);
        k->combine(&combine);

        for (uint64_t i = 0; i < width; i++)
            ref_y[i] = 0.25f;
        ref->quantise(&shape, x + t * H, NUMOE_F32, ref_record);
        ffn.tokens = 1;
        ffn.x = &ref_x;
        ffn.weight = &weight[t];
        ffn.y = &ref_y;
        ref->few(&ffn);
        for (uint64_t i = 0; i < H; i++)
            rounded[compared * H + i] = (double)ref_row[i / 32 * 32 + numoe_row_lane(i % 32)];
    }
    const struct errors e = {relative_l2(want, got, compared * H),
                             relative_l2(rounded, got, compared * H)};
    free(packed);
    free(x);
    free(records);
    free(ref_record);
    free(y);
    free(ref_y);
    free(down_bias);
    free(scratch);
    free(xp);
    free(yp);
    free(weight);
    free(want);
    free(rounded);
    free(got);
    return e;
}

/* A hash of the outputs of one form of one kernel set. */
static uint64_t output_bits(const struct numoe_kernels *k, bool few,
                            const struct test_expert *expert,
                            const struct numoe_activation *activation, unsigned tokens)
{
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    const uint64_t slices = (expert->intermediate + 31) / 32;
    uint64_t hash = 14695981039346656037u;

    cr_assert_eq(numoe_slice_shape_init(&shape, expert->hidden, expert->bias[0] != NULL), 0);
    const uint64_t width = shape.hidden_tiles * NUMOE_TILE;
    uint8_t *packed = aligned_bytes(slices * shape.bytes);
    uint8_t *records = aligned_bytes(tokens * k->record_bytes(&shape));
    float *y = aligned_bytes(tokens * width * sizeof *y);
    float *x = aligned_bytes(expert->hidden * sizeof *x);
    void *scratch = aligned_bytes(k->scratch_bytes(&shape));
    const void *xp[16];
    float *yp[16], weight[16];

    cr_assert_eq(numoe_pack_slices(&shape, &expert->source, 0, slices, packed, &report), 0);
    for (unsigned t = 0; t < tokens; t++) {
        for (uint64_t i = 0; i < expert->hidden; i++)
            x[i] = random_normal();
        xp[t] = records + t * k->record_bytes(&shape);
        yp[t] = y + t * width;
        weight[t] = 0.1f + (float)random_unit();
        k->quantise(&shape, x, NUMOE_F32, records + t * k->record_bytes(&shape));
    }
    const struct numoe_ffn ffn = {.shape = &shape,
                                  .activation = activation,
                                  .arithmetic = k->arithmetic,
                                  .slices = packed,
                                  .slice_count = slices,
                                  .tokens = tokens,
                                  .x = xp,
                                  .weight = weight,
                                  .y = yp,
                                  .scratch = scratch};
    (few ? k->few : k->many)(&ffn);
    for (uint64_t i = 0; i < tokens * width; i++) {
        uint32_t bits;
        memcpy(&bits, &y[i], sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
    }
    free(packed);
    free(records);
    free(y);
    free(x);
    free(scratch);
    return hash;
}

struct shape_case {
    uint64_t hidden, intermediate;
    bool bias;
};

/* Wide ones have few slices: the double reference reads every weight for every token. */
static const struct shape_case shapes[] = {
    {32, 32, false},   {96, 32, true},   {33, 70, true},    {130, 96, false},
    {256, 130, false}, {2880, 96, true}, {3584, 64, false}, {4096, 70, false},
    {64, 768, false},  {96, 2880, true}, {32, 3072, false},
};

/*
 * What a set may be off by. Against double: silu at a typical width, and anything else (narrow
 * shapes and saturated activations scatter more). Against the reference set, which rounds at the
 * same points: fp32 sums, and a requantised h that falls on the other side of a rounding.
 */
static const struct limits {
    double typical, other, rounded;
} limits[NUMOE_ARITHMETICS + 1] = {
    [NUMOE_FAST] = {1.6e-2, 2.2e-2, 2e-3},      [NUMOE_EXACT] = {2.5e-3, 4e-3, 4e-4},
    [NUMOE_FINE] = {8e-5, 1.2e-4, 2e-5},        [NUMOE_MXFP8_UP] = {7e-2, 1.2e-1, 1.5e-2},
    [NUMOE_MXFP8_OCP] = {1e-1, 1.4e-1, 1.5e-2},
};

static void check(const struct numoe_kernels *k, const char *form, const struct shape_case *shape,
                  const struct numoe_activation *a, unsigned tokens, struct errors e)
{
    const bool typical = shape->hidden >= 2880 && (a->kind == NUMOE_SILU);
    const struct limits *l = &limits[k->arithmetic];

    cr_expect_leq(e.exact, typical ? l->typical : l->other,
                  "%s %s H %lu I %lu tokens %u activation %d: %g to double", k->name, form,
                  shape->hidden, shape->intermediate, tokens, a->kind, e.exact);
    cr_expect_leq(e.rounded, l->rounded, "%s %s H %lu I %lu tokens %u activation %d: %g to ref",
                  k->name, form, shape->hidden, shape->intermediate, tokens, a->kind, e.rounded);
}

static void check_set(const struct numoe_kernels *k)
{
    const struct numoe_activation *const activations[] = {&silu, &clamped, &oai, &situ};
    const bool ref = !strcmp(k->isa, "ref");
    unsigned n = 0;

    random_state = 12345;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct test_expert expert;
        const unsigned many[] = {1, 2, 7, 13, 65, k->many_tokens};

        test_expert_make(&expert, shapes[s].hidden, shapes[s].intermediate, shapes[s].bias);
        for (unsigned tokens = 1; tokens <= k->few_tokens && tokens <= 8; tokens++, n++) {
            const struct numoe_activation *a = activations[n % 4];
            check(k, "few", &shapes[s], a, tokens,
                  run_form(k, true, &expert, a, tokens, n % 3 == 0));
        }
        for (size_t m = 0; m < sizeof many / sizeof many[0] && !ref; m++, n++) {
            const struct numoe_activation *a = activations[n % 4];
            if (many[m] > k->many_tokens || (many[m] > 13 && shapes[s].hidden > 1000))
                continue;
            check(k, "many", &shapes[s], a, many[m],
                  run_form(k, false, &expert, a, many[m], n % 3 == 0));
        }
        test_expert_free(&expert);
    }
}

#define SET_TEST(arithmetic, mode, index)                                                          \
    Test(kernels_reference, mode##_set_##index, .timeout = 300)                                    \
    {                                                                                              \
        const struct numoe_kernels *k = numoe_kernels_at(arithmetic, index);                       \
        if (!k)                                                                                    \
            cr_skip_test("this CPU has fewer " #mode " kernel sets");                              \
        fprintf(stderr, "%s\n", k->name);                                                          \
        check_set(k);                                                                              \
    }
SET_TEST(NUMOE_FAST, fast, 0)
SET_TEST(NUMOE_FAST, fast, 1)
SET_TEST(NUMOE_FAST, fast, 2)
SET_TEST(NUMOE_FAST, fast, 3)
SET_TEST(NUMOE_FAST, fast, 4)
SET_TEST(NUMOE_FAST, fast, 5)
SET_TEST(NUMOE_EXACT, exact, 0)
SET_TEST(NUMOE_EXACT, exact, 1)
SET_TEST(NUMOE_EXACT, exact, 2)
SET_TEST(NUMOE_EXACT, exact, 3)
SET_TEST(NUMOE_EXACT, exact, 4)
SET_TEST(NUMOE_FINE, fine, 0)
SET_TEST(NUMOE_FINE, fine, 1)
SET_TEST(NUMOE_FINE, fine, 2)
SET_TEST(NUMOE_FINE, fine, 3)
SET_TEST(NUMOE_FINE, fine, 4)
SET_TEST(NUMOE_MXFP8_UP, mxfp8, 0)
SET_TEST(NUMOE_MXFP8_UP, mxfp8, 1)
SET_TEST(NUMOE_MXFP8_UP, mxfp8, 2)
SET_TEST(NUMOE_MXFP8_UP, mxfp8, 3)
SET_TEST(NUMOE_MXFP8_UP, mxfp8, 4)
SET_TEST(NUMOE_MXFP8_OCP, mxfp8_ocp, 0)
SET_TEST(NUMOE_MXFP8_OCP, mxfp8_ocp, 1)
SET_TEST(NUMOE_MXFP8_OCP, mxfp8_ocp, 2)
SET_TEST(NUMOE_MXFP8_OCP, mxfp8_ocp, 3)
SET_TEST(NUMOE_MXFP8_OCP, mxfp8_ocp, 4)

Test(kernels_pack, every_weight_reads_back)
{
    random_state = 99;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        const uint64_t H = shapes[s].hidden, I = shapes[s].intermediate;
        const uint64_t slices = (I + 31) / 32;
        struct numoe_pack_report report = {0};
        struct numoe_slice_shape shape;
        struct test_expert e;

        test_expert_make(&e, H, I, shapes[s].bias);
        cr_assert_eq(numoe_slice_shape_init(&shape, H, shapes[s].bias), 0);
        cr_assert_eq(shape.bytes % 64, 0);
        uint8_t *packed = aligned_bytes(slices * shape.bytes);
        cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, slices, packed, &report), 0);
        for (uint64_t i = 0; i < slices * 32; i++) {
            const uint8_t *slice = packed + i / 32 * shape.bytes;
            for (uint64_t k = 0; k < shape.hidden_tiles * 32; k++) {
                for (int m = 0; m < 2; m++) {
                    unsigned code, scale;
                    const double got =
                        numoe_slice_weight(&shape, slice, m, i % 32, k, &code, &scale);
                    if (i < I && k < H)
                        cr_assert_eq(got, test_expert_weight(&e, m, i, k));
                    else
                        cr_assert_eq(code, 0, "padding");
                    if (i >= I)
                        cr_assert_eq(scale, 127);
                }
                unsigned code;
                const double down =
                    numoe_slice_weight(&shape, slice, NUMOE_DOWN, k, i % 32, &code, NULL);
                if (i < I && k < H)
                    cr_assert_eq(down, test_expert_weight(&e, 2, k, i));
                else
                    cr_assert_eq(code, 0, "padding");
            }
        }
        free(packed);
        test_expert_free(&e);
    }
}

Test(kernels_pack, split_nibbles_describe_the_same_weights)
{
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    struct test_expert e;
    enum { SLICES = 5 };
    const uint64_t H = 160, I = 32 * SLICES;

    random_state = 5;
    test_expert_make(&e, H, I, false);
    numoe_slice_shape_init(&shape, H, false);
    uint8_t *a = aligned_bytes(SLICES * shape.bytes), *b = aligned_bytes(SLICES * shape.bytes);
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, SLICES, a, &report), 0);

    /* GGUF: scale byte, then byte 1 + j with value j low and j + 16 high */
    struct numoe_expert_source gguf = e.source;
    struct numoe_mxfp4 *m[3] = {&gguf.gate, &gguf.up, &gguf.down};
    const uint64_t rows[3] = {I, I, H}, columns[3] = {H, H, I};
    uint8_t *blocks[3];
    for (int i = 0; i < 3; i++) {
        const uint64_t groups = columns[i] / 32;
        blocks[i] = malloc(rows[i] * groups * 17);
        for (uint64_t r = 0; r < rows[i]; r++)
            for (uint64_t g = 0; g < groups; g++) {
                const uint8_t *from = e.codes[i] + r * columns[i] / 2 + g * 16;
                uint8_t *to = blocks[i] + (r * groups + g) * 17, v[32];
                for (int j = 0; j < 16; j++) {
                    v[2 * j] = from[j] & 15;
                    v[2 * j + 1] = from[j] >> 4;
                }
                to[0] = e.scales[i][r * groups + g];
                for (int j = 0; j < 16; j++)
                    to[1 + j] = (uint8_t)(v[j] | v[j + 16] << 4);
            }
        *m[i] = (struct numoe_mxfp4){.codes = blocks[i] + 1,
                                     .scales = blocks[i],
                                     .code_stride = groups * 17,
                                     .scale_stride = groups * 17,
                                     .code_step = 17,
                                     .scale_step = 17,
                                     .nibbles = NUMOE_NIBBLES_SPLIT};
    }
    cr_assert_eq(numoe_pack_slices(&shape, &gguf, 0, SLICES, b, &report), 0);
    cr_assert_arr_eq(a, b, SLICES * shape.bytes);
    for (int i = 0; i < 3; i++)
        free(blocks[i]);
    free(a);
    free(b);
    test_expert_free(&e);
}

/* Four groups at once, or one by one: as slices are asked for, and as scales are ordinary or not.
 */
Test(kernels_pack, slices_together_are_slices_alone)
{
    enum { SLICES = 6 };
    struct numoe_slice_shape shape;
    struct test_expert e;
    const uint64_t H = 288, I = 32 * SLICES;

    random_state = 6;
    test_expert_make(&e, H, I, false);
    numoe_slice_shape_init(&shape, H, false);
    uint8_t *a = aligned_bytes(SLICES * shape.bytes), *b = aligned_bytes(SLICES * shape.bytes);
    for (int turn = 0; turn < 3; turn++) {
        struct numoe_pack_report together = {0}, alone = {0};

        /* the smallest scale in one group of gate, then of down */
        if (turn)
            e.scales[turn == 1 ? 0 : 2][turn == 1 ? 5 * (H / 32) + 2 : 70 * (I / 32) + 1] = 0;
        memset(a, 0xA5, SLICES * shape.bytes);
        memset(b, 0x5A, SLICES * shape.bytes);
        cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, SLICES, a, &together), 0);
        for (uint64_t s = 0; s < SLICES; s++)
            cr_assert_eq(numoe_pack_slices(&shape, &e.source, s, 1, b + s * shape.bytes, &alone),
                         0);
        cr_assert_arr_eq(a, b, SLICES * shape.bytes);
        cr_assert_eq(together.extreme_scales, turn > 0);
        cr_assert_eq(alone.extreme_scales, turn > 0);
        for (uint64_t r = 0; r < H; r++)
            for (uint64_t k = 0; k < I; k++) {
                unsigned code, scale;

                numoe_slice_weight(&shape, a + k / 32 * shape.bytes, NUMOE_DOWN, r, k % 32, &code,
                                   &scale);
                cr_assert_eq(code, e.codes[2][(r * I + k) / 2] >> (k % 2 * 4) & 15);
                cr_assert_eq(scale, e.scales[2][(r * I + k) / 32]);
            }
    }
    free(a);
    free(b);
    test_expert_free(&e);
}

/* Copy rows [row, row + rows) and groups [group, group + groups) of a matrix of `columns`. */
static struct numoe_mxfp4 piece(const struct numoe_mxfp4 *from, uint64_t row, uint64_t rows,
                                uint64_t group, uint64_t groups, uint8_t *codes, uint8_t *scales)
{
    struct numoe_mxfp4 to = {.codes = codes,
                             .scales = scales,
                             .code_stride = 16 * groups,
                             .scale_stride = groups,
                             .code_step = 16,
                             .scale_step = 1,
                             .nibbles = from->nibbles};

    for (uint64_t r = 0; r < rows; r++) {
        memcpy(codes + r * to.code_stride, from->codes + (row + r) * from->code_stride + 16 * group,
               16 * groups);
        memcpy(scales + r * groups, from->scales + (row + r) * from->scale_stride + group, groups);
    }
    return to;
}

/* Slices of gate and up one by one and rows of down piece by piece, each as all there is of the
 * source, are the slices packed at once; and what is wrong has the same place. */
Test(kernels_pack, pieces_of_a_source_are_the_whole)
{
    enum { SLICES = 7, H = 224, I = 32 * SLICES };
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    struct test_expert e;
    uint8_t *codes = malloc(2 * H * I), *scales = malloc(H * I);

    random_state = 9;
    test_expert_make(&e, H, I, true);
    numoe_slice_shape_init(&shape, H, true);
    uint8_t *a = aligned_bytes(SLICES * shape.bytes), *b = aligned_bytes(SLICES * shape.bytes);
    memset(a, 0xA5, SLICES * shape.bytes);
    memset(b, 0x5A, SLICES * shape.bytes);
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, SLICES, a, &report), 0);
    for (unsigned wrong = 0; wrong < 2; wrong++) {
        if (wrong) {
            e.scales[1][(3 * 32 + 5) * (H / 32) + 6] = 255;
            e.scales[2][130 * (I / 32) + 5] = 255;
        }
        for (uint64_t s = 0; s < SLICES; s++) {
            struct numoe_expert_source part = e.source;

            part.first_row = 32 * s;
            part.gate = piece(&e.source.gate, 32 * s, 32, 0, H / 32, codes, scales);
            part.up = piece(&e.source.up, 32 * s, 32, 0, H / 32, codes + H * I, scales + H * I / 2);
            if (!wrong || s != 3) {
                cr_assert_eq(numoe_pack_gate_up(&shape, &part, s, 1, b + s * shape.bytes, &report),
                             0);
                continue;
            }
            cr_assert_eq(numoe_pack_gate_up(&shape, &part, s, 1, b + s * shape.bytes, &report),
                         -EDOM);
            cr_assert_eq(report.bad_matrix, NUMOE_UP);
            cr_assert_eq(report.bad_row, 3 * 32 + 5);
            cr_assert_eq(report.bad_group, 6);
        }
        for (uint64_t s = 0; s < SLICES; s += 5)
            for (uint64_t p = 0; p < 4; p += 2) {
                const uint64_t count = s ? 2 : 5, rows = p ? H - 128 : 128;
                struct numoe_expert_source part = e.source;

                part.down_row = 64 * p;
                part.down_column = 32 * s;
                part.down = piece(&e.source.down, 64 * p, rows, s, count, codes, scales);
                if (!wrong || s != 5 || p != 2) {
                    cr_assert_eq(numoe_pack_down(&shape, &part, s, count, p, 2, b + s * shape.bytes,
                                                 &report),
                                 0);
                    continue;
                }
                cr_assert_eq(
                    numoe_pack_down(&shape, &part, s, count, p, 2, b + s * shape.bytes, &report),
                    -EDOM);
                cr_assert_eq(report.bad_matrix, NUMOE_DOWN);
                cr_assert_eq(report.bad_row, 130);
                cr_assert_eq(report.bad_group, 5);
            }
        if (!wrong)
            cr_assert_arr_eq(a, b, SLICES * shape.bytes);
    }
    free(a);
    free(b);
    free(codes);
    free(scales);
    test_expert_free(&e);
}

Test(kernels_pack, scale_255_is_refused_with_its_place)
{
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    struct test_expert e;

    test_expert_make(&e, 96, 64, false);
    numoe_slice_shape_init(&shape, 96, false);
    uint8_t *out = aligned_bytes(2 * shape.bytes);
    e.scales[2][41 * 2 + 1] = 255; /* down, row 41, group 1 */
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, 1, out, &report), 0, "slice 0 is sound");
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 1, 1, out, &report), -EDOM);
    cr_assert_eq(report.bad_matrix, 2);
    cr_assert_eq(report.bad_row, 41);
    cr_assert_eq(report.bad_group, 1);
    free(out);
    test_expert_free(&e);
}

Test(kernels_pack, extreme_scales_are_reported_unless_the_codes_are_zero)
{
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    struct test_expert e;

    test_expert_make(&e, 64, 32, false);
    numoe_slice_shape_init(&shape, 64, false);
    uint8_t *out = aligned_bytes(shape.bytes);
    e.scales[0][3] = 0; /* gate, row 1, group 1 */
    memset(e.codes[0] + 1 * 32 + 16, 0x80, 16);
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, 1, out, &report), 0);
    cr_assert(!report.extreme_scales);
    e.codes[0][1 * 32 + 20] = 0x10;
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, 1, out, &report), 0);
    cr_assert(report.extreme_scales);
    free(out);
    test_expert_free(&e);
}

Test(kernels_pack, ranges_and_shapes_are_checked)
{
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    struct test_expert e;
    uint8_t out[64];

    cr_assert_eq(numoe_slice_shape_init(&shape, 0, false), -EINVAL);
    cr_assert_eq(numoe_slice_shape_init(&shape, UINT64_MAX - 3, false), -EINVAL);
    cr_assert_eq(numoe_slice_shape_init(&shape, UINT64_MAX / 64, false), -EINVAL);
    test_expert_make(&e, 64, 64, false);
    numoe_slice_shape_init(&shape, 64, false);
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 2, 1, out, &report), -EINVAL);
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 1, UINT64_MAX, out, &report), -EINVAL);
    cr_assert_eq(numoe_pack_down(&shape, &e.source, 0, 1, 1, 1, out, &report), -EINVAL);
    cr_assert_eq(numoe_pack_down(&shape, &e.source, 0, 1, 1, UINT64_MAX, out, &report), -EINVAL);
    e.source.down_row = 32;
    cr_assert_eq(numoe_pack_down(&shape, &e.source, 0, 1, 0, 1, out, &report), -EINVAL);
    e.source.first_row = 64;
    cr_assert_eq(numoe_pack_gate_up(&shape, &e.source, 1, 1, out, &report), -EINVAL);
    e.source.first_row = 0;
    numoe_slice_shape_init(&shape, 96, false);
    cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, 1, out, &report), -EINVAL);
    test_expert_free(&e);
}

/* E8M0's smallest scale is 2^-127, not zero, whatever the host's subnormal mode was. */
Test(kernels_scales, byte_zero_is_a_subnormal_weight)
{
    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        const struct numoe_kernels *k;
        for (size_t i = 0; (k = numoe_kernels_at(arithmetic, i)); i++) {
            struct numoe_slice_shape shape;
            struct numoe_pack_report report = {0};
            struct test_expert e;
            float x[64], weight = 1, *y = aligned_bytes(64 * sizeof *y), got[64];
            double want[64] = {0};

            random_state = 31;
            test_expert_make(&e, 64, 32, false);
            memset(e.scales[2], 0, 64);
            for (int j = 0; j < 64; j++)
                x[j] = 40.0f * round_to_bf16(random_normal()); /* h large: outputs are normal */
            numoe_slice_shape_init(&shape, 64, false);
            uint8_t *packed = aligned_bytes(shape.bytes);
            void *record = aligned_bytes(k->record_bytes(&shape));
            const void *xp = record;
            void *scratch = aligned_bytes(k->scratch_bytes(&shape));
            cr_assert_eq(numoe_pack_slices(&shape, &e.source, 0, 1, packed, &report), 0);
            k->quantise(&shape, x, NUMOE_F32, record);
            const struct numoe_ffn ffn = {.shape = &shape,
                                          .activation = &silu,
                                          .arithmetic = k->arithmetic,
                                          .slices = packed,
                                          .slice_count = 1,
                                          .tokens = 1,
                                          .x = &xp,
                                          .weight = &weight,
                                          .y = &y,
                                          .scratch = scratch};
            const unsigned saved = numoe_kernels_enter();
            k->few(&ffn);
            numoe_kernels_leave(saved);
            test_expert_apply(&e, &silu, x, 1.0, want);
            const float *row = y;
            k->combine(&(struct numoe_combine){.rows = &row,
                                               .row_count = 1,
                                               .tile_end = 2,
                                               .hidden = 64,
                                               .scale = 1.0f,
                                               .type = NUMOE_F32,
                                               .out = got});
            for (int j = 0; j < 64; j++) /* out of the subnormals before comparing */
                want[j] *= 0x1p100, got[j] *= 0x1p100f;
            const double error = relative_l2(want, got, 64);
            cr_expect_leq(error, limits[arithmetic].other, "%s: %g", k->name, error);
            free(packed);
            free(record);
            free(scratch);
            free(y);
            test_expert_free(&e);
        }
    }
}

/* One output of `hidden` values, in items of `step` tiles, from rows whose parts end where `ends`
 * says, which may be NULL. */
static void check_combine(const struct numoe_kernels *k, uint64_t hidden, uint64_t step,
                          const uint8_t *ends)
{
    enum { ROWS = 5 };
    const uint64_t tiles = (hidden + 31) / 32;
    float *rows[ROWS], *out = malloc((hidden + 2) * sizeof *out);
    float *want = malloc(hidden * sizeof *want);
    uint16_t *half = malloc((hidden + 2) * sizeof *half);
    struct numoe_combine c = {.rows = (const float *const *)rows,
                              .ends = ends,
                              .row_count = ROWS,
                              .hidden = hidden,
                              .scale = 1.5f,
                              .add = true};

    random_state = 77;
    for (int r = 0; r < ROWS; r++) {
        rows[r] = aligned_bytes(32 * tiles * sizeof(float));
        for (uint64_t j = 0; j < 32 * tiles; j++)
            rows[r][j] = random_normal();
    }
    for (uint64_t j = 0; j < hidden + 2; j++) {
        out[j] = (float)j;
        half[j] = bf16_bits((float)j);
    }
    for (uint64_t j = 0; j < hidden; j++) {
        float sum = 0, part = 0;
        for (int r = 0; r < ROWS; r++) {
            part += rows[r][j / 32 * 32 + numoe_row_lane(j % 32)];
            if (ends && ends[r]) {
                sum += part;
                part = 0;
            }
        }
        want[j] = (float)j + (ends ? sum : part) * 1.5f;
    }
    for (int type = 0; type < 2; type++) {
        c.type = type ? NUMOE_BF16 : NUMOE_F32;
        c.out = type ? (void *)half : (void *)out;
        for (uint64_t at = 0; at < tiles; at += step) {
            c.tile_begin = at;
            c.tile_end = at + step < tiles ? at + step : tiles;
            k->combine(&c);
        }
    }
    cr_assert_arr_eq(out, want, hidden * sizeof *want, "%s, %lu by %lu", k->name, hidden, step);
    cr_assert_eq(out[hidden], (float)hidden);
    for (uint64_t j = 0; j < hidden; j++)
        cr_assert_eq(half[j], bf16_bits(want[j]), "%s, %lu by %lu: %lu", k->name, hidden, step, j);
    cr_assert_eq(half[hidden], bf16_bits((float)hidden));
    c.tile_begin = 0;
    c.tile_end = tiles;
    c.add = false;
    c.row_count = 0;
    k->combine(&c);
    for (uint64_t j = 0; j < hidden; j++)
        cr_assert_eq(half[j], 0);
    for (int r = 0; r < ROWS; r++)
        free(rows[r]);
    free(out);
    free(want);
    free(half);
}

Test(kernels_combine, sums_rows_in_order_scales_adds_and_rounds_once)
{
    static const uint8_t ends[] = {0, 1, 0, 1, 1};

    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        const struct numoe_kernels *k;
        for (size_t i = 0; (k = numoe_kernels_at(arithmetic, i)); i++)
            for (int parts = 0; parts < 2; parts++) {
                check_combine(k, 70, 3, parts ? ends : NULL);
                /* as many tiles as are summed side by side, and a rest */
                check_combine(k, 250, 8, parts ? ends : NULL);
                check_combine(k, 236, 7, parts ? ends : NULL);
                check_combine(k, 236, 3, parts ? ends : NULL);
            }
    }
}

Test(kernels_dispatch, unknown_and_absent_sets_are_refused_by_name)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_null(numoe_kernels_select(NUMOE_FAST, "sse9", &error));
    cr_assert_eq(error.code, -EINVAL);
    cr_assert(strstr(error.message, "sse9"));
    cr_assert_null(numoe_kernels_select(NUMOE_ARITHMETICS + 1, NULL, &error));
    cr_assert_not_null(numoe_kernels_select(NUMOE_FAST, "ref", NULL));
    cr_assert_eq(numoe_kernels_select(NUMOE_FAST, "", NULL), numoe_kernels_at(NUMOE_FAST, 0));
}

Test(kernels_dispatch, a_name_without_a_set_of_the_arithmetic_gives_a_lesser_one)
{
    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        static const char *const names[] = {"ref",    "avx2",       "avxvnni",
                                            "avx512", "avx512vnni", "avx512vnni256"};
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            struct numoe_error error = NUMOE_ERROR_INIT;
            const struct numoe_kernels *k = numoe_kernels_select(arithmetic, names[i], &error);
            const struct numoe_kernels *fast = numoe_kernels_select(NUMOE_FAST, names[i], NULL);
            cr_expect_eq(!k, !fast, "%s: what runs here does so in every arithmetic", names[i]);
            if (k)
                cr_expect_eq((int)k->arithmetic, arithmetic);
            else
                cr_expect_eq(error.code, -ENOTSUP);
        }
        cr_assert_not_null(numoe_kernels_select(arithmetic, NULL, NULL));
    }
}

/* Which width is chosen when a context opens must not change results. */
Test(kernels_dispatch, both_widths_give_the_same_bits, .timeout = 120)
{
    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        const struct numoe_kernels *wide = numoe_kernels_select(arithmetic, "avx512vnni", NULL);
        const struct numoe_kernels *half = numoe_kernels_select(arithmetic, "avx512vnni256", NULL);
        if (!wide || !half)
            cr_skip_test("this CPU has no AVX-512 VNNI");
        cr_expect_eq(wide->few_limit, half->few_limit);
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (unsigned tokens = 1; tokens <= 13; tokens += 3) {
                const struct numoe_activation *const all[] = {&silu, &clamped, &oai, &situ};
                struct test_expert expert;
                uint64_t bits[2];
                random_state = 4242 + s;
                test_expert_make(&expert, shapes[s].hidden, shapes[s].intermediate, shapes[s].bias);
                for (int i = 0; i < 2; i++) {
                    random_state = 777 + tokens;
                    bits[i] = output_bits(i ? half : wide, tokens <= wide->few_limit, &expert,
                                          all[(s + tokens) % 4], tokens);
                }
                cr_expect_eq(bits[0], bits[1], "%s and %s, H %lu I %lu tokens %u", wide->name,
                             half->name, shapes[s].hidden, shapes[s].intermediate, tokens);
                test_expert_free(&expert);
            }
    }
}

Test(kernels_ceiling, loops_report_their_work)
{
    uint8_t *buffer = aligned_bytes(1 << 20);

    cr_assert_eq(numoe_ceiling_run(NUMOE_CEILING_READ, NULL, buffer, 1 << 20), 1 << 20);
    cr_assert_gt(numoe_ceiling_run(NUMOE_CEILING_INT8, NULL, NULL, 100), 100);
    cr_assert_gt(numoe_ceiling_run(NUMOE_CEILING_EXACT, "ref", NULL, 100), 100);
    cr_assert_eq(numoe_ceiling_run(NUMOE_CEILING_EXACT, "nonesuch", NULL, 100), 0);
    free(buffer);
}

/* Rows of parts are summed first, then parts. */
Test(kernels_combine, sums_rows_to_parts_and_then_parts)
{
    static const uint8_t ends[] = {0, 0, 1, 1, 0, 1};

    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        const struct numoe_kernels *k;
        for (size_t i = 0; (k = numoe_kernels_at(arithmetic, i)); i++) {
            enum { H = 70, W = 96, ROWS = 6 };
            float *rows[ROWS], out[H], want[H];

            random_state = 78;
            for (int r = 0; r < ROWS; r++) {
                rows[r] = aligned_bytes(W * sizeof(float));
                for (int j = 0; j < W; j++)
                    rows[r][j] = random_normal();
            }
            for (int j = 0; j < H; j++) {
                const int at = j / 32 * 32 + (int)numoe_row_lane(j % 32);
                const float first = rows[0][at] + rows[1][at] + rows[2][at];
                const float last = rows[4][at] + rows[5][at];

                want[j] = first + rows[3][at] + last;
            }
            const struct numoe_combine c = {.rows = (const float *const *)rows,
                                            .ends = ends,
                                            .row_count = ROWS,
                                            .tile_end = 3,
                                            .hidden = H,
                                            .scale = 1.0f,
                                            .type = NUMOE_F32,
                                            .out = out};
            k->combine(&c);
            cr_assert_arr_eq(out, want, sizeof want, "%s", k->name);
            for (int r = 0; r < ROWS; r++)
                free(rows[r]);
        }
    }
}

/* One call of a form on the first tokens of some; y is overwritten. */
static void overwrite(const struct numoe_kernels *k, bool few, struct numoe_ffn ffn, unsigned first,
                      unsigned tokens)
{
    ffn.x += first;
    ffn.weight += first;
    ffn.y += first;
    ffn.tokens = tokens;
    (few ? k->few : k->many)(&ffn);
}

/* Whether a token's row depends on how many others there are, and on the form. */
static void check_company(const struct numoe_kernels *k, const struct test_expert *expert)
{
    enum { TOKENS = 40 };
    struct numoe_slice_shape shape;
    struct numoe_pack_report report = {0};
    const uint64_t slices = (expert->intermediate + 31) / 32, H = expert->hidden;
    const void *x[TOKENS];
    float weight[TOKENS], *y[TOKENS], *alone[TOKENS];

    cr_assert_eq(numoe_slice_shape_init(&shape, H, expert->bias[0] != NULL), 0);
    const uint64_t width = shape.hidden_tiles * NUMOE_TILE;
    uint8_t *packed = aligned_bytes(slices * shape.bytes);
    float *down_bias = aligned_bytes(width * sizeof *down_bias);
    float *values = aligned_bytes(H * sizeof *values);
    cr_assert_eq(numoe_pack_slices(&shape, &expert->source, 0, slices, packed, &report), 0);
    for (uint64_t i = 0; i < width; i++)
        down_bias[i] = random_normal();
    for (int t = 0; t < TOKENS; t++) {
        void *record = aligned_bytes(k->record_bytes(&shape));
        for (uint64_t i = 0; i < H; i++)
            values[i] = random_normal();
        k->quantise(&shape, values, NUMOE_F32, record);
        x[t] = record;
        y[t] = aligned_bytes(width * sizeof(float));
        alone[t] = aligned_bytes(width * sizeof(float));
        weight[t] = 0.1f + (float)random_unit();
    }
    void *scratch = aligned_bytes(k->scratch_bytes(&shape));
    const struct numoe_ffn ffn = {.shape = &shape,
                                  .activation = &silu,
                                  .arithmetic = k->arithmetic,
                                  .slices = packed,
                                  .slice_count = slices,
                                  .down_bias = expert->bias[2] ? down_bias : NULL,
                                  .x = x,
                                  .weight = weight,
                                  .y = y,
                                  .scratch = scratch,
                                  .in_order = true};
    struct numoe_ffn one = ffn;

    one.y = alone;
    for (unsigned t = 0; t < TOKENS; t++)
        overwrite(k, false, one, t, 1);
    for (unsigned tokens = 2; tokens <= TOKENS && tokens <= k->many_tokens; tokens++) {
        overwrite(k, false, ffn, 0, tokens);
        for (unsigned t = 0; t < tokens; t++)
            cr_assert_arr_eq(y[t], alone[t], width * sizeof(float), "%s: many, token %u of %u",
                             k->name, t, tokens);
    }
    for (unsigned tokens = 1; k->forms_agree && tokens <= k->few_tokens; tokens++) {
        overwrite(k, true, ffn, 0, tokens);
        for (unsigned t = 0; t < tokens; t++)
            cr_assert_arr_eq(y[t], alone[t], width * sizeof(float), "%s: few, token %u of %u",
                             k->name, t, tokens);
    }
    for (int t = 0; t < TOKENS; t++) {
        free((void *)x[t]);
        free(y[t]);
        free(alone[t]);
    }
    free(packed);
    free(down_bias);
    free(values);
    free(scratch);
}

Test(kernels_company, a_token_has_the_same_bits_alone_and_with_others, .timeout = 120)
{
    static const struct {
        uint64_t hidden, intermediate;
        bool bias;
    } widths[] = {{96, 160, false}, {130, 70, true}, {512, 288, true}};

    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        const struct numoe_kernels *k;
        for (size_t i = 0; (k = numoe_kernels_at(arithmetic, i)); i++)
            for (size_t s = 0; s < sizeof widths / sizeof widths[0]; s++) {
                struct test_expert e;

                random_state = 91;
                test_expert_make(&e, widths[s].hidden, widths[s].intermediate, widths[s].bias);
                check_company(k, &e);
                test_expert_free(&e);
            }
    }
}
