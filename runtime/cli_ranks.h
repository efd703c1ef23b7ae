/*
 * cli_ranks.h - one machine planned for several ranks, each with memory nodes of its own.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_RANKS_H
#define NUMOE_CLI_RANKS_H

#include "cli_options.h"

/* A rank, planned. */
struct cli_planned {
    struct numoe_plan *plan;
    struct numoe_prediction *prediction; /* with --json */
};

/* Rank r has the r % tp th part of the slices of the r / tp th part of the experts. */
struct cli_ranks {
    uint32_t count, tp, ep;
    uint32_t *nodes;      /* OS indices, rank by rank */
    uint32_t *node_first; /* [count + 1] into nodes */
    struct cli_planned *planned;
};

/* Whether the command line asks for ranks. */
bool cli_ranks_asked(const struct cli_values *values);

/*
 * Who gets which nodes: as the command line says, else those that the request uses, dealt out by
 * packages and memory domains. To be freed in every case. Prints errors; returns an exit code.
 */
int cli_ranks_make(const struct cli_values *values, const struct numoe_machine *machine,
                   const struct numoe_plan_request *request, struct cli_ranks *ranks);
void cli_ranks_free(struct cli_ranks *ranks);

/* Make a request one rank's; it refers to ranks. */
void cli_ranks_narrow(const struct cli_ranks *ranks, uint32_t rank,
                      struct numoe_plan_request *request);

/* Plan all of them. Prints errors; returns an exit code. */
int cli_ranks_plan(const struct cli_values *values, const struct numoe_machine *machine,
                   const struct numoe_plan_request *request, struct cli_ranks *ranks);
/* A summary, or with --json all plans. Returns an exit code. */
int cli_ranks_print(const struct cli_values *values, const struct cli_ranks *ranks);

#endif
