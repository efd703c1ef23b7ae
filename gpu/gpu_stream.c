/*
 * The copy pipeline. One thread at a time calls; the device works on streams.
 *
 *   copies    weights and tables, and nothing else: a kernel there would wait for a processor
 *             behind a long computation and hold up the link
 *   compute   everything else, or a stream of the caller's
 *
 * A call of a layer is a job: the experts that it needs and that do not stay on the device, in
 * order. They are copied in pieces, each a run of the job's list: of each node one contiguous copy
 * for consecutive experts, so that a piece has at least 4 MiB of every node where there are so many
 * experts, and all of a piece as one batch. A piece is a third of what is left: few
 * launches, and little to compute when the last has arrived. gpu_window.h has the states of a
 * piece; here is what is done between them:
 *
 *   open   choose experts and space; queue on `copies` a wait for `used` of what is reclaimed, and
 *          of cells that are given anew; write the host table once its last copy is past
 *
 *   fill   queue the table's copy and the weights': pinned memory at once, the rest as staging
 *          buffers come free (gpu_stream_pump, or waiting in gpu_stream_next)
 *
 *   queue  record `copied`
 *
 *   take   `on` waits for `copied`; the caller queues its computation
 *
 *   spend  record `used` on `on`; the experts that are to stay are held from now on
 *
 *   drop   instead of take: nobody has computed with it, and what is queued into it is harmless, as
 *          the next filling is behind it on the same stream; its cells are given up
 *
 * Experts that stay have cells (gpu_cache.h). A cell's weights are copied in the piece of the call
 * that missed them. The layer's table of held experts goes to the device only when it has changed,
 * and is written only when `used` of the layer is past, behind which no copy of it can be.
 *
 * One job is taken from, the other is prefetched: pieces of the next layer follow those of this one
 * at once. A job that turns out not to be wanted, or whose weights have changed since, is dropped
 * piece by piece; bytes that are under way by then are lost time, but never wrong.
 *
 * After a failed call (gpu_stream_end with parts that were not done with) the caller's stream is
 * waited for: what was queued may still read.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gpu_stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

/* A piece is at most such a part of the window. */
enum { PARTS_OF_WINDOW = 4 };

/*
 * How many experts a piece has at least, so that those behind it do not pile up. Besides what its
 * experts cost, a piece costs laying x out, sorting all entries and adding to every output. In
 * times of copying an expert let that be f, and computing one k. The last pieces, of n experts
 * each, are computed as fast as they come if n = f + k n; what is left to compute when the last has
 * come is f + k n as well, so fewer experts would not end it sooner. f and k grow with the tokens.
 * As measured on an H200 at 55 GB/s with 24 tokens of an expert for 1024 tokens: elsewhere it is of
 * that order.
 */
static uint64_t least_experts(uint64_t tokens)
{
    const double thousands = (double)tokens / 1024, f = 0.2 + 0.15 * thousands;
    const double k = 0.01 * (thousands < 64 ? thousands : 64);

    return (uint64_t)(f / (1 - k)) + 1;
}

_Static_assert(NUMOE_GPU_ABSENT == NUMOE_CUDA_ABSENT, "one mark of an absent expert");

/* ---- jobs ------------------------------------------------------------------------------------ */

/* The piece is given up before anyone computed with it. */
static void drop_piece(struct gpu_stream *s, struct gpu_piece *p)
{
    struct gpu_job *job = &s->jobs[p->job];

    if (p == s->filling) {
        /* its host table may be on its way: `copied` is what a later use of that waits for */
        if (s->table_sent)
            gpu_judge(s->gpu, s->gpu->ops->event_record(s->gpu->device, p->copied, s->copies), NULL,
                      "marking a piece as given up");
        s->filling = NULL;
        s->batch_count = 0;
        gpu_trace_drop(s->copying);
        s->copying = NULL;
    }
    for (uint32_t i = p->first; i < p->end; i++)
        if (!gpu_cache_holds(&s->cache, job->layer, job->list[i]))
            gpu_cache_drop(&s->cache, job->layer, job->list[i]);
    p->state = GPU_PIECE_SPENT;
}

static void drop_job(struct gpu_stream *s, uint32_t index)
{
    struct gpu_job *job = &s->jobs[index];

    if (job->layer == GPU_NO_LAYER)
        return;
    for (uint32_t i = 0; i < s->window.count; i++) {
        struct gpu_piece *p = gpu_window_piece(&s->window, i);
        if (p->job == index && (p->state == GPU_PIECE_FILLING || p->state == GPU_PIECE_QUEUED))
            drop_piece(s, p);
    }
    for (uint32_t i = job->opened; i < job->count; i++)
        gpu_cache_drop(&s->cache, job->layer, job->list[i]);
    memset(job->listed, 0, s->source->experts * sizeof *job->listed);
    job->layer = GPU_NO_LAYER;
    job->count = job->opened = 0;
}

