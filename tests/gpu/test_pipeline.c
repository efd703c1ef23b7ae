/*
 * The copy pipeline and calls on a fake device: delays, refusals, and a failure at every step.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>

#include "../support/experts.h"
#include "fake_device.h"
#include "gpu_model.h"

enum { HIDDEN = 40, INTERMEDIATE = 64, SLICES = 2, EXPERTS = 4, LAYERS = 5, NODES = 2, TOP_K = 2 };
enum { ABSENT_LAYER = 2, ABSENT_EXPERT = 1 };

/* A small model over two nodes; the boundary between them moves with layer and expert. */
struct model {
    struct numoe_slice_shape shape;
    struct numoe_activation activation;
    uint8_t *arena[NODES];
    uint64_t arena_bytes[NODES];
    uint64_t start[NODES][LAYERS * EXPERTS + 1]; /* slices */
    float *down_bias;                            /* [LAYERS][EXPERTS][64] lane order */
    uint32_t generation[LAYERS];
    uint64_t layers;
    bool bias;
};

static uint64_t boundary(uint64_t q)
{
    return q % (SLICES + 1);
}

static void model_fill(struct model *m, uint64_t layer)
{
    const uint64_t width = 32 * m->shape.hidden_tiles;

    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint64_t q = layer * EXPERTS + e, cut = boundary(q);
        struct numoe_pack_report report = {0};
        struct test_expert expert;

        test_expert_make(&expert, HIDDEN, INTERMEDIATE, m->bias);
        if (cut)
            numoe_pack_slices(&m->shape, &expert.source, 0, cut,
                              m->arena[0] + m->start[0][q] * m->shape.bytes, &report);
        if (cut < SLICES)
            numoe_pack_slices(&m->shape, &expert.source, cut, SLICES - cut,
                              m->arena[1] + m->start[1][q] * m->shape.bytes, &report);
        for (uint64_t i = 0; m->bias && i < width; i++) {
            const uint64_t from = i / 32 * 32 + numoe_lane_row(i % 32);
            m->down_bias[q * width + i] = from < HIDDEN ? expert.bias[2][from] : 0;
        }
        test_expert_free(&expert);
    }
    m->generation[layer]++;
}

static struct model *model_make(uint64_t layers, bool bias)
{
    struct model *m = calloc(1, sizeof *m);

    numoe_slice_shape_init(&m->shape, HIDDEN, bias);
    m->activation = (struct numoe_activation){.kind = NUMOE_SILU};
    m->layers = layers;
    m->bias = bias;
    m->down_bias = calloc(LAYERS * EXPERTS * 32 * m->shape.hidden_tiles, sizeof(float));
    for (uint64_t q = 0; q < layers * EXPERTS; q++) {
        m->start[0][q + 1] = m->start[0][q] + boundary(q);
        m->start[1][q + 1] = m->start[1][q] + SLICES - boundary(q);
    }
    for (int n = 0; n < NODES; n++) {
        m->arena_bytes[n] = m->start[n][layers * EXPERTS] * m->shape.bytes;
        m->arena[n] = aligned_bytes(m->arena_bytes[n]);
    }
    for (uint64_t l = 0; l < layers; l++)
        model_fill(m, l);
    return m;
}

static void model_free(struct model *m)
{
    for (int n = 0; n < NODES; n++)
        free(m->arena[n]);
    free(m->down_bias);
    free(m);
}

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    struct model *m = user;
    *address = m->arena[index];
    *bytes = m->arena_bytes[index];
}

static void region(void *user, uint64_t layer, uint32_t index, const void **address,
                   uint64_t *bytes)
{
    struct model *m = user;
    const uint64_t *start = m->start[index];
    *address = m->arena[index] + start[layer * EXPERTS] * m->shape.bytes;
    *bytes = (start[(layer + 1) * EXPERTS] - start[layer * EXPERTS]) * m->shape.bytes;
}

static void tables(void *user, uint64_t layer, const uint64_t *region_at, uint32_t *slice_at,
                   float *down_bias)
{
    struct model *m = user;
    const uint64_t width = 32 * m->shape.hidden_tiles, first = layer * EXPERTS;

    for (uint64_t e = 0; e < EXPERTS; e++)
        for (uint64_t s = 0; s < SLICES; s++) {
            const uint64_t q = first + e, n = s >= boundary(q);
            const uint64_t at = m->start[n][q] - m->start[n][first] + (n ? s - boundary(q) : s);
            slice_at[e * SLICES + s] = (uint32_t)(region_at[n] + at * m->shape.bytes / 64);
        }
    if (layer == ABSENT_LAYER)
        slice_at[ABSENT_EXPERT * SLICES] = NUMOE_GPU_ABSENT;
    if (down_bias)
        memcpy(down_bias, m->down_bias + first * width, EXPERTS * width * sizeof(float));
}

