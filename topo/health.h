/*
 * health.h - what of a system's settings and limits costs speed.
 *
 * Two steps, so that each can be tested alone: values are read below a directory that stands for
 * "/", and judged without looking at any file.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef HEALTH_H
#define HEALTH_H

#include "numoe_topo.h"

enum { HEALTH_NOT_KNOWN = -1 };

struct health_node {
    int64_t huge_2m, huge_1g; /* pages reserved */
};

/* As the system says, HEALTH_NOT_KNOWN where it does not. */
struct health_values {
    int64_t numa_balancing; /* 0: off */
    int64_t zone_reclaim_mode;
    int64_t max_map_count;
    int64_t io_uring_disabled; /* 1: for those without privilege, 2: for all */
    int64_t swappiness;
    char huge_pages[16]; /* "always", "madvise", "never"; or empty: not known */
    char governor[32];   /* of the first CPU whose governor is not "performance"; or empty */
    uint32_t slow_cpus;  /* CPUs with such a governor */
    uint64_t swap_bytes, swap_used_bytes;
    uint64_t locked_bytes;     /* limit of locked memory; UINT64_MAX: none, or not known */
    double cpu_quota;          /* 0: none */
    uint64_t cgroup_bytes;     /* what the cgroup still grants; UINT64_MAX: no limit */
    struct health_node *nodes; /* of machine->nodes */
    int policy_error;          /* errno of binding memory to a node; 0: works, or was not tried */
};

/* @return 0 (free with health_free) or -ENOMEM */
int health_read(const struct numoe_machine *machine, const char *root,
                struct health_values *values);
void health_free(struct health_values *values);

/* Append a warning for each thing that is not as it should be. @return 0 or -ENOMEM */
int health_judge(const struct numoe_machine *machine, const struct health_values *values,
                 struct numoe_warnings *warnings);

#endif
