/* The timeline: valid, nested, complete, and honest about what was dropped. */
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>

#include "context.h"
#include "stats_context.h"

enum { TRACK_CALLS = 1, TRACK_PHASES = 2, TRACK_WORKERS = 10 };

static struct subject traced(uint32_t threads, uint32_t events)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;

    options.topology = TWO_NODES;
    options.threads = threads;
    options.trace_events = events;
    options.spin_ns = 0;
    return open_subject(&options, false);
}

static json_t *written(struct numoe *context)
{
    json_error_t error;
    json_t *root;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    cr_assert_not_null(out);
    cr_assert_eq(numoe_trace_write(context, out), 0);
    fclose(out);
    root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(root, "line %d: %s", error.line, error.text);
    free(text);
    return root;
}

static const char *word(const json_t *event, const char *key)
{
    const char *text = json_string_value(json_object_get(event, key));

    cr_assert_not_null(text, "no %s", key);
    return text;
}

/* Nanoseconds of a time in microseconds. */
static int64_t time_of(const json_t *event, const char *key)
{
    const json_t *value = json_object_get(event, key);

    cr_assert(json_is_number(value), "%s of %s", key, word(event, "name"));
    return llround(json_number_value(value) * 1000);
}

static json_int_t argument(const json_t *event, const char *key)
{
    const json_t *value = json_object_get(json_object_get(event, "args"), key);

    cr_assert(json_is_integer(value), "%s of %s", key, word(event, "name"));
    return json_integer_value(value);
}

static json_int_t track_of(const json_t *event)
{
    return json_integer_value(json_object_get(event, "tid"));
}

/* Spans of a track begin in order, and each ends within what it began in. */
static void check_track(const json_t *events, json_int_t track)
{
    int64_t open[64], last = 0;
    size_t depth = 0, i;
    const json_t *event;

    json_array_foreach(events, i, event)
    {
        const char *type = word(event, "ph");
        int64_t begin, end;

        if (track_of(event) != track || strcmp(type, "M") == 0)
            continue;
        begin = time_of(event, "ts");
        cr_expect_geq(begin, last, "%s of track %lld begins before the event before it",
                      word(event, "name"), (long long)track);
        last = begin;
        if (strcmp(type, "i") == 0)
            continue;
        cr_assert_str_eq(type, "X");
        end = begin + time_of(event, "dur");
        cr_expect_geq(end, begin);
        while (depth && open[depth - 1] <= begin)
            depth--;
        cr_expect(!depth || end <= open[depth - 1], "%s of track %lld ends after what it is in",
                  word(event, "name"), (long long)track);
        cr_assert_lt(depth, 64);
        open[depth++] = end;
    }
}

static void check_trace(const json_t *root, uint32_t workers)
{
    const json_t *events = json_object_get(root, "traceEvents"), *event;
    size_t i, names = 0;

    cr_assert(json_is_array(events));
    json_array_foreach(events, i, event)
    {
        json_int_t track = track_of(event);

        word(event, "name");
        cr_expect_eq(json_integer_value(json_object_get(event, "pid")), 1);
        cr_expect(track <= TRACK_PHASES ||
                      (track >= TRACK_WORKERS && track < TRACK_WORKERS + (json_int_t)workers),
                  "track %lld", (long long)track);
        names += strcmp(word(event, "name"), "thread_name") == 0;
    }
    cr_expect_eq(names, workers + 2);
    check_track(events, TRACK_CALLS);
    check_track(events, TRACK_PHASES);
    for (uint32_t w = 0; w < workers; w++)
        check_track(events, TRACK_WORKERS + w);
}

/* How many events of a name there are, on tracks first .. last. */
static size_t count(const json_t *root, const char *name, json_int_t first, json_int_t last)
{
    const json_t *event;
    size_t i, found = 0;

    json_array_foreach(json_object_get(root, "traceEvents"), i, event) found +=
        strcmp(word(event, "name"), name) == 0 && track_of(event) >= first &&
        track_of(event) <= last;
    return found;
}

static uint64_t dropped(const json_t *root)
{
    const json_t *data = json_object_get(root, "otherData");

    return (uint64_t)json_integer_value(json_object_get(data, "dropped_events"));
}

