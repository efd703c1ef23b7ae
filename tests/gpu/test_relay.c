/*
 * Experts that are whole on several devices, tens of thousands of them passed on from device to
 * device under random delays of each: whenever a computation happens, every expert that its table
 * has is there as it was when the call was made, and each device gets each expert once. And who
 * waits for whom. Failures are in test_relay_failures.c.
 */
#include "relay_set.h"

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

    set_open(&set, 2 + (uint32_t)(seed % 3), seed, &options);
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
        const struct numoe_gpu_model_options options = options_of_room(0, 100);
        struct numoe_gpu_report report, part;
        uint64_t wanted = 0;
        struct set set;

        set_open(&set, count, count, &options);
        for (uint64_t layer = 0; layer < LAYERS; layer++) {
            cr_assert_eq(call_begin(&set, layer, 100, NULL), 0);
            take_all(&set);
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
        const bool bare = seed % 2; /* nothing stays, and nothing is prefetched */
        struct numoe_gpu_report report;
        struct set set;

        options.stream = options.stream || bare;
        set_open(&set, count, seed, &options);
        for (uint64_t call = 0; call < 4 * LAYERS; call++) {
            const uint64_t layer = call % LAYERS;
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
            if (!bare)
                disturb(&set, (layer + 1) % LAYERS);
        }
        numoe_gpu_model_report(set.model, &report);
        cr_expect(!bare || report.copied_experts == copied);
        cr_expect(!bare || report.passed_experts == passed);
        cr_expect_gt(report.passed_experts, 0);
        set_free(&set);
    }
    regions_free();
}

