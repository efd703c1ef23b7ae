/*
 * Calls that end early, that are as odd as calls may be, or that find no memory: nothing is lost
 * that was already done, and what comes after is right.
 */
#include "base/sanitized.h"
#include "queued_batch.h"
#include "rows_call.h"

/* The allocation of this process that fails, counted from now on; 0: none. */
static long fails_in;

#if !SANITIZED
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *p, size_t size);

void *malloc(size_t size)
{
    return fails_in && --fails_in == 0 ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails_in && --fails_in == 0 ? NULL : __libc_calloc(count, size);
}

void *realloc(void *p, size_t size)
{
    return fails_in && --fails_in == 0 ? NULL : __libc_realloc(p, size);
}
#endif

static void expect_right(struct numoe_gpu_model *model, const struct model *m, uint64_t layer)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct batch b;
    uint64_t done;

    batch_make(&b);
    cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, &error), 0, "%s", error.message);
    cr_assert(batch_right(m, layer, &b, done), "layer %d", (int)layer);
}

/* Every cell is free once nothing is held or on its way. */
static void expect_all_free(struct numoe_gpu_model *model)
{
    struct gpu_cache *cache = &model->stream.cache;

    gpu_stream_forget(&model->stream);
    cr_expect_eq(cache->free_count, cache->cells, "%d cells of %d are lost",
                 (int)(cache->cells - cache->free_count), (int)cache->cells);
    for (uint64_t l = 0; l < cache->layers; l++)
        cr_expect_eq(cache->held[l], 0);
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* Given up between start and finish, in every state that queued work may be in: out is as it was,
 * nothing is on its way any more, and what follows is right. */
Test(gpu_odd_calls, a_call_is_cancelled_or_its_model_destroyed_in_mid_flight, .timeout = 60)
{
    struct model *m = model_make(LAYERS, true);

    for (uint64_t seed = 0; seed < 80; seed++) {
        const struct numoe_gpu_model_options options = {.cache_bytes = 1 + seed % 3 * 30000,
                                                        .window_bytes = 30000,
                                                        .piece_bytes = 1,
                                                        .ring_bytes = 16384,
                                                        .no_pinning = seed % 4 == 3,
                                                        .keep_free_bytes = 4 << 20};
        struct fake *f = fake_make(seed);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_model *model = model_on(gpu, m, &options);
        struct numoe_error error = NUMOE_ERROR_INIT;
        uint64_t tokens = 0, done;

        many_stages(model, seed);
        for (uint64_t i = 0; i < 12; i++) {
            static struct batch b;

            batch_make(&b);
            cr_expect_eq(numoe_gpu_queue(model, &b.call, &error), -EINVAL);
            cr_expect(strstr(error.message, "none was begun"), "%s", error.message);
            cr_assert_eq(
                numoe_gpu_begin(model, i % LAYERS, &b.call, i % b.call.tokens, &tokens, NULL), 0);
            cr_expect_eq(numoe_gpu_start(model, 0, &b.call, 0, &tokens, NULL), -EBUSY);
            cr_expect_eq(numoe_gpu_finish(model, &b.call, &done, &error), -EINVAL);
            cr_expect(strstr(error.message, "none was started"), "%s", error.message);
            if ((i + seed) % 3) { /* what is given up is begun, or queued */
                cr_assert_eq(numoe_gpu_queue(model, &b.call, NULL), 0);
                cr_expect_eq(numoe_gpu_queue(model, &b.call, NULL), -EINVAL);
            }
            cr_expect_eq(numoe_gpu_start(model, 0, &b.call, 0, &tokens, NULL), -EBUSY);
            if (i == 11)
                break; /* and destroyed */
            numoe_gpu_cancel(model);
            for (int s = 0; s < FAKE_STREAMS; s++)
                cr_expect(!f->streams[s].used || &f->streams[s] == model->stream.copies ||
                              &f->streams[s] == model->stream.fills ||
                              f->streams[s].head == f->streams[s].tail,
                          "seed %d: work on memory that is free to be used again", (int)seed);
            cr_expect(batch_right(m, 0, &b, 0), "a cancelled call wrote");
            cr_expect_eq(numoe_gpu_finish(model, &b.call, &done, &error), -EINVAL);
            cr_expect(strstr(error.message, "none was started"), "%s", error.message);
            numoe_gpu_cancel(model); /* nothing to cancel */
            expect_right(model, m, random_u64() % LAYERS);
        }
        close_clean(model, gpu, f);
    }
    model_free(m);
}

/* What an engine has queued on a stream of its own still reads experts. */
Test(gpu_odd_calls, destroying_waits_for_the_callers_stream)
{
    struct model *m = model_make(LAYERS, true);

    for (int stays = 0; stays < 2; stays++) {
        const struct numoe_gpu_model_options options = {.stream = !stays,
                                                        .keep_free_bytes = 4 << 20};
        struct fake *f = fake_make(5); /* nothing happens unless it is waited for */
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_model *model = model_on(gpu, m, &options);
        static struct queued q;
        struct numoe_gpu_device_call call;
        void *stream = NULL;

        cr_assert_eq(fake_stream_create(f, &stream), 0);
        batch_make(&q.batch);
        q.batch.call.add = false;
        queued_make(&q, f);
        queued_send(&q, f, stream);
        call = queued_call(&q);
        for (int again = 0; again <= stays; again++)
            cr_assert_eq(numoe_gpu_enqueue(model, 0, &call, NULL, stream, NULL), 0);
        queued_fetch(&q, f, stream);
        numoe_gpu_model_destroy(model);
        cr_assert_eq(fake_stream_sync(f, stream), 0);
        cr_expect_eq(f->wrong, 0, "%s", f->text);
        cr_expect(queued_right(m, 0, &q));
        queued_free(&q, f);
        fake_stream_destroy(f, stream);
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
    model_free(m);
}

/* A prefetch that turns out not to be wanted takes no cell with it, opened or not. */
Test(gpu_odd_calls, dropped_prefetches_give_their_cells_back)
{
    struct model *m = model_make(LAYERS, false);

    for (uint64_t seed = 0; seed < 20; seed++) {
        const struct numoe_gpu_model_options options = {
            .piece_bytes = 1, .ring_bytes = 16384, .no_pinning = true, .keep_free_bytes = 4 << 20};
        struct fake *f = fake_make(seed);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_model *model = model_on(gpu, m, &options);

        for (uint64_t i = 0; i < 60; i++) {
            cr_assert_eq(numoe_gpu_prefetch(model, random_u64() % LAYERS, NULL, 0, NULL), 0);
            if (i % 7 == 0)
                expect_right(model, m, random_u64() % LAYERS);
        }
        for (uint64_t layer = 0; layer < LAYERS; layer++)
            cr_assert_eq(gpu_stream_visit(&model->stream, layer, model->stream.everything, NULL),
                         0);
        for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) /* there is a cell for each */
            cr_expect_eq(gpu_cache_holds(&model->stream.cache, q / EXPERTS, q % EXPERTS),
                         present(NULL, q / EXPERTS, q % EXPERTS), "expert %d", (int)q);
        expect_all_free(model);
        close_clean(model, gpu, f);
    }
    model_free(m);
}

/* ---- no memory ------------------------------------------------------------------------------- */

static int zeros_refused; /* copies of zeros that are refused; of so many bytes */
static uint64_t zeros_bytes;

static int refuse_zeros(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    if (zeros_refused && bytes == zeros_bytes && ((const uint8_t *)from)[0] == 0 &&
        !memcmp(from, (const uint8_t *)from + 1, bytes - 1)) {
        zeros_refused--;
        return fake_refuse(device, 1);
    }
    return fake_copy_in(device, stream, to, from, bytes);
}

static uint64_t zeros_seen;

/* Slices that an expert has not here are zeros. */
static void look_for_zeros(struct fake *f, const struct numoe_cuda_ffn *c)
{
    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint32_t *at = c->slice_at + e * SLICES;

        for (uint64_t k = boundary(c->x_stride * EXPERTS + e); k < SLICES; k++) {
            const uint8_t *slice = c->weights + at[k] * 64ull;

            if (at[0] == NUMOE_CUDA_ABSENT)
                continue;
            if (!fake_is(f, slice, zeros_bytes, true) || slice[0] ||
                memcmp(slice, slice + 1, zeros_bytes - 1))
                fake_wrong(f, "a slice that is not there is not zero");
            zeros_seen++;
        }
    }
}

