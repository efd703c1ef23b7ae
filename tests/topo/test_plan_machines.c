/*
 * Whatever the machine, the model and the options: a plan that keeps its promises, or a refusal
 * that says what is missing.
 *
 * Machines: all recorded ones, 200 that nobody has built (random_machine.h) and described ones up
 * to 128 nodes and 2048 CPUs. Their memory is scaled so that a model fits about every second time.
 */
#include "families.h"
#include "model.h"
#include "predict.h"
#include "topo/random_machine.h"
#include "topo/topo_fixture.h"
#include "topo_text.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>

static const char *const models[] = {"v4-flash",     "v4-pro",      "kimi-k3",
                                     "gpt-oss-120b", "deepseek-v3", "qwen3-30b"};

enum { MODELS = sizeof models / sizeof models[0], MOST_CPUS = 8192, MOST_NODES = 1024 };

struct tally {
    uint32_t fit, refused;
};

static struct numoe_expert_shape shape_of(const char *name)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_expert_shape shape;
    struct numoe_model_desc desc;

    cr_assert_eq(numoe_model_by_name(name, &desc, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_model_expert_shape(&desc, &shape, &error), 0, "%s", error.message);
    return shape;
}

static uint64_t bytes_of(const struct numoe_expert_shape *shape)
{
    return shape->layers * shape->experts *
           (shape->slices * shape->slice_bytes + shape->expert_bytes);
}

/* ---- promises ------------------------------------------------------------------------------- */

/* All layers where that is cheap, else three. */
static void check_layers(const struct numoe_plan *plan)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    uint64_t *all, *first;

    if (shape->layers * shape->experts * plan->node_count <= 50000) {
        check_boundaries(plan);
        return;
    }
    all = calloc(plan->node_count, sizeof *all);
    first = calloc(plan->node_count, sizeof *first);
    check_layer(plan, 0, all, first);
    check_layer(plan, shape->layers / 2, all, first);
    check_layer(plan, shape->layers - 1, all, first);
    for (uint32_t n = 0; n < plan->node_count; n++)
        cr_assert(all[n] <= plan->nodes[n].slice_count);
    free(all);
    free(first);
}

static bool listed(const uint32_t *list, uint32_t count, uint32_t value)
{
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == value)
            return true;
    return false;
}

/* CPUs that workers may be on. */
static uint32_t usable_cpus(const struct numoe_machine *machine,
                            const struct numoe_plan_request *request, bool *usable)
{
    static bool reserved[MOST_CPUS];
    uint32_t count = 0;

    memset(reserved, 0, sizeof reserved);
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (listed(request->reserved_cpus, request->reserved_count, machine->pus[i].os_index))
            reserved[machine->pus[i].core] = true;
    for (uint32_t i = 0; i < machine->pu_count; i++) {
        const struct numoe_pu *pu = &machine->pus[i];

        usable[i] = pu->allowed && !reserved[pu->core] &&
                    (!request->cpus || listed(request->cpus, request->cpu_count, pu->os_index));
        count += usable[i];
    }
    return count;
}

/* Workers on CPUs that may be used, as often as was asked: no CPU twice while there are others. */
static void check_workers(const struct numoe_machine *machine,
                          const struct numoe_plan_request *request, const struct numoe_plan *plan)
{
    static bool usable[MOST_CPUS], core[MOST_CPUS];
    static uint32_t times[MOST_CPUS];
    uint32_t count = usable_cpus(machine, request, usable);

    memset(times, 0, sizeof times);
    memset(core, 0, sizeof core);
    for (uint32_t w = 0; w < plan->worker_count; w++) {
        uint32_t pu = plan->workers[w].pu;

        cr_assert(usable[pu], "%s: worker %u on CPU %u", plan->source, w,
                  machine->pus[pu].os_index);
        times[pu]++;
        cr_assert(request->workers || request->cpus || request->smt || !core[machine->pus[pu].core],
                  "%s: two workers on core %u", plan->source, machine->pus[pu].core);
        core[machine->pus[pu].core] = true;
    }
    if (request->workers)
        cr_assert_eq(plan->worker_count, request->workers);
    else
        cr_assert_leq(plan->worker_count, count);
    for (uint32_t i = 0; i < machine->pu_count; i++)
        cr_assert(times[i] <= 1 || request->workers, "%s: CPU %u has %u workers", plan->source,
                  machine->pus[i].os_index, times[i]);
}

