/* Ranks of tensor and expert parallelism on one machine. SPDX-License-Identifier: Apache-2.0 */
#include "cli_ranks.h"

#include "cli_output.h"
#include "topo_text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool cli_ranks_asked(const struct cli_values *values)
{
    return values->tp || values->ep || values->rank_given || values->rank_node_count;
}

/* ---- options ----------------------------------------------------------------------------------
 */

/* Said twice of a rank, the later counts. */
int cli_parse_rank_nodes(const char *text, struct cli_values *values, struct numoe_error *error)
{
    struct numoe_error inner = NUMOE_ERROR_INIT;
    struct cli_rank_nodes *grown;
    struct cli_list nodes = {NULL, 0};
    const char *end = text;
    uint64_t rank;
    int rc;

    if (!cli_parse_number(text, &rank, &end) || *end != ':' || rank >= CLI_MAX_RANKS)
        return numoe_error_set(error, -EINVAL, NULL, "\"%s\" is not R:LIST such as 1:8-15", text);
    rc = cli_parse_list(end + 1, &nodes, &inner);
    if (rc)
        return numoe_error_set(error, rc, NULL, "\"%s\": %s", text, inner.message);
    for (uint32_t i = 0; i < values->rank_node_count; i++)
        if (values->rank_nodes[i].rank == rank) {
            free(values->rank_nodes[i].nodes.values);
            values->rank_nodes[i].nodes = nodes;
            return 0;
        }
    grown = realloc(values->rank_nodes, (values->rank_node_count + 1u) * sizeof *grown);
    if (!grown) {
        free(nodes.values);
        return numoe_error_set(error, -ENOMEM, NULL, "out of memory");
    }
    grown[values->rank_node_count++] = (struct cli_rank_nodes){(uint32_t)rank, nodes};
    values->rank_nodes = grown;
    return 0;
}

/* ---- who gets which nodes -------------------------------------------------------------------- */

static int check_options(const struct cli_values *values, const struct numoe_plan_request *request,
                         const struct cli_ranks *ranks)
{
    const struct numoe_expert_shape *shape = &request->shape;

    if (!values->tp && !values->ep) {
        cli_error("plan", "--rank and --rank-nodes go with --tp or --ep");
        return CLI_USAGE;
    }
    if (ranks->tp > shape->slices || ranks->ep > shape->experts) {
        cli_error("plan", "--%s %" PRIu32 ": there are %" PRIu64 " %s",
                  ranks->tp > shape->slices ? "tp" : "ep",
                  ranks->tp > shape->slices ? ranks->tp : ranks->ep,
                  ranks->tp > shape->slices ? shape->slices : shape->experts,
                  ranks->tp > shape->slices ? "slices of 32 in an expert" : "experts in a layer");
        return CLI_USAGE;
    }
    if (values->rank_given && values->rank >= ranks->count) {
        cli_error("plan", "--rank %" PRIu32 ": there are %" PRIu32 ", from 0", values->rank,
                  ranks->count);
        return CLI_USAGE;
    }
    if (values->cpus.count) {
        cli_error("plan", "--cpus goes without --tp and --ep: a rank's workers are on the CPUs of "
                          "its nodes");
        return CLI_USAGE;
    }
    if (values->rank_node_count && (values->nodes.count || values->reserved_nodes.count)) {
        cli_error("plan", "--rank-nodes says which nodes are used: it goes without --%s",
                  values->nodes.count ? "nodes" : "reserve-nodes");
        return CLI_USAGE;
    }
    if (!values->rank_given && (values->explain || values->svg || values->png)) {
        cli_error("plan", "--%s shows one plan: --rank says whose",
                  values->explain ? "explain"
                  : values->svg   ? "svg"
                                  : "png");
        return CLI_USAGE;
    }
    return CLI_OK;
}

/* The list of --rank-nodes for a rank, or NULL. */
static const struct cli_list *named(const struct cli_values *values, uint32_t rank)
{
    for (uint32_t i = 0; i < values->rank_node_count; i++)
        if (values->rank_nodes[i].rank == rank)
            return &values->rank_nodes[i].nodes;
    return NULL;
}

static bool has(const uint32_t *list, uint32_t count, uint32_t number)
{
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == number)
            return true;
    return false;
}

