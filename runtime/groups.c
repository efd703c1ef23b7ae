/* Which plan nodes share work, and who does it. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "context.h"

/* The nearest plan node with workers. */
static uint32_t served_by(const struct numoe_plan *plan, uint32_t n)
{
    uint32_t best = UINT32_MAX, home = n;

    if (plan->nodes[n].worker_count)
        return n;
    for (uint32_t i = 0; i < plan->node_count; i++) {
        const uint32_t distance = plan->distances[(size_t)n * plan->node_count + i];

        if (plan->nodes[i].worker_count && distance < best) {
            best = distance;
            home = i;
        }
    }
    return home;
}

/* Workers of the group's nodes; a group without any is served by the nearest node that has some. */
static uint32_t list_workers(const struct numoe_plan *plan, const uint32_t *nodes, uint32_t count,
                             uint32_t *workers)
{
    uint32_t found = 0;

    for (uint32_t i = 0; i < count; i++)
        for (uint32_t w = 0; w < plan->nodes[nodes[i]].worker_count; w++)
            workers[found++] = plan->nodes[nodes[i]].first_worker + w;
    if (!found) {
        const struct numoe_plan_node *home = &plan->nodes[served_by(plan, nodes[0])];

        for (uint32_t w = 0; w < home->worker_count; w++)
            workers[found++] = home->first_worker + w;
    }
    return found;
}

static int group_nodes(const struct numoe_plan *plan, enum numoe_reach reach,
                       struct model_groups *groups)
{
    const uint32_t nodes = plan->node_count;
    uint32_t *of = malloc(nodes * sizeof *of), found = 0;

    groups->first = calloc((size_t)nodes + 1, sizeof *groups->first);
    groups->nodes = calloc(nodes, sizeof *groups->nodes);
    groups->worker_first = calloc((size_t)nodes + 1, sizeof *groups->worker_first);
    /* each group may be served by another's workers */
    groups->workers = calloc((size_t)nodes * plan->worker_count + 1, sizeof *groups->workers);
    if (!of || !groups->first || !groups->nodes || !groups->worker_first || !groups->workers) {
        free(of);
        return -ENOMEM;
    }
    numoe_plan_groups(plan, reach, of);
    for (uint32_t n = 0; n < nodes; n++)
        if (of[n] >= groups->count)
            groups->count = of[n] + 1;
    for (uint32_t g = 0; g < groups->count; g++) {
        for (uint32_t n = 0; n < nodes; n++)
            if (of[n] == g)
                groups->nodes[found++] = n;
        groups->first[g + 1] = found;
        groups->worker_first[g + 1] =
            groups->worker_first[g] + list_workers(plan, groups->nodes + groups->first[g],
                                                   found - groups->first[g],
                                                   groups->workers + groups->worker_first[g]);
    }
    free(of);
    return 0;
}

int numoe_model_group(struct numoe_model *model)
{
    numoe_plan_reaches(model->plan, model->reach);
    for (enum numoe_reach reach = NUMOE_REACH_DOMAIN; reach < NUMOE_REACHES; reach++) {
        int rc = group_nodes(model->plan, reach, &model->groups[reach]);

        if (rc)
            return rc;
    }
    return 0;
}

void numoe_model_ungroup(struct numoe_model *model)
{
    for (enum numoe_reach reach = NUMOE_REACH_DOMAIN; reach < NUMOE_REACHES; reach++) {
        free(model->groups[reach].first);
        free(model->groups[reach].nodes);
        free(model->groups[reach].worker_first);
        free(model->groups[reach].workers);
    }
}