static uint32_t generation(void *user, uint64_t layer)
{
    return ((struct model *)user)->generation[layer];
}

static struct numoe_gpu_source source_of(struct model *m)
{
    return (struct numoe_gpu_source){.user = m,
                                     .shape = m->shape,
                                     .activation = m->activation,
                                     .layers = m->layers,
                                     .experts = EXPERTS,
                                     .slices = SLICES,
                                     .down_bias = m->bias,
                                     .region_count = NODES,
                                     .arena = arena,
                                     .region = region,
                                     .tables = tables,
                                     .generation = generation};
}

enum { TOKENS_MOST = 7, GAP = 3 };

struct batch {
    float x[TOKENS_MOST][HIDDEN], out[TOKENS_MOST][HIDDEN + GAP], before[TOKENS_MOST][HIDDEN + GAP];
    float routing[TOKENS_MOST][TOP_K];
    int32_t ids[TOKENS_MOST][TOP_K];
    struct numoe_gpu_call call;
};

static void batch_make(struct batch *b)
{
    for (int t = 0; t < TOKENS_MOST; t++) {
        for (int k = 0; k < HIDDEN; k++)
            b->x[t][k] = round_to_bf16(random_normal());
        for (int k = 0; k < HIDDEN + GAP; k++)
            b->out[t][k] = b->before[t][k] = random_normal();
        for (int j = 0; j < TOP_K; j++) {
            b->ids[t][j] = (int32_t)(random_u64() >> 20) % (EXPERTS + 1) - (random_u64() % 5 == 0);
            if (b->ids[t][j] == EXPERTS)
                b->ids[t][j] = -1;
            b->routing[t][j] = (float)random_unit();
        }
    }
    b->call = (struct numoe_gpu_call){.tokens = 1 + random_u64() % TOKENS_MOST,
                                      .top_k = TOP_K,
                                      .x = b->x,
                                      .x_type = NUMOE_F32,
                                      .x_stride = HIDDEN,
                                      .ids = &b->ids[0][0],
                                      .routing = &b->routing[0][0],
                                      .out = b->out,
                                      .out_type = NUMOE_F32,
                                      .out_stride = HIDDEN + GAP,
                                      .add = random_u64() % 2,
                                      .scale = 1.5f};
}

static bool same_bits(const void *a, const void *b, size_t bytes)
{
    return memcmp(a, b, bytes) == 0;
}

/* Outputs of tokens below done, and that the rest is as before. */
static bool batch_right(const struct model *m, uint64_t layer, const struct batch *b, uint64_t done)
{
    uint8_t slices[SLICES * 16384];
    const uint64_t width = 32 * m->shape.hidden_tiles, bytes = m->shape.bytes;

    for (uint64_t t = 0; t < TOKENS_MOST; t++) {
        double want[HIDDEN] = {0};
        if (!same_bits(&b->out[t][HIDDEN], &b->before[t][HIDDEN], GAP * sizeof(float)))
            return false;
        if (t >= done) {
            if (!same_bits(b->out[t], b->before[t], sizeof b->out[t]))
                return false;
            continue;
        }
        for (int j = 0; j < TOP_K; j++) {
            const int32_t e = b->ids[t][j];
            const uint64_t q = layer * EXPERTS + (uint64_t)(e < 0 ? 0 : e), cut = boundary(q);
            if (e < 0 || (layer == ABSENT_LAYER && e == ABSENT_EXPERT))
                continue;
            memcpy(slices, m->arena[0] + m->start[0][q] * bytes, cut * bytes);
            memcpy(slices + cut * bytes, m->arena[1] + m->start[1][q] * bytes,
                   (SLICES - cut) * bytes);
            numoe_reference_slices(&m->shape, &m->activation, slices, SLICES, b->x[t],
                                   (double)b->routing[t][j],
                                   m->bias ? m->down_bias + q * width : NULL, true, want);
        }
        for (int k = 0; k < HIDDEN; k++) {
            want[k] = want[k] * 1.5 + (b->call.add ? (double)b->before[t][k] : 0);
            if (!(fabs(want[k] - (double)b->out[t][k]) <= 1e-5 * (1 + fabs(want[k]))))
                return false;
        }
    }
    return true;
}

