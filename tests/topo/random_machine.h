/*
 * random_machine.h - machines that nobody has built, each following from its seed.
 *
 * Packages of memory domains of nodes of L3 caches of cores of threads, none of them even; node
 * memory from nothing over a few MiB to hundreds of GiB; HBM, CXL and GPU memory beside it; CPUs
 * and nodes that are not allowed; numbers with holes. What follows from these (which node serves a
 * CPU, counts, distances) follows as it does when a machine is loaded.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef RANDOM_MACHINE_H
#define RANDOM_MACHINE_H

#include "numoe_topo.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { RANDOM_MOST_NODES = 128, RANDOM_MOST_PUS = 2048 };

static inline uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* 0 .. below - 1 */
static inline uint32_t random_below(uint64_t *state, uint32_t below)
{
    return (uint32_t)(random_next(state) >> 11) % below;
}

static inline bool random_chance(uint64_t *state, uint32_t percent)
{
    return random_below(state, 100) < percent;
}

static inline uint64_t random_memory(uint64_t *state)
{
    const uint64_t mib = (uint64_t)1 << 20;

    switch (random_below(state, 10)) {
    case 0:
        return 0;
    case 1:
        return 1 + random_next(state) % (64 * mib); /* less than anything needs, and odd */
    default:
        return (1 + random_next(state) % 512) * 1024 * mib;
    }
}

struct random_plan {
    uint64_t *state;
    struct numoe_machine *machine;
    uint32_t cores, threads, node_step, pu_step;
    bool hybrid;
};

/* A node with its cores; a node beside it, or a GPU's, has none. */
static inline void random_add_node(struct random_plan *r, enum numoe_node_kind kind,
                                   uint32_t package, uint32_t domain)
{
    struct numoe_machine *machine = r->machine;
    struct numoe_node *node = &machine->nodes[machine->node_count];
    uint32_t cores = kind == NUMOE_NODE_DRAM ? random_below(r->state, r->cores + 1) : 0;
    uint32_t caches = 1 + random_below(r->state, 2);

    *node = (struct numoe_node){
        .os_index = machine->node_count * r->node_step + 3 * (r->node_step > 1),
        .kind = kind,
        .allowed = !random_chance(r->state, 4),
        .domain = domain,
        .package = package,
        .beside = kind == NUMOE_NODE_DRAM ? NUMOE_NONE : machine->node_count - 1,
        .capacity_bytes = random_memory(r->state),
    };
    for (uint32_t c = 0; c < cores && machine->pu_count + r->threads <= RANDOM_MOST_PUS; c++) {
        uint32_t efficiency = r->hybrid ? random_below(r->state, 2) : 0;

        if (c == 0 || (c == cores / 2 && caches > 1))
            machine->l3_count++;
        for (uint32_t t = 0; t < r->threads; t++) {
            struct numoe_pu *pu = &machine->pus[machine->pu_count];

            *pu = (struct numoe_pu){
                .os_index = machine->pu_count * r->pu_step + (r->pu_step > 1),
                .allowed = !random_chance(r->state, 4),
                .core = machine->core_count,
                .node = machine->node_count, /* for now: where it is */
                .l3 = machine->l3_count - 1,
                .package = package,
                .efficiency = efficiency,
            };
            machine->pu_count++;
        }
        machine->core_count++;
    }
    machine->node_count++;
}

static inline void random_fill_distances(struct numoe_machine *machine)
{
    uint32_t count = machine->node_count;

    machine->distances = calloc((size_t)count * count, sizeof *machine->distances);
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = 0; b < count; b++)
            machine->distances[(size_t)a * count + b] =
                a == b                                                   ? 10
                : machine->nodes[a].domain == machine->nodes[b].domain   ? 11
                : machine->nodes[a].package == machine->nodes[b].package ? 12
                                                                         : 32;
}

/* The nearest node that could serve a CPU of node `home`. */
static inline uint32_t random_server(const struct numoe_machine *machine, uint32_t home)
{
    uint32_t best = NUMOE_NONE;

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        if (!node->allowed || !node->capacity_bytes || node->kind != NUMOE_NODE_DRAM)
            continue;
        if (best == NUMOE_NONE ||
            numoe_machine_distance(machine, home, i) < numoe_machine_distance(machine, home, best))
            best = i;
    }
    return best;
}

static inline void random_serve(struct numoe_machine *machine)
{
    uint32_t smt = 0, counted = NUMOE_NONE;

    for (uint32_t i = 0; i < machine->pu_count; i++) {
        struct numoe_pu *pu = &machine->pus[i];
        uint32_t home = pu->node;

        smt = i && machine->pus[i - 1].core == pu->core ? smt : 0;
        pu->smt = smt;
        smt += pu->allowed;
        pu->node = random_server(machine, home);
        pu->node_is_near = pu->node == home;
        pu->domain = pu->node == NUMOE_NONE ? NUMOE_NONE : machine->nodes[pu->node].domain;
        if (!pu->allowed || pu->node == NUMOE_NONE)
            continue;
        machine->nodes[pu->node].pu_count++;
        machine->nodes[pu->node].core_count += counted != pu->core;
        counted = pu->core;
    }
    for (uint32_t i = 0; i < machine->node_count; i++)
        machine->nodes[i].free_bytes = machine->nodes[i].capacity_bytes;
}