/* What the device has of a layer is of its weights as they are now, or forgotten. */
static int meet_generation(struct gpu_stream *s, uint64_t layer, struct numoe_error *error)
{
    const struct numoe_gpu_source *source = s->source;
    const uint32_t generation = source->generation(source->user, layer);
    const uint64_t width = 32 * source->shape.hidden_tiles, rows = source->experts * width;
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = 0;

    if (s->seen[layer] && s->generation[layer] == generation)
        return 0;
    if (s->cache.frozen[layer])
        return numoe_error_set(error, -EBUSY, "layer",
                               "weights of layer %llu have changed while it is held for graphs",
                               (unsigned long long)layer);
    for (uint32_t i = 0; i < 2; i++)
        if (s->jobs[i].layer == layer)
            drop_job(s, i);
    gpu_cache_drop_layer(&s->cache, layer);
    s->stale[layer] = true;
    s->seen[layer] = false;
    if (s->host_bias) {
        /* of an earlier generation: still being copied, or read by a computation */
        rc = gpu_judge(gpu, ops->event_sync(gpu->device, s->bias_sent), error, "copying biases");
        if (!rc)
            rc = gpu_judge(gpu, ops->stream_wait(gpu->device, s->copies, s->used[layer]), error,
                           "waiting for a layer");
        for (uint64_t e = 0; !rc && e < source->experts; e++) {
            const float *row = source->bias(source->user, layer, e);
            if (row)
                memcpy(s->host_bias + layer * rows + e * width, row, width * sizeof *row);
        }
        if (!rc)
            rc = gpu_judge(gpu,
                           ops->copy_in(gpu->device, s->copies, s->bias + layer * rows,
                                        s->host_bias + layer * rows, rows * sizeof *s->bias),
                           error, "copying the biases of layer %llu", (unsigned long long)layer);
        if (!rc)
            rc = gpu_judge(gpu, ops->event_record(gpu->device, s->bias_sent, s->copies), error,
                           "marking biases");
    }
    if (rc)
        return rc;
    s->seen[layer] = true;
    s->generation[layer] = generation;
    return 0;
}

/* Add to a job what it lacks of the experts in need. */
static void list_experts(struct gpu_stream *s, struct gpu_job *job, const uint32_t *need)
{
    const struct numoe_gpu_source *source = s->source;

    for (uint32_t e = 0; e < source->experts; e++) {
        uint32_t displaced;
        if (!need[e] || job->listed[e] || gpu_cache_holds(&s->cache, job->layer, e) ||
            !source->present(source->user, job->layer, e))
            continue;
        job->listed[e] = true;
        job->list[job->count++] = e;
        gpu_cache_admit(&s->cache, job->layer, e, need, &displaced);
        if (displaced != GPU_NO_CELL)
            s->stale[job->layer] = true;
    }
}

static void start_job(struct gpu_stream *s, uint32_t index, uint64_t layer)
{
    struct gpu_job *job = &s->jobs[index];

    job->layer = layer;
    job->generation = s->generation[layer];
    job->count = job->opened = 0;
    s->jobs_begun++;
}

/* ---- opening a piece ------------------------------------------------------------------------- */

static int add_copy(struct gpu_stream *s, const uint8_t *from, uint64_t to, uint64_t bytes)
{
    struct gpu_copy *last = s->copy_count ? &s->copy[s->copy_count - 1] : NULL;

    if (last && last->from + last->bytes == from && last->to + last->bytes == to) {
        last->bytes += bytes;
        return 0;
    }
    if (s->copy_count == s->copy_room) {
        const uint32_t room = s->copy_room ? 2 * s->copy_room : 64;
        struct gpu_copy *copy = realloc(s->copy, room * sizeof *copy);
        if (!copy)
            return -ENOMEM;
        s->copy = copy;
        s->copy_room = room;
    }
    s->copy[s->copy_count++] = (struct gpu_copy){from, to, bytes};
    return 0;
}

/* The rest of an expert's row of a table, of which `had` slices are somewhere. */
static void fill_row(const struct gpu_stream *s, uint32_t *row, uint64_t had)
{
    while (had < s->source->slices)
        row[had++] = (uint32_t)(s->zero_at / 64);
}

/* How many slices an expert has here. */
static uint64_t count_slices(const struct gpu_stream *s, uint64_t layer, uint64_t e)
{
    const struct numoe_gpu_source *source = s->source;
    const uint8_t *address;
    uint64_t count = 0;

    for (uint32_t r = 0; r < source->region_count; r++)
        count += source->place(source->user, layer, e, r, &address);
    return count;
}

/* Copies and places of the experts [first, end) of a list, from `to` on, region after region: each
 * gives consecutive experts as one range. */
