/* Calls that a GPU and the workers share: how they are divided, and that nothing is lost. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../support/models.h"
#include "base/sanitized.h"
#include "context.h"
#include "fake_device.h"
#include "gpu_model.h"
#include "gpu_run.h"
#include "gpu_share.h"

/* ---- dividing -------------------------------------------------------------------------------- */

enum { MANY = 64 };

static struct gpu_share speeds(double link, double cpu_read, double cpu_rate)
{
    return (struct gpu_share){.expert_bytes = 13e6,
                              .token_bytes = 4096 * 8,
                              .token_operations = 6.0 * 4096 * 2048,
                              .link_rate = link,
                              .gpu_rate = 100e12,
                              .gpu_fixed = 50e-6,
                              .cpu_read = cpu_read,
                              .cpu_rate = cpu_rate,
                              .cpu_fixed = 10e-6};
}

/* No division of few experts is better, and both sides alone are worse or as good. */
Test(gpu_share, the_division_is_the_best_of_all, .timeout = 60)
{
    enum { FEW = 10 };

    random_state = 3;
    for (int round = 0; round < 300; round++) {
        struct gpu_share share =
            speeds(1e9 * (double)(1 + random_u64() % 60), 1e9 * (double)(1 + random_u64() % 300),
                   1e12 * (double)(1 + random_u64() % 20));
        uint32_t tokens_of[FEW], order[FEW];
        uint8_t held[FEW], on_gpu[FEW], other[FEW];
        struct gpu_share_choice choice, check, alone;
        uint64_t tokens = 0;
        double best = INFINITY;

        for (int e = 0; e < FEW; e++) {
            tokens_of[e] = random_u64() % 3 ? (uint32_t)(random_u64() % 200) : 0;
            held[e] = random_u64() % 4 == 0;
            tokens += tokens_of[e];
        }
        tokens = tokens / 2 + 1;
        gpu_share_choose(&share, tokens, tokens_of, held, FEW, order, on_gpu, &choice);
        gpu_share_cost(&share, tokens, tokens_of, held, on_gpu, FEW, &check);
        cr_expect_float_eq(check.seconds, choice.seconds, 1e-9);
        cr_expect_eq(check.gpu_experts, choice.gpu_experts);
        for (int e = 0; e < FEW; e++)
            cr_expect(tokens_of[e] || !on_gpu[e]);
        for (unsigned set = 0; set < 1u << FEW; set++) {
            for (int e = 0; e < FEW; e++)
                other[e] = set >> e & 1;
            gpu_share_cost(&share, tokens, tokens_of, held, other, FEW, &alone);
            if (alone.seconds < best)
                best = alone.seconds;
            if (set == 0 || set == (1u << FEW) - 1)
                cr_expect_leq(choice.seconds, alone.seconds + 1e-12);
        }
        /* whole experts: an expert's worth is lost at most */
        cr_expect_leq(choice.seconds, best + fmax(share.expert_bytes / share.link_rate,
                                                  200 * share.token_operations / share.cpu_rate +
                                                      share.expert_bytes / share.cpu_read));
    }
}

Test(gpu_share, the_hot_go_to_the_gpu_and_the_held_stay_there)
{
    struct gpu_share share = speeds(25e9, 150e9, 5e12);
    uint32_t tokens_of[MANY], order[MANY];
    uint8_t held[MANY] = {0}, on_gpu[MANY];
    struct gpu_share_choice choice;
    uint32_t least = UINT32_MAX, most = 0;

    for (uint32_t e = 0; e < MANY; e++)
        tokens_of[e] = 1 + e * 8 % 500;
    gpu_share_choose(&share, 1024, tokens_of, held, MANY, order, on_gpu, &choice);
    for (uint32_t e = 0; e < MANY; e++) {
        if (on_gpu[e] && tokens_of[e] < least)
            least = tokens_of[e];
        if (!on_gpu[e] && tokens_of[e] > most)
            most = tokens_of[e];
    }
    cr_expect_gt(choice.gpu_experts, 0);
    cr_expect_gt(choice.cpu_experts, 0);
    cr_expect_geq(least, most);
    /* one token: six experts of which two are held */
    memset(tokens_of, 0, sizeof tokens_of);
    for (uint32_t e = 0; e < 6; e++)
        tokens_of[e] = 1;
    held[1] = held[4] = 1;
    gpu_share_choose(&share, 1, tokens_of, held, MANY, order, on_gpu, &choice);
    cr_expect_eq(choice.gpu_experts, 2);
    cr_expect(on_gpu[1] && on_gpu[4]);
    cr_expect_eq(choice.copied, 0);
}

