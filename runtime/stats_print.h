/*
 * stats_print.h - a snapshot of all stats of a context, and the words that its printed forms share.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_STATS_PRINT_H
#define NUMOE_STATS_PRINT_H

#include "numoe.h"

struct stats_snapshot {
    struct numoe_stats all;
    struct numoe_worker_stats *workers; /* [all.workers] */
    struct numoe_node_stats *nodes;     /* [all.nodes] */
    struct numoe_gpu_stats *gpus;       /* [all.gpus] */
};

/* Returns 0 (free with numoe_stats_snapshot_free), -ENOMEM, -ECHILD or -EINVAL. */
int numoe_stats_snapshot(struct numoe *context, struct stats_snapshot *snapshot);
void numoe_stats_snapshot_free(struct stats_snapshot *snapshot);

/* "l3", "node", "domain", "package", "machine" */
extern const char *const numoe_distance_names[NUMOE_DISTANCES];

/* "none", "in-place", "mixed", "staging": of enum numoe_pinning */
extern const char *const numoe_pinning_names[];

/* One GPU's, the index-th of a context's. NULL: out of memory. */
struct json_t;
struct json_t *numoe_stats_gpu_json(const struct numoe_gpu_stats *gpu, uint32_t index);

/* The same as numoe_stats_print_json as an object; NULL: out of memory. */
struct json_t *numoe_stats_json(const struct stats_snapshot *snapshot);

#endif