static struct numoe_gpu *wrap(struct fake *f)
{
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe_gpu *gpu;

    cr_assert_eq(gpu_wrap(&fake_ops, f, &p, NULL, &gpu), 0);
    return gpu;
}

static void expect_clean(struct fake *f)
{
    cr_expect_eq(f->wrong, 0, "%s", f->text);
    cr_expect_leq(f->range_count, f->lost, "%u ranges were left", f->range_count);
    cr_expect_leq(f->events, f->lost, "%u events were left", f->events);
    for (int i = 0; i < FAKE_STREAMS; i++)
        cr_expect_not(f->streams[i].used, "a stream was left");
}

/* Many layers in turn, with jumps, changed weights, every way of copying; all results are right. */
static void run_seed(uint64_t seed)
{
    struct model *m = model_make(LAYERS, seed % 2);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_gpu_source source = source_of(m);
    struct numoe_gpu_model_options options = {
        .stream = seed % 3,
        .slots = (uint32_t)(seed / 2 % 6),
        .chunk_bytes = seed % 4 ? 4096 * (1 + seed % 7) : 0,
        .ring_bytes = 16384 * (1 + seed % 3),
        .keep_free_bytes = 4 << 20,
        .no_pinning = seed % 5 == 1,
    };
    struct numoe_gpu_model *model;
    uint64_t layer = 0;

    if (seed % 5 == 2)
        f->pin_most = 20000 + seed * 97 % 60000;
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, &error), 0, "seed %d: %s",
                 (int)seed, error.message);
    for (int i = 0; i < 40; i++) {
        struct batch b;
        uint64_t done;

        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, &error), 0, "%s",
                     error.message);
        cr_assert_eq(done, b.call.tokens);
        cr_assert(batch_right(m, layer, &b, done), "seed %d, call %d, layer %d", (int)seed, i,
                  (int)layer);
        layer = random_u64() % 8 ? (layer + 1) % LAYERS : random_u64() % LAYERS;
        if (random_u64() % 6 == 0)
            model_fill(m, random_u64() % LAYERS);
    }
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

Test(gpu_pipeline, results_are_right_under_any_delay, .timeout = 120)
{
    for (uint64_t seed = 1; seed <= 60; seed++)
        run_seed(seed);
}

/* Layers queued one behind the other without ever waiting for a result, as numoe bench does: only
 * the events keep copies, tables and computations apart. */
static void run_ahead(uint64_t seed)
{
    enum { CALLS = 3 * LAYERS };
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.slots = 2 + seed % 3,
                                                    .ring_bytes = 16384,
                                                    .no_pinning = seed % 2,
                                                    .keep_free_bytes = 1 << 20};
    struct numoe_gpu_model *model;
    static struct batch b[CALLS];
    uint8_t *memory[CALLS], *host = NULL;
    const uint64_t part = 4096;

    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    cr_assert_eq(fake_host_allocate(f, CALLS * 4 * part, (void **)&host), 0);
    for (uint64_t i = 0; i < CALLS; i++) {
        const uint64_t layer = i % LAYERS;
        uint8_t *at = host + i * 4 * part;
        struct numoe_cuda_ffn ffn = {0};
        struct gpu_slot *slot;

        batch_make(&b[i]);
        b[i].call.add = false;
        cr_assert_eq(fake_allocate(f, 5 * part, (void **)&memory[i]), 0);
        memcpy(at, b[i].x, sizeof b[i].x);
        memcpy(at + part, b[i].ids, sizeof b[i].ids);
        memcpy(at + 2 * part, b[i].routing, sizeof b[i].routing);
        fake_copy_in(f, model->stream.compute, memory[i], at, 3 * part);
        cr_assert_eq(gpu_stream_acquire(&model->stream, layer, &slot, NULL), 0);
        gpu_model_ffn(model, slot, &ffn);
        ffn.tokens = (uint32_t)b[i].call.tokens;
        ffn.top_k = TOP_K;
        ffn.x = memory[i];
        ffn.x_type = NUMOE_F32;
        ffn.x_stride = HIDDEN;
        ffn.ids = memory[i] + part;
        ffn.routing = (const float *)(const void *)(memory[i] + 2 * part);
        ffn.out = memory[i] + 3 * part;
        ffn.out_type = NUMOE_F32;
        ffn.out_stride = HIDDEN + GAP;
        ffn.scale = 1.5f;
        ffn.workspace = memory[i] + 4 * part;
        fake_launch(f, model->stream.compute, &ffn);
        cr_assert_eq(gpu_stream_release(&model->stream, slot, NULL), 0);
        fake_copy_out(f, model->stream.compute, at + 3 * part, memory[i] + 3 * part, part);
        cr_assert_eq(gpu_stream_prefetch(&model->stream, (layer + 1) % LAYERS, layer, NULL), 0);
    }
    cr_assert_eq(fake_stream_sync(f, model->stream.compute), 0);
    for (uint64_t i = 0; i < CALLS; i++) {
        const float *out = (const float *)(const void *)(host + i * 4 * part + 3 * part);
        for (uint64_t t = 0; t < b[i].call.tokens; t++)
            memcpy(b[i].out[t], out + t * (HIDDEN + GAP), HIDDEN * sizeof *out);
        cr_expect(batch_right(m, i % LAYERS, &b[i], b[i].call.tokens), "seed %d, call %d",
                  (int)seed, (int)i);
        fake_release(f, memory[i]);
    }
    fake_host_release(f, host);
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

