/*
 * Models on a device, and calls.
 *
 * A call: x, ids and routing weights go to pinned memory and from there, on the compute stream, to
 * the device; the layer's slot is acquired; kernels; the output comes back on the compute stream
 * (the other direction of the link); the next layer's copies are queued as soon as the kernels are.
 * Large batches take several passes, so that their workspace stays within what was kept free.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gpu_model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"

#define HOST_BYTES_MOST ((uint64_t)512 << 20) /* pinned staging of a pass */
#define GIB ((uint64_t)1 << 30)
enum { PASS_TOKENS_MOST = 1 << 16 };
/* Below so many a pass reads nearly every expert for few tokens each: rather a slot less. */
enum { PASS_TOKENS_WORTH = 256 };

static void model_free(struct numoe_gpu_model *m)
{
    struct numoe_gpu *gpu = m->gpu;

    gpu_stream_fini(&m->stream);
    if (m->done)
        gpu_judge(gpu, gpu->ops->event_destroy(gpu->device, m->done), NULL, "freeing an event");
    if (m->device)
        gpu_judge(gpu, gpu->ops->release(gpu->device, m->device), NULL, "freeing the workspace");
    if (m->host)
        gpu_judge(gpu, gpu->ops->host_release(gpu->device, m->host), NULL, "freeing staging");
    gpu_ring_fini(&m->ring);
    gpu_pinned_fini(&m->pinned);
    free(m);
}

static int pin_arenas(struct numoe_gpu_model *m, const struct numoe_gpu_model_options *o,
                      struct numoe_error *error)
{
    const struct numoe_gpu_source *source = &m->source;
    const uint64_t chunk = o->chunk_bytes ? o->chunk_bytes : GIB;
    int rc = 0;

    m->pinned.gpu = m->gpu;
    for (uint32_t i = 0; !rc && i < source->region_count; i++) {
        void *address;
        uint64_t bytes;
        source->arena(source->user, i, &address, &bytes);
        if (o->no_pinning)
            m->pinned.wanted_bytes += bytes;
        else if (bytes)
            rc = gpu_pinned_add(&m->pinned, address, bytes, chunk, error);
    }
    if (rc || m->pinned.pinned_bytes == m->pinned.wanted_bytes)
        return rc;
    if (*m->pinned.refusal)
        numoe_log_write(&m->gpu->log, NUMOE_LOG_WARNING,
                        "%.1f of %.1f GB of expert memory are pinned, the rest goes through "
                        "staging buffers: %s",
                        (double)m->pinned.pinned_bytes / 1e9, (double)m->pinned.wanted_bytes / 1e9,
                        m->pinned.refusal);
    m->ring_bytes = o->ring_bytes ? o->ring_bytes : (uint64_t)64 << 20;
    rc = gpu_ring_init(&m->ring, m->gpu, m->ring_bytes, error);
    if (!rc && m->ring.memory) {
        struct numoe_memory_report report = {0};
        numoe_memory_inspect(m->ring.memory, &report);
        m->ring_checked = report.checked_bytes;
        m->ring_placed = report.placed_bytes;
    }
    return rc;
}

int numoe_gpu_model_create(struct numoe_gpu *gpu, const struct numoe_gpu_source *source,
                           const struct numoe_gpu_model_options *options,
                           struct numoe_gpu_model **out, struct numoe_error *error)
{
    const struct numoe_gpu_model_options defaults = {0}, *o = options ? options : &defaults;
    uint64_t free_bytes, total_bytes, slots = o->slots;
    struct numoe_gpu_model *m;
    int rc = gpu_enter(gpu, error);