/* As the command line says. What is not there is for the plan to refuse. */
static int take_named(const struct cli_values *values, struct cli_ranks *ranks)
{
    uint32_t room = 0, count = 0;

    for (uint32_t i = 0; i < values->rank_node_count; i++) {
        if (values->rank_nodes[i].rank >= ranks->count) {
            cli_error("plan", "--rank-nodes: there is no rank %" PRIu32 " of %" PRIu32,
                      values->rank_nodes[i].rank, ranks->count);
            return CLI_USAGE;
        }
        room += values->rank_nodes[i].nodes.count;
    }
    ranks->nodes = calloc((size_t)room + 1, sizeof *ranks->nodes);
    if (!ranks->nodes) {
        cli_error("plan", "out of memory");
        return CLI_FAILURE;
    }
    for (uint32_t rank = 0; rank < ranks->count; rank++) {
        const struct cli_list *list = named(values, rank);

        if (!list) {
            cli_error("plan", "--rank-nodes: rank %" PRIu32 " has no node", rank);
            return CLI_USAGE;
        }
        for (uint32_t i = 0; i < list->count; i++) {
            if (has(ranks->nodes, ranks->node_first[rank], list->values[i])) {
                cli_error("plan",
                          "--rank-nodes: node %" PRIu32 " of rank %" PRIu32 " is another rank's "
                          "too",
                          list->values[i], rank);
                return CLI_USAGE;
            }
            ranks->nodes[count++] = list->values[i];
        }
        ranks->node_first[rank + 1] = count;
    }
    return CLI_OK;
}

static int deal(const struct cli_ranks *ranks, const struct numoe_plan *plan, uint32_t *group)
{
    uint32_t count = 0;

    if (ranks->count > plan->node_count) {
        cli_error("plan",
                  "%" PRIu32 " ranks need as many memory nodes, and %" PRIu32 " are used: rank "
                  "%" PRIu32 " has no node",
                  ranks->count, plan->node_count, plan->node_count);
        return CLI_USAGE;
    }
    if (numoe_plan_deal(plan, ranks->count, group)) {
        cli_error("plan", "out of memory");
        return CLI_FAILURE;
    }
    for (uint32_t rank = 0; rank < ranks->count; rank++) {
        for (uint32_t n = 0; n < plan->node_count; n++)
            if (group[n] == rank)
                ranks->nodes[count++] = plan->nodes[n].os_index;
        ranks->node_first[rank + 1] = count;
    }
    return CLI_OK;
}

/* Those that a plan of the whole machine uses, dealt out. */
static int take_dealt(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                      struct cli_ranks *ranks)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan_request none = *request;
    struct numoe_plan *plan = NULL;
    uint32_t *group = NULL;
    int code;

    memset(&none.shape, 0, sizeof none.shape);
    if (numoe_plan_create(machine, &none, &plan, &error))
        return cli_report("plan", CLI_STAGE_OPTIONS, &error);
    group = calloc(plan->node_count, sizeof *group);
    ranks->nodes = calloc(plan->node_count, sizeof *ranks->nodes);
    if (group && ranks->nodes) {
        code = deal(ranks, plan, group);
    } else {
        cli_error("plan", "out of memory");
        code = CLI_FAILURE;
    }
    free(group);
    numoe_plan_free(plan);
    return code;
}

int cli_ranks_make(const struct cli_values *values, const struct numoe_machine *machine,
                   const struct numoe_plan_request *request, struct cli_ranks *ranks)
{
    int code;

    *ranks =
        (struct cli_ranks){.tp = values->tp ? values->tp : 1, .ep = values->ep ? values->ep : 1};
    ranks->count = ranks->tp * ranks->ep;
    code = check_options(values, request, ranks);
    if (code)
        return code;
    ranks->node_first = calloc((size_t)ranks->count + 1, sizeof *ranks->node_first);
    if (!ranks->node_first) {
        cli_error("plan", "out of memory");
        return CLI_FAILURE;
    }
    return values->rank_node_count ? take_named(values, ranks)
                                   : take_dealt(machine, request, ranks);
}

void cli_ranks_free(struct cli_ranks *ranks)
{
    for (uint32_t r = 0; ranks->planned && r < ranks->count; r++) {
        numoe_prediction_free(ranks->planned[r].prediction);
        numoe_plan_free(ranks->planned[r].plan);
    }
    free(ranks->planned);
    free(ranks->nodes);
    free(ranks->node_first);
    *ranks = (struct cli_ranks){0};
}

