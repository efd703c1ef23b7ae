/*
 * The copy pipeline and calls on a fake device: delays, refusals, and a failure at every step.
 */
#include <time.h>

#include "queued_batch.h"
#include "rows_call.h"

/* Many layers in turn, with jumps, changed weights, every way of copying; all results are right. */
static void run_seed(uint64_t seed)
{
    struct model *m = model_make(LAYERS, seed % 2);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_gpu_source source = source_of(m);
    struct numoe_gpu_model_options options = {
        .stream = seed % 3 == 0,
        .cache_bytes = seed / 2 % 6 * 30000,
        .window_bytes = seed / 5 % 4 * 40000,
        .piece_bytes = seed % 7 ? 1 + seed % 3 * 4000 : 0,
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
    many_stages(model, seed);
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
    close_clean(model, gpu, f);
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
    const struct numoe_gpu_model_options options = {.window_bytes = 20000 + seed % 3 * 30000,
                                                    .cache_bytes = 1 + seed % 4 * 20000,
                                                    .piece_bytes = 1,
                                                    .ring_bytes = 16384,
                                                    .no_pinning = seed % 2,
                                                    .keep_free_bytes = 1 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    static struct queued b[CALLS];

    for (uint64_t i = 0; i < CALLS; i++) {
        const uint64_t layer = i % LAYERS;
        struct gpu_stream *stream = &model->stream;
        struct numoe_cuda_ffn ffn = {0};
        uint32_t need[EXPERTS] = {0};
        struct numoe_gpu_device_call call;
        struct gpu_part gone;
        int parts = 0;

        batch_make(&b[i].batch);
        b[i].batch.call.add = false;
        queued_make(&b[i], f);
        queued_send(&b[i], f, stream->compute);
        call = queued_call(&b[i]);
        for (uint64_t t = 0; t < call.tokens; t++)
            for (int j = 0; j < TOP_K; j++)
                if (b[i].batch.ids[t][j] >= 0)
                    need[b[i].batch.ids[t][j]]++;
        cr_assert_eq(gpu_stream_begin(stream, layer, need, NULL, call.tokens, NULL), 0);
        for (;;) {
            cr_assert_eq(gpu_stream_next(stream, stream->compute, &gone, NULL), 0);
            if (!gone.slice_at)
                break;
            gpu_model_ffn(model, &gone, &ffn);
            ffn.tokens = (uint32_t)call.tokens;
            ffn.top_k = TOP_K;
            ffn.x = call.x;
            ffn.x_type = call.x_type;
            ffn.x_stride = HIDDEN;
            ffn.ids = call.ids;
            ffn.routing = call.routing;
            ffn.out = call.out;
            ffn.out_type = NUMOE_F32;
            ffn.out_stride = HIDDEN + GAP;
            ffn.scale = 1.5f;
            ffn.workspace = call.workspace;
            ffn.add = parts++ > 0;
            fake_launch(f, stream->compute, &ffn);
            cr_assert_eq(gpu_stream_done(stream, stream->compute, &gone, NULL), 0);
        }
        cr_assert_gt(parts, 0);
        gpu_stream_end(stream, stream->compute);
        queued_fetch(&b[i], f, stream->compute);
        cr_assert_eq(gpu_stream_prefetch(stream, (layer + 1) % LAYERS, NULL, NULL), 0);
    }
    cr_assert_eq(fake_stream_sync(f, model->stream.compute), 0);
    for (uint64_t i = 0; i < CALLS; i++) {
        cr_expect(queued_right(m, i % LAYERS, &b[i]), "seed %d, call %d", (int)seed, (int)i);
        queued_free(&b[i], f);
    }
    close_clean(model, gpu, f);
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
        const struct numoe_gpu_model_options options = {.cache_bytes = at % 3 * 20000 + 1,
                                                        .window_bytes = 40000,
                                                        .piece_bytes = 1,
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
        if (!rc)
            many_stages(model, at);
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

/* Passes over all layers, every expert of each hit: what is copied and what is found in place. */
static void count_pass(uint64_t cells, uint64_t passes, struct numoe_gpu_report *report)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.stream = cells == 0,
                                                    .cache_bytes = cells * SLICES * m->shape.bytes,
                                                    .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);

    for (uint64_t i = 0; i < passes * LAYERS; i++) {
        struct batch b;
        uint64_t done;
        batch_make(&b);
        b.call.tokens = 4;
        for (int t = 0; t < 4; t++)
            b.ids[t][0] = t;
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
        cr_assert(batch_right(m, i % LAYERS, &b, done));
    }
    numoe_gpu_model_report(model, report);
    close_clean(model, gpu, f);
    model_free(m);
}

Test(gpu_pipeline, more_cells_mean_fewer_copies)
{
    enum { THERE = LAYERS * EXPERTS - 1 }; /* one is absent */

    for (uint32_t cells = 0; cells <= LAYERS * EXPERTS; cells += LAYERS) {
        struct numoe_gpu_report once, more;
        count_pass(cells, 4, &once);
        count_pass(cells, 8, &more);
        cr_expect_eq(more.cells, cells);
        cr_expect_eq(more.experts, LAYERS * EXPERTS);
        cr_expect_eq(more.resident, cells == LAYERS * EXPERTS);
        /* what a pass has no room for, and the next layer that is under way at the end */
        cr_expect_eq(more.copied_experts - once.copied_experts,
                     4 * (THERE - (cells < LAYERS * EXPERTS ? cells : THERE)), "%u cells: %d",
                     cells, (int)(more.copied_experts - once.copied_experts));
    }
}

/* Experts that are not hit are not copied. */
Test(gpu_pipeline, only_what_is_hit_is_copied)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.stream = true, .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    struct numoe_gpu_report report;
    struct batch b;
    uint64_t done;

    for (uint64_t i = 0; i < 2 * LAYERS; i++) {
        batch_make(&b);
        b.call.tokens = 1;
        b.ids[0][0] = b.ids[0][1] = 3;
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
        cr_assert(batch_right(m, i % LAYERS, &b, done));
    }
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(report.copied_experts, 2 * LAYERS);
    cr_expect_eq(report.copied_bytes, 2 * LAYERS * report.expert_bytes);
    /* a prefetch of the right expert is taken over, one of another layer is dropped */
    cr_assert_eq(numoe_gpu_prefetch(model, 0, (const int32_t[]){3}, 1, NULL), 0);
    batch_make(&b);
    b.call.tokens = 1;
    b.ids[0][0] = b.ids[0][1] = 3;
    cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, NULL), 0);
    cr_assert(batch_right(m, 0, &b, done));
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(report.copied_experts, 2 * LAYERS + 1);
    cr_assert_eq(numoe_gpu_prefetch(model, 1, NULL, 0, NULL), 0);
    batch_make(&b);
    b.call.tokens = 1;
    b.ids[0][0] = 3;
    b.ids[0][1] = -1;
    cr_assert_eq(numoe_gpu_forward(model, 4, &b.call, &done, NULL), 0);
    cr_assert(batch_right(m, 4, &b, done));
    cr_expect_eq(numoe_gpu_prefetch(model, LAYERS, NULL, 0, NULL), -EINVAL);
    close_clean(model, gpu, f);
    model_free(m);
}

