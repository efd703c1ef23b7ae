/*
 * What a node's part of the weights should be.
 *
 * Its bandwidth where that is known of all nodes (given, else measured, else told by the firmware),
 * else its part of its memory domain (whose channels count once) averaged with its part of the
 * cores; or, where kinds of memory are mixed, of its domain by kind.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "plan_build.h"
#include "predict.h"

#include <errno.h>
#include <stdlib.h>

/* A domain's part is divided exactly by any number of nodes up to 16. */
enum { DOMAIN_UNITS = 720720 };

/* Bandwidth of a node, and whether it is the node's own part of channels that it shares. */
enum bandwidth_source {
    GIVEN,             /* with the request, while all nodes are read: its own part; what is not
                          given, as measured so */
    MEASURED_TOGETHER, /* while all nodes were read: its own part */
    MEASURED_ALONE,    /* by the domain that reads it fastest: the channels' */
    FIRMWARE,          /* the same, as memory attributes say */
    NOT_KNOWN
};

static uint64_t given_mbs(const struct numoe_plan_request *request, uint32_t node)
{
    const struct numoe_predict_options *predict = request->predict;
    double gbs = predict && predict->node_gbs ? predict->node_gbs[node] : 0;

    /* what is no bandwidth is for the prediction to refuse */
    if (!(gbs > 0) || gbs > 1e9)
        return 0;
    return gbs < 1e-3 ? 1 : (uint64_t)(gbs * 1e3 + 0.5);
}

static bool any_given(const struct plan_build *build)
{
    for (uint32_t i = 0; i < build->plan->node_count; i++)
        if (given_mbs(build->request, build->plan->nodes[i].node))
            return true;
    return false;
}

static uint64_t bandwidth_of(const struct plan_build *build, uint32_t node,
                             enum bandwidth_source source)
{
    const struct numoe_machine *machine = build->machine;
    uint64_t given;

    switch (source) {
    case GIVEN:
        given = given_mbs(build->request, node);
        return given ? given : bandwidth_of(build, node, MEASURED_TOGETHER);
    case MEASURED_TOGETHER:
        return machine->together_mbs ? machine->together_mbs[node] : 0;
    case MEASURED_ALONE:
        return numoe_machine_measured(machine, node);
    case FIRMWARE:
        return machine->nodes[node].bandwidth_mbs;
    case NOT_KNOWN:
        break;
    }
    return 0;
}

/* The best source that knows all of the plan's nodes; fills in their bandwidths. */
static enum bandwidth_source choose_source(const struct plan_build *build, uint64_t *bandwidth)
{
    const struct numoe_plan *plan = build->plan;
    enum bandwidth_source source;

    for (source = any_given(build) ? GIVEN : MEASURED_TOGETHER; source < NOT_KNOWN; source++) {
        bool known = true;

        for (uint32_t i = 0; i < plan->node_count; i++) {
            bandwidth[i] = bandwidth_of(build, plan->nodes[i].node, source);
            known &= bandwidth[i] != 0;
        }
        if (known)
            break;
    }
    return source;
}

/* What was measured of equal nodes differs a little, and shares must not follow noise. */
static void even_out(uint64_t *bandwidth, uint32_t count)
{
    enum { NOISE_PERCENT = 5 };
    uint64_t least = UINT64_MAX, most = 0, sum = 0;

    for (uint32_t i = 0; i < count; i++) {
        least = bandwidth[i] < least ? bandwidth[i] : least;
        most = bandwidth[i] > most ? bandwidth[i] : most;
        sum += bandwidth[i];
    }
    if ((most - least) * 100 > most * NOISE_PERCENT)
        return;
    for (uint32_t i = 0; i < count; i++)
        bandwidth[i] = sum / count;
}

/* What channels of a kind are likely to read, in quarters of DRAM's. */
static uint64_t likely_speed(enum numoe_node_kind kind)
{
    return kind == NUMOE_NODE_HBM ? 12 : kind == NUMOE_NODE_SLOW ? 1 : 4;
}

static bool mixes_kinds(const struct plan_build *build)
{
    const struct numoe_plan *plan = build->plan;
    const struct numoe_node *nodes = build->machine->nodes;

    for (uint32_t i = 1; i < plan->node_count; i++)
        if (likely_speed(nodes[plan->nodes[i].node].kind) !=
            likely_speed(nodes[plan->nodes[0].node].kind))
            return true;
    return false;
}

int plan_weigh(struct plan_build *build, struct numoe_error *error)
{
    static const char *const notes[] = {
        [GIVEN] = "shares follow the bandwidth of nodes as given",
        [MEASURED_TOGETHER] = "shares follow the bandwidth of nodes as measured, all at once",
        [MEASURED_ALONE] = "shares follow the bandwidth of nodes as measured, each alone",
        [FIRMWARE] = "shares follow the bandwidth of nodes as the firmware gives it",
        [NOT_KNOWN] = "bandwidth is not known: shares follow memory domains and cores",
    };
    const struct numoe_machine *machine = build->machine;
    const struct numoe_plan *plan = build->plan;
    uint64_t *weight = calloc(plan->node_count, sizeof *weight), cores = 0, parts = 0;
    enum bandwidth_source source;
    bool known, by_kind;

    if (!weight)
        return numoe_error_set(error, -ENOMEM, plan->source, "out of memory");
    build->weight = weight;
    source = choose_source(build, weight);
    known = source != NOT_KNOWN;
    by_kind = !known && mixes_kinds(build);
    if (source == MEASURED_TOGETHER || source == MEASURED_ALONE)
        even_out(weight, plan->node_count);
    for (uint32_t i = 0; i < plan->node_count; i++)
        cores += build->core_units[i];
    /* nodes of one domain share its channels; the fastest tells what those can do */
    for (uint32_t i = 0; known && i < plan->node_count; i++)
        for (uint32_t j = 0; j < i && source > MEASURED_TOGETHER; j++) {
            if (machine->nodes[plan->nodes[j].node].domain !=
                machine->nodes[plan->nodes[i].node].domain)
                continue;
            if (weight[j] > weight[i])
                weight[i] = weight[j];
            else
                weight[j] = weight[i];
        }
    for (uint32_t i = 0; i < plan->node_count; i++) {
        uint32_t domain = machine->nodes[plan->nodes[i].node].domain;
        uint64_t sharing = 0;

        for (uint32_t j = 0; j < plan->node_count; j++)
            sharing += machine->nodes[plan->nodes[j].node].domain == domain;
        if (source <= MEASURED_TOGETHER)
            weight[i] <<= 16;
        else
            weight[i] = known ? (weight[i] << 16) / sharing : DOMAIN_UNITS / sharing;
        if (by_kind)
            weight[i] *= likely_speed(machine->nodes[plan->nodes[i].node].kind);
        parts += weight[i];
    }
    if (!known && !by_kind && cores)
        for (uint32_t i = 0; i < plan->node_count; i++)
            weight[i] = weight[i] * cores + build->core_units[i] * parts;
    if (plan->node_count > 1)
        plan_note(build, "%s%s",
                  source != GIVEN && any_given(build) ? "bandwidth is given of some nodes only; "
                                                      : "",
                  by_kind ? "bandwidth is not known: shares follow memory domains, HBM taken for "
                            "three times as fast as DRAM and slow memory for a quarter"
                          : notes[source]);
    return 0;
}
