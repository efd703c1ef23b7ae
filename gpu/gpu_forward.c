/*
 * Calls on host memory.
 *
 * A pass takes as many tokens as there is room for on the device, up to 65536: their x, ids,
 * routing weights and outputs are there as a whole, and each part of the layer's experts is
 * computed for all of them, in chunks that share one workspace, before the next part. So the
 * weights of a layer cross the link once a pass.
 *
 *   compute stream   x, ids, routing (from staging), then part after part: launches
 *   results stream   outputs to staging, the other direction of the link
 *   copy stream      weights, of the next layer too
 *
 * Staging is in stages, each used again when the event behind its last copy says so: what is copied
 * between a stage and the caller's memory and what crosses the link are in different ones at once,
 * in a pass of few tokens too. A pass of one
 * part writes the caller's type at once; with more parts, outputs are summed in fp32, and those of
 * bf16 are rounded once at the end.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "gpu_several.h"

enum { PASS_TOKENS_MOST = 1 << 16, CHUNK_TOKENS_MOST = 8192 };
/* Below so many a pass reads nearly every expert for few tokens each: rather fewer that stay. */
enum { PASS_TOKENS_WORTH = 256 };

static uint64_t type_bytes(enum numoe_type type)
{
    return type == NUMOE_BF16 ? 2 : 4;
}

/* ---- what a pass takes ----------------------------------------------------------------------- */

/* What is computed into: fp32 where another's outputs are added. */
static enum numoe_type out_type(const struct numoe_gpu_call *call)
{
    return call->join ? NUMOE_F32 : call->out_type;
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
        .out_type = out_type(call),
        .out_stride = m->source.shape.hidden,
        .add = call->add,
        .scale = call->scale,
    };
    gpu_model_ffn(m, NULL, ffn);
    ffn->form = gpu_choose_form(m->gpu, ffn);
}

static uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

static struct gpu_parts lay_out(const struct numoe_cuda_ffn *ffn, uint64_t tokens, uint64_t work)
{
    const uint64_t pairs = tokens * ffn->top_k;
    struct gpu_parts p = {0};
    uint64_t at = 0;

    p.x = take(&at, tokens * ffn->x_stride * type_bytes(ffn->x_type));
    p.ids = take(&at, pairs * sizeof(int32_t));
    p.routing = take(&at, pairs * sizeof(float));
    p.out = take(&at, tokens * ffn->out_stride * type_bytes(ffn->out_type));
    p.sum = take(&at, ffn->out_type == NUMOE_BF16 ? tokens * ffn->out_stride * sizeof(float) : 0);
    p.work = take(&at, work);
    p.bytes = at;
    return p;
}

/* Staging bytes of a token: x, ids and routing weights on their way in, and out, either way. */
static uint64_t token_bytes(const struct numoe_cuda_ffn *ffn)
{
    return ffn->x_stride * type_bytes(ffn->x_type) + 8ull * ffn->top_k +
           ffn->out_stride * type_bytes(ffn->out_type) + 4 * 256;
}

/* How many of n tokens pass through a stage. */
static uint64_t stage_tokens(const struct numoe_gpu_model *m, const struct numoe_cuda_ffn *ffn,
                             uint64_t n)
{
    const uint64_t row = ffn->out_stride * type_bytes(ffn->out_type);
    const uint64_t least = (m->stage_least + row - 1) / row;
    const uint64_t most = m->stage_most / token_bytes(ffn);
    uint64_t tokens = (n + GPU_STAGES - 1) / GPU_STAGES;

    tokens = tokens < least ? least : tokens;
    tokens = tokens < most ? tokens : most;
    tokens = tokens < n ? tokens : n;
    return tokens < 1 ? 1 : tokens;
}

