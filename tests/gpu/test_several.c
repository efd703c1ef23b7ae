/*
 * A model on several fake devices, each with delays of its own: the division, results, the same
 * bits again, and a failure at every step of one device while the others work.
 */
#include "device_set.h"

#include "gpu_divide.h"
#include "rows_call.h"

/* ---- the division -----------------------------------------------------------------------------
 */

static void divide(uint32_t devices, const uint32_t *weight, uint32_t regions,
                   const uint64_t *bytes, const uint32_t *distance, struct gpu_division *v,
                   uint32_t *group)
{
    gpu_divide(devices, weight, regions, bytes, distance, v, group);
    cr_assert_geq(v->groups, 1);
    for (uint32_t r = 0; r < regions; r++)
        cr_assert_lt(group[r], v->groups);
}

Test(gpu_divide, regions_go_to_the_nearest_devices)
{
    const uint32_t weight[] = {8, 8, 8, 8};
    const uint64_t bytes[] = {100, 101, 99, 100};
    /* two sockets of two nodes, two devices on each */
    const uint32_t near[] = {10, 12, 32, 32, 12, 10, 32, 32, 32, 32, 10, 12, 32, 32, 12, 10};
    const uint32_t sockets[] = {10, 10, 32, 32, 10, 10, 32, 32, 32, 32, 10, 10, 32, 32, 10, 10};
    struct gpu_division v;
    uint32_t group[4];

    divide(4, weight, 4, bytes, near, &v, group);
    cr_expect_eq(v.groups, 4);
    for (uint32_t i = 0; i < 4; i++)
        cr_expect(group[i] == i && v.group[i] == i && v.begin[i] == 0 && v.end[i] == v.weight[i]);
    divide(4, weight, 4, bytes, sockets, &v, group);
    cr_expect_eq(v.groups, 2);
    for (uint32_t i = 0; i < 4; i++)
        cr_expect(group[i] == i / 2 && v.group[i] == i / 2 && v.begin[i] == i % 2 * 8 &&
                  v.end[i] == (i % 2 + 1) * 8 && v.weight[i / 2] == 16);
}

Test(gpu_divide, experts_where_regions_would_be_uneven_or_nothing_is_known)
{
    const uint32_t even[] = {1, 1}, uneven[] = {8, 4};
    const uint64_t bytes[] = {100, 100}, one_sided[] = {150, 50}, empty[] = {200, 0};
    const uint64_t nearly[] = {112, 88}, hardly[] = {113, 87}; /* an eighth more than due: 112.5 */
    const uint32_t near[] = {10, 21, 21, 10}, same[] = {10, 21, 10, 21}, unknown[] = {10, 21, 0, 0};
    const struct {
        const uint32_t *weight, *distance;
        const uint64_t *bytes;
        uint32_t groups;
    } cases[] = {
        {even, near, bytes, 2},  {uneven, near, bytes, 1}, {even, near, one_sided, 1},
        {even, near, empty, 1},  {even, same, bytes, 1},   {even, unknown, bytes, 1},
        {even, near, nearly, 2}, {even, near, hardly, 1},  {uneven, same, bytes, 1},
    };
    struct gpu_division v;
    uint32_t group[2];

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        divide(2, cases[i].weight, 2, cases[i].bytes, cases[i].distance, &v, group);
        cr_expect_eq(v.groups, cases[i].groups, "case %zu: %u groups", i, v.groups);
    }
    cr_expect(v.weight[0] == 12 && v.end[0] == 8 && v.begin[1] == 8 && v.end[1] == 12);
}

/* Where there is nothing it does not matter who is near. */
Test(gpu_divide, regions_without_bytes_join_nobody)
{
    const uint32_t weight[] = {1, 1};
    const uint64_t bytes[] = {100, 0, 100, 0};
    const uint32_t distance[] = {10, 15, 21, 0, 21, 15, 10, 10};
    struct gpu_division v;
    uint32_t group[4];

    divide(2, weight, 4, bytes, distance, &v, group);
    cr_expect_eq(v.groups, 2);
    cr_expect(group[0] == 0 && group[2] == 1);
}

