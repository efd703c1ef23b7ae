/*
 * Forms of the kernels beside the reference, one at a time, and turning off those that are wrong.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_gate.h"
#include "gpu_internal.h"

/* Experts, a batch, and both on the device. */
struct stage {
    struct numoe_gpu *gpu;
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    uint32_t slices, experts, tokens, top_k;
    uint8_t *host; /* pinned: experts, tables, inputs, outputs, as on the device */
    uint8_t *device;
    void *stream;
    uint64_t table, x, ids, routing, out, work, bytes; /* offsets; experts are first */
    uint64_t random;
};

static uint32_t draw(struct stage *s)
{
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(s->random >> 33);
}

static uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

/* Without addresses until there is memory. */
static struct numoe_cuda_ffn call_of(const struct stage *s, uint32_t form)
{
    struct numoe_cuda_ffn ffn = {
        .shape = s->shape,
        .activation = s->activation,
        .slices = s->slices,
        .experts = s->experts,
        .tokens = s->tokens,
        .top_k = s->top_k,
        .x_type = NUMOE_F32,
        .x_stride = s->shape.hidden,
        .id_bytes = 4,
        .out_type = NUMOE_F32,
        .out_stride = s->shape.hidden,
        .scale = 1.0f,
        .form = (enum numoe_cuda_form)form,
    };

    if (!form)
        ffn.form = gpu_choose_form(s->gpu, &ffn);
    if (!s->device)
        return ffn;
    ffn.weights = s->device;
    ffn.slice_at = (const uint32_t *)(const void *)(s->device + s->table);
    ffn.x = s->device + s->x;
    ffn.ids = s->device + s->ids;
    ffn.routing = (const float *)(const void *)(s->device + s->routing);
    ffn.out = s->device + s->out;
    ffn.workspace = s->device + s->work;
    return ffn;
}

static void close_stage(struct stage *s)
{
    struct numoe_gpu *gpu = s->gpu;

    if (s->stream) {
        gpu_judge(gpu, gpu->ops->stream_sync(gpu->device, s->stream), NULL, "a check");
        gpu_judge(gpu, gpu->ops->stream_destroy(gpu->device, s->stream), NULL, "freeing a stream");
    }
    if (s->device)
        gpu_judge(gpu, gpu->ops->release(gpu->device, s->device), NULL, "freeing a check's memory");
    if (s->host)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, s->host), NULL,
                  "freeing a check's memory");
}

/* Sizes are set. *there: the device has the form. */
static int open_stage(struct stage *s, uint32_t form, bool *there, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    const uint64_t pairs = (uint64_t)s->tokens * s->top_k, row = s->shape.hidden * sizeof(float);
    uint64_t at = 0, host, work;
    struct numoe_cuda_ffn ffn;
    int rc;

    take(&at, s->experts * s->slices * s->shape.bytes);
    s->table = take(&at, s->experts * s->slices * 4);
    s->x = take(&at, s->tokens * row);
    s->ids = take(&at, pairs * 4);
    s->routing = take(&at, pairs * 4);
    s->out = take(&at, s->tokens * row);
    host = at;
    ffn = call_of(s, form);
    work = ops->workspace_bytes(gpu->device, &ffn);
    *there = work != 0;
    if (!work)
        return 0;
    s->work = take(&at, work);
    s->bytes = at;
    rc = gpu_judge(gpu, ops->host_allocate(gpu->device, host, (void **)&s->host), error,
                   "allocating a check's memory");
    if (!rc)
        rc = gpu_judge(gpu, ops->allocate(gpu->device, s->bytes, (void **)&s->device), error,
                       "allocating a check's memory");
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_create(gpu->device, &s->stream), error, "making a stream");
    if (rc)
        return rc;
    memset(s->host, 0, host);
    for (uint32_t i = 0; i < s->experts * s->slices; i++)
        ((uint32_t *)(void *)(s->host + s->table))[i] = (uint32_t)(i * s->shape.bytes / 64);
    return 0;
}

