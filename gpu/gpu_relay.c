/*
 * Passing experts on: for all devices together; each device works by itself.
 *
 * Any number of threads call. relay->lock protects everything of a call: all of struct gpu_relay
 * but `users`, what gpu_relay_open to gpu_relay_make set and what is for reports, and of each
 * device's model the stream (struct gpu_stream), its cells, window and jobs, with every call of the
 * device's that is made for it. gpu_engine.c takes the lock (gpu_relay_lock) around each function
 * that it has for pieces, so it is held wherever this file is entered. The wait for pieces, in
 * gpu_relay_next, gives it up: others take pieces, are done with them, or end the call meanwhile.
 * With the lock held nobody waits for what a consumer computes, but at the end of a call that has
 * failed. Behind a wait nothing that was seen before holds any more but `device`; whether it is the
 * same call still is told by `serial`. Nobody is woken: who waits looks again after a nap, so no
 * wake-up is lost. A thread counts as one of `users` from before it takes the lock, as it may wait
 * for that, until it is out; who destroys the models marks them as `closing`, which ends every
 * wait, and waits for the last.
 *
 * A call of a layer is one for all devices. Every expert has an owner among them, which has it from
 * its own cells, or copies it from the host as in any call (gpu_stream.c), unless nobody who needs
 * it lacks it. The others copy it from the owner's memory into a second window of their own, on a
 * stream of its own (`passes`), which runs beside the copies over the link. No device waits for
 * another's event: the host looks, and queues what may follow.
 *
 *   owner's piece               passed piece, in the second window of each other device
 *
 *   queued -------------------> filling  space is reclaimed (`passes` waits for `used`),
 *     |                           |      places are chosen and the table is sent: by a kernel,
 *     |                           |      as a copy waits for all that is queued for the link
 *     | the host sees `copied`    |
 *     +-------------------------> queued copies from the owner are queued, `copied` after them
 *     |                           |
 *     | <------------------------ here   the host sees `copied`: the reader's bit is cleared
 *     |                           |      if this was the last of the owner's piece
 *   taken, spent                  |
 *     | its own `used`, and no    |
 *     | reader's bit is set       taken, spent   as of any window
 *   (reclaimed)
 *
 * So the owner's memory is given on only when its own consumer is through (the stream's wait for
 * `used`) and all copies out of it are past (seen by the host). An owner's piece that is larger
 * than a fourth of the reader's window comes as several. Experts that stay with their owner are
 * passed on from their cells, which no other expert gets while the call lasts; the first copy waits
 * until `used` of the layer is past, behind which no copy into these cells can be.
 *
 * Nobody waits in a circle. A passed piece holds space only of the second window, into which
 * nothing else comes: it is given on as soon as the device's consumer is through with what was
 * passed before, whatever the owner waits for. An owner waits for its own consumer and for readers.
 * So when nothing is on its way, and no device has a piece that is there and was not taken, all
 * that holds anything up is pieces that were taken and are not done with: -EAGAIN.
 *
 * If anything fails the call has failed for all devices; nothing more is queued. The caller ends it
 * for each of them, and the last end waits for all copies from device to device. If it was such a
 * copy that failed, later calls pass nothing.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gpu_relay.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

/* A passed piece is at most such a part of the window. */
enum { PARTS_OF_WINDOW = 4 };
/* The host looks with naps in between, each an eighth of what it has waited so far: a piece that
 * took long to come is then seen a little later, and the CPU is left alone meanwhile. */
enum { NAP_PART = 8, NAP_LEAST_NS = 20000, NAP_MOST_NS = 500000 };

static struct gpu_stream *stream_of(struct gpu_relay *r, uint32_t i)
{
    return &r->sides[i].model->stream;
}

static const struct gpu_job *job_of(struct gpu_relay *r, uint32_t i)
{
    const struct gpu_stream *s = stream_of(r, i);

    return &s->jobs[s->current];
}

static struct gpu_passed *passed_of(struct gpu_relay_side *side, const struct gpu_piece *p)
{
    return &side->passed[p - side->window.pieces];
}

/* Device i gets the expert from its owner, device j. */
static bool comes_from(const struct gpu_relay *r, uint32_t i, uint32_t j, uint32_t e)
{
    return r->sides[i].wants[e] && r->owner[e] == j && !r->sides[i].need[e];
}

/* ---- opening a passed piece ------------------------------------------------------------------ */

