/*
 * The expert FFN on a device against the oracle, for shapes with awkward remainders.
 *
 * Each run: device buffers between guard bytes, the workspace poisoned, slices scattered over the
 * weights in random order with rubbish between them.
 */
#include <errno.h>
#include <math.h>

#include "../support/experts.h"
#include "gpu_harness.h"
#include "numoe_cuda.h"
#include "numoe_gpu.h"

static struct numoe_cuda_device device;

enum { EXPERTS = 7, MANY_EXPERTS = 1500, ABSENT = 3, TOP_K = 4 };

struct set {
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    uint64_t intermediate;
    uint32_t slices, experts;
    uint8_t *packed[MANY_EXPERTS];
    float *down_bias; /* [experts][32 hidden_tiles] lane order, or NULL */
    uint32_t slice_at[EXPERTS * 4096];
    struct guarded weights, table, bias;
};

static const struct numoe_activation activations[] = {
    {.kind = NUMOE_SILU},
    {.kind = NUMOE_SILU_CLAMPED, .limit = 1.5f},
    {.kind = NUMOE_SWIGLU_OAI, .limit = 2.0f, .alpha = 1.702f},
    {.kind = NUMOE_SITU, .gate_cap = 2.0f, .up_cap = 1.5f},
};

/* The kernels' operands are bf16, which ends below 2^128: 4 x 2^126 and 2 x 2^127 are none. */
static void keep_below_bf16_end(struct test_expert *e, int m, uint64_t row, uint64_t group,
                                unsigned scale)
{
    const uint64_t columns = m == 2 ? e->intermediate : e->hidden;
    const unsigned most = scale == 254 ? 3 /* 1.5 */ : scale == 253 ? 5 /* 3 */ : 7;

    for (uint64_t c = 32 * group; c < 32 * group + 32 && c < columns; c++) {
        uint8_t *byte = &e->codes[m][row * ((columns + 1) / 2) + c / 2];
        const unsigned shift = c % 2 ? 4 : 0, code = *byte >> shift & 7;
        if (code > most)
            *byte = (uint8_t)((*byte & ~(7u << shift)) | most << shift);
    }
}

/* extreme: scale bytes 0, 1, 128 .. 254 in turns of rows and groups instead of usual ones */
static void set_scales(struct test_expert *e, int extreme)
{
    const uint64_t rows[3] = {e->intermediate, e->intermediate, e->hidden};
    const uint64_t columns[3] = {e->hidden, e->hidden, e->intermediate};

    for (int m = 0; m < 3; m++) {
        const uint64_t groups = (columns[m] + 31) / 32;
        for (uint64_t i = 0; i < rows[m] * groups; i++) {
            const uint64_t draw = random_u64() >> 20;
            if (extreme == 1) /* tiny beside usual: gate and down */
                e->scales[m][i] = draw % 3 == 0   ? (uint8_t)(draw / 3 % 2)
                                  : draw % 3 == 1 ? 118
                                                  : e->scales[m][i];
            if (extreme == 2 && m == 1) /* large up ... */
                e->scales[m][i] = (uint8_t)(128 + draw % 31);
            if (extreme == 2 && m == 2) /* ... and small down, so that the sum stays a number */
                e->scales[m][i] = (uint8_t)(60 + draw % 30);
            if (extreme == 3 && m == 2) /* up to the end, for a finite product */
                e->scales[m][i] = (uint8_t)(200 + draw % 52);
            if (extreme == 4 && m == 2) {
                e->scales[m][i] = (uint8_t)(draw % 4 ? 252 + draw / 4 % 3 : 128);
                keep_below_bf16_end(e, m, i / groups, i % groups, e->scales[m][i]);
            }
            if (extreme >= 3 && m == 1)
                e->scales[m][i] = (uint8_t)(20 + draw % 20);
        }
    }
}

