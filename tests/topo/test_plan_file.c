/* Plans as data: what comes back, what is refused, and which machines a plan is refused on. */
#include "plan_shares.h"
#include "support/damage.h"
#include "topo/topo_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char directory[] = "/tmp/numoe-plan-XXXXXX";

static void enter(void)
{
    cr_assert_not_null(mkdtemp(directory));
}

static void leave(void)
{
    char command[64];

    snprintf(command, sizeof command, "rm -rf %s", directory);
    cr_assert_eq(system(command), 0);
}

TestSuite(plan_file, .init = enter, .fini = leave, .timeout = 240);
TestSuite(plan_check, .timeout = 60);

static char *json_of(const struct numoe_plan *plan)
{
    return text_of(cr_assert_eq(numoe_plan_print_json(plan, out), 0));
}

static struct numoe_plan *parsed(const char *text)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    int rc = numoe_plan_parse(text, strlen(text), NULL, &plan, &error);

    cr_assert_eq(rc, 0, "%s: %s", error.where, error.message);
    return plan;
}

/* ---- what comes back ---- */

static bool same_list(const uint32_t *a, uint32_t a_count, const uint32_t *b, uint32_t b_count)
{
    return a_count == b_count && !a == !b && (!a || !memcmp(a, b, a_count * sizeof *a));
}

static void check_same_request(const struct numoe_plan_request *a,
                               const struct numoe_plan_request *b)
{
    cr_assert_eq(a->size, b->size);
    cr_assert_eq(memcmp(&a->shape, &b->shape, sizeof a->shape), 0);
    cr_assert(a->workers == b->workers && a->smt == b->smt &&
              a->keep_free_bytes == b->keep_free_bytes &&
              a->lanes_per_worker == b->lanes_per_worker);
    cr_assert(a->form == b->form && a->groups == b->groups && a->objective == b->objective);
    cr_assert(!a->predict && !b->predict);
    cr_assert_eq(memcmp(&a->range, &b->range, sizeof a->range), 0);
    cr_assert(same_list(a->nodes, a->node_count, b->nodes, b->node_count));
    cr_assert(same_list(a->cpus, a->cpu_count, b->cpus, b->cpu_count));
    cr_assert(same_list(a->reserved_cpus, a->reserved_count, b->reserved_cpus, b->reserved_count));
}

static void check_same_fingerprint(const struct numoe_plan_machine *a,
                                   const struct numoe_plan_machine *b)
{
    cr_assert(a->live == b->live && a->distances_known == b->distances_known &&
              a->cgroup_bytes == b->cgroup_bytes && a->cpu_quota == b->cpu_quota);
    cr_assert_str_eq(a->cpu_model, b->cpu_model);
    cr_assert_str_eq(a->allowed_cpus, b->allowed_cpus);
    cr_assert_eq(a->node_count, b->node_count);
    cr_assert_eq(a->cpu_count, b->cpu_count);
    for (uint32_t i = 0; i < a->node_count; i++) {
        const struct numoe_plan_machine_node *x = &a->nodes[i], *y = &b->nodes[i];

        cr_assert(x->os_index == y->os_index && x->kind == y->kind && x->allowed == y->allowed &&
                  x->domain == y->domain && x->package == y->package &&
                  x->capacity_bytes == y->capacity_bytes);
    }
    for (uint32_t i = 0; i < a->cpu_count; i++) {
        const struct numoe_plan_cpu *x = &a->cpus[i], *y = &b->cpus[i];

        cr_assert(x->index == y->index && x->os_index == y->os_index && x->core == y->core &&
                  x->l3 == y->l3 && x->package == y->package && x->node == y->node);
    }
}

/* Boundaries of some experts, on every node. */
static void check_same_boundaries(const struct numoe_plan *a, const struct numoe_plan *b)
{
    const struct numoe_expert_shape *shape = &a->shape;

    for (uint64_t l = 0; l<shape->layers; l += shape->layers> 8 ? 7 : 1)
        for (uint64_t e = 0; e<shape->experts; e += shape->experts> 16 ? 11 : 1)
            for (uint32_t n = 0; n <= a->node_count; n++)
                cr_assert_eq(numoe_plan_boundary(a, l, e, n), numoe_plan_boundary(b, l, e, n),
                             "layer %lu expert %lu node %u", (unsigned long)l, (unsigned long)e, n);
}

