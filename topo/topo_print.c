/* A machine as text for people. SPDX-License-Identifier: Apache-2.0 */
#include "topo_print.h"

#include "numoe_topo.h"
#include "topo_text.h"

#include <stdlib.h>

const char *topo_kind_name(enum numoe_node_kind kind)
{
    static const char *const names[] = {"DRAM", "HBM", "slow", "GPU"};

    return (unsigned)kind < sizeof names / sizeof names[0] ? names[kind] : "?";
}

static const char *plural(uint32_t count)
{
    return count == 1 ? "" : "s";
}

static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

const char *topo_sorted_ranges(char *text, size_t size, uint32_t *numbers, size_t count)
{
    qsort(numbers, count, sizeof *numbers, ascending);
    return topo_ranges(text, size, numbers, count);
}

static void print_nodes(const struct numoe_machine *machine, FILE *out, uint32_t *scratch)
{
    fprintf(out, "%6s %-5s %7s %8s %6s %12s %12s %10s  %s\n", "node", "kind", "domain", "package",
            "cores", "memory", "free", "MB/s", "CPUs");
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];
        char cpus[160], capacity[32], available[32], package[16] = "-", speed[24] = "-";
        size_t count = 0;

        for (uint32_t p = 0; p < machine->pu_count; p++)
            if (machine->pus[p].node == i && machine->pus[p].allowed)
                scratch[count++] = machine->pus[p].os_index;
        if (node->package != NUMOE_NONE)
            snprintf(package, sizeof package, "%u", node->package);
        if (node->bandwidth_mbs)
            snprintf(speed, sizeof speed, "%llu", (unsigned long long)node->bandwidth_mbs);
        fprintf(out, "%6u %-5s %7u %8s %6u %12s %12s %10s  %s%s\n", node->os_index,
                topo_kind_name(node->kind), node->domain, package, node->core_count,
                topo_bytes(capacity, node->capacity_bytes), topo_bytes(available, node->free_bytes),
                speed, count ? topo_sorted_ranges(cpus, sizeof cpus, scratch, count) : "none",
                node->allowed ? "" : "  (not allowed)");
    }
}

static void print_devices(const struct numoe_machine *machine, FILE *out, uint32_t *scratch)
{
    for (uint32_t i = 0; i < machine->device_count; i++) {
        const struct numoe_device *device = &machine->devices[i];
        char nodes[160], memory[32];

        for (uint32_t n = 0; n < device->node_count; n++)
            scratch[n] = machine->nodes[device->nodes[n]].os_index;
        fprintf(out, "%s %s:", device->gpu ? "GPU" : "drive", device->name);
        if (device->locality_known)
            fprintf(out, " local to node%s %s", plural(device->node_count),
                    topo_sorted_ranges(nodes, sizeof nodes, scratch, device->node_count));
        else
            fprintf(out, " locality not known");
        if (device->link_gbs > 0)
            fprintf(out, ", link %.1f GB/s", device->link_gbs);
        if (device->memory_bytes)
            fprintf(out, ", %s", topo_bytes(memory, device->memory_bytes));
        fputc('\n', out);
    }
}

/* One column of "least-most", or of one number when they are alike. */
static const char *span(char text[32], double least, double most)
{
    if (most <= 0)
        snprintf(text, 32, "-");
    else if (most - least < 0.5)
        snprintf(text, 32, "%.0f", most);
    else
        snprintf(text, 32, "%.0f-%.0f", least, most);
    return text;
}

struct extent {
    double least, most;
};

static void widen(struct extent *extent, double value)
{
    if (value <= 0)
        return;
    if (extent->most <= 0 || value < extent->least)
        extent->least = value;
    if (value > extent->most)
        extent->most = value;
}

static void print_calibration(const struct numoe_machine *machine, FILE *out)
{
    if (!machine->pair_count && !machine->together_mbs)
        return;
    fprintf(out, "\nmeasured:\n%6s %9s %7s %15s %13s %16s\n", "node", "own MB/s", "own ns",
            "others MB/s", "others ns", "at once MB/s");
    for (uint32_t n = 0; n < machine->node_count; n++) {
        struct extent own_mbs = {0}, own_ns = {0}, mbs = {0}, ns = {0};
        double together = machine->together_mbs ? (double)machine->together_mbs[n] : 0;
        char a[32], b[32], c[32], d[32], e[32];

        for (uint32_t i = 0; i < machine->pair_count; i++) {
            const struct numoe_pair_speed *pair = &machine->pairs[i];
            bool own = pair->domain == machine->nodes[n].domain;

            if (pair->node != n)
                continue;
            widen(own ? &own_mbs : &mbs, (double)pair->bandwidth_mbs);
            widen(own ? &own_ns : &ns, pair->latency_ns);
        }
        fprintf(out, "%6u %9s %7s %15s %13s %16s\n", machine->nodes[n].os_index,
                span(a, own_mbs.least, own_mbs.most), span(b, own_ns.least, own_ns.most),
                span(c, mbs.least, mbs.most), span(d, ns.least, ns.most),
                span(e, together, together));
    }
    fputc('\n', out);
}

void numoe_machine_print(const struct numoe_machine *machine, FILE *out)
{
    size_t most = machine->pu_count > machine->node_count ? machine->pu_count : machine->node_count;
    uint32_t *scratch = calloc(most + 1, sizeof *scratch), allowed = 0;

    if (!scratch)
        return;
    for (uint32_t i = 0; i < machine->pu_count; i++)
        allowed += machine->pus[i].allowed;
    fprintf(out, "machine: %s\n", machine->source);
    if (machine->saved_source)
        fprintf(out, "saved from: %s\n", machine->saved_source);
    if (machine->cpu_model[0])
        fprintf(out, "CPU: %s\n", machine->cpu_model);
    fprintf(out,
            "%u memory node%s in %u domain%s, %u package%s, %u core%s, %u CPU%s (%u allowed)\n",
            machine->node_count, plural(machine->node_count), machine->domain_count,
            plural(machine->domain_count), machine->package_count, plural(machine->package_count),
            machine->core_count, plural(machine->core_count), machine->pu_count,
            plural(machine->pu_count), allowed);
    print_nodes(machine, out, scratch);
    print_calibration(machine, out);
    print_devices(machine, out, scratch);
    if (machine->cgroup_bytes != UINT64_MAX) {
        char left[32];

        fprintf(out, "memory that the cgroup still grants: %s\n",
                topo_bytes(left, machine->cgroup_bytes));
    }
    if (machine->cpu_quota > 0)
        fprintf(out, "CPU quota of the cgroup: %.2f\n", machine->cpu_quota);
    for (uint32_t i = 0; i < machine->note_count; i++)
        fprintf(out, "note: %s\n", machine->notes[i]);
    free(scratch);
}