static void set_make_of(struct set *s, uint32_t experts, uint64_t hidden, uint64_t intermediate,
                        bool bias, const struct numoe_activation *activation, int extreme)
{
    uint64_t places, *order, width;
    uint8_t *image;

    memset(s, 0, sizeof *s);
    if (numoe_slice_shape_init(&s->shape, hidden, bias))
        abort();
    s->activation = *activation;
    s->intermediate = intermediate;
    s->experts = experts;
    s->slices = (uint32_t)((intermediate + 31) / 32);
    width = 32 * s->shape.hidden_tiles;
    if (bias)
        s->down_bias = calloc(experts * width, sizeof(float));
    for (uint32_t e = 0; e < experts; e++) {
        struct numoe_pack_report report = {0};
        struct test_expert expert;

        test_expert_make(&expert, hidden, intermediate, bias);
        set_scales(&expert, extreme);
        s->packed[e] = aligned_bytes(s->slices * s->shape.bytes);
        if (numoe_pack_slices(&s->shape, &expert.source, 0, s->slices, s->packed[e], &report))
            abort();
        for (uint64_t i = 0; bias && i < width; i++) {
            const uint64_t from = i / 32 * 32 + numoe_lane_row(i % 32);
            s->down_bias[e * width + i] = from < hidden ? expert.bias[2][from] : 0.0f;
        }
        test_expert_free(&expert);
    }
    /* scattered: place p of a random order, each slice with a gap of its own before it */
    places = (uint64_t)experts * s->slices;
    order = malloc(places * sizeof *order);
    for (uint64_t i = 0; i < places; i++)
        order[i] = i;
    for (uint64_t i = places; i-- > 1;) {
        const uint64_t j = random_u64() % (i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    image = aligned_bytes(places * (s->shape.bytes + 192) + 192);
    uint64_t at = 0;
    for (uint64_t i = 0; i < places; i++) {
        const uint64_t e = order[i] / s->slices, slice = order[i] % s->slices;
        at += 64 * (random_u64() % 4);
        memcpy(image + at, s->packed[e] + slice * s->shape.bytes, s->shape.bytes);
        s->slice_at[order[i]] = (uint32_t)(at / 64);
        at += s->shape.bytes;
    }
    s->slice_at[ABSENT * s->slices] = NUMOE_CUDA_ABSENT;
    guarded_put(&s->weights, image, at);
    guarded_put(&s->table, s->slice_at, places * sizeof(uint32_t));
    if (bias)
        guarded_put(&s->bias, s->down_bias, experts * width * sizeof(float));
    free(image);
    free(order);
}

static void set_make(struct set *s, uint64_t hidden, uint64_t intermediate, bool bias,
                     const struct numoe_activation *activation, int extreme)
{
    set_make_of(s, EXPERTS, hidden, intermediate, bias, activation, extreme);
}

static void set_free(struct set *s)
{
    guarded_check(&s->weights, "the weights");
    guarded_check(&s->table, "slice_at");
    if (s->down_bias) {
        guarded_check(&s->bias, "the down biases");
        guarded_free(&s->bias);
    }
    guarded_free(&s->weights);
    guarded_free(&s->table);
    for (uint32_t e = 0; e < s->experts; e++)
        free(s->packed[e]);
    free(s->down_bias);
}

enum { ALL_FORMS = NUMOE_CUDA_FORMS + 1 }; /* with 0, the choice among them */

/* Of a call: a form, or for 0 and for what the device has not, the one that its table says. */
static enum numoe_cuda_form form_of(uint32_t form, uint64_t hidden, uint32_t slices,
                                    uint32_t experts, uint32_t tokens, uint32_t top_k)
{
    if (form && device.forms >> form & 1)
        return (enum numoe_cuda_form)form;
    return (enum numoe_cuda_form)numoe_gpu_tuning_choose(numoe_gpu_tuning_builtin(), device.forms,
                                                         hidden, 32ull * slices,
                                                         (double)tokens * top_k / experts);
}

struct batch {
    uint32_t tokens, top_k, id_bytes, form; /* form 0: as is chosen */
    enum numoe_type x_type, out_type;
    uint64_t x_stride, out_stride;
    bool add;
    float scale;
    enum numoe_arithmetic arithmetic; /* 0: exact */
    float *x;                         /* [tokens][hidden] as given */
    int64_t *ids;                     /* [tokens][top_k] */
    float *routing;
    float *before; /* [tokens][out_stride] what out held, rounded to its type */
};

static uint64_t type_bytes(enum numoe_type type)
{
    return type == NUMOE_BF16 ? 2 : 4;
}

static void *encode(const float *from, uint64_t rows, uint64_t columns, uint64_t stride,
                    enum numoe_type type)
{
    uint8_t *out = calloc(rows * stride + 1, type_bytes(type));
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < stride; c++) {
            /* what lies between rows must not matter: NaN */
            const float v = c < columns ? from[r * columns + c] : NAN;
            if (type == NUMOE_BF16)
                ((uint16_t *)(void *)out)[r * stride + c] = isnan(v) ? 0x7FC0 : bf16_bits(v);
            else
                ((float *)(void *)out)[r * stride + c] = v;
        }
    return out;
}

static float decode(const void *from, uint64_t at, enum numoe_type type)
{
    return type == NUMOE_BF16 ? bf16_value(((const uint16_t *)from)[at])
                              : ((const float *)from)[at];
}

/* Compute; returns the raw rows of out (malloc'd), all tokens. */
static void *compute(const struct set *s, const struct batch *b)
{
    const uint64_t hidden = s->shape.hidden, pairs = (uint64_t)b->tokens * b->top_k;
    const uint64_t out_bytes = b->tokens * b->out_stride * type_bytes(b->out_type);
    void *x = encode(b->x, b->tokens, hidden, b->x_stride, b->x_type);
    void *out = encode(b->before, b->tokens, hidden, b->out_stride, b->out_type);
    uint8_t *ids = calloc(pairs + 1, 8);
    struct guarded dx, dids, drouting, dout, work;

    for (uint64_t i = 0; i < pairs; i++) {
        if (b->id_bytes == 8)
            ((int64_t *)(void *)ids)[i] = b->ids[i];
        else
            ((int32_t *)(void *)ids)[i] = (int32_t)b->ids[i];
    }
    guarded_put(&dx, x, b->tokens * b->x_stride * type_bytes(b->x_type));
    guarded_put(&dids, ids, pairs * b->id_bytes);
    guarded_put(&drouting, b->routing, pairs * sizeof(float));
    guarded_put(&dout, out, out_bytes);
    struct numoe_cuda_ffn ffn = {
        .shape = s->shape,
        .activation = s->activation,
        .arithmetic = b->arithmetic,
        .slices = s->slices,
        .experts = s->experts,
        .weights = s->weights.data,
        .slice_at = (const uint32_t *)(const void *)s->table.data,
        .down_bias = s->down_bias ? (const float *)(const void *)s->bias.data : NULL,
        .tokens = b->tokens,
        .top_k = b->top_k,
        .x = dx.data,
        .x_type = b->x_type,
        .x_stride = b->x_stride,
        .ids = dids.data,
        .id_bytes = b->id_bytes,
        .routing = (const float *)(const void *)drouting.data,
        .out = dout.data,
        .out_type = b->out_type,
        .out_stride = b->out_stride,
        .add = b->add,
        .scale = b->scale,
        .form = form_of(b->form, s->shape.hidden, s->slices, s->experts, b->tokens, b->top_k),
    };
    const uint64_t need = numoe_cuda_workspace_bytes(&device, &ffn);
    expect(b->tokens == 0 || need > 0, "no workspace size");
    guarded_make(&work, need ? need : 256, 0xFF);
    ffn.workspace = work.data;
    cudaError_t e = numoe_cuda_ffn_launch(&device, &ffn, NULL);
    expect(!e, "launch: %s", cudaGetErrorString(e));
    e = cudaDeviceSynchronize();
    must(e, "the kernels");
    must(cudaMemcpy(out, dout.data, out_bytes, cudaMemcpyDeviceToHost), "copy back");
    guarded_check(&dx, "x");
    guarded_check(&dids, "ids");
    guarded_check(&drouting, "routing");
    guarded_check(&dout, "out");
    guarded_check(&work, "the workspace");
    guarded_free(&dx);
    guarded_free(&dids);
    guarded_free(&drouting);
    guarded_free(&dout);
    guarded_free(&work);
    free(x);
    free(ids);
    return out;
}

static void batch_make(struct batch *b, const struct set *s, uint32_t tokens, uint32_t top_k,
                       unsigned variant)
{
    const uint64_t hidden = s->shape.hidden;

    *b = (struct batch){.tokens = tokens, .top_k = top_k, .scale = 1.0f};
    b->id_bytes = variant & 1 ? 8 : 4;
    b->x_type = variant & 2 ? NUMOE_F32 : NUMOE_BF16;
    b->out_type = variant & 4 ? NUMOE_BF16 : NUMOE_F32;
    b->x_stride = hidden + (variant & 8 ? 8 : variant & 16 ? 3 : 0);
    b->out_stride = hidden + (variant & 16 ? 5 : 0);
    b->add = variant & 32;
    if (variant & 64)
        b->scale = 2.5f;
    b->x = malloc((tokens * hidden + 1) * sizeof(float));
    b->before = malloc((tokens * hidden + 1) * sizeof(float));
    for (uint64_t i = 0; i < tokens * hidden; i++) {
        b->x[i] = random_normal();
        b->before[i] = round_to_bf16(random_normal());
    }
    b->ids = malloc(((uint64_t)tokens * top_k + 1) * sizeof *b->ids);
    b->routing = malloc(((uint64_t)tokens * top_k + 1) * sizeof *b->routing);
    for (uint64_t i = 0; i < (uint64_t)tokens * top_k; i++) {
        const uint64_t draw = random_u64() >> 16;
        b->ids[i] = draw % 11 == 0   ? -1
                    : draw % 13 == 0 ? s->experts
                    : draw % 17 == 0 ? (b->id_bytes == 8 ? (int64_t)1 << 40 : 1 << 30)
                                     : (int64_t)(draw / 64 % s->experts);
        if (i % top_k && draw % 7 == 0)
            b->ids[i] = b->ids[i - 1]; /* repeated */
        b->routing[i] = 0.05f + (float)random_unit();
    }
}

static void batch_free(struct batch *b)
{
    free(b->x);
    free(b->before);
    free(b->ids);
    free(b->routing);
}

/* One expert on one token as the CPU's kernels do it, added to want[hidden]. */
static void cpu_expert(const struct set *s, const struct batch *b, int64_t expert, const float *x,
                       float weight, double *want)
{
    const struct numoe_kernels *kernels = numoe_kernels_select(b->arithmetic, "ref", NULL);
    const uint64_t hidden = s->shape.hidden, width = 32 * s->shape.hidden_tiles;
    uint8_t *record = aligned_bytes(kernels->record_bytes(&s->shape));
    uint8_t *scratch = aligned_bytes(kernels->scratch_bytes(&s->shape));
    float *y = (float *)(void *)aligned_bytes(width * sizeof(float));
    const struct numoe_ffn ffn = {
        .shape = &s->shape,
        .activation = &s->activation,
        .arithmetic = b->arithmetic,
        .slices = s->packed[expert],
        .slice_count = s->slices,
        .down_bias = s->down_bias ? s->down_bias + (uint64_t)expert * width : NULL,
        .tokens = 1,
        .x = (const void *const[]){record},
        .weight = &weight,
        .y = (float *const[]){y},
        .scratch = scratch,
    };

    kernels->quantise(&s->shape, x, NUMOE_F32, record);
    kernels->few(&ffn);
    for (uint64_t i = 0; i < width; i++) {
        const uint64_t k = i / 32 * 32 + numoe_lane_row(i % 32);
        if (k < hidden)
            want[k] += (double)y[i];
    }
    free(record);
    free(scratch);
    free(y);
}

/* What token t must be, into want[hidden]. */
static void reference(const struct set *s, const struct batch *b, uint64_t t, double *want)
{
    const uint64_t hidden = s->shape.hidden;
    float *x = malloc(hidden * sizeof *x);

    memset(want, 0, hidden * sizeof *want);
    for (uint64_t i = 0; i < hidden; i++)
        x[i] = b->arithmetic && b->x_type == NUMOE_F32 ? b->x[t * hidden + i]
                                                       : round_to_bf16(b->x[t * hidden + i]);
    for (uint64_t j = 0; j < b->top_k; j++) {
        const int64_t e = b->ids[t * b->top_k + j];
        if (e < 0 || e >= s->experts || e == ABSENT)
            continue;
        if (b->arithmetic) {
            cpu_expert(s, b, e, x, b->routing[t * b->top_k + j], want);
            continue;
        }
        numoe_reference_slices(&s->shape, &s->activation, s->packed[e], s->slices, x,
                               (double)b->routing[t * b->top_k + j],
                               s->down_bias ? s->down_bias + e * 32 * (int64_t)s->shape.hidden_tiles
                                            : NULL,
                               true, want);
    }
    for (uint64_t i = 0; i < hidden; i++) {
        want[i] *= (double)b->scale;
        if (b->add)
            want[i] += (double)b->before[t * hidden + i];
    }
    free(x);
}

/* Tokens of the batch that are compared: as many as some 60 million weights allow, spread. */
static void compare(const struct set *s, const struct batch *b, const void *out)
{
    const uint64_t hidden = s->shape.hidden;
    const double limit = 5e-3;
    uint64_t count = 60000000 / (3 * hidden * s->intermediate * b->top_k) + 2, bad = 0;
    double *want = malloc(hidden * sizeof *want), worst = 0;
    float *got = malloc(hidden * sizeof *got);

    if (count > b->tokens)
        count = b->tokens;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t t = count > 1 ? i * (b->tokens - 1) / (count - 1) : 0;
        reference(s, b, t, want);
        for (uint64_t k = 0; k < hidden; k++)
            got[k] = decode(out, t * b->out_stride + k, b->out_type);
        const double l2 = relative_l2(want, got, hidden);
        if (!(l2 <= limit))
            bad++;
        if (!(l2 <= worst))
            worst = l2;
    }
    expect(bad == 0, "%llu of %llu tokens are wrong, relative L2 up to %.3g",
           (unsigned long long)bad, (unsigned long long)count, worst);
    /* between the rows nothing is written: NaN as encode left it */
    uint64_t touched = 0, wrong = 0;
    for (uint64_t t = 0; t < b->tokens; t++)
        for (uint64_t k = 0; k < b->out_stride; k++) {
            const float v = decode(out, t * b->out_stride + k, b->out_type);
            touched += k >= hidden && !isnan(v);
            wrong += k < hidden && !isfinite(v);
        }
    expect(touched == 0, "%llu values between rows were written", (unsigned long long)touched);
    expect(wrong == 0, "%llu outputs are no numbers", (unsigned long long)wrong);
    free(want);
    free(got);
}