/* Whatever was guessed, calls bring the division to what the true speeds would choose, and sizes
 * that were not seen profit. */
Test(gpu_share, what_calls_take_corrects_the_guesses)
{
    const struct gpu_share truth = speeds(20e9, 100e9, 2e12);

    for (int seed = 0; seed < 16; seed++) {
        /* also where reading and arithmetic are not guessed wrong alike */
        struct gpu_share share = speeds(64e9, 800e9, seed < 8 ? 16e12 : 30e12);
        uint32_t tokens_of[MANY], order[MANY];
        uint8_t held[MANY] = {0}, on_gpu[MANY];
        struct gpu_share_choice choice, really, ideal;
        const uint64_t tokens = 64u << seed % 8;
        struct gpu_share best = truth;

        random_state = (uint64_t)seed + 1;
        for (int call = 0; call < 40; call++) {
            for (uint32_t e = 0; e < MANY; e++)
                tokens_of[e] = (uint32_t)(1 + random_u64() % (tokens / 5));
            gpu_share_choose(&share, tokens, tokens_of, held, MANY, order, on_gpu, &choice);
            gpu_share_cost(&truth, tokens, tokens_of, held, on_gpu, MANY, &really);
            gpu_share_learn(&share, tokens, &choice, really.gpu_seconds, really.cpu_seconds, 0);
            gpu_share_choose(&best, tokens, tokens_of, held, MANY, order, on_gpu, &ideal);
            if (call > 20)
                cr_expect_leq(really.seconds, (seed < 8 ? 1.08 : 1.2) * ideal.seconds,
                              "%d tokens, call %d: %.3f", (int)tokens, call,
                              really.seconds / ideal.seconds);
        }
    }
}

static double of(const struct gpu_share *share, uint64_t tokens, uint8_t gpu, uint8_t is_held)
{
    const uint32_t tokens_of[1] = {(uint32_t)tokens};
    struct gpu_share_choice c;

    gpu_share_cost(share, tokens, tokens_of, &is_held, &gpu, 1, &c);
    cr_expect_eq(c.copied, gpu && !is_held);
    return c.seconds;
}

/* What each side is expected to take: the GPU its link or its arithmetic, the CPUs reading or
 * arithmetic, whichever is longer, and what a call costs besides. */
Test(gpu_share, a_side_takes_the_longer_of_what_bounds_it)
{
    const struct gpu_share s = speeds(25e9, 100e9, 2e12);
    const double pair = s.token_operations, few = 13e6 / 25e9 + 4 * 32768 / 25e9;

    cr_expect_float_eq(of(&s, 4, 1, 0), 50e-6 + few, 1e-12);
    cr_expect_float_eq(of(&s, 4, 1, 1), 50e-6 + 4 * 32768 / 25e9, 1e-12);
    cr_expect_float_eq(of(&s, 1 << 20, 1, 1), 50e-6 + (1 << 20) * 32768.0 / 25e9, 1e-9);
    cr_expect_float_eq(of(&s, 1, 0, 0), 10e-6 + 13e6 / 100e9, 1e-12);
    cr_expect_float_eq(of(&s, 1000, 0, 0), 10e-6 + 1000 * pair / 2e12, 1e-9);
    struct gpu_share slow = s;
    slow.gpu_rate = 1e12;
    cr_expect_float_eq(of(&slow, 1000, 1, 0), 50e-6 + 1000 * pair / 1e12, 1e-9);
}

/* Corrections are of a size, and of the nearest where it has none; and after so many calls a side
 * that did badly is tried again. */
Test(gpu_share, corrections_are_of_a_size_and_are_not_for_ever)
{
    struct gpu_share s = speeds(25e9, 100e9, 2e12);
    const struct gpu_share plain = s;
    const uint8_t gpu = 1, is_held = 0;
    struct gpu_share_choice c;

    for (int i = 0; i < 2; i++) {
        const uint64_t tokens = i ? 4096 : 64;
        const uint32_t tokens_of[1] = {(uint32_t)tokens};

        gpu_share_cost(&s, tokens, tokens_of, &is_held, &gpu, 1, &c);
        gpu_share_learn(&s, tokens, &c, c.gpu_model * (i ? 5 : 3), 0, 0);
    }
    cr_expect_float_eq(of(&s, 64, 1, 0) / of(&plain, 64, 1, 0), 3, 1e-9);
    cr_expect_float_eq(of(&s, 4096, 1, 0) / of(&plain, 4096, 1, 0), 5, 1e-9);
    cr_expect_float_eq(of(&s, 128, 1, 0) / of(&plain, 128, 1, 0), 3, 1e-9);
    cr_expect_float_eq(of(&s, 1, 1, 0) / of(&plain, 1, 1, 0), 3, 1e-9);
    cr_expect_float_eq(of(&s, 65536, 1, 0) / of(&plain, 65536, 1, 0), 5, 1e-9);
    cr_expect_float_eq(of(&s, 64, 0, 0) / of(&plain, 64, 0, 0), 1, 1e-9, "the CPUs'");
    for (int i = 0; i < 640; i++) /* calls in which it had no part */
        gpu_share_learn(&s, 64, &(struct gpu_share_choice){0}, 0, 0, 0);
    cr_expect_lt(of(&s, 64, 1, 0) / of(&plain, 64, 1, 0), 2.5);
    cr_expect_gt(of(&s, 64, 1, 0) / of(&plain, 64, 1, 0), 1.5);
}

