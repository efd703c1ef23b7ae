/*
 * The command line: words of a verb, one a line, the verb first. A plan is then made as the words
 * ask, on a described machine, with its text, explanations, pictures and predictions.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cli_options.h"
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

static const struct cli_verb *const verbs[] = {&cli_topo,  &cli_plan, &cli_synth,  &cli_run,
                                               &cli_bench, &cli_soak, &cli_version};
enum { VERBS = sizeof verbs / sizeof verbs[0], MOST_WORDS = 64 };

static const char *const machines[] = {
    "pack:2 [numa(memory=96GB)] l3:2 core:2 pu:2",                       /* one node a package */
    "pack:2 group:2 [numa(memory=32GB)] [numa(memory=8GB)] core:4 pu:1", /* shared, second kinds */
    NUMOE_TEST_DATA "/topo/data/cpuless-gpu-and-far-nodes.xml",
};
enum { MACHINES = sizeof machines / sizeof machines[0] };

/* Paths of the machines as they were saved: read without a process. */
static const char *saved(size_t i)
{
    static char *paths[MACHINES];

    if (!paths[i]) {
        struct numoe_error error = NUMOE_ERROR_INIT;
        struct numoe_machine *machine = NULL;
        char name[32];

        snprintf(name, sizeof name, "machine%zu.json", i);
        paths[i] = strdup(fuzz_path(name));
        check_that(!numoe_machine_load(machines[i], &machine, &error), "%s", error.message);
        check_that(paths[i] && !numoe_machine_save(machine, paths[i], &error), "%s", error.message);
        numoe_machine_free(machine);
    }
    return paths[i];
}

/* What was refused is said in one line on stderr; what was answered is on stdout. */
static void check_answer(int code, const char *out, const char *err, const char *input)
{
    check_that(code >= CLI_OK && code <= CLI_CHECK_FAILED, "exit status %d", code);
    check_that(code == CLI_OK || !strncmp(err, "numoe: ", 7), "status %d: \"%s\"", code, err);
    check_that(code != CLI_OK || *out, "no answer");
    fuzz_check_text(out, input);
}

static int plan(struct cli_values *values, size_t machine)
{
    values->topology = saved(machine);
    values->directory = NULL; /* nothing is written, and no file is read */
    if (values->svg)
        values->svg = fuzz_path("plan.svg");
    values->png = NULL;
    if (!values->model)
        values->model = "v4-flash";
    return cli_plan.run(values);
}

static void run(const struct cli_verb *verb, int argc, char **argv, const char *input)
{
    FILE *const out = stdout, *const err = stderr;
    struct fuzz_print answer, complaint;
    struct cli_values values;
    int code;

    if (verb == &cli_plan)
        for (size_t i = 0; i < MACHINES; i++)
            saved(i);
    fuzz_print_open(&answer);
    fuzz_print_open(&complaint);
    stdout = answer.out;
    stderr = complaint.out;
    code = cli_parse(verb, argc, argv, &values);
    if (code < 0 && verb == &cli_plan)
        code = plan(&values, strlen(input) % MACHINES);
    stdout = out;
    stderr = err;
    cli_values_free(&values);
    fuzz_print_take(&answer);
    fuzz_print_take(&complaint);
    if (code >= 0)
        check_answer(code, answer.text, complaint.text, input);
    free(answer.text);
    free(complaint.text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = fuzz_text(data, size), *words = fuzz_text(data, size), *save = NULL;
    char *argv[MOST_WORDS + 1] = {NULL};
    int argc = 0;

    for (char *word = words ? strtok_r(words, "\n", &save) : NULL; word && argc < MOST_WORDS;
         word = strtok_r(NULL, "\n", &save))
        argv[argc++] = word;
    for (size_t i = 0; argc && i < VERBS; i++)
        if (!strcmp(verbs[i]->name, argv[0]))
            run(verbs[i], argc, argv, text);
    free(words);
    free(text);
    return argc ? 0 : -1;
}