static const uint32_t token_counts[] = {0, 1, 2, 7, 8, 9, 33, 65, 300};
static const uint64_t hiddens[] = {32, 96, 130, 2880, 4096};
static const uint64_t intermediates[] = {32, 70, 768};

enum {
    TOKEN_KINDS = sizeof token_counts / sizeof token_counts[0],
    HIDDENS = sizeof hiddens / sizeof hiddens[0],
    INTERMEDIATES = sizeof intermediates / sizeof intermediates[0],
    SHAPE_TESTS = HIDDENS * INTERMEDIATES * TOKEN_KINDS
};

static void test_shapes(void)
{
    static struct set s;
    unsigned n = 0;

    for (int h = 0; h < HIDDENS; h++)
        for (int i = 0; i < INTERMEDIATES; i++) {
            const bool bias = (h + i) % 2;
            set_make(&s, hiddens[h], intermediates[i], bias, &activations[(h + 2 * i) % 4], 0);
            for (int t = 0; t < TOKEN_KINDS; t++) {
                /* every bit of the variant meets every token count */
                const unsigned variant = (n * 29 + n / 7) & 127;
                struct batch b;

                begin("H %llu I %llu, %u tokens, variant %u", (unsigned long long)hiddens[h],
                      (unsigned long long)intermediates[i], token_counts[t], variant);
                batch_make(&b, &s, token_counts[t], TOP_K, variant);
                b.form = n % ALL_FORMS;
                void *out = compute(&s, &b);
                compare(&s, &b, out);
                free(out);
                batch_free(&b);
                end();
                n++;
            }
            begin("H %llu I %llu", (unsigned long long)hiddens[h],
                  (unsigned long long)intermediates[i]);
            set_free(&s);
            harness_failed += !harness_ok;
        }
}

