/*
 * Refusals are right: on small machines every way of placing the experts is tried.
 *
 * What is tried contains all that a plan can be: each expert's slices in consecutive runs on nodes
 * (ways_of_runs), and beyond that any numbers of slices on any nodes, with the bytes besides slices
 * at whichever node has slice 0 (any_way).
 */
#include "topo/random_machine.h"
#include "topo/topo_fixture.h"

#include <errno.h>

enum { MOST_SMALL = 4 };

struct small {
    uint32_t nodes;
    uint64_t room[MOST_SMALL], cgroup;
    struct numoe_expert_shape shape;
};

static struct numoe_machine *small_machine(const struct small *small)
{
    struct numoe_machine *machine = calloc(1, sizeof *machine);

    machine->source = strdup("small machine");
    machine->node_count = machine->pu_count = machine->core_count = small->nodes;
    machine->l3_count = machine->domain_count = small->nodes;
    machine->package_count = 1;
    machine->cgroup_bytes = small->cgroup;
    machine->nodes = calloc(small->nodes, sizeof *machine->nodes);
    machine->pus = calloc(small->nodes, sizeof *machine->pus);
    for (uint32_t i = 0; i < small->nodes; i++) {
        machine->nodes[i] = (struct numoe_node){.os_index = i,
                                                .allowed = true,
                                                .domain = i,
                                                .beside = NUMOE_NONE,
                                                .pu_count = 1,
                                                .core_count = 1,
                                                .capacity_bytes = small->room[i] + 1,
                                                .free_bytes = small->room[i] + 1};
        machine->pus[i] = (struct numoe_pu){.os_index = i,
                                            .allowed = true,
                                            .core = i,
                                            .node = i,
                                            .node_is_near = true,
                                            .l3 = i,
                                            .domain = i};
    }
    return machine;
}

/* Place what is left of an expert from node n on, then the experts after it. in_order: slice 0 is
 * on the first of its nodes; else on any of them. */
static bool place(const struct small *small, uint64_t *room, bool in_order, uint64_t experts,
                  uint64_t slices, uint32_t n, bool begun)
{
    const struct numoe_expert_shape *shape = &small->shape;

    if (!slices) {
        if (!begun)
            return false;
        return experts == 1 || place(small, room, in_order, experts - 1, shape->slices, 0, false);
    }
    if (n == small->nodes)
        return false;
    for (uint64_t count = 0; count <= slices; count++) {
        uint64_t bytes = count * shape->slice_bytes;

        /* with slice 0 here, and without */
        for (int first = 0; first < 2; first++) {
            uint64_t need = bytes + (first ? shape->expert_bytes : 0);
            bool fits;

            if (first ? begun || !count : in_order && !begun && count)
                continue;
            if (need > room[n])
                continue;
            room[n] -= need;
            fits = place(small, room, in_order, experts, slices - count, n + 1, begun || first);
            room[n] += need;
            if (fits)
                return true;
        }
    }
    return false;
}

static uint64_t need_of(const struct small *small)
{
    const struct numoe_expert_shape *shape = &small->shape;

    return shape->layers * shape->experts *
           (shape->slices * shape->slice_bytes + shape->expert_bytes);
}

static bool can_be_placed(const struct small *small, bool in_order)
{
    uint64_t room[MOST_SMALL];

    memcpy(room, small->room, sizeof room);
    if (need_of(small) > small->cgroup)
        return false;
    return place(small, room, in_order, small->shape.layers * small->shape.experts,
                 small->shape.slices, 0, false);
}

static struct small random_small(uint64_t *seed, bool besides)
{
    struct small small = {.nodes = 1 + random_below(seed, MOST_SMALL), .cgroup = UINT64_MAX};
    struct numoe_expert_shape *shape = &small.shape;
    uint64_t need;

    *shape = (struct numoe_expert_shape){.layers = 1 + random_below(seed, 2),
                                         .experts = 1 + random_below(seed, 2),
                                         .slices = 1 + random_below(seed, 4),
                                         .slice_bytes = 1 + random_below(seed, 12),
                                         .hidden = 32,
                                         .experts_per_token = 1};
    if (besides)
        shape->expert_bytes = 1 + random_below(seed, 6);
    need = need_of(&small);
    for (uint32_t i = 0; i < small.nodes; i++)
        small.room[i] = random_below(seed, (uint32_t)(3 * need / small.nodes + 2));
    if (random_chance(seed, 20))
        small.cgroup = random_below(seed, (uint32_t)(2 * need));
    return small;
}

