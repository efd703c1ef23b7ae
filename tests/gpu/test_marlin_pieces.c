/* Pieces repacked to Marlin's layout, in slots of the engine's, while others are on their way. */
#define SMALL_HIDDEN 128
#include "device_set.h"

/* The expert as the reference packs it. */
static void want_of(const struct model *m, uint64_t layer, uint64_t e, bool interleaved,
                    const struct numoe_marlin *to)
{
    const uint64_t q = layer * EXPERTS + e, cut = boundary(q), bytes = m->shape.bytes;
    uint8_t *slices = aligned_bytes(SLICES * bytes);

    memcpy(slices, m->arena[0] + m->start[0][q] * bytes, cut * bytes);
    memcpy(slices + cut * bytes, m->arena[1] + m->start[1][q] * bytes, (SLICES - cut) * bytes);
    cr_assert_eq(numoe_marlin_reference(&m->shape, slices, SLICES, interleaved, to), 0);
    free(slices);
}

static void run_seed(uint64_t seed)
{
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    const uint64_t expert = SLICES * m->shape.bytes;
    const struct numoe_gpu_model_options options = {.window_bytes = 3 * expert,
                                                    .cache_bytes = 1 + seed % 3 * 4 * expert,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = 4 << 20};
    const bool interleaved = seed % 2;
    struct numoe_gpu_model *model = model_on(gpu, m, &options);
    struct numoe_marlin_sizes sizes;
    struct numoe_marlin to = {NULL}, want;
    int32_t slots[EXPERTS], *slot_of = NULL;
    void *stream = NULL;

    cr_assert_eq(numoe_marlin_sizes(&m->shape, SLICES, &sizes), 0);
    cr_assert_eq(fake_stream_create(f, &stream), 0);
    cr_assert_eq(fake_allocate(f, EXPERTS * 4 * sizes.gate_up_words, (void **)&to.gate_up), 0);
    cr_assert_eq(fake_allocate(f, EXPERTS * sizes.gate_up_scales, (void **)&to.gate_up_scales), 0);
    cr_assert_eq(fake_allocate(f, EXPERTS * 4 * sizes.down_words, (void **)&to.down), 0);
    cr_assert_eq(fake_allocate(f, EXPERTS * sizes.down_scales, (void **)&to.down_scales), 0);
    cr_assert_eq(fake_allocate(f, sizeof slots, (void **)&slot_of), 0);
    want.gate_up = malloc(4 * sizes.gate_up_words);
    want.gate_up_scales = malloc(sizes.gate_up_scales);
    want.down = malloc(4 * sizes.down_words);
    want.down_scales = malloc(sizes.down_scales);
    for (uint64_t call = 0; call < 2 * LAYERS; call++) {
        const uint64_t layer = call % LAYERS;
        struct numoe_gpu_piece piece;

        for (int e = 0; e < EXPERTS; e++)
            slots[e] = e == 3 ? -1 : 2 - e; /* the last is left out */
        memcpy(slot_of, slots, sizeof slots);
        memset(to.gate_up, 0xAB, EXPERTS * 4 * sizes.gate_up_words);
        cr_assert_eq(numoe_gpu_pieces_begin(model, layer, NULL, 0, 0, NULL), 0);
        for (;;) {
            cr_assert_eq(numoe_gpu_piece_next(model, stream, &piece, NULL), 0);
            if (!piece.slice_at)
                break;
            cr_assert_eq(
                numoe_gpu_piece_marlin(model, stream, &piece, slot_of, interleaved, &to, NULL), 0);
            cr_assert_eq(numoe_gpu_piece_done(model, stream, &piece, NULL), 0);
        }
        cr_expect_eq(numoe_gpu_piece_marlin(model, stream, &piece, slot_of, interleaved, &to, NULL),
                     -EINVAL);
        numoe_gpu_pieces_end(model, stream);
        cr_assert_eq(fake_stream_sync(f, stream), 0);
        for (int e = 0; e < EXPERTS; e++) {
            const uint64_t slot = (uint64_t)slots[e];
            if (slots[e] < 0 || (layer == ABSENT_LAYER && e == ABSENT_EXPERT))
                continue;
            want_of(m, layer, (uint64_t)e, interleaved, &want);
            cr_expect_arr_eq(to.gate_up + slot * sizes.gate_up_words, want.gate_up,
                             4 * sizes.gate_up_words);
            cr_expect_arr_eq(to.gate_up_scales + slot * sizes.gate_up_scales, want.gate_up_scales,
                             sizes.gate_up_scales);
            cr_expect_arr_eq(to.down + slot * sizes.down_words, want.down, 4 * sizes.down_words);
            cr_expect_arr_eq(to.down_scales + slot * sizes.down_scales, want.down_scales,
                             sizes.down_scales);
        }
        for (uint64_t i = 0; i < sizes.gate_up_words; i++)
            cr_expect_eq(to.gate_up[3 * sizes.gate_up_words + i], 0xABABABABu);
    }
    fake_release(f, to.gate_up);
    fake_release(f, to.gate_up_scales);
    fake_release(f, to.down);
    fake_release(f, to.down_scales);
    fake_release(f, slot_of);
    fake_stream_destroy(f, stream);
    close_clean(model, gpu, f);
    model_free(m);
    free(want.gate_up);
    free(want.gate_up_scales);
    free(want.down);
    free(want.down_scales);
}

