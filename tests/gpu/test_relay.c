/*
 * Experts that are whole on several devices, tens of thousands of them passed on from device to
 * device under random delays of each: whenever a computation happens, every expert that its table
 * has is there as it was when the call was made, and each device gets each expert once. Then
 * failures at every step, windows that are full, devices that do not reach each other.
 */
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
static void check(struct fake *f, const struct numoe_cuda_ffn *c)
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

static void set_make(struct set *set, uint32_t count, uint64_t seed)
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

static void set_free(struct set *set)
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

static struct numoe_gpu_model_options options_of(uint64_t seed)
{
    struct numoe_gpu_model_options options = patterns_options(seed);

    options.no_pinning = false;
    options.keep_free_bytes = 1 << 20;
    options.shares = seed % 3 ? evenly : unevenly;
    options.whole = NUMOE_GPU_WHOLE_PEERS;
    return options;
}

static void set_model(struct set *set, const struct numoe_gpu_model_options *options)
{
    const struct numoe_gpu_source source = patterns_source();
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_assert_eq(
        numoe_gpu_model_create_over(set->gpu, set->count, &source, options, &set->model, &error), 0,
        "%s", error.message);
}

/* A computation with a piece, as an engine's kernel would be. */
static int compute(struct set *set, uint32_t i, const struct numoe_gpu_piece *piece)
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

static int sync_all(struct set *set)
{
    int e = 0;

    for (uint32_t i = 0; i < set->count; i++) {
        const int one = fake_stream_sync(set->fake[i], set->streams[i]);
        e = e ? e : one;
    }
    return e;
}

/* Some experts of a layer, by ids that may also be none. */
static int call_begin(struct set *set, uint64_t layer, uint32_t percent, struct numoe_error *error)
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
static bool each_once(const struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        for (int e = 0; e < EXPERTS; e++)
            if (seen[i][e] > 1 || seen[i][e] < set->need[e])
                return false;
    return true;
}

static void end_all(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        numoe_gpu_pieces_end(numoe_gpu_model_part(set->model, i), set->streams[i]);
}

/* One thread for all devices, done with each piece before the next. */
static int call_in_turns(struct set *set, struct numoe_error *error)
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

static bool is_past(const struct gpu_piece *p)
{
    const struct fake_event *event = p->copied;

    return event->completed >= event->recorded;
}

/* Copies of the call, on any device: for which alone -EAGAIN is too early. */
static bool any_under_way(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        struct gpu_stream *s = &numoe_gpu_model_part(set->model, i)->stream;
        struct gpu_window *mine = &set->model->several->relay->sides[i].window;

        for (uint32_t k = 0; k < s->window.count; k++) {
            const struct gpu_piece *p = gpu_window_piece(&s->window, k);
            if (p->job == s->current && p->state == GPU_PIECE_QUEUED && !is_past(p))
                return true;
        }
        for (uint32_t k = 0; k < mine->count; k++) {
            const struct gpu_piece *p = gpu_window_piece(mine, k);
            if (p->state == GPU_PIECE_FILLING || (p->state == GPU_PIECE_QUEUED && !is_past(p)))
                return true;
        }
    }
    return false;
}

/* Devices asked in any order, some far more often than others; pieces kept for a while. Returns
 * false if the engine gave up on the way. */
static bool call_at_random(struct set *set, bool stops)
{
    enum { HELD = 3 };
    struct numoe_gpu_piece held[MOST][HELD];
    uint32_t holds[MOST] = {0}, finished = 0, in_vain = 0;

    while (finished != (1u << set->count) - 1) {
        const uint32_t slow = (uint32_t)(random_u64() % 8 ? random_u64() % set->count : 0);
        const uint32_t i = random_u64() % 3 ? slow : (uint32_t)(random_u64() % set->count);
        struct numoe_gpu_model *part = numoe_gpu_model_part(set->model, i);
        int rc = 0;

        if (stops && random_u64() % 12 == 0)
            return false;
        if (holds[i] == HELD || (holds[i] && (in_vain > 2 || random_u64() % 2))) {
            cr_assert_eq(numoe_gpu_piece_done(part, set->streams[i], &held[i][--holds[i]], NULL),
                         0);
            in_vain = 0;
            continue;
        }
        if (finished >> i & 1)
            continue;
        rc = numoe_gpu_piece_next(part, set->streams[i], &held[i][holds[i]], NULL);
        if (rc == -EAGAIN) {
            cr_assert(!any_under_way(set), "it came early");
            cr_assert_lt(in_vain++, 10000, "nothing comes any more");
            continue;
        }
        cr_assert_eq(rc, 0);
        in_vain = 0;
        if (held[i][holds[i]].slice_at)
            cr_assert_eq(compute(set, i, &held[i][holds[i]++]), 0);
        else
            finished |= 1u << i;
    }
    for (uint32_t i = 0; i < set->count; i++)
        while (holds[i] && random_u64() % 8) /* the rest is left to the end */
            cr_assert_eq(numoe_gpu_piece_done(numoe_gpu_model_part(set->model, i), set->streams[i],
                                              &held[i][--holds[i]], NULL),
                         0);
    return true;
}

/* ---- under delays ---------------------------------------------------------------------------- */

