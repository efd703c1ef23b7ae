/*
 * Memory to pass experts on through, and whether that pays.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_peers.h"
#include "gpu_relay.h"

/* Of what models may take of a device, the part for what is passed on to it: 1 / so much. */
enum { MEMORY_PART = 4 };

/* Why nothing is passed: the first reason is the one. */
static void note(struct gpu_relay *r, const struct numoe_error *why)
{
    if (atomic_load_explicit(&r->noted, memory_order_relaxed))
        return;
    snprintf(r->note, sizeof r->note, "%.48s: %.160s", why->where, why->message);
    atomic_store_explicit(&r->noted, 1, memory_order_release); /* gpu_relay_report */
}

static int health(const struct gpu_relay *r, struct numoe_error *error)
{
    int rc = 0;

    for (uint32_t i = 0; !rc && i < r->count; i++)
        rc = numoe_gpu_health(r->sides[i].gpu, error);
    return rc;
}

static void free_memory(struct gpu_relay *r)
{
    for (uint32_t i = 0; i < r->count; i++) {
        struct gpu_relay_side *side = &r->sides[i];
        struct numoe_gpu *gpu = side->gpu;

        if (!gpu || !side->memory)
            continue;
        gpu_enter(gpu, NULL);
        gpu_judge(gpu, gpu->ops->release(gpu->device, side->memory), NULL, "freeing experts");
        side->memory = NULL;
        side->window.bytes = 0;
    }
}

static int make_memory(struct gpu_relay *r, uint32_t i, const struct numoe_gpu_model_options *o,
                       struct numoe_error *error)
{
    const struct numoe_gpu_source *source = r->source;
    const uint64_t expert = source->slices * source->shape.bytes;
    const uint64_t wish = o->window_bytes ? o->window_bytes : source->experts * expert;
    struct gpu_relay_side *side = &r->sides[i];
    struct numoe_gpu *gpu = side->gpu;
    uint64_t budget, keep_free, bytes;
    uint32_t sharers = 0;
    int rc = gpu_enter(gpu, error);

    for (uint32_t k = i; k < r->count; k++)
        sharers += r->sides[k].gpu->properties.index == gpu->properties.index;
    if (!rc)
        rc = gpu_model_budget(gpu, o, sharers, &budget, &keep_free, error);
    if (rc)
        return rc;
    bytes = wish > 2 * expert ? wish : 2 * expert;
    bytes = (bytes < budget / MEMORY_PART ? bytes : budget / MEMORY_PART) / 64 * 64;
    if (bytes < 2 * expert)
        return numoe_error_set(error, -ENOMEM, gpu->properties.name,
                               "1/%d of the %llu MiB that may be used has no room for two experts",
                               (int)MEMORY_PART, (unsigned long long)(budget >> 20));
    bytes = bytes / 64 < NUMOE_GPU_ABSENT ? bytes : (NUMOE_GPU_ABSENT - UINT64_C(1)) * 64;
    rc = gpu_judge(gpu, gpu->ops->allocate(gpu->device, bytes, (void **)&side->memory), error,
                   "allocating %llu MiB for experts of other devices",
                   (unsigned long long)(bytes >> 20));
    side->window.bytes = rc ? 0 : bytes;
    return rc;
}

int gpu_relay_open(struct gpu_relay *r, struct numoe_gpu *const *gpus, uint32_t count,
                   const struct numoe_gpu_source *source, const struct numoe_gpu_model_options *o,
                   struct numoe_error *error)
{
    struct numoe_error why = NUMOE_ERROR_INIT;
    uint8_t *memory[NUMOE_GPU_MOST];
    uint64_t half = UINT64_MAX;
    int rc = 0;

