/*
 * Two contexts, each with a device of its own that is late at random: calls of several threads that
 * devices and workers share, submissions that are called off, readers of what there is, and models
 * destroyed with a call under way. For ThreadSanitizer; and what is not called off is right.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "../support/models.h"
#include "context.h"
#include "fake_device.h"
#include "gpu_run.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ROUNDS 25
#endif
#endif
#ifndef ROUNDS
#define ROUNDS 100
#endif

enum { HIDDEN = 40, INTERMEDIATE = 64, EXPERTS = 8, LAYERS = 2, TOP_K = 2, TOKENS = 9 };

static atomic_uint failures, cancelled;
static atomic_uint_fast64_t device_pairs, pairs;
static atomic_bool over;

#define EXPECT(good)                                                                               \
    do {                                                                                           \
        if (!(good) && atomic_fetch_add(&failures, 1) < 20)                                        \
            fprintf(stderr, "line %d: %s\n", __LINE__, #good);                                     \
    } while (0)

struct call {
    float x[TOKENS][HIDDEN], routing[TOKENS][TOP_K], out[TOKENS][HIDDEN], truth[TOKENS][HIDDEN];
    int32_t ids[TOKENS][TOP_K];
    struct numoe_batch batch;
};

struct side {
    struct numoe *context;
    struct numoe_model *model;
    struct fake *fake;
    struct call calls[2]; /* of a thread each */
};

static void open_side(struct side *s, uint64_t seed, bool device)
{
    const struct numoe_gpu_properties p = {.name = "Fake", .os_node = NUMOE_NONE};
    const struct numoe_model_desc desc =
        plain_desc(LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, true);
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.topology = "pack:2 [numa(memory=4GB)] core:1 pu:1";
    options.threads = 2;
    options.stats = true;
    options.gpu = NUMOE_GPU_OFF;
    EXPECT(numoe_open(&options, &s->context, NULL) == 0);
    s->fake = device ? fake_make(seed) : NULL;
    if (device) {
        EXPECT(gpu_wrap(&fake_ops, s->fake, &p, &s->context->log, &s->context->gpu) == 0);
        s->context->gpu_cache_bytes = 30000;
    }
    EXPECT(numoe_model_create(s->context, &desc, &s->model, NULL) == 0);
    random_state = 17;
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) {
        struct numoe_expert_weights w;
        struct test_expert from;

        test_expert_make(&from, HIDDEN, INTERMEDIATE, true);
        w = expert_weights(&from);
        EXPECT(numoe_expert_load(s->model, q / EXPERTS, q % EXPERTS, &w, NULL) == 0);
        test_expert_free(&from);
    }
}

static void close_side(struct side *s)
{
    numoe_model_destroy(s->model);
    if (s->fake) {
        EXPECT(s->fake->wrong == 0);
        if (s->fake->wrong)
            fprintf(stderr, "%s\n", s->fake->text);
        EXPECT(s->fake->range_count == 0);
    }
    numoe_close(s->context);
    if (s->fake)
        fake_free(s->fake);
}

static void make_call(struct call *c, uint64_t seed)
{
    random_state = seed + 5;
    c->batch = (struct numoe_batch)NUMOE_BATCH_INIT;
    for (int t = 0; t < TOKENS; t++) {
        for (int k = 0; k < HIDDEN; k++)
            c->x[t][k] = round_to_bf16(random_normal());
        for (int j = 0; j < TOP_K; j++) {
            c->ids[t][j] = (int32_t)(random_u64() % EXPERTS);
            c->routing[t][j] = (float)random_unit();
        }
    }
    c->batch.tokens = TOKENS;
    c->batch.top_k = TOP_K;
    c->batch.x = c->x;
    c->batch.x_type = NUMOE_F32;
    c->batch.ids = c->ids;
    c->batch.id_bytes = 4;
    c->batch.weights = &c->routing[0][0];
    c->batch.out = c->out;
    c->batch.out_type = NUMOE_F32;
}

static bool right(const struct call *c)
{
    double error = 0, norm = 0;

    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        const double want = (double)(&c->truth[0][0])[i];
        const double d = (double)(&c->out[0][0])[i] - want;

        error += d * d;
        norm += want * want;
    }
    return sqrt(error / norm) <= 5e-3;
}