Test(gpu_pipeline, events_alone_keep_queued_layers_apart, .timeout = 120)
{
    for (uint64_t seed = 1; seed <= 60; seed++)
        run_ahead(seed);
}

/* Every call that can fail fails once, in each way. */
static void fail_everywhere(int code, bool ring)
{
    struct model *m = model_make(3, true);
    const struct numoe_gpu_source source = source_of(m);
    uint64_t at, reached = 0;

    for (at = 0;; at++) {
        const struct numoe_gpu_model_options options = {.slots = 2,
                                                        .chunk_bytes = 8192,
                                                        .ring_bytes = 32768,
                                                        .no_pinning = ring,
                                                        .keep_free_bytes = 4 << 20};
        struct fake *f = fake_make(at);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_gpu_model *model = NULL;
        bool failed = false;
        int rc;

        f->fail_at = at;
        f->fail_code = code;
        rc = numoe_gpu_model_create(gpu, &source, &options, &model, &error);
        if (rc) {
            cr_expect_null(model);
            cr_expect(error.message[0]);
            failed = true;
        }
        for (int i = 0; !rc && i < 5; i++) {
            struct batch b;
            uint64_t done;
            int again;

            batch_make(&b);
            again = numoe_gpu_forward(model, (uint64_t)i % 3, &b.call, &done, &error);
            cr_assert(batch_right(m, (uint64_t)i % 3, &b, done), "code %d at %d, call %d", code,
                      (int)at, i);
            if (again) {
                cr_expect_eq(again, gpu_errno_of(code), "%d at %d", again, (int)at);
                cr_expect_not(failed && !f->sticky, "two calls failed");
                failed = true;
            } else {
                cr_assert_eq(done, b.call.tokens);
            }
        }
        if (f->sticky) {
            /* dead: says so, answers the same ten times over, and touches nothing */
            cr_expect_eq(numoe_gpu_health(gpu, &error), -EIO);
            cr_expect(strstr(error.message, "CUDA error"), "%s", error.message);
            for (int i = 0; model && i < 10; i++) {
                struct batch b;
                uint64_t done;
                batch_make(&b);
                cr_expect_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), -EIO);
                cr_expect(done == 0 && batch_right(m, 0, &b, 0));
            }
        } else {
            cr_expect_eq(numoe_gpu_health(gpu, NULL), 0);
        }
        f->fail_at = UINT64_MAX;
        numoe_gpu_model_destroy(model);
        if (!f->sticky)
            expect_clean(f);
        cr_expect_eq(f->wrong, 0, "%s (code %d at %d)", f->text, code, (int)at);
        reached = f->calls;
        numoe_gpu_close(gpu);
        fake_free(f);
        if (at > reached)
            break;
    }
    cr_expect_gt(at, 100, "only %d steps", (int)at);
    model_free(m);
}

Test(gpu_pipeline, out_of_memory_at_every_step, .timeout = 120)
{
    fail_everywhere(2, false);
    fail_everywhere(2, true);
}

Test(gpu_pipeline, a_refused_call_at_every_step, .timeout = 120)
{
    fail_everywhere(1, false);
    fail_everywhere(1, true);
}

Test(gpu_pipeline, an_illegal_access_at_every_step, .timeout = 120)
{
    fail_everywhere(700, false);
    fail_everywhere(700, true);
}

