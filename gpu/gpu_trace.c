/*
 * Spans of work on a device.
 *
 * The origin is found when the trace is made: a timer is queued on an idle stream and waited for,
 * and it happened between the host's clock before and after; of several tries the one with the
 * least between counts. CUDA tells distances in milliseconds as a float, which is worth less the
 * longer they are, so the origin moves along: a timer far from it takes its place, at the moment
 * that was found for it. After a rest it is found again, before the first span.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gpu_trace.h"

#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"

enum { TRIES = 8 };
/* As far as a float of milliseconds is good to a tenth of a microsecond. */
#define FAR_MS 1000.0
/* No span for so long: the next one would be told by such a float. */
#define REST_NS 10000000000u

/* Without telling: a trace is no reason to fail. */
static bool did(struct gpu_trace *t, int code)
{
    return !gpu_judge(t->gpu, code, NULL, "tracing");
}

static int find_origin(struct gpu_trace *t, void *stream, struct numoe_error *error)
{
    const struct gpu_ops *ops = t->gpu->ops;
    void *const device = t->gpu->device;
    uint64_t least = UINT64_MAX;
    int rc = gpu_judge(t->gpu, ops->stream_sync(device, stream), error, "finding a trace's origin");

    for (int i = 0; !rc && i < TRIES; i++) {
        void *const other = t->marks[0].begin;
        const uint64_t before = numoe_now_ns();
        uint64_t after;

        rc = gpu_judge(t->gpu, ops->event_record(device, other, stream), error,
                       "finding a trace's origin");
        if (!rc)
            rc = gpu_judge(t->gpu, ops->event_sync(device, other), error,
                           "finding a trace's origin");
        after = numoe_now_ns();
        if (rc || after - before >= least)
            continue;
        least = after - before;
        t->origin_ns = before + least / 2;
        t->marks[0].begin = t->origin;
        t->origin = other;
    }
    return rc;
}

struct gpu_trace *gpu_trace_make(struct numoe_gpu *gpu, uint32_t part, void *stream,
                                 void (*tell)(void *user, const struct numoe_gpu_span *span),
                                 void *user, struct numoe_error *error)
{
    struct gpu_trace *t = calloc(1, sizeof *t);
    int rc = 0;

    if (!t) {
        numoe_error_set(error, -ENOMEM, "trace", "out of memory");
        return NULL;
    }
    t->gpu = gpu;
    t->part = part;
    t->stream = stream;
    t->tell = tell;
    t->user = user;
    rc = gpu_judge(gpu, gpu->ops->timer_create(gpu->device, &t->origin), error, "making a timer");
    for (int i = 0; !rc && i < GPU_MARKS; i++) {
        rc = gpu_judge(gpu, gpu->ops->timer_create(gpu->device, &t->marks[i].begin), error,
                       "making a timer");
        if (!rc)
            rc = gpu_judge(gpu, gpu->ops->timer_create(gpu->device, &t->marks[i].end), error,
                           "making a timer");
    }
    if (!rc)
        rc = find_origin(t, stream, error);
    if (!rc)
        return t;
    gpu_trace_free(t);
    return NULL;
}

static void free_timer(struct gpu_trace *t, void *timer)
{
    if (timer)
        did(t, t->gpu->ops->event_destroy(t->gpu->device, timer));
}

void gpu_trace_free(struct gpu_trace *t)
{
    if (!t)
        return;
    for (int i = 0; i < GPU_MARKS; i++) {
        free_timer(t, t->marks[i].begin);
        free_timer(t, t->marks[i].end);
    }
    free_timer(t, t->origin);
    free(t);
}

struct gpu_mark *gpu_trace_begin(struct gpu_trace *t, enum numoe_gpu_span_kind kind, uint64_t layer,
                                 void *stream)
{
    struct gpu_mark *mark = NULL;
    int free_count = 0;

    for (int i = 0; t && i < GPU_MARKS; i++)
        free_count += t->marks[i].state == GPU_MARK_FREE;
    if (t && free_count == GPU_MARKS && numoe_now_ns() > t->origin_ns + REST_NS)
        (void)find_origin(t, t->stream, NULL); /* else the old one is as good as it is */
    for (int i = 0; t && !mark && i < GPU_MARKS; i++)
        if (t->marks[i].state == GPU_MARK_FREE)
            mark = &t->marks[i];
    if (!mark || !did(t, t->gpu->ops->event_record(t->gpu->device, mark->begin, stream)))
        return NULL;
    mark->span = (struct numoe_gpu_span){.kind = kind, .part = t->part, .layer = layer};
    mark->state = GPU_MARK_BEGUN;
    return mark;
}

void gpu_trace_end(struct gpu_trace *t, struct gpu_mark *mark, void *stream, uint64_t experts,
                   uint64_t bytes)
{
    if (!mark)
        return;
    mark->span.experts = experts;
    mark->span.bytes = bytes;
    mark->state = did(t, t->gpu->ops->event_record(t->gpu->device, mark->end, stream))
                      ? GPU_MARK_ENDED
                      : GPU_MARK_FREE;
}

void gpu_trace_drop(struct gpu_mark *mark)
{
    if (mark)
        mark->state = GPU_MARK_FREE;
}

/* The host's time of a timer that has happened. */
static bool time_of(struct gpu_trace *t, void *timer, uint64_t *ns, double *ms)
{
    if (!did(t, t->gpu->ops->elapsed(t->gpu->device, t->origin, timer, ms)))
        return false;
    *ns = (uint64_t)((int64_t)t->origin_ns + (int64_t)(*ms * 1e6));
    return true;
}

void gpu_trace_drain(struct gpu_trace *t)
{
    struct gpu_mark *latest = NULL;
    double farthest = FAR_MS;

    for (int i = 0; t && i < GPU_MARKS; i++) {
        struct gpu_mark *mark = &t->marks[i];
        bool happened = false;
        double ms;

        if (mark->state != GPU_MARK_ENDED ||
            !did(t, t->gpu->ops->event_query(t->gpu->device, mark->end, &happened)) || !happened)
            continue;
        mark->state = GPU_MARK_FREE;
        if (!time_of(t, mark->begin, &mark->span.begin_ns, &ms) ||
            !time_of(t, mark->end, &mark->span.end_ns, &ms))
            continue;
        t->tell(t->user, &mark->span);
        if (ms > farthest) {
            farthest = ms;
            latest = mark;
        }
    }
    if (latest) {
        void *const timer = latest->end;
        latest->end = t->origin;
        t->origin = timer;
        t->origin_ns = latest->span.end_ns;
    }
}
