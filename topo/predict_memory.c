/*
 * What the memory of each node holds while a plan is executed.
 *
 *     before        what others use, on a machine that is read live
 *     experts       as planned
 *     activations   partial outputs and records of a pass, scratch of the workers. Nobody binds
 *                   them: they lie where the workers are that write them first
 *     pinned        a GPU's staging of inputs and outputs, on its node. The experts themselves are
 *                   pinned where they lie
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "predict_box.h"
#include "topo_print.h"
#include "topo_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Staging of a pass on a GPU: gpu/gpu_model.c halves passes until theirs is no more. */
static const uint64_t most_staging = (uint64_t)512 << 20;

static const struct numoe_prediction_cell *largest_pass(const struct numoe_prediction *prediction)
{
    const struct numoe_prediction_cell *largest = NULL;

    for (uint32_t i = 0; i < prediction->cell_count; i++)
        if (prediction->cells[i].way == NUMOE_WAY_CPU &&
            (!largest || prediction->cells[i].tokens > largest->tokens))
            largest = &prediction->cells[i];
    return largest;
}

/* Activations in and out in fp32, ids and routing weights. */
static uint64_t staging(const struct numoe_expert_shape *shape, uint64_t tokens)
{
    double token = (double)shape->hidden * 8 + (double)shape->experts_per_token * 8;

    while (tokens > 1 && token * (double)tokens > (double)most_staging)
        tokens = (tokens + 1) / 2;
    return (uint64_t)(token * (double)tokens);
}

static void fill(const struct numoe_machine *machine, const struct numoe_plan *plan, uint32_t n,
                 struct numoe_prediction_node *node)
{
    const struct numoe_plan_node *place = &plan->nodes[n];
    const uint64_t have = plan_node_memory(machine, place->node);

    *node = (struct numoe_prediction_node){
        .os_index = place->os_index,
        .capacity_bytes = place->capacity_bytes,
        .before_bytes = place->capacity_bytes > have ? place->capacity_bytes - have : 0,
        .expert_bytes = place->planned_bytes,
        .slices =
            (double)place->slice_count / ((double)plan->shape.layers * (double)plan->shape.experts),
    };
}

/* One note for all nodes on which it does not go. */
static int note_short(const struct numoe_plan *plan, struct numoe_prediction *prediction)
{
    uint32_t *numbers = calloc(plan->node_count, sizeof *numbers);
    char ranges[96], lack[32], keep[32];
    uint64_t most_short = 0, most_needed = 0;
    size_t count = 0;
    int rc = 0;

    if (!numbers)
        return -ENOMEM;
    for (uint32_t n = 0; n < prediction->node_count; n++) {
        const struct numoe_prediction_node *node = &prediction->nodes[n];
        uint64_t needed = node->activation_bytes + node->pinned_bytes;

        if (node->left_bytes >= 0)
            continue;
        numbers[count++] = node->os_index;
        most_short =
            (uint64_t)-node->left_bytes > most_short ? (uint64_t)-node->left_bytes : most_short;
        most_needed = needed > most_needed ? needed : most_needed;
    }
    if (count)
        rc = topo_note(
            &prediction->notes, &prediction->note_count,
            "node%s %s: a pass of %u tokens takes more than the experts leave, by %s at "
            "most; smaller passes, or %s kept free, would help",
            count > 1 ? "s" : "", topo_sorted_ranges(ranges, sizeof ranges, numbers, count),
            prediction->memory_tokens, topo_bytes(lack, most_short), topo_bytes(keep, most_needed));
    free(numbers);
    return rc;
}

int predict_memory(const struct numoe_machine *machine, const struct numoe_plan *plan,
                   const struct numoe_predict_options *options, struct numoe_prediction *prediction)
{
    const struct numoe_prediction_cell *cell = largest_pass(prediction);
    double rows, tokens;

    if (!cell)
        return 0;
    prediction->nodes = calloc(plan->node_count, sizeof *prediction->nodes);
    if (!prediction->nodes)
        return -ENOMEM;
    prediction->node_count = plan->node_count;
    prediction->memory_tokens = cell->tokens;
    prediction->before_known = machine->live;
    /* each partial output is written once and read once */
    rows = (double)cell->reduction_bytes / 2 / (double)cell->passes;
    tokens = (double)cell->tokens / (double)cell->passes;
    for (uint32_t n = 0; n < plan->node_count; n++) {
        struct numoe_prediction_node *node = &prediction->nodes[n];
        double workers = plan->nodes[n].worker_count;

        fill(machine, plan, n, node);
        node->activation_bytes = (uint64_t)(workers / plan->worker_count *
                                                (rows + tokens * (double)options->record_bytes) +
                                            workers * (double)options->scratch_bytes);
        for (uint32_t g = 0; g < prediction->gpu_count; g++)
            if (prediction->gpus[g].node == node->os_index)
                node->pinned_bytes += staging(&plan->shape, cell->tokens);
        node->left_bytes =
            (int64_t)node->capacity_bytes - (int64_t)(node->before_bytes + node->expert_bytes +
                                                      node->activation_bytes + node->pinned_bytes);
    }
    return note_short(plan, prediction);
}

