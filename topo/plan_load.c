/*
 * Read a plan that plan_save.c wrote. The file may come from anyone: every number has its range,
 * every index its array, and what follows from other fields is compared with them, so that whoever
 * uses the plan may rely on the same things as with one that was just made.
 *
 * Keys that are not known are passed over: a later version may add some without a new number.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_load.h"
#include "plan_build.h"
#include "plan_form.h"
#include "plan_shares.h"
#include "topo_build.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void read_range(struct topo_reader *in, const json_t *root, struct numoe_range *range)
{
    const json_t *object = topo_read_object(in, root, "range");

    range->first_slice = topo_read_number(in, object, "first_slice", INT64_MAX);
    range->end_slice = topo_read_number(in, object, "end_slice", INT64_MAX);
    range->first_expert = topo_read_number(in, object, "first_expert", INT64_MAX);
    range->end_expert = topo_read_number(in, object, "end_expert", INT64_MAX);
    topo_read_outside(in);
}

static void read_shape(struct topo_reader *in, const json_t *root, struct numoe_plan *plan,
                       struct plan_totals *totals)
{
    const json_t *object = topo_read_object(in, root, "shape");
    struct numoe_expert_shape *shape = &plan->shape, held;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_range range;

    shape->layers = topo_read_number(in, object, "layers", INT64_MAX);
    shape->experts = topo_read_number(in, object, "experts", INT64_MAX);
    shape->slices = topo_read_number(in, object, "slices", INT64_MAX);
    shape->slice_bytes = topo_read_number(in, object, "slice_bytes", INT64_MAX);
    shape->hidden = topo_read_number(in, object, "hidden", INT64_MAX);
    shape->experts_per_token = topo_read_number(in, object, "experts_per_token", INT64_MAX);
    shape->expert_bytes = topo_read_number(in, object, "expert_bytes", INT64_MAX);
    topo_read_outside(in);
    read_range(in, root, &plan->range);
    if (!in->rc && plan_count_totals(shape, totals, &error))
        topo_read_wrong(in, "shape", "cannot be: %s", error.message);
    if (in->rc)
        return;
    if (plan_resolve_range(shape, &plan->range, &range, &error)) {
        topo_read_wrong(in, "range", "cannot be: %s", error.message);
        return;
    }
    if (memcmp(&range, &plan->range, sizeof range)) {
        topo_read_wrong(in, "range", "ends with slice %" PRIu64 " and expert %" PRIu64,
                        plan->range.end_slice, plan->range.end_expert);
        return;
    }
    held = numoe_plan_held(plan);
    if (plan_count_totals(&held, totals, &error)) /* of less than was counted above */
        topo_read_wrong(in, "range", "cannot be: %s", error.message);
}

/* ---- the request ---- */

/* Numbers up to most, or null. */
static uint32_t *read_list(struct topo_reader *in, const json_t *object, const char *key,
                           uint32_t most, uint32_t *count)
{
    const json_t *items;
    uint32_t *list;

    if (json_is_null(json_object_get(object, key)))
        return NULL;
    items = topo_read_array(in, object, key, 1, PLAN_FORM_LIST);
    list = topo_read_room(in, json_array_size(items), sizeof *list);
    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++)
        list[(*count)++] = (uint32_t)topo_read_element(in, items, key, i, most);
    return list;
}

static void read_request(struct topo_reader *in, const json_t *root,
                         struct numoe_plan_request *request)
{
    const json_t *object = topo_read_object(in, root, "request");

    request->workers = topo_read_u32(in, object, "workers", PLAN_MAX_WORKERS);
    request->nodes = read_list(in, object, "nodes", TOPO_MAX_NODES - 1, &request->node_count);
    request->cpus = read_list(in, object, "cpus", TOPO_MAX_CPU_INDEX, &request->cpu_count);
    request->smt = topo_read_boolean(in, object, "smt");
    request->keep_free_bytes = topo_read_number(in, object, "keep_free_bytes", INT64_MAX);
    request->lanes_per_worker =
        topo_read_u32(in, object, "lanes_per_worker", PLAN_MAX_LANES_PER_WORKER);
    request->reserved_cpus =
        read_list(in, object, "reserved_cpus", TOPO_MAX_CPU_INDEX, &request->reserved_count);
    request->form = plan_read_form(in, object, "form");
    request->groups = topo_read_u32(in, object, "groups", TOPO_MAX_NODES);
    request->objective = plan_read_objective(in, object, "optimize");
    read_range(in, object, &request->range);
    topo_read_outside(in);
}