static int lay_out_run(struct gpu_stream *s, const struct gpu_job *job, uint32_t first,
                       uint32_t end, uint64_t to, uint32_t *table)
{
    const struct numoe_gpu_source *source = s->source;
    const uint64_t units = source->shape.bytes / 64;
    int rc = 0;

    for (uint32_t i = first; i < end; i++)
        s->slices_had[job->list[i]] = 0;
    for (uint32_t r = 0; !rc && r < source->region_count; r++)
        for (uint32_t i = first; !rc && i < end; i++) {
            const uint32_t e = job->list[i];
            const uint8_t *from;
            const uint64_t count = source->place(source->user, job->layer, e, r, &from);
            uint32_t *at = table + (uint64_t)e * source->slices + s->slices_had[e];
            if (!count)
                continue;
            s->slices_had[e] += (uint32_t)count;
            for (uint64_t k = 0; k < count; k++)
                at[k] = (uint32_t)(to / 64 + k * units);
            rc = add_copy(s, from, to, count * source->shape.bytes);
            to += count * source->shape.bytes;
        }
    for (uint32_t i = first; s->uneven && i < end; i++)
        fill_row(s, table + (uint64_t)job->list[i] * source->slices, s->slices_had[job->list[i]]);
    return rc;
}

/* How many experts the next piece has, and how many bytes of the window it takes. */
static uint32_t size_piece(const struct gpu_stream *s, const struct gpu_job *job, uint64_t *bytes)
{
    const uint64_t left = job->count - job->opened, most = s->window.bytes / PARTS_OF_WINDOW;
    const uint64_t least =
        (s->source->region_count * s->piece_least + s->cell_bytes - 1) / s->cell_bytes;
    const uint64_t behind = least_experts(s->tokens);
    uint64_t want = (left + 2) / 3;
    uint32_t count = 0;

    want = want < least ? least : want;
    want = want < behind ? behind : want;
    want = want < left ? want : left;
    for (*bytes = 0; count < want; count++) {
        const bool passes = gpu_stream_cell(s, job, job->opened + count) == GPU_NO_CELL;
        if (passes && *bytes && *bytes + s->cell_bytes > most)
            break;
        *bytes += passes ? s->cell_bytes : 0;
    }
    return count;
}

/* Wait, on the copy stream, for the computations that read a cell which is given anew. */
static int await_cells(struct gpu_stream *s, const struct gpu_job *job, uint32_t count,
                       struct numoe_error *error)
{
    uint64_t last = GPU_NO_LAYER;
    int rc = 0;

    for (uint32_t i = job->opened; !rc && i < job->opened + count; i++) {
        const uint32_t cell = gpu_stream_cell(s, job, i);
        if (cell == GPU_NO_CELL)
            continue;
        if (s->cell_user[cell] != GPU_NO_LAYER && s->cell_user[cell] != last) {
            last = s->cell_user[cell];
            rc = gpu_judge(s->gpu,
                           s->gpu->ops->stream_wait(s->gpu->device, s->copies, s->used[last]),
                           error, "waiting for experts of layer %llu", (unsigned long long)last);
        }
    }
    return rc;
}

/* Until the last copy of the piece's host table is past. A host that is so far ahead waits for some
 * pieces more: the others keep the link busy, and to fall asleep and wake up for each is what
 * streaming costs a CPU. */
static int await_table(struct gpu_stream *s, const struct gpu_piece *p, struct numoe_error *error)
{
    const uint32_t later = ((uint32_t)(p - s->window.pieces) + GPU_PIECES / 4) % GPU_PIECES;
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    bool done;
    int rc = gpu_judge(gpu, ops->event_query(gpu->device, p->copied, &done), error,
                       "waiting for a table");

    if (!rc && !done)
        rc = gpu_judge(gpu, ops->event_sync(gpu->device, s->window.pieces[later].copied), error,
                       "waiting for tables");
    return rc ? rc
              : gpu_judge(gpu, ops->event_sync(gpu->device, p->copied), error,
                          "waiting for a table");
}

/* -EAGAIN: no space before older pieces are done with. */
static int open_piece(struct gpu_stream *s, uint32_t index, struct numoe_error *error)
{
    struct gpu_job *job = &s->jobs[index];
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    struct gpu_piece *p;
    uint64_t bytes, to;
    uint32_t reclaim, count = size_piece(s, job, &bytes);
    int rc = gpu_window_room(&s->window, bytes, &reclaim);

    if (rc)
        return rc;
    for (uint32_t i = 0; !rc && i < reclaim; i++) {
        p = gpu_window_piece(&s->window, i);
        if (p->was_used)
            rc = gpu_judge(gpu, ops->stream_wait(gpu->device, s->copies, p->used), error,
                           "waiting for a piece");
    }
    if (!rc)
        rc = await_cells(s, job, count, error);
    if (rc)
        return rc;
    p = gpu_window_open(&s->window, bytes, reclaim);
    p->job = index;
    p->first = job->opened;
    p->end = job->opened += count;
    p->readers = s->in_call ? s->readers : 0;
    s->filling = p;
    s->copy_count = s->copy_at = s->batch_count = 0;
    s->copy_offset = 0;
    s->table_sent = false;
    rc = await_table(s, p, error);
    if (rc)
        goto fail;
    for (uint64_t e = 0; e < s->source->experts; e++)
        p->host_table[e * s->source->slices] = NUMOE_GPU_ABSENT;
    to = s->cache.cells * s->cell_bytes + gpu_window_begin(&s->window, p);
    for (uint32_t i = p->first, end; !rc && i < p->end; i = end) {
        const uint32_t cell = gpu_stream_cell(s, job, i);
        for (end = i + 1; cell == GPU_NO_CELL && end < p->end &&
                          gpu_stream_cell(s, job, end) == cell &&
                          job->list[end] == job->list[end - 1] + 1;)
            end++;
        rc = lay_out_run(s, job, i, end, cell == GPU_NO_CELL ? to : cell * s->cell_bytes,
                         p->host_table);
        to += cell == GPU_NO_CELL ? (end - i) * s->cell_bytes : 0;
    }
    if (rc) {
        numoe_error_set(error, rc, "copies", "out of memory");
        goto fail;
    }
    return 0;
fail:
    drop_piece(s, p);
    return rc;
}