static const struct gpu_stream *filled;
static uint64_t queued_copies;

static void count_queued(const void *to)
{
    const uint8_t *at = to;

    queued_copies += filled && at >= filled->pool && at < filled->pool + filled->pool_bytes;
}

static int count_one(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    count_queued(to);
    return fake_copy_in(device, stream, to, from, bytes);
}

static int count_many(void *device, void *stream, void *const *to, const void *const *from,
                      const uint64_t *bytes, uint32_t count)
{
    count_queued(to[0]);
    return fake_copy_in_many(device, stream, to, from, bytes, count);
}

/* However many nodes and cells it comes from and goes to. */
Test(gpu_pipeline, all_copies_of_a_piece_are_queued_at_once)
{
    struct gpu_ops counting = fake_ops;

    counting.copy_in = count_one;
    counting.copy_in_many = count_many;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct model *m = model_make(LAYERS, false);
        struct fake *f = fake_make(seed);
        struct numoe_gpu *gpu = wrap(f);
        const struct numoe_gpu_model_options options = {
            .stream = seed % 2,
            .cache_bytes = seed % 2 ? 0 : LAYERS * SLICES * m->shape.bytes,
            .keep_free_bytes = 4 << 20};
        struct numoe_gpu_model *model;
        struct numoe_gpu_report report;

        gpu->ops = &counting;
        model = model_on(gpu, m, &options);
        filled = &model->stream;
        queued_copies = 0;
        for (uint64_t i = 0; i < 3 * LAYERS; i++) {
            struct batch b;
            uint64_t done;

            batch_make(&b);
            b.call.ahead = NUMOE_GPU_NO_AHEAD;
            cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
            cr_assert(batch_right(m, i % LAYERS, &b, done));
        }
        numoe_gpu_model_report(model, &report);
        cr_expect_gt(report.batches, 0);
        cr_expect_lt(report.batches, report.pieces);
        cr_expect_eq(queued_copies, report.pieces, "%d copies, %d pieces", (int)queued_copies,
                     (int)report.pieces);
        filled = NULL;
        close_clean(model, gpu, f);
        model_free(m);
    }
}