/* One step at a time, each waited for: inputs in, the launch or its replay, outputs back. */
static int step_by_step(struct stage *s, uint32_t form, bool graph, float *out,
                        struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    const struct numoe_cuda_ffn ffn = call_of(s, form);
    const uint64_t bytes = s->tokens * s->shape.hidden * sizeof(float);
    int rc;

    memset(s->host + s->out, 0xFF, bytes); /* NaN where nothing is written */
    rc = gpu_judge(gpu, ops->copy_in(gpu->device, s->stream, s->device, s->host, s->out + bytes),
                   error, "copying a check's inputs");
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->stream), error, "a check's inputs");
    if (!rc)
        rc = gpu_judge(gpu,
                       graph ? ops->replay(gpu->device, s->stream, &ffn, 3)
                             : ops->launch(gpu->device, s->stream, &ffn),
                       error, "launching %u tokens", s->tokens);
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->stream), error, "computing %u tokens",
                       s->tokens);
    if (!rc)
        rc = gpu_judge(
            gpu, ops->copy_out(gpu->device, s->stream, s->host + s->out, s->device + s->out, bytes),
            error, "copying a check's outputs");
    if (!rc)
        rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->stream), error, "a check's outputs");
    if (!rc)
        memcpy(out, s->host + s->out, bytes);
    return rc;
}

/* What float64 gives for a token; returns the largest of it. */
static double compute(const struct stage *s, uint32_t token, double *want)
{
    const float *x = (const float *)(const void *)(s->host + s->x) + token * s->shape.hidden;
    const int32_t *ids = (const int32_t *)(const void *)(s->host + s->ids) + token * s->top_k;
    const float *routing = (const float *)(const void *)(s->host + s->routing) + token * s->top_k;
    double largest = 0;

    memset(want, 0, s->shape.hidden * sizeof *want);
    for (uint32_t j = 0; j < s->top_k; j++)
        if (ids[j] >= 0)
            numoe_reference_slices(&s->shape, &s->activation,
                                   s->host + (uint64_t)ids[j] * s->slices * s->shape.bytes,
                                   s->slices, x, (double)routing[j], NULL, true, want);
    for (uint64_t k = 0; k < s->shape.hidden; k++)
        largest = fabs(want[k]) > largest ? fabs(want[k]) : largest;
    return largest;
}

/* Relative L2 of a token to float64. */
static double compare(const struct stage *s, const float *out, uint32_t token, double *want)
{
    const double largest = compute(s, token, want);
    double off = 0, size = 0;

    for (uint64_t k = 0; k < s->shape.hidden && largest > 0; k++) {
        /* in parts of the largest: squares of what fp32 holds need not be in a double's range */
        const double w = want[k] / largest;
        const double d = (double)out[token * s->shape.hidden + k] / largest - w;
        off += d * d;
        size += w * w;
    }
    off = size > 0 ? sqrt(off / size) : 0;
    return isnan(off) ? INFINITY : off;
}

/* ---- forms ----------------------------------------------------------------------------------- */

enum { HIDDEN = 160, INTERMEDIATE = 96, SLICES = 3, EXPERTS = 9, TOP_K = 3, COMPARED = 24 };

static struct numoe_activation activation_of(enum numoe_activation_kind kind)
{
    return (struct numoe_activation){
        .kind = kind, .limit = 2.5f, .alpha = 1.702f, .gate_cap = 3.0f, .up_cap = 2.0f};
}

static int pack_expert(struct stage *s, uint32_t expert, uint64_t hidden, uint64_t intermediate,
                       const unsigned low[3], unsigned kinds, bool all_codes)
{
    const uint64_t in = (hidden + 31) / 32, out = (intermediate + 31) / 32;
    const uint64_t rows = intermediate > hidden ? intermediate : hidden;
    const uint64_t groups = in > out ? in : out;
    uint8_t *codes = malloc(3 * rows * groups * 17), *scales = codes + 3 * rows * groups * 16;
    struct numoe_expert_source source = {.hidden = hidden, .intermediate = intermediate};
    struct numoe_mxfp4 *const matrices[3] = {&source.gate, &source.up, &source.down};
    struct numoe_pack_report report = {0};
    int rc;

    if (!codes)
        return -ENOMEM;
    for (int m = 0; m < 3; m++) {
        const uint64_t wide = m == 2 ? out : in;
        uint8_t *c = codes + m * rows * groups * 16, *e = scales + m * rows * groups;
        for (uint64_t i = 0; i < rows * groups * 16; i++)
            c[i] = (uint8_t)(all_codes ? (2 * i % 16) | (2 * i + 1) % 16 << 4 : draw(s));
        for (uint64_t i = 0; all_codes && i < rows * groups * 16; i++)
            if (draw(s) % 2) /* all of them, in every order */
                c[i] = (uint8_t)(c[i] << 4 | c[i] >> 4);
        for (uint64_t i = 0; i < rows * groups; i++)
            e[i] = (uint8_t)(low[m] + (kinds > 1 ? draw(s) % kinds : 0));
        *matrices[m] = (struct numoe_mxfp4){.codes = c,
                                            .scales = e,
                                            .code_stride = wide * 16,
                                            .scale_stride = wide,
                                            .code_step = 16,
                                            .scale_step = 1,
                                            .nibbles = NUMOE_NIBBLES_ADJACENT};
    }
    rc = numoe_pack_slices(&s->shape, &source, 0, s->slices,
                           s->host + (uint64_t)expert * s->slices * s->shape.bytes, &report);
    free(codes);
    return rc;
}

