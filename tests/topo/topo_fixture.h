/* What tests of topo share. SPDX-License-Identifier: Apache-2.0 */
#ifndef TOPO_FIXTURE_H
#define TOPO_FIXTURE_H

#include "numoe_topo.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DATA NUMOE_TEST_DATA "/topo/data/"

static inline struct numoe_machine *machine_of(const char *source)
{
    struct numoe_machine *machine = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_machine_load(source, &machine, &error);

    cr_assert_eq(rc, 0, "%s: %s", source ? source : "live", error.message);
    return machine;
}

static inline uint32_t node_at(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].os_index == os_index)
            return i;
    cr_assert_fail("there is no node %u", os_index);
    return NUMOE_NONE;
}

static inline const struct numoe_pu *cpu_at(const struct numoe_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].os_index == os_index)
            return &machine->pus[i];
    cr_assert_fail("there is no CPU %u", os_index);
    return NULL;
}

/* DeepSeek-V4-Flash: 147.2e9 bytes of experts. */
static const struct numoe_expert_shape v4_flash = {.layers = 43,
                                                   .experts = 256,
                                                   .slices = 64,
                                                   .slice_bytes = 208896,
                                                   .hidden = 4096,
                                                   .experts_per_token = 6};

static inline bool has_note(char *const *notes, uint32_t count, const char *words)
{
    for (uint32_t i = 0; i < count; i++)
        if (strstr(notes[i], words))
            return true;
    return false;
}

/* Everything that holds of any machine. */
static inline void check_machine(const struct numoe_machine *machine)
{
    uint32_t pus = 0;

    cr_assert(machine->node_count > 0 && machine->pu_count > 0);
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];

        cr_assert(node->domain < machine->domain_count);
        cr_assert(node->package == NUMOE_NONE || node->package < machine->package_count);
        cr_assert(node->core_count <= node->pu_count);
        cr_assert(node->free_bytes <= node->capacity_bytes);
        cr_assert(node->beside == NUMOE_NONE || node->beside < machine->node_count);
        cr_assert(!node->pu_count || (node->allowed && node->kind != NUMOE_NODE_GPU));
        pus += node->pu_count;
        for (uint32_t j = 0; j < i; j++)
            cr_assert_neq(machine->nodes[j].os_index, node->os_index);
        cr_assert_eq(numoe_machine_distance(machine, i, i), 10);
    }
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        cr_assert(pu->core < machine->core_count);
        cr_assert(pu->l3 == NUMOE_NONE || pu->l3 < machine->l3_count);
        cr_assert(pu->node == NUMOE_NONE || pu->node < machine->node_count);
        cr_assert(pu->node == NUMOE_NONE || pu->domain == machine->nodes[pu->node].domain);
        if (pu->allowed && pu->node != NUMOE_NONE)
            pus--;
    }
    cr_assert_eq(pus, 0, "PUs of nodes and PUs with a node differ");
}

static inline struct numoe_plan *plan_of(const struct numoe_machine *machine,
                                         const struct numoe_plan_request *request)
{
    struct numoe_plan *plan = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_plan_create(machine, request, &plan, &error);

    cr_assert_eq(rc, 0, "%s: %s", error.where, error.message);
    return plan;
}

/* Shards cover all places in order, and their nodes are where they say. */
static inline void check_shards(const struct numoe_plan *plan)
{
    const struct numoe_expert_shape held = numoe_plan_held(plan), *shape = &held;
    uint64_t places = 0;

    cr_assert(plan->shard_count > 0 && plan->shard_count <= plan->node_count);
    cr_assert(plan->form != NUMOE_FORM_EVERY_NODE || plan->shard_count == 1);
    cr_assert(plan->form != NUMOE_FORM_EXPERTS || plan->shard_count == plan->node_count);
    for (uint32_t g = 0; g < plan->shard_count; g++) {
        const struct numoe_plan_shard *shard = &plan->shards[g];
        uint64_t slices = 0, before = 0;

        cr_assert_eq(shard->first_place, places);
        places += shard->places;
        cr_assert(shard->first_node < shard->end_node && shard->end_node <= plan->node_count);
        cr_assert_eq(plan->nodes[shard->first_node].shard, g);
        cr_assert_eq(plan->nodes[shard->end_node - 1].shard, g);
        for (uint32_t n = 0; n < plan->node_count; n++) {
            if (plan->nodes[n].shard != g)
                continue;
            cr_assert(n >= shard->first_node && n < shard->end_node);
            cr_assert(plan->cumulative[n] >= before);
            before = plan->cumulative[n];
            slices += plan->nodes[n].slice_count;
        }
        cr_assert_eq(slices, shard->places * shape->slices);
    }
    cr_assert_eq(places, shape->layers * shape->experts);
}