/* The CPUs begin later than the GPU in a call that both share, and not in one of their own. */
Test(gpu_share, who_begins_later_gets_less)
{
    struct gpu_share share = speeds(100e9, 100e9, 1e15);
    uint32_t tokens_of[MANY], order[MANY];
    uint8_t held[MANY] = {0}, on_gpu[MANY];
    struct gpu_share_choice even, late;
    const double expert = 13e6 / 100e9;

    for (uint32_t e = 0; e < MANY; e++)
        tokens_of[e] = 2;
    gpu_share_choose(&share, 64, tokens_of, held, MANY, order, on_gpu, &even);
    gpu_share_learn(&share, 64, &(struct gpu_share_choice){.seconds = 1}, 0, 0, 10 * expert);
    gpu_share_choose(&share, 64, tokens_of, held, MANY, order, on_gpu, &late);
    cr_expect_lt(late.cpu_experts, even.cpu_experts);
    cr_expect_gt(late.seconds, even.seconds);
    cr_expect_float_eq(late.seconds, fmax(late.gpu_seconds, late.cpu_seconds + 10 * expert), 1e-12);
    cr_expect_lt(fabs(late.gpu_seconds - late.cpu_seconds - 10 * expert), 5 * expert);
    /* the nearest size's, and a moved one's */
    gpu_share_choose(&share, 16, tokens_of, held, MANY, order, on_gpu, &late);
    cr_expect_float_eq(late.seconds, fmax(late.gpu_seconds, late.cpu_seconds + 10 * expert), 1e-12);
    gpu_share_learn(&share, 64, &(struct gpu_share_choice){.seconds = 1}, 0, 0, 20 * expert);
    gpu_share_choose(&share, 64, tokens_of, held, MANY, order, on_gpu, &late);
    cr_expect_float_eq(late.seconds, fmax(late.gpu_seconds, late.cpu_seconds + 15 * expert), 1e-12);
    /* alone */
    memset(on_gpu, 0, sizeof on_gpu);
    gpu_share_cost(&share, 64, tokens_of, held, on_gpu, MANY, &late);
    cr_expect_float_eq(late.seconds, 10e-6 + MANY * expert, 1e-12);
    memset(on_gpu, 1, sizeof on_gpu);
    gpu_share_cost(&share, 64, tokens_of, held, on_gpu, MANY, &late);
    cr_expect_float_eq(late.seconds, late.gpu_seconds, 1e-12);
}

/* A call that was held up when it began does not end sharing, and sharing that was given up is
 * tried again. */
Test(gpu_share, being_late_once_is_forgotten)
{
    const struct gpu_share truth = speeds(50e9, 100e9, 1e15);
    uint32_t tokens_of[MANY], order[MANY], tries = 0;
    uint8_t held[MANY] = {0}, on_gpu[MANY];
    struct gpu_share share = truth;
    struct gpu_share_choice c;

    for (uint32_t e = 0; e < MANY; e++)
        tokens_of[e] = 2;
    gpu_share_choose(&share, 64, tokens_of, held, MANY, order, on_gpu, &c);
    cr_assert(c.gpu_experts && c.cpu_experts);
    gpu_share_learn(&share, 64, &c, c.gpu_seconds, c.cpu_seconds, 1.0);
    gpu_share_choose(&share, 64, tokens_of, held, MANY, order, on_gpu, &c);
    cr_expect(c.gpu_experts && c.cpu_experts, "late by a second");
    /* sides of which sharing is worth little: one alone is chosen when it begins late by so much */
    share = speeds(10e9, 100e9, 1e15);
    gpu_share_learn(&share, 64, &(struct gpu_share_choice){.seconds = 1}, 0, 0, 0.01);
    do {
        gpu_share_choose(&share, 64, tokens_of, held, MANY, order, on_gpu, &c);
        cr_assert_lt(tries++, 200);
    } while (!c.gpu_experts || !c.cpu_experts);
    cr_expect_gt(tries, 1);
}