static const struct numoe_gpu_model *told; /* whose copies are written down */
static char order[64];

static void write_down(const void *address, char what)
{
    const uint8_t *at = address, *pool = told ? told->stream.pool : NULL;
    const size_t end = strlen(order);

    if (!told || end + 1 == sizeof order)
        return;
    if (at >= pool && at < pool + told->stream.pool_bytes)
        order[end] = 'w';
    else if (at >= told->device && at < told->device + told->device_bytes)
        order[end] = what;
}

static int tell_one(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    write_down(to, 'i');
    return fake_copy_in(device, stream, to, from, bytes);
}

static int tell_many(void *device, void *stream, void *const *to, const void *const *from,
                     const uint64_t *bytes, uint32_t count)
{
    write_down(to[0], 'i');
    return fake_copy_in_many(device, stream, to, from, bytes, count);
}

static int tell_out(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    write_down(from, 'o');
    return fake_copy_out(device, stream, to, from, bytes);
}

/* Few inputs go before all experts, which they would wait for; many go behind one piece, which the
 * link has to do while they are staged. Many outputs are copied while others are added. */
Test(gpu_pipeline, many_inputs_follow_one_piece_and_outputs_come_in_stages)
{
    struct gpu_ops telling = fake_ops;

    telling.copy_in = tell_one;
    telling.copy_in_many = tell_many;
    telling.copy_out = tell_out;
    for (int many = 0; many < 2; many++) {
        struct model *m = model_make(LAYERS, false);
        struct fake *f = fake_make(3);
        struct numoe_gpu *gpu = wrap(f);
        const struct numoe_gpu_model_options options = {
            .stream = true, .piece_bytes = 1, .keep_free_bytes = 4 << 20};
        struct numoe_gpu_model *model;
        struct batch b;
        uint64_t done;

        gpu->ops = &telling;
        model = model_on(gpu, m, &options);
        if (many)
            many_stages(model, 7);
        batch_make(&b);
        b.call.tokens = TOKENS_MOST;
        b.call.add = false;
        b.call.ahead = NUMOE_GPU_NO_AHEAD;
        for (int t = 0; t < TOKENS_MOST; t++)
            b.ids[t][0] = t % EXPERTS;
        memset(order, 0, sizeof order);
        told = model;
        cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, NULL), 0);
        told = NULL;
        cr_assert(batch_right(m, 0, &b, done));
        cr_expect_str_eq(order, many ? "wiiiiiiiiiiiiwwoooo" : "iiiwwwo", "%s", order);
        close_clean(model, gpu, f);
        model_free(m);
    }
}

Test(gpu_pipeline, the_copy_stream_has_nothing_but_copies)
{
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(1);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.stream = true, .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    int pure = 0;

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
    close_clean(model, gpu, f);
    model_free(m);
}