/* Everything that holds of any plan; counts slice by slice when that is not too many. */
static inline void check_plan(const struct numoe_machine *machine, const struct numoe_plan *plan)
{
    const struct numoe_expert_shape held = numoe_plan_held(plan), *shape = &held;
    uint64_t total = shape->layers * shape->experts * shape->slices, slices = 0, bytes = 0;
    double weights = 0;
    uint32_t workers = 0;

    cr_assert(plan->node_count > 0 && plan->worker_count > 0);
    cr_assert_eq(plan->cumulative[0], 0);
    check_shards(plan);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_plan_node *node = &plan->nodes[n];

        cr_assert_eq(machine->nodes[node->node].os_index, node->os_index);
        cr_assert(machine->nodes[node->node].allowed);
        cr_assert_neq(machine->nodes[node->node].kind, NUMOE_NODE_GPU);
        cr_assert(plan->cumulative[n] <= plan->cumulative[n + 1] || plan->shard_count > 1);
        cr_assert(node->planned_bytes <= node->available_bytes);
        cr_assert(node->lanes >= 1);
        cr_assert_eq(node->first_worker, workers);
        for (uint32_t w = 0; w < node->worker_count; w++)
            cr_assert_eq(plan->workers[workers + w].plan_node, n);
        workers += node->worker_count;
        slices += node->slice_count;
        bytes += node->planned_bytes;
        weights += node->weight;
    }
    cr_assert_eq(workers, plan->worker_count);
    cr_assert_float_eq(weights, 1, 1e-9);
    cr_assert_eq(slices, total);
    cr_assert_eq(bytes,
                 total * shape->slice_bytes + shape->layers * shape->experts * shape->expert_bytes);
    for (uint32_t w = 0; w < plan->worker_count; w++) {
        const struct numoe_pu *pu = &machine->pus[plan->workers[w].pu];

        cr_assert(pu->allowed);
        cr_assert_eq(pu->os_index, plan->workers[w].os_cpu);
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

        cr_assert_eq(before, range->first_slice);
        for (uint32_t n = 0; n < plan->node_count; n++) {
            uint64_t next = numoe_plan_boundary(plan, l, e, n + 1);

            cr_assert(next >= before);
            layer[n] += next - before;
            first[n] += before == 0 && next > 0;
            cr_assert(next == before || shard == NUMOE_NONE || shard == plan->nodes[n].shard);
            shard = next > before ? plan->nodes[n].shard : shard;
            before = next;
        }
        cr_assert_eq(before, held ? range->end_slice : range->first_slice);
        cr_assert_eq(held, shard != NUMOE_NONE);
        if (held)
            experts[shard]++;
    }
    for (uint32_t g = 0; g < plan->shard_count; g++) {
        double share = (double)plan->shards[g].places / (double)shape->layers;

        cr_assert((double)experts[g] > share - 1 && (double)experts[g] < share + 1,
                  "layer %lu shard %u: %lu experts, share %f", (unsigned long)l, g,
                  (unsigned long)experts[g], share);
    }
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_plan_shard *shard = &plan->shards[plan->nodes[n].shard];
        double ideal = shard->places
                           ? (double)experts[plan->nodes[n].shard] *
                                 (double)plan->nodes[n].slice_count / (double)shard->places
                           : 0;

        cr_assert((double)layer[n] > ideal - near - 1e-6 && (double)layer[n] < ideal + near + 1e-6,
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
        cr_assert_eq(all[n], plan->nodes[n].slice_count);
        cr_assert_eq(plan->nodes[n].planned_bytes,
                     all[n] * shape->slice_bytes + first[n] * shape->expert_bytes);
    }
    free(all);
    free(first);
}

/* What a printing function writes, as a string to free. */
#define text_of(call)                                                                              \
    __extension__({                                                                                \
        char *text_ = NULL;                                                                        \
        size_t size_ = 0;                                                                          \
        FILE *out = open_memstream(&text_, &size_);                                                \
        cr_assert(out);                                                                            \
        call;                                                                                      \
        fclose(out);                                                                               \
        text_;                                                                                     \
    })

#endif
