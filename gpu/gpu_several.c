/* Models on several devices. SPDX-License-Identifier: Apache-2.0 */
#include "gpu_several.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- a part's source: the whole model's, less what others have --------------------------------
 */

static void arena(void *user, uint32_t index, void **address, uint64_t *bytes)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    whole->arena(whole->user, part->region[index], address, bytes);
}

static bool has(const struct gpu_several_part *part, uint64_t layer, uint64_t expert)
{
    return part->has[layer * part->of->source.experts + expert] & GPU_SEVERAL_HAS;
}

static uint64_t place(void *user, uint64_t layer, uint64_t expert, uint32_t index,
                      const uint8_t **address)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    return has(part, layer, expert)
               ? whole->place(whole->user, layer, expert, part->region[index], address)
               : 0;
}

static bool present(void *user, uint64_t layer, uint64_t expert)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    return has(part, layer, expert) && whole->present(whole->user, layer, expert);
}

static const float *bias(void *user, uint64_t layer, uint64_t expert)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    return part->has[layer * whole->experts + expert] & GPU_SEVERAL_FIRST
               ? whole->bias(whole->user, layer, expert)
               : part->no_bias;
}

static uint32_t generation(void *user, uint64_t layer)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    return whole->generation(whole->user, layer);
}

static void copy(void *user, void *to, uint64_t to_stride, const void *from, uint64_t from_stride,
                 uint64_t row_bytes, uint64_t rows)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    whole->copy(whole->user, to, to_stride, from, from_stride, row_bytes, rows);
}

static void fill(void *user, void *to, const void *from, uint64_t bytes, uint32_t os_node)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    whole->fill(whole->user, to, from, bytes, os_node);
}

static void sum(void *user, void *to, enum numoe_type type, uint64_t to_stride,
                const float *const *from, uint32_t count, bool keep, uint64_t columns,
                uint64_t rows)
{
    const struct gpu_several_part *part = user;
    const struct numoe_gpu_source *whole = &part->of->source;

    whole->sum(whole->user, to, type, to_stride, from, count, keep, columns, rows);
}

/* Fills what the part has, and the longest row of slices of it. */
static void take_part(struct gpu_several_part *part, uint32_t *slices)
{
    const struct gpu_several *s = part->of;
    const struct numoe_gpu_source *whole = &s->source;

    *slices = 0;
    for (uint64_t q = 0; q < whole->layers * whole->experts; q++) {
        const uint64_t layer = q / whole->experts, e = q % whole->experts;
        uint64_t before = 0, count = 0;

        if (!gpu_divide_has(&s->division, part->index, layer, e, whole->experts))
            continue;
        for (uint32_t r = 0; r < whole->region_count; r++) {
            const uint8_t *address;
            const uint64_t here = whole->place(whole->user, layer, e, r, &address);
            if (s->region_group[r] == s->division.group[part->index])
                count += here;
            else if (count == 0)
                before += here;
        }
        if (count)
            part->has[q] = before ? GPU_SEVERAL_HAS : GPU_SEVERAL_HAS | GPU_SEVERAL_FIRST;
        *slices = count > *slices ? (uint32_t)count : *slices;
    }
}