static void check_nodes(const struct numoe_machine *machine,
                        const struct numoe_plan_request *request, const struct numoe_plan *plan)
{
    uint64_t total = 0;

    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_plan_node *node = &plan->nodes[n];
        uint64_t capacity = machine->nodes[node->node].capacity_bytes;

        cr_assert_eq(node->capacity_bytes, capacity);
        cr_assert(node->planned_bytes <= capacity);
        cr_assert(!request->keep_free_bytes || !node->planned_bytes ||
                  node->planned_bytes <= capacity - request->keep_free_bytes);
        cr_assert(!request->nodes || listed(request->nodes, request->node_count, node->os_index));
        total += node->planned_bytes;
    }
    cr_assert_eq(total, bytes_of(&plan->shape));
    cr_assert(total <= machine->cgroup_bytes);
}

/* ---- what is said --------------------------------------------------------------------------- */

static void check_prediction(const struct numoe_prediction *prediction)
{
    cr_assert(prediction->cell_count > 0);
    for (uint32_t i = 0; i < prediction->cell_count; i++) {
        const struct numoe_prediction_cell *cell = &prediction->cells[i];

        cr_assert(*cell->why);
        if (!cell->possible) {
            cr_assert_neq(cell->way, NUMOE_WAY_CPU);
            continue;
        }
        cr_assert(isfinite(cell->layer_ms) && cell->layer_ms > 0);
        cr_assert(isfinite(cell->tokens_per_s) && cell->tokens_per_s > 0);
        cr_assert(cell->weight_bytes > 0 || cell->cached_part > 0);
        cr_assert(cell->gpu_part >= 0 && cell->gpu_part <= 1 + 1e-9);
        for (enum numoe_bound b = 0; b < NUMOE_BOUNDS; b++)
            cr_assert(isfinite(cell->parts_ms[b]) && cell->parts_ms[b] >= 0);
    }
}

static void check_memory(const struct numoe_plan *plan, const struct numoe_prediction *prediction)
{
    double slices = 0;

    cr_assert_eq(prediction->node_count, plan->node_count);
    for (uint32_t n = 0; n < plan->node_count; n++) {
        const struct numoe_prediction_node *node = &prediction->nodes[n];

        cr_assert_eq(node->expert_bytes, plan->nodes[n].planned_bytes);
        cr_assert_eq((int64_t)node->capacity_bytes - node->left_bytes,
                     (int64_t)(node->before_bytes + node->expert_bytes + node->activation_bytes +
                               node->pinned_bytes));
        slices += node->slices;
    }
    cr_assert_float_eq(slices, (double)plan->shape.slices, 1e-6);
}

static void check_json(const struct numoe_plan *plan, const struct numoe_prediction *prediction)
{
    char *text = text_of(cr_assert_eq(numoe_prediction_print_json(plan, prediction, out), 0));
    json_error_t error;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error);

    cr_assert_not_null(root, "%s: line %d: %s", plan->source, error.line, error.text);
    cr_assert_eq(json_array_size(json_object_get(root, "nodes")), plan->node_count);
    cr_assert_eq(json_array_size(json_object_get(root, "workers")), plan->worker_count);
    cr_assert_eq((uint64_t)json_integer_value(json_object_get(root, "total_bytes")),
                 bytes_of(&plan->shape));
    cr_assert_eq(json_array_size(json_object_get(json_object_get(root, "predicted"), "cells")),
                 prediction->cell_count);
    json_decref(root);
    free(text);
}

