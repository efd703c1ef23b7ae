/*
 * queued_batch.h - batches on a fake device for calls that are queued on a stream, on which inputs
 * are copied there and outputs back, too.
 */
#ifndef NUMOE_TESTS_QUEUED_BATCH_H
#define NUMOE_TESTS_QUEUED_BATCH_H

#include "small_model.h"

/* Of x, ids, routing weights, outputs and, on the device alone, workspace: one after the other. */
enum { PART = 4096 };

struct queued {
    struct batch batch;
    uint8_t *host, *memory; /* pinned; on the device */
};

static inline void queued_make(struct queued *q, struct fake *f)
{
    cr_assert_eq(fake_host_allocate(f, 4 * PART, (void **)&q->host), 0);
    cr_assert_eq(fake_allocate(f, 5 * PART, (void **)&q->memory), 0);
}

static inline void queued_free(struct queued *q, struct fake *f)
{
    fake_release(f, q->memory);
    fake_host_release(f, q->host);
}

/* Of as many tokens as the batch has now. */
static inline struct numoe_gpu_device_call queued_call(const struct queued *q)
{
    return (struct numoe_gpu_device_call){
        .tokens = q->batch.call.tokens,
        .top_k = TOP_K,
        .x = q->memory,
        .x_type = NUMOE_F32,
        .x_stride = HIDDEN,
        .ids = (const int32_t *)(const void *)(q->memory + PART),
        .routing = (const float *)(const void *)(q->memory + 2 * PART),
        .out = (float *)(void *)(q->memory + 3 * PART),
        .out_stride = HIDDEN + GAP,
        .add = q->batch.call.add,
        .scale = 1.5f,
        .workspace = q->memory + 4 * PART,
        .workspace_bytes = PART,
    };
}

static inline void queued_send(const struct queued *q, struct fake *f, void *stream)
{
    memcpy(q->host, q->batch.x, sizeof q->batch.x);
    memcpy(q->host + PART, q->batch.ids, sizeof q->batch.ids);
    memcpy(q->host + 2 * PART, q->batch.routing, sizeof q->batch.routing);
    memcpy(q->host + 3 * PART, q->batch.out, sizeof q->batch.out);
    cr_assert_eq(fake_copy_in(f, stream, q->memory, q->host, 4 * PART), 0);
}

static inline void queued_fetch(const struct queued *q, struct fake *f, void *stream)
{
    cr_assert_eq(fake_copy_out(f, stream, q->host + 3 * PART, q->memory + 3 * PART, PART), 0);
}

/* Once the stream has come so far. */
static inline bool queued_right(const struct model *m, uint64_t layer, struct queued *q)
{
    const uint8_t *rows = q->host + 3 * PART;

    for (uint64_t t = 0; t < q->batch.call.tokens; t++)
        memcpy(q->batch.out[t], rows + t * (HIDDEN + GAP) * sizeof(float), HIDDEN * sizeof(float));
    return batch_right(m, layer, &q->batch, q->batch.call.tokens);
}

#endif
