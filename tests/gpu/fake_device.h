/*
 * fake_device.h - a device made of host memory, behind the table of gpu/gpu_ops.h.
 *
 * Work that is queued on a stream happens later: on any call, in an order that the streams and
 * their events allow and a seed decides, and then with what memory holds by then. So a buffer that
 * is filled again too early, a slot used before it has arrived or copied over while in use, shows
 * as a wrong result. Copies must come from pinned memory and stay within live allocations.
 *
 * What is done in the wrong order by luck only shows as well: fake_order.h. A copy to the host
 * spoils its destination as soon as it is queued if nobody else uses it, and what the host copies
 * from must not change before the host knows that it has been copied.
 *
 * A chosen call can fail; a fatal error is then the answer of every later call, as with CUDA.
 */
#ifndef NUMOE_TESTS_FAKE_DEVICE_H
#define NUMOE_TESTS_FAKE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_order.h"
#include "gpu_error.h"
#include "gpu_internal.h"
#include "gpu_ops.h"

enum fake_kind { FAKE_DEVICE, FAKE_HOST, FAKE_PINNED };
enum fake_what {
    FAKE_COPY_IN,
    FAKE_COPY_OUT,
    FAKE_COPY_PEER,
    FAKE_LAUNCH,
    FAKE_ROUND,
    FAKE_SUM,
    FAKE_RUN,
    FAKE_MARLIN,
    FAKE_RECORD,
    FAKE_WAIT
};

struct fake_range {
    uint8_t *address;
    uint64_t bytes;
    enum fake_kind kind;
    struct order_memory order;
};

struct fake_event {
    uint64_t recorded, completed;
    struct order_clock clock; /* of the last record */
    double at;                /* when: steps of the device */
    struct fake_event *next;  /* of all that were ever made; freed with the device */
};

struct fake_op {
    enum fake_what what;
    void *to;
    const void *from;
    uint64_t bytes;
    struct fake_event *event;
    uint64_t ticket;
    struct numoe_cuda_ffn ffn;
    struct numoe_cuda_marlin marlin;
    uint64_t stride, rows, columns;
    bool add;
    struct fake *peer;
    const float *parts[16];
    uint32_t part_count;
    bool (*run)(void *argument); /* false: it cannot be done yet */
    struct order_use use;
};

/* What was queued on a stream while it was captured. */
enum { FAKE_GRAPH_OPS = 64 };
struct fake_graph {
    struct fake_op ops[FAKE_GRAPH_OPS];
    uint32_t count;
};

enum { FAKE_STREAMS = 16, FAKE_OPS = 4096, FAKE_RANGES = 512 };

struct fake_stream {
    bool used;
    struct fake_graph *captured; /* NULL: what is queued happens */
    struct fake_op ops[FAKE_OPS];
    uint32_t head, tail;
    uint32_t copies_in, copies_out, launches;
    uint32_t order;             /* its number there */
    struct order_clock clock;   /* of what was queued last */
    struct order_clock *clocks; /* of ops */
};

struct fake {
    uint64_t random;
    struct fake_stream streams[FAKE_STREAMS];
    uint32_t stream_count; /* those that were ever used are the first */
    struct fake_range ranges[FAKE_RANGES];
    uint32_t range_count;
    uint64_t memory, taken; /* of the device */
    uint64_t pin_most, pinned;
    struct fake *pins;       /* a device whose pinned memory is this one's too, or NULL */
    struct fake *opened[16]; /* devices that this one copies from */
    uint32_t opened_count;
    bool no_peers, spoils; /* refuses to; what it copies from others arrives changed */
    uint64_t peer_copies, sums;
    uint32_t events;
    struct fake_event *all_events;
    uint64_t steps;   /* things done */
    uint64_t calls;   /* that can fail */
    uint64_t fail_at; /* the call that fails; UINT64_MAX */
    int fail_code;
    int sticky;         /* every call's answer from now on */
    bool error_pending; /* a recoverable error was not cleared */
    uint64_t speed;     /* of 256: how readily queued work happens */
    uint32_t lost;      /* frees that were made to fail: what they were of stays */
    uint32_t wrong;     /* rules broken */
    /* what a launch does, instead of computing; NULL */
    void (*instead)(struct fake *fake, const struct numoe_cuda_ffn *ffn);
    char text[256];
};

static inline void fake_wrong(struct fake *f, const char *what)
{
    if (!f->wrong++)
        snprintf(f->text, sizeof f->text, "%s", what);
}

