/*
 * topo_checks.h - what holds of every machine and every plan.
 *
 * Whoever includes it defines check_that(condition, [format, ...]) first: what to do when
 * something does not hold.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_TESTS_TOPO_CHECKS_H
#define NUMOE_TESTS_TOPO_CHECKS_H

#include "numoe_topo.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Everything that holds of any machine. */
static inline void check_machine(const struct numoe_machine *machine)
{
    uint32_t pus = 0;

    check_that(machine->node_count > 0 && machine->pu_count > 0);
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        check_that(node->domain < machine->domain_count);
        check_that(node->package == NUMOE_NONE || node->package < machine->package_count);
        check_that(node->core_count <= node->pu_count);
        check_that(node->free_bytes <= node->capacity_bytes);
        check_that(node->beside == NUMOE_NONE || node->beside < machine->node_count);
        check_that(!node->pu_count || (node->allowed && node->kind != NUMOE_NODE_GPU));
        pus += node->pu_count;
        for (uint32_t j = 0; j < i; j++)
            check_that(machine->nodes[j].os_index != node->os_index);
        check_that(numoe_machine_distance(machine, i, i) == 10);
    }
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        check_that(pu->core < machine->core_count);
        check_that(pu->l3 == NUMOE_NONE || pu->l3 < machine->l3_count);
        check_that(pu->node == NUMOE_NONE || pu->node < machine->node_count);
        check_that(pu->node == NUMOE_NONE || pu->domain == machine->nodes[pu->node].domain);
        if (pu->allowed && pu->node != NUMOE_NONE)
            pus--;
    }
    check_that(pus == 0, "PUs of nodes and PUs with a node differ");
}

/* Every field but source and live, which tell where a machine came from. */
static inline void check_same_machine(const struct numoe_machine *a, const struct numoe_machine *b)
{
    size_t square = (size_t)a->node_count * a->node_count;

    check_that(a->node_count == b->node_count);
    check_that(a->pu_count == b->pu_count);
    check_that(a->core_count == b->core_count);
    check_that(a->l3_count == b->l3_count);
    check_that(a->domain_count == b->domain_count);
    check_that(a->package_count == b->package_count);
    check_that(a->cgroup_bytes == b->cgroup_bytes);
    check_that(a->cpu_quota == b->cpu_quota);
    check_that(!strcmp(a->cpu_model, b->cpu_model));
    for (uint32_t i = 0; i < a->node_count; i++) {
        const struct numoe_node *x = &a->nodes[i], *y = &b->nodes[i];

        check_that(x->os_index == y->os_index && x->kind == y->kind && x->allowed == y->allowed &&
                       x->domain == y->domain && x->package == y->package &&
                       x->beside == y->beside && x->pu_count == y->pu_count &&
                       x->core_count == y->core_count && x->capacity_bytes == y->capacity_bytes &&
                       x->free_bytes == y->free_bytes && x->huge_2m_free == y->huge_2m_free &&
                       x->huge_1g_free == y->huge_1g_free && x->bandwidth_mbs == y->bandwidth_mbs,
                   "node %u", i);
    }
    for (uint32_t i = 0; i < a->pu_count; i++) {
        const struct numoe_pu *x = &a->pus[i], *y = &b->pus[i];

        check_that(x->os_index == y->os_index && x->allowed == y->allowed && x->core == y->core &&
                       x->smt == y->smt && x->node == y->node &&
                       x->node_is_near == y->node_is_near && x->l3 == y->l3 &&
                       x->domain == y->domain && x->package == y->package &&
                       x->efficiency == y->efficiency,
                   "PU %u", i);
    }
    check_that(a->device_count == b->device_count);
    for (uint32_t i = 0; i < a->device_count; i++) {
        const struct numoe_device *x = &a->devices[i], *y = &b->devices[i];

        check_that(!strcmp(x->name, y->name));
        check_that(x->gpu == y->gpu && x->locality_known == y->locality_known &&
                       x->package == y->package && x->node_count == y->node_count &&
                       x->link_gbs == y->link_gbs && x->memory_bytes == y->memory_bytes,
                   "device %u", i);
        check_that(!x->node_count || !memcmp(x->nodes, y->nodes, x->node_count * sizeof *x->nodes));
    }
    check_that(!a->distances == !b->distances);
    check_that(!a->distances || !memcmp(a->distances, b->distances, square * sizeof(uint32_t)));
    check_that(a->note_count == b->note_count);
    for (uint32_t i = 0; i < a->note_count; i++)
        check_that(!strcmp(a->notes[i], b->notes[i]));
    check_that(a->pair_count == b->pair_count);
    for (uint32_t i = 0; i < a->pair_count; i++) {
        const struct numoe_pair_speed *x = &a->pairs[i], *y = &b->pairs[i];

        check_that(x->domain == y->domain && x->node == y->node &&
                   x->bandwidth_mbs == y->bandwidth_mbs && x->latency_ns == y->latency_ns);
    }
    check_that(!a->together_mbs == !b->together_mbs);
    check_that(!a->together_mbs ||
               !memcmp(a->together_mbs, b->together_mbs, a->node_count * sizeof *a->together_mbs));
}