/* ---- filling --------------------------------------------------------------------------------- */

/* As one, where there are several: each copy that is queued by itself leaves the link idle for some
 * 3 us before it. */
static int send_batch(struct gpu_stream *s, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    int rc = 0;

    if (s->batch_count > 1) {
        rc = gpu_judge(gpu,
                       ops->copy_in_many(gpu->device, s->copies, s->batch_to, s->batch_from,
                                         s->batch_bytes, s->batch_count),
                       error, "copying experts");
        gpu_tally_add(&s->tally, GPU_BATCHES, 1);
    } else if (s->batch_count == 1) {
        rc = gpu_judge(gpu,
                       ops->copy_in(gpu->device, s->copies, s->batch_to[0], s->batch_from[0],
                                    s->batch_bytes[0]),
                       error, "copying experts");
    }
    for (uint32_t i = 0; !rc && i < s->batch_count; i++)
        gpu_tally_add(&s->tally, GPU_COPIED_BYTES, s->batch_bytes[i]);
    s->batch_count = 0;
    return rc;
}

/* A stretch that is not pinned, through a staging buffer. *sent is 0 when none is free. */
static int send_staged(struct gpu_stream *s, const uint8_t *from, uint64_t to, uint64_t bytes,
                       bool block, uint64_t *sent, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    uint8_t *buffer;
    int rc;

    *sent = 0;
    if (!s->ring)
        return numoe_error_set(error, -EINVAL, "staging", "memory is not pinned");
    rc = block && s->await ? s->await(s->await_user, gpu_ring_event(s->ring), error) : 0;
    if (!rc)
        rc = gpu_ring_take(s->ring, block, &buffer, error);
    if (rc || !buffer)
        return rc;
    if (bytes > s->ring->buffer_bytes)
        bytes = s->ring->buffer_bytes;
    if (s->source->fill)
        s->source->fill(s->source->user, buffer, from, bytes, s->ring->node);
    else
        memcpy(buffer, from, bytes);
    rc = gpu_judge(gpu, gpu->ops->copy_in(gpu->device, s->copies, s->pool + to, buffer, bytes),
                   error, "copying experts");
    if (!rc)
        rc = gpu_ring_sent(s->ring, s->copies, error);
    if (rc)
        return rc;
    *sent = bytes;
    gpu_tally_add(&s->tally, GPU_COPIED_BYTES, bytes);
    return 0;
}

static int send_table(struct gpu_stream *s, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    struct gpu_piece *p = s->filling;

    s->table_sent = true; /* on its way, whatever becomes of the rest */
    return gpu_judge(
        gpu, gpu->ops->copy_in(gpu->device, s->copies, p->table, p->host_table, s->table_bytes),
        error, "copying a table");
}

/* Queue copies of the piece that is being filled. *stuck: no staging buffer is free. */
static int fill(struct gpu_stream *s, bool block, bool *stuck, struct numoe_error *error)
{
    struct gpu_piece *p = s->filling;
    int rc = 0;

    *stuck = false;
    if (!s->table_sent) {
        s->copied_before = gpu_tally_get(&s->tally, GPU_COPIED_BYTES);
        s->copying =
            gpu_trace_begin(s->trace, NUMOE_GPU_SPAN_COPY, s->jobs[p->job].layer, s->copies);
        rc = send_table(s, error);
    }
    while (!rc && s->copy_at < s->copy_count) {
        const struct gpu_copy *c = &s->copy[s->copy_at];
        uint64_t bytes = c->bytes - s->copy_offset, to = c->to + s->copy_offset;
        const uint8_t *from = c->from + s->copy_offset;
        bool is_pinned;

        bytes = gpu_pinned_reach(s->pinned, from, bytes, &is_pinned);
        if (is_pinned) {
            s->batch_to[s->batch_count] = s->pool + to;
            s->batch_from[s->batch_count] = from;
            s->batch_bytes[s->batch_count++] = bytes;
            if (s->batch_count == GPU_BATCH)
                rc = send_batch(s, error);
        } else {
            rc = send_staged(s, from, to, bytes, block, &bytes, error);
            if (!rc && !bytes) {
                *stuck = true;
                rc = send_batch(s, error);
                break;
            }
        }
        s->copy_offset += bytes;
        if (s->copy_offset == c->bytes) {
            s->copy_at++;
            s->copy_offset = 0;
        }
    }
    if (!rc && !*stuck)
        rc = send_batch(s, error);
    if (!rc && !*stuck)
        rc = gpu_judge(s->gpu, s->gpu->ops->event_record(s->gpu->device, p->copied, s->copies),
                       error, "marking a piece as copied");
    if (rc) {
        drop_piece(s, p);
        return rc;
    }
    if (!*stuck) {
        gpu_trace_end(s->trace, s->copying, s->copies, p->end - p->first,
                      gpu_tally_get(&s->tally, GPU_COPIED_BYTES) - s->copied_before);
        s->copying = NULL;
        p->state = GPU_PIECE_QUEUED;
        gpu_tally_add(&s->tally, GPU_COPIED_EXPERTS, p->end - p->first);
        s->filling = NULL;
    }
    return 0;
}

