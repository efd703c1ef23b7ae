/* What only the running system knows. SPDX-License-Identifier: Apache-2.0 */
#include "topo_build.h"
#include "topo_load.h"
#include "topo_system.h"
#include "topo_text.h"

#include <errno.h>
#include <numaif.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_CPUS = 1024, LAST_CPUS = 1 << 20, LONG_BITS = 8 * sizeof(unsigned long) };

/* The calling thread's mask: what threads started from it will inherit. */
static void restrict_cpus(struct numoe_machine *machine)
{
    for (int cpus = FIRST_CPUS; cpus <= LAST_CPUS; cpus *= 4) {
        size_t size = CPU_ALLOC_SIZE(cpus);
        cpu_set_t *set = CPU_ALLOC(cpus);

        if (!set)
            return;
        if (sched_getaffinity(0, size, set) == 0) {
            for (uint32_t i = 0; i < machine->pu_count; i++)
                if (machine->pus[i].os_index >= (uint32_t)cpus ||
                    !CPU_ISSET_S(machine->pus[i].os_index, size, set))
                    machine->pus[i].allowed = false;
            CPU_FREE(set);
            return;
        }
        CPU_FREE(set);
        if (errno != EINVAL)
            break;
    }
    (void)topo_note(&machine->notes, &machine->note_count,
                    "the CPU affinity mask cannot be read: %s", strerror(errno));
}

/* Nodes that the cpuset of this task excludes. A kernel without NUMA, or a container that forbids
 * the call, leaves what hwloc found. */
static void restrict_nodes(struct numoe_machine *machine)
{
    unsigned long mask[TOPO_MAX_NODES / LONG_BITS] = {0};

    if (get_mempolicy(NULL, mask, TOPO_MAX_NODES, NULL, MPOL_F_MEMS_ALLOWED))
        return;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        uint32_t os = machine->nodes[i].os_index;

        if (!machine->nodes[i].capacity_bytes) {
            machine->nodes[i].allowed = true; /* in no task's mask, but not by a cpuset */
            continue;
        }
        if (!(mask[os / LONG_BITS] >> os % LONG_BITS & 1))
            machine->nodes[i].allowed = false;
    }
}

void topo_live_allowed(hwloc_topology_t topology, struct numoe_machine *machine)
{
    bool any = false;

    if (!hwloc_topology_is_thissystem(topology)) {
        (void)topo_note(&machine->notes, &machine->note_count,
                        "hwloc was told to read another machine (environment HWLOC_*)");
        return;
    }
    restrict_cpus(machine);
    for (uint32_t i = 0; i < machine->node_count; i++)
        any |= machine->nodes[i].capacity_bytes != 0;
    if (any)
        restrict_nodes(machine);
}

/* @return whether the system tells */
static bool node_memory(struct numoe_node *node, bool single)
{
    struct topo_node_memory memory, system;
    bool known = topo_system_node("", node->os_index, &memory);

    if (single && topo_system_memory("", &system)) {
        if (!known)
            memory = system;
        if (system.total_bytes > memory.total_bytes)
            memory.total_bytes = system.total_bytes;
        if (system.free_bytes > memory.free_bytes)
            memory.free_bytes = system.free_bytes;
        known = true;
    }
    if (!known)
        return false;
    node->capacity_bytes = memory.total_bytes;
    node->free_bytes =
        memory.free_bytes < memory.total_bytes ? memory.free_bytes : memory.total_bytes;
    node->huge_2m_free = memory.huge_2m_free;
    node->huge_1g_free = memory.huge_1g_free;
    return true;
}

/* @return number of nodes of which the system tells nothing; first: one of them */
static uint32_t read_memory(struct numoe_machine *machine, uint32_t *first)
{
    struct topo_cgroup cgroup;
    bool single = machine->node_count == 1 && topo_system_single_node("");
    uint32_t unknown = 0;

    for (uint32_t i = 0; i < machine->node_count; i++)
        if (!node_memory(&machine->nodes[i], single) && !unknown++)
            *first = machine->nodes[i].os_index;
    topo_cgroup_find("", &cgroup);
    machine->cgroup_bytes = topo_cgroup_memory_left(&cgroup);
    machine->cpu_quota = topo_cgroup_cpus(&cgroup);
    topo_cgroup_free(&cgroup);
    return unknown;
}

void numoe_machine_refresh(struct numoe_machine *machine)
{
    uint32_t first;

    if (machine->live)
        (void)read_memory(machine, &first);
}

void topo_live_memory(struct numoe_machine *machine)
{
    uint32_t first = 0, unknown = read_memory(machine, &first);

    if (unknown)
        (void)topo_note(&machine->notes, &machine->note_count,
                        unknown > 1 ? "free memory of node %u and others is not known"
                                    : "free memory of node %u is not known",
                        first);
    if (access("/sys/devices/system/node", F_OK))
        (void)topo_note(&machine->notes, &machine->note_count,
                        "the system tells nothing of NUMA nodes: taken as one node");
}
