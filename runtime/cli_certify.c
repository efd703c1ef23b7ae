/* numoe certify. SPDX-License-Identifier: Apache-2.0 */
#include "cli_certify.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli_options.h"
#include "cli_output.h"
#include "numoe_gpu.h"

static void progress(const struct certify_check *check, uint32_t done, uint32_t count)
{
    if (check->state == CERTIFY_FAILED || check->state == CERTIFY_ERROR) {
        cli_progress_end();
        cli_error("certify", "%s: %s", check->id, check->text);
    }
    cli_progress("%" PRIu32 " of %" PRIu32 " checks, %s", done, count, check->id);
}

/* Of a group of checks: how many there are of each outcome, and the worst distance. */
struct tally {
    uint32_t of[CERTIFY_ERROR + 1];
    double worst;
};

static void count(struct tally *t, const struct certify_check *check)
{
    t->of[check->state]++;
    if (!(check->rel_l2 <= t->worst) && !isnan(check->rel_l2))
        t->worst = check->rel_l2;
}

/* A row a form: "form-32" out of "form-32.silu.8" and of "codes.form-32.gate". */
static void row_of(const struct certify_check *check, char name[32])
{
    const char *from = check->id, *end;

    if (check->kind == CERTIFY_CODES)
        from = strchr(from, '.') + 1;
    end = strchr(from, '.');
    snprintf(name, 32, "%s%.*s", check->kind == CERTIFY_CODES ? "codes " : "", (int)(end - from),
             from);
}

static void print_rows(const struct certify *c, FILE *out, bool markdown)
{
    const char *const line =
        markdown ? "| %s | %u | %u | %u | %u | %.2e |\n" : "%-20s %6u %6u %6u %6u   %.2e\n";

    fprintf(out, markdown ? "| kernels | ok | failed | absent | errors | worst rel. L2 |\n"
                            "|---|---|---|---|---|---|\n"
                          : "kernels                  ok failed absent errors   worst rel. L2\n");
    for (uint32_t i = 0; i < c->count;) {
        struct tally t = {.worst = 0};
        char name[32], other[32];

        if (c->checks[i].kind > CERTIFY_MARLIN)
            break;
        row_of(&c->checks[i], name);
        for (; i < c->count && c->checks[i].kind <= CERTIFY_MARLIN; i++) {
            row_of(&c->checks[i], other);
            if (strcmp(name, other) != 0)
                break;
            count(&t, &c->checks[i]);
        }
        fprintf(out, line, name, t.of[CERTIFY_OK], t.of[CERTIFY_FAILED], t.of[CERTIFY_ABSENT],
                t.of[CERTIFY_ERROR] + t.of[CERTIFY_OPEN], t.worst);
    }
}

static void print_rates(const struct certify *c, FILE *out, bool markdown)
{
    for (uint32_t i = 0; i < c->count; i++) {
        const struct certify_check *check = &c->checks[i];
        if (check->kind == CERTIFY_RATES && check->state == CERTIFY_OK)
            fprintf(out,
                    "\nreads its memory at %.0f GB/s, the link gives %.1f GB/s from pinned memory, "
                    "mma.sync %.0f Gop/s\n",
                    check->value[0], check->value[1], check->value[2]);
        if (check->kind == CERTIFY_RATES)
            fprintf(out, markdown
                             ? "\n| prompt | tokens/s | total/max(copy, compute) | of link |\n"
                               "|---|---|---|---|\n"
                             : "\nprompt  tokens/s  total/max   of link   (V4-Flash, 43 layers' "
                               "experts copied for each prompt)\n");
        if (check->kind == CERTIFY_PREFILL && check->state == CERTIFY_OK)
            fprintf(out, markdown ? "| %u | %.0f | %.3f | %.3f |\n" : "%6u %9.0f %10.3f %9.3f\n",
                    (unsigned)check->tokens, check->value[0], check->value[1], check->value[2]);
    }
}

static void print_wrong(const struct certify *c, FILE *out)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->checks[i].state == CERTIFY_FAILED || c->checks[i].state == CERTIFY_ERROR)
            fprintf(out, "\n- %s: %s: %s", c->checks[i].id, certify_state_name(c->checks[i].state),
                    c->checks[i].text);
    if (certify_failures(c))
        fputc('\n', out);
}

static void print(const struct certify *c, const char *verdict, FILE *out, bool markdown)
{
    fprintf(out, markdown ? "### %s\n\n%s\n\n" : "%s\n%s\n\n", c->device, verdict);
    print_rows(c, out, markdown);
    print_rates(c, out, markdown);
    print_wrong(c, out);
}

