/*
 * relay_set.h - several fake devices, each with delays of its own, and a model whose experts are
 * whole on all of them; calls for its pieces, each expert of which is looked at when a computation
 * with it happens.
 */
#ifndef NUMOE_TESTS_RELAY_SET_H
#define NUMOE_TESTS_RELAY_SET_H

#include <criterion/criterion.h>
#include <errno.h>

#include "fake_device.h"
#include "gpu_several.h"
#include "transfer_patterns.h"

enum { MOST = 4, EXPERT = SLICES * SLICE_BYTES };

static const uint32_t evenly[MOST] = {1, 1, 1, 1}, unevenly[MOST] = {3, 1, 2, 5};

/* ---- several devices ------------------------------------------------------------------------- */

struct set {
    uint32_t count;
    struct fake *fake[MOST];
    struct numoe_gpu *gpu[MOST];
    struct numoe_gpu_model *model;
    void *streams[MOST]; /* of the engine */
    uint64_t layer;
    uint32_t need[EXPERTS];
};

/* What computations of the call found: how often each expert on each device. */
static struct fake *known[MOST];
static uint32_t seen[MOST][EXPERTS];
static uint64_t checked;

/* A launch: x_stride is the layer, out_stride the generation. */
static inline void check(struct fake *f, const struct numoe_cuda_ffn *c)
{
    uint32_t device = 0;

    while (device < MOST && known[device] != f)
        device++;
    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint32_t *at = c->slice_at + e * SLICES;

        if (!fake_is(f, at, SLICES * 4, true)) {
            fake_wrong(f, "a table outside of device memory");
            return;
        }
        if (at[0] == NUMOE_CUDA_ABSENT)
            continue;
        for (uint64_t s = 0; s < SLICES; s++) {
            const uint8_t *from = c->weights + at[s] * 64ull;

            if (!fake_is(f, from, SLICE_BYTES, true))
                fake_wrong(f, "a slice outside of device memory");
            else if (!has_pattern(from, c->x_stride, e, s, c->out_stride))
                fake_wrong(f, "an expert is not what it was when it was called for");
        }
        seen[device][e]++;
        checked++;
    }
}

static inline void set_make(struct set *set, uint32_t count, uint64_t seed)
{
    *set = (struct set){.count = count};
    for (uint32_t i = 0; i < count; i++) {
        struct numoe_gpu_properties p = {.name = "Fake", .index = i, .os_node = NUMOE_NONE};

        set->fake[i] = known[i] = fake_make(seed * 31 + i * 7);
        set->fake[i]->pins = i ? set->fake[0] : NULL;
        set->fake[i]->instead = check;
        cr_assert_eq(gpu_wrap(&fake_ops, set->fake[i], &p, NULL, &set->gpu[i]), 0);
        cr_assert_eq(fake_stream_create(set->fake[i], &set->streams[i]), 0);
    }
}

static inline void set_free(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        struct fake *f = set->fake[i];

        if (!f->sticky) {
            cr_assert_eq(fake_stream_sync(f, set->streams[i]), 0);
            fake_stream_destroy(f, set->streams[i]);
        }
    }
    numoe_gpu_model_destroy(set->model);
    for (uint32_t i = 0; i < set->count; i++) {
        struct fake *f = set->fake[i];
        uint32_t streams = 0;

        cr_assert_eq(f->wrong, 0, "device %u: %s", i, f->text);
        for (int k = 0; k < FAKE_STREAMS; k++)
            streams += f->streams[k].used;
        if (!f->sticky) {
            cr_expect_leq(f->range_count, f->lost, "%u ranges were left", f->range_count);
            cr_expect_leq(f->events, f->lost, "%u events were left", f->events);
            cr_expect_leq(streams, f->lost, "%u streams were left", streams);
        }
        numoe_gpu_close(set->gpu[i]);
        fake_free(f);
    }
}

