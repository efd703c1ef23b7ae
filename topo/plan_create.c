/* Make and free a plan. SPDX-License-Identifier: Apache-2.0 */
#include "plan_build.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct numoe_plan_request) == 184, "size-first struct: grow at the end");

int numoe_plan_create(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                      struct numoe_plan **out, struct numoe_error *error)
{
    struct numoe_plan_request asked = NUMOE_PLAN_REQUEST_INIT;
    struct plan_build build = {.machine = machine, .request = &asked};
    struct numoe_plan *plan;
    int rc;

    if (!machine || !request || !out || request->size < sizeof request->size)
        return numoe_error_set(error, -EINVAL, "numoe_plan_create", "machine or request missing");
    memcpy(&asked, request, request->size < sizeof asked ? request->size : sizeof asked);
    /* an empty list is no list */
    if (!asked.node_count)
        asked.nodes = NULL;
    if (!asked.cpu_count)
        asked.cpus = NULL;
    if ((asked.node_count && !asked.nodes) || (asked.cpu_count && !asked.cpus) ||
        (asked.reserved_count && !asked.reserved_cpus))
        return numoe_error_set(error, -EINVAL, "numoe_plan_create", "a list is missing");
    plan = calloc(1, sizeof *plan);
    if (!plan)
        return numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
    build.plan = plan;
    plan->shape = asked.shape;
    rc = plan_resolve_range(&plan->shape, &asked.range, &plan->range, error);
    if (rc)
        goto out;
    plan->source = strdup(machine->source);
    if (!plan->source) {
        rc = numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
        goto out;
    }
    rc = plan_choose_nodes(&build, error);
    if (!rc)
        rc = plan_choose_workers(&build, error);
    if (!rc)
        rc = plan_place(&build, error);
    if (!rc)
        rc = plan_describe(&build, error);
out:
    free(build.place_of);
    free(build.core_units);
    free(build.weight);
    free(build.full);
    if (rc)
        numoe_plan_free(plan);
    else
        *out = plan;
    return rc;
}

void numoe_plan_free(struct numoe_plan *plan)
{
    if (!plan)
        return;
    free(plan->nodes);
    free(plan->workers);
    free(plan->shards);
    free(plan->cumulative);
    free(plan->forms);
    free(plan->distances);
    free(plan->source);
    free((void *)plan->request.nodes);
    free((void *)plan->request.cpus);
    free((void *)plan->request.reserved_cpus);
    free(plan->machine.nodes);
    free(plan->machine.cpus);
    free(plan->machine.allowed_cpus);
    topo_notes_free(plan->notes, plan->note_count);
    free(plan);
}
