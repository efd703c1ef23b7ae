/* The soak itself: that it is the same walk each time, and that it notices what goes wrong. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wordexp.h>

#include "base/sanitized.h"
#include "cli_soak.h"
#include "soak.h"

#define MANY_NODES "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2"

static struct numoe_soak_options walk_of(uint64_t seed, uint64_t steps)
{
    return (struct numoe_soak_options){.seed = seed, .steps = steps, .scratch = NUMOE_BINARY_DIR};
}

static struct numoe_soak_report walk_ok(const struct numoe_soak_options *options)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_soak_report report;
    int rc = numoe_soak_run(options, &report, &error);

    cr_assert_eq(rc, 0, "%d: %s; %s", rc, error.message, report.reproduce);
    cr_assert(!report.failed);
    cr_assert_str_empty(report.failure);
    cr_assert_str_empty(report.reproduce);
    return report;
}

/* ---- a walk ---------------------------------------------------------------------------------- */

Test(soak_walk, does_everything_and_leaves_nothing, .timeout = 240)
{
    char folder[] = NUMOE_BINARY_DIR "/soak-XXXXXX";
    struct numoe_soak_options options = walk_of(1, 150);
    struct numoe_soak_report report;

    cr_assert_not_null(mkdtemp(folder));
    options.scratch = folder;
    report = walk_ok(&options);
    cr_assert_eq(report.steps, 150);
    for (int k = 0; k < NUMOE_SOAK_KINDS; k++)
        cr_expect_gt(report.operations[k], 0, "%s never happened",
                     numoe_soak_kind_name((enum numoe_soak_kind)k));
    cr_expect_gt(report.calls, report.checks);
    cr_expect_gt(report.checks, 50);
    cr_expect_gt(report.repeats, 20);
    cr_expect_gt(report.tokens, 1000);
    cr_expect_gt(report.steals, 0);
    cr_expect_gt(report.peak_bytes, 0);
    cr_expect(report.worst_rel_l2 > 1e-4 && report.worst_rel_l2 < 0.1, "%g", report.worst_rel_l2);
    cr_expect(report.worst_deviation > 0.5 && report.worst_deviation < 6, "%g",
              report.worst_deviation);
    cr_expect_eq(report.now.descriptors, report.baseline.descriptors);
    cr_expect_eq(report.now.threads, report.baseline.threads);
    cr_expect_eq(rmdir(folder), 0, "%s is not empty", folder);
}

Test(soak_walk, is_the_same_for_a_seed_and_not_for_another, .timeout = 240)
{
    struct numoe_soak_options options = walk_of(77, 60);
    struct numoe_soak_report first = walk_ok(&options), second = walk_ok(&options), other;

    cr_expect_arr_eq(first.operations, second.operations, sizeof first.operations);
    cr_expect_eq(first.calls, second.calls);
    cr_expect_eq(first.tokens, second.tokens);
    cr_expect_eq(first.pairs, second.pairs);
    cr_expect_eq(first.checked_tokens, second.checked_tokens);
    cr_expect_eq(first.worst_deviation, second.worst_deviation);
    options.seed = 78;
    other = walk_ok(&options);
    cr_expect_neq(first.tokens, other.tokens);
    cr_expect_neq(first.pairs, other.pairs);
}

Test(soak_walk, runs_on_thirty_two_nodes, .timeout = 240)
{
    struct numoe_soak_options options = walk_of(3, 40);

    options.topology = MANY_NODES;
    walk_ok(&options);
    options.threads = 5;
    walk_ok(&options);
}

Test(soak_walk, ends_by_time_and_by_request, .timeout = 120)
{
    struct numoe_soak_options options = walk_of(4, 0);
    atomic_bool stop = true;

    options.duration_s = 1.5;
    cr_expect_gt(walk_ok(&options).seconds, 1.5);
    options.duration_s = 3600;
    options.stop = &stop;
    cr_expect_eq(walk_ok(&options).steps, 0);
}

Test(soak_walk, refuses_options_that_say_nothing, .timeout = 60)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_soak_options options = walk_of(1, 0);
    struct numoe_soak_report report;

    cr_expect_eq(numoe_soak_run(&options, &report, &error), -EINVAL);
    cr_expect(!report.failed);
    cr_expect(*error.message);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

