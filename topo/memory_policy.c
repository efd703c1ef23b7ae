/* Policies of ranges, and what they leave room for. SPDX-License-Identifier: Apache-2.0 */
#include "memory_node.h"

#include "topo_build.h"

#include <errno.h>
#include <numaif.h>

#ifndef MPOL_LOCAL
#define MPOL_LOCAL 4
#endif
#ifndef MPOL_PREFERRED_MANY /* since Linux 5.15 */
#define MPOL_PREFERRED_MANY 5
#endif

enum { LONG_BITS = 8 * sizeof(unsigned long), MASK_LONGS = TOPO_MAX_NODES / LONG_BITS + 1 };

static void mark(unsigned long *mask, uint32_t os_node)
{
    if (os_node < TOPO_MAX_NODES)
        mask[os_node / LONG_BITS] |= 1ul << os_node % LONG_BITS;
}

/* The kernel reads maxnode - 1 bits. */
static int set_policy(void *address, uint64_t bytes, int mode, const unsigned long *mask)
{
    return mbind(address, bytes, mode, mask, mask ? TOPO_MAX_NODES + 1 : 0, 0) ? -errno : 0;
}

static int prefer(const struct numoe_memory *memory, void *address, uint64_t bytes)
{
    unsigned long mask[MASK_LONGS] = {0};
    int rc;

    mark(mask, memory->os_node);
    for (uint32_t i = 0; i < memory->node_count; i++)
        mark(mask, memory->nodes[i]);
    rc = set_policy(address, bytes, MPOL_PREFERRED_MANY, mask);
    if (rc != -EINVAL)
        return rc;
    /* an older kernel prefers one node only */
    for (uint32_t i = 0; i < MASK_LONGS; i++)
        mask[i] = 0;
    mark(mask, memory->os_node);
    return set_policy(address, bytes, MPOL_PREFERRED, mask);
}

int memory_bind(const struct numoe_memory *memory, void *address, uint64_t bytes)
{
    unsigned long mask[MASK_LONGS] = {0};

    switch (memory->policy) {
    case NUMOE_MEMORY_PREFERRED:
        return prefer(memory, address, bytes);
    case NUMOE_MEMORY_LOCAL:
        return set_policy(address, bytes, MPOL_LOCAL, NULL);
    case NUMOE_MEMORY_INTERLEAVE:
        for (uint32_t i = 0; i < memory->node_count; i++)
            mark(mask, memory->nodes[i]);
        if (!memory->node_count)
            mark(mask, memory->os_node);
        return set_policy(address, bytes, MPOL_INTERLEAVE, mask);
    default:
        mark(mask, memory->os_node);
        return set_policy(address, bytes, MPOL_BIND, mask);
    }
}

int memory_unbind(const struct numoe_memory *memory, void *address, uint64_t bytes)
{
    return prefer(memory, address, bytes);
}

int numoe_memory_prefer(uint32_t os_node)
{
    unsigned long mask[MASK_LONGS] = {0};

    if (os_node >= TOPO_MAX_NODES)
        return -EINVAL;
    mark(mask, os_node);
    return set_mempolicy(MPOL_PREFERRED, mask, TOPO_MAX_NODES + 1) ? -errno : 0;
}

uint64_t numoe_memory_room(void)
{
    struct topo_cgroup cgroup;
    uint64_t room = memory_available_anywhere(), granted;

    topo_cgroup_find("", &cgroup);
    granted = topo_cgroup_memory_left(&cgroup);
    topo_cgroup_free(&cgroup);
    room = granted < room ? granted : room;
    if (room == UINT64_MAX)
        return room;
    return room > MEMORY_MARGIN ? room - MEMORY_MARGIN : 0;
}

uint64_t memory_available_anywhere(void)
{
    struct topo_node_memory system;

    return topo_system_memory("", &system) ? system.free_bytes : UINT64_MAX;
}

void memory_available(const struct numoe_memory *memory, uint64_t *node_bytes,
                      uint64_t *cgroup_bytes)
{
    const bool one_node = memory->bound && memory->policy == NUMOE_MEMORY_BIND;
    struct topo_node_memory node;

    *cgroup_bytes = topo_cgroup_memory_left(&memory->cgroup);
    *node_bytes = UINT64_MAX;
    if (one_node && topo_system_node("", memory->os_node, &node))
        *node_bytes = node.free_bytes;
    if (!one_node || memory->single_node) {
        const uint64_t system = memory_available_anywhere();

        if (*node_bytes == UINT64_MAX || (system != UINT64_MAX && system > *node_bytes))
            *node_bytes = system;
    }
}