/* Less memory: fewer experts stay; too little: a refusal with the numbers, and nothing is left. */
Test(gpu_pipeline, memory_decides_how_many_experts_stay)
{
    struct model *m = model_make(LAYERS, true);
    const struct numoe_gpu_source source = source_of(m);
    uint64_t last = 0;
    bool refused = false, served = false;

    for (uint64_t kib = 32; kib < 512; kib += 4) {
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
            cr_expect_not(served);
            cr_expect(strstr(error.message, "MiB"), "%s", error.message);
            refused = true;
        } else {
            numoe_gpu_model_report(model, &report);
            served = true;
            cr_expect_geq(report.cells, last);
            last = report.cells;
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
    cr_expect_eq(last, LAYERS * EXPERTS);
    model_free(m);
}

/* Someone else took the memory meanwhile: experts give way to the workspace. */
Test(gpu_pipeline, experts_give_way_to_workspace)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = wrap(f);
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    struct batch b;
    uint64_t done;

    model = model_on(gpu, m, &options);
    f->memory = f->taken + 100;
    batch_make(&b);
    cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), 0, "%s", error.message);
    cr_expect(batch_right(m, 0, &b, done));
    numoe_gpu_model_report(model, &report);
    cr_expect_lt(report.cells, LAYERS * EXPERTS);
    cr_expect_geq(report.cells, 1);
    for (uint64_t i = 0; i < 2 * LAYERS; i++) {
        batch_make(&b);
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, &error), 0);
        cr_expect(batch_right(m, i % LAYERS, &b, done));
    }
    close_clean(model, gpu, f);
    model_free(m);
}

/* Memory runs out while the next layer is being copied, and what is called for that fails too, at
 * every step: half a piece must not pass for a whole one, and without any memory for experts calls
 * fail until there is some. */
Test(gpu_pipeline, a_second_fault_while_experts_give_way, .timeout = 120)
{
    struct model *m = model_make(LAYERS, true);
    const struct numoe_gpu_model_options options = {
        .cache_bytes = 100000, .ring_bytes = 16384, .no_pinning = true, .keep_free_bytes = 1 << 20};

    for (uint64_t seed = 0; seed < 3; seed++)
        for (uint64_t second = 1; second < 60; second++) {
            struct fake *f = fake_make(seed);
            struct numoe_gpu *gpu = wrap(f);
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_gpu_model *model;
            uint64_t done, layer = 0, failures = 0;
            struct batch b;
            bool more;

            model = model_on(gpu, m, &options);
            for (; layer < 2; layer++) {
                batch_make(&b);
                b.call.tokens = 1;
                cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, &error), 0);
            }
            /* a piece is half full, and memory is short for more tokens */
            numoe_gpu_prefetch(model, 3, NULL, 0, NULL);
            gpu_stream_pump(&model->stream, &more, NULL);
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
            close_clean(model, gpu, f);
        }
    model_free(m);
}

/* A call of many tokens; a pass of 256 of them fits once experts give way. */
Test(gpu_pipeline, experts_give_way_before_passes_get_short, .timeout = 60)
{
    enum { MANY = 600, WORTH = 256 };
    static float x[MANY][HIDDEN], out[2][MANY][HIDDEN], routing[MANY];
    static int32_t ids[MANY];
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu_call call = rows_call(WORTH, HIDDEN, 1, x[0], ids, routing, NULL);
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
        struct numoe_gpu_model *model = model_on(gpu, m, &options);
        uint64_t done, passes = 0;

        call.out = out[shortage];
        if (shortage) {
            f->memory = f->taken + need - 256;
        } else {
            cr_assert_eq(numoe_gpu_forward(model, 0, &call, &done, NULL), 0);
            need = model->device_bytes;
        }
        call.tokens = MANY;
        for (int i = 0; i < FAKE_STREAMS; i++)
            f->streams[i].copies_out = 0;
        cr_assert_eq(numoe_gpu_forward(model, 1, &call, &done, NULL), 0);
        cr_expect_eq(done, MANY);
        for (int i = 0; i < FAKE_STREAMS; i++)
            passes += f->streams[i].copies_out;
        numoe_gpu_model_report(model, &report);
        cr_expect(shortage ? passes == 2 || passes == 3 : passes == 1, "%d passes", (int)passes);
        cr_expect(shortage ? report.cells < LAYERS * EXPERTS : report.resident);
        close_clean(model, gpu, f);
    }
    cr_expect(same_bits(out[0], out[1], sizeof out[0]));
    model_free(m);
}

/* Case B4: a box with 600 GiB in one arena. The driver refuses a registration of 512 GiB or more,
 * and everything from some call on. */
#define BOX ((uint64_t)1 << 40)
static uint64_t pin_calls, pin_largest, pin_from;

static int driver_pin(void *device, void *address, uint64_t bytes)
{
    struct fake *f = device;
    const int e = fake_call(f);

    if ((uintptr_t)address >= 2 * BOX)
        return e ? e : fake_pin(device, address, bytes);
    pin_calls++;
    pin_largest = bytes > pin_largest ? bytes : pin_largest;
    return e ? e : bytes >= (uint64_t)1 << 39 || pin_calls > pin_from ? fake_refuse(f, 2) : 0;
}