/* An owner copies for others what they have not, and nothing that only those need who have it. */
Test(gpu_relay, what_is_there_is_not_copied_for_others, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of_room(0, 100);

    random_state = 14;
    patterns_make();
    for (uint32_t all = 0; all < 2; all++) { /* does the third device need them, too? */
        int32_t ids[EXPERTS];
        const int32_t *const lists[MOST] = {ids, ids, ids};
        struct numoe_gpu_report report;
        uint64_t count = 0;
        struct set set;

        set_open(&set, 3, 6, &options);
        for (int32_t e = 0; e < EXPERTS; e++)
            if (present(NULL, 0, (uint64_t)e) &&
                !gpu_divide_has(&set.model->several->division, 1, 0, (uint64_t)e, EXPERTS))
                ids[count++] = e;
        cr_assert_eq(numoe_gpu_prefetch(numoe_gpu_model_part(set.model, 1), 0, ids, count, NULL),
                     0);
        set.layer = 0;
        memset(seen, 0, sizeof seen);
        cr_assert_eq(numoe_gpu_pieces_begin_each(set.model, 0, lists,
                                                 (uint64_t[MOST]){0, count, all * count}, 1, NULL),
                     0);
        cr_assert_eq(call_in_turns(&set, NULL), 0);
        end_all(&set);
        cr_assert_eq(sync_all(&set), 0);
        numoe_gpu_model_report(set.model, &report);
        cr_expect_eq(report.copied_experts, (1 + all) * count);
        for (uint64_t k = 0; k < count; k++) {
            const bool owner =
                gpu_divide_has(&set.model->several->division, 0, 0, (uint64_t)ids[k], EXPERTS);

            cr_expect_eq(seen[1][ids[k]], 1);
            cr_expect_eq(seen[0][ids[k]], all && owner);
            cr_expect_eq(seen[2][ids[k]], all);
        }
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
        set_open(&set, count, seed, &options);
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
    set_open(&set, 3, 6, &options);
    for (int round = 0; round < 2; round++) {
        numoe_gpu_model_report(set.model, &before);
        cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
        take_all(&set);
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
    take_all(&set);
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
    const struct numoe_gpu_model_options options = options_of_room(LAYERS * EXPERTS / 2, 10);
    uint32_t tokens_of[EXPERTS] = {0}, kept = 0;
    struct numoe_gpu_model *owner;
    struct set set;

    random_state = 3;
    patterns_make();
    set_open(&set, 2, 5, &options);
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
    take_all(&set);
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

static void open_with_biases(struct set *set, const struct numoe_gpu_model_options *options)
{
    struct numoe_gpu_source source = patterns_source();
    struct numoe_error error = NUMOE_ERROR_INIT;

    source.down_bias = true;
    source.bias = some_bias;
    set_make(set, 2, 5);
    cr_assert_eq(numoe_gpu_model_create_over(set->gpu, 2, &source, options, &set->model, &error), 0,
                 "%s", error.message);
}

/* Device 0, whose own copies are held up, gets a piece that device 1 has passed on. */
static struct numoe_gpu_piece first_passed(struct set *set)
{
    struct gpu_relay *relay = set->model->several->relay;
    struct numoe_gpu_model *other = numoe_gpu_model_part(set->model, 1);
    struct numoe_gpu_piece piece;

    while (!any_here(&relay->sides[0])) {
        cr_assert_eq(numoe_gpu_piece_next(other, set->streams[1], &piece, NULL), 0);
        cr_assert_not_null(piece.slice_at);
        cr_assert_eq(compute(set, 1, &piece), 0);
        cr_assert_eq(numoe_gpu_piece_done(other, set->streams[1], &piece, NULL), 0);
        while (fake_step(set->fake[0], relay->sides[0].passes))
            ;
    }
    cr_assert_eq(
        numoe_gpu_piece_next(numoe_gpu_model_part(set->model, 0), set->streams[0], &piece, NULL),
        0);
    cr_assert(gpu_relay_has(relay, 0, piece.handle));
    return piece;
}

/* With biases every computation of the layer marks it as used, that with passed experts, too: what
 * is on its way to stay is not passed on before it is there. */
Test(gpu_relay, what_uses_biases_does_not_pass_what_is_on_its_way_to_stay, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of_room(LAYERS * EXPERTS / 2, 100);
    uint32_t tokens_of[EXPERTS] = {0}, kept = 0, blocked = 200;
    struct numoe_gpu_model *part[2];
    struct numoe_gpu_piece piece;
    struct set set;
    uint64_t used;

    random_state = 3;
    patterns_make();
    open_with_biases(&set, &options);
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
    piece = first_passed(&set);
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
    take_all(&set);
    set_free(&set);
    regions_free();
}

/* The first that a device gets of a call may be a passed piece: it, too, waits for the biases. */
Test(gpu_relay, what_is_passed_on_waits_for_biases, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of_room(0, 100);
    struct numoe_gpu_model *part[2];
    struct numoe_gpu_piece piece;
    uint32_t blocked = 1 << 30;
    struct set set;

    random_state = 3;
    patterns_make();
    open_with_biases(&set, &options);
    for (uint32_t i = 0; i < 2; i++)
        part[i] = numoe_gpu_model_part(set.model, i);
    set.fake[0]->speed = 0;
    set.fake[1]->speed = 255;
    cr_assert_eq(fake_push(set.fake[0], part[0]->stream.copies,
                           (struct fake_op){.what = FAKE_RUN, .to = &blocked, .run = later}),
                 0);
    cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
    piece = first_passed(&set);
    cr_assert_not_null(piece.down_bias);
    cr_assert_eq(compute(&set, 0, &piece), 0);
    while (fake_step(set.fake[0], set.streams[0]))
        ;
    for (int e = 0; e < EXPERTS; e++)
        cr_expect_eq(seen[0][e], 0, "biases are not there");
    blocked = 0;
    cr_assert_eq(numoe_gpu_piece_done(part[0], set.streams[0], &piece, NULL), 0);
    take_all(&set);
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
    set_open(&set, 2, 5, &options);
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
    take_all(&set);
    set_free(&set);
    regions_free();
}

/* ---- what is given up ------------------------------------------------------------------------ */

/* Pieces of a call that was ended, whichever thread did that, are nobody's: to be done with one is
 * refused, and nothing becomes of it in the call that follows. */
Test(gpu_relay, what_was_given_up_is_not_done_with, .timeout = 60)
{
    uint32_t stayed = 0, own = 0, passed = 0;

    random_state = 15;
    patterns_make();
    for (uint64_t seed = 1; seed <= 12; seed++) {
        struct numoe_gpu_model_options options = options_of(seed);
        struct set set;

        options.stream = false;
        options.cache_bytes = 8 * EXPERT;
        options.window_bytes = 20 * EXPERT;
        set_open(&set, 2, seed, &options);
        for (uint64_t call = 0; call < 6; call++) {
            struct numoe_gpu_model *part = numoe_gpu_model_part(set.model, call % 2);
            void *const stream = set.streams[call % 2];
            struct numoe_gpu_piece held[4];
            uint32_t holds = 0;

            cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
            while (holds < 4 && !numoe_gpu_piece_next(part, stream, &held[holds], NULL) &&
                   held[holds].slice_at) {
                const struct numoe_gpu_piece *p = &held[holds++];

                stayed += !p->handle;
                passed += p->handle && gpu_relay_has(part->relay, part->index, p->handle);
                own += p->handle && !gpu_relay_has(part->relay, part->index, p->handle);
            }
            cr_assert_gt(holds, 0);
            cr_assert_eq(numoe_gpu_piece_done(part, stream, &held[0], NULL), 0);
            cr_expect_eq(numoe_gpu_piece_done(part, stream, &held[0], NULL), -EINVAL, "twice");
            end_all(&set);
            for (uint32_t k = 0; k < holds; k++)
                cr_expect_eq(numoe_gpu_piece_done(part, stream, &held[k], NULL), -EINVAL);
            cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
            for (uint32_t k = 0; k < holds; k++)
                cr_expect_eq(numoe_gpu_piece_done(part, stream, &held[k], NULL), -EINVAL);
            take_all(&set);
        }
        set_free(&set);
    }
    cr_expect(stayed && own && passed, "%u, %u, %u", stayed, own, passed);
    regions_free();
}

/* ---- who waits for whom ---------------------------------------------------------------------- */

static bool is_open(void *gate)
{
    return *(const bool *)gate;
}

/* The table of what stays is written when nothing reads it any more. Until then a device whose
 * consumer computes with it holds up no other, and nobody is waited for in its stead. */
Test(gpu_relay, a_device_that_computes_keeps_no_other_from_what_stays, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of_room(LAYERS * EXPERTS, 100);

    random_state = 16;
    patterns_make();
    for (uint64_t seed = 1; seed <= 10; seed++) {
        struct numoe_gpu_piece piece;
        bool gate = false;
        uint32_t which;
        struct set set;

        set_open(&set, 2, seed, &options);
        fake_push(set.fake[0], set.streams[0],
                  (struct fake_op){.what = FAKE_RUN, .to = &gate, .run = is_open});
        cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
        cr_assert_eq(call_in_turns(&set, NULL), 0);
        end_all(&set);
        cr_assert_eq(fake_stream_sync(set.fake[1], set.streams[1]), 0);
        cr_assert(numoe_gpu_model_part(set.model, 0)->stream.stale[0]);
        cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
        do {
            cr_assert_eq(numoe_gpu_piece_any(set.model, set.streams, &which, &piece, NULL), 0);
            cr_assert(which ? !piece.handle
                            : gpu_relay_has(set.model->several->relay, 0, piece.handle));
            cr_assert_eq(compute(&set, which, &piece), 0);
            cr_assert_eq(numoe_gpu_piece_done(numoe_gpu_model_part(set.model, which),
                                              set.streams[which], &piece, NULL),
                         0);
        } while (which == 0);
        gate = true;
        cr_assert_eq(call_in_turns(&set, NULL), 0);
        end_all(&set);
        cr_assert_eq(sync_all(&set), 0);
        for (int e = 0; e < EXPERTS; e++) /* device 0: those of the call before, too */
            cr_assert(seen[0][e] == 2 && seen[1][e] == 1);
        set_free(&set);
    }
    regions_free();
}

/* However late a device asks: what is on it anyway is before what has come from others. */
Test(gpu_relay, what_stays_is_first, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of_room(LAYERS * EXPERTS, 100);
    struct numoe_gpu_model *part[2];
    struct numoe_gpu_piece piece;
    struct set set;

    random_state = 17;
    patterns_make();
    set_open(&set, 2, 4, &options);
    for (uint32_t i = 0; i < 2; i++)
        part[i] = numoe_gpu_model_part(set.model, i);
    for (int call = 0; call < 2; call++) {
        cr_assert_eq(call_begin(&set, 0, 100, NULL), 0);
        if (call == 0)
            take_all(&set);
    }
    do {
        cr_assert_eq(numoe_gpu_piece_next(part[0], set.streams[0], &piece, NULL), 0);
        if (piece.slice_at) {
            cr_assert_eq(compute(&set, 0, &piece), 0);
            cr_assert_eq(numoe_gpu_piece_done(part[0], set.streams[0], &piece, NULL), 0);
        }
    } while (piece.slice_at || !any_here(&set.model->several->relay->sides[1]));
    cr_assert_eq(numoe_gpu_piece_next(part[1], set.streams[1], &piece, NULL), 0);
    cr_expect_null(piece.handle);
    cr_assert_eq(compute(&set, 1, &piece), 0);
    cr_assert_eq(numoe_gpu_piece_done(part[1], set.streams[1], &piece, NULL), 0);
    take_all(&set);
    set_free(&set);
    regions_free();
}

Test(gpu_relay, a_device_that_takes_nothing_holds_up_others_only_so_far, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of_room(0, 4);
    struct numoe_gpu_piece held[2][EXPERTS + 1];
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *part[2];
    uint32_t holds[2] = {0};
    struct set set;
    int rc;

    random_state = 4;
    patterns_make();
    options.piece_bytes = 1;
    set_open(&set, 2, 3, &options);
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
    take_all(&set);
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
    set_open(&set, 3, 4, &options);
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
