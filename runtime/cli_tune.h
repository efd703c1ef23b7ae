/* cli_tune.h - numoe bench --gpu --tune. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_CLI_TUNE_H
#define NUMOE_CLI_TUNE_H

#include "numoe.h"

struct cli_values;

/* Time every form of the kernels on a layer of a model that has a GPU and is filled, and write the
 * times to values->tune. Returns an exit code. */
int cli_tune(const struct cli_values *values, struct numoe_model *model,
             const struct numoe_model_desc *desc);

#endif