/* ---- as text and as JSON --------------------------------------------------------------------- */

static bool alike(const struct numoe_prediction_node *a, const struct numoe_prediction_node *b)
{
    return b->os_index > a->os_index && a->capacity_bytes == b->capacity_bytes &&
           a->before_bytes == b->before_bytes && a->expert_bytes == b->expert_bytes &&
           a->activation_bytes == b->activation_bytes && a->pinned_bytes == b->pinned_bytes;
}

static void print_line(const struct numoe_prediction *prediction, const char *name,
                       const struct numoe_prediction_node *node, FILE *out)
{
    const uint64_t left = (uint64_t)(node->left_bytes < 0 ? -node->left_bytes : node->left_bytes);
    char text[6][32], sign[40];

    snprintf(sign, sizeof sign, "%s%s", node->left_bytes < 0 ? "-" : "", topo_bytes(text[5], left));
    fprintf(out, "%8s %7.4g %12s %12s %12s %12s %12s %12s\n", name, node->slices,
            topo_bytes(text[0], node->capacity_bytes),
            prediction->before_known ? topo_bytes(text[1], node->before_bytes) : "not known",
            topo_bytes(text[2], node->expert_bytes), topo_bytes(text[3], node->activation_bytes),
            topo_bytes(text[4], node->pinned_bytes), sign);
}

void predict_memory_print(const struct numoe_prediction *prediction, FILE *out)
{
    struct numoe_prediction_node total = {0};

    if (!prediction->node_count)
        return;
    fprintf(out, "\nmemory of nodes, with passes of up to %u tokens:\n", prediction->memory_tokens);
    fprintf(out, "%8s %7s %12s %12s %12s %12s %12s %12s\n", "nodes", "slices", "memory", "before",
            "experts", "activations", "pinned", "left");
    for (uint32_t n = 0; n < prediction->node_count; n++) {
        const struct numoe_prediction_node *first = &prediction->nodes[n], *node = first;
        char name[32];

        for (;; n++) {
            node = &prediction->nodes[n];
            total.slices += node->slices;
            total.capacity_bytes += node->capacity_bytes;
            total.before_bytes += node->before_bytes;
            total.expert_bytes += node->expert_bytes;
            total.activation_bytes += node->activation_bytes;
            total.pinned_bytes += node->pinned_bytes;
            total.left_bytes += node->left_bytes;
            if (n + 1 == prediction->node_count || node[1].os_index != node->os_index + 1 ||
                !alike(first, &node[1]))
                break;
        }
        if (node == first)
            snprintf(name, sizeof name, "%u", first->os_index);
        else
            snprintf(name, sizeof name, "%u-%u", first->os_index, node->os_index);
        print_line(prediction, name, first, out);
    }
    print_line(prediction, "total", &total, out);
}

json_t *predict_memory_json(const struct numoe_prediction *prediction)
{
    json_t *array = json_array();

    for (uint32_t n = 0; n < prediction->node_count; n++) {
        const struct numoe_prediction_node *node = &prediction->nodes[n];
        json_t *object = json_object();

        topo_json_set(&object, "os_index", json_integer(node->os_index));
        topo_json_set(&object, "slices", json_real(node->slices));
        topo_json_set(&object, "capacity_bytes", topo_json_number(node->capacity_bytes));
        topo_json_set(&object, "before_bytes",
                      prediction->before_known ? topo_json_number(node->before_bytes)
                                               : json_null());
        topo_json_set(&object, "expert_bytes", topo_json_number(node->expert_bytes));
        topo_json_set(&object, "activation_bytes", topo_json_number(node->activation_bytes));
        topo_json_set(&object, "pinned_bytes", topo_json_number(node->pinned_bytes));
        topo_json_set(&object, "left_bytes", json_integer(node->left_bytes));
        topo_json_append(&array, object);
    }
    return array;
}
