/*
 * cli_predict.h - predictions as numoe plan asks for them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_PREDICT_H
#define NUMOE_CLI_PREDICT_H

#include "cli_options.h"
#include "numoe.h"

/*
 * What predictions rest on, by the options of the command line. node_gbs is to be freed, in every
 * case, after the last use of options. Prints errors; returns an exit code.
 */
int cli_predict_options(const struct cli_values *values, const struct numoe_model_desc *desc,
                        const struct numoe_machine *machine, struct numoe_predict_options *options,
                        double **node_gbs);

#endif
