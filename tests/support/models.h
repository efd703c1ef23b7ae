/*
 * models.h - how a test's model of random experts is described and loaded.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TEST_MODELS_H
#define TEST_MODELS_H

#include "numoe.h"
#include "support/experts.h"

/* Plain SiLU, exact. */
static inline struct numoe_model_desc plain_desc(uint64_t layers, uint64_t experts, uint64_t top_k,
                                                 uint64_t hidden, uint64_t intermediate, bool bias)
{
    struct numoe_model_desc desc = NUMOE_MODEL_DESC_INIT;

    desc.layers = layers;
    desc.experts = experts;
    desc.experts_per_token = top_k;
    desc.hidden = hidden;
    desc.intermediate = intermediate;
    desc.bias = bias;
    desc.activation = (struct numoe_activation){.kind = NUMOE_SILU};
    desc.arithmetic = NUMOE_EXACT;
    return desc;
}

/* An expert's weights as the caller of numoe_expert_load gives them. */
static inline struct numoe_expert_weights expert_weights(const struct test_expert *e)
{
    return (struct numoe_expert_weights){.size = sizeof(struct numoe_expert_weights),
                                         .gate = e->source.gate,
                                         .up = e->source.up,
                                         .down = e->source.down,
                                         .gate_bias = e->bias[0],
                                         .up_bias = e->bias[1],
                                         .bias_step = e->bias[0] ? 1 : 0,
                                         .down_bias = e->bias[2]};
}

#endif
