/* numoe plan as a user meets it: what goes where, pictures of it, and what it predicts. */
#include "runtime/cli_answer.h"

/* 43 layers of 256 experts of 64 slices of 208,896 bytes. */
#define V4_FLASH_BYTES (43ll * 256 * 64 * 208896)

Test(cli_plan, spreads_v4_flash_over_32_nodes, .timeout = 60)
{
    struct answer answer =
        numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--json", NULL);
    json_t *root = parse(&answer), *nodes = json_object_get(root, "nodes"), *node;
    json_int_t planned = 0, workers = 0;
    size_t i;

    cr_assert_eq(json_array_size(nodes), 32);
    json_array_foreach(nodes, i, node)
    {
        cr_assert_eq(integer(node, "os_index"), (json_int_t)i);
        cr_assert_eq(integer(node, "capacity_bytes"), 16000000000);
        cr_assert_eq(integer(node, "workers"), 4);
        /* 2 of 64 slices of every expert each: equal shares, exactly. */
        cr_assert_eq(integer(node, "planned_bytes"), V4_FLASH_BYTES / 32);
        planned += integer(node, "planned_bytes");
        workers += integer(node, "workers");
    }
    cr_assert_eq(planned, V4_FLASH_BYTES);
    cr_assert_eq(workers, 128);
    json_decref(root);
    forget(&answer);
}

Test(cli_plan, says_what_each_node_holds, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, NULL);

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "43 MoE layers of 256 experts"));
    cr_assert_not_null(strstr(answer.out, "147.17 GB"));
    forget(&answer);
}

Test(cli_plan, keeps_to_the_nodes_it_is_given, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--nodes",
                                 "16-31", "--json", NULL);
    json_t *root = parse(&answer), *nodes = json_object_get(root, "nodes"), *node;
    json_int_t planned = 0;
    size_t i;

    json_array_foreach(nodes, i, node)
    {
        if (integer(node, "os_index") < 16)
            cr_assert_eq(integer(node, "planned_bytes"), 0);
        planned += integer(node, "planned_bytes");
    }
    cr_assert_eq(planned, V4_FLASH_BYTES);
    json_decref(root);
    forget(&answer);
}

Test(cli_plan, what_does_not_fit_is_exit_code_3, .timeout = 60)
{
    struct answer answer =
        numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--nodes", "0", NULL);

    assert_refused(answer, 3, "short");
    answer =
        numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--keep-free", "12GB", NULL);
    assert_refused(answer, 3, "short");
}

#define BOX NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml"

Test(cli_plan, draws_what_it_plans, .timeout = 60)
{
    static char text[1 << 20];
    char directory[] = "/tmp/numoe-picture-XXXXXX", path[64], head[8] = {0};
    size_t length;
    struct answer answer;
    FILE *file;

    cr_assert_not_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/plan.svg", directory);
    answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--svg", path, NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "128 workers"));
    file = fopen(path, "re");
    cr_assert_not_null(file);
    cr_assert_eq(fread(head, 1, 4, file), 4);
    fclose(file);
    cr_assert_str_eq(head, "<svg");
    forget(&answer);
    unlink(path);

    /* the GPU that is predicted, not those that the machine has */
    answer = numoe("plan", "--model", "v4-flash", "--topology", BOX, "--gpu", "a10@4,25,24",
                   "--svg", path, NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "a10 at node 4 (25 GB/s, 24 GB)"));
    forget(&answer);
    file = fopen(path, "re");
    cr_assert_not_null(file);
    length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    cr_expect_not_null(strstr(text, ">GPU a10 at node 4<"));
    cr_expect_not_null(strstr(text, ">link 25.0 GB/s<"));
    cr_expect_not_null(strstr(text, ">22.4 GiB, all experts 5.9 s<"));
    cr_expect_not_null(strstr(text, ">695.5 tokens/s<"));
    cr_expect_not_null(strstr(text, "epyc-7h12-2s-32n.xml<"));
    cr_expect_null(strstr(text, BOX));
    cr_expect_null(strstr(text, "cuda"));
    unlink(path);

    snprintf(path, sizeof path, "%s/plan.png", directory);
    answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--png", path, NULL);
    if (answer.status) {
        assert_refused(answer, 1, "built without cairo");
    } else {
        file = fopen(path, "re");
        cr_assert_not_null(file);
        cr_assert_eq(fread(head, 1, 4, file), 4);
        fclose(file);
        cr_assert_str_eq(head, "\x89PNG");
        forget(&answer);
        unlink(path);
    }
    cr_assert_eq(rmdir(directory), 0);
}

Test(cli_plan, a_picture_that_cannot_be_written_is_refused_by_its_name, .timeout = 60)
{
    struct answer answer;

    answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--svg",
                   "/nonexistent/plan.svg", NULL);
    assert_refused(answer, 1, "/nonexistent/plan.svg: could not be opened for writing: No such");
    answer =
        numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--svg", "/dev/full", NULL);
    assert_refused(answer, 3, "/dev/full: could not be written: No space left");
}

Test(cli_plan, nodes_and_cpus_that_are_not_there_are_refused, .timeout = 60)
{
    struct answer answer =
        numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--nodes", "32", NULL);

    assert_refused(answer, 2, "32");
    answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--cpus", "256", NULL);
    assert_refused(answer, 2, "256");
}

static const char *const a10s[] = {"a10@4,25GB/s,24GB", "a10@20,25GB/s,24GB"};

