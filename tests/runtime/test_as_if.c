/* Another machine's plan replayed here: its bits, whatever does the work. */
#include <criterion/criterion.h>
#include <errno.h>

#include "model.h"
#include "numoe.h"
#include "runtime/cli_answer.h"
#include "support/fixture.h"

/* 32 memory nodes in 8 domains, 128 cores. */
#define DUAL_IN_DOMAINS NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml"

enum { HIDDEN = 96, EXPERTS = 7, INNER = 1280 };

static const uint64_t counts[] = {1, 5, 16, 200};

enum { COUNTS = sizeof counts / sizeof counts[0], ALL_TOKENS = 222 };

static char *plan_of(const struct fixture *f, const char *topology, enum numoe_form form)
{
    struct numoe_plan_request request = NUMOE_PLAN_REQUEST_INIT;
    struct numoe_machine *machine = NULL;
    struct numoe_plan *plan = NULL;
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    request.form = form;
    cr_assert_eq(numoe_model_expert_shape(&f->desc, &request.shape, NULL), 0);
    cr_assert_eq(numoe_machine_load(topology, &machine, NULL), 0);
    cr_assert_eq(numoe_plan_create(machine, &request, &plan, NULL), 0);
    cr_assert_eq(numoe_plan_print_json(plan, out), 0);
    fclose(out);
    numoe_plan_free(plan);
    numoe_machine_free(machine);
    return text;
}

/* Outputs of batches of every size, one after another; freed by the caller. */
static float *outputs_of(struct fixture *f, const struct numoe_options *options)
{
    float *all = malloc(ALL_TOKENS * HIDDEN * sizeof *all), *at = all;

    open_model(f, options);
    for (size_t i = 0; i < COUNTS; i++) {
        random_state = 500 + i;
        struct call c = call_make(counts[i], 3, HIDDEN, EXPERTS, true);
        struct numoe_batch b = call_batch(&c);
        run(f, 0, &b);
        cr_assert_leq(check(f, 0, &c, counts[i] / 2 + 1), 2e-2);
        memcpy(at, c.out, counts[i] * HIDDEN * sizeof *at);
        at += counts[i] * HIDDEN;
        call_free(&c);
    }
    return all;
}

static void check_machine(const char *topology, enum numoe_form form,
                          enum numoe_arithmetic arithmetic)
{
    static const uint32_t workers[] = {1, 2, 7, 64};
    /* this machine, and ones with less, as many and more nodes than the plan */
    static const char *const here[] = {NULL, "numa:3(memory=64GB) core:2 pu:1",
                                       "numa:40(memory=8GB) core:1 pu:1"};
    struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, true, arithmetic);
    struct numoe_options direct = NUMOE_OPTIONS_INIT;
    const size_t all = sizeof workers / sizeof workers[0];
    float *want, *got;
    char *text;

    experts_make(&f, 61);
    direct.topology = topology;
    direct.form = form;
    direct.isa = "avx2";
    direct.threads = 2;
    want = outputs_of(&f, &direct);
    close_model(&f);
    text = plan_of(&f, topology, form);
    for (size_t h = 0; h < sizeof here / sizeof here[0]; h++)
        for (size_t w = h; w < (h ? h + 1 : all); w++) {
            struct numoe_options options = NUMOE_OPTIONS_INIT;
            struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
            uint64_t bytes = 0;

            options.topology = here[h];
            options.plan = text;
            options.plan_bytes = strlen(text);
            options.as_if = true;
            options.workers = workers[w];
            options.isa = "avx2";
            options.spin_ns = 1000;
            options.chaos_seed = w % 2;
            got = outputs_of(&f, &options);
            cr_assert_arr_eq(got, want, ALL_TOKENS * HIDDEN * sizeof *want,
                             "%s as if %s, %u workers, mode %d", here[h] ? here[h] : "this machine",
                             topology, workers[w], arithmetic);
            free(got);
            numoe_model_info(f.model, &info);
            cr_assert_eq(info.worker_count, workers[w]);
            for (uint32_t n = 0; n < info.node_count; n++) {
                struct numoe_node_info node = NUMOE_NODE_INFO_INIT;

                cr_assert_eq(numoe_model_node(f.model, n, &node), 0);
                bytes += node.planned_bytes;
            }
            cr_assert_eq(bytes, info.resident_bytes);
            close_model(&f);
        }
    free(text);
    free(want);
    experts_free(&f);
}

Test(as_if, thirty_two_nodes_fast, .timeout = 240)
{
    check_machine(DUAL_IN_DOMAINS, NUMOE_FORM_EVERY_NODE, NUMOE_FAST);
}

Test(as_if, thirty_two_nodes_exact, .timeout = 240)
{
    check_machine(DUAL_IN_DOMAINS, NUMOE_FORM_EVERY_NODE, NUMOE_EXACT);
}

Test(as_if, thirty_two_nodes_of_groups, .timeout = 240)
{
    check_machine(DUAL_IN_DOMAINS, NUMOE_FORM_GROUPS, NUMOE_FAST);
}

Test(as_if, nodes_of_whole_experts, .timeout = 240)
{
    check_machine(DUAL_IN_DOMAINS, NUMOE_FORM_EXPERTS, NUMOE_FAST);
}

Test(as_if, one_node_on_many, .timeout = 240)
{
    check_machine("pack:1 [numa(memory=64GB)] core:3 pu:1", NUMOE_FORM_AUTO, NUMOE_FAST);
}