static void check_same(const struct numoe_plan *a, const struct numoe_plan *b)
{
    size_t square = (size_t)a->node_count * a->node_count;

    cr_assert_str_eq(a->source, b->source);
    cr_assert_eq(memcmp(&a->shape, &b->shape, sizeof a->shape), 0);
    cr_assert_eq(memcmp(&a->range, &b->range, sizeof a->range), 0);
    check_same_request(&a->request, &b->request);
    check_same_fingerprint(&a->machine, &b->machine);
    cr_assert_eq(a->node_count, b->node_count);
    cr_assert_eq(a->worker_count, b->worker_count);
    cr_assert_eq(a->expert_step, b->expert_step);
    for (uint32_t i = 0; i < a->node_count; i++) {
        const struct numoe_plan_node *x = &a->nodes[i], *y = &b->nodes[i];

        cr_assert(x->node == y->node && x->os_index == y->os_index && x->domain == y->domain &&
                      x->package == y->package && x->capacity_bytes == y->capacity_bytes &&
                      x->available_bytes == y->available_bytes &&
                      x->planned_bytes == y->planned_bytes && x->slice_count == y->slice_count &&
                      x->first_worker == y->first_worker && x->worker_count == y->worker_count &&
                      x->lanes == y->lanes && x->weight == y->weight && x->shard == y->shard,
                  "node %u", i);
    }
    for (uint32_t i = 0; i < a->worker_count; i++) {
        const struct numoe_plan_worker *x = &a->workers[i], *y = &b->workers[i];

        cr_assert(x->pu == y->pu && x->os_cpu == y->os_cpu && x->plan_node == y->plan_node &&
                      x->l3 == y->l3 && x->domain == y->domain && x->package == y->package,
                  "worker %u", i);
    }
    cr_assert_arr_eq(a->cumulative, b->cumulative, (a->node_count + 1) * sizeof *a->cumulative);
    cr_assert_arr_eq(a->distances, b->distances, square * sizeof *a->distances);
    cr_assert_eq(a->note_count, b->note_count);
    for (uint32_t i = 0; i < a->note_count; i++)
        cr_assert_str_eq(a->notes[i], b->notes[i]);
    check_same_boundaries(a, b);
}

/* Print, load, print: equal plans, equal bytes; and the machine is the one it was made for. */
static void check_round_trip(const struct numoe_machine *machine, const struct numoe_plan *plan)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char *once = json_of(plan), *twice;
    struct numoe_plan *loaded = parsed(once);

    check_same(plan, loaded);
    twice = json_of(loaded);
    cr_assert_str_eq(once, twice);
    cr_assert_eq(numoe_plan_check(loaded, machine, NULL, &error), 0, "%s: %s", machine->source,
                 error.message);
    numoe_plan_free(loaded);
    free(once);
    free(twice);
}

static const struct numoe_expert_shape shapes[] = {{43, 256, 64, 208896, 4096, 6, 0},
                                                   {1, 32, 90, 149760, 2880, 4, 11520},
                                                   {3, 3, 5, 4352, 64, 2, 256},
                                                   {1, 1, 1, 1088, 32, 1, 128},
                                                   {0, 0, 0, 0, 0, 0, 0}};

/* Every kind of request that the machine grants. */
static void check_machine_plans(const struct numoe_machine *machine)
{
    uint32_t node = NUMOE_NONE, cpu = NUMOE_NONE, plans = 0;

    for (uint32_t i = 0; i < machine->node_count; i++)
        if (machine->nodes[i].pu_count)
            node = machine->nodes[i].os_index;
    for (uint32_t i = 0; i < machine->pu_count; i++)
        if (machine->pus[i].allowed && machine->pus[i].node != NUMOE_NONE)
            cpu = machine->pus[i].os_index;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int kind = 0; kind < 9; kind++) {
            struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
            struct numoe_error error = NUMOE_ERROR_INIT;
            struct numoe_plan *plan;

            request.shape = shapes[s];
            if (kind == 1) {
                request.nodes = &node;
                request.node_count = 1;
            } else if (kind == 2) {
                request.cpus = &cpu;
                request.cpu_count = 1;
            } else if (kind == 3) {
                request.smt = true;
                request.keep_free_bytes = 12345678;
            } else if (kind == 4) {
                request.workers = 5;
                request.lanes_per_worker = 3;
            } else if (kind == 5) {
                request.reserved_cpus = &cpu;
                request.reserved_count = 1;
            } else if (kind == 6) {
                request.form = NUMOE_FORM_EXPERTS;
            } else if (kind == 7) {
                request.form = NUMOE_FORM_GROUPS;
                request.groups = 1 + (machine->node_count > 4);
                request.objective = NUMOE_OPTIMIZE_PREFILL;
            } else if (kind == 8) {
                request.form = NUMOE_FORM_EVERY_NODE;
                request.objective = NUMOE_OPTIMIZE_DECODE;
                request.range.first_slice = shapes[s].slices / 2;
                request.range.end_expert = shapes[s].experts / 2 + 1;
            }
            if (numoe_plan_create(machine, &request, &plan, &error)) {
                /* too small for the model, or nothing but the reserved core */
                cr_assert(error.code == -ENOSPC || kind == 5, "%s: %s", machine->source,
                          error.message);
                continue;
            }
            check_round_trip(machine, plan);
            numoe_plan_free(plan);
            plans++;
        }
    cr_assert_geq(plans, 5, "%s: %u plans", machine->source, plans);
}