/* What may happen between calls. */
static void disturb(struct set *set, uint64_t next)
{
    struct numoe_gpu_model *part =
        numoe_gpu_model_part(set->model, (uint32_t)(random_u64() % set->count));
    const uint64_t layer = random_u64() % 4 ? next : random_u64() % LAYERS;
    const int32_t some[] = {3, 1, 4, 15, 9, 2, 6, 5, 3};

    switch (random_u64() % 16) {
    case 0:
    case 1:
    case 2:
    case 3:
        cr_assert_eq(numoe_gpu_prefetch(set->model, layer, NULL, 0, NULL), 0);
        break;
    case 4:
    case 5:
        cr_assert_eq(numoe_gpu_prefetch(set->model, layer, some, 9, NULL), 0);
        break;
    case 6:
        cr_assert_eq(numoe_gpu_prefetch(part, layer, some, 9, NULL), 0);
        break;
    case 7:
        cr_assert_eq(numoe_gpu_bring(random_u64() % 2 ? part : set->model, layer, 2, NULL), 0);
        break;
    case 8:
        gpu_stream_shrink(&part->stream, EXPERT, NULL);
        break;
    case 9:
        if (!numoe_gpu_hold(part, layer, some, random_u64() % 9, NULL) && random_u64() % 2)
            numoe_gpu_release(part, layer);
        break;
    case 10:
        numoe_gpu_release(part, layer);
        break;
    case 11: {
        /* weights change when nothing computes; what is on its way is of the old ones */
        bool held = false;

        cr_assert_eq(sync_all(set), 0);
        for (uint32_t i = 0; i < set->count; i++)
            held = held || numoe_gpu_model_part(set->model, i)->stream.cache.frozen[layer];
        if (held)
            break;
        generations[layer]++;
        paint(layer);
        break;
    }
    default:
        break;
    }
}

static void run_seed(uint64_t seed, uint64_t *passed)
{
    const struct numoe_gpu_model_options options = options_of(seed);
    struct numoe_gpu_report report;
    uint64_t layer = 0;
    struct set set;

    set_make(&set, 2 + (uint32_t)(seed % 3), seed);
    set_model(&set, &options);
    for (uint32_t i = 0; i < set.count; i++) {
        struct gpu_relay_side *side = &set.model->several->relay->sides[i];
        const uint64_t most = EXPERT * (2 + random_u64() % 20); /* of other sizes each */

        side->window.bytes = side->window.bytes < most ? side->window.bytes : most;
    }
    for (int call = 0; call < 60; call++) {
        bool all = true;

        cr_assert_eq(call_begin(&set, layer, random_u64() % 2 ? 90 : 25, NULL), 0);
        cr_assert_eq(numoe_gpu_pieces_begin(set.model, layer, NULL, 0, 0, NULL), -EBUSY);
        cr_assert_eq(
            numoe_gpu_pieces_begin(numoe_gpu_model_part(set.model, 1), layer, NULL, 0, 0, NULL),
            -EBUSY);
        if (random_u64() % 2)
            cr_assert_eq(call_in_turns(&set, NULL), 0);
        else
            all = call_at_random(&set, random_u64() % 6 == 0);
        end_all(&set);
        if (!all || random_u64() % 4) {
            cr_assert_eq(sync_all(&set), 0);
            cr_assert(!all || each_once(&set), "seed %d, call %d", (int)seed, call);
        } else {
            /* the next one follows while this one's computations are still to come */
            const uint64_t after = (layer + 1) % LAYERS;

            cr_assert_eq(numoe_gpu_prefetch(set.model, after, NULL, 0, NULL), 0);
            cr_assert_eq(sync_all(&set), 0);
            cr_assert(each_once(&set), "seed %d, call %d", (int)seed, call);
        }
        layer = random_u64() % 6 ? (layer + 1) % LAYERS : random_u64() % LAYERS;
        disturb(&set, layer);
    }
    numoe_gpu_model_report(set.model, &report);
    cr_expect(report.passes && !*report.pass_note, "%s", report.pass_note);
    cr_expect_eq(report.passed_bytes, report.passed_experts * EXPERT);
    cr_expect_gt(report.passed_experts, 0);
    *passed += report.passed_experts;
    set_free(&set);
}

Test(gpu_relay, tens_of_thousands_of_patterns_are_passed_on, .timeout = 600)
{
    uint64_t passed = 0;

    random_state = 9;
    patterns_make();
    for (uint64_t seed = 1; seed <= 60; seed++)
        run_seed(seed, &passed);
    cr_log_info("%llu experts passed on, %llu checked", (unsigned long long)passed,
                (unsigned long long)checked);
    cr_expect_gt(passed, 40000);
    cr_expect_gt(checked, passed);
    regions_free();
}

/* ---- once over each link --------------------------------------------------------------------- */

Test(gpu_relay, every_expert_crosses_one_link, .timeout = 60)
{
    random_state = 2;
    patterns_make();
    for (uint32_t count = 2; count <= MOST; count++) {
        struct numoe_gpu_model_options options = options_of(1);
        struct numoe_gpu_report report, part;
        uint64_t wanted = 0;
        struct set set;

        options.stream = true; /* nothing stays */
        options.window_bytes = 100 * EXPERT;
        set_make(&set, count, count);
        set_model(&set, &options);
        for (uint64_t layer = 0; layer < LAYERS; layer++) {
            cr_assert_eq(call_begin(&set, layer, 100, NULL), 0);
            cr_assert_eq(call_in_turns(&set, NULL), 0);
            end_all(&set);
            cr_assert_eq(sync_all(&set), 0);
            cr_assert(each_once(&set));
            for (int e = 0; e < EXPERTS; e++)
                wanted += set.need[e];
        }
        numoe_gpu_model_report(set.model, &report);
        cr_expect_eq(report.copied_experts, wanted);
        cr_expect_eq(report.copied_bytes, wanted * EXPERT);
        cr_expect_eq(report.passed_experts, (count - 1) * wanted);
        for (uint32_t i = 0; i < count; i++) {
            numoe_gpu_model_report(numoe_gpu_model_part(set.model, i), &part);
            cr_expect_eq(part.copied_experts + part.passed_experts, wanted);
            cr_expect_lt(part.copied_experts, wanted / count + LAYERS + 1);
            cr_expect_gt(part.device_bytes, set.model->several->relay->sides[i].window.bytes);
        }
        set_free(&set);
    }
    regions_free();
}

