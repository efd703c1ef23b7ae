/*
 * trace.h - what happened when, kept in a ring for each worker, one for calls and two for each GPU.
 *
 * Each ring has one writer at a time: its worker, or whoever holds the context's turn. Nothing is
 * allocated or written to a file while calls run; numoe_trace_write (trace_write.c) reads the rings
 * from any thread.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TRACE_H
#define NUMOE_TRACE_H

#include "base/clock.h"
#include "numoe_gpu.h"
#include "numoe_pool.h"

#include <stdint.h>

/* Kinds of event and what their arguments are; trace_write.c has their names. */
enum trace_kind {
    /* of calls */
    TRACE_CALL,    /* layer, tokens */
    TRACE_SUBMIT,  /* layer, tokens */
    TRACE_WAIT,    /* layer, tokens */
    TRACE_LAY_OUT, /* layer, tokens, lanes */
    TRACE_GPU,     /* layer, tokens */
    TRACE_RUN,     /* layer, tokens, lanes */
    /* of the GPU, by the host's clock */
    TRACE_GPU_COPY,    /* layer, experts, KiB */
    TRACE_GPU_COMPUTE, /* layer, experts */
    /* of workers */
    TRACE_RECORDS, /* layer, first token, tokens */
    TRACE_EXPERT,  /* layer, expert, slices, tokens, lane */
    TRACE_COMBINE, /* layer, token, rows, chunk */
    TRACE_STEAL,   /* victim, distance, items */
    TRACE_PARK,    /* wake latency in ns */
    TRACE_PHASE,   /* enum trace_phase, items */
    TRACE_JOIN,
    TRACE_KINDS
};

enum trace_phase {
    TRACE_PHASE_RECORDS,
    TRACE_PHASE_EXPERTS,
    TRACE_PHASE_COMBINE,
    TRACE_PHASE_OTHER /* work that is not a call's: loading, measuring */
};

enum { TRACE_ARGS = 5 };

struct trace_event {
    uint64_t begin_ns, end_ns;
    enum trace_kind kind;
    uint32_t args[TRACE_ARGS];
};

struct numoe_trace;

/* Rings of `events` for each of `workers`, one for calls, and those of GPUs. NULL: out of memory.
 */
struct numoe_trace *numoe_trace_create(uint32_t workers, uint32_t events);
void numoe_trace_free(struct numoe_trace *trace);

uint32_t numoe_trace_workers(const struct numoe_trace *trace);
/* The ring of calls, after those of workers. */
static inline uint32_t numoe_trace_calls(const struct numoe_trace *trace)
{
    return numoe_trace_workers(trace);
}

/* The ring of the copies, or of the computations, of a GPU; and how many rings there are. */
static inline uint32_t numoe_trace_gpu(const struct numoe_trace *trace, uint32_t gpu, bool copies)
{
    return numoe_trace_workers(trace) + 1 + 2 * gpu + !copies;
}
enum { TRACE_RINGS_BESIDES = 1 + 2 * NUMOE_GPU_MOST };
static inline uint32_t numoe_trace_rings(const struct numoe_trace *trace)
{
    return numoe_trace_workers(trace) + TRACE_RINGS_BESIDES;
}

/* When something begins; 0 without a trace. */
static inline uint64_t numoe_trace_now(const struct numoe_trace *trace)
{
    return trace ? numoe_now_ns() : 0;
}

/* Keep an event that ends now; returns when that is. */
uint64_t numoe_trace_span(struct numoe_trace *trace, uint32_t ring, enum trace_kind kind,
                          uint64_t since, const uint32_t args[TRACE_ARGS]);

/* Keep an event. */
void numoe_trace_add(struct numoe_trace *trace, uint32_t ring, const struct trace_event *event);

/* The pool's observer; user is the trace. */
void numoe_trace_pool_event(void *user, const struct numoe_pool_event *event);

/*
 * Copy what a ring holds, in the order in which it ended. events: to be freed; dropped: how many
 * came before them. Returns 0 or -ENOMEM.
 */
int numoe_trace_read(const struct numoe_trace *trace, uint32_t ring, struct trace_event **events,
                     uint64_t *count, uint64_t *dropped);

#endif
