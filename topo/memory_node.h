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
#define MEMORY_GIANT_PAGE ((uint64_t)1 << 30)
/* Left over, on a node and in the cgroup, for page tables and for what the kernel keeps below its
 * watermarks. */
#define MEMORY_MARGIN ((uint64_t)32 << 20)

struct numoe_memory {
    unsigned char *address;
    uint64_t bytes;        /* asked for */
    uint64_t mapped;       /* a multiple of MEMORY_HUGE_PAGE */
    uint64_t giant_bytes;  /* from address on, on pages of 1 GiB, resident since creation ... */
    uint64_t pooled_bytes; /* ... and from address on, on pages of 1 GiB and then of 2 MiB ... */
    _Atomic uint64_t missed_bytes; /* ... but for so many, whose pages were not there after all */
    uint32_t os_node;
    uint32_t *nodes; /* of PREFERRED and INTERLEAVE */
    uint32_t node_count;
    enum numoe_memory_policy policy;
    bool spill;
    bool bound;
    int bind_errno;
    bool single_node; /* the system's own totals describe the node */
    struct topo_cgroup cgroup;
    /* Bytes that threads inside populate are about to make resident: checks of several threads
     * must not count the same free memory. Added before a check, taken back after. */
    _Atomic uint64_t pending;
    _Atomic uint64_t *together; /* the same of all ranges beside each other: in one of them */
    _Atomic uint64_t of_all;    /* where it is that one */
    _Atomic uint64_t spilled;   /* bytes of chunks that were allowed elsewhere */
};

/* What may still be taken where the policy puts pages, and in the cgroup; UINT64_MAX: not known. */
void memory_available(const struct numoe_memory *memory, uint64_t *node_bytes,
                      uint64_t *cgroup_bytes);
/* The same of all nodes. */
uint64_t memory_available_anywhere(void);

/* Give [address, address + bytes) the range's policy. @return 0 or -errno */
int memory_bind(const struct numoe_memory *memory, void *address, uint64_t bytes);
/* Let it lie elsewhere when the node is full. */
int memory_unbind(const struct numoe_memory *memory, void *address, uint64_t bytes);

/* Take from the node's pools of huge pages what they hold. The range has its policy already; on
 * failure it is ordinary memory again, with its policy. */
void memory_take_pools(struct numoe_memory *memory);

/* Make [begin, end) of the range resident, all of it from the pools; pages that are not there
 * become ordinary ones. @return 0 or -errno */
int memory_populate_pooled(struct numoe_memory *memory, uint64_t begin, uint64_t end,
                           struct numoe_error *error);
/* Make a part of the range that is ordinary memory resident, if there is room for it. @return 0 or
 * -ENOMEM with error filled */
int memory_populate_ordinary(struct numoe_memory *memory, unsigned char *address, uint64_t bytes,
                             struct numoe_error *error);

/* Make a range resident without a signal on failure. @return 0 or -errno */
int memory_fault_in(unsigned char *address, uint64_t bytes);

#endif
