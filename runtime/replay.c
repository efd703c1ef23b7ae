/*
 * Where the memory of plan nodes lies. A plan of this machine says so itself; with another
 * machine's plan (numoe_options.as_if) its nodes are dealt out among the nodes of this one, in
 * order, by what this machine's own plan of the model would put there: neighbours stay neighbours,
 * and this node gets about its share. A node that no node here has room for, or all of them where
 * there are more nodes here than in the plan, is spread over all nodes page by page.
 *
 * Only times depend on it: results follow from the plan alone.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>

#include "context.h"

/* The node of `here` in whose share the byte `at` of `total` falls, in order of nodes. */
static uint32_t node_at(const struct numoe_plan *here, double at)
{
    double total = 0, before = 0;
    uint32_t last = 0;

    for (uint32_t r = 0; r < here->node_count; r++)
        total += here->nodes[r].weight;
    for (uint32_t r = 0; r < here->node_count; r++) {
        if (!(here->nodes[r].weight > 0))
            continue;
        before += here->nodes[r].weight / total;
        last = r;
        if (at < before)
            break;
    }
    return last;
}

/* The node with the most room, if that is enough; else NUMOE_NONE. */
static uint32_t roomiest(const uint64_t *room, uint32_t count, uint64_t bytes)
{
    uint32_t best = 0;

    for (uint32_t r = 1; r < count; r++)
        if (room[r] > room[best])
            best = r;
    return room[best] >= bytes ? best : NUMOE_NONE;
}

static int deal(struct numoe_model *model, const struct numoe_plan *here)
{
    const struct numoe_plan *plan = model->plan;
    uint64_t *room = calloc(here->node_count, sizeof *room);
    double total = 0, before = 0;

    if (!room)
        return -ENOMEM;
    for (uint32_t r = 0; r < here->node_count; r++)
        room[r] = here->nodes[r].available_bytes;
    for (uint32_t n = 0; n < plan->node_count; n++)
        total += (double)plan->nodes[n].planned_bytes;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const uint64_t bytes = plan->nodes[n].planned_bytes;
        uint32_t r = NUMOE_NONE;

        if (plan->node_count >= here->node_count) {
            r = node_at(here, total > 0 ? (before + (double)bytes / 2) / total : 0);
            if (room[r] < bytes)
                r = roomiest(room, here->node_count, bytes);
        }
        if (r != NUMOE_NONE)
            room[r] -= bytes;
        model->home[n] = r;
        before += (double)bytes;
    }
    free(room);
    return 0;
}

int numoe_model_settle(struct numoe_model *model, const struct numoe_expert_shape *shape,
                       struct numoe_error *error)
{
    struct numoe *context = model->context;
    struct numoe_plan *here = NULL;
    int rc;

    model->home = malloc(model->plan->node_count * sizeof *model->home);
    if (!model->home)
        return numoe_error_set(error, -ENOMEM, "model", "out of memory");
    for (uint32_t n = 0; n < model->plan->node_count; n++)
        model->home[n] = n;
    if (!context->as_if)
        return 0;
    rc = numoe_context_plan_here(context, shape, &model->plan->range, &here, error);
    if (rc)
        return rc;
    rc = deal(model, here);
    numoe_plan_free(here);
    return rc ? numoe_error_set(error, rc, "model", "out of memory") : 0;
}

uint64_t numoe_model_bytes_on(const struct numoe_model *model, uint32_t n, uint32_t node,
                              uint64_t bytes)
{
    const uint64_t nodes = model->context->plan->node_count;

    if (model->home[n] == NUMOE_NONE)
        return bytes / nodes + (node < bytes % nodes);
    return model->home[n] == node ? bytes : 0;
}
