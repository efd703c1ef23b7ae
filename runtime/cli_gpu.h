/* cli_gpu.h - GPUs in the numoe command. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_CLI_GPU_H
#define NUMOE_CLI_GPU_H

#include "numoe.h"
#include "numoe_topo.h"

struct cli_values;
struct json_t;

/* numoe bench --gpu. Returns an exit code. */
int cli_bench_gpu(const struct cli_values *values);

/* numoe bench --gpu --share. Returns an exit code. */
int cli_bench_share(const struct cli_values *values);

/* What of a run a GPU did, and why not more. */
struct numoe_gpu_report;
void cli_print_gpu(const struct numoe_model_info *info, const struct numoe_stats *stats,
                   const struct numoe_gpu_report *report);
struct json_t *cli_gpu_json(const struct numoe_model_info *info, const struct numoe_stats *stats,
                            const struct numoe_gpu_report *report);

/* The GPUs of this machine with locality, and whether each can be used; nothing for another's, and
 * none is looked at with mode off. */
void cli_topo_gpus(const struct numoe_machine *machine, enum numoe_gpu_mode mode);
/* The whole of numoe topo --json. 0, -ENOMEM or -EIO */
int cli_topo_json(const struct numoe_machine *machine, const struct numoe_warnings *warnings,
                  enum numoe_gpu_mode mode);

#endif
