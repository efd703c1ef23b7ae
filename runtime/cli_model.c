/* Models on the command line. SPDX-License-Identifier: Apache-2.0 */
#include "cli_model.h"

#include "checkpoint.h"
#include "cli_output.h"
#include "families.h"
#include "model.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

int cli_model_by_name(const char *verb, const struct cli_values *values, const char *name,
                      struct numoe_model_desc *desc)
{
    struct numoe_error error = NUMOE_ERROR_INIT;

    *desc = (struct numoe_model_desc)NUMOE_MODEL_DESC_INIT;
    if (numoe_model_by_name(name, desc, &error)) {
        cli_report(verb, CLI_STAGE_OPTIONS, &error);
        return CLI_USAGE;
    }
    if (values->layers)
        desc->layers = values->layers;
    if (values->experts)
        desc->experts = values->experts;
    if (desc->experts_per_token > desc->experts)
        desc->experts_per_token = desc->experts;
    return CLI_OK;
}

/* A model that has no name. Every number of it must be given. */
static int describe_shape(const char *verb, const struct cli_values *values,
                          struct numoe_model_desc *desc)
{
    const struct {
        const char *option;
        uint64_t value;
    } needed[] = {{"hidden", values->hidden},
                  {"intermediate", values->intermediate},
                  {"experts", values->experts},
                  {"experts-per-token", values->experts_per_token},
                  {"layers", values->layers}};

    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (!needed[i].value) {
            cli_error(verb,
                      "--%s is missing: a model without a name is --hidden, --intermediate, "
                      "--experts, --experts-per-token and --layers",
                      needed[i].option);
            return CLI_USAGE;
        }
    if (values->experts_per_token > values->experts) {
        cli_error(verb, "--experts-per-token %" PRIu64 " is more than --experts %" PRIu64,
                  values->experts_per_token, values->experts);
        return CLI_USAGE;
    }
    *desc = (struct numoe_model_desc)NUMOE_MODEL_DESC_INIT;
    desc->layers = values->layers;
    desc->experts = values->experts;
    desc->experts_per_token = values->experts_per_token;
    desc->hidden = values->hidden;
    desc->intermediate = values->intermediate;
    desc->format = values->format ? values->format : NUMOE_MXFP4;
    desc->activation.kind = NUMOE_SILU; /* planning does not look at it */
    return CLI_OK;
}

static int describe_checkpoint(const char *verb, const struct cli_values *values,
                               struct numoe_model_desc *desc)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_checkpoint *checkpoint = NULL;
    struct numoe_log log = cli_log();
    struct numoe_checkpoint_options options = {
        .log = &log, .draft = values->draft, .family = values->family};

    if (values->experts || values->format) {
        cli_error(verb, "--%s goes with --model: a checkpoint has the %s it has",
                  values->experts ? "experts" : "format", values->experts ? "experts" : "format");
        return CLI_USAGE;
    }
    if (numoe_checkpoint_open(values->directory, &options, &checkpoint, &error))
        return cli_report(values->directory, CLI_STAGE_INPUT, &error);
    *desc = *numoe_checkpoint_desc(checkpoint);
    numoe_checkpoint_close(checkpoint);
    if (values->layers)
        desc->layers = values->layers;
    return CLI_OK;
}

int cli_model_describe(const char *verb, const struct cli_values *values,
                       struct numoe_model_desc *desc)
{
    const char *part = values->hidden              ? "hidden"
                       : values->intermediate      ? "intermediate"
                       : values->experts_per_token ? "experts-per-token"
                                                   : NULL;
    int code;

    if (part && (values->model || values->directory)) {
        cli_error(verb, "--%s is of a model without a name: it goes without --model and DIR", part);
        return CLI_USAGE;
    }
    if (!values->directory && (values->draft || values->family)) {
        cli_error(verb, "--%s is of the checkpoint in a directory",
                  values->draft ? "draft" : "family");
        return CLI_USAGE;
    }
    if (part)
        return describe_shape(verb, values, desc);
    if (!values->model == !values->directory) {
        cli_error(verb, "either --model or a directory is needed; see numoe %s --help", verb);
        return CLI_USAGE;
    }
    if (values->directory)
        return describe_checkpoint(verb, values, desc);
    code = cli_model_by_name(verb, values, values->model, desc);
    if (!code && values->format)
        desc->format = values->format;
    return code;
}

const char *cli_model_title(const struct cli_values *values)
{
    return values->model       ? values->model
           : values->directory ? values->directory
                               : "model as described";
}

/* Bytes of an expert, and of all that a token reads. */
static uint64_t sizes_of(const struct numoe_model_desc *desc, uint64_t *all, uint64_t *token)
{
    struct numoe_expert_shape shape = {0};
    uint64_t expert;

    numoe_model_expert_shape(desc, &shape, NULL);
    expert = shape.slices * shape.slice_bytes + shape.expert_bytes;
    *all = expert * desc->experts * desc->layers;
    *token = expert * desc->experts_per_token * desc->layers;
    return expert;
}

static json_t *json_model(const char *name, const struct numoe_model_desc *desc)
{
    const struct numoe_format_info *format = numoe_format_info(desc->format);
    uint64_t all, token, expert = sizes_of(desc, &all, &token);

    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:b, s:I, s:I, s:I, s:b}", "name", name,
                     "layers", (json_int_t)desc->layers, "experts", (json_int_t)desc->experts,
                     "experts_per_token", (json_int_t)desc->experts_per_token, "hidden",
                     (json_int_t)desc->hidden, "intermediate", (json_int_t)desc->intermediate,
                     "format", format->name, "bias", (int)desc->bias, "expert_bytes",
                     (json_int_t)expert, "total_bytes", (json_int_t)all, "token_bytes",
                     (json_int_t)token, "kernels", (int)format->has_kernels);
}

int cli_model_list(const struct cli_values *values)
{
    json_t *list = values->json ? json_array() : NULL;
    struct numoe_model_desc desc;
    const char *name;

    if (!values->json)
        printf("%-13s %6s %7s %7s %6s %12s  %-15s %9s %8s %10s\n", "model", "layers", "experts",
               "a token", "hidden", "intermediate", "format", "MB expert", "GB", "GB a token");
    for (size_t i = 0; (name = numoe_model_name_at(i)); i++) {
        const struct numoe_format_info *format;
        uint64_t all, token, expert;

        numoe_model_by_name(name, &desc, NULL);
        format = numoe_format_info(desc.format);
        expert = sizes_of(&desc, &all, &token);
        if (values->json)
            json_array_append_new(list, json_model(name, &desc));
        else
            printf("%-13s %6" PRIu64 " %7" PRIu64 " %7" PRIu64 " %6" PRIu64 " %12" PRIu64
                   "  %-15s %9.2f %8.1f %10.2f%s\n",
                   name, desc.layers, desc.experts, desc.experts_per_token, desc.hidden,
                   desc.intermediate, format->title, (double)expert / 1e6, (double)all / 1e9,
                   (double)token / 1e9, format->has_kernels ? "" : "  plan only");
    }
    return values->json ? cli_print_json(list) : cli_flush(CLI_OK);
}