static int make_part(struct gpu_several *s, uint32_t i, struct numoe_gpu *const *gpus,
                     const struct numoe_gpu_model_options *options, struct numoe_error *error)
{
    struct gpu_several_part *part = &s->parts[i];
    struct numoe_gpu_source source = s->source;
    uint32_t sharers = 0;
    int rc;

    part->of = s;
    part->index = i;
    part->region = calloc(s->source.region_count, sizeof *part->region);
    part->has = calloc(s->source.layers * s->source.experts, 1);
    part->no_bias = calloc(32 * (uint64_t)s->source.shape.hidden_tiles, sizeof *part->no_bias);
    if (!part->region || !part->has || !part->no_bias)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    for (uint32_t r = 0; r < s->source.region_count; r++)
        if (s->region_group[r] == s->division.group[i])
            part->region[part->regions++] = r;
    for (uint32_t k = i; k < s->count; k++)
        sharers += gpus[k]->properties.index == gpus[i]->properties.index;
    if (s->relay) {
        memset(part->has, GPU_SEVERAL_HAS | GPU_SEVERAL_FIRST,
               s->source.layers * s->source.experts);
        rc = gpu_model_make(gpus[i], &source, options, &s->pinned, sharers, &part->model, error);
        if (rc)
            return rc;
        part->model->relay = s->relay;
        part->model->index = i;
        s->relay->sides[i].model = part->model;
        return 0;
    }
    source.user = part;
    source.region_count = part->regions;
    source.arena = arena;
    source.place = place;
    source.present = present;
    source.bias = bias;
    source.generation = generation;
    source.copy = s->source.copy ? copy : NULL;
    source.fill = s->source.fill ? fill : NULL;
    source.sum = s->source.sum ? sum : NULL;
    take_part(part, &source.slices);
    if (!source.slices)
        return numoe_error_set(error, -EINVAL, gpus[i]->properties.name,
                               "there are more devices than %llu experts can be divided among",
                               (unsigned long long)s->source.experts);
    rc = gpu_model_make(gpus[i], &source, options, &s->pinned, sharers, &part->model, error);
    if (!rc)
        part->model->beside_bytes = s->sum.scratch[i] ? 2 * s->sum.slot_bytes : 0;
    return rc;
}

/* ---- making -----------------------------------------------------------------------------------
 */

/* In eighths of the fastest: small differences of a measurement are none of the division. */
static void weigh(const struct gpu_several *s, uint32_t *weight)
{
    double fastest = 0;

    for (uint32_t i = 0; i < s->count; i++)
        fastest = s->links.host_gbs[i] > fastest ? s->links.host_gbs[i] : fastest;
    for (uint32_t i = 0; i < s->count; i++) {
        weight[i] = fastest > 0 ? (uint32_t)(8 * s->links.host_gbs[i] / fastest + 0.5) : 1;
        weight[i] = weight[i] ? weight[i] : 1;
    }
}

static int divide(struct gpu_several *s, struct numoe_gpu *const *gpus, const uint32_t *weight)
{
    const struct numoe_gpu_source *source = &s->source;
    const uint32_t regions = source->region_count;
    uint32_t *distance = calloc((uint64_t)regions * s->count, sizeof *distance);
    uint64_t *bytes = calloc(regions, sizeof *bytes);

    s->region_group = calloc(regions, sizeof *s->region_group);
    if (!distance || !bytes || !s->region_group) {
        free(distance);
        free(bytes);
        return -ENOMEM;
    }
    for (uint32_t r = 0; r < regions; r++) {
        void *address;
        source->arena(source->user, r, &address, &bytes[r]);
        for (uint32_t i = 0; i < s->count; i++)
            if (source->distance && gpus[i]->properties.locality_known && !s->relay)
                distance[i * regions + r] =
                    source->distance(source->user, r, gpus[i]->properties.os_node);
    }
    gpu_divide(s->count, weight, regions, bytes, distance, &s->division, s->region_group);
    free(distance);
    free(bytes);
    return 0;
}

static void say_division(const struct gpu_several *s, struct numoe_gpu *const *gpus)
{
    const struct gpu_division *v = &s->division;

    for (uint32_t i = 0; i < s->count; i++)
        numoe_log_write(&gpus[i]->log, NUMOE_LOG_INFO,
                        "GPU %u (%s) has slices of %u of %u nodes, of %u in %u experts; its link "
                        "carries %.1f GB/s while all copy",
                        gpus[i]->properties.index, gpus[i]->properties.bus, s->parts[i].regions,
                        s->source.region_count, v->end[i] - v->begin[i], v->weight[v->group[i]],
                        s->links.host_gbs[i]);
}

void gpu_several_free(struct gpu_several *s)
{
    gpu_several_cancel(s);
    if (s->relay)
        gpu_relay_stop(s->relay);
    for (uint32_t i = 0; i < s->count; i++) {
        numoe_gpu_model_destroy(s->parts[i].model);
        free(s->parts[i].region);
        free(s->parts[i].has);
        free(s->parts[i].no_bias);
    }
    gpu_sum_close(&s->sum);
    if (s->relay)
        gpu_relay_close(s->relay);
    free(s->relay);
    if (s->pinned.gpu) {
        gpu_enter(s->pinned.gpu, NULL);
        gpu_pinned_fini(&s->pinned);
    }
    free(s->region_group);
    free(s);
}