/* ---- the machine ---- */

static uint32_t find_node(const struct numoe_plan_machine *machine, uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].os_index == os_index)
            return i;
    return NUMOE_NONE;
}

static const struct numoe_plan_cpu *find_cpu(const struct numoe_plan_machine *machine,
                                             uint32_t os_index)
{
    for (uint32_t i = 0; i < machine->cpu_count; i++)
        if (machine->cpus[i].os_index == os_index)
            return &machine->cpus[i];
    return NULL;
}

static void read_machine_nodes(struct topo_reader *in, const json_t *object,
                               struct numoe_plan_machine *machine)
{
    const json_t *items = topo_read_array(in, object, "nodes", 1, TOPO_MAX_NODES);

    machine->nodes = topo_read_room(in, json_array_size(items), sizeof *machine->nodes);
    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        const json_t *item = topo_read_item(in, items, "machine.nodes", i);
        struct numoe_plan_machine_node *node = &machine->nodes[i];

        node->os_index = topo_read_u32(in, item, "os_index", TOPO_MAX_NODES - 1);
        node->kind = topo_read_kind(in, item, "kind");
        node->allowed = topo_read_boolean(in, item, "allowed");
        node->domain = topo_read_u32(in, item, "domain", TOPO_MAX_NODES - 1);
        node->package = topo_read_index(in, item, "package", TOPO_MAX_PUS);
        node->capacity_bytes = topo_read_number(in, item, "capacity_bytes", PLAN_SHARE_ONE);
        if (find_node(machine, node->os_index) != NUMOE_NONE)
            topo_read_wrong(in, "os_index", "is %u, which appears twice", node->os_index);
        machine->node_count++;
    }
}

static void read_cpus(struct topo_reader *in, const json_t *object,
                      struct numoe_plan_machine *machine)
{
    const json_t *items = topo_read_array(in, object, "cpus", 1, PLAN_MAX_WORKERS);

    machine->cpus = topo_read_room(in, json_array_size(items), sizeof *machine->cpus);
    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        const json_t *item = topo_read_item(in, items, "machine.cpus", i);
        struct numoe_plan_cpu *cpu = &machine->cpus[i];

        cpu->index = topo_read_u32(in, item, "index", TOPO_MAX_PUS - 1);
        cpu->os_index = topo_read_u32(in, item, "os_index", TOPO_MAX_CPU_INDEX);
        cpu->core = topo_read_u32(in, item, "core", TOPO_MAX_PUS - 1);
        cpu->l3 = topo_read_index(in, item, "l3", TOPO_MAX_PUS);
        cpu->package = topo_read_index(in, item, "package", TOPO_MAX_PUS);
        cpu->node = topo_read_index(in, item, "node", TOPO_MAX_NODES);
        if (i && cpu->index <= cpu[-1].index)
            topo_read_wrong(in, "index", "is %u, out of order", cpu->index);
        if (find_cpu(machine, cpu->os_index))
            topo_read_wrong(in, "os_index", "is %u, which appears twice", cpu->os_index);
        if (cpu->node != NUMOE_NONE && find_node(machine, cpu->node) == NUMOE_NONE)
            topo_read_wrong(in, "node", "is %u, which is no node of that machine", cpu->node);
        machine->cpu_count++;
    }
}

static void read_machine(struct topo_reader *in, const json_t *root,
                         struct numoe_plan_machine *machine)
{
    const json_t *object = topo_read_object(in, root, "machine");

    machine->live = topo_read_boolean(in, object, "live");
    topo_copy_printable(machine->cpu_model, sizeof machine->cpu_model,
                        topo_read_string(in, json_object_get(object, "cpu_model"), "cpu_model",
                                         sizeof machine->cpu_model));
    machine->allowed_cpus =
        topo_read_copy(in, json_object_get(object, "allowed_cpus"), "allowed_cpus");
    topo_read_limits(in, object, &machine->cgroup_bytes, &machine->cpu_quota);
    machine->distances_known = topo_read_boolean(in, object, "distances_known");
    read_machine_nodes(in, object, machine);
    snprintf(in->at, sizeof in->at, "machine");
    read_cpus(in, object, machine);
    topo_read_outside(in);
}

/* ---- the plan itself ---- */

/* Which node of the machine it is; the plan's are in the same order. */
static void place_node(struct topo_reader *in, const struct numoe_plan *plan,
                       struct numoe_plan_node *node)
{
    const struct numoe_plan_machine_node *at;

