/*
 * The engine's side: calls on device memory and on a stream of the caller's, and pieces for kernels
 * of the engine's own. gpu_stream.c does what is said here; nothing is waited for but what it
 * names.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "gpu_several.h"

/* need: how often the ids name each expert; without ids 1 for all. */
static void count_need(uint32_t *need, uint64_t experts, const int32_t *ids, uint64_t count)
{
    memset(need, 0, experts * sizeof *need);
    for (uint64_t i = 0; ids && i < count; i++)
        if (ids[i] >= 0 && (uint64_t)ids[i] < experts)
            need[ids[i]]++;
    for (uint64_t e = 0; !ids && e < experts; e++)
        need[e] = 1;
}

static int refuse_several(const struct numoe_gpu_model *m, struct numoe_error *error)
{
    return numoe_error_set(error, -ENOTSUP, "model",
                           "is on %u devices: each has its part (numoe_gpu_model_part)",
                           m->several->count);
}

/* What pieces of a layer, and holding it, ask of the model. */
static int check_free(struct numoe_gpu_model *m, uint64_t layer, struct numoe_error *error)
{
    const int rc = gpu_enter(m->gpu, error);

    if (rc)
        return rc;
    if (layer >= m->source.layers)
        return numoe_error_set(error, -EINVAL, "layer", "%llu of %llu", (unsigned long long)layer,
                               (unsigned long long)m->source.layers);
    if (m->several)
        return refuse_several(m, error);
    if (m->running || m->stream.in_call)
        return numoe_error_set(error, -EBUSY, "layer", "another call is not over");
    return 0;
}

static int check_pinned(const struct gpu_pinned *pins, struct numoe_error *error)
{
    return pins->pinned_bytes == pins->wanted_bytes
               ? 0
               : numoe_error_set(error, -ENOTSUP, "staging",
                                 "host memory is not all pinned: its copies would be waited for");
}

/* One call for all devices that have whole experts. ids, each NULL for all experts, and tokens: of
 * each device; or [1]: of all devices' tokens, each of which is to have all. */
static int begin_all(struct numoe_gpu_model *m, uint64_t layer, const int32_t *const *ids,
                     const uint64_t *tokens, uint32_t lists, uint64_t top_k,
                     struct numoe_error *error)
{
    struct gpu_several *s = m->several;
    const uint64_t experts = s->source.experts;
    uint32_t *need = s->relay->list;
    uint64_t all = 0;
    int rc;

    if (layer >= m->source.layers)
        return numoe_error_set(error, -EINVAL, "layer", "%llu of %llu", (unsigned long long)layer,
                               (unsigned long long)m->source.layers);
    rc = check_pinned(&s->pinned, error);
    if (rc)
        return rc;
    if (s->relay->running)
        return numoe_error_set(error, -EBUSY, "layer", "another call is not over");
    memset(need, 0, experts * sizeof *need);
    for (uint32_t i = 0; i < s->count; i++) {
        uint32_t *wants = s->relay->sides[i].wants;

        count_need(wants, experts, ids[i % lists], tokens[i % lists] * top_k);
        for (uint64_t e = 0; i < lists && e < experts; e++)
            need[e] += wants[e];
        all += i < lists && ids[i] ? tokens[i] : 0;
    }
    return gpu_relay_begin(s->relay, layer, need, all, error);
}

int numoe_gpu_pieces_begin_each(struct numoe_gpu_model *m, uint64_t layer,
                                const int32_t *const *ids, const uint64_t *tokens, uint64_t top_k,
                                struct numoe_error *error)
{
    int rc;

    if (!m->several)
        return numoe_gpu_pieces_begin(m, layer, ids[0], tokens[0], top_k, error);
    if (!m->several->relay)
        return refuse_several(m, error);
    gpu_relay_lock(m->several->relay);
    rc = begin_all(m, layer, ids, tokens, m->several->count, top_k, error);
    gpu_relay_unlock(m->several->relay);
    return rc;
}

int numoe_gpu_pieces_begin(struct numoe_gpu_model *m, uint64_t layer, const int32_t *ids,
                           uint64_t tokens, uint64_t top_k, struct numoe_error *error)
{
    int rc;

    if (m->several && m->several->relay) {
        gpu_relay_lock(m->several->relay);
        rc = begin_all(m, layer, &ids, &tokens, 1, top_k, error);
        gpu_relay_unlock(m->several->relay);
        return rc;
    }
    gpu_relay_lock(m->relay);
    rc = check_free(m, layer, error);
    if (!rc)
        rc = check_pinned(m->pins, error);
    if (!rc) {
        gpu_model_warm(m);
        count_need(m->need, m->source.experts, ids, tokens * top_k);
        rc = gpu_stream_begin(&m->stream, layer, m->need, NULL, ids ? tokens : 0, error);
    }
    gpu_relay_unlock(m->relay);
    return rc;
}

