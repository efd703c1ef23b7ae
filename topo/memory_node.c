/*
 * Reserve memory on a node.
 *
 * A range is anonymous memory aligned to 2 MiB with a policy of its own (mbind), so that neither
 * the process's policy nor other memory is touched. When the node's pool of 2 MiB pages has enough
 * for all of it, it is taken from there and made resident at once, while a failure can still be
 * handled: a reservation counts pages of all nodes, and a bound range that finds its node's pages
 * gone gets SIGBUS at the first touch. Otherwise transparent huge pages are asked for.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory_node.h"

#include "base/checked.h"
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <numaif.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

enum { LONG_BITS = 8 * sizeof(unsigned long) };

int memory_bind(void *address, uint64_t bytes, uint32_t os_node)
{
    /* the kernel reads maxnode - 1 bits */
    unsigned long mask[TOPO_MAX_NODES / LONG_BITS + 1] = {0};

    mask[os_node / LONG_BITS] = 1ul << os_node % LONG_BITS;
    return mbind(address, bytes, MPOL_BIND, mask, TOPO_MAX_NODES + 1, 0) ? -errno : 0;
}

int numoe_memory_prefer(uint32_t os_node)
{
    unsigned long mask[TOPO_MAX_NODES / LONG_BITS + 1] = {0};

    if (os_node >= TOPO_MAX_NODES)
        return -EINVAL;
    mask[os_node / LONG_BITS] = 1ul << os_node % LONG_BITS;
    return set_mempolicy(MPOL_PREFERRED, mask, TOPO_MAX_NODES + 1) ? -errno : 0;
}

bool memory_available(const struct numoe_memory *memory, uint64_t *node_bytes,
                      uint64_t *cgroup_bytes)
{
    struct topo_node_memory node, system;
    bool known = memory->os_node != NUMOE_NONE && memory->bound &&
                 topo_system_node("", memory->os_node, &node);

    *cgroup_bytes = topo_cgroup_memory_left(&memory->cgroup);
    if ((memory->single_node || !memory->bound) && topo_system_memory("", &system)) {
        if (!known || system.free_bytes > node.free_bytes)
            node.free_bytes = system.free_bytes;
        known = true;
    }
    *node_bytes = known ? node.free_bytes : UINT64_MAX;
    return known;
}

uint64_t numoe_memory_room(void)
{
    struct numoe_memory anywhere = {.os_node = NUMOE_NONE};
    uint64_t system, cgroup;

    topo_cgroup_find("", &anywhere.cgroup);
    memory_available(&anywhere, &system, &cgroup);
    topo_cgroup_free(&anywhere.cgroup);
    system = cgroup < system ? cgroup : system;
    if (system == UINT64_MAX)
        return system;
    return system > MEMORY_MARGIN ? system - MEMORY_MARGIN : 0;
}

static const char *node_name(char text[32], uint32_t os_node)
{
    if (os_node == NUMOE_NONE)
        snprintf(text, 32, "memory");
    else
        snprintf(text, 32, "node %u", os_node);
    return text;
}

