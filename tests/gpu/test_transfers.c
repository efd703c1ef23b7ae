/*
 * Experts with patterns of their own, many thousands of them through cells and window under random
 * delays: whenever a computation happens, every expert that its table has is there as it was when
 * the call was made.
 */
#include <criterion/criterion.h>
#include <errno.h>

#include "fake_device.h"
#include "transfer_patterns.h"

static uint64_t checked;

/* A launch: x_stride is the layer, out_stride the generation. */
static void check(struct fake *f, const struct numoe_cuda_ffn *c)
{
    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint32_t *at = c->slice_at + e * SLICES;
        if (!fake_is(f, at, SLICES * 4, true))
            fake_wrong(f, "a table outside of device memory");
        else if (at[0] != NUMOE_CUDA_ABSENT) {
            for (uint64_t s = 0; s < SLICES; s++) {
                const uint8_t *from = c->weights + at[s] * 64ull;
                if (!fake_is(f, from, SLICE_BYTES, true)) {
                    fake_wrong(f, "a slice outside of device memory");
                    return;
                }
                if (!has_pattern(from, c->x_stride, e, s, c->out_stride)) {
                    fake_wrong(f, "an expert is not what it was when it was called for");
                    return;
                }
            }
            checked++;
        }
    }
}

static uint64_t run_seed(uint64_t seed)
{
    struct fake *f = fake_make(seed);
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const struct numoe_gpu_source source = patterns_source();
    const struct numoe_gpu_model_options options = patterns_options(seed);
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    struct numoe_gpu *gpu;
    struct gpu_stream *s;
    uint64_t layer = 0;

    f->instead = check;
    if (seed % 4 == 2)
        f->pin_most = 20000;
    cr_assert_eq(gpu_wrap(&fake_ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, &options, &model, NULL), 0);
    s = &model->stream;
    for (int call = 0; call < 400; call++) {
        uint32_t need[EXPERTS] = {0}, given = 0, asked = 0;
        struct gpu_part part;
        const bool stops = random_u64() % 20 == 0; /* an engine that gives up */

        for (uint32_t e = 0; e < EXPERTS; e++) {
            need[e] = random_u64() % 100 < (seed % 2 ? 90 : 20);
            asked += need[e] && present(NULL, layer, e);
        }
        cr_assert_eq(gpu_stream_begin(s, layer, need, NULL, 3, NULL), 0);
        for (;;) {
            const struct numoe_cuda_ffn ffn = {.x_stride = layer, .out_stride = generations[layer]};
            struct numoe_cuda_ffn c = ffn;
            cr_assert_eq(gpu_stream_next(s, s->compute, &part, NULL), 0);
            if (!part.slice_at)
                break;
            given++;
            c.weights = part.weights;
            c.slice_at = part.slice_at;
            cr_assert_eq(fake_launch(f, s->compute, &c), 0);
            if (stops && random_u64() % 2)
                break;
            cr_assert_eq(gpu_stream_done(s, s->compute, &part, NULL), 0);
        }
        cr_assert_gt(given, 0);
        gpu_stream_end(s, s->compute);
        layer = random_u64() % 6 ? (layer + 1) % LAYERS : random_u64() % LAYERS;
        if (random_u64() % 3)
            cr_assert_eq(gpu_stream_prefetch(s, random_u64() % 5 ? layer : random_u64() % LAYERS,
                                             random_u64() % 2 ? NULL : need, NULL),
                         0);
        if (random_u64() % 30 == 0) {
            /* weights change when nothing computes; what is on its way is of the old ones */
            const uint64_t changed = random_u64() % LAYERS;
            cr_assert_eq(fake_stream_sync(f, s->compute), 0);
            generations[changed]++;
            paint(changed);
        }
        if (random_u64() % 100 == 0)
            gpu_stream_shrink(s, SLICES * SLICE_BYTES, NULL);
        (void)asked;
    }
    numoe_gpu_model_report(model, &report);
    numoe_gpu_model_destroy(model);
    cr_assert_eq(f->wrong, 0, "seed %d: %s", (int)seed, f->text);
    cr_expect_eq(f->range_count, 0);
    cr_expect_eq(f->events, 0);
    numoe_gpu_close(gpu);
    fake_free(f);
    return report.copied_experts;
}

Test(gpu_transfers, a_hundred_thousand_patterns_arrive, .timeout = 300)
{
    uint64_t copied = 0;

    random_state = 4;
    patterns_make();
    for (uint64_t seed = 1; seed <= 120; seed++)
        copied += run_seed(seed);
    cr_log_info("%llu experts copied, %llu checked", (unsigned long long)copied,
                (unsigned long long)checked);
    cr_expect_gt(copied, 100000);
    cr_expect_gt(checked, copied / 2);
    regions_free();
}