/* Ids of each device's own tokens: an expert that some need is passed on to these alone. */
Test(gpu_relay, experts_go_to_those_who_need_them, .timeout = 60)
{
    random_state = 12;
    patterns_make();
    for (uint64_t seed = 1; seed <= 40; seed++) {
        const uint32_t count = 2 + (uint32_t)(seed % 3);
        struct numoe_gpu_model_options options = options_of(seed);
        uint64_t copied = 0, passed = 0;
        struct numoe_gpu_report report;
        struct set set;

        options.stream = true; /* nothing stays, and nothing is prefetched */
        set_make(&set, count, seed);
        set_model(&set, &options);
        for (uint64_t layer = 0; layer < LAYERS; layer++) {
            int32_t ids[MOST][EXPERTS];
            const int32_t *lists[MOST];
            uint64_t counts[MOST] = {0};
            bool wants[MOST][EXPERTS] = {{false}};

            set.layer = layer;
            memset(seen, 0, sizeof seen);
            for (uint32_t i = 0; i < count; i++) {
                lists[i] = ids[i];
                for (int32_t e = 0; e < EXPERTS; e++)
                    if (random_u64() % 3 == 0) {
                        ids[i][counts[i]++] = e;
                        wants[i][e] = present(NULL, layer, (uint64_t)e);
                    }
            }
            for (uint64_t e = 0; e < EXPERTS; e++) {
                bool any = false;
                for (uint32_t i = 0; i < count; i++) {
                    any = any || wants[i][e];
                    passed += wants[i][e] &&
                              !gpu_divide_has(&set.model->several->division, i, layer, e, EXPERTS);
                }
                copied += any;
            }
            cr_assert_eq(numoe_gpu_pieces_begin_each(set.model, layer, lists, counts, 1, NULL), 0);
            cr_assert_eq(call_in_turns(&set, NULL), 0);
            end_all(&set);
            cr_assert_eq(sync_all(&set), 0);
            for (uint32_t i = 0; i < count; i++)
                for (int e = 0; e < EXPERTS; e++)
                    cr_assert(seen[i][e] <= 1 && seen[i][e] >= wants[i][e]);
        }
        numoe_gpu_model_report(set.model, &report);
        cr_expect_eq(report.copied_experts, copied);
        cr_expect_eq(report.passed_experts, passed);
        set_free(&set);
    }
    regions_free();
}

/* ---- spans ----------------------------------------------------------------------------------- */

enum { SPANS = 2048 };

static struct {
    struct numoe_gpu_span spans[SPANS];
    uint32_t count;
} told;

static void tell(void *user, const struct numoe_gpu_span *span)
{
    (void)user;
    cr_assert_lt(told.count, SPANS);
    told.spans[told.count++] = *span;
}

