/*
 * A thread for each of several devices that have whole experts, one call at a time by a lock of the
 * engine's, and one thread that reads reports all the while: for ThreadSanitizer; and every expert
 * comes to each device once, as it was.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include "fake_device.h"
#include "gpu_several.h"
#include "transfer_patterns.h"

enum { DEVICES = 3, CALLS = 60, EXPERT = SLICES * SLICE_BYTES };

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t meeting;
static struct fake *fakes[DEVICES];
static struct numoe_gpu_model *model;
static void *streams[DEVICES];
static uint32_t seen[DEVICES][EXPERTS]; /* of a device's thread, under the lock */
static atomic_bool over;
static atomic_uint wrong;

static void fail(const char *what)
{
    if (!atomic_fetch_add_explicit(&wrong, 1, memory_order_relaxed))
        printf("FAILED: %s\n", what);
}

/* A launch: x_stride is the layer. */
static void check(struct fake *f, const struct numoe_cuda_ffn *c)
{
    uint32_t device = 0;

    while (fakes[device] != f)
        device++;
    for (uint64_t e = 0; e < EXPERTS; e++) {
        const uint32_t *at = c->slice_at + e * SLICES;

        for (uint64_t s = 0; at[0] != NUMOE_CUDA_ABSENT && s < SLICES; s++)
            if (!has_pattern(c->weights + at[s] * 64ull, c->x_stride, e, s, 0))
                fail("an expert is not what it was");
        seen[device][e] += at[0] != NUMOE_CUDA_ABSENT;
    }
}

/* A device's part of a call. */
static void run_call(uint32_t device, uint64_t layer)
{
    struct numoe_gpu_model *part = numoe_gpu_model_part(model, device);
    struct numoe_gpu_piece piece;
    int rc;

    do {
        pthread_mutex_lock(&turn);
        rc = numoe_gpu_piece_next(part, streams[device], &piece, NULL);
        if (!rc && piece.slice_at) {
            const struct numoe_cuda_ffn c = {
                .weights = piece.weights, .slice_at = piece.slice_at, .x_stride = layer};

            if (fake_launch(fakes[device], streams[device], &c) ||
                numoe_gpu_piece_done(part, streams[device], &piece, NULL))
                fail("a computation");
        }
        if (!rc && !piece.slice_at) {
            numoe_gpu_pieces_end(part, streams[device]);
            if (fake_stream_sync(fakes[device], streams[device]))
                fail("waiting for computations");
        }
        pthread_mutex_unlock(&turn);
        sched_yield();
    } while (rc == -EAGAIN || (!rc && piece.slice_at));
    if (rc)
        fail("a piece");
}

static void *drive(void *argument)
{
    const uint32_t device = (uint32_t)(uintptr_t)argument;

    for (uint64_t call = 0; call < CALLS; call++) {
        const uint64_t layer = call % LAYERS;

        if (device == 0) {
            memset(seen, 0, sizeof seen);
            if (numoe_gpu_pieces_begin(model, layer, NULL, 0, 0, NULL))
                fail("a call");
        }
        pthread_barrier_wait(&meeting);
        run_call(device, layer);
        pthread_barrier_wait(&meeting);
        for (uint64_t e = 0; e < EXPERTS; e++)
            if (seen[device][e] != present(NULL, layer, e))
                fail("an expert came more than once, or never");
        if (device == 0 && numoe_gpu_prefetch(model, (layer + 1) % LAYERS, NULL, 0, NULL))
            fail("a prefetch");
        pthread_barrier_wait(&meeting);
    }
    return NULL;
}

static void *report(void *argument)
{
    uint64_t before = 0;

    (void)argument;
    while (!atomic_load_explicit(&over, memory_order_relaxed)) {
        struct numoe_gpu_report now;

        numoe_gpu_model_report(model, &now);
        if (now.passed_bytes < before)
            fail("a count fell");
        before = now.passed_bytes;
        sched_yield();
    }
    return NULL;
}

int main(void)
{
    static const uint32_t shares[DEVICES] = {1, 1, 1};
    const struct numoe_gpu_source source = patterns_source();
    const struct numoe_gpu_model_options options = {.cache_bytes = 40 * EXPERT,
                                                    .window_bytes = 9 * EXPERT,
                                                    .piece_bytes = 1,
                                                    .keep_free_bytes = 1 << 20,
                                                    .shares = shares,
                                                    .whole = NUMOE_GPU_WHOLE_PEERS};
    struct numoe_gpu *gpus[DEVICES];
    struct numoe_gpu_report told;
    pthread_t threads[DEVICES], reader;

    random_state = 3;
    patterns_make();
    pthread_barrier_init(&meeting, NULL, DEVICES);
    for (uint32_t i = 0; i < DEVICES; i++) {
        const struct numoe_gpu_properties p = {.name = "Fake", .index = i, .os_node = NUMOE_NONE};

        fakes[i] = fake_make(11 + i * 3);
        fakes[i]->pins = i ? fakes[0] : NULL;
        fakes[i]->instead = check;
        if (gpu_wrap(&fake_ops, fakes[i], &p, NULL, &gpus[i]) ||
            fake_stream_create(fakes[i], &streams[i]))
            return 1;
    }
    if (numoe_gpu_model_create_over(gpus, DEVICES, &source, &options, &model, NULL))
        return 1;
    pthread_create(&reader, NULL, report, NULL);
    for (uintptr_t i = 0; i < DEVICES; i++)
        pthread_create(&threads[i], NULL, drive, (void *)i);
    for (uint32_t i = 0; i < DEVICES; i++)
        pthread_join(threads[i], NULL);
    atomic_store_explicit(&over, true, memory_order_relaxed);
    pthread_join(reader, NULL);
    numoe_gpu_model_report(model, &told);
    printf("%llu experts passed on\n", (unsigned long long)told.passed_experts);
    if (!told.passed_experts)
        fail("nothing was passed on");
    for (uint32_t i = 0; i < DEVICES; i++)
        fake_stream_destroy(fakes[i], streams[i]);
    numoe_gpu_model_destroy(model);
    for (uint32_t i = 0; i < DEVICES; i++) {
        if (fakes[i]->wrong)
            fail(fakes[i]->text);
        numoe_gpu_close(gpus[i]);
        fake_free(fakes[i]);
    }
    pthread_barrier_destroy(&meeting);
    regions_free();
    const bool ok = atomic_load_explicit(&wrong, memory_order_relaxed) == 0;
    printf("%d passed, %d failed\n", ok, !ok);
    return !ok;
}