/* ---- shared calls ---------------------------------------------------------------------------- */

enum { HIDDEN = 40, INTERMEDIATE = 70, EXPERTS = 12, LAYERS = 3, TOP_K = 3, TOKENS = 70 };

static struct numoe *context_make(struct fake *f, uint64_t cache)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context;

    unsetenv("NUMOE_GPU");
    options.topology = "pack:3 [numa(memory=4GB)] core:1 pu:1";
    options.threads = 2;
    options.gpu_cache_bytes = cache;
    options.gpu_stream = cache == 0;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    if (f) {
        cr_assert_eq(gpu_wrap(&fake_ops, f, &p, &context->log, &context->gpu), 0);
        context->gpu_stream = cache == 0;
        context->gpu_cache_bytes = cache;
    }
    return context;
}

static struct numoe_model *model_make(struct numoe *context)
{
    const struct numoe_model_desc desc =
        plain_desc(LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, true);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model *model;

    cr_assert_eq(numoe_model_create(context, &desc, &model, &error), 0, "%s", error.message);
    random_state = 17;
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) {
        struct numoe_expert_weights w;
        struct test_expert from;

        test_expert_make(&from, HIDDEN, INTERMEDIATE, true);
        w = expert_weights(&from);
        if (q % EXPERTS != 4) /* missing */
            cr_assert_eq(numoe_expert_load(model, q / EXPERTS, q % EXPERTS, &w, &error), 0);
        test_expert_free(&from);
    }
    return model;
}

/* A model and its context, and the device that it is on. */
static void close_on(struct fake *f, struct numoe *context, struct numoe_model *model)
{
    numoe_model_destroy(model);
    numoe_close(context);
    cr_expect_eq(f->wrong, 0, "%s", f->text);
    fake_free(f);
}

struct call {
    float x[TOKENS][HIDDEN], routing[TOKENS][TOP_K], out[TOKENS][HIDDEN];
    uint16_t narrow[TOKENS][HIDDEN];
    int32_t ids[TOKENS][TOP_K];
    uint8_t elsewhere[EXPERTS];
    struct numoe_batch batch;
    struct numoe_result result;
};

static void call_make(struct call *c, uint64_t seed, uint64_t tokens)
{
    random_state = seed + 99;
    *c = (struct call){.batch = NUMOE_BATCH_INIT, .result = NUMOE_RESULT_INIT};
    for (uint64_t t = 0; t < tokens; t++) {
        for (int k = 0; k < HIDDEN; k++) {
            c->x[t][k] = round_to_bf16(random_normal());
            c->out[t][k] = round_to_bf16(random_normal());
            c->narrow[t][k] = bf16_bits(c->out[t][k]);
        }
        for (int j = 0; j < TOP_K; j++) {
            c->ids[t][j] = (int32_t)(random_u64() >> 30) % (EXPERTS + 3) - 2;
            c->routing[t][j] = (float)random_unit();
        }
    }
    c->elsewhere[3] = 1;
    c->batch.tokens = tokens;
    c->batch.top_k = TOP_K;
    c->batch.x = c->x;
    c->batch.x_type = NUMOE_F32;
    c->batch.ids = c->ids;
    c->batch.id_bytes = 4;
    c->batch.weights = &c->routing[0][0];
    c->batch.out = seed % 4 == 3 ? (void *)c->narrow : c->out;
    c->batch.out_type = seed % 4 == 3 ? NUMOE_BF16 : NUMOE_F32;
    c->batch.add = seed % 2;
    c->batch.scale = 0.75f;
    c->batch.elsewhere = seed % 3 ? c->elsewhere : NULL;
}

static double distance(const struct call *a, const struct call *b)
{
    double want[TOKENS * HIDDEN];
    float have[TOKENS * HIDDEN];

    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        const bool narrow = b->batch.out_type == NUMOE_BF16;
        want[i] = narrow ? (double)bf16_value((&b->narrow[0][0])[i]) : (double)(&b->out[0][0])[i];
        have[i] = narrow ? bf16_value((&a->narrow[0][0])[i]) : (&a->out[0][0])[i];
    }
    return relative_l2(want, have, TOKENS * HIDDEN);
}

