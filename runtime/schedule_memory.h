/*
 * schedule_memory.h - the memory of a call, which one call leaves to the next.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_SCHEDULE_MEMORY_H
#define NUMOE_SCHEDULE_MEMORY_H

#include "schedule.h"

enum schedule_memory {
    MEMORY_LANES,
    MEMORY_RUNS,
    MEMORY_ENTRIES,
    MEMORY_TOKEN_FIRST,
    MEMORY_TOKEN_ROWS,
    MEMORY_LANE_FIRST,
    MEMORY_RECORDS,
    MEMORY_ROWS,
    MEMORY_SCRATCH,
    MEMORY_OWN_EPOCH,
    MEMORY_BUILD,
    MEMORY_ROW_TOKEN,
    MEMORY_SEEN,
    MEMORY_NODE_BYTES,
    MEMORY_LANE_WORKER,
    MEMORY_LANE_SORTED,
    MEMORY_LANE_COST,
    MEMORY_LANE_ORDER,
    MEMORY_TOKEN_ENDS,
    MEMORY_SHAPE,
    MEMORY_USES
};
_Static_assert((int)MEMORY_USES == (int)SCHEDULE_MEMORY_USES, "a place for every use");

/* More than there is. */
int schedule_more(struct numoe_schedule *schedule, enum schedule_memory use, uint64_t bytes,
                  bool keep);

/* At least `bytes` at memory[use].data, and half as many more when it has to grow; what was there
 * is kept. Zero bytes are fine. Returns 0, -ENOMEM or -EOVERFLOW. */
static inline int schedule_grow(struct numoe_schedule *schedule, enum schedule_memory use,
                                uint64_t bytes)
{
    return bytes <= schedule->memory[use].bytes ? 0 : schedule_more(schedule, use, bytes, true);
}

/* As schedule_grow for memory that starts anew each call: nothing is copied. */
static inline int schedule_renew(struct numoe_schedule *schedule, enum schedule_memory use,
                                 uint64_t bytes)
{
    return bytes <= schedule->memory[use].bytes ? 0 : schedule_more(schedule, use, bytes, false);
}

#endif
