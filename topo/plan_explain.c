/* Why something is where it is, from the plan's own data. SPDX-License-Identifier: Apache-2.0 */
#include "predict.h"
#include "topo_print.h"
#include "topo_text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct subject {
    const struct numoe_machine *machine;
    const struct numoe_plan *plan;
    FILE *out;
    uint32_t *scratch; /* for as many numbers as there are nodes, PUs or workers */
};

static uint32_t sharing_nodes(const struct subject *s, uint32_t domain, char text[160])
{
    size_t count = 0;

    for (uint32_t i = 0; i < s->plan->node_count; i++)
        if (s->machine->nodes[s->plan->nodes[i].node].domain == domain)
            s->scratch[count++] = s->plan->nodes[i].os_index;
    topo_sorted_ranges(text, 160, s->scratch, count);
    return (uint32_t)count;
}

static void print_notes_of(const struct subject *s, const char *words)
{
    for (uint32_t i = 0; i < s->plan->note_count; i++)
        if (strstr(s->plan->notes[i], words))
            fprintf(s->out, "  note: %s\n", s->plan->notes[i]);
}

static void explain_unused(const struct subject *s, const struct numoe_node *node)
{
    fprintf(s->out, "node %u holds nothing: ", node->os_index);
    if (!node->allowed)
        fputs("this process is not allowed to allocate there", s->out);
    else if (node->kind == NUMOE_NODE_GPU)
        fputs("it is the memory of a GPU, which is never used for experts", s->out);
    else if (!node->capacity_bytes)
        fputs("it has no memory", s->out);
    else if (node->kind != NUMOE_NODE_DRAM && node->beside != NUMOE_NONE)
        fprintf(s->out, "it is %s beside node %u, used only when named", topo_kind_name(node->kind),
                s->machine->nodes[node->beside].os_index);
    else if (!node->pu_count)
        fputs("it serves no allowed CPU; such nodes are used only when named", s->out);
    else
        fputs("the nodes or CPUs that were named or reserved leave it out", s->out);
    fputs(".\n", s->out);
}

/* Slices of an expert of its shard that a node has, on average. */
static double slices_of(const struct numoe_plan *plan, const struct numoe_plan_node *node)
{
    uint64_t places = plan->shards[node->shard].places;

    return places ? (double)node->slice_count / (double)places : 0;
}

static const char *rounding(double slices)
{
    return slices != (double)(uint64_t)slices ? ", rounded up or down by expert and layer in turn"
                                              : "";
}

static void explain_node(const struct subject *s, uint32_t machine_node)
{
    const struct numoe_node *node = &s->machine->nodes[machine_node];
    const struct numoe_expert_shape held = numoe_plan_held(s->plan), *shape = &held;
    const struct numoe_plan_node *place = NULL;
    char bytes[4][32], text[160];
    uint32_t at, sharing;
    double exact;

    for (at = 0; at < s->plan->node_count && !place; at++)
        if (s->plan->nodes[at].node == machine_node)
            place = &s->plan->nodes[at];
    if (!place) {
        explain_unused(s, node);
        return;
    }
    exact = slices_of(s->plan, place);
    if (s->plan->shard_count == 1)
        fprintf(s->out,
                "node %u holds %.3f %% of every expert: %.2f of its %" PRIu64 " slices%s.\n",
                node->os_index, place->weight * 100, exact, shape->slices, rounding(exact));
    else
        fprintf(s->out,
                "node %u holds %.3f %% of the weights: in each layer, of %.2f of %" PRIu64
                " experts, %.2f of their %" PRIu64 " slices%s.\n",
                node->os_index, place->weight * 100,
                (double)s->plan->shards[place->shard].places / (double)shape->layers,
                shape->experts, exact, shape->slices, rounding(exact));
    fprintf(
        s->out, "  over all layers %" PRIu64 " slices, %s, of %s that may be used (%s in all)\n",
        place->slice_count, topo_bytes(bytes[0], place->planned_bytes),
        topo_bytes(bytes[1], place->available_bytes), topo_bytes(bytes[2], place->capacity_bytes));
    sharing = sharing_nodes(s, node->domain, text);
    if (sharing > 1)
        fprintf(s->out,
                "  why this part: nodes %s share the channels of one memory domain, which "
                "counts once\n",
                text);
    else
        fputs("  why this part: its memory channels are its own\n", s->out);
    print_notes_of(s, "shares follow");
    print_notes_of(s, "form: ");
    print_notes_of(s, "full: the others");
    if (place->worker_count) {
        for (uint32_t w = 0; w < place->worker_count; w++)
            s->scratch[w] = s->plan->workers[place->first_worker + w].os_cpu;
        fprintf(s->out, "  worked on first by %u worker%s, on CPU%s %s, in %u lanes\n",
                place->worker_count, place->worker_count > 1 ? "s" : "",
                place->worker_count > 1 ? "s" : "",
                topo_sorted_ranges(text, sizeof text, s->scratch, place->worker_count),
                place->lanes);
    } else {
        fputs("  no worker is at this node: workers of the nearest node read it\n", s->out);
    }
    print_notes_of(s, "reserved");
}