static inline uint64_t fake_draw(struct fake *f)
{
    f->random = f->random * 6364136223846793005u + 1442695040888963407u;
    return f->random >> 33;
}

static inline struct fake_range *fake_find(struct fake *f, const void *address, uint64_t bytes)
{
    const uint8_t *at = address;
    for (uint32_t i = 0; i < f->range_count; i++)
        if (at >= f->ranges[i].address && at + bytes <= f->ranges[i].address + f->ranges[i].bytes)
            return &f->ranges[i];
    return NULL;
}

static inline struct fake_range *fake_find_host(struct fake *f, const void *address, uint64_t bytes)
{
    struct fake_range *r = fake_find(f, address, bytes);

    if (!r && f->pins)
        r = fake_find(f->pins, address, bytes);
    return r && r->kind != FAKE_DEVICE ? r : NULL;
}

/* Whether it is memory of the device, or of the host's that devices know. What a device asks for
 * while it does something it reads. */
static inline bool fake_is(struct fake *f, const void *address, uint64_t bytes, bool device)
{
    struct fake_range *r;

    if (!device)
        return fake_find_host(f, address, bytes);
    r = fake_find(f, address, bytes);
    if (!r || r->kind != FAKE_DEVICE)
        return false;
    if (fake_running.clock &&
        !order_read(&r->order, (uint64_t)((const uint8_t *)address - r->address), bytes,
                    fake_running.clock, fake_running.use))
        fake_wrong(f, "memory is read that may not be written yet");
    return true;
}

/* The same of what a device writes. */
static inline bool fake_writes(struct fake *f, void *address, uint64_t bytes)
{
    struct fake_range *r = fake_find(f, address, bytes);

    if (!r || r->kind != FAKE_DEVICE)
        return false;
    if (fake_running.clock && !order_write(&r->order, (uint64_t)((uint8_t *)address - r->address),
                                           bytes, fake_running.clock, fake_running.use))
        fake_wrong(f, "memory is written that may still be read, or written");
    return true;
}