static int earlier(const void *a, const void *b)
{
    const struct numoe_gpu_span *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

/* All of what is passed on to a device is on a lane of its own there. */
Test(gpu_relay, spans_of_what_is_passed_on, .timeout = 60)
{
    random_state = 13;
    patterns_make();
    for (uint64_t seed = 1; seed <= 8; seed++) {
        const uint32_t count = 2 + (uint32_t)(seed % 3);
        const struct numoe_gpu_model_options options = options_of(seed);
        uint64_t bytes[MOST][3] = {{0}}, experts[MOST][3] = {{0}}, end[MOST][3] = {{0}};
        struct set set;

        told.count = 0;
        set_make(&set, count, seed);
        set_model(&set, &options);
        cr_assert_eq(numoe_gpu_trace(set.model, tell, NULL, NULL), 0);
        for (uint64_t call = 0; call < 12; call++) {
            cr_assert_eq(call_begin(&set, call % LAYERS, call < 11 ? 80 : 0, NULL), 0);
            cr_assert_eq(call_in_turns(&set, NULL), 0);
            end_all(&set);
            for (uint32_t i = 0; i < count; i++) { /* what is over is told by the next call */
                cr_assert_eq(
                    fake_stream_sync(set.fake[i], set.model->several->relay->sides[i].passes), 0);
                cr_assert_eq(fake_stream_sync(set.fake[i],
                                              numoe_gpu_model_part(set.model, i)->stream.copies),
                             0);
            }
        }
        cr_assert_eq(sync_all(&set), 0);
        qsort(told.spans, told.count, sizeof told.spans[0], earlier);
        for (uint32_t k = 0; k < told.count; k++) {
            const struct numoe_gpu_span *s = &told.spans[k];

            cr_assert(s->kind == NUMOE_GPU_SPAN_COPY || s->kind == NUMOE_GPU_SPAN_PASS);
            cr_assert_lt(s->part, count);
            cr_expect_leq(s->begin_ns, s->end_ns);
            cr_expect_geq(s->begin_ns, end[s->part][s->kind], "spans of a lane do not overlap");
            cr_expect_eq(s->bytes, s->experts * EXPERT);
            cr_expect_lt(s->layer, LAYERS);
            end[s->part][s->kind] = s->end_ns;
            bytes[s->part][s->kind] += s->bytes;
            experts[s->part][s->kind] += s->experts;
        }
        for (uint32_t i = 0; i < count; i++) {
            struct numoe_gpu_report report;

            numoe_gpu_model_report(numoe_gpu_model_part(set.model, i), &report);
            cr_expect_gt(report.passed_bytes, 0);
            cr_expect_eq(bytes[i][NUMOE_GPU_SPAN_PASS], report.passed_bytes);
            cr_expect_eq(experts[i][NUMOE_GPU_SPAN_PASS], report.passed_experts);
            cr_expect_eq(bytes[i][NUMOE_GPU_SPAN_COPY], report.copied_bytes);
        }
        set_free(&set);
    }
    regions_free();
}

/* ---- who stays ------------------------------------------------------------------------------- */

/* What stays with its owner crosses no link again, and is passed on from there; what a device holds
 * itself is not passed to it. */
Test(gpu_relay, experts_that_stay, .timeout = 60)
{
    const int32_t mine[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    struct numoe_gpu_model_options options = options_of(2);
    struct numoe_gpu_report before, after;
    struct set set;
    uint8_t held[EXPERTS];

    random_state = 3;
    patterns_make();
    options.stream = false;
    options.cache_bytes = (uint64_t)LAYERS * EXPERTS * EXPERT;
    options.window_bytes = 10 * EXPERT;
    set_make(&set, 3, 6);
    set_model(&set, &options);
    for (int round = 0; round < 2; round++) {
        numoe_gpu_model_report(set.model, &before);
        cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
        cr_assert_eq(call_in_turns(&set, NULL), 0);
        end_all(&set);
        cr_assert_eq(sync_all(&set), 0);
        cr_assert(each_once(&set));
        numoe_gpu_model_report(set.model, &after);
        cr_expect_eq(after.copied_experts - before.copied_experts, round ? 0 : EXPERTS);
        cr_expect_eq(after.passed_experts - before.passed_experts, 2 * EXPERTS);
    }
    for (uint32_t i = 0; i < 3; i++) /* the tables of what stays have come to each by its stream */
        cr_expect_eq(((const struct fake_stream *)set.streams[i])->copies_in, 0,
                     "a copy waits for all that is queued for the link");
    /* for graphs of one device: all of them, over its own link */
    cr_assert_eq(numoe_gpu_hold(numoe_gpu_model_part(set.model, 1), 0, mine, 10, NULL), 0);
    numoe_gpu_held(numoe_gpu_model_part(set.model, 1), 0, held);
    for (int e = 0; e < 10; e++)
        cr_expect(held[e]);
    numoe_gpu_model_report(set.model, &before);
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    cr_assert_eq(call_in_turns(&set, NULL), 0);
    end_all(&set);
    cr_assert_eq(sync_all(&set), 0);
    cr_assert(each_once(&set));
    numoe_gpu_model_report(set.model, &after);
    cr_expect_lt(after.passed_experts - before.passed_experts, 2 * EXPERTS);
    /* a device alone: all over its own link, into a call of its own */
    {
        struct numoe_gpu_model *part = numoe_gpu_model_part(set.model, 2);
        struct numoe_gpu_piece piece;

        set.layer = 3;
        memset(seen, 0, sizeof seen);
        cr_assert_eq(numoe_gpu_pieces_begin(part, 3, NULL, 0, 0, NULL), 0);
        cr_expect_eq(numoe_gpu_pieces_begin(set.model, 0, NULL, 0, 0, NULL), -EBUSY);
        for (;;) {
            cr_assert_eq(numoe_gpu_piece_next(part, set.streams[2], &piece, NULL), 0);
            if (!piece.slice_at)
                break;
            cr_assert_eq(compute(&set, 2, &piece), 0);
            cr_assert_eq(numoe_gpu_piece_done(part, set.streams[2], &piece, NULL), 0);
        }
        numoe_gpu_pieces_end(part, set.streams[2]);
        cr_assert_eq(sync_all(&set), 0);
        for (int e = 0; e < EXPERTS; e++)
            cr_expect_eq(seen[2][e], 1);
    }
    set_free(&set);
    regions_free();
}

/* Experts that were brought to where they stay without anybody waiting for them. */
Test(gpu_relay, experts_on_their_way_to_stay, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    uint32_t tokens_of[EXPERTS] = {0}, kept = 0;
    struct numoe_gpu_model *owner;
    struct set set;

    random_state = 3;
    patterns_make();
    options.stream = false;
    options.cache_bytes = (uint64_t)LAYERS * EXPERTS * EXPERT / 2;
    options.window_bytes = 10 * EXPERT;
    set_make(&set, 2, 5);
    set_model(&set, &options);
    set.fake[0]->speed = 0; /* what it is waited for, and nothing else */
    set.fake[1]->speed = 255;
    owner = numoe_gpu_model_part(set.model, 0);
    for (uint64_t e = 0; e < EXPERTS; e++)
        tokens_of[e] = gpu_divide_has(&set.model->several->division, 0, 0, e, EXPERTS);
    numoe_gpu_asked(owner, 0, tokens_of, 100);
    cr_assert_eq(numoe_gpu_bring(owner, 0, 4, NULL), 0);
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    for (int e = 0; e < EXPERTS; e++)
        kept += set.model->several->relay->sides[0].kept[e];
    cr_expect_geq(kept, 3);
    cr_assert_eq(call_in_turns(&set, NULL), 0);
    end_all(&set);
    cr_assert_eq(sync_all(&set), 0);
    cr_expect(each_once(&set));
    set_free(&set);
    regions_free();
}

static bool later(void *left)
{
    uint32_t *times = left;

    return *times == 0 || --*times == 0;
}

static bool any_here(struct gpu_relay_side *side)
{
    bool any = false;

    for (uint32_t k = 0; k < side->window.count; k++) {
        const struct gpu_piece *p = gpu_window_piece(&side->window, k);
        any = any || (p->state == GPU_PIECE_QUEUED && side->passed[p - side->window.pieces].here);
    }
    return any;
}

static const float *some_bias(void *user, uint64_t layer, uint64_t e)
{
    static const float row[32];

    (void)user;
    (void)layer;
    (void)e;
    return row;
}

/* With biases every computation of the layer marks it as used, that with passed experts, too: what
 * is on its way to stay is not passed on before it is there. */
Test(gpu_relay, what_uses_biases_does_not_pass_what_is_on_its_way_to_stay, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    uint32_t tokens_of[EXPERTS] = {0}, kept = 0, blocked = 200;
    struct numoe_gpu_source source = patterns_source();
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *part[2];
    struct numoe_gpu_piece piece;
    struct set set;
    uint64_t used;

    random_state = 3;
    patterns_make();
    source.down_bias = true;
    source.bias = some_bias;
    options.stream = false;
    options.cache_bytes = (uint64_t)LAYERS * EXPERTS * EXPERT / 2;
    options.window_bytes = 100 * EXPERT;
    set_make(&set, 2, 5);
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &set.model, &error), 0,
                 "%s", error.message);
    for (uint32_t i = 0; i < 2; i++)
        part[i] = numoe_gpu_model_part(set.model, i);
    cr_assert_eq(call_begin(&set, 0, 0, NULL), 0); /* biases */
    end_all(&set);
    cr_assert_eq(fake_stream_sync(set.fake[0], part[0]->stream.copies), 0);
    for (uint64_t e = 0; e < EXPERTS; e++)
        tokens_of[e] = gpu_divide_has(&set.model->several->division, 0, 0, e, EXPERTS);
    numoe_gpu_asked(part[0], 0, tokens_of, 100);
    set.fake[0]->speed = 0;
    set.fake[1]->speed = 255;
    cr_assert_eq(fake_push(set.fake[0], part[0]->stream.copies,
                           (struct fake_op){.what = FAKE_RUN, .to = &blocked, .run = later}),
                 0);
    cr_assert_eq(numoe_gpu_bring(part[0], 0, 4, NULL), 0);
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    for (int e = 0; e < EXPERTS; e++)
        kept += set.model->several->relay->sides[0].kept[e];
    cr_assert_geq(kept, 3);
    /* the owner first computes with what the other device passes on to it */
    while (!any_here(&set.model->several->relay->sides[0])) {
        cr_assert_eq(numoe_gpu_piece_next(part[1], set.streams[1], &piece, NULL), 0);
        cr_assert_not_null(piece.slice_at);
        cr_assert_eq(compute(&set, 1, &piece), 0);
        cr_assert_eq(numoe_gpu_piece_done(part[1], set.streams[1], &piece, NULL), 0);
        while (fake_step(set.fake[0], set.model->several->relay->sides[0].passes))
            ;
    }
    cr_assert_eq(numoe_gpu_piece_next(part[0], set.streams[0], &piece, NULL), 0);
    cr_assert(gpu_relay_has(set.model->several->relay, 0, piece.handle));
    cr_assert_eq(compute(&set, 0, &piece), 0);
    used = ((const struct fake_event *)part[0]->stream.used[0])->recorded;
    cr_assert_eq(numoe_gpu_piece_done(part[0], set.streams[0], &piece, NULL), 0);
    cr_expect_gt(((const struct fake_event *)part[0]->stream.used[0])->recorded, used,
                 "biases may be written while they are read");
    while (fake_step(set.fake[0], set.streams[0]))
        ;
    cr_assert_gt(blocked, 0);
    for (;;) { /* the other one gets all, what stays with the owner too */
        cr_assert_eq(numoe_gpu_piece_next(part[1], set.streams[1], &piece, NULL), 0);
        if (!piece.slice_at)
            break;
        cr_assert_eq(compute(&set, 1, &piece), 0);
        cr_assert_eq(numoe_gpu_piece_done(part[1], set.streams[1], &piece, NULL), 0);
    }
    cr_assert_eq(call_in_turns(&set, &error), 0, "%s", error.message);
    end_all(&set);
    cr_assert_eq(sync_all(&set), 0);
    cr_expect(each_once(&set));
    set_free(&set);
    regions_free();
}