static int driver_unpin(void *device, void *address)
{
    return (uintptr_t)address >= 2 * BOX ? fake_unpin(device, address) : fake_call(device);
}

static void arena_of_box(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    (void)user;
    *address = index ? NULL : (void *)(uintptr_t)BOX;
    *bytes = index ? 0 : (uint64_t)600 << 30;
}

Test(gpu_pipeline, half_a_terabyte_is_pinned_in_chunks_and_the_first_refusal_ends_it)
{
    const uint64_t gib = (uint64_t)1 << 30;
    const struct {
        uint64_t chunk, from, calls, pinned;
    } cases[] = {{0, UINT64_MAX, 600, 600},
                 {700 * gib, UINT64_MAX, 600, 600},
                 {100 * gib, UINT64_MAX, 6, 600},
                 {0, 0, 1, 0},
                 {0, 37, 38, 37},
                 {511 * gib, 1, 2, 511}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model *m = model_make(1, false);
        struct fake *f = fake_make(2);
        struct numoe_gpu_source source = source_of(m);
        const struct numoe_gpu_model_options options = {
            .chunk_bytes = cases[i].chunk, .ring_bytes = 65536, .keep_free_bytes = 1 << 20};
        struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
        struct gpu_ops ops = fake_ops;
        struct numoe_gpu_report report;
        struct numoe_gpu_model *model;
        struct numoe_gpu *gpu;

        ops.pin = driver_pin;
        ops.unpin = driver_unpin;
        pin_calls = pin_largest = 0;
        pin_from = cases[i].from;
        source.arena = arena_of_box;
        cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
        cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
        numoe_gpu_model_report(model, &report);
        cr_expect_eq(pin_calls, cases[i].calls, "case %zu: %d calls", i, (int)pin_calls);
        cr_expect_lt(pin_largest, 512 * gib);
        cr_expect_eq(report.pinned_bytes, cases[i].pinned * gib);
        cr_expect_eq(report.arena_bytes, 600 * gib);
        cr_expect_eq(*report.pin_refusal != 0, cases[i].pinned != 600);
        if (*report.pin_refusal) {
            cr_expect(strstr(report.pin_refusal, "host memory"), "%s", report.pin_refusal);
            cr_expect_gt(report.ring_bytes, 0);
        }
        close_clean(model, gpu, f);
        model_free(m);
    }
}

