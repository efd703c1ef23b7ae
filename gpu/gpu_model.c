/*
 * Models on a device: their memory, what is pinned of the host's, and what is reported.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gpu_several.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

#define GIB ((uint64_t)1 << 30)
#define STAGE_LEAST ((uint64_t)4 << 20)
#define STAGE_MOST ((uint64_t)128 << 20)

static void model_free(struct numoe_gpu_model *m)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;

    if (m->results) {
        gpu_still(gpu, m->results, "the last outputs");
        gpu_judge(gpu, ops->stream_destroy(gpu->device, m->results), NULL, "freeing a stream");
    }
    gpu_trace_free(m->stream.trace);
    gpu_stream_fini(&m->stream);
    if (m->computed)
        gpu_judge(gpu, ops->event_destroy(gpu->device, m->computed), NULL, "freeing an event");
    if (m->began)
        gpu_judge(gpu, ops->event_destroy(gpu->device, m->began), NULL, "freeing a timer");
    if (m->ended)
        gpu_judge(gpu, ops->event_destroy(gpu->device, m->ended), NULL, "freeing a timer");
    for (int i = 0; i < GPU_STAGES; i++)
        if (m->stage_free[i])
            gpu_judge(gpu, ops->event_destroy(gpu->device, m->stage_free[i]), NULL,
                      "freeing an event");
    if (m->device)
        gpu_judge(gpu, ops->release(gpu->device, m->device), NULL, "freeing the workspace");
    if (m->host)
        gpu_judge(gpu, ops->host_release(gpu->device, m->host), NULL, "freeing staging");
    gpu_ring_fini(&m->ring);
    gpu_pinned_fini(&m->pinned);
    free(m->need);
    free(m);
}

int gpu_model_pin(struct gpu_pinned *pinned, const struct numoe_gpu_source *source,
                  const struct numoe_gpu_model_options *o, struct numoe_error *error)
{
    const uint64_t wish = o->chunk_bytes ? o->chunk_bytes : NUMOE_GPU_CHUNK_BYTES;
    const uint64_t chunk = wish < NUMOE_GPU_REGISTRATION_BYTES ? wish : NUMOE_GPU_CHUNK_BYTES;
    int rc = 0;

    for (uint32_t i = 0; !rc && i < source->region_count; i++) {
        void *address;
        uint64_t bytes;
        source->arena(source->user, i, &address, &bytes);
        if (o->no_pinning)
            pinned->wanted_bytes += bytes;
        else if (bytes)
            rc = gpu_pinned_add(pinned, address, bytes, chunk, error);
    }
    if (!rc && *pinned->refusal)
        numoe_log_write(&pinned->gpu->log, NUMOE_LOG_WARNING,
                        "%.1f of %.1f GB of expert memory are pinned, the rest goes through "
                        "staging buffers: %s",
                        (double)pinned->pinned_bytes / 1e9, (double)pinned->wanted_bytes / 1e9,
                        pinned->refusal);
    return rc;
}

/* Staging, if not all is pinned. */
static int make_ring(struct numoe_gpu_model *m, const struct numoe_gpu_model_options *o,
                     struct numoe_error *error)
{
    int rc;

    if (m->pins->pinned_bytes == m->pins->wanted_bytes)
        return 0;
    m->ring_bytes = o->ring_bytes ? o->ring_bytes : NUMOE_GPU_RING_BYTES;
    rc = gpu_ring_init(&m->ring, m->gpu, m->ring_bytes, error);
    if (!rc && m->ring.memory) {
        struct numoe_memory_report report = {0};
        numoe_memory_inspect(m->ring.memory, &report);
        m->ring_checked = report.checked_bytes;
        m->ring_placed = report.placed_bytes;
    }
    return rc;
}

static int make_events(struct numoe_gpu_model *m, struct numoe_error *error)
{
    struct numoe_gpu *gpu = m->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = gpu_judge(gpu, ops->stream_create(gpu->device, &m->results), error, "making a stream");

    if (!rc)
        rc = gpu_judge(gpu, ops->event_create(gpu->device, &m->computed), error, "making an event");
    if (!rc)
        rc = gpu_judge(gpu, ops->timer_create(gpu->device, &m->began), error, "making a timer");
    if (!rc)
        rc = gpu_judge(gpu, ops->timer_create(gpu->device, &m->ended), error, "making a timer");
    for (int i = 0; !rc && i < GPU_STAGES; i++)
        rc = gpu_judge(gpu, ops->event_create(gpu->device, &m->stage_free[i]), error,
                       "making an event");
    return rc;
}

