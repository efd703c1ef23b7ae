/*
 * numoe_forward with a fake GPU in the context: the same results and counts as on the CPU, and the
 * CPU goes on when the device fails (case F5).
 */
#include <errno.h>
#include <math.h>

#include "small_context.h"

static void expect_same_counts(const struct numoe_result *a, const struct numoe_result *b)
{
    cr_expect_eq(a->skipped, b->skipped);
    cr_expect_eq(a->missing, b->missing);
    cr_expect_eq(a->pairs, b->pairs);
    cr_expect_eq(a->experts_hit, b->experts_hit);
    cr_expect_eq(a->expert_bytes, b->expert_bytes);
}

static void check_results_and_counts(void)
{
    struct fake *f = fake_make(7);
    struct numoe *here = context_make(f), *there = context_make(NULL);
    struct numoe_model *gpu = model_make(here), *cpu = model_make(there);
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_stats stats = {.size = sizeof stats};

    cr_assert_not_null(numoe_model_gpu(gpu));
    cr_assert_null(numoe_model_gpu(cpu));
    for (uint64_t i = 0; i < 24; i++) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct call a, b;

        if (i == 12) { /* replaced: the copy on the device is old */
            load(gpu, 1, 2, 9);
            load(cpu, 1, 2, 9);
        }
        call_make(&a, i);
        call_make(&b, i);
        cr_assert_eq(numoe_forward(gpu, i % LAYERS, &a.batch, &a.result, &error), 0, "%s",
                     error.message);
        cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, &error), 0);
        cr_expect_lt(distance(&a, &b), 5e-3, "call %d: %.2e", (int)i, distance(&a, &b));
        cr_expect_eq(a.result.gpu_tokens, TOKENS);
        cr_expect_eq(b.result.gpu_tokens, 0);
        expect_same_counts(&a.result, &b.result);
    }
    numoe_model_info(gpu, &info);
    cr_expect_str_eq(info.gpu, "Fake");
    cr_expect(info.gpu_resident);
    numoe_model_info(cpu, &info);
    cr_expect_str_eq(info.gpu, "");
    numoe_stats_get(here, &stats);
    cr_expect_eq(stats.gpu_calls, 24);
    cr_expect_eq(stats.gpu_tokens, 24 * TOKENS);
    numoe_model_destroy(gpu);
    numoe_model_destroy(cpu);
    cr_expect_eq(f->wrong, 0, "%s", f->text);
    cr_expect_eq(f->range_count, 0);
    numoe_close(here);
    numoe_close(there);
    fake_free(f);
}

Test(gpu_calls, results_and_counts_are_those_of_the_cpu, .timeout = 60)
{
    for (form = NUMOE_FORM_AUTO; form <= NUMOE_FORM_EXPERTS; form++)
        check_results_and_counts();
}

/* Three devices, shared with the workers or not; then one of them fails, and all goes on. */
static void check_several(uint64_t from_tokens, int code)
{
    struct fake *f = fake_make(7), *more[] = {fake_make(9), fake_make(11)};
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe *here = context_make(f), *there = context_make(NULL);
    struct numoe_model *gpu, *cpu = model_make(there);
    struct numoe_model_info info = {.size = sizeof info};

    here->gpu_from_tokens = from_tokens;
    for (uint32_t i = 0; i < 2; i++) {
        p.index = i + 1;
        more[i]->pins = f;
        cr_assert_eq(gpu_wrap(&fake_ops, more[i], &p, &here->log, &here->more_gpus[i]), 0);
        here->more_gpu_count++;
    }
    gpu = model_make(here);
    cr_assert_not_null(numoe_model_gpu(gpu));
    cr_expect_eq(numoe_gpu_model_parts(numoe_model_gpu(gpu)), 3);
    for (uint64_t i = 0; i < 24; i++) {
        struct call a, b;

        call_make(&a, i);
        call_make(&b, i);
        if (i == 12) {
            more[1]->fail_at = more[1]->calls + 20;
            more[1]->fail_code = code;
        }
        cr_assert_eq(numoe_forward(gpu, i % LAYERS, &a.batch, &a.result, NULL), 0);
        cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, NULL), 0);
        cr_expect_lt(distance(&a, &b), 5e-3, "call %d: %.2e", (int)i, distance(&a, &b));
        expect_same_counts(&a.result, &b.result);
        if (from_tokens)
            cr_expect(i >= 12 || a.result.gpu_tokens == TOKENS);
    }
    numoe_model_info(gpu, &info);
    if (more[1]->sticky) {
        cr_expect_str_eq(info.gpu, "");
        cr_expect(strstr(info.gpu_note, "lost"), "%s", info.gpu_note);
    } else {
        cr_expect_str_eq(info.gpu, "3 x Fake");
    }
    numoe_model_destroy(gpu);
    numoe_model_destroy(cpu);
    cr_expect_eq(f->wrong + more[0]->wrong + more[1]->wrong, 0);
    cr_expect_eq(f->range_count + more[0]->range_count, 0);
    numoe_close(here);
    numoe_close(there);
    fake_free(f);
    fake_free(more[0]);
    fake_free(more[1]);
}

