/*
 * plan_build.h - the steps of making a plan, in their order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLAN_BUILD_H
#define PLAN_BUILD_H

#include "numoe_topo.h"
#include "topo_text.h"

enum { PLAN_MAX_WORKERS = 4096, PLAN_MAX_LANES_PER_WORKER = 1024 };

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

/* Note down what was asked for, and what the plan rests on. */
int plan_describe(struct plan_build *build, struct numoe_error *error);

/* How much there is of a model. */
struct plan_totals {
    uint64_t pairs;  /* (layer, expert) */
    uint64_t slices; /* over all */
    uint64_t bytes;
};

/* @return 0; -EINVAL, -EOVERFLOW */
int plan_count_totals(const struct numoe_expert_shape *shape, struct plan_totals *totals,
                      struct numoe_error *error);
/* What a node holds, by the shares. */
void plan_count_node(struct numoe_plan *plan, const struct plan_totals *totals, uint32_t plan_node);
uint64_t plan_total_bytes(const struct numoe_plan *plan);
/* A node's part of the whole as a number to read. */
double plan_weight(const struct numoe_plan *plan, uint32_t plan_node);

/* Memory of a node by dense index: all of it; where machine is live, what is free, or in a pool of
 * huge pages, which are as much for weights. */
uint64_t plan_node_memory(const struct numoe_machine *machine, uint32_t node);
/* Bytes of a node that stay free, asked being the request's. */
uint64_t plan_kept_free(uint64_t asked, uint64_t capacity_bytes);

/* Dense index by OS index, or NUMOE_NONE. */
uint32_t plan_find_pu(const struct numoe_machine *machine, uint32_t os_index);
uint32_t plan_find_node(const struct numoe_machine *machine, uint32_t os_index);

#define plan_note(build, ...)                                                                      \
    ((void)topo_note(&(build)->plan->notes, &(build)->plan->note_count, __VA_ARGS__))

#endif