Test(plan_file, plans_of_synthetic_machines_come_back)
{
    static const char *const sources[] = {
        "core:1 pu:1",
        "numa:3(memory=64GB) core:2 pu:1",
        "pack:2 l3:16 [numa(memory=16GB)] core:4 pu:2",
        "pack:4 [numa(memory=64GB)] l3:2 core:8 pu:2",
        "numa:64(memory=8GB) core:2 pu:1",
        "pack:2 [numa(memory=8GB)] l3:2 [numa(memory=4GB)] core:2 pu:2"};

    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
        struct numoe_machine *machine = machine_of(sources[i]);

        check_machine_plans(machine);
        numoe_machine_free(machine);
    }
}

Test(plan_file, plans_of_this_machine_come_back)
{
    struct numoe_machine *machine = machine_of(NULL);

    check_machine_plans(machine);
    numoe_machine_free(machine);
}

/* Returns how many machines a folder holds. */
static uint32_t check_folder(const char *folder)
{
    DIR *listing = opendir(folder);
    struct dirent *entry;
    uint32_t files = 0;

    cr_assert_not_null(listing, "%s", folder);
    while ((entry = readdir(listing))) {
        const char *dot = strrchr(entry->d_name, '.');
        struct numoe_machine *machine;
        char path[1024];

        if (!dot || strcmp(dot, ".xml") != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        machine = machine_of(path);
        check_machine_plans(machine);
        numoe_machine_free(machine);
        files++;
    }
    closedir(listing);
    return files;
}

Test(plan_file, plans_of_described_machines_come_back)
{
    cr_assert_geq(check_folder(DATA), 8);
}

Test(plan_file, plans_of_recorded_machines_come_back)
{
    struct stat info;

    if (stat(NUMOE_RECORDED_TOPOLOGIES, &info))
        cr_skip_test("no recorded topologies beside this checkout");
    cr_assert_gt(check_folder(NUMOE_RECORDED_TOPOLOGIES), 0);
}

/* ---- one plan for most of what follows: two nodes, four workers ---- */

#define SMALL "pack:2 [numa(memory=16GB)] core:2 pu:2"

static struct numoe_plan *small_plan(const struct numoe_machine *machine)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = (struct numoe_expert_shape){3, 8, 5, 1 << 20, 64, 2, 256};
    request.form = NUMOE_FORM_EVERY_NODE;
    return plan_of(machine, &request);
}

/* ---- what is refused ---- */

static json_t *at_path(json_t *root, const char *path, const char **last)
{
    char name[64];

    for (;;) {
        const char *dot = strchr(path, '.');
        json_t *next;

        if (!dot) {
            *last = path;
            return root;
        }
        snprintf(name, sizeof name, "%.*s", (int)(dot - path), path);
        next = json_is_array(root) ? json_array_get(root, (size_t)atoi(name))
                                   : json_object_get(root, name);
        cr_assert_not_null(next, "no %s", name);
        root = next;
        path = dot + 1;
    }
}

/* The text with one value replaced, or taken out when json is NULL. */
static char *edited(const char *text, const char *path, const char *json)
{
    json_t *root = json_loads(text, 0, NULL), *parent, *value = NULL;
    const char *last;
    char *made;

    parent = at_path(root, path, &last);
    if (json) {
        value = json_loads(json, JSON_DECODE_ANY, NULL);
        cr_assert_not_null(value, "%s", json);
    }
    if (json_is_array(parent))
        cr_assert_eq(json ? json_array_set_new(parent, (size_t)atoi(last), value)
                          : json_array_remove(parent, (size_t)atoi(last)),
                     0, "%s", path);
    else
        cr_assert_eq(json ? json_object_set_new(parent, last, value)
                          : json_object_del(parent, last),
                     0, "%s", path);
    made = json_dumps(root, 0);
    json_decref(root);
    return made;
}

static int parse_error(const char *text, size_t bytes, struct numoe_error *error)
{
    struct numoe_plan *plan = NULL;
    int rc;

    *error = (struct numoe_error)NUMOE_ERROR_INIT;
    rc = numoe_plan_parse(text, bytes, "somewhere", &plan, error);
    cr_assert_eq(!rc, plan != NULL);
    if (rc)
        cr_assert(error->code == rc && *error->message && !strcmp(error->where, "somewhere"));
    numoe_plan_free(plan);
    return rc;
}