static void explain_worker(const struct subject *s, uint32_t w)
{
    const struct numoe_plan_worker *worker = &s->plan->workers[w];
    const struct numoe_plan_node *place = &s->plan->nodes[worker->plan_node];
    const struct numoe_pu *pu = &s->machine->pus[worker->pu];
    uint32_t sharing = 0;

    fprintf(s->out, "worker %u runs on CPU %u (core %u", w, worker->os_cpu, pu->core);
    if (pu->package != NUMOE_NONE)
        fprintf(s->out, ", package %u", pu->package);
    if (pu->l3 != NUMOE_NONE)
        fprintf(s->out, ", L3 cache %u", pu->l3);
    fprintf(s->out, ") and works on node %u first.\n", place->os_index);
    if (pu->node == place->node && pu->node_is_near)
        fprintf(s->out, "  why this node: it is that CPU's own memory\n");
    else if (pu->node != NUMOE_NONE && !pu->node_is_near)
        fprintf(s->out, "  why this node: the CPU's own node has no memory that may be used; "
                        "this is the nearest with some\n");
    else
        fprintf(s->out, "  why this node: of the nodes in use it is the nearest to the CPU\n");
    for (uint32_t i = 0; i < s->plan->worker_count; i++)
        if (s->machine->pus[s->plan->workers[i].pu].core == pu->core)
            sharing++;
    fprintf(s->out, "  why this CPU: %s of its core%s\n",
            pu->smt ? "a further thread" : "the first allowed thread",
            sharing > 1 ? ", which has other workers too" : ", which has no other worker");
    fprintf(s->out,
            "  it is %u of %u workers of node %u; when done it helps others, nearest first\n",
            w - place->first_worker + 1, place->worker_count, place->os_index);
    print_notes_of(s, "workers");
    print_notes_of(s, "worker:");
    print_notes_of(s, "reserved");
}

static uint32_t shard_holding(const struct numoe_plan *plan, uint64_t layer, uint64_t expert)
{
    uint32_t n = 0;

    while (n + 1 < plan->node_count &&
           numoe_plan_boundary(plan, layer, expert, n + 1) == plan->range.first_slice)
        n++;
    return plan->nodes[n].shard;
}

static void explain_expert(const struct subject *s, uint64_t layer, uint64_t expert)
{
    const struct numoe_plan *plan = s->plan;
    uint64_t slices = numoe_plan_held(plan).slices, from = plan->range.first_slice;
    bool rounded = false;
    uint32_t holders = 0, members = 0, shard = shard_holding(plan, layer, expert);
    char text[160];

    fprintf(s->out,
            "expert %" PRIu64 " of layer %" PRIu64 ": %" PRIu64 " slices of %" PRIu64 " bytes:\n",
            expert, layer, slices, plan->shape.slice_bytes);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        uint64_t to = numoe_plan_boundary(plan, layer, expert, n + 1), count = to - from;
        double share = slices_of(plan, &plan->nodes[n]);

        if (count) {
            holders++;
            fprintf(s->out, "  node %u: slice%s %" PRIu64, plan->nodes[n].os_index,
                    count > 1 ? "s" : "", from);
            if (count > 1)
                fprintf(s->out, "-%" PRIu64, to - 1);
            fprintf(s->out, " (%" PRIu64 "; its share is %.2f)%s\n", count, share,
                    from == 0 && plan->shape.expert_bytes ? ", and the down bias" : "");
        }
        rounded |= plan->nodes[n].shard == shard && (double)count != share;
        from = to;
    }
    for (uint32_t n = 0; n < plan->node_count; n++)
        if (plan->nodes[n].shard == shard)
            s->scratch[members++] = plan->nodes[n].os_index;
    if (plan->shard_count == 1)
        fprintf(
            s->out,
            "  why: every node has a part of every expert, so that whichever is hit, all memory "
            "is read at once\n");
    else
        fprintf(s->out,
                "  why: experts go whole to %u groups of nodes, in turn by expert and layer and by "
                "the groups' shares; this one to node%s %s\n",
                plan->shard_count, members > 1 ? "s" : "",
                topo_sorted_ranges(text, sizeof text, s->scratch, members));
    if (rounded)
        fprintf(s->out, "  shares are not whole: who gets the odd slice rotates by expert and "
                        "layer, so that totals stay within one slice\n");
    if (holders < members)
        fprintf(s->out,
                "  %u of %u nodes hold some of this one; the others' turn comes with other "
                "experts\n",
                holders, members);
}

