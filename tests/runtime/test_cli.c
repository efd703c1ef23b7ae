/* The numoe command as a user meets it: what it prints, refuses and returns. */
#include "runtime/cli_answer.h"

#include <dirent.h>
#include <sys/stat.h>

static const char *const verbs[] = {"topo", "plan", "synth", "run", "bench", "soak", "version"};

enum { VERB_COUNT = sizeof verbs / sizeof verbs[0] };

Test(cli_help, lists_every_verb_and_the_exit_codes, .timeout = 60)
{
    struct answer answer = numoe("--help", NULL);

    cr_assert_eq(answer.status, 0);
    for (int i = 0; i < VERB_COUNT; i++) {
        char line[32];

        snprintf(line, sizeof line, "\n  %s ", verbs[i]);
        cr_assert_not_null(strstr(answer.out, line), "%s is missing", verbs[i]);
    }
    cr_assert_not_null(strstr(answer.out, "Exit status:"));
    cr_assert_not_null(strstr(answer.out, "\n  6  a plan "));
    cr_assert_not_null(strstr(answer.out, "v4-flash"));
    cr_assert_str_empty(answer.err);
    forget(&answer);
}

Test(cli_help, exists_for_every_verb, .timeout = 60)
{
    for (int i = 0; i < VERB_COUNT; i++) {
        struct answer answer = numoe(verbs[i], "--help", NULL);
        char usage[32];

        snprintf(usage, sizeof usage, "Usage: numoe %s", verbs[i]);
        cr_assert_eq(answer.status, 0);
        cr_assert_eq(strncmp(answer.out, usage, strlen(usage)), 0, "%s", answer.out);
        cr_assert_not_null(strstr(answer.out, "Exit status:"));
        cr_assert_str_empty(answer.err);
        forget(&answer);
    }
}

Test(cli_usage, nothing_and_unknown_verbs_are_refused, .timeout = 60)
{
    struct answer answer = numoe(NULL, NULL);

    cr_assert_eq(answer.status, 2);
    cr_assert_str_empty(answer.out);
    cr_assert_not_null(strstr(answer.err, "Usage: numoe"));
    forget(&answer);
    answer = numoe("dance", NULL);
    assert_refused(answer, 2, "dance");
}

Test(cli_usage, unknown_options_are_refused_by_every_verb, .timeout = 60)
{
    for (int i = 0; i < VERB_COUNT; i++) {
        struct answer answer = numoe(verbs[i], "--no-such-option", NULL);

        assert_refused(answer, 2, "--no-such-option");
        answer = numoe(verbs[i], "-x", NULL);
        assert_refused(answer, 2, "-x");
    }
}

Test(cli_usage, bad_values_are_refused_with_the_option_named, .timeout = 120)
{
    static const char *const cases[][4] = {
        {"plan", "--model"},
        {"plan", "--layers", "0"},
        {"bench", "--routing", "zipfian"},
        {"run", "--as-if", ""},
        {"plan", "--hidden", "0"},
        {"plan", "--intermediate", "-32"},
        {"plan", "--experts-per-token", "none"},
        {"plan", "--format", "fp16"},
        {"plan", "--format", ""},
        {"plan", "--layers", "-1"},
        {"plan", "--layers", "99999999999999999999999"},
        {"plan", "--nodes", "3-1"},
        {"plan", "--nodes", "1,,2"},
        {"plan", "--cpus", "0-4294967295"},
        {"plan", "--keep-free", "12XB"},
        {"plan", "--keep-free", "99999999999TB"},
        {"plan", "--tokens", "0"},
        {"plan", "--tokens", "1,x"},
        {"plan", "--domains", "0"},
        {"plan", "--reserve-cpus", "1-"},
        {"plan", "--reserve-nodes", "a"},
        {"plan", "--form", "rows"},
        {"plan", "--form", "groups:"},
        {"plan", "--form", "groups:0"},
        {"plan", "--form", "groups:2x"},
        {"plan", "--optimize", "speed"},
        {"plan", "--tp", "0"},
        {"plan", "--ep", "1025"},
        {"plan", "--rank", "-1"},
        {"plan", "--rank-nodes", "0-3"},
        {"plan", "--rank-nodes", "1024:0"},
        {"plan", "--rank-nodes", "0:"},
        {"plan", "--gpu", "a10"},
        {"plan", "--gpu", "@4,25GB/s,24GB"},
        {"plan", "--gpu", "a10@4"},
        {"plan", "--gpu", "a10@x,25GB/s,24GB"},
        {"plan", "--gpu", "a10@4,0GB/s,24GB"},
        {"plan", "--gpu", "a10@4,-1,24GB"},
        {"plan", "--gpu", "a10@4,25GB/s"},
        {"plan", "--gpu", "a10@4,25GB/s,0"},
        {"plan", "--gpu", "a10@4,25MB/s,24GB"},
        {"plan", "--gpu", "a10@99999999999999999999,25,24GB"},
        {"plan", "--gpu", "a-name-of-more-than-thirty-one-bytes@4,25,24GB"},
        {"plan", "--node-bandwidth", "fast"},
        {"plan", "--node-bandwidth", "0"},
        {"plan", "--node-bandwidth", "."},
        {"plan", "--node-bandwidth", "1e3"},
        {"plan", "--node-bandwidth", "0-=10"},
        {"plan", "--node-bandwidth", "=10"},
        {"plan", "--node-bandwidth", "0=10=10"},
        {"plan", "--node-bandwidth", "99999999999999999999"},
        {"run", "--tokens", "0"},
        {"run", "--arithmetic", "sloppy"},
        {"run", "--arithmetic", "fast,exact"},
        {"run", "--isa", "avx2,avx512"},
        {"bench", "--arithmetic", "fast,fast"},
        {"bench", "--tokens", "1,x"},
        {"bench", "--repeat", "0"},
        {"bench", "--isa", "avx2,,avx512"},
        {"bench", "--isa", "avx2,"},
        {"bench", "--isa", "ref,ref"},
        {"run", "--plan", ""},
        {"topo", "--topology", ""},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct answer answer = numoe(cases[i][0], cases[i][1], cases[i][2], NULL);

        assert_refused(answer, 2, cases[i][1]);
    }
}