static void check_words(const struct numoe_plan *plan, const struct numoe_prediction *prediction)
{
    char *text = text_of(numoe_plan_print(plan, out); numoe_prediction_print(prediction, out));

    cr_assert(strstr(text, "total") && strstr(text, "predicted, on the CPUs"));
    cr_assert_null(strstr(text, "nan"), "%s", text);
    free(text);
}

/* Bytes and whole slices that the nodes of a request have room for. */
static void room_of(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                    uint64_t *bytes, uint64_t *slices)
{
    *bytes = *slices = 0;
    for (uint32_t i = 0; i < machine->node_count; i++) {
        const struct numoe_node *node = &machine->nodes[i];
        uint64_t keep = request->keep_free_bytes;
        bool used = request->nodes ? listed(request->nodes, request->node_count, node->os_index)
                                   : node->pu_count != 0;

        if (request->cpus && !request->nodes) {
            used = false;
            for (uint32_t p = 0; p < machine->pu_count; p++)
                used |= machine->pus[p].node == i &&
                        listed(request->cpus, request->cpu_count, machine->pus[p].os_index);
        }
        if (!keep)
            keep = node->capacity_bytes / 50 < 256 << 20 ? node->capacity_bytes / 50 : 256 << 20;
        if (!request->keep_free_bytes && keep < 48 << 20)
            keep = 48 << 20;
        if (!used || node->capacity_bytes < keep)
            continue;
        *bytes += node->capacity_bytes - keep;
        *slices += (node->capacity_bytes - keep) / request->shape.slice_bytes;
    }
}

static int plan_again(const struct numoe_machine *machine, const struct numoe_plan_request *request)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    int rc = numoe_plan_create(machine, request, &plan, &error);

    numoe_plan_free(plan);
    return rc;
}

/* The number before words in text, or 0. */
static uint64_t number_after(const char *text, const char *words)
{
    const char *at = strstr(text, words);

    return at ? strtoull(at + strlen(words), NULL, 10) : 0;
}

/* What would make it fit makes it fit, and the most of it is the most. */
static void check_suggestions(const struct numoe_machine *machine,
                              const struct numoe_plan_request *request,
                              const struct numoe_error *error)
{
    const uint64_t keep = number_after(error->message, "with at most ");
    const char *of = strstr(error->message, "it would fit with");
    struct numoe_plan_request other = *request;

    if (keep) {
        other.keep_free_bytes = keep << 20;
        cr_assert_eq(plan_again(machine, &other), 0, "%s", error->message);
        other.keep_free_bytes = (keep + 1) << 20;
        cr_assert_eq(plan_again(machine, &other), -ENOSPC, "%s", error->message);
    }
    if (strstr(error->message, " too, which would add")) {
        uint32_t *all = calloc(machine->node_count, sizeof *all);

        other = *request;
        other.nodes = all;
        other.node_count = 0;
        for (uint32_t i = 0; i < machine->node_count; i++)
            if (machine->nodes[i].allowed && machine->nodes[i].kind != NUMOE_NODE_GPU &&
                machine->nodes[i].capacity_bytes)
                all[other.node_count++] = machine->nodes[i].os_index;
        cr_assert_eq(plan_again(machine, &other), 0, "%s", error->message);
        free(all);
    }
    other = *request;
    of = of ? strstr(of, " of the ") : NULL;
    if (!of || !strstr(of, " layers"))
        return;
    while (of[-1] != ' ')
        of--;
    other.shape.layers = strtoull(of, NULL, 10);
    cr_assert_gt(other.shape.layers, 0, "%s", error->message);
    cr_assert_eq(plan_again(machine, &other), 0, "%s", error->message);
    other.shape.layers++;
    cr_assert_eq(plan_again(machine, &other), -ENOSPC, "%s", error->message);
}