Test(cli_predict, two_a10s_are_bound_by_their_links, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "v4-flash", "--topology", BOX, "--gpu", a10s[0],
                                 "--gpu", a10s[1], "--tokens", "1,4096,8192,65536", "--json", NULL);
    json_t *root = parse(&answer), *predicted = json_object_get(root, "predicted"), *cell;
    unsigned seen = 0;
    size_t i;

    json_array_foreach(json_object_get(predicted, "cells"), i, cell)
    {
        const char *way = json_string_value(json_object_get(cell, "way"));
        double rate = number(cell, "tokens_per_s");
        json_int_t tokens = integer(cell, "tokens");

        if (!strcmp(way, "stream-one") && tokens == 4096) {
            cr_assert_str_eq(json_string_value(json_object_get(cell, "bound")), "link");
            cr_assert(rate > 680 && rate < 700, "%g", rate);
            cr_assert(number(cell, "pass_ms") > 5850 && number(cell, "pass_ms") < 5950);
            seen++;
        }
        if (!strcmp(way, "stream") && tokens >= 8192) {
            cr_assert(rate >= 1300, "%g", rate);
            seen++;
        }
    }
    cr_assert_eq(seen, 3);
    cr_assert_eq(json_array_size(json_object_get(predicted, "gpus")), 2);
    json_decref(root);
    forget(&answer);

    answer = numoe("plan", "--model", "v4-flash", "--topology", BOX, "--gpu", a10s[0], "--gpu",
                   a10s[1], NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "link: 147 GB a pass over 25.0 GB/s = 5.89 s"));
    cr_assert_not_null(strstr(answer.out, "what would help"));
    cr_assert_not_null(strstr(answer.out, "assumed: EPYC Rome"));
    forget(&answer);
}

Test(cli_predict, bandwidth_and_domains_are_taken_as_given, .timeout = 60)
{
    static const char *const options[][2] = {
        {"--node-bandwidth", "9.5GB/s"}, {"--node-bandwidth", "0-31=9.5"}, {"--domains", "16"}};
    /* without a figure: 2 packages of 204.8 GB/s, of which 0.75, however they are cut */
    static const double all[] = {304, 304, 307.2};

    for (size_t i = 0; i < 3; i++) {
        struct answer answer = numoe("plan", "--model", "v4-flash", "--topology", BOX,
                                     options[i][0], options[i][1], "--json", NULL);
        json_t *root = parse(&answer), *figure;

        figure = json_array_get(json_object_get(json_object_get(root, "predicted"), "figures"), 0);
        cr_assert_str_eq(json_string_value(json_object_get(figure, "name")), "memory bandwidth");
        cr_assert(number(figure, "value") > all[i] - 0.01 &&
                      number(figure, "value") < all[i] + 0.01,
                  "%g", number(figure, "value"));
        json_decref(root);
        forget(&answer);
    }
}

/* Domains are shown wherever they count, found or asked for. */
Test(cli_predict, memory_domains_are_said, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "v4-flash", "--topology", BOX, NULL);

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_not_null(strstr(answer.out, "note: 32 memory nodes are 8 memory domains"));
    forget(&answer);
    answer = numoe("plan", "--model", "v4-flash", "--topology", BOX, "--domains", "16", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_not_null(strstr(answer.out, "note: memory domains as asked: 16 of them"));
    cr_expect_null(strstr(answer.out, "are 8 memory domains"));
    forget(&answer);
}

Test(cli_predict, reserved_cores_get_no_worker, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "v4-flash", "--topology", BOX, "--reserve-cpus",
                                 "0,64-67", "--json", NULL);
    json_t *root = parse(&answer), *workers = json_object_get(root, "workers"), *worker;
    size_t i;

    cr_assert_eq(json_array_size(workers), 123);
    json_array_foreach(workers, i, worker)
    {
        json_int_t cpu = integer(worker, "os_cpu");

        cr_assert(cpu % 128 != 0 && (cpu % 128 < 64 || cpu % 128 > 67), "CPU %lld", (long long)cpu);
    }
    json_decref(root);
    forget(&answer);
}

Test(cli_predict, places_are_explained, .timeout = 60)
{
    static const char *const words[][2] = {{"node:17", "node 17 holds"},
                                           {"worker:5", "worker 5 runs on CPU 5"},
                                           {"expert:3.200", "expert 200 of layer 3"}};

    for (size_t i = 0; i < 3; i++) {
        struct answer answer =
            numoe("plan", "--model", "v4-flash", "--topology", BOX, "--explain", words[i][0], NULL);

        cr_assert_eq(answer.status, 0, "%s", answer.err);
        cr_assert_eq(strncmp(answer.out, words[i][1], strlen(words[i][1])), 0, "%s", answer.out);
        forget(&answer);
    }
}

Test(cli_predict, what_is_not_there_is_refused, .timeout = 60)
{
    static const char *const cases[][3] = {
        {"--gpu", "a10@32,25GB/s,24GB", "node 32"},
        {"--node-bandwidth", "32=10GB/s", "node 32"},
        {"--reserve-cpus", "256", "256"},
        {"--reserve-cpus", "0-255", "reserved"},
        {"--domains", "3", "3 domains"},
        {"--domains", "64", "32 domains a package"},
        {"--isa", "mmx", "mmx"},
        {"--explain", "node:99", "99"},
        {"--explain", "expert:43.0", "43"},
        {"--explain", "cpu:1", "cpu:1"},
    };
    struct answer answer;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        answer =
            numoe("plan", "--model", "v4-flash", "--topology", BOX, cases[i][0], cases[i][1], NULL);
        assert_refused(answer, 2, cases[i][2]);
    }
    answer = numoe("plan", "--model", "v4-flash", "--explain", "node:0", "--json", NULL);
    assert_refused(answer, 2, "--explain");
}
