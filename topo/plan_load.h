/*
 * plan_load.h - the parts of reading a plan that have files of their own.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLAN_LOAD_H
#define PLAN_LOAD_H

#include "plan_build.h"
#include "topo_read.h"

enum numoe_form plan_read_form(struct topo_reader *in, const json_t *object, const char *key);
enum numoe_objective plan_read_objective(struct topo_reader *in, const json_t *object,
                                         const char *key);

/* Form, shards and shares; nodes have been read. */
void plan_read_shards(struct topo_reader *in, const json_t *root, struct numoe_plan *plan,
                      const struct plan_totals *totals);
/* The forms that were weighed. */
void plan_read_forms(struct topo_reader *in, const json_t *root, struct numoe_plan *plan);

#endif