Test(cli_usage, missing_and_surplus_arguments_are_refused, .timeout = 60)
{
    struct answer answer = numoe("run", NULL);

    assert_refused(answer, 2, "directory");
    answer = numoe("topo", "one-too-many", NULL);
    assert_refused(answer, 2, "one-too-many");
    answer = numoe("plan", NULL);
    assert_refused(answer, 2, "--model");
    answer = numoe("plan", "--model", "v4-flash", "some-directory", NULL);
    assert_refused(answer, 2, "either");
    answer = numoe("synth", "some-directory", NULL);
    assert_refused(answer, 2, "--model");
}

Test(cli_usage, unknown_models_and_instructions_are_refused, .timeout = 60)
{
    struct answer answer = numoe("plan", "--model", "v4-flush", NULL);

    assert_refused(answer, 2, "v4-flush");
    answer = numoe("synth", "--model", "v4-flush", "/tmp/never-written", NULL);
    assert_refused(answer, 2, "v4-flush");
    answer = numoe("bench", "--isa", "mmx", NULL);
    assert_refused(answer, 2, "mmx");
}

Test(cli_usage, a_full_stdout_is_a_failure, .timeout = 60)
{
    int status = system(NUMOE_BINARY_DIR "/numoe --help >/dev/full 2>/dev/null");

    cr_assert(WIFEXITED(status));
    cr_assert_eq(WEXITSTATUS(status), 1);
}

Test(cli_version, names_version_and_kernels, .timeout = 60)
{
    struct answer answer = numoe("version", NULL);

    cr_assert_eq(answer.status, 0);
    cr_assert_eq(strncmp(answer.out, "numoe " NUMOE_VERSION "\n", strlen(NUMOE_VERSION) + 7), 0,
                 "%s", answer.out);
    cr_assert_not_null(strstr(answer.out, " ref"));
    forget(&answer);
}

Test(cli_topo, shows_a_synthetic_machine_as_json, .timeout = 60)
{
    struct answer answer = numoe("topo", "--topology", DUAL_7H12, "--json", NULL);
    json_t *root = parse(&answer);

    cr_assert_eq(json_array_size(json_object_get(root, "nodes")), 32);
    json_decref(root);
    forget(&answer);
}

