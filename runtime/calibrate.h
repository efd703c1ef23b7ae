/*
 * calibrate.h - measure how fast each node's memory is read, and from where.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_CALIBRATE_H
#define NUMOE_CALIBRATE_H

#include "numoe_topo.h"

enum { NUMOE_CALIBRATE_PAIRS = 1024 };

struct numoe_calibrate_options {
    uint64_t pair_ns;      /* for one pair, two thirds bandwidth and one latency; 0: 300 ms */
    uint32_t pair_limit;   /* pairs measured at most; 0: NUMOE_CALIBRATE_PAIRS */
    uint64_t budget_ns;    /* no pair but the first is begun after so long; 0: no limit */
    uint64_t buffer_bytes; /* a node; 0: four times the caches of a domain, 128 MiB to 1 GiB */
    const char *isa;       /* of the reading loop, as numoe_kernels_select */
    /* Called before each step, by the calling thread; may be NULL. what: a few words. */
    void (*progress)(void *user, uint32_t done, uint32_t total, const char *what);
    void *progress_user;
};

/*
 * Measure, and put the results into the machine, in place of those that were there. For each pair
 * of CPU domain and memory node: all cores of the domain read that node's memory, then one follows
 * a chain through it; at last the cores of all nodes read their own node at once. Local pairs come
 * first, then by distance, until pair_limit or budget_ns is reached.
 *
 * A node takes its buffer's size of memory meanwhile, at most a quarter of what is free there and
 * of an equal part of what the cgroup grants. Time: preparing takes about a second for a GiB of
 * buffers, then pair_ns for each pair and twice that for all at once.
 *
 * What cannot be measured (no room, a denied binding, a CPU that cannot be pinned to) is left out
 * or measured as it can be, and is a note of the machine.
 * machine: live. Returns 0; -EINVAL when it is not live or the ISA does not run here; -ENOMEM;
 * -EAGAIN when not one thread could be started. On error the machine is as it was, save notes.
 */
int numoe_calibrate(struct numoe_machine *machine, const struct numoe_calibrate_options *options,
                    struct numoe_error *error);

#endif