static bool has_slices(void *user, uint64_t layer, uint64_t expert)
{
    (void)user;
    return boundary(layer * EXPERTS + expert) != 0;
}

/* Experts that give way to workspace, and then the zeros behind those that have fewer slices here
 * do not come: that memory is not taken for whole by the calls that follow. */
Test(gpu_odd_calls, a_slice_of_zeros_that_did_not_come_is_copied_again)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct gpu_ops ops = fake_ops;
    struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    struct gpu_stream *s;

    ops.copy_in = refuse_zeros;
    gpu->ops = &ops;
    f->instead = look_for_zeros;
    zeros_bytes = m->shape.bytes;
    source.region_count = 1; /* of two nodes: some experts have one slice there, some none */
    source.present = has_slices;
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    s = &model->stream;
    cr_assert(s->uneven);
    for (int refused = 0; refused < 3; refused++) {
        zeros_refused = refused;
        if (refused) {
            cr_expect_eq(gpu_stream_shrink(s, 2 * s->cell_bytes, &error), -EINVAL);
            cr_expect(strstr(error.message, "slice of zeros"), "%s", error.message);
            numoe_gpu_model_report(model, &report);
            cr_expect(report.cells == 0 && report.window_bytes == 0 && !report.resident);
            cr_expect_eq(report.device_bytes, s->fixed_bytes);
        }
        if (refused == 2)
            cr_expect_eq(gpu_stream_visit(s, 0, s->everything, NULL), -EINVAL);
        for (uint64_t layer = 0; layer < 2 * LAYERS; layer++) {
            struct numoe_cuda_ffn c = {.x_stride = layer % LAYERS};
            struct gpu_part part;

            cr_assert_eq(gpu_stream_begin(s, c.x_stride, s->everything, NULL, 1, NULL), 0);
            for (;;) {
                cr_assert_eq(gpu_stream_next(s, s->compute, &part, NULL), 0);
                if (!part.slice_at)
                    break;
                c.weights = part.weights;
                c.slice_at = part.slice_at;
                cr_assert_eq(fake_launch(f, s->compute, &c), 0);
                cr_assert_eq(gpu_stream_done(s, s->compute, &part, NULL), 0);
            }
            gpu_stream_end(s, s->compute);
        }
        cr_assert_eq(fake_stream_sync(f, s->compute), 0);
        cr_expect_eq(f->wrong, 0, "%s", f->text);
        cr_expect_gt(s->cache.cells, 2, "and there is as much as there was to be");
    }
    cr_expect_gt(zeros_seen, 0);
    close_clean(model, gpu, f);
    model_free(m);
}