    if (rc)
        return rc;
    if (source->experts > 65536 || source->slices == 0 || source->layers == 0)
        return numoe_error_set(error, -EOVERFLOW, "experts",
                               "%llu experts a layer are more than the GPU's 65536",
                               (unsigned long long)source->experts);
    m = calloc(1, sizeof *m);
    if (!m)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    m->gpu = gpu;
    m->source = *source;
    rc = gpu_judge(gpu, gpu->ops->memory(gpu->device, &free_bytes, &total_bytes), error,
                   "asking for free device memory");
    if (rc)
        goto fail;
    m->keep_free_bytes = o->keep_free_bytes          ? o->keep_free_bytes
                         : total_bytes / 8 > 4 * GIB ? 4 * GIB
                                                     : total_bytes / 8;
    rc = pin_arenas(m, o, error);
    if (rc)
        goto fail;
    if (!slots)
        slots = o->stream ? 2 : source->layers;
    rc = gpu_stream_init(
        &m->stream, gpu, &m->source, &m->pinned, m->ring.gpu ? &m->ring : NULL, slots,
        free_bytes > m->keep_free_bytes ? free_bytes - m->keep_free_bytes : 0, error);
    if (rc)
        goto fail;
    rc = gpu_judge(gpu, gpu->ops->event_create(gpu->device, &m->done), error, "making an event");
    if (rc)
        goto fail;
    *out = m;
    return 0;
fail:
    model_free(m);
    return rc;
}

void numoe_gpu_model_destroy(struct numoe_gpu_model *m)
{
    if (!m)
        return;
    gpu_enter(m->gpu, NULL);
    model_free(m);
}