/* Runs the walk, which must find something; replays it by the line that it gives. */
static struct numoe_soak_report walk_wrong(const struct numoe_soak_options *options,
                                           const char *words)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_soak_report report;

    cr_assert_neq(numoe_soak_run(options, &report, &error), 0, "nothing was noticed");
    cr_assert(report.failed);
    cr_assert_not_null(strstr(report.failure, words), "\"%s\" is not in: %s", words,
                       report.failure);
    cr_assert_eq(strncmp(error.message, report.failure, strlen(error.message)), 0);
    cr_assert_eq(strncmp(report.reproduce, "numoe soak --seed ", 18), 0, "%s", report.reproduce);
    return report;
}

/* The command line as the shell and the numoe command read it, with the same sabotage. */
static void replay(const struct numoe_soak_report *report, const struct numoe_soak_options *with,
                   const char *words)
{
    struct numoe_soak_options options;
    struct numoe_soak_report again;
    struct cli_values values;
    wordexp_t line;

    cr_assert_eq(wordexp(report->reproduce, &line, WRDE_NOCMD), 0, "%s", report->reproduce);
    cr_assert_str_eq(line.we_wordv[1], cli_soak.name);
    cr_assert_eq(cli_parse(&cli_soak, (int)line.we_wordc - 1, line.we_wordv + 1, &values), -1);
    cli_soak_options(&values, &options);
    cr_expect_eq(options.duration_s, 0);
    if (with->topology)
        cr_expect_str_eq(options.topology, with->topology);
    cr_expect_eq(options.threads, with->threads);
    cr_expect_eq(options.workers, with->workers);
    options.scratch = with->scratch;

    /* without what was done to it, all is well */
    walk_ok(&options);
    options.hooks = with->hooks;
    again = walk_wrong(&options, words);
    cr_expect_str_eq(again.failure, report->failure);
    cr_expect_eq(again.failed_step, options.steps, "in step %lu of %lu", again.failed_step,
                 options.steps);
    wordfree(&line);
    cli_values_free(&values);
}

static void change_output(const struct numoe_soak_call *call, void *out, uint64_t token,
                          uint64_t output, float factor)
{
    const uint64_t at = token * call->out_stride + output;

    if (call->out_type == NUMOE_F32) {
        ((float *)out)[at] *= factor;
        return;
    }
    const uint32_t word = (uint32_t)((uint16_t *)out)[at] << 16;
    float value;
    uint32_t bits;
    memcpy(&value, &word, 4);
    value *= factor;
    memcpy(&bits, &value, 4);
    ((uint16_t *)out)[at] = (uint16_t)(bits >> 16);
}

/* Makes every output of a checked token half as large again, in calls that are rare enough not to
 * come in the first cycle. What it does follows from the call alone, so that a replay meets it. */
static void spoil(void *user, const struct numoe_soak_call *call, void *out)
{
    (void)user;
    if (call->tokens % 16 != 9 || call->hidden < 32 || !call->checked_count)
        return;
    for (uint64_t i = 0; i < call->hidden; i++)
        change_output(call, out, call->checked[0], i, 1.5f);
}

Test(soak_wrong, a_wrong_result_is_found_and_found_again, .timeout = 400)
{
    static const struct numoe_soak_hooks hooks = {.computed = spoil};
    struct numoe_soak_options options = walk_of(11, 2000);
    struct numoe_soak_report report;

    options.hooks = &hooks;
    report = walk_wrong(&options, " was expected within ");
    cr_expect_gt(report.cycles, 0, "step %lu is in the first cycle", report.failed_step);
    replay(&report, &options, " was expected within ");
}

Test(soak_wrong, the_line_carries_the_options, .timeout = 400)
{
    static const struct numoe_soak_hooks hooks = {.computed = spoil};
    struct numoe_soak_options options = walk_of(12, 2000);
    struct numoe_soak_report report;

    options.hooks = &hooks;
    options.topology = "numa:2(memory=1GB) core:2 pu:1";
    options.threads = 3;
    options.workers = 6;
    report = walk_wrong(&options, " was expected within ");
    replay(&report, &options, " was expected within ");
}