/* Blocks for a pass; nothing runs on them. *staging: it is the host's memory that is short. */
static int reserve(struct numoe_gpu_model *m, uint64_t device, uint64_t stage, bool *staging,
                   struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc;

    *staging = false;
    if (device > m->device_bytes) {
        if (m->device) {
            rc = gpu_judge(gpu, ops->release(gpu->device, m->device), error,
                           "freeing the workspace");
            if (rc)
                return rc;
            m->device = NULL;
            m->device_bytes = 0;
            gpu_tally_set(&m->stream.tally, GPU_WORKSPACE_BYTES, 0);
        }
        rc = gpu_judge(gpu, ops->allocate(gpu->device, device, (void **)&m->device), error,
                       "allocating %llu MiB of workspace", (unsigned long long)(device >> 20));
        if (rc) {
            m->device = NULL;
            return rc;
        }
        m->device_bytes = device;
        gpu_tally_set(&m->stream.tally, GPU_WORKSPACE_BYTES, device);
    }
    stage = (stage + 255) / 256 * 256;
    *staging = true;
    if (stage > m->stage_bytes) {
        if (m->host) {
            rc = gpu_judge(gpu, ops->host_release(gpu->device, m->host), error, "freeing staging");
            if (rc)
                return rc;
            m->host = NULL;
            m->stage_bytes = 0;
        }
        rc = gpu_judge(gpu, ops->host_allocate(gpu->device, GPU_STAGES * stage, (void **)&m->host),
                       error, "allocating %llu MiB of pinned staging",
                       (unsigned long long)(GPU_STAGES * stage >> 20));
        if (rc) {
            m->host = NULL;
            return rc;
        }
        m->stage_bytes = stage;
    }
    return m->device && m->host ? 0 : -ENOMEM;
}

/* How many tokens the next pass takes, with room for them. Out of memory means fewer tokens as long
 * as the passes stay worth their copies, then fewer experts that stay, then fewer tokens again; but
 * no fewer experts where it is the host that has none to stage tokens in. */