/* The fake device has memory all the same. */
static int event_create(void *device, void **event)
{
    const long kept = fails_in;
    int e;

    fails_in = 0;
    e = fake_event_create(device, event);
    fails_in = kept;
    return e;
}

/* The host has no memory, at each of the allocations in turn, when a model is made and when experts
 * give way: an error that says so, and nothing is left, or all goes on. */
Test(gpu_odd_calls, the_host_is_out_of_memory_at_every_step, .timeout = 60)
{
    struct model *m = model_make(LAYERS, true);
    const struct numoe_gpu_source source = source_of(m);
    uint64_t refusals = 0, shrunk = 0;
    struct gpu_ops ops = fake_ops;

    ops.event_create = ops.timer_create = event_create;
#if SANITIZED
    cr_skip_test("a sanitizer has taken the allocator's place");
#endif
    for (long at = 1;; at++) {
        const struct numoe_gpu_model_options options = {.chunk_bytes = 4096 * 4,
                                                        .ring_bytes = 16384,
                                                        .no_pinning = at % 2,
                                                        .keep_free_bytes = 4 << 20};
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct fake *f = fake_make((uint64_t)at);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_model *model = NULL;
        bool reached;
        int rc;

        gpu->ops = &ops;
        fails_in = (at + 1) / 2;
        rc = numoe_gpu_model_create(gpu, &source, &options, &model, &error);
        reached = fails_in == 0;
        fails_in = 0;
        if (rc) {
            cr_expect_null(model);
            cr_expect(reached && rc == -ENOMEM, "%d", rc);
            cr_expect(strstr(error.message, "out of memory"), "%s", error.message);
            refusals++;
        } else {
            for (uint64_t layer = 0; layer < LAYERS; layer++)
                expect_right(model, m, layer);
            numoe_gpu_model_destroy(model);
        }
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
        if (!reached && at % 2 == 0)
            break;
    }
    cr_expect_gt(refusals, 20);
    for (long at = 1; at < 8; at++) {
        const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct fake *f = fake_make((uint64_t)at);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_model *model;

        cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
        for (uint64_t layer = 0; layer < LAYERS; layer++)
            expect_right(model, m, layer);
        fails_in = at;
        if (gpu_stream_shrink(&model->stream, 10 * model->stream.cell_bytes, &error)) {
            cr_expect(strstr(error.message, "out of memory"), "%s", error.message);
            shrunk++;
        }
        fails_in = 0;
        for (uint64_t layer = 0; layer < 2 * LAYERS; layer++)
            expect_right(model, m, layer % LAYERS);
        expect_all_free(model);
        close_clean(model, gpu, f);
    }
    cr_expect_gt(shrunk, 0);
    model_free(m);
}