    pthread_mutex_init(&r->lock, NULL);
    r->count = count;
    r->source = source;
    r->part_threads = o->part_threads;
    for (uint32_t i = 0; i < count; i++)
        r->sides[i].gpu = gpus[i];
    if (o->whole == NUMOE_GPU_WHOLE_LINKS) {
        numoe_error_set(&why, -ENOTSUP, "links", "every GPU is to copy all over its own link");
        note(r, &why);
        return 0;
    }
    for (uint32_t i = 0; !rc && i < count; i++) {
        rc = make_memory(r, i, o, &why);
        memory[i] = r->sides[i].memory;
        half = r->sides[i].window.bytes / 2 < half ? r->sides[i].window.bytes / 2 : half;
    }
    if (!rc)
        rc = gpu_peers_open(gpus, count, memory, half, &why);
    r->passes = !rc;
    if (rc)
        note(r, &why);
    return health(r, error);
}

int gpu_relay_choose(struct gpu_relay *r, const struct numoe_gpu_model_options *o,
                     const struct gpu_links *links, const struct numoe_error *peer_error,
                     struct numoe_error *error)
{
    struct numoe_error slow = NUMOE_ERROR_INIT;

    if (r->passes) {
        r->peer_gbs = gpu_links_slowest_peer(links, r->count);
        if (o->whole == NUMOE_GPU_WHOLE_AUTO && gpu_links_compare(links, r->count, &slow)) {
            r->passes = false;
            note(r, peer_error->code ? peer_error : &slow);
        }
    }
    if (!r->passes)
        free_memory(r);
    return health(r, error);
}

static int make_side(struct gpu_relay *r, uint32_t i, struct numoe_error *error)
{
    struct gpu_relay_side *side = &r->sides[i];
    const struct gpu_stream *s = &side->model->stream;
    const uint64_t step = gpu_stream_table_step(s), experts = r->source->experts;
    struct numoe_gpu *gpu = side->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = gpu_enter(gpu, error);

    side->need = calloc(experts, sizeof *side->need);
    side->kept = calloc(experts, sizeof *side->kept);
    side->wants = calloc(experts, sizeof *side->wants);
    if (!side->need || !side->kept || !side->wants)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    if (rc || !r->passes)
        return rc;
    rc = gpu_judge(gpu, ops->stream_create(gpu->device, &side->passes), error, "making a stream");
    if (!rc)
        rc = gpu_judge(gpu, ops->allocate(gpu->device, GPU_PIECES * step, (void **)&side->tables),
                       error, "allocating tables of experts");
    if (!rc)
        rc = gpu_judge(
            gpu, ops->host_allocate(gpu->device, GPU_PIECES * step, (void **)&side->host_tables),
            error, "allocating pinned memory for tables");
    for (uint32_t k = 0; !rc && k < GPU_PIECES; k++) {
        struct gpu_piece *p = &side->window.pieces[k];

        p->table = gpu_stream_table(s, side->tables, k);
        p->host_table = gpu_stream_table(s, side->host_tables, k);
        rc = gpu_judge(gpu, ops->event_create(gpu->device, &p->copied), error, "making an event");
        if (!rc)
            rc = gpu_judge(gpu, ops->event_create(gpu->device, &p->used), error, "making an event");
    }
    return rc;
}

