/*
 * cli_nodes.h - which memory nodes --nodes and --reserve-nodes leave.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_NODES_H
#define NUMOE_CLI_NODES_H

#include "cli_options.h"
#include "numoe_topo.h"

/*
 * With --reserve-nodes, list the nodes that a plan would use without it, less these; else leave the
 * request as it is. list holds the numbers, to be freed in every case. Prints errors; returns exit
 * code.
 */
int cli_reserve_nodes(const char *verb, const struct cli_values *values,
                      const struct numoe_machine *machine, struct numoe_plan_request *request,
                      uint32_t **list);

#endif