    node->node = find_node(&plan->machine, node->os_index);
    if (node->node == NUMOE_NONE) {
        topo_read_wrong(in, "os_index", "is %u, which is no node of that machine", node->os_index);
        return;
    }
    at = &plan->machine.nodes[node->node];
    node->domain = at->domain;
    node->package = at->package;
    if (node > plan->nodes && node->node <= node[-1].node)
        topo_read_wrong(in, "os_index", "is %u, out of order or there twice", node->os_index);
    if (!at->allowed || at->kind == NUMOE_NODE_GPU)
        topo_read_wrong(in, "os_index", "is %u, a node that may not be used", node->os_index);
    if (node->capacity_bytes != at->capacity_bytes)
        topo_read_wrong(in, "capacity_bytes", "is %" PRIu64 ", and %" PRIu64 " in machine.nodes",
                        node->capacity_bytes, at->capacity_bytes);
}

static void read_nodes(struct topo_reader *in, const json_t *root, struct numoe_plan *plan)
{
    const json_t *items = topo_read_array(in, root, "nodes", 1, TOPO_MAX_NODES);

    plan->nodes = topo_read_room(in, json_array_size(items), sizeof *plan->nodes);
    for (size_t i = 0; i < json_array_size(items) && !in->rc; i++) {
        const json_t *item = topo_read_item(in, items, "nodes", i);
        struct numoe_plan_node *node = &plan->nodes[i];
        uint32_t lanes;

        node->os_index = topo_read_u32(in, item, "os_index", TOPO_MAX_NODES - 1);
        node->capacity_bytes = topo_read_number(in, item, "capacity_bytes", PLAN_SHARE_ONE);
        node->available_bytes = topo_read_number(in, item, "available_bytes", node->capacity_bytes);
        node->planned_bytes = topo_read_number(in, item, "planned_bytes", node->available_bytes);
        node->slice_count = topo_read_number(in, item, "slices", INT64_MAX);
        node->weight = topo_read_real(in, item, "weight", 1);
        node->first_worker = plan->worker_count;
        node->worker_count =
            topo_read_u32(in, item, "workers", PLAN_MAX_WORKERS - plan->worker_count);
        lanes = node->worker_count ? node->worker_count : 1;
        node->lanes = (uint32_t)topo_read_between(in, item, "lanes", 1,
                                                  (uint64_t)lanes * PLAN_MAX_LANES_PER_WORKER);
        if (!in->rc)
            place_node(in, plan, node);
        plan->worker_count += node->worker_count;
        plan->node_count++;
    }
    topo_read_outside(in);
}

static void read_worker(struct topo_reader *in, const json_t *item, const struct numoe_plan *plan,
                        struct numoe_plan_worker *worker)
{
    const struct numoe_plan_node *node = &plan->nodes[worker->plan_node];
    const struct numoe_plan_cpu *cpu;
    uint32_t place = (uint32_t)(worker - plan->workers), number, os_node;

    number = topo_read_u32(in, item, "worker", PLAN_MAX_WORKERS);
    worker->os_cpu = topo_read_u32(in, item, "os_cpu", TOPO_MAX_CPU_INDEX);
    os_node = topo_read_u32(in, item, "node", TOPO_MAX_NODES - 1);
    if (in->rc)
        return;
    cpu = find_cpu(&plan->machine, worker->os_cpu);
    if (number != place)
        topo_read_wrong(in, "worker", "is %u, not its place", number);
    else if (os_node != node->os_index)
        topo_read_wrong(in, "node", "is %u: by nodes[].workers this one is at node %u", os_node,
                        node->os_index);
    if (!cpu)
        topo_read_wrong(in, "os_cpu", "is %u, which is not among machine.cpus", worker->os_cpu);
    if (in->rc || !cpu)
        return;
    worker->pu = cpu->index;
    worker->l3 = cpu->l3;
    worker->package = cpu->package;
    worker->domain = plan->machine.nodes[node->node].domain;
}

static void read_workers(struct topo_reader *in, const json_t *root, struct numoe_plan *plan)
{
    const json_t *items =
        topo_read_array(in, root, "workers", plan->worker_count, plan->worker_count);
    uint32_t place = 0;

    if (!plan->worker_count)
        topo_read_wrong(in, "workers", "is empty");
    plan->workers = topo_read_room(in, plan->worker_count, sizeof *plan->workers);
    for (uint32_t i = 0; i < plan->worker_count && !in->rc; i++) {
        while (i == plan->nodes[place].first_worker + plan->nodes[place].worker_count)
            place++;
        plan->workers[i].plan_node = place;
        read_worker(in, topo_read_item(in, items, "workers", i), plan, &plan->workers[i]);
    }
    topo_read_outside(in);
}