/* Nodes, how much is short of what, and what would help; and it does not fit indeed. */
static void check_refusal(const struct numoe_machine *machine,
                          const struct numoe_plan_request *request, const struct numoe_error *error)
{
    static const char *const helps[] = {"it would fit with ", "is not known",
                                        "more memory is needed"};
    const struct numoe_expert_shape *shape = &request->shape;
    uint64_t need = bytes_of(shape), room, slices, have;
    char text[2][32], words[80];
    bool helped = false;

    room_of(machine, request, &room, &slices);
    have = room < machine->cgroup_bytes ? room : machine->cgroup_bytes;
    cr_assert(need > machine->cgroup_bytes || request->form > NUMOE_FORM_EVERY_NODE ||
                  shape->layers * shape->experts * shape->slices > slices ||
                  (shape->expert_bytes && need + machine->node_count * shape->slice_bytes > room),
              "%s: %s", machine->source, error->message);
    cr_assert(strstr(error->message, "the experts do not fit"), "%s", error->message);
    cr_assert(!strncmp(error->where, "node", 4), "%s", error->where);
    if (need > have) {
        snprintf(words, sizeof words, "short by %s (%.1f GB)", topo_bytes(text[0], need - have),
                 (double)(need - have) / 1e9);
        cr_assert(strstr(error->message, words), "%s: %s", words, error->message);
        snprintf(words, sizeof words, "%s available", topo_bytes(text[1], have));
        cr_assert(strstr(error->message, words), "%s: %s", words, error->message);
    }
    for (size_t i = 0; i < sizeof helps / sizeof helps[0]; i++)
        helped |= strstr(error->message, helps[i]) != NULL;
    cr_assert(helped, "%s", error->message);
    cr_assert(strlen(error->message) < sizeof error->message - 1);
    check_suggestions(machine, request, error);
}

/* ---- walks ---------------------------------------------------------------------------------- */

static void judge(const struct numoe_machine *machine, const struct numoe_plan_request *request,
                  struct tally *tally)
{
    struct numoe_prediction *prediction = NULL;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    int rc = numoe_plan_create(machine, request, &plan, &error);

    /* groups are of whole memory domains, or of as many nodes as there are */
    if (rc == -EINVAL && request->form == NUMOE_FORM_GROUPS) {
        cr_assert(strstr(error.message, "group"), "%s", error.message);
        return;
    }
    if (rc) {
        cr_assert_null(plan);
        cr_assert_eq(rc, -ENOSPC, "%s: %s", machine->source, error.message);
        check_refusal(machine, request, &error);
        tally->refused++;
        return;
    }
    tally->fit++;
    check_plan(machine, plan);
    check_nodes(machine, request, plan);
    check_workers(machine, request, plan);
    check_layers(plan);
    rc = numoe_predict(machine, plan, NULL, &prediction, &error);
    cr_assert_eq(rc, 0, "%s: %s", machine->source, error.message);
    check_prediction(prediction);
    check_memory(plan, prediction);
    check_json(plan, prediction);
    check_words(plan, prediction);
    numoe_prediction_free(prediction);
    numoe_plan_free(plan);
}

/* Memory in proportion as it was, in all 0.6 to 1.5 times what the model takes. */
static void scale(struct numoe_machine *machine, const uint64_t *was,
                  const struct numoe_expert_shape *shape, uint64_t *seed)
{
    double used = 0, factor;

    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].pu_count)
            used += (double)was[i];
    factor = (0.6 + 0.9 * random_below(seed, 1000) / 1000) * (double)bytes_of(shape) /
             (used > 0 ? used : 1);
    for (uint32_t i = 0; i < machine->node_count; i++) {
        double bytes = (double)was[i] * factor;

        machine->nodes[i].capacity_bytes = bytes < 0x1p50 ? (uint64_t)bytes : (uint64_t)1 << 50;
        machine->nodes[i].free_bytes = machine->nodes[i].capacity_bytes;
    }
}

