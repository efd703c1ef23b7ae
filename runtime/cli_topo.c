/* numoe topo. SPDX-License-Identifier: Apache-2.0 */
#include "cli_gpu.h"
#include "cli_options.h"
#include "cli_output.h"
#include "numoe_gpu.h"
#include "numoe_topo.h"

#include <stdio.h>

static int run(const struct cli_values *values)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_machine *machine;
    enum numoe_gpu_mode mode;
    int rc = 0;

    if (numoe_gpu_mode(NUMOE_GPU_ON, &mode, &error))
        return cli_report("topo", CLI_STAGE_OPTIONS, &error);
    if (numoe_machine_load(values->topology, &machine, &error))
        return cli_report("topo", CLI_STAGE_INPUT, &error);
    if (values->json) {
        rc = cli_topo_json(machine, mode);
    } else {
        numoe_machine_print(machine, stdout);
        cli_topo_gpus(machine, mode);
    }
    numoe_machine_free(machine);
    return cli_flush(rc ? CLI_FAILURE : CLI_OK);
}

static const enum cli_option options[] = {CLI_TOPOLOGY, CLI_JSON, CLI_END};

const struct cli_verb cli_topo = {
    .name = "topo",
    .arguments = "",
    .summary = "show the machine: memory nodes, cores, caches, devices, limits",
    .description = "Show this machine, or one recorded in a file, as numoe sees it: memory nodes\n"
                   "with their cores, distances, devices, and what limits apply. Each GPU of this\n"
                   "machine is tried out, and it is shown whether it can be used and why not.\n",
    .directory = CLI_DIRECTORY_NONE,
    .options = options,
    .run = run,
};