enum { VARIANT_TESTS = 128 + 8 };

static void test_variants(void)
{
    static struct set s;

    set_make(&s, 130, 70, true, &activations[1], 0);
    for (unsigned variant = 0; variant < 128; variant++) {
        struct batch b;
        begin("variant %u", variant);
        batch_make(&b, &s, variant % 3 ? 19 : 70, 1 + variant % 6, variant);
        void *out = compute(&s, &b);
        compare(&s, &b, out);
        free(out);
        batch_free(&b);
        end();
    }
    begin("variants");
    set_free(&s);
    harness_failed += !harness_ok;
    for (int a = 0; a < 8; a++) {
        struct batch b;
        begin("activation %d, bias %d", a / 2, a % 2);
        set_make(&s, 128, 96, a % 2, &activations[a / 2], 0);
        batch_make(&b, &s, 41, 3, 0);
        void *out = compute(&s, &b);
        compare(&s, &b, out);
        free(out);
        batch_free(&b);
        set_free(&s);
        end();
    }
}

enum { EXTREME_TESTS = 4 * ALL_FORMS };

static void test_extreme_scales(void)
{
    static const uint32_t tokens[ALL_FORMS] = {100, 12, 40, 60, 70, 130, 200};
    static struct set s;

    for (int extreme = 1; extreme <= 4; extreme++) {
        set_make(&s, 160, 96, false, &activations[0], extreme);
        for (int i = 0; i < ALL_FORMS; i++) {
            struct batch b;
            begin("extreme scales %d, form %s, %u tokens", extreme, numoe_gpu_form_names[i],
                  tokens[i]);
            batch_make(&b, &s, tokens[i], TOP_K, 0);
            b.form = (uint32_t)i;
            void *out = compute(&s, &b);
            compare(&s, &b, out);
            free(out);
            batch_free(&b);
            end();
        }
        begin("extreme scales %d", extreme);
        set_free(&s);
        harness_failed += !harness_ok;
    }
}

/* Rounding to MXFP8, against the CPU's. Where sums in another order round an element of h to the
 * value beside, that is 1/16 of one element: far under the limit, and the rules differ by 4e-2. */
enum { MXFP8_COUNTS = 5, MXFP8_TESTS = 2 * 2 * MXFP8_COUNTS };

static void test_mxfp8(void)
{
    static const uint32_t tokens[MXFP8_COUNTS] = {1, 3, 12, 40, 200};
    static const enum numoe_arithmetic rules[2] = {NUMOE_MXFP8_UP, NUMOE_MXFP8_OCP};
    static struct set s;

    for (int shape = 0; shape < 2; shape++) {
        set_make(&s, shape ? 130 : 288, shape ? 70 : 96, shape, &activations[shape ? 3 : 0], 0);
        for (int rule = 0; rule < 2; rule++)
            for (int i = 0; i < MXFP8_COUNTS; i++) {
                struct batch b;
                begin("MXFP8 by rule %d, H %llu, %u tokens", rule,
                      (unsigned long long)s.shape.hidden, tokens[i]);
                batch_make(&b, &s, tokens[i], TOP_K, i % 2 ? 2 : 0);
                b.arithmetic = rules[rule];
                for (uint64_t k = 0; k < b.tokens * s.shape.hidden; k += 97)
                    b.x[k] *= 449.0f / 256.0f * (float)(1 << k % 13); /* groups apart, past 448 */
                void *out = compute(&s, &b);
                compare(&s, &b, out);
                free(out);
                batch_free(&b);
                end();
            }
        begin("MXFP8");
        set_free(&s);
        harness_failed += !harness_ok;
    }
}