/* Shards cover all places in order, and their nodes are where they say. */
static inline void check_shards(const struct numoe_plan *plan)
{
    const struct numoe_expert_shape held = numoe_plan_held(plan), *shape = &held;
    uint64_t places = 0;

    check_that(plan->shard_count > 0 && plan->shard_count <= plan->node_count);
    check_that(plan->form != NUMOE_FORM_EVERY_NODE || plan->shard_count == 1);
    check_that(plan->form != NUMOE_FORM_EXPERTS || plan->shard_count == plan->node_count);
    for (uint32_t g = 0; g < plan->shard_count; g++) {
        const struct numoe_plan_shard *shard = &plan->shards[g];
        uint64_t slices = 0, before = 0;

        check_that(shard->first_place == places);
        places += shard->places;
        check_that(shard->first_node < shard->end_node && shard->end_node <= plan->node_count);
        check_that(plan->nodes[shard->first_node].shard == g);
        check_that(plan->nodes[shard->end_node - 1].shard == g);
        for (uint32_t n = 0; n < plan->node_count; n++) {
            if (plan->nodes[n].shard != g)
                continue;
            check_that(n >= shard->first_node && n < shard->end_node);
            check_that(plan->cumulative[n] >= before);
            before = plan->cumulative[n];
            slices += plan->nodes[n].slice_count;
        }
        check_that(slices == shard->places * shape->slices);
    }
    check_that(places == shape->layers * shape->experts);
}

/* Everything that holds of any plan by itself. */
static inline void check_plan_alone(const struct numoe_plan *plan)
{
    const struct numoe_expert_shape held = numoe_plan_held(plan), *shape = &held;
    uint64_t total = shape->layers * shape->experts * shape->slices, slices = 0, bytes = 0;
    double weights = 0;
    uint32_t workers = 0;

    check_that(plan->node_count > 0 && plan->worker_count > 0);
    check_that(plan->cumulative[0] == 0);
    check_shards(plan);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_plan_node *node = &plan->nodes[n];

        check_that(plan->cumulative[n] <= plan->cumulative[n + 1] || plan->shard_count > 1);
        check_that(node->planned_bytes <= node->available_bytes);
        check_that(node->lanes >= 1);
        check_that(node->first_worker == workers);
        for (uint32_t w = 0; w < node->worker_count; w++)
            check_that(plan->workers[workers + w].plan_node == n);
        workers += node->worker_count;
        slices += node->slice_count;
        bytes += node->planned_bytes;
        weights += node->weight;
    }
    check_that(workers == plan->worker_count);
    check_that(fabs(weights - 1) < 1e-9);
    check_that(slices == total);
    check_that(bytes ==
               total * shape->slice_bytes + shape->layers * shape->experts * shape->expert_bytes);
}

