/* cli_draw.h - pictures in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_CLI_DRAW_H
#define NUMOE_CLI_DRAW_H

#include "numoe.h"
#include "numoe_topo.h"
#include "predict.h"

struct cli_values;

/* Write the files that --svg and --png name, if any, with the GPUs that were predicted. Prints
 * errors; returns an exit code. */
int cli_draw_plan(const struct cli_values *values, const struct numoe_model_desc *desc,
                  const struct numoe_machine *machine, const struct numoe_plan *plan,
                  const struct numoe_prediction *prediction);

#endif