/* A single output, by as much as it is. */
static void spoil_one(void *user, const struct numoe_soak_call *call, void *out)
{
    (void)user;
    if (call->tokens > 8 && call->hidden >= 64 && call->checked_count)
        change_output(call, out, call->checked[0], call->hidden / 2, -1.0f);
}

Test(soak_wrong, a_single_wrong_output_is_found, .timeout = 120)
{
    static const struct numoe_soak_hooks hooks = {.computed = spoil_one};
    struct numoe_soak_options options = walk_of(13, 2000);

    options.hooks = &hooks;
    walk_wrong(&options, " was expected within ");
}

static void write_before(void *user, const struct numoe_soak_call *call, void *out)
{
    (void)user;
    if (call->tokens > 8)
        ((uint8_t *)out)[-3] ^= 1;
}

Test(soak_wrong, a_write_outside_is_found, .timeout = 120)
{
    static const struct numoe_soak_hooks hooks = {.computed = write_before};
    struct numoe_soak_options options = walk_of(14, 2000);

    options.hooks = &hooks;
    walk_wrong(&options, "wrote outside of its outputs");
}

/* An output that no check looks at differs from one call to the next. */
static void differ(void *user, const struct numoe_soak_call *call, void *out)
{
    static float factor = 1.5f;

    (void)user;
    for (uint64_t t = 0; t < call->tokens && call->tokens > 8; t++) {
        bool looked_at = false;

        for (uint32_t i = 0; i < call->checked_count; i++)
            looked_at = looked_at || call->checked[i] == t;
        if (!looked_at)
            change_output(call, out, t, 0, factor += 0.5f);
    }
}

Test(soak_wrong, other_bits_are_found, .timeout = 120)
{
    static const struct numoe_soak_hooks hooks = {.computed = differ};
    struct numoe_soak_options options = walk_of(15, 2000);

    options.hooks = &hooks;
    walk_wrong(&options, " gives other bits");
}

static void *sleep_on(void *user)
{
    pause();
    return user;
}

static void leak(void *user, enum numoe_soak_kind kind)
{
    const char *what = user;
    pthread_t thread;

    if (kind == NUMOE_SOAK_TEARDOWN)
        return;
    if (!strcmp(what, "descriptors")) {
        (void)open("/dev/null", O_RDONLY);
    } else if (!strcmp(what, "threads")) {
        pthread_create(&thread, NULL, sleep_on, NULL);
    } else if (!strcmp(what, "mappings")) {
        /* each of other rights than its neighbour, so that they are not joined */
        static int rights;
        (void)mmap(NULL, 4096, rights++ % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                   -1, 0);
    } else {
        uint8_t *bytes =
            mmap(NULL, 1 << 19, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(bytes, 1, 1 << 19);
    }
}

static void check_leak(const char *what)
{
    const struct numoe_soak_hooks hooks = {.user = (void *)(uintptr_t)what, .stepped = leak};
    struct numoe_soak_options options = walk_of(16, 2000);
    struct numoe_soak_report report;

    options.hooks = &hooks;
    report = walk_wrong(&options, what);
    /* no cycle alone is to blame: from the beginning */
    cr_expect_not_null(strstr(report.reproduce, "--seed 16 "), "%s", report.reproduce);
    cr_expect_eq(report.operations[NUMOE_SOAK_TEARDOWN], 1);
}

Test(soak_wrong, descriptors_that_stay_are_found, .timeout = 120)
{
    check_leak("descriptors");
}

Test(soak_wrong, threads_that_stay_are_found, .timeout = 120)
{
    check_leak("threads");
}

Test(soak_wrong, mappings_that_stay_are_found, .timeout = 120)
{
    if (SANITIZED)
        cr_skip_test("AddressSanitizer keeps mappings of its own");
    check_leak("mappings");
}

Test(soak_wrong, memory_that_stays_is_found, .timeout = 120)
{
    if (SANITIZED)
        cr_skip_test("AddressSanitizer keeps freed memory");
    check_leak("anonymous memory");
}

static void hang(void *user, const struct numoe_soak_call *call, void *out)
{
    (void)user;
    (void)out;
    if (call->tokens > 8)
        for (;;)
            pause();
}

static void log_to_pipe(void *user, enum numoe_log_level level, const char *message)
{
    if (level == NUMOE_LOG_ERROR)
        dprintf(*(int *)user, "%s\n", message);
}

/* In a process of its own: the watchdog ends it. */
Test(soak_wrong, a_walk_that_hangs_says_where_and_ends, .timeout = 120)
{
    char folder[] = NUMOE_BINARY_DIR "/soak-XXXXXX", text[8192] = "";
    size_t used = 0;
    int ends[2], status;
    ssize_t got;
    pid_t child;

    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(pipe(ends), 0);
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        const struct numoe_soak_hooks hooks = {.computed = hang};
        struct numoe_soak_options options = walk_of(17, 2000);
        struct numoe_soak_report report;

        close(ends[0]);
        options.scratch = folder;
        options.hooks = &hooks;
        options.watchdog_s = 3;
        options.log = (struct numoe_log){log_to_pipe, &ends[1]};
        numoe_soak_run(&options, &report, NULL);
        _exit(77);
    }
    close(ends[1]);
    while (used < sizeof text - 1 && (got = read(ends[0], text + used, sizeof text - 1 - used)) > 0)
        used += (size_t)got;
    close(ends[0]);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %x", status);
    cr_expect_not_null(strstr(text, "no progress for 3 s"), "%s", text);
    cr_expect_not_null(strstr(text, "reproduce: numoe soak --seed "), "%s", text);
    cr_expect_not_null(strstr(text, "is in state "), "%s", text);
    cr_expect_eq(rmdir(folder), 0, "%s is not empty", folder);
}