static uint64_t *capacities(const struct numoe_machine *machine)
{
    uint64_t *was = calloc(machine->node_count, sizeof *was);

    for (uint32_t i = 0; i < machine->node_count; i++)
        was[i] = machine->nodes[i].capacity_bytes;
    return was;
}

static void all_models(struct numoe_machine *machine, uint64_t *seed, struct tally *tally)
{
    uint64_t *was = capacities(machine);

    for (size_t m = 0; m < MODELS; m++) {
        struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

        request.shape = shape_of(models[m]);
        scale(machine, was, &request.shape, seed);
        judge(machine, &request, tally);
    }
    free(was);
}

static void expect_about_half(const struct tally *tally)
{
    uint32_t all = tally->fit + tally->refused;

    cr_expect(tally->fit * 10 > all * 3 && tally->refused * 10 > all * 3, "%u fit, %u do not",
              tally->fit, tally->refused);
}

Test(plan_machines, recorded, .timeout = 300)
{
    DIR *folder = opendir(NUMOE_RECORDED_TOPOLOGIES);
    struct tally tally = {0}, as_they_are = {0};
    uint64_t seed = 0x2545f4914f6cdd1du;
    struct dirent *entry;

    if (!folder)
        cr_skip_test("no recorded topologies beside this checkout");
    while ((entry = readdir(folder))) {
        struct numoe_machine *machine;
        char path[1280];

        if (!strstr(entry->d_name, ".xml"))
            continue;
        snprintf(path, sizeof path, "%s/%s", NUMOE_RECORDED_TOPOLOGIES, entry->d_name);
        machine = machine_of(path);
        for (size_t m = 0; m < MODELS; m++) {
            struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

            request.shape = shape_of(models[m]);
            judge(machine, &request, &as_they_are);
        }
        all_models(machine, &seed, &tally);
        numoe_machine_free(machine);
    }
    closedir(folder);
    cr_expect(as_they_are.fit > 0 && as_they_are.refused > 0);
    expect_about_half(&tally);
}

Test(plan_machines, described, .timeout = 300)
{
    static const char *const strings[] = {
        "pack:1 [numa(memory=64GB)] core:1 pu:1",
        "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2",
        "pack:1 group:4 [numa(memory=64GB)] core:6 pu:2",
        "pack:2 group:4 [numa(memory=64GB)] [numa(memory=16GB)] core:12 pu:2",
        "pack:4 [numa(memory=64GB indexes=0,1,16,17)] core:4 pu:1",
        "pack:2 group:3 [numa(memory=120GB)] core:32 pu:1",
        "pack:1 [numa(memory=4TB)] core:512 pu:4",
        "pack:16 group:8 [numa(memory=64GB)] l3:2 core:8 pu:1",
        "pack:16 group:8 [numa(memory=64GB)] core:8 pu:2",
    };
    struct tally tally = {0};
    uint64_t seed = 0x9e3779b97f4a7c15u;
    uint32_t most_nodes = 0, most_pus = 0;

    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++) {
        struct numoe_machine *machine = machine_of(strings[i]);

        most_nodes = machine->node_count > most_nodes ? machine->node_count : most_nodes;
        most_pus = machine->pu_count > most_pus ? machine->pu_count : most_pus;
        all_models(machine, &seed, &tally);
        numoe_machine_free(machine);
    }
    cr_expect_eq(most_nodes, RANDOM_MOST_NODES);
    cr_expect_eq(most_pus, RANDOM_MOST_PUS);
    expect_about_half(&tally);
}

enum { MACHINES = 200 };