static uint64_t host_most, host_refused;

static int host_allocate_most(void *device, uint64_t bytes, void **address)
{
    if (bytes <= host_most)
        return fake_host_allocate(device, bytes, address);
    host_refused++;
    return fake_refuse(device, 2);
}

/* No pinned memory for the staging of so many tokens: fewer go at a time, and no expert on the
 * device gives way to that; none for one token is an error, and costs no expert either. */
Test(gpu_odd_calls, experts_do_not_give_way_to_staging_on_the_host, .timeout = 60)
{
    enum { MANY = 100, TOKEN = 2 * HIDDEN * 4 + 8 + 4 * 256 };
    static float x[MANY][HIDDEN], out[MANY][HIDDEN], alone[MANY][HIDDEN], routing[MANY];
    static int32_t ids[MANY];
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu_call call = rows_call(1, HIDDEN, 1, x[0], ids, routing, out[0]);
    struct fake *f = fake_make(3);
    struct gpu_ops ops = fake_ops;
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_report before, after;
    struct numoe_gpu_model *model;
    uint64_t done;

    for (int t = 0; t < MANY; t++) {
        for (int k = 0; k < HIDDEN; k++)
            x[t][k] = round_to_bf16(random_normal());
        ids[t] = t % EXPERTS;
        routing[t] = (float)random_unit();
    }
    call.ahead = NUMOE_GPU_NO_AHEAD;
    ops.host_allocate = host_allocate_most;
    gpu->ops = &ops;
    host_most = UINT64_MAX;
    model = model_on(gpu, m, &options);
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        cr_assert_eq(gpu_stream_visit(&model->stream, layer, model->stream.everything, NULL), 0);
    numoe_gpu_model_report(model, &before);
    host_most = 2 * TOKEN; /* four stages of less than a token */
    cr_expect_eq(numoe_gpu_forward(model, 0, &call, &done, &error), -ENOMEM);
    cr_expect(strstr(error.message, "pinned staging"), "%s", error.message);
    host_most = 60 * TOKEN;
    host_refused = 0;
    call.tokens = MANY;
    for (uint64_t layer = 0; layer < LAYERS; layer++) {
        cr_assert_eq(numoe_gpu_forward(model, layer, &call, &done, &error), 0, "%s", error.message);
        cr_expect_eq(done, MANY);
    }
    cr_expect_gt(host_refused, 0);
    numoe_gpu_model_report(model, &after);
    cr_expect(after.resident);
    cr_expect_eq(after.cells, before.cells);
    cr_expect_eq(after.copied_experts, before.copied_experts, "experts were copied again");
    host_most = UINT64_MAX;
    call.out = alone;
    cr_assert_eq(numoe_gpu_forward(model, LAYERS - 1, &call, &done, NULL), 0);
    cr_expect(same_bits(out, alone, sizeof out));
    close_clean(model, gpu, f);
    model_free(m);
}

