/*
 * Experts with patterns of their own, many thousands of them through cells and window under random
 * delays: whenever a computation happens, every expert that its table has is there as it was when
 * the call was made.
 */
#include <criterion/criterion.h>

#include "../support/experts.h"
#include "fake_device.h"
#include "gpu_model.h"

enum { LAYERS = 5, EXPERTS = 24, SLICES = 5, REGIONS = 3, SLICE_BYTES = 128 };

static uint8_t *arena_of[REGIONS];
static uint64_t start[REGIONS][LAYERS * EXPERTS + 1]; /* slices */
static uint32_t generations[LAYERS];
static uint64_t checked;

/* Slices of expert q in a region, some experts having none in some. */
static uint64_t slices_in(uint64_t q, uint32_t region)
{
    const uint64_t first = q % (SLICES + 1), second = first + q * 7 % (SLICES + 1 - first);
    return region == 0 ? first : region == 1 ? second - first : SLICES - second;
}

static uint64_t pattern(uint64_t layer, uint64_t e, uint64_t slice, uint64_t generation)
{
    return (((generation * LAYERS + layer) * EXPERTS + e) * SLICES + slice + 1) *
           0x9E3779B97F4A7C15u;
}

static void paint(uint64_t layer)
{
    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint64_t q = layer * EXPERTS + e;
        uint64_t slice = 0;
        for (uint32_t r = 0; r < REGIONS; r++)
            for (uint64_t i = start[r][q]; i < start[r][q + 1]; i++, slice++) {
                uint64_t *words = (uint64_t *)(void *)(arena_of[r] + i * SLICE_BYTES);
                for (int w = 0; w < SLICE_BYTES / 8; w++)
                    words[w] = pattern(layer, e, slice, generations[layer]) + (uint64_t)w;
            }
    }
}

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    (void)user;
    *address = arena_of[index];
    *bytes = start[index][LAYERS * EXPERTS] * SLICE_BYTES;
}

static uint64_t place(void *user, uint64_t layer, uint64_t e, uint32_t index,
                      const uint8_t **address)
{
    const uint64_t q = layer * EXPERTS + e;
    (void)user;
    *address = arena_of[index] + start[index][q] * SLICE_BYTES;
    return start[index][q + 1] - start[index][q];
}

static bool present(void *user, uint64_t layer, uint64_t e)
{
    (void)user;
    return layer != 1 || e != 7;
}

static uint32_t generation(void *user, uint64_t layer)
{
    (void)user;
    return generations[layer];
}

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
                for (int w = 0; w < SLICE_BYTES / 8; w++)
                    if (((const uint64_t *)(const void *)from)[w] !=
                        pattern(c->x_stride, e, s, c->out_stride) + (uint64_t)w) {
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
    const struct numoe_gpu_source source = {
        .shape = {.hidden = 32, .hidden_tiles = 1, .bytes = SLICE_BYTES},
        .layers = LAYERS,
        .experts = EXPERTS,
        .slices = SLICES,
        .region_count = REGIONS,
        .arena = arena,
        .place = place,
        .present = present,
        .generation = generation,
    };
    const uint64_t expert = SLICES * SLICE_BYTES;
    const struct numoe_gpu_model_options options = {
        .stream = seed % 5 == 0,
        .cache_bytes = expert * (1 + seed * 13 % (LAYERS * EXPERTS)),
        .window_bytes = expert * (2 + seed % 50),
        .piece_bytes = 1 + seed % 3 * 500,
        .chunk_bytes = seed % 2 ? 4096 : 0,
        .ring_bytes = 1 << (14 + seed % 3),
        .no_pinning = seed % 4 == 3,
    };
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
            gpu_stream_shrink(s, expert, NULL);
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
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++)
        for (uint32_t r = 0; r < REGIONS; r++)
            start[r][q + 1] = start[r][q] + slices_in(q, r);
    for (uint32_t r = 0; r < REGIONS; r++)
        arena_of[r] = calloc(start[r][LAYERS * EXPERTS] + 1, SLICE_BYTES);
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        paint(layer);
    for (uint64_t seed = 1; seed <= 60; seed++)
        copied += run_seed(seed);
    cr_log_info("%llu experts copied, %llu checked", (unsigned long long)copied,
                (unsigned long long)checked);
    cr_expect_gt(copied, 100000);
    cr_expect_gt(checked, copied / 2);
    for (uint32_t r = 0; r < REGIONS; r++)
        free(arena_of[r]);
}