/* Open and fill pieces of a job as far as space and, unless block, staging go. */
static int advance(struct gpu_stream *s, uint32_t index, bool block, bool *more,
                   struct numoe_error *error)
{
    struct gpu_job *job = &s->jobs[index];
    bool stuck = false;
    int rc = 0;

    while (!rc && !stuck && (s->filling || job->opened < job->count)) {
        if (!s->filling)
            rc = open_piece(s, index, error);
        if (!rc)
            rc = fill(s, block, &stuck, error);
    }
    if (rc == -EAGAIN)
        rc = 0;
    *more = !rc && (s->filling || job->opened < job->count);
    return rc;
}

/* ---- prefetching ----------------------------------------------------------------------------- */

int gpu_stream_prefetch(struct gpu_stream *s, uint64_t layer, const uint32_t *need,
                        struct numoe_error *error)
{
    const uint32_t index = !s->current;
    struct gpu_job *job = &s->jobs[index];
    bool more;
    int rc;

    if (s->in_call || !s->pool)
        return 0;
    rc = meet_generation(s, layer, error);
    if (rc)
        return rc;
    if (job->layer != layer) {
        drop_job(s, index);
        start_job(s, index, layer);
    }
    list_experts(s, job, need ? need : s->everything);
    rc = advance(s, index, false, &more, error);
    if (rc)
        drop_job(s, index);
    return rc;
}

int gpu_stream_pump(struct gpu_stream *s, bool *more, struct numoe_error *error)
{
    const uint32_t index = s->in_call ? s->current : !s->current;
    int rc;

    *more = false;
    if (s->jobs[index].layer == GPU_NO_LAYER)
        return 0;
    rc = advance(s, index, false, more, error);
    /* what waits for space waits for the next call */
    *more = *more && s->filling;
    if (rc && !s->in_call)
        drop_job(s, index);
    return rc;
}

/* ---- calls ----------------------------------------------------------------------------------- */

int gpu_stream_begin(struct gpu_stream *s, uint64_t layer, const uint32_t *need,
                     const uint32_t *asked, uint64_t tokens, struct numoe_error *error)
{
    uint64_t found = 0;
    int rc;

    if (s->in_call)
        return numoe_error_set(error, -EBUSY, "layer", "another call is not over");
    if (!s->pool) {
        rc = gpu_stream_remake(s, error);
        if (rc)
            return rc;
    }
    rc = meet_generation(s, layer, error);
    if (rc)
        return rc;
    if (s->jobs[!s->current].layer == layer) {
        s->current = !s->current;
    } else {
        drop_job(s, !s->current);
        start_job(s, s->current, layer);
    }
    for (uint32_t e = 0; e < s->source->experts; e++)
        found += need[e] && gpu_cache_holds(&s->cache, layer, e);
    gpu_tally_add(&s->tally, GPU_FOUND_EXPERTS, found);
    gpu_cache_heat(&s->cache, layer, asked ? asked : need, tokens);
    list_experts(s, &s->jobs[s->current], need);
    s->need = need;
    s->tokens = tokens ? tokens : s->tokens;
    s->readers = 0;
    s->in_call = true;
    s->kept_given = false;
    return 0;
}

void gpu_stream_lend(struct gpu_stream *s, uint32_t readers)
{
    s->readers = readers;
    for (uint32_t i = 0; i < s->window.count; i++) {
        struct gpu_piece *p = gpu_window_piece(&s->window, i);
        if (p->job == s->current && p->state != GPU_PIECE_SPENT)
            p->readers = readers; /* prefetched */
    }
}