/* A model of patterns on a device of its own, which looks at what computations find. */
static struct numoe_gpu_model *open_on(struct fake *f, const struct gpu_ops *ops,
                                       const struct numoe_gpu_model_options *options)
{
    const struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const struct numoe_gpu_source source = patterns_source();
    struct numoe_gpu_model *model;
    struct numoe_gpu *gpu;

    f->instead = check;
    cr_assert_eq(gpu_wrap(ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(numoe_gpu_model_create(gpu, &source, options, &model, NULL), 0);
    return model;
}

static void close_on(struct fake *f, struct numoe_gpu_model *model)
{
    struct numoe_gpu *gpu = model->gpu;

    numoe_gpu_model_destroy(model);
    cr_expect_eq(f->wrong, 0, "%s", f->text);
    numoe_gpu_close(gpu);
    fake_free(f);
}

/* Begin layer 0 and queue a computation with what stays of it. */
static void compute_kept(struct fake *f, struct gpu_stream *s, void *on, const uint32_t *need,
                         struct gpu_part *part)
{
    struct numoe_cuda_ffn c = {.x_stride = 0};

    cr_assert_eq(gpu_stream_begin(s, 0, need, NULL, 3, NULL), 0);
    cr_assert_eq(gpu_stream_next(s, on, part, NULL), 0);
    cr_assert_not_null(part->slice_at);
    cr_assert_null(part->piece);
    c.weights = part->weights;
    c.slice_at = part->slice_at;
    cr_assert_eq(fake_launch(f, on, &c), 0);
}

/* Experts that stay, taken and not done with: their cells are not given on before they were read.
 */
Test(gpu_transfers, what_stays_is_waited_for_when_a_call_is_given_up, .timeout = 60)
{
    struct fake *f = fake_make(5); /* nothing happens unless it is waited for */
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_gpu_model *model;
    struct fake_stream *compute;
    struct gpu_stream *s;
    struct gpu_part part;

    patterns_make();
    model = open_on(f, &fake_ops, &options);
    s = &model->stream;
    compute = s->compute;
    cr_assert_eq(gpu_stream_visit(s, 0, s->everything, NULL), 0);
    compute_kept(f, s, compute, s->everything, &part);
    cr_assert_neq(compute->head, compute->tail);
    gpu_stream_end(s, compute);
    cr_expect_eq(compute->head, compute->tail, "its computation is still to come");
    close_on(f, model);
    regions_free();
}

static bool is_open(void *gate)
{
    return *(const bool *)gate;
}

/* All that can happen without `held`. */
static void settle_but(struct fake *f, const struct fake_stream *held)
{
    for (bool any = true; any;) {
        any = false;
        for (uint32_t i = 0; i < f->stream_count; i++)
            while (&f->streams[i] != held && fake_step(f, &f->streams[i]))
                any = true;
    }
}

/* An engine computes with what stays of a layer while others are brought to it, from a stream of
 * their own: the last of them gets the place of an expert that is being read. */
Test(gpu_transfers, what_is_brought_does_not_pass_what_computes, .timeout = 60)
{
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20,
                                                    .cache_bytes =
                                                        (uint64_t)4 * LAYERS * SLICES * SLICE_BYTES,
                                                    .window_bytes = 20 * SLICES * SLICE_BYTES};
    const uint32_t need[EXPERTS] = {1, 1, 1}, hot[EXPERTS] = {0, 0, 0, 9, 9};
    struct fake *f = fake_make(5); /* nothing happens unless it is waited for */
    struct numoe_gpu_model *model;
    struct gpu_stream *s;
    struct gpu_part part;
    bool gate = false;
    void *engine = NULL;

    patterns_make();
    model = open_on(f, &fake_ops, &options);
    cr_assert_eq(fake_stream_create(f, &engine), 0);
    s = &model->stream;
    cr_assert_eq(s->cache.limit[0], 4);
    cr_assert_eq(gpu_stream_visit(s, 0, need, NULL), 0);
    cr_assert_eq(fake_stream_sync(f, s->compute), 0);
    cr_assert_eq(
        fake_push(f, engine, (struct fake_op){.what = FAKE_RUN, .to = &gate, .run = is_open}), 0);
    compute_kept(f, s, engine, need, &part);
    cr_assert_eq(gpu_stream_done(s, engine, &part, NULL), 0);
    gpu_stream_end(s, engine);
    cr_assert_eq(gpu_stream_bring(s, 0, 3, NULL), 0); /* to a place that nobody has */
    settle_but(f, engine);
    cr_assert(gpu_cache_holds(&s->cache, 0, 3));
    gpu_cache_heat(&s->cache, 0, hot, 9);
    cr_assert_eq(gpu_stream_bring(s, 0, 4, NULL), 0);
    cr_assert(gpu_cache_holds(&s->cache, 0, 4) && !gpu_cache_holds(&s->cache, 0, 0));
    settle_but(f, engine);
    checked = 0;
    gate = true;
    cr_assert_eq(fake_stream_sync(f, engine), 0);
    cr_expect_eq(checked, 3);
    fake_stream_destroy(f, engine);
    close_on(f, model);
    regions_free();
}

static const void *unmarked;

static int record(void *device, void *event, void *stream)
{
    if (event != unmarked)
        return fake_event_record(device, event, stream);
    unmarked = NULL;
    return fake_refuse(device, 1);
}

/* No event stands behind the copy of the table of what stays: no other is copied to its place, and
 * the host does not write it anew, before that is past. */
Test(gpu_transfers, a_table_is_waited_for_when_it_cannot_be_marked, .timeout = 60)
{
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    const uint32_t need[EXPERTS] = {1, 1, 1}, more[EXPERTS] = {1, 1, 1, 1};
    struct fake *f = fake_make(5); /* nothing happens unless it is waited for */
    struct gpu_ops ops = fake_ops;
    struct numoe_gpu_model *model;
    struct gpu_stream *s;
    struct gpu_part part;
    void *engine[2] = {NULL};

    patterns_make();
    ops.event_record = record;
    checked = 0;
    model = open_on(f, &ops, &options);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(fake_stream_create(f, &engine[i]), 0);
    s = &model->stream;
    cr_assert_eq(gpu_stream_visit(s, 0, need, NULL), 0);
    cr_assert_eq(gpu_stream_begin(s, 0, need, NULL, 3, NULL), 0);
    unmarked = s->used[0];
    cr_assert_eq(gpu_stream_next(s, engine[0], &part, NULL), -EINVAL);
    cr_assert_null(unmarked);
    gpu_stream_end(s, engine[0]);
    cr_assert_eq(gpu_stream_visit(s, 0, more, NULL), 0);
    for (int call = 0; call < 2; call++) {
        compute_kept(f, s, engine[1], more, &part);
        cr_assert_eq(gpu_stream_done(s, engine[1], &part, NULL), 0);
        gpu_stream_end(s, engine[1]);
    }
    for (int i = 2; i-- > 0;) {
        cr_assert_eq(fake_stream_sync(f, engine[i]), 0);
        fake_stream_destroy(f, engine[i]);
    }
    cr_expect_eq(checked, 8);
    close_on(f, model);
    regions_free();
}

/* Pieces of a layer: how many experts each has, and how many copies bring it. */
static uint32_t pieces_of(struct gpu_stream *s, uint64_t tokens, uint32_t *experts,
                          uint32_t *copies)
{
    struct fake_stream *link = s->copies;
    uint32_t count = 0, before = link->copies_in;
    struct gpu_part part;

    cr_assert_eq(gpu_stream_begin(s, 0, s->everything, NULL, tokens, NULL), 0);
    for (;;) {
        cr_assert_eq(gpu_stream_next(s, s->compute, &part, NULL), 0);
        if (!part.slice_at)
            break;
        cr_assert_not_null(part.piece);
        experts[count++] = part.piece->end - part.piece->first;
        cr_assert_eq(gpu_stream_done(s, s->compute, &part, NULL), 0);
    }
    gpu_stream_end(s, s->compute);
    *copies = link->copies_in - before;
    return count;
}

/* A piece is a third of what is left, but every region gives what was asked for, and there are so
 * many experts that pieces do not pile up behind many tokens; a region's consecutive experts are
 * one copy. */
Test(gpu_transfers, pieces_are_as_long_as_every_region_and_the_tokens_ask)
{
    enum { EXPERT = SLICES * SLICE_BYTES };
    static const struct {
        uint64_t piece, window, tokens;
        uint32_t experts[8];
    } cases[] = {
        {1, 200, 1, {8, 6, 4, 2, 2, 1, 1}},
        {2 * EXPERT, 200, 1, {8, 6, 6, 4}}, /* six experts have two of each of three regions */
        {2 * EXPERT - 1, 200, 1, {8, 6, 6, 4}},
        {7 * EXPERT / 3, 200, 1, {8, 7, 7, 2}},
        {1, 200, 8192, {8, 6, 4, 2, 2, 2}},
        {1, 200, 65536, {24}},
        {1, 20, 65536, {5, 5, 5, 5, 4}}, /* a quarter of the window */
    };

    patterns_make();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct fake *f = fake_make(3);
        const struct numoe_gpu_model_options options = {.stream = true,
                                                        .window_bytes = cases[i].window * EXPERT,
                                                        .piece_bytes = cases[i].piece,
                                                        .keep_free_bytes = 4 << 20};
        uint32_t experts[EXPERTS + 1] = {0}, copies, count;
        struct numoe_gpu_model *model = open_on(f, &fake_ops, &options);

        count = pieces_of(&model->stream, cases[i].tokens, experts, &copies);
        for (uint32_t k = 0; k < 8; k++)
            cr_expect_eq(experts[k], cases[i].experts[k], "case %d, piece %u: %u", (int)i, k,
                         experts[k]);
        /* the table, and of three regions one stretch each */
        cr_expect_leq(copies, 4 * count, "case %d: %u copies of %u pieces", (int)i, copies, count);
        close_on(f, model);
    }
    regions_free();
}
