/*
 * Memory that is not pinned, on several fake devices: while the host waits for a staging buffer of
 * one, the others' links have something to do.
 */
#define SMALL_HIDDEN 192 /* a device's part of a layer is more than its ring */
#include "device_set.h"

static const void *current;

static int enters(void *device)
{
    current = device;
    return fake_enter(device);
}

static void expect_current(const void *device, const char *what)
{
    cr_expect(current == device || ((const struct fake *)device)->sticky,
              "%s on a device that is not current", what);
}

static int copies_in(void *device, void *stream, void *to, const void *from, uint64_t bytes)
{
    expect_current(device, "a copy");
    return fake_copy_in(device, stream, to, from, bytes);
}

static int records(void *device, void *event, void *stream)
{
    expect_current(device, "an event");
    return fake_event_record(device, event, stream);
}

static int launches(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    expect_current(device, "a launch");
    return fake_launch(device, stream, ffn);
}

/* A link that rests until the other devices have all that they can be given before it goes on; or
 * until a call to one of the devices has failed. */
struct resting {
    struct numoe_gpu_model *model;
    uint32_t slow;
    uint64_t until[MOST]; /* copied bytes */
    const struct fake *victim;
    bool failed;
};

static bool others_are_ahead(void *argument)
{
    struct resting *r = argument;
    bool all = true;

    r->failed = r->failed || r->victim->calls > r->victim->fail_at;
    if (r->failed)
        return true; /* the model may be half destroyed by now */
    for (uint32_t i = 0; i < numoe_gpu_model_parts(r->model); i++) {
        struct numoe_gpu_report part;

        numoe_gpu_model_report(numoe_gpu_model_part(r->model, i), &part);
        all = all && (i == r->slow || part.copied_bytes >= r->until[i]);
    }
    return all;
}

static uint64_t layer_bytes(const struct numoe_gpu_model *part, uint64_t layer)
{
    const struct numoe_gpu_source *source = &part->source;
    const uint8_t *address;
    uint64_t slices = 0;

    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t r = 0; r < source->region_count; r++)
            slices += source->place(source->user, layer, e, r, &address);
    return slices * source->shape.bytes;
}

static void batch_of_all(struct batch *b)
{
    batch_make(b);
    b->call.tokens = 2;
    for (int t = 0; t < TOKENS_MOST; t++)
        for (int j = 0; j < TOP_K; j++)
            b->ids[t][j] = (t * TOP_K + j) % EXPERTS;
}

/* A call of all experts on three devices whose memory is not pinned, and a second one. A call to
 * the victim fails, behind so many others in the first: false when that is over before. */
static bool rest_one(struct model *m, uint32_t slow, uint32_t victim, uint64_t behind, int code)
{
    const struct numoe_gpu_source source = source_of(m);
    const struct numoe_gpu_model_options options = {.stream = true,
                                                    .shares = shares,
                                                    .sum = NUMOE_GPU_SUM_HOST,
                                                    .window_bytes = 1 << 20,
                                                    .cache_bytes = 1,
                                                    .piece_bytes = 1,
                                                    .ring_bytes = 16384,
                                                    .keep_free_bytes = 1 << 20,
                                                    .no_pinning = true};
    struct resting r = {.slow = slow};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct gpu_ops ops = fake_ops;
    static struct batch b;
    struct fake *f;
    struct set set;
    uint64_t done;
    int rc;

    ops.enter = enters;
    ops.copy_in = copies_in;
    ops.event_record = records;
    ops.launch = launches;
    set_make(&set, 3, UNKNOWN, slow);
    for (uint32_t i = 0; i < 3; i++) {
        set.fake[i]->speed = 0; /* buffers come free when it is asked, or waited */
        set.gpu[i]->ops = &ops;
    }
    cr_assert_eq(numoe_gpu_model_create_over(set.gpu, 3, &source, &options, &r.model, NULL), 0);
    for (uint32_t i = 0; i < 3; i++) {
        const struct numoe_gpu_model *part = numoe_gpu_model_part(r.model, i);

        /* those before it in the call go on with the next layer */
        r.until[i] = layer_bytes(part, 0) + (i < slow ? layer_bytes(part, 1) : 0);
        cr_assert_gt(layer_bytes(part, 0), part->ring.buffer_bytes * GPU_RING_BUFFERS);
    }
    f = set.fake[victim];
    f->fail_at = code ? f->calls + behind : UINT64_MAX;
    f->fail_code = code;
    r.victim = f;
    fake_push(set.fake[slow], numoe_gpu_model_part(r.model, slow)->stream.copies,
              (struct fake_op){.what = FAKE_RUN, .to = &r, .run = others_are_ahead});
    batch_of_all(&b);
    rc = numoe_gpu_forward(r.model, 0, &b.call, &done, &error);
    r.failed = f->calls > f->fail_at;
    f->fail_at = UINT64_MAX;
    cr_assert(rc == 0 || (r.failed && rc == gpu_errno_of(code) && error.message[0]),
              "device %u rests, code %d behind %d calls to device %u: %d, %s", slow, code,
              (int)behind, victim, rc, error.message);
    cr_assert(rc || done == b.call.tokens);
    cr_assert(batch_right(m, 0, &b, done));
    batch_of_all(&b);
    rc = numoe_gpu_forward(r.model, 1, &b.call, &done, &error);
    cr_assert_eq(rc, f->sticky ? -EIO : 0, "%d, %s", rc, error.message);
    cr_assert(batch_right(m, 1, &b, done));
    numoe_gpu_model_destroy(r.model);
    set_free(&set);
    return r.failed;
}

/* Who waits for a staging buffer of one device fills the others', and that device goes on as before
 * when it has one. */
Test(gpu_staging, a_link_that_rests_holds_up_no_other, .timeout = 30)
{
    struct model *m = model_make(LAYERS, false);

    for (uint32_t slow = 0; slow < 3; slow++)
        rest_one(m, slow, slow, 0, 0);
    model_free(m);
}

/* Of the one that rests, or of those that are filled meanwhile. */
Test(gpu_staging, a_failure_while_a_link_rests_is_the_calls, .timeout = 240)
{
    struct model *m = model_make(LAYERS, true);

    for (uint32_t slow = 0; slow < 3; slow++)
        for (uint32_t victim = 0; victim < 3; victim++) {
            uint64_t behind = 0;

            while (rest_one(m, slow, victim, behind, (slow + victim) % 2 ? 700 : 2))
                behind += 1 + behind / 12;
            cr_expect_gt(behind, 60, "only %d steps", (int)behind);
        }
    model_free(m);
}
