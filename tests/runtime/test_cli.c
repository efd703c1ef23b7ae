/* The numoe command as a user meets it: what it prints, refuses and returns. */
#include "runtime/cli_answer.h"
#include "support/tree.h"

static const char *const verbs[] = {"topo",  "plan", "synth",   "run",
                                    "bench", "soak", "certify", "version"};

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
    /* all that is read of the environment */
    cr_assert_not_null(strstr(answer.out, "\n  NUMOE_ISA "));
    cr_assert_not_null(strstr(answer.out, "\n  NUMOE_GPU "));
    cr_assert_not_null(strstr(answer.out, "\n  NUMOE_GPU_TUNING "));
    cr_assert_not_null(strstr(answer.out, "\n  NUMOE_NCCL "));
    cr_assert_not_null(strstr(answer.out, "\n  TMPDIR "));
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
        {"run", "--gpu-sum", "ring"},
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

Test(cli_usage, a_full_or_closed_stdout_is_a_failure, .timeout = 60)
{
    static const char *const words[] = {"--help", "version", "topo --json", "plan --model list",
                                        "plan --model list --json"};
    char line[512];

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        for (int closed = 0; closed < 2; closed++) {
            int status;

            snprintf(line, sizeof line,
                     "err=$(%s/numoe %s 2>&1 %s); status=$?; "
                     "[ \"$err\" = 'numoe: stdout: the answer could not be written: %s' ] && "
                     "exit $status; exit 99",
                     NUMOE_BINARY_DIR, words[i], closed ? ">&-" : ">/dev/full",
                     closed ? "Bad file descriptor" : "No space left on device");
            status = system(line);
            cr_expect(WIFEXITED(status));
            cr_expect_eq(WEXITSTATUS(status), closed ? 1 : 3, "%s: status %d", line,
                         WEXITSTATUS(status));
        }
}

Test(cli_usage, empty_words_are_refused_as_such, .timeout = 60)
{
    struct answer answer = numoe("plan", "", NULL);

    assert_refused(answer, 2, "plan: the directory's name is empty");
    answer = numoe("run", "", NULL);
    assert_refused(answer, 2, "run: the directory's name is empty");
    answer = numoe("synth", "--model", "v4-flash", "", NULL);
    assert_refused(answer, 2, "synth: the directory's name is empty");
    answer = numoe("plan", "--model", "", NULL);
    assert_refused(answer, 2, "plan: --model: is empty");
    answer = numoe("run", "--trace", "", "some-directory", NULL);
    assert_refused(answer, 2, "run: --trace: is empty");
}

Test(cli_usage, names_that_lead_nowhere_are_missing_input, .timeout = 60)
{
    char folder[] = "/tmp/numoe-cli-XXXXXX", loop[64], name[5000];
    struct answer answer;

    cr_assert_not_null(mkdtemp(folder));
    snprintf(loop, sizeof loop, "%s/loop", folder);
    cr_assert_eq(symlink(loop, loop), 0);
    answer = numoe("run", loop, NULL);
    assert_refused(answer, 4, "/loop: cannot open the checkpoint: Too many levels");
    answer = numoe("run", "--plan", loop, folder, NULL);
    assert_refused(answer, 4, "/loop: ");
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = 0;
    answer = numoe("plan", name, NULL);
    assert_refused(answer, 4, "File name too long");
    unlink(loop);
    rmdir(folder);
}

Test(cli_usage, what_cannot_be_written_is_no_damaged_input, .timeout = 60)
{
    static const char nowhere[] = "/no/such/folder/file";
    struct answer answer = numoe("topo", "--save", nowhere, NULL);

    assert_refused(answer, 1, "/no/such/folder/file: cannot be written: No such file");
    answer = numoe("topo", "--save", "/dev/full", NULL);
    assert_refused(answer, 3, "/dev/full: cannot be written: No space left");
    answer =
        numoe("synth", "--model", "v4-flash", "--layers", "1", "--experts", "2", nowhere, NULL);
    assert_refused(answer, 1, nowhere);
    answer = numoe("plan", "--model", "v4-flash", "--topology", DUAL_7H12, "--svg", nowhere, NULL);
    assert_refused(answer, 1, nowhere);
}