void numoe_gpu_model_report(const struct numoe_gpu_model *m, struct numoe_gpu_report *report)
{
    const struct gpu_stream *s = &m->stream;

    *report = (struct numoe_gpu_report){
        .slots = s->slot_count,
        .resident = s->slot_count == m->source.layers,
        .slot_bytes = s->slot_bytes,
        .device_bytes = s->slot_count * s->slot_bytes + m->device_bytes,
        .pinned_bytes = m->pinned.pinned_bytes,
        .arena_bytes = m->pinned.wanted_bytes,
        .ring_bytes = m->ring.gpu ? m->ring_bytes : 0,
        .ring_node = m->ring.gpu ? m->ring.node : NUMOE_NONE,
        .ring_checked = m->ring_checked,
        .ring_placed = m->ring_placed,
        .copies = s->copies_begun,
        .copied_bytes = s->copied_bytes,
        .hits = s->hits,
        .calls = m->calls,
        .tokens = m->tokens,
    };
    memcpy(report->pin_refusal, m->pinned.refusal, sizeof report->pin_refusal);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static uint64_t type_bytes(enum numoe_type type)
{
    return type == NUMOE_BF16 ? 2 : 4;
}

void gpu_model_ffn(const struct numoe_gpu_model *m, const struct gpu_slot *slot,
                   struct numoe_cuda_ffn *ffn)
{
    const struct numoe_gpu_source *source = &m->source;

    ffn->shape = source->shape;
    ffn->activation = source->activation;
    ffn->slices = source->slices;
    ffn->experts = (uint32_t)source->experts;
    ffn->weights = slot ? slot->weights : NULL;
    ffn->slice_at = slot ? slot->slice_at : NULL;
    ffn->down_bias = slot ? slot->down_bias : NULL;
    ffn->id_bytes = 4;
}

/* The call of so many tokens without its addresses. */
static void describe(const struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                     uint64_t tokens, struct numoe_cuda_ffn *ffn)
{
    *ffn = (struct numoe_cuda_ffn){
        .tokens = (uint32_t)tokens,
        .top_k = (uint32_t)call->top_k,
        .x_type = call->x_type,
        .x_stride = (m->source.shape.hidden + 7) / 8 * 8, /* rows of 16-byte pieces */
        .out_type = call->out_type,
        .out_stride = m->source.shape.hidden,
        .add = call->add,
        .scale = call->scale,
    };
    gpu_model_ffn(m, NULL, ffn);
}

static uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

/* work: 0 on the host. */
static struct gpu_parts lay_out(const struct numoe_cuda_ffn *ffn, uint64_t work)
{
    const uint64_t pairs = (uint64_t)ffn->tokens * ffn->top_k;
    struct gpu_parts p = {0};
    uint64_t at = 0;

    p.x = take(&at, ffn->tokens * ffn->x_stride * type_bytes(ffn->x_type));
    p.ids = take(&at, pairs * sizeof(int32_t));
    p.routing = take(&at, pairs * sizeof(float));
    p.out = take(&at, ffn->tokens * ffn->out_stride * type_bytes(ffn->out_type));
    p.work = take(&at, work);
    p.bytes = at;
    return p;
}

/* Blocks for the parts of a pass; nothing runs on them. */
static int reserve(struct numoe_gpu_model *m, uint64_t device, uint64_t host,
                   struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc;

    if (device > m->device_bytes) {
        if (m->device) {
            rc = gpu_judge(gpu, ops->release(gpu->device, m->device), error,
                           "freeing the workspace");
            if (rc)
                return rc;
            m->device = NULL;
            m->device_bytes = 0;
        }
        rc = gpu_judge(gpu, ops->allocate(gpu->device, device, (void **)&m->device), error,
                       "allocating %llu MiB of workspace", (unsigned long long)(device >> 20));
        if (rc) {
            m->device = NULL;
            return rc;
        }
        m->device_bytes = device;
    }
    if (host > m->host_bytes) {
        if (m->host) {
            rc = gpu_judge(gpu, ops->host_release(gpu->device, m->host), error, "freeing staging");
            if (rc)
                return rc;
            m->host = NULL;
            m->host_bytes = 0;
        }
        rc = gpu_judge(gpu, ops->host_allocate(gpu->device, host, (void **)&m->host), error,
                       "allocating %llu MiB of pinned staging", (unsigned long long)(host >> 20));
        if (rc) {
            m->host = NULL;
            return rc;
        }
        m->host_bytes = host;
    }
    return m->device && m->host ? 0 : -ENOMEM;
}

/* How many tokens the next pass takes, with room for them. Out of memory means fewer tokens as long
 * as the passes stay worth their launches, then fewer slots, then fewer tokens again. */
static int plan_pass(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                     uint64_t left, uint64_t *tokens, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    uint64_t n = left < PASS_TOKENS_MOST ? left : PASS_TOKENS_MOST;

    for (;;) {
        struct numoe_error inner = NUMOE_ERROR_INIT;
        struct numoe_cuda_ffn ffn;
        uint64_t work;
        int rc;

        describe(m, call, n, &ffn);
        work = gpu->ops->workspace_bytes(gpu->device, &ffn);
        if (!work && n == 1) {
            numoe_error_set(error, -EINVAL, "tokens", "a token of %u entries is too large",
                            ffn.top_k);
            return -EINVAL;
        }
        const struct gpu_parts device = lay_out(&ffn, work), host = lay_out(&ffn, 0);
        if (n > 1 &&
            (!work || device.bytes > m->keep_free_bytes / 4 * 3 || host.bytes > HOST_BYTES_MOST)) {
            n = (n + 1) / 2;
            continue;
        }
        rc = reserve(m, device.bytes, host.bytes, &inner);
        if (rc == -ENOMEM && n > PASS_TOKENS_WORTH) {
            n = n / 2 > PASS_TOKENS_WORTH ? (n + 1) / 2 : PASS_TOKENS_WORTH;
            continue;
        }
        if (rc == -ENOMEM) {
            struct numoe_error unshrunk = NUMOE_ERROR_INIT;
            const int shrunk = gpu_stream_shrink(&m->stream, layer, &unshrunk);
            if (!shrunk) {
                numoe_log_write(&gpu->log, NUMOE_LOG_WARNING,
                                "device memory is short: %u layers are held at once now",
                                m->stream.slot_count);
                continue;
            }
            if (shrunk == -ENOMEM && n > 1) {
                n = (n + 1) / 2;
                continue;
            }
            if (shrunk != -ENOMEM) {
                rc = shrunk;
                inner = unshrunk;
            }
        }
        if (rc && error)
            *error = inner;
        *tokens = n;
        return rc;
    }
}

static void copy_rows(const struct numoe_gpu_model *m, void *to, uint64_t to_stride,
                      const void *from, uint64_t from_stride, uint64_t row_bytes, uint64_t rows)
{
    if (rows == 0)
        return;
    if (m->source.copy) {
        m->source.copy(m->source.user, to, to_stride, from, from_stride, row_bytes, rows);
        return;
    }
    if (to_stride == row_bytes && from_stride == row_bytes) {
        memcpy(to, from, row_bytes * rows);
        return;
    }
    for (uint64_t r = 0; r < rows; r++)
        memcpy((uint8_t *)to + r * to_stride, (const uint8_t *)from + r * from_stride, row_bytes);
}

static int send_inputs(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, uint64_t first,
                       const struct numoe_cuda_ffn *ffn, const struct gpu_parts *host,
                       const struct gpu_parts *device, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const uint64_t hidden = m->source.shape.hidden, pairs = (uint64_t)ffn->tokens * ffn->top_k;
    const uint64_t x_size = type_bytes(ffn->x_type), out_size = type_bytes(ffn->out_type);
    const struct {
        uint64_t from, to, bytes;
    } copies[] = {
        {host->x, device->x, ffn->tokens * ffn->x_stride * x_size},
        {host->ids, device->ids, pairs * sizeof(int32_t)},
        {host->routing, device->routing, pairs * sizeof(float)},
        {host->out, device->out, ffn->add ? ffn->tokens * ffn->out_stride * out_size : 0},
    };
    int rc = 0;

    copy_rows(m, m->host + host->x, ffn->x_stride * x_size,
              (const uint8_t *)call->x + first * call->x_stride * x_size, call->x_stride * x_size,
              hidden * x_size, ffn->tokens);
    memcpy(m->host + host->ids, call->ids + first * call->top_k, pairs * sizeof(int32_t));
    memcpy(m->host + host->routing, call->routing + first * call->top_k, pairs * sizeof(float));
    if (ffn->add)
        copy_rows(m, m->host + host->out, ffn->out_stride * out_size,
                  (const uint8_t *)call->out + first * call->out_stride * out_size,
                  call->out_stride * out_size, hidden * out_size, ffn->tokens);
    for (size_t i = 0; !rc && i < sizeof copies / sizeof copies[0]; i++)
        if (copies[i].bytes)
            rc = gpu_judge(gpu,
                           gpu->ops->copy_in(gpu->device, m->stream.compute,
                                             m->device + copies[i].to, m->host + copies[i].from,
                                             copies[i].bytes),
                           error, "copying the inputs of %u tokens", ffn->tokens);
    return rc;
}

/* Rows of out that the call changes: with add, a token without a computed entry keeps its bits. */
static void take_outputs(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                         uint64_t first, const struct numoe_cuda_ffn *ffn,
                         const struct gpu_parts *host)
{
    const uint64_t size = type_bytes(ffn->out_type), hidden = m->source.shape.hidden;
    uint64_t begin = 0;

    for (uint64_t t = 0; t <= ffn->tokens; t++) {
        bool wanted = t < ffn->tokens && !call->add;
        for (uint64_t j = 0; t < ffn->tokens && !wanted && j < call->top_k; j++)
            wanted = call->ids[(first + t) * call->top_k + j] >= 0;
        if (wanted)
            continue;
        copy_rows(m, (uint8_t *)call->out + (first + begin) * call->out_stride * size,
                  call->out_stride * size, m->host + host->out + begin * ffn->out_stride * size,
                  ffn->out_stride * size, hidden * size, t - begin);
        begin = t + 1;
    }
}

/* Until the output is there, copies of the next layer that wait for staging go on. */
static int await(struct numoe_gpu_model *m, struct numoe_error *error)
{
    const struct timespec nap = {0, 20000};
    struct numoe_gpu *gpu = m->gpu;
    bool more = m->stream.filling != NULL, done = false;

    while (more && !done) {
        int rc = gpu_judge(gpu, gpu->ops->event_query(gpu->device, m->done, &done), error,
                           "computing a layer");
        if (rc)
            return rc;
        /* what goes wrong in the prefetch shows when its layer is acquired */
        if (!done && gpu_stream_pump(&m->stream, false, &more, NULL))
            more = false;
        if (!done && more)
            nanosleep(&nap, NULL);
    }
    return gpu_judge(gpu, gpu->ops->event_sync(gpu->device, m->done), error, "computing a layer");
}

static int run_pass(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                    uint64_t first, uint64_t tokens, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    struct gpu_parts host, device;
    struct numoe_cuda_ffn ffn;
    struct gpu_slot *slot;
    int rc;

    describe(m, call, tokens, &ffn);
    device = lay_out(&ffn, ops->workspace_bytes(gpu->device, &ffn));
    host = lay_out(&ffn, 0);
    rc = send_inputs(m, call, first, &ffn, &host, &device, error);
    if (rc)
        goto settle;
    rc = gpu_stream_acquire(&m->stream, layer, &slot, error);
    if (rc)
        goto settle;
    gpu_model_ffn(m, slot, &ffn);
    ffn.x = m->device + device.x;
    ffn.ids = m->device + device.ids;
    ffn.routing = (const float *)(const void *)(m->device + device.routing);
    ffn.out = m->device + device.out;
    ffn.workspace = m->device + device.work;
    rc = gpu_judge(gpu, ops->launch(gpu->device, m->stream.compute, &ffn), error,
                   "launching layer %llu for %u tokens", (unsigned long long)layer, ffn.tokens);
    if (rc)
        goto settle;
    rc = gpu_stream_release(&m->stream, slot, error);
    if (!rc)
        rc = gpu_judge(gpu,
                       ops->copy_out(gpu->device, m->stream.compute, m->host + host.out,
                                     m->device + device.out,
                                     ffn.tokens * ffn.out_stride * type_bytes(ffn.out_type)),
                       error, "copying the outputs of %u tokens", ffn.tokens);
    if (!rc)
        rc = gpu_judge(gpu, ops->event_record(gpu->device, m->done, m->stream.compute), error,
                       "marking the end of a call");
    if (rc)
        goto settle;
    if (m->source.layers > 1)
        gpu_stream_prefetch(&m->stream, (layer + 1) % m->source.layers, layer, NULL);
    rc = await(m, error);
    if (rc)
        goto settle;
    take_outputs(m, call, first, &ffn, &host);
    return 0;
settle:
    /* what was queued still uses the buffers, and perhaps a slot that was not released */
    gpu_judge(gpu, ops->stream_sync(gpu->device, m->stream.compute), NULL, "the failed call");
    return rc;
}

int numoe_gpu_forward(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                      uint64_t *done, struct numoe_error *error)
{
    int rc = gpu_enter(m->gpu, error);

    *done = 0;
    if (!rc && layer >= m->source.layers)
        rc = numoe_error_set(error, -EINVAL, "layer", "%llu of %llu", (unsigned long long)layer,
                             (unsigned long long)m->source.layers);
    while (!rc && *done < call->tokens) {
        uint64_t tokens = 0;
        rc = plan_pass(m, layer, call, call->tokens - *done, &tokens, error);
        if (!rc)
            rc = run_pass(m, layer, call, *done, tokens, error);
        if (!rc)
            *done += tokens;
    }
    m->calls += !rc;
    m->tokens += *done;
    return rc;
}
