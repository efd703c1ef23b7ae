/*
 * memory_node.h - one range of memory on one node.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MEMORY_NODE_H
#define MEMORY_NODE_H

#include "numoe_topo.h"
#include "topo_system.h"

#include <stdatomic.h>

#define MEMORY_HUGE_PAGE ((uint64_t)2 << 20)
/* Left over, on a node and in the cgroup, for page tables and for what the kernel keeps below its
 * watermarks. */
#define MEMORY_MARGIN ((uint64_t)32 << 20)

struct numoe_memory {
    unsigned char *address;
    uint64_t bytes;  /* asked for */
    uint64_t mapped; /* a multiple of MEMORY_HUGE_PAGE */
    uint32_t os_node;
    bool bound;
    int bind_errno;
    bool hugetlb;     /* on pages of the huge page pool, all resident since creation */
    bool single_node; /* the system's own totals describe the node */
    struct topo_cgroup cgroup;
    /* Bytes that threads inside populate are about to make resident: checks of several threads
     * must not count the same free memory. Added before a check, taken back after. */
    _Atomic uint64_t pending;
};

/* What may still be taken on the node and in the cgroup. @return false: the node's is not known */
bool memory_available(const struct numoe_memory *memory, uint64_t *node_bytes,
                      uint64_t *cgroup_bytes);

/* Bind [address, address + bytes) to the node. @return 0 or -errno */
int memory_bind(void *address, uint64_t bytes, uint32_t os_node);

/* Make a range resident without a signal on failure. @return 0 or -errno */
int memory_fault_in(unsigned char *address, uint64_t bytes);

#endif