Test(gpu_divide, every_expert_has_one_device_and_devices_their_due)
{
    for (uint32_t devices = 1; devices <= NUMOE_GPU_MOST; devices++)
        for (uint64_t experts = 1; experts <= 260; experts += 37) {
            uint32_t weight[NUMOE_GPU_MOST], distance[NUMOE_GPU_MOST] = {0}, group, total = 0;
            uint64_t had[NUMOE_GPU_MOST] = {0};
            const uint64_t bytes = 1;
            struct gpu_division v;

            for (uint32_t i = 0; i < devices; i++)
                total += weight[i] = 1 + (i * 5 + devices) % 8;
            divide(devices, weight, 1, &bytes, distance, &v, &group);
            for (uint64_t layer = 0; layer < total; layer++)
                for (uint64_t e = 0; e < experts; e++) {
                    uint32_t owners = 0;
                    for (uint32_t i = 0; i < devices; i++)
                        if (gpu_divide_has(&v, i, layer, e, experts)) {
                            owners++;
                            had[i]++;
                        }
                    cr_assert_eq(owners, 1, "layer %d, expert %d", (int)layer, (int)e);
                }
            /* over so many layers exactly: the remainder moves */
            for (uint32_t i = 0; i < devices; i++)
                cr_expect_eq(had[i], experts * weight[i], "%u of %u: %d", i, devices, (int)had[i]);
        }
}

/* ---- models -----------------------------------------------------------------------------------
 */

Test(gpu_several, results_are_right_and_the_same_bits_under_any_delay, .timeout = 120)
{
    float *first = calloc(SET_FLOATS, sizeof *first), *again = calloc(SET_FLOATS, sizeof *again);

    for (uint32_t count = 1; count <= MOST; count++)
        for (int layout = UNKNOWN; layout <= NEAR; layout++)
            for (uint64_t seed = 1; seed <= 10; seed++) {
                struct model *m = model_make(LAYERS, seed % 2);
                set_run(m, count, (enum layout)layout, NUMOE_GPU_SUM_HOST, seed, seed, first);
                set_run(m, count, (enum layout)layout, NUMOE_GPU_SUM_HOST, seed, seed + 100, again);
                /* staging is as free as delays leave it, and with it what has arrived */
                if (!options_of(m, seed).no_pinning)
                    cr_expect(same_bits(first, again, SET_FLOATS * sizeof *first),
                              "%u devices, seed %d", count, (int)seed);
                model_free(m);
            }
    free(first);
    free(again);
}

Test(gpu_several, near_devices_have_slices_and_far_ones_experts)
{
    struct model *m = model_make(LAYERS, true);
    const struct numoe_gpu_source source = source_near(m);
    const struct numoe_gpu_model_options options = {
        .shares = shares, .window_bytes = 1 << 18, .cache_bytes = 1, .keep_free_bytes = 1 << 20};
    struct numoe_gpu_model_options unpinned = options;

    unpinned.no_pinning = true;
    unpinned.ring_bytes = 65536;
    for (int layout = UNKNOWN; layout <= NEAR; layout++)
        for (uint32_t count = 2; count <= MOST; count += 2) {
            struct numoe_gpu_model *model, *staged;
            struct numoe_gpu_report report;
            struct set set;

            set_make(&set, count, (enum layout)layout, 3);
            cr_assert_eq(
                numoe_gpu_model_create_over(set.gpu, count, &source, &options, &model, NULL), 0);
            /* engines queue each part */
            cr_expect_eq(numoe_gpu_pieces_begin(model, 0, NULL, 1, 1, NULL), -ENOTSUP);
            cr_expect_eq(
                numoe_gpu_pieces_begin(numoe_gpu_model_part(model, 1), 0, NULL, 1, 1, NULL), 0);
            numoe_gpu_pieces_end(numoe_gpu_model_part(model, 1),
                                 numoe_gpu_model_part(model, 1)->stream.compute);
            cr_expect_eq(model->several->division.groups, layout == NEAR ? NODES : 1);
            for (uint32_t i = 0; i < count; i++) {
                const struct numoe_gpu_model *part = numoe_gpu_model_part(model, i);
                cr_expect_eq(part->source.region_count, layout == NEAR ? 1 : NODES);
            }
            numoe_gpu_model_destroy(model);
            cr_assert_eq(
                numoe_gpu_model_create_over(set.gpu, count, &source, &unpinned, &staged, NULL), 0);
            /* case F4: each has staging of its own, on its own node where there is such a one */
            for (uint32_t i = 0; i < count; i++) {
                numoe_gpu_model_report(numoe_gpu_model_part(staged, i), &report);
                cr_expect_gt(report.ring_bytes, 0);
                cr_expect(report.ring_node == NUMOE_NONE ||
                          (layout == NEAR && report.ring_node == i % NODES));
                /* of a node that this machine lacks nothing is placed, and that is told */
                cr_expect_leq(report.ring_placed, report.ring_checked);
            }
            numoe_gpu_model_destroy(staged);
            set_free(&set);
        }
    model_free(m);
}