static int plan_pass(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, uint64_t left,
                     struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    struct gpu_pass *p = &m->pass;
    uint64_t n = left < PASS_TOKENS_MOST ? left : PASS_TOKENS_MOST;
    uint64_t chunk = n < CHUNK_TOKENS_MOST ? n : CHUNK_TOKENS_MOST;

    for (;;) {
        struct numoe_error inner = NUMOE_ERROR_INIT;
        struct numoe_cuda_ffn ffn;
        uint64_t work;
        bool staging;
        int rc;

        chunk = chunk < n ? chunk : n;
        describe(m, call, chunk, &ffn);
        work = gpu->ops->workspace_bytes(gpu->device, &ffn);
        if (!work && chunk == 1)
            return numoe_error_set(error, -EINVAL, "tokens", "a token of %u entries is too large",
                                   ffn.top_k);
        p->parts = lay_out(&ffn, n, work);
        if (n > 1 && (!work || p->parts.bytes > m->keep_free_bytes / 4 * 3)) {
            if (n > chunk && work)
                n = n / 2 > chunk ? n / 2 : chunk;
            else
                n = chunk = (chunk + 1) / 2;
            continue;
        }
        p->tokens = n;
        p->chunk = chunk;
        p->staged = stage_tokens(m, &ffn, n);
        rc = reserve(m, p->parts.bytes, p->staged * token_bytes(&ffn), &staging, &inner);
        if (rc == -ENOMEM && n > PASS_TOKENS_WORTH) {
            n = n / 2 > PASS_TOKENS_WORTH ? (n + 1) / 2 : PASS_TOKENS_WORTH;
            continue;
        }
        if (rc == -ENOMEM && staging && n > 1) {
            n = (n + 1) / 2;
            continue;
        }
        if (rc == -ENOMEM && !staging) {
            struct numoe_error unshrunk = NUMOE_ERROR_INIT;
            const int shrunk = gpu_stream_shrink(&m->stream, p->parts.bytes, &unshrunk);
            if (!shrunk) {
                numoe_log_write(&gpu->log, NUMOE_LOG_WARNING,
                                "device memory is short: there is room for %u experts to stay now",
                                m->stream.cache.cells);
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
        return rc;
    }
}

/* ---- inputs ---------------------------------------------------------------------------------- */

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

/* Tokens [at, at + count) of the pass, through a stage; x of [x_at, x_at +
 * x_count) alone. */
static int send_some(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                     const struct numoe_cuda_ffn *ffn, uint64_t at, uint64_t count, uint64_t x_at,
                     uint64_t x_count, unsigned stage, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    const struct gpu_parts *to = &m->pass.parts;
    const uint64_t hidden = m->source.shape.hidden, first = m->pass.first + at;
    const uint64_t x_row = ffn->x_stride * type_bytes(ffn->x_type);
    const uint64_t out_size = type_bytes(ffn->out_type), out_row = ffn->out_stride * out_size;
    const uint64_t entries = count * call->top_k;
    uint8_t *host = m->host + stage * m->stage_bytes;
    uint64_t x = 0, ids = 0, routing = 0, out = 0, end = 0;
    int rc = gpu_judge(gpu, ops->event_sync(gpu->device, m->stage_free[stage]), error,
                       "waiting for staging");

    if (rc)
        return rc;
    x = take(&end, x_count * x_row);
    ids = take(&end, entries * 4);
    routing = take(&end, entries * 4);
    out = take(&end, count * out_row);
    copy_rows(m, host + x, x_row,
              (const uint8_t *)call->x +
                  (m->pass.first + x_at) * call->x_stride * type_bytes(ffn->x_type),
              call->x_stride * type_bytes(ffn->x_type), hidden * type_bytes(ffn->x_type), x_count);
    memcpy(host + ids, call->ids + first * call->top_k, entries * 4);
    memcpy(host + routing, call->routing + first * call->top_k, entries * 4);
    if (call->add)
        copy_rows(m, host + out, out_row,
                  (const uint8_t *)call->out + first * call->out_stride * out_size,
                  call->out_stride * out_size, hidden * out_size, count);
    const struct {
        uint64_t from, to, bytes;
    } copies[] = {
        {x, to->x + x_at * x_row, x_count * x_row},
        {ids, to->ids + at * call->top_k * 4, entries * 4},
        {routing, to->routing + at * call->top_k * 4, entries * 4},
        {out, to->out + at * out_row, call->add ? count * out_row : 0},
    };
    for (size_t i = 0; !rc && i < sizeof copies / sizeof copies[0]; i++)
        if (copies[i].bytes)
            rc = gpu_judge(gpu,
                           ops->copy_in(gpu->device, m->stream.compute, m->device + copies[i].to,
                                        host + copies[i].from, copies[i].bytes),
                           error, "copying the inputs of %llu tokens", (unsigned long long)count);
    if (!rc)
        rc = gpu_judge(gpu, ops->event_record(gpu->device, m->stage_free[stage], m->stream.compute),
                       error, "marking staging");
    return rc;
}

/* x of the pass's tokens [begin, end), everything else of all. */
static int send_inputs(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, uint64_t begin,
                       uint64_t end, struct numoe_error *error)
{
    const struct gpu_pass *p = &m->pass;
    struct numoe_cuda_ffn ffn;
    unsigned stage = 0;
    int rc = 0;

    describe(m, call, p->tokens, &ffn);
    for (uint64_t at = 0; !rc && at < p->tokens;
         at += p->staged, stage = (stage + 1) % GPU_STAGES) {
        const uint64_t left = p->tokens - at, count = left < p->staged ? left : p->staged;
        const uint64_t x_at = begin < at ? at : begin < at + count ? begin : at + count;
        const uint64_t x_end = end < x_at ? x_at : end < at + count ? end : at + count;

        rc = send_some(m, call, &ffn, at, count, x_at, x_end - x_at, stage, error);
    }
    return rc;
}

/* ---- computing ------------------------------------------------------------------------------- */

/* Where the chunk that begins at token `at` is on the device. */
static void locate(const struct numoe_gpu_model *m, uint64_t at, struct numoe_cuda_ffn *ffn)
{
    const struct gpu_parts *p = &m->pass.parts;
    const uint64_t entry = at * ffn->top_k * 4;

    ffn->x = m->device + p->x + at * ffn->x_stride * type_bytes(ffn->x_type);
    ffn->ids = m->device + p->ids + entry;
    ffn->routing = (const float *)(const void *)(m->device + p->routing + entry);
    ffn->workspace = m->device + p->work;
}

/* One part of the layer for all tokens of the pass. to_sum: into fp32 sums, and not into out. */
static int compute_part(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                        const struct gpu_part *part, bool to_sum, bool add,
                        struct numoe_error *error)
{
    const struct gpu_pass *p = &m->pass;
    struct numoe_gpu *gpu = m->gpu;
    int rc = 0;

    for (uint64_t at = 0; !rc && at < p->tokens; at += p->chunk) {
        const uint64_t left = p->tokens - at;
        struct numoe_cuda_ffn ffn;

        describe(m, call, left < p->chunk ? left : p->chunk, &ffn);
        gpu_model_ffn(m, part, &ffn);
        locate(m, at, &ffn);
        ffn.out_type = to_sum ? NUMOE_F32 : out_type(call);
        ffn.out = m->device + (to_sum ? p->parts.sum : p->parts.out) +
                  at * ffn.out_stride * type_bytes(ffn.out_type);
        ffn.add = add;
        rc = gpu_judge(gpu, gpu->ops->launch(gpu->device, m->stream.compute, &ffn), error,
                       "launching layer %llu for %u tokens", (unsigned long long)p->layer,
                       ffn.tokens);
    }
    return rc;
}

static int compute(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                   struct numoe_error *error)
{
    struct gpu_stream *s = &m->stream;
    struct gpu_pass *p = &m->pass;
    struct numoe_gpu *gpu = m->gpu;
    const bool bf16 = out_type(call) == NUMOE_BF16;
    bool several = false;
    struct gpu_part part;
    uint32_t parts = 0;
    int rc;

    for (;; parts++) {
        rc = gpu_stream_next(s, s->compute, &part, error);
        if (rc || !part.slice_at)
            break;
        if (parts == 0) /* experts that stay, and no others: that is all */
            several = part.piece || s->jobs[s->current].count;
        rc = compute_part(m, call, &part, bf16 && several,
                          parts ? true : call->add && !(bf16 && several), error);
        if (!rc)
            rc = gpu_stream_done(s, s->compute, &part, error);
        if (rc)
            break;
    }
    if (!rc && bf16 && several)
        rc = gpu_judge(gpu,
                       gpu->ops->round(gpu->device, s->compute,
                                       (const float *)(const void *)(m->device + p->parts.sum),
                                       (uint16_t *)(void *)(m->device + p->parts.out),
                                       m->source.shape.hidden, p->tokens, m->source.shape.hidden,
                                       call->add),
                       error, "rounding outputs");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->event_record(gpu->device, m->ended, s->compute), error,
                       "marking the end of a call");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->event_record(gpu->device, m->computed, s->compute), error,
                       "marking the end of a call");
    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, m->results, m->computed), error,
                       "waiting for a call");
    return rc;
}