static void draw_batch(struct stage *s)
{
    float *x = (float *)(void *)(s->host + s->x),
          *routing = (float *)(void *)(s->host + s->routing);
    int32_t *ids = (int32_t *)(void *)(s->host + s->ids);

    for (uint64_t i = 0; i < s->tokens * s->shape.hidden; i++)
        x[i] = (float)((int)(draw(s) % 255) - 127) / 64.0f;
    for (uint64_t i = 0; i < (uint64_t)s->tokens * s->top_k; i++) {
        ids[i] = draw(s) % 16 ? (int32_t)(draw(s) % s->experts) : -1;
        routing[i] = 0.25f + (float)(draw(s) % 64) / 128.0f;
    }
}

static int run_form(struct stage *s, uint32_t form, bool graph, struct numoe_gpu_finding *f,
                    struct numoe_error *error)
{
    const uint64_t values = s->tokens * s->shape.hidden;
    float *first = malloc(2 * values * sizeof *first), *again = first + values;
    double *want = malloc(s->shape.hidden * sizeof *want);
    const uint32_t step = s->tokens > COMPARED ? s->tokens / COMPARED : 1;
    int rc = -ENOMEM;

    if (!first || !want) {
        numoe_error_set(error, rc, "check", "out of memory");
        goto out;
    }
    rc = step_by_step(s, form, false, first, error);
    if (!rc)
        rc = step_by_step(s, form, graph, again, error);
    if (rc)
        goto out;
    for (uint32_t t = 0; t < s->tokens; t += step) {
        const double rel_l2 = compare(s, again, t, want);
        f->rel_l2 = rel_l2 > f->rel_l2 ? rel_l2 : f->rel_l2;
    }
    f->ok = f->rel_l2 <= GPU_TEST_LIMIT;
    if (!f->ok)
        snprintf(f->text, sizeof f->text, "off by %.2e, more than %.0e", f->rel_l2, GPU_TEST_LIMIT);
    else if (memcmp(first, again, values * sizeof *first) != 0) {
        f->ok = false;
        snprintf(f->text, sizeof f->text,
                 graph ? "a replayed graph gives other bits than a launch"
                       : "a second launch gives other bits");
    }
out:
    free(first);
    free(want);
    return rc;
}

int numoe_gpu_certify_form(struct numoe_gpu *gpu, enum numoe_activation_kind activation,
                           uint32_t form, uint32_t tokens, bool graph, struct numoe_gpu_finding *f,
                           struct numoe_error *error)
{
    struct stage s = {.gpu = gpu,
                      .activation = activation_of(activation),
                      .slices = SLICES,
                      .experts = EXPERTS,
                      .tokens = tokens,
                      .top_k = TOP_K,
                      .random = 77 + tokens};
    int rc = gpu_enter(gpu, error);