/* ---- sizes ----------------------------------------------------------------------------------- */

/* One expert of one layer, no tokens, ids repeated in a token and all tokens to one expert; staging
 * buffers shorter than a slice, and registering that ends in the middle of an arena. */
Test(gpu_odd_calls, one_expert_no_tokens_and_repeated_ids, .timeout = 60)
{
    struct model *m = model_make(LAYERS, true);

    for (uint64_t seed = 0; seed < 24; seed++) {
        const bool one = seed % 2;
        const struct numoe_gpu_model_options options = {.stream = seed % 3 == 0,
                                                        .cache_bytes = 1,
                                                        .window_bytes = 1,
                                                        .piece_bytes = 1,
                                                        .chunk_bytes = 1000,
                                                        .ring_bytes = 1,
                                                        .no_pinning = seed % 4 == 1,
                                                        .keep_free_bytes = 4 << 20};
        struct numoe_gpu_source source = source_of(m);
        struct fake *f = fake_make(seed);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_gpu_call none = {.top_k = TOP_K, .x_type = NUMOE_F32, .out_type = NUMOE_F32};
        struct numoe_gpu_model *model;
        uint64_t done = 7, tokens = 7;

        if (seed % 4 == 3)
            f->pin_most = 4097;
        source.layers = one ? 1 : LAYERS;
        source.experts = one ? 1 : EXPERTS;
        cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, &error), 0, "%s",
                     error.message);
        for (uint64_t i = 0; i < 12; i++) {
            const uint64_t layer = one ? 0 : i % LAYERS;
            static struct batch b;

            /* before anything, and in between */
            cr_assert_eq(numoe_gpu_forward(model, layer, &none, &done, &error), 0);
            cr_expect_eq(done, 0);
            cr_expect_eq(numoe_gpu_start(model, layer, &none, 0, &tokens, &error), -EINVAL);
            cr_expect(strstr(error.message, "none from 0 on"), "%s", error.message);
            batch_make(&b);
            for (int t = 0; t < TOKENS_MOST; t++)
                for (int j = 0; j < TOP_K; j++)
                    b.ids[t][j] = one ? 0 : i % 3 ? (int)i % EXPERTS : t % EXPERTS;
            cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, &error), 0, "%s",
                         error.message);
            cr_assert(batch_right(m, layer, &b, done), "seed %d, call %d", (int)seed, (int)i);
        }
        close_clean(model, gpu, f);
    }
    model_free(m);
}

