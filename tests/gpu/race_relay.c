/*
 * A thread for each of several devices that have whole experts, with no lock of the engine's, and
 * one thread that reads reports all the while: for ThreadSanitizer; and every expert comes to each
 * device once, as it was. Then, with one device's link at a standstill: the thread that waits for
 * it keeps no other from its pieces, and is sent away when the call is ended or the model
 * destroyed, wherever in the call it is by then.
 *
 * The fake devices know no threads. What the engine does with them by itself is done under the lock
 * that gpu_relay.c has around everything it does with them.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "fake_device.h"
#include "gpu_several.h"
#include "transfer_patterns.h"

enum { DEVICES = 3, CALLS = 60, EXPERT = SLICES * SLICE_BYTES, PATIENCE_S = 60 };

static pthread_barrier_t meeting;
static struct fake *fakes[DEVICES];
static struct numoe_gpu_model *model;
static struct gpu_relay *relay;
static void *streams[DEVICES];
static uint32_t seen[DEVICES][EXPERTS]; /* under the relay's lock */
static atomic_bool over, gate;
static atomic_uint wrong, taken[DEVICES];

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

static void compute(uint32_t device, uint64_t layer, const struct numoe_gpu_piece *piece)
{
    const struct numoe_cuda_ffn c = {
        .weights = piece->weights, .slice_at = piece->slice_at, .x_stride = layer};

    gpu_relay_lock(relay);
    if (fake_launch(fakes[device], streams[device], &c))
        fail("a computation");
    gpu_relay_unlock(relay);
}

static void sync_device(uint32_t device)
{
    gpu_relay_lock(relay);
    if (fake_stream_sync(fakes[device], streams[device]))
        fail("waiting for computations");
    gpu_relay_unlock(relay);
}

/* A device's part of a call: done with each piece before the next, so never -EAGAIN. */
static void run_call(uint32_t device, uint64_t layer)
{
    struct numoe_gpu_model *part = numoe_gpu_model_part(model, device);
    struct numoe_gpu_piece piece;

    for (;;) {
        const int rc = numoe_gpu_piece_next(part, streams[device], &piece, NULL);

        if (rc) {
            fail(rc == -EAGAIN ? "a thread that holds nothing has to ask again" : "a piece");
            break;
        }
        if (!piece.slice_at)
            break;
        compute(device, layer, &piece);
        if (numoe_gpu_piece_done(part, streams[device], &piece, NULL))
            fail("done with a piece");
        atomic_fetch_add_explicit(&taken[device], 1, memory_order_relaxed);
    }
    numoe_gpu_pieces_end(part, streams[device]);
    sync_device(device);
}