Test(gpu_pipeline, a_launch_failure_at_every_step, .timeout = 120)
{
    fail_everywhere(719, false);
    fail_everywhere(719, true);
}

/* Passes over all layers: what is copied and what is found in place. */
static void count_pass(uint32_t slots, uint64_t passes, struct numoe_gpu_report *report)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.slots = slots, .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model;

    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    for (uint64_t i = 0; i < passes * LAYERS; i++) {
        struct batch b;
        uint64_t done;
        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
    }
    numoe_gpu_model_report(model, report);
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

Test(gpu_pipeline, more_slots_mean_fewer_copies)
{
    struct numoe_gpu_report report;

    for (uint32_t slots = 2; slots <= LAYERS; slots++) {
        struct numoe_gpu_report once, more;
        count_pass(slots, 4, &once);
        count_pass(slots, 8, &more);
        cr_expect_eq(more.slots, slots);
        /* k slots: k - 2 layers stay; all of them once each layer has one */
        const uint64_t a_pass = slots == LAYERS ? 0 : LAYERS - (slots - 2);
        cr_expect_leq(more.copies - once.copies, 4 * a_pass, "%u slots: %d copies in 4 passes",
                      slots, (int)(more.copies - once.copies));
    }
    /* each layer but the first was under way before it was asked for */
    count_pass(2, 4, &report);
    cr_expect_geq(report.hits, 4 * LAYERS - 1);
    count_pass(LAYERS, 4, &report);
    cr_expect(report.resident);
    cr_expect_eq(report.copies, LAYERS);
}

Test(gpu_pipeline, the_copy_stream_has_nothing_but_copies)
{
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(1);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.slots = 2, .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model;
    int pure = 0;

    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    for (uint64_t i = 0; i < 2 * LAYERS; i++) {
        struct batch b;
        uint64_t done;
        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
    }
    for (int i = 0; i < FAKE_STREAMS; i++)
        pure += f->streams[i].used && f->streams[i].copies_in && !f->streams[i].launches &&
                !f->streams[i].copies_out;
    cr_expect_eq(pure, 1);
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

/* Less memory: fewer slots; too little: a refusal with the numbers, and nothing is left. */
Test(gpu_pipeline, memory_decides_how_many_slots)
{
    struct model *m = model_make(LAYERS, true);
    const struct numoe_gpu_source source = source_of(m);
    uint32_t last = 0;
    bool refused = false;

    for (uint64_t kib = 64; kib < 2048; kib += 16) {
        struct fake *f = fake_make(4);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_error error = NUMOE_ERROR_INIT;
        const struct numoe_gpu_model_options options = {.keep_free_bytes = 48 << 10};
        struct numoe_gpu_report report;
        struct numoe_gpu_model *model;
        int rc;

        f->memory = kib << 10;
        rc = numoe_gpu_model_create(gpu, &source, &options, &model, &error);
        if (rc) {
            cr_expect_eq(rc, -ENOMEM);
            cr_expect_eq(last, 0);
            cr_expect(strstr(error.message, "MiB"), "%s", error.message);
            refused = true;
        } else {
            numoe_gpu_model_report(model, &report);
            cr_expect_geq(report.slots, 2);
            cr_expect_geq(report.slots, last);
            last = report.slots;
            for (uint64_t i = 0; i < 2 * LAYERS; i++) {
                struct batch b;
                uint64_t done;
                batch_make(&b);
                cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, &error), 0, "%s",
                             error.message);
                cr_assert(batch_right(m, i % LAYERS, &b, done));
            }
            numoe_gpu_model_destroy(model);
        }
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
    cr_expect(refused);
    cr_expect_eq(last, LAYERS);
    model_free(m);
}

/* Someone else took the memory meanwhile: a slot is given up for the workspace. */
Test(gpu_pipeline, a_slot_is_given_up_for_workspace)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    struct batch b;
    uint64_t done;

    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, &error), 0);
    f->memory = f->taken + 100;
    batch_make(&b);
    cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), 0, "%s", error.message);
    cr_expect(batch_right(m, 0, &b, done));
    numoe_gpu_model_report(model, &report);
    cr_expect_lt(report.slots, LAYERS);
    cr_expect_geq(report.slots, 2);
    for (uint64_t i = 0; i < 2 * LAYERS; i++) {
        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, &error), 0);
        cr_expect(batch_right(m, i % LAYERS, &b, done));
    }
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

static bool held(const struct gpu_stream *s, uint64_t layer)
{
    for (uint32_t i = 0; i < s->slot_count; i++)
        if (s->slots[i].layer == layer)
            return true;
    return false;
}