Test(gpu_several, shares_follow_the_links)
{
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model = NULL;
    uint32_t uneven[] = {3, 1}, wrong[] = {1, 0};
    struct set set;
    int rc;

    set_make(&set, 2, UNKNOWN, 4);
    set.fake[0]->memory = set.fake[1]->memory = 256 << 20;
    rc = numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, &error);
    /* of a device whose steps are its clock anything may be measured */
    cr_assert(rc == 0 || rc == -EINVAL, "%d: %s", rc, error.message);
    if (!rc) {
        cr_expect_gt(model->several->links.host_gbs[0], 0);
        cr_expect_gt(model->several->links.host_gbs[1], 0);
        numoe_gpu_model_destroy(model);
    }
    for (int i = 0; i < 2; i++) {
        struct numoe_gpu_model_options given = options;
        given.shares = i ? wrong : uneven;
        rc = numoe_gpu_model_create_over(set.gpu, 2, &source, &given, &model, &error);
        cr_assert_eq(rc, i ? -EINVAL : 0);
        if (rc)
            continue;
        cr_expect_eq(numoe_gpu_model_part(model, 0)->experts, 15);
        cr_expect_eq(numoe_gpu_model_part(model, 1)->experts, 5);
        numoe_gpu_model_destroy(model);
    }
    set_free(&set);
    model_free(m);
}

static const void *timed_of[2];
static double link_ms[2]; /* of each one's measured copies */

static int timed(void *device, void *begin, void *end, double *ms)
{
    const int e = fake_elapsed(device, begin, end, ms);

    *ms = link_ms[device == timed_of[1]];
    return e;
}

/* In eighths of the fastest, so what differs by a little divides alike. */
Test(gpu_several, weights_are_eighths_of_the_fastest_link)
{
    static const struct {
        double ms[2];
        uint32_t weight[2];
    } cases[] = {{{10, 10}, {8, 8}}, {{10, 20}, {8, 4}}, {{10.5, 10}, {8, 8}}, {{20, 5}, {2, 8}}};
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.keep_free_bytes = 1 << 20};
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct gpu_ops ops = fake_ops;
        const struct gpu_division *v;
        struct numoe_gpu_model *model;
        struct set set;

        ops.elapsed = timed;
        set_make(&set, 2, UNKNOWN, i);
        for (int k = 0; k < 2; k++) {
            set.fake[k]->memory = 256 << 20;
            set.gpu[k]->ops = &ops;
            timed_of[k] = set.fake[k];
            link_ms[k] = cases[i].ms[k];
        }
        cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, &error), 0,
                     "%s", error.message);
        v = &model->several->division;
        for (int k = 0; k < 2; k++)
            cr_expect_eq(v->end[k] - v->begin[k], cases[i].weight[k], "case %zu, device %d: %u", i,
                         k, v->end[k] - v->begin[k]);
        numoe_gpu_model_destroy(model);
        set_free(&set);
    }
    model_free(m);
}

static uint64_t place_but_one(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                              const uint8_t **address)
{
    return expert == 1 ? 0 : place(user, layer, expert, index, address);
}

static bool present_but_one(void *user, uint64_t layer, uint64_t expert)
{
    return expert != 1 && present(user, layer, expert);
}