Test(as_if, what_was_read_is_counted_on_the_nodes_here, .timeout = 60)
{
    static const char *const plans[] = {DUAL_IN_DOMAINS, "core:2 pu:1"};

    for (size_t p = 0; p < 2; p++) {
        struct fixture f = fixture_of(1, EXPERTS, HIDDEN, INNER, true, NUMOE_FAST);
        struct numoe_options options = NUMOE_OPTIONS_INIT;
        struct numoe_stats all = NUMOE_STATS_INIT;
        uint64_t read = 0, planned = 0, total;
        char *text = plan_of(&f, plans[p], NUMOE_FORM_AUTO);

        experts_make(&f, 62);
        options.topology = "numa:3(memory=64GB) core:2 pu:1";
        options.plan = text;
        options.plan_bytes = strlen(text);
        options.as_if = true;
        free(outputs_of(&f, &options));
        numoe_stats_get(f.context, &all);
        cr_assert_eq(all.nodes, 3);
        for (uint32_t n = 0; n < 3; n++) {
            struct numoe_node_stats node = NUMOE_NODE_STATS_INIT;

            cr_assert_eq(numoe_stats_node(f.context, n, &node), 0);
            cr_expect_gt(node.planned_bytes, 0, "node %u", n);
            read += node.expert_bytes;
            planned += node.planned_bytes;
        }
        cr_expect_eq(read, all.expert_bytes);
        struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
        numoe_model_info(f.model, &info);
        total = info.resident_bytes;
        cr_expect_eq(planned, total);
        close_model(&f);
        free(text);
        experts_free(&f);
    }
}

Test(as_if, what_cannot_be_is_refused, .timeout = 60)
{
    struct fixture f = fixture_of(2, EXPERTS, HIDDEN, INNER, true, NUMOE_FAST);
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe *context = NULL;
    struct numoe_model *model = NULL;
    char *text = plan_of(&f, DUAL_IN_DOMAINS, NUMOE_FORM_AUTO);

    options.as_if = true;
    cr_expect_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_expect_str_eq(error.where, "as_if");
    options.plan = text;
    options.plan_bytes = strlen(text) - 2;
    cr_expect_eq(numoe_open(&options, &context, &error), -EBADMSG);
    options.plan_bytes = strlen(text);
    options.form = NUMOE_FORM_EXPERTS;
    cr_expect_eq(numoe_open(&options, &context, &error), -EINVAL);
    cr_expect(strstr(error.message, "form"), "%s", error.message);
    options.form = NUMOE_FORM_AUTO;

    /* 2 layers of 7 experts take 2.7 MB */
    options.topology = "numa:2(memory=1MB) core:1 pu:1";
    options.keep_free_bytes = 1;
    cr_assert_eq(numoe_open(&options, &context, &error), 0, "%s", error.message);
    cr_expect_eq(numoe_model_create(context, &f.desc, &model, &error), -ENOSPC, "%s",
                 error.message);
    f.desc.layers = 1;
    cr_expect_eq(numoe_model_create(context, &f.desc, &model, &error), -ESTALE);
    cr_expect(strstr(error.message, "layers: 2, and 1"), "%s", error.message);
    numoe_close(context);
    free(text);
}

static void digest_of(const char *directory, char digest[64], const char *first, const char *second,
                      const char *third, const char *fourth)
{
    struct answer a = numoe("run", directory, "--once", "--json", "--isa", "avx2", "--tokens",
                            "1,5,16,200", first, second, third, fourth, NULL);
    json_t *root = json_loads(a.out, 0, NULL);

    cr_assert_eq(a.status, 0, "%s", a.err);
    snprintf(digest, 64, "%s",
             json_string_value(json_object_get(json_object_get(root, "check"), "digest")));
    json_decref(root);
    free(a.out);
    free(a.err);
}

Test(as_if, run_gives_the_digest_of_the_other_machine, .timeout = 240)
{
    char directory[] = "/tmp/numoe-as-if-XXXXXX", path[64], command[80];
    char want[64], got[64], without[64];
    struct answer a;
    FILE *file;

    cr_assert_not_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/plan", directory);
    a = numoe("synth", "--model", "v4-flash", "--layers", "1", "--experts", "4", directory, NULL);
    cr_assert_eq(a.status, 0, "%s", a.err);
    free(a.out);
    free(a.err);
    a = numoe("plan", "--json", "--topology", DUAL_IN_DOMAINS, directory, NULL);
    cr_assert_eq(a.status, 0, "%s", a.err);
    file = fopen(path, "w");
    fputs(a.out, file);
    fclose(file);
    free(a.out);
    free(a.err);

    digest_of(directory, want, "--topology", DUAL_IN_DOMAINS, "--threads", "3");
    digest_of(directory, got, "--as-if", path, "--workers", "7");
    digest_of(directory, without, "--workers", "1", NULL, NULL);
    cr_expect_str_eq(got, want);
    cr_expect_str_neq(without, want);

    a = numoe("run", directory, "--plan", path, "--as-if", path, NULL);
    cr_expect_eq(a.status, 2);
    free(a.out);
    free(a.err);
    a = numoe("run", directory, "--as-if", "/nonexistent/plan", NULL);
    cr_expect_eq(a.status, 4, "%s", a.err);
    free(a.out);
    free(a.err);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    cr_assert_eq(system(command), 0);
}