    *f = (struct numoe_gpu_finding){0};
    if (!rc)
        rc = numoe_slice_shape_init(&s.shape, HIDDEN, false);
    if (!rc)
        rc = open_stage(&s, form, &f->there, error);
    for (uint32_t e = 0; !rc && f->there && e < EXPERTS; e++) {
        rc = pack_expert(&s, e, HIDDEN, INTERMEDIATE, (const unsigned[]){121, 121, 121}, 4, false);
        if (rc)
            numoe_error_set(error, rc, "check", "its experts could not be packed");
    }
    if (!rc && f->there) {
        draw_batch(&s);
        rc = run_form(&s, form, graph, f, error);
    }
    close_stage(&s);
    return rc;
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* An expert a scale byte, a token an expert. x is such that h and outputs stay where fp32 and bf16
 * have all their digits. */
enum { BYTES = 255, MID = 127, CODES_HIDDEN = 64 };

static float x_scale(enum numoe_matrix matrix, int byte)
{
    int power;

    if (matrix == NUMOE_DOWN)
        power = byte >= MID ? -40 : 0;
    else
        power = MID - byte > 60 ? 60 : MID - byte < -60 ? -60 : MID - byte;
    return ldexpf(1.0f, power);
}

int numoe_gpu_certify_codes(struct numoe_gpu *gpu, uint32_t form, enum numoe_matrix matrix,
                            struct numoe_gpu_finding *f, struct numoe_error *error)
{
    struct stage s = {.gpu = gpu,
                      .activation = activation_of(NUMOE_SILU),
                      .slices = 1,
                      .experts = BYTES,
                      .tokens = BYTES,
                      .top_k = 1,
                      .random = 5 + (uint64_t)matrix};
    float out[BYTES * CODES_HIDDEN];
    double want[CODES_HIDDEN];
    uint32_t wrong = 0, first = 0;
    int rc = gpu_enter(gpu, error);

    *f = (struct numoe_gpu_finding){0};
    if (!rc)
        rc = numoe_slice_shape_init(&s.shape, CODES_HIDDEN, false);
    if (!rc)
        rc = open_stage(&s, form, &f->there, error);
    for (uint32_t e = 0; !rc && f->there && e < BYTES; e++) {
        unsigned low[3] = {MID, MID, MID};
        low[matrix] = e;
        rc = pack_expert(&s, e, CODES_HIDDEN, 32, low, 1, true);
        if (rc)
            numoe_error_set(error, rc, "check", "its experts could not be packed");
    }
    if (rc || !f->there)
        goto out;
    draw_batch(&s);
    for (uint32_t t = 0; t < BYTES; t++) {
        float *x = (float *)(void *)(s.host + s.x) + t * CODES_HIDDEN;
        for (int k = 0; k < CODES_HIDDEN; k++)
            x[k] *= x_scale(matrix, (int)t) / 32;
        ((int32_t *)(void *)(s.host + s.ids))[t] = (int32_t)t;
        /* where all of gate is far below zero, outputs are zero and show nothing of the byte */
        const bool silent = !(compute(&s, t, want) > 0);
        for (int k = 0; silent && k < CODES_HIDDEN; k++)
            x[k] = -x[k];
    }
    rc = step_by_step(&s, form, false, out, error);
    if (rc)
        goto out;
    for (uint32_t t = 0; t < BYTES; t++) {
        const double rel_l2 = compare(&s, out, t, want);
        if (t >= 253 && !isfinite(rel_l2))
            continue;
        if (!(rel_l2 <= GPU_TEST_LIMIT) && !wrong++)
            first = t;
        f->rel_l2 = rel_l2 > f->rel_l2 ? rel_l2 : f->rel_l2;
    }
    f->ok = !wrong;
    if (wrong)
        snprintf(f->text, sizeof f->text, "%u scale bytes are off by up to %.2e, from %u on", wrong,
                 f->rel_l2, first);
out:
    close_stage(&s);
    return rc;
}

/* ---- the pipeline ---------------------------------------------------------------------------- */

/* Two layers of the stage's experts in memory of their own, which is pinned as any other: the first
 * slice of each, then the other slices of each, as two nodes would hold them. */
struct host_model {
    const struct stage *stage;
    uint8_t *experts;
};

static uint64_t host_slices(const struct host_model *m, uint32_t index)
{
    return index ? m->stage->slices - 1 : 1;
}

static uint8_t *host_at(const struct host_model *m, uint32_t index, uint64_t expert)
{
    const uint64_t before = index ? m->stage->experts : 0;
    return m->experts + (before + expert * host_slices(m, index)) * m->stage->shape.bytes;
}

static void host_arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    const struct host_model *m = user;
    *address = host_at(m, index, 0);
    *bytes = m->stage->experts * host_slices(m, index) * m->stage->shape.bytes;
}

static uint64_t host_place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                           const uint8_t **address)
{
    const struct host_model *m = user;
    (void)layer;
    *address = host_at(m, index, expert);
    return host_slices(m, index);
}

static bool host_present(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    (void)layer;
    (void)expert;
    return true;
}