static int by_place(const void *a, const void *b)
{
    const struct gpu_stretch *x = a, *y = b;

    return x->place < y->place ? -1 : x->place > y->place;
}

/* Where the owner has slice k of an expert. */
static uint32_t place_of(const struct gpu_stream *s, const struct gpu_piece *source, uint64_t layer,
                         uint32_t e, uint64_t k)
{
    const uint64_t units = s->source->shape.bytes / 64;
    const uint64_t at = gpu_cache_at(&s->cache, layer, e);

    return source ? source->host_table[(uint64_t)e * s->source->slices + k]
                  : (uint32_t)(s->cache.cell_of[at] * s->cell_bytes / 64 + k * units);
}

static int add_copy(struct gpu_passed *x, uint64_t from, uint64_t to, uint64_t bytes)
{
    struct gpu_relay_copy *last = x->count ? &x->copies[x->count - 1] : NULL;

    if (last && last->from + last->bytes == from && last->to + last->bytes == to) {
        last->bytes += bytes;
        return 0;
    }
    if (x->count == x->room) {
        const uint32_t room = x->room ? 2 * x->room : 16;
        struct gpu_relay_copy *copies = realloc(x->copies, room * sizeof *copies);
        if (!copies)
            return -ENOMEM;
        x->copies = copies;
        x->room = room;
    }
    x->copies[x->count++] = (struct gpu_relay_copy){from, to, bytes};
    return 0;
}

/* Copies and the table of r->list[0 .. count): in the owner's order, so that what is one range
 * there is one copy. */
static int lay_out(struct gpu_relay *r, uint32_t i, struct gpu_piece *p, uint32_t count)
{
    struct gpu_relay_side *side = &r->sides[i];
    struct gpu_passed *x = passed_of(side, p);
    const struct gpu_stream *s = stream_of(r, x->from);
    const uint64_t slices = r->source->slices, bytes = r->source->shape.bytes;
    const uint32_t units = (uint32_t)(bytes / 64);
    uint64_t to = gpu_window_begin(&side->window, p);
    uint32_t chunks = 0;
    int rc = 0;

    for (uint64_t e = 0; e < r->source->experts; e++)
        p->host_table[e * slices] = NUMOE_GPU_ABSENT;
    for (uint32_t l = 0; l < count; l++)
        for (uint32_t k = 0; k < slices; k++) {
            const uint32_t place = place_of(s, x->source, r->layer, r->list[l], k);
            struct gpu_stretch *last = k ? &r->chunks[chunks - 1] : NULL;
            if (last && place == last->place + last->slices * units)
                last->slices++;
            else
                r->chunks[chunks++] = (struct gpu_stretch){place, 1, r->list[l], k};
        }
    qsort(r->chunks, chunks, sizeof *r->chunks, by_place);
    for (uint32_t c = 0; !rc && c < chunks; c++) {
        const struct gpu_stretch *chunk = &r->chunks[c];
        uint32_t *row = p->host_table + (uint64_t)chunk->expert * slices + chunk->first;
        for (uint32_t k = 0; k < chunk->slices; k++)
            row[k] = (uint32_t)(to / 64) + k * units;
        rc = add_copy(x, chunk->place * (uint64_t)64, to, chunk->slices * bytes);
        to += chunk->slices * bytes;
    }
    return rc;
}

/* The owner's piece that list[at] of its job is in, once its copies are queued; NULL. */
static struct gpu_piece *piece_at(struct gpu_relay *r, uint32_t i, uint32_t j, uint32_t at)
{
    struct gpu_window *w = &stream_of(r, j)->window;

    for (uint32_t k = 0; k < w->count; k++) {
        struct gpu_piece *p = gpu_window_piece(w, k);
        if (p->readers >> i & 1 && p->state != GPU_PIECE_FILLING && p->first <= at && at < p->end)
            return p;
    }
    return NULL;
}

