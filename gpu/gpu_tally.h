/*
 * gpu_tally.h - numbers of a model on a device that anyone may read while calls run. One thread at
 * a time writes, whoever has the model's turn; a reader gets each number whole, and two of them may
 * be a moment apart. So both sides are relaxed: no number says that another is there.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_TALLY_H
#define NUMOE_GPU_TALLY_H

#include <stdatomic.h>
#include <stdint.h>

enum gpu_number {
    GPU_COPIED_BYTES,
    GPU_COPIED_EXPERTS,
    GPU_FOUND_EXPERTS,
    GPU_PIECES_TAKEN,
    GPU_BATCHES,
    GPU_CALLS,
    GPU_TOKENS,
    GPU_PEER_BYTES,
    GPU_SUMMED_TOKENS,
    GPU_PASSED_BYTES,
    GPU_PASSED_EXPERTS,
    /* what there is now */
    GPU_SUM_WAY,
    GPU_RELAYS,
    GPU_POOL_BYTES,
    GPU_WINDOW_BYTES,
    GPU_CELLS,
    GPU_RESIDENT,
    GPU_WORKSPACE_BYTES,
    GPU_NUMBERS
};

struct gpu_tally {
    atomic_uint_fast64_t of[GPU_NUMBERS];
};

static inline uint64_t gpu_tally_get(const struct gpu_tally *tally, enum gpu_number which)
{
    /* C11 has no load of a const atomic */
    return atomic_load_explicit((atomic_uint_fast64_t *)&tally->of[which], memory_order_relaxed);
}

static inline void gpu_tally_set(struct gpu_tally *tally, enum gpu_number which, uint64_t number)
{
    atomic_store_explicit(&tally->of[which], number, memory_order_relaxed);
}

static inline void gpu_tally_add(struct gpu_tally *tally, enum gpu_number which, uint64_t more)
{
    gpu_tally_set(tally, which, gpu_tally_get(tally, which) + more);
}

#endif