static uint32_t host_generation(void *user, uint64_t layer)
{
    (void)user;
    (void)layer;
    return 1;
}

/* The sums of pieces are added in fp32 in another order than within one launch. */
#define PIPELINE_LIMIT 1e-5

static double apart(const float *a, const float *b, uint64_t count)
{
    double off = 0, size = 0;

    for (uint64_t i = 0; i < count; i++) {
        const double d = (double)a[i] - (double)b[i];
        off += d * d;
        size += (double)a[i] * (double)a[i];
    }
    off = size > 0 ? sqrt(off / size) : off;
    return isnan(off) ? INFINITY : off;
}

/* Both layers four times over, so that each is prefetched while the other computes; the last
 * counts.
 */
static int stream_through(struct stage *s, struct host_model *host, float *out,
                          struct numoe_error *error)
{
    const uint64_t expert = s->slices * s->shape.bytes;
    const struct numoe_gpu_source source = {.user = host,
                                            .shape = s->shape,
                                            .activation = s->activation,
                                            .arithmetic = NUMOE_EXACT,
                                            .layers = 2,
                                            .experts = s->experts,
                                            .slices = s->slices,
                                            .region_count = 2,
                                            .arena = host_arena,
                                            .place = host_place,
                                            .present = host_present,
                                            .generation = host_generation};
    const struct numoe_gpu_model_options options = {
        .stream = true, .window_bytes = 6 * expert, .piece_bytes = 1};
    const struct numoe_gpu_call call = {
        .tokens = s->tokens,
        .top_k = s->top_k,
        .x = s->host + s->x,
        .x_type = NUMOE_F32,
        .x_stride = s->shape.hidden,
        .ids = (const int32_t *)(const void *)(s->host + s->ids),
        .routing = (const float *)(const void *)(s->host + s->routing),
        .out = out,
        .out_type = NUMOE_F32,
        .out_stride = s->shape.hidden,
        .scale = 1.0f,
    };
    struct numoe_gpu_model *model = NULL;
    int rc = numoe_gpu_model_create(s->gpu, &source, &options, &model, error);

    for (uint64_t i = 0; !rc && i < 8; i++) {
        uint64_t done;
        rc = numoe_gpu_forward(model, i % 2, &call, &done, error);
    }
    numoe_gpu_model_destroy(model);
    return rc;
}

int numoe_gpu_certify_pipeline(struct numoe_gpu *gpu, uint32_t tokens, struct numoe_gpu_finding *f,
                               struct numoe_error *error)
{
    struct stage s = {.gpu = gpu,
                      .activation = activation_of(NUMOE_SILU_CLAMPED),
                      .slices = SLICES,
                      .experts = EXPERTS,
                      .tokens = tokens,
                      .top_k = TOP_K,
                      .random = 31 + tokens};
    const uint64_t values = (uint64_t)tokens * HIDDEN;
    const uint32_t step = tokens > COMPARED ? tokens / COMPARED : 1;
    float *alone = calloc(2 * values, sizeof *alone), *streamed = alone + values;
    double want[HIDDEN], distance;
    struct host_model host = {.stage = &s};
    uint64_t bytes;
    int rc =
        alone ? gpu_enter(gpu, error) : numoe_error_set(error, -ENOMEM, "check", "out of memory");

    *f = (struct numoe_gpu_finding){0};
    if (!rc)
        rc = numoe_slice_shape_init(&s.shape, HIDDEN, false);
    if (!rc)
        rc = open_stage(&s, 0, &f->there, error);
    for (uint32_t e = 0; !rc && e < EXPERTS; e++) {
        rc = pack_expert(&s, e, HIDDEN, INTERMEDIATE, (const unsigned[]){121, 121, 121}, 4, false);
        if (rc)
            numoe_error_set(error, rc, "check", "its experts could not be packed");
    }
    if (rc)
        goto out;
    draw_batch(&s);
    bytes = EXPERTS * SLICES * s.shape.bytes;
    host.experts = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!host.experts) {
        rc = numoe_error_set(error, -ENOMEM, "check", "out of memory");
        goto out;
    }
    for (uint64_t e = 0; e < EXPERTS; e++)
        for (uint32_t i = 0; i < 2; i++)
            memcpy(host_at(&host, i, e), s.host + (e * SLICES + i) * s.shape.bytes,
                   host_slices(&host, i) * s.shape.bytes);
    rc = step_by_step(&s, 0, false, alone, error);
    if (!rc)
        rc = stream_through(&s, &host, streamed, error);
    if (rc)
        goto out;
    for (uint32_t t = 0; t < tokens; t += step) {
        const double rel_l2 = compare(&s, streamed, t, want);
        f->rel_l2 = rel_l2 > f->rel_l2 ? rel_l2 : f->rel_l2;
    }
    distance = apart(alone, streamed, values);
    f->ok = f->rel_l2 <= GPU_TEST_LIMIT && distance <= PIPELINE_LIMIT;
    if (!f->ok)
        snprintf(f->text, sizeof f->text,
                 "off by %.2e, of %.0e, and by %.2e from step by step, of %.0e", f->rel_l2,
                 GPU_TEST_LIMIT, distance, PIPELINE_LIMIT);
