/* Stats and traces of the numoe command. */
#include "cli_answer.h"
#include "support/exposition.h"

#include <math.h>

/* A checkpoint of one layer of four experts of V4-Flash's widths, 53 MB. */
static char directory[128], trace[160];

static void make_checkpoint(void)
{
    struct answer answer;

    snprintf(directory, sizeof directory, "%s/numoe-stats-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    cr_assert_not_null(mkdtemp(directory));
    snprintf(trace, sizeof trace, "%s/trace.json", directory);
    answer = numoe("synth", "--model", "v4-flash", "--layers", "1", "--experts", "4", "--seed", "7",
                   directory, NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    forget(&answer);
}

static void remove_checkpoint(void)
{
    char command[sizeof directory + 16];

    if (!*directory)
        return;
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    cr_expect_eq(system(command), 0);
}

TestSuite(cli_stats, .init = make_checkpoint, .fini = remove_checkpoint, .timeout = 300);

/* The object that ends the answer. */
static json_t *last_object(const char *text)
{
    const char *begin = strstr(text, "\n{\n");
    json_error_t error;
    json_t *root;

    cr_assert_not_null(begin, "%s", text);
    root = json_loads(begin, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(root, "line %d: %s in %s", error.line, error.text, begin);
    return root;
}

/* One repetition for one token: a call that grows the workspace and the one that is measured. */
#define RUN "run", directory, "--tokens", "1", "--repeat", "1"

static void check_stats(const json_t *stats)
{
    const json_t *workers = json_object_get(stats, "workers"), *worker;
    const json_t *node = json_array_get(json_object_get(stats, "nodes"), 0);
    json_int_t items = 0, busy = 0;
    size_t i;

    cr_expect(json_is_true(json_object_get(stats, "timed")));
    cr_expect_eq(integer(stats, "calls"), 2);
    cr_expect_eq(integer(stats, "tokens"), 2);
    cr_expect_eq(integer(stats, "expert_bytes"), 2 * 4 * 13369344ll);
    cr_expect_eq(integer(stats, "models"), 1);
    json_array_foreach(workers, i, worker)
    {
        items += integer(worker, "items");
        busy += integer(worker, "busy_ns");
    }
    cr_expect_gt(items, 0);
    cr_expect_gt(busy, 0);
    cr_expect_gt(integer(node, "planned_bytes"), 0);
}

Test(cli_stats, run_prints_a_table)
{
    struct answer answer = numoe(RUN, "--stats", NULL);

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_not_null(strstr(answer.out, "memory after loading"));
    cr_expect_not_null(strstr(answer.out, "worker    CPU  node"), "%s", answer.out);
    cr_expect_not_null(strstr(answer.out, "the busiest worker was busy"), "%s", answer.out);
    forget(&answer);

    answer = numoe(RUN, NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_null(strstr(answer.out, "worker    CPU  node"));
    forget(&answer);
}

Test(cli_stats, run_prints_json_after_the_report_or_within_it)
{
    struct answer answer = numoe(RUN, "--stats=json", NULL);
    json_t *root;

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_not_null(strstr(answer.out, "memory after loading"));
    root = last_object(answer.out);
    check_stats(root);
    json_decref(root);
    forget(&answer);

    answer = numoe(RUN, "--stats", "--json", NULL);
    root = parse(&answer);
    check_stats(json_object_get(root, "stats"));
    json_decref(root);
    forget(&answer);

    answer = numoe(RUN, "--json", NULL);
    root = parse(&answer);
    cr_expect_null(json_object_get(root, "stats"));
    json_decref(root);
    forget(&answer);
}

Test(cli_stats, run_prints_prometheus_text)
{
    struct answer answer = numoe(RUN, "--stats=prometheus", NULL);
    const char *begin, *wrong;
    struct exposition e;
    double value;

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    begin = strstr(answer.out, "# HELP ");
    cr_assert_not_null(begin, "%s", answer.out);
    wrong = exposition_read(begin, &e);
    cr_assert_null(wrong, "%s in %s", wrong, begin);
    cr_assert(exposition_value(&e, "numoe_calls_total", &value));
    cr_expect_eq(value, 2);
    cr_assert(exposition_value(&e, "numoe_expert_bytes_total", &value));
    cr_expect_eq(value, 2 * 4 * 13369344.0);
    exposition_free(&e);
    forget(&answer);
}

Test(cli_stats, run_writes_a_trace)
{
    struct answer answer = numoe(RUN, "--trace", trace, NULL);
    json_error_t error;
    json_t *root, *event;
    size_t i, calls = 0, experts = 0;

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_null(strstr(answer.out, "worker    CPU  node"));
    root = json_load_file(trace, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(root, "line %d: %s", error.line, error.text);
    cr_expect_eq(integer(json_object_get(root, "otherData"), "dropped_events"), 0);
    json_array_foreach(json_object_get(root, "traceEvents"), i, event)
    {
        const char *name = json_string_value(json_object_get(event, "name"));

        calls += strcmp(name, "call") == 0;
        experts += strncmp(name, "expert ", 7) == 0;
    }
    cr_expect_eq(calls, 2);
    cr_expect_geq(experts, 2 * 4);
    json_decref(root);
    forget(&answer);
}

Test(cli_stats, what_cannot_be_is_refused)
{
    struct answer answer = numoe(RUN, "--stats=yaml", NULL);

    assert_refused(answer, 2, "\"yaml\" is neither json nor prometheus");
    answer = numoe(RUN, "--stats=", NULL);
    assert_refused(answer, 2, "neither json nor prometheus");
    answer = numoe(RUN, "--stats=prometheus", "--json", NULL);
    assert_refused(answer, 2, "--json");
    answer = numoe(RUN, "--trace", "/no/such/folder/trace.json", NULL);
    assert_refused(answer, 1, "/no/such/folder/trace.json");
    answer = numoe(RUN, "--trace", NULL);
    assert_refused(answer, 2, "--trace");
    answer = numoe("plan", directory, "--stats", NULL);
    assert_refused(answer, 2, "--stats");
    answer = numoe("bench", "--stats", "--gpu", NULL);
    assert_refused(answer, 2, "--stats");
    answer = numoe("bench", "--stats=json", NULL);
    assert_refused(answer, 2, "--stats");
}

Test(cli_stats, a_trace_that_does_not_fit_is_a_failure)
{
    struct answer answer = numoe(RUN, "--trace", "/dev/full", NULL);

    cr_expect_eq(answer.status, 3);
    cr_expect_not_null(strstr(answer.err, "/dev/full: could not be written: No space left"), "%s",
                       answer.err);
    cr_expect_not_null(strstr(answer.out, "memory after loading"));
    forget(&answer);
}

Test(cli_stats, bench_shows_how_busy_workers_are)
{
    struct answer answer = numoe("bench", "--experts", "4", "--tokens", "1", "--repeat", "3",
                                 "--stats", "--json", NULL);
    json_t *root = parse(&answer);
    const json_t *cell = json_array_get(json_object_get(root, "results"), 0);

    cr_expect_gt(number(cell, "busy_fraction"), 0);
    cr_expect_leq(number(cell, "busy_fraction"), 1);
    cr_expect_geq(number(cell, "busy_imbalance"), 1);
    json_decref(root);
    forget(&answer);

    answer = numoe("bench", "--experts", "4", "--tokens", "1", "--repeat", "3", "--json", NULL);
    root = parse(&answer);
    cell = json_array_get(json_object_get(root, "results"), 0);
    cr_expect(json_is_null(json_object_get(cell, "busy_fraction")));
    json_decref(root);
    forget(&answer);
}
