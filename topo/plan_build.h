/*
 * plan_build.h - the steps of making a plan, in their order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLAN_BUILD_H
#define PLAN_BUILD_H

#include "numoe_topo.h"
#include "topo_text.h"

struct plan_build {
    const struct numoe_machine *machine;
    const struct numoe_plan_request *request;
    struct numoe_plan *plan;
    uint32_t *place_of;   /* machine node -> plan node, or NUMOE_NONE */
    uint32_t *core_units; /* plan node -> what its cores are worth: 2 a core, 1 a slow one */
};

/* Which memory nodes are used, and how much of each may be. */
int plan_choose_nodes(struct plan_build *build, struct numoe_error *error);
/* Which CPUs workers run on, and with which node. */
int plan_choose_workers(struct plan_build *build, struct numoe_error *error);
/* How many slices go where. */
int plan_place(struct plan_build *build, struct numoe_error *error);

/* Dense index of a PU by its OS index, or NUMOE_NONE. */
uint32_t plan_find_pu(const struct numoe_machine *machine, uint32_t os_index);

#define plan_note(build, ...)                                                                      \
    ((void)topo_note(&(build)->plan->notes, &(build)->plan->note_count, __VA_ARGS__))

#endif