/* With add a token without a computed entry keeps its bits: those of a negative zero, too. */
Test(gpu_odd_calls, a_token_that_is_skipped_keeps_its_bits)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    struct batch b;
    uint64_t done, tokens;

    for (int joins = 0; joins < 2; joins++) {
        batch_make(&b);
        b.call.tokens = 3;
        b.call.add = !joins;
        b.call.join = joins;
        b.ids[0][0] = b.ids[2][0] = 0;
        b.ids[1][0] = b.ids[1][1] = -1;
        for (int k = 0; k < HIDDEN; k++)
            b.out[1][k] = b.before[1][k] = -0.0f;
        cr_assert_eq(numoe_gpu_start(model, 0, &b.call, 0, &tokens, NULL), 0);
        cr_assert_eq(numoe_gpu_finish(model, &b.call, &done, NULL), 0);
        cr_expect(same_bits(b.out[1], b.before[1], sizeof b.out[1]), "joins: %d", joins);
        b.call.add = true;
        cr_expect(batch_right(m, 0, &b, done));
    }
    close_clean(model, gpu, f);
    model_free(m);
}

/* Launches in their order: of which part, and how many tokens. */
static struct {
    const uint32_t *part;
    uint64_t tokens;
} launched[256];
static uint32_t launches;

static void note_launch(struct fake *f, const struct numoe_cuda_ffn *c)
{
    (void)f;
    if (launches < 256) {
        launched[launches].part = c->slice_at;
        launched[launches].tokens = c->tokens;
    }
    launches++;
    if (c->out_type == NUMOE_F32) /* each launch adds 1 to each row: once a part */
        for (uint64_t t = 0; t < c->tokens; t++) {
            float *row = (float *)c->out + t * c->out_stride;
            row[0] = (c->add ? row[0] : 0) + 1;
            for (uint64_t k = 1; k < c->out_stride; k++)
                row[k] = 0;
        }
}

/* More tokens than a pass takes: of 65536 at a time a layer's experts cross the link once, each
 * piece is computed for all chunks of 8192 before the next piece, and no token is left out. */
Test(gpu_odd_calls, experts_cross_the_link_once_for_65536_tokens, .timeout = 120)
{
    enum { PASS = 65536, CHUNK = 8192, MANY = PASS + 3 };
    struct model *m = model_make(2, false);
    const struct numoe_gpu_model_options options = {
        .stream = true, .piece_bytes = 1, .keep_free_bytes = 200 << 20};
    float *x = calloc((size_t)MANY * HIDDEN, sizeof *x), *out = calloc(MANY, HIDDEN * sizeof *out);
    float *routing = calloc(MANY, sizeof *routing);
    int32_t *ids = calloc(MANY, sizeof *ids);
    struct numoe_gpu_call call = rows_call(MANY, HIDDEN, 1, x, ids, routing, out);
    struct fake *f = fake_make(4);
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    uint64_t done, parts = 0;
    uint32_t i = 0;

    call.ahead = NUMOE_GPU_NO_AHEAD;
    f->memory = (uint64_t)400 << 20;
    f->instead = note_launch;
    for (int t = 0; t < MANY; t++)
        ids[t] = t < PASS ? t % EXPERTS : EXPERTS - 1;
    launches = 0;
    model = model_on(gpu, m, &options);
    model->stream.window.bytes = 8 * model->stream.cell_bytes < model->stream.window.bytes
                                     ? 8 * model->stream.cell_bytes
                                     : model->stream.window.bytes;
    cr_assert_eq(numoe_gpu_forward(model, 0, &call, &done, NULL), 0);
    cr_expect_eq(done, MANY);
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(report.copied_experts, EXPERTS + 1, "once for 65536 tokens, and for 3 more");
    for (; i < launches && launched[i].tokens == CHUNK; i += PASS / CHUNK, parts++)
        for (uint32_t c = 0; c < PASS / CHUNK; c++) {
            cr_expect_eq(launched[i + c].part, launched[i].part, "launch %d", (int)(i + c));
            cr_expect_eq(launched[i + c].tokens, CHUNK);
        }
    for (uint64_t t = 0; t < PASS; t++)
        cr_assert_eq((uint64_t)out[t * HIDDEN], parts, "token %d", (int)t);
    for (uint32_t c = i; c < launches; c++)
        cr_expect_eq(launched[c].tokens, 3);
    for (uint64_t t = PASS; t < MANY; t++)
        cr_assert_eq((uint64_t)out[t * HIDDEN], launches - i, "token %d", (int)t);
    cr_expect(parts > 0 && i < launches);
    close_clean(model, gpu, f);
    model_free(m);
    free(x);
    free(out);
    free(routing);
    free(ids);
}

