/*
 * A trace as a file: Chrome's JSON trace event format, which Perfetto opens.
 *
 * Tracks: calls; copies and computations of GPUs; phases, which are those of the pool's jobs; and
 * one for each worker. All spans are complete events ("X"), so that beginnings and ends match;
 * those of a track are sorted and nest.
 *
 * Within a phase two parts are worked out from the items of its workers: "fork", from the opening
 * of a job's first phase until the last worker that takes part began, and "barrier", from when the
 * first of them had done its last item until the end.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "context.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    PROCESS = 1,
    TRACK_CALLS = 1,
    TRACK_PHASES,
    TRACK_WORKERS = 10,
    TRACK_GPUS = 10000 /* two each */
};

static const struct {
    const char *name;
    const char *args[TRACE_ARGS]; /* up to NULL */
} kinds[TRACE_KINDS] = {
    [TRACE_CALL] = {"call", {"layer", "tokens"}},
    [TRACE_SUBMIT] = {"submit", {"layer", "tokens"}},
    [TRACE_WAIT] = {"wait", {"layer", "tokens"}},
    [TRACE_LAY_OUT] = {"lay out", {"layer", "tokens", "lanes"}},
    [TRACE_GPU] = {"gpu", {"layer", "tokens"}},
    [TRACE_RUN] = {"run", {"layer", "tokens", "lanes"}},
    [TRACE_GPU_COPY] = {"copy", {"layer", "experts", "kib"}},
    [TRACE_GPU_COMPUTE] = {"compute", {"layer", "experts"}},
    [TRACE_RECORDS] = {"records", {"layer", "first_token", "tokens"}},
    [TRACE_EXPERT] = {"expert", {"layer", "expert", "slices", "tokens", "lane"}},
    [TRACE_COMBINE] = {"combine", {"layer", "token", "rows", "chunk"}},
    [TRACE_STEAL] = {"steal", {"victim", "distance", "items"}},
    [TRACE_PARK] = {"parked", {"wake_latency_ns"}},
    [TRACE_JOIN] = {"join", {NULL}},
};

static const char *const phases[] = {[TRACE_PHASE_RECORDS] = "records",
                                     [TRACE_PHASE_EXPERTS] = "experts",
                                     [TRACE_PHASE_COMBINE] = "combine",
                                     [TRACE_PHASE_OTHER] = "other work"};

/* What one ring held. */
struct lane {
    struct trace_event *events;
    uint64_t count, dropped;
    uint64_t at; /* where the search for items has come to */
};

struct writer {
    FILE *out;
    uint64_t origin_ns;
    struct lane *lanes; /* workers, then calls, then GPUs' */
    uint32_t workers, rings;
    struct trace_event *phases; /* of all workers, with joins */
    uint64_t phase_count;
    uint64_t whole_ns; /* from here on nothing was dropped */
    bool comma;
};

static void begin_event(struct writer *w, const char *name, char type, uint32_t track)
{
    fprintf(w->out, "%s\n{\"name\":\"%s\",\"ph\":\"%c\",\"pid\":%d,\"tid\":%" PRIu32,
            w->comma ? "," : "", name, type, PROCESS, track);
    w->comma = true;
}

/* Microseconds, the format's unit, to the nanosecond. */
static void put_time(struct writer *w, const char *name, uint64_t ns)
{
    fprintf(w->out, ",\"%s\":%" PRIu64 ".%03" PRIu64, name, ns / 1000, ns % 1000);
}

static void put_span(struct writer *w, const char *name, uint32_t track, uint64_t begin_ns,
                     uint64_t end_ns)
{
    begin_event(w, name, 'X', track);
    put_time(w, "ts", begin_ns - w->origin_ns);
    put_time(w, "dur", end_ns - begin_ns);
}

static void put_args(struct writer *w, const struct trace_event *event)
{
    const char *const *args = kinds[event->kind].args;

    for (int i = 0; i < TRACE_ARGS && args[i]; i++)
        fprintf(w->out, "%s\"%s\":%" PRIu32, i ? "," : ",\"args\":{", args[i], event->args[i]);
    fputs(args[0] ? "}}" : "}", w->out);
}