/* What a call reads may be on its way when it is queued, on another stream: an event of that must
 * hold it back although kernels overlap, queued or captured. */
enum { ORDER_TESTS = 2 };

static void test_order(void)
{
    static struct set s;
    const uint64_t big = (uint64_t)1 << 28;
    struct guarded dx, dids, drouting, dout, work;
    uint8_t *fill = NULL;
    cudaStream_t stream, side;
    cudaEvent_t begun, copied;
    struct batch b;
    void *want;

    set_make(&s, 160, 96, true, &activations[1], 0);
    batch_make(&b, &s, 3, TOP_K, 0);
    want = compute(&s, &b);
    void *x = encode(b.x, b.tokens, 160, 160, NUMOE_BF16);
    const uint64_t x_bytes = (uint64_t)b.tokens * 160 * 2, out_bytes = (uint64_t)b.tokens * 160 * 4;
    int32_t ids[3 * TOP_K];
    for (int i = 0; i < 3 * TOP_K; i++)
        ids[i] = (int32_t)b.ids[i];
    guarded_put(&dx, x, x_bytes);
    guarded_put(&dids, ids, sizeof ids);
    guarded_put(&drouting, b.routing, sizeof(float) * 3 * TOP_K);
    guarded_make(&dout, out_bytes, 0xFF);
    struct numoe_cuda_ffn ffn = {
        .shape = s.shape,
        .activation = s.activation,
        .slices = s.slices,
        .experts = s.experts,
        .weights = s.weights.data,
        .slice_at = (const uint32_t *)(const void *)s.table.data,
        .down_bias = (const float *)(const void *)s.bias.data,
        .tokens = b.tokens,
        .top_k = TOP_K,
        .x_type = NUMOE_BF16,
        .x_stride = 160,
        .ids = dids.data,
        .id_bytes = 4,
        .routing = (const float *)(const void *)drouting.data,
        .out = dout.data,
        .out_type = NUMOE_F32,
        .out_stride = 160,
        .scale = 1.0f,
        .form = form_of(0, 160, s.slices, s.experts, b.tokens, TOP_K),
    };
    guarded_make(&work, numoe_cuda_workspace_bytes(&device, &ffn), 0xFF);
    ffn.workspace = work.data;
    must(cudaMalloc((void **)&fill, 2 * big), "room for a long copy");
    uint8_t *const late = fill + big; /* x, at the end of a long copy */
    ffn.x = late + big - 4096;
    must(cudaMemset(fill, 0xFF, 2 * big), "poison");
    must(cudaMemcpy(fill + big - 4096, dx.data, x_bytes, cudaMemcpyDeviceToDevice), "x");
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    must(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "stream");
    must(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming), "event");
    must(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming), "event");
    for (int captured = 0; captured < ORDER_TESTS; captured++) {
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        uint8_t *got = malloc(out_bytes);

        begin("after an event of another stream, %s", captured ? "captured" : "queued");
        must(cudaMemset(late, 0xFF, big), "poison");
        must(cudaMemset(dout.data, 0xFF, out_bytes), "poison");
        must(cudaDeviceSynchronize(), "poison");
        if (captured)
            must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        must(cudaEventRecord(begun, stream), "record");
        must(cudaStreamWaitEvent(side, begun, 0), "wait");
        must(cudaMemcpyAsync(late, fill, big, cudaMemcpyDeviceToDevice, side), "copy");
        must(cudaEventRecord(copied, side), "record");
        must(numoe_cuda_ffn_launch(&device, &ffn, stream), "a call before the event");
        must(cudaStreamWaitEvent(stream, copied, 0), "wait");
        must(numoe_cuda_ffn_launch(&device, &ffn, stream), "the call");
        if (captured) {
            must(cudaStreamEndCapture(stream, &graph), "capture");
            must(cudaGraphInstantiate(&exec, graph, 0), "graph");
            must(cudaGraphLaunch(exec, stream), "graph");
        }
        must(cudaStreamSynchronize(stream), "the kernels");
        must(cudaMemcpy(got, dout.data, out_bytes, cudaMemcpyDeviceToHost), "copy back");
        expect(!memcmp(got, want, out_bytes), "other bits than alone");
        guarded_check(&work, "the workspace");
        if (exec)
            cudaGraphExecDestroy(exec);
        if (graph)
            cudaGraphDestroy(graph);
        free(got);
        end();
    }
    cudaEventDestroy(begun);
    cudaEventDestroy(copied);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(side);
    cudaFree(fill);
    guarded_free(&dx);
    guarded_free(&dids);
    guarded_free(&drouting);
    guarded_free(&dout);
    guarded_free(&work);
    free(want);
    free(x);
    batch_free(&b);
    begin("order");
    set_free(&s);
    harness_failed += !harness_ok;
}

enum { REPEAT_TESTS = 4, NAN_TESTS = 4 };