int gpu_stream_lead(struct gpu_stream *s, struct numoe_error *error)
{
    const struct gpu_job *job = &s->jobs[s->current];
    bool stuck = false;
    int rc = 0;

    for (uint32_t i = 0; i < s->window.count; i++)
        if (gpu_window_piece(&s->window, i)->job == s->current &&
            gpu_window_piece(&s->window, i)->state == GPU_PIECE_QUEUED)
            return 0; /* prefetched */
    if (!s->filling && job->opened < job->count)
        rc = open_piece(s, s->current, error);
    if (!rc && s->filling)
        rc = fill(s, false, &stuck, error);
    return rc == -EAGAIN ? 0 : rc;
}

int gpu_stream_mark_used(struct gpu_stream *s, uint64_t layer, void *on, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    /* another stream may have been the last: what was before it, as reading of cells and copies
     * into them, is before it still */
    int rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, on, s->used[layer]), error,
                       "waiting for layer %llu", (unsigned long long)layer);

    return rc ? rc
              : gpu_judge(gpu, gpu->ops->event_record(gpu->device, s->used[layer], on), error,
                          "marking the end of layer %llu", (unsigned long long)layer);
}

/* The table of the experts that stay, on the device as it is now. */
static int send_kept(struct gpu_stream *s, uint64_t layer, void *on, struct numoe_error *error)
{
    const struct numoe_gpu_source *source = s->source;
    const uint64_t units = source->shape.bytes / 64;
    struct numoe_gpu *gpu = s->gpu;
    const struct gpu_ops *ops = gpu->ops;
    uint32_t *table = gpu_stream_table(s, s->host_tables, layer);
    int rc;

    if (!s->stale[layer])
        return 0;
    /* the table's last copy is before the layer's last use */
    rc = gpu_judge(gpu, ops->event_sync(gpu->device, s->used[layer]), error,
                   "waiting for layer %llu", (unsigned long long)layer);
    if (rc)
        return rc;
    for (uint32_t e = 0; e < source->experts; e++) {
        const uint64_t at = s->cache.cell_of[gpu_cache_at(&s->cache, layer, e)] * s->cell_bytes;
        uint32_t *row = table + (uint64_t)e * source->slices;
        row[0] = NUMOE_GPU_ABSENT;
        if (gpu_cache_holds(&s->cache, layer, e))
            for (uint64_t k = 0; k < source->slices; k++)
                row[k] = (uint32_t)(at / 64 + k * units);
        if (s->uneven && gpu_cache_holds(&s->cache, layer, e))
            fill_row(s, row, count_slices(s, layer, e));
    }
    /* a copy would wait, on whichever stream, for all that is queued for the link */
    rc = gpu_judge(
        gpu,
        ops->read_in(gpu->device, on, gpu_stream_table(s, s->tables, layer), table, s->table_bytes),
        error, "copying the table of layer %llu", (unsigned long long)layer);
    if (rc)
        return rc;
    rc = gpu_stream_mark_used(s, layer, on, error); /* this copy, too, is before it then */
    if (rc)
        gpu_still(gpu, on, "the failed call"); /* else the next one would pass it */
    s->stale[layer] = rc != 0;
    return rc;
}

/* Of `on`, if that is the stream of calls on host memory: an engine's may hold several parts at
 * once.
 */
static void mark_computing(struct gpu_stream *s, void *on)
{
    gpu_trace_drop(s->computing);
    s->computing = on == s->compute ? gpu_trace_begin(s->trace, NUMOE_GPU_SPAN_COMPUTE,
                                                      s->jobs[s->current].layer, on)
                                    : NULL;
}

/* Experts of the part that are asked for. */
static uint64_t count_computed(const struct gpu_stream *s, const struct gpu_piece *p)
{
    const struct gpu_job *job = &s->jobs[s->current];
    uint64_t count = 0;

    for (uint32_t i = p ? p->first : 0; p && i < p->end; i++)
        count += s->need[job->list[i]] != 0;
    for (uint32_t e = 0; !p && e < s->source->experts; e++)
        count += s->need[e] && gpu_cache_holds(&s->cache, job->layer, e);
    return count;
}

static int give_kept(struct gpu_stream *s, const struct gpu_job *job, void *on,
                     struct gpu_part *part, struct numoe_error *error)
{
    struct numoe_gpu *gpu = s->gpu;
    int rc;

    /* another stream may have computed with the layer last, and waited for its weights */
    rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, on, s->used[job->layer]), error,
                   "waiting for layer %llu", (unsigned long long)job->layer);
    if (!rc)
        rc = send_kept(s, job->layer, on, error);
    if (rc)
        return rc;
    part->slice_at = gpu_stream_table(s, s->tables, job->layer);
    s->kept_open = true;
    mark_computing(s, on);
    return 0;
}

static bool wanted(const struct gpu_stream *s, const struct gpu_piece *p)
{
    const struct gpu_job *job = &s->jobs[p->job];

    for (uint32_t i = p->first; i < p->end; i++)
        if (s->need[job->list[i]])
            return true;
    return false;
}