Test(gpu_pipeline, the_slot_given_up_is_the_one_needed_last)
{
    for (uint64_t next = 0; next < LAYERS; next++) {
        struct model *m = model_make(LAYERS, true);
        struct fake *f = fake_make(2);
        struct numoe_gpu *gpu = wrap(f);
        const struct numoe_gpu_source source = source_of(m);
        const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
        struct numoe_gpu_model *model;
        struct batch b;
        uint64_t done;

        cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
        for (uint64_t layer = 0; layer < LAYERS; layer++) {
            batch_make(&b);
            cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, NULL), 0);
        }
        for (uint32_t slots = LAYERS; slots > 2; slots--) {
            const uint64_t last = (next + slots - 1) % LAYERS;
            cr_assert_eq(gpu_stream_shrink(&model->stream, next, NULL), 0);
            cr_expect_eq(model->stream.slot_count, slots - 1);
            cr_expect_not(held(&model->stream, last), "layer %d", (int)last);
            for (uint64_t i = 0; i + 1 < slots; i++)
                cr_expect(held(&model->stream, (next + i) % LAYERS), "layer %d after %d", (int)i,
                          (int)next);
        }
        cr_expect_eq(gpu_stream_shrink(&model->stream, next, NULL), -ENOMEM);
        for (uint64_t i = 0; i < 2 * LAYERS; i++) {
            batch_make(&b);
            cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
            cr_expect(batch_right(m, i % LAYERS, &b, done));
        }
        numoe_gpu_model_destroy(model);
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
        model_free(m);
    }
}

/* Memory runs out while the next layer is being copied, and what is called for that fails too, at
 * every step: a slot that holds half a layer must not pass for a whole one. */
Test(gpu_pipeline, a_second_fault_while_a_slot_is_given_up, .timeout = 120)
{
    struct model *m = model_make(LAYERS, true);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {
        .slots = 4, .ring_bytes = 16384, .no_pinning = true, .keep_free_bytes = 1 << 20};

    for (uint64_t seed = 0; seed < 3; seed++)
        for (uint64_t second = 1; second < 60; second++) {
            struct fake *f = fake_make(seed);
            struct numoe_gpu *gpu = wrap(f);
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_gpu_model *model;
            uint64_t done, layer = 0, failures = 0;
            struct batch b;
            bool more;

            cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, &error), 0);
            for (; layer < 2; layer++) {
                batch_make(&b);
                b.call.tokens = 1;
                cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, &error), 0);
            }
            /* the slot filled last is half full, and memory is short for more tokens */
            gpu_stream_prefetch(&model->stream, 3, 2, NULL);
            gpu_stream_pump(&model->stream, false, &more, NULL);
            f->memory = f->taken + 100;
            f->fail_at = f->calls + second;
            f->fail_code = 1;
            for (int i = 0; i < 2 * LAYERS; i++, layer = (layer + 1) % LAYERS) {
                int rc;
                batch_make(&b);
                b.call.tokens = TOKENS_MOST;
                rc = numoe_gpu_forward(model, layer, &b.call, &done, &error);
                failures += rc != 0;
                cr_assert(batch_right(m, layer, &b, done), "seed %d, fault at %d, call %d",
                          (int)seed, (int)second, i);
                cr_expect(rc == 0 || rc == -EINVAL, "%d: %s", rc, error.message);
            }
            cr_expect_leq(failures, 1);
            numoe_gpu_model_destroy(model);
            expect_clean(f);
            numoe_gpu_close(gpu);
            fake_free(f);
        }
    model_free(m);
}

