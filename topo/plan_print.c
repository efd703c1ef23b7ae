/* A plan as text. SPDX-License-Identifier: Apache-2.0 */
#include "plan_build.h"
#include "topo_print.h"

#include <stdlib.h>

uint64_t plan_total_bytes(const struct numoe_plan *plan)
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

/* What is planned, when it is not all. */
static void print_range(const struct numoe_plan *plan, FILE *out)
{
    const struct numoe_range *range = &plan->range;

    if (range->end_slice - range->first_slice != plan->shape.slices ||
        range->end_expert - range->first_expert != plan->shape.experts)
        fprintf(out, "of which: slices %llu-%llu of experts %llu-%llu\n",
                (unsigned long long)range->first_slice, (unsigned long long)range->end_slice - 1,
                (unsigned long long)range->first_expert, (unsigned long long)range->end_expert - 1);
}

static void print_forms(const struct numoe_plan *plan, FILE *out)
{
    char text[2][32];

    if (plan->form_count < 2)
        return;
    fprintf(out,
            "forms, predicted a layer: a token (decode) and 4096 (prefill), with their partial "
            "outputs\n%-36s %10s %10s %12s %12s  %s\n",
            "", "decode ms", "prefill ms", "decode", "prefill", "why");
    for (uint32_t i = 0; i < plan->form_count; i++) {
        const struct numoe_plan_form *f = &plan->forms[i];

        if (f->decode_ms > 0)
            fprintf(out, "%s%-35s %10.3f %10.2f %12s %12s  %s\n", f->chosen ? "*" : " ", f->name,
                    f->decode_ms, f->prefill_ms, topo_bytes(text[0], f->decode_bytes),
                    topo_bytes(text[1], f->prefill_bytes), f->reason);
        else
            fprintf(out, "%s%-35s %10s %10s %12s %12s  %s\n", f->chosen ? "*" : " ", f->name, "-",
                    "-", "-", "-", f->reason);
    }
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
    print_range(plan, out);
    fprintf(out, "%6s %12s %12s %12s %8s %8s %6s  %s\n", "node", "memory", "planned", "room left",
            "share", "workers", "lanes", "CPUs");
    for (uint32_t i = 0; i < plan->node_count; i++) {
        print_node(plan, out, i, scratch);
        capacity += plan->nodes[i].capacity_bytes;
        left += plan->nodes[i].available_bytes - plan->nodes[i].planned_bytes;
        lanes += plan->nodes[i].lanes;
    }
    fprintf(out, "%6s %12s %12s %12s %7.3f%% %8u %6u\n", "total", topo_bytes(text[0], capacity),
            topo_bytes(text[1], plan_total_bytes(plan)), topo_bytes(text[2], left), 100.0,
            plan->worker_count, lanes);
    print_forms(plan, out);
    for (uint32_t i = 0; i < plan->note_count; i++)
        fprintf(out, "note: %s\n", plan->notes[i]);
    free(scratch);
}
