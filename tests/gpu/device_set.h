/*
 * device_set.h - several fake devices, each with delays of its own, and models on all of them.
 */
#ifndef NUMOE_TESTS_DEVICE_SET_H
#define NUMOE_TESTS_DEVICE_SET_H

#include "small_model.h"

#include "gpu_several.h"

enum { MOST = 4 };

/* Which nodes devices are on. */
enum layout { UNKNOWN, NEAR };

static inline uint32_t distance(void *user, uint32_t index, uint32_t os_node)
{
    (void)user;
    cr_assert_neq(os_node, NUMOE_NONE, "a distance to where nobody knows");
    return index == os_node ? 10 : 21;
}

struct set {
    struct fake *fake[MOST];
    struct numoe_gpu *gpu[MOST];
    uint32_t count;
};

static inline void set_make(struct set *set, uint32_t count, enum layout layout, uint64_t seed)
{
    *set = (struct set){.count = count};
    for (uint32_t i = 0; i < count; i++) {
        struct numoe_gpu_properties p = {.name = "Fake",
                                         .index = i,
                                         .locality_known = layout == NEAR,
                                         .os_node = layout == NEAR ? i % NODES : NUMOE_NONE};
        set->fake[i] = fake_make(seed * 31 + i * 7);
        set->fake[i]->pins = i ? set->fake[0] : NULL;
        cr_assert_eq(gpu_wrap(&fake_ops, set->fake[i], &p, NULL, &set->gpu[i]), 0);
    }
}

static inline void set_free(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        cr_expect_eq(set->fake[i]->wrong, 0, "device %u: %s", i, set->fake[i]->text);
        if (!set->fake[i]->sticky)
            expect_clean(set->fake[i]);
        numoe_gpu_close(set->gpu[i]);
        fake_free(set->fake[i]);
    }
}

static const uint32_t shares[MOST] = {1, 1, 1, 1};

static inline struct numoe_gpu_model_options options_of(const struct model *m, uint64_t seed)
{
    return (struct numoe_gpu_model_options){.stream = seed % 3 == 0,
                                            .cache_bytes = (seed % 5) * SLICES * m->shape.bytes + 1,
                                            .window_bytes = 5 * SLICES * m->shape.bytes,
                                            .piece_bytes = 1,
                                            .chunk_bytes = 4096,
                                            .ring_bytes = 32768,
                                            .keep_free_bytes = 1 << 20,
                                            .no_pinning = seed % 4 == 1,
                                            .shares = shares,
                                            .sum = NUMOE_GPU_SUM_HOST};
}

static inline struct numoe_gpu_source source_near(struct model *m)
{
    struct numoe_gpu_source source = source_of(m);
    source.distance = distance;
    return source;
}

/* Rounds of so few rows that a call has several. */
static inline void set_narrow(struct numoe_gpu_model *model, uint64_t rows)
{
    struct gpu_sum *sum = &model->several->sum;
    const uint64_t bytes = (sum->count - 1) * rows * HIDDEN * sizeof(float);

    sum->slot_bytes = bytes < sum->slot_bytes ? bytes : sum->slot_bytes;
}

/* Calls of a seed; the bits of all outputs to outs. */
enum { SET_CALLS = 12, SET_FLOATS = SET_CALLS * TOKENS_MOST * (HIDDEN + GAP) };

static inline void set_run(struct model *m, uint32_t count, enum layout layout,
                           enum numoe_gpu_sum sum, uint64_t seed, uint64_t delays, float *outs)
{
    const struct numoe_gpu_source source = source_near(m);
    struct numoe_gpu_model_options options = options_of(m, seed);
    struct numoe_gpu_report report;
    struct numoe_gpu_model *model;
    uint64_t layer = 0;
    struct set set;