static void test_same_bits_and_nan(void)
{
    static const uint32_t tokens[4] = {5, 30, 77, 300};
    static struct set s;

    set_make(&s, 288, 96, true, &activations[2], 0);
    for (int i = 0; i < 4; i++) {
        struct batch b;
        batch_make(&b, &s, tokens[i], TOP_K, 0);
        const uint64_t row = b.out_stride * 4, bytes = tokens[i] * row;

        begin("same bits, %u tokens", tokens[i]);
        uint8_t *first = compute(&s, &b);
        for (int again = 0; again < 3; again++) {
            uint8_t *next = compute(&s, &b);
            expect(!memcmp(first, next, bytes), "run %d differs", again + 2);
            free(next);
        }
        end();

        begin("NaN stays in its token, %u tokens", tokens[i]);
        const uint32_t poor = tokens[i] / 2;
        b.ids[poor * b.top_k] = 0; /* at least one expert that is there */
        uint8_t *clean = compute(&s, &b);
        b.x[poor * s.shape.hidden + 17] = NAN;
        uint8_t *dirty = compute(&s, &b);
        for (uint32_t t = 0; t < tokens[i]; t++) {
            if (t != poor)
                expect(!memcmp(clean + t * row, dirty + t * row, row), "token %u changed", t);
            else
                for (uint64_t k = 0; k < s.shape.hidden; k++)
                    if (!expect(isnan(((float *)(void *)(dirty + t * row))[k]),
                                "output %llu of the token with the NaN is a number",
                                (unsigned long long)k))
                        break;
        }
        end();
        free(first);
        free(clean);
        free(dirty);
        batch_free(&b);
    }
    begin("same bits");
    set_free(&s);
    harness_failed += !harness_ok;
}

/* Patterns of ids that no random draw makes. */
enum { PATTERN_TESTS = 6 };

static void test_patterns(void)
{
    static const char *const names[] = {
        "all to one expert",      "all skipped", "all absent", "all the same in a row",
        "one token in a hundred", "top_k 64"};
    static struct set s;

    set_make(&s, 96, 64, true, &activations[0], 0);
    for (int p = 0; p < PATTERN_TESTS; p++) {
        struct batch b;
        begin("%s", names[p]);
        batch_make(&b, &s, p == 5 ? 40 : 200, p == 5 ? 64 : TOP_K, (unsigned)p);
        for (uint64_t i = 0; p < 5 && i < (uint64_t)b.tokens * b.top_k; i++) {
            const uint64_t t = i / b.top_k;
            b.ids[i] = p == 0   ? 2
                       : p == 1 ? -(int64_t)(i % 5) - 1
                       : p == 2 ? ABSENT
                       : p == 3 ? (int64_t)(t % EXPERTS)
                                : (t % 100 == 50 ? 1 : -1);
        }
        void *out = compute(&s, &b);
        compare(&s, &b, out);
        free(out);
        batch_free(&b);
        end();
    }
    begin("patterns");
    set_free(&s);
    harness_failed += !harness_ok;
}

/* More experts than the routing block has threads: its scan takes a second round. */
enum { MANY_TESTS = 4 };

static void test_many_experts(void)
{
    static const int64_t edges[] = {0, 1, 1022, 1023, 1024, 1025, 1026, 1498, 1499};
    static const char *const names[MANY_TESTS] = {"few tokens", "the rounds' edges",
                                                  "only the second round", "every expert"};
    static const uint32_t tokens[MANY_TESTS] = {3, 36, 60, 1500};
    static struct set s;

    set_make_of(&s, MANY_EXPERTS, 64, 64, true, &activations[0], 0);
    for (int i = 0; i < MANY_TESTS; i++) {
        struct batch b;
        begin("%d experts, %s", MANY_EXPERTS, names[i]);
        batch_make(&b, &s, tokens[i], TOP_K, (unsigned)i);
        for (uint64_t p = 0; p < (uint64_t)b.tokens * b.top_k; p++) {
            if (i == 1)
                b.ids[p] = edges[p % (sizeof edges / sizeof edges[0])];
            if (i == 2)
                b.ids[p] = 1024 + (int64_t)(p * 37 % (MANY_EXPERTS - 1024));
            if (i == 3)
                b.ids[p] = (int64_t)(p % MANY_EXPERTS);
        }
        void *out = compute(&s, &b);
        compare(&s, &b, out);
        free(out);
        batch_free(&b);
        end();
    }
    begin("many experts");
    set_free(&s);
    harness_failed += !harness_ok;
}

/* Slices that begin more than 4 GiB behind the first byte; what lies before is rubbish. */
enum { FAR_TESTS = 4 };

static void test_far_slices(void)
{
    static const uint32_t tokens[FAR_TESTS] = {1, 12, 40, 200};
    const uint64_t gap = ((uint64_t)4608 << 20) / 64 * 64;
    static struct set s;
    uint8_t *far = NULL, *near;
    cudaError_t e;

    set_make(&s, 288, 96, true, &activations[0], 0);
    near = s.weights.data;
    e = cudaMalloc((void **)&far, gap + s.weights.bytes);
    if (e) {
        cudaGetLastError();
        printf("skipped: slices behind 4 GiB: %llu MiB of device memory: %s\n",
               (unsigned long long)(gap >> 20), cudaGetErrorString(e));
        harness_skipped += FAR_TESTS;
        set_free(&s);
        return;
    }
    must(cudaMemset(far, 0x7F, gap), "cudaMemset");
    must(cudaMemcpy(far + gap, near, s.weights.bytes, cudaMemcpyDeviceToDevice), "move");
    for (uint32_t i = 0; i < s.experts * s.slices; i++)
        if (s.slice_at[i] != NUMOE_CUDA_ABSENT)
            s.slice_at[i] += (uint32_t)(gap / 64);
    must(cudaMemcpy(s.table.data, s.slice_at, s.table.bytes, cudaMemcpyHostToDevice), "the table");
    s.weights.data = far;
    for (int i = 0; i < FAR_TESTS; i++) {
        struct batch b;
        begin("slices behind 4 GiB, %u tokens", tokens[i]);
        batch_make(&b, &s, tokens[i], TOP_K, (unsigned)i);
        void *out = compute(&s, &b);
        compare(&s, &b, out);
        free(out);
        batch_free(&b);
        end();
    }
    s.weights.data = near;
    must(cudaFree(far), "cudaFree");
    begin("slices behind 4 GiB");
    set_free(&s);
    harness_failed += !harness_ok;
}

/* Any form gives every count of tokens, to one expert or to some. */
enum { SHALLOW_TESTS = 3, FORM_TESTS = ALL_FORMS * 3 + SHALLOW_TESTS };

