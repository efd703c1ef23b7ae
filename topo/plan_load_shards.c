/*
 * Read which nodes hold which experts of a plan, and what was weighed.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_load.h"
#include "plan_shares.h"
#include "topo_build.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum numoe_form plan_read_form(struct topo_reader *in, const json_t *object, const char *key)
{
    const char *word = topo_read_string(in, json_object_get(object, key), key, 16);

    for (int form = NUMOE_FORM_AUTO; form < PLAN_FORMS; form++)
        if (!strcmp(word, plan_form_word((enum numoe_form)form)))
            return (enum numoe_form)form;
    topo_read_wrong(in, key, "is \"%s\", which is no form", word);
    return NUMOE_FORM_AUTO;
}

enum numoe_objective plan_read_objective(struct topo_reader *in, const json_t *object,
                                         const char *key)
{
    const char *word = topo_read_string(in, json_object_get(object, key), key, 16);

    for (int objective = 0; objective < PLAN_OBJECTIVES; objective++)
        if (!strcmp(word, plan_objective_word((enum numoe_objective)objective)))
            return (enum numoe_objective)objective;
    topo_read_wrong(in, key, "is \"%s\", which is nothing to optimize", word);
    return NUMOE_OPTIMIZE_BOTH;
}

/* ---- shards ---------------------------------------------------------------------------------- */

static uint32_t find_node(const struct numoe_plan *plan, uint32_t os_index)
{
    for (uint32_t i = 0; i < plan->node_count; i++)
        if (plan->nodes[i].os_index == os_index)
            return i;
    return NUMOE_NONE;
}

/* Each of the plan's nodes belongs to one shard; taken[n]: it has been said to which. */
static void read_members(struct topo_reader *in, const json_t *item, struct numoe_plan *plan,
                         uint32_t shard, bool *taken)
{
    const json_t *items = topo_read_array(in, item, "nodes", 1, plan->node_count);

    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        uint32_t os = (uint32_t)topo_read_element(in, items, "nodes", i, TOPO_MAX_NODES - 1);
        uint32_t at = in->rc ? NUMOE_NONE : find_node(plan, os);

        if (in->rc)
            return;
        if (at == NUMOE_NONE || taken[at]) {
            topo_read_wrong(in, "nodes",
                            at == NUMOE_NONE ? "has %u, which is no node of this plan"
                                             : "has %u, which is in a shard already",
                            os);
            return;
        }
        taken[at] = true;
        plan->nodes[at].shard = shard;
    }
}

static void read_members_of_all(struct topo_reader *in, const json_t *root, struct numoe_plan *plan,
                                const struct plan_totals *totals)
{
    const json_t *items = topo_read_array(in, root, "shards", 1, plan->node_count);
    bool *taken = topo_read_room(in, plan->node_count, sizeof *taken);
    uint64_t places = 0;

    plan->shards = topo_read_room(in, json_array_size(items), sizeof *plan->shards);
    for (uint32_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        const json_t *item = topo_read_item(in, items, "shards", i);

        plan->shards[i].first_place = places;
        plan->shards[i].places = topo_read_number(in, item, "experts", totals->pairs - places);
        places += plan->shards[i].places;
        read_members(in, item, plan, i, taken);
        plan->shard_count++;
    }
    topo_read_outside(in);
    for (uint32_t n = 0; n < plan->node_count && !in->rc; n++)
        if (!taken[n])
            topo_read_wrong(in, "shards", "leave out node %u", plan->nodes[n].os_index);
    for (uint32_t i = 0; i < plan->shard_count && !in->rc; i++)
        plan_bound_shard(plan, i);
    if (!in->rc && places != totals->pairs)
        topo_read_wrong(in, "shards", "have %" PRIu64 " experts, and there are %" PRIu64, places,
                        totals->pairs);
    free(taken);
}

static void check_form(struct topo_reader *in, const struct numoe_plan *plan)
{
    bool fits = plan->form == NUMOE_FORM_EVERY_NODE ? plan->shard_count == 1
                : plan->form == NUMOE_FORM_EXPERTS  ? plan->shard_count == plan->node_count
                                                    : plan->form == NUMOE_FORM_GROUPS;

    if (!fits)
        topo_read_wrong(in, "form", "is \"%s\", which is not that of %u shards on %u nodes",
                        plan_form_word(plan->form), plan->shard_count, plan->node_count);
}