    options.sum = sum;
    set_make(&set, count, layout, delays);
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, count, &source, &options, &model, NULL), 0);
    cr_expect_eq(numoe_gpu_model_parts(model), count);
    for (uint32_t i = 0; i < count; i++)
        many_stages(numoe_gpu_model_part(model, i), seed);
    if (sum != NUMOE_GPU_SUM_HOST)
        set_narrow(model, 1 + seed % 3);
    random_state = seed;
    for (int i = 0; i < SET_CALLS; i++, layer = random_u64() % 4 ? (layer + 1) % LAYERS : 0) {
        struct batch b;
        uint8_t held[EXPERTS];
        uint64_t done;

        batch_make(&b);
        if (random_u64() % 3 == 0)
            numoe_gpu_prefetch(model, layer, random_u64() % 2 ? NULL : &b.ids[0][0], TOP_K, NULL);
        if (random_u64() % 3 == 0)
            cr_assert_eq(numoe_gpu_bring(model, layer, 2, NULL), 0);
        numoe_gpu_held(model, layer, held);
        for (int e = 0; e < EXPERTS; e++)
            cr_expect_leq(held[e], layer != ABSENT_LAYER || e != ABSENT_EXPERT);
        cr_assert_eq(numoe_gpu_forward(model, layer, &b.call, &done, NULL), 0);
        cr_assert(batch_right(m, layer, &b, done), "%u devices, seed %d, call %d", count, (int)seed,
                  i);
        cr_expect_eq(done, b.call.tokens);
        cr_expect_geq(numoe_gpu_took_ms(model), 0);
        memcpy(outs + i * TOKENS_MOST * (HIDDEN + GAP), b.out, sizeof b.out);
    }
    numoe_gpu_model_report(model, &report);
    cr_expect_gt(report.copied_bytes, 0);
    if (count > 1) {
        cr_expect_eq(report.sum, sum, "%s: %s", numoe_gpu_sum_names[report.sum], report.sum_note);
        cr_expect_eq(report.summed_tokens, sum == NUMOE_GPU_SUM_HOST ? 0 : report.tokens);
        cr_expect_eq(report.peer_bytes > 0, sum != NUMOE_GPU_SUM_HOST);
    }
    for (uint32_t i = 0; i < count; i++) {
        struct numoe_gpu_report part;
        numoe_gpu_model_report(numoe_gpu_model_part(model, i), &part);
        cr_expect_gt(part.copied_bytes, 0, "device %u has had nothing to do", i);
        cr_expect_leq(part.copied_bytes, report.copied_bytes);
    }
    numoe_gpu_model_destroy(model);
    set_free(&set);
}

/* Code at every step of one device. */
static inline void set_fail_everywhere(uint32_t count, uint32_t victim, enum layout layout,
                                       enum numoe_gpu_sum sum, int code)
{
    struct model *m = model_make(3, true);
    const struct numoe_gpu_source source = source_near(m);
    uint64_t at, reached;

    for (at = 0;; at += 1 + at / 60) {
        struct numoe_gpu_model_options options = options_of(m, at);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_gpu_model *model = NULL;
        struct fake *f;
        struct set set;
        uint32_t failures = 0;
        int rc;

        options.sum = sum;
        set_make(&set, count, layout, at);
        f = set.fake[victim];
        f->fail_at = at;
        f->fail_code = code;
        rc = numoe_gpu_model_create_over(set.gpu, count, &source, &options, &model, &error);
        if (rc) {
            cr_expect_null(model);
            cr_expect(error.message[0]);
        }
        if (!rc && sum != NUMOE_GPU_SUM_HOST)
            set_narrow(model, 1);
        for (uint32_t i = 0; !rc && i < count; i++)
            many_stages(numoe_gpu_model_part(model, i), at);
        for (int i = 0; !rc && i < 6; i++) {
            const uint64_t layer = (uint64_t)i % 3;
            struct batch b;
            uint64_t done;
            int again;

            batch_make(&b);
            again = numoe_gpu_forward(model, layer, &b.call, &done, &error);
            cr_assert(batch_right(m, layer, &b, done), "code %d at %d of device %u, call %d", code,
                      (int)at, victim, i);
            failures += again != 0;
            cr_assert(again || done == b.call.tokens);
            if (again)
                cr_expect_eq(again, gpu_errno_of(code), "%d at %d", again, (int)at);
            cr_expect(failures <= 1 || f->sticky, "two calls failed");
        }
        if (model)
            cr_expect_eq(numoe_gpu_model_health(model, NULL), f->sticky ? -EIO : 0);
        f->fail_at = UINT64_MAX;
        numoe_gpu_model_destroy(model);
        reached = f->calls;
        set_free(&set);
        if (at > reached)
            break;
    }
    cr_expect_gt(at, 100, "only %d steps", (int)at);
    model_free(m);
}

#endif
