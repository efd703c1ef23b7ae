/* What can be done with a machine. SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include "support/topo_checks.h"

#include "draw_plan.h"
#include "predict.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Small enough to look at every slice, and uneven; and one of a real size. */
static const struct numoe_expert_shape small = {.layers = 3,
                                                .experts = 5,
                                                .slices = 7,
                                                .slice_bytes = 8192,
                                                .hidden = 64,
                                                .experts_per_token = 2,
                                                .expert_bytes = 128};
static const struct numoe_expert_shape large = {.layers = 43,
                                                .experts = 256,
                                                .slices = 64,
                                                .slice_bytes = 208896,
                                                .hidden = 4096,
                                                .experts_per_token = 6};

/* Pictures and predictions of a large machine take long and show nothing new; of one in so many
 * small ones they are made. */
enum { MOST_DRAWN = 64, ONE_OF = 8 };

struct use {
    const struct numoe_machine *machine;
    const char *input;
    uint32_t *nodes; /* OS indices of nodes that may be named in a request */
    uint32_t node_count;
    uint32_t luck; /* of the input */
};

/* ---- what a plan is good for ---- */

static void print_plan(const struct use *use, const struct numoe_plan *plan)
{
    struct fuzz_print print;
    char *text;

    fuzz_print_open(&print);
    numoe_plan_print(plan, print.out);
    text = fuzz_print_take(&print);
    fuzz_check_text(text, use->input);
    free(text);
}

/* A plan as JSON is the whole plan, and the machine is the one that it was made for. */
static void reload_plan(const struct use *use, const struct numoe_plan *plan)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *loaded = NULL;
    struct fuzz_print once, twice;

    fuzz_print_open(&once);
    check_that(!numoe_plan_print_json(plan, once.out));
    fuzz_print_take(&once);
    check_that(!numoe_plan_parse(once.text, once.bytes, NULL, &loaded, &error),
               "a plan's JSON is refused: %s", error.message);
    check_plan(use->machine, loaded);
    fuzz_print_open(&twice);
    check_that(!numoe_plan_print_json(loaded, twice.out));
    fuzz_print_take(&twice);
    check_that(!strcmp(once.text, twice.text), "loaded and printed again it differs");
    check_that(!numoe_plan_check(loaded, use->machine, NULL, &error), "%s", error.message);
    free(once.text);
    free(twice.text);
    numoe_plan_free(loaded);
}

static void explain(const struct use *use, const struct numoe_plan *plan, const char *what)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct fuzz_print print;
    char *text;
    int rc;

    fuzz_print_open(&print);
    rc = numoe_plan_explain(use->machine, plan, what, print.out, &error);
    text = fuzz_print_take(&print);
    check_that(rc == 0, "%s: %s", what, error.message);
    check_that(*text, "%s", what);
    fuzz_check_text(text, use->input);
    free(text);
}

static void explain_all(const struct use *use, const struct numoe_plan *plan)
{
    const struct numoe_machine *machine = use->machine;
    char what[64];

    for (uint32_t i = 0; i < machine->node_count && i < 8; i++) {
        snprintf(what, sizeof what, "node:%u", machine->nodes[i].os_index);
        explain(use, plan, what);
    }
    explain(use, plan, "worker:0");
    snprintf(what, sizeof what, "worker:%u", plan->worker_count - 1);
    explain(use, plan, what);
    if (!plan->shape.layers)
        return;
    explain(use, plan, "expert:0.0");
    snprintf(what, sizeof what, "expert:%u.%u", (unsigned)plan->shape.layers - 1,
             (unsigned)plan->shape.experts - 1);
    explain(use, plan, what);
}