static void expect_same_counts(const struct numoe_result *a, const struct numoe_result *b, int call)
{
    cr_expect_eq(a->skipped, b->skipped, "call %d", call);
    cr_expect_eq(a->missing, b->missing, "call %d: %d and %d", call, (int)a->missing,
                 (int)b->missing);
    cr_expect_eq(a->pairs, b->pairs, "call %d: %d and %d", call, (int)a->pairs, (int)b->pairs);
    cr_expect_eq(a->experts_hit, b->experts_hit, "call %d", call);
    cr_expect_eq(a->expert_bytes, b->expert_bytes, "call %d", call);
}

/* Speeds of the two sides as they please, so that every kind of division comes. */
static void set_speeds(struct numoe_model *model, uint64_t seed)
{
    random_state = seed * 31 + 7;
    numoe_gpu_run_guess(model, 1e6 * (1 + (double)(random_u64() % 1000)),
                        1e6 * (1 + (double)(random_u64() % 1000)));
}

Test(gpu_share, results_and_counts_are_those_of_the_cpu, .timeout = 120)
{
    struct numoe *there = context_make(NULL, 0);
    struct numoe_model *cpu = model_make(there);
    uint64_t shared = 0, alone = 0, none = 0;

    for (uint64_t seed = 0; seed < 12; seed++) {
        struct fake *f = fake_make(seed);
        struct numoe *here = context_make(f, seed % 3 * 40000);
        struct numoe_model *gpu = model_make(here);

        cr_assert_not_null(numoe_model_gpu(gpu));
        for (uint64_t i = 0; i < 24; i++) {
            struct numoe_error error = NUMOE_ERROR_INIT;
            static struct call a, b;
            const uint64_t tokens = i % 3 == 0 ? 1 : i % 3 == 1 ? 9 : TOKENS;

            set_speeds(gpu, seed * 100 + i);
            call_make(&a, i, tokens);
            call_make(&b, i, tokens);
            if (i % 5 == 4) {
                uint64_t ticket;
                cr_assert_eq(numoe_submit(gpu, i % LAYERS, &a.batch, &ticket, &error), 0, "%s",
                             error.message);
                cr_assert_eq(numoe_wait(gpu, ticket, &a.result), 0);
            } else {
                cr_assert_eq(numoe_forward(gpu, i % LAYERS, &a.batch, &a.result, &error), 0, "%s",
                             error.message);
            }
            cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, &error), 0);
            cr_expect_lt(distance(&a, &b), 5e-3, "call %d: %.2e", (int)i, distance(&a, &b));
            expect_same_counts(&a.result, &b.result, (int)i);
            shared += a.result.gpu_pairs && a.result.gpu_pairs < a.result.pairs;
            alone += a.result.gpu_pairs && a.result.gpu_pairs == a.result.pairs;
            none += !a.result.gpu_pairs;
        }
        numoe_model_destroy(gpu);
        cr_expect_eq(f->wrong, 0, "%s", f->text);
        cr_expect_eq(f->range_count, 0);
        numoe_close(here);
        fake_free(f);
    }
    cr_expect(shared > 40 && alone > 10 && none > 10, "%d shared, %d the GPU's, %d the CPU's",
              (int)shared, (int)alone, (int)none);
    numoe_model_destroy(cpu);
    numoe_close(there);
}

/* The device fails in one of the calls that a shared call makes, and perhaps is lost. */
static void fail_in_calls(int code)
{
    struct numoe *there = context_make(NULL, 0);
    struct numoe_model *cpu = model_make(there);
    uint64_t given_back = 0;

    for (uint64_t at = 0; at < 90; at += 2) {
        struct fake *f = fake_make(at);
        struct numoe *here = context_make(f, 40000);
        struct numoe_model *gpu = model_make(here);

        f->fail_at = f->calls + at;
        f->fail_code = code;
        for (uint64_t i = 0; i < 6; i++) {
            struct numoe_error error = NUMOE_ERROR_INIT;
            static struct call a, b;

            numoe_gpu_run_guess(gpu, 200e6, 200e6);
            call_make(&a, i, TOKENS);
            call_make(&b, i, TOKENS);
            cr_assert_eq(numoe_forward(gpu, i % LAYERS, &a.batch, &a.result, &error), 0, "%s",
                         error.message);
            cr_assert_eq(numoe_forward(cpu, i % LAYERS, &b.batch, &b.result, &error), 0);
            cr_expect_lt(distance(&a, &b), 5e-3, "code %d at %d, call %d: %.2e", code, (int)at,
                         (int)i, distance(&a, &b));
            expect_same_counts(&a.result, &b.result, (int)i);
            given_back += a.result.gpu_tokens < TOKENS;
        }
        f->fail_at = UINT64_MAX;
        close_on(f, here, gpu);
    }
    cr_expect_gt(given_back, 10);
    numoe_model_destroy(cpu);
    numoe_close(there);
}