Test(gpu_marlin, pieces_in_slots_of_the_engine, .timeout = 120)
{
    for (uint64_t seed = 1; seed <= 12; seed++)
        run_seed(seed);
}

static int crooked_marlin(void *device, void *stream, const struct numoe_cuda_marlin *marlin)
{
    struct numoe_cuda_marlin other = *marlin;

    other.interleaved = false; /* as if one order of columns were wrong */
    return fake_marlin(device, stream, &other);
}

/* A device that repacks wrongly says so, and is used for all else. */
Test(gpu_marlin, other_bits_are_refused)
{
    struct gpu_ops ops = fake_ops;
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    const struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 4 << 20};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_finding found;
    struct numoe_gpu_model *model;
    struct numoe_gpu_piece piece;
    struct numoe_gpu *gpu;
    static struct batch b;
    void *stream = NULL;
    uint64_t done;

    ops.marlin = crooked_marlin;
    cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
    cr_assert_eq(numoe_gpu_certify_marlin(gpu, &found, NULL), 0);
    cr_expect(!found.ok && strstr(found.text, "other bits"), "%s", found.text);
    model = model_on(gpu, m, &options);
    cr_assert_eq(fake_stream_create(f, &stream), 0);
    cr_assert_eq(numoe_gpu_pieces_begin(model, 0, NULL, 0, 0, NULL), 0);
    cr_assert_eq(numoe_gpu_piece_next(model, stream, &piece, NULL), 0);
    cr_expect_eq(numoe_gpu_piece_marlin(model, stream, &piece, NULL, false,
                                        &(struct numoe_marlin){.gate_up = NULL}, &error),
                 -ENOTSUP);
    cr_expect_not_null(strstr(error.message, "other bits"), "%s", error.message);
    numoe_gpu_pieces_end(model, stream);
    batch_make(&b);
    cr_expect_eq(numoe_gpu_forward(model, 0, &b.call, &done, NULL), 0);
    cr_expect(batch_right(m, 0, &b, done));
    fake_stream_destroy(f, stream);
    close_clean(model, gpu, f);
    model_free(m);
}

enum { ARRAYS = 4 };

static int diverted; /* the array that goes to where nobody looks; ARRAYS: none does */
static uint8_t *elsewhere;

static int divert(void *device, void *stream, const struct numoe_cuda_marlin *marlin)
{
    struct numoe_cuda_marlin other = *marlin;

    switch (diverted) {
    case 0:
        other.to.gate_up = (uint32_t *)(void *)elsewhere;
        break;
    case 1:
        other.to.gate_up_scales = elsewhere;
        break;
    case 2:
        other.to.down = (uint32_t *)(void *)elsewhere;
        break;
    case 3:
        other.to.down_scales = elsewhere;
        break;
    default:
        break;
    }
    return fake_marlin(device, stream, &other);
}

/* Each of the arrays is looked at: one that is never written is found. */
Test(gpu_marlin, every_array_is_checked)
{
    const struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct gpu_ops ops = fake_ops;

    ops.marlin = divert;
    for (diverted = 0; diverted <= ARRAYS; diverted++) {
        struct fake *f = fake_make(2);
        struct numoe_gpu_finding found;
        struct numoe_gpu *gpu;

        cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
        cr_assert_eq(fake_allocate(f, 4 << 20, (void **)&elsewhere), 0);
        cr_assert_eq(numoe_gpu_certify_marlin(gpu, &found, NULL), 0);
        cr_expect_eq(found.ok, diverted == ARRAYS, "array %d: %s", diverted, found.text);
        fake_release(f, elsewhere);
        expect_clean(f);
        numoe_gpu_close(gpu);
        fake_free(f);
    }
}

static uint32_t repacked;

