/*
 * cli_memory.h - what the system says this process has taken.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CLI_MEMORY_H
#define NUMOE_CLI_MEMORY_H

#include <stdint.h>

/* Zero where the system does not tell. */
struct cli_memory {
    uint64_t anonymous_bytes; /* resident anonymous pages, hugetlb pages included */
    uint64_t peak_bytes;      /* most that was resident at once, files included */
    uint64_t cgroup_bytes;    /* what the memory cgroup holds, page cache included */
};

void cli_memory_read(struct cli_memory *memory);

/* What the memory cgroup of this process holds now; 0: not known. */
uint64_t cli_memory_cgroup(void);

#endif