/* A call of many tokens; a pass of 256 of them fits once a slot is given up. */
Test(gpu_pipeline, a_slot_goes_before_passes_get_short, .timeout = 60)
{
    enum { MANY = 600, WORTH = 256 };
    static float x[MANY][HIDDEN], out[2][MANY][HIDDEN], routing[MANY];
    static int32_t ids[MANY];
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu_call call = {.tokens = WORTH,
                                  .top_k = 1,
                                  .x = x,
                                  .x_type = NUMOE_F32,
                                  .x_stride = HIDDEN,
                                  .ids = ids,
                                  .routing = routing,
                                  .out_type = NUMOE_F32,
                                  .out_stride = HIDDEN,
                                  .scale = 1.0f};
    uint64_t need = 0;

    for (int t = 0; t < MANY; t++) {
        for (int k = 0; k < HIDDEN; k++)
            x[t][k] = round_to_bf16(random_normal());
        ids[t] = t % EXPERTS;
        routing[t] = (float)random_unit();
    }
    for (int shortage = 0; shortage < 2; shortage++) {
        struct fake *f = fake_make(3);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_report report;
        struct numoe_gpu_model *model;
        uint64_t done, launches = 0;

        cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
        call.out = out[shortage];
        if (shortage) {
            f->memory = f->taken + need - 256;
        } else {
            cr_assert_eq(numoe_gpu_forward(model, 0, &call, &done, NULL), 0);
            numoe_gpu_model_report(model, &report);
            need = report.device_bytes - report.slots * report.slot_bytes;
        }
        call.tokens = MANY;
        for (int i = 0; i < FAKE_STREAMS; i++)
            f->streams[i].launches = 0;
        cr_assert_eq(numoe_gpu_forward(model, 1, &call, &done, NULL), 0);
        cr_expect_eq(done, MANY);
        for (int i = 0; i < FAKE_STREAMS; i++)
            launches += f->streams[i].launches;
        numoe_gpu_model_report(model, &report);
        cr_expect_eq(launches, shortage ? 3 : 1, "%d passes", (int)launches);
        cr_expect_eq(report.slots, shortage ? LAYERS - 1 : LAYERS);
        numoe_gpu_model_destroy(model);
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
    cr_expect(same_bits(out[0], out[1], sizeof out[0]));
    model_free(m);
}

Test(gpu_pipeline, a_refused_pin_is_reported_and_cleared)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {
        .chunk_bytes = 8192, .ring_bytes = 16384, .keep_free_bytes = 1 << 20};
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;

    f->pin_most = 30000;
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(report.pinned_bytes, 24576);
    cr_expect_gt(report.arena_bytes, report.pinned_bytes);
    cr_expect_gt(report.ring_bytes, 0);
    cr_expect(strstr(report.pin_refusal, "out of memory"), "%s", report.pin_refusal);
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

/* What the streamed measurement shows of every layer is right, and a layer that the streamed pass
 * gets wrong is seen although passes without copies follow. */
static uint64_t forged_layer;

static int forging_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    static uint64_t launches;
    struct numoe_cuda_ffn other = *ffn;

    if (launches++ % LAYERS == forged_layer)
        other.scale *= 2;
    return fake_launch(device, stream, &other);
}

static void bench_layers(bool forge)
{
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(3);
    struct gpu_ops ops = fake_ops;
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.stream = true, .keep_free_bytes = 4 << 20};
    static float sampled[LAYERS][2][HIDDEN];
    struct inputs { /* pinned, as every copy's host memory is here */
        uint16_t x[TOKENS_MOST][HIDDEN];
        int32_t ids[TOKENS_MOST][TOP_K];
        float routing[TOKENS_MOST][TOP_K];
    } *in = NULL;
    const uint64_t sample[2] = {0, TOKENS_MOST - 1};
    struct numoe_gpu_bench_stream result = {0};
    struct numoe_gpu_bench bench = {.tokens = TOKENS_MOST,
                                    .top_k = TOP_K,
                                    .routings = 1,
                                    .repeat = 3,
                                    .sample = sample,
                                    .samples = 2,
                                    .sampled = &sampled[0][0][0]};
    struct numoe_gpu_model *model;
    struct numoe_gpu *gpu;
    struct batch b;

    if (forge)
        ops.launch = forging_launch;
    forged_layer = 1;
    batch_make(&b);
    b.call.add = false;
    b.ids[0][0] = b.ids[TOKENS_MOST - 1][0] = 0; /* there in every layer */
    cr_assert_eq(fake_host_allocate(f, sizeof *in, (void **)&in), 0);
    memcpy(in->ids, b.ids, sizeof in->ids);
    bench.x = &in->x[0][0];
    bench.ids = &in->ids[0][0];
    bench.routing = &in->routing[0][0];
    for (int t = 0; t < TOKENS_MOST; t++) {
        for (int k = 0; k < HIDDEN; k++)
            in->x[t][k] = bf16_bits(b.x[t][k]);
        for (int j = 0; j < TOP_K; j++)
            in->routing[t][j] = 1.5f * b.routing[t][j]; /* the scale that batch_right expects */
    }
    cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    cr_assert_eq(numoe_gpu_bench_layers(model, &bench, &result, NULL), 0);
    cr_expect_gt(result.bytes, 0);
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < 2; i++) {
            struct batch one = b;
            memcpy(one.x[0], b.x[sample[i]], sizeof one.x[0]);
            memcpy(one.ids[0], b.ids[sample[i]], sizeof one.ids[0]);
            memcpy(one.routing[0], b.routing[sample[i]], sizeof one.routing[0]);
            memcpy(one.out[0], sampled[layer][i], sizeof sampled[layer][i]);
            cr_expect_eq(batch_right(m, layer, &one, 1), !forge || layer != forged_layer,
                         "layer %d, sample %d", (int)layer, i);
        }
    numoe_gpu_model_destroy(model);
    fake_host_release(f, in);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

