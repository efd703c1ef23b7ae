/* Calls in graphs: what is captured, what is refused, and replays among calls of every other kind.
 */
#include "queued_batch.h"

enum { GRAPHS = 4 };

/* Inputs and outputs of one graph stay where they were when it was captured. */
struct captured {
    struct fake_graph graph;
    struct queued queued;
    uint64_t layer, tokens;
    bool add;
};

static void captured_draw(struct captured *c)
{
    batch_make(&c->queued.batch);
    c->queued.batch.call.tokens = c->tokens;
    c->queued.batch.call.add = c->add;
}

/* Other x and ids in the same buffers; a replay; and whether that is right. */
static bool replay_right(const struct model *m, struct fake *f, struct captured *c, void *stream)
{
    captured_draw(c);
    queued_send(&c->queued, f, stream);
    cr_assert_eq(fake_graph_launch(f, stream, &c->graph), 0);
    queued_fetch(&c->queued, f, stream);
    cr_assert_eq(fake_stream_sync(f, stream), 0);
    return queued_right(m, c->layer, &c->queued);
}

/* A call on host memory, of a layer that is held or not. */
static void call_on_host(struct model *m, struct numoe_gpu_model *model, uint64_t layer)
{
    static struct batch b;
    uint64_t done = 0;

    batch_make(&b);
    cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, NULL), 0);
    cr_expect(batch_right(m, layer, &b, done), "a call on layer %d", (int)layer);
}

