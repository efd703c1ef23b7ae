/* Memory nodes that are left to others. SPDX-License-Identifier: Apache-2.0 */
#include "cli_nodes.h"

#include "cli_output.h"

#include <stdlib.h>

static bool is_listed(const struct cli_list *list, uint32_t value)
{
    for (uint32_t i = 0; i < list->count; i++)
        if (list->values[i] == value)
            return true;
    return false;
}

static bool is_there(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].os_index == os_index)
            return true;
    return false;
}

/* Whether a plan takes the node when nothing is reserved: see numoe_plan_request.nodes. */
static bool is_used(const struct cli_values *values, const struct numoe_machine *machine,
                    uint32_t node)
{
    if (values->nodes.count)
        return is_listed(&values->nodes, machine->nodes[node].os_index);
    if (!values->cpus.count)
        return machine->nodes[node].pu_count != 0;
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].node == node && is_listed(&values->cpus, machine->pus[i].os_index))
            return true;
    return false;
}

int cli_reserve_nodes(const char *verb, const struct cli_values *values,
                      const struct numoe_machine *machine, struct numoe_plan_request *request,
                      uint32_t **list)
{
    uint32_t count = 0;

    *list = NULL;
    if (!values->reserved_nodes.count)
        return CLI_OK;
    for (uint32_t i = 0; i < values->reserved_nodes.count; i++)
        if (!is_there(machine, values->reserved_nodes.values[i])) {
            cli_error(verb, "--reserve-nodes: there is no memory node %u",
                      values->reserved_nodes.values[i]);
            return CLI_USAGE;
        }
    *list = calloc((size_t)machine->node_count + values->nodes.count, sizeof **list);
    if (!*list) {
        cli_error(verb, "out of memory");
        return CLI_FAILURE;
    }
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (is_used(values, machine, i) &&
            !is_listed(&values->reserved_nodes, machine->nodes[i].os_index))
            (*list)[count++] = machine->nodes[i].os_index;
    /* those that are not there are for the plan to refuse */
    for (uint32_t i = 0; i < values->nodes.count; i++)
        if (!is_there(machine, values->nodes.values[i]))
            (*list)[count++] = values->nodes.values[i];
    if (!count) {
        cli_error(verb, "--reserve-nodes: no memory node is left");
        return CLI_USAGE;
    }
    request->nodes = *list;
    request->node_count = count;
    return CLI_OK;
}