Test(gpu_pipeline, pinning_is_tried_on_the_devices_node)
{
    struct fake *f = fake_make(2);
    struct numoe_gpu_properties p = {.name = "Fake", .locality_known = true};
    struct numoe_gpu_pinning pinning;
    struct numoe_machine *machine;
    struct numoe_gpu *gpu;

    cr_assert_eq(numoe_machine_load(NULL, &machine, NULL), 0);
    p.os_node = machine->nodes[0].os_index;
    cr_assert_eq(gpu_wrap(&fake_ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(numoe_gpu_try_pinning(gpu, 1 << 20, &pinning, NULL), 0);
    cr_expect(pinning.in_place && pinning.os_node == p.os_node && !*pinning.reason);
    cr_expect_geq(pinning.tried_bytes, 1 << 20);
    f->pin_most = 4096;
    cr_assert_eq(numoe_gpu_try_pinning(gpu, 1 << 20, &pinning, NULL), 0);
    cr_expect_not(pinning.in_place);
    cr_expect(strstr(pinning.reason, "host memory"), "%s", pinning.reason);
    f->fail_at = f->calls + 1;
    f->fail_code = 700;
    cr_expect_eq(numoe_gpu_try_pinning(gpu, 1 << 20, &pinning, NULL), -EIO);
    cr_expect_eq(f->wrong, 0, "%s", f->text);
    numoe_gpu_close(gpu);
    fake_free(f);
    numoe_machine_free(machine);
}

static uint64_t pins_refused;

static int count_refusals(void *device, void *address, uint64_t bytes)
{
    const int e = fake_pin(device, address, bytes);

    pins_refused += e != 0;
    return e;
}

Test(gpu_pipeline, a_refused_pin_is_reported_and_cleared)
{
    struct gpu_ops ops = fake_ops;
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {
        .chunk_bytes = 8192, .ring_bytes = 16384, .keep_free_bytes = 1 << 20};
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;

    ops.pin = count_refusals;
    gpu->ops = &ops;
    pins_refused = 0;
    f->pin_most = 30000;
    model = model_on(gpu, m, &options);
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(report.pinned_bytes, 24576);
    cr_expect_eq(pins_refused, 2, "once in the first arena, and of the ring");
    cr_expect_gt(report.arena_bytes, report.pinned_bytes);
    cr_expect_gt(report.ring_bytes, 0);
    cr_expect(strstr(report.pin_refusal, "out of memory"), "%s", report.pin_refusal);
    close_clean(model, gpu, f);
    model_free(m);
}

/* What the streamed measurement shows of every layer is right, and a layer that the streamed pass
 * gets wrong is seen although passes without copies follow. */
static uint64_t forged_layer;

static int forging_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    static uint64_t layers; /* begun: the first part of each sets its outputs */
    struct numoe_cuda_ffn other = *ffn;

    layers += !ffn->add;
    if ((layers - 1) % LAYERS == forged_layer)
        other.scale *= 2;
    return fake_launch(device, stream, &other);
}

static void bench_layers(bool forge)
{
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(3);
    struct gpu_ops ops = fake_ops;
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
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
    model = model_on(gpu, m, &options);
    cr_assert_eq(numoe_gpu_bench_layers(model, &bench, &result, NULL), 0);
    cr_expect_gt(result.bytes, 0);
    cr_expect(result.link_gbs > 0 && result.link_fraction > 0 && result.copy_link_fraction > 0);
    cr_expect(result.host_cpu > 0 && result.host_cpu < 64, "%g cores", result.host_cpu);
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

enum { PHASES = 64 };

/* Launches between the measurements of the link, of which each streamed pass has one before it. */
static uint32_t phase_launches[PHASES], phases;

static int phase_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    phase_launches[phases]++;
    return fake_launch(device, stream, ffn);
}

static int phase_elapsed(void *device, void *begin, void *end, double *ms)
{
    if (phase_launches[phases])
        phases++;
    return fake_elapsed(device, begin, end, ms);
}

static void slow_compute(struct fake *f, const struct numoe_cuda_ffn *ffn)
{
    const struct timespec ten_ms = {.tv_nsec = 10000000};

    (void)f;
    (void)ffn;
    nanosleep(&ten_ms, NULL);
}

/* Copies alone are measured without computing, computing without copies, and each pass copies all,
 * though there is room for the experts to stay. */
Test(gpu_pipeline, the_streamed_measurement_keeps_copies_and_computing_apart, .timeout = 60)
{
    enum { REPEAT = 3 };
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct gpu_ops ops = fake_ops;
    const struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const uint64_t expert = SLICES * m->shape.bytes;
    const struct numoe_gpu_model_options options = {.window_bytes = 2 * EXPERTS * expert,
                                                    .cache_bytes = 2 * EXPERTS * expert,
                                                    .keep_free_bytes = 4 << 20};
    struct inputs {
        uint16_t x[TOKENS_MOST][HIDDEN];
        int32_t ids[TOKENS_MOST][TOP_K];
        float routing[TOKENS_MOST][TOP_K];
    } *in = NULL;
    struct numoe_gpu_bench_stream result = {0};
    struct numoe_gpu_bench bench = {
        .tokens = TOKENS_MOST, .top_k = TOP_K, .routings = 1, .repeat = REPEAT};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model;
    struct numoe_gpu_report report;
    struct numoe_gpu *gpu;

    ops.launch = phase_launch;
    ops.elapsed = phase_elapsed;
    f->instead = slow_compute;
    cr_assert_eq(fake_host_allocate(f, sizeof *in, (void **)&in), 0);
    memset(in, 0, sizeof *in);
    bench.x = &in->x[0][0];
    bench.ids = &in->ids[0][0];
    bench.routing = &in->routing[0][0];
    cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
    model = model_on(gpu, m, &options);
    phases = 0;
    memset(phase_launches, 0, sizeof phase_launches);
    cr_assert_eq(numoe_gpu_bench_layers(model, &bench, &result, &error), 0, "%s", error.message);
    numoe_gpu_model_report(model, &report);
    cr_expect_geq(report.cells, EXPERTS, "there is room");
    cr_expect_eq(result.bytes, m->arena_bytes[0] + m->arena_bytes[1] - SLICES * m->shape.bytes,
                 "all but the expert that is absent");
    /* of the warm-up, then of both together, and of the computing alone that follows copies */
    cr_assert_eq(phases, 2 * REPEAT);
    for (uint32_t i = 0; i <= phases; i++)
        if (i && i % 2 == 0)
            cr_expect_eq(phase_launches[i], LAYERS, "%u: %u", i, phase_launches[i]);
        else
            cr_expect_geq(phase_launches[i], LAYERS);
    cr_expect_lt(result.copy_ms, LAYERS * 10, "copies alone took %g ms", result.copy_ms);
    cr_expect_geq(result.compute_ms, LAYERS * 10);
    cr_expect_geq(result.total_ms, LAYERS * 10);
    numoe_gpu_model_destroy(model);
    fake_host_release(f, in);
    expect_clean(f);
    numoe_gpu_close(gpu);
    fake_free(f);
    model_free(m);
}

static uint64_t filled_bytes;
static uint32_t filled_node;

static void fill(void *user, void *to, const void *from, uint64_t bytes, uint32_t os_node)
{
    (void)user;
    memcpy(to, from, bytes);
    filled_bytes += bytes;
    filled_node = os_node;
}

/* Case F4: staging lies on the device's own node, and its pages have been looked at. */
Test(gpu_pipeline, the_ring_is_on_the_node_of_the_device)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {
        .ring_bytes = 1 << 20, .no_pinning = true, .keep_free_bytes = 1 << 20};
    struct numoe_gpu_properties p = {.name = "Fake", .locality_known = true};
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    struct numoe_machine *machine;
    struct numoe_gpu *gpu;

    cr_assert_eq(numoe_machine_load(NULL, &machine, NULL), 0);
    p.os_node = machine->nodes[0].os_index;
    source.fill = fill;
    filled_bytes = 0;
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
    numoe_gpu_model_report(model, &report);
    cr_expect_eq(filled_bytes, report.copied_bytes);
    cr_expect_eq(filled_node, p.os_node);
    close_clean(model, gpu, f);
    numoe_machine_free(machine);
    model_free(m);
}

