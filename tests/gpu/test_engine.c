/* Calls on streams of the caller's, one behind the other without waiting for any. */
#include "queued_batch.h"

enum { CALLS = 4 * LAYERS };

static const void *watched; /* a stream of the caller's, while a call is queued on it */
static uint64_t waits;

static int sync_watched(void *device, void *stream)
{
    waits += watched && stream == watched;
    return fake_stream_sync(device, stream);
}

static void run_seed(uint64_t seed)
{
    struct model *m = model_make(LAYERS, seed % 2);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    struct gpu_ops ops = fake_ops;
    const struct numoe_gpu_model_options options = {.window_bytes = 20000 + seed % 3 * 30000,
                                                    .stream = seed % 5 == 0,
                                                    .cache_bytes = 1 + seed % 4 * 20000,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model;
    struct numoe_error error = NUMOE_ERROR_INIT;
    static struct queued b[CALLS];
    void *streams[2];

    ops.stream_sync = sync_watched;
    gpu->ops = &ops;
    model = model_on(gpu, m, &options);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(fake_stream_create(f, &streams[i]), 0);
    for (uint64_t i = 0; i < CALLS; i++) {
        void *stream = streams[seed % 3 ? random_u64() % 2 : 0];
        struct numoe_gpu_device_call call;

        batch_make(&b[i].batch);
        queued_make(&b[i], f);
        queued_send(&b[i], f, stream);
        call = queued_call(&b[i]);
        watched = stream;
        cr_assert_eq(numoe_gpu_enqueue(model, i % LAYERS, &call,
                                       random_u64() % 3 ? &b[i].batch.ids[0][0] : NULL, stream,
                                       &error),
                     0, "%s", error.message);
        watched = NULL;
        queued_fetch(&b[i], f, stream);
        if (random_u64() % 2)
            cr_assert_eq(numoe_gpu_prefetch(model, (i + 1) % LAYERS, NULL, 0, NULL), 0);
        call.workspace_bytes = 1;
        cr_expect_eq(numoe_gpu_enqueue(model, 0, &call, NULL, stream, &error), -EINVAL);
    }
    cr_expect_eq(waits, 0, "the host has waited for the caller's stream");
    for (int i = 0; i < 2; i++)
        cr_assert_eq(fake_stream_sync(f, streams[i]), 0);
    for (uint64_t i = 0; i < CALLS; i++) {
        cr_expect(queued_right(m, i % LAYERS, &b[i]), "seed %d, call %d", (int)seed, (int)i);
        queued_free(&b[i], f);
    }
    for (int i = 0; i < 2; i++)
        fake_stream_destroy(f, streams[i]);
    close_clean(model, gpu, f);
    model_free(m);
}

Test(gpu_engine, calls_on_the_callers_streams, .timeout = 120)
{
    for (uint64_t seed = 1; seed <= 60; seed++)
        run_seed(seed);
}

/* Every expert that is asked for comes in one piece, also where an engine holds several pieces; and
 * when nothing more fits, that is said and passes. */
Test(gpu_engine, pieces_for_kernels_of_others)
{
    struct model *m = model_make(LAYERS, true);

    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct fake *f = fake_make(seed);
        struct numoe_gpu *gpu = wrap(f);
        const struct numoe_gpu_model_options options = {.window_bytes = 14000,
                                                        .stream = seed % 2,
                                                        .piece_bytes = 1,
                                                        .keep_free_bytes = 4 << 20};
        struct numoe_gpu_model *model = model_on(gpu, m, &options);
        struct numoe_gpu_piece held[EXPERTS + 1], piece;
        uint32_t pieces = 0, given = 0, full = 0;
        void *stream = NULL;

        cr_assert_eq(fake_stream_create(f, &stream), 0);
        cr_expect_eq(numoe_gpu_piece_next(model, stream, &piece, NULL), -EINVAL);
        cr_assert_eq(numoe_gpu_pieces_begin(model, 1, NULL, 0, 0, NULL), 0);
        /* what is refused changes nothing of what was begun */
        cr_expect_eq(numoe_gpu_pieces_begin(model, 1, NULL, 0, 0, NULL), -EBUSY);
        cr_expect_eq(numoe_gpu_hold(model, 2, (const int32_t[]){0}, 1, NULL), -EBUSY);
        {
            static struct batch b;
            uint64_t done;

            batch_make(&b);
            cr_expect_eq(numoe_gpu_forward(model, 2, &b.call, &done, NULL), -EBUSY);
        }
        for (;;) {
            const int rc = numoe_gpu_piece_next(model, stream, &piece, NULL);
            if (rc == -EAGAIN) {
                cr_assert_gt(pieces, 0);
                full++;
                cr_assert_eq(numoe_gpu_piece_done(model, stream, &held[0], NULL), 0);
                memmove(held, held + 1, --pieces * sizeof *held);
                continue;
            }
            cr_assert_eq(rc, 0);
            if (!piece.slice_at)
                break;
            cr_assert_eq(fake_stream_sync(f, stream), 0);
            for (uint64_t e = 0; e < EXPERTS; e++)
                given += piece.slice_at[e * SLICES] != NUMOE_GPU_ABSENT;
            held[pieces++] = piece;
        }
        cr_expect_eq(given, EXPERTS);
        cr_expect(seed % 2 == 0 || full > 0);
        while (pieces > 1)
            cr_assert_eq(numoe_gpu_piece_done(model, stream, &held[--pieces], NULL), 0);
        numoe_gpu_pieces_end(model, stream); /* one is not done with: its stream is waited for */
        cr_assert_eq(fake_stream_destroy(f, stream), 0);
        close_clean(model, gpu, f);
    }
    model_free(m);
}

/* Between start and finish of a call, whose experts are all queued by then, nothing else may take
 * its cells. */
Test(gpu_engine, pieces_wait_for_the_end_of_a_call)
{
    static const int32_t some[] = {0};
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    static struct batch b;
    uint64_t tokens, done;

    batch_make(&b);
    cr_assert_eq(numoe_gpu_start(model, 1, &b.call, 0, &tokens, NULL), 0);
    cr_expect(!model->stream.in_call);
    cr_expect_eq(numoe_gpu_pieces_begin(model, 0, NULL, 0, 0, NULL), -EBUSY);
    cr_expect_eq(numoe_gpu_hold(model, 0, some, 1, NULL), -EBUSY);
    cr_assert_eq(numoe_gpu_finish(model, &b.call, &done, NULL), 0);
    cr_expect(batch_right(m, 1, &b, done));
    cr_expect_eq(numoe_gpu_hold(model, 0, some, 1, NULL), 0);
    cr_assert_eq(numoe_gpu_pieces_begin(model, 2, NULL, 0, 0, NULL), 0);
    numoe_gpu_pieces_end(model, model->stream.compute);
    close_clean(model, gpu, f);
    model_free(m);
}

Test(gpu_engine, memory_that_is_not_pinned_is_refused)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(1);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {
        .no_pinning = true, .ring_bytes = 16384, .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);

    cr_expect_eq(numoe_gpu_pieces_begin(model, 0, NULL, 0, 0, NULL), -ENOTSUP);
    cr_expect_eq(numoe_gpu_pieces_begin(model, LAYERS, NULL, 0, 0, NULL), -EINVAL);
    close_clean(model, gpu, f);
    model_free(m);
}