void cli_ranks_narrow(const struct cli_ranks *ranks, uint32_t rank,
                      struct numoe_plan_request *request)
{
    const uint64_t t = rank % ranks->tp, e = rank / ranks->tp;
    const uint64_t slices = request->shape.slices, experts = request->shape.experts;

    request->nodes = ranks->nodes + ranks->node_first[rank];
    request->node_count = ranks->node_first[rank + 1] - ranks->node_first[rank];
    request->range = (struct numoe_range){.first_slice = slices * t / ranks->tp,
                                          .end_slice = slices * (t + 1) / ranks->tp,
                                          .first_expert = experts * e / ranks->ep,
                                          .end_expert = experts * (e + 1) / ranks->ep};
}

/* ---- printing -------------------------------------------------------------------------------- */

static int by_number(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

static void sorted_ranges(char *text, size_t size, uint32_t *numbers, uint32_t count)
{
    qsort(numbers, count, sizeof *numbers, by_number);
    topo_ranges(text, size, numbers, count);
}

static uint64_t planned_bytes(const struct numoe_plan *plan)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < plan->node_count; i++)
        bytes += plan->nodes[i].planned_bytes;
    return bytes;
}

static uint64_t left_bytes(const struct numoe_plan *plan)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < plan->node_count; i++)
        bytes += plan->nodes[i].available_bytes - plan->nodes[i].planned_bytes;
    return bytes;
}

static bool print_rank(uint32_t rank, const struct numoe_plan *plan)
{
    const struct numoe_range *range = &plan->range;
    uint32_t room = plan->node_count > plan->worker_count ? plan->node_count : plan->worker_count;
    uint32_t *numbers = calloc(room, sizeof *numbers);
    char slices[48], experts[48], nodes[64], cpus[96];

    if (!numbers)
        return false;
    for (uint32_t i = 0; i < plan->node_count; i++)
        numbers[i] = plan->nodes[i].os_index;
    sorted_ranges(nodes, sizeof nodes, numbers, plan->node_count);
    for (uint32_t i = 0; i < plan->worker_count; i++)
        numbers[i] = plan->workers[i].os_cpu;
    sorted_ranges(cpus, sizeof cpus, numbers, plan->worker_count);
    free(numbers);
    snprintf(slices, sizeof slices, "%" PRIu64 "-%" PRIu64, range->first_slice,
             range->end_slice - 1);
    snprintf(experts, sizeof experts, "%" PRIu64 "-%" PRIu64, range->first_expert,
             range->end_expert - 1);
    printf("%5" PRIu32 " %9s %11s %12s %10.2f %9.2f %8" PRIu32, rank, slices, experts, nodes,
           (double)planned_bytes(plan) / 1e9, (double)left_bytes(plan) / 1e9, plan->worker_count);
    if (plan->form_count && plan->forms[0].decode_ms > 0)
        printf(" %10.3f %10.2f", plan->forms[0].decode_ms, plan->forms[0].prefill_ms);
    else
        printf(" %10s %10s", "-", "-");
    printf("  %s; CPUs %s\n", plan->form_count ? plan->forms[0].name : "-", cpus);
    return true;
}

/* Ranks that take memory channels, or CPUs, from each other. */
static void print_shared(const struct cli_planned *planned, uint32_t count)
{
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = a + 1; b < count; b++) {
            const struct numoe_plan *x = planned[a].plan, *y = planned[b].plan;
            bool domain = false, cpu = false;

            for (uint32_t i = 0; i < x->node_count && !domain; i++)
                for (uint32_t j = 0; j < y->node_count && !domain; j++)
                    domain = x->nodes[i].domain == y->nodes[j].domain;
            for (uint32_t i = 0; i < x->worker_count && !cpu; i++)
                for (uint32_t j = 0; j < y->worker_count && !cpu; j++)
                    cpu = x->workers[i].os_cpu == y->workers[j].os_cpu;
            if (domain || cpu)
                printf("note: ranks %" PRIu32 " and %" PRIu32 " share %s%s%s: both are slower than "
                       "predicted when they run at once\n",
                       a, b, domain ? "memory channels" : "", domain && cpu ? " and " : "",
                       cpu ? "CPUs" : "");
        }
}