int gpu_model_budget(struct numoe_gpu *gpu, const struct numoe_gpu_model_options *o,
                     uint32_t sharers, uint64_t *budget, uint64_t *keep_free,
                     struct numoe_error *error)
{
    uint64_t free_bytes = 0, total_bytes = 0;
    const int rc = gpu_judge(gpu, gpu->ops->memory(gpu->device, &free_bytes, &total_bytes), error,
                             "asking for free device memory");

    free_bytes /= sharers;
    total_bytes /= sharers;
    *keep_free = o->keep_free_bytes          ? o->keep_free_bytes
                 : total_bytes / 8 > 4 * GIB ? 4 * GIB
                                             : total_bytes / 8;
    *budget = free_bytes > *keep_free ? free_bytes - *keep_free : 0;
    return rc;
}

int gpu_model_make(struct numoe_gpu *gpu, const struct numoe_gpu_source *source,
                   const struct numoe_gpu_model_options *options, const struct gpu_pinned *pins,
                   uint32_t sharers, struct numoe_gpu_model **out, struct numoe_error *error)
{
    const struct numoe_gpu_model_options defaults = {0}, *o = options ? options : &defaults;
    const uint64_t layer_bytes = source->experts * source->slices * source->shape.bytes;
    struct numoe_gpu_model *m;
    uint64_t budget;
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
    m->gpu = m->pinned.gpu = gpu;
    m->pins = pins ? pins : &m->pinned;
    m->source = *source;
    m->warm = true;
    m->took_ms = -1;
    m->stage_least = STAGE_LEAST;
    m->stage_most = STAGE_MOST;
    m->need = calloc(source->experts, sizeof *m->need);
    if (!m->need) {
        rc = numoe_error_set(error, -ENOMEM, "model", "out of memory");
        goto fail;
    }
    rc = gpu_model_budget(gpu, o, sharers, &budget, &m->keep_free_bytes, error);
    if (rc)
        goto fail;
    if (!pins)
        rc = gpu_model_pin(&m->pinned, source, o, error);
    if (!rc)
        rc = make_ring(m, o, error);
    if (rc)
        goto fail;
    const struct gpu_stream_sizes sizes = {
        .window = o->window_bytes ? o->window_bytes : 2 * layer_bytes,
        .cache = o->stream        ? 0
                 : o->cache_bytes ? o->cache_bytes
                                  : UINT64_MAX,
        .budget = budget,
        .piece = o->piece_bytes ? o->piece_bytes : GPU_PIECE_LEAST,
    };
    rc = gpu_stream_init(&m->stream, gpu, &m->source, m->pins, m->ring.gpu ? &m->ring : NULL,
                         &sizes, error);
    if (!rc)
        rc = make_events(m, error);
    if (!rc && o->profile) {
        rc = gpu_cache_load(&m->stream.cache, o->profile, error);
        m->warm = false;
    }
    if (rc)
        goto fail;
    for (uint64_t l = 0; l < source->layers; l++)
        m->experts += m->stream.wanted[l];
    *out = m;
    return 0;
fail:
    model_free(m);
    return rc;
}

int numoe_gpu_model_create(struct numoe_gpu *gpu, const struct numoe_gpu_source *source,
                           const struct numoe_gpu_model_options *options,
                           struct numoe_gpu_model **model, struct numoe_error *error)
{
    return gpu_model_make(gpu, source, options, NULL, 1, model, error);
}

void numoe_gpu_model_destroy(struct numoe_gpu_model *m)
{
    if (!m)
        return;
    if (m->several) {
        gpu_several_free(m->several);
        free(m);
        return;
    }
    gpu_enter(m->gpu, NULL);
    numoe_gpu_cancel(m);
    gpu_stream_end(&m->stream, m->stream.compute);
    model_free(m);
}

uint32_t numoe_gpu_model_parts(const struct numoe_gpu_model *m)
{
    return m->several ? m->several->count : 1;
}

struct numoe_gpu_model *numoe_gpu_model_part(struct numoe_gpu_model *m, uint32_t i)
{
    return m->several ? m->several->parts[i].model : m;
}

int numoe_gpu_model_health(const struct numoe_gpu_model *m, struct numoe_error *error)
{
    int rc = 0;

    if (!m->several)
        return numoe_gpu_health(m->gpu, error);
    for (uint32_t i = 0; !rc && i < m->several->count; i++)
        rc = numoe_gpu_health(m->several->parts[i].model->gpu, error);
    return rc;
}

