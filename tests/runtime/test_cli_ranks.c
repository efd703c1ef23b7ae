/* numoe plan for ranks of tensor and expert parallelism, and its forms of sharding. */
#include "runtime/cli_answer.h"

#include "numoe_topo.h"

#define EPYC NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml"
#define MODEL "plan", "--model", "v4-flash", "--topology", EPYC

static json_t *json_of(struct answer *answer)
{
    json_error_t where;
    json_t *root = json_loads(answer->out, 0, &where);

    cr_assert_eq(answer->status, 0, "%s", answer->err);
    cr_assert_not_null(root, "%s", where.text);
    forget(answer);
    return root;
}

/* What all ranks hold makes up the model, and no node is used twice. */
static void check_ranks(json_t *all, uint64_t tp, uint64_t ep)
{
    json_int_t bytes = 0, cells = 0;
    bool used[32] = {false};
    size_t r, i;
    json_t *plan, *node;

    cr_assert_eq(json_array_size(all), tp * ep);
    json_array_foreach(all, r, plan)
    {
        json_t *range = json_object_get(plan, "range");
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_plan *loaded = NULL;
        char *text = json_dumps(plan, 0);

        cr_assert_eq(integer(range, "first_slice"), (json_int_t)(64 * (r % tp) / tp));
        cr_assert_eq(integer(range, "end_slice"), (json_int_t)(64 * (r % tp + 1) / tp));
        cr_assert_eq(integer(range, "first_expert"), (json_int_t)(256 * (r / tp) / ep));
        cr_assert_eq(integer(range, "end_expert"), (json_int_t)(256 * (r / tp + 1) / ep));
        cells += (integer(range, "end_slice") - integer(range, "first_slice")) *
                 (integer(range, "end_expert") - integer(range, "first_expert"));
        bytes += integer(plan, "total_bytes");
        json_array_foreach(json_object_get(plan, "nodes"), i, node)
        {
            json_int_t os = integer(node, "os_index");

            cr_assert(os < 32 && !used[os]);
            used[os] = true;
        }
        /* each is a plan that its process can be given */
        cr_assert_eq(numoe_plan_parse(text, strlen(text), NULL, &loaded, &error), 0, "%s",
                     error.message);
        numoe_plan_free(loaded);
        free(text);
    }
    for (i = 0; i < 32; i++)
        cr_assert(used[i]);
    cr_assert_eq(cells, 64 * 256);
    cr_assert_eq(bytes, (json_int_t)(43ull * 256 * 64 * 208896));
    json_decref(all);
}

Test(cli_ranks, hold_the_model_once_on_nodes_of_their_own, .timeout = 120)
{
    struct answer answer = numoe(MODEL, "--json", "--tp", "2", NULL);

    check_ranks(json_of(&answer), 2, 1);
    answer = numoe(MODEL, "--json", "--ep", "3", NULL);
    check_ranks(json_of(&answer), 1, 3);
    answer = numoe(MODEL, "--json", "--tp", "4", "--ep", "2", NULL);
    check_ranks(json_of(&answer), 4, 2);
    answer = numoe(MODEL, "--json", "--tp", "2", "--rank-nodes", "1:0-9", "--rank-nodes", "0:10-31",
                   NULL);
    check_ranks(json_of(&answer), 2, 1);
}

/* Packages first, then whole memory domains. */
Test(cli_ranks, nodes_are_dealt_by_package_and_domain, .timeout = 120)
{
    struct answer answer = numoe(MODEL, "--json", "--tp", "2", "--ep", "2", NULL);
    json_t *all = json_of(&answer), *plan, *node;
    size_t r, i;

    json_array_foreach(all, r, plan)
    {
        json_array_foreach(json_object_get(plan, "nodes"), i, node)
            cr_assert_eq(integer(node, "os_index"), (json_int_t)(8 * r + i));
        cr_assert_eq(i, 8);
    }
    json_decref(all);
}

Test(cli_ranks, one_rank_is_an_ordinary_plan, .timeout = 120)
{
    struct answer answer = numoe(MODEL, "--tp", "2", "--rank", "1", NULL), all;

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "of which: slices 32-63 of experts 0-255"));
    cr_assert_not_null(strstr(answer.out, "predicted, on the CPUs"));
    forget(&answer);
    answer = numoe(MODEL, "--tp", "2", "--rank", "1", "--explain", "expert:3.200", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "32 slices of 208896 bytes"), "%s", answer.out);
    cr_assert_not_null(strstr(answer.out, "slices 32-33"), "%s", answer.out);
    forget(&answer);
    answer = numoe(MODEL, "--ep", "2", "--rank", "1", "--explain", "expert:3.100", NULL);
    cr_assert_not_null(strstr(answer.out, "is held elsewhere"), "%s", answer.out);
    forget(&answer);
    all = numoe(MODEL, "--tp", "2", NULL);
    cr_assert_eq(all.status, 0, "%s", all.err);
    cr_assert_not_null(strstr(all.out, "2 ranks: 2 tensor parallel"));
    cr_assert_not_null(strstr(all.out, "0-31       0-255         0-15"), "%s", all.out);
    cr_assert_not_null(strstr(all.out, "total"));
    cr_assert_null(strstr(all.out, "share"), "no rank's channels are another's: %s", all.out);
    forget(&all);
    all = numoe(MODEL, "--tp", "3", "--rank-nodes", "0:0-9", "--rank-nodes", "1:10-20",
                "--rank-nodes", "2:21-31", NULL);
    cr_assert_not_null(strstr(all.out, "ranks 0 and 1 share memory channels"), "%s", all.out);
    forget(&all);
}