/* ---- the command ----------------------------------------------------------------------------- */

/* Exit status of a command; what it printed on stdout and stderr together. */
static int shell(const char *arguments, char *text, size_t size)
{
    char command[1024];
    FILE *pipe;
    size_t got;

    snprintf(command, sizeof command, "'%s/numoe' soak %s", NUMOE_BINARY_DIR, arguments);
    pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    got = fread(text, 1, size - 1, pipe);
    text[got] = 0;
    return WEXITSTATUS(pclose(pipe));
}

Test(soak_command, prints_the_seed_first_and_reports_last, .timeout = 120)
{
    char text[8192];

    cr_assert_eq(shell("--seed 18446744073709551615 --steps 20 2>/dev/null", text, sizeof text), 0,
                 "%s", text);
    cr_expect_eq(strncmp(text, "seed 18446744073709551615\n", 26), 0, "%s", text);
    cr_expect_not_null(strstr(text, "operations: open "), "%s", text);
    cr_expect_not_null(strstr(text, "worst relative L2"), "%s", text);
    cr_expect_not_null(strstr(text, "\npassed\n"), "%s", text);
}

Test(soak_command, reports_as_json, .timeout = 120)
{
    char text[8192];
    json_t *root;

    cr_assert_eq(shell("--seed 5 --steps 20 --json 2>/dev/null", text, sizeof text), 0, "%s", text);
    root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    cr_assert_not_null(root, "%s", text);
    cr_expect_str_eq(json_string_value(json_object_get(root, "seed")), "5");
    cr_expect_eq(json_integer_value(json_object_get(root, "steps")), 20);
    cr_expect(json_is_true(json_object_get(root, "passed")));
    cr_expect_eq(json_object_size(json_object_get(root, "operations")), NUMOE_SOAK_KINDS);
    json_decref(root);
}

Test(soak_command, refuses_what_it_cannot_do, .timeout = 60)
{
    static const char *const lines[] = {"--steps 0",   "--duration 0", "--duration 1.5x",
                                        "--threads 0", "--seed x",     "--threads 5000 --steps 5"};
    char line[128], text[4096];

    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        snprintf(line, sizeof line, "%s 2>&1 >/dev/null", lines[i]);
        cr_expect_eq(shell(line, text, sizeof text), 2, "%s: %s", lines[i], text);
        cr_expect_eq(strncmp(text, "numoe: ", 7), 0, "%s: %s", lines[i], text);
    }
    cr_expect_eq(shell("--topology 'pack:two core:1' --steps 5 2>&1 >/dev/null", text, sizeof text),
                 4, "%s", text);
    cr_expect_eq(strncmp(text, "numoe: pack:two core:1: ", 24), 0, "%s", text);
}