int gpu_relay_make(struct gpu_relay *r, const struct gpu_division *division,
                   const struct numoe_gpu_model_options *o, struct numoe_error *error)
{
    const uint64_t experts = r->source->experts;
    struct numoe_error why = NUMOE_ERROR_INIT;
    bool resident = true;
    int rc = 0;

    r->division = division;
    for (uint32_t i = 0; i < r->count; i++)
        resident = resident && gpu_stream_resident(&r->sides[i].model->stream);
    if (r->passes && resident && o->whole == NUMOE_GPU_WHOLE_AUTO) {
        numoe_error_set(&why, -ENOTSUP, "memory",
                        "every GPU has room for all experts, and copies each only once");
        note(r, &why);
        r->passes = false;
        free_memory(r);
    }
    r->need = calloc(experts, sizeof *r->need);
    r->owner = calloc(experts, sizeof *r->owner);
    r->list = calloc(experts, sizeof *r->list);
    r->chunks = calloc(experts * r->source->slices, sizeof *r->chunks);
    if (!r->need || !r->owner || !r->list || !r->chunks)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    for (uint32_t i = 0; !rc && i < r->count; i++) {
        rc = make_side(r, i, error);
        r->sides[i].model->beside_bytes = gpu_relay_bytes(r, i);
    }
    if (rc)
        return rc;
    gpu_tally_set(&r->tally, GPU_RELAYS, r->passes);
    if (r->passes)
        numoe_log_write(&r->sides[0].gpu->log, NUMOE_LOG_INFO,
                        "each expert crosses the link of one of %u GPUs, which pass it on to each "
                        "other (%.1f GB/s)",
                        r->count, r->peer_gbs);
    else
        numoe_log_write(&r->sides[0].gpu->log, NUMOE_LOG_INFO,
                        "each expert crosses the links of all %u GPUs: %s", r->count, r->note);
    return 0;
}

uint64_t gpu_relay_bytes(const struct gpu_relay *r, uint32_t i)
{
    const struct gpu_relay_side *side = &r->sides[i];

    return side->window.bytes +
           (side->tables ? GPU_PIECES * gpu_stream_table_step(&side->model->stream) : 0);
}

void gpu_relay_leave(struct gpu_relay *r, const struct numoe_error *why)
{
    if (!r->passes)
        return;
    r->passes = false;
    note(r, why);
    gpu_tally_set(&r->tally, GPU_RELAYS, 0);
    numoe_log_write(&r->sides[0].gpu->log, NUMOE_LOG_WARNING,
                    "each expert crosses the links of all %u GPUs from now on: %s", r->count,
                    why->message);
}

void gpu_relay_report(const struct gpu_relay *r, struct numoe_gpu_report *report)
{
    report->passes = gpu_tally_get(&r->tally, GPU_RELAYS);
    report->peer_gbs = r->peer_gbs;
    /* pairs with the store in note; C11 has no load of a const atomic */
    if (atomic_load_explicit((atomic_uint *)&r->noted, memory_order_acquire))
        memcpy(report->pass_note, r->note, sizeof report->pass_note);
}

static void close_side(struct gpu_relay *r, uint32_t i)
{
    struct gpu_relay_side *side = &r->sides[i];
    struct numoe_gpu *gpu = side->gpu;
    const struct gpu_ops *ops = gpu->ops;

    gpu_enter(gpu, NULL);
    for (uint32_t k = 0; k < GPU_PIECES; k++) {
        struct gpu_piece *p = &side->window.pieces[k];

        if (p->was_used) /* on a stream of the caller's */
            gpu_judge(gpu, ops->event_sync(gpu->device, p->used), NULL, "the last computation");
        if (p->copied)
            gpu_judge(gpu, ops->event_destroy(gpu->device, p->copied), NULL, "freeing an event");
        if (p->used)
            gpu_judge(gpu, ops->event_destroy(gpu->device, p->used), NULL, "freeing an event");
        free(side->passed[k].copies);
    }
    if (side->tables)
        gpu_judge(gpu, ops->release(gpu->device, side->tables), NULL, "freeing tables");
    if (side->host_tables)
        gpu_judge(gpu, ops->host_release(gpu->device, side->host_tables), NULL, "freeing tables");
    if (side->passes)
        gpu_judge(gpu, ops->stream_destroy(gpu->device, side->passes), NULL, "freeing a stream");
    free(side->need);
    free(side->kept);
    free(side->wants);
}

void gpu_relay_close(struct gpu_relay *r)
{
    for (uint32_t i = 0; i < r->count; i++)
        close_side(r, i);
    free_memory(r);
    if (r->count)
        pthread_mutex_destroy(&r->lock);
    free(r->need);
    free(r->owner);
    free(r->list);
    free(r->chunks);
}