void numoe_gpu_model_report(const struct numoe_gpu_model *m, struct numoe_gpu_report *report)
{
    const struct gpu_stream *s = &m->stream;

    if (m->several) {
        gpu_several_report(m->several, report);
        return;
    }
    *report = (struct numoe_gpu_report){
        .resident = gpu_tally_get(&s->tally, GPU_RESIDENT),
        .expert_bytes = s->cell_bytes,
        .device_bytes = gpu_tally_get(&s->tally, GPU_POOL_BYTES) +
                        gpu_tally_get(&s->tally, GPU_WORKSPACE_BYTES) + s->fixed_bytes +
                        m->beside_bytes,
        .cells = gpu_tally_get(&s->tally, GPU_CELLS),
        .experts = m->experts,
        .window_bytes = gpu_tally_get(&s->tally, GPU_WINDOW_BYTES),
        .pinned_bytes = m->pins->pinned_bytes,
        .pinned_chunks = m->pins->count,
        .arena_bytes = m->pins->wanted_bytes,
        .ring_bytes = m->ring.gpu ? m->ring_bytes : 0,
        .ring_node = m->ring.gpu ? m->ring.node : NUMOE_NONE,
        .ring_checked = m->ring_checked,
        .ring_placed = m->ring_placed,
        .copied_bytes = gpu_tally_get(&s->tally, GPU_COPIED_BYTES),
        .copied_experts = gpu_tally_get(&s->tally, GPU_COPIED_EXPERTS),
        .passed_bytes = gpu_tally_get(&s->tally, GPU_PASSED_BYTES),
        .passed_experts = gpu_tally_get(&s->tally, GPU_PASSED_EXPERTS),
        .found = gpu_tally_get(&s->tally, GPU_FOUND_EXPERTS),
        .pieces = gpu_tally_get(&s->tally, GPU_PIECES_TAKEN),
        .batches = gpu_tally_get(&s->tally, GPU_BATCHES),
        .calls = gpu_tally_get(&s->tally, GPU_CALLS),
        .tokens = gpu_tally_get(&s->tally, GPU_TOKENS),
        .sum = NUMOE_GPU_SUM_HOST,
    };
    memcpy(report->pin_refusal, m->pins->refusal, sizeof report->pin_refusal);
}

void gpu_model_ffn(const struct numoe_gpu_model *m, const struct gpu_part *part,
                   struct numoe_cuda_ffn *ffn)
{
    const struct numoe_gpu_source *source = &m->source;

    ffn->shape = source->shape;
    ffn->activation = source->activation;
    ffn->arithmetic = source->arithmetic;
    ffn->slices = source->slices;
    ffn->experts = (uint32_t)source->experts;
    ffn->weights = part ? part->weights : NULL;
    ffn->slice_at = part ? part->slice_at : NULL;
    ffn->down_bias = part ? part->down_bias : NULL;
    ffn->id_bytes = 4;
}

void gpu_model_warm(struct numoe_gpu_model *m)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    if (m->warm)
        return;
    m->warm = true;
    if (gpu_stream_warm(&m->stream, &error))
        numoe_log_write(&m->gpu->log, NUMOE_LOG_WARNING,
                        "experts of the profile come when they are asked for: %s", error.message);
}

void gpu_model_hottest(struct numoe_gpu_model *m, uint64_t layer, uint64_t most, uint32_t *need)
{
    const uint32_t experts = (uint32_t)m->source.experts;
    uint32_t *list = m->stream.slices_had; /* scratch */
    uint64_t count;

    most = most < experts ? most : experts;
    count = gpu_cache_hottest(&m->stream.cache, layer, (uint32_t)most, m->source.present,
                              m->source.user, list);
    memset(need, 0, experts * sizeof *need);
    for (uint64_t i = 0; i < count; i++)
        need[list[i]] = 1;
    for (uint32_t e = 0; e < experts && count < most; e++)
        if (!need[e]) {
            need[e] = 1;
            count++;
        }
}

bool gpu_model_most(const struct numoe_gpu_model *m, uint64_t layer, const uint32_t *need)
{
    uint64_t hit = 0;

    for (uint64_t e = 0; e < m->source.experts; e++)
        hit += need[e] && m->source.present(m->source.user, layer, e);
    return 8 * hit >= 7ull * m->stream.wanted[layer];
}

