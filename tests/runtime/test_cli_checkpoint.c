/* A checkpoint's life by the numoe command: written, planned, run, executed by a plan, damaged. */
#include "runtime/cli_answer.h"

#include <dirent.h>
#include <sys/stat.h>

/* One layer of four experts of V4-Flash's widths, 53 MB. */
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
