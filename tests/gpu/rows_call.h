/*
 * rows_call.h - calls of models on devices whose inputs and outputs are rows of floats, one after
 * the other.
 */
#ifndef NUMOE_TESTS_ROWS_CALL_H
#define NUMOE_TESTS_ROWS_CALL_H

#include "numoe_gpu.h"

/* x, out: [tokens][hidden]; ids, routing: [tokens][top_k]. */
static inline struct numoe_gpu_call rows_call(uint64_t tokens, uint64_t hidden, uint32_t top_k,
                                              const float *x, const int32_t *ids,
                                              const float *routing, float *out)
{
    return (struct numoe_gpu_call){.tokens = tokens,
                                   .top_k = top_k,
                                   .x = x,
                                   .x_type = NUMOE_F32,
                                   .x_stride = hidden,
                                   .ids = ids,
                                   .routing = routing,
                                   .out = out,
                                   .out_type = NUMOE_F32,
                                   .out_stride = hidden,
                                   .scale = 1.0f};
}

#endif