static inline struct numoe_gpu_model_options options_of(uint64_t seed)
{
    struct numoe_gpu_model_options options = patterns_options(seed);

    options.no_pinning = false;
    options.keep_free_bytes = 1 << 20;
    options.shares = seed % 3 ? evenly : unevenly;
    options.whole = NUMOE_GPU_WHOLE_PEERS;
    return options;
}

/* Room for so many experts that stay on each device, and that pass through it. */
static inline struct numoe_gpu_model_options options_of_room(uint64_t stay, uint64_t pass)
{
    struct numoe_gpu_model_options options = options_of(1);

    options.stream = stay == 0;
    options.cache_bytes = stay * EXPERT;
    options.window_bytes = pass * EXPERT;
    return options;
}

static inline void set_model(struct set *set, const struct numoe_gpu_model_options *options)
{
    const struct numoe_gpu_source source = patterns_source();
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(
        numoe_gpu_model_create_over(set->gpu, set->count, &source, options, &set->model, &error), 0,
        "%s", error.message);
}

static inline void set_open(struct set *set, uint32_t count, uint64_t seed,
                            const struct numoe_gpu_model_options *options)
{
    set_make(set, count, seed);
    set_model(set, options);
}

/* A computation with a piece, as an engine's kernel would be. */
static inline int compute(struct set *set, uint32_t i, const struct numoe_gpu_piece *piece)
{
    const struct numoe_cuda_ffn c = {.weights = piece->weights,
                                     .slice_at = piece->slice_at,
                                     .x_stride = set->layer,
                                     .out_stride = generations[set->layer]};

    const int e = fake_launch(set->fake[i], set->streams[i], &c);

    if (e)
        fake_clear_error(set->fake[i]); /* the engine's own */
    return e;
}

static inline int sync_all(struct set *set)
{
    int e = 0;

    for (uint32_t i = 0; i < set->count; i++) {
        const int one = fake_stream_sync(set->fake[i], set->streams[i]);
        e = e ? e : one;
    }
    return e;
}

/* Some experts of a layer, by ids that may also be none. */
static inline int call_begin(struct set *set, uint64_t layer, uint32_t percent,
                             struct numoe_error *error)
{
    int32_t ids[EXPERTS + 2] = {-1, EXPERTS};
    uint64_t count = 2;

    set->layer = layer;
    memset(seen, 0, sizeof seen);
    memset(set->need, 0, sizeof set->need);
    for (int32_t e = 0; e < EXPERTS; e++)
        if (random_u64() % 100 < percent) {
            ids[count++] = e;
            set->need[e] = present(NULL, layer, (uint64_t)e);
        }
    return numoe_gpu_pieces_begin(set->model, layer, ids, count, 1, error);
}

/* What each device has got, once it has computed. Others than were asked for may be there, too. */
static inline bool each_once(const struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        for (int e = 0; e < EXPERTS; e++)
            if (seen[i][e] > 1 || seen[i][e] < set->need[e])
                return false;
    return true;
}

static inline void end_all(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        numoe_gpu_pieces_end(numoe_gpu_model_part(set->model, i), set->streams[i]);
}

/* One thread for all devices, done with each piece before the next. */
static inline int call_in_turns(struct set *set, struct numoe_error *error)
{
    for (;;) {
        struct numoe_gpu_piece piece;
        uint32_t i = MOST;
        int rc = numoe_gpu_piece_any(set->model, set->streams, &i, &piece, error);

        if (rc || !piece.slice_at)
            return rc;
        rc = compute(set, i, &piece) ? -EIO : 0;
        if (!rc)
            rc = numoe_gpu_piece_done(numoe_gpu_model_part(set->model, i), set->streams[i], &piece,
                                      error);
        if (rc)
            return rc;
    }
}

/* All pieces, done with one by one; the call's end; and what came. */
static inline void take_all(struct set *set)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(call_in_turns(set, &error), 0, "%s", error.message);
    end_all(set);
    cr_assert_eq(sync_all(set), 0);
    cr_assert(each_once(set));
}

#endif