static void check_cell(const struct numoe_prediction_cell *cell)
{
    check_that(*cell->why, "%s, %u tokens: no reason", numoe_way_name(cell->way), cell->tokens);
    if (!cell->possible)
        return;
    check_that(isfinite(cell->layer_ms) && cell->layer_ms > 0 && isfinite(cell->pass_ms) &&
                   isfinite(cell->tokens_per_s) && cell->tokens_per_s > 0,
               "%s, %u tokens: %g ms a layer, %g tokens/s", numoe_way_name(cell->way), cell->tokens,
               cell->layer_ms, cell->tokens_per_s);
    check_that(cell->gpu_part >= 0 && cell->gpu_part <= 1 + 1e-9 && cell->cached_part >= 0 &&
                   cell->cached_part <= 1 + 1e-9,
               "%s: parts %g, %g", numoe_way_name(cell->way), cell->gpu_part, cell->cached_part);
    for (unsigned b = 0; b < NUMOE_BOUNDS; b++)
        check_that(isfinite(cell->parts_ms[b]) && cell->parts_ms[b] >= 0, "%s: %s takes %g ms",
                   numoe_way_name(cell->way), numoe_bound_name(b), cell->parts_ms[b]);
}

static void draw(const struct use *use, const struct numoe_plan *plan,
                 const struct numoe_prediction *prediction)
{
    struct draw_subject subject = {"fuzz", "", use->machine, plan, prediction};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct draw_layout *layout = NULL;
    struct draw_page *page = NULL;
    struct fuzz_print print;
    char *text;

    check_that(!draw_layout_create(&subject, &layout, &error), "%s", error.message);
    check_that(!draw_page_create(layout, &page, &error), "%s", error.message);
    fuzz_print_open(&print);
    check_that(!draw_svg(page, print.out, &error), "%s", error.message);
    text = fuzz_print_take(&print);
    fuzz_check_text(text, use->input);
    free(text);
    draw_page_free(page);
    draw_layout_free(layout);
}

static void predict(const struct use *use, const struct numoe_plan *plan)
{
    struct numoe_predict_gpu gpu = {"a10", plan->nodes[0].os_index, 25, (uint64_t)24 << 30, 0, 0};
    struct numoe_predict_options options = NUMOE_PREDICT_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_prediction *prediction = NULL;

    /* with the GPUs that the machine has, as a picture too, then with one that is given */
    for (uint32_t given = 0; given < 2; given++) {
        struct fuzz_print print;
        char *text;
        int rc;

        options.gpus = given ? &gpu : NULL;
        options.gpu_count = given;
        rc = numoe_predict(use->machine, plan, &options, &prediction, &error);
        check_that(rc == 0, "%s: %s", error.where, error.message);
        for (uint32_t i = 0; i < prediction->cell_count; i++)
            check_cell(&prediction->cells[i]);
        for (uint32_t i = 0; i < prediction->figure_count; i++)
            check_that(isfinite(prediction->figures[i].value) && prediction->figures[i].value >= 0,
                       "%s is %g", prediction->figures[i].name, prediction->figures[i].value);
        fuzz_print_open(&print);
        numoe_prediction_print(prediction, print.out);
        text = fuzz_print_take(&print);
        fuzz_check_text(text, use->input);
        free(text);
        fuzz_print_open(&print);
        check_that(!numoe_prediction_print_json(plan, prediction, print.out));
        text = fuzz_print_take(&print);
        fuzz_check_json(text);
        free(text);
        if (!given)
            draw(use, plan, prediction);
        numoe_prediction_free(prediction);
    }
}

/* ---- plans ---- */

/* A plan as asked, or NULL with an error that says why there is none. */
static struct numoe_plan *plan_of(const struct use *use, const struct numoe_plan_request *request)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *plan = NULL;
    int rc = numoe_plan_create(use->machine, request, &plan, &error);

    if (rc) {
        fuzz_check_error(rc, &error);
        check_that(rc == -ENOSPC || rc == -EINVAL, "%d: %s", rc, error.message);
        return NULL;
    }
    check_plan(use->machine, plan);
    if (request->shape.slices == small.slices)
        check_boundaries(plan);
    return plan;
}