/* A shard's shares begin with 0 and do not fall. */
static void check_shares(struct topo_reader *in, const struct numoe_plan *plan)
{
    for (uint32_t s = 0; s < plan->shard_count && !in->rc; s++) {
        uint64_t before = 0;

        for (uint32_t n = plan->shards[s].first_node; n < plan->shards[s].end_node; n++) {
            uint64_t share = plan->cumulative[n];

            if (plan->nodes[n].shard != s)
                continue;
            if (n == plan->shards[s].first_node && share)
                topo_read_wrong(in, "cumulative", "begins with %" PRIu64 " on node %u, and not 0",
                                share, plan->nodes[n].os_index);
            else if (share < before)
                topo_read_wrong(in, "cumulative",
                                "has %" PRIu64 " after %" PRIu64 ": it must not fall", share,
                                before);
            before = share;
        }
    }
}

void plan_read_shards(struct topo_reader *in, const json_t *root, struct numoe_plan *plan,
                      const struct plan_totals *totals)
{
    const uint64_t experts = numoe_plan_held(plan).experts;
    size_t count = (size_t)plan->node_count + 1;
    const json_t *items;

    plan->form = plan_read_form(in, root, "form");
    read_members_of_all(in, root, plan, totals);
    if (!in->rc)
        check_form(in, plan);
    items = topo_read_array(in, root, "cumulative", count, count);
    plan->cumulative = topo_read_room(in, count, sizeof *plan->cumulative);
    for (size_t i = 0; i < count && !in->rc; i++)
        plan->cumulative[i] = topo_read_element(in, items, "cumulative", i, PLAN_SHARE_ONE);
    if (!in->rc)
        check_shares(in, plan);
    if (!in->rc && plan->cumulative[count - 1] != PLAN_SHARE_ONE)
        topo_read_wrong(in, "cumulative", "ends with %" PRIu64 ", and not 2^62",
                        plan->cumulative[count - 1]);
    plan->expert_step =
        topo_read_between(in, root, "expert_step", 1, experts > 1 ? experts - 1 : 1);
    if (experts > 1 && !in->rc && plan_common_divisor(plan->expert_step, experts) != 1)
        topo_read_wrong(in, "expert_step", "is %" PRIu64 ", not coprime with %" PRIu64 " experts",
                        plan->expert_step, experts);
}

/* ---- forms ----------------------------------------------------------------------------------- */

void plan_read_forms(struct topo_reader *in, const json_t *root, struct numoe_plan *plan)
{
    const json_t *items = topo_read_array(in, root, "forms", 0, PLAN_FORMS_MOST);

    plan->forms = topo_read_room(in, json_array_size(items), sizeof *plan->forms);
    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        const json_t *item = topo_read_item(in, items, "forms", i);
        struct numoe_plan_form *form = &plan->forms[i];

        form->form = plan_read_form(in, item, "form");
        form->groups = (uint32_t)topo_read_between(in, item, "groups", 1, plan->node_count);
        form->chosen = topo_read_boolean(in, item, "chosen");
        form->fits = topo_read_boolean(in, item, "fits");
        form->executable = topo_read_boolean(in, item, "executable");
        form->decode_ms = topo_read_real(in, item, "decode_ms", HUGE_VAL);
        form->prefill_ms = topo_read_real(in, item, "prefill_ms", HUGE_VAL);
        form->decode_bytes = topo_read_number(in, item, "decode_reduction_bytes", INT64_MAX);
        form->prefill_bytes = topo_read_number(in, item, "prefill_reduction_bytes", INT64_MAX);
        form->cost = topo_read_real(in, item, "cost", HUGE_VAL);
        topo_copy_printable(
            form->name, sizeof form->name,
            topo_read_string(in, json_object_get(item, "name"), "name", sizeof form->name));
        topo_copy_printable(
            form->reason, sizeof form->reason,
            topo_read_string(in, json_object_get(item, "reason"), "reason", sizeof form->reason));
        plan->form_count++;
    }
    topo_read_outside(in);
}