/* What one device lacks is not held, nor what none has; and the whole is the sum of its parts. */
Test(gpu_several, what_is_held_and_told_is_of_all_parts)
{
    struct model *m = model_make(LAYERS, false);
    struct numoe_gpu_source source = source_near(m);

    source.place = place_but_one;
    source.present = present_but_one;
    for (int layout = UNKNOWN; layout <= NEAR; layout++)
        for (int pinned = 0; pinned < 2; pinned++) {
            const struct numoe_gpu_model_options options = {.shares = shares,
                                                            .piece_bytes = pinned ? 0 : 1,
                                                            .no_pinning = !pinned,
                                                            .ring_bytes = 32768,
                                                            .keep_free_bytes = 1 << 20};
            struct numoe_gpu_report all, sum = {0}, part;
            struct numoe_gpu_model *model;
            struct set set;

            set_make(&set, 2, (enum layout)layout, 4);
            set.fake[1]->memory = 2 << 20; /* the second has little room */
            cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, NULL),
                         0);
            for (uint64_t i = 0; i < 3 * LAYERS; i++) {
                uint8_t held[EXPERTS];
                struct batch b;
                uint64_t done;

                batch_make(&b);
                for (int t = 0; t < TOKENS_MOST; t++)
                    for (int j = 0; j < TOP_K; j++)
                        b.ids[t][j] = b.ids[t][j] == 1 ? -1 : b.ids[t][j];
                cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
                cr_expect(batch_right(m, i % LAYERS, &b, done));
                numoe_gpu_held(model, i % LAYERS, held);
                for (uint32_t e = 0; e < EXPERTS; e++) {
                    bool everywhere = e != 1;

                    for (uint32_t k = 0; k < 2; k++)
                        if (model->several->parts[k].has[i % LAYERS * EXPERTS + e])
                            everywhere = everywhere &&
                                         gpu_stream_has(&numoe_gpu_model_part(model, k)->stream,
                                                        i % LAYERS, e);
                    cr_expect_eq(held[e], everywhere, "expert %u", e);
                }
            }
            numoe_gpu_model_report(model, &all);
            sum.resident = true;
            for (uint32_t k = 0; k < 2; k++) {
                numoe_gpu_model_report(numoe_gpu_model_part(model, k), &part);
                sum.resident = sum.resident && part.resident;
                sum.device_bytes += part.device_bytes;
                sum.window_bytes += part.window_bytes;
                sum.ring_bytes += part.ring_bytes;
                sum.ring_checked += part.ring_checked;
                sum.ring_placed += part.ring_placed;
                sum.cells += part.cells;
                sum.experts += part.experts;
                sum.copied_bytes += part.copied_bytes;
                sum.copied_experts += part.copied_experts;
                sum.found += part.found;
                sum.pieces += part.pieces;
                sum.batches += part.batches;
                cr_expect(part.cells && part.found && part.pieces && part.copied_experts &&
                              (pinned ? part.batches : part.ring_bytes),
                          "device %u: %d cells, %d found, %d pieces, %d experts, %d batches", k,
                          (int)part.cells, (int)part.found, (int)part.pieces,
                          (int)part.copied_experts, (int)part.batches);
            }
            cr_expect_eq(all.resident, sum.resident);
            cr_expect_eq(all.device_bytes, sum.device_bytes);
            cr_expect_eq(all.window_bytes, sum.window_bytes);
            cr_expect_eq(all.ring_bytes, sum.ring_bytes);
            cr_expect_eq(all.ring_checked, sum.ring_checked);
            cr_expect_eq(all.ring_placed, sum.ring_placed);
            cr_expect_eq(all.cells, sum.cells);
            cr_expect_eq(all.experts, sum.experts);
            cr_expect_eq(all.copied_bytes, sum.copied_bytes);
            cr_expect_eq(all.copied_experts, sum.copied_experts);
            cr_expect_eq(all.found, sum.found);
            cr_expect_eq(all.pieces, sum.pieces);
            cr_expect_eq(all.batches, sum.batches);
            numoe_gpu_model_destroy(model);
            set_free(&set);
        }
    model_free(m);
}

Test(gpu_several, one_of_two_fails_at_every_step, .timeout = 240)
{
    for (uint32_t victim = 0; victim < 2; victim++)
        for (int layout = UNKNOWN; layout <= NEAR; layout++) {
            set_fail_everywhere(2, victim, (enum layout)layout, NUMOE_GPU_SUM_HOST, 2);
            set_fail_everywhere(2, victim, (enum layout)layout, NUMOE_GPU_SUM_HOST, 700);
        }
}

Test(gpu_several, one_of_three_fails_at_every_step, .timeout = 240)
{
    for (uint32_t victim = 0; victim < 3; victim++)
        set_fail_everywhere(3, victim, UNKNOWN, NUMOE_GPU_SUM_HOST, victim % 2 ? 719 : 1);
}

Test(gpu_several, one_of_four_fails_at_every_step, .timeout = 240)
{
    for (uint32_t victim = 0; victim < 4; victim++)
        set_fail_everywhere(4, victim, NEAR, NUMOE_GPU_SUM_HOST, victim % 2 ? 2 : 700);
}

