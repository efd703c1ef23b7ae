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
    uint64_t *weight;     /* plan node -> what its part should be, in any unit */
    bool *full;           /* plan node -> has no room for more than it was given */
};

struct plan_totals {
    uint64_t pairs;  /* (layer, expert) */
    uint64_t slices; /* over all */
    uint64_t bytes;
};

/* Which memory nodes are used, and how much of each may be. */
int plan_choose_nodes(struct plan_build *build, struct numoe_error *error);
/* Which CPUs workers run on, and with which node. */
int plan_choose_workers(struct plan_build *build, struct numoe_error *error);
/* What each node's part should be: build->weight. */
int plan_weigh(struct plan_build *build, struct numoe_error *error);
/* How many slices go where, in which form. */
int plan_place(struct plan_build *build, struct numoe_error *error);

/* A range with both its ends. Returns 0 or -EINVAL. */
int plan_resolve_range(const struct numoe_expert_shape *shape, const struct numoe_range *asked,
                       struct numoe_range *range, struct numoe_error *error);
/* Sizes of what is held of a shape, over all layers, checked. All 0 without a model. */
int plan_count_totals(const struct numoe_expert_shape *held, struct plan_totals *totals,
                      struct numoe_error *error);
/*
 * Place the model on shards; shard[n] is plan node n's, 0 .. shards - 1, each with a node.
 * Replaces what was placed before. *room: how many whole experts the shards have room for.
 * Returns 0, -ENOSPC (what is in the plan is then of no use) or -ENOMEM.
 */
int plan_place_shards(struct plan_build *build, const struct plan_totals *totals,
                      const uint32_t *shard, uint32_t shards, uint64_t *room);
/* Shares of a plan without a model. Returns 0 or -ENOMEM. */
int plan_place_nothing(struct plan_build *build);
/* A form as plan_place_shards takes it. */
struct plan_grouping {
    const uint32_t *group; /* of each plan node */
    uint32_t groups;
};

/*
 * Say what is missing, and what would make it fit in one of these forms; each thing said is tried.
 * What is in the plan is then of no use. Returns -ENOSPC, or -ENOMEM.
 */
int plan_refuse(struct plan_build *build, const struct plan_totals *totals,
                const struct plan_grouping *forms, uint32_t form_count, struct numoe_error *error);
/* scratch: for as many numbers as there are nodes. */
void plan_note_full(struct plan_build *build, uint32_t *scratch);

/* Groups of whole packages. Returns 0 or -ENOMEM. */
int plan_deal_packages(const struct numoe_plan *plan, uint32_t *group, uint32_t *groups);
/* How many memory domains the plan's nodes are of. Returns 0 or -ENOMEM. */
int plan_count_domains(const struct numoe_plan *plan, uint32_t *count);

/* Note down what was asked for, and what the plan rests on. */
int plan_describe(struct plan_build *build, struct numoe_error *error);

/* What a node holds, by its shard and the shares. */
void plan_count_node(struct numoe_plan *plan, const struct plan_totals *totals, uint32_t plan_node);
uint64_t plan_total_bytes(const struct numoe_plan *plan);

/* A shard's nodes: which are the first and the last. */
void plan_bound_shard(struct numoe_plan *plan, uint32_t shard);

/* "every", ...; "both", ...: as on the command line. */
const char *plan_form_word(enum numoe_form form);
const char *plan_objective_word(enum numoe_objective objective);
enum { PLAN_FORMS = NUMOE_FORM_ROWS + 1, PLAN_OBJECTIVES = NUMOE_OPTIMIZE_PREFILL + 1 };
enum { PLAN_FORMS_MOST = 6 /* that are weighed */ };

/* Memory of a node by dense index: all of it; where machine is live, what is free, or in a pool of
 * huge pages, which are as much for weights. */
uint64_t plan_node_memory(const struct numoe_machine *machine, uint32_t node);
/* Bytes of a node that stay free, asked being the request's. */
uint64_t plan_kept_free(const struct numoe_machine *machine, uint64_t asked,
                        uint64_t capacity_bytes);
/* What the cgroup grants to experts; UINT64_MAX: there is no limit. */
uint64_t plan_granted(const struct numoe_machine *machine);

/* Dense index by OS index, or NUMOE_NONE. */
uint32_t plan_find_pu(const struct numoe_machine *machine, uint32_t os_index);
uint32_t plan_find_node(const struct numoe_machine *machine, uint32_t os_index);

#define plan_note(build, ...)                                                                      \
    ((void)topo_note(&(build)->plan->notes, &(build)->plan->note_count, __VA_ARGS__))

#endif