static void refused(struct answer answer, int status, const char *words)
{
    cr_expect_eq(answer.status, status, "%s", answer.err);
    cr_expect_str_eq(answer.out, "");
    cr_expect_not_null(strstr(answer.err, words), "\"%s\" is not in: %s", words, answer.err);
    forget(&answer);
}

Test(cli_ranks, what_cannot_be_is_refused, .timeout = 240)
{
    refused(numoe(MODEL, "--tp", "33", NULL), 2, "rank 32 has no node");
    refused(numoe(MODEL, "--tp", "8", "--ep", "5", NULL), 2, "40 ranks need as many memory nodes");
    refused(numoe(MODEL, "--tp", "65", NULL), 2, "64 slices");
    refused(numoe(MODEL, "--ep", "257", NULL), 2, "256 experts");
    refused(numoe(MODEL, "--tp", "64", "--ep", "64", NULL), 2, "more than 1024 ranks");
    refused(numoe(MODEL, "--rank", "0", NULL), 2, "go with --tp or --ep");
    refused(numoe(MODEL, "--tp", "2", "--rank", "2", NULL), 2, "there are 2");
    refused(numoe(MODEL, "--tp", "2", "--cpus", "0-3", NULL), 2, "--cpus goes without");
    refused(numoe(MODEL, "--tp", "2", "--explain", "node:1", NULL), 2, "--rank says whose");
    refused(numoe(MODEL, "--tp", "2", "--rank-nodes", "0:0-3", NULL), 2, "rank 1 has no node");
    refused(numoe(MODEL, "--tp", "2", "--rank-nodes", "2:0-3", NULL), 2, "no rank 2 of 2");
    refused(numoe(MODEL, "--tp", "2", "--rank-nodes", "0:0-3", "--rank-nodes", "1:3-5", NULL), 2,
            "node 3 of rank 1 is another rank's too");
    refused(numoe(MODEL, "--tp", "2", "--rank-nodes", "0:0-3", "--nodes", "1", NULL), 2,
            "goes without --nodes");
    refused(numoe(MODEL, "--tp", "2", "--rank-nodes", "0:0-15", "--rank-nodes", "1:16-32", NULL), 2,
            "rank 1: there is no memory node 32");
    refused(numoe(MODEL, "--tp", "2", "--rank-nodes", "0:0-15", "--rank-nodes", "1:31", NULL), 3,
            "rank 1: the experts do not fit");
}

/* ---- forms ----------------------------------------------------------------------------------- */

Test(cli_form, is_what_was_asked_for, .timeout = 120)
{
    static const struct {
        const char *form, *word;
        json_int_t shards;
    } cases[] = {{"every", "every", 1},
                 {"groups", "groups", 2},
                 {"groups:8", "groups", 8},
                 {"groups:5", "groups", 5},
                 {"experts", "experts", 32}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct answer answer =
            numoe(MODEL, "--json", "--tokens", "1", "--form", cases[i].form, NULL);
        json_t *root = json_of(&answer), *forms = json_object_get(root, "forms");

        cr_expect_str_eq(json_string_value(json_object_get(root, "form")), cases[i].word);
        cr_expect_eq(json_array_size(json_object_get(root, "shards")), (size_t)cases[i].shards);
        cr_expect(json_is_true(json_object_get(json_array_get(forms, 0), "chosen")));
        cr_expect_geq(json_array_size(forms), 5);
        json_decref(root);
    }
    refused(numoe(MODEL, "--form", "groups:33", NULL), 2, "32 are used");
}

Test(cli_form, follows_what_it_is_optimized_for, .timeout = 120)
{
    static const char *const fields[] = {"decode_ms", "prefill_ms"}, *const words[] = {"decode",
                                                                                       "prefill"};

    for (int i = 0; i < 2; i++) {
        struct answer answer =
            numoe(MODEL, "--json", "--tokens", "1", "--optimize", words[i], NULL);
        json_t *root = json_of(&answer), *form;
        double chosen = 0;
        size_t n;

        json_array_foreach(json_object_get(root, "forms"), n, form)
        {
            double ms = json_real_value(json_object_get(form, fields[i]));

            if (n == 0)
                chosen = ms;
            else if (json_is_true(json_object_get(form, "executable")))
                cr_expect(chosen <= ms * 1.001, "%s: %g, and %g", words[i], chosen, ms);
        }
        json_decref(root);
    }
}
