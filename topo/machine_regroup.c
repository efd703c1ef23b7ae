/* Memory domains as the user knows them. SPDX-License-Identifier: Apache-2.0 */
#include "plan_build.h"
#include "predict.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool grouped(const struct numoe_node *node)
{
    return node->kind == NUMOE_NODE_DRAM && node->capacity_bytes;
}

/* What was noted of the domains that are overruled. */
static void drop_note(struct numoe_machine *machine)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < machine->note_count; i++)
        if (strstr(machine->notes[i], "memory domains: nodes of one domain share"))
            free(machine->notes[i]);
        else
            machine->notes[kept++] = machine->notes[i];
    machine->note_count = kept;
}

int numoe_machine_regroup(struct numoe_machine *machine, uint32_t domains,
                          struct numoe_error *error)
{
    uint32_t packages = 0, nodes = 0, each, next = 0;
    uint32_t *count = calloc((size_t)machine->package_count + 1, sizeof *count); /* nodes */
    uint32_t *first = calloc((size_t)machine->package_count + 1, sizeof *first); /* domain */
    uint32_t *place = calloc((size_t)machine->package_count + 1, sizeof *place);
    int rc = 0;

    if (!count || !first || !place) {
        rc = numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
        goto out;
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        if (!grouped(node))
            continue;
        packages += !count[node->package < machine->package_count ? node->package
                                                                  : machine->package_count]++;
        nodes++;
    }
    each = packages ? domains / packages : 0;
    if (!each || domains % packages) {
        rc = numoe_error_set(error, -EINVAL, "domains",
                             "%u memory nodes in %u package%s cannot be %u domains, as many in "
                             "each package",
                             nodes, packages, packages == 1 ? "" : "s", domains);
        goto out;
    }
    for (uint32_t p = 0; p <= machine->package_count; p++) {
        if (count[p] && count[p] < each) {
            rc = numoe_error_set(error, -EINVAL, "domains",
                                 "%u domains a package are more than the %u memory node%s of "
                                 "package %u",
                                 each, count[p], count[p] == 1 ? "" : "s", p);
            goto out;
        }
        first[p] = next;
        next += count[p] ? each : 0;
    }
    for (uint32_t i = 0; i < machine->node_count; i++) {
        struct numoe_node *node = &machine->nodes[i];
        uint32_t p =
            node->package < machine->package_count ? node->package : machine->package_count;

        if (grouped(node))
            node->domain = first[p] + (uint32_t)((uint64_t)place[p]++ * each / count[p]);
        else
            node->domain = next++;
    }
    machine->domain_count = next;
    drop_note(machine);
    machine->pair_count = 0; /* measured of other domains */
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].node != NUMOE_NONE)
            machine->pus[i].domain = machine->nodes[machine->pus[i].node].domain;
    if (topo_note(&machine->notes, &machine->note_count,
                  "memory domains as asked: %u of them for %u nodes", domains, nodes))
        rc = numoe_error_set(error, -ENOMEM, machine->source, "out of memory");
out:
    free(count);
    free(first);
    free(place);
    return rc;
}