static void put_event(struct writer *w, const struct trace_event *event, uint32_t track)
{
    const char *name = kinds[event->kind].name;
    char expert[32];

    if (event->kind == TRACE_EXPERT) {
        snprintf(expert, sizeof expert, "expert %" PRIu32, event->args[1]);
        name = expert;
    }
    if (event->kind == TRACE_STEAL) {
        begin_event(w, name, 'i', track);
        put_time(w, "ts", event->begin_ns - w->origin_ns);
        fputs(",\"s\":\"t\"", w->out);
    } else {
        put_span(w, name, track, event->begin_ns, event->end_ns);
    }
    put_args(w, event);
}

/* Where a track stands: GPUs between phases and workers. */
static uint32_t order_of(uint32_t track)
{
    if (track >= TRACK_GPUS)
        return TRACK_WORKERS + track - TRACK_GPUS;
    return track >= TRACK_WORKERS ? track + 2 * NUMOE_GPU_MOST : track;
}

static void put_track(struct writer *w, uint32_t track, const char *name, uint64_t dropped)
{
    begin_event(w, "thread_name", 'M', track);
    fprintf(w->out, ",\"args\":{\"name\":\"%s\"}}", name);
    begin_event(w, "thread_sort_index", 'M', track);
    fprintf(w->out, ",\"args\":{\"sort_index\":%" PRIu32 "}}", order_of(track));
    if (!dropped)
        return;
    begin_event(w, "older events dropped", 'i', track);
    fprintf(w->out, ",\"ts\":0,\"s\":\"t\",\"args\":{\"events\":%" PRIu64 "}}", dropped);
}

/* By beginning; of spans that begin together the outer first. */
static int earlier(const void *a, const void *b)
{
    const struct trace_event *x = a, *y = b;

    if (x->begin_ns != y->begin_ns)
        return x->begin_ns < y->begin_ns ? -1 : 1;
    return (x->end_ns < y->end_ns) - (x->end_ns > y->end_ns);
}

static bool of_phases(const struct trace_event *event)
{
    return event->kind == TRACE_PHASE || event->kind == TRACE_JOIN;
}

static bool is_item(const struct trace_event *event)
{
    return event->kind == TRACE_RECORDS || event->kind == TRACE_EXPERT ||
           event->kind == TRACE_COMBINE;
}

/* Sort each lane and take phases out of those of workers. */
static int sort_out(struct writer *w)
{
    uint64_t count = 0;

    for (uint32_t l = 0; l < w->rings; l++)
        for (uint64_t i = 0; i < w->lanes[l].count; i++)
            count += of_phases(&w->lanes[l].events[i]);
    w->phases = malloc((count + 1) * sizeof *w->phases);
    if (!w->phases)
        return -ENOMEM;
    w->origin_ns = UINT64_MAX;
    for (uint32_t l = 0; l < w->rings; l++) {
        struct lane *lane = &w->lanes[l];
        uint64_t kept = 0;

        /* what was dropped ended before the first event that is left did */
        if (lane->dropped && lane->count && lane->events[0].end_ns > w->whole_ns)
            w->whole_ns = lane->events[0].end_ns;
        for (uint64_t i = 0; i < lane->count; i++) {
            const struct trace_event event = lane->events[i];

            if (event.begin_ns < w->origin_ns)
                w->origin_ns = event.begin_ns;
            if (of_phases(&event))
                w->phases[w->phase_count++] = event;
            else
                lane->events[kept++] = event;
        }
        lane->count = kept;
        if (kept)
            qsort(lane->events, lane->count, sizeof *lane->events, earlier);
    }
    if (w->phase_count)
        qsort(w->phases, w->phase_count, sizeof *w->phases, earlier);
    return 0;
}

/* Of the workers that ran items of the phase: when the last began its first, and when the first
 * had done its last. @return false: nobody did, or it is not known */
static bool look_into(struct writer *w, const struct trace_event *phase, uint64_t *all_began,
                      uint64_t *one_done)
{
    bool any = false;

    *all_began = phase->begin_ns;
    *one_done = phase->end_ns;
    for (uint32_t l = 0; l < w->workers; l++) {
        struct lane *lane = &w->lanes[l];
        uint64_t first = 0, last = 0;

        for (; lane->at < lane->count; lane->at++) {
            const struct trace_event *event = &lane->events[lane->at];

            if (event->begin_ns >= phase->end_ns)
                break;
            if (!is_item(event) || event->begin_ns < phase->begin_ns)
                continue;
            first = first ? first : event->begin_ns;
            last = event->end_ns;
        }
        if (!first)
            continue;
        any = true;
        if (first > *all_began)
            *all_began = first;
        if (last < *one_done)
            *one_done = last;
    }
    if (*one_done < *all_began)
        *one_done = *all_began;
    return any && phase->begin_ns >= w->whole_ns;
}