/* Several shards: each begins with 0, none falls, and the form is theirs. */
Test(plan_file, shards_that_contradict_are_refused)
{
    static const struct {
        const char *path, *json, *field, *word;
    } edits[] = {
        {"cumulative.1", "1", "cumulative", "begins with 1 on node 1"},
        {"cumulative.2", "1", "nodes[0].slices", "and 0 by"},
        {"cumulative.3", "0", "nodes[1].slices", "and 0 by"},
        {"form", "\"every\"", "form", "not that of 2 shards on 4 nodes"},
        {"form", "\"experts\"", "form", "not that of 2 shards on 4 nodes"},
        {"shards.1.nodes", "[1,2]", "shards[1].nodes", "2, which is in a shard already"},
        {"shards.0.experts", "11", "shards", "23 experts, and there are 24"},
    };
    struct numoe_machine *machine = machine_of("numa:4(memory=16GB) core:2 pu:1");
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error;
    struct numoe_plan *plan;
    char *text;

    for (uint32_t i = 0; i < 4; i++)
        machine->nodes[i].domain = i % 2; /* its nodes do not stand together */
    request.shape = (struct numoe_expert_shape){3, 8, 6, 1 << 20, 64, 2, 256};
    request.form = NUMOE_FORM_GROUPS;
    plan = plan_of(machine, &request);
    check_round_trip(machine, plan);
    text = json_of(plan);
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        char *bad = edited(text, edits[i].path, edits[i].json);

        cr_expect_eq(parse_error(bad, strlen(bad), &error), -EBADMSG, "%s = %s", edits[i].path,
                     edits[i].json);
        cr_expect(strstr(error.message, edits[i].field) && strstr(error.message, edits[i].word),
                  "%s = %s: %s", edits[i].path, edits[i].json, error.message);
        free(bad);
    }
    free(text);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_file, contradictions_are_refused_by_field_and_value)
{
    static const struct {
        const char *path, *json, *field, *word;
    } edits[] = {
        {"numoe_plan", "2", "version 2", ""},
        {"numoe_plan", NULL, "not a plan", "numoe_plan"},
        {"source", "7", "source", "not a string"},
        {"shape", NULL, "shape", "missing"},
        {"shape.layers", "4", "shards", "24 experts, and there are 32"},
        {"shape.layers", "-1", "shape.layers", "-1"},
        {"shape.experts", "0", "shape", "0 experts"},
        {"shape.slices", "9223372036854775807", "shape", "more than any machine holds"},
        {"shape.slice_bytes", "1.5", "shape.slice_bytes", "whole"},
        {"shape.expert_bytes", "255", "planned_bytes", "by the shares"},
        {"request", "[]", "request", "not an object"},
        {"request.workers", "4097", "request.workers", "4097"},
        {"request.nodes", "[1024]", "request.nodes[0]", "1024"},
        {"request.nodes", "[]", "request.nodes", "0 items"},
        {"request.smt", "0", "request.smt", "neither true nor false"},
        {"request.reserved_cpus", "[0,65536]", "request.reserved_cpus[1]", "65536"},
        {"machine.cpu_model", "null", "machine.cpu_model", "not a string"},
        {"machine.cgroup_bytes", "-1", "machine.cgroup_bytes", "-1"},
        {"machine.cpu_quota", "-0.5", "machine.cpu_quota", "-0.5"},
        {"machine.nodes", "[]", "machine.nodes", "0 items"},
        {"machine.nodes.1.os_index", "0", "machine.nodes[1].os_index", "0, which appears twice"},
        {"machine.nodes.0.kind", "\"DROM\"", "machine.nodes[0].kind", "DROM"},
        {"machine.nodes.0.kind", "\"GPU\"", "nodes[0].os_index", "may not be used"},
        {"machine.nodes.1.allowed", "false", "nodes[1].os_index", "may not be used"},
        {"machine.nodes.0.capacity_bytes", "1", "nodes[0].capacity_bytes", "1 in machine.nodes"},
        {"machine.cpus.1.index", "0", "machine.cpus[1].index", "0, out of order"},
        {"machine.cpus.1.os_index", "0", "machine.cpus[1].os_index", "twice"},
        {"machine.cpus.0.node", "7", "machine.cpus[0].node", "7, which is no node"},
        {"machine.cpus.0", NULL, "workers[0].os_cpu", "0, which is not among machine.cpus"},
        {"nodes", "[]", "nodes", "0 items"},
        {"nodes.0.os_index", "5", "nodes[0].os_index", "5, which is no node"},
        {"nodes.1.os_index", "0", "nodes[1].os_index", "0, out of order or there twice"},
        {"nodes.0.available_bytes", "99999999999", "nodes[0].available_bytes", "99999999999"},
        {"nodes.0.planned_bytes", "1", "nodes[0].planned_bytes", "1, and"},
        {"nodes.0.planned_bytes", "99999999999", "nodes[0].planned_bytes", "out of range"},
        {"nodes.0.slices", "61", "nodes[0].slices", "61, and 60"},
        {"nodes.0.weight", "0.75", "nodes[0].weight", "0.75, and 0.5"},
        {"nodes.0.workers", "3", "workers", "4 items"},
        {"nodes.0.workers", "4097", "nodes[0].workers", "4097"},
        {"nodes.0.lanes", "0", "nodes[0].lanes", "0, out of range"},
        {"nodes.0.lanes", "2049", "nodes[0].lanes", "2049"},
        {"workers.1.worker", "2", "workers[1].worker", "2, not its place"},
        {"workers.0.node", "1", "workers[0].node", "1: by nodes[].workers"},
        {"workers.0.os_cpu", "1", "workers[0].os_cpu", "1, which is not among"},
        {"workers.1.os_cpu", "0", "machine.cpus", "CPU 2, which has no worker"},
        {"workers.3", NULL, "workers", "3 items"},
        {"total_bytes", "1", "total_bytes", "1, and"},
        {"cumulative", "[0]", "cumulative", "1 items"},
        {"cumulative.0", "1", "cumulative", "begins with 1 on node 0"},
        {"cumulative.1", "4611686018427387905", "cumulative[1]", "4611686018427387905"},
        {"cumulative.2", "2305843009213693951", "cumulative", "ends with 2305843009213693951"},
        {"cumulative.2", "4611686018427387903", "cumulative", "and not 2^62"},
        {"range", "0", "range", "not an object"},
        {"range.end_slice", "4", "nodes[0].slices", "60, and 48"},
        {"range.end_slice", "6", "range", "none of the 5"},
        {"range.end_slice", "0", "range", "ends with slice 0"},
        {"range.first_slice", "5", "range", "none of the 5"},
        {"range.first_expert", "1", "shards[0].experts", "24, out of range"},
        {"range.end_expert", "9", "range", "none of the 8"},
        {"request.range.end_slice", "-1", "end_slice", "-1"},
        {"form", "\"rows\"", "form", "not that of 1 shards"},
        {"form", "\"experts\"", "form", "not that of 1 shards on 2 nodes"},
        {"form", "\"some\"", "form", "some"},
        {"shards", "[]", "shards", "0 items"},
        {"shards.0.experts", "23", "shards", "23 experts, and there are 24"},
        {"shards.0.experts", "25", "shards[0].experts", "25, out of range"},
        {"shards.0.nodes", "[0]", "shards", "leave out node 1"},
        {"shards.0.nodes", "[0,0]", "shards[0].nodes", "0, which is in a shard already"},
        {"shards.0.nodes", "[0,2]", "shards[0].nodes", "2, which is no node"},
        {"shards.0.nodes", "[0,1,1]", "nodes", "3 items"},
        {"forms.0.form", "1", "forms[0].form", "not a string"},
        {"forms.0.groups", "3", "forms[0].groups", "3, out of range"},
        {"forms.0.cost", "-1", "forms[0].cost", "-1"},
        {"request.form", "\"none\"", "request.form", "none"},
        {"request.optimize", "\"all\"", "request.optimize", "all"},
        {"cumulative.1", "0", "nodes[0].slices", "60, and 0"},
        {"expert_step", "0", "expert_step", "0, out of range"},
        {"expert_step", "8", "expert_step", "8, out of range"},
        {"expert_step", "6", "expert_step", "6, not coprime with 8"},
        {"distances", "[10,20,20]", "distances", "3 items"},
        {"distances.0", "11", "distances", "11 where a node's own"},
        {"distances.1", "-1", "distances[1]", "-1"},
        {"notes", "[1]", "notes", "not a string"},
    };
    struct numoe_machine *machine = machine_of(SMALL);
    struct numoe_plan *plan = small_plan(machine);
    char *text = json_of(plan);
    struct numoe_error error;

    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        char *bad = edited(text, edits[i].path, edits[i].json);

        cr_expect_eq(parse_error(bad, strlen(bad), &error), -EBADMSG, "%s = %s", edits[i].path,
                     edits[i].json);
        cr_expect(strstr(error.message, edits[i].field) && strstr(error.message, edits[i].word),
                  "%s = %s: %s", edits[i].path, edits[i].json, error.message);
        free(bad);
    }
    free(text);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_file, what_is_not_known_is_passed_over)
{
    struct numoe_machine *machine = machine_of(SMALL);
    struct numoe_plan *plan = small_plan(machine), *loaded;
    char *text = json_of(plan), *more = edited(text, "predicted", "{\"cells\": [1]}");

    loaded = parsed(more);
    check_same(plan, loaded);
    numoe_plan_free(loaded);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    free(text);
    free(more);
}