/* ---- heat ------------------------------------------------------------------------------------ */

/* An expert that a call asks much for takes a cell in that very call; and what others compute of a
 * call counts as much as what the device does. */
Test(gpu_odd_calls, heat_is_of_the_call_at_hand_and_of_whoever_computes)
{
    struct model *m = model_make(1, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.cache_bytes = SLICES * m->shape.bytes,
                                                    .keep_free_bytes = 4 << 20};
    const uint32_t asked[EXPERTS] = {[1] = 1, [2] = 9};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    struct gpu_cache *cache;
    struct batch b;
    uint64_t done;

    cache = &model->stream.cache;
    for (int e = 0; e < 2; e++) {
        batch_make(&b);
        b.call.tokens = e ? 5 : 1;
        for (int t = 0; t < TOKENS_MOST; t++)
            b.ids[t][0] = b.ids[t][1] = e;
        cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, NULL), 0);
        cr_assert(batch_right(m, 0, &b, done));
        cr_expect(gpu_cache_holds(cache, 0, (uint32_t)e), "expert %d", e);
    }
    b.call.asked = asked;
    for (int i = 0; i < 4; i++)
        cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, NULL), 0);
    cr_expect_gt(cache->heat[2], 2 * cache->heat[1]);
    close_clean(model, gpu, f);
    model_free(m);
}

/* ---- together -------------------------------------------------------------------------------- */

/* Two models on one device share its memory; calls of one are under way while the other's are. */
Test(gpu_odd_calls, two_models_on_one_device, .timeout = 60)
{
    struct model *m[2] = {model_make(LAYERS, true), model_make(3, true)};

    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct fake *f = fake_make(seed);
        struct numoe_gpu *gpu = wrap(f);
        struct numoe_gpu_model *models[2];
        struct numoe_error error = NUMOE_ERROR_INIT;

        for (int i = 0; i < 2; i++) {
            const struct numoe_gpu_source source = source_of(m[i]);
            const struct numoe_gpu_model_options options = {.cache_bytes = seed % 3 * 20000 + 1,
                                                            .keep_free_bytes = 4 << 20};
            cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &models[i], &error), 0,
                         "%s", error.message);
        }
        for (uint64_t call = 0; call < 20; call++) {
            static struct batch b[2];
            uint64_t layer[2], tokens[2], done;

            for (int i = 0; i < 2; i++) {
                batch_make(&b[i]);
                layer[i] = random_u64() % m[i]->layers;
                cr_assert_eq(numoe_gpu_start(models[i], layer[i], &b[i].call, 0, &tokens[i], NULL),
                             0);
            }
            for (int k = 0; k < 2; k++) {
                const uint64_t i = (call + (uint64_t)k) % 2;
                cr_assert_eq(numoe_gpu_finish(models[i], &b[i].call, &done, NULL), 0);
                cr_expect_eq(done, tokens[i]);
                cr_expect(batch_right(m[i], layer[i], &b[i], done));
            }
        }
        numoe_gpu_model_destroy(models[seed % 2]); /* the other goes on */
        expect_right(models[!(seed % 2)], m[!(seed % 2)], 1);
        close_clean(models[!(seed % 2)], gpu, f);
    }
    model_free(m[0]);
    model_free(m[1]);
}