/* What device i gets next from device j, to r->list, at most so many. */
static uint32_t choose(struct gpu_relay *r, uint32_t i, uint32_t j, uint32_t most, uint32_t *kept,
                       uint32_t *listed, struct gpu_piece **source)
{
    const struct gpu_job *job = job_of(r, j);
    struct gpu_relay_side *side = &r->sides[i];
    const uint32_t experts = (uint32_t)r->source->experts;
    uint32_t count = 0;

    *source = NULL;
    for (*kept = side->kept_at[j]; *kept < experts && count < most; ++*kept)
        if (r->sides[j].kept[*kept] && comes_from(r, i, j, *kept))
            r->list[count++] = *kept;
    *listed = side->list_at[j];
    if (count)
        return count;
    side->kept_at[j] = *kept;
    while (*listed < job->count && !comes_from(r, i, j, job->list[*listed]))
        ++*listed;
    side->list_at[j] = *listed;
    *source = *listed < job->count ? piece_at(r, i, j, *listed) : NULL;
    for (; *source && *listed < (*source)->end && count < most; ++*listed)
        if (comes_from(r, i, j, job->list[*listed]))
            r->list[count++] = job->list[*listed];
    return count;
}

/* Open a piece for what device j has for device i. *opened: there was something, and space. */
static int open_passed(struct gpu_relay *r, uint32_t i, uint32_t j, bool *opened,
                       struct numoe_error *error)
{
    struct gpu_relay_side *side = &r->sides[i];
    const struct gpu_stream *s = &side->model->stream;
    const uint64_t most = side->window.bytes / PARTS_OF_WINDOW / s->cell_bytes;
    const struct gpu_ops *ops = side->gpu->ops;
    struct gpu_piece *source, *p;
    uint32_t kept, listed, reclaim;
    const uint32_t count = choose(r, i, j, most ? (uint32_t)most : 1, &kept, &listed, &source);
    int rc;

    *opened = false;
    if (!count || gpu_window_room(&side->window, count * s->cell_bytes, &reclaim))
        return 0;
    rc = gpu_enter(side->gpu, error);
    for (uint32_t k = 0; !rc && k < reclaim; k++) {
        p = gpu_window_piece(&side->window, k);
        if (p->was_used)
            rc = gpu_judge(side->gpu, ops->stream_wait(side->gpu->device, side->passes, p->used),
                           error, "waiting for a piece");
    }
    if (rc)
        return rc;
    p = gpu_window_open(&side->window, count * s->cell_bytes, reclaim);
    *passed_of(side, p) = (struct gpu_passed){.from = j,
                                              .source = source,
                                              .experts = count,
                                              .copies = passed_of(side, p)->copies,
                                              .room = passed_of(side, p)->room};
    side->kept_at[j] = kept;
    side->list_at[j] = listed;
    *opened = true;
    if (lay_out(r, i, p, count))
        return numoe_error_set(error, -ENOMEM, "copies", "out of memory");
    return gpu_judge(
        side->gpu,
        ops->read_in(side->gpu->device, side->passes, p->table, p->host_table, s->table_bytes),
        error, "copying a table");
}

/* ---- passing on ------------------------------------------------------------------------------ */

/* Whether the host sees that what is to be passed on is there. */
static int is_past(struct gpu_relay *r, const struct gpu_passed *x, bool *past,
                   struct numoe_error *error)
{
    struct gpu_relay_side *from = &r->sides[x->from];
    struct gpu_stream *s = stream_of(r, x->from);
    void *event = x->source ? x->source->copied : s->used[r->layer];
    int rc = 0;

    *past = !x->source && from->kept_past;
    if (!*past)
        rc = gpu_judge(from->gpu, from->gpu->ops->event_query(from->gpu->device, event, past),
                       error, "waiting for layer %llu", (unsigned long long)r->layer);
    if (!x->source)
        from->kept_past = !rc && *past;
    return rc;
}

static int send_passed(struct gpu_relay *r, uint32_t i, struct gpu_piece *p,
                       struct numoe_error *error)
{
    struct gpu_relay_side *side = &r->sides[i];
    struct gpu_passed *x = passed_of(side, p);
    const struct gpu_relay_side *from = &r->sides[x->from];
    struct gpu_trace *trace = side->model->stream.trace;
    const struct gpu_ops *ops = side->gpu->ops;
    struct gpu_mark *mark;
    uint64_t bytes = 0;
    int rc = gpu_enter(side->gpu, error);