/* Ways between devices, for sums or for experts, and how fast they and the links are. */
static int open_ways(struct gpu_several *s, struct numoe_gpu *const *gpus,
                     const struct numoe_gpu_model_options *o, struct numoe_error *error)
{
    struct numoe_error peer_error = NUMOE_ERROR_INIT;
    const bool chosen = o->whole ? o->whole == NUMOE_GPU_WHOLE_AUTO : o->sum == NUMOE_GPU_SUM_AUTO;
    bool peers;
    int rc;

    if (o->whole) {
        s->relay = calloc(1, sizeof *s->relay);
        if (!s->relay)
            return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    }
    rc = gpu_sum_open(&s->sum, gpus, s->count, o->whole ? NUMOE_GPU_SUM_HOST : o->sum,
                      s->source.shape.hidden * sizeof(float), error);
    if (!rc && s->relay)
        rc = gpu_relay_open(s->relay, gpus, s->count, &s->source, o, error);
    peers = s->relay ? s->relay->passes : s->sum.peers;
    if (!rc && !o->shares)
        rc = gpu_links_measure(gpus, s->count, peers, &s->links, &peer_error, error);
    else if (!rc && chosen && peers &&
             gpu_links_measure(gpus, s->count, true, &s->links, &peer_error, &peer_error))
        s->links = (struct gpu_links){0}; /* shares do not go by them: no peers, and no error */
    if (rc)
        return rc;
    return s->relay ? gpu_relay_choose(s->relay, o, &s->links, &peer_error, error)
                    : gpu_sum_choose(&s->sum, &s->links, &peer_error, error);
}

int numoe_gpu_model_create_over(struct numoe_gpu *const *gpus, uint32_t count,
                                const struct numoe_gpu_source *source,
                                const struct numoe_gpu_model_options *options,
                                struct numoe_gpu_model **out, struct numoe_error *error)
{
    const struct numoe_gpu_model_options defaults = {0}, *o = options ? options : &defaults;
    uint32_t weight[NUMOE_GPU_MOST];
    struct numoe_gpu_model *m;
    struct gpu_several *s;
    int rc = 0;

    if (count < 1 || count > NUMOE_GPU_MOST)
        return numoe_error_set(error, -EINVAL, "GPUs", "%u are not 1 to %d", count,
                               (int)NUMOE_GPU_MOST);
    if ((unsigned)o->sum > NUMOE_GPU_SUM_NCCL)
        return numoe_error_set(error, -EINVAL, "sum", "%d is no way to sum", (int)o->sum);
    if ((unsigned)o->whole > NUMOE_GPU_WHOLE_PEERS)
        return numoe_error_set(error, -EINVAL, "whole", "%d is no way to have whole experts",
                               (int)o->whole);
    if (count == 1)
        return numoe_gpu_model_create(gpus[0], source, options, out, error);
    m = calloc(1, sizeof *m);
    s = calloc(1, sizeof *s);
    if (!m || !s) {
        free(m);
        free(s);
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    }
    m->several = s;
    m->gpu = gpus[0];
    m->source = *source; /* for its numbers */
    s->source = *source;
    s->count = count;
    if (o->shares)
        memcpy(weight, o->shares, count * sizeof *weight);
    rc = open_ways(s, gpus, o, error);
    if (!rc && !o->shares)
        weigh(s, weight);
    for (uint32_t i = 0; !rc && i < count; i++)
        if (weight[i] < 1 || weight[i] > 64)
            rc = numoe_error_set(error, -EINVAL, "shares", "%u is not 1 to 64", weight[i]);
    if (!rc) {
        rc = divide(s, gpus, weight);
        if (rc)
            numoe_error_set(error, rc, "model", "out of memory");
    }
    if (!rc)
        rc = gpu_enter(gpus[0], error);
    if (!rc) {
        s->pinned.gpu = gpus[0];
        rc = gpu_model_pin(&s->pinned, source, o, error);
    }
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = make_part(s, i, gpus, o, error);
    if (!rc && s->relay)
        rc = gpu_relay_make(s->relay, &s->division, o, error);
    if (rc) {
        gpu_several_free(s);
        free(m);
        return rc;
    }
    if (!s->relay)
        say_division(s, gpus);
    *out = m;
    return 0;
}

