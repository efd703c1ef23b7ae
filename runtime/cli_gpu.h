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

/* What of a run GPUs did, all of them and each, and why not more. */
struct numoe_gpu_report;
struct stats_snapshot;
void cli_print_gpu(const struct numoe_model_info *info, const struct stats_snapshot *stats,
                   const struct numoe_gpu_report *report);
struct json_t *cli_gpu_json(const struct numoe_model_info *info, const struct stats_snapshot *stats,
                            const struct numoe_gpu_report *report);

/* The GPUs of this machine with locality, and whether each can be used; none is looked at with mode
 * off. Of those of another machine, where their staging would lie. */
void cli_topo_gpus(const struct numoe_machine *machine, enum numoe_gpu_mode mode);
/* Of numoe topo: what there is to pin for GPUs; what pinning came to on one of this machine; and
 * where staging of those of a described machine would lie. */
struct numoe_gpu_pinning;
void cli_print_pinnable(const struct numoe_machine *machine);
struct json_t *cli_pinnable_json(const struct numoe_machine *machine);
void cli_print_pinning(const struct numoe_gpu_pinning *pinning);
struct json_t *cli_pinning_json(const struct numoe_gpu_pinning *pinning);
void cli_print_staging(const struct numoe_machine *machine);
struct json_t *cli_staging_json(const struct numoe_machine *machine);

/* The whole of numoe topo --json. 0, -ENOMEM or -EIO */
int cli_topo_json(const struct numoe_machine *machine, const struct numoe_warnings *warnings,
                  enum numoe_gpu_mode mode);

#endif