/* 0, or what numoe_plan_create refused it with. */
static int plan_small(const struct small *small, enum numoe_form form)
{
    struct numoe_machine *machine = small_machine(small);
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    int rc;

    request.shape = small->shape;
    request.keep_free_bytes = 1;
    request.form = form;
    rc = numoe_plan_create(machine, &request, &plan, &error);
    if (!rc) {
        for (uint32_t n = 0; n < plan->node_count; n++)
            cr_assert_eq(plan->nodes[n].available_bytes, small->room[n]);
        check_plan(machine, plan);
        check_boundaries(plan);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    return rc;
}

static const char *words_of(const struct small *small)
{
    static char text[256];

    snprintf(text, sizeof text,
             "%u nodes with room for %lu, %lu, %lu, %lu; %lu experts of %lu slices of %lu bytes "
             "and %lu",
             small->nodes, (unsigned long)small->room[0], (unsigned long)small->room[1],
             (unsigned long)small->room[2], (unsigned long)small->room[3],
             (unsigned long)(small->shape.layers * small->shape.experts),
             (unsigned long)small->shape.slices, (unsigned long)small->shape.slice_bytes,
             (unsigned long)small->shape.expert_bytes);
    return text;
}

Test(plan_fits, exactly_when_there_is_a_way, .timeout = 120)
{
    uint64_t seed = 0x2545f4914f6cdd1du;
    uint32_t fit = 0, refused = 0;

    for (uint32_t round = 0; round < 20000; round++) {
        struct small small = random_small(&seed, false);
        bool runs = can_be_placed(&small, true);
        int rc = plan_small(&small, NUMOE_FORM_AUTO);

        cr_assert_eq(runs, can_be_placed(&small, false), "%s", words_of(&small));
        cr_assert_eq(rc, runs ? 0 : -ENOSPC, "%s", words_of(&small));
        cr_assert_eq(plan_small(&small, NUMOE_FORM_EVERY_NODE), rc, "%s", words_of(&small));
        *(rc ? &refused : &fit) += 1;
    }
    cr_expect(fit > 5000 && refused > 5000, "%u fit, %u do not", fit, refused);
}

/* Whether shares of the nodes exist that fit when slices are cut as numoe_plan_boundary cuts them:
 * of all slices before a node, as many as there are experts are slice 0 of one. */
static bool shares_exist(const struct small *small, uint64_t before, uint32_t n)
{
    const struct numoe_expert_shape *shape = &small->shape;
    uint64_t experts = shape->layers * shape->experts, all = experts * shape->slices;

    if (n == small->nodes)
        return before == all;
    for (uint64_t count = 0; before + count <= all; count++) {
        uint64_t firsts_before = before < experts ? before : experts;
        uint64_t firsts = (before + count < experts ? before + count : experts) - firsts_before;

        if (count * shape->slice_bytes + firsts * shape->expert_bytes <= small->room[n] &&
            shares_exist(small, before + count, n + 1))
            return true;
    }
    return false;
}

/*
 * Bytes besides slices go where slice 0 is. A plan finds shares whenever there are any; of forms
 * one may fit where another does not. Ways that are no plan can use ends of nodes that a plan
 * leaves: never more of each than a slice and what goes with it.
 */
Test(plan_fits, bytes_besides_slices, .timeout = 120)
{
    uint64_t seed = 0x9e3779b97f4a7c15u;
    uint32_t fit = 0, refused = 0, lost = 0, other_forms = 0;

    for (uint32_t round = 0; round < 20000; round++) {
        struct small small = random_small(&seed, true), less = small;
        bool shares = need_of(&small) <= small.cgroup && shares_exist(&small, 0, 0);
        int rc = plan_small(&small, NUMOE_FORM_AUTO);

        cr_assert_eq(plan_small(&small, NUMOE_FORM_EVERY_NODE), shares ? 0 : -ENOSPC, "%s",
                     words_of(&small));
        cr_assert(rc == 0 || (rc == -ENOSPC && !shares), "%s", words_of(&small));
        cr_assert(rc || can_be_placed(&small, true), "%s", words_of(&small));
        other_forms += !rc && !shares;
        *(rc ? &refused : &fit) += 1;
        if (!rc || !can_be_placed(&small, false))
            continue;
        lost++;
        for (uint32_t n = 0; n < small.nodes; n++) {
            uint64_t end = small.shape.slice_bytes + small.shape.expert_bytes - 1;

            less.room[n] -= less.room[n] < end ? less.room[n] : end;
        }
        cr_assert(!can_be_placed(&less, false), "%s", words_of(&small));
    }
    cr_expect(fit > 5000 && refused > 5000, "%u fit, %u do not", fit, refused);
    cr_expect(lost < refused / 10, "%u of %u", lost, refused);
    cr_expect(other_forms > 0);
}

Test(plan_fits, whole_experts, .timeout = 120)
{
    uint64_t seed = 0x2545f4914f6cdd1du;
    uint32_t fit = 0, refused = 0;

    for (uint32_t round = 0; round < 20000; round++) {
        struct small small = random_small(&seed, round % 2);
        const struct numoe_expert_shape *shape = &small.shape;
        uint64_t experts = 0;
        bool fits;
        int rc = plan_small(&small, NUMOE_FORM_EXPERTS);

        for (uint32_t n = 0; n < small.nodes; n++)
            experts += small.room[n] / (shape->slices * shape->slice_bytes + shape->expert_bytes);
        fits = need_of(&small) <= small.cgroup && experts >= shape->layers * shape->experts;
        cr_assert_eq(rc, fits ? 0 : -ENOSPC, "%s", words_of(&small));
        *(rc ? &refused : &fit) += 1;
    }
    cr_expect(fit > 3000 && refused > 3000, "%u fit, %u do not", fit, refused);
}
