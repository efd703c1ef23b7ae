/* numoe topo. SPDX-License-Identifier: Apache-2.0 */
#include "calibrate.h"
#include "cli_gpu.h"
#include "cli_options.h"
#include "cli_output.h"
#include "numoe_gpu.h"
#include "numoe_topo.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

static void measuring(void *user, uint32_t done, uint32_t total, const char *what)
{
    (void)user;
    cli_progress("measuring: %" PRIu32 " of %" PRIu32 ": %s", done, total, what);
}

static int measure(struct numoe_machine *machine, uint64_t duration_s)
{
    struct numoe_calibrate_options options = {.progress = measuring,
                                              .budget_ns = duration_s * 1000000000u};
    struct numoe_error error = NUMOE_ERROR_INIT;
    int rc = numoe_calibrate(machine, &options, &error);

    cli_progress_end();
    return rc ? cli_report("topo", CLI_STAGE_WORK, &error) : CLI_OK;
}

/* The directory whose sys/ and proc/ tell how this machine is set up; NULL: nothing does. */
static const char *root_of(const struct cli_values *values, const struct numoe_machine *machine)
{
    struct stat info;

    if (machine->live)
        return "";
    return values->topology && stat(values->topology, &info) == 0 && S_ISDIR(info.st_mode)
               ? values->topology
               : NULL;
}

static int run(const struct cli_values *values)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_warnings warnings = {0};
    struct numoe_machine *machine;
    enum numoe_gpu_mode mode;
    const char *root;
    int code = CLI_OK;

    if (numoe_gpu_mode(NUMOE_GPU_ON, &mode, &error))
        return cli_report("topo", CLI_STAGE_OPTIONS, &error);
    if (numoe_machine_load(values->topology, &machine, &error))
        return cli_report("topo", CLI_STAGE_INPUT, &error);
    if (values->duration_s && !values->measure) {
        cli_error("topo", "--duration is how long --measure may take, which is missing");
        code = CLI_USAGE;
        goto out;
    }
    if (values->measure && !machine->live) {
        cli_error("topo", "--measure is for this machine, not for one that --topology describes");
        code = CLI_USAGE;
        goto out;
    }
    if (values->measure)
        code = measure(machine, values->duration_s);
    if (!code && values->save && numoe_machine_save(machine, values->save, &error))
        code = cli_report(values->save, CLI_STAGE_OUTPUT, &error);
    if (code)
        goto out;
    root = root_of(values, machine);
    if (root && numoe_machine_health(machine, root, &warnings)) {
        cli_error("topo", "out of memory");
        code = CLI_NO_ROOM;
        goto out;
    }
    if (values->json) {
        code = cli_topo_json(machine, &warnings, mode) ? CLI_FAILURE : CLI_OK;
    } else {
        numoe_machine_print(machine, stdout);
        cli_topo_gpus(machine, mode);
        numoe_warnings_print(&warnings, stdout);
    }
    code = cli_flush(code);
out:
    numoe_warnings_free(&warnings);
    numoe_machine_free(machine);
    return code;
}

static const enum cli_option options[] = {CLI_TOPOLOGY, CLI_MEASURE, CLI_MEASURE_TIME,
                                          CLI_SAVE,     CLI_JSON,    CLI_END};

const struct cli_verb cli_topo = {
    .name = "topo",
    .arguments = "",
    .summary = "show the machine: memory nodes, cores, caches, devices, limits",
    .description =
        "Show this machine, or one recorded in a file, as numoe sees it: memory nodes\n"
        "with their cores, distances, devices, what limits apply, and what costs speed,\n"
        "with the command that mends it. Each GPU of this machine is tried out, and it\n"
        "is shown whether it can be used and why not.\n",
    .directory = CLI_DIRECTORY_NONE,
    .options = options,
    .run = run,
};