/* And of one that was made for a machine. */
static inline void check_plan(const struct numoe_machine *machine, const struct numoe_plan *plan)
{
    check_plan_alone(plan);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_node *node = &machine->nodes[plan->nodes[n].node];

        check_that(node->os_index == plan->nodes[n].os_index);
        check_that(node->allowed && node->kind != NUMOE_NODE_GPU);
    }
    for (uint32_t w = 0; w < plan->worker_count; w++) {
        const struct numoe_pu *pu = &machine->pus[plan->workers[w].pu];

        check_that(pu->allowed);
        check_that(pu->os_index == plan->workers[w].os_cpu);
    }
}

/* Walk the boundaries of a layer: whole cover by one shard, ascending, counts as promised. Adds to
 * what each node holds: slices, and slices that are an expert's first. */
static inline void check_layer(const struct numoe_plan *plan, uint64_t l, uint64_t *all,
                               uint64_t *first)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    const struct numoe_range *range = &plan->range;
    uint64_t *layer = calloc(plan->node_count, sizeof *layer);
    uint64_t *experts = calloc(plan->shard_count, sizeof *experts);
    /* slices of a node in one layer, beside its part of the experts that its shard has there */
    double near = plan->shard_count > 1 ? 2 : 1;

    for (uint64_t e = 0; e < shape->experts; e++) {
        const bool held = e >= range->first_expert && e < range->end_expert;
        uint64_t before = numoe_plan_boundary(plan, l, e, 0);
        uint32_t shard = NUMOE_NONE;

        check_that(before == range->first_slice);
        for (uint32_t n = 0; n < plan->node_count; n++) {
            uint64_t next = numoe_plan_boundary(plan, l, e, n + 1);

            check_that(next >= before);
            layer[n] += next - before;
            first[n] += before == 0 && next > 0;
            check_that(next == before || shard == NUMOE_NONE || shard == plan->nodes[n].shard);
            shard = next > before ? plan->nodes[n].shard : shard;
            before = next;
        }
        check_that(before == (held ? range->end_slice : range->first_slice));
        check_that(held == (shard != NUMOE_NONE));
        if (held)
            experts[shard]++;
    }
    for (uint32_t g = 0; g < plan->shard_count; g++) {
        double share = (double)plan->shards[g].places / (double)shape->layers;

        check_that((double)experts[g] > share - 1 && (double)experts[g] < share + 1,
                   "layer %lu shard %u: %lu experts, share %f", (unsigned long)l, g,
                   (unsigned long)experts[g], share);
    }
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_plan_shard *shard = &plan->shards[plan->nodes[n].shard];
        double ideal = shard->places
                           ? (double)experts[plan->nodes[n].shard] *
                                 (double)plan->nodes[n].slice_count / (double)shard->places
                           : 0;

        check_that((double)layer[n] > ideal - near - 1e-6 && (double)layer[n] < ideal + near + 1e-6,
                   "layer %lu node %u: %lu slices, share %f", (unsigned long)l, n,
                   (unsigned long)layer[n], ideal);
        all[n] += layer[n];
    }
    free(layer);
    free(experts);
}

/* All layers, and that they add up to what the plan says of its nodes. */
static inline void check_boundaries(const struct numoe_plan *plan)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    uint64_t *all = calloc(plan->node_count, sizeof *all);
    uint64_t *first = calloc(plan->node_count, sizeof *first);

    for (uint64_t l = 0; l < shape->layers; l++)
        check_layer(plan, l, all, first);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        check_that(all[n] == plan->nodes[n].slice_count);
        check_that(plan->nodes[n].planned_bytes ==
                   all[n] * shape->slice_bytes + first[n] * shape->expert_bytes);
    }
    free(all);
    free(first);
}

#endif
