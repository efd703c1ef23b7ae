/* A plan as text and as JSON. SPDX-License-Identifier: Apache-2.0 */
#include "numoe_topo.h"
#include "topo_print.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>

static uint64_t total_bytes(const struct numoe_plan *plan)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < plan->node_count; i++)
        bytes += plan->nodes[i].planned_bytes;
    return bytes;
}

static void print_node(const struct numoe_plan *plan, FILE *out, uint32_t i, uint32_t *scratch)
{
    const struct numoe_plan_node *node = &plan->nodes[i];
    char capacity[32], planned[32], left[32], cpus[160];
    uint64_t rest = node->available_bytes - node->planned_bytes;

    for (uint32_t w = 0; w < node->worker_count; w++)
        scratch[w] = plan->workers[node->first_worker + w].os_cpu;
    fprintf(out, "%6u %12s %12s %12s %7.3f%% %8u %6u  %s\n", node->os_index,
            topo_bytes(capacity, node->capacity_bytes), topo_bytes(planned, node->planned_bytes),
            topo_bytes(left, rest), node->weight * 100, node->worker_count, node->lanes,
            node->worker_count ? topo_sorted_ranges(cpus, sizeof cpus, scratch, node->worker_count)
                               : "-");
}

void numoe_plan_print(const struct numoe_plan *plan, FILE *out)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    uint32_t *scratch = calloc((size_t)plan->worker_count + 1, sizeof *scratch), lanes = 0;
    uint64_t capacity = 0, left = 0;
    char text[3][32];

    if (!scratch)
        return;
    fprintf(out, "machine: %s\n", plan->source);
    if (shape->layers)
        fprintf(out, "experts: %llu layers of %llu, each %llu slices of %llu bytes\n",
                (unsigned long long)shape->layers, (unsigned long long)shape->experts,
                (unsigned long long)shape->slices, (unsigned long long)shape->slice_bytes);
    fprintf(out, "%6s %12s %12s %12s %8s %8s %6s  %s\n", "node", "memory", "planned", "left",
            "share", "workers", "lanes", "CPUs");
    for (uint32_t i = 0; i < plan->node_count; i++) {
        print_node(plan, out, i, scratch);
        capacity += plan->nodes[i].capacity_bytes;
        left += plan->nodes[i].available_bytes - plan->nodes[i].planned_bytes;
        lanes += plan->nodes[i].lanes;
    }
    fprintf(out, "%6s %12s %12s %12s %7.3f%% %8u %6u\n", "total", topo_bytes(text[0], capacity),
            topo_bytes(text[1], total_bytes(plan)), topo_bytes(text[2], left), 100.0,
            plan->worker_count, lanes);
    for (uint32_t i = 0; i < plan->note_count; i++)
        fprintf(out, "note: %s\n", plan->notes[i]);
    free(scratch);
}

static json_t *json_node(const struct numoe_plan_node *node)
{
    json_t *object = json_object();

    topo_json_set(&object, "os_index", json_integer(node->os_index));
    topo_json_set(&object, "capacity_bytes", topo_json_number(node->capacity_bytes));
    topo_json_set(&object, "planned_bytes", topo_json_number(node->planned_bytes));
    topo_json_set(&object, "available_bytes", topo_json_number(node->available_bytes));
    topo_json_set(&object, "workers", json_integer(node->worker_count));
    topo_json_set(&object, "lanes", json_integer(node->lanes));
    topo_json_set(&object, "weight", json_real(node->weight));
    topo_json_set(&object, "slices", topo_json_number(node->slice_count));
    return object;
}

static json_t *json_worker(const struct numoe_plan *plan, uint32_t i)
{
    const struct numoe_plan_worker *worker = &plan->workers[i];
    json_t *object = json_object();

    topo_json_set(&object, "worker", json_integer(i));
    topo_json_set(&object, "os_cpu", json_integer(worker->os_cpu));
    topo_json_set(&object, "node", json_integer(plan->nodes[worker->plan_node].os_index));
    return object;
}

json_t *plan_json(const struct numoe_plan *plan)
{
    json_t *root = json_object(), *nodes = json_array(), *workers = json_array();

    for (uint32_t i = 0; i < plan->node_count; i++)
        topo_json_append(&nodes, json_node(&plan->nodes[i]));
    for (uint32_t i = 0; i < plan->worker_count; i++)
        topo_json_append(&workers, json_worker(plan, i));
    topo_json_set(&root, "source", topo_json_string(plan->source));
    topo_json_set(&root, "nodes", nodes);
    topo_json_set(&root, "workers", workers);
    topo_json_set(&root, "total_bytes", topo_json_number(total_bytes(plan)));
    topo_json_set(&root, "notes", topo_json_notes(plan->notes, plan->note_count));
    return root;
}

int numoe_plan_print_json(const struct numoe_plan *plan, FILE *out)
{
    return topo_json_write(plan_json(plan), out);
}
