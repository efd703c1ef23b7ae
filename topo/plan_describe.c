/* What a plan keeps of its request and of its machine. SPDX-License-Identifier: Apache-2.0 */
#include "plan_build.h"
#include "topo_print.h"
#include "topo_saved_form.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* NULL for an empty list, and when there is no memory for it. */
static uint32_t *copy_list(const uint32_t *list, uint32_t count)
{
    uint32_t *copy = count ? malloc(count * sizeof *copy) : NULL;

    if (copy)
        memcpy(copy, list, count * sizeof *copy);
    return copy;
}

static bool keep_request(const struct numoe_plan_request *request, struct numoe_plan_request *kept)
{
    *kept = *request;
    kept->predict = NULL; /* the caller's; what came of it is in the forms */
    kept->nodes = copy_list(request->nodes, request->node_count);
    kept->cpus = copy_list(request->cpus, request->cpu_count);
    kept->reserved_cpus = copy_list(request->reserved_cpus, request->reserved_count);
    return (kept->nodes || !kept->node_count) && (kept->cpus || !kept->cpu_count) &&
           (kept->reserved_cpus || !kept->reserved_count);
}

static bool keep_nodes(const struct numoe_machine *machine, struct numoe_plan_machine *kept)
{
    kept->nodes = calloc(machine->node_count, sizeof *kept->nodes);
    if (!kept->nodes)
        return false;
    kept->node_count = machine->node_count;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        kept->nodes[i] = (struct numoe_plan_machine_node){
            .os_index = node->os_index,
            .kind = node->kind,
            .allowed = node->allowed,
            .domain = node->domain,
            .package = node->package,
            .capacity_bytes = node->capacity_bytes,
        };
    }
    return true;
}

static bool keep_cpus(const struct numoe_machine *machine, const struct numoe_plan *plan,
                      struct numoe_plan_machine *kept)
{
    bool *used = calloc(machine->pu_count, sizeof *used);

    kept->cpus = calloc(plan->worker_count, sizeof *kept->cpus);
    for (uint32_t w = 0; used && w < plan->worker_count; w++)
        used[plan->workers[w].pu] = true;
    for (uint32_t i = 0; used && kept->cpus && i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        if (!used[i])
            continue;
        kept->cpus[kept->cpu_count++] = (struct numoe_plan_cpu){
            .index = i,
            .os_index = pu->os_index,
            .core = pu->core,
            .l3 = pu->l3,
            .package = pu->package,
            .node = pu->node == NUMOE_NONE ? NUMOE_NONE : machine->nodes[pu->node].os_index,
        };
    }
    free(used);
    return kept->cpu_count != 0;
}

static bool keep_allowed_cpus(const struct numoe_machine *machine, struct numoe_plan_machine *kept)
{
    uint32_t *numbers = calloc(machine->pu_count, sizeof *numbers);
    char text[TOPO_SAVED_TEXT];
    size_t count = 0;

    if (!numbers)
        return false;
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].allowed)
            numbers[count++] = machine->pus[i].os_index;
    kept->allowed_cpus = strdup(topo_sorted_ranges(text, sizeof text, numbers, count));
    free(numbers);
    return kept->allowed_cpus != NULL;
}

int plan_describe(struct plan_build *build, struct numoe_error *error)
{
    const struct numoe_machine *machine = build->machine;
    struct numoe_plan *plan = build->plan;
    struct numoe_plan_machine *kept = &plan->machine;

    kept->live = machine->live;
    memcpy(kept->cpu_model, machine->cpu_model, sizeof kept->cpu_model);
    kept->distances_known = machine->distances != NULL;
    kept->cgroup_bytes = machine->cgroup_bytes;
    kept->cpu_quota = machine->cpu_quota;
    if (!keep_request(build->request, &plan->request) || !keep_nodes(machine, kept) ||
        !keep_cpus(machine, plan, kept) || !keep_allowed_cpus(machine, kept))
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    return 0;
}