/* Pieces that were taken are not lost to who asks for something else meanwhile. */
Test(gpu_relay, what_is_refused_in_a_call_does_not_end_it, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    uint32_t tokens_of[EXPERTS], before;
    struct numoe_gpu_piece piece, odd;
    struct set set;
    uint32_t which;

    random_state = 3;
    patterns_make();
    options.stream = false;
    options.cache_bytes = (uint64_t)LAYERS * EXPERTS * EXPERT / 2;
    set_make(&set, 2, 5);
    set_model(&set, &options);
    for (int e = 0; e < EXPERTS; e++)
        tokens_of[e] = 10;
    numoe_gpu_asked(set.model, 1, tokens_of, 100);
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    cr_assert_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), 0);
    cr_assert_not_null(piece.slice_at);
    cr_assert_eq(compute(&set, which, &piece), 0);
    before = seen[which][0];
    cr_expect_eq(numoe_gpu_bring(set.model, 1, 2, NULL), -EBUSY);
    for (uint32_t i = 0; i < 2; i++) {
        struct numoe_gpu_model *part = numoe_gpu_model_part(set.model, i);

        cr_expect(part->stream.in_call);
        cr_expect_eq(numoe_gpu_bring(part, 1, 2, NULL), -EBUSY);
        cr_expect_eq(numoe_gpu_hold(part, 1, NULL, 0, NULL), -EBUSY);
        cr_expect_eq(numoe_gpu_prefetch(part, 1, NULL, 0, NULL), 0);
        cr_expect(part->stream.in_call);
    }
    cr_expect_eq(seen[which][0], before, "a computation was waited for");
    /* the whole model has no pieces of its own */
    odd = piece;
    cr_expect_eq(numoe_gpu_piece_done(set.model, set.streams[0], &odd, NULL), -ENOTSUP);
    cr_expect_eq(numoe_gpu_piece_next(set.model, set.streams[0], &odd, NULL), -ENOTSUP);
    cr_expect_eq(numoe_gpu_piece_marlin(set.model, set.streams[0], &piece, NULL, false,
                                        &(struct numoe_marlin){0}, NULL),
                 -ENOTSUP);
    cr_assert_eq(numoe_gpu_piece_done(numoe_gpu_model_part(set.model, which), set.streams[which],
                                      &piece, NULL),
                 0);
    cr_assert_eq(call_in_turns(&set, NULL), 0);
    end_all(&set);
    cr_assert_eq(sync_all(&set), 0);
    cr_expect(each_once(&set));
    set_free(&set);
    regions_free();
}