static inline float fake_from_bf16(uint16_t bits)
{
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* To nearest, ties to even; no NaN comes here. */
static inline uint16_t fake_to_bf16(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

/* The mathematics, slowly. */
static inline void fake_compute(struct fake *f, const struct numoe_cuda_ffn *c)
{
    const uint64_t hidden = c->shape.hidden, bytes = c->shape.bytes;
    const uint64_t out_size = c->out_type == NUMOE_BF16 ? 2 : 4;
    uint8_t *slices = aligned_alloc(64, c->slices * bytes);
    double *y = malloc(hidden * sizeof *y);
    float *x = malloc(hidden * sizeof *x);

    if (!fake_is(f, c->x,
                 ((c->tokens - 1) * c->x_stride + hidden) * (c->x_type == NUMOE_F32 ? 4 : 2),
                 true) ||
        !fake_is(f, c->slice_at, c->experts * c->slices * 4ull, true) ||
        !fake_is(f, c->ids, (uint64_t)c->tokens * c->top_k * 4, true) ||
        !fake_is(f, c->routing, (uint64_t)c->tokens * c->top_k * 4, true) ||
        (c->down_bias &&
         !fake_is(f, c->down_bias, c->experts * 128ull * c->shape.hidden_tiles, true)) ||
        !fake_writes(f, c->out, ((c->tokens - 1) * c->out_stride + hidden) * out_size) ||
        !fake_writes(f, c->workspace, c->tokens)) {
        fake_wrong(f, "a launch on memory that is not the device's");
        goto out;
    }
    memset(c->workspace, 0xEE, c->tokens); /* it is ours to spoil */
    for (uint32_t t = 0; t < c->tokens; t++) {
        memset(y, 0, hidden * sizeof *y);
        for (uint64_t k = 0; k < hidden; k++) {
            if (c->x_type == NUMOE_F32)
                x[k] = ((const float *)c->x)[t * c->x_stride + k];
            else
                x[k] = fake_from_bf16(((const uint16_t *)c->x)[t * c->x_stride + k]);
        }
        for (uint32_t j = 0; j < c->top_k; j++) {
            const int32_t e = ((const int32_t *)c->ids)[t * c->top_k + j];
            const uint32_t *at = c->slice_at + (e < 0 ? 0 : e) * (uint64_t)c->slices;
            if (e < 0 || e >= (int32_t)c->experts || at[0] == NUMOE_CUDA_ABSENT)
                continue;
            for (uint32_t s = 0; s < c->slices; s++) {
                const uint8_t *from = c->weights + at[s] * 64ull;
                if (!fake_is(f, from, bytes, true)) {
                    fake_wrong(f, "a slice outside of device memory");
                    goto out;
                }
                memcpy(slices + s * bytes, from, bytes);
            }
            numoe_reference_slices(
                &c->shape, &c->activation, slices, c->slices, x,
                (double)c->routing[t * c->top_k + j],
                c->down_bias ? c->down_bias + e * 32ull * c->shape.hidden_tiles : NULL, true, y);
        }
        for (uint64_t k = 0; k < hidden; k++) {
            const uint64_t at = t * c->out_stride + k;
            const float sum = (float)(y[k] * (double)c->scale);
            if (c->out_type == NUMOE_BF16) {
                uint16_t *out = (uint16_t *)c->out + at;
                *out = fake_to_bf16((c->add ? fake_from_bf16(*out) : 0.0f) + sum);
            } else {
                float *out = (float *)c->out + at;
                *out = (c->add ? *out : 0.0f) + sum;
            }
        }
    }
out:
    free(slices);
    free(y);
    free(x);
}

static inline void fake_rounding(struct fake *f, const struct fake_op *op)
{
    if (!fake_is(f, op->from, op->rows * op->columns * 4, true) ||
        !fake_writes(f, op->to, ((op->rows - 1) * op->stride + op->columns) * 2)) {
        fake_wrong(f, "rounding in memory that is not the device's");
        return;
    }
    for (uint64_t i = 0; i < op->rows * op->columns; i++) {
        uint16_t *to = (uint16_t *)op->to + i / op->columns * op->stride + i % op->columns;
        *to = fake_to_bf16((op->add ? fake_from_bf16(*to) : 0.0f) + ((const float *)op->from)[i]);
    }
}

static inline void fake_repack(struct fake *f, const struct numoe_cuda_marlin *m)
{
    const uint64_t bytes = m->shape.bytes;
    uint8_t *slices = aligned_alloc(64, m->slices * bytes);
    struct numoe_marlin_sizes sizes;

    numoe_marlin_sizes(&m->shape, m->slices, &sizes);
    if (!fake_is(f, m->slice_at, m->experts * m->slices * 4ull, true))
        fake_wrong(f, "a table that is not the device's");
    for (uint32_t e = 0; e < m->experts; e++) {
        const uint32_t *at = m->slice_at + e * (uint64_t)m->slices;
        const int64_t slot = m->slot_of ? m->slot_of[e] : (int64_t)e;
        if (at[0] == NUMOE_CUDA_ABSENT || slot < 0)
            continue;
        const struct numoe_marlin to = {
            .gate_up = m->to.gate_up + slot * sizes.gate_up_words,
            .gate_up_scales = m->to.gate_up_scales + slot * sizes.gate_up_scales,
            .down = m->to.down + slot * sizes.down_words,
            .down_scales = m->to.down_scales + slot * sizes.down_scales};
        if (!fake_writes(f, to.gate_up, 4 * sizes.gate_up_words) ||
            !fake_writes(f, to.gate_up_scales, sizes.gate_up_scales) ||
            !fake_writes(f, to.down, 4 * sizes.down_words) ||
            !fake_writes(f, to.down_scales, sizes.down_scales)) {
            fake_wrong(f, "repacking to memory that is not the device's");
            break;
        }
        for (uint32_t s = 0; s < m->slices; s++) {
            if (!fake_is(f, m->weights + at[s] * 64ull, bytes, true))
                fake_wrong(f, "a slice outside of device memory");
            memcpy(slices + s * bytes, m->weights + at[s] * 64ull, bytes);
        }
        numoe_marlin_reference(&m->shape, slices, m->slices, m->interleaved, &to);
    }
    free(slices);
}

static inline void fake_summing(struct fake *f, const struct fake_op *op)
{
    bool there = true;

    for (uint32_t i = 0; i < op->part_count; i++)
        there = there && fake_is(f, op->parts[i], op->bytes, true);
    there = there && fake_writes(f, op->to, op->bytes);
    if (!there) {
        fake_wrong(f, "summing in memory that is not the device's");
        return;
    }
    for (uint64_t k = 0; k < op->bytes / 4; k++) {
        float sum = op->parts[0][k];
        for (uint32_t i = 1; i < op->part_count; i++)
            sum += op->parts[i][k];
        ((float *)op->to)[k] = sum;
    }
    f->sums++;
}

/* Whether it can be done. */
static inline bool fake_do(struct fake *f, struct fake_op *op)
{
    switch (op->what) {
    case FAKE_WAIT:
        if (op->event->completed < op->ticket)
            return false;
        break;
    case FAKE_RECORD:
        if (op->event->completed > op->ticket) {
            fake_wrong(f, "an event was recorded anew before what it stood behind was past");
            break;
        }
        op->event->completed = op->ticket;
        op->event->at = (double)f->steps;
        break;
    case FAKE_COPY_IN:
    case FAKE_COPY_OUT:
        if ((op->what == FAKE_COPY_IN ? !fake_writes(f, op->to, op->bytes)
                                      : !fake_is(f, op->from, op->bytes, true)) ||
            !fake_is(f, op->what == FAKE_COPY_IN ? op->from : op->to, op->bytes, false)) {
            fake_wrong(f, "a copy between memory that is not there, not pinned, or over its end");
            break;
        }
        memcpy(op->to, op->from, op->bytes);
        break;
    case FAKE_COPY_PEER:
        if (!fake_writes(f, op->to, op->bytes) || !fake_is(op->peer, op->from, op->bytes, true)) {
            fake_wrong(f, "a copy between devices' memory that is not there, or over its end");
            break;
        }
        memmove(op->to, op->from, op->bytes);
        if (f->spoils)
            ((uint8_t *)op->to)[fake_draw(f) % op->bytes] ^= 1;
        f->peer_copies++;
        break;
    case FAKE_SUM:
        fake_summing(f, op);
        break;
    case FAKE_RUN:
        if (!op->run(op->to))
            return false;
        break;
    case FAKE_LAUNCH:
        (f->instead ? f->instead : fake_compute)(f, &op->ffn);
        break;
    case FAKE_ROUND:
        fake_rounding(f, op);
        break;
    case FAKE_MARLIN:
        fake_repack(f, &op->marlin);
        break;
    }
    return true;
}

/* Do the first thing of a stream if it can be done. */
static inline bool fake_step(struct fake *f, struct fake_stream *s)
{
    struct fake_op *op = &s->ops[s->head % FAKE_OPS];
    bool did;

    if (s->head == s->tail)
        return false;
    fake_running.clock = &s->clocks[s->head % FAKE_OPS];
    fake_running.use = op->use;
    did = fake_do(f, op);
    fake_running.clock = NULL;
    s->head += did;
    f->steps += did;
    return did;
}

static inline struct fake_stream *fake_any_stream(struct fake *f)
{
    return &f->streams[f->stream_count ? fake_draw(f) % f->stream_count : 0];
}

static inline void fake_advance(struct fake *f)
{
    if (f->sticky)
        return;
    while (fake_draw(f) % 256 < f->speed)
        fake_step(f, fake_any_stream(f));
}

/* Enters a call; nonzero: its answer. */
static inline int fake_call(struct fake *f)
{
    if (f->sticky)
        return f->sticky;
    if (f->error_pending)
        fake_wrong(f, "a recoverable error was left behind");
    fake_advance(f);
    if (f->calls++ == f->fail_at) {
        if (gpu_fault_of(f->fail_code) == GPU_FAULT_DEAD)
            f->sticky = f->fail_code;
        else
            f->error_pending = true;
        return f->fail_code;
    }
    return 0;
}

/* What may not be called while any stream is captured. */
static inline void fake_breaks(struct fake *f)
{
    for (int i = 0; i < FAKE_STREAMS; i++)
        if (f->streams[i].used && f->streams[i].captured)
            fake_wrong(f, "a call that breaks a capture");
}

static inline int fake_refuse(struct fake *f, int code)
{
    f->error_pending = true;
    return code;
}

static inline int fake_add_range(struct fake *f, void *address, uint64_t bytes, enum fake_kind kind)
{
    if (f->range_count == FAKE_RANGES)
        abort();
    f->ranges[f->range_count++] = (struct fake_range){address, bytes, kind, {.bytes = bytes}};
    return 0;
}

/* Frees happen at once, whatever is queued: callers must have waited. */
static inline int fake_drop_range(struct fake *f, void *address, enum fake_kind kind)
{
    for (uint32_t i = 0; i < f->range_count; i++)
        if (f->ranges[i].address == address && f->ranges[i].kind == kind) {
            if (!order_drop(&f->ranges[i].order))
                fake_wrong(f, "memory was freed that may still be used");
            if (kind == FAKE_DEVICE)
                f->taken -= f->ranges[i].bytes;
            if (kind == FAKE_PINNED)
                f->pinned -= f->ranges[i].bytes;
            else
                free(address);
            f->ranges[i] = f->ranges[--f->range_count];
            return 0;
        }
    fake_wrong(f, "memory was freed that is not there");
    return fake_refuse(f, 1);
}

static inline int fake_enter(void *device)
{
    return fake_call(device);
}

static inline int fake_memory(void *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    struct fake *f = device;
    const int e = fake_call(f);
    *free_bytes = f->memory - f->taken;
    *total_bytes = f->memory;
    return e;
}

static inline int fake_allocate(void *device, uint64_t bytes, void **address)
{
    struct fake *f = device;
    const int e = fake_call(f);
    fake_breaks(f);
    if (e)
        return e;
    if (bytes > f->memory - f->taken)
        return fake_refuse(f, 2);
    *address = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(*address, 0xDD, bytes);
    f->taken += bytes;
    return fake_add_range(f, *address, bytes, FAKE_DEVICE);
}

static inline int fake_release(void *device, void *address)
{
    const int e = fake_call(device);
    ((struct fake *)device)->lost += e != 0;
    return e ? e : fake_drop_range(device, address, FAKE_DEVICE);
}

static inline int fake_host_allocate(void *device, uint64_t bytes, void **address)
{
    const int e = fake_call(device);
    if (e)
        return e;
    *address = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return fake_add_range(device, *address, bytes, FAKE_HOST);
}

static inline int fake_host_release(void *device, void *address)
{
    const int e = fake_call(device);
    ((struct fake *)device)->lost += e != 0;
    return e ? e : fake_drop_range(device, address, FAKE_HOST);
}

static inline int fake_pin(void *device, void *address, uint64_t bytes)
{
    struct fake *f = device;
    const int e = fake_call(f);
    if (e)
        return e;
    if (bytes > f->pin_most - f->pinned)
        return fake_refuse(f, 2);
    f->pinned += bytes;
    return fake_add_range(f, address, bytes, FAKE_PINNED);
}

static inline int fake_unpin(void *device, void *address)
{
    const int e = fake_call(device);
    ((struct fake *)device)->lost += e != 0;
    return e ? e : fake_drop_range(device, address, FAKE_PINNED);
}

static inline int fake_stream_create(void *device, void **stream)
{
    struct fake *f = device;
    const int e = fake_call(f);
    if (e)
        return e;
    for (int i = 0; i < FAKE_STREAMS; i++)
        if (!f->streams[i].used) {
            struct fake_stream *s = &f->streams[i];

            s->used = true;
            s->captured = NULL;
            s->head = s->tail = s->copies_in = s->copies_out = s->launches = 0;
            s->order = order_stream(&f->sticky);
            s->clock = (struct order_clock){.at = {0}};
            s->clocks = s->clocks ? s->clocks : aligned_alloc(64, FAKE_OPS * sizeof *s->clocks);
            f->stream_count = f->stream_count > (uint32_t)i ? f->stream_count : (uint32_t)i + 1;
            *stream = &f->streams[i];
            return 0;
        }
    abort();
}

static inline int fake_stream_destroy(void *device, void *stream)
{
    struct fake_stream *s = stream;
    const int e = fake_call(device);
    ((struct fake *)device)->lost += e != 0;
    if (e)
        return e;
    if (s->head != s->tail)
        fake_wrong(device, "a stream was destroyed with work on it");
    s->used = false;
    return 0;
}

/* Memory of the host's that something is queued to copy from, or to. */
static inline void fake_queue_host(struct fake *f, const struct fake_stream *s,
                                   const struct fake_op *op)
{
    const bool in = op->what == FAKE_COPY_IN;
    const uint8_t *address = in ? op->from : op->to;
    struct fake_range *r;
    uint64_t at;

    if (!in && op->what != FAKE_COPY_OUT)
        return;
    r = fake_find_host(f, address, op->bytes);
    if (!r)
        return;
    at = (uint64_t)(address - r->address);
    /* what is pinned where it lies are weights, whose changes copies under way may see */
    if (in && r->kind == FAKE_HOST && !order_host_wrote(&r->order, at, op->bytes, address))
        fake_wrong(f, "the host wrote what may still be copied");
    if (!in && order_is_free(&r->order, at, op->bytes))
        memset(op->to, 0xEC, op->bytes);
    if (in ? !order_read(&r->order, at, op->bytes, &s->clock, op->use)
           : !order_write(&r->order, at, op->bytes, &s->clock, op->use))
        fake_wrong(f, "a copy passes another of the same host memory");
}

static inline int fake_push(struct fake *f, void *stream, struct fake_op op)
{
    struct fake_stream *s = stream;
    if (s->captured) {
        if (op.what == FAKE_WAIT || op.what == FAKE_RECORD)
            fake_wrong(f, "an event of outside in a capture");
        if (s->captured->count == FAKE_GRAPH_OPS)
            abort();
        s->captured->ops[s->captured->count++] = op;
        return 0;
    }
    if (s->tail - s->head == FAKE_OPS)
        abort();
    if (!s->used)
        fake_wrong(f, "something was queued on a stream that is not there any more");
    op.use = order_queue(&s->clock, s->order);
    if (op.what == FAKE_WAIT)
        order_join(&s->clock, &op.event->clock);
    if (op.what == FAKE_RECORD)
        op.event->clock = s->clock;
    fake_queue_host(f, s, &op);
    s->clocks[s->tail % FAKE_OPS] = s->clock;
    s->ops[s->tail++ % FAKE_OPS] = op;
    fake_advance(f);
    return 0;
}

/* All streams go on until `event` is complete or `stream` empty; stuck for good: a deadlock. */
static inline int fake_drain(struct fake *f, struct fake_stream *stream, struct fake_event *event,
                             uint64_t ticket)
{
    while (stream ? stream->head != stream->tail : event->completed < ticket) {
        const uint32_t first = (uint32_t)fake_draw(f) % FAKE_STREAMS;
        bool moved = false;
        for (uint32_t i = 0; i < FAKE_STREAMS && !moved; i++)
            moved = fake_step(f, &f->streams[(first + i) % FAKE_STREAMS]);
        if (!moved) {
            fake_wrong(f, "the streams wait for each other");
            return f->sticky = 702;
        }
    }
    return 0;
}

static inline void fake_capture(void *stream, struct fake_graph *graph)
{
    graph->count = 0;
    ((struct fake_stream *)stream)->captured = graph;
}

static inline void fake_capture_end(void *stream)
{
    ((struct fake_stream *)stream)->captured = NULL;
}

static inline int fake_graph_launch(struct fake *f, void *stream, const struct fake_graph *graph)
{
    const int e = fake_call(f);

    for (uint32_t i = 0; !e && i < graph->count; i++)
        fake_push(f, stream, graph->ops[i]);
    return e;
}

static inline int fake_stream_captures(void *device, void *stream, bool *yes)
{
    *yes = ((struct fake_stream *)stream)->captured != NULL;
    return fake_call(device);
}

static inline int fake_stream_sync(void *device, void *stream)
{
    int e = fake_call(device);

    fake_breaks(device);
    if (!e)
        e = fake_drain(device, stream, NULL, 0);
    if (!e)
        order_see(&((struct fake_stream *)stream)->clock);
    return e;
}

static inline int fake_stream_wait(void *device, void *stream, void *event)
{
    struct fake_event *ev = event;
    const int e = fake_call(device);
    return e ? e
             : fake_push(device, stream,
                         (struct fake_op){.what = FAKE_WAIT, .event = ev, .ticket = ev->recorded});
}

static inline int fake_event_create(void *device, void **event)
{
    const int e = fake_call(device);
    if (e)
        return e;
    struct fake *f = device;
    struct fake_event *made = calloc(1, sizeof *made);
    made->next = f->all_events;
    f->all_events = made;
    f->events++;
    *event = made;
    return 0;
}

static inline int fake_event_destroy(void *device, void *event)
{
    const int e = fake_call(device);
    ((struct fake *)device)->lost += e != 0;
    if (e)
        return e;
    ((struct fake *)device)->events--;
    (void)event;
    return 0;
}

static inline int fake_event_record(void *device, void *event, void *stream)
{
    struct fake_event *ev = event;
    const int e = fake_call(device);
    return e ? e
             : fake_push(
                   device, stream,
                   (struct fake_op){.what = FAKE_RECORD, .event = ev, .ticket = ++ev->recorded});
}

static inline int fake_event_query(void *device, void *event, bool *done)
{
    struct fake_event *ev = event;
    const int e = fake_call(device);
    fake_breaks(device);
    if (!e) /* a device gets on by itself while it is asked over and over */
        fake_step(device, fake_any_stream(device));
    *done = !e && ev->completed >= ev->recorded;
    if (*done)
        order_see(&ev->clock);
    return e;
}

static inline int fake_event_sync(void *device, void *event)
{
    struct fake_event *ev = event;
    int e = fake_call(device);
    fake_breaks(device);
    if (!e)
        e = fake_drain(device, NULL, ev, ev->recorded);
    if (!e)
        order_see(&ev->clock);
    return e;
}

static inline int fake_elapsed(void *device, void *begin, void *end, double *ms)
{
    const struct fake_event *from = begin, *to = end;
    const int e = fake_call(device);

    if (!e && (from->completed < from->recorded || to->completed < to->recorded))
        fake_wrong(device, "the time of an event that has not happened was asked for");
    *ms = to->at - from->at;
    return e;
}

static inline int fake_copy_in(void *device, void *stream, void *to, const void *from,
                               uint64_t bytes)
{
    const int e = fake_call(device);
    if (e)
        return e;
    ((struct fake_stream *)stream)->copies_in++;
    return fake_push(
        device, stream,
        (struct fake_op){.what = FAKE_COPY_IN, .to = to, .from = from, .bytes = bytes});
}

static inline int fake_read_in(void *device, void *stream, void *to, const void *from,
                               uint64_t bytes)
{
    const int e = fake_call(device);

    if (bytes % 4)
        fake_wrong(device, "what processors read is no number of words");
    return e ? e
             : fake_push(
                   device, stream,
                   (struct fake_op){.what = FAKE_COPY_IN, .to = to, .from = from, .bytes = bytes});
}

static inline int fake_copy_in_many(void *device, void *stream, void *const *to,
                                    const void *const *from, const uint64_t *bytes, uint32_t count)
{
    const int e = fake_call(device);

    for (uint32_t i = 0; !e && i < count; i++) {
        ((struct fake_stream *)stream)->copies_in++;
        fake_push(device, stream,
                  (struct fake_op){
                      .what = FAKE_COPY_IN, .to = to[i], .from = from[i], .bytes = bytes[i]});
    }
    return e;
}

static inline int fake_replay(void *device, void *stream, const struct numoe_cuda_ffn *ffn,
                              uint32_t count)
{
    int e = fake_call(device);

    for (uint32_t i = 0; !e && i < count; i++)
        e = fake_push(device, stream, (struct fake_op){.what = FAKE_LAUNCH, .ffn = *ffn});
    if (!e)
        e = fake_drain(device, stream, NULL, 0);
    if (!e)
        order_see(&((struct fake_stream *)stream)->clock);
    return e;
}

static inline int fake_round(void *device, void *stream, const float *from, uint16_t *to,
                             uint64_t to_stride, uint64_t rows, uint64_t columns, bool add)
{
    const int e = fake_call(device);

    ((struct fake_stream *)stream)->launches += e == 0;
    return e ? e
             : fake_push(device, stream,
                         (struct fake_op){.what = FAKE_ROUND,
                                          .to = to,
                                          .from = from,
                                          .stride = to_stride,
                                          .rows = rows,
                                          .columns = columns,
                                          .add = add});
}

static inline int fake_copy_out(void *device, void *stream, void *to, const void *from,
                                uint64_t bytes)
{
    const int e = fake_call(device);
    if (e)
        return e;
    ((struct fake_stream *)stream)->copies_out++;
    return fake_push(
        device, stream,
        (struct fake_op){.what = FAKE_COPY_OUT, .to = to, .from = from, .bytes = bytes});
}

static inline int fake_peer_open(void *device, void *peer)
{
    struct fake *f = device;
    const int e = fake_call(f);

    fake_breaks(f);
    if (e)
        return e;
    if (f->no_peers)
        return fake_refuse(f, 217);
    for (uint32_t i = 0; i < f->opened_count; i++)
        if (f->opened[i] == peer)
            return 0; /* by others: it stays open */
    if (f->opened_count == 16)
        abort();
    f->opened[f->opened_count++] = peer;
    return 0;
}

static inline int fake_copy_peer(void *device, void *stream, void *to, void *peer, const void *from,
                                 uint64_t bytes)
{
    struct fake *f = device;
    const int e = fake_call(f);
    bool open = false;

    for (uint32_t i = 0; i < f->opened_count; i++)
        open = open || f->opened[i] == peer;
    if (!open)
        fake_wrong(f, "a copy from a device whose memory was not opened");
    return e ? e
             : fake_push(device, stream,
                         (struct fake_op){.what = FAKE_COPY_PEER,
                                          .to = to,
                                          .peer = peer,
                                          .from = from,
                                          .bytes = bytes});
}

static inline int fake_sum(void *device, void *stream, float *to, const float *const *from,
                           uint32_t count, uint64_t elements)
{
    struct fake_op op = {.what = FAKE_SUM, .to = to, .bytes = 4 * elements, .part_count = count};
    const int e = fake_call(device);

    for (uint32_t i = 0; i < count; i++)
        op.parts[i] = from[i];
    return e ? e : fake_push(device, stream, op);
}

static inline uint64_t fake_workspace(void *device, const struct numoe_cuda_ffn *ffn)
{
    (void)device;
    return 64ull * ffn->tokens * ffn->top_k;
}

static inline int fake_launch(void *device, void *stream, const struct numoe_cuda_ffn *ffn)
{
    const int e = fake_call(device);
    if (e)
        return e;
    ((struct fake_stream *)stream)->launches++;
    return fake_push(device, stream, (struct fake_op){.what = FAKE_LAUNCH, .ffn = *ffn});
}

static inline int fake_marlin(void *device, void *stream, const struct numoe_cuda_marlin *marlin)
{
    const int e = fake_call(device);
    return e ? e
             : fake_push(device, stream, (struct fake_op){.what = FAKE_MARLIN, .marlin = *marlin});
}

static inline void fake_clear_error(void *device)
{
    ((struct fake *)device)->error_pending = false;
}

static inline const char *fake_text(int code)
{
    return code == 2 ? "out of memory" : code == 700 ? "an illegal memory access" : "an error";
}

static const struct gpu_ops fake_ops = {
    .enter = fake_enter,
    .memory = fake_memory,
    .allocate = fake_allocate,
    .release = fake_release,
    .host_allocate = fake_host_allocate,
    .host_release = fake_host_release,
    .pin = fake_pin,
    .unpin = fake_unpin,
    .stream_create = fake_stream_create,
    .stream_destroy = fake_stream_destroy,
    .stream_sync = fake_stream_sync,
    .stream_captures = fake_stream_captures,
    .stream_wait = fake_stream_wait,
    .event_create = fake_event_create,
    .event_destroy = fake_event_destroy,
    .event_record = fake_event_record,
    .event_query = fake_event_query,
    .event_sync = fake_event_sync,
    .timer_create = fake_event_create,
    .elapsed = fake_elapsed,
    .copy_in = fake_copy_in,
    .copy_in_many = fake_copy_in_many,
    .read_in = fake_read_in,
    .copy_out = fake_copy_out,
    .peer_open = fake_peer_open,
    .copy_peer = fake_copy_peer,
    .workspace_bytes = fake_workspace,
    .launch = fake_launch,
    .replay = fake_replay,
    .round = fake_round,
    .sum = fake_sum,
    .marlin = fake_marlin,
    .clear_error = fake_clear_error,
    .error_text = fake_text,
};

static inline struct fake *fake_make(uint64_t seed)
{
    struct fake *f = calloc(1, sizeof *f);
    f->random = seed * 0x9E3779B97F4A7C15u + 1;
    f->memory = 64 << 20;
    f->pin_most = UINT64_MAX / 2;
    f->fail_at = UINT64_MAX;
    f->speed = (uint64_t[]){0, 40, 128, 200, 250}[seed % 5];
    return f;
}

/* What is left must be nothing, unless the device died: then the driver keeps it. */
static inline void fake_free(struct fake *f)
{
    for (uint32_t i = 0; i < f->range_count; i++) {
        free(f->ranges[i].order.blocks);
        if (f->ranges[i].kind != FAKE_PINNED)
            free(f->ranges[i].address);
    }
    for (int i = 0; i < FAKE_STREAMS; i++)
        free(f->streams[i].clocks);
    order_forget(&f->sticky);
    while (f->all_events) {
        struct fake_event *next = f->all_events->next;
        free(f->all_events);
        f->all_events = next;
    }
    free(f);
}

#endif