/* bf16 in and out, with and without add: the fake computes as a device does. */
Test(gpu_pipeline, bf16_outputs)
{
    struct model *m = model_make(LAYERS, true);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);

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
    close_clean(model, gpu, f);
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

static void read_biases(struct fake *f, const struct numoe_cuda_ffn *c)
{
    if (!fake_is(f, c->down_bias, EXPERTS * 128ull * c->shape.hidden_tiles, true))
        fake_wrong(f, "biases outside of device memory");
}

/* Biases of a layer whose weights have changed: the host writes them anew when those before have
 * been copied, and they are copied to where the engine has read those before. */
Test(gpu_pipeline, biases_change_behind_who_reads_them, .timeout = 60)
{
    struct model *m = model_make(1, true);
    struct fake *f = fake_make(5); /* nothing happens unless it is waited for */
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu *gpu = wrap(f);
    const uint32_t need[EXPERTS] = {1};
    struct numoe_gpu_model *model;
    struct gpu_stream *s;
    void *engine = NULL;

    f->instead = read_biases;
    cr_assert_eq(fake_stream_create(f, &engine), 0);
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    s = &model->stream;
    for (int call = 0; call < 3; call++) {
        struct numoe_cuda_ffn c = {.shape = m->shape};
        struct gpu_part part;

        cr_assert_eq(gpu_stream_begin(s, 0, need, NULL, 1, NULL), 0);
        cr_assert_eq(gpu_stream_next(s, engine, &part, NULL), 0);
        c.down_bias = part.down_bias;
        cr_assert_eq(fake_launch(f, engine, &c), 0);
        cr_assert_eq(gpu_stream_done(s, engine, &part, NULL), 0);
        gpu_stream_end(s, engine);
        for (uint64_t i = 0; i < EXPERTS * 32ull * m->shape.hidden_tiles; i++)
            m->down_bias[i] += 1;
        m->generation[0]++;
    }
    cr_assert_eq(fake_stream_sync(f, engine), 0);
    fake_stream_destroy(f, engine);
    close_clean(model, gpu, f);
    model_free(m);
}
