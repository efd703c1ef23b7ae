/*
 * fork_join.h - what an empty fork and join costs: numoe's pool beside libgomp and pthreadpool.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_FORK_JOIN_H
#define NUMOE_FORK_JOIN_H

#include <stdint.h>

/*
 * A way to have `workers` threads, the caller among them, run the items 0 .. workers - 1. An item
 * adds one to its own cell of a table, a cache line each, so that what ran can be checked.
 */
struct fork_join_cell {
    _Alignas(64) uint64_t runs;
};
extern struct fork_join_cell *fork_join_cells;

struct fork_join_way {
    const char *name;
    uint32_t workers;                    /* 0: as many as asked for */
    int (*create)(uint32_t workers);     /* start the threads; 0, or negative errno */
    void (*fork_join)(uint32_t workers); /* once */
    void (*destroy)(void);               /* end the threads */
};

/* In the order of the report; the last has no name. */
extern const struct fork_join_way fork_join_ways[];

#endif