static int write_report(const struct certify *c, const char *verdict, const char *path)
{
    FILE *file = fopen(path, "we");
    int rc = file ? 0 : -errno;

    if (file) {
        errno = 0;
        print(c, verdict, file, true);
        if (fflush(file) || ferror(file))
            rc = errno ? -errno : -EIO;
        if (fclose(file) && !rc)
            rc = -errno;
    }
    return cli_written(path, rc);
}

static json_t *json_of(const struct certify *c, const char *verdict)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < c->count; i++) {
        const struct certify_check *check = &c->checks[i];
        json_t *object = json_pack("{s:s, s:s, s:s}", "id", check->id, "state",
                                   certify_state_name(check->state), "text", check->text);
        if (check->kind <= CERTIFY_MARLIN)
            json_object_set_new(object, "rel_l2", cli_json_number(check->rel_l2));
        if (check->kind == CERTIFY_RATES) {
            json_object_set_new(object, "read_gbs", cli_json_number(check->value[0]));
            json_object_set_new(object, "link_gbs", cli_json_number(check->value[1]));
            json_object_set_new(object, "mma_gops", cli_json_number(check->value[2]));
        }
        if (check->kind == CERTIFY_PREFILL) {
            json_object_set_new(object, "tokens", json_integer(check->tokens));
            json_object_set_new(object, "tokens_s", cli_json_number(check->value[0]));
            json_object_set_new(object, "total_over_max", cli_json_number(check->value[1]));
            json_object_set_new(object, "link_fraction", cli_json_number(check->value[2]));
        }
        json_array_append_new(list, object);
    }
    return json_pack("{s:s, s:s, s:I, s:o}", "device", c->device, "verdict", verdict, "failures",
                     (json_int_t)certify_failures(c), "checks", list);
}

int certify_command(struct certify *c, const char *verdict, const struct cli_values *values)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    int code = CLI_OK;

    if (values->resume && certify_resume(c, values->resume, &error)) {
        cli_error(error.where, "%s", error.message);
        return CLI_BAD_INPUT;
    }
    if (c->anew)
        cli_error("warning", "%s has no check in it: it is begun anew", values->resume);
    if (certify_run(c, values->resume, progress, &error)) {
        cli_progress_end();
        cli_error("certify", "%s", error.message);
        code = CLI_FAILURE; /* and what was found is shown */
    }
    cli_progress_end();
    if (values->report) {
        const int written = write_report(c, verdict, values->report);

        code = code ? code : written;
    }
    if (!code && certify_failures(c))
        code = CLI_CHECK_FAILED;
    if (values->json) {
        const int printed = cli_print_json(json_of(c, verdict));

        return code ? code : printed;
    }
    print(c, verdict, stdout, false);
    return cli_flush(code);
}

static int run(const struct cli_values *values)
{
    const struct numoe_log log = cli_log();
    struct numoe_gpu_verdict verdict = {.rel_l2 = -1};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_gpu *gpu = NULL;
    struct certify c = {0};
    int code;

    /* a device that the gate would refuse is looked at all the same, and the gate's reason shown */
    if (numoe_gpu_open(values->device, NUMOE_GPU_FORCE, NULL, &log, &gpu, &verdict, &error)) {
        cli_error("certify", "%s", error.message);
        return CLI_FAILURE;
    }
    if (certify_init(&c, gpu)) {
        cli_error("certify", "out of memory");
        code = CLI_NO_ROOM;
    } else {
        code = certify_command(&c, verdict.reason, values);
    }
    certify_fini(&c);
    numoe_gpu_close(gpu);
    return code;
}

static const enum cli_option options[] = {CLI_DEVICE, CLI_RESUME, CLI_REPORT, CLI_JSON, CLI_END};

const struct cli_verb cli_certify = {
    .name = "certify",
    .arguments = "",
    .summary = "check every kernel on a GPU, measure it, and write a report",
    .description =
        "Compute random experts by every form of the kernels, with every activation, for 1 to\n"
        "8192 tokens, launched and as a replayed graph, and compare with float64 and bit by bit\n"
        "with each other; then every code with every scale byte in every matrix; then experts\n"
        "streamed piece by piece, beside the same step by step, and passed on between the device\n"
        "and itself taken as two; then repacking to Marlin's layout, bit by bit; then measure the\n"
        "device's memory, its link and its tensor cores, and how many tokens a second of\n"
        "DeepSeek-V4-Flash's experts it computes while they are copied, by length of the\n"
        "prompt.\n"
        "With --resume FILE each check is written to FILE when it is done, and what FILE has is\n"
        "not done again; an interrupt ends it at once, and loses nothing of that. Exit status\n"
        "5: a check failed. When a GPU is used, forms of kernels that compute wrong there are\n"
        "found by the self-test and not used, and the others are.\n",
    .directory = CLI_DIRECTORY_NONE,
    .options = options,
    .run = run,
};