/* ---- outputs --------------------------------------------------------------------------------- */

/* Queue the next outputs that fit in a stage. */
static int send_outputs(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                        struct numoe_error *error)
{
    struct gpu_pass *p = &m->pass;
    struct numoe_gpu *gpu = m->gpu;
    const uint64_t row = m->source.shape.hidden * type_bytes(out_type(call));
    const uint64_t left = p->tokens - p->sent, count = left < p->staged ? left : p->staged;
    const unsigned stage = (unsigned)(p->sent / p->staged % GPU_STAGES);
    int rc = gpu_judge(gpu,
                       gpu->ops->copy_out(gpu->device, m->results, m->host + stage * m->stage_bytes,
                                          m->device + p->parts.out + p->sent * row, count * row),
                       error, "copying the outputs of %llu tokens", (unsigned long long)count);

    if (!rc)
        rc = gpu_judge(gpu, gpu->ops->event_record(gpu->device, m->stage_free[stage], m->results),
                       error, "marking outputs");
    p->sent += count;
    return rc;
}

static void sum_rows(const struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                     uint64_t first, const float *const *from, uint32_t count, bool keep,
                     uint64_t rows)
{
    void *to = (uint8_t *)call->out + first * call->out_stride * type_bytes(call->out_type);

    if (rows == 0)
        return;
    (m->source.sum ? m->source.sum(m->source.user, to, call->out_type, call->out_stride, from,
                                   count, keep, m->source.shape.hidden, rows)
                   : numoe_gpu_sum_rows(to, call->out_type, call->out_stride, from, count, keep,
                                        m->source.shape.hidden, rows));
}

/* Rows of out that the call changes: with add or join, a token without a computed entry keeps its
 * bits. */
void gpu_take_outputs(const struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                      uint64_t at, uint64_t count, const uint8_t *const *rows, uint32_t parts,
                      bool sums)
{
    const float *from[NUMOE_GPU_MOST];
    const uint64_t size = type_bytes(call->out_type), hidden = m->source.shape.hidden;
    const uint64_t first = m->pass.first + at;
    uint64_t begin = 0;

    for (uint64_t t = 0; t <= count; t++) {
        bool wanted = t < count && !call->add && !call->join;
        for (uint64_t j = 0; t < count && !wanted && j < call->top_k; j++)
            wanted = call->ids[(first + t) * call->top_k + j] >= 0;
        if (wanted)
            continue;
        for (uint32_t i = 0; i < parts; i++)
            from[i] = (const float *)(const void *)rows[i] + begin * hidden;
        if (sums)
            sum_rows(m, call, first + begin, from, parts, call->join || call->add, t - begin);
        else
            copy_rows(m, (uint8_t *)call->out + (first + begin) * call->out_stride * size,
                      call->out_stride * size, rows[0] + begin * hidden * size, hidden * size,
                      hidden * size, t - begin);
        begin = t + 1;
    }
}