/* The oldest piece of the current job that is not taken, once it is queued; NULL: none is open. */
static int next_piece(struct gpu_stream *s, struct gpu_piece **out, struct numoe_error *error)
{
    bool stuck;

    *out = NULL;
    for (uint32_t i = 0; i < s->window.count; i++) {
        struct gpu_piece *p = gpu_window_piece(&s->window, i);
        if (p->job != s->current || (p->state != GPU_PIECE_QUEUED && p->state != GPU_PIECE_FILLING))
            continue;
        if (p->state == GPU_PIECE_FILLING) {
            const int rc = fill(s, true, &stuck, error);
            if (rc)
                return rc;
        }
        if (!wanted(s, p)) {
            drop_piece(s, p);
            continue;
        }
        *out = p;
        return 0;
    }
    return 0;
}

/* Experts that are needed stay; or come. */
static bool any_kept(const struct gpu_stream *s)
{
    bool any = false;

    for (uint32_t e = 0; !any && e < s->source->experts; e++)
        any = s->need[e] && gpu_cache_holds(&s->cache, s->jobs[s->current].layer, e);
    return any;
}

static bool any_comes(const struct gpu_stream *s)
{
    const struct gpu_job *job = &s->jobs[s->current];
    bool any = false;

    for (uint32_t i = 0; !any && i < job->count; i++)
        any = s->need[job->list[i]];
    return any;
}

/* The same, with as many opened as there is space for. *full: one is left, and there is none. */
static int find_piece(struct gpu_stream *s, struct gpu_piece **p, bool *full,
                      struct numoe_error *error)
{
    const struct gpu_job *job = &s->jobs[s->current];
    bool more, block = false;

    for (*full = false;; block = true) {
        const uint32_t opened = job->opened;
        int rc = advance(s, s->current, block, &more, error);

        *p = NULL;
        if (!rc && block && job->opened == opened) {
            *full = true;
            return 0;
        }
        if (!rc)
            rc = next_piece(s, p, error);
        if (rc || *p || job->opened == job->count)
            return rc;
    }
}

int gpu_stream_next(struct gpu_stream *s, void *on, struct gpu_part *part,
                    struct numoe_error *error)
{
    const uint64_t width = 32 * s->source->shape.hidden_tiles;
    struct gpu_job *job = &s->jobs[s->current];
    struct numoe_gpu *gpu = s->gpu;
    struct gpu_piece *p;
    bool full;
    int rc = 0;

    *part = (struct gpu_part){.weights = s->pool};
    if (s->bias) {
        part->down_bias = s->bias + job->layer * s->source->experts * width;
        if (!s->kept_given)
            rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, on, s->bias_sent), error,
                           "waiting for biases");
        if (rc)
            return rc;
    }
    if (!s->kept_given) {
        s->kept_given = true;
        if (any_kept(s) || !any_comes(s))
            return give_kept(s, job, on, part, error);
    }
    rc = find_piece(s, &p, &full, error);
    if (!rc && full)
        rc = numoe_error_set(error, -EAGAIN, "window", "pieces that are taken fill all of it");
    if (rc || !p)
        return rc;
    rc = gpu_judge(gpu, gpu->ops->stream_wait(gpu->device, on, p->copied), error,
                   "waiting for layer %llu", (unsigned long long)job->layer);
    if (rc)
        return rc;
    mark_computing(s, on);
    p->state = GPU_PIECE_TAKEN;
    gpu_tally_add(&s->tally, GPU_PIECES_TAKEN, 1);
    part->piece = p;
    part->slice_at = p->table;
    return 0;
}

int gpu_stream_look(struct gpu_stream *s, enum gpu_stream_ahead *ahead, struct numoe_error *error)
{
    bool full, here = true;
    struct gpu_piece *p;
    int rc = find_piece(s, &p, &full, error);

    const uint64_t layer = s->jobs[s->current].layer;
    const bool kept = !s->kept_given && any_kept(s);
    void *const event = kept ? s->stale[layer] ? s->used[layer] : NULL : p ? p->copied : NULL;

    if (!rc && event)
        rc = gpu_judge(s->gpu, s->gpu->ops->event_query(s->gpu->device, event, &here), error,
                       "waiting for layer %llu", (unsigned long long)layer);
    if (kept) {
        *ahead = here ? GPU_PART_HERE : GPU_PART_COMES;
        return rc;
    }
    *ahead = full ? GPU_PART_FULL : !p ? GPU_PART_NONE : here ? GPU_PART_HERE : GPU_PART_COMES;
    return rc;
}

int gpu_stream_refuse(struct numoe_error *error)
{
    return numoe_error_set(error, -EINVAL, "piece", "is not taken, or was given up since");
}

int gpu_stream_done(struct gpu_stream *s, void *on, const struct gpu_part *part,
                    struct numoe_error *error)
{
    const struct gpu_job *job = &s->jobs[s->current];
    struct gpu_piece *p = part->piece;
    struct numoe_gpu *gpu = s->gpu;
    bool cells = !p;
    int rc = 0;