/* The stream's work goes into a graph: nothing may be waited for. */
static int captures(struct numoe_gpu_model *m, void *stream, bool *yes, struct numoe_error *error)
{
    *yes = false;
    return gpu_judge(m->gpu, m->gpu->ops->stream_captures(m->gpu->device, stream, yes), error,
                     "asking whether a stream is captured");
}

/* Pieces come and go while calls run, which a graph that is replayed later cannot follow. */
static int refuse_captured(struct numoe_gpu_model *m, void *stream, struct numoe_error *error)
{
    bool captured;
    int rc = captures(m, stream, &captured, error);

    if (!rc && captured)
        rc = numoe_error_set(error, -ENOTSUP, "stream",
                             "is captured, and pieces have no place in a graph");
    return rc;
}

/* A call for all devices that have whole experts is under way. */
static bool is_shared(const struct numoe_gpu_model *m)
{
    return m->relay && m->relay->running;
}

/* The functions for pieces of a model whose experts are whole on several devices, of which threads
 * may each drive one, are called with its lock. */

static int piece_next(struct numoe_gpu_model *m, void *stream, struct numoe_gpu_piece *piece,
                      struct numoe_error *error)
{
    struct gpu_part part;
    int rc = gpu_enter(m->gpu, error);

    if (!rc && m->several)
        rc = refuse_several(m, error);
    if (!rc && !m->stream.in_call)
        rc = numoe_error_set(error, -EINVAL, "layer", "none was begun");
    if (!rc)
        rc = refuse_captured(m, stream, error);
    if (!rc && is_shared(m)) {
        uint32_t device = m->index;

        rc = gpu_relay_next(m->relay, &device, &stream, piece, error);
        gpu_enter(m->gpu, NULL); /* others may be current */
        return rc;
    }
    if (!rc)
        rc = gpu_stream_next(&m->stream, stream, &part, error);
    if (rc)
        return rc;
    *piece = (struct numoe_gpu_piece){.weights = part.weights,
                                      .slice_at = part.slice_at,
                                      .down_bias = part.down_bias,
                                      .handle = part.piece};
    return 0;
}

int numoe_gpu_piece_next(struct numoe_gpu_model *m, void *stream, struct numoe_gpu_piece *piece,
                         struct numoe_error *error)
{
    struct gpu_relay *r = m->relay;
    int rc;

    gpu_relay_lock(r);
    rc = piece_next(m, stream, piece, error);
    gpu_relay_unlock(r);
    return rc;
}

static int piece_any(struct gpu_relay *r, void *const *streams, uint32_t *part,
                     struct numoe_gpu_piece *piece, struct numoe_error *error)
{
    int rc = 0;

    if (!r->running)
        return numoe_error_set(error, -EINVAL, "layer", "none was begun");
    for (uint32_t i = 0; !rc && i < r->count; i++) {
        rc = gpu_enter(r->sides[i].gpu, error);
        if (!rc)
            rc = refuse_captured(r->sides[i].model, streams[i], error);
    }
    if (rc)
        return rc;
    *part = NUMOE_GPU_MOST;
    rc = gpu_relay_next(r, part, streams, piece, error);
    *part = *part < r->count ? *part : 0;
    return rc;
}

int numoe_gpu_piece_any(struct numoe_gpu_model *m, void *const *streams, uint32_t *part,
                        struct numoe_gpu_piece *piece, struct numoe_error *error)
{
    struct gpu_relay *r = m->several ? m->several->relay : NULL;
    int rc;

    *part = 0;
    if (!m->several)
        return numoe_gpu_piece_next(m, streams[0], piece, error);
    if (!r)
        return refuse_several(m, error);
    gpu_relay_lock(r);
    rc = piece_any(r, streams, part, piece, error);
    gpu_relay_unlock(r);
    return rc;
}