/* Cases B4 and F4: what would be pinned, how, and on which node each GPU's staging lies. */
Test(cli_topo, shows_what_would_be_pinned_for_gpus, .timeout = 60)
{
    static const char box[] = NUMOE_TEST_DATA "/topo/data/epyc-7h12-2s-32n.xml";
    const json_int_t gib = 1 << 30, nodes[] = {4, 20};
    struct answer answer = numoe("topo", "--topology", box, "--json", NULL);
    json_t *root = parse(&answer), *pinning = json_object_get(root, "pinning");
    json_t *staging = json_object_get(root, "staging");

    cr_expect_eq(json_integer_value(json_object_get(pinning, "memory_bytes")), 512 * gib);
    cr_expect_eq(json_integer_value(json_object_get(pinning, "chunk_bytes")), gib);
    cr_expect_eq(json_integer_value(json_object_get(pinning, "registration_bytes")), 512 * gib);
    cr_expect(json_is_null(json_object_get(pinning, "locked_bytes")));
    cr_assert_eq(json_array_size(staging), 2);
    for (size_t i = 0; i < 2; i++)
        cr_expect_eq(
            json_integer_value(json_object_get(json_array_get(staging, i), "staging_node")),
            nodes[i]);
    json_decref(root);
    forget(&answer);
    answer = numoe("topo", "--topology", box, NULL);
    cr_expect_not_null(strstr(answer.out, "one registration ends at 512 GiB"), "%s", answer.out);
    cr_expect_not_null(strstr(answer.out, "GPU cuda1: 64 MiB of staging on node 20"));
    forget(&answer);
    answer = numoe("topo", "--json", NULL);
    root = parse(&answer);
    pinning = json_object_get(root, "pinning");
    cr_expect_gt(json_integer_value(json_object_get(pinning, "memory_bytes")), 0);
    json_decref(root);
    forget(&answer);
}

Test(cli_topo, shows_this_machine, .timeout = 60)
{
    struct answer answer = numoe("topo", NULL);

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "node"));
    forget(&answer);
}

Test(cli_topo, refuses_what_is_no_topology, .timeout = 60)
{
    struct answer answer = numoe("topo", "--duration", "3", NULL);

    assert_refused(answer, 2, "--measure");
    answer = numoe("topo", "--topology", "no-such-file.xml", NULL);

    assert_refused(answer, 4, "no-such-file.xml");
    answer = numoe("plan", "--model", "v4-flash", "--topology", "pack:zero", NULL);
    assert_refused(answer, 4, "pack:zero");
}

static json_t *warned_of(json_t *root, const char *what)
{
    json_t *list = json_object_get(root, "warnings");

    for (size_t i = 0; i < json_array_size(list); i++)
        if (!strcmp(json_string_value(json_object_get(json_array_get(list, i), "what")), what))
            return json_array_get(list, i);
    return NULL;
}

static void put(const char *root, const char *name, const char *text)
{
    char path[512], *slash;
    FILE *file;

    snprintf(path, sizeof path, "%s/%s", root, name);
    for (slash = path + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0777);
        *slash = '/';
    }
    file = fopen(path, "w");
    cr_assert_not_null(file);
    fputs(text, file);
    fclose(file);
}

Test(cli_topo, saves_a_machine_that_plan_reads, .timeout = 60)
{
    char made[] = "/tmp/numoe-cli-topo-XXXXXX", path[64], bad[64];
    struct answer answer, again;
    json_t *root;

    cr_assert_not_null(mkdtemp(made));
    snprintf(path, sizeof path, "%s/box.json", made);
    snprintf(bad, sizeof bad, "%s/absent/box.json", made);
    answer = numoe("topo", "--topology", DUAL_7H12, "--save", path, NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    forget(&answer);
    answer = numoe("topo", "--topology", path, "--json", NULL);
    root = parse(&answer);
    cr_assert_eq(json_array_size(json_object_get(root, "nodes")), 32);
    cr_assert_eq(json_array_size(json_object_get(root, "warnings")), 0);
    json_decref(root);
    forget(&answer);
    answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, NULL);
    again = numoe("plan", "--model", "v4-flash", "--topology", path, NULL);
    cr_assert_eq(again.status, 0, "%s", again.err);
    cr_assert_eq(strlen(again.out) - strlen(path), strlen(answer.out) - strlen(DUAL_7H12));
    forget(&answer);
    forget(&again);
    answer = numoe("topo", "--topology", DUAL_7H12, "--save", bad, NULL);
    cr_assert_neq(answer.status, 0);
    cr_assert_not_null(strstr(answer.err, bad), "%s", answer.err);
    forget(&answer);
    unlink(path);
    rmdir(made);
}