/* ---- who waits for whom ---------------------------------------------------------------------- */

Test(gpu_relay, a_device_that_takes_nothing_holds_up_others_only_so_far, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    struct numoe_gpu_piece held[2][EXPERTS + 1];
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *part[2];
    uint32_t holds[2] = {0};
    struct set set;
    int rc;

    random_state = 4;
    patterns_make();
    options.stream = true;
    options.window_bytes = 4 * EXPERT;
    options.piece_bytes = 1;
    set_make(&set, 2, 3);
    set_model(&set, &options);
    for (int i = 0; i < 2; i++)
        part[i] = numoe_gpu_model_part(set.model, (uint32_t)i);
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    /* device 0 takes and gives back nothing: it is told so; then the other one, too */
    for (int i = 0; i < 2; i++) {
        while (!(rc = numoe_gpu_piece_next(part[i], set.streams[i], &held[i][holds[i]], &error)) &&
               held[i][holds[i]].slice_at)
            cr_assert_eq(compute(&set, (uint32_t)i, &held[i][holds[i]++]), 0);
        cr_expect_eq(rc, -EAGAIN, "%d: %s", rc, error.message);
        cr_assert_gt(holds[i], 0);
    }
    {
        struct numoe_gpu_piece piece;
        uint32_t which;

        cr_expect_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), -EAGAIN);
    }
    /* what was held is given back, latest first, and all goes on */
    for (int i = 0; i < 2; i++)
        while (holds[i])
            cr_assert_eq(numoe_gpu_piece_done(part[i], set.streams[i], &held[i][--holds[i]], NULL),
                         0);
    cr_assert_eq(call_in_turns(&set, &error), 0, "%s", error.message);
    end_all(&set);
    cr_assert_eq(sync_all(&set), 0);
    cr_expect(each_once(&set));
    set_free(&set);
    regions_free();
}

/* A consumer that was told the end, or was not, and what others then get. */
Test(gpu_relay, a_call_ends_for_all_devices, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of(2);
    struct numoe_gpu_piece piece;
    struct set set;
    uint32_t which;

    random_state = 5;
    patterns_make();
    set_make(&set, 3, 4);
    set_model(&set, &options);
    cr_expect_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), -EINVAL);
    cr_expect_eq(numoe_gpu_pieces_begin(set.model, LAYERS, NULL, 0, 0, NULL), -EINVAL);
    /* nothing is wanted: nothing comes */
    cr_assert_eq(call_begin(&set, 0, 0, NULL), 0);
    cr_assert_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), 0);
    cr_expect_null(piece.slice_at);
    end_all(&set);
    /* one that gives up, gives up for all */
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    cr_assert_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), 0);
    cr_assert_not_null(piece.slice_at);
    numoe_gpu_pieces_end(numoe_gpu_model_part(set.model, 1), set.streams[1]);
    cr_expect_eq(
        numoe_gpu_piece_next(numoe_gpu_model_part(set.model, 1), set.streams[1], &piece, NULL),
        -EINVAL);
    cr_expect_eq(
        numoe_gpu_piece_next(numoe_gpu_model_part(set.model, 0), set.streams[0], &piece, NULL),
        -ECANCELED);
    cr_expect_eq(numoe_gpu_pieces_begin(set.model, 0, NULL, 0, 0, NULL), -EBUSY);
    end_all(&set);
    /* one that has had all may go before the others have */
    cr_assert_eq(call_begin(&set, 1, 100, NULL), 0);
    for (uint32_t i = 0; i < 3;) {
        struct numoe_gpu_model *part = numoe_gpu_model_part(set.model, i);

        for (;;) {
            const int rc = numoe_gpu_piece_next(part, set.streams[i], &piece, NULL);

            /* what only others can give back */
            if (rc == -EAGAIN)
                break;
            cr_assert_eq(rc, 0);
            if (!piece.slice_at)
                break;
            cr_assert_eq(compute(&set, i, &piece), 0);
            cr_assert_eq(numoe_gpu_piece_done(part, set.streams[i], &piece, NULL), 0);
        }
        if (set.model->several->relay->sides[i].finished)
            numoe_gpu_pieces_end(part, set.streams[i]);
        for (i = 0; i < 3 && set.model->several->relay->sides[i].ended;)
            i++;
        if (i < 3 && !set.model->several->relay->running)
            break;
        if (i < 3) { /* in turns */
            uint32_t next = (uint32_t)(random_u64() % 3);
            while (set.model->several->relay->sides[next].ended)
                next = (next + 1) % 3;
            i = next;
        }
    }
    cr_expect(!set.model->several->relay->running);
    cr_assert_eq(sync_all(&set), 0);
    cr_expect(each_once(&set));
    /* in mid-flight */
    cr_assert_eq(numoe_gpu_prefetch(set.model, 2, NULL, 0, NULL), 0);
    cr_assert_eq(call_begin(&set, 2, 100, NULL), 0);
    cr_assert_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), 0);
    set_free(&set);
    regions_free();
}

static bool is_empty(const void *stream)
{
    const struct fake_stream *s = stream;

    return s->head == s->tail;
}

/* Given up with copies from device to device under way, and a computation with what was passed on:
 * the end waits for both, as memory is given on behind it. */
