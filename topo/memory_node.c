/*
 * Reserve memory on a node.
 *
 * A range is anonymous memory with a policy of its own (mbind), so that neither the process's
 * policy nor other memory is touched. What the node's pools of huge pages hold is taken first;
 * transparent huge pages are asked for the rest.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory_node.h"

#include "base/checked.h"
#include "topo_build.h"
#include "topo_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const char *node_name(char text[32], uint32_t os_node)
{
    if (os_node == NUMOE_NONE)
        snprintf(text, 32, "memory");
    else
        snprintf(text, 32, "node %u", os_node);
    return text;
}

/* Address space aligned for the largest pages that it may get, without any page. */
static int reserve(struct numoe_memory *memory)
{
    const uint64_t align =
        memory->mapped < MEMORY_GIANT_PAGE ? MEMORY_HUGE_PAGE : MEMORY_GIANT_PAGE;
    uint64_t size = memory->mapped + align, skip;
    unsigned char *base = mmap(NULL, size, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (base == MAP_FAILED)
        return -errno;
    skip = (align - (uint64_t)(uintptr_t)base % align) % align;
    if (skip)
        munmap(base, skip);
    munmap(base + skip + memory->mapped, align - skip);
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
    rc = memory_bind(memory, memory->address, memory->mapped);
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

static int check_room(const struct numoe_memory *memory, struct numoe_error *error)
{
    const uint64_t wanted = memory->mapped - memory->pooled_bytes;
    uint64_t node, cgroup;
    char name[32], need[32], have[32];

    memory_available(memory, &node, &cgroup);
    if (memory->spill)
        node = memory_available_anywhere();
    node_name(name, memory->os_node);
    if (wanted > cgroup)
        return numoe_error_set(error, -ENOMEM, name,
                               "%s needed on %s, but the cgroup's memory limit leaves %s",
                               topo_bytes(need, wanted), name, topo_bytes(have, cgroup));
    if (wanted > node)
        return numoe_error_set(error, -ENOMEM, name, "%s needed on %s, %s has %s free",
                               topo_bytes(need, wanted), name,
                               memory->spill ? "and the machine" : "which", topo_bytes(have, node));
    return 0;
}

static int check_request(const struct numoe_memory_request *request, uint64_t *mapped,
                         struct numoe_error *error)
{
    char name[32];

    node_name(name, request->os_node);
    if (!request->bytes)
        return numoe_error_set(error, -EINVAL, name, "a range of no bytes was asked for");
    if (request->os_node != NUMOE_NONE && request->os_node >= TOPO_MAX_NODES)
        return numoe_error_set(error, -EINVAL, name, "there is no %s; the highest is node %d", name,
                               TOPO_MAX_NODES - 1);
    if ((unsigned)request->policy > NUMOE_MEMORY_INTERLEAVE)
        return numoe_error_set(error, -EINVAL, name, "there is no memory policy %d",
                               (int)request->policy);
    if (request->node_count && !request->nodes)
        return numoe_error_set(error, -EINVAL, name, "the list of nodes is missing");
    if (!numoe_round_up_u64(request->bytes, MEMORY_HUGE_PAGE, mapped) || *mapped > (uint64_t)1
                                                                                       << 47)
        return numoe_error_set(error, -ENOMEM, name,
                               "%llu bytes are more than an address space holds",
                               (unsigned long long)request->bytes);
    return 0;
}

/* A range that knows what it is to be, without an address. */
static struct numoe_memory *describe(const struct numoe_memory_request *request, uint64_t mapped)
{
    struct numoe_memory *memory = calloc(1, sizeof *memory);

    if (!memory)
        return NULL;
    if (request->node_count) {
        memory->nodes = malloc(request->node_count * sizeof *memory->nodes);
        if (!memory->nodes) {
            free(memory);
            return NULL;
        }
        memcpy(memory->nodes, request->nodes, request->node_count * sizeof *memory->nodes);
        memory->node_count = request->node_count;
    }
    memory->os_node = request->os_node;
    memory->policy = request->policy;
    memory->spill = request->spill && request->policy == NUMOE_MEMORY_BIND;
    memory->bytes = request->bytes;
    memory->mapped = mapped;
    memory->together = request->beside ? request->beside->together : &memory->of_all;
    memory->single_node = topo_system_single_node("");
    topo_cgroup_find("", &memory->cgroup);
    return memory;
}

int numoe_memory_create(const struct numoe_memory_request *request, struct numoe_memory **out,
                        struct numoe_error *error)
{
    struct numoe_memory_request asked = NUMOE_MEMORY_REQUEST_INIT;
    struct numoe_memory *memory;
    char name[32];
    uint64_t mapped = 0;
    int rc;

    if (!request || !out || request->size < sizeof request->size)
        return numoe_error_set(error, -EINVAL, "numoe_memory_create",
                               "request or result is missing");
    memcpy(&asked, request, request->size < sizeof asked ? request->size : sizeof asked);
    rc = check_request(&asked, &mapped, error);
    if (rc)
        return rc;
    node_name(name, asked.os_node);
    memory = describe(&asked, mapped);
    if (!memory)
        return numoe_error_set(error, -ENOMEM, name, "out of memory");
    rc = reserve(memory);
    if (rc) {
        char need[32];

        numoe_error_set(error, rc, name, "cannot map %s for %s: %s", topo_bytes(need, mapped), name,
                        strerror(-rc));
        goto forget;
    }
    rc = bind_range(memory, asked.strict, asked.log, error);
    if (rc)
        goto fail;
    memory_take_pools(memory);
    if (memory->pooled_bytes < mapped) {
        rc = check_room(memory, error);
        if (rc)
            goto fail;
        /* refused without transparent huge pages in the kernel: shown by numoe_memory_inspect */
        (void)madvise(memory->address + memory->pooled_bytes, mapped - memory->pooled_bytes,
                      MADV_HUGEPAGE);
    }
    *out = memory;
    return 0;

fail:
    munmap(memory->address, memory->mapped);
forget:
    topo_cgroup_free(&memory->cgroup);
    free(memory->nodes);
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
    free(memory->nodes);
    free(memory);
}