Test(gpu_pipeline, the_streamed_measurement_shows_every_layer)
{
    bench_layers(false);
    bench_layers(true);
}

/* Case F4: staging lies on the device's own node, and its pages have been looked at. */
Test(gpu_pipeline, the_ring_is_on_the_node_of_the_device)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {
        .ring_bytes = 1 << 20, .no_pinning = true, .keep_free_bytes = 1 << 20};
    struct numoe_gpu_properties p = {.name = "Fake", .locality_known = true};
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    struct numoe_machine *machine;
    struct numoe_gpu *gpu;

    cr_assert_eq(numoe_machine_load(NULL, &machine, NULL), 0);
    p.os_node = machine->nodes[0].os_index;
    cr_assert_eq(gpu_wrap(&fake_ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(report.ring_node, p.os_node);
    cr_expect_gt(f->pinned, 0, "the ring is the driver's own memory");
    cr_expect_eq(report.ring_placed, report.ring_checked);
    if (report.ring_checked == 0)
        cr_log_info("the kernel does not say where pages lie");
    for (uint64_t layer = 0; layer < LAYERS; layer++) {
        struct batch b;
        uint64_t done;
        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, NULL), 0);
        cr_expect(batch_right(m, layer, &b, done));
    }
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    numoe_machine_free(machine);
    model_free(m);
}

/* bf16 in and out, with and without add: the fake computes as a device does. */
Test(gpu_pipeline, bf16_outputs)
{
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
    struct numoe_gpu_model *model;

    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    for (uint64_t i = 0; i < 4 * LAYERS; i++) {
        static uint16_t x[TOKENS_MOST][HIDDEN], out[TOKENS_MOST][HIDDEN + GAP];
        struct numoe_gpu_call call;
        struct batch b;
        uint64_t done;

        batch_make(&b);
        for (int t = 0; t < TOKENS_MOST; t++) {
            for (int k = 0; k < HIDDEN; k++)
                x[t][k] = bf16_bits(b.x[t][k]);
            for (int k = 0; k < HIDDEN + GAP; k++) {
                b.before[t][k] = b.out[t][k] = round_to_bf16(b.before[t][k]);
                out[t][k] = bf16_bits(b.out[t][k]);
            }
        }
        call = b.call;
        call.x = x;
        call.x_type = NUMOE_BF16;
        call.out = out;
        call.out_type = NUMOE_BF16;
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
        cr_assert(batch_right(m, i % LAYERS, &b, done));
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &call, &done, NULL), 0);
        for (uint64_t t = 0; t < TOKENS_MOST; t++)
            for (uint64_t k = 0; k < HIDDEN + GAP; k++)
                cr_assert_eq(out[t][k], bf16_bits(b.out[t][k]), "token %d, output %d", (int)t,
                             (int)k);
    }
    numoe_gpu_model_destroy(model);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

/* The self-test takes the whole way, so on a device that computes right it agrees. */
Test(gpu_pipeline, the_self_test_passes_and_sees_a_wrong_device)
{
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    double rel_l2 = -1;

    cr_assert_eq(gpu_self_test(gpu, &rel_l2, &error), 0, "%s", error.message);
    cr_expect_lt(rel_l2, 1e-6);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
}

static int crooked_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    struct numoe_cuda_ffn other = *ffn;
    other.scale *= 1.01f;
    return fake_launch(device, stream, &other);
}

Test(gpu_pipeline, the_self_test_sees_one_percent)
{
    struct gpu_ops ops = fake_ops;
    struct fake *f = fake_make(3);
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe_gpu *gpu;
    double rel_l2 = -1;

    ops.launch = crooked_launch;
    cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(gpu_self_test(gpu, &rel_l2, NULL), 0);
    cr_expect_gt(rel_l2, 5e-3);
    numoe_gpu_close(gpu);
    fake_free(f);
}
