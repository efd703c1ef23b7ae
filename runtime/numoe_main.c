/* The numoe command. SPDX-License-Identifier: Apache-2.0 */
#include "cli_options.h"
#include "cli_output.h"
#include "families.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct cli_verb *const verbs[] = {&cli_topo,  &cli_plan, &cli_synth,   &cli_run,
                                               &cli_bench, &cli_soak, &cli_certify, &cli_version};

enum { VERB_COUNT = sizeof verbs / sizeof verbs[0] };

static void print_usage(FILE *out)
{
    fprintf(out, "Usage: numoe VERB [OPTION]...\n"
                 "\n"
                 "Executes the routed experts of Mixture-of-Experts models on this machine.\n"
                 "\n"
                 "Verbs:\n");
    for (size_t i = 0; i < VERB_COUNT; i++)
        fprintf(out, "  %-9s %s\n", verbs[i]->name, verbs[i]->summary);
    fprintf(out, "\nnumoe VERB --help shows the options of a verb.\n\nModels:");
    for (size_t i = 0; numoe_model_name_at(i); i++)
        fprintf(out, "%s %s", i ? "," : "", numoe_model_name_at(i));
    fprintf(out,
            "\n\n"
            "Environment:\n"
            "  NUMOE_ISA         ref, avx2, avxvnni, avx512, avx512vnni or avx512vnni256: the\n"
            "                    instructions to use, where --isa says nothing\n"
            "  NUMOE_GPU         off, on or force, whatever --gpu says; force: also a GPU that\n"
            "                    computes wrong\n"
            "  NUMOE_GPU_TUNING  the file of --gpu-tuning, where that is not given\n"
            "  NUMOE_NCCL        the library of --gpu-sum nccl (default: libnccl.so.2)\n"
            "  TMPDIR            where soak makes its folder (default: /tmp)\n"
            "\n%s",
            cli_exit_help);
}

/* A file opened later must not take the place of a closed stdin, stdout or stderr. What stands
 * there instead is opened the wrong way round, so that an answer nobody gets is still an error. */
static int hold_standard_files(void)
{
    int fd = STDIN_FILENO;

    while (fd <= STDERR_FILENO) {
        fd = open("/dev/null", O_WRONLY);
        if (fd > STDIN_FILENO && fd <= STDERR_FILENO) {
            close(fd);
            fd = open("/dev/null", O_RDONLY);
        }
        if (fd < 0)
            return -errno;
    }
    close(fd);
    return 0;
}

int main(int argc, char **argv)
{
    struct cli_values values;
    int code;

    if (hold_standard_files())
        return CLI_FAILURE;
    if (argc < 2) {
        print_usage(stderr);
        return CLI_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_usage(stdout);
        return cli_flush(CLI_OK);
    }
    if (!strcmp(argv[1], "--version"))
        argv[1] = (char *)cli_version.name;
    for (size_t i = 0; i < VERB_COUNT; i++) {
        if (strcmp(argv[1], verbs[i]->name) != 0)
            continue;
        code = cli_parse(verbs[i], argc - 1, argv + 1, &values);
        if (code < 0)
            code = verbs[i]->run(&values);
        cli_values_free(&values);
        return code;
    }
    cli_error(NULL, "\"%s\" is not a verb; see numoe --help", argv[1]);
    return CLI_USAGE;
}
