/*
 * cli_predict.h - predictions as numoe plan asks for them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_PREDICT_H
#define NUMOE_CLI_PREDICT_H

#include "cli_options.h"

/* Predict a plan by the options of the command line. Prints errors; returns an exit code. */
int cli_predict(const struct cli_values *values, const struct numoe_machine *machine,
                const struct numoe_plan *plan, struct numoe_prediction **prediction);

#endif