    if (!s->in_call || (p ? p->job != s->current || p->state != GPU_PIECE_TAKEN : !s->kept_open))
        return gpu_stream_refuse(error);
    if (s->computing && on == s->compute) {
        gpu_trace_end(s->trace, s->computing, on, count_computed(s, p), 0);
        s->computing = NULL;
    }
    for (uint32_t i = p ? p->first : 0; p && !cells && i < p->end; i++)
        cells = gpu_stream_cell(s, job, i) != GPU_NO_CELL;
    if (cells || s->bias)
        rc = gpu_stream_mark_used(s, job->layer, on, error);
    if (!rc && p)
        rc = gpu_judge(gpu, gpu->ops->event_record(gpu->device, p->used, on), error,
                       "marking the end of a piece");
    if (!rc && !p)
        s->kept_open = false;
    if (rc || !p)
        return rc;
    p->state = GPU_PIECE_SPENT;
    p->was_used = true;
    for (uint32_t i = p->first; cells && i < p->end; i++) {
        const uint32_t cell = gpu_stream_cell(s, job, i);
        if (cell == GPU_NO_CELL)
            continue;
        s->cell_user[cell] = job->layer;
        gpu_cache_settle(&s->cache, job->layer, job->list[i]);
        s->stale[job->layer] = true;
    }
    return 0;
}

void gpu_stream_settle(struct gpu_stream *s, void *on)
{
    struct numoe_gpu *gpu = s->gpu;
    bool waited = s->kept_open;

    /* no event stands behind what reads the cells, which may be given to others from now on */
    if (s->kept_open)
        gpu_still(gpu, on, "the failed call");
    s->kept_open = false;
    for (uint32_t i = 0; i < s->window.count; i++) {
        struct gpu_piece *p = gpu_window_piece(&s->window, i);
        if (p->job != s->current || p->state != GPU_PIECE_TAKEN)
            continue;
        if (!waited)
            gpu_still(gpu, on, "the failed call");
        waited = true;
        drop_piece(s, p);
    }
    gpu_trace_drop(s->computing);
    s->computing = NULL;
}

void gpu_stream_end(struct gpu_stream *s, void *on)
{
    if (!s->in_call)
        return;
    gpu_stream_settle(s, on);
    drop_job(s, s->current);
    for (uint32_t i = 0; i < s->window.count; i++)
        gpu_window_piece(&s->window, i)->readers = 0;
    s->in_call = false;
    s->need = NULL;
}

void gpu_stream_forget(struct gpu_stream *s)
{
    for (uint32_t i = 0; i < 2; i++)
        drop_job(s, i);
    for (uint64_t l = 0; l < s->source->layers; l++) {
        if (s->cache.frozen[l])
            continue;
        gpu_cache_drop_layer(&s->cache, l);
        s->stale[l] = true;
    }
}

int gpu_stream_hold(struct gpu_stream *s, uint64_t layer, const uint32_t *need,
                    struct numoe_error *error)
{
    const struct numoe_gpu_source *source = s->source;
    uint32_t count = 0;
    int rc = 0;

    if (s->in_call || s->cache.frozen[layer])
        return numoe_error_set(error, -EBUSY, "layer",
                               s->in_call ? "another call is not over" : "is held already");
    if (!s->pool)
        rc = gpu_stream_remake(s, error);
    if (!rc)
        rc = meet_generation(s, layer, error);
    if (rc)
        return rc;
    for (uint32_t e = 0; e < source->experts; e++)
        count += need[e] && source->present(source->user, layer, e);
    if (count > s->cache.limit[layer])
        return numoe_error_set(error, -ENOMEM, "experts",
                               "%u of layer %llu are to be held, and there is room for %u", count,
                               (unsigned long long)layer, s->cache.limit[layer]);
    /* what was prefetched without a cell would not stay */
    for (uint32_t i = 0; i < 2; i++)
        if (s->jobs[i].layer == layer)
            drop_job(s, i);
    for (uint32_t e = 0; e < source->experts; e++)
        if (!need[e])
            gpu_cache_drop(&s->cache, layer, e);
    s->stale[layer] = true;
    rc = gpu_stream_visit(s, layer, need, error);
    if (!rc)
        rc = send_kept(s, layer, s->compute, error);
    if (!rc)
        rc = gpu_judge(s->gpu, s->gpu->ops->stream_sync(s->gpu->device, s->compute), error,
                       "holding layer %llu", (unsigned long long)layer);
    s->cache.frozen[layer] = !rc;
    return rc;
}

void gpu_stream_loose(struct gpu_stream *s, uint64_t layer)
{
    s->cache.frozen[layer] = false;
}

struct gpu_part gpu_stream_held(const struct gpu_stream *s, uint64_t layer)
{
    const uint64_t width = 32 * s->source->shape.hidden_tiles;

    return (struct gpu_part){
        .weights = s->pool,
        .slice_at = gpu_stream_table(s, s->tables, layer),
        .down_bias = s->bias ? s->bias + layer * s->source->experts * width : NULL,
    };
}
