/* Pictures in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#include "cli_draw.h"

#include "cli_model.h"
#include "cli_options.h"
#include "cli_output.h"
#include "draw_plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int draw_fn(const struct draw_page *page, FILE *out, struct numoe_error *error);

static int refuse(const char *path, int code, const char *message)
{
    cli_error(path, "%s", message);
    return code == -ENOSPC || code == -ENOMEM ? CLI_NO_ROOM : CLI_FAILURE;
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

int cli_draw_plan(const struct cli_values *values, const struct numoe_model_desc *desc,
                  const struct numoe_machine *machine, const struct numoe_plan *plan)
{
    struct draw_subject subject = {cli_model_title(values), NULL, machine, plan};
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct draw_layout *layout = NULL;
    struct draw_page *page = NULL;
    char detail[256];
    int code = CLI_OK;

    if (!values->svg && !values->png)
        return CLI_OK;
    if (values->png && !draw_png_available())
        return refuse("--png", -ENOTSUP,
                      "this numoe was built without cairo, which PNG needs; --svg does not");
    snprintf(detail, sizeof detail,
             "%" PRIu64 " MoE layers of %" PRIu64 " experts, %" PRIu64 " a token; hidden %" PRIu64
             ", intermediate %" PRIu64,
             desc->layers, desc->experts, desc->experts_per_token, desc->hidden,
             desc->intermediate);
    subject.detail = detail;
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
    return code;
}
