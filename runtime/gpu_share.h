/*
 * gpu_share.h - which experts of a call the GPU computes and which the CPUs, so that both end
 * together: arithmetic on numbers, no device.
 *
 * The GPU's time is that of the link, for what it does not hold, or of its arithmetic, whichever is
 * longer; an expert costs the link its bytes whatever its tokens. The CPUs' time is the sum over
 * experts of reading or of arithmetic. So experts with many tokens are the GPU's, and those with
 * few stay where they lie; what the GPU holds costs it no link and is its own. In a call that both
 * share the CPUs begin later than the GPU, as inputs and the first copies are queued before.
 *
 * The speeds begin as guesses that flatter both sides, so that both are tried, and are corrected by
 * what calls took: calls that both shared, so contention for memory is in them. Each power of two
 * of tokens has corrections of its own, as what limits a side changes with them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_GPU_SHARE_H
#define NUMOE_GPU_SHARE_H

#include <stdbool.h>
#include <stdint.h>

enum { GPU_SHARE_SIZES = 24 };

struct gpu_share {
    double expert_bytes, token_bytes; /* of an expert; of a token's x and output over the link */
    double token_operations;          /* of a token in an expert */
    /* guesses: bytes and operations a second; seconds of a call besides */
    double link_rate, gpu_rate, gpu_fixed, cpu_read, cpu_rate, cpu_fixed;
    /* what calls of 2^i tokens and more took, by what was expected; 0: none yet */
    double gpu_took[GPU_SHARE_SIZES], cpu_took[GPU_SHARE_SIZES];
    double
        cpu_late[GPU_SHARE_SIZES]; /* seconds that the CPUs began later than the GPU; 0: none yet */
    uint64_t calls;
};

struct gpu_share_choice {
    uint64_t gpu_experts, cpu_experts; /* hit ones */
    uint64_t copied;                   /* of gpu_experts, not held */
    double gpu_seconds, cpu_seconds;   /* expected */
    double seconds;                    /* until both have ended */
    double gpu_model, cpu_model;       /* before correction */
};

/* Seconds that each side would take for these hit experts. */
void gpu_share_cost(const struct gpu_share *share, uint64_t tokens, const uint32_t *tokens_of,
                    const uint8_t *held, const uint8_t *on_gpu, uint64_t experts,
                    struct gpu_share_choice *choice);

/*
 * Choose: on_gpu[e] of experts with tokens_of[e]. Never a division that is expected to end later
 * than one side alone would. order: [experts] scratch.
 */
void gpu_share_choose(struct gpu_share *share, uint64_t tokens, const uint32_t *tokens_of,
                      const uint8_t *held, uint64_t experts, uint32_t *order, uint8_t *on_gpu,
                      struct gpu_share_choice *choice);

/* What a call of the choice took, each side, and how much later the CPUs began; not positive: not
 * known. */
void gpu_share_learn(struct gpu_share *share, uint64_t tokens,
                     const struct gpu_share_choice *choice, double gpu_seconds, double cpu_seconds,
                     double cpu_late);

#endif
