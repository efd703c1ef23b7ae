/*
 * gpu_sum.h - the parts of outputs that several devices computed, summed on the devices.
 *
 * Every device has fp32 sums of its own experts or slices, for all tokens of a pass. Outputs are
 * taken in rounds of consecutive tokens, and of a round each device makes a range of rows:
 *
 *   peer  on `compute`: copies of these rows from the other devices to scratch; on `results`,
 * behind them: their sum in the order of the devices, and its copy to staging nccl  on `results`:
 * its reduce-scatter to scratch, and the copy to staging
 *
 * So over each link to the host comes 1/n of the outputs, once, and the host adds nothing. Partial
 * sums stay as they are until the pass is over: whatever fails, another way, and at last the host,
 * goes on with the rows that are left.
 *
 * A round begins only when the host has seen all devices' `computed`; no device waits for another's
 * event. Rounds alternate between two slots of scratch and two stages of staging: one is used
 * again when the host has taken what was in it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_SUM_H
#define NUMOE_GPU_SUM_H

#include "gpu_links.h"
#include "gpu_model.h"
#include "gpu_nccl.h"

/* Opening, choosing by links and NCCL, and each way once, may have something to say. */
enum { GPU_SUM_NOTES = 5 };

struct gpu_sum {
    uint32_t count;
    struct numoe_gpu *gpus[NUMOE_GPU_MOST];
    enum numoe_gpu_sum wish, way; /* way: never AUTO */
    bool peers;           /* each device copies from each other, and what arrives is right */
    uint64_t least_bytes; /* of fp32 outputs, or of inputs, that way is taken for */
    uint8_t *scratch[NUMOE_GPU_MOST]; /* two slots */
    uint64_t slot_bytes;
    void *pulled[NUMOE_GPU_MOST][2]; /* events: copies to the slot */
    struct gpu_nccl nccl;
    double peer_gbs;
    /* for who reports, at any time: a note is written once, and counted then */
    struct gpu_tally tally;
    struct gpu_tally of[NUMOE_GPU_MOST]; /* bytes and tokens of each device */
    char notes[GPU_SUM_NOTES][216];
    atomic_uint noted;
};

/* Rows of a round. */
struct gpu_round {
    uint64_t at, tokens, each; /* each: of a device, but for the last ones */
    unsigned slot;
};

/* Open what the wish asks for, for rows of so many bytes, and try it. What cannot be had is noted
 * and no error. */
int gpu_sum_open(struct gpu_sum *sum, struct numoe_gpu *const *gpus, uint32_t count,
                 enum numoe_gpu_sum wish, uint64_t row, struct numoe_error *error);
/* By the links' speeds, if they were measured, and what has been opened. */
int gpu_sum_choose(struct gpu_sum *sum, const struct gpu_links *links,
                   const struct numoe_error *peer_error, struct numoe_error *error);
/* Also while calls run; the second: of one device, what it copied from others, and of how many
 * tokens it has summed the outputs. */
void gpu_sum_report(const struct gpu_sum *sum, struct numoe_gpu_report *report);
enum numoe_gpu_sum gpu_sum_of(const struct gpu_sum *sum, uint32_t device, uint64_t *peer_bytes,
                              uint64_t *summed_tokens);
/* Nothing is queued. */
void gpu_sum_close(struct gpu_sum *sum);

/* The way of a pass with outputs of so many bytes as fp32. */
enum numoe_gpu_sum gpu_sum_way(const struct gpu_sum *sum, uint64_t bytes);
/* Inputs of so many bytes come over each device's link in part. */
bool gpu_sum_passes(const struct gpu_sum *sum, uint64_t bytes);

/* Queue on every device copies of the others' inputs: [i * each, ...) of the tokens has come over
 * the link of device i, which the host has seen. */
int gpu_sum_pass_inputs(struct gpu_sum *sum, struct numoe_gpu_model *const *models,
                        const struct numoe_gpu_call *call, uint64_t each,
                        struct numoe_error *error);

/* The round that begins at a token of the pass. */
struct gpu_round gpu_sum_round(const struct gpu_sum *sum, const struct numoe_gpu_model *lead,
                               uint64_t at, unsigned slot);
/* Where in the round's tokens the rows of a device begin; of `count` devices: where the last end.
 */
static inline uint64_t gpu_round_begin(const struct gpu_round *round, uint32_t device)
{
    const uint64_t at = device * round->each;
    return at < round->tokens ? at : round->tokens;
}
int gpu_sum_queue(struct gpu_sum *sum, enum numoe_gpu_sum way,
                  struct numoe_gpu_model *const *models, const struct gpu_round *round,
                  struct numoe_error *error);
/* Wait until each device's rows are in its stage, that of the slot. */
int gpu_sum_await(struct gpu_sum *sum, enum numoe_gpu_sum way,
                  struct numoe_gpu_model *const *models, const struct gpu_round *round,
                  struct numoe_error *error);

/* A way has failed with why: nothing of it is queued when this returns, the next one is *way, and
 * the failed one is not tried again. 0; -EIO: a device is lost. */
int gpu_sum_fall(struct gpu_sum *sum, enum numoe_gpu_sum *way,
                 struct numoe_gpu_model *const *models, const struct numoe_error *why,
                 struct numoe_error *error);

#endif