int numoe_gpu_prefetch(struct numoe_gpu_model *m, uint64_t layer, const int32_t *ids,
                       uint64_t count, struct numoe_error *error)
{
    uint32_t *need = NULL;
    int rc = 0;

    if (m->several && !m->several->relay) {
        for (uint32_t i = 0; !rc && i < m->several->count; i++)
            rc = numoe_gpu_prefetch(m->several->parts[i].model, layer, ids, count, error);
        return rc;
    }
    rc = gpu_enter(m->gpu, error);
    if (rc)
        return rc;
    if (layer >= m->source.layers)
        return numoe_error_set(error, -EINVAL, "layer", "%llu of %llu", (unsigned long long)layer,
                               (unsigned long long)m->source.layers);
    if (ids) {
        need = calloc(m->source.experts, sizeof *need);
        if (!need)
            return numoe_error_set(error, -ENOMEM, "prefetch", "out of memory");
        for (uint64_t i = 0; i < count; i++)
            if (ids[i] >= 0 && (uint64_t)ids[i] < m->source.experts)
                need[ids[i]]++;
    }
    rc = m->several ? gpu_relay_prefetch(m->several->relay, layer, need, error)
                    : gpu_stream_prefetch(&m->stream, layer, need, error);
    free(need);
    return rc;
}

void numoe_gpu_held(const struct numoe_gpu_model *m, uint64_t layer, uint8_t *held)
{
    if (m->several) {
        gpu_several_held(m->several, layer, held);
        return;
    }
    for (uint32_t e = 0; e < m->source.experts; e++)
        held[e] = gpu_stream_has(&m->stream, layer, e);
}

void numoe_gpu_asked(struct numoe_gpu_model *m, uint64_t layer, const uint32_t *tokens_of,
                     uint64_t tokens)
{
    for (uint32_t i = 0; i < numoe_gpu_model_parts(m); i++)
        gpu_cache_heat(&numoe_gpu_model_part(m, i)->stream.cache, layer, tokens_of, tokens);
}

int numoe_gpu_bring(struct numoe_gpu_model *m, uint64_t layer, uint32_t most,
                    struct numoe_error *error)
{
    int rc = 0;

    if (m->several) {
        for (uint32_t i = 0; !rc && i < m->several->count; i++)
            rc = numoe_gpu_bring(m->several->parts[i].model, layer, most, error);
        return rc;
    }
    rc = gpu_enter(m->gpu, error);
    /* a prefetch that is under way would be dropped for it */
    while (!rc && most-- && m->stream.jobs[!m->stream.current].layer == GPU_NO_LAYER) {
        const uint32_t e =
            gpu_cache_worth(&m->stream.cache, layer, m->source.present, m->source.user);
        if (e == GPU_NO_CELL)
            break;
        rc = gpu_stream_bring(&m->stream, layer, e, error);
    }
    return rc;
}

static int trace_part(struct numoe_gpu_model *m, uint32_t part,
                      void (*tell)(void *user, const struct numoe_gpu_span *span), void *user,
                      struct numoe_error *error)
{
    struct numoe_error why = NUMOE_ERROR_INIT;
    int rc = gpu_enter(m->gpu, error);

    if (!rc && (m->running || m->stream.in_call || m->stream.trace))
        rc = numoe_error_set(error, -EBUSY, "trace",
                             m->stream.trace ? "is on already" : "a call is not over");
    if (rc)
        return rc;
    m->stream.trace = gpu_trace_make(m->gpu, part, m->stream.compute, tell, user, &why);
    if (m->stream.trace)
        return 0;
    if (error)
        *error = why;
    return numoe_gpu_health(m->gpu, NULL) ? -EIO : -ENOMEM;
}

int numoe_gpu_trace(struct numoe_gpu_model *m,
                    void (*tell)(void *user, const struct numoe_gpu_span *span), void *user,
                    struct numoe_error *error)
{
    uint32_t on = 0;
    int rc = 0;

    while (!rc && on < numoe_gpu_model_parts(m)) {
        rc = trace_part(numoe_gpu_model_part(m, on), on, tell, user, error);
        on += rc == 0;
    }
    while (rc && on > 0) { /* all or none */
        struct gpu_stream *stream = &numoe_gpu_model_part(m, --on)->stream;

        gpu_trace_free(stream->trace);
        stream->trace = NULL;
    }
    return rc;
}

double numoe_gpu_took_ms(const struct numoe_gpu_model *m)
{
    double ms = m->took_ms;

    for (uint32_t i = 0; m->several && i < m->several->count; i++) {
        const double part = m->several->parts[i].model->took_ms;
        ms = part < 0 || (i && ms < 0) ? -1 : i && ms > part ? ms : part;
    }
    return ms;
}

uint64_t numoe_gpu_began_ns(const struct numoe_gpu_model *m)
{
    return (m->several ? m->several->parts[0].model : m)->began_ns;
}

int numoe_gpu_profile_save(const struct numoe_gpu_model *m, const char *path,
                           struct numoe_error *error)
{
    /* all parts hear of all experts' tokens */
    return gpu_cache_save(&(m->several ? m->several->parts[0].model : m)->stream.cache, path,
                          error);
}
