/*
 * cli_output.h - how the numoe command speaks: answers on stdout, everything else on stderr as
 * "numoe: where: message", and a progress line on a terminal.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_OUTPUT_H
#define NUMOE_CLI_OUTPUT_H

#include "numoe.h"

#include <stdbool.h>
#include <stdint.h>

struct cli_values;

void cli_error(const char *where, const char *format, ...) NUMOE_PRINTF(2, 3);

/* What failed decides the exit code where the errno alone does not. */
enum cli_stage {
    CLI_STAGE_OPTIONS, /* -EINVAL is the command line's fault */
    CLI_STAGE_INPUT,   /* -EINVAL, -ENOENT, ... are the fault of a file */
    CLI_STAGE_WORK,    /* neither */
    CLI_STAGE_OUTPUT   /* a file that was to be written: no room, or a failure */
};

/* Print the error and return the exit code. verb: said when the error names no place. */
int cli_report(const char *verb, enum cli_stage stage, const struct numoe_error *error);

/* Whether an error is about a file that the command line names; where may have been cut. */
bool cli_is_about(const struct numoe_error *error, const char *path);

/* The exit code for a negative errno of a file that was to be written. */
int cli_output_code(int code);
/* Say why the file could not be written, and return that code; CLI_OK for 0. */
int cli_written(const char *path, int rc);

/* Make sure that the answer has reached stdout; returns code, or if it has not why, as
 * cli_output_code. */
int cli_flush(int code);

/* A log that prints errors and warnings. */
struct numoe_log cli_log(void);

/* One line on stderr, replaced by the next; nothing when stderr is no terminal. */
void cli_progress(const char *format, ...) NUMOE_PRINTF(1, 2);
void cli_progress_end(void);
/* As the library calls it while it loads. */
int cli_progress_load(void *user, const struct numoe_load_progress *progress);

/* Open a context as the options ask; isa may be NULL. The error is printed; returns exit code. */
int cli_open(const char *verb, const struct cli_values *values, const char *isa,
             struct numoe **context);

/* Print an object and free it. Returns an exit code. */
struct json_t;
int cli_print_json(struct json_t *object);
/* A number, or null for what is not finite. */
struct json_t *cli_json_number(double value);

const char *cli_arithmetic_name(enum numoe_arithmetic arithmetic);
/* The mode of that name, the first length bytes; 0: none. */
int cli_arithmetic_by_name(const char *name, size_t length);

#endif