/* ---- calls ------------------------------------------------------------------------------------
 */

/* A part of a call: fp32 outputs, to be summed. */
static struct numoe_gpu_call part_of(const struct numoe_gpu_call *call)
{
    struct numoe_gpu_call part = *call;

    part.join = true;
    part.add = false;
    return part;
}

static void list_models(struct gpu_several *s, struct numoe_gpu_model **models)
{
    for (uint32_t i = 0; i < s->count; i++)
        models[i] = s->parts[i].model;
}

void gpu_several_cancel(struct gpu_several *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->parts[i].model)
            numoe_gpu_cancel(s->parts[i].model);
}

/* Each device gets x of some tokens over its link, and of the others from the other devices. Where
 * that fails nothing is queued any more, and all goes over every link. */
static int pass_inputs(struct gpu_several *s, const struct numoe_gpu_call *part, uint64_t tokens,
                       struct numoe_error *error)
{
    const uint64_t each = (tokens + s->count - 1) / s->count;
    struct numoe_gpu_model *models[NUMOE_GPU_MOST];
    struct numoe_error why = NUMOE_ERROR_INIT;
    void *events[NUMOE_GPU_MOST];
    int rc = 0;

    list_models(s, models);
    for (uint32_t i = 0; !rc && i < s->count; i++) {
        const uint64_t begin = i * each < tokens ? i * each : tokens;
        rc = gpu_pass_inputs(models[i], part, begin, begin + each, error);
    }
    for (int stage = 0; !rc && stage < GPU_STAGES; stage++) {
        for (uint32_t i = 0; i < s->count; i++)
            events[i] = models[i]->stage_free[stage];
        rc = gpu_pass_wait(models, events, s->count, NULL, "copying inputs", error);
    }
    if (rc || !gpu_sum_pass_inputs(&s->sum, models, part, each, &why))
        return rc;
    s->way = NUMOE_GPU_SUM_PEER;
    rc = gpu_sum_fall(&s->sum, &s->way, models, &why, error);
    for (uint32_t i = 0; !rc && i < s->count; i++)
        rc = gpu_pass_inputs(models[i], part, 0, tokens, error);
    return rc;
}

/* For one part's staging buffer, while the others' are filled. */
static int await_staging(void *user, void *event, struct numoe_error *error)
{
    const struct gpu_several_part *part = user;
    struct numoe_gpu_model *models[NUMOE_GPU_MOST];
    void *events[NUMOE_GPU_MOST] = {0};
    int rc, entered;

    list_models(part->of, models);
    events[part->index] = event;
    rc =
        gpu_pass_wait(models, events, part->of->count, NULL, "waiting for a staging buffer", error);
    entered = gpu_enter(part->model->gpu, rc ? NULL : error);
    return rc ? rc : entered;
}

int gpu_several_begin(struct gpu_several *s, uint64_t layer, const struct numoe_gpu_call *call,
                      uint64_t first, uint64_t *tokens, struct numoe_error *error)
{
    const struct numoe_gpu_call part = part_of(call);
    uint64_t most = call->tokens - first, row;
    uint32_t agreed = 0;
    bool passes, more;
    int rc = 0;

    if (s->relay)
        return numoe_error_set(error, -ENOTSUP, "model",
                               "has whole experts on %u devices: calls are for its parts "
                               "(numoe_gpu_model_part), or by pieces",
                               s->count);
    if (call->join && call->add)
        return numoe_error_set(error, -EINVAL, "add", "is for who writes out");
    /* all take as many tokens as the one that has the least room */
    for (uint32_t i = 0; agreed < s->count; i = (i + 1) % s->count) {
        struct numoe_gpu_model *m = s->parts[i].model;

        rc = gpu_pass_plan(m, layer, &part, first, most, error);
        if (rc)
            return rc; /* nothing is queued; what was refused may be because of a call that runs */
        agreed = m->pass.tokens == most ? agreed + 1 : 1;
        most = m->pass.tokens;
    }
    for (uint32_t i = 0; !rc && i < s->count; i++)
        rc = gpu_pass_begin(s->parts[i].model, &part, error);
    gpu_pass_x(s->parts[0].model, &part, 0, &row);
    passes = gpu_sum_passes(&s->sum, most * row);
    if (!rc && passes)
        rc = pass_inputs(s, &part, most, error);
    s->way = gpu_sum_way(&s->sum, most * s->source.shape.hidden * sizeof(float));
    for (uint32_t i = 0; !rc && i < s->count; i++) {
        struct numoe_gpu_model *m = s->parts[i].model;

        if (!passes)
            rc = gpu_pass_inputs(m, &part, 0, most, error);
        if (!rc)
            rc = gpu_enter(m->gpu, error);
        /* each link works before the first of them is waited for */
        if (!rc)
            rc = gpu_stream_pump(&m->stream, &more, error);
    }
    if (rc)
        gpu_several_cancel(s);
    else
        *tokens = most;
    return rc;
}