Test(gpu_calls, several_devices_compute_together, .timeout = 60)
{
    check_several(1, 2);
    check_several(1, 700);
    check_several(0, 1);
    check_several(0, 719);
}

Test(gpu_calls, submit_and_strict_ids)
{
    struct fake *f = fake_make(3);
    struct numoe *context = context_make(f);
    struct numoe_model *model = model_make(context);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct call a, b;
    uint64_t ticket;

    call_make(&a, 1);
    call_make(&b, 1);
    cr_assert_eq(numoe_submit(model, 0, &a.batch, &ticket, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_wait(model, ticket, &a.result), 0);
    cr_assert_eq(numoe_forward(model, 0, &b.batch, &b.result, &error), 0);
    cr_expect_arr_eq(a.out, b.out, sizeof a.out);
    cr_expect_eq(a.result.gpu_tokens, TOKENS);
    expect_same_counts(&a.result, &b.result);
    call_make(&a, 1);
    call_make(&b, 1);
    a.batch.strict = true;
    a.ids[2][1] = EXPERTS;
    cr_expect_eq(numoe_forward(model, 0, &a.batch, &a.result, &error), -EINVAL);
    cr_expect_arr_eq(a.out, b.out, sizeof a.out);
    numoe_model_destroy(model);
    numoe_close(context);
    fake_free(f);
}

/* The device fails once, in one of the calls that a forward makes; then ten more forwards. */
static void fail_in_calls(int code)
{
    struct numoe *there = context_make(NULL);
    struct numoe_model *cpu = model_make(there);

    for (uint64_t at = 0; at < 60; at += 3) {
        struct fake *f = fake_make(at);
        struct numoe *here = context_make(f);
        struct numoe_model *gpu = model_make(here);
        struct numoe_model_info info = {.size = sizeof info};
        uint64_t on_gpu = 0;

        warnings = 0;
        f->fail_at = f->calls + at;
        f->fail_code = code;
        for (uint64_t i = 0; i < 11; i++) {
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct call a, b;

            call_make(&a, i);
            call_make(&b, i);
            cr_assert_eq(numoe_forward(gpu, i % LAYERS, &a.batch, &a.result, &error), 0);
            cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, &error), 0);
            cr_expect_lt(distance(&a, &b), 5e-3, "code %d at %d, call %d", code, (int)at, (int)i);
            expect_same_counts(&a.result, &b.result);
            if (a.result.gpu_tokens == 0) /* the very bits of the CPU */
                cr_expect_arr_eq(a.out, b.out, sizeof a.out);
            on_gpu += a.result.gpu_tokens != 0;
        }
        cr_expect_geq(on_gpu, f->sticky ? 0 : 10, "%d calls on the GPU", (int)on_gpu);
        if (f->sticky) {
            cr_expect_lt(on_gpu, 11);
            cr_expect_geq(warnings, 2); /* the loss, and that the CPU goes on */
            cr_expect_leq(warnings, 3);
            numoe_model_info(gpu, &info);
            cr_expect_str_eq(info.gpu, "");
            cr_expect(strstr(info.gpu_note, "lost"), "%s", info.gpu_note);
        }
        f->fail_at = UINT64_MAX;
        numoe_model_destroy(gpu);
        cr_expect_eq(f->wrong, 0, "%s", f->text);
        numoe_close(here);
        fake_free(f);
    }
    numoe_model_destroy(cpu);
    numoe_close(there);
}