Test(plan_machines, that_nobody_has_built, .timeout = 300)
{
    struct tally tally = {0};
    uint32_t largest = 0, most_pus = 0, holes = 0;

    for (uint64_t seed = 1; seed <= MACHINES; seed++) {
        struct numoe_machine *machine = random_machine(seed);
        uint64_t walk = seed;

        check_machine(machine);
        largest = machine->node_count > largest ? machine->node_count : largest;
        most_pus = machine->pu_count > most_pus ? machine->pu_count : most_pus;
        for (uint32_t i = 0; i < machine->node_count; i++)
            holes += !machine->nodes[i].capacity_bytes;
        all_models(machine, &walk, &tally);
        numoe_machine_free(machine);
    }
    /* the generator does not run dry */
    cr_expect(largest > 100 && most_pus > 1500 && holes > MACHINES);
    expect_about_half(&tally);
}

/* ---- options -------------------------------------------------------------------------------- */

/* Some of the machine's CPUs or nodes, by OS index. */
static uint32_t some(uint64_t *seed, uint32_t *list, uint32_t percent, uint32_t count,
                     const struct numoe_machine *machine, bool cpus)
{
    uint32_t chosen = 0;

    for (uint32_t i = 0; i < count; i++) {
        bool usable = cpus ? machine->pus[i].allowed
                           : machine->nodes[i].allowed && machine->nodes[i].kind != NUMOE_NODE_GPU;

        if (usable && random_chance(seed, percent))
            list[chosen++] = cpus ? machine->pus[i].os_index : machine->nodes[i].os_index;
    }
    return chosen;
}

Test(plan_machines, any_options_together, .timeout = 300)
{
    static uint32_t nodes[MOST_NODES], cpus[MOST_CPUS], reserved[MOST_CPUS];
    struct tally tally = {0};
    uint32_t without_cpus = 0;

    for (uint64_t seed = 1; seed <= 3 * MACHINES; seed++) {
        struct numoe_machine *machine = random_machine(seed % MACHINES + 1);
        struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
        struct numoe_error error = NUMOE_ERROR_INIT;
        uint64_t walk = seed * 0x9e3779b97f4a7c15u + 1, *was = capacities(machine);
        static bool usable[MOST_CPUS];
        struct numoe_plan *plan = NULL;

        request.shape = shape_of(models[random_below(&walk, MODELS)]);
        scale(machine, was, &request.shape, &walk);
        request.smt = random_chance(&walk, 50);
        request.form = (enum numoe_form)random_below(&walk, NUMOE_FORM_ROWS);
        if (request.form == NUMOE_FORM_GROUPS)
            request.groups = random_below(&walk, 5);
        request.objective = (enum numoe_objective)random_below(&walk, 3);
        if (random_chance(&walk, 30))
            request.workers = 1 + random_below(&walk, 2 * machine->pu_count);
        if (random_chance(&walk, 40))
            request.keep_free_bytes = (uint64_t)random_below(&walk, 1 << 30) * 4;
        request.nodes = nodes;
        if (random_chance(&walk, 40))
            request.node_count = some(&walk, nodes, 60, machine->node_count, machine, false);
        request.cpus = cpus;
        if (random_chance(&walk, 40))
            request.cpu_count = some(&walk, cpus, 60, machine->pu_count, machine, true);
        request.reserved_cpus = reserved;
        if (random_chance(&walk, 40))
            request.reserved_count = some(&walk, reserved, random_chance(&walk, 10) ? 100 : 20,
                                          machine->pu_count, machine, true);
        /* as numoe_plan_create does: an empty list is no list */
        request.nodes = request.node_count ? nodes : NULL;
        request.cpus = request.cpu_count ? cpus : NULL;
        if (usable_cpus(machine, &request, usable)) {
            judge(machine, &request, &tally);
        } else {
            cr_assert_eq(numoe_plan_create(machine, &request, &plan, &error), -EINVAL);
            cr_assert(strstr(error.message, "no CPU is"), "%s", error.message);
            without_cpus++;
        }
        free(was);
        numoe_machine_free(machine);
    }
    cr_expect(tally.fit > MACHINES / 3 && tally.refused > MACHINES / 3, "%u fit, %u do not",
              tally.fit, tally.refused);
    cr_expect(without_cpus > 0);
}