static void check_cpus_used(struct topo_reader *in, const struct numoe_plan *plan)
{
    bool *used = topo_read_room(in, TOPO_MAX_PUS, sizeof *used);

    for (uint32_t i = 0; i < plan->worker_count && !in->rc; i++)
        used[plan->workers[i].pu] = true;
    for (uint32_t i = 0; i < plan->machine.cpu_count && !in->rc; i++)
        if (!used[plan->machine.cpus[i].index])
            topo_read_wrong(in, "machine.cpus", "lists CPU %u, which has no worker",
                            plan->machine.cpus[i].os_index);
    free(used);
}

static void compare(struct topo_reader *in, const char *key, uint64_t have, uint64_t follows)
{
    if (have != follows)
        topo_read_wrong(in, key, "is %" PRIu64 ", and %" PRIu64 " by the shares and the shape",
                        have, follows);
}

/* What nodes hold must be what follows from the shares: memory is reserved by it. */
static void check_nodes(struct topo_reader *in, const json_t *root, struct numoe_plan *plan,
                        const struct plan_totals *totals)
{
    for (uint32_t i = 0; i < plan->node_count && !in->rc; i++) {
        struct numoe_plan_node *node = &plan->nodes[i];
        struct numoe_plan_node said = *node;

        plan_count_node(plan, totals, i);
        snprintf(in->at, sizeof in->at, "nodes[%u]", i);
        compare(in, "slices", said.slice_count, node->slice_count);
        compare(in, "planned_bytes", said.planned_bytes, node->planned_bytes);
        if (fabs(said.weight - node->weight) > 1e-9)
            topo_read_wrong(in, "weight", "is %g, and %g by the shares", said.weight, node->weight);
    }
    topo_read_outside(in);
    compare(in, "total_bytes", topo_read_number(in, root, "total_bytes", INT64_MAX),
            plan_total_bytes(plan));
}

static void read_plan(struct topo_reader *in, const json_t *root, struct numoe_plan *plan)
{
    struct plan_totals totals = {0};

    plan->source = topo_read_copy(in, json_object_get(root, "source"), "source");
    read_shape(in, root, plan, &totals);
    plan->request.size = sizeof plan->request;
    plan->request.shape = plan->shape;
    read_request(in, root, &plan->request);
    read_machine(in, root, &plan->machine);
    read_nodes(in, root, plan);
    read_workers(in, root, plan);
    check_cpus_used(in, plan);
    plan_read_shards(in, root, plan, &totals);
    check_nodes(in, root, plan, &totals);
    plan->distances = topo_read_distances(in, root, "distances", plan->node_count);
    plan_read_forms(in, root, plan);
    topo_read_notes(in, root, &plan->notes, &plan->note_count);
}

int numoe_plan_parse(const void *text, size_t bytes, const char *name, struct numoe_plan **out,
                     struct numoe_error *error)
{
    struct topo_reader in = {
        .file = name ? name : "plan", .what = "plan", .code = -EBADMSG, .error = error};
    struct numoe_plan *plan;
    json_t *root;

    if (!text || !out)
        return numoe_error_set(error, -EINVAL, in.file, "text or place for the plan missing");
    if (bytes > TOPO_MAX_JSON_BYTES)
        return numoe_error_set(error, -E2BIG, in.file,
                               "%zu bytes are too many for a plan; %d are allowed", bytes,
                               TOPO_MAX_JSON_BYTES);
    root = topo_read_root(&in, text, bytes, PLAN_FORM_KEY, PLAN_FORM_VERSION, "not a plan");
    if (!root)
        return in.rc;
    plan = topo_read_room(&in, 1, sizeof *plan);
    if (plan)
        read_plan(&in, root, plan);
    json_decref(root);
    if (in.rc)
        numoe_plan_free(plan);
    else
        *out = plan;
    return in.rc;
}

int numoe_plan_load(const char *path, struct numoe_plan **plan, struct numoe_error *error)
{
    size_t bytes;
    char *text;
    int rc;

    if (!path || !*path || !plan)
        return numoe_error_set(error, -EINVAL, "numoe_plan_load", "path or place missing");
    rc = topo_file_read(path, TOPO_MAX_JSON_BYTES, "plan", &text, &bytes, error);
    if (rc)
        return rc;
    rc = numoe_plan_parse(text, bytes, path, plan, error);
    free(text);
    return rc;
}