int gpu_several_queue(struct gpu_several *s, const struct numoe_gpu_call *call,
                      struct numoe_error *error)
{
    const struct numoe_gpu_call part = part_of(call);
    int rc = gpu_pass_check(s->parts[0].model, false, error);

    if (rc)
        return rc;
    for (uint32_t i = 0; !rc && i < s->count; i++) {
        struct numoe_gpu_model *m = s->parts[i].model;

        m->stream.await = await_staging;
        m->stream.await_user = &s->parts[i];
        rc = gpu_pass_compute(m, &part, s->way == NUMOE_GPU_SUM_HOST, error);
        m->stream.await = NULL;
    }
    if (rc)
        gpu_several_cancel(s);
    return rc;
}

/* Outputs of the pass from token *at on, summed by devices, round after round. */
static int take_sums(struct gpu_several *s, const struct numoe_gpu_call *call,
                     struct numoe_gpu_model *const *models, uint64_t *at, struct numoe_error *error)
{
    const struct numoe_gpu_model *lead = models[0];
    uint64_t queued = *at;
    struct gpu_round rounds[2];
    void *events[NUMOE_GPU_MOST];
    unsigned slot = 0;
    int rc;

    for (uint32_t i = 0; i < s->count; i++)
        events[i] = models[i]->computed;
    rc = gpu_pass_wait(models, events, s->count, NULL, "computing a layer", error);
    for (unsigned k = 0; !rc && k < 2 && queued < lead->pass.tokens; k++) {
        rounds[k] = gpu_sum_round(&s->sum, lead, queued, k);
        queued += rounds[k].tokens;
        rc = gpu_sum_queue(&s->sum, s->way, models, &rounds[k], error);
    }
    for (; !rc && *at < lead->pass.tokens; slot = !slot) {
        struct gpu_round *r = &rounds[slot];

        rc = gpu_sum_await(&s->sum, s->way, models, r, error);
        for (uint32_t i = 0; !rc && i < s->count; i++) {
            const uint64_t begin = gpu_round_begin(r, i), end = gpu_round_begin(r, i + 1);
            const uint8_t *rows = models[i]->host + slot * models[i]->stage_bytes;

            if (begin < end)
                gpu_take_outputs(lead, call, r->at + begin, end - begin, &rows, 1, true);
        }
        if (rc)
            break;
        *at += r->tokens;
        if (queued < lead->pass.tokens) {
            *r = gpu_sum_round(&s->sum, lead, queued, slot);
            queued += r->tokens;
            rc = gpu_sum_queue(&s->sum, s->way, models, r, error);
        }
    }
    return rc;
}

/* Outputs of the pass from token *at on, summed by the host. */
static int take_parts(struct gpu_several *s, const struct numoe_gpu_call *call,
                      struct numoe_gpu_model *const *models, uint64_t *at,
                      struct numoe_error *error)
{
    const struct numoe_gpu_call part = part_of(call);
    const uint8_t *rows[NUMOE_GPU_MOST];
    void *events[NUMOE_GPU_MOST];
    uint64_t count = 0;
    int rc = 0;

