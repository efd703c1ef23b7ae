/*
 * cli_model.h - which model the command line means: one by name, a checkpoint, or one described.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_MODEL_H
#define NUMOE_CLI_MODEL_H

#include "cli_options.h"
#include "numoe.h"

/* The description of --model, with --layers and --experts. Prints errors; returns exit code. */
int cli_model_by_name(const char *verb, const struct cli_values *values, const char *name,
                      struct numoe_model_desc *desc);

/*
 * The model that a plan is for: --model with --format, a directory, or --hidden and the other
 * options of a shape. Prints errors; returns exit code.
 */
int cli_model_describe(const char *verb, const struct cli_values *values,
                       struct numoe_model_desc *desc);

/* What to call it: its name, its directory, or words. */
const char *cli_model_title(const struct cli_values *values);

/* Print all models that are known by name, as text or as a JSON array. Returns exit code. */
int cli_model_list(const struct cli_values *values);

#endif