Test(gpu_relay, an_end_waits_for_what_reads_and_writes, .timeout = 120)
{
    uint32_t copies = 0, computed = 0;

    random_state = 11;
    patterns_make();
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct numoe_gpu_model_options options = options_of(seed);
        struct gpu_relay_side *sides;
        struct numoe_gpu_piece piece;
        struct set set;
        bool over = false;

        options.stream = true;
        set_make(&set, 2, 5 * seed + 1); /* slow */
        set_model(&set, &options);
        sides = set.model->several->relay->sides;
        cr_assert_eq(call_begin(&set, seed % LAYERS, 100, NULL), 0);
        while (!over) {
            uint32_t i = MOST;
            bool passed;

            cr_assert_eq(numoe_gpu_piece_any(set.model, set.streams, &i, &piece, NULL), 0);
            if (!piece.slice_at)
                break;
            passed = gpu_relay_has(set.model->several->relay, i, piece.handle);
            over = passed && random_u64() % 3 == 0;
            for (uint32_t k = 0; over && k < 2; k++)
                set.fake[k]->speed = 0;
            cr_assert_eq(compute(&set, i, &piece), 0);
            if (!over)
                cr_assert_eq(numoe_gpu_piece_done(numoe_gpu_model_part(set.model, i),
                                                  set.streams[i], &piece, NULL),
                             0);
            else
                computed += !is_empty(set.streams[i]);
        }
        for (uint32_t i = 0; i < 2; i++)
            copies += !is_empty(sides[i].passes);
        for (uint32_t i = 0; i < 2; i++) {
            numoe_gpu_pieces_end(numoe_gpu_model_part(set.model, i), set.streams[i]);
            if (over && gpu_relay_has(set.model->several->relay, i, piece.handle))
                cr_expect(is_empty(set.streams[i]), "it computes with what was given up");
        }
        for (uint32_t i = 0; i < 2; i++)
            cr_expect(is_empty(sides[i].passes), "copies from device to device are under way");
        set_free(&set);
    }
    cr_expect_gt(copies, 3);
    cr_expect_gt(computed, 3);
    regions_free();
}

/* ---- what cannot be had ---------------------------------------------------------------------- */

/* Two layers right, whichever way. */
static void expect_right(struct set *set)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (uint64_t layer = 0; layer < 2; layer++) {
        cr_assert_eq(call_begin(set, layer, 80, &error), 0, "%s", error.message);
        cr_assert_eq(call_in_turns(set, &error), 0, "%s", error.message);
        end_all(set);
        cr_assert_eq(sync_all(set), 0);
        cr_assert(each_once(set));
    }
}

Test(gpu_relay, devices_that_do_not_reach_each_other_copy_all_themselves, .timeout = 60)
{
    static const char *const says[] = {"opening GPU", "is not what is there", "its own link"};

    random_state = 6;
    patterns_make();
    for (int way = 0; way < 3; way++) {
        struct numoe_gpu_model_options options = options_of(1);
        struct numoe_gpu_report report;
        struct set set;

        set_make(&set, 3, (uint64_t)way + 1);
        set.fake[1]->no_peers = way == 0;
        set.fake[2]->spoils = way == 1;
        if (way == 2)
            options.whole = NUMOE_GPU_WHOLE_LINKS;
        set_model(&set, &options);
        expect_right(&set);
        numoe_gpu_model_report(set.model, &report);
        cr_expect_not(report.passes);
        cr_expect_eq(report.passed_bytes, 0);
        cr_expect_not_null(strstr(report.pass_note, says[way]), "%s", report.pass_note);
        set_free(&set);
    }
    regions_free();
}

Test(gpu_relay, what_is_no_faster_is_not_taken_by_itself, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    const struct gpu_links slow = {.host_gbs = {50, 52}, .peer_gbs = {60, 300}};
    const struct gpu_links fast = {.host_gbs = {50, 52}, .peer_gbs = {400, 300}};
    const struct numoe_error none = NUMOE_ERROR_INIT;
    struct numoe_gpu_report report = {0};
    struct gpu_relay relay = {0};
    struct numoe_error error = NUMOE_ERROR_INIT;
    const struct numoe_gpu_source source = patterns_source();
    struct set set;

    patterns_make();
    set_make(&set, 2, 5);
    for (int way = 0; way < 3; way++) {
        options.whole = way == 2 ? NUMOE_GPU_WHOLE_PEERS : NUMOE_GPU_WHOLE_AUTO;
        relay = (struct gpu_relay){0};
        report = (struct numoe_gpu_report){0};
        cr_assert_eq(gpu_relay_open(&relay, set.gpu, 2, &source, &options, NULL), 0);
        cr_assert_eq(gpu_relay_choose(&relay, &options, way == 1 ? &fast : &slow, &none, NULL), 0);
        cr_expect_eq(relay.passes, way > 0);
        gpu_relay_report(&relay, &report);
        cr_expect_eq(report.peer_gbs, way == 1 ? 300 : 60);
        cr_expect(way ? !*report.pass_note : strstr(report.pass_note, "60.0 GB/s") != NULL, "%s",
                  report.pass_note);
        gpu_relay_close(&relay);
    }
    /* nor if there is no room for what is passed */
    relay = (struct gpu_relay){0};
    set.fake[1]->memory = options.keep_free_bytes + 4 * 2 * EXPERT - 1;
    cr_assert_eq(gpu_relay_open(&relay, set.gpu, 2, &source, &options, NULL), 0);
    cr_assert_eq(gpu_relay_choose(&relay, &options, &fast, &none, NULL), 0);
    cr_expect_not(relay.passes);
    cr_expect_not_null(strstr(relay.note, "no room for two experts"), "%s", relay.note);
    gpu_relay_close(&relay);
    set.fake[1]->memory = 64 << 20;
    /* where all experts fit nothing is to be passed */
    options.whole = NUMOE_GPU_WHOLE_AUTO;
    options.stream = false;
    options.cache_bytes = 0;
    relay = (struct gpu_relay){0};
    options.whole = 99;
    cr_expect_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &set.model, &error),
                 -EINVAL);
    options.whole = NUMOE_GPU_WHOLE_PEERS;
    set_model(&set, &options);
    {
        struct gpu_relay *r = set.model->several->relay;
        struct gpu_relay again = {
            .lock = PTHREAD_MUTEX_INITIALIZER, .count = 2, .source = &source, .passes = true};

        for (uint32_t i = 0; i < 2; i++) {
            again.sides[i].gpu = set.gpu[i];
            again.sides[i].model = r->sides[i].model;
        }
        options.whole = NUMOE_GPU_WHOLE_AUTO;
        cr_assert_eq(gpu_relay_make(&again, r->division, &options, NULL), 0);
        cr_expect_not(again.passes);
        cr_expect_not_null(strstr(again.note, "room for all"), "%s", again.note);
        gpu_relay_close(&again);
    }
    {
        uint64_t done, tokens;
        const struct numoe_gpu_call call = {.tokens = 1, .top_k = 1};

        cr_expect_eq(numoe_gpu_forward(set.model, 0, &call, &done, NULL), -ENOTSUP);
        cr_expect_eq(numoe_gpu_start(set.model, 0, &call, 0, &tokens, NULL), -ENOTSUP);
    }
    expect_right(&set);
    set_free(&set);
    regions_free();
}

