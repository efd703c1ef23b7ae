/* Options of predictions: GPUs and bandwidths. SPDX-License-Identifier: Apache-2.0 */
#include "cli_predict.h"

#include "base/checked.h"
#include "cli_output.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double most_gbs = 1e6;

/* "25", "25.5", "25GB/s": digits with at most one point. *end: what follows. */
static bool parse_gbs(const char *text, double *gbs, const char **end)
{
    double value = 0, place = 1;
    const char *p = text;
    int digits = 0;

    for (; *p >= '0' && *p <= '9'; p++, digits++)
        value = value * 10 + (*p - '0');
    if (*p == '.')
        for (p++; *p >= '0' && *p <= '9'; p++, digits++)
            value += (*p - '0') * (place /= 10);
    if (!strncmp(p, "GB/s", 4))
        p += 4;
    *end = p;
    *gbs = value;
    return digits && value > 0 && value <= most_gbs;
}

int cli_parse_gpu(const char *text, struct cli_values *values, struct numoe_error *error)
{
    struct numoe_error inner = NUMOE_ERROR_INIT;
    const char *at = strchr(text, '@'), *p;
    struct numoe_predict_gpu gpu = {0}, *grown;
    uint64_t node = 0;

    if (!at || at == text || (size_t)(at - text) >= sizeof gpu.name)
        goto malformed;
    for (p = text; p < at; p++) {
        if (*p <= ' ' || *p > '~')
            goto malformed;
        gpu.name[p - text] = *p;
    }
    for (p = at + 1; *p >= '0' && *p <= '9'; p++) {
        node = node * 10 + (uint64_t)(*p - '0');
        if (node >= NUMOE_NONE)
            goto malformed;
    }
    if (p == at + 1 || *p != ',')
        goto malformed;
    gpu.node = (uint32_t)node;
    if (!parse_gbs(p + 1, &gpu.link_gbs, &p) || *p != ',')
        goto malformed;
    if (cli_parse_size(p + 1, &gpu.memory_bytes, &inner) || !gpu.memory_bytes)
        goto malformed;
    /* like the link, in billions unless a unit says otherwise */
    if (p[1 + strspn(p + 1, "0123456789")] == 0 &&
        !numoe_mul_u64(gpu.memory_bytes, 1000000000, &gpu.memory_bytes))
        goto malformed;
    grown = realloc(values->gpus, (values->gpu_count + 1u) * sizeof *grown);
    if (!grown)
        return numoe_error_set(error, -ENOMEM, NULL, "out of memory");
    grown[values->gpu_count++] = gpu;
    values->gpus = grown;
    return 0;
malformed:
    return numoe_error_set(error, -EINVAL, NULL,
                           "\"%s\" is not NAME@NODE,GB/s,GB such as a10@4,25GB/s,24GB", text);
}

static int add_rate(struct cli_values *values, uint32_t node, double gbs)
{
    const uint32_t count = values->rate_count;

    if ((count & (count - 1)) == 0) { /* full: room is a power of two */
        struct cli_rate *grown =
            realloc(values->rates, (count ? 2 * (size_t)count : 1) * sizeof *grown);

        if (!grown)
            return -ENOMEM;
        values->rates = grown;
    }
    values->rates[values->rate_count++] = (struct cli_rate){node, gbs};
    return 0;
}

int cli_parse_rates(const char *text, struct cli_values *values, struct numoe_error *error)
{
    struct numoe_error inner = NUMOE_ERROR_INIT;
    const char *equals = strchr(text, '='), *end;
    struct cli_list nodes = {NULL, 0};
    char *list = NULL;
    double gbs;
    int rc = -EINVAL;

    if (!parse_gbs(equals ? equals + 1 : text, &gbs, &end) || *end)
        goto out;
    if (!equals) {
        rc = add_rate(values, NUMOE_NONE, gbs);
        goto out;
    }
    list = strndup(text, (size_t)(equals - text));
    rc = list ? cli_parse_list(list, &nodes, &inner) : -ENOMEM;
    for (uint32_t i = 0; !rc && i < nodes.count; i++)
        rc = add_rate(values, nodes.values[i], gbs);
out:
    free(list);
    free(nodes.values);
    if (rc == -ENOMEM)
        return numoe_error_set(error, rc, NULL, "out of memory");
    if (rc)
        return numoe_error_set(error, -EINVAL, NULL,
                               "\"%s\" is not a bandwidth such as 9.6GB/s or 0-15=9.6GB/s", text);
    return 0;
}

/* Bandwidths by dense index. What is said of a node counts more than what is said of all. */
static int fill_rates(const struct cli_values *values, const struct numoe_machine *machine,
                      double *node_gbs)
{
    for (uint32_t r = 0; r < values->rate_count; r++)
        for (uint32_t i = 0; i < machine->node_count && values->rates[r].node == NUMOE_NONE; i++)
            node_gbs[i] = values->rates[r].gbs;
    for (uint32_t r = 0; r < values->rate_count; r++) {
        uint32_t i = 0;

        if (values->rates[r].node == NUMOE_NONE)
            continue;
        while (i < machine->node_count && machine->nodes[i].os_index != values->rates[r].node)
            i++;
        if (i == machine->node_count) {
            cli_error("plan", "--node-bandwidth: there is no memory node %u",
                      values->rates[r].node);
            return CLI_USAGE;
        }
        node_gbs[i] = values->rates[r].gbs;
    }
    return CLI_OK;
}

/* Records and scratch of the instructions asked for; of the best here when this CPU lacks them. */
static void count_workspace(const struct numoe_model_desc *desc, const char *isa,
                            struct numoe_predict_options *options)
{
    const struct numoe_kernels *kernels = numoe_kernels_select(NUMOE_FAST, isa, NULL);
    struct numoe_slice_shape shape;

    if (!kernels)
        kernels = numoe_kernels_at(NUMOE_FAST, 0);
    if (numoe_slice_shape_init(&shape, desc->hidden, desc->bias))
        return;
    options->record_bytes = kernels->record_bytes(&shape);
    options->scratch_bytes = kernels->scratch_bytes(&shape);
}

int cli_predict_options(const struct cli_values *values, const struct numoe_model_desc *desc,
                        const struct numoe_machine *machine, struct numoe_predict_options *options,
                        double **node_gbs)
{
    const struct numoe_format_info *format = numoe_format_info(desc->format);
    const struct numoe_kernels *kernels = NULL;

    *options = (struct numoe_predict_options)NUMOE_PREDICT_OPTIONS_INIT;
    options->gpus = values->gpus;
    options->gpu_count = values->gpu_count;
    options->tokens = values->tokens.values;
    options->token_count = values->tokens.count;
    count_workspace(desc, values->isa_count ? values->isas[0] : NULL, options);
    options->without_kernel = format && !format->has_kernels ? format->title : NULL;
    if (values->isa_count)
        options->isa = values->isas[0];
    else if (machine->live)
        kernels = numoe_kernels_select(NUMOE_FAST, NULL, NULL);
    if (kernels)
        options->isa = kernels->isa;
    if (!values->rate_count)
        return CLI_OK;
    *node_gbs = calloc(machine->node_count, sizeof **node_gbs);
    if (!*node_gbs) {
        cli_error("plan", "out of memory");
        return CLI_FAILURE;
    }
    options->node_gbs = *node_gbs;
    return fill_rates(values, machine, *node_gbs);
}