static int print_summary(const struct cli_ranks *ranks)
{
    const struct cli_planned *planned = ranks->planned;
    double decode = 0, prefill = 0;
    uint64_t planned_all = 0, left_all = 0, workers = 0;

    printf("%" PRIu32 " ranks: %" PRIu32 " tensor parallel (parts of the slices) x %" PRIu32
           " expert parallel (parts of the experts)\n",
           ranks->count, ranks->tp, ranks->ep);
    printf("%5s %9s %11s %12s %10s %9s %8s %10s %10s  %s\n", "rank", "slices", "experts", "nodes",
           "planned GB", "left GB", "workers", "decode ms", "prefill ms", "form");
    for (uint32_t r = 0; r < ranks->count; r++) {
        const struct numoe_plan *plan = planned[r].plan;

        if (!print_rank(r, plan)) {
            cli_error("plan", "out of memory");
            return CLI_FAILURE;
        }
        planned_all += planned_bytes(plan);
        left_all += left_bytes(plan);
        workers += plan->worker_count;
        if (plan->form_count && plan->forms[0].decode_ms > decode)
            decode = plan->forms[0].decode_ms;
        if (plan->form_count && plan->forms[0].prefill_ms > prefill)
            prefill = plan->forms[0].prefill_ms;
    }
    printf("%5s %9s %11s %12s %10.2f %9.2f %8" PRIu64 " %10.3f %10.2f  the slowest rank's\n",
           "total", "", "", "", (double)planned_all / 1e9, (double)left_all / 1e9, workers, decode,
           prefill);
    printf("note: a layer of 1 token (decode) and of 4096 (prefill); adding up the ranks' outputs "
           "is the engine's and comes on top\n");
    print_shared(planned, ranks->count);
    return CLI_OK;
}

static int print_json(const struct cli_planned *planned, uint32_t count)
{
    int rc = 0;

    fputs("[\n", stdout);
    for (uint32_t r = 0; r < count && !rc; r++) {
        if (r)
            fputs(",\n", stdout);
        rc = numoe_prediction_print_json(planned[r].plan, planned[r].prediction, stdout);
    }
    fputs("]\n", stdout);
    return rc ? CLI_FAILURE : CLI_OK;
}

/* ---- all ranks ------------------------------------------------------------------------------- */

static int plan_rank(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                     const struct cli_ranks *ranks, uint32_t rank, bool predict,
                     struct cli_planned *planned)
{
    struct numoe_error error = NUMOE_ERROR_INIT, named = NUMOE_ERROR_INIT;
    struct numoe_plan_request one = *request;
    int rc;

    cli_ranks_narrow(ranks, rank, &one);
    rc = numoe_plan_create(machine, &one, &planned->plan, &error);
    if (!rc && predict)
        rc = numoe_predict(machine, planned->plan, request->predict, &planned->prediction, &error);
    if (!rc)
        return CLI_OK;
    numoe_error_set(&named, error.code, error.where, "rank %" PRIu32 ": %s", rank, error.message);
    return cli_report("plan", CLI_STAGE_OPTIONS, &named);
}

int cli_ranks_plan(const struct cli_values *values, const struct numoe_machine *machine,
                   const struct numoe_plan_request *request, struct cli_ranks *ranks)
{
    uint64_t bytes = 0;
    int code = CLI_OK;

    ranks->planned = calloc(ranks->count, sizeof *ranks->planned);
    if (!ranks->planned) {
        cli_error("plan", "out of memory");
        return CLI_FAILURE;
    }
    for (uint32_t r = 0; r < ranks->count && !code; r++) {
        code = plan_rank(machine, request, ranks, r, values->json, &ranks->planned[r]);
        bytes += code ? 0 : planned_bytes(ranks->planned[r].plan);
    }
    /* each has what the cgroup leaves; all together may not */
    if (!code && bytes > machine->cgroup_bytes) {
        cli_error("plan", "the ranks do not fit together: %.2f GB, and the cgroup leaves %.2f GB",
                  (double)bytes / 1e9, (double)machine->cgroup_bytes / 1e9);
        code = CLI_NO_ROOM;
    }
    return code;
}

int cli_ranks_print(const struct cli_values *values, const struct cli_ranks *ranks)
{
    return cli_flush(values->json ? print_json(ranks->planned, ranks->count)
                                  : print_summary(ranks));
}