/* Memory that is not pinned would have to be waited for. */
Test(gpu_relay, memory_that_is_not_pinned_is_refused, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    struct set set;

    patterns_make();
    options.no_pinning = true;
    set_make(&set, 2, 5);
    set_model(&set, &options);
    cr_expect_eq(numoe_gpu_pieces_begin(set.model, 0, NULL, 0, 0, NULL), -ENOTSUP);
    set_free(&set);
    regions_free();
}

/* As numoe certify asks it, of a device that is right and of one that is not. */
Test(gpu_relay, a_device_taken_as_two_is_certified, .timeout = 60)
{
    struct numoe_gpu_finding found;
    struct set set;

    for (int spoils = 0; spoils < 2; spoils++) {
        set_make(&set, 1, 3);
        cr_assert_eq(numoe_gpu_certify_passing(set.gpu[0], &found, NULL), 0);
        cr_expect(found.there && found.ok, "%s", found.text);
        set.fake[0]->spoils = spoils;
        if (spoils) {
            cr_assert_eq(numoe_gpu_certify_passing(set.gpu[0], &found, NULL), 0);
            cr_expect(found.there && !found.ok);
            cr_expect_not_null(strstr(found.text, "is not what is there"), "%s", found.text);
        }
        set_free(&set);
    }
    /* at every step */
    for (uint64_t at = 0, reached = UINT64_MAX; at < reached; at += 1 + at / 60)
        for (int code = 2; code <= 700; code += 698) {
            struct numoe_error error = NUMOE_ERROR_INIT;
            int rc;

            set_make(&set, 1, 3);
            set.fake[0]->fail_at = set.fake[0]->calls + at;
            set.fake[0]->fail_code = code;
            rc = numoe_gpu_certify_passing(set.gpu[0], &found, &error);
            cr_expect(rc ? error.message[0] : found.there, "%d at %d", code, (int)at);
            cr_expect(rc || found.ok || *found.text);
            reached = set.fake[0]->calls;
            set.fake[0]->fail_at = UINT64_MAX;
            set_free(&set);
        }
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Code at every step of one device. */
static void fail_everywhere(uint32_t count, uint32_t victim, int code)
{
    const struct numoe_gpu_source source = patterns_source();
    uint64_t at, reached, left_off = 0;

    for (at = 0;; at += 1 + at / 40) {
        struct numoe_gpu_model_options options = options_of(at % 7 + 1);
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_gpu_report report;
        uint32_t failures = 0;
        struct fake *f;
        struct set set;
        int rc;

        options.chunk_bytes = 0; /* pinning has tests of its own */
        set_make(&set, count, at + 1);
        f = set.fake[victim];
        f->fail_at = f->calls + at;
        f->fail_code = code;
        rc = numoe_gpu_model_create_over(set.gpu, count, &source, &options, &set.model, &error);
        if (rc) {
            cr_expect_null(set.model);
            cr_expect(error.message[0]);
        }
        if (!rc) {
            numoe_gpu_model_report(set.model, &report);
            rc = report.pinned_bytes != report.arena_bytes; /* and is refused then */
        }
        for (int i = 0; !rc && i < 5; i++) {
            const uint64_t failing = f->fail_at;
            int again = call_begin(&set, (uint64_t)i % LAYERS, 90, &error);
            const bool begun = !again;

            if (begun)
                again = call_in_turns(&set, &error);
            if (begun)
                end_all(&set);
            f->fail_at = UINT64_MAX;
            if (!f->sticky) {
                cr_assert_eq(sync_all(&set), 0);
                cr_assert(again || each_once(&set), "code %d at %d of device %u, call %d", code,
                          (int)at, victim, i);
            }
            f->fail_at = failing < f->calls ? UINT64_MAX : failing;
            failures += again != 0;
            cr_expect(failures <= 1 || f->sticky, "two calls failed");
            if (!begun && i < 4)
                cr_expect(again == -EIO || again == gpu_errno_of(code), "%d", again);
        }
        if (set.model) {
            numoe_gpu_model_report(set.model, &report);
            left_off += !report.passes;
            cr_expect_eq(report.passes, !*report.pass_note);
            cr_expect_eq(numoe_gpu_model_health(set.model, NULL), f->sticky ? -EIO : 0);
        }
        f->fail_at = UINT64_MAX;
        reached = f->calls;
        set_free(&set);
        if (at > reached)
            break;
    }
    cr_expect_gt(at, 100, "only %d steps", (int)at);
    cr_expect_gt(left_off, 0);
}

Test(gpu_relay, one_of_two_fails_at_every_step, .timeout = 600)
{
    random_state = 7;
    patterns_make();
    for (uint32_t victim = 0; victim < 2; victim++) {
        fail_everywhere(2, victim, 2);
        fail_everywhere(2, victim, 700);
    }
    regions_free();
}

Test(gpu_relay, one_of_four_fails_at_every_step, .timeout = 600)
{
    random_state = 8;
    patterns_make();
    fail_everywhere(4, 1, 1);
    fail_everywhere(4, 3, 719);
    regions_free();
}