Test(plan_file, other_json_and_too_much_are_refused)
{
    const size_t most = ((size_t)16 << 20) + 1;
    char *huge = malloc(most);
    struct numoe_error error;

    cr_assert_eq(parse_error("", 0, &error), -EBADMSG);
    cr_assert_eq(parse_error("{}", 2, &error), -EBADMSG);
    cr_assert_eq(parse_error("[1]", 3, &error), -EBADMSG);
    cr_assert_eq(parse_error("{\"numoe_machine\": 1}", 20, &error), -EBADMSG);
    cr_assert_eq(parse_error("{\"numoe_plan\": 1}", 17, &error), -EBADMSG);
    cr_assert_eq(parse_error("{\"numoe_plan\": 1, \"numoe_plan\": 1}", 34, &error), -EBADMSG);
    cr_assert_eq(parse_error("{\0}", 3, &error), -EBADMSG);
    memset(huge, '[', most);
    cr_assert_eq(parse_error(huge, most - 1, &error), -EBADMSG);
    cr_assert_eq(parse_error(huge, most, &error), -E2BIG);
    free(huge);
}

/* Thousands of damaged files: an error with words, or a plan on which everything holds. */
Test(plan_file, damaged_bytes_never_crash)
{
    struct numoe_machine *machine = machine_of(SMALL);
    struct numoe_plan *plan = small_plan(machine);
    char *text = json_of(plan), *copy = malloc(strlen(text));
    uint64_t state = 0x9E3779B97F4A7C15u;
    uint32_t accepted = 0;

    for (uint32_t round = 0; round < 6000; round++) {
        size_t bytes = damage(copy, text, strlen(text), round, &state);
        struct numoe_plan_changes changes;
        struct numoe_plan *loaded = NULL;
        struct numoe_error error;

        if (parse_error(copy, bytes, &error))
            continue;
        accepted++;
        cr_assert_eq(numoe_plan_parse(copy, bytes, NULL, &loaded, NULL), 0);
        check_boundaries(loaded);
        cr_assert_eq(numoe_plan_compare(loaded, machine, &changes), 0);
        numoe_plan_changes_free(&changes);
        free(text_of(numoe_plan_print(loaded, out)));
        free(json_of(loaded));
        numoe_plan_free(loaded);
    }
    /* the letter of a note may change, or what the machine was, and leave a plan */
    cr_assert_gt(accepted, 0);
    cr_assert_lt(accepted, 5000);
    free(text);
    free(copy);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

/* ---- files ---- */

Test(plan_file, several_processes_read_one_file)
{
    struct numoe_machine *machine = machine_of(SMALL);
    struct numoe_plan *plan = small_plan(machine);
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *loaded;
    char path[128];
    FILE *file;

    snprintf(path, sizeof path, "%s/plan.json", directory);
    file = fopen(path, "w");
    cr_assert_eq(numoe_plan_print_json(plan, file), 0);
    fclose(file);
    cr_assert_eq(chmod(path, 0444), 0);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();

        if (child == 0)
            _exit(numoe_plan_load(path, &loaded, NULL) ||
                  numoe_plan_check(loaded, machine, NULL, NULL));
        cr_assert_gt(child, 0);
    }
    cr_assert_eq(numoe_plan_load(path, &loaded, &error), 0, "%s", error.message);
    check_same(plan, loaded);
    numoe_plan_free(loaded);
    for (int i = 0, status; i < 3; i++) {
        cr_assert_gt(wait(&status), 0);
        cr_assert_eq(status, 0);
    }
    numoe_plan_free(plan);
    numoe_machine_free(machine);
}