static int count_marlin(void *device, void *stream, const struct numoe_cuda_marlin *marlin)
{
    repacked++;
    return fake_marlin(device, stream, marlin);
}

/* A graph cannot follow pieces. */
Test(gpu_marlin, a_captured_stream_is_refused)
{
    struct gpu_ops ops = fake_ops;
    struct model *m = model_make(LAYERS, false);
    struct fake *f = fake_make(2);
    const struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const struct numoe_gpu_model_options options = {.piece_bytes = 1, .keep_free_bytes = 4 << 20};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_marlin to = {NULL};
    struct numoe_marlin_sizes sizes;
    struct fake_graph graph = {.count = 0};
    struct numoe_gpu_model *model;
    struct numoe_gpu_piece piece;
    struct numoe_gpu *gpu;
    void *stream = NULL;
    uint8_t *memory = NULL;

    ops.marlin = count_marlin;
    cr_assert_eq(gpu_wrap(&ops, f, &p, NULL, &gpu), 0);
    model = model_on(gpu, m, &options);
    cr_assert_eq(numoe_marlin_sizes(&m->shape, SLICES, &sizes), 0);
    cr_assert_eq(fake_stream_create(f, &stream), 0);
    cr_assert_eq(fake_allocate(f, 4 << 20, (void **)&memory), 0);
    to.gate_up = (uint32_t *)(void *)memory;
    to.down = (uint32_t *)(void *)(memory + (1 << 20));
    to.gate_up_scales = memory + (2 << 20);
    to.down_scales = memory + (3 << 20);
    cr_assert_leq(EXPERTS * 4 * sizes.gate_up_words, 1 << 20);
    cr_assert_eq(numoe_gpu_pieces_begin(model, 0, NULL, 0, 0, NULL), 0);
    cr_assert_eq(numoe_gpu_piece_next(model, stream, &piece, NULL), 0);
    for (int checked = 0; checked < 2; checked++) { /* whether the device is known to be right */
        fake_capture(stream, &graph);
        repacked = 0;
        cr_expect_eq(numoe_gpu_piece_marlin(model, stream, &piece, NULL, false, &to, &error),
                     -ENOTSUP);
        cr_expect_not_null(strstr(error.message, "is captured"), "%s", error.message);
        cr_expect(graph.count == 0 && repacked == 0);
        fake_capture_end(stream);
        cr_expect_eq(numoe_gpu_piece_marlin(model, stream, &piece, NULL, false, &to, &error), 0,
                     "%s", error.message);
        cr_expect_gt(repacked, 0);
    }
    cr_assert_eq(numoe_gpu_piece_done(model, stream, &piece, NULL), 0);
    numoe_gpu_pieces_end(model, stream);
    cr_assert_eq(fake_stream_sync(f, stream), 0);
    fake_release(f, memory);
    fake_stream_destroy(f, stream);
    close_clean(model, gpu, f);
    model_free(m);
}

/* Of a device that has slices of each expert there are no whole experts to repack. */
Test(gpu_marlin, slices_are_refused)
{
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_source source = source_near(m);
    const struct numoe_gpu_model_options options = {
        .shares = shares, .window_bytes = 1 << 18, .cache_bytes = 1, .keep_free_bytes = 1 << 20};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model;
    struct set set;

    set_make(&set, 2, NEAR, 3);
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, NULL), 0);
    for (uint32_t i = 0; i < 2; i++) {
        struct numoe_gpu_model *part = numoe_gpu_model_part(model, i);
        struct numoe_gpu_piece piece;
        void *stream = NULL;

        cr_assert_eq(fake_stream_create(set.fake[i], &stream), 0);
        cr_assert_eq(numoe_gpu_pieces_begin(part, 0, NULL, 0, 0, NULL), 0);
        cr_assert_eq(numoe_gpu_piece_next(part, stream, &piece, NULL), 0);
        cr_assert_not_null(piece.slice_at);
        cr_expect_eq(numoe_gpu_piece_marlin(part, stream, &piece, NULL, false,
                                            &(struct numoe_marlin){.gate_up = NULL}, &error),
                     -ENOTSUP);
        cr_expect_not_null(strstr(error.message, "some slices"), "%s", error.message);
        cr_assert_eq(numoe_gpu_piece_done(part, stream, &piece, NULL), 0);
        numoe_gpu_pieces_end(part, stream);
        cr_assert_eq(fake_stream_sync(set.fake[i], stream), 0);
        fake_stream_destroy(set.fake[i], stream);
    }
    numoe_gpu_model_destroy(model);
    set_free(&set);
    model_free(m);
}