/* Passes are as long as the device with the least room can have them. */
Test(gpu_several, devices_agree_on_the_tokens_of_a_pass)
{
    enum { MANY = 300 };
    struct model *m = model_make(1, false);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.shares = shares, .keep_free_bytes = 4 << 20};
    static float x[MANY][HIDDEN], out[MANY][HIDDEN], routing[MANY][TOP_K];
    static int32_t ids[MANY][TOP_K];
    const struct numoe_gpu_call call =
        rows_call(MANY, HIDDEN, TOP_K, x[0], ids[0], routing[0], out[0]);
    struct numoe_gpu_model *model;
    uint64_t tokens, done;
    struct set set;

    set_make(&set, 3, UNKNOWN, 2);
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 3, &source, &options, &model, NULL), 0);
    numoe_gpu_model_part(model, 1)->keep_free_bytes = 100000;
    for (int t = 0; t < MANY; t++)
        for (int j = 0; j < TOP_K; j++)
            ids[t][j] = (t + j) % EXPERTS;
    cr_assert_eq(numoe_gpu_start(model, 0, &call, 0, &tokens, NULL), 0);
    cr_expect(tokens > 0 && tokens < MANY, "%d", (int)tokens);
    for (uint32_t i = 0; i < 3; i++)
        cr_expect_eq(numoe_gpu_model_part(model, i)->pass.tokens, tokens);
    /* a second one is refused, and the first goes on */
    cr_expect_eq(numoe_gpu_start(model, 0, &call, 0, &done, NULL), -EBUSY);
    cr_assert_eq(numoe_gpu_finish(model, &call, &done, NULL), 0);
    cr_expect_eq(done, tokens);
    cr_assert_eq(numoe_gpu_start(model, 0, &call, tokens, &tokens, NULL), 0);
    numoe_gpu_cancel(model);
    cr_expect_eq(numoe_gpu_finish(model, &call, &done, NULL), -EINVAL);
    cr_expect_eq(numoe_gpu_queue(model, &call, NULL), -EINVAL);
    cr_assert_eq(numoe_gpu_begin(model, 0, &call, 0, &tokens, NULL), 0);
    cr_expect_eq(numoe_gpu_finish(model, &call, &done, NULL), -EINVAL);
    cr_assert_eq(numoe_gpu_queue(model, &call, NULL), 0);
    cr_expect_eq(numoe_gpu_queue(model, &call, NULL), -EINVAL);
    cr_assert_eq(numoe_gpu_finish(model, &call, &done, NULL), 0);
    cr_expect_eq(done, tokens);
    cr_assert_eq(numoe_gpu_begin(model, 0, &call, 0, &tokens, NULL), 0);
    numoe_gpu_model_destroy(model); /* in mid-flight */
    set_free(&set);
    model_free(m);
}

/* With the smallest pools and no memory beside them experts cannot give way for ever: a call fails,
 * and the next one, with memory, is right. */
Test(gpu_several, memory_that_never_comes_is_an_error, .timeout = 30)
{
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_source source = source_near(m);
    const struct numoe_gpu_model_options options = {
        .shares = shares, .window_bytes = 1, .cache_bytes = 1, .piece_bytes = 1};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu_model *model;
    uint64_t memory[2], done;
    static struct batch b;
    bool uneven = false;
    struct set set;

    set_make(&set, 2, NEAR, 5);
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, NULL), 0);
    for (uint32_t i = 0; i < 2; i++) {
        uneven = uneven || numoe_gpu_model_part(model, i)->stream.uneven;
        memory[i] = set.fake[i]->memory;
        set.fake[i]->memory = set.fake[i]->taken;
    }
    cr_assert(uneven);
    batch_make(&b);
    cr_expect_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), -ENOMEM, "%s", error.message);
    for (uint32_t i = 0; i < 2; i++)
        set.fake[i]->memory = memory[i];
    batch_make(&b);
    cr_assert_eq(numoe_gpu_forward(model, 0, &b.call, &done, &error), 0, "%s", error.message);
    cr_expect(batch_right(m, 0, &b, done));
    numoe_gpu_model_destroy(model);
    set_free(&set);
    model_free(m);
}

/* Each device brings what it has, though the hottest of all is the other's. */
Test(gpu_several, each_device_brings_experts_of_its_own)
{
    struct model *m = model_make(LAYERS, false);
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.shares = shares, .piece_bytes = 1};
    uint32_t tokens_of[EXPERTS];
    struct numoe_gpu_model *model;
    struct set set;

    for (uint32_t e = 0; e < EXPERTS; e++)
        tokens_of[e] = 1 + e;
    set_make(&set, 2, UNKNOWN, 6);
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 2, &source, &options, &model, NULL), 0);
    numoe_gpu_asked(model, 0, tokens_of, 100);
    cr_assert_eq(numoe_gpu_bring(model, 0, 1, NULL), 0);
    for (uint32_t i = 0; i < 2; i++) {
        uint8_t held[EXPERTS];
        uint32_t count = 0;

        numoe_gpu_held(numoe_gpu_model_part(model, i), 0, held);
        for (uint32_t e = 0; e < EXPERTS; e++)
            count += held[e];
        cr_expect_eq(count, 1, "device %u holds %u", i, count);
    }
    numoe_gpu_model_destroy(model);
    set_free(&set);
    model_free(m);
}
