/* Pictures in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#include "cli_draw.h"

#include "cli_model.h"
#include "cli_options.h"
#include "cli_output.h"
#include "draw_plan.h"
#include "model.h"
#include "numoe_kernels.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int draw_fn(const struct draw_page *page, FILE *out, struct numoe_error *error);

static int refuse(const char *path, int code, const char *message)
{
    cli_error(path, "%s", message);
    return cli_output_code(code);
}

static int write_file(const char *path, const struct draw_page *page, draw_fn *draw)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    char message[256];
    FILE *out = fopen(path, "we");
    int rc;

    if (!out) {
        rc = -errno;
        snprintf(message, sizeof message, "could not be opened for writing: %s", strerror(-rc));
        return refuse(path, rc, message);
    }
    rc = draw(page, out, &error);
    if (fclose(out) && !rc) {
        rc = -errno;
        numoe_error_set(&error, rc, NULL, "could not be written: %s", strerror(-rc));
    }
    return rc ? refuse(path, rc, error.message) : CLI_OK;
}

/* Local to the one node that the link hangs on. */
static void place_gpu(const struct numoe_machine *machine, const struct numoe_predict_gpu *gpu,
                      struct numoe_device *device, uint32_t *node)
{
    *device = (struct numoe_device){.gpu = true,
                                    .package = NUMOE_NONE,
                                    .link_gbs = gpu->link_gbs,
                                    .memory_bytes = gpu->memory_bytes};
    snprintf(device->name, sizeof device->name, "%s", gpu->name);
    for (*node = 0; *node < machine->node_count && machine->nodes[*node].os_index != gpu->node;)
        ++*node;
    if (*node == machine->node_count)
        return;
    device->locality_known = true;
    device->package = machine->nodes[*node].package;
    device->nodes = node;
    device->node_count = 1;
}

/*
 * The machine as predicted: with the GPUs that were given, if any were, or its own with the rates
 * that copies reach. Drives stay. Everything but devices and nodes, which are the caller's to free,
 * is the machine's. 0 or -ENOMEM.
 */
static int as_predicted(const struct numoe_machine *machine,
                        const struct numoe_prediction *prediction, bool given,
                        struct numoe_machine *view, uint32_t **nodes)
{
    uint32_t count = 0, gpu = 0;
    struct numoe_device *devices;

    devices = calloc((size_t)machine->device_count + prediction->gpu_count + 1, sizeof *devices);
    *nodes = calloc((size_t)prediction->gpu_count + 1, sizeof **nodes);
    *view = *machine;
    view->devices = devices;
    if (!devices || !*nodes)
        return -ENOMEM;
    for (uint32_t i = 0; i < machine->device_count; i++) {
        if (machine->devices[i].gpu && given)
            continue;
        devices[count] = machine->devices[i];
        /* predictions list those of the machine in its order, some left out */
        if (devices[count].gpu && gpu < prediction->gpu_count &&
            !strcmp(devices[count].name, prediction->gpus[gpu].name))
            devices[count].link_gbs = prediction->gpus[gpu++].link_gbs;
        count++;
    }
    for (uint32_t i = 0; given && i < prediction->gpu_count; i++)
        place_gpu(machine, &prediction->gpus[i], &devices[count++], &(*nodes)[i]);
    view->device_count = count;
    return 0;
}

int cli_draw_plan(const struct cli_values *values, const struct numoe_model_desc *desc,
                  const struct numoe_machine *machine, const struct numoe_plan *plan,
                  const struct numoe_prediction *prediction)
{
    const struct numoe_expert_shape *shape = &plan->shape;
    struct numoe_machine view;
    struct draw_subject subject = {cli_model_title(values), NULL, &view, plan, prediction};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct draw_layout *layout = NULL;
    struct draw_page *page = NULL;
    uint32_t *nodes = NULL;
    char detail[256];
    int code = CLI_OK;

    if (!values->svg && !values->png)
        return CLI_OK;
    if (values->png && !draw_png_available())
        return refuse("--png", -ENOTSUP,
                      "this numoe was built without cairo, which PNG needs; --svg does not");
    snprintf(detail, sizeof detail,
             "%" PRIu64 " MoE layers of %" PRIu64 " experts, %" PRIu64 " a token; hidden %" PRIu64
             ", intermediate %" PRIu64 "; %s, %.1f GB",
             desc->layers, desc->experts, desc->experts_per_token, desc->hidden, desc->intermediate,
             numoe_format_info(desc->format)->title,
             (double)shape->layers * (double)shape->experts *
                 (double)(shape->slices * shape->slice_bytes + shape->expert_bytes) / 1e9);
    if (plan->range.end_slice - plan->range.first_slice != shape->slices ||
        plan->range.end_expert - plan->range.first_expert != shape->experts) {
        size_t length = strlen(detail);

        snprintf(detail + length, sizeof detail - length,
                 "; of which slices %" PRIu64 "-%" PRIu64 " of experts %" PRIu64 "-%" PRIu64,
                 plan->range.first_slice, plan->range.end_slice - 1, plan->range.first_expert,
                 plan->range.end_expert - 1);
    }
    subject.detail = detail;
    if (as_predicted(machine, prediction, values->gpu_count != 0, &view, &nodes)) {
        code = refuse("plan", -ENOMEM, "out of memory");
        goto out;
    }
    if (draw_layout_create(&subject, &layout, &error) || draw_page_create(layout, &page, &error)) {
        code = cli_report("plan", CLI_STAGE_WORK, &error);
        goto out;
    }
    if (values->svg)
        code = write_file(values->svg, page, draw_svg);
    if (values->png && !code)
        code = write_file(values->png, page, draw_png);
out:
    draw_page_free(page);
    draw_layout_free(layout);
    free(view.devices);
    free(nodes);
    return code;
}