static void run_seed(uint64_t seed)
{
    static const uint64_t tokens[GRAPHS] = {1, 2, 5, TOKENS_MOST};
    struct model *m = model_make(LAYERS, seed % 2);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    const uint64_t expert = SLICES * m->shape.bytes;
    /* room for two layers and some, or for all: cells of layers that are not held come and go */
    const struct numoe_gpu_model_options options = {.window_bytes = 4 * expert,
                                                    .cache_bytes =
                                                        seed % 3 ? 0 : LAYERS * EXPERTS * expert,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static struct captured c[GRAPHS];
    struct numoe_gpu_device_call call;
    void *stream = NULL;

    cr_assert_eq(fake_stream_create(f, &stream), 0);
    call_on_host(m, model, 1);
    for (int i = 0; i < GRAPHS; i++) {
        c[i].tokens = tokens[i];
        c[i].layer = i % 2 ? ABSENT_LAYER : 1;
        c[i].add = i > 1;
        captured_draw(&c[i]);
        queued_make(&c[i].queued, f);
    }
    for (int i = 0; i < GRAPHS; i++) {
        call = queued_call(&c[i].queued);
        fake_capture(stream, &c[i].graph);
        if (i < 2) { /* not held yet: refused, and the capture is whole */
            cr_expect_eq(numoe_gpu_enqueue(model, c[i].layer, &call, NULL, stream, &error),
                         -ENOTSUP);
            cr_expect_not_null(strstr(error.message, "not held"), "%s", error.message);
            cr_expect_eq(c[i].graph.count, 0);
            fake_capture_end(stream);
            cr_assert_eq(numoe_gpu_hold(model, c[i].layer, NULL, 0, &error), 0, "%s",
                         error.message);
            cr_expect_eq(numoe_gpu_hold(model, c[i].layer, NULL, 0, NULL), -EBUSY);
            fake_capture(stream, &c[i].graph);
        }
        cr_assert_eq(numoe_gpu_enqueue(model, c[i].layer, &call, NULL, stream, &error), 0, "%s",
                     error.message);
        fake_capture_end(stream);
        cr_expect_eq(c[i].graph.count, 1, "the launch and nothing else");
    }
    for (int round = 0; round < 40; round++) {
        struct captured *of = &c[random_u64() % GRAPHS];
        const uint64_t other = random_u64() % LAYERS;

        cr_expect(replay_right(m, f, of, stream), "seed %d, round %d, %d tokens", (int)seed, round,
                  (int)of->tokens);
        switch (random_u64() % 4) {
        case 0:
            call_on_host(m, model, other);
            break;
        case 1:
            cr_assert_eq(numoe_gpu_prefetch(model, other, NULL, 0, NULL), 0);
            break;
        case 2:
            cr_assert_eq(numoe_gpu_bring(model, other, 2, NULL), 0);
            break;
        default:
            call = queued_call(&c[0].queued);
            cr_assert_eq(numoe_gpu_enqueue(model, other, &call, NULL, stream, NULL), 0);
        }
    }
    cr_assert_eq(fake_stream_sync(f, stream), 0);
    for (int i = 0; i < GRAPHS; i++)
        queued_free(&c[i].queued, f);
    fake_stream_destroy(f, stream);
    close_clean(model, gpu, f);
    model_free(m);
}

Test(gpu_capture, replays_among_other_calls, .timeout = 120)
{
    for (uint64_t seed = 1; seed <= 40; seed++)
        run_seed(seed);
}

/* With a part of a layer held: a graph computes these experts and no others. */
Test(gpu_capture, of_some_experts)
{
    static const int32_t some[] = {0, 2, -1, EXPERTS, 2}, two[] = {0, 2}, three[] = {3, 0};
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(3);
    struct numoe_gpu *gpu = wrap(f);
    const uint64_t expert = SLICES * m->shape.bytes;
    const struct numoe_gpu_model_options options = {.window_bytes = 4 * expert,
                                                    .cache_bytes = LAYERS * 3 * expert,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    struct numoe_error error = NUMOE_ERROR_INIT;
    static struct captured c;
    struct numoe_gpu_device_call call;
    struct numoe_gpu_piece piece;
    uint8_t held[EXPERTS];
    void *stream = NULL;
    uint64_t done;

    cr_assert_eq(fake_stream_create(f, &stream), 0);
    queued_make(&c.queued, f);
    c.tokens = 1;
    captured_draw(&c);
    call = queued_call(&c.queued);
    for (int i = 0; i < 3; i++)
        call_on_host(m, model, 0);
    cr_expect_eq(numoe_gpu_hold(model, 0, NULL, 0, &error), -ENOMEM);
    cr_expect_not_null(
        strstr(error.message, "4 of layer 0 are to be held, and there is room for 3"), "%s",
        error.message);
    cr_expect_eq(numoe_gpu_hold(model, LAYERS, NULL, 0, NULL), -EINVAL);
    cr_assert_eq(numoe_gpu_hold(model, 0, some, 5, NULL), 0);
    numoe_gpu_held(model, 0, held);
    cr_expect(held[0] && !held[1] && held[2] && !held[3]);
    fake_capture(stream, &c.graph);
    cr_expect_eq(numoe_gpu_enqueue(model, 0, &call, NULL, stream, &error), -ENOTSUP);
    cr_expect_not_null(strstr(error.message, "expert 1 of layer 0"), "%s", error.message);
    cr_expect_eq(numoe_gpu_enqueue(model, 0, &call, three, stream, &error), -ENOTSUP);
    cr_expect_not_null(strstr(error.message, "expert 3 of layer 0"), "%s", error.message);
    cr_expect_eq(numoe_gpu_enqueue(model, LAYERS, &call, two, stream, NULL), -EINVAL);
    cr_assert_eq(numoe_gpu_enqueue(model, 0, &call, two, stream, NULL), 0);
    /* pieces are for streams that may wait */
    fake_capture_end(stream);
    cr_assert_eq(numoe_gpu_pieces_begin(model, 1, NULL, 0, 0, NULL), 0);
    cr_expect_eq(numoe_gpu_hold(model, 1, NULL, 0, NULL), -EBUSY);
    fake_capture(stream, &(struct fake_graph){.count = 0});
    cr_expect_eq(numoe_gpu_piece_next(model, stream, &piece, NULL), -ENOTSUP);
    fake_capture_end(stream);
    cr_assert_eq(numoe_gpu_piece_next(model, stream, &piece, NULL), 0);
    fake_capture(stream, &(struct fake_graph){.count = 0});
    cr_expect_eq(numoe_gpu_piece_done(model, stream, &piece, NULL), -ENOTSUP);
    fake_capture_end(stream);
    cr_expect_eq(numoe_gpu_piece_done(model, stream, &piece, NULL), 0);
    numoe_gpu_pieces_end(model, stream);
    cr_expect_eq(c.graph.count, 1);
    for (int round = 0; round < 30; round++) {
        /* an expert that is not held is skipped, as one that is elsewhere */
        captured_draw(&c);
        queued_send(&c.queued, f, stream);
        for (int j = 0; j < TOP_K; j++)
            if (c.queued.batch.ids[0][j] % 2)
                c.queued.batch.ids[0][j] = -1;
        cr_assert_eq(fake_graph_launch(f, stream, &c.graph), 0);
        queued_fetch(&c.queued, f, stream);
        cr_assert_eq(fake_stream_sync(f, stream), 0);
        cr_expect(queued_right(m, 0, &c.queued), "round %d", round);
        call_on_host(m, model, 0); /* all experts, those not held through the window */
    }
    /* weights of a graph do not change under it, nor do old ones go into a new one */
    model_fill(m, 0);
    fake_capture(stream, &c.graph);
    cr_expect_eq(numoe_gpu_enqueue(model, 0, &call, two, stream, &error), -EBUSY);
    cr_expect_not_null(strstr(error.message, "other weights"), "%s", error.message);
    fake_capture_end(stream);
    {
        static struct batch b;
        batch_make(&b);
        cr_expect_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), -EBUSY);
        cr_expect_not_null(strstr(error.message, "held for graphs"), "%s", error.message);
    }
    numoe_gpu_release(model, 0);
    call_on_host(m, model, 0);
    queued_free(&c.queued, f);
    fake_stream_destroy(f, stream);
    close_clean(model, gpu, f);
    model_free(m);
}

/* A failure at every step of holding: nothing stays half held, and it can be tried again. */
Test(gpu_capture, holding_survives_failures, .timeout = 120)
{
    struct model *m = model_make(LAYERS, true);
    bool more = true;

    for (uint64_t at = 0; more; at++) {
        struct fake *f = fake_make(1 + at % 5);
        struct numoe_gpu *gpu = wrap(f);
        const struct numoe_gpu_model_options options = {.piece_bytes = 1,
                                                        .keep_free_bytes = 4 << 20};
        struct numoe_gpu_model *model = model_on(gpu, m, &options);
        int rc;

        f->fail_at = f->calls + at;
        f->fail_code = 1;
        rc = numoe_gpu_hold(model, 3, NULL, 0, NULL);
        more = f->calls > f->fail_at;
        f->fail_at = UINT64_MAX;
        cr_expect_eq(rc, more ? -EINVAL : 0, "%d", (int)at);
        if (rc)
            cr_expect_eq(numoe_gpu_hold(model, 3, NULL, 0, NULL), 0);
        call_on_host(m, model, 3);
        close_clean(model, gpu, f);
    }
    model_free(m);
}
