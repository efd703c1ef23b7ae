/*
 * A plan as JSON; docs/plan.md has the format, and plan_load.c reads it. A field that is added here
 * is read there in the function of the same name.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "plan_form.h"
#include "topo_print.h"

static json_t *save_shape(const struct numoe_expert_shape *shape)
{
    json_t *object = json_object();

    topo_json_set(&object, "layers", topo_json_number(shape->layers));
    topo_json_set(&object, "experts", topo_json_number(shape->experts));
    topo_json_set(&object, "slices", topo_json_number(shape->slices));
    topo_json_set(&object, "slice_bytes", topo_json_number(shape->slice_bytes));
    topo_json_set(&object, "hidden", topo_json_number(shape->hidden));
    topo_json_set(&object, "experts_per_token", topo_json_number(shape->experts_per_token));
    topo_json_set(&object, "expert_bytes", topo_json_number(shape->expert_bytes));
    return object;
}

static json_t *save_range(const struct numoe_range *range)
{
    json_t *object = json_object();

    topo_json_set(&object, "first_slice", topo_json_number(range->first_slice));
    topo_json_set(&object, "end_slice", topo_json_number(range->end_slice));
    topo_json_set(&object, "first_expert", topo_json_number(range->first_expert));
    topo_json_set(&object, "end_expert", topo_json_number(range->end_expert));
    return object;
}

/* Null when nothing was named. */
static json_t *save_list(const uint32_t *list, uint32_t count)
{
    return count ? topo_json_list(list, count) : json_null();
}

static json_t *save_request(const struct numoe_plan_request *request)
{
    json_t *object = json_object();

    topo_json_set(&object, "workers", json_integer(request->workers));
    topo_json_set(&object, "nodes", save_list(request->nodes, request->node_count));
    topo_json_set(&object, "cpus", save_list(request->cpus, request->cpu_count));
    topo_json_set(&object, "smt", json_boolean(request->smt));
    topo_json_set(&object, "keep_free_bytes", topo_json_number(request->keep_free_bytes));
    topo_json_set(&object, "lanes_per_worker", json_integer(request->lanes_per_worker));
    topo_json_set(&object, "reserved_cpus",
                  save_list(request->reserved_cpus, request->reserved_count));
    topo_json_set(&object, "form", json_string(plan_form_word(request->form)));
    topo_json_set(&object, "groups", json_integer(request->groups));
    topo_json_set(&object, "optimize", json_string(plan_objective_word(request->objective)));
    topo_json_set(&object, "range", save_range(&request->range));
    return object;
}

