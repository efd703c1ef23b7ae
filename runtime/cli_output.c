/* How the numoe command speaks. SPDX-License-Identifier: Apache-2.0 */
#include "cli_output.h"

#include "cli_options.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { TRACE_EVENTS = 16384 }; /* of each worker: a second of small calls */

static bool line_open; /* a progress line stands on the terminal */

void cli_progress_end(void)
{
    if (line_open)
        fputs("\r\033[K", stderr);
    line_open = false;
}

void cli_progress(const char *format, ...)
{
    va_list args;

    if (!isatty(STDERR_FILENO))
        return;
    fputs("\r\033[K", stderr);
    line_open = true;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

int cli_progress_load(void *user, const struct numoe_load_progress *progress)
{
    static const char *const stages[] = {[NUMOE_LOAD_MEMORY] = "making memory resident,",
                                         [NUMOE_LOAD_READING] = "loading",
                                         [NUMOE_LOAD_CHECKSUMS] = "taking checksums,"};
    double seconds = progress->seconds > 1e-3 ? progress->seconds : 1e-3;
    double rate = (double)progress->bytes_done / seconds;
    double left = rate > 0 ? (double)(progress->bytes_total - progress->bytes_done) / rate : 0;

    (void)user;
    cli_progress("%s %.2f of %.2f GB, %.2f GB/s, %.0f s left", stages[progress->stage],
                 (double)progress->bytes_done / 1e9, (double)progress->bytes_total / 1e9,
                 rate / 1e9, left);
    return 0;
}

void cli_error(const char *where, const char *format, ...)
{
    va_list args;

    cli_progress_end();
    fprintf(stderr, "numoe: %s%s", where ? where : "", where && *where ? ": " : "");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

int cli_output_code(int code)
{
    return code == -ENOSPC || code == -EDQUOT || code == -ENOMEM ? CLI_NO_ROOM : CLI_FAILURE;
}

int cli_written(const char *path, int rc)
{
    if (!rc)
        return CLI_OK;
    cli_error(path, "could not be written: %s", strerror(-rc));
    return cli_output_code(rc);
}

static int exit_code(enum cli_stage stage, int code)
{
    if (stage == CLI_STAGE_OUTPUT && code)
        return cli_output_code(code);
    switch (code) {
    case 0:
        return CLI_OK;
    case -ENOSPC:
    case -ENOMEM:
        return CLI_NO_ROOM;
    case -EBADMSG:
    case -ENOENT:
    case -ENOTDIR:
    case -ELOOP:
    case -ENAMETOOLONG:
        return CLI_BAD_INPUT;
    case -ESTALE:
        return CLI_STALE_PLAN;
    case -EINVAL:
    case -E2BIG:
    case -EDOM:
    case -EOVERFLOW:
    case -EISDIR:
    case -EACCES:
    case -ENOTSUP:
        if (stage == CLI_STAGE_INPUT)
            return CLI_BAD_INPUT;
        return stage == CLI_STAGE_OPTIONS && (code == -EINVAL || code == -EOVERFLOW) ? CLI_USAGE
                                                                                     : CLI_FAILURE;
    default:
        return CLI_FAILURE;
    }
}

int cli_report(const char *verb, enum cli_stage stage, const struct numoe_error *error)
{
    if (*error->message)
        cli_error(*error->where ? error->where : verb, "%s", error->message);
    else
        cli_error(*error->where ? error->where : verb, "%s", strerror(-error->code));
    return exit_code(stage, error->code);
}

int cli_flush(int code)
{
    if (fflush(stdout) || ferror(stdout)) {
        const int why = errno;

        cli_error("stdout", "the answer could not be written: %s", strerror(why));
        return code == CLI_OK || code == CLI_FAILURE ? cli_output_code(-why) : code;
    }
    return code;
}

static void log_message(void *user, enum numoe_log_level level, const char *message)
{
    (void)user;
    if (level == NUMOE_LOG_ERROR)
        cli_error(NULL, "%s", message);
    else if (level == NUMOE_LOG_WARNING)
        cli_error("warning", "%s", message);
}

struct numoe_log cli_log(void)
{
    return (struct numoe_log){log_message, NULL};
}

bool cli_is_about(const struct numoe_error *error, const char *path)
{
    return path && *error->where && !strncmp(error->where, path, sizeof error->where - 1);
}

int cli_open(const char *verb, const struct cli_values *values, const char *isa,
             struct numoe **context)
{
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    const char *tuning = values->gpu_tuning ? values->gpu_tuning : getenv("NUMOE_GPU_TUNING");

    if (values->plan && values->as_if) {
        cli_error(verb, "--plan and --as-if both name a plan");
        return CLI_USAGE;
    }
    options.topology = values->topology;
    options.threads = values->threads;
    options.workers = values->workers;
    options.nodes = values->nodes.values;
    options.node_count = values->nodes.count;
    options.cpus = values->cpus.values;
    options.cpu_count = values->cpus.count;
    options.reserved_cpus = values->reserved.values;
    options.reserved_count = values->reserved.count;
    options.keep_free_bytes = values->keep_free_bytes;
    options.memory_policy = values->memory_policy;
    options.memory_spill = values->spill;
    options.plan_file = values->as_if ? values->as_if : values->plan;
    options.as_if = values->as_if != NULL;
    options.batch_invariant = values->batch_invariant;
    options.isa = isa;
    options.pin_caller = true;
    options.gpu = values->gpu ? NUMOE_GPU_ON : NUMOE_GPU_OFF;
    options.gpu_devices = values->gpu_devices.values;
    options.gpu_device_count = values->gpu_devices.count;
    options.gpu_sum = values->gpu_sum;
    options.gpu_stream = values->stream;
    options.gpu_cache_bytes = values->gpu_cache_bytes;
    options.gpu_from_tokens = values->gpu_from_tokens;
    if (values->gpu_profile && access(values->gpu_profile, F_OK) == 0)
        options.gpu_profile = values->gpu_profile;
    options.gpu_tuning = values->gpu_tuning;
    options.form = values->form;
    options.groups = values->groups;
    options.objective = values->objective;
    options.stats = values->stats != CLI_STATS_OFF;
    options.trace_events = values->trace ? TRACE_EVENTS : 0;
    options.log = cli_log();
    if (numoe_open(&options, context, &error))
        return cli_report(verb,
                          cli_is_about(&error, values->topology) ||
                                  cli_is_about(&error, options.plan_file) ||
                                  cli_is_about(&error, tuning)
                              ? CLI_STAGE_INPUT
                              : CLI_STAGE_OPTIONS,
                          &error);
    return CLI_OK;
}

int cli_print_json(json_t *object)
{
    int rc;

    if (!object) {
        cli_error("json", "out of memory");
        return CLI_FAILURE;
    }
    rc = json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(object);
    putchar('\n');
    return cli_flush(rc ? CLI_FAILURE : CLI_OK);
}

json_t *cli_json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static const char *const arithmetics[NUMOE_ARITHMETICS + 1] = {[NUMOE_FAST] = "fast",
                                                               [NUMOE_EXACT] = "exact",
                                                               [NUMOE_FINE] = "fine",
                                                               [NUMOE_MXFP8_UP] = "mxfp8",
                                                               [NUMOE_MXFP8_OCP] = "mxfp8-ocp"};

const char *cli_arithmetic_name(enum numoe_arithmetic arithmetic)
{
    return arithmetics[arithmetic];
}

int cli_arithmetic_by_name(const char *name, size_t length)
{
    for (int i = 1; i <= NUMOE_ARITHMETICS; i++)
        if (strlen(arithmetics[i]) == length && !strncmp(name, arithmetics[i], length))
            return i;
    return 0;
}
