/*
 * The pools of huge pages.
 *
 * A range takes what its node's pools hold, from its address on: pages of 1 GiB, then of 2 MiB;
 * the rest is ordinary memory. A reservation counts pages of all nodes, and a bound range that
 * finds its node's pages gone gets SIGBUS at the first touch. So pages of 1 GiB are made resident
 * at once, and those of 2 MiB by numoe_memory_populate, before anything touches them: by several
 * threads, and one that is not there becomes ordinary memory. The first of them is tried at once,
 * as a kernel before 5.14 cannot make pages resident without that signal.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory_node.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif
#ifndef MAP_HUGE_1GB
#define MAP_HUGE_1GB (30 << 26)
#endif

enum { PART_PAGES = 64 };

/* Instead of pages of a pool. */
static int make_ordinary(struct numoe_memory *memory, unsigned char *address, uint64_t bytes)
{
    void *mapped = mmap(address, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);

    if (mapped == MAP_FAILED)
        return -errno;
    return memory->bound ? memory_bind(memory, address, bytes) : 0;
}

/* resident: so many bytes at once. */
static bool take(struct numoe_memory *memory, unsigned char *address, uint64_t bytes, int size,
                 uint64_t resident)
{
    void *mapped = mmap(address, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB | size, -1, 0);

    if (mapped != MAP_FAILED && (!memory->bound || !memory_bind(memory, address, bytes)) &&
        !memory_fault_in(address, resident))
        return true;
    /* also after a failed mmap: MAP_FIXED may have removed what was there */
    (void)make_ordinary(memory, address, bytes);
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
        take(memory, memory->address, pages * MEMORY_GIANT_PAGE, MAP_HUGE_1GB,
             pages * MEMORY_GIANT_PAGE))
        memory->pooled_bytes = memory->giant_bytes = pages * MEMORY_GIANT_PAGE;
    pages = (memory->mapped - memory->pooled_bytes) / MEMORY_HUGE_PAGE;
    pages = pages < have.huge_2m_free ? pages : have.huge_2m_free;
    /* in parts: when others take pages meanwhile, what was got before is kept */
    while (pages) {
        const uint64_t some = pages < PART_PAGES ? pages : PART_PAGES;

        if (!take(memory, memory->address + memory->pooled_bytes, some * MEMORY_HUGE_PAGE,
                  MAP_HUGE_2MB, MEMORY_HUGE_PAGE))
            break;
        memory->pooled_bytes += some * MEMORY_HUGE_PAGE;
        pages -= some;
    }
}

int memory_populate_pooled(struct numoe_memory *memory, uint64_t begin, uint64_t end,
                           struct numoe_error *error)
{
    if (begin < memory->giant_bytes)
        begin = memory->giant_bytes;
    for (uint64_t at = begin / MEMORY_HUGE_PAGE * MEMORY_HUGE_PAGE; at < end;
         at += MEMORY_HUGE_PAGE) {
        unsigned char *page = memory->address + at;
        int rc;

        if (!memory_fault_in(page, MEMORY_HUGE_PAGE))
            continue;
        rc = make_ordinary(memory, page, MEMORY_HUGE_PAGE);
        if (rc)
            return numoe_error_set(error, rc, "memory",
                                   "a page of a pool was gone, and no other can be mapped: %s",
                                   strerror(-rc));
        atomic_fetch_add_explicit(&memory->missed_bytes, MEMORY_HUGE_PAGE, memory_order_relaxed);
        rc = memory_populate_ordinary(memory, page, MEMORY_HUGE_PAGE, error);
        if (rc)
            return rc;
    }
    return 0;
}