Test(gpu_share, the_workers_finish_what_runs_out_of_memory, .timeout = 120)
{
    fail_in_calls(2);
}

Test(gpu_share, the_workers_finish_what_a_lost_device_began, .timeout = 120)
{
    fail_in_calls(700);
}

#if !SANITIZED
/* No memory can be mapped by this thread: workers have what they need, or fail. */
static _Thread_local bool no_maps;

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    if (no_maps) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

static int last_maps(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    no_maps = true;
    return fake_copy_in(device, stream, to, from, bytes);
}

/* Workers that find no memory when the device has begun its part end the call, and the device's
 * part with it: the next call is as any other. */
Test(gpu_share, the_device_ends_what_the_workers_cannot, .timeout = 60)
{
    struct numoe *there = context_make(NULL, 0);
    struct numoe_model *cpu = model_make(there);
    uint32_t ended = 0;

    for (uint64_t seed = 1; seed <= 30; seed++) {
        struct fake *f = fake_make(seed);
        struct numoe *context = context_make(f, 1);
        struct numoe_model *model = model_make(context);
        struct gpu_ops ops = fake_ops;
        struct numoe_error error = NUMOE_ERROR_INIT;
        static struct call a, b;
        int rc;

        ops.copy_in = last_maps;
        context->gpu->ops = &ops;
        set_speeds(model, seed);
        call_make(&a, seed, TOKENS);
        rc = numoe_forward(model, 0, &a.batch, &a.result, &error);
        no_maps = false;
        context->gpu->ops = &fake_ops;
        if (rc) {
            ended++;
            cr_expect_eq(rc, -ENOMEM, "%s", error.message);
            cr_expect_not_null(strstr(error.message, "no memory for"), "%s", error.message);
            cr_expect(!numoe_model_gpu(model)->running && !numoe_gpu_sharing(model));
        }
        call_make(&a, seed, TOKENS);
        call_make(&b, seed, TOKENS);
        cr_assert_eq(numoe_forward(model, 0, &a.batch, &a.result, &error), 0, "%s", error.message);
        cr_assert_eq(numoe_forward(cpu, 0, &b.batch, &b.result, NULL), 0);
        cr_expect(!rc || a.result.gpu_pairs > 0, "the device goes on");
        cr_expect_lt(distance(&a, &b), 5e-3);
        expect_same_counts(&a.result, &b.result, (int)seed);
        close_on(f, context, model);
    }
    cr_expect_gt(ended, 5, "%u", ended);
    numoe_model_destroy(cpu);
    numoe_close(there);
}
#endif

static const float *watched;
static uint32_t seen_written;

/* The device's first computation is queued when the workers have written what they write last. */
static int launch_late(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    for (int i = 0; i < 20000 && isnan(*(const volatile float *)watched); i++)
        usleep(500);
    seen_written += !isnan(*(const volatile float *)watched);
    return fake_launch(device, stream, ffn);
}

/* The workers do not wait until all of the device's part is queued. */
Test(gpu_share, the_workers_begin_at_once, .timeout = 60)
{
    struct numoe *there = context_make(NULL, 0);
    struct numoe_model *cpu = model_make(there);
    struct fake *f = fake_make(3);
    struct numoe *context = context_make(f, 0);
    struct numoe_model *model = model_make(context);
    struct gpu_ops ops = fake_ops;
    struct gpu_shared sides;
    static struct call a, b;

    ops.launch = launch_late;
    context->gpu->ops = &ops;
    numoe_gpu_run_guess(model, 200e6, 200e6);
    call_make(&a, 2, TOKENS);
    call_make(&b, 2, TOKENS);
    a.out[TOKENS - 1][HIDDEN - 1] = NAN;
    watched = &a.out[TOKENS - 1][HIDDEN - 1];
    cr_assert_eq(numoe_forward(model, 0, &a.batch, &a.result, NULL), 0);
    cr_assert_eq(numoe_forward(cpu, 0, &b.batch, &b.result, NULL), 0);
    numoe_gpu_shared(model, &sides);
    cr_assert(sides.gpu_experts && sides.cpu_experts);
    cr_expect_gt(seen_written, 0);
    cr_expect_lt(distance(&a, &b), 5e-3);
    close_on(f, context, model);
    numoe_model_destroy(cpu);
    numoe_close(there);
}

