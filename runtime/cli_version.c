/* numoe version. SPDX-License-Identifier: Apache-2.0 */
#include "cli_options.h"
#include "cli_output.h"
#include "numoe.h"
#include "numoe_kernels.h"

#include <stdio.h>

static int run(const struct cli_values *values)
{
    (void)values;
    printf("numoe %s\n", numoe_version());
    printf("built by %s\n", __VERSION__);
    for (int arithmetic = 1; arithmetic <= NUMOE_ARITHMETICS; arithmetic++) {
        const struct numoe_kernels *kernels;

        printf("%s kernels on this CPU, best first:", cli_arithmetic_name(arithmetic));
        for (size_t i = 0; (kernels = numoe_kernels_at(arithmetic, i)); i++)
            printf("%s %s", i ? "," : "", kernels->isa);
        putchar('\n');
    }
    return cli_flush(CLI_OK);
}

static const enum cli_option options[] = {CLI_END};

const struct cli_verb cli_version = {
    .name = "version",
    .arguments = "",
    .summary = "print the version, and the kernels that run here",
    .description = "Print the version, the compiler, and which kernels run on this CPU.\n",
    .directory = CLI_DIRECTORY_NONE,
    .options = options,
    .run = run,
};