Test(plan_file, files_that_are_none_are_refused)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    char path[128];

    snprintf(path, sizeof path, "%s/plan.json", directory);
    cr_assert_eq(numoe_plan_load(path, &plan, &error), -ENOENT);
    cr_assert_str_eq(error.where, path);
    cr_assert_eq(numoe_plan_load(directory, &plan, &error), -EINVAL);
    cr_assert_eq(mkfifo(path, 0600), 0);
    cr_assert_eq(numoe_plan_load(path, &plan, &error), -EINVAL);
    cr_assert_eq(unlink(path), 0);
    fclose(fopen(path, "w"));
    cr_assert_eq(truncate(path, ((off_t)16 << 20) + 1), 0);
    cr_assert_eq(numoe_plan_load(path, &plan, &error), -E2BIG);
    cr_assert_null(plan);
}

/* ---- machines ---- */

/* A plan of a machine, and the machine, to be changed. */
struct pair {
    struct numoe_machine *machine;
    struct numoe_plan *plan;
};

static struct pair pair_of(const char *source)
{
    struct pair pair = {.machine = machine_of(source)};

    strcpy(pair.machine->cpu_model, "AMD EPYC 7H12");
    pair.plan = small_plan(pair.machine);
    return pair;
}

static void free_pair(struct pair *pair)
{
    numoe_plan_free(pair->plan);
    numoe_machine_free(pair->machine);
}