Test(cli_usage, what_bench_cannot_make_is_the_command_lines_fault, .timeout = 60)
{
    struct answer answer = numoe("bench", "--layers", "99999999", NULL);

    assert_refused(answer, 2, "layers: 99999999 is not in 1..1048576");
    answer = numoe("bench", "--experts", "8", "--form", "groups:4096", NULL);
    assert_refused(answer, 2, "groups: 4096 groups need as many nodes");
}

Test(cli_gpu, options_of_gpus_are_refused_without_one, .timeout = 60)
{
    static const char *const words[][2] = {
        {"--stream", NULL},        {"--gpu-from", "64"},     {"--gpu-cache", "1GiB"},
        {"--gpu-profile", "heat"}, {"--gpu-tuning", "file"}, {"--gpu-sum", "host"},
        {"--gpu-sum=peer", NULL},
    };
    char wanted[64];

    unsetenv("NUMOE_GPU");
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        struct answer answer = numoe("run", "no-directory", words[i][0], words[i][1], NULL);

        snprintf(wanted, sizeof wanted, "run: %.*s is for --gpu", (int)strcspn(words[i][0], "="),
                 words[i][0]);
        assert_refused(answer, 2, wanted);
        if (!strcmp(words[i][0], "--gpu-from") || !strcmp(words[i][0], "--gpu-profile"))
            continue;
        answer = numoe("bench", words[i][0], words[i][1], NULL);
        snprintf(wanted, sizeof wanted, "bench: %.*s is for --gpu", (int)strcspn(words[i][0], "="),
                 words[i][0]);
        assert_refused(answer, 2, wanted);
    }
    /* the environment asks for one, too: what is wrong then is the directory */
    setenv("NUMOE_GPU", "on", 1);
    struct answer answer = numoe("run", "/no/such/directory", "--gpu-from", "64", NULL);
    cr_expect_eq(answer.status, 4, "status %d: %s", answer.status, answer.err);
    cr_expect_not_null(strstr(answer.err, "/no/such/directory: cannot open"), "%s", answer.err);
    forget(&answer);
    unsetenv("NUMOE_GPU");
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
    tree_put(made, "sys/devices/system/cpu/online", "0\n");
    tree_put(made, "sys/devices/system/cpu/cpu0/topology/core_siblings", "1\n");
    tree_put(made, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    tree_put(made, "proc/cpuinfo", "processor\t: 0\n\n");
    tree_put(made, "proc/meminfo", "MemTotal: 12582912 kB\n");
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

Test(cli_gpu, bench_and_soak_fail_with_the_reason_where_no_gpu_is, .timeout = 60)
{
    char *reason = no_gpu();
    struct answer answer = numoe("bench", "--gpu", "--experts", "8", NULL);

    assert_refused(answer, 1, reason);
    answer = numoe("bench", "--gpu", "--stream", "--experts", "8", "--json", NULL);
    cr_assert_eq(answer.status, 1);
    cr_assert_not_null(strstr(answer.err, reason), "%s", answer.err);
    assert_refused(answer, 1, "bench: there is no GPU to measure");
    answer = numoe("bench", "--gpu", "--share", "--experts", "8", NULL);
    assert_refused(answer, 1, "bench: there is no GPU to measure");
    answer = numoe("soak", "--gpu", "--steps", "1", NULL);
    cr_assert_eq(answer.status, 1, "status %d: %s", answer.status, answer.err);
    cr_assert_not_null(strstr(answer.err, "numoe: gpu: none is used: "), "%s", answer.err);
    cr_assert_not_null(strstr(answer.err, reason), "%s", answer.err);
    forget(&answer);
    answer = numoe("soak", "--topology", "no-such-file", "--steps", "1", NULL);
    cr_assert_eq(answer.status, 4, "status %d: %s", answer.status, answer.err);
    cr_assert_not_null(strstr(answer.err, "no-such-file: "), "%s", answer.err);
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