Test(gpu_calls, the_cpu_goes_on_after_out_of_memory, .timeout = 120)
{
    fail_in_calls(2);
}

Test(gpu_calls, the_cpu_goes_on_after_an_illegal_access, .timeout = 120)
{
    fail_in_calls(700);
}

Test(gpu_calls, the_cpu_goes_on_after_a_launch_failure, .timeout = 120)
{
    fail_in_calls(719);
}

/* Too small a device: the model is the CPU's, and says so. */
Test(gpu_calls, a_small_device_leaves_the_model_to_the_cpu)
{
    struct fake *f = fake_make(1);
    struct numoe *context = context_make(f);
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_model *model;
    struct call a;

    f->memory = 16384;
    warnings = 0;
    model = model_make(context);
    cr_expect_null(numoe_model_gpu(model));
    cr_expect_geq(warnings, 1);
    numoe_model_info(model, &info);
    cr_expect(strstr(info.gpu_note, "do not fit"), "%s", info.gpu_note);
    call_make(&a, 1);
    cr_expect_eq(numoe_forward(model, 0, &a.batch, &a.result, NULL), 0);
    cr_expect_eq(a.result.gpu_tokens, 0);
    numoe_model_destroy(model);
    numoe_close(context);
    fake_free(f);
}

Test(gpu_calls, without_a_device_the_reason_is_kept)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;

    if (numoe_gpu_count(NULL) > 0)
        cr_skip_test("there is a device");
    unsetenv("NUMOE_GPU");
    options.gpu = NUMOE_GPU_ON;
    options.log.fn = hear;
    warnings = 0;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    cr_expect_eq(warnings, 1);
    cr_expect_gt(strlen(context->gpu_note), 10);
    numoe_close(context);
    setenv("NUMOE_GPU", "perhaps", 1);
    cr_expect_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_expect(strstr(error.message, "perhaps"));
}

/* ---- a wait that is refused after a call that failed ------------------------------------------
 */

static struct gpu_ops refusing;
static unsigned launches_left, refusals, refused;

static int launch_fails_once(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    return launches_left-- ? fake_launch(device, stream, ffn) : fake_refuse(device, 1);
}

static int sync_refused(void *device, void *stream)
{
    if (launches_left < 1000 || refused >= refusals)
        return fake_stream_sync(device, stream);
    refused++;
    return fake_refuse(device, 2);
}

/* What was queued still uses the buffers: it is waited for again, or the device is given up. */
Test(gpu_calls, memory_is_not_used_again_before_a_failed_call_is_past)
{
    struct numoe *there = context_make(NULL);
    struct numoe_model *cpu = model_make(there);

    refusing = fake_ops;
    refusing.launch = launch_fails_once;
    refusing.stream_sync = sync_refused;
    for (unsigned wanted = 1; wanted <= 20; wanted++) {
        struct fake *f = fake_make(wanted);
        struct numoe *here = context_make(f);
        struct numoe_model *gpu = model_make(here);
        const bool lost = wanted == 20;

        here->gpu->ops = &refusing;
        here->gpu_from_tokens = 1;
        f->speed = 8;
        launches_left = wanted % 4;
        refusals = lost ? UINT32_MAX : 1 + wanted % 2;
        refused = 0;
        for (uint64_t i = 0; i < 8; i++) {
            struct call a, b;

            call_make(&a, i);
            call_make(&b, i);
            cr_assert_eq(numoe_forward(gpu, i % LAYERS, &a.batch, &a.result, NULL), 0);
            cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, NULL), 0);
            cr_expect_lt(distance(&a, &b), 5e-3, "%u refusals, call %d", refusals, (int)i);
        }
        cr_expect_gt(refused, 0);
        cr_expect_eq(numoe_gpu_health(here->gpu, NULL), lost ? -EIO : 0);
        refusals = 0;
        numoe_model_destroy(gpu);
        cr_expect_eq(f->wrong, 0, "%s", f->text);
        cr_expect_eq(f->range_count, 0);
        numoe_close(here);
        fake_free(f);
    }
    numoe_model_destroy(cpu);
    numoe_close(there);
}
