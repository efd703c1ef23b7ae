/* numoe soak. SPDX-License-Identifier: Apache-2.0 */
#include "cli_soak.h"

#include "cli_output.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_DURATION_S 60.0
#define LINE_EVERY_S 10.0

static atomic_bool stop;

/* The first signal ends the walk after its step, with a report; the second ends the process. */
static void interrupted(int number)
{
    (void)number;
    atomic_store_explicit(&stop, true, memory_order_relaxed);
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = interrupted,
                               .sa_flags = (int)SA_RESETHAND | SA_RESTART};

    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static uint64_t mib(uint64_t bytes)
{
    return bytes == UINT64_MAX ? 0 : bytes >> 20;
}

/* On a terminal one line that is replaced; else a line now and then. */
static void show(void *user, const struct numoe_soak_report *r)
{
    double *next = user;
    char line[256];

    snprintf(line, sizeof line,
             "%.0f s, step %" PRIu64 ", cycle %" PRIu64 ": %" PRIu64 " calls, %" PRIu64
             " tokens, %" PRIu64 " checked, worst relative L2 %.1e, %" PRIu64 " MiB, %" PRIu64
             " maps after teardown",
             r->seconds, r->steps, r->cycles, r->calls, r->tokens, r->checks, r->worst_rel_l2,
             mib(r->now.anonymous_bytes), r->now.maps == UINT64_MAX ? 0 : r->now.maps);
    if (isatty(STDERR_FILENO)) {
        cli_progress("%s", line);
    } else if (r->seconds >= *next) {
        fprintf(stderr, "%s\n", line);
        *next = r->seconds + LINE_EVERY_S;
    }
}

static double rate(const struct numoe_soak_report *r, uint64_t count)
{
    return r->seconds > 0 ? (double)count / r->seconds : 0;
}

static void print_usage_row(const char *what, uint64_t before, uint64_t after, uint64_t unit)
{
    if (before == UINT64_MAX || after == UINT64_MAX)
        printf("  %-32s not watched in this build or on this system\n", what);
    else
        printf("  %-32s %" PRIu64 " -> %" PRIu64 "\n", what, before / unit, after / unit);
}

static void print_text(const struct numoe_soak_report *r)
{
    printf("%.1f s, %" PRIu64 " steps in %" PRIu64 " cycles\noperations:", r->seconds, r->steps,
           r->cycles);
    for (int k = 0; k < NUMOE_SOAK_KINDS; k++)
        printf(" %s %" PRIu64 "%s", numoe_soak_kind_name((enum numoe_soak_kind)k), r->operations[k],
               k + 1 < NUMOE_SOAK_KINDS ? "," : "\n");
    printf("layers computed: %" PRIu64 " (%.1f a second), %" PRIu64
           " tokens (%.0f a second), %" PRIu64 " pairs, %" PRIu64 " steals\n",
           r->calls, rate(r, r->calls), r->tokens, rate(r, r->tokens), r->pairs, r->steals);
    if (r->gpu_tokens)
        printf("computed by a GPU: %" PRIu64 " of the tokens\n", r->gpu_tokens);
    printf("checked against float64: %" PRIu64 " calls, %" PRIu64
           " tokens; worst relative L2 %.2e; worst output %.1f times its expected error\n",
           r->checks, r->checked_tokens, r->worst_rel_l2, r->worst_deviation);
    printf("repeated with the same bits: %" PRIu64 " calls\n", r->repeats);
    printf("resources after the warm-up -> after the last teardown (peak %" PRIu64
           " MiB resident)\n",
           r->peak_bytes >> 20);
    print_usage_row("anonymous memory, KiB", r->baseline.anonymous_bytes, r->now.anonymous_bytes,
                    1024);
    print_usage_row("mappings", r->baseline.maps, r->now.maps, 1);
    print_usage_row("threads", r->baseline.threads, r->now.threads, 1);
    print_usage_row("descriptors", r->baseline.descriptors, r->now.descriptors, 1);
    printf("%s\n", r->failed ? "FAILED" : "passed");
}

static json_t *number_or_null(uint64_t value)
{
    return value == UINT64_MAX ? json_null() : json_integer((json_int_t)value);
}

static json_t *json_of_usage(const struct numoe_soak_usage *usage)
{
    return json_pack("{s:o, s:o, s:o, s:o}", "anonymous_bytes",
                     number_or_null(usage->anonymous_bytes), "maps", number_or_null(usage->maps),
                     "threads", number_or_null(usage->threads), "descriptors",
                     number_or_null(usage->descriptors));
}

