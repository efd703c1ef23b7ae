/* numoe synth. SPDX-License-Identifier: Apache-2.0 */
#include "cli_model.h"
#include "cli_options.h"
#include "cli_output.h"
#include "synth.h"

#include <inttypes.h>
#include <stdio.h>

static int show_progress(void *user, uint64_t bytes_done, uint64_t bytes_total)
{
    (void)user;
    cli_progress("writing %.2f of %.2f GB", (double)bytes_done / 1e9, (double)bytes_total / 1e9);
    return 0;
}

static int run(const struct cli_values *values)
{
    struct numoe_synth_options options = NUMOE_SYNTH_OPTIONS_INIT;
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_desc desc;
    int code;

    if (!values->model) {
        cli_error("synth", "--model is missing; see numoe synth --help");
        return CLI_USAGE;
    }
    code = cli_model_by_name("synth", values, values->model, &desc);
    if (code)
        return code;
    options.model = values->model;
    options.layers = values->layers;
    options.experts = values->experts;
    options.seed = values->seed;
    options.layout = values->layout;
    options.draft = values->draft;
    options.progress = show_progress;
    code = numoe_synth_write(values->directory, &options, &error);
    cli_progress_end();
    if (code)
        return cli_report(values->directory, CLI_STAGE_OUTPUT, &error);
    printf("%s: %s, %" PRIu64 " layers of %" PRIu64 " experts, seed %" PRIu64 "\n",
           values->directory, values->model, desc.layers, desc.experts, values->seed);
    return cli_flush(CLI_OK);
}

static const enum cli_option options[] = {CLI_MODEL,     CLI_LAYERS, CLI_EXPERTS, CLI_LAYOUT,
                                          CLI_DRAFT_TOO, CLI_SEED,   CLI_END};

const struct cli_verb cli_synth = {
    .name = "synth",
    .arguments = "--model NAME DIR",
    .summary = "write a checkpoint of random weights in a model's own layout",
    .description =
        "Write a checkpoint of a model with random weights into DIR, with the model's own\n"
        "tensor names, types, shapes, shards, index and config.json, or as GGUF files, for trying\n"
        "and testing.\n",
    .directory = CLI_DIRECTORY_REQUIRED,
    .options = options,
    .run = run,
};
