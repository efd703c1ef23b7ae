/* cli_stats.h - stats and traces in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_CLI_STATS_H
#define NUMOE_CLI_STATS_H

#include "numoe.h"

#include <stdio.h>

struct cli_values;

/* Print what --stats asks for, if anything, after the rest. Returns an exit code. */
int cli_print_stats(const struct cli_values *values, struct numoe *context);

/* All stats as they are now, to be freed with numoe_stats_snapshot_free. Returns an exit code, with
 * an error printed. */
struct stats_snapshot;
int cli_stats_take(struct numoe *context, struct stats_snapshot *snapshot);

/* Open the file of --trace before anything else is done; path NULL: none, *file stays as it is.
 * Returns an exit code. */
int cli_trace_open(const char *path, FILE **file);

/* Write the trace and close the file; *file is NULL then. Returns an exit code. */
int cli_trace_write(const char *path, struct numoe *context, FILE **file);

#endif