struct caller {
    struct side *side;
    struct call *call;
    bool submits;
};

/* What calls took on the fake device says nothing: speeds with which calls are shared, or the
 * workers' alone, which are those that can be called off. */
static void guess(struct side *s, bool shared)
{
    pthread_mutex_lock(&s->context->turn);
    numoe_gpu_run_guess(s->model, shared ? 200e6 : 1, 200e6);
    pthread_mutex_unlock(&s->context->turn);
}

static void *call_often(void *user)
{
    const struct caller *me = user;
    struct call *c = me->call;

    for (unsigned i = 0; i < ROUNDS; i++) {
        struct numoe_result result = NUMOE_RESULT_INIT;
        uint64_t ticket;
        int rc;

        memset(c->out, 0xFF, sizeof c->out);
        guess(me->side, i % 2);
        if (me->submits) {
            EXPECT(numoe_submit(me->side->model, 0, &c->batch, &ticket, NULL) == 0);
            if (i % 3 == 0) {
                rc = numoe_cancel(me->side->model, ticket);
                EXPECT(rc == 0 || rc == -EALREADY);
            }
            rc = numoe_wait(me->side->model, ticket, &result);
            EXPECT(rc == 0 || (rc == -ECANCELED && i % 3 == 0));
            atomic_fetch_add(&cancelled, rc != 0);
        } else {
            rc = numoe_forward(me->side->model, 0, &c->batch, &result, NULL);
            EXPECT(rc == 0);
        }
        EXPECT(rc || right(c));
        if (rc)
            continue;
        atomic_fetch_add(&pairs, result.pairs);
        atomic_fetch_add(&device_pairs, result.gpu_pairs);
    }
    return NULL;
}

static void *read_often(void *user)
{
    const struct side *sides = user;

    while (!atomic_load(&over))
        for (int i = 0; i < 2; i++) {
            struct numoe_model_info info = {.size = sizeof info};
            struct numoe_stats stats = NUMOE_STATS_INIT;
            struct numoe_gpu_report report;

            EXPECT(numoe_model_info(sides[i].model, &info) == 0);
            EXPECT(numoe_stats_get(sides[i].context, &stats) == 0);
            numoe_gpu_model_report(numoe_model_gpu(sides[i].model), &report);
        }
    return NULL;
}

int main(void)
{
    static struct side sides[2], cpu;
    struct caller callers[4];
    pthread_t threads[5];
    uint64_t ticket;

    open_side(&cpu, 0, false);
    for (int i = 0; i < 2; i++) {
        open_side(&sides[i], 2 + (uint64_t)i, true);
        for (int k = 0; k < 2; k++) {
            struct call *c = &sides[i].calls[k];

            make_call(c, (uint64_t)(2 * i + k));
            EXPECT(numoe_forward(cpu.model, 0, &c->batch, NULL, NULL) == 0);
            memcpy(c->truth, c->out, sizeof c->out);
            callers[2 * i + k] = (struct caller){&sides[i], c, k == 1};
        }
    }
    EXPECT(pthread_create(&threads[4], NULL, read_often, sides) == 0);
    for (int i = 0; i < 4; i++)
        EXPECT(pthread_create(&threads[i], NULL, call_often, &callers[i]) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&over, true);
    pthread_join(threads[4], NULL);
    for (int i = 0; i < 2; i++) { /* under way when its model goes */
        guess(&sides[i], true);
        EXPECT(numoe_submit(sides[i].model, 0, &sides[i].calls[0].batch, &ticket, NULL) == 0);
    }
    EXPECT(atomic_load(&device_pairs) > atomic_load(&pairs) / 8 &&
           atomic_load(&device_pairs) < atomic_load(&pairs));
    for (int i = 0; i < 2; i++)
        close_side(&sides[i]);
    close_side(&cpu);
    printf("%llu of %llu entries by devices, %u cancelled\n",
           (unsigned long long)atomic_load(&device_pairs), (unsigned long long)atomic_load(&pairs),
           atomic_load(&cancelled));
    printf("%d passed, %d failed\n", atomic_load(&failures) == 0, atomic_load(&failures) != 0);
    return atomic_load(&failures) != 0;
}
