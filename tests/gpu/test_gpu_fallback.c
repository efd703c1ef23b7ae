/* A GPU that fails in the middle of a call, and a process that forks while it computes. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../support/models.h"
#include "context.h"
#include "fake_device.h"
#include "gpu_model.h"

enum { HIDDEN = 40, INTERMEDIATE = 70, EXPERTS = 6, LAYERS = 2, TOP_K = 3, TOKENS = 300 };

static struct numoe *context_make(const struct gpu_ops *ops, struct fake *fake)
{
    const struct numoe_gpu_properties properties = {.name = "Fake", .os_node = NUMOE_NONE};
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe *context;

    options.topology = "pack:3 [numa(memory=4GB)] core:1 pu:1";
    options.threads = 2;
    options.gpu_from_tokens = 1;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    if (ops)
        cr_assert_eq(gpu_wrap(ops, fake, &properties, &context->log, &context->gpu), 0);
    return context;
}

static uint32_t left_out;

static void count_left_out(void *user, enum numoe_log_level level, const char *message)
{
    (void)user;
    left_out += level == NUMOE_LOG_WARNING && strstr(message, "is left out: ");
}

/* A device that is asked for twice and is not there is told of once. */
Test(gpu_fallback, a_device_is_left_out_once)
{
    static const uint32_t devices[] = {97, 98, 97, 97, 98};
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe *context;

    options.topology = "pack:3 [numa(memory=4GB)] core:1 pu:1";
    options.threads = 2;
    options.gpu = NUMOE_GPU_ON;
    options.gpu_devices = devices;
    options.gpu_device_count = sizeof devices / sizeof *devices;
    options.log.fn = count_left_out;
    left_out = 0;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    cr_expect_eq(left_out, 2);
    cr_expect_null(context->gpu);
    numoe_close(context);
}

static struct numoe_model *model_make(struct numoe *context)
{
    const struct numoe_model_desc desc =
        plain_desc(LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, false);
    struct numoe_model *model;

    cr_assert_eq(numoe_model_create(context, &desc, &model, NULL), 0);
    random_state = 7;
    for (uint64_t q = 0; q < LAYERS * EXPERTS; q++) {
        struct numoe_expert_weights w;
        struct test_expert e;
        test_expert_make(&e, HIDDEN, INTERMEDIATE, false);
        w = expert_weights(&e);
        cr_assert_eq(numoe_expert_load(model, q / EXPERTS, q % EXPERTS, &w, NULL), 0);
        test_expert_free(&e);
    }
    return model;
}

static float x[TOKENS][HIDDEN], routing[TOKENS][TOP_K], out[TOKENS][HIDDEN];
static int32_t ids[TOKENS][TOP_K];

static struct numoe_batch batch_make(void)
{
    struct numoe_batch b = NUMOE_BATCH_INIT;

    random_state = 11;
    for (int t = 0; t < TOKENS; t++) {
        for (int k = 0; k < HIDDEN; k++)
            x[t][k] = round_to_bf16(random_normal());
        for (int j = 0; j < TOP_K; j++) {
            ids[t][j] = (t + j) % EXPERTS;
            routing[t][j] = 0.5f;
        }
    }
    memset(out, 0xFF, sizeof out);
    b.tokens = TOKENS;
    b.top_k = TOP_K;
    b.x = x;
    b.x_type = NUMOE_F32;
    b.ids = ids;
    b.weights = &routing[0][0];
    b.out = out;
    b.out_type = NUMOE_F32;
    return b;
}

/* The GPU has done some passes, the workers do the rest: an expert that both hit counts once. */
Test(gpu_fallback, counts_are_the_cpus_wherever_the_gpu_stops, .timeout = 120)
{
    struct numoe *alone = context_make(NULL, NULL);
    struct numoe_model *on_cpu = model_make(alone);
    struct numoe_result want = NUMOE_RESULT_INIT;
    struct numoe_batch b = batch_make();
    static float truth[TOKENS][HIDDEN];
    unsigned in_the_middle = 0;

    cr_assert_eq(numoe_forward(on_cpu, 0, &b, &want, NULL), 0);
    memcpy(truth, out, sizeof truth);
    for (uint64_t at = 0; at < 80; at += 3) {
        struct fake *fake = fake_make(at);
        struct numoe *context = context_make(&fake_ops, fake);
        struct numoe_model *model = model_make(context);
        for (int round = 0; round < 2; round++) {
            struct numoe_result have = NUMOE_RESULT_INIT;
            double error = 0, norm = 0;
            b = batch_make();
            numoe_model_gpu(model)->keep_free_bytes = 100000; /* several passes */
            fake->fail_at = fake->calls + at;
            fake->fail_code = 2;
            cr_assert_eq(numoe_forward(model, 0, &b, &have, NULL), 0);
            fake->fail_at = UINT64_MAX;
            in_the_middle += have.gpu_tokens && have.gpu_tokens < TOKENS;
            cr_expect_eq(have.pairs, want.pairs);
            cr_expect_eq(have.experts_hit, want.experts_hit, "at %lu: %lu", at, have.experts_hit);
            cr_expect_eq(have.expert_bytes, want.expert_bytes);
            for (int i = 0; i < TOKENS * HIDDEN; i++) {
                const double want_i = (double)truth[i / HIDDEN][i % HIDDEN];
                const double d = (double)out[i / HIDDEN][i % HIDDEN] - want_i;
                error += d * d;
                norm += want_i * want_i;
            }
            cr_expect(error <= 25e-6 * norm, "at %lu: %g", at, sqrt(error / norm));
        }
        numoe_model_destroy(model);
        numoe_close(context);
        fake_free(fake);
    }
    cr_expect_gt(in_the_middle, 0, "some failure fell between passes");
    numoe_model_destroy(on_cpu);
    numoe_close(alone);
}

static atomic_bool launching, go_on;

static int slow_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    atomic_store(&launching, true);
    while (!atomic_load(&go_on))
        usleep(1000);
    return fake_ops.launch(device, stream, ffn);
}

static void *call(void *model)
{
    const struct numoe_batch b = batch_make();

    cr_expect_eq(numoe_forward(model, 0, &b, NULL, NULL), 0);
    return NULL;
}

Test(gpu_fallback, a_forked_child_may_destroy_while_its_parent_computes, .timeout = 60)
{
    struct gpu_ops ops = fake_ops;
    struct fake *fake = fake_make(1);
    struct numoe *context;
    struct numoe_model *model;
    pthread_t thread;
    int status;

    ops.launch = slow_launch;
    context = context_make(&ops, fake);
    model = model_make(context);
    cr_assert_eq(pthread_create(&thread, NULL, call, model), 0);
    while (!atomic_load(&launching))
        usleep(1000);
    const pid_t child = fork();
    if (child == 0) {
        alarm(10); /* a lock that nobody will open ends here */
        numoe_model_destroy(model);
        numoe_close(context);
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
    atomic_store(&go_on, true);
    pthread_join(thread, NULL);
    numoe_model_destroy(model);
    numoe_close(context);
    fake_free(fake);
}