/* Bandwidth: not known, or told by firmware, or measured with all nodes busy. */
static inline void random_fill_bandwidth(struct numoe_machine *machine, uint64_t *state)
{
    uint32_t known = random_below(state, 3);

    if (known == 2)
        machine->together_mbs = calloc(machine->node_count, sizeof *machine->together_mbs);
    for (uint32_t i = 0; i < machine->node_count && known; i++) {
        uint64_t mbs = 1000 + random_next(state) % 100000;

        if (known == 1)
            machine->nodes[i].bandwidth_mbs = mbs;
        else if (machine->nodes[i].pu_count)
            machine->together_mbs[i] = mbs;
    }
}

static inline void random_add_gpus(struct numoe_machine *machine, uint64_t *state)
{
    uint32_t count = random_below(state, 3);

    machine->devices = calloc(3, sizeof *machine->devices);
    for (uint32_t i = 0; i < count; i++) {
        struct numoe_device *device = &machine->devices[machine->device_count++];

        *device =
            (struct numoe_device){.gpu = true,
                                  .locality_known = true,
                                  .package = 0,
                                  .node_count = 1,
                                  .link_gbs = 8 + random_below(state, 60),
                                  .memory_bytes = (uint64_t)(1 + random_below(state, 140)) << 30};
        snprintf(device->name, sizeof device->name, "cuda%u", i);
        device->nodes = calloc(1, sizeof *device->nodes);
        device->nodes[0] = random_below(state, machine->node_count);
    }
}

/* Free with numoe_machine_free. At least one node can be planned on. */
static inline struct numoe_machine *random_machine(uint64_t seed)
{
    static const char *const cpus[] = {"", "AMD EPYC 7H12 64-Core Processor",
                                       "INTEL(R) XEON(R) PLATINUM 8568Y+"};
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    uint32_t packages, domains, nodes, target;
    struct random_plan r = {.state = &state};
    struct numoe_machine *machine = calloc(1, sizeof *machine);

    for (int i = 0; i < 8; i++)
        random_next(&state);
    machine->source = malloc(64);
    snprintf(machine->source, 64, "random machine %llu", (unsigned long long)seed);
    machine->nodes = calloc(RANDOM_MOST_NODES, sizeof *machine->nodes);
    machine->pus = calloc(RANDOM_MOST_PUS, sizeof *machine->pus);
    machine->cgroup_bytes = UINT64_MAX;
    strcpy(machine->cpu_model, cpus[random_below(&state, 3)]);
    r.machine = machine;
    target = 1 + random_below(&state, random_chance(&state, 30) ? RANDOM_MOST_NODES : 16);
    packages = 1 + random_below(&state, random_chance(&state, 20) ? 16 : 2);
    domains = 1 + random_below(&state, 4);
    nodes = 1 + target / (packages * domains);
    r.cores = 1 + random_below(&state, target > 64 ? 16 : 64);
    r.threads = 1u << random_below(&state, 3);
    r.node_step = random_chance(&state, 25) ? 5 : 1;
    r.pu_step = random_chance(&state, 25) ? 4 : 1;
    r.hybrid = random_chance(&state, 15);
    for (uint32_t p = 0; p < packages && machine->node_count < target;
         p++, machine->package_count++)
        for (uint32_t d = 0; d < domains && machine->node_count < target; d++) {
            uint32_t domain = machine->domain_count++;

            for (uint32_t n = 0; n < nodes && machine->node_count < target; n++)
                random_add_node(&r, NUMOE_NODE_DRAM, p, domain);
            if (machine->node_count < target && random_chance(&state, 10))
                random_add_node(&r,
                                (enum numoe_node_kind)(NUMOE_NODE_HBM + random_below(&state, 3)), p,
                                machine->domain_count++);
        }
    /* whatever came out, somewhere there is a core with memory */
    machine->nodes[0].allowed = true;
    if (!machine->nodes[0].capacity_bytes)
        machine->nodes[0].capacity_bytes = (uint64_t)16 << 30;
    if (!machine->pu_count) {
        machine->pus[machine->pu_count++] = (struct numoe_pu){.l3 = NUMOE_NONE};
        machine->core_count++;
    }
    machine->pus[0].allowed = true;
    if (random_chance(&state, 80))
        random_fill_distances(machine);
    random_serve(machine);
    random_fill_bandwidth(machine, &state);
    random_add_gpus(machine, &state);
    if (random_chance(&state, 10))
        machine->cgroup_bytes = (uint64_t)(1 + random_below(&state, 2000)) << 30;
    if (random_chance(&state, 10))
        machine->cpu_quota = 0.5 + random_below(&state, 100);
    return machine;
}

#endif