/* *all: every event has happened. */
static int ask(struct numoe_gpu_model *const *models, void *const *events, uint32_t count,
               bool *all, const char *what, struct numoe_error *error)
{
    int rc = 0;

    *all = true;
    for (uint32_t i = 0; !rc && i < count; i++) {
        struct numoe_gpu *gpu = models[i]->gpu;
        bool done = true;

        if (events[i])
            rc = gpu_enter(gpu, error);
        if (!rc && events[i])
            rc = gpu_judge(gpu, gpu->ops->event_query(gpu->device, events[i], &done), error, "%s",
                           what);
        *all = *all && done;
    }
    return rc;
}

/* More of what waits for staging may be queued; not by others where the stream waits itself. */
static bool waits_for_staging(const struct gpu_stream *s)
{
    return s->filling && !s->await;
}

/* *more: some experts still wait for staging, of any device. */
static int pump(struct numoe_gpu_model *const *models, uint32_t count, bool *more,
                struct numoe_error *error)
{
    *more = false;
    for (uint32_t i = 0; i < count; i++) {
        struct gpu_stream *s = &models[i]->stream;
        struct numoe_error why = NUMOE_ERROR_INIT;
        bool some = false;
        const bool waits = waits_for_staging(s);
        int rc = waits ? gpu_enter(models[i]->gpu, &why) : 0;

        if (!rc && waits)
            rc = gpu_stream_pump(s, &some, &why);
        /* what goes wrong in a prefetch shows when its layer is called */
        if (rc && s->in_call) {
            if (error)
                *error = why;
            return rc;
        }
        *more = *more || (!rc && some);
    }
    return 0;
}