/* Refused with so many changes, of which one has these words; and freed. */
static void expect_changes(struct pair *pair, uint32_t count, const char *words)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan_changes changes;
    bool found = false;

    cr_assert_eq(numoe_plan_compare(pair->plan, pair->machine, &changes), 0);
    for (uint32_t i = 0; i < changes.count; i++)
        found |= strstr(changes.list[i], words) != NULL;
    cr_expect_eq(changes.count, count, "%s: %u changes", words, changes.count);
    cr_expect(found, "\"%s\" is not in: %s", words, changes.count ? changes.list[0] : "nothing");
    cr_expect_eq(numoe_plan_check(pair->plan, pair->machine, NULL, &error), -ESTALE);
    cr_expect_not_null(strstr(error.message, changes.count ? changes.list[0] : ""), "%s",
                       error.message);
    numoe_plan_changes_free(&changes);
    free_pair(pair);
}

static void expect_accepted(struct pair *pair)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    cr_expect_eq(numoe_plan_check(pair->plan, pair->machine, NULL, &error), 0, "%s", error.message);
    free_pair(pair);
}

Test(plan_check, nodes_that_are_gone_or_forbidden)
{
    struct pair pair = pair_of(SMALL);

    pair.machine->nodes[1].os_index = 9;
    /* its CPUs are at what it is called now */
    expect_changes(&pair, 2, "memory node 1 is not there");
    pair = pair_of(SMALL);
    pair.machine->nodes[1].os_index = 9;
    expect_changes(&pair, 2, "CPUs 4,6 are at memory node 9, and were at memory node 1");
    pair = pair_of(SMALL);
    pair.machine->nodes[1].allowed = false;
    expect_changes(&pair, 1, "memory node 1 is no longer allowed");
    pair = pair_of(SMALL);
    pair.machine->nodes[0].kind = NUMOE_NODE_HBM;
    expect_changes(&pair, 1, "memory node 0 is HBM, and was DRAM");
}

Test(plan_check, cpus_that_are_gone_forbidden_or_moved)
{
    struct pair pair = pair_of(SMALL);

    pair.machine->pus[2].os_index = 99;
    expect_changes(&pair, 1, "CPU 2 is not there");
    pair = pair_of(SMALL);
    pair.machine->pus[2].allowed = pair.machine->pus[4].allowed = false;
    expect_changes(&pair, 1, "CPUs 2,4 are no longer allowed for this process");
    pair = pair_of(SMALL);
    pair.machine->pus[0].node = pair.machine->pus[2].node = 1;
    expect_changes(&pair, 1, "CPUs 0,2 are at memory node 1, and were at memory node 0");
    pair = pair_of(SMALL);
    pair.machine->pus[4].node = NUMOE_NONE;
    expect_changes(&pair, 1, "CPU 4 is at no memory node, and was at memory node 1");
    /* CPU 2 becomes the second thread of CPU 0's core */
    pair = pair_of(SMALL);
    pair.machine->pus[2].core = 0;
    expect_changes(&pair, 1, "CPUs 0,2 are on cores with other CPUs");
}

Test(plan_check, memory_that_is_less)
{
    struct pair pair = pair_of(SMALL);

    pair.machine->nodes[0].capacity_bytes = (uint64_t)12e9;
    expect_changes(&pair, 1, "memory node 0 has 11.18 GiB, and had 14.90 GiB");
    /* what the kernel keeps for itself differs from start to start */
    pair = pair_of(SMALL);
    pair.machine->nodes[0].capacity_bytes = (uint64_t)15.5e9;
    expect_accepted(&pair);
    pair = pair_of(SMALL);
    pair.machine->nodes[0].capacity_bytes = (uint64_t)32e9;
    expect_accepted(&pair);

    pair = pair_of(SMALL);
    pair.machine->live = true;
    pair.machine->nodes[1].free_bytes = pair.plan->nodes[1].planned_bytes + (200 << 20);
    expect_changes(&pair, 1, "260.00 MiB free, 256.00 MiB of them to be kept free, and 60.00 MiB");
    pair = pair_of(SMALL);
    pair.machine->live = true;
    pair.machine->nodes[1].free_bytes = pair.plan->nodes[1].planned_bytes + (256 << 20);
    expect_accepted(&pair);
    /* memory in pools of huge pages is for weights too */
    pair = pair_of(SMALL);
    pair.machine->live = true;
    pair.machine->nodes[1].free_bytes = 256 << 20;
    pair.machine->nodes[1].huge_2m_free = pair.plan->nodes[1].planned_bytes >> 21;
    expect_accepted(&pair);
}