static int piece_marlin(struct numoe_gpu_model *m, void *stream,
                        const struct numoe_gpu_piece *piece, const int32_t *slot_of,
                        bool interleaved, const struct numoe_marlin *to, struct numoe_error *error)
{
    const struct numoe_cuda_marlin marlin = {
        .shape = m->source.shape,
        .slices = m->source.slices,
        .experts = (uint32_t)m->source.experts,
        .weights = piece->weights,
        .slice_at = piece->slice_at,
        .slot_of = slot_of,
        .interleaved = interleaved,
        .to = *to,
    };
    struct numoe_marlin_sizes sizes;
    int rc = gpu_enter(m->gpu, error);

    if (!rc && m->several)
        rc = refuse_several(m, error);
    if (rc)
        return rc;
    if (!piece->slice_at)
        return numoe_error_set(error, -EINVAL, "piece", "there is none: it is past the last");
    if (m->stream.uneven)
        return numoe_error_set(error, -ENOTSUP, "piece",
                               "the device has some slices of each expert, and not all");
    if (numoe_marlin_sizes(&marlin.shape, marlin.slices, &sizes))
        return numoe_error_set(error, -EINVAL, "marlin",
                               "a hidden width of %llu that is no multiple of 64, or %u slices "
                               "that are less than 2",
                               (unsigned long long)marlin.shape.hidden, marlin.slices);
    rc = refuse_captured(m, stream, error);
    if (!rc)
        rc = gpu_marlin_usable(m->gpu, error);
    if (rc)
        return rc;
    return gpu_judge(m->gpu, m->gpu->ops->marlin(m->gpu->device, stream, &marlin), error,
                     "repacking experts");
}

int numoe_gpu_piece_marlin(struct numoe_gpu_model *m, void *stream,
                           const struct numoe_gpu_piece *piece, const int32_t *slot_of,
                           bool interleaved, const struct numoe_marlin *to,
                           struct numoe_error *error)
{
    int rc;

    gpu_relay_lock(m->relay);
    rc = piece_marlin(m, stream, piece, slot_of, interleaved, to, error);
    gpu_relay_unlock(m->relay);
    return rc;
}

static int piece_done(struct numoe_gpu_model *m, void *stream, const struct numoe_gpu_piece *piece,
                      struct numoe_error *error)
{
    const struct gpu_part part = {.weights = piece->weights,
                                  .slice_at = piece->slice_at,
                                  .down_bias = piece->down_bias,
                                  .piece = piece->handle};
    int rc = gpu_enter(m->gpu, error);

    if (!rc && m->several)
        rc = refuse_several(m, error);
    if (!rc)
        rc = refuse_captured(m, stream, error);
    if (rc)
        return rc;
    if (m->relay && gpu_relay_has(m->relay, m->index, piece->handle))
        return gpu_relay_done(m->relay, m->index, stream, piece->handle, error);
    return gpu_stream_done(&m->stream, stream, &part, error);
}

int numoe_gpu_piece_done(struct numoe_gpu_model *m, void *stream,
                         const struct numoe_gpu_piece *piece, struct numoe_error *error)
{
    int rc;

    gpu_relay_lock(m->relay);
    rc = piece_done(m, stream, piece, error);
    gpu_relay_unlock(m->relay);
    return rc;
}