/* Whether workers and nodes of two plans are the same. */
static bool same_places(const struct numoe_plan *a, const struct numoe_plan *b)
{
    if (a->node_count != b->node_count || a->worker_count != b->worker_count)
        return false;
    for (uint32_t w = 0; w < a->worker_count; w++)
        if (a->workers[w].pu != b->workers[w].pu ||
            a->workers[w].plan_node != b->workers[w].plan_node)
            return false;
    for (uint32_t n = 0; n < a->node_count; n++)
        if (a->nodes[n].node != b->nodes[n].node || a->nodes[n].lanes != b->nodes[n].lanes)
            return false;
    return true;
}

/* Nothing asked for: there must be a plan wherever some node serves some CPU. */
static void plan_by_default(const struct use *use)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_plan *empty = plan_of(use, &request), *full;
    bool served = false;

    for (uint32_t i = 0; i < use->machine->node_count; i++)
        served |= use->machine->nodes[i].pu_count != 0;
    check_that(served == (empty != NULL), "%s", served ? "no plan" : "a plan for no CPU");
    if (!empty)
        return;
    print_plan(use, empty);
    reload_plan(use, empty);
    request.shape = small;
    full = plan_of(use, &request);
    if (full) {
        check_that(same_places(empty, full), "nodes or workers depend on the model");
        print_plan(use, full);
        reload_plan(use, full);
        explain_all(use, full);
        if (use->luck % ONE_OF == 0 && use->machine->pu_count <= MOST_DRAWN)
            predict(use, full);
    }
    numoe_plan_free(full);
    request.shape = large;
    full = plan_of(use, &request);
    if (full)
        check_that(same_places(empty, full), "nodes or workers depend on the model");
    numoe_plan_free(full);
    numoe_plan_free(empty);
}

static void plan_by_request(const struct use *use)
{
    const struct numoe_machine *machine = use->machine;
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    uint32_t last = machine->pus[machine->pu_count - 1].os_index;
    uint32_t first = machine->pus[0].os_index;

    request.shape = small;
    request.smt = true;
    request.keep_free_bytes = 4096;
    request.lanes_per_worker = 3;
    request.reserved_cpus = &last;
    request.reserved_count = 1;
    numoe_plan_free(plan_of(use, &request));
    request.smt = false;
    request.workers = 7;
    request.nodes = use->nodes;
    request.node_count = use->node_count;
    numoe_plan_free(plan_of(use, &request));
    request.workers = machine->pu_count % 61 + 1;
    request.nodes = NULL;
    request.node_count = request.reserved_count = 0;
    request.cpus = &first;
    request.cpu_count = 1;
    numoe_plan_free(plan_of(use, &request));
}

/* The memory of an accelerator, and of nodes that may not be used, is refused by name. */
static void refuse_nodes(const struct use *use)
{
    for (uint32_t i = 0; i < use->machine->node_count; i++) {
        const struct numoe_node *node = &use->machine->nodes[i];
        struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

        if (node->allowed && node->kind != NUMOE_NODE_GPU)
            continue;
        request.nodes = &node->os_index;
        request.node_count = 1;
        check_that(!plan_of(use, &request), "node %u was used", node->os_index);
    }
}

static void list_nodes(struct use *use)
{
    use->nodes = calloc(use->machine->node_count, sizeof *use->nodes);
    check_that(use->nodes);
    for (uint32_t i = 0; i < use->machine->node_count; i++) {
        const struct numoe_node *node = &use->machine->nodes[i];

        if (node->allowed && node->kind != NUMOE_NODE_GPU)
            use->nodes[use->node_count++] = node->os_index;
    }
}

/* ---- the machine ---- */

