/* Spans of copies and computations: all of them, in order, and each computation behind its copy. */
#include "base/clock.h"
#include "small_model.h"

enum { SPANS = 4096 };

struct told {
    struct numoe_gpu_span spans[SPANS];
    uint32_t count;
};

static void tell(void *user, const struct numoe_gpu_span *span)
{
    struct told *told = user;

    cr_assert_lt(told->count, SPANS);
    told->spans[told->count++] = *span;
}

static int earlier(const void *a, const void *b)
{
    const struct numoe_gpu_span *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

/* @return how long it went on, by the fake's clock */
static uint64_t run_seed(uint64_t seed)
{
    static struct told told;
    struct model *m = model_make(LAYERS, seed % 2);
    struct fake *f = fake_make(seed);
    struct numoe_gpu *gpu = wrap(f);
    const struct numoe_gpu_model_options options = {.window_bytes = 30000,
                                                    .cache_bytes = 1 + seed % 3 * 40000,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = 4 << 20};
    const uint64_t before = numoe_now_ns();
    struct numoe_gpu_model *model;
    struct numoe_gpu_report report;
    uint64_t bytes = 0, copied = 0, end[2] = {0}, first_copy = UINT64_MAX, last = 0;
    uint32_t computed = 0;

    told.count = 0;
    model = model_on(gpu, m, &options);
    cr_assert_eq(numoe_gpu_trace(model, tell, &told, NULL), 0);
    cr_expect_eq(numoe_gpu_trace(model, tell, &told, NULL), -EBUSY);
    for (uint64_t i = 0; i < 200; i++) {
        static struct batch b;
        uint64_t done;

        batch_make(&b);
        b.call.ahead = NUMOE_GPU_NO_AHEAD;
        cr_assert_eq(numoe_gpu_forward(model, i % LAYERS, &b.call, &done, NULL), 0);
        cr_expect(batch_right(m, i % LAYERS, &b, done));
    }
    numoe_gpu_model_report(model, &report);
    qsort(told.spans, told.count, sizeof told.spans[0], earlier);
    for (uint32_t i = 0; i < told.count; i++) {
        const struct numoe_gpu_span *s = &told.spans[i];
        const bool copy = s->kind == NUMOE_GPU_SPAN_COPY;

        cr_expect_leq(s->begin_ns, s->end_ns);
        cr_expect_geq(s->begin_ns, end[copy], "spans of a lane do not overlap");
        cr_expect_geq(s->begin_ns, before, "by the host's clock");
        cr_expect_lt(s->layer, LAYERS);
        end[copy] = s->end_ns;
        bytes += s->bytes;
        copied += copy ? s->experts : 0;
        computed += !copy;
        cr_expect_eq(s->bytes != 0, copy);
        if (copy && s->begin_ns < first_copy)
            first_copy = s->begin_ns;
        last = s->end_ns > last ? s->end_ns : last;
    }
    cr_expect_eq(bytes, report.copied_bytes);
    cr_expect_eq(copied, report.copied_experts);
    cr_expect_geq(computed, 200, "every call computes");
    close_clean(model, gpu, f);
    model_free(m);
    return last - first_copy;
}

Test(gpu_trace, spans_of_both_lanes, .timeout = 120)
{
    uint64_t longest = 0;

    for (uint64_t seed = 1; seed <= 20; seed++) {
        const uint64_t ns = run_seed(seed);
        longest = ns > longest ? ns : longest;
    }
    /* a millisecond a step, so the origin has moved */
    cr_expect_gt(longest, (uint64_t)2 * 1000000000);
}

/* Whatever fails, calls go on as without a trace. */
Test(gpu_trace, failures_cost_no_call, .timeout = 120)
{
    static struct told told;
    struct model *m = model_make(LAYERS, false);

    for (uint64_t at = 0; at < 600; at += 7) {
        struct fake *f = fake_make(1 + at % 5);
        struct numoe_gpu *gpu = wrap(f);
        const struct numoe_gpu_model_options options = {.piece_bytes = 1,
                                                        .keep_free_bytes = 4 << 20};
        struct numoe_gpu_model *model;
        static struct batch b;
        uint64_t done;

        told.count = 0;
        model = model_on(gpu, m, &options);
        f->fail_at = f->calls + at;
        f->fail_code = 1;
        if (numoe_gpu_trace(model, tell, &told, NULL) == 0)
            for (uint64_t layer = 0; layer < LAYERS; layer++) {
                batch_make(&b);
                if (!numoe_gpu_forward(model, layer, &b.call, &done, NULL))
                    cr_expect(batch_right(m, layer, &b, done));
            }
        f->fail_at = UINT64_MAX;
        batch_make(&b);
        cr_expect_eq(numoe_gpu_forward(model, 3, &b.call, &done, NULL), 0);
        cr_expect(batch_right(m, 3, &b, done));
        close_clean(model, gpu, f);
    }
    model_free(m);
}