int gpu_pass_wait(struct numoe_gpu_model *const *models, void *const *events, uint32_t count,
                  const struct gpu_nccl *nccl, const char *what, struct numoe_error *error)
{
    const struct timespec nap = {0, 20000};
    bool more = false, all = false;
    int rc = 0;

    for (uint32_t i = 0; i < count; i++)
        more = more || waits_for_staging(&models[i]->stream);
    while (!rc && !all && (more || nccl)) {
        rc = ask(models, events, count, &all, what, error);
        if (rc || all)
            break;
        rc = pump(models, count, &more, error);
        if (!rc && nccl)
            rc = gpu_nccl_health(nccl, error);
        if (!rc && (more || nccl))
            nanosleep(&nap, NULL);
    }
    for (uint32_t i = 0; !rc && !all && i < count; i++) {
        struct numoe_gpu *gpu = models[i]->gpu;

        if (events[i])
            rc = gpu_enter(gpu, error);
        if (!rc && events[i])
            rc = gpu_judge(gpu, gpu->ops->event_sync(gpu->device, events[i]), error, "%s", what);
    }
    return rc;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void count_need(struct numoe_gpu_model *m, const struct numoe_gpu_call *call)
{
    const int32_t *ids = call->ids + m->pass.first * call->top_k;

    memset(m->need, 0, m->source.experts * sizeof *m->need);
    for (uint64_t i = 0; i < m->pass.tokens * call->top_k; i++)
        if (ids[i] >= 0 && (uint64_t)ids[i] < m->source.experts)
            m->need[ids[i]]++;
}

/* After a failure: what was queued still uses the buffers. */
static void settle(struct numoe_gpu_model *m)
{
    struct numoe_gpu *gpu = m->gpu;

    gpu_stream_end(&m->stream, m->stream.compute);
    gpu_still(gpu, m->stream.compute, "the failed call");
    gpu_still(gpu, m->results, "the failed call");
    m->running = false;
}

/* What goes wrong here shows when the layer is called. */
static void look_ahead(struct numoe_gpu_model *m, uint64_t next, uint64_t ahead)
{
    if (ahead == NUMOE_GPU_NO_AHEAD)
        return;
    if (ahead == 0) {
        if (gpu_model_most(m, m->pass.layer, m->need))
            gpu_stream_prefetch(&m->stream, next, NULL, NULL);
        return;
    }
    gpu_model_hottest(m, next, ahead, m->need);
    gpu_stream_prefetch(&m->stream, next, m->need, NULL);
}

int gpu_pass_plan(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                  uint64_t first, uint64_t most, struct numoe_error *error)
{
    int rc = gpu_enter(m->gpu, error);

    if (!rc && layer >= m->source.layers)
        rc = numoe_error_set(error, -EINVAL, "layer", "%llu of %llu", (unsigned long long)layer,
                             (unsigned long long)m->source.layers);
    if (!rc && (m->running || m->stream.in_call))
        rc = numoe_error_set(error, -EBUSY, "call", "another is not finished");
    if (!rc && call->join && call->add)
        rc = numoe_error_set(error, -EINVAL, "add", "is for who writes out");
    if (rc)
        return rc;
    gpu_model_warm(m);
    m->pass = (struct gpu_pass){.layer = layer, .first = first};
    return plan_pass(m, call, most, error);
}

int gpu_pass_begin(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                   struct numoe_error *error)
{
    struct numoe_cuda_ffn ffn;
    int rc = gpu_enter(m->gpu, error);

    if (rc)
        return rc;
    describe(m, call, m->pass.tokens, &ffn);
    count_need(m, call);
    m->running = true;
    m->took_ms = -1;
    m->began_ns = numoe_now_ns();
    rc = gpu_judge(m->gpu, m->gpu->ops->event_record(m->gpu->device, m->began, m->stream.compute),
                   error, "marking the begin of a call");
    if (!rc)
        rc = gpu_stream_begin(&m->stream, m->pass.layer, m->need, call->asked, m->pass.tokens,
                              error);
    /* The link has something to do while many inputs are brought to staging, and no more than that:
     * they come behind all that is queued. */
    if (!rc && m->pass.tokens * ffn.x_stride * type_bytes(ffn.x_type) >= m->stage_least)
        rc = gpu_stream_lead(&m->stream, error);
    if (rc)
        settle(m);
    return rc;
}

int gpu_pass_inputs(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, uint64_t begin,
                    uint64_t end, struct numoe_error *error)
{
    int rc = gpu_enter(m->gpu, error);

    if (!rc)
        rc = send_inputs(m, call, begin, end, error);
    if (rc)
        settle(m);
    return rc;
}

uint8_t *gpu_pass_x(const struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                    uint64_t token, uint64_t *row_bytes)
{
    struct numoe_cuda_ffn ffn;

    describe(m, call, 1, &ffn);
    *row_bytes = ffn.x_stride * type_bytes(ffn.x_type);
    return m->device + m->pass.parts.x + token * *row_bytes;
}

int gpu_pass_compute(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, bool outputs,
                     struct numoe_error *error)
{
    const uint64_t layer = m->pass.layer;
    int rc = gpu_enter(m->gpu, error);

    if (!rc)
        rc = compute(m, call, error);
    if (!rc && outputs)
        rc = gpu_pass_outputs(m, call, 0, error);
    if (rc) {
        settle(m);
        return rc;
    }
    gpu_stream_end(&m->stream, m->stream.compute);
    m->pass.queued = true;
    if (m->source.layers > 1 && m->pass.first + m->pass.tokens == call->tokens)
        look_ahead(m, (layer + 1) % m->source.layers, call->ahead);
    return 0;
}

void *gpu_pass_rows(const struct numoe_gpu_model *m, uint64_t at, uint64_t *count,
                    const uint8_t **rows)
{
    const struct gpu_pass *p = &m->pass;
    const uint64_t left = p->tokens - at;
    const unsigned stage = (unsigned)(at / p->staged % GPU_STAGES);

    *count = left < p->staged ? left : p->staged;
    *rows = m->host + stage * m->stage_bytes;
    return m->stage_free[stage];
}

int gpu_pass_outputs(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, uint64_t at,
                     struct numoe_error *error)
{
    int rc = 0;

    m->pass.sent = at;
    for (int i = 0; !rc && i < GPU_STAGES; i++)
        rc = gpu_pass_more(m, call, error);
    return rc;
}

int gpu_pass_more(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                  struct numoe_error *error)
{
    int rc = gpu_enter(m->gpu, error);

    if (!rc && m->pass.sent < m->pass.tokens)
        rc = send_outputs(m, call, error);
    return rc;
}

void gpu_pass_end(struct numoe_gpu_model *m, uint64_t tokens, int rc)
{
    gpu_enter(m->gpu, NULL);
    if (rc)
        settle(m);
    else if (gpu_judge(m->gpu,
                       m->gpu->ops->elapsed(m->gpu->device, m->began, m->ended, &m->took_ms), NULL,
                       "timing a call"))
        m->took_ms = -1;
    if (!rc)
        gpu_trace_drain(m->stream.trace);
    m->running = false;
    gpu_tally_add(&m->stream.tally, GPU_CALLS, !rc);
    gpu_tally_add(&m->stream.tally, GPU_TOKENS, tokens);
}

int numoe_gpu_begin(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                    uint64_t first, uint64_t *tokens, struct numoe_error *error)
{
    int rc;

    if (first >= call->tokens)
        return numoe_error_set(error, -EINVAL, "tokens", "there is none from %llu on: %llu",
                               (unsigned long long)first, (unsigned long long)call->tokens);
    if (m->several)
        return gpu_several_begin(m->several, layer, call, first, tokens, error);
    rc = gpu_pass_plan(m, layer, call, first, call->tokens - first, error);
    if (!rc)
        rc = gpu_pass_begin(m, call, error);
    if (!rc)
        rc = gpu_pass_inputs(m, call, 0, m->pass.tokens, error);
    if (rc)
        return rc;
    /* the link works until the rest is queued */
    rc = gpu_stream_lead(&m->stream, error);
    if (rc)
        settle(m);
    else
        *tokens = m->pass.tokens;
    return rc;
}

int gpu_pass_check(struct numoe_gpu_model *m, bool queued, struct numoe_error *error)
{
    int rc;

    if (m->running && m->pass.queued == queued)
        return 0;
    rc = gpu_enter(m->gpu, error);
    return rc ? rc
              : numoe_error_set(error, -EINVAL, "call", "none was %s",
                                queued ? "started" : "begun, or it is queued already");
}

int numoe_gpu_queue(struct numoe_gpu_model *m, const struct numoe_gpu_call *call,
                    struct numoe_error *error)
{
    int rc;

    if (m->several)
        return gpu_several_queue(m->several, call, error);
    rc = gpu_pass_check(m, false, error);
    return rc ? rc : gpu_pass_compute(m, call, true, error);
}

int numoe_gpu_start(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                    uint64_t first, uint64_t *tokens, struct numoe_error *error)
{
    const int rc = numoe_gpu_begin(m, layer, call, first, tokens, error);

    return rc ? rc : numoe_gpu_queue(m, call, error);
}

int numoe_gpu_finish(struct numoe_gpu_model *m, const struct numoe_gpu_call *call, uint64_t *done,
                     struct numoe_error *error)
{
    uint64_t at = 0, count;
    int rc;

    *done = 0;
    if (m->several)
        return gpu_several_finish(m->several, call, done, error);
    rc = gpu_pass_check(m, true, error);
    if (rc)
        return rc;
    do {
        const uint8_t *rows;
        void *come = gpu_pass_rows(m, at, &count, &rows);

        rc = gpu_pass_wait(&m, &come, 1, NULL, "computing a layer", error);
        if (rc)
            break;
        gpu_take_outputs(m, call, at, count, &rows, 1, call->join);
        *done = at += count;
        rc = gpu_pass_more(m, call, error);
    } while (!rc && at < m->pass.tokens);
    gpu_pass_end(m, at, rc);
    return rc;
}

void numoe_gpu_cancel(struct numoe_gpu_model *m)
{
    if (m->several)
        gpu_several_cancel(m->several);
    if (!m->running)
        return;
    gpu_enter(m->gpu, NULL);
    settle(m);
}

int numoe_gpu_forward(struct numoe_gpu_model *m, uint64_t layer, const struct numoe_gpu_call *call,
                      uint64_t *done, struct numoe_error *error)
{
    int rc = 0;

    *done = 0;
    if (call->tokens == 0)
        rc = gpu_enter(m->gpu, error);
    while (!rc && *done < call->tokens) {
        uint64_t tokens = 0;
        rc = numoe_gpu_start(m, layer, call, *done, &tokens, error);
        if (!rc)
            rc = numoe_gpu_finish(m, call, &tokens, error);
        else
            tokens = 0;
        *done += tokens;
    }
    return rc;
}