Test(trace, shows_every_call_phase_and_item, .timeout = 60)
{
    enum { THREADS = 3 };
    struct subject s = traced(THREADS, 10000);
    uint64_t slices = 0, items = 0, steals = 0, lanes = 0, combines = 0, records = 0;
    json_t *root = written(s.context), *event;
    struct numoe_stats before = NUMOE_STATS_INIT, after = NUMOE_STATS_INIT;
    size_t other = count(root, "other work", TRACK_PHASES, TRACK_PHASES), i;

    cr_expect_gt(other, 0); /* filling the model */
    json_decref(root);
    numoe_stats_get(s.context, &before);
    for (uint64_t c = 0; c < 6; c++) {
        const struct numoe_schedule *schedule = &s.context->schedule;

        call(&s, c % 2, 1 + 3 * c, 1, 4);
        lanes += schedule->lane_count;
        combines += schedule->token_count * schedule->combine_chunks;
        records += schedule->own_records ? 0 : (schedule->token_count + 15) / 16;
    }
    root = written(s.context);
    numoe_stats_get(s.context, &after);
    check_trace(root, THREADS);
    cr_expect_eq(dropped(root), 0);
    cr_expect_eq(count(root, "call", TRACK_CALLS, TRACK_CALLS), 6);
    cr_expect_eq(count(root, "lay out", TRACK_CALLS, TRACK_CALLS), 6);
    cr_expect_eq(count(root, "run", TRACK_CALLS, TRACK_CALLS), 6);
    cr_expect_eq(count(root, "experts", TRACK_PHASES, TRACK_PHASES), 6);
    cr_expect_eq(count(root, "combine", TRACK_PHASES, TRACK_PHASES), 6);
    cr_expect_eq(count(root, "records", TRACK_PHASES, TRACK_PHASES), 4); /* five tokens or more */
    cr_expect_eq(count(root, "other work", TRACK_PHASES, TRACK_PHASES), other);
    cr_expect_eq(count(root, "fork", TRACK_PHASES, TRACK_PHASES), 6);
    cr_expect_eq(count(root, "barrier", TRACK_PHASES, TRACK_PHASES), 6 + 6 + 4);
    /* none where all was done before the caller came to look */
    cr_expect_leq(count(root, "join", TRACK_PHASES, TRACK_PHASES), 6 + other);
    cr_expect_geq(count(root, "join", TRACK_PHASES, TRACK_PHASES), 1);

    json_array_foreach(json_object_get(root, "traceEvents"), i, event)
    {
        if (strncmp(word(event, "name"), "expert ", 7) == 0) {
            char name[32];

            snprintf(name, sizeof name, "expert %lld", (long long)argument(event, "expert"));
            cr_expect_str_eq(word(event, "name"), name);
            cr_expect(argument(event, "expert") >= 1 && argument(event, "expert") <= 4);
            cr_expect_lt(argument(event, "layer"), LAYERS);
            slices += (uint64_t)(argument(event, "slices") * argument(event, "tokens"));
        }
        if (track_of(event) >= TRACK_WORKERS && strcmp(word(event, "name"), "steal") == 0) {
            cr_expect_lt(argument(event, "victim"), THREADS);
            steals++;
        }
    }
    /* four experts of every token of six calls, in whatever blocks and ranges */
    cr_expect_eq(slices, (1 + 4 + 7 + 10 + 13 + 16) * 4 * SLICES);
    items = count(root, "records", TRACK_WORKERS, TRACK_WORKERS + THREADS) +
            count(root, "combine", TRACK_WORKERS, TRACK_WORKERS + THREADS);
    cr_expect_eq(items, records + combines);
    cr_expect_eq(after.work.items - before.work.items, items + lanes);
    cr_expect_eq(steals, after.steals);
    cr_expect_leq(count(root, "parked", TRACK_WORKERS, TRACK_WORKERS + THREADS), after.work.wakes);
    cr_expect_gt(count(root, "parked", TRACK_WORKERS, TRACK_WORKERS + THREADS), 0);
    json_decref(root);
    close_subject(&s);
}

Test(trace, items_lie_within_their_phase, .timeout = 60)
{
    struct subject s = traced(2, 10000);
    const json_t *events, *event, *phase;
    json_t *root;
    size_t i, j;

    for (int c = 0; c < 4; c++)
        call(&s, 0, 6, 0, 3);
    root = written(s.context);
    events = json_object_get(root, "traceEvents");
    json_array_foreach(events, i, event)
    {
        const char *name = word(event, "name");
        const char *of = strncmp(name, "expert ", 7) == 0 ? "experts" : name;
        int64_t begin, end;
        bool within = false;

        if (track_of(event) < TRACK_WORKERS || strcmp(word(event, "ph"), "X") != 0 ||
            strcmp(name, "parked") == 0)
            continue;
        begin = time_of(event, "ts");
        end = begin + time_of(event, "dur");
        json_array_foreach(events, j, phase)
        {
            if (track_of(phase) != TRACK_PHASES || strcmp(word(phase, "name"), of) != 0)
                continue;
            within = within || (time_of(phase, "ts") <= begin &&
                                end <= time_of(phase, "ts") + time_of(phase, "dur"));
        }
        cr_expect(within, "%s is in no phase of its own", name);
    }
    json_decref(root);
    close_subject(&s);
}

Test(trace, shows_submissions, .timeout = 60)
{
    struct subject s = traced(3, 1000);
    struct request r = new_request(2, 0, 3);
    uint64_t ticket;
    json_t *root;

    cr_assert_eq(numoe_submit(s.model, 1, &r.batch, &ticket, NULL), 0);
    cr_assert_eq(numoe_wait(s.model, ticket, NULL), 0);
    root = written(s.context);
    check_trace(root, 3);
    cr_expect_eq(count(root, "submit", TRACK_CALLS, TRACK_CALLS), 1);
    cr_expect_eq(count(root, "wait", TRACK_CALLS, TRACK_CALLS), 1);
    cr_expect_eq(count(root, "call", TRACK_CALLS, TRACK_CALLS), 0);
    cr_expect_eq(count(root, "experts", TRACK_PHASES, TRACK_PHASES), 1);
    json_decref(root);
    free_request(&r);
    close_subject(&s);
}

