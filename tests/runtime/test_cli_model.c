/* Which model numoe plan is asked about: by name, described, listed, refused. */
#include "runtime/cli_answer.h"

#include <inttypes.h>

#define SMALL_BOX "numa:4(memory=64GB) core:8 pu:1"

Test(cli_model, the_list_has_every_model_and_its_bytes, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "list", "--json", NULL), help, text;
    json_t *list = parse(&answer), *model;
    bool v3 = false;
    size_t i;

    help = numoe("--help", NULL);
    text = numoe("plan", "--model", "list", NULL);
    cr_assert_eq(text.status, 0, "%s", text.err);
    cr_assert_eq(json_array_size(list), 18);
    json_array_foreach(list, i, model)
    {
        const char *name = json_string_value(json_object_get(model, "name"));

        cr_expect(strstr(help.out, name), "%s", name);
        cr_expect(strstr(text.out, name), "%s", name);
        cr_expect_eq(integer(model, "total_bytes"), integer(model, "expert_bytes") *
                                                        integer(model, "experts") *
                                                        integer(model, "layers"));
        cr_expect_eq(integer(model, "token_bytes"), integer(model, "expert_bytes") *
                                                        integer(model, "experts_per_token") *
                                                        integer(model, "layers"));
        if (strcmp(name, "deepseek-v3"))
            continue;
        v3 = true;
        cr_expect_str_eq(json_string_value(json_object_get(model, "format")), "fp8");
        cr_expect(json_is_false(json_object_get(model, "kernels")));
        cr_expect_eq(integer(model, "hidden"), 7168);
    }
    cr_expect(v3);
    json_decref(list);
    forget(&answer);
    forget(&help);
    forget(&text);
}

Test(cli_model, each_is_planned_on_a_large_machine, .timeout = 300)
{
    struct answer answer = numoe("plan", "--model", "list", "--json", NULL);
    json_t *list = parse(&answer), *model;
    size_t i;

    json_array_foreach(list, i, model)
    {
        struct answer plan =
            numoe("plan", "--model", json_string_value(json_object_get(model, "name")),
                  "--topology", "pack:2 [numa(memory=1TB)] core:16 pu:1", "--json", NULL);
        json_t *root = parse(&plan), *predicted = json_object_get(root, "predicted");

        cr_expect_eq(integer(root, "total_bytes"), integer(model, "total_bytes"));
        /* what no kernel computes yet is marked */
        cr_expect_eq(json_is_null(json_object_get(predicted, "without_kernel")),
                     json_is_true(json_object_get(model, "kernels")));
        json_decref(root);
        forget(&plan);
    }
    json_decref(list);
    forget(&answer);
}

Test(cli_model, text_marks_what_has_no_kernel, .timeout = 60)
{
    struct answer answer =
        numoe("plan", "--model", "qwen3-30b", "--topology", SMALL_BOX, "--tokens", "1", NULL);

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect(strstr(answer.out, "BF16; 9.44 MB an expert, 57.98 GB in all, 3.62 GB read"));
    cr_expect(strstr(answer.out, "no kernel computes BF16 yet"));
    forget(&answer);
    answer = numoe("plan", "--model", "qwen3-30b", "--format", "mxfp4", "--topology", SMALL_BOX,
                   "--tokens", "1", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect(strstr(answer.out, "MXFP4; 2.51 MB an expert"), "%s", answer.out);
    cr_expect_not(strstr(answer.out, "no kernel"));
    forget(&answer);
}

Test(cli_model, a_shape_is_as_good_as_a_name, .timeout = 60)
{
    static const char *const formats[] = {NULL, "mxfp4"};
    struct answer named =
        numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--json", NULL);

    for (size_t i = 0; i < 2; i++) {
        struct answer shaped =
            numoe("plan", "--topology", DUAL_7H12, "--json", "--hidden", "4096", "--intermediate",
                  "2048", "--experts", "256", "--experts-per-token", "6", "--layers", "43",
                  formats[i] ? "--format" : NULL, formats[i], NULL);

        cr_assert_eq(shaped.status, 0, "%s", shaped.err);
        cr_expect_str_eq(shaped.out, named.out);
        forget(&shaped);
    }
    forget(&named);
}

Test(cli_model, a_shape_is_whole_and_alone, .timeout = 60)
{
    struct answer answer = numoe("plan", "--hidden", "4096", "--layers", "2", NULL);

    assert_refused(answer, 2, "--intermediate is missing");
    answer = numoe("plan", "--hidden", "4096", "--intermediate", "64", "--experts", "4",
                   "--experts-per-token", "5", "--layers", "1", NULL);
    assert_refused(answer, 2, "--experts-per-token 5 is more than --experts 4");
    answer = numoe("plan", "--hidden", "4096", "--intermediate", "64", "--experts", "4", "--layers",
                   "1", NULL);
    assert_refused(answer, 2, "--experts-per-token is missing");
    answer = numoe("plan", "--model", "v4-flash", "--intermediate", "64", NULL);
    assert_refused(answer, 2, "--intermediate");
    answer = numoe("plan", "--experts-per-token", "4", "some-directory", NULL);
    assert_refused(answer, 2, "--experts-per-token");
    answer = numoe("plan", "--format", "bf16", "some-directory", NULL);
    assert_refused(answer, 2, "--format goes with --model");
    /* more than an expert can be, and more than memory can be */
    answer = numoe("plan", "--hidden", "4294967295", "--intermediate", "64", "--experts", "4",
                   "--experts-per-token", "4", "--layers", "1", NULL);
    assert_refused(answer, 2, "hidden");
    answer = numoe("plan", "--hidden", "16777216", "--intermediate", "16777216", "--experts",
                   "1048576", "--experts-per-token", "4", "--layers", "1048576", NULL);
    assert_refused(answer, 2, "overflows");
}

Test(cli_model, running_what_has_no_kernel_is_refused_by_name, .timeout = 60)
{
    struct answer answer = numoe("bench", "--model", "deepseek-v3", "--experts", "8", NULL);

    assert_refused(answer, 1, "no kernel for FP8 block 128 yet");
    answer = numoe("synth", "--model", "qwen3-30b", "/tmp/never-written", NULL);
    assert_refused(answer, 1, "qwen3-30b");
}