    mark = rc ? NULL : gpu_trace_begin(trace, NUMOE_GPU_SPAN_PASS, r->layer, side->passes);
    for (uint32_t k = 0; !rc && k < x->count; k++) {
        const struct gpu_relay_copy *c = &x->copies[k];
        struct numoe_error why = NUMOE_ERROR_INIT;

        rc = gpu_judge(side->gpu,
                       ops->copy_peer(side->gpu->device, side->passes, side->memory + c->to,
                                      from->gpu->device, from->model->stream.pool + c->from,
                                      c->bytes),
                       &why, "copying experts from GPU %u", from->gpu->properties.index);
        bytes += c->bytes;
        if (rc)
            gpu_relay_leave(r, &why);
        if (rc && error)
            *error = why;
    }
    if (!rc)
        rc = gpu_judge(side->gpu, ops->event_record(side->gpu->device, p->copied, side->passes),
                       error, "marking a piece as copied");
    if (rc) {
        gpu_trace_drop(mark);
        return rc;
    }
    gpu_trace_end(trace, mark, side->passes, x->experts, bytes);
    p->state = GPU_PIECE_QUEUED;
    gpu_tally_add(&side->model->stream.tally, GPU_PASSED_BYTES, bytes);
    gpu_tally_add(&side->model->stream.tally, GPU_PASSED_EXPERTS, x->experts);
    return 0;
}

/* Whoever has had all it needs of an owner's pieces does not read them any more. Returns whether
 * that is news of any. */
static bool clear_readers(struct gpu_relay *r, uint32_t i, uint32_t j)
{
    struct gpu_relay_side *side = &r->sides[i];
    struct gpu_window *w = &stream_of(r, j)->window;
    const uint32_t bit = UINT32_C(1) << i;
    bool any = false;

    for (uint32_t k = 0; k < w->count; k++) {
        struct gpu_piece *p = gpu_window_piece(w, k);
        bool reads = side->list_at[j] < p->end;

        if (!(p->readers & bit))
            continue;
        for (uint32_t n = 0; !reads && n < side->window.count; n++) {
            const struct gpu_piece *mine = gpu_window_piece(&side->window, n);
            const struct gpu_passed *x = passed_of(side, mine);
            reads = x->source == p && !x->here && mine->state != GPU_PIECE_SPENT;
        }
        if (reads)
            continue;
        p->readers &= ~bit;
        any = true;
    }
    return any;
}

/* Queue for a device what can be, and see what has come. *freed: memory of owners may be given on.
 */
static int pass_on(struct gpu_relay *r, uint32_t i, bool *freed, struct numoe_error *error)
{
    struct gpu_relay_side *side = &r->sides[i];
    bool more = true;
    int rc = 0;

    for (uint32_t k = 0; !rc && k < side->window.count; k++) {
        struct gpu_piece *p = gpu_window_piece(&side->window, k);
        struct gpu_passed *x = passed_of(side, p);

        if (p->state == GPU_PIECE_QUEUED && !x->here)
            rc = gpu_judge(side->gpu,
                           side->gpu->ops->event_query(side->gpu->device, p->copied, &x->here),
                           error, "waiting for experts of another GPU");
    }
    while (!rc && more) {
        more = false;
        for (uint32_t k = 1; !rc && k < r->count; k++) { /* of all in turns */
            bool opened;
            rc = open_passed(r, i, (i + k) % r->count, &opened, error);
            more = more || opened;
        }
    }
    for (uint32_t j = 0; !rc && j < r->count; j++)
        if (j != i)
            *freed = clear_readers(r, i, j) || *freed;
    for (uint32_t k = 0; !rc && k < side->window.count; k++) {
        struct gpu_piece *p = gpu_window_piece(&side->window, k);
        bool past;

        if (p->state != GPU_PIECE_FILLING)
            continue;
        rc = is_past(r, passed_of(side, p), &past, error);
        if (!rc && past)
            rc = send_passed(r, i, p, error);
    }
    return rc;
}