static void test_forms(void)
{
    static const uint32_t tokens[3] = {1, 29, 150};
    static struct set s;

    set_make(&s, 224, 160, true, &activations[3], 0);
    for (uint32_t f = 0; f < ALL_FORMS; f++)
        for (int i = 0; i < 3; i++) {
            struct batch b;
            begin("form %s, %u tokens", numoe_gpu_form_names[f], tokens[i]);
            batch_make(&b, &s, tokens[i], TOP_K, f + (unsigned)i);
            b.form = f;
            for (uint64_t p = 0; i == 2 && p < (uint64_t)b.tokens * b.top_k; p++)
                b.ids[p] = p % 3 ? 5 : 6;
            void *out = compute(&s, &b);
            compare(&s, &b, out);
            free(out);
            batch_free(&b);
            end();
        }
    for (int i = 0; i < SHALLOW_TESTS; i++) { /* as where an SM has less shared memory */
        const struct numoe_cuda_few few = device.few;
        struct batch b;
        begin("form 8, 3 stages, %u tokens", tokens[i]);
        batch_make(&b, &s, tokens[i], TOP_K, (unsigned)i);
        b.form = NUMOE_CUDA_8;
        device.few = (struct numoe_cuda_few){.stages = 3, .blocks_an_sm = 2};
        void *out = compute(&s, &b);
        device.few = few;
        compare(&s, &b, out);
        free(out);
        batch_free(&b);
        end();
    }
    begin("forms");
    set_free(&s);
    harness_failed += !harness_ok;
}

/* Calls of several sizes captured on shared buffers, replayed in turn with other inputs. */
enum { GRAPH_SIZES = 4, GRAPH_TESTS = GRAPH_SIZES + 2 };

static void put_inputs(const struct batch *b, struct guarded *dx, struct guarded *dids,
                       struct guarded *drouting)
{
    void *x = encode(b->x, b->tokens, 160, 160, NUMOE_BF16);
    int32_t ids[32 * TOP_K];

    for (uint32_t p = 0; p < b->tokens * TOP_K; p++)
        ids[p] = (int32_t)b->ids[p];
    must(cudaMemcpy(dx->data, x, b->tokens * 160 * 2, cudaMemcpyHostToDevice), "x");
    must(cudaMemcpy(dids->data, ids, b->tokens * TOP_K * 4, cudaMemcpyHostToDevice), "ids");
    must(cudaMemcpy(drouting->data, b->routing, b->tokens * TOP_K * 4, cudaMemcpyHostToDevice),
         "routing");
    free(x);
}

static bool replays_as(cudaGraphExec_t exec, cudaStream_t stream, const struct guarded *dout,
                       const void *eager, uint32_t tokens)
{
    float got[32 * 160];

    must(cudaMemset(dout->data, 0xFF, tokens * 160 * 4), "poison");
    must(cudaGraphLaunch(exec, stream), "replay");
    must(cudaStreamSynchronize(stream), "the replay");
    must(cudaMemcpy(got, dout->data, tokens * 160 * 4, cudaMemcpyDeviceToHost), "out");
    return !memcmp(got, eager, tokens * 160 * 4);
}

static void test_graphs(void)
{
    static const uint32_t tokens[GRAPH_SIZES] = {1, 2, 8, 32};
    static struct set s;
    cudaGraphExec_t exec[GRAPH_SIZES];
    struct batch b[GRAPH_SIZES];
    struct guarded dx, dids, drouting, dout, work;
    struct numoe_cuda_ffn ffn;
    cudaStream_t stream;
    uint64_t need = 0;

    set_make(&s, 160, 96, true, &activations[1], 0);
    guarded_make(&dx, 32 * 160 * 4, 0xFF);
    guarded_make(&dids, 32 * TOP_K * 8, 0xFF);
    guarded_make(&drouting, 32 * TOP_K * 4, 0xFF);
    guarded_make(&dout, 32 * 160 * 4, 0xFF);
    ffn = (struct numoe_cuda_ffn){
        .shape = s.shape,
        .activation = s.activation,
        .slices = s.slices,
        .experts = s.experts,
        .weights = s.weights.data,
        .slice_at = (const uint32_t *)(const void *)s.table.data,
        .down_bias = (const float *)(const void *)s.bias.data,
        .tokens = 32,
        .top_k = TOP_K,
        .x = dx.data,
        .x_type = NUMOE_BF16,
        .x_stride = 160,
        .ids = dids.data,
        .id_bytes = 4,
        .routing = (const float *)(const void *)drouting.data,
        .out = dout.data,
        .out_type = NUMOE_F32,
        .out_stride = 160,
        .scale = 1.0f,
    };
    for (int i = 0; i < GRAPH_SIZES; i++) { /* each by its own form: the most that any needs */
        ffn.tokens = tokens[i];
        ffn.form = form_of(0, 160, s.slices, s.experts, tokens[i], TOP_K);
        const uint64_t bytes = numoe_cuda_workspace_bytes(&device, &ffn);
        need = bytes > need ? bytes : need;
    }
    guarded_make(&work, need, 0xFF);
    ffn.workspace = work.data;
    must(cudaStreamCreate(&stream), "cudaStreamCreate");
    for (int i = 0; i < GRAPH_SIZES; i++) {
        cudaGraph_t graph;
        ffn.tokens = tokens[i];
        ffn.form = form_of(0, 160, s.slices, s.experts, tokens[i], TOP_K);
        must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        must(numoe_cuda_ffn_launch(&device, &ffn, stream), "launch");
        must(cudaStreamEndCapture(stream, &graph), "end of capture");
        must(cudaGraphInstantiate(&exec[i], graph, 0), "instantiate");
        must(cudaGraphDestroy(graph), "destroy");
    }
    for (int i = 0; i < GRAPH_SIZES; i++)
        batch_make(&b[i], &s, tokens[i], TOP_K, 0);
    for (int i = 0; i < GRAPH_SIZES; i++) {
        begin("a graph of %u tokens, replayed in turn with others", tokens[i]);
        void *eager = compute(&s, &b[i]);
        for (int turn = 0; turn < 20; turn++) {
            const int j = turn % 2 ? i : (i + turn) % GRAPH_SIZES;
            put_inputs(&b[j], &dx, &dids, &drouting);
            expect(replays_as(exec[j], stream, &dout, eager, tokens[j]) || j != i,
                   "turn %d differs", turn);
        }
        free(eager);
        end();
    }
    begin("a thousand replays, calls of another size between them");
    struct batch other;
    void *eager = compute(&s, &b[2]);
    batch_make(&other, &s, 16, TOP_K, 0);
    put_inputs(&b[2], &dx, &dids, &drouting);
    for (int turn = 0; turn < 1000; turn++) {
        if (turn % 100 == 50)
            free(compute(&s, &other));
        if (!expect(replays_as(exec[2], stream, &dout, eager, tokens[2]), "replay %d differs",
                    turn))
            break;
    }
    batch_free(&other);
    free(eager);
    end();
    begin("graphs that are gone have left nothing behind");
    size_t before = 0, after = 0, total;
    for (int turn = 0; turn < 60; turn++) {
        cudaGraph_t graph;
        cudaGraphExec_t again;
        must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        must(numoe_cuda_ffn_launch(&device, &ffn, stream), "launch");
        must(cudaStreamEndCapture(stream, &graph), "end of capture");
        must(cudaGraphInstantiate(&again, graph, 0), "instantiate");
        must(cudaGraphLaunch(again, stream), "replay");
        must(cudaStreamSynchronize(stream), "the replay");
        must(cudaGraphExecDestroy(again), "destroy");
        must(cudaGraphDestroy(graph), "destroy");
        must(cudaMemGetInfo(turn < 20 ? &before : &after, &total), "free memory");
    }
    expect(after >= before, "%zu bytes of device memory are gone", before - after);
    end();
    begin("graphs");
    guarded_check(&work, "the workspace");
    guarded_check(&dout, "out");
    for (int i = 0; i < GRAPH_SIZES; i++) {
        must(cudaGraphExecDestroy(exec[i]), "destroy");
        batch_free(&b[i]);
    }
    must(cudaStreamDestroy(stream), "cudaStreamDestroy");
    guarded_free(&dx);
    guarded_free(&dids);
    guarded_free(&drouting);
    guarded_free(&dout);
    guarded_free(&work);
    set_free(&s);
    harness_failed += !harness_ok;
}