static json_t *json_of_report(const struct numoe_soak_report *r)
{
    json_t *operations = json_object();
    char seed[24]; /* a string: JSON readers disagree on integers past 2^53 */

    snprintf(seed, sizeof seed, "%" PRIu64, r->seed);
    for (int k = 0; k < NUMOE_SOAK_KINDS; k++)
        json_object_set_new(operations, numoe_soak_kind_name((enum numoe_soak_kind)k),
                            json_integer((json_int_t)r->operations[k]));
    return json_pack(
        "{s:s, s:b, s:o, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:I, s:I, "
        "s:o, s:o,"
        " s:s, s:s}",
        "seed", seed, "passed", !r->failed, "seconds", cli_json_number(r->seconds), "steps",
        (json_int_t)r->steps, "cycles", (json_int_t)r->cycles, "operations", operations, "calls",
        (json_int_t)r->calls, "tokens", (json_int_t)r->tokens, "pairs", (json_int_t)r->pairs,
        "gpu_tokens", (json_int_t)r->gpu_tokens, "checks", (json_int_t)r->checks, "checked_tokens",
        (json_int_t)r->checked_tokens, "repeats", (json_int_t)r->repeats, "worst_rel_l2",
        cli_json_number(r->worst_rel_l2), "worst_deviation", cli_json_number(r->worst_deviation),
        "steals", (json_int_t)r->steals, "peak_bytes", (json_int_t)r->peak_bytes, "baseline",
        json_of_usage(&r->baseline), "now", json_of_usage(&r->now), "failure", r->failure,
        "reproduce", r->reproduce);
}

void cli_soak_options(const struct cli_values *values, struct numoe_soak_options *options)
{
    *options = (struct numoe_soak_options){
        .duration_s = (double)values->duration_s,
        .steps = values->steps,
        .seed = values->seed,
        .topology = values->topology,
        .workers = values->workers,
        .threads = values->threads,
        .gpu = values->gpu,
        .batch_invariant = values->batch_invariant,
        .log = cli_log(),
    };
    if (!values->duration_s && !values->steps)
        options->duration_s = DEFAULT_DURATION_S;
}

static int run(const struct cli_values *values)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_soak_options options;
    struct numoe_soak_report report;
    double next = 0;
    int code, rc;

    cli_soak_options(values, &options);
    options.progress = show;
    options.progress_user = &next;
    options.stop = &stop;
    fprintf(values->json ? stderr : stdout, "seed %" PRIu64 "\n", values->seed);
    fflush(stdout);
    catch_signals();
    rc = numoe_soak_run(&options, &report, &error);
    cli_progress_end();
    if (rc && !report.failed) {
        const bool described = cli_is_about(&error, options.topology);

        return cli_report("soak", described ? CLI_STAGE_INPUT : CLI_STAGE_OPTIONS, &error);
    }
    code = rc ? CLI_FAILURE : CLI_OK;
    if (values->json) {
        const int printed = cli_print_json(json_of_report(&report));

        code = code ? code : printed;
    } else {
        print_text(&report);
        code = cli_flush(code);
    }
    if (rc) {
        cli_error("soak", "step %" PRIu64 " of seed %" PRIu64 ": %s", report.failed_step,
                  report.seed, report.failure);
        fprintf(stderr, "reproduce: %s\n", report.reproduce);
    }
    return code;
}

static const enum cli_option options[] = {CLI_DURATION, CLI_STEPS,   CLI_SEED, CLI_TOPOLOGY,
                                          CLI_WORKERS,  CLI_THREADS, CLI_GPU,  CLI_BATCH_INVARIANT,
                                          CLI_JSON,     CLI_END};

const struct cli_verb cli_soak = {
    .name = "soak",
    .arguments = "",
    .summary = "do everything at random for a while, checking every result",
    .description =
        "Walk at random, by a seed, over contexts, models, checkpoints, batches, callers and\n"
        "pools, on this machine and on described ones. Results are compared with float64 and\n"
        "with the same calls under other threads; after everything was closed, memory,\n"
        "mappings, threads and descriptors must be back where they were after a warm-up. Ends\n"
        "with a report and status 0, or with status 1 and a command that repeats the failure.\n"
        "Without progress for 60 seconds, says what was running and ends with status 1.\n",
    .directory = CLI_DIRECTORY_NONE,
    .options = options,
    .run = run,
};