out:
    close_stage(&s);
    free(host.experts);
    free(alone);
    return rc;
}

/* ---- Marlin's layout ------------------------------------------------------------------------- */

enum { MARLIN_HIDDEN = 192 }; /* three tiles of 64, and gate ends in the middle of one */

static uint64_t marlin_bytes(const struct numoe_marlin_sizes *sizes)
{
    return 4 * (sizes->gate_up_words + sizes->down_words) + sizes->gate_up_scales +
           sizes->down_scales;
}

/* `experts` of each array, one array behind the other. */
static struct numoe_marlin marlin_at(uint8_t *memory, const struct numoe_marlin_sizes *sizes,
                                     uint64_t experts)
{
    uint8_t *const down = memory + experts * 4 * sizes->gate_up_words;
    uint8_t *const scales = down + experts * 4 * sizes->down_words;

    return (struct numoe_marlin){
        .gate_up = (uint32_t *)(void *)memory,
        .down = (uint32_t *)(void *)down,
        .gate_up_scales = scales,
        .down_scales = scales + experts * sizes->gate_up_scales,
    };
}

static bool same_experts(const struct stage *s, const struct numoe_marlin_sizes *sizes,
                         bool interleaved, uint8_t *packed, uint8_t *memory)
{
    const struct numoe_marlin got = marlin_at(packed, sizes, s->experts);
    const struct numoe_marlin want = marlin_at(memory, sizes, 1);

    for (uint64_t e = 0; e < s->experts; e++) {
        numoe_marlin_reference(&s->shape, s->host + e * s->slices * s->shape.bytes, s->slices,
                               interleaved, &want);
        if (memcmp(got.gate_up + e * sizes->gate_up_words, want.gate_up,
                   4 * sizes->gate_up_words) != 0 ||
            memcmp(got.down + e * sizes->down_words, want.down, 4 * sizes->down_words) != 0 ||
            memcmp(got.gate_up_scales + e * sizes->gate_up_scales, want.gate_up_scales,
                   sizes->gate_up_scales) != 0 ||
            memcmp(got.down_scales + e * sizes->down_scales, want.down_scales,
                   sizes->down_scales) != 0)
            return false;
    }
    return true;
}

/* Both orders of columns, by memory on the device (`to`) and pinned (`back`). */
static int repack(struct stage *s, const struct numoe_marlin_sizes *sizes, uint8_t *to,
                  uint8_t *back, struct numoe_gpu_finding *f, struct numoe_error *error)
{
    const uint64_t bytes = s->experts * marlin_bytes(sizes);
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    uint8_t *want = malloc(marlin_bytes(sizes));
    int rc = gpu_judge(gpu, ops->copy_in(gpu->device, s->stream, s->device, s->host, s->x), error,
                       "copying a check's experts");

    if (!want)
        rc = numoe_error_set(error, -ENOMEM, "check", "out of memory");
    f->ok = true;
    for (int interleaved = 0; !rc && interleaved < 2; interleaved++) {
        const struct numoe_cuda_marlin marlin = {
            .shape = s->shape,
            .slices = s->slices,
            .experts = s->experts,
            .weights = s->device,
            .slice_at = (const uint32_t *)(const void *)(s->device + s->table),
            .interleaved = interleaved,
            .to = marlin_at(to, sizes, s->experts),
        };
        rc = gpu_judge(gpu, ops->marlin(gpu->device, s->stream, &marlin), error,
                       "repacking experts");
        if (!rc)
            rc = gpu_judge(gpu, ops->copy_out(gpu->device, s->stream, back, to, bytes), error,
                           "copying repacked experts");
        if (!rc)
            rc = gpu_judge(gpu, ops->stream_sync(gpu->device, s->stream), error,
                           "repacking experts");
        if (!rc && !same_experts(s, sizes, interleaved, back, want)) {
            f->ok = false;
            snprintf(f->text, sizeof f->text,
                     "repacking to Marlin's layout gives other bits than the reference");
        }
    }
    free(want);
    return rc;
}