static json_t *save_machine_nodes(const struct numoe_plan_machine *machine)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_plan_machine_node *node = &machine->nodes[i];
        json_t *object = json_object();

        topo_json_set(&object, "os_index", json_integer(node->os_index));
        topo_json_set(&object, "kind", json_string(topo_kind_name(node->kind)));
        topo_json_set(&object, "allowed", json_boolean(node->allowed));
        topo_json_set(&object, "domain", json_integer(node->domain));
        topo_json_set(&object, "package", topo_json_index(node->package));
        topo_json_set(&object, "capacity_bytes", topo_json_number(node->capacity_bytes));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_cpus(const struct numoe_plan_machine *machine)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < machine->cpu_count; i++) {
        const struct numoe_plan_cpu *cpu = &machine->cpus[i];
        json_t *object = json_object();

        topo_json_set(&object, "index", json_integer(cpu->index));
        topo_json_set(&object, "os_index", json_integer(cpu->os_index));
        topo_json_set(&object, "core", json_integer(cpu->core));
        topo_json_set(&object, "l3", topo_json_index(cpu->l3));
        topo_json_set(&object, "package", topo_json_index(cpu->package));
        topo_json_set(&object, "node", topo_json_index(cpu->node));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_machine(const struct numoe_plan_machine *machine)
{
    json_t *object = json_object();

    topo_json_set(&object, "live", json_boolean(machine->live));
    topo_json_set(&object, "cpu_model", topo_json_string(machine->cpu_model));
    topo_json_set(&object, "allowed_cpus",
                  topo_json_string(machine->allowed_cpus ? machine->allowed_cpus : ""));
    topo_json_set(&object, "cgroup_bytes", topo_json_number(machine->cgroup_bytes));
    topo_json_set(&object, "cpu_quota",
                  machine->cpu_quota > 0 ? json_real(machine->cpu_quota) : json_null());
    topo_json_set(&object, "distances_known", json_boolean(machine->distances_known));
    topo_json_set(&object, "nodes", save_machine_nodes(machine));
    topo_json_set(&object, "cpus", save_cpus(machine));
    return object;
}

static json_t *save_nodes(const struct numoe_plan *plan)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < plan->node_count; i++) {
        const struct numoe_plan_node *node = &plan->nodes[i];
        json_t *object = json_object();

        topo_json_set(&object, "os_index", json_integer(node->os_index));
        topo_json_set(&object, "capacity_bytes", topo_json_number(node->capacity_bytes));
        topo_json_set(&object, "planned_bytes", topo_json_number(node->planned_bytes));
        topo_json_set(&object, "available_bytes", topo_json_number(node->available_bytes));
        topo_json_set(&object, "workers", json_integer(node->worker_count));
        topo_json_set(&object, "lanes", json_integer(node->lanes));
        topo_json_set(&object, "weight", json_real(node->weight));
        topo_json_set(&object, "slices", topo_json_number(node->slice_count));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_shards(const struct numoe_plan *plan)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < plan->shard_count; i++) {
        json_t *object = json_object(), *nodes = json_array();

        for (uint32_t n = 0; n < plan->node_count; n++)
            if (plan->nodes[n].shard == i)
                topo_json_append(&nodes, json_integer(plan->nodes[n].os_index));
        topo_json_set(&object, "nodes", nodes);
        topo_json_set(&object, "experts", topo_json_number(plan->shards[i].places));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_forms(const struct numoe_plan *plan)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < plan->form_count; i++) {
        const struct numoe_plan_form *form = &plan->forms[i];
        json_t *object = json_object();

        topo_json_set(&object, "form", json_string(plan_form_word(form->form)));
        topo_json_set(&object, "groups", json_integer(form->groups));
        topo_json_set(&object, "name", topo_json_string(form->name));
        topo_json_set(&object, "chosen", json_boolean(form->chosen));
        topo_json_set(&object, "fits", json_boolean(form->fits));
        topo_json_set(&object, "executable", json_boolean(form->executable));
        topo_json_set(&object, "decode_ms", json_real(form->decode_ms));
        topo_json_set(&object, "prefill_ms", json_real(form->prefill_ms));
        topo_json_set(&object, "decode_reduction_bytes", topo_json_number(form->decode_bytes));
        topo_json_set(&object, "prefill_reduction_bytes", topo_json_number(form->prefill_bytes));
        topo_json_set(&object, "cost", json_real(form->cost));
        topo_json_set(&object, "reason", topo_json_string(form->reason));
        topo_json_append(&array, object);
    }
    return array;
}

static json_t *save_workers(const struct numoe_plan *plan)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < plan->worker_count; i++) {
        const struct numoe_plan_worker *worker = &plan->workers[i];
        json_t *object = json_object();

        topo_json_set(&object, "worker", json_integer(i));
        topo_json_set(&object, "os_cpu", json_integer(worker->os_cpu));
        topo_json_set(&object, "node", json_integer(plan->nodes[worker->plan_node].os_index));
        topo_json_append(&array, object);
    }
    return array;
}

json_t *plan_json(const struct numoe_plan *plan)
{
    json_t *root = json_object();

    topo_json_set(&root, PLAN_FORM_KEY, json_integer(PLAN_FORM_VERSION));
    topo_json_set(&root, "source", topo_json_string(plan->source));
    topo_json_set(&root, "shape", save_shape(&plan->shape));
    topo_json_set(&root, "range", save_range(&plan->range));
    topo_json_set(&root, "form", json_string(plan_form_word(plan->form)));
    topo_json_set(&root, "nodes", save_nodes(plan));
    topo_json_set(&root, "shards", save_shards(plan));
    topo_json_set(&root, "workers", save_workers(plan));
    topo_json_set(&root, "total_bytes", topo_json_number(plan_total_bytes(plan)));
    topo_json_set(&root, "cumulative",
                  topo_json_numbers(plan->cumulative, (size_t)plan->node_count + 1));
    topo_json_set(&root, "expert_step", topo_json_number(plan->expert_step));
    topo_json_set(&root, "distances",
                  topo_json_list(plan->distances, (size_t)plan->node_count * plan->node_count));
    topo_json_set(&root, "forms", save_forms(plan));
    topo_json_set(&root, "request", save_request(&plan->request));
    topo_json_set(&root, "machine", save_machine(&plan->machine));
    topo_json_set(&root, "notes", topo_json_notes(plan->notes, plan->note_count));
    return root;
}

int numoe_plan_print_json(const struct numoe_plan *plan, FILE *out)
{
    return topo_json_write(plan_json(plan), out);
}
