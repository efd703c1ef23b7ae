/*
 * The pools of huge pages.
 *
 * A range takes what its node's pools hold, from its address on: pages of 1 GiB, then of 2 MiB;
 * the rest is ordinary memory. Each part is made resident at once, while a failure can still be
 * handled: a reservation counts pages of all nodes, and a bound range that finds its node's pages
 * gone gets SIGBUS at the first touch.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory_node.h"

#include <sys/mman.h>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif
#ifndef MAP_HUGE_1GB
#define MAP_HUGE_1GB (30 << 26)
#endif

enum { PART_PAGES = 64 };

static bool take(struct numoe_memory *memory, unsigned char *address, uint64_t bytes, int size)
{
    void *mapped = mmap(address, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB | size, -1, 0);

    if (mapped != MAP_FAILED && (!memory->bound || !memory_bind(memory, address, bytes)) &&
        !memory_fault_in(address, bytes))
        return true;
    /* also after a failed mmap: MAP_FIXED may have removed what was there */
    mapped = mmap(address, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (mapped != MAP_FAILED && memory->bound)
        (void)memory_bind(memory, address, bytes);
    return false;
}

void memory_take_pools(struct numoe_memory *memory)
{
    struct topo_node_memory have;
    uint64_t pages;

    /* other policies spread over nodes whose pools the kernel counts together */
    if (memory->bound && memory->policy != NUMOE_MEMORY_BIND)
        return;
    if (memory->bound ? !topo_system_node("", memory->os_node, &have)
                      : !topo_system_memory("", &have))
        return;
    pages = memory->mapped / MEMORY_GIANT_PAGE;
    pages = pages < have.huge_1g_free ? pages : have.huge_1g_free;
    if (pages && (uint64_t)(uintptr_t)memory->address % MEMORY_GIANT_PAGE == 0 &&
        take(memory, memory->address, pages * MEMORY_GIANT_PAGE, MAP_HUGE_1GB))
        memory->pooled_bytes = memory->giant_bytes = pages * MEMORY_GIANT_PAGE;
    pages = (memory->mapped - memory->pooled_bytes) / MEMORY_HUGE_PAGE;
    pages = pages < have.huge_2m_free ? pages : have.huge_2m_free;
    /* in parts: when others take pages meanwhile, what was got before is kept */
    while (pages) {
        const uint64_t some = pages < PART_PAGES ? pages : PART_PAGES;

        if (!take(memory, memory->address + memory->pooled_bytes, some * MEMORY_HUGE_PAGE,
                  MAP_HUGE_2MB))
            break;
        memory->pooled_bytes += some * MEMORY_HUGE_PAGE;
        pages -= some;
    }
}