int numoe_gpu_certify_marlin(struct numoe_gpu *gpu, struct numoe_gpu_finding *f,
                             struct numoe_error *error)
{
    struct stage s = {.gpu = gpu,
                      .slices = SLICES,
                      .experts = EXPERTS,
                      .tokens = 1,
                      .top_k = 1,
                      .activation = activation_of(NUMOE_SILU),
                      .random = 99};
    const struct gpu_ops *ops = gpu->ops;
    struct numoe_marlin_sizes sizes;
    uint8_t *to = NULL, *back = NULL;
    int rc = gpu_enter(gpu, error);

    *f = (struct numoe_gpu_finding){0};
    if (!rc)
        rc = numoe_slice_shape_init(&s.shape, MARLIN_HIDDEN, false);
    if (!rc)
        rc = numoe_marlin_sizes(&s.shape, s.slices, &sizes);
    if (!rc)
        rc = open_stage(&s, 0, &f->there, error);
    for (uint32_t e = 0; !rc && e < EXPERTS; e++) {
        rc = pack_expert(&s, e, MARLIN_HIDDEN, INTERMEDIATE, (const unsigned[]){0, 0, 0}, 255,
                         false);
        if (rc)
            numoe_error_set(error, rc, "check", "its experts could not be packed");
    }
    if (!rc)
        rc =
            gpu_judge(gpu, ops->allocate(gpu->device, EXPERTS * marlin_bytes(&sizes), (void **)&to),
                      error, "allocating a check's memory");
    if (!rc)
        rc = gpu_judge(
            gpu, ops->host_allocate(gpu->device, EXPERTS * marlin_bytes(&sizes), (void **)&back),
            error, "allocating a check's memory");
    if (!rc)
        rc = repack(&s, &sizes, to, back, f, error);
    if (s.stream) /* before what it uses is freed */
        gpu_judge(gpu, ops->stream_sync(gpu->device, s.stream), NULL, "a check");
    if (to)
        gpu_judge(gpu, ops->release(gpu->device, to), NULL, "freeing a check's memory");
    if (back)
        gpu_judge(gpu, ops->host_release(gpu->device, back), NULL, "freeing a check's memory");
    close_stage(&s);
    return rc;
}

int gpu_marlin_usable(struct numoe_gpu *gpu, struct numoe_error *error)
{
    struct numoe_gpu_finding f;
    int rc;

    if (gpu->marlin_checked)
        return 0;
    rc = numoe_gpu_certify_marlin(gpu, &f, error);
    if (rc)
        return rc;
    if (!f.ok)
        return numoe_error_set(error, -ENOTSUP, gpu->properties.name, "%s", f.text);
    gpu->marlin_checked = true;
    return 0;
}

/* ---- turning off ----------------------------------------------------------------------------- */

uint32_t gpu_turn_off_forms(struct numoe_gpu *gpu)
{
    uint32_t left = 0;

    for (uint32_t form = 1; form <= NUMOE_GPU_FORMS; form++) {
        static const uint32_t tokens[] = {1, 32, 300};
        bool there = false, ok = true;
        char why[160] = "";

        for (size_t t = 0; ok && t < sizeof tokens / sizeof tokens[0]; t++) {
            struct numoe_gpu_finding f;
            struct numoe_error error = NUMOE_ERROR_INIT;
            if (numoe_gpu_certify_form(gpu, NUMOE_SWIGLU_OAI, form, tokens[t], false, &f, &error))
                return 0; /* it cannot be told */
            there = there || f.there;
            ok = !f.there || f.ok;
            memcpy(why, f.text, sizeof why);
        }
        if (there && !ok) {
            gpu->forms_off |= 1u << form;
            numoe_log_write(&gpu->log, NUMOE_LOG_WARNING,
                            "form %s of the kernels is not used on %s: %s",
                            numoe_gpu_form_names[form], gpu->properties.name, why);
        }
        left += there && ok;
    }
    return left;
}
