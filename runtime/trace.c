/*
 * The rings of a trace.
 *
 *     head counts the events ever added; event i is in slot i % slots, slots = events kept + 1.
 *
 * The writer stores the event and then head. A reader loads head, the events before it, and head
 * again: while the writer was adding event h, slot h % slots may hold a mixture, so event
 * h - slots and older ones are dropped. The loads are acquire and the stores release, so a reader
 * that met a word of event h also meets a head of at least h.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "trace.h"

#include "base/checked.h"
#include "schedule.h"

#include <errno.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* begin, end, kind and the first argument, two arguments, two arguments */
enum { WORDS = 5 };

struct slot {
    _Atomic uint64_t words[WORDS];
};

struct ring {
    alignas(64) _Atomic uint64_t head;
    struct slot *slots;
};

struct numoe_trace {
    uint32_t workers;
    uint64_t slots; /* of each ring */
    struct ring *rings;
    struct slot *memory; /* of all rings; each page is first touched by the ring's writer */
};

struct numoe_trace *numoe_trace_create(uint32_t workers, uint32_t events)
{
    struct numoe_trace *trace = calloc(1, sizeof *trace);
    const uint64_t rings = (uint64_t)workers + TRACE_RINGS_BESIDES;
    uint64_t slots;

    if (!trace)
        return NULL;
    trace->workers = workers;
    trace->slots = (uint64_t)events + 1;
    trace->rings = aligned_alloc(alignof(struct ring), rings * sizeof *trace->rings);
    if (numoe_mul_u64(rings, trace->slots, &slots))
        trace->memory = calloc(slots, sizeof *trace->memory);
    if (!trace->rings || !trace->memory) {
        numoe_trace_free(trace);
        return NULL;
    }
    memset(trace->rings, 0, rings * sizeof *trace->rings);
    for (uint64_t r = 0; r < rings; r++)
        trace->rings[r].slots = trace->memory + r * trace->slots;
    return trace;
}

void numoe_trace_free(struct numoe_trace *trace)
{
    if (!trace)
        return;
    free(trace->memory);
    free(trace->rings);
    free(trace);
}

uint32_t numoe_trace_workers(const struct numoe_trace *trace)
{
    return trace->workers;
}

static uint64_t pack(uint32_t low, uint32_t high)
{
    return (uint64_t)high << 32 | low;
}

void numoe_trace_add(struct numoe_trace *trace, uint32_t index, const struct trace_event *event)
{
    struct ring *ring = &trace->rings[index];
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    struct slot *slot = &ring->slots[head % trace->slots];
    const uint64_t words[WORDS] = {
        event->begin_ns, event->end_ns, pack(event->kind, event->args[0]),
        pack(event->args[1], event->args[2]), pack(event->args[3], event->args[4])};

    /* pair with the loads in numoe_trace_read */
    for (int w = 0; w < WORDS; w++)
        atomic_store_explicit(&slot->words[w], words[w], memory_order_release);
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
}

uint64_t numoe_trace_span(struct numoe_trace *trace, uint32_t ring, enum trace_kind kind,
                          uint64_t since, const uint32_t args[TRACE_ARGS])
{
    struct trace_event event = {.begin_ns = since, .end_ns = numoe_now_ns(), .kind = kind};

    memcpy(event.args, args, sizeof event.args);
    numoe_trace_add(trace, ring, &event);
    return event.end_ns;
}

void numoe_trace_pool_event(void *user, const struct numoe_pool_event *from)
{
    struct trace_event event = {.begin_ns = from->begin_ns, .end_ns = from->end_ns};

    switch (from->kind) {
    case NUMOE_POOL_STEAL:
        event.kind = TRACE_STEAL;
        event.args[0] = from->victim;
        event.args[1] = from->distance;
        event.args[2] = from->items;
        break;
    case NUMOE_POOL_PARK:
        event.kind = TRACE_PARK;
        event.args[0] = from->latency_ns > UINT32_MAX ? UINT32_MAX : (uint32_t)from->latency_ns;
        break;
    case NUMOE_POOL_PHASE:
        event.kind = TRACE_PHASE;
        event.args[0] = numoe_schedule_phase(from->run);
        event.args[1] = from->items;
        break;
    case NUMOE_POOL_JOIN:
        event.kind = TRACE_JOIN;
        break;
    }
    numoe_trace_add(user, from->worker, &event);
}

static void unpack(const uint64_t words[WORDS], struct trace_event *event)
{
    *event = (struct trace_event){
        .begin_ns = words[0],
        .end_ns = words[1],
        .kind = (enum trace_kind)(uint32_t)words[2],
        .args = {(uint32_t)(words[2] >> 32), (uint32_t)words[3], (uint32_t)(words[3] >> 32),
                 (uint32_t)words[4], (uint32_t)(words[4] >> 32)},
    };
}

int numoe_trace_read(const struct numoe_trace *trace, uint32_t index, struct trace_event **events,
                     uint64_t *count, uint64_t *dropped)
{
    struct ring *ring = &trace->rings[index];
    const uint64_t slots = trace->slots;
    const uint64_t end = atomic_load_explicit(&ring->head, memory_order_acquire);
    const uint64_t begin = end >= slots ? end - slots + 1 : 0;
    struct trace_event *copy = malloc((end - begin + 1) * sizeof *copy);
    uint64_t now, first;

    if (!copy)
        return -ENOMEM;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t words[WORDS];

        for (int w = 0; w < WORDS; w++)
            words[w] = atomic_load_explicit(&ring->slots[i % slots].words[w], memory_order_acquire);
        unpack(words, &copy[i - begin]);
    }
    now = atomic_load_explicit(&ring->head, memory_order_relaxed);
    first = now >= slots ? now - slots + 1 : 0; /* of those that no writer has touched since */
    if (first > end)
        first = end;
    memmove(copy, copy + (first - begin), (end - first) * sizeof *copy);
    *events = copy;
    *count = end - first;
    *dropped = first;
    return 0;
}