/* More tokens than the workers or the device take at once: each side in passes of its own. Few of
 * them have an expert. */
Test(gpu_share, calls_of_several_passes, .timeout = 120)
{
    enum { LONG = 1200000, EACH = 9973 };
    struct numoe *there = context_make(NULL, 0);
    struct numoe_model *cpu = model_make(there);
    struct fake *f = fake_make(4);
    struct numoe *context = context_make(f, 0);
    struct numoe_model *model = model_make(context);
    float *x = calloc((size_t)LONG * HIDDEN, sizeof *x), *routing = calloc(LONG, sizeof *routing);
    float *out[2];
    int32_t *ids = calloc(LONG, sizeof *ids);
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe_result results[2] = {NUMOE_RESULT_INIT, NUMOE_RESULT_INIT};
    struct gpu_shared sides;

    random_state = 8;
    for (uint64_t t = 0; t < LONG; t++) {
        ids[t] = t % EACH ? -1 : (int32_t)(random_u64() % EXPERTS);
        routing[t] = (float)random_unit();
        for (int k = 0; k < HIDDEN && t % EACH == 0; k++)
            x[t * HIDDEN + k] = round_to_bf16(random_normal());
    }
    for (int i = 0; i < 2; i++) {
        out[i] = malloc((size_t)LONG * HIDDEN * sizeof(float));
        memset(out[i], 0xFF, (size_t)LONG * HIDDEN * sizeof(float));
    }
    batch.tokens = LONG;
    batch.top_k = 1;
    batch.x = x;
    batch.x_type = NUMOE_F32;
    batch.ids = ids;
    batch.id_bytes = 4;
    batch.weights = routing;
    batch.out_type = NUMOE_F32;
    batch.out = out[0];
    numoe_gpu_run_guess(model, 2e11, 1e7); /* experts are nothing beside so many tokens */
    cr_assert_eq(numoe_forward(model, 0, &batch, &results[0], NULL), 0);
    numoe_gpu_shared(model, &sides);
    cr_assert(sides.gpu_experts && sides.cpu_experts);
    batch.out = out[1];
    cr_assert_eq(numoe_forward(cpu, 0, &batch, &results[1], NULL), 0);
    for (uint64_t t = 0; t < LONG; t++)
        if (t % EACH)
            cr_assert_eq(memcmp(out[0] + t * HIDDEN, out[1] + t * HIDDEN, HIDDEN * sizeof(float)),
                         0);
        else
            for (int k = 0; k < HIDDEN; k++)
                cr_assert_float_eq(out[0][t * HIDDEN + k], out[1][t * HIDDEN + k],
                                   1e-2f * (1 + fabsf(out[1][t * HIDDEN + k])));
    expect_same_counts(&results[0], &results[1], 0);
    for (int i = 0; i < 2; i++)
        free(out[i]);
    free(x);
    free(ids);
    free(routing);
    close_on(f, context, model);
    numoe_model_destroy(cpu);
    numoe_close(there);
}

/* Of a shared call the device hears of all experts, also of the workers'; it keeps the link free of
 * what nobody asked for. */
Test(gpu_share, a_shared_call_tells_of_all_its_experts, .timeout = 60)
{
    struct fake *f = fake_make(3);
    struct numoe *context = context_make(f, 40000);
    struct numoe_model *model = model_make(context);
    const struct gpu_stream *stream = &numoe_model_gpu(model)->stream;
    static struct call c;
    uint64_t shared = 0;

    for (uint64_t i = 0; i < 12; i++) {
        uint8_t hit[EXPERTS] = {0};
        struct gpu_shared sides;

        numoe_gpu_run_guess(model, 200e6, 200e6);
        call_make(&c, 1, TOKENS);
        c.batch.elsewhere = NULL;
        cr_assert_eq(numoe_forward(model, i % LAYERS, &c.batch, &c.result, NULL), 0);
        numoe_gpu_shared(model, &sides);
        cr_assert(sides.gpu_experts && sides.cpu_experts);
        shared += c.result.gpu_pairs < c.result.pairs;
        for (int t = 0; t < TOKENS * TOP_K; t++)
            if ((&c.ids[0][0])[t] >= 0 && (&c.ids[0][0])[t] < EXPERTS)
                hit[(&c.ids[0][0])[t]] = 1;
        for (uint32_t e = 0; e < EXPERTS; e++)
            cr_expect_eq(stream->cache.heat[gpu_cache_at(&stream->cache, i % LAYERS, e)] > 0,
                         hit[e] && e != 4, "expert %u", e);
        cr_expect_eq(stream->jobs[!stream->current].layer, GPU_NO_LAYER, "a prefetch");
    }
    cr_expect_eq(shared, 12);
    close_on(f, context, model);
}