Test(trace, drops_the_oldest_and_says_how_many, .timeout = 60)
{
    enum { KEPT = 8, CALLS = 40 };
    struct subject s = traced(1, KEPT);
    struct numoe_stats stats = NUMOE_STATS_INIT;
    uint64_t marks = 0, kept = 0, last_call = 0;
    json_t *root, *event;
    size_t i;

    for (int c = 0; c < CALLS; c++)
        call(&s, 0, 1, 0, 1);
    numoe_stats_get(s.context, &stats);
    root = written(s.context);
    check_trace(root, 1);
    json_array_foreach(json_object_get(root, "traceEvents"), i, event)
    {
        if (strcmp(word(event, "name"), "older events dropped") == 0)
            marks += (uint64_t)argument(event, "events");
        else if (track_of(event) == TRACK_CALLS && strcmp(word(event, "ph"), "X") == 0)
            kept++;
        if (strcmp(word(event, "name"), "call") == 0)
            last_call = (uint64_t)time_of(event, "ts");
    }
    cr_expect_eq(kept, KEPT);
    cr_expect_eq(marks, dropped(root));
    /* three events a call in the ring of calls: lay out, run, call */
    cr_expect_geq(dropped(root), 3 * CALLS - KEPT);
    /* what is left is the latest: the last call of all is in it */
    cr_expect_gt(last_call, 0);
    cr_expect_eq(count(root, "call", TRACK_CALLS, TRACK_CALLS), 3);
    json_decref(root);
    close_subject(&s);
}

/* A GPU's spans have tracks of their own, on the workers' clock; without them there are none. */
Test(trace, shows_a_gpu, .timeout = 60)
{
    struct subject s = traced(2, 1000);
    struct numoe_trace *trace = s.context->trace;
    const uint64_t now = numoe_now_ns();
    const struct trace_event copy = {now, now + 5000, TRACE_GPU_COPY, {7, 12, 4096}};
    const struct trace_event compute = {now + 5000, now + 9000, TRACE_GPU_COMPUTE, {7, 12}};
    int copies = 0, computed = 0, names = 0;
    json_t *root, *event;
    size_t i;

    numoe_trace_add(trace, numoe_trace_gpu(trace, 0, true), &copy);
    root = written(s.context);
    json_array_foreach(json_object_get(root, "traceEvents"), i, event) names +=
        !strcmp(word(event, "name"), "thread_name") &&
        strstr(word(json_object_get(event, "args"), "name"), "GPU") != NULL;
    cr_expect_eq(names, 1);
    json_decref(root);
    numoe_trace_add(trace, numoe_trace_gpu(trace, 0, false), &compute);
    root = written(s.context);
    json_array_foreach(json_object_get(root, "traceEvents"), i, event)
    {
        if (!strcmp(word(event, "name"), "copy")) {
            copies++;
            cr_expect_eq(argument(event, "layer"), 7);
            cr_expect_eq(argument(event, "experts"), 12);
            cr_expect_eq(argument(event, "kib"), 4096);
            cr_expect_eq(time_of(event, "dur"), 5000);
        }
        if (!strcmp(word(event, "name"), "compute")) {
            computed++;
            cr_expect_eq(time_of(event, "dur"), 4000);
        }
    }
    cr_expect_eq(copies, 1);
    cr_expect_eq(computed, 1);
    json_decref(root);
    close_subject(&s);
}

Test(trace, may_be_written_before_anything_happened, .timeout = 60)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe *context = NULL;
    json_t *root;

    options.topology = TWO_NODES;
    options.threads = 1;
    options.trace_events = 1;
    cr_assert_eq(numoe_open(&options, &context, NULL), 0);
    root = written(context);
    check_trace(root, 1);
    cr_expect_eq(dropped(root), 0);
    json_decref(root);
    numoe_close(context);
}

Test(trace, is_refused_where_there_is_none, .timeout = 60)
{
    struct subject s = traced(1, 10);
    struct numoe *without = NULL;
    FILE *full = fopen("/dev/full", "w");

    cr_assert_not_null(full);
    cr_assert_eq(numoe_open(NULL, &without, NULL), 0);
    cr_expect_eq(numoe_trace_write(without, stdout), -EINVAL);
    cr_expect_eq(numoe_trace_write(NULL, stdout), -EINVAL);
    cr_expect_eq(numoe_trace_write(s.context, NULL), -EINVAL);
    cr_expect_eq(numoe_trace_write(s.context, full), -EIO);
    fclose(full);
    numoe_close(without);
    close_subject(&s);
}
