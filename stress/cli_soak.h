/* cli_soak.h - options of numoe soak as a walk takes them. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_CLI_SOAK_H
#define NUMOE_CLI_SOAK_H

#include "cli_options.h"
#include "soak.h"

/* The walk that a command line asks for; without progress and stop. */
void cli_soak_options(const struct cli_values *values, struct numoe_soak_options *options);

#endif