Test(cli_topo, measures_this_machine_only, .timeout = 120)
{
    struct answer answer = numoe("topo", "--measure", "--topology", DUAL_7H12, NULL);
    json_t *root, *measured;

    assert_refused(answer, 2, "--measure");
    answer = numoe("topo", "--measure", "--json", NULL);
    root = parse(&answer);
    measured = json_object_get(root, "measured");
    cr_assert(json_is_object(measured));
    cr_assert(json_array_size(json_object_get(measured, "pairs")) > 0 ||
              strstr(answer.out, "is not measured"));
    json_decref(root);
    forget(&answer);
}

Test(cli_topo, warns_of_how_a_captured_machine_is_set_up, .timeout = 60)
{
    char made[] = "/tmp/numoe-cli-topo-XXXXXX", command[64];
    struct answer answer;
    json_t *root, *warning;

    cr_assert_not_null(mkdtemp(made));
    put(made, "sys/devices/system/cpu/online", "0\n");
    put(made, "sys/devices/system/cpu/cpu0/topology/core_siblings", "1\n");
    put(made, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    put(made, "proc/cpuinfo", "processor\t: 0\n\n");
    put(made, "proc/meminfo", "MemTotal: 12582912 kB\n");
    answer = numoe("topo", "--topology", made, "--json", NULL);
    root = parse(&answer);
    warning = warned_of(root, "transparent_hugepage");
    cr_assert_not_null(warning, "%s", answer.out);
    cr_assert_str_eq(json_string_value(json_object_get(warning, "fix")),
                     "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    json_decref(root);
    forget(&answer);
    answer = numoe("topo", "--topology", made, NULL);
    cr_assert_eq(answer.status, 0);
    cr_assert_not_null(strstr(answer.out, "warning: transparent huge pages are off"));
    forget(&answer);
    snprintf(command, sizeof command, "rm -rf %s", made);
    cr_assert_eq(system(command), 0);
}

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

/* ---- a small checkpoint: one layer of four experts of V4-Flash's widths, 53 MB ---- */

enum { SMALL_EXPERTS = 4 };
#define SMALL_BYTES (SMALL_EXPERTS * 13369344ll)

static char directory[128];

static void make_directory(void)
{
    snprintf(directory, sizeof directory, "%s/numoe-cli-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    cr_assert_not_null(mkdtemp(directory));
}

static void make_checkpoint(void)
{
    struct answer answer;

    make_directory();
    answer = numoe("synth", "--model", "v4-flash", "--layers", "1", "--experts", "4", "--seed", "7",
                   directory, NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    forget(&answer);
}

static void remove_directory(void)
{
    char command[sizeof directory + 16];

    if (!*directory)
        return;
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    cr_expect_eq(system(command), 0);
}

/* Path of some weight file of the checkpoint. */
static void find_shard(char *path, size_t size)
{
    DIR *listing = opendir(directory);
    struct dirent *entry;

    cr_assert_not_null(listing);
    *path = 0;
    while ((entry = readdir(listing))) {
        const char *dot = strrchr(entry->d_name, '.');

        if (dot && !strcmp(dot, ".safetensors"))
            snprintf(path, size, "%s/%s", directory, entry->d_name);
    }
    closedir(listing);
    cr_assert(*path);
}

TestSuite(cli_checkpoint, .fini = remove_directory, .timeout = 300);

Test(cli_checkpoint, is_planned_from_its_files)
{
    struct answer answer;
    json_t *root, *nodes, *node;
    json_int_t planned = 0;
    size_t i;

    make_checkpoint();
    answer = numoe("plan", "--topology", DUAL_7H12, "--json", directory, NULL);
    root = parse(&answer);
    nodes = json_object_get(root, "nodes");
    json_array_foreach(nodes, i, node) planned += integer(node, "planned_bytes");
    cr_assert_eq(planned, SMALL_BYTES);
    json_decref(root);
    forget(&answer);
    answer = numoe("plan", directory, "--experts", "2", NULL);
    assert_refused(answer, 2, "--experts");
}

Test(cli_checkpoint, runs_and_agrees_with_the_reference)
{
    struct answer answer;
    json_t *root, *results, *result, *check, *memory;
    size_t i;

    make_checkpoint();
    answer = numoe("run", directory, "--tokens", "1,7", "--repeat", "2", "--json", NULL);
    root = parse(&answer);
    results = json_object_get(root, "results");
    cr_assert_eq(json_array_size(results), 2);
    json_array_foreach(results, i, result)
    {
        cr_assert_eq(integer(result, "layer"), 0);
        cr_assert_eq(integer(result, "tokens"), i ? 7 : 1);
        cr_assert_gt(number(result, "ms"), 0);
        cr_assert_leq(number(result, "ms_min"), number(result, "ms"));
        cr_assert_leq(number(result, "ms"), number(result, "ms_p90"));
        /* Four of four experts a token: every call reads all of them. */
        cr_assert_eq(number(result, "experts_hit"), (double)SMALL_EXPERTS);
        cr_assert_eq(number(result, "bytes"), SMALL_BYTES);
        cr_assert_gt(number(result, "bandwidth_fraction"), 0);
        cr_assert_gt(number(result, "rel_l2"), 0);
    }
    check = json_object_get(root, "check");
    cr_assert(json_is_true(json_object_get(check, "passed")));
    cr_assert_leq(number(check, "worst_rel_l2"), 2e-2);
    memory = json_object_get(root, "memory");
    cr_assert_geq(integer(memory, "resident_bytes"), SMALL_BYTES);
    cr_assert_eq(integer(json_object_get(root, "load"), "bytes"), SMALL_BYTES);
    json_decref(root);
    forget(&answer);
}

/* Of a run with these options; 17 bytes. */
static void digest_of(char *digest, const char *topology, const char *seed)
{
    struct answer answer = numoe("run", directory, "--once", "--tokens", "1,7", "--topology",
                                 topology, "--seed", seed, "--json", NULL);
    json_t *root = parse(&answer);
    json_t *check = json_object_get(root, "check");
    json_t *row = json_array_get(json_object_get(root, "results"), 1);

    cr_assert(json_is_true(json_object_get(check, "passed")));
    cr_assert(json_is_null(json_object_get(row, "bandwidth_fraction")));
    cr_assert_eq(integer(row, "repetitions"), 1);
    snprintf(digest, 17, "%s", json_string_value(json_object_get(check, "digest")));
    cr_assert_eq(strspn(digest, "0123456789abcdef"), 16, "%s", digest);
    json_decref(root);
    forget(&answer);
}

Test(cli_checkpoint, runs_once_with_a_digest_of_the_outputs)
{
    const char *plan = "numa:3(memory=1GB) core:2 pu:1", *other = "numa:2(memory=1GB) core:2 pu:1";
    char first[17], again[17], unlike[17];
    struct answer answer;

    make_checkpoint();
    digest_of(first, plan, "1");
    digest_of(again, plan, "1");
    cr_assert_str_eq(first, again);
    digest_of(unlike, plan, "2");
    cr_assert_str_neq(first, unlike);
    digest_of(unlike, other, "1");
    cr_assert_str_neq(first, unlike, "sums are cut at other places");
    answer = numoe("run", directory, "--once", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "digest of the first outputs: "), "%s", answer.out);
    cr_assert_null(strstr(answer.out, "nan"), "%s", answer.out);
    cr_assert_null(strstr(answer.out, "inf "), "%s", answer.out);
    forget(&answer);
    answer = numoe("run", directory, "--once", "--repeat", "3", NULL);
    assert_refused(answer, 2, "--once");
}

/* What numoe run --once --tokens 1 on the checkpoint writes to a terminal that is its stderr. */
static char *on_a_terminal(int *status)
{
    char *argv[] = {NUMOE_BINARY_DIR "/numoe", "run", directory, "--once", "--tokens", "1", NULL};
    int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    posix_spawn_file_actions_t actions;
    size_t length = 0, room = 1 << 20;
    char *text = calloc(1, room + 1);
    ssize_t some;
    pid_t child;
    int side;

    cr_assert_not_null(text);
    cr_assert_geq(terminal, 0);
    cr_assert_eq(grantpt(terminal), 0);
    cr_assert_eq(unlockpt(terminal), 0);
    side = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);
    cr_assert_geq(side, 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, side, 2);
    cr_assert_eq(posix_spawn(&child, argv[0], &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(side);
    /* EIO once nobody has the other side open */
    while (length < room && (some = read(terminal, text + length, room - length)) > 0)
        length += (size_t)some;
    close(terminal);
    cr_assert_eq(waitpid(child, status, 0), child);
    return text;
}

/* Of every line of progress: bytes never more than all and never fewer than before, a rate, and
 * the time that is left; the last one is erased. In a file there is none of it. */
Test(cli_checkpoint, loading_is_shown_on_a_terminal_only)
{
    double before = 0, done, all = 0, rate, left;
    unsigned lines = 0;
    struct answer answer;
    const char *last;
    int status;
    char *text;

    make_checkpoint();
    text = on_a_terminal(&status);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s", text);
    for (const char *at = text; (at = strstr(at, "\r\033[Kloading ")); lines++) {
        at += strlen("\r\033[Kloading ");
        cr_assert_eq(sscanf(at, "%lf of %lf GB, %lf GB/s, %lf s left", &done, &all, &rate, &left),
                     4, "%s", at);
        cr_expect(done >= before && done <= all && rate >= 0 && left >= 0, "%s", at);
        before = done;
    }
    cr_expect_geq(lines, 1, "%s", text);
    cr_expect_float_eq(before, all, 1e-9, "ends at %.2f of %.2f GB", before, all);
    cr_expect_float_eq(all, 0.05, 0.01);
    last = strrchr(text, '\r');
    cr_assert_not_null(last);
    cr_expect_str_eq(last, "\r\033[K");
    free(text);
    answer = numoe("run", directory, "--once", "--tokens", "1", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_expect_null(strchr(answer.err, '\r'), "%s", answer.err);
    forget(&answer);
}

Test(cli_checkpoint, runs_exactly_and_prints_a_table)
{
    struct answer answer;

    make_checkpoint();
    answer = numoe("run", directory, "--tokens", "2", "--repeat", "1", "--arithmetic", "exact",
                   "--workers", "1", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "1 MoE layers of 4 experts"), "%s", answer.out);
    cr_assert_not_null(strstr(answer.out, "limit 2.50e-03 (exact): passed"), "%s", answer.out);
    cr_assert_not_null(strstr(answer.out, "experts in memory"), "%s", answer.out);
    forget(&answer);
}

/* What numoe plan --json prints of the checkpoint, in a file beside it. */
static void write_plan(const char *path, const char *topology)
{
    struct answer answer = numoe("plan", "--json", "--topology", topology, directory, NULL);
    FILE *file = fopen(path, "w");

    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_geq(fputs(answer.out, file), 0);
    cr_assert_eq(fclose(file), 0);
    forget(&answer);
}

/* The results of a run, without what time it took: distances to the reference, and what lies
 * where. */
static json_t *run_facts(const char *plan, const char *topology)
{
    struct answer answer = plan ? numoe("run", "--plan", plan, "--topology", topology, "--tokens",
                                        "1,7", "--repeat", "1", "--json", directory, NULL)
                                : numoe("run", "--topology", topology, "--tokens", "1,7",
                                        "--repeat", "1", "--json", directory, NULL);
    json_t *root = parse(&answer), *facts = json_array(), *value;
    size_t i;

    json_array_foreach(json_object_get(root, "results"), i, value)
        json_array_append(facts, json_object_get(value, "rel_l2"));
    json_array_foreach(json_object_get(root, "nodes"), i, value)
        json_array_append(facts, json_object_get(value, "planned_bytes"));
    json_decref(root);
    forget(&answer);
    return facts;
}

Test(cli_checkpoint, a_plan_is_executed_as_it_was_written)
{
    static const char *const machines[] = {"live", "pack:2 l3:2 [numa(memory=16GB)] core:2 pu:2"};
    char plan[sizeof directory + 16];

    make_checkpoint();
    snprintf(plan, sizeof plan, "%s/plan.json", directory);
    for (size_t i = 0; i < 2; i++) {
        json_t *made, *given;

        write_plan(plan, machines[i]);
        made = run_facts(NULL, machines[i]);
        given = run_facts(plan, machines[i]);
        cr_assert_gt(json_array_size(made), 2);
        cr_assert(json_equal(made, given));
        json_decref(made);
        json_decref(given);
    }
}

Test(cli_checkpoint, a_plan_that_does_not_apply_is_exit_code_6)
{
    char plan[sizeof directory + 16];
    struct answer answer;

    make_checkpoint();
    snprintf(plan, sizeof plan, "%s/plan.json", directory);
    write_plan(plan, DUAL_7H12);
    answer = numoe("run", "--plan", plan, "--topology",
                   "pack:2 l3:12 [numa(memory=16GB)] core:4 pu:2", directory, NULL);
    assert_refused(answer, 6, "memory nodes 24-31 are not there");
    answer = numoe("bench", "--plan", plan, "--topology", DUAL_7H12, NULL);
    assert_refused(answer, 6, "experts a layer: 4, and 256 in this model");
    answer = numoe("run", "--plan", plan, "--workers", "1", directory, NULL);
    assert_refused(answer, 2, "workers");
    answer = numoe("run", "--plan", directory, directory, NULL);
    assert_refused(answer, 4, directory);
    cr_assert_eq(truncate(plan, 1000), 0);
    answer = numoe("run", "--plan", plan, directory, NULL);
    assert_refused(answer, 4, plan);
    cr_assert_eq(unlink(plan), 0);
    answer = numoe("run", "--plan", plan, directory, NULL);
    assert_refused(answer, 4, plan);
}

Test(cli_checkpoint, cut_files_are_exit_code_4_with_the_file_named)
{
    struct answer answer;
    struct stat status;
    char shard[512];

    make_checkpoint();
    find_shard(shard, sizeof shard);
    cr_assert_eq(stat(shard, &status), 0);
    cr_assert_eq(truncate(shard, status.st_size - 1000), 0);
    answer = numoe("run", directory, NULL);
    assert_refused(answer, 4, strrchr(shard, '/') + 1);
    answer = numoe("plan", directory, NULL);
    assert_refused(answer, 4, strrchr(shard, '/') + 1);
    cr_assert_eq(unlink(shard), 0);
    answer = numoe("run", directory, NULL);
    assert_refused(answer, 4, strrchr(shard, '/') + 1);
}

Test(cli_checkpoint, missing_and_empty_directories_are_exit_code_4)
{
    struct answer answer;

    make_directory();
    answer = numoe("run", directory, NULL);
    assert_refused(answer, 4, directory);
    remove_directory();
    answer = numoe("run", directory, NULL);
    assert_refused(answer, 4, directory);
    answer = numoe("plan", directory, NULL);
    assert_refused(answer, 4, directory);
}

Test(cli_bench, sleeps_and_reports_what_that_cost, .timeout = 300)
{
    struct answer answer = numoe("bench", "--experts", "1", "--tokens", "1", "--repeat", "1",
                                 "--isa", "ref", "--idle", "1", "--json", NULL);
    json_t *root = parse(&answer);

    cr_assert_eq(number(root, "idle_seconds"), 1);
    cr_assert_geq(number(root, "idle_cpu_s"), 0);
    cr_assert_lt(number(root, "idle_cpu_s"), 0.02);
    cr_assert_gt(number(root, "first_call_us_p50"), 0);
    cr_assert_leq(number(root, "first_call_us_p50"), number(root, "first_call_us_p99"));
    cr_assert_gt(number(root, "warm_call_us_p99"), 0);
    json_decref(root);
    forget(&answer);
    answer = numoe("bench", "--experts", "1", "--tokens", "1", "--repeat", "1", "--isa", "ref",
                   "--idle", "1", NULL);
    cr_assert_eq(answer.status, 0);
    cr_assert(strstr(answer.out, "asleep for 1 s: 0.0"), "%s", answer.out);
    forget(&answer);
}

Test(cli_bench, measures_what_it_is_told_as_json, .timeout = 300)
{
    struct answer answer = numoe("bench", "--experts", "1", "--tokens", "1,3", "--repeat", "2",
                                 "--isa", "ref,avx2", "--arithmetic", "fast,exact", "--json", NULL);
    json_t *root, *results, *result;
    size_t i;

    if (answer.status && strstr(answer.err, "avx2")) {
        forget(&answer);
        cr_skip_test("no AVX2 on this CPU");
    }
    root = parse(&answer);
    results = json_object_get(root, "results");
    cr_assert_eq(json_array_size(results), 8);
    json_array_foreach(results, i, result)
    {
        int exact = i / 2 % 2;

        cr_assert_str_eq(json_string_value(json_object_get(result, "isa")), i < 4 ? "ref" : "avx2");
        cr_assert_str_eq(json_string_value(json_object_get(result, "arithmetic")),
                         exact ? "exact" : "fast");
        cr_assert_eq(integer(result, "tokens"), i % 2 ? 3 : 1);
        cr_assert_gt(number(result, "ms"), 0);
        cr_assert_eq(number(result, "bytes"), 13369344);
        cr_assert_gt(number(result, "bandwidth_fraction"), 0);
        cr_assert_gt(number(result, "rel_l2"), 0);
        cr_assert_leq(number(result, "rel_l2"), exact ? 2.5e-3 : 1.25e-2);
    }
    cr_assert_gt(number(json_object_get(root, "ceilings"), "read_gbs"), 0);
    cr_assert_geq(integer(json_object_get(root, "machine"), "workers"), 1);
    json_decref(root);
    forget(&answer);
}

/* Why no GPU of this machine is used; skips the test where one is. The caller frees. */
static char *no_gpu(void)
{
    struct answer answer;
    const char *said;
    json_t *root;
    char *reason;

    unsetenv("NUMOE_GPU");
    answer = numoe("topo", "--json", NULL);
    root = parse(&answer);
    if (json_array_size(json_object_get(root, "gpus")))
        cr_skip_test("this machine has a GPU");
    said = json_string_value(json_object_get(root, "gpu_reason"));
    cr_assert(said && *said);
    reason = strdup(said);
    json_decref(root);
    forget(&answer);
    return reason;
}

Test(cli_gpu, bench_and_soak_fail_with_the_reason_where_no_gpu_is, .timeout = 60)
{
    char *reason = no_gpu();
    struct answer answer = numoe("bench", "--gpu", "--experts", "8", NULL);

    assert_refused(answer, 1, reason);
    answer = numoe("bench", "--gpu", "--stream", "--experts", "8", "--json", NULL);
    assert_refused(answer, 1, reason);
    answer = numoe("soak", "--gpu", "--steps", "1", NULL);
    cr_assert_eq(answer.status, 1, "status %d: %s", answer.status, answer.err);
    cr_assert_not_null(strstr(answer.err, reason), "%s", answer.err);
    forget(&answer);
    setenv("NUMOE_GPU", "off", 1);
    answer = numoe("bench", "--gpu", "--experts", "8", NULL);
    assert_refused(answer, 1, "NUMOE_GPU=off in the environment");
    unsetenv("NUMOE_GPU");
    free(reason);
}

Test(cli_gpu, topo_obeys_the_environment, .timeout = 60)
{
    struct answer answer;
    json_t *root;

    setenv("NUMOE_GPU", "off", 1);
    answer = numoe("topo", NULL);
    cr_assert_eq(answer.status, 0);
    cr_assert_not_null(strstr(answer.out, "NUMOE_GPU=off in the environment"), "%s", answer.out);
    forget(&answer);
    answer = numoe("topo", "--json", NULL);
    root = parse(&answer);
    cr_assert_eq(json_array_size(json_object_get(root, "gpus")), 0);
    cr_assert_str_eq(json_string_value(json_object_get(root, "gpu_reason")),
                     "NUMOE_GPU=off in the environment");
    json_decref(root);
    forget(&answer);
    setenv("NUMOE_GPU", "yes", 1);
    answer = numoe("topo", NULL);
    assert_refused(answer, 2, "\"yes\" is neither off, on nor force");
    answer = numoe("bench", "--experts", "8", NULL);
    assert_refused(answer, 2, "\"yes\" is neither off, on nor force");
    unsetenv("NUMOE_GPU");
}

Test(cli_gpu, options_that_exclude_each_other_are_refused, .timeout = 60)
{
    struct answer answer = numoe("bench", "--gpu", "--stream", "--resident", NULL);

    assert_refused(answer, 2, "exclude");
    answer = numoe("bench", "--stream", NULL);
    assert_refused(answer, 2, "--gpu");
    answer = numoe("bench", "--gpu", "--arithmetic", "fast", NULL);
    assert_refused(answer, 2, "exact");
}

Test(cli_checkpoint, run_on_a_gpu_that_is_not_there_computes_on_the_cpu_and_says_so)
{
    char *reason = no_gpu();
    struct answer answer;
    json_t *root, *gpu;

    make_checkpoint();
    answer = numoe("run", directory, "--gpu", "--tokens", "2", "--repeat", "1", "--json", NULL);
    cr_assert_not_null(strstr(answer.err, reason), "%s", answer.err);
    root = parse(&answer);
    gpu = json_object_get(root, "gpu");
    cr_assert_str_empty(json_string_value(json_object_get(gpu, "name")));
    cr_assert_not_null(strstr(json_string_value(json_object_get(gpu, "note")), reason));
    cr_assert_eq(integer(gpu, "calls"), 0);
    cr_assert_eq(integer(gpu, "ring_bytes"), 0);
    cr_assert(json_is_null(json_object_get(gpu, "ring_node")));
    cr_assert(json_is_true(json_object_get(json_object_get(root, "check"), "passed")));
    json_decref(root);
    forget(&answer);
    answer = numoe("run", directory, "--gpu", "--tokens", "2", "--repeat", "1", NULL);
    cr_assert_eq(answer.status, 0, "%s", answer.err);
    cr_assert_not_null(strstr(answer.out, "computed on the CPU, not on a GPU"), "%s", answer.out);
    cr_assert_not_null(strstr(answer.out, reason), "%s", answer.out);
    forget(&answer);
    free(reason);
}