static void put_phases(struct writer *w)
{
    uint64_t before_ns = 0; /* end of the phase before */

    put_track(w, TRACK_PHASES, "phases", 0);
    for (uint64_t i = 0; i < w->phase_count; i++) {
        const struct trace_event *phase = &w->phases[i];
        uint64_t all_began, one_done;

        if (phase->kind == TRACE_JOIN) {
            put_event(w, phase, TRACK_PHASES);
            continue;
        }
        put_span(w, phases[phase->args[0]], TRACK_PHASES, phase->begin_ns, phase->end_ns);
        fprintf(w->out, ",\"args\":{\"items\":%" PRIu32 "}}", phase->args[1]);
        if (look_into(w, phase, &all_began, &one_done)) {
            if (phase->begin_ns != before_ns) {
                put_span(w, "fork", TRACK_PHASES, phase->begin_ns, all_began);
                fputc('}', w->out);
            }
            put_span(w, "barrier", TRACK_PHASES, one_done, phase->end_ns);
            fputc('}', w->out);
        }
        before_ns = phase->end_ns;
    }
}

static void put_workers(struct writer *w, const struct numoe *context)
{
    const struct numoe_plan *plan = context->plan;

    for (uint32_t l = 0; l < w->workers; l++) {
        const struct numoe_plan_worker *worker = &plan->workers[l % plan->worker_count];
        char name[64];

        snprintf(name, sizeof name, "worker %" PRIu32 " (CPU %" PRIu32 ", node %" PRIu32 ")", l,
                 worker->os_cpu, plan->nodes[worker->plan_node].os_index);
        put_track(w, TRACK_WORKERS + l, name, w->lanes[l].dropped);
        for (uint64_t i = 0; i < w->lanes[l].count; i++)
            put_event(w, &w->lanes[l].events[i], TRACK_WORKERS + l);
    }
}

/* No tracks for GPUs that are not there. */
static void put_gpus(struct writer *w, const struct lane *lanes)
{
    for (uint32_t i = 0; i < 2 * NUMOE_GPU_MOST; i++) {
        char name[32];

        if (!lanes[i].count)
            continue;
        snprintf(name, sizeof name, "GPU %" PRIu32 " %s", i / 2, i % 2 ? "computing" : "copies");
        put_track(w, TRACK_GPUS + i, name, lanes[i].dropped);
        for (uint64_t e = 0; e < lanes[i].count; e++)
            put_event(w, &lanes[i].events[e], TRACK_GPUS + i);
    }
}

static int put_all(struct writer *w, const struct numoe *context)
{
    const struct lane *calls = &w->lanes[w->workers];
    uint64_t dropped = 0;

    for (uint32_t l = 0; l < w->rings; l++)
        dropped += w->lanes[l].dropped;
    fprintf(w->out,
            "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"producer\":\"numoe %s\","
            "\"dropped_events\":%" PRIu64 "},\"traceEvents\":[",
            NUMOE_VERSION, dropped);
    begin_event(w, "process_name", 'M', 0);
    fputs(",\"args\":{\"name\":\"numoe\"}}", w->out);
    put_track(w, TRACK_CALLS, "calls", calls->dropped);
    for (uint64_t i = 0; i < calls->count; i++)
        put_event(w, &calls->events[i], TRACK_CALLS);
    put_gpus(w, calls + 1);
    put_phases(w);
    put_workers(w, context);
    fputs("\n]}\n", w->out);
    return fflush(w->out) || ferror(w->out) ? -EIO : 0;
}

int numoe_trace_write(struct numoe *context, FILE *out)
{
    struct writer w = {.out = out};
    int rc = 0;

    if (!context || !out || !context->trace)
        return -EINVAL;
    w.workers = numoe_trace_workers(context->trace);
    w.rings = numoe_trace_rings(context->trace);
    w.lanes = calloc(w.rings, sizeof *w.lanes);
    if (!w.lanes)
        return -ENOMEM;
    for (uint32_t l = 0; l < w.rings && !rc; l++)
        rc = numoe_trace_read(context->trace, l, &w.lanes[l].events, &w.lanes[l].count,
                              &w.lanes[l].dropped);
    if (!rc)
        rc = sort_out(&w);
    if (!rc)
        rc = put_all(&w, context);
    for (uint32_t l = 0; l < w.rings; l++)
        free(w.lanes[l].events);
    free(w.lanes);
    free(w.phases);
    return rc;
}