void numoe_gpu_pieces_end(struct numoe_gpu_model *m, void *stream)
{
    gpu_relay_lock(m->relay);
    gpu_enter(m->gpu, NULL);
    if (is_shared(m))
        gpu_relay_end(m->relay, m->index, stream);
    else
        gpu_stream_end(&m->stream, stream);
    gpu_enter(m->gpu, NULL);
    gpu_relay_unlock(m->relay);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void describe(const struct numoe_gpu_model *m, const struct numoe_gpu_device_call *call,
                     const struct gpu_part *part, struct numoe_cuda_ffn *ffn)
{
    *ffn = (struct numoe_cuda_ffn){
        .tokens = (uint32_t)call->tokens,
        .top_k = (uint32_t)call->top_k,
        .x = call->x,
        .x_type = call->x_type,
        .x_stride = call->x_stride,
        .ids = call->ids,
        .routing = call->routing,
        .out = call->out,
        .out_type = NUMOE_F32,
        .out_stride = call->out_stride,
        .scale = call->scale,
        .workspace = call->workspace,
    };
    gpu_model_ffn(m, part, ffn);
    ffn->form = gpu_choose_form(m->gpu, ffn);
}

uint64_t numoe_gpu_workspace(const struct numoe_gpu_model *m,
                             const struct numoe_gpu_device_call *call)
{
    struct numoe_cuda_ffn ffn;

    if (m->several || call->tokens > UINT32_MAX || call->top_k > UINT32_MAX)
        return 0;
    describe(m, call, NULL, &ffn);
    return m->gpu->ops->workspace_bytes(m->gpu->device, &ffn);
}

int numoe_gpu_hold(struct numoe_gpu_model *m, uint64_t layer, const int32_t *ids, uint64_t count,
                   struct numoe_error *error)
{
    const int rc = check_free(m, layer, error);

    if (rc)
        return rc;
    count_need(m->need, m->source.experts, ids, count);
    return gpu_stream_hold(&m->stream, layer, m->need, error);
}

void numoe_gpu_release(struct numoe_gpu_model *m, uint64_t layer)
{
    if (!m->several && layer < m->source.layers)
        gpu_stream_loose(&m->stream, layer);
}

/* All experts that are asked for are held: what the device reads of them does not move. */
static int all_held(const struct numoe_gpu_model *m, uint64_t layer,
                    const struct numoe_gpu_device_call *call, const int32_t *ids,
                    struct numoe_error *error)
{
    const struct numoe_gpu_source *source = &m->source;
    const struct gpu_cache *cache = &m->stream.cache;
    const uint64_t count = ids ? call->tokens * call->top_k : source->experts;

    if (!cache->frozen[layer])
        return numoe_error_set(error, -ENOTSUP, "stream",
                               "is captured, and layer %llu is not held on the device "
                               "(numoe_gpu_hold): a graph cannot copy experts from host memory",
                               (unsigned long long)layer);
    if (source->generation(source->user, layer) != m->stream.generation[layer])
        return numoe_error_set(error, -EBUSY, "layer",
                               "layer %llu has other weights than those that are held: it is to be "
                               "released and held again",
                               (unsigned long long)layer);
    for (uint64_t i = 0; i < count; i++) {
        const int64_t e = ids ? ids[i] : (int64_t)i;
        if (e >= 0 && (uint64_t)e < source->experts &&
            source->present(source->user, layer, (uint64_t)e) &&
            !gpu_cache_holds(cache, layer, (uint32_t)e))
            return numoe_error_set(error, -ENOTSUP, "stream",
                                   "is captured, and expert %lld of layer %llu is in host memory, "
                                   "not held on the device (numoe_gpu_hold)",
                                   (long long)e, (unsigned long long)layer);
    }
    return 0;
}

/* Into a graph: the launch, and nothing else. */
static int capture(struct numoe_gpu_model *m, uint64_t layer,
                   const struct numoe_gpu_device_call *call, const int32_t *host_ids, void *stream,
                   struct numoe_error *error)
{
    const struct gpu_part part = gpu_stream_held(&m->stream, layer);
    struct numoe_cuda_ffn ffn;
    const int rc = all_held(m, layer, call, host_ids, error);

    if (rc)
        return rc;
    describe(m, call, &part, &ffn);
    ffn.add = call->add;
    return gpu_judge(m->gpu, m->gpu->ops->launch(m->gpu->device, stream, &ffn), error,
                     "capturing layer %llu for %u tokens", (unsigned long long)layer, ffn.tokens);
}

int numoe_gpu_enqueue(struct numoe_gpu_model *m, uint64_t layer,
                      const struct numoe_gpu_device_call *call, const int32_t *host_ids,
                      void *stream, struct numoe_error *error)
{
    const uint64_t work = numoe_gpu_workspace(m, call);
    struct numoe_gpu *gpu = m->gpu;
    bool first = true, captured = false;
    int rc;

    if (m->several)
        return refuse_several(m, error);
    if (!work || call->workspace_bytes < work)
        return numoe_error_set(error, -EINVAL, "workspace",
                               "%llu bytes are not the %llu that %llu tokens need",
                               (unsigned long long)call->workspace_bytes, (unsigned long long)work,
                               (unsigned long long)call->tokens);
    rc = gpu_enter(gpu, error);
    if (!rc && layer >= m->source.layers)
        rc = numoe_error_set(error, -EINVAL, "layer", "%llu of %llu", (unsigned long long)layer,
                             (unsigned long long)m->source.layers);
    if (!rc)
        rc = captures(m, stream, &captured, error);
    if (!rc && captured)
        return capture(m, layer, call, host_ids, stream, error);
    if (!rc)
        rc = numoe_gpu_pieces_begin(m, layer, host_ids, call->tokens, call->top_k, error);
    if (rc)
        return rc;
    for (;; first = false) {
        struct numoe_cuda_ffn ffn;
        struct gpu_part part;

        rc = gpu_stream_next(&m->stream, stream, &part, error);
        if (rc || !part.slice_at)
            break;
        describe(m, call, &part, &ffn);
        ffn.add = call->add || !first;
        rc = gpu_judge(gpu, gpu->ops->launch(gpu->device, stream, &ffn), error,
                       "launching layer %llu for %u tokens", (unsigned long long)layer, ffn.tokens);
        if (!rc)
            rc = gpu_stream_done(&m->stream, stream, &part, error);
        if (rc)
            break;
    }
    gpu_stream_end(&m->stream, stream);
    return rc;
}
