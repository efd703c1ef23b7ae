/*
 * Make memory resident, chunk by chunk.
 *
 * With strict binding the kernel kills the process when a node is full; nothing is returned. So
 * before each chunk what the node has free, and what the cgroup still grants, is compared with what
 * is missing of the chunk and what other threads are about to take.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory_node.h"
#include "topo_text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE = 4096 };
/* Several processes may look at the same free memory at once: four of them stay within the margin.
 */
static const uint64_t chunk_bytes = (uint64_t)8 << 20;

int memory_fault_in(unsigned char *address, uint64_t bytes)
{
    int rc;

    do
        rc = madvise(address, bytes, MADV_POPULATE_WRITE) ? -errno : 0;
    while (rc == -EINTR || rc == -EAGAIN);
    return rc;
}

/* A kernel before 5.14: write to each page what is there. The exchange changes nothing that another
 * thread has written; adding or or-ing zero would do too, but compilers make mere loads of those.
 */
static void touch(unsigned char *address, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += PAGE) {
        unsigned char seen = __atomic_load_n(address + at, __ATOMIC_RELAXED);

        while (!__atomic_compare_exchange_n(address + at, &seen, seen, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED))
            ;
    }
}

/* Bytes of a chunk that are not resident; all when the system does not tell. */
static uint64_t missing(unsigned char *address, uint64_t bytes)
{
    unsigned char resident[(8 << 20) / PAGE];
    uint64_t count = 0, pages = bytes / PAGE;

    if (mincore(address, bytes, resident))
        return bytes;
    for (uint64_t i = 0; i < pages; i++)
        count += !(resident[i] & 1);
    return count * PAGE;
}

/* What is about to be taken must be there: `pending` by this range, `all` by it and those beside
 * it. A chunk that its node has no room for may go elsewhere when that was asked for. */
static int check(struct numoe_memory *memory, unsigned char *address, uint64_t bytes,
                 uint64_t pending, uint64_t all, struct numoe_error *error)
{
    const bool own_node =
        memory->bound && memory->policy == NUMOE_MEMORY_BIND && !memory->single_node;
    uint64_t node, cgroup;
    char name[32] = "memory", need[32], have[32];

    memory_available(memory, &node, &cgroup);
    if (memory->os_node != NUMOE_NONE)
        snprintf(name, sizeof name, "node %u", memory->os_node);
    if (!own_node)
        pending = all; /* one store for all of them */
    if (all + MEMORY_MARGIN > cgroup)
        return numoe_error_set(error, -ENOMEM, name,
                               "the cgroup's memory limit leaves %s, but %s are about to be used "
                               "on %s",
                               topo_bytes(have, cgroup), topo_bytes(need, all), name);
    if (pending + MEMORY_MARGIN > node && memory->spill &&
        all + MEMORY_MARGIN <= memory_available_anywhere() &&
        !memory_unbind(memory, address, bytes)) {
        atomic_fetch_add_explicit(&memory->spilled, bytes, memory_order_relaxed);
        return 0;
    }
    if (pending + MEMORY_MARGIN > node)
        return numoe_error_set(error, -ENOMEM, name,
                               "%s has %s free, but %s are about to be used there", name,
                               topo_bytes(have, node), topo_bytes(need, pending));
    return 0;
}

int memory_populate_ordinary(struct numoe_memory *memory, unsigned char *address, uint64_t bytes,
                             struct numoe_error *error)
{
    uint64_t need = missing(address, bytes), pending, all;
    int rc;

    if (!need)
        return 0;
    /* relaxed: only the sum counts, it orders nothing */
    pending = atomic_fetch_add_explicit(&memory->pending, need, memory_order_relaxed) + need;
    all = atomic_fetch_add_explicit(memory->together, need, memory_order_relaxed) + need;
    rc = check(memory, address, bytes, pending, all, error);
    if (!rc) {
        rc = memory_fault_in(address, bytes);
        if (rc == -EINVAL) {
            touch(address, bytes);
            rc = 0;
        } else if (rc) {
            numoe_error_set(error, -ENOMEM, "memory", "%llu bytes could not be made resident: %s",
                            (unsigned long long)bytes, strerror(-rc));
            rc = -ENOMEM;
        }
    }
    atomic_fetch_sub_explicit(memory->together, need, memory_order_relaxed);
    atomic_fetch_sub_explicit(&memory->pending, need, memory_order_relaxed);
    return rc;
}

int numoe_memory_populate(struct numoe_memory *memory, uint64_t offset, uint64_t bytes,
                          struct numoe_error *error)
{
    uint64_t end, at;

    if (offset > memory->bytes || bytes > memory->bytes - offset)
        return numoe_error_set(error, -EINVAL, "numoe_memory_populate",
                               "%llu bytes at %llu are outside a range of %llu bytes",
                               (unsigned long long)bytes, (unsigned long long)offset,
                               (unsigned long long)memory->bytes);
    end = (offset + bytes + PAGE - 1) / PAGE * PAGE;
    at = offset / PAGE * PAGE;
    if (at < memory->pooled_bytes) {
        const uint64_t pooled = end < memory->pooled_bytes ? end : memory->pooled_bytes;
        const int rc = memory_populate_pooled(memory, at, pooled, error);

        if (rc)
            return rc;
        at = pooled;
    }
    while (at < end) {
        /* chunks begin at multiples of their size, so that threads share no huge page */
        uint64_t next = (at / chunk_bytes + 1) * chunk_bytes;
        int rc;

        if (next > end)
            next = end;
        rc = memory_populate_ordinary(memory, memory->address + at, next - at, error);
        if (rc)
            return rc;
        at = next;
    }
    return 0;
}

uint64_t numoe_memory_release(struct numoe_memory *memory, uint64_t offset, uint64_t bytes)
{
    uint64_t begin = (offset + PAGE - 1) / PAGE * PAGE, end = (offset + bytes) / PAGE * PAGE;

    if (begin < memory->pooled_bytes)
        begin = memory->pooled_bytes;
    if (end > memory->mapped)
        end = memory->mapped;
    if (begin >= end || madvise(memory->address + begin, end - begin, MADV_DONTNEED))
        return 0;
    return end - begin;
}
