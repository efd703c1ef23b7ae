/*
 * gpu_trace.h - when copies and computations happened on a device, by the host's clock.
 *
 * A span lies between two timers that are queued before and behind the work. When both have
 * happened, which is looked at when outputs are fetched anyway, it is told by their distance from
 * an origin: a timer whose moment the host knows. Nothing is waited for. Spans for which no timers
 * are free are not told.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_TRACE_H
#define NUMOE_GPU_TRACE_H

#include "gpu_internal.h"

struct gpu_mark {
    void *begin, *end; /* timers */
    struct numoe_gpu_span span;
    enum gpu_mark_state { GPU_MARK_FREE, GPU_MARK_BEGUN, GPU_MARK_ENDED } state;
};

enum { GPU_MARKS = 256 };

struct gpu_trace {
    struct numoe_gpu *gpu;
    uint32_t part;
    void (*tell)(void *user, const struct numoe_gpu_span *span);
    void *user;
    void *stream; /* that the origin is found on */
    void *origin; /* timer, at origin_ns */
    uint64_t origin_ns;
    struct gpu_mark marks[GPU_MARKS];
};

/* stream: idle, or soon. NULL: an error, which is told */
struct gpu_trace *gpu_trace_make(struct numoe_gpu *gpu, uint32_t part, void *stream,
                                 void (*tell)(void *user, const struct numoe_gpu_span *span),
                                 void *user, struct numoe_error *error);
/* Nothing that was marked is under way any more. NULL is allowed. */
void gpu_trace_free(struct gpu_trace *trace);

/* What is queued on the stream from now on. NULL without a trace, or when no timers are free. */
struct gpu_mark *gpu_trace_begin(struct gpu_trace *trace, enum numoe_gpu_span_kind kind,
                                 uint64_t layer, void *stream);
/* Up to here. mark may be NULL. */
void gpu_trace_end(struct gpu_trace *trace, struct gpu_mark *mark, void *stream, uint64_t experts,
                   uint64_t bytes);
/* Instead: it is not told. */
void gpu_trace_drop(struct gpu_mark *mark);

/* Tell what has happened by now. */
void gpu_trace_drain(struct gpu_trace *trace);

#endif