    while (!rc && *at < models[0]->pass.tokens) {
        for (uint32_t i = 0; i < s->count; i++)
            events[i] = gpu_pass_rows(models[i], *at, &count, &rows[i]);
        rc = gpu_pass_wait(models, events, s->count, NULL, "computing a layer", error);
        if (rc)
            break;
        gpu_take_outputs(models[0], call, *at, count, rows, s->count, true);
        *at += count;
        for (uint32_t i = 0; !rc && i < s->count; i++)
            rc = gpu_pass_more(models[i], &part, error);
    }
    return rc;
}

int gpu_several_finish(struct gpu_several *s, const struct numoe_gpu_call *call, uint64_t *done,
                       struct numoe_error *error)
{
    const struct numoe_gpu_call part = part_of(call);
    struct numoe_gpu_model *models[NUMOE_GPU_MOST];
    bool fell = false;
    uint64_t at = 0;
    int rc = 0;

    *done = 0;
    list_models(s, models);
    rc = gpu_pass_check(models[0], true, error);
    if (rc)
        return rc;
    while (!rc && s->way != NUMOE_GPU_SUM_HOST && at < models[0]->pass.tokens) {
        struct numoe_error why = NUMOE_ERROR_INIT;

        if (take_sums(s, call, models, &at, &why)) {
            fell = true;
            rc = gpu_sum_fall(&s->sum, &s->way, models, &why, error);
        }
    }
    for (uint32_t i = 0; !rc && fell && s->way == NUMOE_GPU_SUM_HOST && i < s->count; i++)
        rc = gpu_pass_outputs(models[i], &part, at, error);
    if (!rc)
        rc = take_parts(s, call, models, &at, error);
    *done = at;
    for (uint32_t i = 0; i < s->count; i++)
        gpu_pass_end(models[i], at, rc);
    return rc;
}

/* ---- what is told -----------------------------------------------------------------------------
 */

void gpu_several_held(const struct gpu_several *s, uint64_t layer, uint8_t *held)
{
    const uint64_t experts = s->source.experts;

    memset(held, 1, experts);
    for (uint32_t i = 0; i < s->count; i++) {
        const struct gpu_several_part *part = &s->parts[i];
        for (uint64_t e = 0; e < experts; e++)
            if (has(part, layer, e) && !gpu_stream_has(&part->model->stream, layer, (uint32_t)e))
                held[e] = 0;
    }
    for (uint64_t e = 0; e < experts; e++) {
        bool any = false;
        for (uint32_t i = 0; !any && i < s->count; i++)
            any = has(&s->parts[i], layer, e);
        held[e] = held[e] && any;
    }
}

void gpu_several_report(const struct gpu_several *s, struct numoe_gpu_report *report)
{
    struct numoe_gpu_report part;

    numoe_gpu_model_report(s->parts[0].model, report);
    gpu_sum_report(&s->sum, report);
    if (s->relay)
        gpu_relay_report(s->relay, report);
    for (uint32_t i = 1; i < s->count; i++) {
        numoe_gpu_model_report(s->parts[i].model, &part);
        report->resident = report->resident && part.resident;
        report->expert_bytes =
            part.expert_bytes > report->expert_bytes ? part.expert_bytes : report->expert_bytes;
        report->device_bytes += part.device_bytes;
        report->cells += part.cells;
        report->experts += part.experts;
        report->window_bytes += part.window_bytes;
        report->ring_bytes += part.ring_bytes;
        report->ring_checked += part.ring_checked;
        report->ring_placed += part.ring_placed;
        report->copied_bytes += part.copied_bytes;
        report->copied_experts += part.copied_experts;
        report->passed_bytes += part.passed_bytes;
        report->passed_experts += part.passed_experts;
        report->found += part.found;
        report->pieces += part.pieces;
        report->batches += part.batches;
    }
}

enum numoe_gpu_sum numoe_gpu_model_sums(const struct numoe_gpu_model *m, uint32_t i,
                                        uint64_t *peer_bytes, uint64_t *summed_tokens)
{
    *peer_bytes = *summed_tokens = 0;
    return m->several ? gpu_sum_of(&m->several->sum, i, peer_bytes, summed_tokens)
                      : NUMOE_GPU_SUM_AUTO;
}
