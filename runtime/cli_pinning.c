/* What pinning host memory for GPUs comes to, in numoe topo. SPDX-License-Identifier: Apache-2.0 */
#include "cli_gpu.h"

#include "cli_output.h"
#include "numoe_gpu.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <sys/resource.h>

/* The node of a described device, as an open one has it. */
static uint32_t staging_node(const struct numoe_machine *machine, const struct numoe_device *d)
{
    return d->locality_known && d->node_count ? machine->nodes[d->nodes[0]].os_index : NUMOE_NONE;
}

/* What there is to pin, and what may be. */
struct pinnable {
    uint64_t bytes;  /* of all nodes that may be used: free where that is known, else in all */
    uint64_t locked; /* that this process may lock; UINT64_MAX: no limit, or another machine */
};

static struct pinnable pinnable_of(const struct numoe_machine *machine)
{
    struct pinnable p = {.locked = UINT64_MAX};
    struct rlimit limit;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *n = &machine->nodes[i];
        if (n->allowed)
            p.bytes += n->free_bytes ? n->free_bytes : n->capacity_bytes;
    }
    if (machine->live && !getrlimit(RLIMIT_MEMLOCK, &limit) && limit.rlim_cur != RLIM_INFINITY)
        p.locked = limit.rlim_cur;
    return p;
}

void cli_print_pinnable(const struct numoe_machine *machine)
{
    const struct pinnable p = pinnable_of(machine);

    printf("pinning for GPUs: experts where they lie, in chunks of %.0f GiB (one registration ends "
           "at %.0f GiB), %.1f GB at most",
           (double)NUMOE_GPU_CHUNK_BYTES / (1u << 30),
           (double)NUMOE_GPU_REGISTRATION_BYTES / (1u << 30), (double)p.bytes / 1e9);
    if (p.locked == UINT64_MAX)
        printf("%s\n", machine->live ? "; memory that may be locked is not limited" : "");
    else
        printf("; %.1f MB of memory may be locked (ulimit -l), which a driver may hold to\n",
               (double)p.locked / 1e6);
}

/* Where staging goes: to the device's node, if that is known. */
static void print_staging(uint32_t os_node)
{
    printf("%" PRIu64 " MiB of staging ", NUMOE_GPU_RING_BYTES >> 20);
    if (os_node == NUMOE_NONE)
        printf("wherever the system puts it, as the GPU's node is not known");
    else
        printf("on node %" PRIu32, os_node);
}

void cli_print_pinning(const struct numoe_gpu_pinning *p)
{
    if (p->in_place)
        printf("  experts are pinned where they lie: %" PRIu64 " MiB for trial in %.1f ms; what is "
               "refused goes through ",
               p->tried_bytes >> 20, p->ms);
    else
        printf("  experts are not pinned (%s), and go through ", p->reason);
    print_staging(p->os_node);
    putchar('\n');
}

json_t *cli_pinning_json(const struct numoe_gpu_pinning *p)
{
    return json_pack("{s:s, s:I, s:o, s:I, s:o, s:s}", "path", p->in_place ? "in-place" : "staging",
                     "tried_bytes", (json_int_t)p->tried_bytes, "tried_ms", cli_json_number(p->ms),
                     "staging_bytes", (json_int_t)NUMOE_GPU_RING_BYTES, "staging_node",
                     p->os_node == NUMOE_NONE ? json_null() : json_integer(p->os_node), "reason",
                     p->reason);
}

json_t *cli_pinnable_json(const struct numoe_machine *machine)
{
    const struct pinnable p = pinnable_of(machine);

    return json_pack("{s:I, s:I, s:I, s:o}", "memory_bytes", (json_int_t)p.bytes, "chunk_bytes",
                     (json_int_t)NUMOE_GPU_CHUNK_BYTES, "registration_bytes",
                     (json_int_t)NUMOE_GPU_REGISTRATION_BYTES, "locked_bytes",
                     p.locked == UINT64_MAX ? json_null() : json_integer((json_int_t)p.locked));
}

/* GPUs of a machine that is described: where their staging would be. */
void cli_print_staging(const struct numoe_machine *machine)
{
    bool any = false;

    for (uint32_t i = 0; i < machine->device_count; i++) {
        const struct numoe_device *d = &machine->devices[i];
        if (!d->gpu)
            continue;
        if (!any)
            cli_print_pinnable(machine);
        any = true;
        printf("GPU %s: ", d->name);
        print_staging(staging_node(machine, d));
        putchar('\n');
    }
}

json_t *cli_staging_json(const struct numoe_machine *machine)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < machine->device_count; i++) {
        const struct numoe_device *d = &machine->devices[i];
        const uint32_t node = d->gpu ? staging_node(machine, d) : NUMOE_NONE;
        if (d->gpu)
            json_array_append_new(list,
                                  json_pack("{s:s, s:I, s:o}", "name", d->name, "staging_bytes",
                                            (json_int_t)NUMOE_GPU_RING_BYTES, "staging_node",
                                            node == NUMOE_NONE ? json_null() : json_integer(node)));
    }
    return list;
}