static void print_machine(const struct use *use)
{
    const struct numoe_machine *machine = use->machine;
    size_t square = (size_t)machine->node_count * machine->node_count;
    struct fuzz_print print;
    bool odd = false;
    char *text;

    for (size_t i = 0; machine->distances && i < square; i++)
        odd |= machine->distances[i] == UINT32_MAX;
    fuzz_print_open(&print);
    numoe_machine_print(machine, print.out);
    text = fuzz_print_take(&print);
    if (!odd)
        fuzz_check_text(text, use->input);
    free(text);
    fuzz_print_open(&print);
    check_that(!numoe_machine_print_json(machine, print.out));
    text = fuzz_print_take(&print);
    fuzz_check_json(text);
    free(text);
}

static char *read_back(const char *path)
{
    FILE *file = fopen(path, "r");
    struct stat info;
    char *text;

    check_that(file && !fstat(fileno(file), &info), "%s", path);
    text = malloc((size_t)info.st_size + 1);
    check_that(text && fread(text, 1, (size_t)info.st_size, file) == (size_t)info.st_size);
    text[info.st_size] = 0;
    fclose(file);
    return text;
}

static struct numoe_machine *load_saved(const char *path)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine = NULL;

    check_that(!numoe_machine_load(path, &machine, &error), "what was saved is refused: %s",
               error.message);
    return machine;
}

/* Saved and loaded it is the same, and saved again the same bytes. @return the loaded one */
static struct numoe_machine *round_trip(const struct numoe_machine *machine)
{
    const char *once = fuzz_path("once.json"), *twice = fuzz_path("twice.json");
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *loaded;
    char *a, *b;

    check_that(!numoe_machine_save(machine, once, &error), "%s", error.message);
    loaded = load_saved(once);
    check_same_machine(machine, loaded);
    check_that(!numoe_machine_save(loaded, twice, &error), "%s", error.message);
    a = read_back(once);
    b = read_back(twice);
    check_that(!strcmp(a, b), "saved again it differs");
    free(a);
    free(b);
    return loaded;
}

/* The loaded one gives the same plan; with other domains it is still a machine. */
static void use_again(const struct use *use, struct numoe_machine *loaded)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct use again = {.machine = loaded, .input = use->input};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_plan *a, *b;
    int rc;

    request.shape = small;
    a = plan_of(use, &request);
    b = plan_of(&again, &request);
    check_that(!a == !b && (!a || same_places(a, b)), "what was saved gives another plan");
    for (uint32_t n = 0; a && n <= a->node_count; n++)
        check_that(a->cumulative[n] == b->cumulative[n], "what was saved gives another plan");
    numoe_plan_free(a);
    numoe_plan_free(b);
    rc = numoe_machine_regroup(loaded, 2, &error);
    if (rc) {
        fuzz_check_error(rc, &error);
        return;
    }
    check_machine(loaded);
    numoe_plan_free(plan_of(&again, &request));
}

static uint32_t luck_of(const char *input)
{
    uint32_t hash = 2166136261u;

    for (; *input; input++)
        hash = (hash ^ (uint8_t)*input) * 16777619u;
    return hash >> 16;
}

/* Larger than any machine, where a plan takes seconds with sanitizers: one is enough. */
static void plan_huge(const struct use *use)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;

    request.shape = small;
    numoe_plan_free(plan_of(use, &request));
}

void fuzz_use_machine(struct numoe_machine *machine, const char *input)
{
    const bool huge = (uint64_t)machine->node_count * machine->pu_count > 1 << 18;
    struct use use = {.machine = machine, .input = input, .luck = luck_of(input)};
    struct numoe_machine *loaded;

    check_machine(machine);
    print_machine(&use);
    list_nodes(&use);
    if (huge)
        plan_huge(&use);
    else
        plan_by_default(&use);
    loaded = round_trip(machine);
    if (!huge) {
        plan_by_request(&use);
        refuse_nodes(&use);
        use_again(&use, loaded);
    }
    numoe_machine_free(loaded);
    numoe_machine_free(machine);
    free(use.nodes);
}