static void test_refusals(void)
{
    static struct set s;
    struct numoe_cuda_ffn ffn;

    begin("limits are refused");
    set_make(&s, 32, 32, false, &activations[0], 0);
    ffn = (struct numoe_cuda_ffn){.shape = s.shape,
                                  .activation = s.activation,
                                  .slices = s.slices,
                                  .experts = 65537,
                                  .tokens = 1,
                                  .top_k = 1,
                                  .form = NUMOE_CUDA_8};
    expect(numoe_cuda_workspace_bytes(&device, &ffn) == 0, "65537 experts have a workspace");
    expect(numoe_cuda_ffn_launch(&device, &ffn, NULL) == cudaErrorInvalidValue,
           "65537 experts ran");
    ffn.experts = EXPERTS;
    ffn.tokens = 1u << 30;
    ffn.top_k = 2;
    expect(numoe_cuda_workspace_bytes(&device, &ffn) == 0, "2^31 pairs have a workspace");
    ffn.tokens = 1;
    for (int form = -1; form <= NUMOE_CUDA_FORMS + 1; form++) {
        ffn.form = (enum numoe_cuda_form)form;
        if (form < 1 || form > NUMOE_CUDA_FORMS || !(device.forms >> form & 1))
            expect(numoe_cuda_workspace_bytes(&device, &ffn) == 0 &&
                       numoe_cuda_ffn_launch(&device, &ffn, NULL) == cudaErrorInvalidValue,
                   "form %d ran", form);
    }
    ffn.tokens = 0;
    expect(numoe_cuda_ffn_launch(&device, &ffn, NULL) == cudaSuccess, "no tokens failed");
    set_free(&s);
    end();
}

/* Nothing spills, and everything but one form by wgmma fits where a block may have 99 KiB (case
 * F2). */
static void test_kernels(void)
{
    struct numoe_cuda_kernel_info info[32];
    const size_t count = numoe_cuda_kernels(info, 32);

    begin("what the kernels need");
    printf("%-20s %9s %6s %8s %8s %9s %6s\n", "kernel", "registers", "local", "static", "dynamic",
           "blocks/SM", "code");
    for (size_t i = 0; i < count; i++) {
        printf("%-20s %9d %6d %8d %8d %9d %6d\n", info[i].name, info[i].registers,
               info[i].local_bytes, info[i].static_shared_bytes, info[i].dynamic_shared_bytes,
               info[i].blocks_an_sm, info[i].binary_version);
        expect(info[i].local_bytes == 0, "%s spills", info[i].name);
        expect(strstr(info[i].name, "128, wgmma") != NULL ||
                   info[i].static_shared_bytes + info[i].dynamic_shared_bytes <= 99 * 1024,
               "%s needs more than 99 KiB", info[i].name);
    }
    end();
}

/* "small": what a sanitizer, which is a hundred times slower, gets through. */
int main(int argc, char **argv)
{
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    const int tests = PATTERN_TESTS + EXTREME_TESTS + MXFP8_TESTS + ORDER_TESTS + REPEAT_TESTS +
                      NAN_TESTS + MANY_TESTS + FORM_TESTS + GRAPH_TESTS + 2;

    if (!have_device(small ? tests : tests + SHAPE_TESTS + VARIANT_TESTS + FAR_TESTS))
        return finish();
    must(numoe_cuda_device_init(&device), "the device's numbers");
    test_kernels();
    test_refusals();
    test_patterns();
    test_extreme_scales();
    test_mxfp8();
    test_order();
    test_same_bits_and_nan();
    test_many_experts();
    test_forms();
    test_graphs();
    if (small)
        return finish();
    test_far_slices();
    test_variants();
    test_shapes();
    return finish();
}