Test(plan_check, limits_of_the_cgroup)
{
    struct pair pair = pair_of(SMALL);

    pair.machine->cgroup_bytes = 100 << 20;
    expect_changes(&pair, 1, "the memory limit of the cgroup leaves 100.00 MiB");
    pair = pair_of(SMALL);
    pair.machine->cpu_quota = 2.5;
    expect_changes(&pair, 1, "the CPU quota of the cgroup is 2.50, and 4 workers");
    pair = pair_of(SMALL);
    pair.machine->cpu_quota = 4;
    expect_accepted(&pair);
    /* more workers than the quota granted, as was asked: the same quota is no change */
    pair = pair_of(SMALL);
    pair.machine->cpu_quota = pair.plan->machine.cpu_quota = 2.5;
    expect_accepted(&pair);
}

Test(plan_check, another_cpu)
{
    struct pair pair = pair_of(SMALL);

    strcpy(pair.machine->cpu_model, "AMD EPYC 7763");
    expect_changes(&pair, 1, "the CPU is \"AMD EPYC 7763\", and was \"AMD EPYC 7H12\"");
    pair = pair_of(SMALL);
    pair.machine->cpu_model[0] = 0; /* not known */
    expect_accepted(&pair);
}

Test(plan_check, other_distances)
{
    struct pair pair = pair_of(EPYC);

    cr_assert_not_null(pair.machine->distances);
    pair.machine->distances[2]++;
    expect_changes(&pair, 1, "the distance from memory node 0 to 2 is ");
    pair = pair_of(EPYC);
    free(pair.machine->distances);
    pair.machine->distances = NULL; /* not known */
    expect_accepted(&pair);
}

Test(plan_check, what_the_plan_does_not_use_may_change)
{
    struct numoe_machine *small = machine_of(SMALL), *larger;
    struct numoe_plan *plan = small_plan(small);
    struct pair pair = pair_of(SMALL);
    struct numoe_error error = NUMOE_ERROR_INIT;

    /* a second thread that has no worker */
    pair.machine->pus[1].allowed = false;
    expect_accepted(&pair);
    larger = machine_of("pack:3 [numa(memory=32GB)] core:2 pu:2");
    cr_expect_eq(numoe_plan_check(plan, larger, NULL, &error), 0, "%s", error.message);
    numoe_machine_free(larger);
    numoe_plan_free(plan);
    numoe_machine_free(small);
}

static void count_lines(void *user, enum numoe_log_level level, const char *message)
{
    cr_assert_eq(level, NUMOE_LOG_WARNING);
    cr_assert_not_null(strstr(message, "memory node "), "%s", message);
    ++*(uint32_t *)user;
}

Test(plan_check, many_changes_are_counted_and_logged)
{
    struct pair pair = pair_of("numa:12(memory=16GB) core:1 pu:1");
    struct numoe_error error = NUMOE_ERROR_INIT;
    uint32_t lines = 0, shown = 0;
    struct numoe_log log = {count_lines, &lines};
    char words[32];

    for (uint32_t i = 0; i < 12; i++)
        pair.machine->nodes[i].capacity_bytes = (uint64_t)8e9;
    cr_assert_eq(numoe_plan_check(pair.plan, pair.machine, &log, &error), -ESTALE);
    for (uint32_t i = 0; i < 12; i++) {
        snprintf(words, sizeof words, "memory node %u has", i);
        shown += strstr(error.message, words) != NULL;
    }
    cr_assert_eq(shown + lines, 12, "%u shown, %u logged", shown, lines);
    cr_assert(shown >= 4 && shown <= 8, "%s", error.message);
    snprintf(words, sizeof words, "; and %u more", lines);
    cr_assert_not_null(strstr(error.message, words), "%s", error.message);
    expect_changes(&pair, 12, "memory node 11 has 7.45 GiB");
}

/* A plan of a file stands on the machine whatever file or memory it was described by. */
Test(plan_file, one_machine_in_two_descriptions)
{
    struct numoe_machine *xml = machine_of(EPYC), *saved;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan, *other;
    char path[128];

    request.shape = v4_flash;
    plan = plan_of(xml, &request);
    snprintf(path, sizeof path, "%s/box.json", directory);
    cr_assert_eq(numoe_machine_save(xml, path, &error), 0, "%s", error.message);
    saved = machine_of(path);
    other = plan_of(saved, &request);
    cr_assert_str_neq(plan->source, other->source);
    cr_assert_eq(numoe_plan_check(plan, saved, NULL, &error), 0, "%s", error.message);
    cr_assert_eq(numoe_plan_check(other, xml, NULL, &error), 0, "%s", error.message);
    numoe_plan_free(plan);
    numoe_plan_free(other);
    numoe_machine_free(saved);
    numoe_machine_free(xml);
}