static void check_seen(uint32_t device, uint64_t layer)
{
    for (uint64_t e = 0; e < EXPERTS; e++)
        if (seen[device][e] != present(NULL, layer, e))
            fail("an expert came more than once, or never");
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
        check_seen(device, layer);
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

/* ---- a link at a standstill ------------------------------------------------------------------ */

enum { STILL_LAYER = 3 };

static void nap(void)
{
    const struct timespec t = {0, 1000000};

    nanosleep(&t, NULL);
}

/* On a stream, under the lock: whether what is behind it may happen. */
static bool is_open(void *argument)
{
    (void)argument;
    return atomic_load_explicit(&gate, memory_order_relaxed) || relay->closing;
}

/* A call of which nothing comes over device 0's link before the gate is open. */
static void begin_still(void)
{
    struct gpu_stream *owner = &numoe_gpu_model_part(model, 0)->stream;

    atomic_store_explicit(&gate, true, memory_order_relaxed);
    gpu_relay_lock(relay);
    if (fake_stream_sync(fakes[0], owner->copies)) /* of an earlier one */
        fail("copies");
    gpu_relay_unlock(relay);
    atomic_store_explicit(&gate, false, memory_order_relaxed);
    gpu_relay_lock(relay);
    memset(seen, 0, sizeof seen);
    gpu_stream_forget(owner);
    fake_push(fakes[0], owner->copies, (struct fake_op){.what = FAKE_RUN, .run = is_open});
    gpu_relay_unlock(relay);
    if (numoe_gpu_pieces_begin(model, STILL_LAYER, NULL, 0, 0, NULL))
        fail("a call at a standstill");
}

/* Until a thread waits in the library, and has done so for a while. */
static void await_waiting(void)
{
    for (int times = 0; times < 50;) {
        times = atomic_load_explicit(&relay->users, memory_order_relaxed) ? times + 1 : 0;
        nap();
    }
}

static void *drive_still(void *argument)
{
    run_call((uint32_t)(uintptr_t)argument, STILL_LAYER);
    return NULL;
}

static void waiting_keeps_nobody_waiting(void)
{
    pthread_t threads[DEVICES];

    begin_still();
    for (uint32_t i = 0; i < DEVICES; i++)
        atomic_store_explicit(&taken[i], 0, memory_order_relaxed);
    for (uintptr_t i = 0; i < DEVICES; i++) {
        pthread_create(&threads[i], NULL, drive_still, (void *)i);
        if (i == 0)
            await_waiting();
    }
    for (uint32_t i = 1; i < DEVICES; i++)
        while (atomic_load_explicit(&taken[i], memory_order_relaxed) < 2)
            nap();
    atomic_store_explicit(&gate, true, memory_order_relaxed);
    for (uint32_t i = 0; i < DEVICES; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < DEVICES; i++)
        check_seen(i, STILL_LAYER);
}

/* Takes pieces, of device 0 or (NULL) of whichever has one, until it is sent away. */
static void *wait_for_ever(void *argument)
{
    struct numoe_gpu_model *part = argument;
    struct numoe_gpu_piece piece;
    uint32_t which = 0;
    int rc;

    do {
        rc = part ? numoe_gpu_piece_next(part, streams[0], &piece, NULL)
                  : numoe_gpu_piece_any(model, streams, &which, &piece, NULL);
        if (!rc && piece.slice_at)
            rc = numoe_gpu_piece_done(numoe_gpu_model_part(model, which), streams[which], &piece,
                                      NULL);
        else if (!rc)
            rc = 1;
    } while (!rc);
    if (rc != -ECANCELED)
        fail("who waits for a call that is over has to be told");
    return NULL;
}

/* Ended by another thread, for the device that is waited for alone or for all, and begun anew at
 * once; then destroyed. */
static void waiting_ends(void)
{
    for (int way = 0; way < 6; way++) {
        pthread_t waiter;

        begin_still();
        pthread_create(&waiter, NULL, wait_for_ever,
                       way % 2 ? NULL : numoe_gpu_model_part(model, 0));
        await_waiting();
        if (way < 4)
            for (uint32_t i = 0; i < (way < 2 ? 1 : DEVICES); i++)
                numoe_gpu_pieces_end(numoe_gpu_model_part(model, i), streams[i]);
        else {
            for (uint32_t i = 0; i < DEVICES; i++)
                numoe_gpu_pieces_end(numoe_gpu_model_part(model, i), streams[i]);
            if (numoe_gpu_pieces_begin(model, 1, NULL, 0, 0, NULL))
                fail("a call behind one that was ended");
        }
        pthread_join(waiter, NULL);
        for (uint32_t i = 0; i < DEVICES; i++)
            numoe_gpu_pieces_end(numoe_gpu_model_part(model, i), streams[i]);
        atomic_store_explicit(&gate, true, memory_order_relaxed);
    }
}

static void *ask_once(void *argument)
{
    struct numoe_gpu_piece piece;

    if (numoe_gpu_piece_next(argument, streams[1], &piece, NULL) != -ECANCELED)
        fail("who asks while the model is being destroyed has to be told");
    return NULL;
}

static void *destroy(void *argument)
{
    numoe_gpu_model_destroy(argument);
    return NULL;
}

/* Destroyed by one thread while another has come no further than to the lock. */
static void destroying_waits_for_the_lock(void)
{
    pthread_t threads[2];

    if (numoe_gpu_pieces_begin(model, 0, NULL, 0, 0, NULL))
        fail("a call before the end");
    pthread_mutex_lock(&relay->lock);
    pthread_create(&threads[0], NULL, destroy, model);
    for (int times = 0; times < 50; times++)
        nap();
    pthread_create(&threads[1], NULL, ask_once, numoe_gpu_model_part(model, 1));
    for (int times = 0; times < 50; times++)
        nap();
    pthread_mutex_unlock(&relay->lock);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
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
                                                    .whole = NUMOE_GPU_WHOLE_PEERS,
                                                    .part_threads = true};
    struct numoe_gpu *gpus[DEVICES];
    struct numoe_gpu_report told;
    pthread_t threads[DEVICES], reader;

    setvbuf(stdout, NULL, _IOLBF, 0);
    alarm(PATIENCE_S); /* who waits for ever has failed */
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
    relay = model->several->relay;
    pthread_create(&reader, NULL, report, NULL);
    for (uintptr_t i = 0; i < DEVICES; i++)
        pthread_create(&threads[i], NULL, drive, (void *)i);
    for (uint32_t i = 0; i < DEVICES; i++)
        pthread_join(threads[i], NULL);
    waiting_keeps_nobody_waiting();
    waiting_ends();
    atomic_store_explicit(&over, true, memory_order_relaxed);
    pthread_join(reader, NULL);
    numoe_gpu_model_report(model, &told);
    printf("%llu experts passed on\n", (unsigned long long)told.passed_experts);
    if (!told.passed_experts)
        fail("nothing was passed on");
    for (uint32_t i = 0; i < DEVICES; i++) {
        sync_device(i);
        fake_stream_destroy(fakes[i], streams[i]);
        fake_stream_create(fakes[i], &streams[i]);
    }
    begin_still();
    pthread_create(&threads[0], NULL, wait_for_ever, NULL);
    await_waiting();
    numoe_gpu_model_destroy(model);
    pthread_join(threads[0], NULL);
    for (int times = 0; times < 10; times++) {
        if (numoe_gpu_model_create_over(gpus, DEVICES, &source, &options, &model, NULL))
            return 1;
        relay = model->several->relay;
        destroying_waits_for_the_lock();
    }
    for (uint32_t i = 0; i < DEVICES; i++) {
        fake_stream_destroy(fakes[i], streams[i]);
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