static double device_ms;

static int elapsed_as_told(void *device, void *begin, void *end, double *ms)
{
    const int e = fake_elapsed(device, begin, end, ms);

    *ms = device_ms;
    return e;
}

/* Calls on a context as it is, of so many tokens each; what the device computed of the last. */
static void call_some(struct numoe_model *model, uint64_t calls, uint64_t tokens,
                      struct numoe_result *last)
{
    static struct call c;

    for (uint64_t i = 0; i < calls; i++) {
        call_make(&c, 1, tokens);
        cr_assert_eq(numoe_forward(model, i % LAYERS, &c.batch, &c.result, NULL), 0);
    }
    *last = c.result;
}

/* Shared calls move the division by what the device's own clock says, the device's alone by the
 * host's. */
Test(gpu_share, what_a_call_took_moves_the_next, .timeout = 60)
{
    struct gpu_ops ops = fake_ops;

    ops.elapsed = elapsed_as_told;
    for (int kind = 0; kind < 3; kind++) {
        struct fake *f = fake_make(3);
        struct numoe *context = context_make(f, 0);
        struct numoe_model *model = model_make(context);
        struct numoe_result r;

        context->gpu->ops = &ops;
        device_ms = kind ? 1e4 : 1e-2;
        numoe_gpu_run_guess(model, kind == 2 ? 1e15 : 200e6, kind == 2 ? 1e12 : 200e6);
        call_some(model, 1, TOKENS, &r);
        cr_assert(kind == 2 ? r.gpu_pairs == r.pairs : r.gpu_pairs && r.gpu_pairs < r.pairs);
        call_some(model, 1, TOKENS, &r); /* whatever the host's clock says of the workers */
        cr_expect_eq(r.gpu_pairs > 0, kind == 0, "kind %d: %d of %d", kind, (int)r.gpu_pairs,
                     (int)r.pairs);
        numoe_model_destroy(model);
        numoe_close(context);
        fake_free(f);
    }
}

/* A number of tokens that was set divides calls, and not what sides take; memory that is not pinned
 * is the device's alone; and large calls leave the link to themselves. */
Test(gpu_share, what_is_not_shared, .timeout = 60)
{
    for (int kind = 0; kind < 3; kind++) {
        struct fake *f = fake_make(3);
        struct numoe *context = context_make(f, 200000);
        struct numoe_gpu_report before, after;
        struct numoe_model *model;
        struct numoe_result r;

        if (kind == 0)
            context->gpu_from_tokens = 5;
        if (kind == 1)
            f->pin_most = 0;
        model = model_make(context);
        /* the workers would have it all, but for what is held */
        numoe_gpu_run_guess(model, 1e3, 1e12);
        numoe_gpu_model_report(numoe_model_gpu(model), &before);
        call_some(model, 3, kind ? TOKENS : 4, &r);
        numoe_gpu_model_report(numoe_model_gpu(model), &after);
        cr_expect_eq(r.gpu_pairs, kind == 1 ? r.pairs : 0);
        cr_expect_eq(after.copied_experts > before.copied_experts, kind == 1);
        if (kind == 0) {
            call_some(model, 3, 5, &r);
            cr_expect_eq(r.gpu_pairs, r.pairs);
        }
        close_on(f, context, model);
    }
}

/* Decode with room for some experts: those asked for often come, though nobody waits for them. */
Test(gpu_share, experts_asked_for_often_come_to_stay, .timeout = 60)
{
    struct fake *f = fake_make(3);
    struct numoe *context = context_make(f, 200000);
    struct numoe_model *model = model_make(context);
    uint64_t gpu_pairs = 0, pairs = 0;

    for (uint64_t i = 0; i < 120; i++) {
        static struct call c;

        /* a slow link: nothing is worth copying for a call, but what is there is the GPU's */
        numoe_gpu_run_guess(model, 1e6, 30e6);
        call_make(&c, i, 1);
        for (int j = 0; j < TOP_K; j++)
            c.ids[0][j] = j;
        c.batch.elsewhere = NULL;
        cr_assert_eq(numoe_forward(model, i % LAYERS, &c.batch, &c.result, NULL), 0);
        if (i >= 60) {
            gpu_pairs += c.result.gpu_pairs;
            pairs += c.result.pairs;
        }
    }
    cr_expect_eq(gpu_pairs, pairs, "%d of %d", (int)gpu_pairs, (int)pairs);
    close_on(f, context, model);
}
