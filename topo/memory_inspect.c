/* Where pages are, and how large. SPDX-License-Identifier: Apache-2.0 */
#include "memory_node.h"

#include <errno.h>
#include <numaif.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, SAMPLES = 4096, BATCH = 512 };

static bool wanted(const struct numoe_memory *memory, uint32_t node)
{
    if (memory->os_node == NUMOE_NONE)
        return true;
    for (uint32_t i = 0; i < memory->node_count; i++)
        if (memory->nodes[i] == node && memory->policy != NUMOE_MEMORY_BIND)
            return true;
    return node == memory->os_node;
}

/* Ask the kernel for the node of some pages, evenly spread. A container may forbid it: then no
 * byte counts as checked. */
static void sample_nodes(const struct numoe_memory *memory, struct numoe_memory_report *report)
{
    uint64_t pages = (memory->bytes + PAGE - 1) / PAGE;
    uint64_t samples = pages < SAMPLES ? pages : SAMPLES;

    for (uint64_t first = 0; first < samples; first += BATCH) {
        void *addresses[BATCH];
        int where[BATCH];
        unsigned long count = samples - first < BATCH ? samples - first : BATCH;

        for (unsigned long i = 0; i < count; i++) {
            uint64_t page = samples == pages ? first + i : (first + i) * (pages / samples);

            addresses[i] = memory->address + page * PAGE;
            where[i] = -ENOENT;
        }
        if (move_pages(0, count, addresses, NULL, where, 0) < 0)
            return;
        for (unsigned long i = 0; i < count; i++) {
            if (where[i] < 0)
                continue; /* not resident, or not told */
            report->checked_bytes += PAGE;
            if (wanted(memory, (uint32_t)where[i]))
                report->placed_bytes += PAGE;
        }
    }
}

static uint64_t pooled(const struct numoe_memory *memory)
{
    return memory->pooled_bytes - atomic_load_explicit(&memory->missed_bytes, memory_order_relaxed);
}

/* Sum the huge pages of the mappings that overlap the range. The kernel may have joined the range
 * with a neighbour; never report more than there is. */
static uint64_t count_huge(const struct numoe_memory *memory)
{
    unsigned long long begin, end, kilobytes, from = (uintptr_t)memory->address;
    FILE *file = fopen("/proc/self/smaps", "re");
    uint64_t bytes = 0;
    bool inside = false;
    char line[512];

    if (!file)
        return pooled(memory);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%llx-%llx ", &begin, &end) == 2)
            inside = begin < from + memory->mapped && end > from + memory->pooled_bytes;
        else if (inside && sscanf(line, "AnonHugePages: %llu kB", &kilobytes) == 1)
            bytes += kilobytes * 1024;
    }
    fclose(file);
    bytes += pooled(memory);
    return bytes < memory->mapped ? bytes : memory->mapped;
}

void numoe_memory_inspect(const struct numoe_memory *memory, struct numoe_memory_report *report)
{
    memset(report, 0, sizeof *report);
    report->bytes = memory->bytes;
    report->bound = memory->bound;
    report->bind_errno = memory->bind_errno;
    report->spilled_bytes = atomic_load_explicit(&memory->spilled, memory_order_relaxed);
    report->giant_bytes = memory->giant_bytes;
    report->huge_bytes = pooled(memory) == memory->mapped ? memory->mapped : count_huge(memory);
    sample_nodes(memory, report);
}
