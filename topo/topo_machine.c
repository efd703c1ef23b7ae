/* Load and free a machine. SPDX-License-Identifier: Apache-2.0 */
#include "topo_build.h"
#include "topo_load.h"
#include "topo_text.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static void find_model(hwloc_topology_t topology, struct numoe_machine *machine)
{
    hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
    const char *model = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;

    if (!model)
        model = hwloc_obj_get_info_by_name(hwloc_get_root_obj(topology), "CPUModel");
    if (model)
        topo_copy_printable(machine->cpu_model, sizeof machine->cpu_model, model);
}

static int build_all(struct topo_build *build, bool live, struct numoe_error *error)
{
    int rc = topo_build_objects(build, error);

    if (!rc)
        rc = topo_build_distances(build, error);
    if (rc)
        return rc;
    if (live) {
        topo_live_allowed(build->topology, build->machine);
        if (hwloc_topology_is_thissystem(build->topology))
            topo_live_memory(build->machine);
    }
    rc = topo_build_kinds(build, error);
    if (!rc)
        rc = topo_build_domains(build, error);
    if (!rc)
        rc = topo_build_service(build, error);
    if (!rc)
        rc = topo_build_devices(build, error);
    return rc;
}

int topo_machine_build(const struct topo_source *source, struct numoe_machine **out,
                       struct numoe_error *error)
{
    struct topo_build build = {0};
    struct numoe_machine *machine;
    size_t length = strlen(source->name) + 1;
    int rc;

    machine = calloc(1, sizeof *machine);
    if (!machine)
        return numoe_error_set(error, -ENOMEM, source->name, "out of memory");
    machine->live = source->kind == TOPO_LIVE;
    machine->cgroup_bytes = UINT64_MAX;
    machine->source = malloc(length);
    if (!machine->source) {
        rc = numoe_error_set(error, -ENOMEM, source->name, "out of memory");
        goto free_machine;
    }
    topo_copy_printable(machine->source, length, source->name);
    rc = topo_source_topology(source, &build.topology, error);
    if (rc)
        goto free_machine;
    build.machine = machine;
    find_model(build.topology, machine);
    rc = build_all(&build, machine->live, error);
    free(build.node_objects);
    free(build.pu_objects);
    hwloc_topology_destroy(build.topology);
    if (rc)
        goto free_machine;
    *out = machine;
    return 0;

free_machine:
    numoe_machine_free(machine);
    return rc;
}

/*
 * Held while hwloc is at work and across fork: hwloc has locks of its own, and a child forked while
 * another thread holds one would wait for it for ever.
 */
static pthread_mutex_t hwloc_in_use = PTHREAD_MUTEX_INITIALIZER;

int numoe_machine_load(const char *words, struct numoe_machine **machine, struct numoe_error *error)
{
    struct topo_source source;
    int rc;

    if (!machine)
        return numoe_error_set(error, -EINVAL, "numoe_machine_load", "no place for the machine");
    rc = topo_source_open(words, &source, error);
    if (rc)
        return rc;
    if (source.kind == TOPO_SAVED) {
        rc = topo_saved_read(&source, machine, error);
        topo_source_close(&source);
        return rc;
    }
    pthread_mutex_lock(&hwloc_in_use);
    rc = source.kind == TOPO_LIVE ? topo_machine_build(&source, machine, error)
                                  : topo_machine_try(&source, machine, error);
    pthread_mutex_unlock(&hwloc_in_use);
    topo_source_close(&source);
    return rc;
}

const struct numoe_pair_speed *numoe_machine_speed(const struct numoe_machine *machine,
                                                   uint32_t domain, uint32_t node)
{
    for (uint32_t i = 0; i < machine->pair_count; i++)
        if (machine->pairs[i].domain == domain && machine->pairs[i].node == node)
            return &machine->pairs[i];
    return NULL;
}

uint64_t numoe_machine_measured(const struct numoe_machine *machine, uint32_t node)
{
    uint64_t best = 0;

    for (uint32_t i = 0; i < machine->pair_count; i++)
        if (machine->pairs[i].node == node && machine->pairs[i].bandwidth_mbs > best)
            best = machine->pairs[i].bandwidth_mbs;
    return best;
}

uint64_t numoe_machine_bandwidth(const struct numoe_machine *machine, uint32_t node)
{
    uint64_t measured;

    if (machine->together_mbs && machine->together_mbs[node])
        return machine->together_mbs[node];
    measured = numoe_machine_measured(machine, node);
    return measured ? measured : machine->nodes[node].bandwidth_mbs;
}

void numoe_machine_free(struct numoe_machine *machine)
{
    if (!machine)
        return;
    for (uint32_t i = 0; i < machine->device_count; i++)
        free(machine->devices[i].nodes);
    free(machine->devices);
    free(machine->distances);
    free(machine->nodes);
    free(machine->pus);
    free(machine->source);
    free(machine->saved_source);
    free(machine->pairs);
    free(machine->together_mbs);
    topo_notes_free(machine->notes, machine->note_count);
    free(machine);
}