/* What the links bring goes on, whoever asks. */
static int go_on(struct gpu_relay *r, struct numoe_error *error)
{
    bool freed;
    int rc = 0;

    do {
        freed = false;
        for (uint32_t i = 0; !rc && i < r->count; i++) {
            rc = gpu_enter(r->sides[i].gpu, error);
            if (!rc)
                gpu_trace_drain(stream_of(r, i)->trace);
            if (!rc)
                rc = gpu_stream_look(stream_of(r, i), &r->sides[i].ahead, error);
        }
        for (uint32_t i = 0; !rc && r->passes && i < r->count; i++)
            rc = pass_on(r, i, &freed, error);
    } while (!rc && freed);
    return rc;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* The oldest passed piece that is there and not taken; NULL. *comes: another is on its way. */
static struct gpu_piece *piece_here(struct gpu_relay_side *side, bool *comes)
{
    struct gpu_piece *here = NULL;

    for (uint32_t k = 0; k < side->window.count; k++) {
        struct gpu_piece *p = gpu_window_piece(&side->window, k);

        if (p->state == GPU_PIECE_QUEUED && passed_of(side, p)->here)
            here = here ? here : p;
        else
            *comes = *comes || p->state == GPU_PIECE_QUEUED || p->state == GPU_PIECE_FILLING;
    }
    return here;
}

/* Nothing is left to come from device j to device i, or to be opened there. */
static bool had_all(struct gpu_relay *r, uint32_t i, uint32_t j)
{
    uint32_t kept, listed;
    struct gpu_piece *source;

    return choose(r, i, j, 1, &kept, &listed, &source) == 0 &&
           r->sides[i].list_at[j] == job_of(r, j)->count;
}

static bool is_finished(struct gpu_relay *r, uint32_t i)
{
    bool comes = false;
    bool all = r->sides[i].ahead == GPU_PART_NONE && !piece_here(&r->sides[i], &comes) && !comes;

    for (uint32_t j = 0; all && r->passes && j < r->count; j++)
        all = j == i || had_all(r, i, j);
    return all;
}

static int give_passed(struct gpu_relay *r, uint32_t i, struct gpu_piece *p, void *on,
                       struct numoe_gpu_piece *piece, struct numoe_error *error)
{
    const uint64_t width = 32 * r->source->shape.hidden_tiles;
    struct gpu_relay_side *side = &r->sides[i];
    const struct gpu_stream *s = &side->model->stream;
    const struct gpu_ops *ops = side->gpu->ops;
    int rc = gpu_judge(side->gpu, ops->stream_wait(side->gpu->device, on, p->copied), error,
                       "waiting for layer %llu", (unsigned long long)r->layer);

    if (!rc && s->bias)
        rc = gpu_judge(side->gpu, ops->stream_wait(side->gpu->device, on, s->bias_sent), error,
                       "waiting for biases");
    if (rc)
        return rc;
    p->state = GPU_PIECE_TAKEN;
    gpu_tally_add(&side->model->stream.tally, GPU_PIECES_TAKEN, 1);
    *piece = (struct numoe_gpu_piece){
        .weights = side->memory,
        .slice_at = p->table,
        .down_bias = s->bias ? s->bias + r->layer * r->source->experts * width : NULL,
        .handle = p};
    return 0;
}

static int give_own(struct gpu_relay *r, uint32_t i, void *on, struct numoe_gpu_piece *piece,
                    struct numoe_error *error)
{
    struct gpu_part part;
    const int rc = gpu_stream_next(stream_of(r, i), on, &part, error);

    if (!rc)
        *piece = (struct numoe_gpu_piece){.weights = part.weights,
                                          .slice_at = part.slice_at,
                                          .down_bias = part.down_bias,
                                          .handle = part.piece};
    return rc;
}

static void nap(uint64_t waited_ns)
{
    const uint64_t part = waited_ns / NAP_PART;
    const struct timespec t = {.tv_nsec = part < NAP_LEAST_NS  ? NAP_LEAST_NS
                                          : part > NAP_MOST_NS ? NAP_MOST_NS
                                                               : (long)part};

    nanosleep(&t, NULL);
}

void gpu_relay_lock(struct gpu_relay *r)
{
    if (!r)
        return;
    atomic_fetch_add_explicit(&r->users, 1, memory_order_relaxed);
    pthread_mutex_lock(&r->lock);
}

void gpu_relay_unlock(struct gpu_relay *r)
{
    if (!r)
        return;
    pthread_mutex_unlock(&r->lock);
    /* the last that the thread does with it; pairs with the load in gpu_relay_stop */
    atomic_fetch_sub_explicit(&r->users, 1, memory_order_release);
}

/* Others may do anything meanwhile. */
static void nap_unlocked(struct gpu_relay *r, uint64_t waited_ns)
{
    pthread_mutex_unlock(&r->lock);
    nap(waited_ns);
    pthread_mutex_lock(&r->lock);
}

/* Whether a copy for the call is under way on some device, beside those that find_here has seen:
 * own pieces behind one that is there. */
static int is_under_way(struct gpu_relay *r, bool *yes, struct numoe_error *error)
{
    int rc = 0;

    *yes = false;
    for (uint32_t i = 0; !rc && !*yes && i < r->count; i++) {
        struct gpu_stream *s = stream_of(r, i);

        rc = gpu_enter(s->gpu, error);
        for (uint32_t k = 0; !rc && !*yes && k < s->window.count; k++) {
            const struct gpu_piece *p = gpu_window_piece(&s->window, k);
            bool past = true;

            if (p->job == s->current && p->state == GPU_PIECE_QUEUED)
                rc = gpu_judge(s->gpu, s->gpu->ops->event_query(s->gpu->device, p->copied, &past),
                               error, "waiting for layer %llu", (unsigned long long)r->layer);
            *yes = !past;
        }
    }
    return rc;
}

/* The device's consumer has pieces that it is not done with. */
static bool holds_pieces(struct gpu_relay *r, uint32_t i)
{
    struct gpu_stream *s = stream_of(r, i);
    struct gpu_window *mine = &r->sides[i].window;
    bool any = s->kept_open;

    for (uint32_t k = 0; !any && k < s->window.count; k++) {
        const struct gpu_piece *p = gpu_window_piece(&s->window, k);
        any = p->job == s->current && p->state == GPU_PIECE_TAKEN;
    }
    for (uint32_t k = 0; !any && k < mine->count; k++)
        any = gpu_window_piece(mine, k)->state == GPU_PIECE_TAKEN;
    return any;
}

/* Why a call gives nothing more, to who begins to wait and to who has waited. */
static int check_call(const struct gpu_relay *r, uint32_t device, uint64_t serial,
                      struct numoe_error *error)
{
    if (r->closing || !r->running || r->serial != serial)
        return numoe_error_set(error, -ECANCELED, "layer", "the call was ended meanwhile");
    if (device < r->count && r->sides[device].ended)
        return numoe_error_set(error, -ECANCELED, "layer", "has been ended for this device");
    if (r->failed)
        return numoe_error_set(error, -ECANCELED, "layer",
                               "the call has failed or was given up for another device");
    return 0;
}

/* A piece that is there, of one of the devices asked for. *given; or *finished: none comes to any
 * of them; or *comes: to some device. */
static int find_here(struct gpu_relay *r, uint32_t *device, void *const *streams,
                     struct numoe_gpu_piece *piece, bool *given, bool *finished, bool *comes,
                     struct numoe_error *error)
{
    const bool any = *device == NUMOE_GPU_MOST;

    *given = *comes = false;
    *finished = true;
    for (uint32_t k = 0; k < r->count; k++) {
        const uint32_t i = (r->turn + k) % r->count;
        struct gpu_relay_side *side = &r->sides[i];
        struct gpu_piece *p = piece_here(side, comes);
        int rc;

        *comes = *comes || side->ahead == GPU_PART_COMES;
        if (!any && i != *device)
            continue;
        side->finished = is_finished(r, i);
        *finished = *finished && side->finished;
        if (!p && side->ahead != GPU_PART_HERE)
            continue;
        if (side->ahead == GPU_PART_HERE && !stream_of(r, i)->kept_given)
            p = NULL; /* what is on the device anyway is first */
        rc = gpu_enter(side->gpu, error);
        if (!rc)
            rc = p ? give_passed(r, i, p, streams[any ? i : 0], piece, error)
                   : give_own(r, i, streams[any ? i : 0], piece, error);
        *given = !rc;
        *device = i;
        r->turn = (i + 1) % r->count;
        return rc;
    }
    return 0;
}

int gpu_relay_next(struct gpu_relay *r, uint32_t *device, void *const *streams,
                   struct numoe_gpu_piece *piece, struct numoe_error *error)
{
    const uint64_t began = numoe_now_ns(), serial = r->serial;
    const uint32_t asked = *device;
    int rc = 0;

    if (asked < r->count && r->sides[asked].ended)
        return numoe_error_set(error, -EINVAL, "layer", "has been ended for this device");
    for (;;) {
        bool given, finished, comes;

        rc = check_call(r, asked, serial, error);
        if (rc)
            return rc;
        rc = go_on(r, error);
        if (!rc)
            rc = find_here(r, device, streams, piece, &given, &finished, &comes, error);
        if (rc)
            break;
        if (given)
            return 0;
        if (finished) {
            *piece = (struct numoe_gpu_piece){0};
            return 0;
        }
        if (!comes)
            rc = is_under_way(r, &comes, error);
        if (rc)
            break;
        if (!comes && (!r->part_threads || asked == NUMOE_GPU_MOST || holds_pieces(r, asked)))
            return numoe_error_set(error, -EAGAIN, "window",
                                   "nothing comes before pieces, of this device or of others, are "
                                   "taken and done with");
        nap_unlocked(r, numoe_now_ns() - began);
    }
    r->failed = true;
    return rc;
}

bool gpu_relay_has(const struct gpu_relay *r, uint32_t i, const void *handle)
{
    const struct gpu_piece *p = r->sides[i].window.pieces;

    return handle >= (const void *)p && handle < (const void *)(p + GPU_PIECES);
}

int gpu_relay_done(struct gpu_relay *r, uint32_t i, void *on, struct gpu_piece *p,
                   struct numoe_error *error)
{
    struct gpu_relay_side *side = &r->sides[i];
    struct gpu_stream *s = &side->model->stream;
    int rc = 0;

    if (!r->running || p->state != GPU_PIECE_TAKEN)
        return gpu_stream_refuse(error);
    if (s->bias)
        rc = gpu_stream_mark_used(s, r->layer, on, error);
    if (!rc)
        rc = gpu_judge(side->gpu, side->gpu->ops->event_record(side->gpu->device, p->used, on),
                       error, "marking the end of a piece");
    if (rc)
        return rc;
    p->state = GPU_PIECE_SPENT;
    p->was_used = true;
    return 0;
}

/* What is left of a call: nothing of it is queued or read any more. */
static void finish(struct gpu_relay *r)
{
    for (uint32_t i = 0; i < r->count; i++) {
        struct gpu_relay_side *side = &r->sides[i];
        bool waits = false;

        gpu_enter(side->gpu, NULL);
        for (uint32_t k = 0; k < side->window.count; k++) {
            struct gpu_piece *p = gpu_window_piece(&side->window, k);
            waits = waits || p->state == GPU_PIECE_FILLING ||
                    (p->state == GPU_PIECE_QUEUED && !passed_of(side, p)->here);
            p->state = GPU_PIECE_SPENT;
        }
        if (waits)
            gpu_still(side->gpu, side->passes, "copies from other devices");
    }
    for (uint32_t i = 0; i < r->count; i++) {
        gpu_enter(r->sides[i].gpu, NULL);
        gpu_stream_end(stream_of(r, i), stream_of(r, i)->compute);
    }
    r->running = false;
}

void gpu_relay_end(struct gpu_relay *r, uint32_t i, void *on)
{
    struct gpu_relay_side *side = &r->sides[i];
    bool waited = false, all = true;

    if (!r->running || side->ended)
        return;
    gpu_enter(side->gpu, NULL);
    gpu_stream_settle(stream_of(r, i), on);
    for (uint32_t k = 0; k < side->window.count; k++) {
        struct gpu_piece *p = gpu_window_piece(&side->window, k);
        if (p->state != GPU_PIECE_TAKEN)
            continue;
        if (!waited)
            gpu_still(side->gpu, on, "the failed call");
        waited = true;
        p->state = GPU_PIECE_SPENT;
    }
    side->ended = true;
    /* the caller may know that it has had all, without having asked for more */
    if (!r->failed && !side->finished)
        side->finished = !gpu_stream_look(stream_of(r, i), &side->ahead, NULL) && is_finished(r, i);
    r->failed = r->failed || !side->finished;
    for (uint32_t k = 0; k < r->count; k++)
        all = all && r->sides[k].ended;
    if (all)
        finish(r);
}

static void share_out(struct gpu_relay *r, uint64_t layer)
{
    const uint64_t experts = r->source->experts;

    for (uint32_t e = 0; e < experts; e++)
        for (uint32_t i = 0; i < r->count; i++)
            if (gpu_divide_has(r->division, i, layer, e, experts))
                r->owner[e] = i;
}

/* What device i has of the layer, or copies from the host for itself: it may be on its way there
 * already. */
static void need_of(const struct gpu_relay *r, uint32_t i, uint64_t layer, const uint32_t *wants,
                    uint32_t *own)
{
    const struct gpu_stream *s = &r->sides[i].model->stream;

    for (uint32_t e = 0; e < r->source->experts; e++) {
        const bool has = !r->passes || r->owner[e] == i || gpu_stream_has(s, layer, e);
        own[e] = has ? wants[e] : 0;
    }
}

/* The same of all devices, and for those who get it from them. */
static void share_needs(struct gpu_relay *r)
{
    for (uint32_t i = 0; i < r->count; i++)
        need_of(r, i, r->layer, r->sides[i].wants, r->sides[i].need);
    for (uint32_t e = 0; r->passes && e < r->source->experts; e++)
        for (uint32_t i = 0; i < r->count; i++)
            if (comes_from(r, i, r->owner[e], e))
                r->sides[r->owner[e]].need[e] += r->sides[i].wants[e];
}

static int check_free(const struct gpu_relay *r, struct numoe_error *error)
{
    bool busy = r->running;
    int rc = 0;

    for (uint32_t i = 0; !rc && i < r->count; i++) {
        const struct numoe_gpu_model *m = r->sides[i].model;

        busy = busy || m->running || m->stream.in_call;
        rc = gpu_enter(m->gpu, error);
    }
    if (!rc && busy)
        rc = numoe_error_set(error, -EBUSY, "layer", "another call is not over");
    return rc;
}

int gpu_relay_begin(struct gpu_relay *r, uint64_t layer, const uint32_t *need, uint64_t tokens,
                    struct numoe_error *error)
{
    const uint64_t experts = r->source->experts;
    const uint32_t all = (uint32_t)((UINT64_C(1) << r->count) - 1);
    int rc = check_free(r, error);
    uint32_t begun = 0;

    if (rc)
        return rc;
    memcpy(r->need, need, experts * sizeof *need);
    r->layer = layer;
    r->serial++;
    r->turn = 0;
    r->failed = false;
    share_out(r, layer);
    for (uint32_t i = 0; !rc && i < r->count; i++) {
        rc = gpu_enter(r->sides[i].gpu, error);
        if (!rc)
            gpu_model_warm(r->sides[i].model);
    }
    share_needs(r);
    for (; !rc && begun < r->count; begun += rc == 0) {
        struct gpu_relay_side *side = &r->sides[begun];
        struct gpu_stream *s = &side->model->stream;

        rc = gpu_enter(side->gpu, error);
        if (rc)
            break;
        rc = gpu_stream_begin(s, layer, side->need, r->need, tokens, error);
        if (!rc && r->passes)
            gpu_stream_lend(s, all & ~(UINT32_C(1) << begun));
        for (uint32_t e = 0; !rc && e < experts; e++)
            side->kept[e] =
                r->owner[e] == begun && side->need[e] && gpu_cache_holds(&s->cache, layer, e);
        memset(side->list_at, 0, sizeof side->list_at);
        memset(side->kept_at, 0, sizeof side->kept_at);
        side->kept_past = side->finished = side->ended = false;
    }
    r->running = !rc;
    while (rc && begun > 0) {
        struct gpu_relay_side *side = &r->sides[--begun];

        gpu_enter(side->gpu, NULL);
        gpu_stream_end(&side->model->stream, side->model->stream.compute);
    }
    if (!rc) {
        rc = go_on(r, error);
        if (rc)
            finish(r);
    }
    return rc;
}

int gpu_relay_prefetch(struct gpu_relay *r, uint64_t layer, const uint32_t *need,
                       struct numoe_error *error)
{
    uint32_t *own;
    int rc = 0;

    if (r->running)
        return 0;
    own = calloc(r->source->experts, sizeof *own);
    if (!own)
        return numoe_error_set(error, -ENOMEM, "prefetch", "out of memory");
    share_out(r, layer);
    for (uint32_t i = 0; !rc && i < r->count; i++) {
        struct gpu_stream *s = stream_of(r, i);

        need_of(r, i, layer, need ? need : s->everything, own);
        rc = gpu_enter(r->sides[i].gpu, error);
        if (!rc)
            rc = gpu_stream_prefetch(s, layer, own, error);
    }
    free(own);
    return rc;
}

void gpu_relay_stop(struct gpu_relay *r)
{
    if (!r->count)
        return; /* never opened */
    pthread_mutex_lock(&r->lock);
    r->closing = true;
    pthread_mutex_unlock(&r->lock);
    while (atomic_load_explicit(&r->users, memory_order_acquire)) /* pairs with gpu_relay_unlock */
        nap(0);
    for (uint32_t i = 0; i < r->count; i++) {
        struct gpu_relay_side *side = &r->sides[i];

        if (!side->passes)
            continue;
        gpu_enter(side->gpu, NULL);
        gpu_still(side->gpu, side->passes, "copies from other devices");
    }
}