static void explain_any_expert(const struct subject *s, uint64_t layer, uint64_t expert)
{
    const struct numoe_range *range = &s->plan->range;

    if (expert >= range->first_expert && expert < range->end_expert)
        explain_expert(s, layer, expert);
    else
        fprintf(s->out,
                "expert %" PRIu64 " of layer %" PRIu64
                " is held elsewhere: this plan is for experts "
                "%" PRIu64 " to %" PRIu64 "\n",
                expert, layer, range->first_expert, range->end_expert - 1);
}

/* Digits, then end or a stop that ends them. */
static bool read_number(const char **text, char stop, uint64_t *value)
{
    const char *p = *text;

    *value = 0;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (*value > UINT64_MAX / 10 - 1)
            return false;
        *value = *value * 10 + (uint64_t)(*p - '0');
    }
    if (p == *text || *p != stop)
        return false;
    *text = p + (stop != 0);
    return true;
}

int numoe_plan_explain(const struct numoe_machine *machine, const struct numoe_plan *plan,
                       const char *what, FILE *out, struct numoe_error *error)
{
    size_t room = (size_t)machine->node_count + machine->pu_count + plan->worker_count + 1;
    struct subject s = {machine, plan, out, NULL};
    uint64_t first, second;
    const char *at;
    int rc = 0;

    s.scratch = calloc(room, sizeof *s.scratch);
    if (!s.scratch)
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    if (!strncmp(what, "node:", 5)) {
        uint32_t i = 0;

        at = what + 5;
        if (!read_number(&at, 0, &first))
            goto malformed;
        while (i < machine->node_count && machine->nodes[i].os_index != first)
            i++;
        if (i < machine->node_count)
            explain_node(&s, i);
        else
            rc = numoe_error_set(error, -EINVAL, "explain", "there is no memory node %" PRIu64,
                                 first);
    } else if (!strncmp(what, "worker:", 7)) {
        at = what + 7;
        if (!read_number(&at, 0, &first))
            goto malformed;
        if (first < plan->worker_count)
            explain_worker(&s, (uint32_t)first);
        else
            rc = numoe_error_set(error, -EINVAL, "explain",
                                 "there is no worker %" PRIu64 ": the plan has 0 to %u", first,
                                 plan->worker_count - 1);
    } else if (!strncmp(what, "expert:", 7)) {
        at = what + 7;
        if (!read_number(&at, '.', &first) || !read_number(&at, 0, &second))
            goto malformed;
        if (first < plan->shape.layers && second < plan->shape.experts)
            explain_any_expert(&s, first, second);
        else
            rc =
                numoe_error_set(error, -EINVAL, "explain",
                                "there is no expert %" PRIu64 " of layer %" PRIu64 ": the plan has "
                                "%" PRIu64 " layers of %" PRIu64,
                                second, first, plan->shape.layers, plan->shape.experts);
    } else {
        goto malformed;
    }
    goto out;
malformed:
    rc = numoe_error_set(error, -EINVAL, "explain",
                         "\"%s\" is none of node:N, worker:N and expert:LAYER.EXPERT", what);
out:
    free(s.scratch);
    return rc;
}
