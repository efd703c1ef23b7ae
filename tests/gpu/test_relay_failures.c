/*
 * Experts that are whole on several devices, where something fails or cannot be had: devices that
 * do not reach each other, no room, memory that is not pinned; and a failure at every step.
 */
#include "relay_set.h"

/* Two layers right, whichever way. */
static void expect_right(struct set *set)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    for (uint64_t layer = 0; layer < 2; layer++) {
        cr_assert_eq(call_begin(set, layer, 80, &error), 0, "%s", error.message);
        take_all(set);
    }
}

/* ---- what cannot be had ---------------------------------------------------------------------- */

Test(gpu_relay_failures, devices_that_do_not_reach_each_other_copy_all_themselves, .timeout = 60)
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

Test(gpu_relay_failures, what_is_no_faster_is_not_taken_by_itself, .timeout = 60)
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
Test(gpu_relay_failures, memory_that_is_not_pinned_is_refused, .timeout = 60)
{
    struct numoe_gpu_model_options options = options_of(1);
    struct set set;

    patterns_make();
    options.no_pinning = true;
    set_open(&set, 2, 5, &options);
    cr_expect_eq(numoe_gpu_pieces_begin(set.model, 0, NULL, 0, 0, NULL), -ENOTSUP);
    set_free(&set);
    regions_free();
}

/* As numoe certify asks it, of a device that is right and of one that is not. */
Test(gpu_relay_failures, a_device_taken_as_two_is_certified, .timeout = 60)
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

/* ---- a copy that fails ----------------------------------------------------------------------- */

static bool refuses;

static int refuse_peer(void *device, void *stream, void *to, void *peer, const void *from,
                       uint64_t bytes)
{
    return refuses ? fake_refuse(device, 1) : fake_copy_peer(device, stream, to, peer, from, bytes);
}

/* The call fails, and says where; those behind it pass nothing, and are right. */
Test(gpu_relay_failures, behind_a_copy_that_failed_nothing_is_passed, .timeout = 60)
{
    const struct numoe_gpu_model_options options = options_of(1);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct gpu_ops ops = fake_ops;
    struct numoe_gpu_report report;
    uint64_t passed;
    struct set set;

    random_state = 14;
    patterns_make();
    ops.copy_peer = refuse_peer;
    refuses = false;
    set_make(&set, 3, 4);
    for (uint32_t i = 0; i < 3; i++)
        set.gpu[i]->ops = &ops;
    set_model(&set, &options);
    expect_right(&set);
    refuses = true;
    cr_assert_eq(call_begin(&set, 2, 100, &error) || call_in_turns(&set, &error), 1);
    cr_expect_not_null(strstr(error.message, "copying experts from GPU"), "%s", error.message);
    end_all(&set);
    cr_assert_eq(sync_all(&set), 0);
    refuses = false;
    numoe_gpu_model_report(set.model, &report);
    cr_expect_not(report.passes);
    cr_expect_not_null(strstr(report.pass_note, "copying experts from GPU"), "%s",
                       report.pass_note);
    passed = report.passed_experts;
    cr_expect_gt(passed, 0);
    expect_right(&set);
    numoe_gpu_model_report(set.model, &report);
    cr_expect_eq(report.passed_experts, passed);
    cr_expect_not(report.passes);
    set_free(&set);
    regions_free();
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

Test(gpu_relay_failures, one_of_two_fails_at_every_step, .timeout = 600)
{
    random_state = 7;
    patterns_make();
    for (uint32_t victim = 0; victim < 2; victim++) {
        fail_everywhere(2, victim, 2);
        fail_everywhere(2, victim, 700);
    }
    regions_free();
}

Test(gpu_relay_failures, one_of_four_fails_at_every_step, .timeout = 600)
{
    random_state = 8;
    patterns_make();
    fail_everywhere(4, 1, 1);
    fail_everywhere(4, 3, 719);
    regions_free();
}