/* Address space aligned to 2 MiB, without any page. */
static int reserve(struct numoe_memory *memory)
{
    uint64_t size = memory->mapped + MEMORY_HUGE_PAGE, skip;
    unsigned char *base = mmap(NULL, size, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (base == MAP_FAILED)
        return -errno;
    skip = (MEMORY_HUGE_PAGE - (uint64_t)(uintptr_t)base % MEMORY_HUGE_PAGE) % MEMORY_HUGE_PAGE;
    if (skip)
        munmap(base, skip);
    munmap(base + skip + memory->mapped, MEMORY_HUGE_PAGE - skip);
    memory->address = base + skip;
    return 0;
}

static int bind_range(struct numoe_memory *memory, bool strict, const struct numoe_log *log,
                      struct numoe_error *error)
{
    char name[32];
    int rc;

    if (memory->os_node == NUMOE_NONE)
        return 0;
    rc = memory_bind(memory->address, memory->mapped, memory->os_node);
    node_name(name, memory->os_node);
    if (rc == 0) {
        memory->bound = true;
        return 0;
    }
    if (rc != -EPERM && rc != -ENOSYS && rc != -EINVAL)
        return numoe_error_set(error, rc, name, "cannot bind memory to %s: %s", name,
                               strerror(-rc));
    memory->bind_errno = -rc;
    if (strict)
        return numoe_error_set(
            error, rc, name, "binding memory to %s was denied (%s), and strict binding was asked",
            name, rc == -EINVAL ? "there is no such node, or it is not allowed" : strerror(-rc));
    numoe_log_write(log, NUMOE_LOG_WARNING,
                    "binding memory to %s was denied (%s): placement is not enforced, pages go "
                    "where they are touched first",
                    name,
                    rc == -EINVAL ? "there is no such node, or it is not allowed" : strerror(-rc));
    return 0;
}

/* Take all of the range from the pool of 2 MiB pages, if the node has them. On failure the range
 * is ordinary memory again. */
static void try_hugetlb(struct numoe_memory *memory)
{
    struct topo_node_memory have;
    void *mapped;

    if (memory->bound ? !topo_system_node("", memory->os_node, &have)
                      : !topo_system_memory("", &have))
        return;
    if (have.huge_2m_free < memory->mapped / MEMORY_HUGE_PAGE)
        return;
    mapped = mmap(memory->address, memory->mapped, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0);
    if (mapped != MAP_FAILED &&
        (!memory->bound || !memory_bind(memory->address, memory->mapped, memory->os_node)) &&
        !memory_fault_in(memory->address, memory->mapped)) {
        memory->hugetlb = true;
        return;
    }
    /* also after a failed mmap: MAP_FIXED may have removed what was there */
    mapped = mmap(memory->address, memory->mapped, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (mapped != MAP_FAILED && memory->bound)
        (void)memory_bind(memory->address, memory->mapped, memory->os_node);
}

static int check_room(const struct numoe_memory *memory, struct numoe_error *error)
{
    uint64_t node, cgroup;
    char name[32], need[32], have[32];

    memory_available(memory, &node, &cgroup);
    node_name(name, memory->os_node);
    if (memory->mapped > cgroup)
        return numoe_error_set(error, -ENOMEM, name,
                               "%s needed on %s, but the cgroup's memory limit leaves %s",
                               topo_bytes(need, memory->mapped), name, topo_bytes(have, cgroup));
    if (memory->mapped > node)
        return numoe_error_set(error, -ENOMEM, name, "%s needed on %s, which has %s free",
                               topo_bytes(need, memory->mapped), name, topo_bytes(have, node));
    return 0;
}

int numoe_memory_create(uint32_t os_node, uint64_t bytes, bool strict, const struct numoe_log *log,
                        struct numoe_memory **out, struct numoe_error *error)
{
    struct numoe_memory *memory;
    char name[32];
    uint64_t mapped;
    int rc;

    node_name(name, os_node);
    if (!out || !bytes)
        return numoe_error_set(error, -EINVAL, name, "a range of no bytes was asked for");
    if (os_node != NUMOE_NONE && os_node >= TOPO_MAX_NODES)
        return numoe_error_set(error, -EINVAL, name, "there is no %s; the highest is node %d", name,
                               TOPO_MAX_NODES - 1);
    if (!numoe_round_up_u64(bytes, MEMORY_HUGE_PAGE, &mapped) || mapped > (uint64_t)1 << 47)
        return numoe_error_set(error, -ENOMEM, name,
                               "%llu bytes are more than an address space holds",
                               (unsigned long long)bytes);
    memory = calloc(1, sizeof *memory);
    if (!memory)
        return numoe_error_set(error, -ENOMEM, name, "out of memory");
    memory->os_node = os_node;
    memory->bytes = bytes;
    memory->mapped = mapped;
    memory->single_node = topo_system_single_node("");
    topo_cgroup_find("", &memory->cgroup);
    rc = reserve(memory);
    if (rc) {
        char need[32];

        numoe_error_set(error, rc, name, "cannot map %s for %s: %s", topo_bytes(need, mapped), name,
                        strerror(-rc));
        goto free_memory;
    }
    rc = bind_range(memory, strict, log, error);
    if (rc)
        goto unmap;
    try_hugetlb(memory);
    if (!memory->hugetlb) {
        rc = check_room(memory, error);
        if (rc)
            goto unmap;
        /* refused without transparent huge pages in the kernel: shown by numoe_memory_inspect */
        (void)madvise(memory->address, mapped, MADV_HUGEPAGE);
    }
    *out = memory;
    return 0;

unmap:
    munmap(memory->address, memory->mapped);
free_memory:
    topo_cgroup_free(&memory->cgroup);
    free(memory);
    return rc;
}

void *numoe_memory_address(const struct numoe_memory *memory)
{
    return memory->address;
}

uint64_t numoe_memory_bytes(const struct numoe_memory *memory)
{
    return memory->bytes;
}

void numoe_memory_destroy(struct numoe_memory *memory)
{
    if (!memory)
        return;
    munmap(memory->address, memory->mapped);
    topo_cgroup_free(&memory->cgroup);
    free(memory);
}
